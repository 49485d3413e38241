"""Indexes of earlier scans, on disk: a daemon with a million samples starts at once. Daemon.

One file for each configured source:

    0       8               16           48      64
    +-------+---------------+------------+-------+------------------------------+--------------+
    | magic | witness bytes | sha256 of  | zeros | witnesses, JSON, zeros up to | the index,   |
    |       |               | all but it |       | a multiple of 64             | see `index`  |
    +-------+---------------+------------+-------+------------------------------+--------------+

A kept index is reused while no witness has changed: each folder that was listed, by the names that
the scan took, each file that was read; servers give the ETags of objects, and listings of buckets.
As with git's index, a file that changed within a moment of the scan may have changed once more
unseen, so such a scan is not kept.

Invariant: a cache that is missing, damaged, full, out of date or another user's costs a scan and
nothing else.
"""

import json
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from struct import Struct
from time import time_ns
from typing import BinaryIO

import structlog

from batchd.data.storage.access import Storage
from batchd.data.storage.index import IndexMalformed, SourceIndex, aligned, sealed_copy
from batchd.data.storage.paths import open_own
from batchd.data.storage.survey import Survey
from batchd.data.storage.values import Witness
from batchd.runtime import __version__

_log = structlog.get_logger()

MAGIC = b"BATCHCA1"
"""Names the format and its version; another layout gets another magic."""
PREFIX_BYTES = 64
SAMPLES_MIN = 10_000
"""Smaller sources are scanned in no time."""
CACHE_BYTES_MAX = 4 << 30
"""Size of all files together; the least recently used ones are removed first."""
SETTLED_NS = 2_000_000_000
"""A witness's times are trusted if it changed this long ago: clocks of file systems are coarse."""
STALE_NS = 3_600_000_000_000
"""An unfinished file of this age is abandoned."""
PlainSource = Mapping[str, object]
"""A configured source, as plain data."""
_PREFIX = Struct("<8sQ32s")
_FOREIGN_WRITERS = stat.S_IWGRP | stat.S_IWOTH


class IndexCache:
    """Keeps indexes in ``folder``, which is created with the first one. None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, source: PlainSource, storage: Storage) -> SourceIndex | None:
        """The index of a source that has not changed since; None if it has to be scanned."""
        if self._folder is None:
            return None
        file = self._file(self._folder, source)
        try:
            if not self._is_ours(self._folder):
                return None
            with os.fdopen(open_own(file, os.O_RDONLY), "rb") as stream:
                index = _index_in(stream, storage)
            os.utime(file)  # it was used
        except FileNotFoundError:
            return None
        except (OSError, IndexMalformed) as error:
            _log.warning("a kept index cannot be used, so the source is scanned", file=str(file), reason=str(error))
            return None
        return index

    def keep(self, source: PlainSource, index: SourceIndex, survey: Survey) -> None:
        """Keep the result of a scan if it is large enough and its witnesses can be trusted."""
        if self._folder is None or len(index) < SAMPLES_MIN or not survey.is_settled(SETTLED_NS):
            return
        file = self._file(self._folder, source)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_ours(self._folder):
                _write(file, _chunks(index, survey.witnesses))
                self._make_room(self._folder)
        except OSError as error:
            _log.warning("the index is not kept for the next start", file=str(file), reason=str(error))

    def _file(self, folder: Path, source: PlainSource) -> Path:
        # Keys stay in their order, which counts: the fields of a raw record are those of its bytes.
        name = sha256(json.dumps([__version__, source]).encode()).hexdigest()
        return folder / f"{name}.index"

    def _is_ours(self, folder: Path) -> bool:
        """True if no other user may write here: an index says which files are opened."""
        status = folder.stat()
        ours = status.st_uid == os.geteuid() and not status.st_mode & _FOREIGN_WRITERS
        if not ours:
            _log.warning("no index is kept or used: others may write into the folder", folder=str(folder))
        return ours

    def _make_room(self, folder: Path) -> None:
        """Remove the least recently used files beyond the limit, and abandoned ones."""
        files = sorted(
            ((entry.stat(), Path(entry.path)) for entry in os.scandir(folder)), key=lambda one: one[0].st_mtime
        )
        total = sum(status.st_size for status, _ in files)
        for status, file in files:
            is_stale = file.suffix == ".unfinished" and status.st_mtime_ns < time_ns() - STALE_NS
            if is_stale or (file.suffix == ".index" and total > CACHE_BYTES_MAX):
                total -= status.st_size
                file.unlink(missing_ok=True)


def _index_in(stream: BinaryIO, storage: Storage) -> SourceIndex:
    """Raises ``IndexMalformed``, and ``FileNotFoundError`` if a witness has changed."""
    prefix = stream.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        raise IndexMalformed(f"{len(prefix)} bytes are less than its beginning")
    magic, witness_bytes, digest = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise IndexMalformed(f"it starts with {magic!r} instead of {MAGIC!r}")
    start = aligned(PREFIX_BYTES + witness_bytes)
    if os.fstat(stream.fileno()).st_size <= start:
        raise IndexMalformed("it is cut")
    witnesses = stream.read(start - PREFIX_BYTES)
    descriptor = sealed_copy(stream, start)
    with ExitStack() as where_it_fails:
        where_it_fails.callback(os.close, descriptor)
        with mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory, memoryview(memory) as index:
            if _digest(witness_bytes, [memoryview(witnesses), index]) != digest:
                raise IndexMalformed("it is damaged")
        check_unchanged(witnesses[:witness_bytes], storage)
        found = SourceIndex.owning(descriptor)
        where_it_fails.pop_all()
    return found


def check_unchanged(witnesses: bytes, storage: Storage) -> None:
    """Raise ``FileNotFoundError`` for a witness, of those in JSON, that has changed."""
    seen = [Witness(*one) for one in json.loads(witnesses)]
    for store, is_remote in ((storage.local, False), (storage.remote, True)):
        if changed := store.first_changed([one for one in seen if one.is_remote == is_remote]):
            raise FileNotFoundError(changed)


def _chunks(index: SourceIndex, witnesses: list[Witness]) -> list[memoryview]:
    seen = json.dumps(witnesses).encode("ascii")
    padded = seen.ljust(aligned(PREFIX_BYTES + len(seen)) - PREFIX_BYTES, b"\0")
    chunks = [memoryview(padded), *_without_gaps(index)]
    prefix = _PREFIX.pack(MAGIC, len(seen), _digest(len(seen), chunks)).ljust(PREFIX_BYTES, b"\0")
    return [memoryview(prefix), *chunks]


def _digest(witness_bytes: int, chunks: Iterable[memoryview]) -> bytes:
    digest = sha256(MAGIC + witness_bytes.to_bytes(8, "little"))
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def _without_gaps(index: SourceIndex) -> Iterator[memoryview]:
    sections, size = index.sections()
    end = 0
    for start, section in sections:
        yield memoryview(bytes(start - end))
        yield section
        end = start + section.nbytes
    yield memoryview(bytes(size - end))


def _write(file: Path, chunks: Iterable[memoryview]) -> None:
    """Make a file that is whole or not there at all."""
    unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with ExitStack() as where_it_fails:
        where_it_fails.callback(unfinished.unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as stream:
            stream.writelines(chunks)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(file)
        where_it_fails.pop_all()
