"""The door for trainers on other hosts: a ROUTER over TCP. DAEMON process.

    connection (CURVE: a known key) -> Greet -> Greeted -> Subscribe, Pull, ... -> disconnected
    more of them (with the same key) -> Join -> Joined: parts of its batches are sent there

A session is its first TCP connection and those that have joined it; the end of any of them ends it.
ZeroMQ's monitor reports that, and heartbeats end a connection within ``HEARTBEAT_TIMEOUT_MS`` even
if the other host has gone silent. A routing id is only an address: a message's rights depend on its
connection, identified by descriptor and key.

Invariant: a slot that is being sent is not written: its lease ends only by ``BatchSent``, never by
a message of the trainer. Each batch gets exactly one, when ZeroMQ has released the memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from secrets import token_bytes
from time import monotonic

import structlog
import zmq

from batchd.core.actions import GrantLease
from batchd.core.admission import NAME_SHOWN_CHARACTERS_MAX
from batchd.core.events import BatchSent, SessionCutOff, SubscriptionAsked, SubscriptionEnded
from batchd.daemon import doors
from batchd.daemon.identity import Identity
from batchd.runtime import __version__, failpoints
from batchd.runtime.keys import AcceptedKey, RoleKeys
from batchd.runtime.limits import (
    MESSAGE_BYTES_MAX,
    QUESTIONS_PER_TICK,
    SESSION_LINES_PER_MINUTE,
    HandshakeRate,
    LinesPerMinute,
    SessionLimits,
    peer_network,
    peer_site,
    printable,
)
from batchd.runtime.tcp.connection_guard import GuardLimits
from batchd.runtime.tcp.connections import (
    Connection,
    OpenSubscription,
    RemoteSession,
    SessionTable,
    host_of,
)
from batchd.runtime.tcp.front import TcpFront
from batchd.runtime.tcp.router import RouterLimits
from batchd.runtime.tcp.sent_memory import SentMemory
from batchd_wire import OLDEST_VERSION, messages
from batchd_wire.codec import NUMBER_MAX, MalformedMessage, Message
from batchd_wire.codes import ErrorCode
from batchd_wire.fields import SlotLayout
from batchd_wire.runtime import host_id
from batchd_wire.status import TcpCounts, TrainerStatistics
from batchd_wire.tcp import PARTS_MAX, PIECE_BYTES, part_of

_log = structlog.get_logger()

REMOTE_UNREAD_MAX = 512
"""Unread messages after which a trainer is disconnected: two batches of each claim, and answers."""
REMOTE_MESSAGES_AT_ONCE = 16
"""Messages read in one round of the loop: a quarter of those of local trainers."""


class TcpDoor(TcpFront, doors.Door):
    """Trainers on other hosts; see ``TcpFront``."""

    is_remote = True

    def __init__(self, daemon: doors.DaemonSide, limits: SessionLimits, keys: RoleKeys | None) -> None:
        doors.Door.__init__(self, daemon, limits)
        self._sessions = SessionTable()
        router_limits = RouterLimits(MESSAGE_BYTES_MAX, REMOTE_UNREAD_MAX)
        guard_limits = GuardLimits(limits.pending_max)
        TcpFront.__init__(self, daemon.poller, keys, router_limits, self._sessions.by_descriptor, guard_limits)
        self._sent_memory = SentMemory(daemon.poller)
        self._rate = HandshakeRate()
        self._lines_per_minute = LinesPerMinute(SESSION_LINES_PER_MINUTE)
        self.sent_bytes = 0
        self._ipc_address = ""

    def bind(self, endpoint: str, ipc_address: str) -> None:
        """Listen. Raises ``BatchdError`` saying why that cannot be."""
        self._ipc_address = ipc_address
        self.listen(endpoint, "daemon.tcp")

    def close(self) -> None:
        """End every session, then let go of what was being sent."""
        super().close()
        self._sent_memory.close()

    def counts(self) -> TcpCounts:
        """Number of connections of all kinds, for ``batchd status``."""
        guard = self.guard
        return TcpCounts(len(guard), len(guard.pending()), guard.closed, self.failed_handshakes, self.sent_bytes)

    def __contains__(self, number: int) -> bool:
        return number in self._sessions.by_number

    def peer(self, number: int) -> doors.Peer:
        """The session's trainer, for the log."""
        session = self._sessions.by_number[number]
        return doors.Peer(session.name, session.pid, f"host {peer_site(session.host)}", is_remote=True)

    def identity(self, number: int) -> Identity:
        """The session's key, which the handshake has proved; without keys, its host."""
        session = self._sessions.by_number[number]
        return _identity(session.key, session.host)

    def is_valid(self, identity: Identity) -> bool:
        """See ``Door``."""
        return not identity.key or (self._keys is not None and self._keys.holds(identity.key, identity.public))

    def trainers(self) -> list[RemoteSession]:
        """All sessions."""
        return list(self._sessions.by_number.values())

    def statistics(self, now: float) -> list[TrainerStatistics]:
        """All trainers, for ``batchd status``."""
        return [session.statistics(now) for session in self.trainers()]

    def may_read(self, number: int, stream: str) -> bool:
        """Tell whether the session's key opens the stream."""
        return self._sessions.by_number[number].may_read(stream)

    # --- sending ----------------------------------------------------------------------------------

    def send(self, number: int, message: Message) -> None:
        """Send to a trainer, unless it is gone. A refused claim is forgotten."""
        session = self._sessions.by_number.get(number)
        if session is not None and isinstance(message, messages.Refused) and message.request:
            session.claims = {key: one for key, one in session.claims.items() if one.request != message.request}
        self.answer(number, message)

    def answer(self, number: int, message: Message) -> None:
        """Send the answer to a question, unless the session is gone."""
        session = self._sessions.by_number.get(number)
        if session is not None:
            self._send(session, message)

    def deliver(self, grant: GrantLease, layout: SlotLayout) -> None:
        """Send the rows of a lease. ``BatchSent`` follows."""
        session = self._sessions.by_number[grant.session]
        sent = BatchSent(grant.session, grant.subscription, grant.sequence, grant.generation)
        try:
            view = self._sent_memory.view(self._daemon.memory.mapped(grant.slot), partial(self._daemon.enqueue, sent))
        except (OSError, MemoryError) as error:
            self._end(session, f"there is no memory to send it a batch from: {error}")
            self._daemon.enqueue(sent)
            return
        claim = session.claims.get(grant.subscription)
        connections = session.connections if claim is not None and claim.is_known else session.connections[:1]
        parts = max(1, min(len(connections), grant.count * layout.row_bytes // PIECE_BYTES))
        for part in range(parts):
            parcel = messages.Parcel.filled_from(grant, part=part, parts=parts)
            frames = [view[start:end] for start, end in part_of(layout, grant.first, grant.count, part, parts)]
            sent_bytes = sum(map(len, frames))
            session.sent_bytes += sent_bytes
            self.sent_bytes += sent_bytes
            over = connections[(grant.sequence + part) % len(connections)]
            self._send(session, parcel, over, frames)
            if session.number not in self:
                break
        failpoints.passing("daemon.parcel.sent")

    def tick(self) -> None:
        """Note the bytes sent so far; end the sessions of revoked keys and of lost connections."""
        self.guard.tick()
        for session in self.trainers():
            is_there = all(map(self._is_there, session.connections))
            session.ticks_adrift = 0 if is_there else session.ticks_adrift + 1
            if session.ticks_adrift > 1:
                self._end(session, "")
                continue
            session.marks.append((monotonic(), session.sent_bytes))
            session.questions = 0
            if not self._is_valid(session.key):
                self._send(session, messages.Refused(0, 0, ErrorCode.KEY_REFUSED, "the key has been revoked"))
                self._end(session, "its key has been revoked")

    def _send(
        self,
        session: RemoteSession,
        message: Message,
        over: Connection | None = None,
        pieces: Sequence[bytes | memoryview] = (),
    ) -> None:
        """Send a message, then pieces of rows, over ``over`` or the first connection."""
        routing = (over or session.connections[0]).routing
        try:
            frames = [routing, doors.encode_answer(message, session.version), *pieces]
            self.router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._end(session, f"it left {REMOTE_UNREAD_MAX} messages unread")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._end(session, "")

    # --- receiving --------------------------------------------------------------------------------

    def _read(self, is_over: Callable[[], bool]) -> bool:
        """Read up to ``REMOTE_MESSAGES_AT_ONCE`` messages."""
        for _ in range(REMOTE_MESSAGES_AT_ONCE):
            try:
                frames = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            self._take(frames)
            if is_over():
                break
        return True

    def _ended(self, descriptor: int) -> None:
        """A connection has ended."""
        session = self._sessions.by_descriptor.get(descriptor)
        if session is not None:
            self._end(session, "")

    def _take(self, frames: list[zmq.Frame]) -> None:
        routing, last = frames[0].bytes, frames[-1]
        descriptor = self._descriptor_of(last, sum(map(self._wire_bytes, frames[1:])), len(frames) - 1)
        if descriptor is None:
            return
        session = self._sessions.by_routing.get(routing)
        if session is not None and not session.has(routing, descriptor):
            # another connection calls itself the same: the first one is gone
            self._end(session, "")
            session = None
        try:
            if len(frames) != 2:  # noqa: PLR2004  address and message
                raise MalformedMessage(f"{len(frames) - 1} frames instead of one")
            message = messages.TO_DAEMON_REMOTE.decode(last.buffer)
        except MalformedMessage as error:
            self._reject(routing, last, ErrorCode.MALFORMED_MESSAGE, str(error))
            return
        if session is None and isinstance(message, messages.Join):
            self._join(routing, last, message)
        elif session is None:
            self._greet(routing, last, message)
        elif routing != session.connections[0].routing:
            text = f"{type(message).__name__} is not expected on a further connection of a session"
            self._reject(routing, last, ErrorCode.UNEXPECTED_MESSAGE, text)
        else:
            self._understand(session, last, message)

    def _greet(self, routing: bytes, frame: zmq.Frame, message: Message) -> None:
        if not isinstance(message, messages.Greet):
            self._refuse(routing, messages.Refused(0, 0, ErrorCode.UNKNOWN_SESSION, "greet first"))
            return
        host = host_of(frame)
        if self._keys is None and not self._rate.admit(peer_network(host), monotonic()):
            self._reject(routing, frame, ErrorCode.TOO_OFTEN, self._rate.complaint(peer_network(host)))
            return
        refusal = doors.refused_version(message.version)
        if refusal is not None:
            self._refuse(routing, refusal)
            return
        key = self._key_of(frame)
        if self._keys is not None and key is None:
            self._reject(routing, frame, ErrorCode.KEY_REFUSED, "the key has been revoked")
            return
        number = next(self._daemon.session_numbers)
        limit_reached = self._sessions.limit_reached(key, host, self._limits) or self._belongs(
            number, _identity(key, host)
        )
        if limit_reached:
            self._reject(routing, frame, ErrorCode.NOT_ALLOWED, limit_reached)
            return
        self._end_former(frame)
        secret = token_bytes(doors.SECRET_BYTES)
        name = printable(message.name)
        session = RemoteSession(number, [], secret, host, name, message.pid, key, message.version)
        session.marks.append((monotonic(), 0))
        self._sessions.add(session)
        self._connect(session, routing, frame)
        self._log_session("remote trainer", session, key=key.name if key else "", name=name)
        ipc_address = self._ipc_address if message.host and message.host == host_id() else ""
        self._send(session, messages.Greeted(__version__, ipc_address, secret))
        failpoints.passing("daemon.remote.greeted")

    def _join(self, routing: bytes, frame: zmq.Frame, message: messages.Join) -> None:
        self._end_former(frame)
        session = self._sessions.by_secret.get(message.secret)
        most = self._limits.sessions_max
        if session is None or (self._keys is not None and self._key_of(frame) != session.key):
            self._reject(routing, frame, ErrorCode.UNKNOWN_SESSION, "no session with this key has this secret")
        elif len(session.connections) >= PARTS_MAX:
            self._reject(routing, frame, ErrorCode.NOT_ALLOWED, f"a session has up to {PARTS_MAX} connections")
        elif len(self._sessions.by_routing) - len(self._sessions.by_number) >= most:
            text = f"{most} further connections are there already; raise sessions_max in [daemon]"
            self._reject(routing, frame, ErrorCode.NOT_ALLOWED, text)
        else:
            self._send(session, messages.Joined(), self._connect(session, routing, frame))

    def _connect(self, session: RemoteSession, routing: bytes, frame: zmq.Frame) -> Connection:
        """A connection belongs to this session from now on."""
        connection = self._connection(routing, frame)
        self._sessions.connect(session, connection)
        return connection

    def _understand(self, session: RemoteSession, frame: zmq.Frame, message: Message) -> None:
        if isinstance(message, messages.Subscribe | messages.AskBad) and not session.may_read(message.stream):
            text = f"the key does not open stream {message.stream[:NAME_SHOWN_CHARACTERS_MAX]!r}"
            self._send(session, messages.Refused(message.request, 0, ErrorCode.KEY_REFUSED, text))
            return
        if isinstance(message, messages.AskStatus | messages.AskBad | messages.AskRemoval) and not session.may_ask():
            text = f"a trainer may ask {QUESTIONS_PER_TICK} questions in half a second"
            self._send(session, messages.Refused(message.request, 0, ErrorCode.TOO_OFTEN, text))
            return
        event = self._event_of(session.number, message)
        if event is None:
            text = f"{type(message).__name__} is not expected in an open session"
            self._reject(session.connections[0].routing, frame, ErrorCode.UNEXPECTED_MESSAGE, text)
        elif isinstance(message, messages.Unsubscribe):
            # Its batches go back when they are sent, whatever the trainer has seen of them.
            session.claims.pop(message.subscription, None)
            self._daemon.enqueue(SubscriptionEnded(session.number, message.subscription, NUMBER_MAX))
        else:
            if isinstance(event, SubscriptionAsked):
                session.claims[event.subscription] = OpenSubscription(event.request)
            elif isinstance(message, messages.Pull) and message.subscription in session.claims:
                session.claims[message.subscription].is_known = True
            self._daemon.enqueue(event)

    def _refuse(self, routing: bytes, refusal: messages.Refused) -> None:
        self._reply_without_session(routing, refusal.encode(OLDEST_VERSION))

    def _reject(self, routing: bytes, frame: zmq.Frame, error: ErrorCode, text: str) -> None:
        """Answer an invalid message with its error number, and log it at most once a minute."""
        host = host_of(frame)
        self._refuse(routing, messages.Refused(0, 0, error, text))
        if self._once_per_minute.allows("remote messages rejected", peer_site(host)):
            _log.warning("remote message rejected", error=int(error), reason=text, host=host)

    def _end(self, session: RemoteSession, fault: str) -> None:
        """The connection is gone, or not listened to any more."""
        if self._sessions.remove(session):
            self._daemon.tenants.pop(session.number, None)
            self._log_session("remote trainer gone", session, **({"reason": fault} if fault else {}))
            # What is being sent to it keeps its slots until ZeroMQ lets go.
            self._daemon.enqueue(SessionCutOff(session.number))

    def _log_session(self, text: str, session: RemoteSession, **facts: str) -> None:
        write = _log.info if self._lines_per_minute.allows("remote sessions", peer_site(session.host)) else _log.debug
        write(text, session=session.number, host=session.host, **facts)


def _identity(key: AcceptedKey | None, host: str) -> Identity:
    site = peer_site(host)
    return Identity(host=site) if key is None else Identity(key=key.name, public=key.public, host=site)
