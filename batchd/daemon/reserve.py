"""Descriptors that are kept for slots, so that no crowd of connections can take them. DAEMON process.

    the hard limit  |-- the daemon's own --|-- two for each slot of every ring --|-- connections --|
                                            held by placeholders until a slot is made

A placeholder is one more descriptor of /dev/null: it costs eight bytes, and its number is taken. Before a slot is made, two are
closed. A thread of ZeroMQ that accepts a connection in that moment may get a number first; then the next two are closed.

Invariant: while there are placeholders, a slot is not refused for want of descriptors.
"""

import os
import resource
from dataclasses import dataclass

from batchd.config.schema import meaning_of
from batchd.config.tree import Config
from batchd.daemon.limits import RemoteLimits
from batchd.daemon.rings import SLOTS_MIN, RingSize
from batchd.errors import Problem

SLOT_DESCRIPTORS = 2
OWN_DESCRIPTORS = 64
"""Standard streams, ZeroMQ's threads and sockets, the directory's lock, signals, what is read now and then."""
WORKER_DESCRIPTORS = 6
"""Its channel and its pidfd, and what it takes to start one."""
LOCAL_SESSION_DESCRIPTORS = 2
"""Its lifeline, and its connection to ZeroMQ."""
TCP_OVERSHOOT = 2_048
"""Connections that ZeroMQ may accept before the loop knows of them: so many events wait in its monitor, then it waits."""
ADVICE = "raise the limit (LimitNOFILE= in the unit, ulimit -Hn, --ulimit nofile= of docker)"


class DescriptorReserve:
    """Placeholders, up to ``count`` of them."""

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._placeholders: list[int] = []
        self._fill()

    def __len__(self) -> int:
        return len(self._placeholders)

    def give(self) -> bool:
        """Free the numbers that one slot needs; false where none are left."""
        given = [self._placeholders.pop() for _ in range(min(SLOT_DESCRIPTORS, len(self._placeholders)))]
        for placeholder in given:
            os.close(placeholder)
        return bool(given)

    def used(self, count: int) -> None:
        """So many of those that were given are in use; take back what else there is."""
        self._count -= count
        self._fill()

    def close(self) -> None:
        """Give everything back."""
        self._count = 0
        while self.give():
            pass

    def _fill(self) -> None:
        missing = self._count - len(self._placeholders)
        if missing <= 0:
            return
        try:
            self._placeholders.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            while len(self._placeholders) < self._count:
                self._placeholders.append(os.dup(self._placeholders[0]))
        except OSError:
            return  # taken by others just now: the next slot tries again


@dataclass(frozen=True, slots=True)
class DescriptorPlan:
    """How many descriptors there are, and who needs them at most."""

    limit: int
    own: int
    slots: int
    connections: int

    @property
    def reserved(self) -> int:
        """How many are kept for slots. Where there are too few, what connections leave, and half of all at least."""
        free = max(0, self.limit - self.own)
        return min(self.slots, max(free - self.connections, free // 2))

    def shortage(self) -> str | None:
        """What is not to be had where all streams and all trainers want everything; None where there is enough."""
        need = self.own + self.slots + self.connections
        if need <= self.limit:
            return None
        return (
            f"need up to {need} descriptors ({self.slots} for slots, {self.connections} for connections, {self.own} others), "
            f"have {self.limit}: rings stay smaller, or trainers wait to be let in; {ADVICE}, or lower sessions_max in [daemon]"
        )

    def refusal(self, streams: int) -> Problem | None:
        """Why the daemon cannot even begin; None where there is room for two slots of each stream, and as much for trainers."""
        need = self.own + 2 * SLOTS_MIN * SLOT_DESCRIPTORS * streams
        if need <= self.limit:
            return None
        text = f"need {need} descriptors at least, have {self.limit}; {ADVICE}"
        return Problem("daemon", text, meaning_of(("daemon",), {}))


def plan_descriptors(config: Config, rings: dict[str, RingSize]) -> DescriptorPlan:
    """Count what the configuration may come to, against the limit of this process."""
    daemon = config.daemon
    connections = LOCAL_SESSION_DESCRIPTORS * daemon.sessions_max
    if daemon.tcp is not None:
        limits = RemoteLimits(daemon.sessions_max, daemon.sessions_per_peer)
        connections += limits.sessions_max + limits.strangers_max + TCP_OVERSHOOT
    return DescriptorPlan(
        limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        own=OWN_DESCRIPTORS + WORKER_DESCRIPTORS * daemon.worker_count() + len(config.streams),
        slots=SLOT_DESCRIPTORS * sum(ring.slots_max for ring in rings.values()),
        connections=connections,
    )
