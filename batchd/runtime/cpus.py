"""How many CPUs this process may use. Daemon and CLI; standard library only.

The answer is the affinity mask ∩ the CPU quota of the control group and of every group above it,
version 1 or 2. Never ``os.cpu_count()``: it counts the CPUs of the machine, not of the container.

Invariant: the answer is at least 1; a missing or malformed file means "no quota", never an error.
"""

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import NamedTuple


class ControlGroup(NamedTuple):
    """A control group that limits this process, or one above it."""

    folder: Path
    version: int


def available_cpus(filesystem: Path = Path("/")) -> int:
    """Number of CPUs that this process may use; a quota of 1.5 CPUs counts as 2."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(ceil, cpu_quotas(filesystem))]))


def cpu_quotas(filesystem: Path = Path("/")) -> Iterator[float]:
    """Each CPU quota that applies, in CPUs."""
    for folder, version in control_groups("cpu", filesystem):
        if version == 1:
            words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            words = _read(folder / "cpu.max").split()
        match words:
            case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period) > 0:
                yield int(quota) / int(period)


def control_groups(controller: str, filesystem: Path = Path("/")) -> Iterator[ControlGroup]:
    """The groups whose ``controller`` ("cpu", "memory", "pids") limits this process."""
    groups = _groups(filesystem, controller)
    for version, root, point in _mounts(filesystem, controller):
        group = groups.get(version)
        if group is not None:
            top = filesystem / point.relative_to("/")
            folder = top / group.relative_to(root) if group.is_relative_to(root) else top
            for level in (folder, *folder.parents):
                if level.is_relative_to(top):
                    yield ControlGroup(level, version)


def _groups(filesystem: Path, controller: str) -> dict[int, Path]:
    """The group of this process, by version of the control groups."""
    groups = {}
    for line in _read(filesystem / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups[2] = Path(path)
        elif controller in controllers.split(","):
            groups[1] = Path(path)
    return groups


def _mounts(filesystem: Path, controller: str) -> Iterator[tuple[int, Path, Path]]:
    """Version, root of the hierarchy and mount point of each mount that may have ``controller``."""
    for line in _read(filesystem / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")  # proc(5): the type follows a lone hyphen
        match before.split(), after.split():
            case [_, _, _, root, point, *_], ["cgroup2", _, _, *_]:
                yield 2, Path(root), Path(point)
            case [_, _, _, root, point, *_], ["cgroup", _, options, *_] if controller in options.split(","):
                yield 1, Path(root), Path(point)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
