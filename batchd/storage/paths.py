"""Paths that a configuration or data name. Daemon, workers and CLI.

Whether the system lets us read them, and whether their links lead out of a folder.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from batchd.errors import SourceInvalid
from batchd.storage.index import readable
from batchd.storage.location import is_url


def unreachable(path: Path) -> str | None:
    """The reason why the system does not say whether a path exists; None if it does."""
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
    """The error for a path that the system does not let us read."""
    return SourceInvalid(f"{readable(path)} cannot be read: {error.strerror}")


def size_of(stream: BinaryIO) -> int:
    """The length of an open file; it is read from its first byte on after that."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return size


def open_regular(path: str, flags: int) -> int:
    """An opener that does not wait for the other end of a FIFO. Raises ``SourceInvalid``.

    It refuses all but regular files.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SourceInvalid(f"{path} is no regular file")
    return descriptor


def may_lead_out(path: bytes) -> bool:
    """True if a path from the data is absolute or has "..", so it may lead out of its folder."""
    return path.startswith(b"/") or b".." in path.split(b"/")


def bound_of(root: Path | bytes, *, allow_outside_root: bool) -> bytes | None:
    """The real path of the root, which links must not lead out of.

    None if they may lead anywhere, and for servers.
    """
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
    """True if a real path is ``bound`` or below it."""
    return real == bound or real.startswith(bound.rstrip(b"/") + b"/")


def below_root(root: bytes, path: bytes) -> bytes:
    """The real path of a file that data names, below ``root``, a folder's real path.

    All links are followed here, so the file that was checked is the one that is opened. Raises
    ``ValueError`` if the file is elsewhere.
    """
    if may_lead_out(path):
        raise ValueError("a path that may lead out of the root; set allow_outside_root = true if you mean it")
    real = real_path(os.path.join(root, path))  # noqa: PTH118  bytes
    if not is_within(real, root):
        raise ValueError(
            f"a link leads out of the root, to {readable(real)}; set allow_outside_root = true if you mean it"
        )
    return real
