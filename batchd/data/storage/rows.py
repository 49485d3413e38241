"""Rows of a file, or all of it: by ``_rows.c``, or without it, in more time. Workers only."""

import mmap
import os
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

try:
    from batchd.data.storage import _rows
except ImportError:  # not built
    IS_BUILT = False
else:
    IS_BUILT = True

QUICK_READS = 64
"""A file is mapped once so many more reads than slow ones came from memory."""
SLOW_READ = 8
"""Quick reads that a slow one takes back."""
SLOW_NS = 200_000
"""A read that takes longer, and 1 us more for each row and 1 ns for each byte, had to wait."""
MAPPED_BYTES_MAX = 4 << 30
"""Longer files are not mapped: page tables take 2 MiB for each GiB, in each worker."""


def read_rows(
    descriptor: int, starts: NDArray[np.int64], places: NDArray[np.int64], rows: memoryview, size: int
) -> int:
    """Read ``size`` bytes from each of ``starts`` in a file into row ``places[i]`` of ``rows``.

    ``starts``, in bytes, and ``places`` are int64 of the same length. ``rows``: contiguous rows of
    ``size`` bytes. Returns the number of rows that were read whole: fewer than all if the file ends
    within one. Raises ``OSError``.
    """
    if IS_BUILT:
        return _rows.read_rows(descriptor, starts, places, rows, size)
    for count, (start, place) in enumerate(zip(starts.tolist(), places.tolist(), strict=True)):
        if os.preadv(descriptor, [rows[place * size : (place + 1) * size]], start) != size:
            return count
    return len(starts)


def read_file(  # noqa: PLR0913, PLR0917  as in C
    folder: int, name: bytes, flags: int, memory: memoryview, bytes_max: int, as_of_ns: int
) -> int:
    """Read a regular file of at most ``bytes_max`` bytes that is shorter than ``memory``.

    ``folder``: a descriptor that a relative ``name`` starts from. Returns the number of bytes, or 0
    if ``BytesReader`` has to read the file, or to say what is wrong with it: also if it was written
    after ``as_of_ns``, unless that is 0.
    """
    return _rows.read_file(folder, name, flags, memory, bytes_max, as_of_ns) if IS_BUILT else 0


class RowsFile:
    """One open file whose rows are read, or copied from a mapping while it is in memory.

        read --- quick, QUICK_READS times ---> copied from the mapping, without a system call a row
             <--- a page was not in memory ---

    A page that is missing would be read by itself, so a file that is not in memory is read.
    """

    def __init__(self, descriptor: int) -> None:
        """``descriptor`` stays the caller's, who closes it after this object."""
        self._descriptor = descriptor
        self._mapped: mmap.mmap | None = None
        self._quick_reads = 0

    @property
    def is_mapped(self) -> bool:
        """True if rows are copied from a mapping."""
        return self._mapped is not None

    def read(self, starts: NDArray[np.int64], places: NDArray[np.int64], rows: memoryview, size: int) -> int:
        """As ``read_rows``."""
        if self._mapped is not None:
            count, waits = _rows.copy_rows(self._mapped, starts, places, rows, size)
            if waits or count < len(starts):
                self.close()
            return count
        begun_ns = perf_counter_ns()
        count = read_rows(self._descriptor, starts, places, rows, size)
        is_slow = perf_counter_ns() - begun_ns > SLOW_NS + len(starts) * (1_000 + size)
        self._quick_reads = max(0, self._quick_reads - SLOW_READ) if is_slow else self._quick_reads + 1
        if IS_BUILT and self._quick_reads >= QUICK_READS:
            self._map()
        return count

    def close(self) -> None:
        """End the mapping; rows are read from now on."""
        self._quick_reads = 0
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def _map(self) -> None:
        self._quick_reads = 0
        try:
            if os.fstat(self._descriptor).st_size <= MAPPED_BYTES_MAX:
                self._mapped = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
                self._mapped.madvise(mmap.MADV_RANDOM)
                self._mapped.madvise(mmap.MADV_DONTDUMP)
        except (OSError, ValueError):  # a file system without mappings, or a file that is empty now
            self.close()
