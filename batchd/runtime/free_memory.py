"""The memory that this process may still take, of the machine and of its cgroup. Every process."""

from collections.abc import Iterator
from pathlib import Path

KIBIBYTE = 1024
UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: those of the machine, or of its cgroups if fewer."""
    return min([_machine_bytes(proc), *(left for _limit, left in _cgroup_bytes(proc, cgroups))])


def limit_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may have if no other process takes any."""
    return min([_machine_bytes(proc, "MemTotal"), *(limit for limit, _left in _cgroup_bytes(proc, cgroups))])


def numbers_in(path: Path) -> dict[str, int]:
    """The number behind each name in a file of the kernel. Raises ``OSError``."""
    lines = map(str.split, path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _machine_bytes(proc: Path, name: str = "MemAvailable") -> int:
    count = numbers_in(proc / "meminfo").get(name)
    return UNLIMITED_BYTES if count is None else count * KIBIBYTE


def _cgroup_bytes(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit and remaining bytes of this process's cgroups and all above, in either cgroup version.

    In a container the path of a group may be invisible.
    """
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_name, usage_name = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
            if limit is not None and usage is not None and limit < UNLIMITED_BYTES:
                yield limit, max(0, limit - max(0, usage - _file_cache_bytes(folder)))
            if folder == root:
                break


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _file_cache_bytes(group: Path) -> int:
    """Bytes of file pages: they count as used, but are freed on demand, as MemAvailable assumes.

    Without this a group that has read many images would seem full. Version 1 writes the sums over
    all below as ``total_...``.
    """
    try:
        numbers = numbers_in(group / "memory.stat")
    except OSError:
        return 0
    return sum(numbers.get(f"total_{name}", numbers.get(name, 0)) for name in ("active_file", "inactive_file"))
