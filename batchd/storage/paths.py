"""Paths that a configuration or data name: whether the system lets us look, and whether links lead out. Daemon, workers, CLI."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from batchd.errors import SourceInvalid
from batchd.storage.index import readable
from batchd.storage.location import is_url


def unreachable(path: Path) -> str | None:
    """Why the system does not say whether something is there; None where it does."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{path} cannot be reached: {error.strerror}"
    return None


def status_of(path: bytes) -> os.stat_result:
    """The status of a file or folder that has to be there. Raises ``SourceInvalid``."""
    try:
        return os.stat(path)  # noqa: PTH116  bytes
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: bytes, error: OSError) -> SourceInvalid:
    """What to raise where the system does not let us look."""
    return SourceInvalid(f"{readable(path)} cannot be read: {error.strerror}")


def size_of(stream: BinaryIO) -> int:
    """The length of an open file; it is read from its first byte on after that."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return size


def open_regular(path: str, flags: int) -> int:
    """An opener: without waiting for the other end of a FIFO, and it refuses what is no file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SourceInvalid(f"{path} is no regular file")
    return descriptor


def may_lead_out(path: bytes) -> bool:
    """Does a path that data names say, by itself, that it may lead out of the folder that it is relative to?"""
    return path.startswith(b"/") or b".." in path.split(b"/")


def bound_of(root: Path | bytes, *, allow_outside_root: bool) -> bytes | None:
    """What links must not lead out of: the real path of the root; None where they may lead anywhere, and on servers."""
    path = os.fsencode(root)
    return None if allow_outside_root or is_url(path) else os.path.realpath(path)


def real_path(path: bytes) -> bytes:
    """Where a path leads when all links are followed; a URL leads to itself."""
    return path if is_url(path) else os.path.realpath(path)


def check_bound(path: bytes, bound: bytes | None) -> None:
    """Refuse a path whose links lead out of ``bound``. Raises ``SourceInvalid``."""
    real = os.path.realpath(path) if bound is not None else path
    if bound is not None and not is_within(real, bound):
        raise SourceInvalid(
            f"{readable(path)} is a link that leads out of the root, to {readable(real)}; set allow_outside_root = true if you "
            "mean it"
        )


def is_within(real: bytes, bound: bytes) -> bool:
    """Is a real path another one, or below it?"""
    return real == bound or real.startswith(bound.rstrip(b"/") + b"/")


def below_root(root: bytes, path: bytes) -> bytes:
    """Where a file really is that data names, below ``root``, a folder's real path. Raises ``ValueError`` if it is elsewhere.

    All links are followed here, so that what was looked at is what is opened.
    """
    if may_lead_out(path):
        raise ValueError("a path that may lead out of the root; set allow_outside_root = true if you mean it")
    real = real_path(os.path.join(root, path))  # noqa: PTH118  bytes
    if not is_within(real, root):
        raise ValueError(
            f"a link leads out of the root, to {readable(real)}; set allow_outside_root = true if you mean it"
        )
    return real
