"""Memory left on the machine and in the cgroup, and the daemon's wait for it. Every process.

memfds are bounded by neither /dev/shm nor rlimits, so the only honest limit is the one that is read
before memory is reserved.

    kill -9 of a daemon -> its workers end, its trainers unmap the ring when they want a batch
                        -> its successor, which may start before that, waits, and says for what

Invariant: the daemon never waits for memory that cannot be freed: a need beyond all the memory of
the machine or the cgroup is refused at once.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from math import ceil, floor
from pathlib import Path
from time import monotonic, sleep

import structlog

from batchd.runtime.limits import printable
from batchd.runtime.sizes import round_bytes

_log = structlog.get_logger()

KIBIBYTE = 1024
UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""
MEMORY_NAME = "batchd-slot"
"""The name of a slot's memfd, which /proc shows."""
RESERVE_BYTES = 64 << 20
"""Left for other processes when a slot is made: below this the machine is about to swap or kill."""
MEMORY_WAIT_S = 10.0
"""A waiting trainer releases its memory at once, one in the middle of a step at the step's end. A
service manager restarts a daemon that has waited in vain."""
LOOK_EVERY_S = 0.02
TELL_EVERY_S = 1.0
OOM_KILL_S = 5.0
"""A process that the kernel kills has ended after that time."""
HOLDERS_MAX = 3
_NAME_COLUMN = 5
_SLOT_NAME = f"/memfd:{MEMORY_NAME}".encode()


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


class OomKills:
    """The kernel's kills for lack of memory; none where it does not count them.

    It counts before it kills. It may kill several processes before the first death is reported.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._counted = self.count_all()
        self._unexplained = 0
        self._risen_s = 0.0

    def explain(self, now_s: float, *, is_killed: bool) -> bool:
        """A process has ended, killed or not; return whether it was killed for lack of memory.

        Each kill explains one death, soon after it.
        """
        before, self._counted = self._counted, self.count_all()
        if now_s - self._risen_s > OOM_KILL_S:
            self._unexplained = 0
        if self._counted > before:
            self._unexplained += self._counted - before
            self._risen_s = now_s
        is_explained = is_killed and self._unexplained > 0
        self._unexplained -= is_explained
        return is_explained

    def count_all(self) -> int:
        """Kills of the whole machine since its start."""
        with suppress(OSError):
            return numbers_in(self._proc / "vmstat").get("oom_kill", 0)
        return 0


def shortage(need_bytes: int, have_bytes: int) -> str | None:
    """Say that there is not enough, by how much, and what helps; None where there is."""
    if need_bytes + RESERVE_BYTES <= have_bytes:
        return None
    return (
        f"need {round_bytes(need_bytes, ceil)} of shared memory, have {round_bytes(max(0, have_bytes - RESERVE_BYTES), floor)}: "
        "set memory = to less, or use a machine (or a cgroup) with more"
    )


def wait_for_memory(need_bytes: int, tell: Callable[[str], None]) -> str | None:
    """Wait for memory, and ``tell`` the status now and then; return a shortage that stays."""
    problem = shortage(need_bytes, available_bytes())
    if problem is None or need_bytes + RESERVE_BYTES > limit_bytes():
        return problem
    give_up, tell_at = monotonic() + MEMORY_WAIT_S, 0.0
    facts = {"reason": problem.partition(":")[0], "held_by": holders(), "up_to_s": MEMORY_WAIT_S}
    _log.warning("waiting for memory", **facts)
    while problem is not None and monotonic() < give_up:
        if monotonic() >= tell_at:
            tell(f"waiting for memory: {problem.partition(':')[0]}")
            tell_at = monotonic() + TELL_EVERY_S
        sleep(LOOK_EVERY_S)
        problem = shortage(need_bytes, available_bytes())
    return problem


def holders(proc: Path = Path("/proc")) -> str:
    """Processes that have slots mapped, and how much, as far as this user may inspect them."""
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            mapped_bytes = sum(map(_slot_bytes, (folder / "maps").read_bytes().split(b"\n")))
            if mapped_bytes:
                name = printable((folder / "comm").read_bytes().decode(errors="replace").rstrip("\n"))
                found.append((mapped_bytes, f"{name} (pid {folder.name})"))
        except (OSError, ValueError):
            continue
    found.sort(reverse=True)
    texts = [f"{holder}: {round_bytes(count, floor)}" for count, holder in found[:HOLDERS_MAX]]
    more = len(found) - len(texts)
    return ", ".join(texts + ([f"{more} more"] if more else [])) or "no process that this user may look at"


def _slot_bytes(line: bytes) -> int:
    """Bytes of a slot in a line of ``maps``, whose last column may have any bytes but a newline."""
    columns = line.split(maxsplit=_NAME_COLUMN)
    if len(columns) <= _NAME_COLUMN or not columns[_NAME_COLUMN].startswith(_SLOT_NAME):
        return 0
    start, _, end = columns[0].partition(b"-")
    return int(end, 16) - int(start, 16)
