"""What stands for a value that a sample does not have. Daemon, workers and CLI; standard library only.

defaults = { label = -1, ids = [], caption = "" }

Invariant: a default that was checked fits into its field.
"""

import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import TypeAlias

from batchd.samples.checks import Checks
from batchd.samples.columns import Column
from batchd_wire.wording import counted

Default: TypeAlias = bool | int | float | str | tuple[bool | int | float, ...]
"""What stands for a missing value: a number for every element, all of them, or a text."""
_PACKED = {
    "uint8": "<B",
    "int8": "<b",
    "uint16": "<H",
    "int16": "<h",
    "float16": "<e",
    "uint32": "<I",
    "int32": "<i",
    "float32": "<f",
    "uint64": "<Q",
    "int64": "<q",
    "float64": "<d",
}


def check_defaults(checks: Checks, columns: Iterable[Column], defaults: Mapping[str, Default]) -> None:
    """Tell ``checks`` of every default that is not what its field holds."""
    for column in columns:
        if column.name in defaults:
            with checks.at("defaults", column.name):
                check_default(column, defaults[column.name])


def check_default(column: Column, default: Default) -> None:
    """Raise ``ValueError`` where a default is not what its field holds."""
    what = f"defaults: {column.name} is {column.text}, so"
    if column.kind == "encoded":
        raise ValueError(f"{what} nothing can stand for it; leave it out of the defaults")
    if (column.kind == "text") != isinstance(default, str):
        raise ValueError(
            f"{what} its default is {'a text' if column.kind == 'text' else 'a number, or a list of them'}"
        )
    if isinstance(default, str):
        return
    if isinstance(default, tuple) and default and column.shape.count(None) > 1:
        raise ValueError(f"{what} its default is [], or none")
    if isinstance(default, tuple):
        known = prod(length for length in column.shape if length is not None)
        fits = len(default) % known == 0 if None in column.shape else len(default) == known
        if not fits or not column.shape:
            raise ValueError(f"{what} its default is not {counted(len(default), 'number')}")
    elif None in column.shape:
        raise ValueError(f"{what} its default is a list, such as []")
    for number in default if isinstance(default, tuple) else (default,):
        if not _holds(column.dtype, number):
            raise ValueError(f"{what} {number} cannot be in it")


def _holds(dtype: str, number: float) -> bool:
    if dtype == "bool":
        return number in (0, 1)
    try:
        struct.pack(_PACKED[dtype], number)
    except (struct.error, OverflowError):
        return False
    return not isinstance(number, bool)
