"""The index of Parquet files: which row of which row group a sample is, and what need not be read there. Daemon and workers.

    shards           uint8 [bytes]    the paths of the files, a NUL after each
    files            int64 [f, 2]     size and CRC-32 of the footer of each
    groups           int64 [g, 3]     (file, row group in it, first sample)
    chunks           int64 [g, c]     bytes of each field in a row group when it is decoded; 0 where nobody needs to decode it
    numbers.NAME     dtype [n]        fields that are one number for each sample
    extents.NAME     int64 [n, 2]     (first byte, bytes) in the file, of fields that stand there as they are; else (-1, 0)

Invariant: whatever a worker has to decode as a whole row group is, by what its footer says, no
larger than ``cache_bytes``.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.sources.parquet.row_groups import Footer
from batchd.storage.index import SourceIndex, readable


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
