"""The front end for trainers on this host: who is there, and what they say. DAEMON process.

    lifeline.sock   accept -> Hello -> Welcome (secret) [AskWritable] ... SlotShared ... end of file: the trainer is gone
    batchd.sock     Open (secret) ties a routing id to the session; from then on its messages speak for that session alone

What trainers say becomes events in the loop's queue; questions of people are answered at once. A routing id is an address
and proves nothing: without a session's secret, which went over the lifeline alone, no message has any effect.

Invariant: a session lives exactly as long as its lifeline.
"""

import errno
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import zmq

from batchd import __version__
from batchd.core.events import SessionCutOff, SessionEnded
from batchd.daemon.descriptors import Watch
from batchd.daemon.mailbox_memory import MailboxMemory
from batchd.daemon.peers import Peer, is_ours, may_connect, peer_of, why_not
from batchd.daemon.seldom import Seldom
from batchd.daemon.slot_memory import SlotMemory
from batchd.daemon.speech import (
    HANDSHAKE_TIMEOUT_MS,
    MESSAGE_BYTES_MAX,
    MESSAGES_AT_ONCE,
    UNREAD_MAX,
    Desk,
    event_of,
    printable,
    wrong_version,
)
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import MalformedMessage, Message
from batchd_wire.codes import ErrorCode
from batchd_wire.messages import (
    TO_DAEMON,
    TO_DAEMON_LIFELINE,
    AskBad,
    AskReload,
    AskStatus,
    AskWritable,
    Hello,
    MailboxShared,
    Open,
    Opened,
    Refused,
    SlotsGone,
    SlotShared,
    Welcome,
)

_log = structlog.get_logger()

SECRET_BYTES = 16
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)  # once, since joining flags is no small part of sending
BACKLOG = 256
_SHORT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Accepting fails with these until somebody gives something back; whoever waits to be accepted goes on waiting."""


@dataclass(slots=True, eq=False)
class Session:
    """One trainer, from its lifeline's first byte to its end. ``routing`` is set once it has opened the ZeroMQ side."""

    number: int
    lifeline: socket.socket
    pid: int | None
    user: int
    name: str = ""
    secret: bytes | None = None
    routing: bytes | None = None
    slots: set[int] = field(default_factory=set)
    """Slots whose memory it was handed."""
    mailboxes: set[int] = field(default_factory=set)
    """Streams whose mailbox it was handed."""
    wants_writable: bool = False
    """It has asked for slots that it can map writable."""
    is_cut_off: bool = False
    """It was sent away, and has not gone yet."""
    is_ours: bool = False
    """It is the daemon's own observer, which is no trainer."""


class Sessions:
    """Owns both sockets. ``writable_slots``: trainers that ask for it get slots that they can map writable."""

    def __init__(self, watch: Watch, desk: Desk, sessions_max: int, *, writable_slots: bool = False) -> None:
        self._watch = watch
        self._desk = desk
        self._enqueue = desk.enqueue
        self._sessions_max = sessions_max
        self._writable_slots = writable_slots
        self._context = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._by_number: dict[int, Session] = {}
        self._by_routing: dict[bytes, Session] = {}
        self._by_secret: dict[bytes, Session] = {}
        self._own = 0
        """Sessions that are no trainer's, and take no trainer's place."""
        self._seldom = Seldom()
        self._directory = -1
        """The runtime directory: whose mode and group say who may connect, also when its name is gone."""
        self._is_accepting = False

    def bind(self, lifeline_path: Path, zmq_path: Path) -> None:
        """Open both sockets. The caller holds the runtime directory's lock, so what lies there is left over and removed."""
        for path in (lifeline_path, zmq_path):
            path.unlink(missing_ok=True)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS),
            (zmq.SNDHWM, UNREAD_MAX),
        ):
            self.router.setsockopt(option, value)
        self.router.bind(f"ipc://{zmq_path}")
        self._directory = os.open(lifeline_path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._listener.bind(os.fspath(lifeline_path))
        self._listener.listen(BACKLOG)
        for path in (lifeline_path, zmq_path):
            self._open_to_group(path)
        self.tick()

    def tick(self) -> None:
        """Time has passed: accept again, where that had to stop."""
        if not self._is_accepting:
            self._is_accepting = True
            self._watch.add(self._listener.fileno(), self._accept)

    def _open_to_group(self, path: Path) -> None:
        """Let the directory's group connect; a socket has the daemon's own group at first."""
        try:
            group = os.fstat(self._directory).st_gid
            if path.stat().st_gid != group:
                os.chown(path, -1, group)
        except OSError as error:
            advice = (
                "put the daemon's user into the group of the runtime directory, or give the directory the setgid bit"
            )
            _log.warning(
                "socket is not open to the directory's group", path=str(path), reason=error.strerror, advice=advice
            )
        path.chmod(0o660)

    def close(self) -> None:
        """End every session and close both sockets; trainers see the end of their lifelines."""
        for session in list(self._by_number.values()):
            session.lifeline.close()
        self._listener.close()
        if self._directory >= 0:
            os.close(self._directory)
        self._context.destroy(linger=0)

    def get(self, number: int) -> Session | None:
        """The session, if its trainer still lives."""
        return self._by_number.get(number)

    def everybody(self) -> list[Session]:
        """All trainers that said who they are."""
        return [
            session
            for session in self._by_number.values()
            if session.secret is not None and not session.is_cut_off and not session.is_ours
        ]

    def adopt(self, lifeline: socket.socket, pid: int) -> None:
        """Begin a session over a lifeline that we made, for a process that we started."""
        self._own += 1
        self._begin(Session(self._desk.numbers.next_session(), lifeline, pid, os.geteuid(), is_ours=True))

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, number: int, message: Message) -> None:
        """Send over ZeroMQ. Nothing is sent to trainers that are gone; one that never reads is cut off."""
        session = self._by_number.get(number)
        if session is not None and session.routing is not None and not session.is_cut_off:
            self._send_to(session.routing, message, session)

    def share_slot(self, number: int, slot: int, memory: SlotMemory) -> None:
        """Hand a slot's memory to a trainer that has not got it yet, before the first handle that names it."""
        session = self._by_number.get(number)
        if session is None or session.is_cut_off or slot in session.slots:
            return
        session.slots.add(slot)
        message = SlotShared(slot, memory.slot_bytes(slot))
        writable = self._writable(session, slot, memory)
        if writable is None:
            self._hand_over(session, message, memory.readable(slot))
        else:
            self._hand_over(session, message, writable)
            os.close(writable)

    def withdraw_slots(self, slots: Sequence[int]) -> None:
        """Have trainers unmap slots whose memory is given back. Who does not read its lifeline is not held to it."""
        for session in self._by_number.values():
            known = session.slots.intersection(slots)
            session.slots -= known
            if known and not session.is_cut_off:
                with suppress(ChannelClosed, BlockingIOError):
                    send_message(session.lifeline, SlotsGone(sorted(known)))

    def withdraw_mailbox(self, stream: int) -> None:
        """Forget who has a mailbox that is given back."""
        for session in self._by_number.values():
            session.mailboxes.discard(stream)

    def limit(self, sessions_max: int) -> None:
        """So many trainers may be connected at once from now on; nobody is sent away."""
        self._sessions_max = sessions_max

    def _writable(self, session: Session, slot: int, memory: SlotMemory) -> int | None:
        """A descriptor to hand over and to close; None where the trainer shall get the one that only reads."""
        if not (session.wants_writable and self._writable_slots):
            return None
        try:
            return memory.writable_anew(slot)
        except OSError as error:
            if self._seldom.now("writable"):
                _log.warning("slot shared read-only, though writable_slots is set", reason=str(error))
            return None

    def share_mailbox(self, number: int, stream: int, mailbox: MailboxMemory) -> None:
        """Hand a producer a stream's mailbox, once. It is on this host, and may connect, so it may write."""
        session = self._by_number.get(number)
        if session is None or session.is_cut_off or stream in session.mailboxes:
            return
        session.mailboxes.add(stream)
        try:
            descriptor = mailbox.writable_anew()
        except OSError as error:
            self._cut_off(session, f"cannot be given a mailbox: {error.strerror}")
            return
        self._hand_over(session, MailboxShared(stream, mailbox.mailbox_bytes), descriptor)
        os.close(descriptor)

    def _hand_over(self, session: Session, message: Message, descriptor: int) -> None:
        try:
            send_message(session.lifeline, message, (descriptor,))
        except ChannelClosed:
            return
        except BlockingIOError:
            self._cut_off(session, "does not read its lifeline")

    def _send_to(self, routing: bytes, message: Message, session: Session | None) -> None:
        try:
            self.router.send(routing, _MORE)
            self.router.send(message.encode(), zmq.NOBLOCK)
        except zmq.Again:
            if session is not None:
                self._cut_off(session, f"left {UNREAD_MAX} messages unread")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    # --- the lifeline -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            lifeline, _address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if self._seldom.now("accept"):
                _log.error("cannot accept a trainer", reason=str(error))
            if error.errno in _SHORT_OF:  # he is still there, and would wake the loop at once, again and again
                self._watch.remove(self._listener.fileno())
                self._is_accepting = False
            return
        lifeline.setblocking(False)
        peer = peer_of(lifeline)
        directory = os.fstat(self._directory)
        if not may_connect(lifeline, peer, directory):
            self._turn_away(lifeline, peer, why_not(peer, directory))
        elif len(self._by_number) - self._own >= self._sessions_max:
            text = f"as many trainers are connected as may be ({self._sessions_max}); raise sessions_max in [daemon]"
            self._turn_away(lifeline, peer, text)
        else:
            self._begin(Session(self._desk.numbers.next_session(), lifeline, peer.pid, peer.user))

    def _begin(self, session: Session) -> None:
        """Hear it from now on. Paired with ``_end``."""
        self._by_number[session.number] = session
        self._watch.add(session.lifeline.fileno(), lambda: self._hear(session))

    def _turn_away(self, lifeline: socket.socket, peer: Peer, text: str) -> None:
        """Tell somebody why he is not let in."""
        if self._seldom.now(f"turned away {peer.user}"):
            _log.warning("trainer refused", pid=peer.pid, user=peer.user, reason=text)
        _say_last_word(lifeline, Refused(0, 0, ErrorCode.NOT_ALLOWED, text))
        lifeline.close()

    def _hear(self, session: Session) -> None:
        """The lifeline has something to read: a Hello once, then perhaps a wish for its slots, and then nothing but its end."""
        try:
            message, descriptors = receive_message(session.lifeline, TO_DAEMON_LIFELINE)
        except BlockingIOError:
            return
        except ChannelClosed:
            self._end(session)
            return
        except MalformedMessage as error:
            self._cut_off(session, f"talks nonsense: {error}")
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if session.is_cut_off:
            return
        if isinstance(message, AskWritable):
            self._hear_wish(session)
            return
        assert isinstance(message, Hello)
        if session.secret is not None:
            self._cut_off(session, "said Hello twice")
        elif message.version != PROTOCOL_VERSION:
            _say_last_word(session.lifeline, wrong_version(message.version))
            self._cut_off(session, f"speaks version {message.version} of the protocol, not {PROTOCOL_VERSION}")
        else:
            self._welcome(session, message.name)

    def _hear_wish(self, session: Session) -> None:
        if session.secret is None:
            self._cut_off(session, "asked for writable slots before it said Hello")
        elif session.wants_writable:
            self._cut_off(session, "asked for writable slots twice")
        elif session.routing is not None:
            self._cut_off(session, "asked for writable slots after it was open")
        else:
            session.wants_writable = True

    def _welcome(self, session: Session, name: str) -> None:
        session.name = printable(name)
        session.secret = secrets.token_bytes(SECRET_BYTES)
        self._by_secret[session.secret] = session
        try:
            send_message(session.lifeline, Welcome(PROTOCOL_VERSION, session.secret))
        except ChannelClosed:
            return  # its end of file is the next thing to hear

    def _cut_off(self, session: Session, fault: str) -> None:
        """Send a trainer away. It lives and may still read its slots: only the end of its lifeline ends its leases."""
        if session.is_cut_off:
            return
        if self._seldom.now(f"cut off {session.pid}"):
            _log.warning("trainer cut off", session=session.number, pid=session.pid, reason=f"it {fault}")
        self._forget_names(session)
        session.is_cut_off = True
        try:
            session.lifeline.shutdown(socket.SHUT_WR)
        except OSError:
            return  # its end of file is the next thing to hear
        self._enqueue(SessionCutOff(session.number))

    def _end(self, session: Session) -> None:
        """The kernel says that the trainer is gone. Paired with ``_begin``."""
        self._watch.remove(session.lifeline.fileno())
        session.lifeline.close()
        self._forget_names(session)
        del self._by_number[session.number]
        self._own -= session.is_ours
        self._enqueue(SessionEnded(session.number))

    def _forget_names(self, session: Session) -> None:
        if session.secret is not None:
            self._by_secret.pop(session.secret, None)
        if session.routing is not None:
            self._by_routing.pop(session.routing, None)

    # --- ZeroMQ -------------------------------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Read what trainers say, a bounded portion at a time; true where there may be more."""
        for _ in range(MESSAGES_AT_ONCE):
            try:
                frames = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._take(frames)
        return True

    def _take(self, frames: list[bytes]) -> None:
        routing = frames[0]
        session = self._by_routing.get(routing)
        try:
            if len(frames) != 2:  # noqa: PLR2004  address and message
                raise MalformedMessage(f"{len(frames) - 1} frames instead of one")
            message = TO_DAEMON.decode(frames[1])
        except MalformedMessage as error:
            self._reject(routing, session, ErrorCode.MALFORMED_MESSAGE, str(error))
            return
        if session is None:
            self._open(routing, message)
        else:
            self._understand(session, message)

    def _open(self, routing: bytes, message: Message) -> None:
        if not isinstance(message, Open):
            # A trainer's last words may come behind the end of its lifeline, so this is no news.
            self._send_to(routing, Refused(0, 0, ErrorCode.UNKNOWN_SESSION, "open the session first"), None)
            return
        if message.version != PROTOCOL_VERSION:
            self._send_to(routing, wrong_version(message.version), None)
            return
        if message.secret in self._by_secret:
            self._hear(self._by_secret[message.secret])  # what it said on its lifeline before this
        session = self._by_secret.get(message.secret)
        if session is None or session.routing is not None:
            self._reject(routing, None, ErrorCode.UNKNOWN_SESSION, "no session has this secret, or it is open already")
            return
        session.routing = routing
        self._by_routing[routing] = session
        self._send_to(routing, Opened(__version__), session)

    def _understand(self, session: Session, message: Message) -> None:
        event = event_of(session.number, message, self._desk.numbers)
        if event is not None:
            self._enqueue(event)
        elif isinstance(message, AskStatus | AskBad):
            self.send(session.number, self._desk.answer(message))
        elif isinstance(message, AskReload):
            self._ask_reload(session, message)
        else:
            text = f"{type(message).__name__} is not expected in an open session"
            self._reject(b"", session, ErrorCode.UNEXPECTED_MESSAGE, text)

    def _ask_reload(self, session: Session, message: AskReload) -> None:
        """Who may read data may not say what is served: only root and our own user may."""
        if is_ours(session.user):
            self._desk.reload(session.number, message.request)
            return
        text = f"only root and the daemon's own user (number {os.geteuid()}) may have it read its configuration again"
        self.send(session.number, Refused(message.request, 0, ErrorCode.NOT_ALLOWED, text))

    def _reject(self, routing: bytes, session: Session | None, error: ErrorCode, text: str) -> None:
        """Answer nonsense with its number; say so in the log, but not for each."""
        if session is not None:
            routing = session.routing or routing
        self._send_to(routing, Refused(0, 0, error, text), session)
        if self._seldom.now(f"reject {error}"):
            _log.warning("message rejected", error=int(error), reason=text, pid=session.pid if session else None)


def _say_last_word(lifeline: socket.socket, message: Message) -> None:
    """Tell somebody why he is not let in; if he does not listen, it is his loss."""
    try:
        send_message(lifeline, message)
    except (ChannelClosed, BlockingIOError):
        return
