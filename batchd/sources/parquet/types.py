"""The types of a Parquet file's columns that fit each column of a sample. Daemon and workers.

    "image"     binary, or a struct of ``bytes`` and ``path``, as Hugging Face stores images
    "text"      string
    "int64"     a number
    "int32[?]"  a list of numbers, or binary

Invariant: a type that is accepted here can be read; single values may still be null, too long or
too large.
"""

import json
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from batchd.samples.columns import Column
from batchd.samples.values import kind_problem

ArrowType: TypeAlias = Any
"""A ``pyarrow.DataType``; pyarrow has no annotations."""
ArrowSchema: TypeAlias = Any
"""A ``pyarrow.Schema``."""
BYTES, PATH = "bytes", "path"
"""The fields of an image as Hugging Face stores it."""
HUGGING_FACE = b"huggingface"
"""The key, in a file's metadata, of what Hugging Face's `datasets` says about columns, in JSON."""


def problem_of(column: Column, kind: ArrowType) -> str:
    """Why a column of the file cannot be a column of a sample; "" where it can."""
    kind = _plain(kind)
    if column.kind == "encoded":
        good = is_bytes(kind) or is_image(kind)
    elif column.kind == "text":
        good = _is_text(kind)
    elif column.shape:
        good = is_bytes(kind) or (_is_list(kind) and _is_number(kind.value_type))
    else:
        good = _is_number(kind)
    if not good:
        return f'is {_short(kind)}, which cannot be "{column.text}": {_advice(column, kind)}'
    if column.kind != "array" or is_bytes(kind):
        return ""
    number = kind.value_type if column.shape else kind
    return kind_problem(column, np.dtype(number.to_pandas_dtype()))


def is_bytes(kind: ArrowType) -> bool:
    """True if each value is a run of bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def is_image(kind: ArrowType) -> bool:
    """True for an image as Hugging Face stores it."""
    return bool(pa.types.is_struct(kind)) and kind.get_field_index(BYTES) >= 0 and is_bytes(kind.field(BYTES).type)


def has_path(kind: ArrowType) -> bool:
    """True if such an image may be a file instead."""
    return is_image(kind) and kind.get_field_index(PATH) >= 0 and _is_text(kind.field(PATH).type)


def is_single_number(column: Column) -> bool:
    """True for one number for each sample, which the index holds."""
    return column.kind == "array" and not column.shape


def class_names(schema: ArrowSchema, title: str) -> tuple[str, ...]:
    """The names of a column's labels, if Hugging Face's `datasets` wrote them into the file."""
    try:
        feature = json.loads(schema.metadata[HUGGING_FACE])["info"]["features"][title]
        names = feature["names"] if feature["_type"] == "ClassLabel" else ()
    except (LookupError, TypeError, ValueError, RecursionError):
        return ()
    good = isinstance(names, list) and all(isinstance(name, str) and name and "\0" not in name for name in names)
    return tuple(names) if good else ()


def is_stored_as_bytes(kind: ArrowType) -> bool:
    """True if a page holds each value as a run of bytes."""
    kind = _plain(kind)
    return is_bytes(kind) or _is_text(kind) or is_image(kind)


def _plain(kind: ArrowType) -> ArrowType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: ArrowType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: ArrowType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: ArrowType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _short(kind: ArrowType) -> str:
    text = str(kind)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004  as much as a line holds


def _advice(column: Column, kind: ArrowType) -> str:
    if is_bytes(kind) or is_image(kind):
        return 'declare it as "image", or as "uint8[?]"' if is_bytes(kind) else 'declare it as "image"'
    if _is_text(kind):
        return 'declare it as "text"'
    if _is_number(kind):
        return f'declare it as "{kind.to_pandas_dtype().__name__.removesuffix("_")}"'
    if _is_list(kind) and _is_number(kind.value_type):
        return f'declare it as "{kind.value_type.to_pandas_dtype().__name__.removesuffix("_")}[?]"'
    return f"write {column.name} as a number, a string, binary, or a list of numbers"
