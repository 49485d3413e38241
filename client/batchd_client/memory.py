"""The memory of one slot, mapped read-only once and for as long as anybody looks at it. Runs in the trainer.

Invariant: nothing is believed of a descriptor that came over the lifeline: its size, its seals and its kind are asked from
the kernel before it is mapped, so the daemon cannot shrink it under a reader (that is how SIGBUS is made).
"""

import fcntl
import mmap
import os
import stat
import sys

import numpy as np

from batchd_client.errors import ProtocolError


class SlotMemory:
    """One slot, mapped. ``page`` reads its header, ``address`` is where it starts, ``slot_bytes`` how long it is.

    The mapping ends with the last reference; arrays hold one, so it outlives the connection where they do.
    """

    __slots__ = ("address", "page", "slot_bytes")

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        """Map what ``descriptor`` names, and close it. Raises ``ProtocolError`` where it is not a sealed slot of this size."""
        try:
            _check(descriptor, slot_bytes)
            self.page = memoryview(_map(descriptor, slot_bytes))
        finally:
            os.close(descriptor)
        self.slot_bytes = slot_bytes
        self.address: int = np.frombuffer(self.page, dtype=np.uint8).__array_interface__["data"][0]


def _check(descriptor: int, slot_bytes: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ProtocolError("a slot was shared as something that is no memory")
    if status.st_size != slot_bytes:
        raise ProtocolError(f"a slot of {slot_bytes} bytes was shared as {status.st_size} bytes")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"a slot was shared as a file without seals ({error.strerror})") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("a slot was shared that is not sealed against shrinking")


def _map(descriptor: int, slot_bytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):  # before that, a mapping keeps a descriptor of its own
        return mmap.mmap(descriptor, slot_bytes, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
    return mmap.mmap(descriptor, slot_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
