"""The ways in for trainers, one ``Door`` each, and the log of sessions. DAEMON process.

    ``local.sessions``: sockets of the runtime directory; batches stay in shared memory
    ``tcp``:            TCP, for other hosts; batches are sent as bytes

A door puts one item for each message of an open session into the daemon's queue: an event for the
core, or a ``Query``. It does not call the rest of the daemon, so doors are made before everything
that uses them. ``SessionLog`` writes one line when a trainer subscribes and one when it leaves:

    admitted (an action of the core) -> "trainer subscribed"
    unsubscribed | session ended (an event) -> "trainer left"

Invariant: each session and each subscription has a number of its own, across all doors.
Invariant: each logged trainer leaves once, whatever ends first; and no peer can fill the disk by
connecting and leaving.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import field
from itertools import count
from typing import TypeAlias

import structlog
import zmq

from batchd.core import events
from batchd.core.actions import AdmitProducer, AdmitSubscription, GrantLease
from batchd.core.admission import UPGRADE_CLIENT, UPGRADE_DAEMON
from batchd.daemon.identity import Identity, Tenancy
from batchd.runtime import failpoints
from batchd.runtime.limits import SESSION_LINES_PER_MINUTE, LinesPerMinute, OncePerMinute, SessionLimits
from batchd.runtime.numa import NO_NODES, Nodes
from batchd.runtime.poller import Poller
from batchd.runtime.slots import MailboxMemory, SlotPool
from batchd_wire import OLDEST_VERSION, PROTOCOL_VERSION, messages
from batchd_wire.codec import MESSAGE_BYTES_MAX, Message
from batchd_wire.codes import ErrorCode
from batchd_wire.fields import SlotLayout
from batchd_wire.record import frozen, record
from batchd_wire.reports import ReportedRows
from batchd_wire.status import LocalCounts, TcpCounts, TrainerStatistics

_log = structlog.get_logger()

SECRET_BYTES = 16


@frozen
class Peer:
    """The trainer of a session. ``owner``: its user or host, which limits its log lines."""

    name: str
    pid: int | None
    owner: str
    is_remote: bool = False


_GONE = Peer("", None, "ended sessions")


class SessionLog:
    """Logs the sessions of the loop's actions and events."""

    def __init__(self) -> None:
        self._lines_per_minute = LinesPerMinute(SESSION_LINES_PER_MINUTE)
        self._readers: dict[int, dict[int, tuple[Peer, str]]] = {}
        """Session → subscription → (peer, stream name)."""
        self._producers: dict[int, dict[int, tuple[Peer, str]]] = {}
        """Session → stream → (peer, stream name)."""

    def subscribed(self, action: AdmitSubscription, stream: str, peer: Peer) -> None:
        """A trainer reads a stream from now on."""
        course, session = action.course, action.session
        self._readers.setdefault(session, {})[action.subscription] = peer, stream
        rank = f"{course.rank} of {course.world_size}"
        self._write("trainer subscribed", session, peer, stream, rank=rank, epoch=course.epoch, step=course.base)

    def produces(self, action: AdmitProducer, stream: str, peer: Peer) -> None:
        """A program pushes samples into a stream from now on; it may say so again."""
        streams = self._producers.setdefault(action.session, {})
        if action.stream not in streams:
            streams[action.stream] = peer, stream
            self._write("producer connected", action.session, peer, stream)

    def observe(self, event: events.Event) -> None:
        """Log the trainers and producers that leave by this event."""
        if isinstance(event, events.SubscriptionEnded):
            entry = self._readers.get(event.session, {}).pop(event.subscription, None)
            if entry is not None:
                self._write("trainer left", event.session, *entry, reason="it closed the stream")
        elif isinstance(event, events.SessionEnded | events.SessionCutOff):
            for peer, stream in self._readers.pop(event.session, {}).values():
                is_disconnected = isinstance(event, events.SessionCutOff) and not peer.is_remote
                reason = "it was disconnected" if is_disconnected else "its connection ended"
                self._write("trainer left", event.session, peer, stream, reason=reason)
            for entry in self._producers.pop(event.session, {}).values():
                self._write("producer left", event.session, *entry)

    def _write(self, text: str, session: int, peer: Peer, stream: str, **further: object) -> None:
        write = _log.info if self._lines_per_minute.allows("sessions", peer.owner) else _log.debug
        write(text, stream=stream, name=peer.name, pid=peer.pid, session=session, **further)


@record
class Query:
    """A session's request that the core does not decide: a query, a reload, or a removal."""

    session: int
    message: messages.AskStatus | messages.AskBad | messages.AskReload | messages.AskRemoval


@record
class Reported:
    """A trainer's reports of batches, which decide nothing. ``peer``: the session may end first."""

    session: int
    peer: Peer
    subscription: int
    reports: Sequence[ReportedRows]


Queue: TypeAlias = deque[events.Event | Query | Reported]
"""Events in order. The daemon makes the queue first and gives its ``append`` to all other parts."""
Enqueue: TypeAlias = Callable[[events.Event | Query | Reported], None]


@frozen
class DaemonSide:
    """The parts of the daemon that every door gets."""

    poller: Poller
    enqueue: Enqueue
    memory: SlotPool
    nodes: Nodes = NO_NODES
    session_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    subscription_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    tenants: dict[int, str] = field(default_factory=dict)
    """By session: of all doors."""


class Door(ABC):
    """One way in for trainers. A message to a session that is gone is dropped."""

    is_remote = False

    def __init__(self, daemon: DaemonSide, limits: SessionLimits) -> None:
        self._daemon = daemon
        self._limits = limits
        self._tenancy = Tenancy({}, {})
        self._once_per_minute = OncePerMinute()

    @property
    def sockets(self) -> "Sequence[zmq.Socket[bytes]]":
        """The ZeroMQ sockets that the loop reads; all other descriptors have handlers."""
        return ()

    @abstractmethod
    def receive(self, ready: Container[object], is_over: Callable[[], bool] = lambda: False) -> bool:
        """Read a portion; true where there may be more. ``ready``: of ``sockets``.

        ``is_over`` is called after each message: it has it handled, and ends the portion.
        """

    @abstractmethod
    def tick(self) -> None:
        """Half a second has passed: close connections that must not stay."""

    @abstractmethod
    def __contains__(self, session: int) -> bool:
        """Tell whether the session came in here and is not gone."""

    @abstractmethod
    def peer(self, session: int) -> Peer:
        """The session's trainer, for the log."""

    @abstractmethod
    def identity(self, session: int) -> Identity:
        """Who a session that is here belongs to, as the kernel or its key proves."""

    def is_valid(self, identity: Identity) -> bool:  # noqa: ARG002  users of this host stay
        """Tell whether who came in here may still come."""
        return True

    def node(self, session: int) -> int | None:  # noqa: ARG002  others are on other hosts
        """The memory node on which a session that is here runs, if that matters."""
        return None

    def may_read(self, session: int, stream: str) -> bool:  # noqa: ARG002  on this host all may
        """Tell whether a session that is here may read a stream, and see it in the status."""
        return True

    @abstractmethod
    def statistics(self, now: float) -> list[TrainerStatistics]:
        """All trainers, for ``batchd status``."""

    @abstractmethod
    def counts(self) -> LocalCounts | TcpCounts:
        """Number of connections of all kinds, for ``batchd status``."""

    @abstractmethod
    def send(self, session: int, message: Message) -> None:
        """Send without waiting. A trainer that does not read is disconnected."""

    def answer(self, session: int, message: Message) -> None:
        """Send the answer to a question."""
        self.send(session, message)

    @abstractmethod
    def deliver(self, grant: GrantLease, layout: SlotLayout) -> None:
        """Send a batch to a session that is here: its handle; or its bytes, then ``BatchSent``."""

    def flush(self) -> None:  # noqa: B027  ZeroMQ's own threads send over TCP
        """Send what was kept back to be sent together."""

    def share_mailbox(self, session: int, stream: int, mailbox: MailboxMemory) -> None:  # noqa: B027  local only
        """Hand a producer a stream's mailbox, once. Producers use the local door only."""

    def withdraw_slots(self, slots: Sequence[int]) -> None:  # noqa: B027  other hosts map no slots
        """Have trainers unmap slots whose memory is given back."""

    def limit(self, limits: SessionLimits, tenancy: Tenancy) -> None:
        """Admit new sessions within these limits, and new subscriptions of these tenants.

        No present session ends.
        """
        self._limits, self._tenancy = limits, tenancy

    def _belongs(self, session: int, identity: Identity) -> str:
        """Count a new session for its tenant, or say why its share admits no other.

        Paired with the removal from ``DaemonSide.tenants``.
        """
        tenant, tenants = self._tenancy.tenant(identity), self._daemon.tenants
        limit_reached = self._tenancy.limit_reached(tenant, tenants.values())
        if not limit_reached:
            tenants[session] = tenant
        return limit_reached

    def _event_of(self, session: int, message: Message) -> events.Event | Query | None:
        """The event or query of a message; None if an open session sends no such message."""
        match message:
            case messages.Pull():
                return self._pulled(session, message)
            case messages.Subscribe():
                identity = self.identity(session)
                return events.SubscriptionAsked(
                    session=session,
                    subscription=next(self._daemon.subscription_numbers),
                    request=message.request,
                    stream=message.stream,
                    rank=message.rank,
                    world_size=message.world_size,
                    window=message.window,
                    epoch=message.epoch,
                    step=message.step,
                    end_epoch=message.end_epoch,
                    fingerprint=message.fingerprint,
                    is_spectator=message.is_spectator,
                    is_remote=self.is_remote,
                    knows_buckets=message.knows_buckets,
                    sample=message.sample,
                    parts=message.parts,
                    converts=message.converts,
                    settings=message.settings,
                    owner=identity.owner,
                    tenant=self._tenancy.tenant(identity),
                    defines=message.defines,
                    keep_s=message.keep_s,
                    node=self.node(session),
                )
            case messages.Mismatched():
                return events.BatchMismatched(session, message.subscription, message.sequence, message.generation)
            case messages.Unsubscribe():
                return events.SubscriptionEnded(session, message.subscription, message.consumed)
            case messages.AskPlace():
                return events.PlaceAsked(session, message.request, message.stream)
            case messages.Pushed():
                return events.SamplePushed(session, message.request, message.stream, message.place)
            case messages.WithdrawAsk():
                return events.PlaceWithdrawn(session, message.stream)
            case messages.Produce():
                return events.ProducerAsked(session, message.request, message.stream)
            case messages.AskStatus() | messages.AskBad() | messages.AskReload() | messages.AskRemoval():
                return Query(session, message)
            case _:
                return None

    def _pulled(self, session: int, message: messages.Pull) -> events.Pulled:
        if message.reports:
            self._daemon.enqueue(Reported(session, self.peer(session), message.subscription, message.reports))
        if message.released:
            failpoints.passing("daemon.release.received")
        # The daemon itself ends the leases of batches that were sent as bytes.
        released = [] if self.is_remote else [(sequence, generation) for sequence, generation in message.released]
        return events.Pulled(
            session, message.subscription, message.consumed, message.waiting, message.wait_us, released
        )


def encode_answer(message: Message, version: int) -> bytes:
    """Encode a message for a peer; one that is longer than any that is read becomes a refusal."""
    data = message.encode(version)
    if len(data) <= MESSAGE_BYTES_MAX:
        return data
    text = f"{type(message).__name__} would have {len(data)} bytes, and a message has {MESSAGE_BYTES_MAX} at most"
    return messages.Refused(getattr(message, "request", 0), 0, ErrorCode.NOT_ALLOWED, text).encode(version)


def refused_version(theirs: int) -> messages.Refused | None:
    """Refuse a protocol version that is not served, with the command that upgrades, or None."""
    if OLDEST_VERSION <= theirs <= PROTOCOL_VERSION:
        return None
    upgrade = UPGRADE_CLIENT if theirs < OLDEST_VERSION else UPGRADE_DAEMON
    served = f"clients of the versions {OLDEST_VERSION} to {PROTOCOL_VERSION} of the protocol"
    text = f"the daemon serves {served}, and this client speaks version {theirs}; {upgrade}"
    return messages.Refused(0, 0, ErrorCode.UNSUPPORTED_VERSION, text)


class Doors:
    """All doors of the daemon, in the order in which they are read."""

    def __init__(self, doors: Iterable[Door]) -> None:
        self._doors = tuple(doors)

    def __iter__(self) -> Iterator[Door]:
        return iter(self._doors)

    def of(self, session: int) -> Door | None:
        """The door that a session came through; None where the session is gone."""
        for door in self._doors:  # no generator: this is asked for each batch
            if session in door:
                return door
        return None

    def send(self, session: int, message: Message) -> None:
        """Send a message through the session's door."""
        door = self.of(session)
        if door is not None:
            door.send(session, message)

    def peer(self, session: int) -> Peer:
        """The session's trainer, for the log; it may be gone already."""
        door = self.of(session)
        return door.peer(session) if door is not None else _GONE
