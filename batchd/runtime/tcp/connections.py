"""Sessions over TCP, and their connections. DAEMON process.

    session 7 (secret, key) = connections [ (routing id, descriptor), ... ]

Invariant: a routing id and a descriptor belong to at most one session, and never to a removed one.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from batchd.runtime.keys import AcceptedKey
from batchd.runtime.limits import QUESTIONS_PER_TICK, SessionLimits, peer_network
from batchd_wire import OLDEST_VERSION
from batchd_wire.keys import DERIVED_MARK
from batchd_wire.status import TrainerStatistics
from batchd_wire.tcp import CURVE_BYTES
from batchd_wire.wording import counted

RATE_MARKS = 10
"""Ticks of the loop over which a rate is taken."""
SHORT_FRAME_BYTES, LONG_FRAME_BYTES, LONG_FRAME_FROM = 2, 9, 256


def descriptor_of(frame: zmq.Frame) -> int | None:
    """Descriptor of the connection of a message; None in ZMTP 1 and 2, which have none."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def host_of(frame: zmq.Frame) -> str:
    """The address of a message's sender; of version 4 in the usual form."""
    return str(frame.get("Peer-Address") or "").removeprefix("::ffff:")


def wire_bytes(length: int, *, encrypted: bool) -> int:
    """Bytes of a frame of this length on the wire, by ZMTP 3.1 and CURVE (RFC 26)."""
    if encrypted:
        length += CURVE_BYTES
    return length + (SHORT_FRAME_BYTES if length < LONG_FRAME_FROM else LONG_FRAME_BYTES)


class Connection(NamedTuple):
    """Routing id, descriptor and its inode: another connection may get the first two later."""

    routing: bytes
    descriptor: int
    inode: int | None = None


@dataclass(slots=True)
class OpenSubscription:
    """A subscription, not given up."""

    request: int
    is_known: bool = False
    """The trainer has spoken of it, so its batches may go over any connection, not only over the
    first, behind the message that names it."""


@dataclass(slots=True, eq=False)
class RemoteSession:
    """One trainer on another host, from its ``Greet`` to the end of its connection."""

    number: int
    connections: list[Connection]
    """The first one carries its messages; parts of its batches are sent over all."""
    secret: bytes
    host: str
    name: str
    pid: int
    key: AcceptedKey | None
    version: int = OLDEST_VERSION
    """Protocol version, from ``Greet``."""
    sent_bytes: int = 0
    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_MARKS))
    """How much had been sent when, every now and then."""
    claims: dict[int, OpenSubscription] = field(default_factory=dict)
    """By subscription: those that were requested, and neither refused nor ended."""
    questions: int = 0
    """Asked since the last tick."""
    ticks_adrift: int = 0
    """For how many ticks one of its connections has been missing."""

    def has(self, routing: bytes, descriptor: int) -> bool:
        """True if it is one of the session's connections."""
        return any((one.routing, one.descriptor) == (routing, descriptor) for one in self.connections)

    def may_read(self, stream: str) -> bool:
        """True if the session's key opens this stream, or the one that it is derived from."""
        opens = None if self.key is None else self.key.streams
        return opens is None or stream.partition(DERIVED_MARK)[0] in opens

    def may_ask(self) -> bool:
        """Count a question; false where there have been too many since the last tick."""
        self.questions += 1
        return self.questions <= QUESTIONS_PER_TICK

    def statistics(self, now: float) -> TrainerStatistics:
        """Name, host and TCP traffic, for ``batchd status``."""
        key = self.key.name if self.key is not None else None
        then_s, then_bytes = self.marks[0]
        bytes_per_s = (self.sent_bytes - then_bytes) / max(now - then_s, 1e-3)
        sent = self.sent_bytes, bytes_per_s, len(self.connections)
        return TrainerStatistics(self.number, self.name, self.pid, None, "tcp", self.host, key, *sent)


class SessionTable:
    """All sessions. The dictionaries change only by ``add``, ``connect`` and ``remove``."""

    def __init__(self) -> None:
        self.by_number: dict[int, RemoteSession] = {}
        self.by_routing: dict[bytes, RemoteSession] = {}
        self.by_descriptor: dict[int, RemoteSession] = {}
        self.by_secret: dict[bytes, RemoteSession] = {}

    def limit_reached(self, key: AcceptedKey | None, host: str, limits: SessionLimits) -> str:
        """Why the limits admit no other session of this key (without keys: this host); or ""."""
        if len(self.by_number) >= limits.sessions_max:
            return f"{limits.sessions_max} remote trainers are connected already; raise sessions_max in [daemon]"
        everyone = self.by_number.values()
        if key is not None:
            owner = f"the key {key.name!r}"
            count = sum(one.key is not None and one.key.public == key.public for one in everyone)
        else:
            owner = peer_network(host)
            count = sum(peer_network(one.host) == owner for one in everyone)
        if count < limits.sessions_per_peer:
            return ""
        had = f"{owner} has {counted(count, 'session')} already"
        return f"{had}; raise sessions_per_peer in [daemon] (now {limits.sessions_per_peer})"

    def add(self, session: RemoteSession) -> None:
        """A session begins. Paired with ``remove``."""
        self.by_number[session.number] = self.by_secret[session.secret] = session

    def connect(self, session: RemoteSession, connection: Connection) -> None:
        """A connection belongs to a session from now on."""
        session.connections.append(connection)
        self.by_routing[connection.routing] = self.by_descriptor[connection.descriptor] = session

    def remove(self, session: RemoteSession) -> bool:
        """A session is over, with all its connections; false where it was before."""
        if self.by_number.pop(session.number, None) is None:
            return False
        del self.by_secret[session.secret]
        for routing, descriptor, _inode in session.connections:
            self.by_routing.pop(routing, None)
            self.by_descriptor.pop(descriptor, None)
        return True
