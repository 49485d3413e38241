"""The files that steps read: are they there, are they still what they were, and how they are read. Daemon, workers and CLI.

    check    file_problem    is it there, and may we read it?
    daemon   digest_of       once, when the stream is opened; goes into its fingerprint, and to every worker
    worker   read_file       all of a small one
             MappedFile      a large one, as pages that all workers share
             changed_file    after they were read: are they what the daemon saw?

Invariant: a worker that makes rows has read what the daemon saw. A worker compares after it has
read, so a file that changes before or meanwhile is found; of a mapped one, whether it changes later
is looked at for every sample.
"""

import hashlib
import mmap
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import singledispatch
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias

from batchd.errors import KeyPath
from batchd.pipeline.effects import StepInvalid
from batchd.pipeline.kinds import step_to_plain
from batchd.pipeline.options import StepOptions

ADVICE = "restart the daemon to serve what it is now, as another stream"


Digests: TypeAlias = Mapping[Path, str]
"""Of the files that steps read."""


class StepFileInvalid(StepInvalid):
    """A file that a step reads is missing, not what it should be, or has changed; the text names it."""


def file_problem(path: Path) -> str | None:
    """What is wrong with a file before it is read; None where nothing is."""
    try:
        with open_file(path):
            return None
    except StepFileInvalid as problem:
        return str(problem)


def check_files(step: StepOptions) -> list[tuple[KeyPath, str]]:
    """What is wrong with the files of a step, each with the option that names it; empty if nothing is.

    Everything that would end a stream at its first batch is found here, when the daemon starts.
    """
    files = {option.name: path for option in fields(step) if isinstance(path := getattr(step, option.name), Path)}
    problems: list[tuple[KeyPath, str]] = [
        ((name,), problem) for name, path in files.items() if (problem := file_problem(path)) is not None
    ]
    if problems:
        return problems
    try:
        check_content(step)
    except StepInvalid as problem:
        named = [name for name, path in files.items() if str(path) in str(problem)]
        return [(tuple(named[:1]), str(problem))]
    return []


@singledispatch
def check_content(_step: StepOptions) -> None:
    """Raise ``StepInvalid`` if the files of a step are not what it needs.

    Families register what their steps need in their modules ``effects``.
    """


def open_file(path: Path) -> BufferedReader:
    """Open a regular file, waiting for no FIFO. Raises ``StepFileInvalid``."""
    try:
        return open(path, "rb", opener=_open_regular)
    except FileNotFoundError:
        raise StepFileInvalid(f"there is no file {path}") from None
    except OSError as error:
        raise StepFileInvalid(f"{path} cannot be read: {error.strerror}") from None


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits. Raises ``StepFileInvalid``."""
    with open_file(path) as stream:
        try:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise StepFileInvalid(f"{path} cannot be read: {error.strerror}") from None


def digests_of(steps: Iterable[StepOptions]) -> Digests:
    """The digests of all files that steps read. Raises ``StepFileInvalid``."""
    return {path: digest_of(path) for step in steps for path in step.files}


def named_by_content(step: StepOptions, digests: Digests) -> dict[str, object]:
    """The options of a step, with the digest of each file in the place of its path."""
    paths = {str(path): digests[path] for path in step.files}
    plain = step_to_plain(step)
    return {
        name: paths[str(value)] if isinstance(getattr(step, name), Path) else value for name, value in plain.items()
    }


def read_file(path: Path, bytes_max: int) -> bytes:
    """The content of a file that is no longer than it may be. Raises ``StepFileInvalid``."""
    with open_file(path) as stream:
        try:
            content = stream.read(bytes_max + 1)
        except OSError as error:
            raise StepFileInvalid(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > bytes_max:
        raise StepFileInvalid(f"{path} is longer than {bytes_max} bytes")
    return content


def changed_file(digests: Iterable[tuple[str, str]]) -> str | None:
    """What to say of the first file that is not what the daemon saw; None where all are. Takes paths with their digests."""
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
        """Raise ``StepFileInvalid`` where somebody has written to the file since. About 1 µs; before its memory is read."""
        if _status(self._descriptor) != self._status:
            raise StepFileInvalid(f"{self._path} was written to while it was in use; {ADVICE}")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _status(descriptor: int) -> tuple[int, int]:
    """What changes with the content, and not where the file is only renamed, or another takes its name."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StepFileInvalid(f"{path} is no regular file")
    return descriptor
