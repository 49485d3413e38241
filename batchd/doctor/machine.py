"""What the kernel says of this machine and of this process's limits. Runs in the user's shell.

Invariant: everything is read under ``root`` or was given, so that a folder and a few numbers are a
machine.
"""

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

KIBIBYTE = 1024
UNLIMITED = resource.RLIM_INFINITY


def _own_limits() -> dict[str, int]:
    """The limits that count: of files the hard one, to which a daemon raises the soft one, and else the soft ones."""
    soft, hard = 0, 1
    return {
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[hard],
        "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[soft],
        "processes": resource.getrlimit(resource.RLIMIT_NPROC)[soft],
    }


class Process(NamedTuple):
    """One process: whose it is (the real user; -1 where that cannot be seen), and how many threads it has."""

    user: int
    threads: int


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, as this process sees it."""

    root: Path = Path("/")
    limits: Mapping[str, int] = field(default_factory=_own_limits)
    """Of "files", "locked memory" (bytes) and "processes"; ``UNLIMITED`` where there is none."""
    affinity: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """CPUs on which this process may run."""
    user: int = field(default_factory=os.geteuid)

    def read(self, path: str | Path) -> str:
        """The text of a file of the kernel, without its last line end; "" where there is none."""
        place = self.root / str(path).lstrip("/") if not Path(path).is_relative_to(self.root) else Path(path)
        try:
            return place.read_text(errors="replace").strip()
        except OSError:
            return ""

    def pids(self) -> list[int]:
        """All processes that can be seen."""
        return [int(folder.name) for folder in (self.root / "proc").glob("[0-9]*") if folder.name.isdecimal()]

    def process(self, pid: int) -> Process:
        """What is known of a process; no thread where it is gone."""
        lines = (line.partition(":") for line in self.read(f"/proc/{pid}/status").splitlines())
        facts = {name: words.split() for name, _, words in lines}
        return Process(int(facts.get("Uid", ["-1"])[0]), int(facts.get("Threads", ["0"])[0]))

    def number(self, path: str | Path) -> int | None:
        """A file of the kernel that holds one number; None where it does not."""
        text = self.read(path)
        return int(text) if text.isdecimal() else None

    def table(self, path: str | Path) -> dict[str, int]:
        """The numbers of a file with a name and a number on each line; those in kB as bytes."""
        numbers = {}
        for line in self.read(path).splitlines():
            name, number, *unit = [*line.replace(":", " ").split(), ""][:3]
            if number.isdecimal():
                numbers[name] = int(number) * (KIBIBYTE if unit == ["kB"] else 1)
        return numbers

    def chosen(self, path: str | Path) -> str:
        """What stands in brackets among the choices, as in "always [madvise] never"; "" where there is no such file."""
        return self.read(path).partition("[")[2].partition("]")[0]


@dataclass(frozen=True, slots=True)
class Running:
    """What the daemon that runs here has already, and another one, or itself anew, would have in its place."""

    memory_bytes: int = 0
    """Of its slots."""
    pids: frozenset[int] = frozenset()
    """Its processes."""

    def shares_groups(self, machine: Machine) -> bool:
        """Is it in the control groups of whoever asks, so that what it takes is taken from these?"""
        own = machine.read("/proc/self/cgroup")
        return any(machine.read(f"/proc/{pid}/cgroup") == own for pid in self.pids)


NOTHING_RUNS = Running()
