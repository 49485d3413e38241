"""Folders and files that somebody named: are they there, may we read them, are they where they must be? Daemon, workers, CLI."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from batchd.errors import SourceInvalid
from batchd.storage.index import readable
from batchd.storage.location import Url, is_url
from batchd.storage.remote_files import bucket_problems, object_problems, opened
from batchd.storage.survey import Survey


def folder_problems(folder: Path) -> list[str]:
    """What is wrong with a folder of samples; empty where it can be scanned."""
    if isinstance(folder, Url):
        return bucket_problems(folder)
    if (problem := unreachable(folder)) is not None:
        return [problem]
    if not folder.is_dir():
        return [f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}"]
    if not os.access(folder, os.R_OK | os.X_OK):
        return [f"the folder {folder} is not readable for this user"]
    return []


def file_problems(file: Path, what: str) -> list[str]:
    """What is wrong with a file, which is ``what`` for people ("the list"); empty where it can be read."""
    if isinstance(file, Url):
        return object_problems(file)
    if (problem := unreachable(file)) is not None:
        return [problem]
    if not file.is_file():
        return [f"{file} is no file" if file.exists() else f"there is no file {file}"]
    if not os.access(file, os.R_OK):
        return [f"{what} {file} is not readable for this user"]
    return []


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


@contextmanager
def reading(file: Path, survey: Survey) -> Iterator[BinaryIO]:
    """A file that a scan reads, open, and among what the survey saw. Raises ``SourceInvalid`` where it cannot be read."""
    if isinstance(file, Url):
        with opened(file, survey) as stream:
            yield stream
        return
    try:
        with open(file, "rb", opener=open_regular) as stream:
            survey.read_file(file, os.fstat(stream.fileno()))
            yield stream
    except OSError as error:
        raise unreadable(os.fsencode(file), error) from None


def size_of(stream: BinaryIO) -> int:
    """The length of an open file; it is read from its first byte on after that."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return size


def look_at_folder(path: bytes, survey: Survey) -> tuple[int, int] | None:
    """Have the survey see a folder; what tells it from others, where links may lead to it. Raises ``SourceInvalid``."""
    if is_url(path):
        return None  # whoever lists it tells the survey what is there
    status = status_of(path)
    survey.saw(path, status)
    return status.st_dev, status.st_ino


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


def bound_of(root: Path, *, allow_outside_root: bool) -> bytes | None:
    """What links must not lead out of: the real path of the root; None where they may lead anywhere, and on servers."""
    return None if allow_outside_root or isinstance(root, Url) else os.path.realpath(os.fsencode(root))


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
    if is_url(root):
        return os.path.join(root, path)  # noqa: PTH118  bytes
    real = os.path.realpath(os.path.join(root, path))  # noqa: PTH118  bytes
    if not is_within(real, root):
        raise ValueError(
            f"a link leads out of the root, to {readable(real)}; set allow_outside_root = true if you mean it"
        )
    return real
