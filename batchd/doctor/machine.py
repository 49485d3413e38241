"""What the kernel says of this machine and of this process's limits. Runs in the user's shell.

Invariant: everything is read under ``root`` or was given, so that a folder and a few numbers are a machine.
"""

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KIBIBYTE = 1024
UNLIMITED = resource.RLIM_INFINITY


def _own_limits() -> dict[str, int]:
    """The hard limits: a daemon raises its soft ones to these."""
    numbers = {
        "files": resource.RLIMIT_NOFILE,
        "locked memory": resource.RLIMIT_MEMLOCK,
        "processes": resource.RLIMIT_NPROC,
    }
    return {name: resource.getrlimit(number)[1] for name, number in numbers.items()}


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
