"""Connections over TCP that are closed by us: those that are no sessions, and those that say too much. DAEMON process.

    ACCEPTED (descriptor) -> stranger -- Greet --> session -- its end --> stranger -> DISCONNECTED
                               |                                            |
                               +-- no session for STRANGER_TICKS, or too many strangers --> shut down <-- UNREAD_BYTES_MAX

ZeroMQ ends a handshake that is not finished. Who finishes it and never greets, who speaks a version
of ZMTP that has none, and who was refused and stays, would keep a descriptor for ever; ZeroMQ can
neither name nor close one connection. So the connection is shut down by its descriptor, which
belongs to a thread of ZeroMQ and may be closed and given to something else at any moment. Therefore
it is first duplicated onto a spare descriptor of ours, which holds what it stands for in place;
then its inode is compared with that of the connection that was accepted; and only then is it shut
down. ZeroMQ reads the end of file and cleans up, as it does whoever hangs up.

How much a peer says is the kernel's word (``TCP_INFO``), since messages are no measure: a message
that never ends is in none, and ZeroMQ keeps it in memory all the same. What the kernel has received
and we have not read lies in ZeroMQ's memory; that is bounded, for each connection and for all of a
host. ZeroMQ's own limit, the high-water mark, counts messages, and libzmq 4.3.5 aborts where a peer
that has reached it sends a PING and resets its connection; so there is none, and this takes its
place.

Invariant: nothing is shut down but a TCP connection to our port that was accepted under this
descriptor, and is no session or said too much.
"""

import os
import socket
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from struct import Struct
from time import monotonic

import structlog

from batchd.daemon.limits import STRANGER_TICKS, Seldom, oldest_of_crowds, peer_network

AUDIT_INTERVAL_S = 0.1
FRAMES_MAX = 5_000
"""Frames of one connection that are read from one audit to the next. A trainer sends one for each batch, and waits for it."""
UNREAD_BYTES_MAX = 256 << 10
UNREAD_HOST_BYTES_MAX = 1 << 20
"""What may lie unread, as bytes on the wire, of one connection and of all of a host; as tiny frames it is 32 times as much."""
HEARTBEAT_BYTES_PER_S = 1_024
"""ZeroMQ's own words are never read by us, so unread bytes wear off at this rate."""
BAN_S = 10.0
"""For how long nobody is let in from where somebody said too much: what he said has to be read away."""
BANNED_MAX = 1_024
_TCP_INFO_BYTES = 136
_BYTES_RECEIVED = Struct("=Q")
_BYTES_RECEIVED_OFFSET = 128
"""Of ``tcpi_bytes_received`` in ``struct tcp_info`` (linux/tcp.h, Linux 4.1)."""

_log = structlog.get_logger()


class Grip:
    """Holds what a descriptor stands for, without needing a free number: a spare one is kept for that."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._spare = os.dup(self._nothing)

    def close(self) -> None:
        """Give both descriptors back."""
        os.close(self._nothing)
        os.close(self._spare)

    @contextmanager
    def on(self, descriptor: int) -> Iterator[socket.socket | None]:
        """The socket that this number stands for now, until the end of the block; None where it is no socket or closed."""
        try:
            os.dup2(descriptor, self._spare, inheritable=False)
        except OSError:
            yield None
            return
        held = None
        try:
            with suppress(OSError):
                held = socket.socket(fileno=self._spare)
            yield held
        finally:
            if held is not None:
                held.detach()
            with suppress(OSError):  # the limit was set below our own number meanwhile: the next grip lets go
                os.dup2(self._nothing, self._spare, inheritable=False)


@dataclass(slots=True)
class _Connection:
    """One that was accepted. ``ticks``: for how long it has been a stranger; ``ticks_gone``: for how long it has not been there.

    ``number`` is the descriptor's, as a socket to ask the kernel with: whatever has that number by
    now is asked. It owns nothing.
    """

    inode: int
    host: str
    number: socket.socket
    received: int = 0
    unread: float = 0.0
    read: int = 0
    frames: int = 0
    ticks: int = 0
    ticks_gone: int = 0
    is_closed: bool = False


class Doorstep:
    """Every connection over TCP, by its descriptor. Those in ``sessions`` are sessions, the others are strangers."""

    def __init__(self, sessions: Container[int], strangers_max: int) -> None:
        self.closed = 0
        self._sessions = sessions
        self._strangers_max = strangers_max
        self._connections: dict[int, _Connection] = {}
        self._grip = Grip()
        self._seldom = Seldom()
        self._port = 0
        self._audited_s = monotonic()
        self._banned_until_s: dict[str, float] = {}
        """By host, in the order of their ends."""

    def open(self, port: int) -> None:
        """From now on connections to this port are ours."""
        self._port = port

    def close(self) -> None:
        """Stop looking; the connections end with ZeroMQ's context."""
        for descriptor in list(self._connections):
            self.went(descriptor)
        self._grip.close()

    def __len__(self) -> int:
        return len(self._connections)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._connections

    def inode_of(self, descriptor: int) -> int | None:
        """What names the connection that was accepted under this descriptor; None where there is none."""
        connection = self._connections.get(descriptor)
        return connection.inode if connection is not None else None

    def host_of(self, descriptor: int) -> str:
        """Where the connection comes from; "" where it went before it was looked at."""
        connection = self._connections.get(descriptor)
        return connection.host if connection is not None else ""

    def strangers(self) -> dict[int, str]:
        """The hosts of the connections that are no sessions and were not closed, oldest first."""
        return {number: one.host for number, one in self._strangers()}

    def came(self, descriptor: int) -> None:
        """A connection was accepted. Paired with ``went``; it may have gone already."""
        self.went(descriptor)
        host = ""
        with self._grip.on(descriptor) as held:
            if held is not None and self._is_ours(held):
                with suppress(OSError):  # it has just gone, and the news of it will find nothing
                    host = peer_network(held.getpeername()[0])
                    number = socket.socket(held.family, held.type, fileno=descriptor)
                    self._connections[descriptor] = _Connection(os.fstat(held.fileno()).st_ino, host, number)
        if descriptor in self._connections and self._is_banned(host):
            self._shut(descriptor, f"somebody said too much there less than {BAN_S:g} s ago")

    def went(self, descriptor: int) -> None:
        """The connection is gone."""
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            connection.number.detach()

    def hears(self, descriptor: int, wire_bytes: int, frames: int) -> bool:
        """A message has been read: is it to be looked at? What one that was shut down had said before is not."""
        connection = self._connections.get(descriptor)
        if connection is None:
            return True
        connection.read += wire_bytes
        connection.frames += frames
        if connection.frames > FRAMES_MAX and not connection.is_closed:
            self._silence(descriptor, f"it sent more than {FRAMES_MAX} frames within {AUDIT_INTERVAL_S:g} s")
        return not connection.is_closed

    def audit(self) -> None:
        """Close whoever says more than is read."""
        now = monotonic()
        worn_off = HEARTBEAT_BYTES_PER_S * (now - self._audited_s)
        self._audited_s = now
        by_host: dict[str, list[int]] = {}
        for descriptor, connection in self._connections.items():
            received = _received_bytes(connection.number)
            more = received - connection.received - connection.read
            connection.unread = max(0.0, connection.unread + more - worn_off)
            connection.received, connection.read, connection.frames = received, 0, 0
            if connection.unread and not connection.is_closed:
                by_host.setdefault(connection.host, []).append(descriptor)
        for loud in by_host.values():
            self._hush(loud)

    def _hush(self, loud: list[int]) -> None:
        """Close those of one host that have too much unread, and the one with most of it where all of them together have."""
        unread = {descriptor: self._connections[descriptor].unread for descriptor in loud if self._is_there(descriptor)}
        for descriptor in list(unread):
            if unread[descriptor] > UNREAD_BYTES_MAX:
                del unread[descriptor]
                self._silence(descriptor, f"more than {UNREAD_BYTES_MAX} bytes of it are unread")
        if sum(unread.values()) > UNREAD_HOST_BYTES_MAX:
            most = max(unread, key=lambda descriptor: unread[descriptor])
            self._silence(most, f"more than {UNREAD_HOST_BYTES_MAX} bytes of its host are unread")

    def _is_there(self, descriptor: int) -> bool:
        """Is it this connection that the kernel was asked about? Its number may be another's by now, who is to be heard first."""
        try:
            return os.fstat(descriptor).st_ino == self._connections[descriptor].inode
        except OSError:
            return False

    def _silence(self, descriptor: int, reason: str) -> None:
        """Close one that says too much, and let nobody in from there for a while."""
        host = self._connections[descriptor].host
        self._banned_until_s.pop(host, None)
        if len(self._banned_until_s) >= BANNED_MAX:
            del self._banned_until_s[next(iter(self._banned_until_s))]
        self._banned_until_s[host] = monotonic() + BAN_S
        self._shut(descriptor, reason)

    def _is_banned(self, host: str) -> bool:
        return monotonic() < self._banned_until_s.get(host, 0.0)

    def settle(self) -> None:
        """Where there are too many strangers, the host with most of them loses its oldest."""
        excess = len(self._connections) - self._strangers_max
        if excess <= 0:
            return
        strangers = self.strangers()
        for number in oldest_of_crowds(strangers, len(strangers) - self._strangers_max):
            self._shut(number, f"more than {self._strangers_max} connections that are no sessions")

    def tick(self) -> None:
        """Time has passed: close those that have been strangers for too long, and forget those that are not there.

        A beginning that is told after its end is of a connection whose end nobody tells again. An
        end that is on its way comes before the second tick.
        """
        for number, connection in list(self._connections.items()):
            connection.ticks_gone = 0 if self._is_there(number) else connection.ticks_gone + 1
            if connection.ticks_gone > 1:
                self.went(number)
                continue
            connection.ticks = 0 if number in self._sessions else connection.ticks + 1
            if connection.ticks > STRANGER_TICKS and not connection.is_closed:
                self._shut(number, "no session came of it")

    def _strangers(self) -> Iterator[tuple[int, _Connection]]:
        for number, connection in self._connections.items():
            if number not in self._sessions and not connection.is_closed:
                yield number, connection

    def _shut(self, descriptor: int, reason: str) -> None:
        connection = self._connections[descriptor]
        connection.is_closed = True
        connection.unread = 0.0
        with self._grip.on(descriptor) as held:
            if held is None or os.fstat(held.fileno()).st_ino != connection.inode or not self._is_ours(held):
                return  # it has gone already, and the news of it is on its way
            with suppress(OSError):  # the other side was faster
                held.shutdown(socket.SHUT_RDWR)
        self.closed += 1
        if self._seldom.now(connection.host):
            _log.warning("remote connection closed", host=connection.host, reason=reason, closed=self.closed)

    def _is_ours(self, held: socket.socket) -> bool:
        """Is it a connection over TCP to our port that still has another side?"""
        if held.family not in {socket.AF_INET, socket.AF_INET6} or held.type != socket.SOCK_STREAM:
            return False
        try:
            held.getpeername()
            port: int = held.getsockname()[1]
        except OSError:
            return False
        return port == self._port


def _received_bytes(connection: socket.socket) -> int:
    """What the kernel has received over it; 0 where that is no connection any more, or the kernel does not count."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    if len(info) < _TCP_INFO_BYTES:
        return 0
    received: int = _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_OFFSET)[0]
    return received
