"""Rows of a file, or all of it: by ``_rows.c``, or without it, in more time. Workers only."""

import os

import numpy as np
from numpy.typing import NDArray

try:
    from batchd.storage import _rows
except ImportError:  # not built
    IS_BUILT = False
else:
    IS_BUILT = True


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


def read_file(folder: int, name: bytes, flags: int, memory: bytearray, bytes_max: int) -> int:
    """Read a regular file of at most ``bytes_max`` bytes that is shorter than ``memory``.

    ``folder``: a descriptor that a relative ``name`` starts from. Returns the number of bytes, or 0
    if ``BytesReader`` has to read the file, or to say what is wrong with it.
    """
    return _rows.read_file(folder, name, flags, memory, bytes_max) if IS_BUILT else 0
