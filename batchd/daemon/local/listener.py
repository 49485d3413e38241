"""Accepts connections to the sockets of the runtime directory, from allowed users. DAEMON process.

    connect -> (kernel's queue) - Listener: a descriptor is left -> pending - Hello, Open -> session
                     ^                                              |
                     +-- until the next tick, where none is left    +- too old, too many -> closed

The runtime directory's mode keeps other users out. ``why_refused`` is the second lock, for a
directory whose mode was opened: root, the daemon's own user and members of the directory's group
may connect. Source: unix(7), SO_PEERCRED and SO_PEERGROUPS. The kernel translates all numbers into
the daemon's namespaces. Root of a container with its own users is the user that started the
container. A daemon inside such a container sees many users as one number, which identifies none of
them.

Invariant: connections leave ``SPARE_DESCRIPTORS`` free, for the daemon's own work meanwhile.
"""

import errno
import os
import resource
import socket
import stat
import struct
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import structlog

from batchd.daemon.runtime import unusable
from batchd.runtime.descriptors import PeerSockets
from batchd.runtime.limits import PENDING_TICKS, OncePerMinute, oldest_of_crowds
from batchd.runtime.poller import Poller
from batchd.runtime.slots import ADVICE
from batchd.stream.rings import SPARE_DESCRIPTORS
from batchd_wire.runtime import unmapped_id

SO_PEERGROUPS = 59
"""asm-generic/socket.h; the socket module does not name it."""
GROUPS_BYTES_MAX = 1024
"""The most that Python's ``getsockopt`` takes: 256 groups."""
_CREDENTIALS = struct.Struct("iII")
_GROUP_BYTES = 4
NEWCOMER_TICKS = 2
"""Ticks before a pending connection is closed to free descriptors: it may be about to greet."""
MADE_ROOM_AT_ONCE = 32
BACKLOG = 256
ACCEPTED_AT_ONCE = 16
_SHORT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC}
"""Accepting fails with these until resources are freed; connections stay in the kernel's queue."""

_log = structlog.get_logger()

K = TypeVar("K", bound=Hashable)


class PeerCredentials(NamedTuple):
    """Process, user and primary group at the other end, as they were when it connected.

    ``pid`` is None for a process outside of the daemon's container.
    """

    pid: int | None
    user: int
    group: int


def credentials_of(lifeline: socket.socket) -> PeerCredentials:
    """Read from the kernel which process connected: SO_PEERCRED. Raises ``OSError``."""
    raw = lifeline.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(raw)
    return PeerCredentials(pid or None, user, group)


def why_refused(lifeline: socket.socket, credentials: PeerCredentials, directory: os.stat_result) -> str | None:
    """None if the peer is root, the daemon's user, or in the runtime directory's group; or why not.

    Of a peer in more than 256 groups only the primary one counts. If numbers do not identify users,
    the kernel's word counts: it let the peer into a directory that is closed to other users.
    """
    nobody, no_group = unmapped_id("uid"), unmapped_id("gid")
    group = directory.st_gid
    if is_ours(credentials.user) or (group != no_group and group in groups_of(lifeline, credentials)):
        return None
    if credentials.user != nobody and group != no_group:
        return f"user {credentials.user} is not in the group of the runtime directory"
    if not directory.st_mode & stat.S_IRWXO:
        return None
    return (
        "user or group is not mapped into the daemon's user namespace, and the runtime directory is open to all users, so "
        "the daemon cannot tell members of its group from others: close the directory (chmod o-rwx)"
    )


def is_ours(user: int) -> bool:
    """True if the user is root or the daemon's own, as far as the number tells."""
    return user in {0, os.geteuid()} and user != unmapped_id("uid")


def open_to_group(path: Path, directory: int) -> None:
    """Let the directory's group connect to a socket of the daemon's. Raises ``BatchdError``."""
    try:
        group = os.fstat(directory).st_gid
        if path.stat().st_gid != group:
            os.chown(path, -1, group)
    except OSError as error:
        advice = "put the daemon's user into the group of the runtime directory, or give the directory the setgid bit"
        reason = error.strerror
        _log.warning("socket is not open to the directory's group", path=str(path), reason=reason, advice=advice)
    try:
        path.chmod(0o660)
    except OSError as error:
        raise unusable(path.parent, error) from None


def groups_of(lifeline: socket.socket, credentials: PeerCredentials) -> set[int]:
    """The groups of a peer; of one in more than 256 only the primary one. Raises ``OSError``."""
    try:
        raw = lifeline.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_BYTES_MAX)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return {credentials.group}
    return {credentials.group, *struct.unpack(f"{len(raw) // _GROUP_BYTES}I", raw)}


class PendingConnections(Generic[K]):
    """Connections that are no sessions yet, each with its owner, for fairness between these."""

    def __init__(self) -> None:
        self._owners: dict[K, Hashable] = {}
        self._ticks: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, one: K, owner: Hashable) -> None:
        """Enter a connection that is no session. Paired with ``remove``."""
        self._owners[one] = owner
        self._ticks[one] = 0

    def remove(self, one: K) -> None:
        """Forget a connection: it is a session now, or closed."""
        self._owners.pop(one, None)
        self._ticks.pop(one, None)

    def tick(self) -> list[K]:
        """Count one tick; return the connections that have been pending for too long."""
        for one in self._ticks:
            self._ticks[one] += 1
        return [one for one, ticks in self._ticks.items() if ticks > PENDING_TICKS]

    def excess(self, most: int) -> list[K]:
        """Connections to close so that ``most`` are left."""
        return oldest_of_crowds(self._owners, len(self._owners) - most)

    def blocking(self) -> list[K]:
        """Connections to close now because others wait for their descriptors."""
        old = {one: owner for one, owner in self._owners.items() if self._ticks[one] >= NEWCOMER_TICKS}
        return oldest_of_crowds(old, MADE_ROOM_AT_ONCE)


def descriptors_left() -> int:
    """Number of descriptors that connections may still take; large if the kernel does not tell."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # noqa: PTH116, PTH208  a count, often
    except OSError as error:
        return 0 if error.errno in _SHORT_OF else limit
    return limit - used - SPARE_DESCRIPTORS


class Listener:
    """A listening socket. Connections go to ``admit``, if ``need()`` descriptors are left."""

    def __init__(
        self,
        poller: Poller,
        kind: socket.SocketKind,
        admit: Callable[[socket.socket], None],
        need: Callable[[], int],
        peers: PeerSockets,
    ) -> None:
        self.is_short = False
        """True if a connection has been left waiting since the last tick."""
        self._poller = poller
        self._admit = admit
        self._need = need
        self._peers = peers
        self._listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
        self._is_watched = False
        self._path = Path()
        self._inode = 0
        self._once_per_minute = OncePerMinute()

    def open(self, path: Path) -> None:
        """Listen there, where nothing is; ``begin`` accepts. Raises ``OSError``."""
        self._peers.refuse_descriptors(self._listener)
        self._listener.bind(os.fspath(path))
        self._listener.listen(BACKLOG)
        self._path, self._inode = path, path.lstat().st_ino

    def begin(self) -> None:
        """Accept from now on. Raises ``OSError`` where it cannot be watched."""
        if not self._is_watched:
            self._poller.watch(self._listener.fileno(), self._accept)
            self._is_watched = True

    def tick(self) -> None:
        """Accept again after it had to stop; if that fails, retry at the next tick."""
        self.is_short = False
        try:
            self.begin()
        except OSError as error:
            self._stop(str(error))

    @property
    def is_found(self) -> bool:
        """True if its path still leads to it, or the kernel does not tell."""
        try:
            return self._path.lstat().st_ino == self._inode
        except OSError as error:
            return error.errno not in {errno.ENOENT, errno.ENOTDIR}

    def close(self) -> None:
        """Listen no more."""
        if self._is_watched:
            self._poller.unwatch(self._listener.fileno())
        self._peers.close(self._listener)

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
                self._peers.close(accepted)
                self._stop(str(error), waits=True)
                return

    def _stop(self, reason: str, *, waits: bool = True) -> None:
        """Stop accepting: waiting connections would wake the loop again and again."""
        if self._once_per_minute.allows("accept"):
            _log.error("cannot accept a trainer", reason=reason)
        if waits:
            self.is_short = True
            self._poller.unwatch(self._listener.fileno())
            self._is_watched = False
