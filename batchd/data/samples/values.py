"""The values of a sample, between its source and its steps, converted to their columns. Workers.

A number has its value, whatever its type in the data: ``true`` is 1, and 5.0 is 5, also where a
field is whole. In digits it is decimal, as tables and JSON write it: not ``1_0``, which Python
reads, nor the digits of other scripts.

Invariant: no number changes its value, except by the rounding of a float: a number that does not
fit is refused, never wrapped or cut.
"""

import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from batchd.data.samples.columns import Column, Default
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable, check_bytes
from batchd.data.samples.kept_files import DecodedFile, FilePart
from batchd_wire.views import Array
from batchd_wire.wording import counted

Value: TypeAlias = memoryview | DecodedFile | FilePart | str | Array | np.generic | int | float | bool
"""The bytes of an ``encoded`` column, or their pixels; a ``text``, or an ``array``; a number for an
array of shape []."""


_WHOLE = re.compile(r"[+-]?[0-9]{1,1000}")
_REAL = re.compile(r"[+-]?(nan|inf(inity)?|([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?)", re.IGNORECASE)
EXACT_FLOATS_END = 1 << 53
"""Below this, each whole number is a float64, so a float there is the number that was written."""


class Unfitting(SampleUnreadable):
    """A number does not fit its column; ``place`` is its index among several."""

    def __init__(self, reason: str, place: int = 0) -> None:
        super().__init__(reason)
        self.place = place


def from_bytes(column: Column, raw: bytes | memoryview, max_bytes: int) -> Value:
    """Parse stored bytes: an image's, UTF-8, or little-endian. Raises ``SampleUnreadable``."""
    raw = memoryview(raw).cast("B")
    check_bytes(raw.nbytes, max_bytes, f"{column.name} ")
    if column.kind == "encoded":
        if not raw.nbytes:
            raise SampleUnreadable(f"{column.name} is empty")
        return raw
    if column.kind == "text":
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise SampleUnreadable(f"{column.name} is no UTF-8: byte {error.start} of {raw.nbytes}") from None
    dtype = np.dtype(column.dtype).newbyteorder("<")
    if raw.nbytes % dtype.itemsize:
        raise SampleUnreadable(f"{column.name} has {raw.nbytes} bytes, which are no whole number of {column.dtype}")
    numbers = np.frombuffer(raw, np.uint8 if column.dtype == "bool" else dtype)
    if column.dtype == "bool":
        numbers = numbers != 0
    return shaped(column, numbers)


def default_value(column: Column, default: Default) -> Value:
    """The value of a default that ``data.samples.columns`` has checked."""
    if isinstance(default, str):
        return default
    if isinstance(default, Sequence):
        return shaped(column, np.array(default, column.dtype))
    return np.full(column.fixed_shape, default, column.dtype)


def shaped(column: Column, numbers: Array) -> Array:
    """Numbers in their column's shape, last dimension fastest. Raises ``SampleUnreadable``."""
    known = int(np.prod([length for length in column.shape if length is not None], dtype=np.int64))
    is_open = None in column.shape
    if numbers.size % known if is_open else numbers.size != known:
        raise SampleUnreadable(f"{column.name} has {counted(numbers.size, 'number')}, not those of {column.text}")
    return numbers.reshape([numbers.size // known if length is None else length for length in column.shape])


def from_plain(column: Column, value: object) -> Array:
    """Numbers from JSON or msgpack, in their own shape. Raises ``SampleUnreadable``."""
    try:
        numbers = np.asarray(value)
    except (ValueError, OverflowError):
        numbers = np.asarray(None)
    return converted(column, numbers if numbers.size else numbers.astype(column.dtype))


def converted(column: Column, numbers: Array) -> Array:
    """Numbers as their column's dtype, in their own shape. Raises ``Unfitting``."""
    wanted = np.dtype(column.dtype)
    if numbers.dtype == wanted:
        return numbers
    if numbers.dtype.kind not in "biuf":
        raise Unfitting(f"{column.name} is {numbers.dtype}, which is no kind of number")
    with np.errstate(over="ignore", invalid="ignore"):
        made = numbers.astype(wanted)
        place = _first_lost(numbers, made) if numbers.size else None
    if place is not None:
        raise Unfitting(f"{column.name} is {numbers.flat[place]}, which no {column.dtype} can be", place)
    return made


def _first_lost(numbers: Array, made: Array) -> int | None:
    """The place of a number that ``made``, which was made of them, does not hold; None: of none."""
    if made.dtype.kind == "f":
        is_lost = np.isfinite(numbers) & ~np.isfinite(made)
        return int(is_lost.argmax()) if is_lost.any() else None
    if numbers.dtype.kind == "b":
        return None
    if numbers.dtype.kind == "f":
        is_lost = ~((np.abs(numbers) < EXACT_FLOATS_END) & (numbers == np.floor(numbers)))
        if is_lost.any():
            return int(is_lost.argmax())
    lowest, highest = (0, 1) if made.dtype.kind == "b" else (np.iinfo(made.dtype).min, np.iinfo(made.dtype).max)
    ends = int(numbers.argmin()), int(numbers.argmax())
    return next((place for place in ends if not lowest <= int(numbers.flat[place]) <= highest), None)


def whole_number(text: str) -> int | None:
    """The whole number that is written; None for any other text."""
    return int(text) if _WHOLE.fullmatch(text) else None


def real_number(text: str) -> float | None:
    """The number that is written, ``nan`` and ``inf`` too; None for any other text."""
    return float(text) if _REAL.fullmatch(text) else None


def array_of(column: Column, value: Value) -> Array:
    """The value as its column's dtype. Raises ``SampleUndecodable`` for another shape or kind."""
    array = np.asarray(value)
    if not column.takes(array.shape) or not np.can_cast(array.dtype, column.dtype, "same_kind"):
        raise SampleUndecodable(f"{column.name!r} is {array.dtype}{list(array.shape)} instead of {column.text}")
    return array.astype(column.dtype, copy=False)
