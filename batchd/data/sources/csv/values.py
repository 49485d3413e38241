"""Convert the text of one record of a table. Workers; the daemon reads headers with it.

Invariant: a value is what its text says, or refused: numbers are decimal, and in the range of their
type.
"""

import csv
import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from batchd.data.samples.columns import Column
from batchd.data.samples.values import Value, in_json, real_number, whole_number
from batchd.runtime.suggestions import nearest
from batchd_wire.views import Array
from batchd_wire.wording import counted

IMAGE = "image"
"""The field of images, if a table names some."""
SHOWN_CHARACTERS_MAX = 40
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some programs write it in front of UTF-8."""
TOO_LONG = "its cells are too long for a table: put them into files of their own, or into parquet"
"""Remedy for a record that is too long."""
ReadCell: TypeAlias = Callable[[str], Value]
"""Converts a cell's text. Raises ``ValueError``, which says what is wrong with the text."""
_Number: TypeAlias = int | float | bool
_PLAIN = re.compile(r"-?[0-9]+(\.[0-9]+)?(,-?[0-9]+(\.[0-9]+)?)*")
"""Of numbers with commas between them, without what is rare."""
_TRUTHS = {"0": False, "1": True, "false": False, "true": True}

csv.field_size_limit(sys.maxsize)  # of the whole process; the length of a record has its own limit


def split_record(record: bytes | memoryview, delimiter: str, quoting: str) -> list[str]:
    """The cells of one record. Raises ``ValueError`` with the reason."""
    try:
        text = str(record, "utf-8")
        if quoting == "none":
            return text.partition("\n")[0].removesuffix("\r").split(delimiter)  # blank lines follow
        rows = [row for row in csv.reader([text], delimiter=delimiter, strict=True) if row]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8: byte 0x{record[error.start]:02x} at byte {error.start} of the record"
        ) from None
    except csv.Error as error:
        raise ValueError(f"is no record of a table: {str(error).partition(' - ')[0]}") from None
    if len(rows) != 1:
        raise ValueError("is no record any more; the file was changed after the daemon read it")
    return rows[0]


def cell_reader(column: Column) -> ReadCell:
    """The function that reads the cells of a column."""
    if column.kind == "text" or column.is_file:
        return str
    if column.kind != "array":
        return partial(in_json, column)
    dtype = np.dtype(column.dtype)
    read = _number_reader(dtype)
    if not column.shape:
        number = dtype.type
        return lambda text: number(read(text.strip()))
    return lambda text: _array(column, np.array([read(word) for word in text.split()], dtype))


def class_reader(column: Column, classes: Sequence[str]) -> ReadCell:
    """The function that reads cells with the names of classes, as their numbers."""
    number_of: dict[str, Value] = {name: np.dtype(column.dtype).type(number) for number, name in enumerate(classes)}

    def read(text: str) -> Value:
        number = number_of.get(text)
        if number is None:
            meant = nearest(text, number_of)
            raise ValueError(
                f"is {shown(text)}, which is none of the classes{(meant and f'; did you mean {meant}?') or ''}"
            )
        return number

    return read


def plain_numbers(texts: Sequence[str], dtype: np.dtype[np.generic]) -> Array | None:
    """The numbers of many cells, faster than one by one; None where a cell is not a plain one."""
    if dtype.kind not in "iuf" or not _PLAIN.fullmatch(",".join(texts)):
        return None
    try:
        numbers = np.array(list(map(float if dtype.kind == "f" else int, texts)))
        with np.errstate(over="ignore"):
            made = numbers.astype(dtype)
    except (ValueError, OverflowError):
        return None
    is_kept = np.isfinite(made).all() if dtype.kind == "f" else numbers.dtype == np.int64 and (made == numbers).all()
    return made if is_kept else None


def shown(text: str) -> str:
    """A cell as a message shows it."""
    short = text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "…"
    return repr(short)


def _array(column: Column, numbers: Array) -> Value:
    known = math.prod(length for length in column.shape if length is not None)
    if column.is_fixed and len(numbers) != known:
        raise ValueError(f"has {counted(len(numbers), 'number')}, and {column.text} has {known}")
    if len(numbers) % known:
        raise ValueError(f"has {counted(len(numbers), 'number')}, not those of {column.text}")
    return numbers.reshape([len(numbers) // known if length is None else length for length in column.shape])


def _number_reader(dtype: np.dtype[np.generic]) -> Callable[[str], _Number]:
    """The function that reads one number of a type; it raises ``ValueError``."""
    name = dtype.name  # numpy works it out each time
    if dtype.kind == "b":
        return _truth
    if dtype.kind == "f":
        largest = float(np.finfo(name).max)
        return lambda text: _real(text, name, largest)
    limits = np.iinfo(name)
    lowest, highest = int(limits.min), int(limits.max)
    return lambda text: _integer(text, name, lowest, highest)


def _truth(text: str) -> bool:
    truth = _TRUTHS.get(text.lower())
    if truth is None:
        raise ValueError(f"is {shown(text)}, which is not bool: 0, 1, false or true")
    return truth


def _integer(text: str, dtype: str, lowest: int, highest: int) -> int:
    number = whole_number(text)
    if number is None:
        raise ValueError(f"is {shown(text)}, which is no whole number, so not {dtype}")
    if not lowest <= number <= highest:
        raise ValueError(f"is {shown(text)}, and {dtype} goes from {lowest} to {highest}")
    return number


def _real(text: str, dtype: str, largest: float) -> float:
    number = real_number(text)
    if number is None:
        hint = "; write nan where there is no number" if not text else ""
        raise ValueError(f"is {shown(text)}, which is not a number, so not {dtype}{hint}")
    is_written = "n" in text.lower()  # nan and inf are meant, 1e999 is not
    if abs(number) > largest and not is_written:
        raise ValueError(f"is {shown(text)}, and {dtype} goes from {-largest:g} to {largest:g}")
    return number
