"""Where the values of a column chunk lie in their file, found by their bytes. Daemon, in a scan.

pyarrow gives one value only by reading the whole row group around it. But where a chunk is not
compressed, every value stands in the file as it is, so a worker can read it with one ``pread``, or
one request:

    | page header | levels | length | value 1 | length | value 2 | ... | page header | levels | length | value 9 | ...
                                    ^         ^
                                    place, bytes: an extent

Nothing of the format is parsed here: pyarrow says what the values are, and each is looked for
behind the one before it: right there first, then a little further on, as pages begin; a value that
a dictionary holds once is where it was found first.

Invariant: the bytes of an extent are the bytes of the value, compared when it was found. A chunk in
which one value is not found has no extents at all.
"""

from array import array
from collections.abc import Iterable
from typing import BinaryIO

from batchd.sources.parquet.row_groups import read_at

LENGTH_BYTES = 4
"""What stands between two values of a page, unless all have the same length."""
GAP_BYTES = 64 << 10
"""How far behind a value the next one is looked for: over the end of a page and the beginning of another."""
NOWHERE = -1
"""The place of a value that is null."""


def extents_of(
    stream: BinaryIO, start: int, end: int, values: Iterable[memoryview | None], *, repeats: bool
) -> "array[int] | None":
    """(place, bytes) of each value of a chunk, flat, where the chunk is bytes ``start`` to ``end`` of the file.

    ``repeats``: may values stand there once for several rows? None where they do not stand there as
    they are.
    """
    found = array("q")
    known: dict[int, int] = {}
    behind = start
    for value in values:
        if value is None:
            found.extend((NOWHERE, 0))
            continue
        size = value.nbytes
        place = _next_place(stream, behind, end, value)
        name = hash(bytes(value)) if repeats else 0
        if place is not None:
            behind = place + size
            known.setdefault(name, place)
        elif name in known and read_at(stream, known[name], size) == value:
            place = known[name]
        else:
            return None
        found.extend((place, size))
    return found


def _next_place(stream: BinaryIO, behind: int, end: int, value: memoryview) -> int | None:
    size = value.nbytes
    for guess in (behind + LENGTH_BYTES, behind):
        if guess + size <= end and read_at(stream, guess, size) == value:
            return guess
    window = read_at(stream, behind, max(0, min(GAP_BYTES + size, end - behind)))
    offset = window.find(value)
    return None if offset < 0 else behind + offset
