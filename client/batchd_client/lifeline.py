"""The link that proves that trainer and daemon live: lifeline or TCP connection. In the trainer.

The lifeline is an AF_UNIX socket:

    connect -> Hello -> Welcome (secret) -> SlotShared + descriptor, for each slot -> end of file
                        (AskWritable, to register slots with a device)

Invariant: the socket stays open while the session *or any lease of it* lives, because its end tells
the daemon that this process reads no slot any more. So a connection may be closed or replaced while
arrays over its slots are in use.

From another host, ``RemoteLink`` watches the TCP connection instead.
"""

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from weakref import finalize, ref

import zmq

from batchd_client.errors import ConnectTimeout, DaemonUnavailable, ProtocolError, error_for_code
from batchd_client.memory import Mailbox, SlotMemory
from batchd_client.sockets import Socket, Sockets, Turn
from batchd_wire import PROTOCOL_VERSION, messages
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import MESSAGE_BYTES_MAX, MalformedMessage
from batchd_wire.codes import ErrorCode
from batchd_wire.keys import ConnectionKey
from batchd_wire.runtime import TcpAddress
from batchd_wire.tcp import CONNECTING_OPTIONS, CURVE_BYTES, PIECE_BYTES, unpack_monitor_event

SECRET_BYTES = 16
LOOK_S = 0.5
"""Interval at which a wait for the daemon's first answer is looked at, to report it."""
PUT_OFF_STATUS = 500
"""Status of the daemon's authenticator if a retry may help (RFC 27)."""

_ENDINGS: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "the connection to the daemon was lost",
    zmq.EVENT_CLOSED: "no connection could be made",
    zmq.EVENT_CONNECT_RETRIED: "no connection could be made",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the daemon does not accept the key",
}


class SessionLost(Exception):  # noqa: N818  news that never leaves this package: the connection answers it by reconnecting
    """The daemon went away, or no longer knows the session."""


class DaemonBusy(DaemonUnavailable):
    """The daemon exists, but cannot accept a session right now.

    It is draining, or trainers connect faster than it accepts them; try again in a moment.
    """


class Lifeline:
    """The open lifeline of one session. Leases hold it; it closes with its last reference.

    Not by ``__del__``: in a reference cycle the socket would be finalized first, with a warning
    that it was not closed.
    """

    __slots__ = ("__weakref__", "_end", "_socket", "descriptor", "path")

    def __init__(self, path: Path, connected: socket.socket, turn: Turn) -> None:
        self._socket = connected
        self.path = path
        self.descriptor = connected.fileno()
        self._end = finalize(self, _close_at_last, connected, ref(self), turn)

    def wait(self, deadline: float) -> bool:
        """Wait for something to receive; False once ``deadline`` has passed."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def receive_shared(self, slots: dict[int, SlotMemory], mailboxes: dict[int, Mailbox]) -> None:
        """Map and unmap memory as announced. Raises ``SessionLost`` and ``ProtocolError``."""
        while True:
            try:
                message, descriptors = receive_message(self._socket, messages.TO_TRAINER_LIFELINE)
            except BlockingIOError:
                return
            except ChannelClosed:
                raise SessionLost("the daemon is gone: end of file on the lifeline") from None
            except MalformedMessage as error:
                raise ProtocolError(f"on the lifeline: {error}") from None
            match message, descriptors:
                case messages.SlotShared(), [descriptor]:
                    slots[message.slot] = SlotMemory(descriptor, message.slot_bytes)
                case messages.SlotsGone(), []:
                    for slot in message.slots:
                        slots.pop(slot, None)
                case messages.MailboxShared(), [descriptor]:
                    mailboxes[message.stream] = Mailbox(descriptor, message.mailbox_bytes)
                case _:
                    _close(descriptors)
                    raise ProtocolError(
                        f"on the lifeline: {type(message).__name__} with {len(descriptors)} descriptors"
                    )

    def introduce(self, name: str, deadline: float, look: Callable[[], None] | None) -> bytes:
        """Send ``Hello`` and return the secret that opens the session.

        Raises ``DaemonBusy`` if a retry may help, ``ConnectTimeout`` for a silent daemon,
        ``ProtocolError``, or the error of the daemon's refusal.
        """
        try:
            # If the daemon has already refused us, its last message has the reason.
            with suppress(ChannelClosed):
                send_message(self._socket, messages.Hello(PROTOCOL_VERSION, name, os.getpid()))
            while not self.wait(min(deadline, time.monotonic() + LOOK_S)) and time.monotonic() < deadline:
                if look is not None:
                    look()
            if not self.wait(0.0):
                raise ConnectTimeout(f"{self.path} took the connection, but the daemon did not say a word")
            message, descriptors = receive_message(self._socket, messages.TO_TRAINER_LIFELINE)
        except ChannelClosed:
            raise DaemonBusy(f"the daemon closed {self.path} without a word") from None
        except MalformedMessage as error:
            raise ProtocolError(f"on {self.path}: {error}") from None
        _close(descriptors)
        match message:
            case messages.Welcome(secret=secret) if len(secret) == SECRET_BYTES:
                return secret
            case messages.Refused(error=ErrorCode.DRAINING, text=text):
                raise DaemonBusy(f"the daemon is shutting down: {text}")
            case messages.Refused(error=code, text=text):
                raise error_for_code(code, text)
            case _:
                raise ProtocolError(f"{type(message).__name__} instead of a welcome on {self.path}")

    def close(self) -> None:
        """Close the socket: no lease needs it any more. Closing twice does nothing."""
        self._socket.close()
        self._end.detach()


def open_lifeline(  # noqa: PLR0913  facts of one session
    path: Path,
    deadline: float,
    look: Callable[[], None] | None,
    turn: Turn,
    *,
    name: str,
    writable_slots: bool,
    given: socket.socket | None,
) -> tuple[Lifeline, bytes]:
    """Connect, or use the socket ``given`` by the daemon; return the lifeline and the secret.

    Raises ``OSError`` if no process listens, ``DaemonBusy`` if a retry may help, ``ConnectTimeout``
    for a silent daemon, ``PermissionDenied`` or ``VersionMismatch`` if it refuses, and
    ``ProtocolError``.
    """
    connecting = given or socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connecting.setblocking(False)
    lifeline = Lifeline(path, connecting, turn)
    secret = None
    try:
        if given is None:
            connecting.connect(os.fspath(path))
        secret = lifeline.introduce(name, deadline, look)
        if writable_slots:
            send_message(connecting, messages.AskWritable())
    except BlockingIOError:
        raise DaemonBusy(f"{path} has more trainers waiting to connect than the kernel queues") from None
    except ChannelClosed:
        raise DaemonBusy(f"the daemon closed {path} after its welcome") from None
    finally:
        if secret is None:
            lifeline.close()
    return lifeline, secret


def _close_at_last(connected: socket.socket, user: ref[Lifeline], turn: Turn) -> None:
    """Close at the last reference or at the program's end, unless a thread waits for a batch."""
    if user() is None or turn.end():
        connected.close()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class RemoteLink:
    """Life of one TCP connection, from ZeroMQ's monitor; in place of a lifeline."""

    def __init__(self, sockets: Sockets, socket: Socket, address: TcpAddress) -> None:
        self._socket = socket
        self._monitor = sockets.monitor(socket, sum(_ENDINGS))
        self.path = address.endpoint
        self.descriptor = int(self._monitor.getsockopt(zmq.FD))
        self.is_key_refused = False
        self.is_put_off = False
        """True if the daemon refuses the connection for reasons that may pass."""

    def receive_shared(self, _slots: dict[int, SlotMemory], _mailboxes: dict[int, Mailbox]) -> None:
        """Receives no memory. Raises ``SessionLost`` if the connection has ended."""
        try:
            event, value = unpack_monitor_event(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            return
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.is_put_off = value == PUT_OFF_STATUS
            self.is_key_refused = not self.is_put_off
        raise SessionLost(_ENDINGS.get(event, "the connection ended"))

    def close(self) -> None:
        """Close the monitor, before the connection's own socket. Closing twice does nothing."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)


def remote_socket(sockets: Sockets, key: ConnectionKey | None) -> Socket:
    """Make a socket that connects once: ``Connection`` decides about retries."""
    socket = sockets.open(zmq.DEALER)
    for name, value in CONNECTING_OPTIONS.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.setsockopt(zmq.MAXMSGSIZE, max(MESSAGE_BYTES_MAX, PIECE_BYTES) + CURVE_BYTES)
    socket.setsockopt(zmq.RCVHWM, 0)  # what may come is bounded by the window
    if key is not None:
        socket.curve_serverkey = key.daemon.encode()
        socket.curve_publickey = key.public.encode()
        socket.curve_secretkey = key.secret.encode()
    return socket
