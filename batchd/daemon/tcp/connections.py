"""Who is connected over TCP: sessions, and the connections that they consist of. DAEMON process; asks nobody.

    session 7 (secret, key) = connections [ (routing id, descriptor), (routing id, descriptor), ... ]

Invariant: a routing id and a descriptor belong to one session at most, and none to a session that
has been removed.
"""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from batchd.daemon.limits import peer_network
from batchd.daemon.tcp.keys import TrainerKey
from batchd_wire import OLDEST_VERSION
from batchd_wire.status import TrainerStatistics

QUESTIONS_PER_TICK = 10
"""Questions of people, such as for the status, whose answers are long; ticks are half a second apart."""
RATE_MARKS = 10
"""Ticks of the loop over which a rate is taken."""


class Connection(NamedTuple):
    """A routing id of the ROUTER, the descriptor that it stands for, and the inode that this had when the session began.

    The number may be another connection's later; an inode is not.
    """

    routing: bytes
    descriptor: int
    inode: int | None = None


@dataclass(slots=True)
class OpenSubscription:
    """A subscription, not given up.

    ``is_known``: the trainer has spoken of it, so its batches may go over any connection; before
    that they go over the first, behind the message that names it.
    """

    request: int
    is_known: bool = False


@dataclass(slots=True, eq=False)
class RemoteSession:
    """One trainer on another host, from its ``Greet`` to the end of its connection."""

    number: int
    connections: list[Connection]
    """The first is what it speaks over; parts of its batches go to all."""
    secret: bytes
    host: str
    name: str
    pid: int
    key: TrainerKey | None
    version: int = OLDEST_VERSION
    """Of the protocol, as it said in ``Greet``."""
    sent_bytes: int = 0
    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_MARKS))
    """How much had been sent when, every now and then."""
    claims: dict[int, OpenSubscription] = field(default_factory=dict)
    """By subscription: those that were asked for, and neither refused nor given up."""
    questions: int = 0
    """Asked since the last tick."""
    ticks_adrift: int = 0
    """For how many ticks one of its connections has not been there."""

    def has(self, routing: bytes, descriptor: int) -> bool:
        """Is this one of its connections?"""
        return any((one.routing, one.descriptor) == (routing, descriptor) for one in self.connections)

    def may_read(self, stream: str) -> bool:
        """Does its key open this stream?"""
        return self.key is None or self.key.streams is None or stream in self.key.streams

    def refused(self, request: int) -> None:
        """The claim of this request is not admitted."""
        self.claims = {number: claim for number, claim in self.claims.items() if claim.request != request}

    def may_ask(self) -> bool:
        """Count a question; false where there have been too many since the last tick."""
        self.questions += 1
        return self.questions <= QUESTIONS_PER_TICK

    def bytes_per_s(self, now: float) -> float:
        """What went out lately, by the second."""
        then_s, then_bytes = self.marks[0]
        return (self.sent_bytes - then_bytes) / max(now - then_s, 1e-3)

    def statistics(self, now: float) -> TrainerStatistics:
        """Who it is, and what it gets over TCP, for people."""
        key = self.key.name if self.key is not None else None
        sent = self.sent_bytes, self.bytes_per_s(now), len(self.connections)
        return TrainerStatistics(self.number, self.name, self.pid, None, "tcp", self.host, key, *sent)


class Register:
    """All sessions, by whatever they are known."""

    def __init__(self) -> None:
        self._by_number: dict[int, RemoteSession] = {}
        self._by_routing: dict[bytes, RemoteSession] = {}
        self._by_descriptor: dict[int, RemoteSession] = {}
        self._by_secret: dict[bytes, RemoteSession] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def descriptors(self) -> Container[int]:
        """The descriptors of all sessions, now and later."""
        return self._by_descriptor

    @property
    def further_connections(self) -> int:
        """Connections that have joined a session."""
        return len(self._by_routing) - len(self._by_number)

    def everybody(self) -> list[RemoteSession]:
        """All sessions."""
        return list(self._by_number.values())

    def __getitem__(self, number: int) -> RemoteSession:
        return self._by_number[number]

    def get(self, number: int) -> RemoteSession | None:
        """By its number."""
        return self._by_number.get(number)

    def at(self, routing: bytes) -> RemoteSession | None:
        """By a routing id of one of its connections."""
        return self._by_routing.get(routing)

    def on(self, descriptor: int) -> RemoteSession | None:
        """By a descriptor of one of its connections."""
        return self._by_descriptor.get(descriptor)

    def knowing(self, secret: bytes) -> RemoteSession | None:
        """By its secret."""
        return self._by_secret.get(secret)

    def of_peer(self, key: TrainerKey | None, host: str) -> int:
        """How many sessions there are with this key, or from this host where there are no keys."""
        if key is not None:
            return sum(one.key is not None and one.key.public == key.public for one in self._by_number.values())
        return sum(peer_network(one.host) == peer_network(host) for one in self._by_number.values())

    def add(self, session: RemoteSession) -> None:
        """A session begins. Paired with ``remove``."""
        self._by_number[session.number] = self._by_secret[session.secret] = session

    def connect(self, session: RemoteSession, connection: Connection) -> None:
        """A connection belongs to a session from now on."""
        session.connections.append(connection)
        self._by_routing[connection.routing] = self._by_descriptor[connection.descriptor] = session

    def remove(self, session: RemoteSession) -> bool:
        """A session is over, with all its connections; false where it was before."""
        if self._by_number.pop(session.number, None) is None:
            return False
        del self._by_secret[session.secret]
        for routing, descriptor, _inode in session.connections:
            self._by_routing.pop(routing, None)
            self._by_descriptor.pop(descriptor, None)
        return True
