"""Memory received over the lifeline: slots to read, mailboxes to write.

Runs in trainers and producers. A slot is mapped once, while anything refers to it: read-only, or
writable if its descriptor is, as some devices need. A mailbox is not mapped.

Invariants: nothing writes into a slot, however it is mapped. Size, seals and kind of a received
descriptor are checked with the kernel before it is mapped, so the daemon cannot shrink it under a
reader (which would raise SIGBUS).
"""

import fcntl
import mmap
import os
import stat
import sys
from io import FileIO
from weakref import finalize

from batchd_client.errors import ProtocolError


class SlotMemory:
    """One mapped slot: ``page`` is its memory, ``address`` its start, ``slot_bytes`` its length.

    The mapping ends with the last reference. Arrays hold one, so it may outlive the connection.
    """

    __slots__ = ("address", "page", "slot_bytes")

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        """Map and close ``descriptor``. Raises ``ProtocolError`` if it is no such slot."""
        try:
            _check(descriptor, slot_bytes, "slot")
            self.page = memoryview(_map(descriptor, slot_bytes))
        finally:
            os.close(descriptor)
        self.slot_bytes = slot_bytes
        self.address = address_of(self.page)


class Mailbox:
    """The places of one live stream. System calls write them: no mapping, so no faults."""

    __slots__ = ("__weakref__", "_end", "_file", "mailbox_bytes")

    def __init__(self, descriptor: int, mailbox_bytes: int) -> None:
        """Own ``descriptor``. Raises ``ProtocolError`` unless a sealed mailbox of this size."""
        try:
            _check(descriptor, mailbox_bytes, "mailbox")
        except ProtocolError:
            os.close(descriptor)
            raise
        self._file = FileIO(descriptor, "r+")
        self.mailbox_bytes = mailbox_bytes
        self._end = finalize(self, self._file.close)  # of a producer that nobody has closed

    def write(self, start: int, data: memoryview) -> None:
        """Copy bytes into the mailbox at ``start``; they must fit."""
        assert start + data.nbytes <= self.mailbox_bytes, "a place is within its mailbox"
        while data:
            written = os.pwrite(self._file.fileno(), data, start)
            data, start = data[written:], start + written

    def close(self) -> None:
        """Close it. Closing twice does nothing."""
        self._file.close()
        self._end.detach()


def address_of(page: memoryview) -> int:
    """Address of ``page`` in this process."""
    import numpy as np  # noqa: PLC0415  a process that maps nothing does without

    address: int = np.frombuffer(page, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _check(descriptor: int, size: int, what: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ProtocolError(f"a {what} was shared as something that is no memory")
    if status.st_size != size:
        raise ProtocolError(f"a {what} of {size} bytes was shared as {status.st_size} bytes")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"a {what} was shared as a file without seals ({error.strerror})") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(f"a {what} was shared that is not sealed against shrinking")


def _map(descriptor: int, slot_bytes: int) -> mmap.mmap:
    is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    access = mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
    if sys.version_info >= (3, 13):  # before that, a mapping keeps a descriptor of its own
        return mmap.mmap(descriptor, slot_bytes, mmap.MAP_SHARED, access, trackfd=False)
    return mmap.mmap(descriptor, slot_bytes, mmap.MAP_SHARED, access)
