"""The memory of slots and mailboxes. DAEMON process; it makes, hands out and marks them.

    create -> memfd, every page reserved, sealed against shrinking and growing, mode 0600
    free -> closed a little later, one by one
    reserve -> header: unfinished          commit -> header: whole, under its generation
    writable -> for a worker               readable -> the same memory read-only, for a trainer
    writable_anew -> for a trainer with    mapped -> the same memory to read, for batches over TCP
                     a device

A memfd has no name, so a killed daemon leaves nothing behind and two daemons cannot collide. Mode
0600 keeps a trainer of another user from opening its read-only descriptor again for writing.

A mailbox is made and sealed in the same way. ``writable_anew`` is for a producer, ``readable`` for
workers; the daemon never reads it.

Invariant: only ``reserve`` and ``commit`` write the header. The memory cannot be truncated under a
worker or trainer that reads it.
"""

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence
from typing import Self

from batchd.daemon.memory.available import UNLIMITED_BYTES, available_bytes, shortage
from batchd.daemon.memory.held_descriptors import BlankSlots
from batchd.errors import MemoryTooSmall, Problem
from batchd_wire.slot import UNFINISHED, SlotHeader

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SlotPool:
    """Every slot of the daemon, by number. ``blanks`` are what they are made of."""

    def __init__(self, blanks: BlankSlots | None = None) -> None:
        self._blanks = BlankSlots() if blanks is None else blanks
        self._writable: dict[int, int] = {}
        self._readable: dict[int, int] = {}
        self._mapped: dict[int, mmap.mmap] = {}
        self._bytes: dict[int, int] = {}
        self._freed: deque[tuple[int, int]] = deque()
        """Descriptors that are still to be closed."""

    def create(self, slot: int, slot_bytes: int) -> None:
        """Reserve memory for a slot.

        Raises ``MemoryError`` or ``OSError`` with the reason; then it makes none. Freed slots that
        are not closed yet are closed before that: a ring that lacks a slot stays smaller.
        """
        while (problem := shortage(slot_bytes, _available_bytes())) is not None and self._freed:
            self.free_some()
        if problem is not None:
            raise MemoryError(problem)
        blank = self._blanks.take()
        try:
            os.posix_fallocate(blank.writable, 0, slot_bytes)
            fcntl.fcntl(blank.writable, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            self._blanks.give_back(blank)
            raise
        self._writable[slot], self._readable[slot] = blank.writable, blank.readable
        if blank.mapped is not None:
            assert len(blank.mapped) >= slot_bytes, "blanks are mapped for the largest slot"
            self._mapped[slot] = blank.mapped
        self._bytes[slot] = slot_bytes

    def __contains__(self, slot: int) -> bool:
        return slot in self._writable

    def reserve(self, slot: int) -> None:
        """Mark the slot unfinished."""
        self._write(slot, SlotHeader(UNFINISHED, slot, 0, 0, 0, 0))

    def commit(self, slot: int, header: SlotHeader) -> None:
        """Mark the slot whole."""
        self._write(slot, header)

    def free(self, slots: Sequence[int]) -> None:
        """Queue slots for ``free_some``; a slot that found no memory has nothing to free."""
        for slot in slots:
            if slot in self._writable:
                self._freed.append((self._writable.pop(slot), self._readable.pop(slot)))
                self._mapped.pop(slot, None)
                del self._bytes[slot]

    def free_some(self) -> bool:
        """Close one freed slot, which may take the kernel a while; True if there are more."""
        if self._freed:
            for descriptor in self._freed.popleft():
                os.close(descriptor)
        return bool(self._freed)

    def expect(self, count: int, mapped_bytes: int) -> None:
        """Set how many slots may still be made; see ``BlankSlots``."""
        self._blanks.expect(count, mapped_bytes)

    def __len__(self) -> int:
        return len(self._writable)

    def writable(self, slot: int) -> int:
        """The descriptor for a worker; the pool keeps it."""
        return self._writable[slot]

    def readable(self, slot: int) -> int:
        """The read-only descriptor for a trainer; the pool keeps it."""
        return self._readable[slot]

    def writable_anew(self, slot: int) -> int:
        """Open a further writable descriptor, for a trainer; the caller closes it.

        Raises ``OSError``. Each is opened separately, since copies of a descriptor share their
        flags: if a trainer set ``O_APPEND``, the next header would be written behind the slot's
        end. The seals bind every holder.
        """
        return os.open(f"/proc/self/fd/{self._writable[slot]}", os.O_RDWR | os.O_CLOEXEC)

    def mapped(self, slot: int) -> memoryview:
        """The memory itself, read-only, where blanks are mapped. It may outlive us."""
        return memoryview(self._mapped[slot])[: self._bytes[slot]]

    def slot_bytes(self, slot: int) -> int:
        """The size of one slot in bytes."""
        return self._bytes[slot]

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(self._bytes.values())

    def close(self) -> None:
        """Release every slot. Pages last until each process has unmapped them."""
        self._blanks.close()
        while self.free_some():
            pass
        for descriptor in (*self._writable.values(), *self._readable.values()):
            os.close(descriptor)
        self._writable.clear()
        self._readable.clear()
        self._mapped.clear()
        self._bytes.clear()

    def _write(self, slot: int, header: SlotHeader) -> None:
        written = os.pwrite(self._writable[slot], header.pack(), 0)
        assert written == len(header.pack()), "a header is shorter than a page, and the page is reserved"


def _available_bytes() -> int:
    """Available bytes.

    Reading them takes a descriptor; without one, rely on the daemon's check at its start.
    """
    try:
        return available_bytes()
    except OSError as error:
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        return UNLIMITED_BYTES


MAILBOX_NAME = "batchd-mailbox"


class MailboxMemory:
    """Raises ``MemoryTooSmall`` where the kernel has none for it."""

    def __init__(self, mailbox_bytes: int) -> None:
        self.mailbox_bytes = mailbox_bytes
        self.writable = os.memfd_create(MAILBOX_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.readable = -1
        try:
            os.fchmod(self.writable, 0o600)
            os.posix_fallocate(self.writable, 0, mailbox_bytes)
            fcntl.fcntl(self.writable, fcntl.F_ADD_SEALS, SEALS)
            self.readable = os.open(f"/proc/self/fd/{self.writable}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            problem = f"no memory for a mailbox of {mailbox_bytes} bytes: {error.strerror}; lower capacity or sample_bytes_max"
            raise MemoryTooSmall([Problem("daemon.memory", problem)]) from None

    @classmethod
    def adopt(cls, descriptor: int, mailbox_bytes: int) -> Self:
        """Take over a mailbox that another process has made, by its writable descriptor.

        Raises ``OSError``, and then closes the descriptor.
        """
        mailbox = cls.__new__(cls)
        mailbox.mailbox_bytes, mailbox.writable, mailbox.readable = mailbox_bytes, descriptor, -1
        try:
            mailbox.readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            mailbox.close()
            raise
        return mailbox

    def writable_anew(self) -> int:
        """Open a further writable descriptor, for a producer; the caller closes it.

        Raises ``OSError``. Each is opened separately, since copies of a descriptor share their
        flags: if one producer set ``O_APPEND``, the others could not write at their places any
        more.
        """
        return os.open(f"/proc/self/fd/{self.writable}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Release it. The memory lasts until every descriptor of it is closed."""
        for descriptor in (self.writable, self.readable):
            if descriptor >= 0:
                os.close(descriptor)
        self.writable = self.readable = -1
