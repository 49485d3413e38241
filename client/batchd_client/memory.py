"""Memory of batches and samples: slots, mailboxes, receive buffers. In trainers and producers.

A slot is mapped once, while anything refers to it: read-only, or writable if its descriptor is, as
some devices need. A mailbox is not mapped. Over TCP, batches are copied into buffers:

    frames of a Parcel --(copied once)--> ReceiveBuffer --> Lease, Batch, arrays
    (its parts may come over several           ^                        |
    connections, in any order)                 +------ reused ----------+ (lease ends)

Invariants: nothing writes into a slot, however it is mapped. Size, seals and kind of a received
descriptor are checked with the kernel before it is mapped, so the daemon cannot shrink it under a
reader (which would raise SIGBUS). A buffer holds one batch at a time, and is reused only after that
batch's lease has ended. A batch is handed on once every part of it, and every batch before it, has
arrived.
"""

import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import FileIO
from typing import NamedTuple
from weakref import finalize

from batchd_client.errors import ProtocolError
from batchd_wire.messages import Parcel
from batchd_wire.tcp import PARTS_MAX

BATCHES_HELD_MAX = 32
"""Batches of one stream that may be alive: no ring limits a remote trainer's memory."""
UNDER_WAY_MAX = 1024
"""Limit on batches in transit to one subscription, above what any daemon sends."""


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
        self.address = _address_of(self.page)


class Mailbox:
    """The places of one live stream. System calls write them: no mapping, so no faults."""

    __slots__ = ("__weakref__", "_end", "_file", "mailbox_bytes")

    def __init__(self, descriptor: int, mailbox_bytes: int) -> None:
        """Take ``descriptor``. Raises ``ProtocolError`` unless it is such a sealed mailbox."""
        try:
            _check(descriptor, mailbox_bytes, "mailbox")
        except ProtocolError:
            os.close(descriptor)
            raise
        self._file = FileIO(descriptor, "r+")
        self.mailbox_bytes = mailbox_bytes
        self._end = finalize(self, self._file.close)  # if its producer is never closed

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


class ReceiveBuffer:
    """Page-aligned memory with the layout of a slot, so that its fields are read the same way.

    Shared, so a fork does not copy it: a registered device would keep reading the old pages.
    """

    __slots__ = ("address", "page", "slot_bytes")

    def __init__(self, slot_bytes: int) -> None:
        self.page = memoryview(mmap.mmap(-1, slot_bytes, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
        self.slot_bytes = slot_bytes
        self.address = _address_of(self.page)


BatchMemory = SlotMemory | ReceiveBuffer


class _Arrival(NamedTuple):
    """A batch, and the numbers of its missing parts."""

    parcel: Parcel
    buffer: ReceiveBuffer
    missing: set[int]


class Arrivals:
    """Puts parts of one subscription's batches together, and hands batches on in order."""

    def __init__(self, slot_bytes: int) -> None:
        self.buffers: list[ReceiveBuffer] = []
        """All buffers: made on demand, reused after their batches end."""
        self._slot_bytes = slot_bytes
        self._free: list[ReceiveBuffer] = []
        self._arrivals: dict[int, _Arrival] = {}
        self._next = 0

    def buffer_for(self, parcel: Parcel) -> ReceiveBuffer:
        """Return the buffer for a part; ``give_back`` takes it when the batch has ended.

        Raises ``ProtocolError`` for an unexpected part, and if there is not enough memory.
        """
        arrival = self._arrivals.get(parcel.sequence)
        if arrival is None:
            if not (
                self._next <= parcel.sequence < self._next + UNDER_WAY_MAX and parcel.part < parcel.parts <= PARTS_MAX
            ):
                raise ProtocolError(f"part {parcel.part} of {parcel.parts} of batch {parcel.sequence} came out of turn")
            buffer = self._free.pop() if self._free else self._new_buffer()
            arrival = self._arrivals[parcel.sequence] = _Arrival(parcel, buffer, set(range(parcel.parts)))
        if parcel.part not in arrival.missing or replace(parcel, part=arrival.parcel.part) != arrival.parcel:
            raise ProtocolError(
                f"part {parcel.part} of batch {parcel.sequence} came twice, or belongs to another batch"
            )
        return arrival.buffer

    def _new_buffer(self) -> ReceiveBuffer:
        try:
            self.buffers.append(ReceiveBuffer(self._slot_bytes))
        except OSError as error:
            text = f"a batch of {self._slot_bytes} bytes, for which there is no memory here: {error.strerror}"
            raise ProtocolError(text) from None
        return self.buffers[-1]

    def note(self, parcel: Parcel) -> Iterator[tuple[Parcel, ReceiveBuffer]]:
        """A part has come as a whole: give the batches that can be handed on now."""
        self._arrivals[parcel.sequence].missing.discard(parcel.part)
        while (arrival := self._arrivals.get(self._next)) is not None and not arrival.missing:
            del self._arrivals[self._next]
            self._next += 1
            yield arrival.parcel, arrival.buffer

    def give_back(self, buffer: ReceiveBuffer) -> None:
        """Note that the buffer is not read any more."""
        self._free.append(buffer)


def _address_of(page: memoryview) -> int:
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
