"""The rows that a worker host sends: checked, written, compared. GATEWAY process; pure.

    frames -> check: every length, every size -> write: one copy into the slot
                                              -> difference, for a conformance order

Invariant: no byte is written before all frames of an order have the length that the layout gives
them, and no byte outside of the order's rows. No size of a varying field exceeds its room.
Invariant: from the first frame on until the frame of the sizes, the sizes of an order's rows are
invalid. So a worker that fills a ragged row next clears all of its room
(``data.pipeline.shapes.stages``), even if this process ended in between.
Invariant: the numbers in a worker host's report are bounded by the order and by the time that
passed, so their sums fit into every message.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from batchd.core.events import OrderFilled
from batchd.core.rows import Rows
from batchd.core.work import Work
from batchd.pool.messages import ROW_FRAME_BYTES
from batchd_wire.fields import HEADER_BYTES, Field, PlacedField, SlotLayout, Varying, sizes_field
from batchd_wire.tcp import Piece
from batchd_wire.views import Array, checked_sizes

Frames = Sequence[memoryview | bytes]
"""Frames as ``batchd_wire.tcp.pieces`` cuts them, each of bytes."""
TRIES_MAX = 64
"""Samples that a worker may read for one row: substitutes for bad ones."""
SLACK_US = 60_000_000
"""Time that a worker may count beyond twice the time that passed here: clocks differ."""


T = TypeVar("T")
Place = tuple[Piece, ...]
"""The pieces of the slot to which the bytes of one frame belong."""


class RowsInvalid(ValueError):  # noqa: N818  named by what is wrong, as all errors here
    """A worker host's rows or its report do not fit the order; the text says why."""


def places_of(layout: SlotLayout, runs: Sequence[tuple[int, int]]) -> list[Place]:
    """Find the places of the frames of some rows, cut as if these rows were consecutive."""
    places: list[Place] = []
    for field in layout.fields:
        pieces: list[Piece] = []
        room = ROW_FRAME_BYTES
        for first, count in runs:
            start = field.offset + first * field.row_bytes
            end = start + count * field.row_bytes
            while start < end:
                cut = min(end, start + room)
                pieces.append(Piece(start, cut))
                room -= cut - start
                start = cut
                if not room:
                    places.append(tuple(pieces))
                    pieces, room = [], ROW_FRAME_BYTES
        if pieces:
            places.append(tuple(pieces))
    return places


def length(place: Place) -> int:
    """The length of a frame, in bytes."""
    return sum([end - start for start, end in place])


def check_rows(layout: SlotLayout, count: int, places: Sequence[Place], frames: Frames) -> None:
    """Check the frames of ``count`` rows against ``places``. Raises ``RowsInvalid``."""
    if len(frames) != len(places):
        raise RowsInvalid(f"{len(frames)} frames of rows came instead of {len(places)}")
    for number, (place, frame) in enumerate(zip(places, frames, strict=True)):
        if len(frame) != length(place):
            raise RowsInvalid(f"frame {number} of the rows has {len(frame)} bytes instead of {length(place)}")
    for field, varying, sizes, number in _sizes(layout, count, places):
        try:
            checked_sizes(_values(sizes.dtype, count, [frames[number]]), field.shape, varying)
        except ValueError as error:
            raise RowsInvalid(f"field {field.name!r}: {error}") from None


def check_report(filled: OrderFilled, count: int, record_bytes_max: int, passed_s: float) -> None:
    """Check the report on ``count`` rows filled in ``passed_s``. Raises ``RowsInvalid``."""
    work = Work(*filled.work)
    most_us = int(2e6 * passed_s) + SLACK_US
    times = (
        work.busy_us,
        work.waited_us,
        work.cpu_us,
        work.cpu_wait_us or 0,
        work.read_cpu_us,
        work.usual_us,
        work.slow_us,
    )
    if max(*times, *work.parts_us, *(took_us for _sample, _path, took_us in work.slow)) > most_us:
        raise RowsInvalid(f"a worker says it worked for longer than the {passed_s:.1f} s since the order")
    if work.read_bytes > count * TRIES_MAX * record_bytes_max:
        raise RowsInvalid(f"a worker says it read {work.read_bytes} bytes for {count} rows")
    numbers = work.slow_rows, work.cache_hits, work.cache_misses, work.shared
    if max(*numbers, len(filled.bad), len(work.slow)) > count * TRIES_MAX:
        raise RowsInvalid(f"a worker reports more samples than {count} rows can have")


def begin(memory: memoryview, layout: SlotLayout, count: int, places: Sequence[Place]) -> None:
    """Make the sizes of ``count`` rows invalid, before the first frame of them is written."""
    for _field, _varying, _sizes_field, number in _sizes(layout, count, places):
        write(memory, places[number : number + 1], [b"\xff" * length(places[number])])


def write(memory: memoryview, places: Sequence[Place], frames: Frames) -> None:
    """Copy checked rows into ``memory``, a slot: uint8 ``[slot_bytes]``; see ``begin``."""
    assert all(start >= HEADER_BYTES for place in places for start, _end in place), "the header page is the daemon's"
    for place, frame in zip(places, frames, strict=True):
        at = 0
        for start, end in place:
            memory[start:end] = frame[at : at + end - start]
            at += end - start


def copy(memory: memoryview, places: Sequence[Place]) -> list[bytes]:
    """Copy rows out of ``memory``, a slot: the bytes of each frame."""
    return [b"".join([memory[start:end] for start, end in place]) for place in places]


def difference(layout: SlotLayout, rows: Rows, ours: Frames, theirs: Frames) -> str:
    """Say how checked rows differ from those of a local worker; "" if every byte is equal."""
    count = len(rows)
    for (field, our_parts), (_field, their_parts) in zip(
        _fields(layout, count, ours), _fields(layout, count, theirs), strict=True
    ):
        our_bytes, their_bytes = b"".join(our_parts), b"".join(their_parts)
        if our_bytes != their_bytes:
            return _difference(field, rows, our_bytes, their_bytes)
    return ""


def _difference(field: PlacedField, rows: Rows, ours: bytes, theirs: bytes) -> str:
    """Describe two different contents of a field's rows."""
    count = len(rows)
    here, there = (_values(field.dtype, count, [data]).reshape(count, -1) for data in (ours, theirs))
    item = here.dtype.itemsize
    # bit for bit: NaN is not equal to itself
    differs = (here.view(np.uint8) != there.view(np.uint8)).reshape(count, -1, item).any(axis=2)
    with np.errstate(all="ignore"):
        largest = np.abs(here[differs].astype(np.float64) - there[differs].astype(np.float64)).max()
    row = rows[int(differs.any(axis=1).argmax())]
    number = f"{differs.sum():,} of {differs.size:,} values differ"
    return f"field {field.name!r}: {number}, by {largest:g} at most, in row {row} first"


def _fields(layout: SlotLayout, count: int, frames: Sequence[T]) -> Iterator[tuple[PlacedField, Sequence[T]]]:
    """Yield each field with its frames, or with their places."""
    at = 0
    for field in layout.fields:
        number = -(-count * field.row_bytes // ROW_FRAME_BYTES)
        yield field, frames[at : at + number]
        at += number


def _sizes(
    layout: SlotLayout, count: int, places: Sequence[Place]
) -> Iterator[tuple[PlacedField, Varying, Field, int]]:
    """Yield each varying field, how it varies, the field of its sizes, and their only frame."""
    if all(field.varying is None for field in layout.fields):
        return
    numbers = {field.name: numbers for field, numbers in _fields(layout, count, range(len(places)))}
    for field in layout.fields:
        sizes = sizes_field(field)
        if field.varying is not None and sizes is not None:
            (number,) = numbers[sizes.name]  # an order has ``CHUNK_ROWS_MAX`` rows at most
            yield field, field.varying, sizes, number


def _values(dtype: str, count: int, parts: Frames) -> Array:
    """The values of a field's rows, of type ``dtype``: ``[count, values of a row]``."""
    return np.frombuffer(b"".join(parts), dtype=dtype).reshape(count, -1)
