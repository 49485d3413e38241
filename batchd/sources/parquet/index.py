"""The index of Parquet files: where each sample is, and where the bytes of its values are. Daemon and workers.

    shards           uint8 [bytes]    the paths of the files, a NUL after each
    files            int64 [f, 2]     size in bytes and CRC-32 of the footer of each
    groups           int64 [g, 3]     (file, row group in it, first sample)
    chunks           int64 [g, c]     decoded bytes of each field in a row group; 0 where no worker decodes it
    numbers.NAME     dtype [n]        fields that are one number for each sample
    extents.NAME     int64 [n, 2]     (first byte, bytes) in the file, of fields stored as they are; else (-1, 0)

pyarrow gives one value only by reading the whole row group around it. But where a column chunk is
not compressed, the file holds each value as it is, so a worker can read it with one ``pread``, or
one request:

    | page header | levels | length | value 1 | length | value 2 | ... | page header | levels | length | value 9 | ...
                                    ^         ^
                                    place, bytes: an extent

The scan finds the extents (``extents_of``), and parses nothing of the format: pyarrow gives the
values, and each is searched behind the one before it: right there first, then a little further on,
as pages begin. The place of a value that a dictionary holds once is where it was found first.

Invariants: what a worker has to decode as a whole row group is, by what its footer says, no larger
than ``cache_bytes``. The bytes of an extent are the bytes of the value, compared when it was found;
a chunk in which one value is not found has no extents at all.
"""

import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.sources.parquet.row_groups import Footer, read_at
from batchd.storage.index import SourceIndex, readable

LENGTH_BYTES = 4
"""What stands between two values of a page, unless all have the same length."""
GAP_BYTES = 64 << 10
"""How far behind a value the next one is looked for: over the end of a page and the beginning of another."""
NOWHERE = -1
"""The place of a value that is null."""


class Place(NamedTuple):
    """Where a sample is. ``row`` counts from 0 in the row group, ``group`` in the file, ``number`` through all files."""

    number: int
    file: int
    group: int
    row: int


@dataclass(frozen=True, eq=False)
class ParquetIndex:
    """An index as the rows of Parquet files see it."""

    index: SourceIndex

    @cached_property
    def root(self) -> str:
        """The folder of the files, absolute."""
        root: str = self.index.place["root"]
        return root

    @cached_property
    def shards(self) -> tuple[bytes, ...]:
        """The files, relative to the root."""
        return self.index.names("shards")

    @cached_property
    def chunks(self) -> NDArray[np.int64]:
        """See above."""
        return self.index.arrays["chunks"]

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        return np.ascontiguousarray(self.index.arrays["groups"][:, 2])

    def place(self, sample: int) -> Place:
        """Where a sample is. Raises ``IndexError``."""
        number = int(self._firsts.searchsorted(self.index.checked(sample), side="right")) - 1
        file, group, first = self.index.arrays["groups"][number].tolist()
        return Place(number, file, group, sample - first)

    def file(self, number: int) -> bytes:
        """The path of a file as the kernel takes it."""
        return os.path.join(os.fsencode(self.root), self.shards[number])  # noqa: PTH118  bytes

    def footer(self, number: int) -> Footer:
        """What a file said of itself at the scan."""
        return Footer(*self.index.arrays["files"][number].tolist())

    def numbers(self, name: str) -> NDArray[np.generic] | None:
        """A field that is one number for each sample; None where it is not."""
        return self.index.arrays.get(f"numbers.{name}")

    def extents(self, name: str) -> NDArray[np.int64] | None:
        """Where a field's values stand in the files; None where none does."""
        return self.index.arrays.get(f"extents.{name}")

    def shown(self, sample: int) -> str:
        """Where a sample is, for people: the file, and the row counted from 0 in the file."""
        place = self.place(sample)
        groups = self.index.arrays["groups"]
        first = int(groups[int(groups[:, 0].searchsorted(place.file)), 2])
        return f"{readable(self.file(place.file))}: row {sample - first}"


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
