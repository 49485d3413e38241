"""Readings of this machine and of this process's limits, and findings. Runs in the user's shell.

Invariant: everything is read under ``root`` or passed in, so a folder and a few numbers describe a
machine.
"""

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

KIBIBYTE = 1024
UNLIMITED = resource.RLIM_INFINITY


def _own_limits() -> dict[str, int]:
    """The soft limits, but the hard one of files: a daemon raises its soft one to that."""
    soft, hard = 0, 1
    return {
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[hard],
        "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[soft],
        "file size": resource.getrlimit(resource.RLIMIT_FSIZE)[soft],
        "processes": resource.getrlimit(resource.RLIMIT_NPROC)[soft],
    }


class Process(NamedTuple):
    """One process: its real user (-1 if unknown) and its number of threads."""

    user: int
    threads: int


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, as this process sees it."""

    root: Path = Path("/")
    limits: Mapping[str, int] = field(default_factory=_own_limits)
    """Of "files", "locked memory", "file size" (bytes) and "processes"; else ``UNLIMITED``."""
    affinity: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """CPUs on which this process may run."""
    user: int = field(default_factory=os.geteuid)

    def read(self, path: str | Path) -> str:
        """The stripped text of a file of the kernel; "" if it cannot be read."""
        place = self.root / str(path).lstrip("/") if not Path(path).is_relative_to(self.root) else Path(path)
        try:
            return place.read_text(errors="replace").strip()
        except OSError:
            return ""

    def pids(self) -> list[int]:
        """Ids of all visible processes."""
        return [int(folder.name) for folder in (self.root / "proc").glob("[0-9]*") if folder.name.isdecimal()]

    def process(self, pid: int) -> Process:
        """User and threads of a process; no threads if it has ended."""
        lines = (line.partition(":") for line in self.read(f"/proc/{pid}/status").splitlines())
        facts = {name: words.split() for name, _, words in lines}
        return Process(int(facts.get("Uid", ["-1"])[0]), int(facts.get("Threads", ["0"])[0]))

    def number(self, path: str | Path) -> int | None:
        """The number in a file of the kernel; None if it has none."""
        text = self.read(path)
        return int(text) if text.isdecimal() else None

    def table(self, path: str | Path) -> dict[str, int]:
        """Names and numbers of a file with one of each a line; those in kB as bytes."""
        numbers = {}
        for line in self.read(path).splitlines():
            name, number, *unit = [*line.replace(":", " ").split(), ""][:3]
            if number.isdecimal():
                numbers[name] = int(number) * (KIBIBYTE if unit == ["kB"] else 1)
        return numbers

    def chosen(self, path: str | Path) -> str:
        """The choice in brackets, as in "always [madvise] never"; "" without such a file."""
        return self.read(path).partition("[")[2].partition("]")[0]


@dataclass(frozen=True, slots=True)
class Running:
    """Resources of the running daemon, which are available to its next start."""

    memory_bytes: int = 0
    """Of its slots."""
    pids: frozenset[int] = frozenset()
    """Its processes."""

    def shares_groups(self, machine: Machine) -> bool:
        """True if it is in this process's control groups, so that its resources count there."""
        own = machine.read("/proc/self/cgroup")
        return any(machine.read(f"/proc/{pid}/cgroup") == own for pid in self.pids)


NOTHING_RUNS = Running()


class Level(StrEnum):
    """Severity of a finding, in ascending order."""

    OK = "ok"
    NOTE = "note"
    """Good to know; no action needed."""
    WARNING = "warning"
    """It works, but could be faster or safer."""
    PROBLEM = "problem"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: a subject, its state, and what helps ("" if nothing is needed)."""

    subject: str
    level: Level
    found: str
    advice: str = ""


def ok(subject: str, found: str) -> Finding:
    """All right."""
    return Finding(subject, Level.OK, found)


def note(subject: str, found: str, advice: str = "") -> Finding:
    """Good to know."""
    return Finding(subject, Level.NOTE, found, advice)


def warning(subject: str, found: str, advice: str) -> Finding:
    """It works, but could be better; ``advice`` says how."""
    return Finding(subject, Level.WARNING, found, advice)


def problem(subject: str, found: str, advice: str) -> Finding:
    """It does not work; ``advice`` says what helps."""
    return Finding(subject, Level.PROBLEM, found, advice)
