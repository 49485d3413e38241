"""Descriptors held for slots, so that no crowd of connections can take them. DAEMON process.

    the hard limit  |-- the daemon's own --|-- two or three for each slot --|-- connections --|
                                            held by blanks until they become slots

A blank is a slot without memory: an empty memfd with both its descriptors and, if batches are sent
over TCP, its mapping, which before Python 3.13 keeps a third one. It is made ahead of time and not
when its slot is wanted, because a process cannot free a number for itself: while connections wait
to be accepted, a thread of ZeroMQ takes each number that becomes free.

Invariant: while there are blanks, no slot is refused for lack of descriptors.
"""

import errno
import mmap
import os
import resource
import sys
from dataclasses import dataclass
from typing import NamedTuple

from batchd.config.schema import meaning_of
from batchd.config.tree import Config
from batchd.daemon.limits import SessionLimits
from batchd.daemon.memory.rings import SLOTS_MIN, RingSize
from batchd.errors import Problem

MEMORY_NAME = "batchd-slot"
SLOT_DESCRIPTORS = 2
MAPPING_DESCRIPTORS = 0 if sys.version_info >= (3, 13) else 1
BLANKS_MAX = 4_096
"""Each takes the kernel about 2 KiB and us some 10 us at the start."""
MADE_AT_ONCE = 16
"""While the daemon serves: so few that the loop is not held up."""
OWN_DESCRIPTORS = 64
"""Standard streams, sockets, ZeroMQ's threads, the directory's lock, signals,
``SPARE_DESCRIPTORS``."""
SPARE_DESCRIPTORS = 24
"""Of the daemon's own, those that local trainers leave free: to replace a worker, read the
configuration or a key."""
WORKER_DESCRIPTORS = 6
"""Its channel, its note, its pidfd and its state, and what it takes to start one."""
MAILBOX_DESCRIPTORS = 2
"""To write and to read the mailbox of a live stream."""
CACHE_DESCRIPTORS = 2 + MAPPING_DESCRIPTORS
"""The cache of a stream, its mapping, and its claims; streams may share them."""
DISK_CACHE_DESCRIPTORS = 2 + CACHE_DESCRIPTORS
"""A cache on disk has its file and its lock, too."""
LOCAL_SESSION_DESCRIPTORS = 2
"""Its lifeline, and its connection to ZeroMQ."""
TCP_OVERSHOOT = 2_048
"""Connections that ZeroMQ may accept before the loop knows of them: so many events fit into its
monitor, then it waits."""
ADVICE = "raise the limit (LimitNOFILE= in the unit, ulimit -Hn, --ulimit nofile= of docker)"


class Blank(NamedTuple):
    """A memfd without a page, mode 0600: the descriptor that writes and the one that only reads."""

    writable: int
    readable: int
    mapped: mmap.mmap | None = None
    """Covers as many bytes as the largest slot; not to be read beyond the end of the slot's
    memory."""

    def close(self) -> None:
        """Close both. The mapping ends with its last view."""
        os.close(self.writable)
        os.close(self.readable)


class BlankSlots:
    """Blanks for ``count`` slots, made ahead, at most ``BLANKS_MAX`` at a time.

    With ``mapped_bytes`` they are mapped, too.
    """

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

    def expect(self, count: int, mapped_bytes: int) -> None:
        """Set how many slots may still be made, the largest of ``mapped_bytes``.

        Blanks are made a few at a time, as others are taken.
        """
        if mapped_bytes > self._mapped_bytes:
            while self._blanks:
                self._blanks.pop().close()
            self._mapped_bytes = mapped_bytes
        self._count = count
        while len(self._blanks) > count:
            self._blanks.pop().close()
        self._make_ahead(MADE_AT_ONCE)

    def close(self) -> None:
        """Close what was made ahead."""
        self._count = 0
        while self._blanks:
            self._blanks.pop().close()

    def _make_ahead(self, most: int = BLANKS_MAX) -> None:
        try:
            for _ in range(min(self._count, BLANKS_MAX, len(self._blanks) + most) - len(self._blanks)):
                self._blanks.append(make_blank(self._mapped_bytes))
        except OSError:
            return  # others have taken the descriptors just now: the next slot tries again


def make_blank(mapped_bytes: int = 0) -> Blank:
    """Make a blank, mapped if ``mapped_bytes`` is not 0. Raises ``OSError``."""
    writable = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(writable, 0o600)
        readable = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.close(writable)
        raise
    blank = Blank(writable, readable)
    if not mapped_bytes:
        return blank
    try:
        return blank._replace(mapped=_map_ahead(blank, mapped_bytes))
    except OSError:
        blank.close()
        raise


def _map_ahead(blank: Blank, mapped_bytes: int) -> mmap.mmap:
    """Map memory that does not exist yet.

    Python maps no more bytes than a file has, so the file has that length for a moment.
    """
    os.ftruncate(blank.writable, mapped_bytes)
    mapped = _map(blank.readable, mapped_bytes)
    os.ftruncate(blank.writable, 0)
    return mapped


def _map(descriptor: int, mapped_bytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):  # before that, a mapping keeps a descriptor of its own
        return mmap.mmap(descriptor, mapped_bytes, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
    return mmap.mmap(descriptor, mapped_bytes, mmap.MAP_SHARED, mmap.PROT_READ)


@dataclass(frozen=True, slots=True)
class DescriptorPlan:
    """How many descriptors the process has, and the most that each part needs."""

    limit: int
    own: int
    slots: int
    connections: int
    per_slot: int = SLOT_DESCRIPTORS

    @property
    def reserved(self) -> int:
        """Number of slots with held descriptors.

        If there are too few: those that connections leave, and at least half of all.
        """
        free = max(0, self.limit - self.own)
        return min(self.slots, max(free - self.connections, free // 2)) // self.per_slot

    def shortage(self) -> str | None:
        """Say what is short if streams and trainers take everything; None if there is enough."""
        need = self.own + self.slots + self.connections
        if need <= self.limit:
            return None
        return (
            f"need up to {need} descriptors ({self.slots} for slots, {self.connections} for connections, {self.own} others), "
            f"have {self.limit}: rings stay smaller, or trainers wait to be let in; {ADVICE}, or lower sessions_max in [daemon]"
        )

    def refusal(self, streams: int) -> Problem | None:
        """Say why the daemon cannot start: fewer than two slots per stream, and as many others."""
        need = self.own + 2 * SLOTS_MIN * self.per_slot * streams
        if need <= self.limit:
            return None
        text = f"need {need} descriptors at least, have {self.limit}; {ADVICE}; {self.own} are for the daemon and its workers"
        return Problem("daemon", text, meaning_of(("daemon",), {}))


def plan_descriptors(config: Config, rings: dict[str, RingSize]) -> DescriptorPlan:
    """Count the descriptors of a configuration against the hard limit of this process.

    The daemon raises its soft limit to that.
    """
    daemon = config.daemon
    connections = LOCAL_SESSION_DESCRIPTORS * daemon.sessions_max
    per_slot = SLOT_DESCRIPTORS
    if daemon.tcp is not None:
        per_slot += MAPPING_DESCRIPTORS
        limits = SessionLimits(daemon.sessions_max, daemon.sessions_per_peer)
        connections += 2 * limits.sessions_max + limits.pending_max + TCP_OVERSHOOT  # as many may join sessions
    return DescriptorPlan(
        limit=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        own=OWN_DESCRIPTORS
        + WORKER_DESCRIPTORS * daemon.worker_count()
        + len(config.streams)
        + MAILBOX_DESCRIPTORS * sum(ring.mailbox_bytes > 0 for ring in rings.values())
        + CACHE_DESCRIPTORS * sum(stream.cache_memory is not None for stream in config.streams.values())
        + DISK_CACHE_DESCRIPTORS * sum(stream.cache_dir is not None for stream in config.streams.values()),
        slots=per_slot * sum(ring.slots_max for ring in rings.values()),
        connections=connections,
        per_slot=per_slot,
    )
