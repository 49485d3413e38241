"""Waits at the daemon's start for memory that is about to come back. DAEMON process.

    kill -9 of a daemon -> its workers end, its trainers unmap the ring when they want their next batch
                        -> its successor, which may be there before them, waits, and says for what

Invariant: nothing is waited for that cannot come: more than the machine or the cgroup has at all is
refused at once.
"""

from collections.abc import Callable
from math import floor
from pathlib import Path
from time import monotonic, sleep

import structlog

from batchd.daemon.dispatch import printable
from batchd.daemon.memory.available import RESERVE_BYTES, available_bytes, limit_bytes, shortage
from batchd.daemon.memory.held_descriptors import MEMORY_NAME
from batchd.samples.sizes import round_bytes

_log = structlog.get_logger()

MEMORY_WAIT_S = 10.0
"""A trainer that waits for its batch lets go at once, and one in the middle of a step when that ends. A service manager starts a
daemon that has waited in vain again."""
LOOK_EVERY_S = 0.02
TELL_EVERY_S = 1.0
HOLDERS_MAX = 3
_NAME_COLUMN = 5
_SLOT_NAME = f"/memfd:{MEMORY_NAME}".encode()


def wait_for_memory(need_bytes: int, tell: Callable[[str], None]) -> str | None:
    """Wait until so much may be had; what is short where it may not. ``tell`` is told now and then what is waited for."""
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
    """Which processes have slots mapped, and how much: trainers and workers of a daemon before us, or of another one.

    Those that this user may not look at are left out.
    """
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
    texts = [f"{who}: {round_bytes(count, floor)}" for count, who in found[:HOLDERS_MAX]]
    more = len(found) - len(texts)
    return ", ".join(texts + ([f"{more} more"] if more else [])) or "no process that this user may look at"


def _slot_bytes(line: bytes) -> int:
    """How much of a slot a line of ``maps`` is about. The name in its last column may have any bytes but a newline."""
    columns = line.split(maxsplit=_NAME_COLUMN)
    if len(columns) <= _NAME_COLUMN or not columns[_NAME_COLUMN].startswith(_SLOT_NAME):
        return 0
    start, _, end = columns[0].partition(b"-")
    return int(end, 16) - int(start, 16)
