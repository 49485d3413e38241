"""The runtime directory of a daemon: made and locked. DAEMON process; ``batchd check`` inspects it.

The lock is a file held with ``flock``: the kernel releases it with the process, so it is never
stale. The file is never removed: otherwise two daemons could hold two locks of one name.

Invariant: the process with the lock owns the sockets in the directory.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from batchd.config.directories import choose_runtime_directory
from batchd.config.schema import problem_at
from batchd.errors import AlreadyRunning, BatchdError, Problem, ProblemKind
from batchd_wire.runtime import RuntimeDirectory

DIRECTORY_MODE = 0o750
LOCKS = Path("/proc/locks")
_NOBODY_THERE = {errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR}


@contextmanager
def hold(configured: Path | None, *, is_private: bool = False, log: str = "") -> Iterator[RuntimeDirectory]:
    """Make and lock the runtime directory; at the end remove the sockets, then give up the lock.

    A private one was made for this daemon only, and is removed at the end. In any other one a link
    leads to the ``log``, if that is a file, also after the daemon's end. Raises
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
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        _lock(names, lock)
        stack.callback(_clean_up, names, lock, is_private=is_private)
        try:
            if is_private:
                names.one_script_path.touch()
            else:
                _link(names.log_path, log)
        except OSError as error:
            raise unusable(names.path, error) from None
        yield names


def _make(path: Path) -> None:
    """Make the directory with its mode, whatever the umask; an existing one keeps its mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=DIRECTORY_MODE)
        path.chmod(DIRECTORY_MODE)


def _lock(names: RuntimeDirectory, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise BatchdError(f"{names.lock_path} cannot be locked: {error.strerror}") from None
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        raise AlreadyRunning(
            f"another daemon (pid {holder or 'unknown'}) holds the runtime directory {names.path}; use it, stop it, or set "
            "another runtime_dir in [daemon] (or BATCHD_RUNTIME_DIR)"
        ) from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise unusable(names.path, error) from None


def _link(path: Path, log: str) -> None:
    """Replace the link to the log of the daemon before."""
    path.unlink(missing_ok=True)
    if log.startswith("/"):
        path.symlink_to(log)


def _clean_up(names: RuntimeDirectory, lock: int, *, is_private: bool) -> None:
    """Remove the sockets, unless the locked directory was removed and another made of its name."""
    try:
        is_ours = os.path.samestat(names.lock_path.lstat(), os.fstat(lock))
    except OSError:
        return
    if not is_ours:
        return
    for path in (names.lifeline_path, names.zmq_path):
        path.unlink(missing_ok=True)
    if is_private:
        names.one_script_path.unlink(missing_ok=True)
        names.lock_path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: another program's files stay
            names.path.rmdir()


def directory_problem(names: RuntimeDirectory) -> Problem | None:
    """Say why the directory cannot be used, without making it; None if no reason is found."""
    number: int | None = None
    folders = (names.path, *names.path.parents)
    try:
        place = next(folder for folder in folders if os.path.exists(folder))  # noqa: PTH110  Path's may raise
        if not place.is_dir():
            number = errno.ENOTDIR
        elif os.statvfs(place).f_flag & os.ST_RDONLY:
            number = errno.EROFS
        elif not os.access(place, os.W_OK | os.X_OK):
            number = errno.EACCES
    except OSError as error:
        number = error.errno
    return (
        problem_at(("daemon", "runtime_dir"), ProblemKind.RUNTIME_DIRECTORY, _cannot_use(names.path, number))
        if number
        else None
    )


def has_daemon(names: RuntimeDirectory) -> bool:
    """True if a daemon runs in the directory, or may: it is closed to this user, or stopped."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as asking:
        try:
            answer = asking.connect_ex(os.fspath(names.lifeline_path))
        except OSError:  # the path is too long for a socket, so there is none
            return False
    return answer not in _NOBODY_THERE or _is_locked(names.lock_path)


def _is_locked(path: Path) -> bool:
    """Look for a lock without taking it: a daemon that starts meanwhile would be refused."""
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
