"""CPU time that is not ours while we measure: of other programs, and stolen by the host.

    busy time of all CPUs - CPU time of a process with all its descendants = other programs'

A descendant that ended without being waited for still counts as ours: it stays as a zombie of the
measuring process, see ``common.adopt_orphans``. The kernel's own work counts as another program's.
The kernel counts in hundredths of a second, so a window of some seconds is needed.

``quiet`` repeats a measurement beside other programs. The sides of ``make bench-peers`` and ``make
bench-pool-peers`` are measured with it, and all of ``make bench`` but what README.md names.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from peers.common import adopt_orphans, cpu_s, tree

T = TypeVar("T")

CORES_MAX = 0.1
"""A measurement beside more than this is repeated."""
TRIES = 4
_TICKS_S = os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
"""Columns of the first line of /proc/stat, after its name: proc(5). Two repeat guests' time."""


class Beside(NamedTuple):
    """Cores that other programs used and that the host took; CPU seconds that were ours."""

    others: float
    stolen: float
    own_s: float

    @property
    def is_quiet(self) -> bool:
        """Whether a measurement beside this counts."""
        return self.others + self.stolen <= CORES_MAX

    def __str__(self) -> str:
        return f"others used {self.others:.2f} cores, the host took {self.stolen:.2f}"


class _Times(NamedTuple):
    """In seconds. ``busy``: of all CPUs, without what was stolen."""

    at: float
    busy: float
    stolen: float
    own: float


class Foreign:
    """Counts from its beginning on, for the tree of processes of ``root``."""

    def __init__(self, root: int) -> None:
        adopt_orphans()
        self._root = root
        self._begun = self._read()

    def beside(self) -> Beside:
        """What was used since the beginning."""
        now, begun = self._read(), self._begun
        passed, own = now.at - begun.at, now.own - begun.own
        others = (now.busy - begun.busy) - own
        return Beside(max(0.0, others / passed), (now.stolen - begun.stolen) / passed, own)

    def _read(self) -> _Times:
        own = sum(map(cpu_s, tree(self._root)))
        ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
        busy = sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT] - ticks[_STEAL]
        return _Times(time.monotonic(), busy / _TICKS_S, ticks[_STEAL] / _TICKS_S, own)


class Window(NamedTuple, Generic[T]):
    """A measurement, and what was used beside it."""

    found: T
    beside: Beside


def quiet(name: str, measure: Callable[[], Window[T]]) -> Window[T]:
    """Measure until others leave the CPUs alone, ``TRIES`` times at most; the last one is kept.

    Prints which windows were rejected, and which was kept though it was not quiet.
    """
    for _ in range(TRIES - 1):
        window = measure()
        if window.beside.is_quiet:
            return window
        print(f"  {name}: rejected, {window.beside}", flush=True)
    window = measure()
    if not window.beside.is_quiet:
        print(f"  {name}: kept after {TRIES} tries, {window.beside}", flush=True)
    return window
