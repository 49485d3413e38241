"""Values in JSON as the values of columns. Workers.

A path of keys leads into a value:

    {"id": 7, "meta": {"label": 3}, "images": ["a.jpg", "b.jpg"]}
       id       meta.label            images.1     images.#: 2

A key at the top that is the whole path comes first: {"meta.label": 3} has a ``meta.label``, too.

Invariant: a value has the dtype and shape of its column; nothing is cut, stretched or wrapped.
"""

from collections.abc import Mapping

import numpy as np

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value, check_text, from_plain, json_value, nested, shaped
from batchd_wire.views import Array

LENGTH = "#"
"""In a path of keys: the length of a list."""


def json_object(content: str | bytes) -> Mapping[str, object]:
    """The JSON object in a text or in its bytes. Raises ``SampleUnreadable``."""
    found = json_value(content)
    if not isinstance(found, dict):
        raise SampleUnreadable(f"is {kind_of_json(found)} in JSON, not an object")
    return found


def value_at(found: Mapping[str, object], name: str) -> object:
    """The value at a key, or at a path of keys and numbers; None if it is missing, or null."""
    if name in found:
        return found[name]
    value: object = found
    for part in name.split("."):
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part == LENGTH:
            value = len(value)
        elif isinstance(value, list) and part.isascii() and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def value_in_json(column: Column, value: object) -> Value:
    """The value of a column under a key. Raises ``SampleUnreadable``."""
    if column.kind in ("json", "texts"):
        return nested(column, value)
    is_numbers = isinstance(value, list) if column.shape else type(value) in (int, float, bool)
    if column.kind == "text" and isinstance(value, str):
        check_text(column.name, value)
        return value
    if column.kind != "array" or not is_numbers:
        advice = '; type "json" reads it' if column.kind == "text" and isinstance(value, (list, dict)) else ""
        raise SampleUnreadable(f'{column.name} is {kind_of_json(value)} in JSON, not "{column.text}"{advice}')
    numbers = from_plain(column, value)
    if column.shape and numbers.ndim == 1 and (column.shape.count(None) <= 1 or not numbers.size):
        return shaped(column, numbers)  # one row fills a shape with at most one unknown length
    return fitting(column, numbers)


def fitting(column: Column, numbers: Array) -> Array:
    """``numbers``, C-contiguous, if they have the column's shape. Raises ``SampleUnreadable``."""
    lengths = zip(column.shape, numbers.shape, strict=False)
    if numbers.ndim != len(column.shape) or any(length not in (None, there) for length, there in lengths):
        raise SampleUnreadable(f'{column.name} has the shape {list(numbers.shape)}, and is declared as "{column.text}"')
    return np.ascontiguousarray(numbers).reshape(numbers.shape)


def kind_of_json(value: object) -> str:
    """The kind of a value, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
