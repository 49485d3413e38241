"""The bytes of a member of a tar shard become the value of a column, or the reason why they cannot. Workers.

Invariant: an array is parsed by its header alone, and those of objects, which need pickle, are refused; JSON is data.
"""

import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchd.config.columns import Column
from batchd.config.members import Coding
from batchd.config.values import Value
from batchd.errors import SourceInvalid
from batchd.samples.errors import SampleUnreadable
from batchd.sources.cells import cell_reader
from batchd.sources.conversion import converted, from_bytes, from_plain, shaped
from batchd.sources.npy import read_header


def value_of(column: Column, coding: Coding, content: memoryview, max_bytes: int) -> Value:
    """The value of a column that is all of a member. Raises ``SampleUnreadable``."""
    if coding == "npy":
        return _fitting(column, converted(column, _array(column, content)))
    if coding == "written":
        return _written(column, content)
    return from_bytes(column, content, max_bytes)


def json_object(content: memoryview) -> Mapping[str, Any]:
    """The object that is a member. Raises ``SampleUnreadable``."""
    try:
        found = json.loads(bytes(content))
    except RecursionError:
        raise SampleUnreadable("is no JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise SampleUnreadable(f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise SampleUnreadable(f"is {_kind(found)} in JSON, not an object")
    return found


def value_in_json(column: Column, value: object) -> Value:
    """The value of a column that stands under a key. Raises ``SampleUnreadable``."""
    is_numbers = isinstance(value, list) if column.shape else type(value) in (int, float, bool)
    if column.kind == "text" and isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise SampleUnreadable(f"{column.name} has half a character in it, which no UTF-8 can hold")
        return value
    if column.kind != "array" or not is_numbers:
        raise SampleUnreadable(f'{column.name} is {_kind(value)} in JSON, not "{column.text}"')
    numbers = from_plain(column, value)
    return shaped(column, numbers) if column.shape and _is_row(column, numbers) else _fitting(column, numbers)


def _is_row(column: Column, numbers: NDArray[Any]) -> bool:
    """Are these the numbers of a shape one after the other, as far as that tells the shape?"""
    return numbers.ndim == 1 and (column.shape.count(None) <= 1 or not numbers.size)


def _fitting(column: Column, numbers: NDArray[Any]) -> NDArray[Any]:
    """Numbers whose shape is that of their column. Raises ``SampleUnreadable``."""
    lengths = zip(column.shape, numbers.shape, strict=False)
    if numbers.ndim != len(column.shape) or any(length not in (None, there) for length, there in lengths):
        raise SampleUnreadable(f'{column.name} has the shape {list(numbers.shape)}, and is declared as "{column.text}"')
    return np.ascontiguousarray(numbers).reshape(numbers.shape)


def _array(column: Column, content: memoryview) -> NDArray[Any]:
    """The array in a .npy member."""
    stream = BytesIO(content)
    try:
        stored = read_header(column.name, stream)
    except SourceInvalid as error:
        raise SampleUnreadable(str(error)) from None
    if len(content) != stored.first + stored.size:
        what = "is cut" if len(content) < stored.first + stored.size else "has something behind its array"
        raise SampleUnreadable(
            f"{column.name} {what}: it has {len(content)} bytes, and its header says {stored.first + stored.size}"
        )
    if not stored.size:
        return np.zeros(stored.shape, stored.dtype.newbyteorder("="))
    numbers = np.frombuffer(content, stored.dtype, offset=stored.first)
    if stored.dtype.kind == "b" and numbers.view(np.uint8).max() > 1:
        raise SampleUnreadable(f"{column.name} has a byte {numbers.view(np.uint8).max()}, which is not bool: 0 or 1")
    numbers = numbers.reshape(stored.shape, order="F" if stored.fortran else "C")
    return numbers if stored.dtype.isnative else numbers.astype(stored.dtype.newbyteorder("="))


def _written(column: Column, content: memoryview) -> Value:
    try:
        return cell_reader(column)(str(content, "utf-8"))
    except UnicodeDecodeError as error:
        raise SampleUnreadable(f"{column.name} is no UTF-8: byte {error.start} of {content.nbytes}") from None
    except ValueError as error:
        raise SampleUnreadable(f"{column.name} {error}") from None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
