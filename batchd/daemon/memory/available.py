"""How much memory may still be had: what the machine has and what the cgroup allows. DAEMON process.

memfds are bounded by neither /dev/shm nor rlimits, so the only honest limit is asked for before
anything is reserved.
"""

from math import ceil, floor
from pathlib import Path

from batchd.samples.sizes import round_bytes

KIBIBYTE = 1024
UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""
RESERVE_BYTES = 64 << 20
"""Left for everybody else when a slot is made: below this the machine is about to swap or to kill."""


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: what the machine has, or what its cgroups leave if that is less."""
    return min([_machine_bytes(proc), *(left for _limit, left in _cgroup_bytes(proc, cgroups))])


def limit_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may have if nobody else takes any."""
    return min([_machine_bytes(proc, "MemTotal:"), *(limit for limit, _left in _cgroup_bytes(proc, cgroups))])


def oom_kills(proc: Path = Path("/proc")) -> int:
    """How many processes the kernel has killed for want of memory since it started; 0 where it keeps no count.

    Its own want or a cgroup's. It counts before it kills, so a death that it caused is never seen
    before the count has risen.
    """
    try:
        lines = (proc / "vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def shortage(need_bytes: int, have_bytes: int) -> str | None:
    """Say that there is not enough, by how much, and what helps; None where there is."""
    if need_bytes + RESERVE_BYTES <= have_bytes:
        return None
    return (
        f"need {round_bytes(need_bytes, ceil)} of shared memory, have {round_bytes(max(0, have_bytes - RESERVE_BYTES), floor)}: "
        "set memory = to less, or use a machine (or a cgroup) with more"
    )


def _machine_bytes(proc: Path, name: str = "MemAvailable:") -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * KIBIBYTE
    return UNLIMITED_BYTES


def _cgroup_bytes(proc: Path, cgroups: Path) -> list[tuple[int, int]]:
    """The limit of each limiting cgroup of this process, and what that leaves, whichever version the host has."""
    left: list[tuple[int, int]] = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            left += _left_on_the_way(cgroups, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            left += _left_on_the_way(cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return left


def _left_on_the_way(root: Path, path: str, limit_name: str, usage_name: str) -> list[tuple[int, int]]:
    """Look at the group and everything above it: the tightest counts. In a container the path may not be visible."""
    group = root / path.lstrip("/")
    left = []
    for folder in (group, *group.parents):
        limit = _read_number(folder / limit_name)
        usage = _read_number(folder / usage_name)
        if limit is not None and usage is not None and limit < UNLIMITED_BYTES:
            left.append((limit, max(0, limit - max(0, usage - _file_cache_bytes(folder)))))
        if folder == root:
            break
    return left


def _file_cache_bytes(group: Path) -> int:
    """Pages of files, which count as used and are given up when memory is wanted; MemAvailable takes them for free too.

    Without this a group that has read many images would seem full. Version 1 writes the sums over
    all below as ``total_...``.
    """
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    facts = (line.partition(" ") for line in lines)
    numbers = {name: int(number) for name, _space, number in facts if number.isdecimal()}
    return sum(numbers.get(f"total_{name}", numbers.get(name, 0)) for name in ("active_file", "inactive_file"))


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
