"""Memory left on the machine and in the cgroup, and the wait for it at the start. DAEMON process.

memfds are bounded by neither /dev/shm nor rlimits, so the only honest limit is the one that is read
before memory is reserved.

    kill -9 of a daemon -> its workers end, its trainers unmap the ring when they want a batch
                        -> its successor, which may start before that, waits, and says for what

Invariant: the daemon never waits for memory that cannot be freed: a need beyond all the memory of
the machine or the cgroup is refused at once.
"""

from collections.abc import Callable
from contextlib import suppress
from math import ceil, floor
from pathlib import Path
from time import monotonic, sleep

import structlog

from batchd.runtime.free_memory import available_bytes, limit_bytes, numbers_in
from batchd.runtime.limits import printable
from batchd.runtime.sizes import round_bytes

_log = structlog.get_logger()

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


class OomKills:
    """The kernel's kills for lack of memory; none where it does not count them.

    It counts before it kills. It may kill several processes before the first death is reported.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._counted = self._count()
        self._unexplained = 0
        self._risen_s = 0.0

    def explain(self, now_s: float, *, is_killed: bool) -> bool:
        """A process has ended, killed or not; return whether it was killed for lack of memory.

        Each kill explains one death, soon after it.
        """
        before, self._counted = self._counted, self._count()
        if now_s - self._risen_s > OOM_KILL_S:
            self._unexplained = 0
        if self._counted > before:
            self._unexplained += self._counted - before
            self._risen_s = now_s
        is_explained = is_killed and self._unexplained > 0
        self._unexplained -= is_explained
        return is_explained

    def _count(self) -> int:
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
