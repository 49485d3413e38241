"""One scan of a source: who is told of its progress, and what it looked at. Daemon.

What it looked at are its witnesses: as long as each folder and file still is what it was, another scan would find the same.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import time_ns
from typing import NamedTuple, TypeAlias

ReportProgress: TypeAlias = Callable[[int], None]
"""Called now and then with the number of samples found so far."""


class Witness(NamedTuple):
    """A file or folder as it was. Whatever happens to the content of either changes ``changed_ns``, the time of the kernel."""

    path: str
    size: int
    modified_ns: int
    changed_ns: int
    inode: int


class Survey:
    """What a scan reports. Without witnesses nobody can tell whether the source has changed, so it is scanned each time."""

    def __init__(self, progress: ReportProgress, python_path: Sequence[Path] = ()) -> None:
        self.progress = progress
        self.python_path = python_path
        """Where modules of people's own functions are looked for first."""
        self.started_ns = time_ns()
        self._seen: list[Witness] = []
        self._parts: list[Survey] = []

    def part(self, found_before: int) -> "Survey":
        """The survey of one of several sources, when those before it have so many samples."""
        part = Survey(lambda found: self.progress(found_before + found), self.python_path)
        self._parts.append(part)
        return part

    @property
    def witnesses(self) -> list[Witness]:
        """Everything that was looked at, also for its parts."""
        return self._seen + [one for part in self._parts for one in part.witnesses]

    def is_settled(self, settled_ns: int) -> bool:
        """Would each witness look different if it changed from now on? False where there are none, too."""
        last_ns = max((max(one.modified_ns, one.changed_ns) for one in self._seen), default=None)
        is_settled = last_ns is None or last_ns < self.started_ns - settled_ns
        has_any = bool(self._seen or self._parts)
        return has_any and is_settled and all(part.is_settled(settled_ns) for part in self._parts)

    def saw(self, path: bytes, status: os.stat_result) -> None:
        """The scan looked into this folder, or read this file; ``status`` is from before it did."""
        self.add(witness(path, status))

    def add(self, seen: Witness) -> None:
        """The scan looked at what this is the witness of."""
        self._seen.append(seen)


def witness(path: bytes, status: os.stat_result) -> Witness:
    """A file or folder as it is."""
    return Witness(os.fsdecode(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
