"""CPU time of processes and of the machine, from ``/proc``. Standard library only.

Foreign programs make the wall-clock figures of a benchmark worse, and CPU time much less. So both
are measured, and how much of the CPUs others used.
"""

import os
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Indexes among the fields behind the name in a process's ``stat``: proc_pid_stat(5)."""
_IDLE, _IO_WAIT, _GUEST = 3, 4, 8
"""Indexes among the numbers of a CPU in ``/proc/stat``; those from ``_GUEST`` on are in others."""


class CpuTimes(NamedTuple):
    """Seconds of CPU time so far: of all programs on the CPUs of this process, and of some."""

    machine_s: float
    tree_s: float


def cpu_times(root: int) -> CpuTimes:
    """CPU time of the machine, and of process ``root`` with all its descendants."""
    return CpuTimes(_machine_s(), tree_cpu_s(root))


def tree_cpu_s(root: int) -> float:
    """CPU time of a process and all its living descendants, in seconds."""
    children: dict[int, list[int]] = {}
    spent: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            facts = Path(f"/proc/{entry.name}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        pid = int(entry.name)
        spent[pid] = int(facts[_USER]) + int(facts[_SYSTEM])
        children.setdefault(int(facts[_PARENT]), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return sum(spent.get(pid, 0) for pid in found) / _TICKS_PER_S


def _machine_s() -> float:
    """CPU time of all programs on the CPUs that this process may use, in seconds."""
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name in names:
            busy = [int(one) for place, one in enumerate(numbers[:_GUEST]) if place not in (_IDLE, _IO_WAIT)]
            ticks += sum(busy)
    return ticks / _TICKS_PER_S
