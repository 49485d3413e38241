"""The values of a sample, between its source and its steps, converted to their columns. Workers.

A number has its value, whatever its type in the data: ``true`` is 1, and 5.0 is 5, also where a
field is whole. In digits it is decimal, as tables and JSON write it: not ``1_0``, which Python
reads, nor the digits of other scripts.

Invariant: no number changes its value, except by the rounding of a float: a number that does not
fit is refused, never wrapped or cut. In a value of JSON no key, number or null changes.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.columns import Column, Default
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable, check_bytes
from batchd.data.samples.kept_files import DecodedFile, FilePart
from batchd_wire.views import Array
from batchd_wire.wording import counted

KEY_BYTES = 16
"""Of a file among those of which something is known."""


class MediaFile(NamedTuple):
    """The value of a column of a long file, which a step reads in parts, until the next call.

    ``read``: some bytes from a first one on, fewer where the file ends. Raises
    ``SampleUnreadable``. ``name``: tells the file from others, and from other content at its path.
    ``descriptor``: of the file, if the column is all of a file of this machine.
    """

    size: int
    read: Callable[[int, int], bytes]
    name: object
    descriptor: int | None = None

    def key(self, what: str) -> bytes | None:
        """Tells what is known of this content from all else, 16 bytes; None for one in memory.

        It is the same in each process, and in each run of them.
        """
        if self.name is None:
            return None
        return sha256(repr((what, self.size, self.name)).encode()).digest()[:KEY_BYTES]

    @classmethod
    def of(cls, content: memoryview) -> "MediaFile":
        """A file that is in memory."""
        return cls(content.nbytes, lambda first, count: bytes(content[first : first + count]), None)

    def whole(self) -> memoryview:
        """All bytes. Raises ``SampleUnreadable``."""
        data = self.read(0, self.size)
        if len(data) != self.size:
            raise SampleUnreadable(f"ends at byte {len(data)} of {self.size}: it was changed while it was read")
        return memoryview(data)


class Clips:
    """The frames of clips between two steps, while they are decoded: each is valid until the next.

    ``lengths``: the dimensions in front of a frame's, which is uint8 ``[height, width, channels]``.
    """

    def __init__(self, lengths: tuple[int, ...], frames: Iterator[NDArray[np.uint8]]) -> None:
        self.lengths = lengths
        self.frames = frames

    @classmethod
    def of(cls, array: Array, front: int) -> "Clips":
        """The frames of an array with so many dimensions in front of theirs."""
        return cls(array.shape[:front], iter(array.reshape(-1, *array.shape[front:])))

    def array(self) -> Array:
        """All frames. Raises ``SampleUndecodable``."""
        frames = [frame.copy() for frame in self.frames]
        shapes = {frame.shape for frame in frames}
        if len(shapes) > 1:
            raise SampleUndecodable(f"its frames have several sizes: {sorted(shapes)}")
        return np.stack(frames).reshape(*self.lengths, *frames[0].shape)


class Canvas:
    """An image between two steps that has parts of others: uint8 ``[height, width, channels]``.

    ``parts``: pixels with their top and left, which may be outside; later ones are on top. They
    stay until the row is made. ``ground``: the colour elsewhere. ``room``: memory of a shape.
    """

    def __init__(
        self, shape: tuple[int, int, int], ground: tuple[int, ...], room: Callable[[tuple[int, ...]], Array]
    ) -> None:
        self.shape, self.ground, self._room = shape, ground, room
        self.parts: list[tuple[Array, int, int]] = []

    def whole(self) -> Array:
        """All pixels."""
        made = self._room(self.shape)
        made[:] = self.ground
        for pixels, top, left in self.parts:
            (rows, columns), seen = self.seen(pixels.shape, top, left)
            made[rows, columns] = pixels[seen]
        return made

    def seen(self, shape: tuple[int, ...], top: int, left: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Where an image of a shape is on the canvas, and which part of the image that is."""
        (rows, of_rows), (columns, of_columns) = map(_overlap, (top, left), shape, self.shape)
        return (rows, columns), (of_rows, of_columns)


def _overlap(begin: int, length: int, room: int) -> tuple[slice, slice]:
    """Where a part from ``begin`` on is in something of a length, and which of it that is."""
    first, end = min(max(begin, 0), room), max(min(begin + length, room), 0)
    return slice(first, max(first, end)), slice(first - begin, max(first, end) - begin)


Value: TypeAlias = (
    memoryview
    | MediaFile
    | Clips
    | Canvas
    | DecodedFile
    | FilePart
    | str
    | Array
    | np.generic
    | int
    | float
    | bool
    | list[object]
    | dict[str, object]
)
"""The bytes of a file, or the file, or its pixels; ``bytes``; a ``text``, or an ``array``; a
number for an array of shape []; a list of ``texts``, ``images`` or ``arrays``, the last also as one
array; ``json``, as Python's module json reads it."""

JSON_DEPTH_MAX = 64
"""Levels of lists and objects in a value of JSON."""

ANY_BYTES = 1 << 62
"""For values of a record whose length was checked."""

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
    if column.is_file:
        if not raw.nbytes:
            raise SampleUnreadable(f"{column.name} is empty")
        return raw
    if column.kind == "bytes":
        return raw
    if column.kind != "array":
        try:
            text = str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise SampleUnreadable(f"{column.name} is no UTF-8: byte {error.start} of {raw.nbytes}") from None
        return text if column.kind == "text" else in_json(column, text)
    dtype = np.dtype(column.dtype).newbyteorder("<")
    if raw.nbytes % dtype.itemsize:
        raise SampleUnreadable(f"{column.name} has {raw.nbytes} bytes, which are no whole number of {column.dtype}")
    numbers = np.frombuffer(raw, np.uint8 if column.dtype == "bool" else dtype)
    if column.dtype == "bool":
        numbers = numbers != 0
    return shaped(column, numbers)


def default_value(column: Column, default: Default) -> Value:
    """The value of a default that ``data.samples.columns`` has checked."""
    if column.kind in ("json", "texts", "images"):
        return list(default) if isinstance(default, tuple) else default
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


def json_value(content: str | bytes) -> object:
    """The value in JSON; of equal keys of an object the last one counts.

    Raises ``SampleUnreadable``.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise SampleUnreadable("is no JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise SampleUnreadable(f"is no JSON: {error}") from None


def in_json(column: Column, text: str) -> Value:
    """The value of a column of ``json`` or ``texts`` from JSON. Raises ``SampleUnreadable``."""
    try:
        value = json_value(text)
    except SampleUnreadable as error:
        raise SampleUnreadable(f"{column.name} {error}") from None
    if value is None:
        raise SampleUnreadable(f"{column.name} is null in JSON")
    return nested(column, value)


def nested(column: Column, value: object) -> Value:
    """The value of a column of ``json``, or a list, from Python's objects, as json reads them.

    Raises ``SampleUnreadable`` for what JSON cannot have, and deeper than ``JSON_DEPTH_MAX``.
    """
    if column.kind == "texts":
        return _texts(column, value)
    if column.kind == "images":
        return images_from(column, items_of(column, value))
    level: list[object] = [value]
    for _depth in range(JSON_DEPTH_MAX + 1):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                if not all(isinstance(key, str) for key in one):
                    raise SampleUnreadable(f"{column.name} has a key that is no text, which JSON has not")
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif not (one is None or isinstance(one, (str, int, float))):
                raise SampleUnreadable(f"{column.name} has {type(one).__name__} in it, which JSON has not")
        if not inner:
            return value  # type: ignore[return-value]  # each level was seen
        level = inner
    raise SampleUnreadable(f"{column.name} is nested deeper than {JSON_DEPTH_MAX} levels")


def items_of(column: Column, value: object) -> list[object]:
    """The values of a list of texts or images, no more than it has. Raises ``SampleUnreadable``."""
    if not isinstance(value, list):
        raise SampleUnreadable(f"{column.name} is {type(value).__name__}, not a list of {column.item.text}s")
    check_count(column, len(value))
    return value


def check_count(column: Column, count: int) -> None:
    """Raise ``SampleUnreadable`` if a list has more values than its column."""
    if count > column.most:
        raise SampleUnreadable(f"{column.name} has {count} {column.item.text}s, more than {column.text} has")


def images_from(column: Column, files: Sequence[object], max_bytes: int = ANY_BYTES) -> list[object]:
    """The files of a list of images, copied. Raises ``SampleUnreadable``, which names the one."""
    images: list[object] = []
    for place, file in enumerate(items_of(column, list(files))):
        one = replace(column.item, name=f"{column.name}[{place}]")
        if not isinstance(file, (bytes, memoryview)):
            kind = "null" if file is None else type(file).__name__
            raise SampleUnreadable(f"{one.name} is {kind}, not the bytes of an image")
        from_bytes(one, file, max_bytes)
        images.append(memoryview(bytes(file)))
    return images


def _texts(column: Column, value: object) -> list[object]:
    value = items_of(column, value)
    for place, text in enumerate(value):
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            raise SampleUnreadable(f"{column.name}[{place}] is {kind}, not a text")
        check_text(f"{column.name}[{place}]", text)
    return value


def check_text(name: str, text: str) -> None:
    """Raise ``SampleUnreadable`` for half of a surrogate pair, which JSON may have."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise SampleUnreadable(f"{name} has half a character in it, which no UTF-8 can hold")


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
    """The value as its column's dtype. Raises ``SampleUndecodable`` for another shape or kind.

    A list of arrays is one, stacked.
    """
    is_empty = isinstance(value, list) and not value
    shape = [0, *(length or 0 for length in column.shape[1:])]
    array = np.zeros(shape, column.dtype) if is_empty else np.asarray(value)
    if not column.takes(array.shape) or not np.can_cast(array.dtype, column.dtype, "same_kind"):
        raise SampleUndecodable(f"{column.name!r} is {array.dtype}{list(array.shape)} instead of {column.text}")
    return array.astype(column.dtype, copy=False)
