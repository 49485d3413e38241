"""Cache files, which outlive the daemon. DAEMON process: opens them and hands them to workers.

    cache_dir/batchd-KIND-KEY.cache   opened, locked (flock), checked -> index in a memfd -> workers

The key names the samples, so a source that has changed has another file. The daemon that fills a
file holds its lock, by an open file that no worker has: the lock ends with the daemon. Workers of a
dead daemon may still append; that is harmless.

Invariant: no system call is made on the file once it is open, so a file server that hangs does not
hang the loop.
"""

import fcntl
import os
import stat
from contextlib import ExitStack, suppress
from errno import EIO, ELOOP, ENODATA
from pathlib import Path
from time import sleep

import numpy as np
import numpy.typing as npt
import structlog

from batchd.daemon.limits import OncePerMinute
from batchd.daemon.memory.cache_folder import PREFIX, SUFFIX, cache_files, folder_problem, is_locked
from batchd.daemon.memory.cache_memory import CLAIMS_NAME, MEMORY_NAME, CacheSpec, SharedCache
from batchd.daemon.memory.slots import SEALS
from batchd.sources.cache.disk import FILE_HEADER, FILE_MAGIC, Trouble, key_seed, records_start, troubles
from batchd.sources.cache.memory import ENTRY, ENTRY_BYTES, HEADER_BYTES, CacheHeader

_log = structlog.get_logger()

KEY_DIGITS = 32
_ATTEMPTS = 10
_PAUSE_S = 0.01
_FOREIGN_WRITERS = stat.S_IWGRP | stat.S_IWOTH
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class CacheUnusable(OSError):  # noqa: N818  names what is wrong
    """The file of a cache, or its folder, cannot be used; the text says why and what helps."""


class CacheOnDisk(SharedCache):
    """One cache on disk. Raises ``CacheUnusable``, and ``OSError`` without memory."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.path = cache_path(spec)
        self._lock = -1
        self._notes_read = 0
        self._spoilt_samples = 0
        self._once_per_minute = OncePerMinute()
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self.close)
            try:
                self._open()
            except CacheUnusable:
                raise
            except OSError as error:
                raise CacheUnusable(error.errno, f"{self.path} cannot be used: {error.strerror}") from None
            where_it_fails.pop_all()

    @property
    def used_bytes(self) -> int:
        """How long its file is."""
        return self._header.used_bytes if self._header is not None else 0

    @property
    def spoilt_samples(self) -> int:
        """How many records were not what had been written."""
        return self._spoilt_samples

    def resize(self, budget_bytes: int) -> None:
        """Give it another budget. Where it has more already, it keeps that."""
        self.spec = self.spec._replace(budget_bytes=budget_bytes)
        if self._header is not None:
            self._header.allow(budget_bytes)

    def tell_troubles(self) -> None:
        """Log what workers have found wrong with the file since this was asked before."""
        found = troubles(self.descriptors[1], self._notes_read)
        self._notes_read += len(found)
        self._spoilt_samples += sum(one.number == 0 for one in found)
        for one in found:
            self._tell(one)

    def close(self) -> None:
        """Release the file and its lock. Other descriptors stay open."""
        super().close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _tell(self, trouble: Trouble) -> None:
        if not self._once_per_minute.allows(f"trouble {trouble.number}"):
            return
        if trouble.number:
            _log.warning(
                "a cache on disk cannot be used at present",
                file=str(self.path),
                reason=os.strerror(trouble.number),
                advice="samples are read from their source; make room, or look at the disk",
            )
        else:
            _log.warning(
                "a record of a cache on disk is damaged",
                file=str(self.path),
                sample=trouble.sample,
                spoilt_samples=self._spoilt_samples,
                advice="it is read from its source and kept again; if it goes on, look at the disk",
            )

    def _open(self) -> None:
        self._lock = _locked_file(self.path, self.spec)
        # Another open file than the lock's, so that no worker holds the lock.
        file = os.open(f"/proc/self/fd/{self._lock}", os.O_RDWR | os.O_CLOEXEC)
        entries, used_bytes = _entries(file, self.spec.samples)
        for name in (MEMORY_NAME, CLAIMS_NAME):
            self.descriptors.append(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.fchmod(self.descriptors[-1], 0o600)
        self.descriptors.append(file)
        memory = self.descriptors[0]
        os.posix_fallocate(memory, 0, records_start(self.spec.samples))
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
        self._header = CacheHeader(self.spec.samples, memory)
        self._header.write(entries, used_bytes, key_seed(bytes.fromhex(self.spec.key)))
        self._header.allow(self.spec.budget_bytes)
        _log.info(
            "cache on disk opened",
            file=str(self.path),
            held_samples=int(np.count_nonzero(entries)),
            samples=self.spec.samples,
            used_bytes=used_bytes,
            budget_bytes=self.spec.budget_bytes,
        )


def cache_path(spec: CacheSpec) -> Path:
    """Where the file of a cache is."""
    return Path(spec.folder) / f"{PREFIX}{spec.kind}-{spec.key[:KEY_DIGITS]}{SUFFIX}"


def tell_unwanted(wanted: set[Path]) -> None:
    """Log caches in the folders of the ``wanted`` ones that no running daemon uses."""
    for folder in sorted({path.parent for path in wanted}):
        with suppress(OSError):
            others = [one for one in cache_files(folder) if one.path not in wanted and one.in_use is not True]
            if others:
                names = " ".join(str(one.path) for one in others)
                _log.info(
                    "unused cache files",
                    folder=str(folder),
                    files=len(others),
                    disk_bytes=sum(one.disk_bytes for one in others),
                    advice=f"of sources or steps that have changed; to remove them: rm {names}",
                )


def _locked_file(path: Path, spec: CacheSpec) -> int:
    """Open and lock a cache file, with a valid header. Raises ``CacheUnusable``, ``OSError``."""
    problem = folder_problem(path.parent)
    if problem is not None:
        raise CacheUnusable(problem)
    for _ in range(_ATTEMPTS):
        with ExitStack() as unless_ready:
            descriptor = _opened(path)
            unless_ready.callback(os.close, descriptor)
            try:
                if _is_ready(descriptor, path, spec):
                    unless_ready.pop_all()
                    return descriptor
            except BlockingIOError:  # a process that only looks whether it is in use is gone in no time
                sleep(_PAUSE_S)
    raise CacheUnusable(_in_use(path))


def file_problem(spec: CacheSpec) -> str | None:
    """Say why a cache file cannot be used, without changing it; None if it can."""
    path = cache_path(spec)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        return _is_link(path)
    return _foreign(path, status) or (_in_use(path) if is_locked(path) else None)


def _in_use(path: Path) -> str:
    return f"another daemon fills {path}: give one of them another cache_dir, or have one daemon serve both"


def _is_link(path: Path) -> str:
    return f"{path} is a link: remove it"


def _foreign(path: Path, status: os.stat_result) -> str | None:
    """Why a file is not this user's alone; None where it is."""
    if status.st_uid != os.geteuid():
        reason, advice = f"belongs to user {status.st_uid}", "run the daemon as that user, or remove it"
    elif not stat.S_ISREG(status.st_mode) or status.st_mode & _FOREIGN_WRITERS:
        reason, advice = "is not this user's alone", "remove it"
    else:
        return None
    return f"{path} {reason}, so what it holds is not to be trusted: {advice}"


def _opened(path: Path) -> int:
    try:
        return os.open(path, _FLAGS | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno == ELOOP:
            raise CacheUnusable(_is_link(path)) from None
        raise


def _is_ready(descriptor: int, path: Path, spec: CacheSpec) -> bool:
    """Lock a file and check that it is the cache, or begin one; False if it has to be opened again.

    Raises ``BlockingIOError`` if another process has the lock, ``CacheUnusable``, and ``OSError``.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    opened = os.fstat(descriptor)
    problem = _foreign(path, opened)
    if problem is not None:
        raise CacheUnusable(problem)
    try:
        if not os.path.samestat(opened, path.lstat()):
            return False
    except FileNotFoundError:
        return False
    header = FILE_HEADER.pack(FILE_MAGIC, spec.samples, bytes.fromhex(spec.key))
    found = os.pread(descriptor, len(header), 0)
    if found == header and opened.st_size >= records_start(spec.samples):
        return True
    if found.strip(b"\0"):  # another file is begun, as workers of a daemon that has died may still have this one
        _log.warning("a cache on disk is damaged and starts empty", file=str(path), reason="its header is invalid")
        path.unlink(missing_ok=True)
        return False
    os.ftruncate(descriptor, records_start(spec.samples))
    if os.pwrite(descriptor, header, 0) != len(header):
        raise OSError(EIO, os.strerror(EIO))
    return True


def _entries(file: int, samples: int) -> tuple[npt.NDArray[np.uint64], int]:
    """The index of a file, less what cannot be; and how long the file is. Raises ``OSError``."""
    size = os.fstat(file).st_size
    memory = np.empty(samples, ENTRY)
    view, done = memory.view(np.uint8).data, 0
    while done < ENTRY_BYTES * samples:
        count = os.preadv(file, [view[done:]], HEADER_BYTES + done)
        if not count:
            raise OSError(ENODATA, os.strerror(ENODATA))
        done += count
    memory[(memory < records_start(samples)) | (memory >= size)] = 0
    return memory, size
