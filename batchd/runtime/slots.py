"""The memory of slots and mailboxes. DAEMON process; it makes, hands out and marks them.

    create -> memfd, every page reserved, huge ones where the kernel gives them on request,
              sealed against shrinking and growing, mode 0600
    free -> closed a little later, one by one
    reserve -> header: unfinished          commit -> header: whole, under its generation
    writable -> for a worker               readable -> the same memory read-only, for a trainer
    open_writable -> for a trainer with    mapped -> the same memory to read, for batches over TCP
                     a device

A memfd has no name, so a killed daemon leaves nothing behind and two daemons cannot collide. Mode
0600 keeps a trainer of another user from opening its read-only descriptor again for writing.

    the hard limit  |-- the daemon's own --|-- two or three for each slot --|-- connections --|
                                            held by blanks until they become slots

A blank is a slot without memory: an empty memfd with both its descriptors and, if batches are sent
over TCP, its mapping, which before Python 3.13 keeps a third one. Where the limit is not enough for
all slots and connections, blanks are made ahead of time and not when their slots are wanted,
because a process cannot free a number for itself: while connections wait to be accepted, a thread
of ZeroMQ takes each number that becomes free.

A mailbox is made and sealed in the same way. ``open_writable`` is for a producer, ``readable`` for
workers; the daemon never reads it.

Invariant: only ``reserve`` and ``commit`` write the header. The memory cannot be truncated under a
worker or trainer that reads it. Invariant: while there are blanks, no slot is refused for lack of
descriptors.
"""

import errno
import fcntl
import mmap
import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from typing import NamedTuple, Self

from batchd.errors import DESCRIPTORS_ADVICE, MemoryTooSmall, Problem, ProblemKind
from batchd.runtime.available import MEMORY_NAME, UNLIMITED_BYTES, available_bytes, shortage
from batchd.runtime.numa import NO_NODES, Nodes
from batchd_wire.slot import UNFINISHED_MARK, SlotHeader

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAILBOX_NAME = "batchd-mailbox"
SLOT_DESCRIPTORS = 2
MAPPING_DESCRIPTORS = 0 if sys.version_info >= (3, 13) else 1
BLANKS_MAX = 4_096
"""Each takes the kernel about 2 KiB and us some 10 us at the start."""
HUGE_PAGE_BYTES = mmap.PAGESIZE**2 // 8
"""What one page of page table entries (8 bytes each) maps: 2 MiB if a page has 4 KiB."""
MADV_POPULATE_WRITE = 23
"""Of madvise(2), since Linux 5.14; the standard library has no name for it."""
MADE_AT_ONCE = 16
"""While the daemon serves: so few that the loop is not held up."""
ADVICE = DESCRIPTORS_ADVICE


class Blank(NamedTuple):
    """A memfd, mode 0600: the descriptor that writes and the one that only reads.

    ``mapped`` covers the bytes of the largest slot: do not read it beyond the end of this slot.
    """

    writable: int
    readable: int
    mapped: mmap.mmap | None

    def close(self) -> None:
        """Close both descriptors. The mapping ends with its last view."""
        os.close(self.writable)
        os.close(self.readable)


def make_blank(mapped_bytes: int) -> Blank:
    """Make a blank without a page, mapped if ``mapped_bytes`` is not 0. Raises ``OSError``."""
    with ExitStack() as where_it_fails:
        writable = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        where_it_fails.callback(os.close, writable)
        os.fchmod(writable, 0o600)
        readable = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        where_it_fails.callback(os.close, readable)
        mapped = None
        # Python maps no more bytes than a file has, so it has that length for a moment
        if mapped_bytes:
            os.ftruncate(writable, mapped_bytes)
            mapped = map_readable(readable, mapped_bytes)
            os.ftruncate(writable, 0)
        where_it_fails.pop_all()
    return Blank(writable, readable, mapped)


def map_readable(descriptor: int, mapped_bytes: int) -> mmap.mmap:
    """Map memory read-only. Raises ``OSError``."""
    if sys.version_info >= (3, 13):  # before that, a mapping keeps a descriptor of its own
        return mmap.mmap(descriptor, mapped_bytes, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
    return mmap.mmap(descriptor, mapped_bytes, mmap.MAP_SHARED, mmap.PROT_READ)


class BlankSlots:
    """Blanks for ``count`` slots, made ahead; at most ``BLANKS_MAX`` at a time."""

    def __init__(self, count: int = 0, mapped_bytes: int = 0) -> None:
        self._count = count
        self._mapped_bytes = mapped_bytes
        self._blanks: list[Blank] = []
        self._make_ahead()

    def __len__(self) -> int:
        return len(self._blanks)

    def take(self) -> Blank:
        """Return a blank for a new slot. Raises ``OSError`` if none can be made."""
        try:
            blank = self._blanks.pop() if self._blanks else make_blank(self._mapped_bytes)
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE}:
                raise
            raise OSError(error.errno, f"{error.strerror}; {ADVICE}") from None
        self._count -= 1
        self._make_ahead(MADE_AT_ONCE)
        return blank

    def give_back(self, blank: Blank) -> None:
        """Take back a blank that became no slot; free its memory, and keep it if it was held."""
        self._count += 1
        if len(self._blanks) < self._count:
            os.ftruncate(blank.writable, 0)
            self._blanks.append(blank)
            return
        blank.close()

    def expect(self, count: int | None, mapped_bytes: int) -> None:
        """Set how many slots may still be made, the largest of ``mapped_bytes``; blanks follow.

        ``count`` None: as many as before.
        """
        if mapped_bytes > self._mapped_bytes:
            self._keep(0)
            self._mapped_bytes = mapped_bytes
        if count is not None:
            self._count = count
        self._keep(max(0, self._count))
        self._make_ahead(MADE_AT_ONCE)

    def close(self) -> None:
        """Close what was made ahead."""
        self._count = 0
        self._keep(0)

    def _keep(self, count: int) -> None:
        while len(self._blanks) > count:
            self._blanks.pop().close()

    def _make_ahead(self, most: int = BLANKS_MAX) -> None:
        try:
            for _ in range(min(self._count, BLANKS_MAX, len(self._blanks) + most) - len(self._blanks)):
                self._blanks.append(make_blank(self._mapped_bytes))
        except OSError:
            return  # others have taken the descriptors just now: the next slot tries again


class SlotPool:
    """Every slot of the daemon, by number; they are made of ``blanks``."""

    def __init__(self, blanks: BlankSlots | None = None, nodes: Nodes = NO_NODES) -> None:
        self._nodes = nodes
        self.blanks = BlankSlots() if blanks is None else blanks
        self._slots: dict[int, Blank] = {}
        self._bytes: dict[int, int] = {}
        self._freed: deque[Blank] = deque()
        """To be closed."""

    def create(self, slot: int, slot_bytes: int, node: int | None = None) -> None:
        """Reserve memory for a slot, of a memory node while it has some.

        Raises ``MemoryError`` or ``OSError``, and then there is none.

        Freed slots are closed before that: a ring that lacks a slot stays smaller.
        """
        while (problem := shortage(slot_bytes, _available_bytes())) is not None and self._freed:
            self.free_some()
        if problem is not None:
            raise MemoryError(problem)
        blank = self.blanks.take()
        try:
            with self._nodes.prefers(node):
                _take_huge_pages(blank.writable, slot_bytes)
                os.posix_fallocate(blank.writable, 0, slot_bytes)
            fcntl.fcntl(blank.writable, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            self.blanks.give_back(blank)
            raise
        assert blank.mapped is None or len(blank.mapped) >= slot_bytes, "blanks are mapped for the largest slot"
        self._slots[slot], self._bytes[slot] = blank, slot_bytes

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def reserve(self, slot: int) -> None:
        """Mark the slot unfinished."""
        self._write(slot, UNFINISHED_MARK)

    def commit(self, slot: int, header: SlotHeader) -> None:
        """Mark the slot whole."""
        self._write(slot, header.pack())

    def free(self, slots: Sequence[int]) -> None:
        """Queue slots for ``free_some``; a slot that found no memory has nothing to free."""
        for slot in slots:
            if slot in self._slots:
                self._freed.append(self._slots.pop(slot))
                del self._bytes[slot]

    def free_some(self) -> bool:
        """Close one freed slot, which may take the kernel a while; True if there are more."""
        if self._freed:
            self._freed.popleft().close()
        return bool(self._freed)

    def writable(self, slot: int) -> int:
        """The descriptor for a worker; the pool keeps it."""
        return self._slots[slot].writable

    def readable(self, slot: int) -> int:
        """The read-only descriptor for a trainer; the pool keeps it."""
        return self._slots[slot].readable

    def open_writable(self, slot: int) -> int:
        """Open a further writable descriptor, for a trainer; the caller closes it.

        Raises ``OSError``. Each is opened separately, since copies of a descriptor share their
        flags: if a trainer set ``O_APPEND``, the next header would be written behind the slot's
        end. The seals bind every holder.
        """
        return os.open(f"/proc/self/fd/{self.writable(slot)}", os.O_RDWR | os.O_CLOEXEC)

    def mapped(self, slot: int) -> memoryview:
        """The memory itself, read-only, where blanks are mapped. It may outlive the slot."""
        mapped = self._slots[slot].mapped
        assert mapped is not None, "with TCP, blanks are mapped"
        return memoryview(mapped)[: self._bytes[slot]]

    def slot_bytes(self, slot: int) -> int:
        """The size of one slot in bytes."""
        return self._bytes[slot]

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(self._bytes.values())

    def close(self) -> None:
        """Release every slot. Pages last until each process has unmapped them."""
        self.blanks.close()
        self.free(list(self._slots))
        while self.free_some():
            pass

    def _write(self, slot: int, header: bytes) -> None:
        written = os.pwrite(self._slots[slot].writable, header, 0)
        assert written == len(header), "a header is shorter than a page, and the page is reserved"


def _take_huge_pages(descriptor: int, slot_bytes: int) -> None:
    """Allocate the huge pages that fit into an empty memfd, if the kernel gives these on request.

    With ``shmem_enabled`` at ``advise``, the first touch of a mapping decides, and a reservation
    has no mapping. So each part that a huge page would cover is touched once, by a call that fails
    where memory is short instead of ending the process. Nothing is touched behind the last whole
    huge page, so a slot takes no byte more. What is refused here is left to the reservation.
    """
    whole_bytes = slot_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if not whole_bytes:
        return
    os.ftruncate(descriptor, whole_bytes)
    with suppress(OSError), closing(mmap.mmap(descriptor, whole_bytes)) as mapped:
        mapped.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, whole_bytes, HUGE_PAGE_BYTES):
            mapped.madvise(MADV_POPULATE_WRITE, start, mmap.PAGESIZE)


def _available_bytes() -> int:
    """Available bytes. Without a descriptor to read them, rely on the check at the start."""
    try:
        return available_bytes()
    except OSError as error:
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        return UNLIMITED_BYTES


class MailboxMemory:
    """The places of pushed samples. Raises ``MemoryTooSmall`` if the kernel has no memory."""

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
            raise MemoryTooSmall([Problem("daemon.memory", ProblemKind.MEMORY_TOO_SMALL, problem)]) from None

    @classmethod
    def adopt(cls, descriptor: int, mailbox_bytes: int) -> Self:
        """Take over a mailbox of another process. Raises ``OSError``, and closes it then."""
        mailbox = cls.__new__(cls)
        mailbox.mailbox_bytes, mailbox.writable, mailbox.readable = mailbox_bytes, descriptor, -1
        try:
            mailbox.readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            mailbox.close()
            raise
        return mailbox

    def open_writable(self) -> int:
        """Open a further writable descriptor, for a producer; the caller closes it.

        Raises ``OSError``. Each is opened separately, as in ``SlotPool.open_writable``.
        """
        return os.open(f"/proc/self/fd/{self.writable}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Release it. The memory lasts until every descriptor of it is closed."""
        for descriptor in (self.writable, self.readable):
            if descriptor >= 0:
                os.close(descriptor)
        self.writable = self.readable = -1
