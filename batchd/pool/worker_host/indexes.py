"""Indexes of sources: received in parts, checked, and kept on disk. WORKER HOST process.

    DIGEST.index in the folder --(its bytes have the digest)--> sealed memory, which workers map
          ^                                                           ^
          +---- kept, written under another name and renamed ---------+-- the last part arrives
                                                                      |
    AskIndex(offset) ... AskIndex(offset + 4 parts)  -->  IndexPart --+

The name of an index is the SHA-256 of all its bytes, so a file that another user has changed is
detected. After a lost connection only the missing parts are transferred.

Invariant: sealed memory has the bytes that its digest names. A folder that is missing, damaged or
full costs only another transfer.
"""

import fcntl
import os
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from time import time

import structlog

from batchd.data.storage.index import MEMORY_NAME, SEALS, write_all
from batchd.pool.messages import INDEX_PART_BYTES, INDEX_PARTS_AHEAD

_log = structlog.get_logger()

FOLDER_BYTES_MAX = 4 << 30
"""Size of all kept indexes together; the least recently used ones are removed first."""
UNUSED_S = 30 * 24 * 3600.0
STALE_S = 3600.0
"""Age at which an unfinished file counts as abandoned."""
SUFFIX, UNFINISHED = ".index", ".unfinished"


class IndexDamaged(ValueError):  # noqa: N818  names what is wrong
    """The received bytes are not those of the index with this digest."""


class ReceivedIndex:
    """An index of ``size`` bytes, received in parts. Raises ``OSError`` without memory for it."""

    def __init__(self, digest: str, size: int) -> None:
        self.digest = digest
        self.size = size
        self.received = 0
        self._asked = 0
        self._sum = sha256()
        with ExitStack() as where_it_fails:
            self.descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            where_it_fails.callback(os.close, self.descriptor)
            if size:
                os.posix_fallocate(self.descriptor, 0, size)
            where_it_fails.pop_all()

    @property
    def is_complete(self) -> bool:
        """True if all bytes were received."""
        return self.received == self.size

    def restart(self) -> None:
        """Request all missing parts again: the link that should have sent them has ended."""
        self._asked = self.received

    def next_offsets(self) -> list[int]:
        """Offsets, in bytes, of the parts to request now."""
        end = min(self.size, self.received + INDEX_PARTS_AHEAD * INDEX_PART_BYTES)
        offsets = list(range(self._asked, end, INDEX_PART_BYTES))
        self._asked = max(self._asked, end)
        return offsets

    def add(self, data: memoryview) -> bool:
        """Append the next part; true if it was the last. Raises ``IndexDamaged`` for excess."""
        if self.received + len(data) > self.size:
            raise IndexDamaged(f"more than the {self.size} bytes of the index")
        write_all(self.descriptor, data, self.received)
        self._sum.update(data)
        self.received += len(data)
        return self.is_complete

    def seal(self) -> None:
        """Seal the complete index. Raises ``IndexDamaged`` if it has another digest."""
        if self._sum.hexdigest() != self.digest:
            raise IndexDamaged(f"its digest is {self._sum.hexdigest()} instead of {self.digest}")
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)

    def close(self) -> None:
        """Close its descriptor. The memory lasts until each process has unmapped it."""
        os.close(self.descriptor)


class IndexFolder:
    """Keeps indexes in ``folder``, created with the first one. With None it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, digest: str, size: int) -> ReceivedIndex | None:
        """The kept index, sealed, or None. Raises ``OSError`` if there is no memory for it."""
        if self._folder is None:
            return None
        file = self._folder / f"{digest}{SUFFIX}"
        with ExitStack() as unless_whole:
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    _cannot_use(file, str(error))
                return None
            unless_whole.callback(os.close, descriptor)
            index = ReceivedIndex(digest, size)
            unless_whole.callback(index.close)
            try:
                while part := os.read(descriptor, INDEX_PART_BYTES):
                    index.add(memoryview(part))
                index.seal()
                os.utime(descriptor)  # the least recently used files are removed first
            except (OSError, IndexDamaged) as error:
                _cannot_use(file, str(error))
                with suppress(OSError):
                    file.unlink()
                return None
            unless_whole.pop_all()
            os.close(descriptor)
        return index

    def keep(self, index: ReceivedIndex) -> None:
        """Keep a sealed index, and remove indexes that have not been used for long."""
        if self._folder is None:
            return
        file = self._folder / f"{index.digest}{SUFFIX}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(file, index)
            self._make_room(self._folder)
        except OSError as error:
            _log.warning("the index is not kept for the next start", file=str(file), reason=str(error))

    def _write(self, file: Path, index: ReceivedIndex) -> None:
        """Write the whole file under its final name, or nothing. Raises ``OSError``."""
        unfinished = file.with_suffix(f".{os.getpid()}{UNFINISHED}")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(unfinished.unlink, missing_ok=True)
            try:
                done = 0
                while done < index.size:
                    done += os.sendfile(descriptor, index.descriptor, done, index.size - done)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            unfinished.rename(file)
            where_it_fails.pop_all()

    def _make_room(self, folder: Path) -> None:
        """Remove unused and abandoned files, and the least recently used ones beyond the limit."""
        files = sorted(
            ((entry.stat(), Path(entry.path)) for entry in os.scandir(folder)), key=lambda one: one[0].st_mtime
        )
        total = sum(status.st_size for status, _file in files)
        for status, file in files:
            age_s = time() - status.st_mtime
            is_stale = file.suffix == UNFINISHED and age_s > STALE_S
            is_unwanted = file.suffix == SUFFIX and (age_s > UNUSED_S or total > FOLDER_BYTES_MAX)
            if is_stale or is_unwanted:
                total -= status.st_size
                file.unlink(missing_ok=True)


def _cannot_use(file: Path, reason: str) -> None:
    _log.warning("a kept index cannot be used, so it is received again", file=str(file), reason=reason)
