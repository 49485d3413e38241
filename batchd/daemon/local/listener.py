"""Who connects to the sockets of the runtime directory: accepted while descriptors are left, closed where no session comes of it.

DAEMON process.

    connect -> (kernel's queue) -- Listener: a descriptor is left --> stranger -- Hello, Open --> session
                     ^                                                |
                     +-- until the next tick, where none is left      +-- STRANGER_TICKS, or too many of them --> closed

Invariant: connections leave ``SPARE_DESCRIPTORS`` free, for what the daemon has to do while they
are there.
"""

import errno
import os
import resource
import socket
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from batchd.daemon.descriptors import Watch
from batchd.daemon.limits import STRANGER_TICKS, oldest_of_crowds
from batchd.daemon.local.zmtp import NotUnderstood, ZmtpConnection
from batchd.daemon.log_limits import Seldom
from batchd.daemon.memory.held_descriptors import ADVICE, SPARE_DESCRIPTORS

_log = structlog.get_logger()

NEWCOMER_TICKS = 2
"""For how many ticks a stranger is not closed for want of descriptors: it may be about to greet."""
MADE_ROOM_AT_ONCE = 32
BACKLOG = 256
ACCEPTED_AT_ONCE = 16
_SHORT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC}
"""Accepting fails with these until something is given back; who waits to be accepted goes on waiting."""

K = TypeVar("K", bound=Hashable)


class Strangers(Generic[K]):
    """Connections that are no sessions yet, by whose they are."""

    def __init__(self) -> None:
        self._owners: dict[K, Hashable] = {}
        self._ticks: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def came(self, one: K, owner: Hashable) -> None:
        """It is no session, from now on. Paired with ``went``."""
        self._owners[one] = owner
        self._ticks[one] = 0

    def went(self, one: K) -> None:
        """It is a session, or gone."""
        self._owners.pop(one, None)
        self._ticks.pop(one, None)

    def tick(self) -> list[K]:
        """Time has passed; those that have been strangers for too long."""
        for one in self._ticks:
            self._ticks[one] += 1
        return [one for one, ticks in self._ticks.items() if ticks > STRANGER_TICKS]

    def too_many(self, most: int) -> list[K]:
        """Those to be closed so that ``most`` are left."""
        return oldest_of_crowds(self._owners, len(self._owners) - most)

    def in_the_way(self) -> list[K]:
        """Those to be closed now that others wait for their descriptors."""
        old = {one: owner for one, owner in self._owners.items() if self._ticks[one] >= NEWCOMER_TICKS}
        return oldest_of_crowds(old, MADE_ROOM_AT_ONCE)


def descriptors_left() -> int:
    """How many descriptors connections may still take; many where the kernel does not tell."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # noqa: PTH116, PTH208  a count, often
    except OSError as error:
        return 0 if error.errno in _SHORT_OF else limit
    return limit - used - SPARE_DESCRIPTORS


class Listener:
    """A listening socket. Each that is accepted is handed to ``admit``; ``need`` is how many descriptors have to be left."""

    def __init__(
        self, watch: Watch, kind: socket.SocketKind, admit: Callable[[socket.socket], None], need: Callable[[], int]
    ) -> None:
        self.is_short = False
        """Since the last tick somebody was left waiting."""
        self._watch = watch
        self._admit = admit
        self._need = need
        self._listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
        self._is_watched = False
        self._path = Path()
        self._inode = 0
        self._seldom = Seldom()

    def open(self, path: Path) -> None:
        """Listen there, where nothing is; ``begin`` accepts. Raises ``OSError``."""
        self._listener.bind(os.fspath(path))
        self._listener.listen(BACKLOG)
        self._path, self._inode = path, path.lstat().st_ino

    def begin(self) -> None:
        """Accept from now on. Raises ``OSError`` where it cannot be watched."""
        if not self._is_watched:
            self._watch.add(self._listener.fileno(), self._accept)
            self._is_watched = True

    def tick(self) -> None:
        """Time has passed: accept again, where that had to stop, or at a later tick where that fails."""
        self.is_short = False
        try:
            self.begin()
        except OSError as error:
            self._stop(str(error))

    @property
    def is_found(self) -> bool:
        """Does its path still lead to it? Where the kernel does not tell, it does."""
        try:
            return self._path.lstat().st_ino == self._inode
        except OSError as error:
            return error.errno not in {errno.ENOENT, errno.ENOTDIR}

    def close(self) -> None:
        """Listen no more."""
        if self._is_watched:
            self._watch.remove(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> None:
        left = descriptors_left()
        for _ in range(ACCEPTED_AT_ONCE):
            if left < self._need():
                self._stop(f"{max(0, left) + SPARE_DESCRIPTORS} descriptors are left, which the daemon needs; {ADVICE}")
                return
            try:
                accepted, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._stop(str(error), waits=error.errno in _SHORT_OF)
                return
            left -= 1
            accepted.setblocking(False)
            try:
                self._admit(accepted)
            except OSError as error:  # it cannot be watched
                accepted.close()
                self._stop(str(error), waits=True)
                return

    def _stop(self, reason: str, *, waits: bool = True) -> None:
        """Who waits is still there, and would wake the loop at once, again and again."""
        if self._seldom.now("accept"):
            _log.error("cannot accept a trainer", reason=reason)
        if waits:
            self.is_short = True
            self._watch.remove(self._listener.fileno())
            self._is_watched = False


class LocalConnections:
    """All connections to the socket of ZeroMQ. Messages are taken from each in turn."""

    def __init__(self, watch: Watch, gone: Callable[[ZmtpConnection], None]) -> None:
        self._watch = watch
        self._gone = gone
        self._all: dict[ZmtpConnection, None] = {}
        self._talking: dict[ZmtpConnection, None] = {}
        """Those that may have said a whole message that was not taken yet, in their turn."""

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, wire: socket.socket) -> ZmtpConnection:
        """Speak with whoever is at the other end. Raises ``OSError`` where it cannot be watched."""
        connection = ZmtpConnection(self._watch, wire, self._listen)
        self._all[connection] = None
        return connection

    def hear(self) -> tuple[ZmtpConnection, list[bytes]] | None:
        """The next message, and where it came from; None where none is whole."""
        while self._talking:
            connection = next(iter(self._talking))
            del self._talking[connection]
            try:
                frames = connection.take()
            except NotUnderstood as reason:
                _log.debug("local peer not understood", reason=str(reason))
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

    def _listen(self, connection: ZmtpConnection) -> None:
        if connection in self._talking:
            return  # its turn comes; until then the kernel keeps what it says
        connection.read()
        if connection.is_over:
            self.close(connection)
        else:
            self._talking[connection] = None
