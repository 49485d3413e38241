"""The door for trainers on this host: their sessions and messages. DAEMON process.

    lifeline.sock   accept -> Hello -> Welcome (secret) [AskWritable] ... SlotShared ... end of file
    batchd.sock     Open (secret) ties a connection to the session; its messages are the session's

A connection to `batchd.sock` proves nothing: without a session's secret, which is sent over the
lifeline only, no message has any effect.

Invariant: a session lives exactly as long as its lifeline: end of file means that the trainer is
gone.
"""

import os
import socket
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_bytes

import structlog

from batchd.core.actions import GrantLease
from batchd.core.events import SessionCutOff, SessionEnded
from batchd.daemon.doors import SECRET_BYTES, DaemonSide, Door, Peer, encode_answer, refused_version
from batchd.daemon.identity import Identity
from batchd.daemon.local.listener import (
    Listener,
    PeerCredentials,
    PendingConnections,
    credentials_of,
    groups_of,
    is_ours,
    open_to_group,
    why_refused,
)
from batchd.daemon.local.zmtp import UNSENT_BYTES_MAX, LocalConnections, ZmtpConnection
from batchd.daemon.runtime import unusable
from batchd.runtime import __version__, failpoints
from batchd.runtime.descriptors import DescriptorSent, PeerSockets
from batchd.runtime.limits import UNREAD_MAX, SessionLimits, printable
from batchd.runtime.slots import MailboxMemory
from batchd_wire import OLDEST_VERSION, messages
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import MalformedMessage, Message
from batchd_wire.codes import ErrorCode
from batchd_wire.fields import SlotLayout
from batchd_wire.status import LocalCounts, TrainerStatistics

_log = structlog.get_logger()

MESSAGES_AT_ONCE = 64
HANDLES_AT_ONCE = 64
"""Handles of one message."""


@dataclass(slots=True, eq=False)
class Session:
    """One trainer, until its lifeline ends. ``connection``: its ZeroMQ side, once it is open."""

    number: int
    lifeline: socket.socket
    pid: int | None
    user: int
    name: str = ""
    secret: bytes | None = None
    connection: ZmtpConnection | None = None
    slots: set[int] = field(default_factory=set)
    """Slots whose memory it was handed."""
    mailboxes: set[int] = field(default_factory=set)
    """Streams whose mailbox it was handed."""
    takes_several: bool = False
    """The trainer understands ``Handles``."""
    wants_writable: bool = False
    """The trainer has asked for slots that it can map writable."""
    is_disconnected: bool = False
    """The daemon has disconnected the trainer, whose lifeline has not ended yet."""
    version: int = OLDEST_VERSION
    is_ours: bool = False
    """The session of the daemon's own observer, which is no trainer."""


class LocalDoor(Door):
    """Owns both sockets. ``writable_slots``: trainers may ask for slots to map writable."""

    def __init__(self, daemon: DaemonSide, limits: SessionLimits, *, writable_slots: bool = False) -> None:
        super().__init__(daemon, limits)
        self._writable_slots = writable_slots
        poller, peers = daemon.poller, PeerSockets()
        self._peers = peers
        self._lifelines = Listener(poller, socket.SOCK_SEQPACKET, self._admit_lifeline, self._lifeline_needs, peers)
        self._zeromq = Listener(poller, socket.SOCK_STREAM, self._admit_connection, lambda: 1, peers)
        self._connections = LocalConnections(poller, self._connection_gone, peers)
        self._pending_sessions: PendingConnections[Session] = PendingConnections()
        """Sessions that have not opened the ZeroMQ side."""
        self._pending_connections: PendingConnections[ZmtpConnection] = PendingConnections()
        """Connections to ZeroMQ that no session has opened."""
        self._by_number: dict[int, Session] = {}
        self._by_connection: dict[ZmtpConnection, Session] = {}
        self._by_secret: dict[bytes, Session] = {}
        self._handles: dict[Session, list[list[int]]] = {}
        """The fields of the handles that were granted in this round."""
        self._directory = -1
        """The runtime directory, whose mode and group decide access, even after its removal."""
        self._is_found = True
        """The runtime directory has our sockets."""
        self.closed = 0
        """Connections that were closed because no session came of them."""

    def bind(self, lifeline_path: Path, zmq_path: Path) -> None:
        """Open both sockets. The caller has the directory's lock, so existing files are left-overs.

        Raises ``BatchdError`` if the directory cannot be used, ``OSError`` for lack of resources.
        """
        listeners = ((zmq_path, self._zeromq), (lifeline_path, self._lifelines))
        try:
            for path, listener in listeners:
                path.unlink(missing_ok=True)
                listener.open(path)
        except OSError as error:
            raise unusable(lifeline_path.parent, error) from None
        self._directory = os.open(lifeline_path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for path, listener in listeners:
            open_to_group(path, self._directory)
            listener.begin()

    def tick(self) -> None:
        """Close connections that became no session, free descriptors, and resume accepting."""
        self._close_pending(self._pending_sessions.tick(), self._pending_connections.tick(), "no session came of it")
        if self._lifelines.is_short or self._zeromq.is_short:
            silent = [session for session in self._pending_sessions.blocking() if session.secret is None]
            self._close_pending(silent, self._pending_connections.blocking(), "others wait for descriptors")
        self._lifelines.tick()
        self._zeromq.tick()
        is_found = self._lifelines.is_found and self._zeromq.is_found
        if self._is_found and not is_found:
            advice = "restart the daemon; trainers that are connected go on until then"
            reason = "new trainers cannot connect"
            _log.error("sockets are gone from the runtime directory", reason=reason, advice=advice)
        self._is_found = is_found

    def counts(self) -> LocalCounts:
        """Number of connections of both kinds, for ``batchd status``."""
        pending = len(self._pending_sessions) + len(self._pending_connections)
        return LocalCounts(len(self._by_number) + len(self._connections), pending, self.closed)

    def close(self) -> None:
        """End every session and close both sockets; trainers see the end of their lifelines."""
        for session in list(self._by_number.values()):
            self._peers.close(session.lifeline)
        self._connections.close_all()
        self._lifelines.close()
        self._zeromq.close()
        if self._directory >= 0:
            os.close(self._directory)

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def peer(self, number: int) -> Peer:
        """The session's trainer, for the log."""
        session = self._by_number[number]
        return Peer(session.name, session.pid, f"user {session.user}")

    def identity(self, session: int) -> Identity:
        """The user at the other end and its groups, as they were when it connected."""
        lifeline = self._by_number[session].lifeline
        credentials = _pid, user, group = credentials_of(lifeline)
        others = groups_of(lifeline, credentials) - {group}
        return Identity(user, (group, *sorted(others)), is_operator=is_ours(user))

    def node(self, session: int) -> int | None:
        """The memory node of the CPU that the trainer ran on last."""
        return self._daemon.nodes.node_of(self._by_number[session].pid)

    def trainers(self) -> list[Session]:
        """Trainers that have sent ``Hello`` and were not disconnected."""
        return [session for session in self._welcomed() if not session.is_disconnected]

    def statistics(self, now: float) -> list[TrainerStatistics]:  # noqa: ARG002  no rates here
        """All trainers, for ``batchd status``."""
        return [
            TrainerStatistics(session.number, session.name, session.pid, session.user, "shared memory")
            for session in self.trainers()
        ]

    def adopt(self, lifeline: socket.socket, pid: int) -> None:
        """Begin a session over a lifeline that we made, for a process that we started."""
        self._peers.refuse_descriptors(lifeline)
        self._begin(Session(next(self._daemon.session_numbers), lifeline, pid, os.geteuid(), is_ours=True))

    # --- sending ----------------------------------------------------------------------------------

    def send(self, number: int, message: Message) -> None:
        """Send over ZeroMQ, unless the trainer is gone. One that never reads is disconnected."""
        session = self._connected(number)
        if session is not None and session.connection is not None:
            self._send_handles(session)
            self._send_to(session.connection, message, session)

    def deliver(self, grant: GrantLease, layout: SlotLayout) -> None:  # noqa: ARG002  its trainer knows it
        """Send the handle of a lease, and before that the memory of a new slot."""
        session = self._connected(grant.session)
        if session is not None and grant.slot not in session.slots:
            self._share_slot(session, grant.slot)
        if session is not None and session.takes_several:
            handles = self._handles.setdefault(session, [])
            handles.append(list(messages.Handle.values_of(grant)))
            if len(handles) == HANDLES_AT_ONCE:
                self._send_handles(session)
        else:
            self.send(grant.session, messages.Handle.filled_from(grant))
        failpoints.passing("daemon.handle.sent")

    def _send_handles(self, session: Session) -> None:
        handles = self._handles.pop(session, None)
        if handles is not None and session.connection is not None and not session.is_disconnected:
            self._send_to(session.connection, messages.Handles(handles), session)

    def _connected(self, number: int) -> Session | None:
        session = self._by_number.get(number)
        return None if session is None or session.is_disconnected else session

    def _share_slot(self, session: Session, slot: int) -> None:
        session.slots.add(slot)
        memory, writable = self._daemon.memory, None
        if session.wants_writable and self._writable_slots:
            try:
                writable = memory.open_writable(slot)
            except OSError as error:
                if self._once_per_minute.allows("writable"):
                    _log.warning("slot shared read-only, though writable_slots is set", reason=str(error))
        message = messages.SlotShared(slot, memory.slot_bytes(slot))
        self._hand_over(session, message, memory.readable(slot) if writable is None else writable)
        if writable is not None:
            os.close(writable)

    def withdraw_slots(self, slots: Sequence[int]) -> None:
        """Ask trainers to unmap freed slots. One that does not read its lifeline may keep them."""
        for session in self._by_number.values():
            known = session.slots.intersection(slots)
            session.slots -= known
            if known and not session.is_disconnected:
                with suppress(ChannelClosed, BlockingIOError):
                    send_message(session.lifeline, messages.SlotsGone(sorted(known)), version=session.version)

    def share_mailbox(self, number: int, stream: int, mailbox: MailboxMemory) -> None:
        """Hand a producer a stream's mailbox, once. It may connect, so it may write."""
        session = self._connected(number)
        if session is None or stream in session.mailboxes:
            return
        session.mailboxes.add(stream)
        try:
            descriptor = mailbox.open_writable()
        except OSError as error:
            self._disconnect(session, f"cannot be given a mailbox: {error.strerror}")
            return
        self._hand_over(session, messages.MailboxShared(stream, mailbox.mailbox_bytes), descriptor)
        os.close(descriptor)

    def _hand_over(self, session: Session, message: Message, descriptor: int) -> None:
        try:
            send_message(session.lifeline, message, (descriptor,), session.version)
        except ChannelClosed:
            return
        except BlockingIOError:
            self._disconnect(session, "does not read its lifeline")

    def _send_to(self, connection: ZmtpConnection, message: Message, session: Session | None) -> None:
        version = OLDEST_VERSION if session is None else session.version
        if not connection.send(encode_answer(message, version)) and session is not None:
            self._disconnect(session, f"left {UNREAD_MAX} messages or {UNSENT_BYTES_MAX >> 20} MiB unread")

    # --- the lifeline -----------------------------------------------------------------------------

    def _lifeline_needs(self) -> int:
        """Descriptors for another lifeline, its connection, and those of all pending sessions."""
        return 2 + len(self._pending_sessions)

    def _admit_lifeline(self, lifeline: socket.socket) -> None:
        credentials = credentials_of(lifeline)
        reason = why_refused(lifeline, credentials, os.fstat(self._directory))
        if reason is not None:
            self._refuse(lifeline, credentials, ErrorCode.NOT_ALLOWED, reason)
            self._peers.close(lifeline)
            return
        session = Session(next(self._daemon.session_numbers), lifeline, credentials.pid, credentials.user)
        self._begin(session)
        self._pending_sessions.add(session, credentials.user)
        self._limit_pending()

    def _limit_pending(self) -> None:
        most = self._limits.pending_max
        silent, unknown = self._pending_sessions.excess(most), self._pending_connections.excess(most)
        self._close_pending(silent, unknown, f"more than {most} connections that are no sessions")

    def _close_pending(self, silent: Sequence[Session], unknown: Sequence[ZmtpConnection], reason: str) -> None:
        if not silent and not unknown:
            return
        self.closed += len(silent) + len(unknown)
        for session in silent:
            self._end(session)
        self._connections.close_all(unknown)
        if self._once_per_minute.allows("closed"):
            _log.warning("local connections closed", reason=reason, closed=self.closed)

    def _begin(self, session: Session) -> None:
        """Hear it from now on. Paired with ``_end``."""
        self._daemon.poller.watch(session.lifeline.fileno(), lambda: self._read_lifeline(session))
        self._by_number[session.number] = session

    def _refuse(self, lifeline: socket.socket, credentials: PeerCredentials, error: ErrorCode, text: str) -> None:
        """Send a peer the reason of its refusal, and log it."""
        if self._once_per_minute.allows("trainers refused", f"user {credentials.user}"):
            _log.warning("trainer refused", pid=credentials.pid, user=credentials.user, reason=text)
        _send_last(lifeline, messages.Refused(0, 0, error, text))

    def _receive_lifeline(self, session: Session) -> Message | None:
        """Return the next message; None if there is none, or the session has ended."""
        try:
            if self._peers.may_carry:
                self._peers.look(session.lifeline)
            return receive_message(session.lifeline, messages.TO_DAEMON_LIFELINE)[0]
        except BlockingIOError:
            return None
        except ChannelClosed:
            self._end(session)
        except DescriptorSent as error:
            self._close_pending([session], [], f"its peer sent what none may send: {error}")
        except MalformedMessage as error:
            self._disconnect(session, f"sends invalid messages: {error}")
        return None

    def _read_lifeline(self, session: Session) -> None:
        """Read the lifeline: first a ``Hello``, then perhaps ``AskWritable``, then only its end."""
        message = self._receive_lifeline(session)
        if message is None or session.is_disconnected:
            return
        if isinstance(message, messages.AskWritable):
            self._allow_writable(session)
            return
        assert isinstance(message, messages.Hello)
        refusal = refused_version(message.version)
        if session.secret is not None:
            self._disconnect(session, "said Hello twice")
        elif refusal is not None:
            _send_last(session.lifeline, refusal)
            self._disconnect(session, f"speaks version {message.version} of the protocol")
        elif not session.is_ours and len(self._welcomed()) >= self._limits.sessions_max:
            most = self._limits.sessions_max
            text = f"as many trainers are connected as may be ({most}); raise sessions_max in [daemon]"
            self._refuse(session.lifeline, credentials_of(session.lifeline), ErrorCode.TOO_MANY_SESSIONS, text)
            self._end(session)
        elif limit_reached := "" if session.is_ours else self._belongs(session.number, self.identity(session.number)):
            self._refuse(session.lifeline, credentials_of(session.lifeline), ErrorCode.TOO_MANY_SESSIONS, limit_reached)
            self._end(session)
        else:
            session.name, session.version = printable(message.name), message.version
            session.secret = token_bytes(SECRET_BYTES)
            self._by_secret[session.secret] = session
            with suppress(ChannelClosed):  # its end of file is the next event
                send_message(
                    session.lifeline, messages.Welcome(session.version, session.secret), version=session.version
                )

    def _allow_writable(self, session: Session) -> None:
        if session.secret is None:
            self._disconnect(session, "asked for writable slots before it said Hello")
        elif session.wants_writable:
            self._disconnect(session, "asked for writable slots twice")
        elif session.connection is not None:
            self._disconnect(session, "asked for writable slots after it was open")
        else:
            session.wants_writable = True

    def _welcomed(self) -> list[Session]:
        """Trainers that have sent ``Hello``, and are not gone."""
        return [session for session in self._by_number.values() if session.secret is not None and not session.is_ours]

    def _disconnect(self, session: Session, fault: str) -> None:
        """Disconnect a trainer. Its leases last until its lifeline ends: it may still read."""
        if session.is_disconnected:
            return
        if self._once_per_minute.allows("trainers disconnected", f"user {session.user}"):
            _log.warning("trainer disconnected", session=session.number, pid=session.pid, reason=f"it {fault}")
        self._forget_names(session)
        session.is_disconnected = True
        try:
            session.lifeline.shutdown(socket.SHUT_WR)
        except OSError:
            return  # its end of file is the next event
        self._daemon.enqueue(SessionCutOff(session.number))

    def _end(self, session: Session) -> None:
        """The kernel says that the trainer is gone. Paired with ``_begin``."""
        self._daemon.poller.unwatch(session.lifeline.fileno())
        self._peers.close(session.lifeline)
        self._forget_names(session)
        self._pending_sessions.remove(session)
        del self._by_number[session.number]
        self._daemon.tenants.pop(session.number, None)
        self._daemon.enqueue(SessionEnded(session.number))

    def _forget_names(self, session: Session) -> None:
        self._handles.pop(session, None)
        if session.secret is not None:
            self._by_secret.pop(session.secret, None)
        if session.connection is not None and self._by_connection.pop(session.connection, None) is not None:
            self._pending_connections.add(session.connection, session.user)

    # --- ZeroMQ -----------------------------------------------------------------------------------

    def receive(
        self,
        ready: Container[object],  # noqa: ARG002  ``Poller`` has its descriptors
        is_over: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Read what trainers say, a bounded portion at a time; true where there may be more."""
        for _ in range(MESSAGES_AT_ONCE):
            message = self._connections.next_message()
            if message is None:
                return False
            self._take(*message)
            if is_over():
                break
        return True

    def flush(self) -> None:
        """See ``Door``."""
        for session in list(self._handles):
            self._send_handles(session)
        self._connections.flush()

    def _admit_connection(self, accepted: socket.socket) -> None:
        user = credentials_of(accepted).user
        self._pending_connections.add(self._connections.admit(accepted), user)
        self._limit_pending()

    def _connection_gone(self, connection: ZmtpConnection) -> None:
        self._pending_connections.remove(connection)
        self._by_connection.pop(connection, None)

    def _take(self, connection: ZmtpConnection, frames: list[bytes]) -> None:
        session = self._by_connection.get(connection)
        try:
            if len(frames) != 1:
                raise MalformedMessage(f"{len(frames)} frames instead of one")
            message = messages.TO_DAEMON.decode(frames[0])
        except MalformedMessage as error:
            self._reject(connection, session, ErrorCode.MALFORMED_MESSAGE, str(error))
            return
        if session is None:
            self._open(connection, message)
        else:
            self._understand(session, message)

    def _open(self, connection: ZmtpConnection, message: Message) -> None:
        if not isinstance(message, messages.Open):
            # Not logged: a trainer's last message may arrive after the end of its lifeline.
            self._send_to(connection, messages.Refused(0, 0, ErrorCode.UNKNOWN_SESSION, "open the session first"), None)
            return
        refusal = refused_version(message.version)
        if refusal is not None:
            self._send_to(connection, refusal, None)
            return
        if message.secret in self._by_secret:
            # what it said on its lifeline before this
            self._read_lifeline(self._by_secret[message.secret])
        session = self._by_secret.get(message.secret)
        if session is None or session.connection is not None:
            text = "no session has this secret, or it is open already"
            self._reject(connection, None, ErrorCode.UNKNOWN_SESSION, text)
            return
        session.connection = connection
        self._by_connection[connection] = session
        self._pending_sessions.remove(session)
        self._pending_connections.remove(connection)
        self._send_to(connection, messages.Opened(__version__), session)

    def _understand(self, session: Session, message: Message) -> None:
        event = self._event_of(session.number, message)
        if isinstance(message, messages.Subscribe):
            session.takes_several = message.takes_several
        # a reader may not say what is served, nor see the rest of the configuration
        is_reload = isinstance(message, messages.AskReload)
        is_owners = is_reload or (isinstance(message, messages.AskStatus) and message.card_of is not None)
        if isinstance(message, messages.AskReload | messages.AskStatus) and is_owners and not is_ours(session.user):
            owner = f"root and the daemon's own user (number {os.geteuid()})"
            use = "have it read its configuration again" if is_reload else "see its configuration"
            text = f"only {owner} may {use}"
            self.send(session.number, messages.Refused(message.request, 0, ErrorCode.NOT_ALLOWED, text))
        elif event is not None:
            self._daemon.enqueue(event)
        else:
            text = f"{type(message).__name__} is not expected in an open session"
            self._reject(session.connection, session, ErrorCode.UNEXPECTED_MESSAGE, text)

    def _reject(self, connection: ZmtpConnection | None, session: Session | None, error: ErrorCode, text: str) -> None:
        """Answer an invalid message with its error number, and log it at most once a minute."""
        if connection is not None:
            self._send_to(connection, messages.Refused(0, 0, error, text), session)
        if self._once_per_minute.allows("messages rejected", str(int(error))):
            _log.warning("message rejected", error=int(error), reason=text, pid=session.pid if session else None)


def _send_last(lifeline: socket.socket, message: Message) -> None:
    with suppress(ChannelClosed, BlockingIOError):  # a peer that does not read it loses it
        send_message(lifeline, message, version=OLDEST_VERSION)
