"""Memory for the rows of one order. WORKER HOST process; a worker writes, ZeroMQ sends from it.

    free --take--> at its worker --rows--> being sent --(ZeroMQ has finished)--> free
                        |                                                        |
                        +--- withdrawn, or its link has ended ------------------>+

It has the layout of a slot with room for the longest order; an order uses its first rows. Each
belongs to one worker and one stream: a ragged row relies on the bytes that this worker left in it
(``data.pipeline.shapes.stages``). With buckets, each order has the layout of its own.

Invariant: a worker does not get it while ZeroMQ sends from it. Each page that a worker writes was
reserved, so without memory the reservation fails instead of the worker.
"""

import mmap
import os
from contextlib import ExitStack
from time import monotonic

from batchd.pool.messages import ROW_FRAME_BYTES
from batchd.runtime.slots import map_readable
from batchd_wire.fields import SlotLayout
from batchd_wire.tcp import pieces

MEMORY_NAME = "batchd-scratch"
SCRATCH_MAX = 3
"""Number for one worker and one stream: two at the worker, and one that is being sent."""
KEPT_IDLE_S = 10.0
"""Time for which an idle one keeps its pages: fresh pages cost more than the rows."""


class OrderMemory:
    """Memory for one order at a time. Raises ``OSError`` without memory or descriptors."""

    def __init__(self, number: int, layout: SlotLayout) -> None:
        self.number = number
        self.layout = layout
        self.is_free = True
        self._reserved: dict[int, int] = {}
        """Rows whose memory is reserved, by the bucket of their layout."""
        self._used_s = monotonic()
        with ExitStack() as where_it_fails:
            self.descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
            where_it_fails.callback(os.close, self.descriptor)
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, layout.slot_bytes)
            self._mapped: mmap.mmap | None = map_readable(self.descriptor, layout.slot_bytes)
            where_it_fails.pop_all()

    def take(self, rows: int, bucket: int = 0) -> None:
        """Reserve memory for ``rows`` rows and mark it as used. Raises ``OSError`` without it."""
        if rows > self._reserved.get(bucket, 0):
            for field in self.layout.of(bucket).fields:
                os.posix_fallocate(self.descriptor, field.offset, rows * field.row_bytes)
            self._reserved[bucket] = rows
        self.is_free = False

    def memory(self) -> memoryview:
        """The whole memory, read-only: uint8 ``[slot_bytes]``. It may outlive the scratch."""
        assert self._mapped is not None, "it is open"
        return memoryview(self._mapped)

    def frames(self, view: memoryview, rows: int, bucket: int = 0) -> list[memoryview]:
        """Cut the first ``rows`` rows out of a view of ``memory`` into the frames to send."""
        return [view[start:end] for start, end in pieces(self.layout.of(bucket), 0, rows, ROW_FRAME_BYTES)]

    def release(self) -> None:
        """Mark it as free: its rows were sent, or are not needed."""
        self.is_free = True
        self._used_s = monotonic()

    def rest(self) -> None:
        """Give the pages back if it has been idle for long; then its bytes are zeros."""
        if self.is_free and self._reserved and monotonic() - self._used_s > KEPT_IDLE_S:
            os.ftruncate(self.descriptor, 0)
            os.ftruncate(self.descriptor, self.layout.slot_bytes)
            self._reserved.clear()

    def close(self) -> None:
        """Close it. The memory lasts until its worker and ZeroMQ have released it."""
        os.close(self.descriptor)
        self._mapped = None
