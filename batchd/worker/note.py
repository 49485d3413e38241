"""The row that the worker has in hand, in shared memory, for whoever finds it dead. WORKER process; drawn in ``orders``.

Invariant: the note is written before a sample is touched and cleared when the chunk is done, so a
dead worker's note names the sample that it died with. The worker is the only writer; a torn read is
harmless, since the daemon trusts it only of the dead.
"""

import mmap
import os

from batchd.orders.worker import NOTE, NOTE_BYTES


class NoteMemory:
    """Maps the note behind ``descriptor``, which belongs to it from now on."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, NOTE_BYTES)
        os.close(descriptor)
        self._order = 0

    def begin(self, order: int) -> None:
        """An order is in hand."""
        self._order = order

    def take(self, row: int, sample: int) -> None:
        """``sample`` is decoded for ``row``."""
        NOTE.pack_into(self._memory, 0, self._order, row + 1, sample)

    def clear(self) -> None:
        """Between samples."""
        NOTE.pack_into(self._memory, 0, self._order, 0, 0)
