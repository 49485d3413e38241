"""Local ZeroMQ connections: ZMTP 3 as a ROUTER speaks it, without encryption. DAEMON process.

    both      greeting (64 bytes)  READY  message ...
    message   frame ...            each frame but the last with MORE
    frame     flags (1) | length (1, or 8 with LONG) | body

Trainers use libzmq, and so does the daemon over TCP, but not here. libzmq's listener on a Unix
socket (libzmq 4.3.5) accepts in a thread of its own, as fast as peers connect, and aborts the
process if accept(2) fails with EMFILE, ENOBUFS or ENOMEM. No guard beside that thread can keep a
descriptor free in time. Here the loop accepts, so it decides how many connections exist.

Source: RFC 23 and RFC 37 of rfc.zeromq.org (ZMTP 3.0 and 3.1).

Invariant: of a peer's data at most one message and ``READ_BYTES`` are in memory; the rest waits in
the kernel.
"""

import errno
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import structlog

from batchd.runtime.descriptors import PeerSockets
from batchd.runtime.limits import MESSAGE_BYTES_MAX, UNREAD_MAX
from batchd.runtime.poller import Poller

_log = structlog.get_logger()

READ_BYTES = 16 * 1024
WRITE_BYTES = 64 * 1024
"""Maximum number of bytes of small messages that are written together."""
FRAMES_MAX = 16
"""Frames of one message. A trainer sends one; a few more are answered with an error."""
COMMANDS_MAX = 16
"""Commands in one portion. libzmq sends one at the beginning, and a PING now and then."""
UNSENT_BYTES_MAX = 16 << 20
"""Bytes that the peer may leave unread; a correct peer stays far below."""
MORE, LONG, COMMAND = 1, 2, 4
SHORT_BYTES_MAX = 255
_SHORT_HEADER_BYTES = 2
_LONG_HEADER_BYTES = 9
_GREETING_BYTES = 64
_SIGNATURE_START, _SIGNATURE_END = 0xFF, 0x7F
_MAJOR_AT, _SIGNATURE_END_AT, _MECHANISM = 10, 9, slice(12, 32)
_MAJOR, _MINOR = 3, 1
_NULL = b"NULL".ljust(20, b"\0")
_PING, _PONG, _READY = b"\x04PING", b"\x04PONG", b"\x05READY"
_PING_TTL_BYTES = 2
_NO_MEMORY = {errno.ENOBUFS, errno.ENOMEM}


def _command(body: bytes) -> bytes:
    return bytes((COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4) + value


GREETING = bytes((_SIGNATURE_START, *bytes(7), 1, _SIGNATURE_END, _MAJOR, _MINOR)) + _NULL + bytes(_GREETING_BYTES - 32)
READY = _command(_READY + _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b""))


class ProtocolViolation(Exception):  # noqa: N818  it says what the peer does
    """The peer does not speak ZMTP 3 without encryption, or sends more at once than allowed."""


class ZmtpConnection:
    """One connection. Calls ``on_readable`` at a possible message and at its end (``is_over``)."""

    def __init__(
        self,
        poller: Poller,
        accepted: socket.socket,
        on_readable: Callable[["ZmtpConnection"], None],
        wants_flush: Callable[["ZmtpConnection"], None] | None = None,
        peers: PeerSockets | None = None,
    ) -> None:
        """Take the socket over. Raises ``OSError``, and then it still is the caller's.

        ``wants_flush`` is called when there is something to send; by default it is sent at once.
        """
        self.is_over = False
        self._poller = poller
        self._socket = accepted
        self._on_readable = on_readable
        self._wants_flush = wants_flush
        self._peers = peers or PeerSockets()
        self._received = bytearray()
        self._frames: list[bytes] = []
        self._frames_bytes = 0
        self._commands = 0
        """Commands in the portion that was read last."""
        self._is_greeted = False
        self._is_ready = False
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._waits_to_write = False
        poller.watch(accepted.fileno(), self._on_ready)
        self._write(GREETING + READY)

    @property
    def is_closed(self) -> bool:
        """True after ``close``."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Hang up."""
        if not self.is_closed:
            self.flush()
            self._poller.unwatch(self._socket.fileno())
            self._peers.close(self._socket)
            self._forget_unsent()

    def send(self, message: bytes) -> bool:
        """Send a message of one frame, with ``flush``; False if the peer leaves too many unread."""
        if len(message) <= SHORT_BYTES_MAX:
            return self._write(bytes((0, len(message))) + message)
        return self._write(bytes((LONG,)) + len(message).to_bytes(8) + message)

    def read(self) -> None:
        """Read one bounded portion; ``take`` every whole message before reading more."""
        try:
            data = self._peers.receive(self._socket, READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.is_over = error.errno not in _NO_MEMORY
            return
        self.is_over = not data
        self._commands = 0
        self._received += data

    def take(self) -> list[bytes] | None:
        """Frames of the next message; None if none is whole. ``ProtocolViolation``: close it."""
        if not self._is_greeted and not self._take_greeting():
            return None
        while (frame := self._take_frame()) is not None:
            flags, body = frame
            if flags & COMMAND:
                self._commands += 1
                if self._commands > COMMANDS_MAX:
                    raise ProtocolViolation(f"more than {COMMANDS_MAX} commands at once")
                self._handle_command(body)
            elif not self._is_ready:
                raise ProtocolViolation("a message before READY")
            else:
                self._frames.append(body)
                if len(self._frames) > FRAMES_MAX:
                    raise ProtocolViolation(f"a message of more than {FRAMES_MAX} frames")
                if not flags & MORE:
                    frames, self._frames, self._frames_bytes = self._frames, [], 0
                    return frames
        return None

    def _take_greeting(self) -> bool:
        received = self._received
        if (received and received[0] != _SIGNATURE_START) or (
            len(received) > _SIGNATURE_END_AT and not received[_SIGNATURE_END_AT] & 1
        ):
            raise ProtocolViolation("no ZeroMQ, or of before version 3")
        if len(received) > _MAJOR_AT and received[_MAJOR_AT] < _MAJOR:
            raise ProtocolViolation(f"version {received[_MAJOR_AT]} of ZMTP, not {_MAJOR}")
        if len(received) < _GREETING_BYTES:
            return False
        if received[_MECHANISM] != _NULL:
            raise ProtocolViolation("another mechanism than NULL")
        del received[:_GREETING_BYTES]
        self._is_greeted = True
        return True

    def _take_frame(self) -> tuple[int, bytes] | None:
        received = self._received
        if len(received) < _SHORT_HEADER_BYTES:
            return None
        flags, length, start = received[0], received[1], _SHORT_HEADER_BYTES
        if flags & LONG:
            if len(received) < _LONG_HEADER_BYTES:
                return None
            length, start = int.from_bytes(received[1:_LONG_HEADER_BYTES]), _LONG_HEADER_BYTES
        if flags > MORE | LONG | COMMAND or (flags & COMMAND and flags & MORE):
            raise ProtocolViolation(f"a frame with flags {flags}")
        if self._frames_bytes + start + length > MESSAGE_BYTES_MAX + _LONG_HEADER_BYTES:
            raise ProtocolViolation(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
        if len(received) < start + length:
            return None
        body = bytes(received[start : start + length])
        del received[: start + length]
        self._frames_bytes += 0 if flags & COMMAND else start + length
        return flags, body

    def _handle_command(self, command: bytes) -> None:
        if command.startswith(_READY):
            self._is_ready = True
        elif command.startswith(_PING) and self._is_ready:
            self._write(_command(_PONG + command[len(_PING) + _PING_TTL_BYTES :][:16]))
        elif not self._is_ready:
            raise ProtocolViolation("another command than READY")

    def _write(self, data: bytes) -> bool:
        if self.is_closed:
            return True
        if self._has_too_much(len(data)):
            self.flush()
            if self._has_too_much(len(data)):
                return False
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._wants_flush is None:
            self.flush()
        else:
            self._wants_flush(self)
        return True

    def _has_too_much(self, more: int) -> bool:
        return len(self._unsent) >= UNREAD_MAX or bool(self._unsent and self._unsent_bytes + more > UNSENT_BYTES_MAX)

    def flush(self) -> None:
        """Send what was not sent yet, as far as the kernel takes it."""
        if self.is_closed:
            return
        while self._unsent:
            together = self._next_bytes()
            sent = self.write_some(together)
            self._unsent_bytes -= sent
            if sent < len(together):
                self._unsent.appendleft(together[sent:])
                break
        self._wait_to_write(wanted=bool(self._unsent))

    def _next_bytes(self) -> bytes:
        """Take the next messages off the unsent ones: one, or small ones together."""
        first = self._unsent.popleft()
        if not self._unsent or len(first) >= WRITE_BYTES:
            return first
        together, length = [first], len(first)
        while self._unsent and length + len(self._unsent[0]) <= WRITE_BYTES:
            together.append(self._unsent.popleft())
            length += len(together[-1])
        return b"".join(together)

    def _forget_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def _wait_to_write(self, *, wanted: bool) -> None:
        """Watch for room to write, or stop watching, which is retried.

        If the kernel has no room to watch, disconnect, since no event would resume the writing.
        """
        if wanted == self._waits_to_write:
            return
        try:
            self._poller.wait_to_write(self._socket.fileno(), wanted=wanted)
        except OSError:
            if wanted:
                self._forget_unsent()
                with suppress(OSError):  # the other side has hung up already
                    # the end of file is the next event
                    self._socket.shutdown(socket.SHUT_RDWR)
        else:
            self._waits_to_write = wanted

    def write_some(self, data: bytes) -> int:
        """Send; return how many bytes the kernel took, or all if the peer is gone."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            return 0 if error.errno in _NO_MEMORY else len(data)

    def _on_ready(self) -> None:
        """The socket can be read, or has room for unsent bytes."""
        self.flush()
        self._on_readable(self)


class LocalConnections:
    """All connections to the socket of ZeroMQ. Messages are taken from each in turn."""

    def __init__(self, poller: Poller, gone: Callable[[ZmtpConnection], None], peers: PeerSockets) -> None:
        self._poller = poller
        self._gone = gone
        self._peers = peers
        self._all: dict[ZmtpConnection, None] = {}
        self._talking: dict[ZmtpConnection, None] = {}
        """Connections that may have sent a whole message, not taken yet, in turn."""
        self._to_flush: dict[ZmtpConnection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, accepted: socket.socket) -> ZmtpConnection:
        """Serve the peer of an accepted socket. Raises ``OSError`` if it cannot be watched."""
        connection = ZmtpConnection(self._poller, accepted, self._read, self._flush_later, self._peers)
        self._all[connection] = None
        return connection

    def next_message(self) -> tuple[ZmtpConnection, list[bytes]] | None:
        """The next message, and where it came from; None where none is whole."""
        while self._talking:
            connection = next(iter(self._talking))
            del self._talking[connection]
            try:
                frames = connection.take()
            except ProtocolViolation as violation:
                _log.debug("local peer not understood", reason=str(violation))
                self.close(connection)
                continue
            if frames is not None:
                self._talking[connection] = None
                return connection, frames
        return None

    def close(self, connection: ZmtpConnection) -> None:
        """Hang up, and forget what was not taken yet."""
        if connection in self._all:
            del self._all[connection]
            self._talking.pop(connection, None)
            connection.close()
            self._gone(connection)

    def close_all(self, connections: Iterable[ZmtpConnection] | None = None) -> None:
        """Hang up on all, or on these."""
        for connection in list(self._all if connections is None else connections):
            self.close(connection)

    def flush(self) -> None:
        """Send what connections were given since the last call."""
        to_flush, self._to_flush = self._to_flush, {}
        for connection in to_flush:
            connection.flush()

    def _flush_later(self, connection: ZmtpConnection) -> None:
        self._to_flush[connection] = None

    def _read(self, connection: ZmtpConnection) -> None:
        if connection in self._talking:
            return  # it has a turn; until then its data stays in the kernel
        connection.read()
        if connection.is_over:
            self.close(connection)
        else:
            self._talking[connection] = None
