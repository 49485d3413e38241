"""The slots that this worker may write. WORKER process.

Each slot is mapped once, when the daemon hands over its descriptor, and stays mapped: no system
call per batch. The memory was reserved before (``posix_fallocate``), so touching it cannot fail.
The header page is never written here.
"""

import mmap
import os
from collections.abc import Sequence

import numpy as np

from batchd_wire.fields import SlotLayout
from batchd_wire.views import slot_arrays

Arrays = dict[str, np.ndarray]


class WritableSlots:
    """The mapped slots, by number."""

    def __init__(self) -> None:
        self._memories: dict[int, memoryview] = {}
        self._arrays: dict[int, Arrays] = {}

    def add(self, slot: int, slot_bytes: int, descriptor: int) -> None:
        """Map ``slot``; the descriptor is closed, the mapping keeps the memory."""
        memory = mmap.mmap(descriptor, slot_bytes)
        os.close(descriptor)
        memory.madvise(mmap.MADV_DONTDUMP)
        self._memories[slot] = memoryview(memory)

    def forget(self, slots: Sequence[int]) -> None:
        """Unmap slots; the mapping ends with the last array over it."""
        for slot in slots:
            self._arrays.pop(slot, None)
            self._memories.pop(slot, None)

    def page(self, slot: int) -> memoryview:
        """The whole memory of ``slot``."""
        return self._memories[slot]

    def arrays(self, slot: int, layout: SlotLayout) -> Arrays:
        """The writable fields of ``slot``, each ``[rows, *shape]``. A slot belongs to one stream, so it has one layout."""
        arrays = self._arrays.get(slot)
        if arrays is None:
            arrays = self._arrays[slot] = slot_arrays(self._memories[slot], layout)
        return arrays
