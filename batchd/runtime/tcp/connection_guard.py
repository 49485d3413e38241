"""Closes TCP connections that become no session, or send too much. DAEMON process.

    ACCEPTED (descriptor) -> pending -- Greet --> session -- its end --> pending -> DISCONNECTED
                               |                                            |
                               +-- for PENDING_TICKS, or too many --> shut down <-- unread_bytes_max

ZeroMQ ends unfinished handshakes, but it can neither name nor close one connection. A peer that
never greets, speaks a version of ZMTP without a handshake, or stays after a refusal would keep a
descriptor for ever. So the guard shuts the connection down by its descriptor, which belongs to a
thread of ZeroMQ and may be closed and reused at any moment: the guard duplicates it onto a spare
one of its own, which keeps the file open, compares the inode with that of the accepted connection,
and only then shuts that down. ZeroMQ reads the end of file and cleans up, as after any disconnect.

The kernel (``TCP_INFO``) tells how much a peer sends: a message that never ends is never read, but
ZeroMQ keeps it in memory. Bytes that the kernel has received and the daemon has not read are in
ZeroMQ's memory; they are limited, for each connection and for all of a host. This replaces ZeroMQ's
own limit, the high-water mark, which counts messages: libzmq 4.3.5 aborts if a peer that has
reached it sends a PING and resets its connection. Answers that were asked for (``expect``) may come
faster than they are read, so they do not count. What a closed connection had sent is still handed
over: it is dropped, message by message, as its descriptor is closed.

Invariant: the guard shuts down only a TCP connection to the daemon's port that was accepted under
this descriptor, and is no session or sent too much.
"""

import os
import socket
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from struct import Struct
from time import monotonic

import structlog

from batchd.runtime.limits import PENDING_TICKS, OncePerMinute, oldest_of_crowds, peer_network, peer_site

AUDIT_INTERVAL_S = 0.1
HEARTBEAT_BYTES_PER_S = 1_024
"""ZeroMQ's own words are never read by us, so unread bytes wear off at this rate."""
BAN_S = 10.0
"""Time without a new connection for a host that sent too much: ZeroMQ has to read it away."""
BANNED_MAX = 1_024
_TCP_INFO_BYTES = 136
_BYTES_RECEIVED = Struct("=Q")
_BYTES_RECEIVED_OFFSET = 128
"""Offset of ``tcpi_bytes_received`` in ``struct tcp_info`` (linux/tcp.h, Linux 4.1)."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """Limits of one address. The defaults are for trainers, which send one frame per batch."""

    pending_max: int
    """Connections that are no sessions."""
    frames_max: int = 5_000
    """Frames read from one connection between two audits."""
    unread_bytes_max: int = 256 << 10
    unread_host_bytes_max: int = 1 << 20
    """Unread bytes on the wire, of one connection and of all connections of a host, beyond those
    that are expected. As tiny frames they take 32 times as much memory (twice, encrypted)."""


class HeldDescriptor:
    """Keeps the file behind a descriptor open, on a spare descriptor that it owns."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._spare = os.dup(self._nothing)

    def close(self) -> None:
        """Give both descriptors back."""
        os.close(self._nothing)
        os.close(self._spare)

    @contextmanager
    def on(self, descriptor: int) -> Iterator[socket.socket | None]:
        """Yield the socket that this number names now, kept open; None if it is none."""
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
            # the limit was set below our own number meanwhile: the next grip lets go
            with suppress(OSError):
                os.dup2(self._nothing, self._spare, inheritable=False)


@dataclass(slots=True)
class _Connection:
    """An accepted connection.

    ``number``: the descriptor as a socket object, which owns nothing and queries whatever has that
    number now. ``ticks``: how long it has been pending. ``ticks_gone``: how long its descriptor has
    named another file. ``expected``: bytes that were asked for, and may be unread beyond the limit.
    """

    inode: int
    host: str
    number: socket.socket
    received: int = 0
    unread: float = 0.0
    expected: int = 0
    read: int = 0
    frames: int = 0
    ticks: int = 0
    ticks_gone: int = 0
    is_closed: bool = False


class ConnectionGuard:
    """All TCP connections, by descriptor. Those that are not in ``sessions`` are pending."""

    def __init__(self, sessions: Container[int], limits: GuardLimits) -> None:
        self.closed = 0
        self._sessions = sessions
        self._limits = limits
        self._connections: dict[int, _Connection] = {}
        self._held = HeldDescriptor()
        self._once_per_minute = OncePerMinute()
        self._port = 0
        self._audited_s = monotonic()
        self._banned_until_s: dict[str, float] = {}
        """Until when a host is banned, ordered by that time."""

    def open(self, port: int) -> None:
        """Guard the connections to this port."""
        self._port = port

    def close(self) -> None:
        """Stop looking; the connections end with ZeroMQ's context."""
        for descriptor in list(self._connections):
            self.remove(descriptor)
        self._held.close()

    def __len__(self) -> int:
        return len(self._connections)

    def inode_of(self, descriptor: int) -> int | None:
        """Inode of the connection accepted under this descriptor; None if there is none."""
        connection = self._connections.get(descriptor)
        return connection.inode if connection is not None else None

    def host_of(self, descriptor: int) -> str:
        """Host of the connection; "" if it ended before that was known."""
        connection = self._connections.get(descriptor)
        return connection.host if connection is not None else ""

    def pending(self) -> dict[int, str]:
        """The hosts of the connections that are no sessions and were not closed, oldest first."""
        every = self._connections.items()
        return {number: one.host for number, one in every if number not in self._sessions and not one.is_closed}

    def add(self, descriptor: int) -> None:
        """A connection was accepted. Paired with ``went``; it may have gone already."""
        self.remove(descriptor)
        host = ""
        with self._held.on(descriptor) as held:
            if held is not None and self._is_ours(held):
                with suppress(OSError):  # it has just gone, and the news of it will find nothing
                    host = peer_network(held.getpeername()[0])
                    number = socket.socket(held.family, held.type, fileno=descriptor)
                    self._connections[descriptor] = _Connection(os.fstat(held.fileno()).st_ino, host, number)
        if descriptor in self._connections and self.is_banned(host):
            self._shut_down(descriptor, f"the host misbehaved less than {BAN_S:g} s ago")

    def remove(self, descriptor: int) -> None:
        """The connection is gone."""
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            connection.number.detach()

    def count_message(self, descriptor: int, host: str, wire_bytes: int, frames: int) -> bool:
        """Count a message that was read; False if its connection is gone or shut down: drop it.

        ZeroMQ may hand it over before the beginning of its connection is reported: then it is not
        counted. It also hands over what a connection sent before its end, with a descriptor that is
        closed by then or will be in a moment, or names another host's connection.
        """
        connection = self._connections.get(descriptor)
        if connection is None or connection.is_closed or connection.host != host:
            is_known = connection is not None and self._is_there(descriptor)
            return not is_known and not self.is_banned(host) and self._is_open(descriptor)
        connection.read += wire_bytes
        connection.frames += frames
        frames_max = self._limits.frames_max
        if connection.frames > frames_max:
            self._close_and_ban(descriptor, f"it sent more than {frames_max} frames within {AUDIT_INTERVAL_S:g} s")
        return not connection.is_closed

    def expect(self, descriptor: int, wire_bytes: int) -> None:
        """Expect this number of unread bytes of the connection from now on: they were requested.

        Lower it only when the answer has been read: an answer that is not wanted any more may be on
        its way.
        """
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.expected = wire_bytes

    def close_soon(self, descriptor: int) -> None:
        """Close a connection whose session has ended within two ticks, unless another begins."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.ticks = max(connection.ticks, PENDING_TICKS - 1)

    def ban(self, host: str) -> None:
        """Ban a host for ``BAN_S``: further connections of it are closed."""
        self._banned_until_s.pop(host, None)
        if len(self._banned_until_s) >= BANNED_MAX:
            del self._banned_until_s[next(iter(self._banned_until_s))]
        self._banned_until_s[host] = monotonic() + BAN_S

    def is_banned(self, host: str) -> bool:
        """True for a host that is banned now."""
        return monotonic() < self._banned_until_s.get(host, 0.0)

    def audit(self) -> None:
        """Close connections that send more than is read."""
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
        for descriptors in by_host.values():
            self._limit_host(descriptors)

    def _limit_host(self, descriptors: list[int]) -> None:
        """Close a host's connections with too much unread, or the largest of too much together."""
        limits = self._limits
        there = {descriptor: self._connections[descriptor] for descriptor in descriptors if self._is_there(descriptor)}
        unread = {descriptor: max(0.0, one.unread - one.expected) for descriptor, one in there.items()}
        for descriptor in list(unread):
            if unread[descriptor] > limits.unread_bytes_max:
                del unread[descriptor]
                self._close_and_ban(descriptor, f"more than {limits.unread_bytes_max} bytes of it are unread")
        if sum(unread.values()) > limits.unread_host_bytes_max:
            most = max(unread, key=lambda descriptor: unread[descriptor])
            self._close_and_ban(most, f"more than {limits.unread_host_bytes_max} bytes of its host are unread")

    def _is_there(self, descriptor: int) -> bool:
        """False if the number is another connection's, whose beginning is not reported yet."""
        try:
            return os.fstat(descriptor).st_ino == self._connections[descriptor].inode
        except OSError:
            return False

    def _is_open(self, descriptor: int) -> bool:
        """True if the number is that of a connection to our port."""
        with self._held.on(descriptor) as held:
            return held is not None and self._is_ours(held)

    def _close_and_ban(self, descriptor: int, reason: str) -> None:
        """Close a connection that sends too much, and ban its host for ``BAN_S``."""
        self.ban(self._connections[descriptor].host)
        self._shut_down(descriptor, reason)

    def limit_pending(self) -> None:
        """If too many are pending, close the oldest ones of the host that has most of them."""
        pending_max = self._limits.pending_max
        if len(self._connections) <= pending_max:
            return
        pending = self.pending()
        for number in oldest_of_crowds(pending, len(pending) - pending_max):
            self._shut_down(number, f"more than {pending_max} connections that are no sessions")

    def tick(self) -> None:
        """Close connections that have been pending for too long, and forget those that are gone.

        If ZeroMQ reports a beginning after its end, no second end is reported. An end that is under
        way is reported before the second tick.
        """
        for number, connection in list(self._connections.items()):
            connection.ticks_gone = 0 if self._is_there(number) else connection.ticks_gone + 1
            if connection.ticks_gone > 1:
                self.remove(number)
                continue
            connection.ticks = 0 if number in self._sessions else connection.ticks + 1
            if connection.ticks > PENDING_TICKS and not connection.is_closed:
                self._shut_down(number, "no session came of it")

    def _shut_down(self, descriptor: int, reason: str) -> None:
        connection = self._connections[descriptor]
        connection.is_closed = True
        connection.unread = 0.0
        with self._held.on(descriptor) as held:
            if held is None or os.fstat(held.fileno()).st_ino != connection.inode or not self._is_ours(held):
                return  # it has gone already, and the news of it is on its way
            with suppress(OSError):  # the other side was faster
                held.shutdown(socket.SHUT_RDWR)
        self.closed += 1
        if self._once_per_minute.allows("remote connections closed", peer_site(connection.host)):
            _log.warning("remote connection closed", host=connection.host, reason=reason, closed=self.closed)

    def _is_ours(self, held: socket.socket) -> bool:
        """True for a TCP connection to the daemon's port that still has a peer."""
        if held.family not in {socket.AF_INET, socket.AF_INET6} or held.type != socket.SOCK_STREAM:
            return False
        try:
            held.getpeername()
            port: int = held.getsockname()[1]
        except OSError:
            return False
        return port == self._port


def _received_bytes(connection: socket.socket) -> int:
    """Bytes that the kernel has received; 0 if the socket is closed or nothing is counted."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    if len(info) < _TCP_INFO_BYTES:
        return 0
    received: int = _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_OFFSET)[0]
    return received
