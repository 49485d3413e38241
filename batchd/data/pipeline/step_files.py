"""The files that steps read: checks, digests and reading. Daemon, workers and CLI.

    check    check_files     are they there, readable, and what the step needs?
    daemon   digest_of       once, when the stream is opened; for its fingerprint and all workers
    worker   files_below     those of a folder, in one order
             read_file       all of a small one
             MappedFile      a large one, as pages that all workers share
             changed_file    after they were read: compares them with what the daemon read

Invariant: a worker that makes rows has read what the daemon read. A worker compares after it has
read, so it finds a file that changes before or meanwhile; a mapped one is checked for each sample.
"""

import hashlib
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, singledispatch
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.options import StepOptions, plain_options
from batchd.data.storage.patterns import Pattern, resolve_braces
from batchd.data.storage.values import fingerprint
from batchd.errors import KeyPath

if TYPE_CHECKING:
    import numpy as np

ADVICE = "restart the daemon to serve what it is now, as another stream"
FOLDER_FILES_MAX = 100_000
_PROBES, _PROBE_BYTES = 8, 1 << 16
"""What is read of a long file in a folder, for its digest."""


Digests: TypeAlias = Mapping[Path, str]
"""Of the files that steps read."""


class StepFileInvalid(StepInvalid):
    """A file that a step reads is missing, invalid, or has changed; the text names it."""


def check_files(step: StepOptions) -> list[tuple[KeyPath, str]]:
    """The problems of a step's files, with their options: all that would end its first batch."""
    problems: list[tuple[KeyPath, str]] = []
    for name, path in step.files.items():
        try:
            if name in step.folders:
                files_below(path)
            else:
                with open_file(path):
                    pass
        except StepFileInvalid as problem:
            problems.append(((name,), str(problem)))
    if problems:
        return problems
    try:
        check_content(step)
    except StepInvalid as problem:
        named = [name for name, path in step.files.items() if str(path) in str(problem)]
        return [(tuple(named[:1]), str(problem))]
    return []


@singledispatch
def check_content(_step: StepOptions) -> None:
    """Raise ``StepInvalid`` if a step's files are not what it needs; families register theirs."""


@contextmanager
def open_file(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file, waiting for no FIFO. Raises ``StepFileInvalid``, also for the block."""
    try:
        with open(path, "rb", opener=_open_regular) as stream:
            yield stream
    except OSError as error:
        from batchd.data.storage.paths import why_unreadable  # noqa: PLC0415  errors only, as it loads numpy

        raise StepFileInvalid(why_unreadable(path, error)) from None


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits. Raises ``StepFileInvalid``.

    That of a folder is of the names of all files below it, their sizes, and their content: of a
    long one, of its ends and of blocks between them.
    """
    if path.is_dir():
        digest = hashlib.sha256()
        for name in files_below(path):
            with open_file(path / name) as stream:
                size, content = fingerprint(stream, os.fstat(stream.fileno()).st_size, _PROBES, _PROBE_BYTES)
            digest.update(os.fsencode(name) + f"\0{size} {content}\n".encode())
        return digest.hexdigest()
    with open_file(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def files_below(root: Path, patterns: Sequence[str] = ("**/*",)) -> list[str]:
    """The files below a folder that one of the patterns matches, as paths from there, in order.

    Names with a dot in front are left out, and folders that are links. Raises ``StepFileInvalid``
    for a link that leads out of the folder, and for too many files.
    """
    resolved = [Pattern(plain) for text in patterns for plain in resolve_braces(text)]
    real, found = os.path.realpath(root), []
    try:
        with os.scandir(root):
            pass  # a path that is no folder
        for folder, folders, names in os.walk(root, onerror=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in [*folders, *names]:
                _check_link(os.path.join(folder, name), real)  # noqa: PTH118  names need not be text
            below = os.path.relpath(folder, root)
            found += [name if below == "." else f"{below}/{name}" for name in names if not name.startswith(".")]
            if len(found) > FOLDER_FILES_MAX:
                raise StepFileInvalid(f"{root} has more than {FOLDER_FILES_MAX} files; name a folder of these alone")
    except OSError as error:
        what = f"{error.filename} cannot be read: {error.strerror}" if root.exists() else f"there is no folder {root}"
        raise StepFileInvalid(what) from None
    ordered = sorted(found, key=os.fsencode)
    return [name for name in ordered if any(one.matches(os.fsencode(name).split(b"/")) for one in resolved)]


def _raise(error: OSError) -> None:
    raise error


def _check_link(path: str, root: str) -> None:
    if os.path.islink(path):  # noqa: PTH114  names need not be text
        real = os.path.realpath(path)
        if not real.startswith(root.rstrip("/") + "/"):
            raise StepFileInvalid(f"{path} is a link that leads out of the folder, to {real}; copy the file there")


def digests_of(steps: Iterable[StepOptions]) -> Digests:
    """The digests of all files that steps read. Raises ``StepFileInvalid``."""
    return {path: digest_of(path) for step in steps for path in step.files.values()}


def named_by_content(step: StepOptions, digests: Digests) -> dict[str, object]:
    """The options of a step, with the digest of each file in the place of its path."""
    plain = plain_options(step, partial(named_by_content, digests=digests))
    said = {name: value for name, value in plain.items() if name not in step.unsaid}
    return {**said, **{name: digests[path] for name, path in step.files.items()}}


def read_file(path: Path, bytes_max: int) -> bytes:
    """The content of a file that is no longer than it may be. Raises ``StepFileInvalid``."""
    with open_file(path) as stream:
        content = stream.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise StepFileInvalid(f"{path} is longer than {bytes_max} bytes")
    return content


def npy_header(stream: BinaryIO, path: Path) -> tuple["np.dtype[Any]", tuple[int, ...], bool]:
    """Type, shape and whether columns are first in memory, of a .npy file; leaves its numbers.

    Raises ``StepFileInvalid``. The header is read as text: nothing is unpickled.
    """
    from numpy.lib import format as npy  # noqa: PLC0415  loads numpy

    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
    except ValueError as error:
        raise StepFileInvalid(f"{path} is not a .npy file, or it is cut: {str(error).splitlines()[0]}") from None
    return dtype, shape, is_fortran


def changed_file(digests: Iterable[tuple[str, str]]) -> str | None:
    """Describe the first of (path, digest) that is not what the daemon read; None if all are."""
    for path, digest in digests:
        try:
            now = digest_of(Path(path))
        except StepFileInvalid as problem:
            return f"{problem}; it was there when the daemon started"
        if now != digest:
            return f"{path} has changed since the daemon started; {ADVICE}"
    return None


class MappedFile:
    """A file as memory, read-only; its pages are the kernel's, the same for all workers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_file(path) as stream:
            self._descriptor = os.dup(stream.fileno())
        self._status = _status(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        self.memory = memoryview(mmap.mmap(self._descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ) if size else b"")

    def check(self) -> None:
        """Raise ``StepFileInvalid`` if the file was written to since; about 1 µs."""
        if _status(self._descriptor) != self._status:
            raise StepFileInvalid(f"{self._path} was written to while it was in use; {ADVICE}")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _status(descriptor: int) -> tuple[int, int]:
    """Return what changes with the content, but not if the file is only renamed or replaced."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StepFileInvalid(f"{path} is not a regular file")
    return descriptor
