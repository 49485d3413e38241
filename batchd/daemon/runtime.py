"""The runtime directory of a daemon: made and locked. DAEMON process; ``batchd check`` inspects it.

The lock is a file held with ``flock``: the kernel releases it with the process, so it is never
stale. The file is never removed: otherwise two daemons could hold two locks of one name.

Invariant: the process with the lock owns the sockets in the directory.
"""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from batchd.config.directories import choose_runtime_directory
from batchd.config.schema import meaning_of
from batchd.errors import AlreadyRunning, BatchdError, Problem
from batchd_wire.runtime import RuntimeDirectory

DIRECTORY_MODE = 0o750
LOCKS = Path("/proc/locks")
_NOBODY_THERE = {errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR}


class HeldDirectory:
    """A locked runtime directory. Use as a context manager."""

    def __init__(self, names: RuntimeDirectory, lock: int, *, is_private: bool) -> None:
        self.names = names
        self._lock = lock
        self._is_private = is_private

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Remove the sockets while the lock is held, then give it up."""
        if self._is_ours():
            for path in (self.names.lifeline_path, self.names.zmq_path):
                path.unlink(missing_ok=True)
            if self._is_private:
                self.names.lock_path.unlink(missing_ok=True)
                with suppress(OSError):  # not empty: another program's files stay
                    self.names.path.rmdir()
        os.close(self._lock)

    def _is_ours(self) -> bool:
        """True if it is the locked directory, not another of its name made after its removal."""
        try:
            return os.path.samestat(self.names.lock_path.lstat(), os.fstat(self._lock))
        except OSError:
            return False


def hold(configured: Path | None, *, is_private: bool = False) -> HeldDirectory:
    """Make and lock the runtime directory.

    A private one was made for this daemon only, and is removed at its end. Raises
    ``AlreadyRunning`` if another daemon holds it, ``ConfigInvalid`` if no directory is available,
    and ``BatchdError`` if it cannot be used.
    """
    names = choose_runtime_directory(configured)
    problem = directory_problem(names)
    if problem is not None:
        raise BatchdError(problem.message)
    try:
        _make(names.path)
        lock = os.open(names.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    except OSError as error:
        raise unusable(names.path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise BatchdError(f"{names.lock_path} cannot be locked: {error.strerror}") from None
        raise AlreadyRunning(
            f"another daemon (pid {holder or 'unknown'}) holds the runtime directory {names.path}; use it, stop it, or set "
            "another runtime_dir in [daemon] (or BATCHD_RUNTIME_DIR)"
        ) from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(lock)
        raise unusable(names.path, error) from None
    return HeldDirectory(names, lock, is_private=is_private)


def directory_problem(names: RuntimeDirectory) -> Problem | None:
    """Say why the directory cannot be used, without making it; None if no reason is found."""
    try:
        number = _obstacle(names.path)
    except OSError as error:
        number = error.errno
    if not number:
        return None
    meaning = meaning_of(("daemon", "runtime_dir"), {})
    return Problem("daemon.runtime_dir", _cannot_use(names.path, number), meaning)


def _obstacle(path: Path) -> int | None:
    place = next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # noqa: PTH110  Path's may raise
    if not place.is_dir():
        return errno.ENOTDIR
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return errno.EROFS
    return None if os.access(place, os.W_OK | os.X_OK) else errno.EACCES


def has_daemon(names: RuntimeDirectory) -> bool:
    """True if a daemon runs in the directory, or may: it is closed to this user, or stopped."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as asking:
        try:
            answer = asking.connect_ex(os.fspath(names.lifeline_path))
        except OSError:  # the path is too long for a socket, so there is none
            return False
    return answer not in _NOBODY_THERE or _is_locked(names.lock_path)


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock, as a daemon does before it has sockets.

    It is asked without locking: a daemon that starts meanwhile would take that for another daemon.
    """
    try:
        status = path.stat()
        locks = LOCKS.read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    return any("FLOCK" in words and f"{device}:{status.st_ino}" in words for words in map(str.split, locks))


def unusable(path: Path, error: OSError) -> BatchdError:
    """Say why there can be no sockets in a directory, and what helps."""
    return BatchdError(_cannot_use(path, error.errno))


def _cannot_use(path: Path, number: int | None) -> str:
    advice = "make it writable for this user"
    if number in {errno.ENOSPC, errno.EDQUOT}:
        advice = "its file system has no space or no inodes left (df, df -i): make room there"
    return (
        f"the runtime directory {path} cannot be used: {os.strerror(number or 0)}; {advice}, or set runtime_dir in [daemon] "
        "(or BATCHD_RUNTIME_DIR)"
    )


def _make(path: Path) -> None:
    """Make the directory with its mode, whatever the umask; an existing one keeps its mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=DIRECTORY_MODE)
        path.chmod(DIRECTORY_MODE)
