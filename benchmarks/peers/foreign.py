"""CPU time that is not a side's while it is measured: of other programs, and stolen by the host.

    busy time of all CPUs - CPU time of the side with all its descendants = other programs'

A descendant that ended without being waited for counts as another program; so does the kernel's own
work. The kernel counts in hundredths of a second, so a window of some seconds is needed.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

import common

CORES_MAX = 0.1
"""A measurement beside more than this is repeated."""
_TICKS_S = os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
"""Columns of the first line of /proc/stat, behind its name: proc(5). Two more repeat guests' time."""


class _Times(NamedTuple):
    """In seconds. ``busy``: of all CPUs, without what was stolen."""

    at: float
    busy: float
    stolen: float
    own: float


class Foreign:
    """Counts from its beginning on, for the tree of processes of ``root``."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._begun = self._read()

    def cores(self) -> tuple[float, float]:
        """Cores that other programs used since the beginning, and that the host took."""
        now, begun = self._read(), self._begun
        passed = now.at - begun.at
        others = (now.busy - begun.busy) - (now.own - begun.own)
        return max(0.0, others / passed), (now.stolen - begun.stolen) / passed

    def _read(self) -> _Times:
        own = sum(map(common.cpu_s, common.tree(self._root)))
        ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
        busy = sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT] - ticks[_STEAL]
        return _Times(time.monotonic(), busy / _TICKS_S, ticks[_STEAL] / _TICKS_S, own)
