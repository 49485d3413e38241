"""How many CPUs this process may use. Daemon and CLI; standard library only.

The answer is the affinity mask ∩ the CPU quota of the control group and of every group above it,
version 1 or 2. Never ``os.cpu_count()``: it counts the machine, and in a container that is someone
else's.

Invariant: the answer is at least 1, and a file that is missing or odd means "no quota", never an
error.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Mount:
    """One line of mountinfo: ``root`` of the hierarchy is mounted at ``point``."""

    root: Path
    point: Path
    version: int


@dataclass(frozen=True, slots=True)
class Group:
    """A control group that limits this process, or one above it."""

    folder: Path
    version: int


def available_cpus(filesystem: Path = Path("/")) -> int:
    """Number of CPUs that this process may use; a quota of 1.5 CPUs counts as 2."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(ceil, cpu_quotas(filesystem))]))


def cpu_quotas(filesystem: Path = Path("/")) -> Iterator[float]:
    """Each CPU quota that applies, in CPUs."""
    for group in control_groups("cpu", filesystem):
        yield from _quota(group.folder, group.version)


def control_groups(controller: str, filesystem: Path = Path("/")) -> Iterator[Group]:
    """The groups whose ``controller`` ("cpu", "memory", "pids") limits this process."""
    groups = _groups(filesystem, controller)
    for mount in _mounts(filesystem, controller):
        group = groups.get(mount.version)
        if group is None:
            continue
        shown = group.relative_to(mount.root) if group.is_relative_to(mount.root) else Path()
        top = filesystem / mount.point.relative_to("/")
        folder = top / shown
        for level in (folder, *folder.parents):
            if level.is_relative_to(top):
                yield Group(level, mount.version)


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


def _mounts(filesystem: Path, controller: str) -> Iterator[_Mount]:
    """Mounts that may have a controller. In mountinfo, proc(5), the type follows a lone hyphen."""
    for line in _read(filesystem / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        places, kind = before.split(), after.split()
        if len(places) < 5 or len(kind) < 3:  # noqa: PLR2004  proc(5): root and mount point are words 4 and 5
            continue
        if kind[0] == "cgroup2":
            yield _Mount(Path(places[3]), Path(places[4]), version=2)
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield _Mount(Path(places[3]), Path(places[4]), version=1)


def _quota(folder: Path, version: int) -> Iterator[float]:
    """The quota of one group, in CPUs, if it has one."""
    if version == 2:  # noqa: PLR2004  the version of the control groups
        words = _read(folder / "cpu.max").split()
    else:
        words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    match words:
        case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
