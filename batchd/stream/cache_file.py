"""Cache files, which outlive the daemon, and their folders. DAEMON process; commands list them.

    cache_dir/batchd-KIND-KEY.cache   opened, locked (flock), checked -> index in a memfd -> workers

The key identifies the samples, so a changed source has another file. The daemon that fills a file
holds its lock by an open file that no worker has, so the lock ends with the daemon. Workers of a
dead daemon may still append, which is harmless.

Invariant: no system call is made on the file once it is open, so a file server that hangs does not
hang the loop.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import EIO, ENODATA
from pathlib import Path
from time import sleep
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import structlog

from batchd.config.schema import problem_at
from batchd.config.tree import Config, StreamConfig
from batchd.data.pipeline.cache_split import crop_problem, cut_problem, decoded_files, media_problem
from batchd.data.sources.cache.disk import FILE_HEADER, FILE_MAGIC, key_seed, records_start, troubles
from batchd.data.sources.cache.memory import ENTRY, ENTRY_BYTES, HEADER_BYTES, open_to_append
from batchd.data.storage.paths import FileForeign, foreign, open_own, unreachable
from batchd.errors import Problem, ProblemKind
from batchd.runtime.limits import OncePerMinute
from batchd.stream.cache_memory import BLOCK_BYTES, CacheSpec, SharedCache, identity

_log = structlog.get_logger()

SUFFIX = ".cache"
PREFIX = "batchd-"
KEY_DIGITS = 32
_ATTEMPTS = 10
_PAUSE_S = 0.01


class CacheUnusable(OSError):  # noqa: N818  names what is wrong
    """The file of a cache, or its folder, cannot be used; the text says why, and what to do."""


class CacheOnDisk(SharedCache):
    """One cache on disk. Raises ``CacheUnusable``, and ``OSError`` without memory."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.path = cache_path(spec)
        self._notes_read = 0
        self._once_per_minute = OncePerMinute()
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            try:
                self._open()
            except CacheUnusable:
                raise
            except OSError as error:
                raise CacheUnusable(error.errno, f"{self.path} cannot be used: {error.strerror}") from None
            on_failure.pop_all()

    @property
    def used_bytes(self) -> int:
        """The length of its file, in bytes."""
        return self._header.used_bytes

    def resize(self, budget_bytes: int) -> None:
        """Set another budget. Samples beyond it stay."""
        self.spec = self.spec._replace(budget_bytes=budget_bytes)
        self.may_grow(is_open=True)

    def may_grow(self, *, is_open: bool) -> None:
        """Let workers keep samples from now on, up to the budget, or no more."""
        self._header.allow(self.spec.budget_bytes if is_open else 0)

    def tell_troubles(self) -> None:
        """Log new errors of the file that workers have noted, each kind once per minute."""
        found = troubles(self.descriptors[1], self._notes_read)
        self._notes_read += len(found)
        self.spoilt_samples += sum(one.number == 0 for one in found)
        for trouble in found:
            if not self._once_per_minute.allows("trouble", str(trouble.number)):
                continue
            if trouble.number:
                _log.warning(
                    "a cache on disk cannot be used at present",
                    file=str(self.path),
                    reason=os.strerror(trouble.number),
                    advice="samples are read from their source; free space, or check the disk",
                )
            else:
                _log.warning(
                    "a record of a cache on disk is damaged",
                    file=str(self.path),
                    sample=trouble.sample,
                    spoilt_samples=self.spoilt_samples,
                    advice="it is read from its source and kept again; if this repeats, check the disk",
                )

    @contextmanager
    def opened(self) -> Iterator[list[int]]:
        """The descriptors for one worker, which appends: its file has an offset of its own."""
        try:
            own = open_to_append(self.descriptors[-1])
        except OSError:  # no descriptor is left, or no such folder: the worker says so
            yield self.descriptors
            return
        try:
            yield [*self.descriptors, own]
        finally:
            os.close(own)

    def _open(self) -> None:
        lock = _locked_file(self.path, self.spec)
        self._stack.callback(os.close, lock)
        index_bytes = records_start(self.spec.samples)
        self._make_memory(index_bytes, index_bytes)
        # Another open file than the lock's, so that no worker holds the lock.
        self._own(os.open(f"/proc/self/fd/{lock}", os.O_RDWR | os.O_CLOEXEC))
        entries, used_bytes = _entries(self.descriptors[-1], self.spec.samples)
        self._header.write(entries, used_bytes, key_seed(bytes.fromhex(self.spec.key)))
        self.may_grow(is_open=True)
        _log.info(
            "cache on disk opened",
            file=str(self.path),
            held_samples=int(np.count_nonzero(entries)),
            samples=self.spec.samples,
            used_bytes=used_bytes,
            budget_bytes=self.spec.budget_bytes,
        )


class CacheFile(NamedTuple):
    """A cache file. ``in_use``: a daemon fills it; None if it cannot be opened to find out."""

    path: Path
    disk_bytes: int
    in_use: bool | None


def cache_files(folder: Path) -> Iterator[CacheFile]:
    """All cache files in a folder, by name. Raises ``OSError`` if the folder cannot be read."""
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
        with suppress(FileNotFoundError):
            taken = path.lstat()
            if stat.S_ISREG(taken.st_mode):
                yield CacheFile(path, taken.st_blocks * BLOCK_BYTES, _is_locked(path))


def _is_locked(path: Path) -> bool | None:
    """True if a daemon fills a cache file; None if the file cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def folder_problem(folder: Path) -> str | None:
    """The reason why this user cannot keep caches in a folder; None if it can."""
    if (problem := unreachable(folder)) is not None:
        return problem
    if not folder.exists():
        return f"{folder} does not exist: create it on a local disk (mkdir -p {folder})"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return f"uid {os.geteuid()} may not write into {folder}: chown it, or choose another folder"
    return None


def cache_problems(config: Config) -> list[Problem]:
    """Problems of a configuration's caches (pipelines, folders, sizes), without opening any."""
    found: list[tuple[str, str, str | None]] = []
    sizes: dict[tuple[str, Path], tuple[str, int | None]] = {}
    for name, stream in config.streams.items():
        found.append((name, "cache", _misfit(stream)))
        if stream.cache_dir is None or stream.cache_kind == "off":
            continue
        found.append((name, "cache_dir", folder_problem(stream.cache_dir)))
        other, size = sizes.setdefault((identity(stream), stream.cache_dir), (name, stream.cache_size))
        if size != stream.cache_size:
            text = f"{name} and {other} share one file, so both need the same cache_size"
            found.append((name, "cache_size", text))
    return [
        problem_at(("streams", name, key), ProblemKind.UNUSABLE_CACHE, text)
        for name, key, text in found
        if text is not None
    ]


def _misfit(stream: StreamConfig) -> str | None:
    """The reason why a pipeline cannot use its kind of cache; None if it can."""
    if stream.cache == "decoded":
        return cut_problem(stream.pipeline)
    if stream.cache == "pixels" and not decoded_files(stream.pipeline):
        return 'cache = "pixels" keeps images that only a "decode" step reads, and there is none; set cache = "encoded"'
    if stream.cache == "media":
        return media_problem(stream.pipeline)
    return crop_problem(stream.pipeline) if stream.cache == "points" else None


def cache_path(spec: CacheSpec) -> Path:
    """The path of a cache's file."""
    return Path(spec.folder) / f"{PREFIX}{spec.kind}-{spec.key[:KEY_DIGITS]}{SUFFIX}"


def tell_unwanted(wanted: set[Path]) -> None:
    """Log the cache files in the folders of the ``wanted`` ones that no running daemon uses."""
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
    """Open and lock a cache file, and make its header. Raises ``CacheUnusable``, ``OSError``."""
    problem = folder_problem(path.parent)
    if problem is not None:
        raise CacheUnusable(problem)
    for _ in range(_ATTEMPTS):
        with ExitStack() as unless_ready:
            try:
                descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
            except FileForeign as error:
                raise CacheUnusable(str(error)) from None
            unless_ready.callback(os.close, descriptor)
            try:
                if _is_ready(descriptor, path, spec):
                    unless_ready.pop_all()
                    return descriptor
            except BlockingIOError:
                # a command that only checks the lock holds it for a moment
                sleep(_PAUSE_S)
    raise CacheUnusable(_in_use(path))


def file_problem(spec: CacheSpec) -> str | None:
    """The reason why a cache file cannot be used, without changing it; None if it can."""
    path = cache_path(spec)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return foreign(path, status) or (_in_use(path) if _is_locked(path) else None)


def _in_use(path: Path) -> str:
    return f"another daemon fills {path}: give one of them another cache_dir, or have one daemon serve both"


def _is_ready(descriptor: int, path: Path, spec: CacheSpec) -> bool:
    """Lock a file and check that it is this cache, or begin one; False if it must be reopened.

    Raises ``BlockingIOError`` if another process has the lock, ``CacheUnusable``, and ``OSError``.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    opened = os.fstat(descriptor)
    try:
        if not os.path.samestat(opened, path.lstat()):
            return False
    except FileNotFoundError:
        return False
    header = FILE_HEADER.pack(FILE_MAGIC, spec.samples, bytes.fromhex(spec.key))
    found = os.pread(descriptor, len(header), 0)
    if found == header and opened.st_size >= records_start(spec.samples):
        return True
    if found.strip(b"\0"):  # make another file: workers of a dead daemon may still use this one
        _log.warning("a cache on disk is damaged and starts empty", file=str(path), reason="its header is invalid")
        path.unlink(missing_ok=True)
        return False
    os.ftruncate(descriptor, records_start(spec.samples))
    if os.pwrite(descriptor, header, 0) != len(header):
        raise OSError(EIO, os.strerror(EIO))
    return True


def _entries(file: int, samples: int) -> tuple[npt.NDArray[np.uint64], int]:
    """The file's valid entries, uint64 ``[samples]``, and its length. Raises ``OSError``."""
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
