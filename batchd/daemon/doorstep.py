"""Connections over TCP that are no sessions, and how they are closed. DAEMON process.

    ACCEPTED (descriptor) -> stranger -- Greet --> session -- its end --> stranger -> DISCONNECTED
                               |                                            |
                               +-- no session for STRANGER_TICKS, or too many strangers --> shut down

ZeroMQ ends a handshake that is not finished. Who finishes it and never greets, who speaks a version of ZMTP that has none, and
who was refused and stays, would keep a descriptor for ever; ZeroMQ can neither name nor close one connection. So the connection
is shut down by its descriptor, which belongs to a thread of ZeroMQ and may be closed and given to something else at any
moment. Therefore it is first duplicated onto a spare descriptor of ours, which holds what it stands for in place; then its
inode is compared with that of the connection that was accepted; and only then is it shut down. ZeroMQ reads the end of file and
cleans up, as it does whoever hangs up.

Invariant: nothing is shut down but a TCP connection to our port that was accepted under this descriptor and is no session.
"""

import os
import socket
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import structlog

from batchd.daemon.limits import peer_network
from batchd.daemon.seldom import Seldom

STRANGER_TICKS = 20
"""How many ticks of the loop (10 s of them) a connection may be no session; ZeroMQ gives a handshake 5 s. Ticks, not seconds:
while the machine stands still nobody can greet."""

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
    """One that was accepted. ``ticks``: for how long it has been a stranger."""

    inode: int
    host: str
    ticks: int = 0
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

    def open(self, port: int) -> None:
        """From now on connections to this port are ours."""
        self._port = port

    def close(self) -> None:
        """Stop looking; the connections end with ZeroMQ's context."""
        self._connections.clear()
        self._grip.close()

    def __len__(self) -> int:
        return len(self._connections)

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
        with self._grip.on(descriptor) as held:
            if held is not None and self._is_ours(held):
                host = peer_network(held.getpeername()[0])
                self._connections[descriptor] = _Connection(os.fstat(held.fileno()).st_ino, host)

    def went(self, descriptor: int) -> None:
        """The connection is gone."""
        self._connections.pop(descriptor, None)

    def settle(self) -> None:
        """Where there are too many strangers, the host with most of them loses its oldest."""
        excess = len(self._connections) - self._strangers_max
        if excess <= 0:
            return
        by_host: dict[str, list[int]] = {}
        strangers = self.strangers()
        for number, host in strangers.items():
            by_host.setdefault(host, []).append(number)
        for _ in range(len(strangers) - self._strangers_max):
            crowd = max(by_host.values(), key=len)
            self._shut(crowd.pop(0), f"more than {self._strangers_max} connections that are no sessions")

    def tick(self) -> None:
        """Time has passed: close those that have been strangers for too long."""
        for number, connection in list(self._connections.items()):
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
