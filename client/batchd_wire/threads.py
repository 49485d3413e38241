"""Checks that threads can be started before libzmq needs them. Every process.

libzmq aborts the process if it cannot start one of its threads. Standard library only.
"""

import os
import threading
import time
from _thread import start_new_thread

MORE_THREADS = "raise the limit (TasksMax= in the unit, ulimit -Hu, --pids-limit of docker)"
TRIAL_MAX_S = 1.0
"""How long a trial thread lives at most, and how long its end is awaited."""
TRIAL_PAUSE_S = 0.0001


class TooFewThreads(Exception):  # noqa: N818  names what is wrong
    """The process cannot start as many threads as it needs; says how many it could start."""


def check_threads(count: int) -> None:
    """Start ``count`` threads at once, and end them. Raises ``TooFewThreads``."""
    gate = threading.Lock()
    started: list[int] = []

    def stay() -> None:
        started.append(threading.get_native_id())
        if gate.acquire(timeout=TRIAL_MAX_S):
            gate.release()

    with gate:
        for number in range(count):
            try:
                start_new_thread(stay, ())
            except (RuntimeError, MemoryError):
                raise TooFewThreads(f"needs {count} threads, and only {number} could be started") from None
    await_ends(started, count)


def await_ends(started: list[int], count: int) -> None:
    """Wait until ``count`` threads, listed in ``started``, no longer count against the limit."""
    deadline = time.monotonic() + TRIAL_MAX_S
    while time.monotonic() < deadline and (len(started) < count or any(map(_is_alive, started))):
        time.sleep(TRIAL_PAUSE_S)


def _is_alive(thread: int) -> bool:
    return os.path.exists(f"/proc/self/task/{thread}")  # noqa: PTH110  a tenth of Path's time, for each connection
