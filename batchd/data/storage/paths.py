"""Files of this machine: which can be read, and where links lead. Daemon, workers and CLI.

A worker keeps shards, which are files with many samples, open while samples of them are read.
Invariant: at most ``SHARDS_MAX`` are open for one stream in one worker: the most recently used.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from batchd.data.samples.errors import OUR_OWN_FAULTS, SampleUnreadable
from batchd.data.samples.location import is_url
from batchd.data.storage.index import readable
from batchd.data.storage.rows import RowsFile
from batchd.data.storage.values import Version, version_of
from batchd.errors import SourceInvalid
from batchd.runtime.suggestions import nearly

_DIGITS = re.compile(r"\d")
"""Names with other digits are other files, not typos."""
NEIGHBOURS_MAX = 10_000
"""Entries of a folder among which a name with a typo is looked for."""
SHARDS_MAX = 64
"""Shards that one worker keeps open for one stream."""
ZEROS_BYTES = 64 << 10
"""Read at once behind the end of a container."""
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


_FOREIGN_WRITERS = stat.S_IWGRP | stat.S_IWOTH


class FileForeign(OSError):  # noqa: N818  names what is wrong
    """Another user may have written a file of our own folder; the text says why, and what to do."""


def foreign(path: Path, status: os.stat_result) -> str | None:
    """Text that other users own or may write a file; None if only this user may."""
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link: remove it"
    if status.st_uid != os.geteuid():
        reason, advice = f"belongs to user {status.st_uid}", "run the daemon as that user, or remove it"
    elif not stat.S_ISREG(status.st_mode):
        reason, advice = "is no regular file", "remove it"
    elif status.st_mode & _FOREIGN_WRITERS:
        reason, advice = "can be written by other users", "remove it"
    else:
        return None
    return f"{path} {reason}, so its content cannot be trusted: {advice}"


def open_own(path: Path, flags: int) -> int:
    """Open a file of ``cache_dir``, which no other user may write.

    Every file there that decides something is opened by this. Raises ``FileForeign``, ``OSError``.
    """
    safely = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags | safely, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileForeign(f"{path} is a link: remove it") from None
        raise
    problem = foreign(path, os.fstat(descriptor))
    if problem is not None:
        os.close(descriptor)
        raise FileForeign(problem)
    return descriptor


def unreachable(path: Path) -> str | None:
    """The reason why the system does not say whether a path exists; None if it does."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{path} cannot be reached: {error.strerror}"
    return None


def absent(what: str, path: Path) -> str:
    """The problem of a file or folder that is not there, with one whose name differs by a typo."""
    there = next((parent for parent in path.parents if parent.is_dir()), None)
    if there is not None:
        name, *below = path.relative_to(there).parts
        with suppress(OSError), os.scandir(there) as entries:
            names = [entry.name for entry in islice(entries, NEIGHBOURS_MAX)]
            near = nearly(name, (one for one in names if _DIGITS.findall(one) == _DIGITS.findall(name)))
            if near is not None and (meant := there.joinpath(near, *below)).exists():
                return f"there is no {what} {path}; did you mean {meant}?"
    return f"there is no {what} {path}"


def why_unreadable(path: Path, error: OSError) -> str:
    """Say why a file that someone named cannot be read, and what helps."""
    if isinstance(error, FileNotFoundError):
        return absent("file", path)
    right = f"; give this user (uid {os.geteuid()}) the right to read it" if isinstance(error, PermissionError) else ""
    return f"{path} cannot be read: {error.strerror}{right}"


def why_unwritable(path: Path, error: OSError) -> str:
    """Say why a file that a command writes cannot be written, and what helps."""
    folder, reason = path.absolute().parent, f"{error.strerror}; "
    if isinstance(error, FileNotFoundError) and not folder.is_dir():
        reason = f"{absent('folder', path.parent)}; make it, or "
    elif isinstance(error, PermissionError):
        reason = f"this user (uid {os.geteuid()}) may not write to {folder}; give it the right, or "
    elif error.errno in {errno.ENOSPC, errno.EDQUOT}:
        reason += "make room there, or "
    return f"{path} cannot be written: {reason}name another place"


def status_of(path: bytes) -> os.stat_result:
    """The status of a file or folder that has to be there. Raises ``SourceInvalid``."""
    try:
        return os.stat(path)  # noqa: PTH116  bytes
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: bytes, error: OSError) -> SourceInvalid:
    """The error for a path that the system does not let us read."""
    return SourceInvalid(f"{readable(path)} cannot be read: {error.strerror}")


def size_of(stream: BinaryIO) -> int:
    """The length of an open file; it is read from its first byte on after that."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return size


def behind_the_end(stream: BinaryIO, end: int, looked: Callable[[], None] = lambda: None) -> str:
    """What is wrong with the bytes of a container behind its end; "" for zeros, which pad it."""
    place = stream.seek(end)
    while block := stream.read(ZEROS_BYTES):
        if rest := block.lstrip(b"\0"):
            first = place + len(block) - len(rest)
            return f"ends at byte {end}, and has other bytes behind its end, from byte {first} on, which no sample would have"
        place += len(block)
        looked()
    return ""


def open_regular(path: str, flags: int) -> int:
    """An opener of regular files that does not wait for a FIFO. Raises ``SourceInvalid``."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SourceInvalid(f"{path} is not a regular file")
    return descriptor


def may_lead_out(path: bytes) -> bool:
    """True if a path from the data is absolute or has "..", so it may lead out of its folder."""
    return path.startswith(b"/") or b".." in path.split(b"/")


def bound_of(root: Path | bytes, *, allow_outside_root: bool) -> bytes | None:
    """The real path that links must not lead out of; None if they may, and for servers."""
    path = os.fsencode(root)
    return None if allow_outside_root or is_url(path) else os.path.realpath(path)


def real_path(path: bytes) -> bytes:
    """The path with all links followed; a URL is unchanged."""
    return path if is_url(path) else os.path.realpath(path)


def check_bound(path: bytes, bound: bytes | None) -> None:
    """Refuse a path whose links lead out of ``bound``. Raises ``SourceInvalid``."""
    real = os.path.realpath(path) if bound is not None else path
    if bound is not None and not is_within(real, bound):
        raise SourceInvalid(f"{readable(path)} is a link that {_leads_out(real)}")


def _leads_out(real: bytes) -> str:
    return f"leads out of the root, to {readable(real)}; set allow_outside_root = true if you mean it"


def check_inside(path: bytes) -> None:
    """Raise ``ValueError`` for a path that may lead out of its root, whatever links there are."""
    if may_lead_out(path):
        raise ValueError("a path that may lead out of the root; set allow_outside_root = true if you mean it")


def is_within(real: bytes, bound: bytes) -> bool:
    """True if a real path is ``bound`` or below it."""
    return real == bound or real.startswith(bound.rstrip(b"/") + b"/")


def below_root(root: bytes, path: bytes) -> bytes:
    """The real path of a file that data names; ``ValueError`` unless it is below a real ``root``.

    All links are followed here, so the file that was checked is the one that is opened.
    """
    check_inside(path)
    real = real_path(os.path.join(root, path))  # noqa: PTH118  bytes
    if not is_within(real, root):
        raise ValueError(f"a link {_leads_out(real)}")
    return real


class OpenShards:
    """Descriptors of shards by their paths. Belongs to one reader.

    ``bound``: see ``bound_of``. ``versions``: the files as they were scanned.
    """

    def __init__(self, bound: bytes | None = None, versions: Mapping[str, Version] = MappingProxyType({})) -> None:
        self._bound = bound
        self._versions = {os.fsencode(where): version for where, version in versions.items()}
        self._descriptors: dict[bytes, int] = {}
        """In order of use, the most recent last."""
        self._rows: dict[bytes, RowsFile] = {}
        """Of those whose rows are read."""

    def descriptor(self, file: bytes) -> int:
        """The descriptor of a shard, which stays this object's."""
        descriptor = self._descriptors.pop(file, None)
        if descriptor is None:
            if len(self._descriptors) >= SHARDS_MAX:
                self._close(next(iter(self._descriptors)))
            descriptor = open_within(file, self._bound)
        self._descriptors[file] = descriptor
        return descriptor

    def rows(self, file: bytes) -> RowsFile:
        """The rows of a shard, valid until another one is opened."""
        descriptor = self.descriptor(file)
        if file not in self._rows:
            self._rows[file] = RowsFile(descriptor)
        return self._rows[file]

    def check(self, file: bytes) -> None:
        """Raise ``SampleUnreadable`` if an open shard has changed since the scan; read it first."""
        version = self._versions.get(file)
        difference = version.differs_from(version_of(os.fstat(self._descriptors[file]))) if version is not None else ""
        if difference:
            raise SampleUnreadable(f"its file has changed since the daemon read it: {difference}; restart the daemon")

    def forget(self, file: bytes) -> None:
        """Close a shard if it is open; it is opened again when it is read."""
        if file in self._descriptors:
            self._close(file)

    def close(self) -> None:
        """Close those that are open."""
        while self._descriptors:
            self._close(next(reversed(self._descriptors)))

    def _close(self, file: bytes) -> None:
        if file in self._rows:
            self._rows.pop(file).close()
        os.close(self._descriptors.pop(file))


def open_within(path: bytes, bound: bytes | None) -> int:
    """Open a file to read; the caller closes it. Raises as ``check_opened``, and ``OSError``."""
    with ExitStack() as where_it_fails:
        descriptor = os.open(path, OPEN_FLAGS)
        where_it_fails.callback(os.close, descriptor)
        check_opened(descriptor, bound)
        where_it_fails.pop_all()
    return descriptor


def check_opened(descriptor: int, bound: bytes | None) -> None:
    """Raise ``SampleUnreadable`` outside of ``bound``: no link can change once the file is open."""
    if bound is None:
        return
    real = os.readlink(b"/proc/self/fd/%d" % descriptor)  # noqa: PTH115  bytes
    if not is_within(real, bound):
        raise SampleUnreadable(f"is a link that {_leads_out(real)}")


@contextmanager
def blaming_the_sample() -> Iterator[None]:
    """An error of the system makes the sample a bad one; see ``blamed``."""
    try:
        yield
    except OSError as error:
        raise blamed(error) from None


def blamed(error: OSError) -> Exception:
    """An error as the sample's fault, unless this process has no descriptors or memory left."""
    return error if error.errno in OUR_OWN_FAULTS else SampleUnreadable(os.strerror(error.errno or errno.EIO))
