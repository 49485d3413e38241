"""The ways in for trainers, one ``Door`` each, and the log of sessions. DAEMON process.

    ``local.sessions``: sockets of the runtime directory; batches stay in shared memory
    ``tcp.sessions``:   TCP, for other hosts; batches are sent as bytes

A door puts the messages of its trainers into the daemon's queue: events for the core, and each
query as ``Query``. It does not call the rest of the daemon, so doors are made before everything
that uses them. ``SessionLog`` writes one line when a trainer subscribes and one when it leaves:

    admitted (an action of the core) -> "trainer subscribed"
    unsubscribed | session ended (an event) -> "trainer left"

Invariant: each session and each subscription has a number of its own, across all doors.
Invariant: each logged trainer leaves once, whatever ends first; and no peer can fill the disk by
connecting and leaving.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol, TypeAlias

import structlog
import zmq

from batchd.core.actions import AdmitProducer, AdmitSubscription, GrantLease
from batchd.core.events import Event, SessionCutOff, SessionEnded, SubscriptionEnded
from batchd.daemon.descriptors import Selector
from batchd.daemon.limits import LinesPerMinute, SessionLimits
from batchd.daemon.memory.slots import MailboxMemory, SlotPool
from batchd_wire.codec import Message
from batchd_wire.fields import SlotLayout
from batchd_wire.messages import AskBad, AskReload, AskStatus
from batchd_wire.status import LocalCounts, TcpCounts, TrainerStatistics

_log = structlog.get_logger()

SESSION_LINES_PER_MINUTE = 240
"""Log lines about the trainers of one user or one host: hundreds may connect at once, but not
repeatedly."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The trainer of a session. ``owner``: its user or host, which limits its log lines."""

    name: str
    pid: int | None
    owner: str
    is_remote: bool = False


class _Entry(NamedTuple):
    peer: Peer
    stream: str


class SessionLog:
    """Logs the sessions of the loop's actions and events."""

    def __init__(self) -> None:
        self._lines_per_minute = LinesPerMinute(SESSION_LINES_PER_MINUTE)
        self._readers: dict[int, dict[int, _Entry]] = {}
        """By session, then by subscription."""
        self._producers: dict[int, dict[int, _Entry]] = {}
        """By session, then by stream."""

    def subscribed(self, action: AdmitSubscription, stream: str, peer: Peer) -> None:
        """A trainer reads a stream from now on."""
        course = action.course
        self._readers.setdefault(action.session, {})[action.subscription] = _Entry(peer, stream)
        write = _log.info if self._lines_per_minute.allows(peer.owner) else _log.debug
        write(
            "trainer subscribed",
            stream=stream,
            name=peer.name,
            pid=peer.pid,
            session=action.session,
            rank=f"{course.rank} of {course.world_size}",
            epoch=course.epoch,
            step=course.base,
        )

    def produces(self, action: AdmitProducer, stream: str, peer: Peer) -> None:
        """A program pushes samples into a stream from now on; it may say so again."""
        streams = self._producers.setdefault(action.session, {})
        if action.stream in streams:
            return
        streams[action.stream] = _Entry(peer, stream)
        write = _log.info if self._lines_per_minute.allows(peer.owner) else _log.debug
        write("producer connected", stream=stream, name=peer.name, pid=peer.pid, session=action.session)

    def observe(self, event: Event) -> None:
        """Log the trainers and producers that leave by this event."""
        if isinstance(event, SubscriptionEnded):
            entry = self._readers.get(event.session, {}).pop(event.subscription, None)
            if entry is not None:
                self._leaves(event.session, entry, "it closed the stream")
        elif isinstance(event, SessionEnded | SessionCutOff):
            self._all_leave(event)

    def _all_leave(self, event: SessionEnded | SessionCutOff) -> None:
        for entry in self._readers.pop(event.session, {}).values():
            is_disconnected = isinstance(event, SessionCutOff) and not entry.peer.is_remote
            self._leaves(event.session, entry, "it was disconnected" if is_disconnected else "its connection ended")
        for entry in self._producers.pop(event.session, {}).values():
            write = _log.info if self._lines_per_minute.allows(entry.peer.owner) else _log.debug
            write("producer left", stream=entry.stream, name=entry.peer.name, pid=entry.peer.pid, session=event.session)

    def _leaves(self, session: int, entry: _Entry, reason: str) -> None:
        peer = entry.peer
        write = _log.info if self._lines_per_minute.allows(peer.owner) else _log.debug
        write("trainer left", stream=entry.stream, name=peer.name, pid=peer.pid, session=session, reason=reason)


_GONE = Peer("", None, "ended sessions")


@dataclass(frozen=True, slots=True)
class Query:
    """A session's request that the core does not decide: a query, or a reload."""

    session: int
    message: AskStatus | AskBad | AskReload


Queue: TypeAlias = deque[Event | Query]
"""Events in order. The daemon makes the queue first and passes its ``append`` to all other
parts."""
Enqueue: TypeAlias = Callable[[Event | Query], None]


@dataclass(frozen=True, slots=True)
class DaemonSide:
    """The parts of the daemon that every door gets."""

    selector: Selector
    enqueue: Enqueue
    memory: SlotPool
    session_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    subscription_numbers: Iterator[int] = field(default_factory=lambda: count(1))


class Door(Protocol):
    """One way in for trainers. A message to a session that is gone is dropped."""

    name: str
    """The key of its counts in the status."""

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        """The ZeroMQ sockets that the loop polls; all other descriptors are in ``Selector``."""

    @property
    def patience_s(self) -> float:
        """Seconds in which the door has nothing to do unless something arrives."""

    def receive(self, ready: Container[object]) -> bool:
        """Read a bounded portion of what trainers say; true where there may be more.

        ``ready`` has those of ``sockets`` that can be read.
        """

    def tick(self) -> None:
        """Half a second has passed: close connections that must not stay."""

    def __contains__(self, session: int) -> bool:
        """Tell whether the session came in here and is not gone."""

    def peer(self, session: int) -> Peer:
        """The session's trainer, for the log."""

    def may_read(self, session: int, stream: str) -> bool:
        """Tell whether a session that is here may read a stream, and see it in the status."""

    def statistics(self, now: float) -> Sequence[TrainerStatistics]:
        """All trainers, for ``batchd status``."""

    def counts(self) -> LocalCounts | TcpCounts:
        """Number of connections of all kinds, for ``batchd status``."""

    def send(self, session: int, message: Message) -> None:
        """Send without waiting. A trainer that does not read is disconnected."""

    def answer(self, session: int, message: Message) -> None:
        """Send the answer to a question."""

    def deliver(self, grant: GrantLease, layout: SlotLayout) -> None:
        """Send a batch to a session that is here: its handle, or its bytes.

        ``BatchSent`` follows where it is bytes.
        """

    def share_mailbox(self, session: int, stream: int, mailbox: MailboxMemory) -> None:
        """Hand a producer a stream's mailbox, once. Producers use the local door only."""

    def withdraw_slots(self, slots: Sequence[int]) -> None:
        """Have trainers unmap slots whose memory is given back."""

    def limit(self, limits: SessionLimits) -> None:
        """Admit new sessions within these limits; no present session ends."""


class Doors:
    """All doors of the daemon, in the order in which they are read."""

    def __init__(self, doors: Iterable[Door]) -> None:
        self._doors = tuple(doors)

    def __iter__(self) -> Iterator[Door]:
        return iter(self._doors)

    def of(self, session: int) -> Door | None:
        """The door that a session came through; None where the session is gone."""
        return next((door for door in self._doors if session in door), None)

    def send(self, session: int, message: Message) -> None:
        """Send a message through the session's door."""
        door = self.of(session)
        if door is not None:
            door.send(session, message)

    def peer(self, session: int) -> Peer:
        """The session's trainer, for the log; it may be gone already."""
        door = self.of(session)
        return door.peer(session) if door is not None else _GONE
