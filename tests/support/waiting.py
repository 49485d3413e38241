"""Waiting for a condition. For tests of processes; the bound is there to end a broken test, not to time a good one."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 240.0
"""Tells what hangs from what is slow, and nothing else: far above what anything here takes on a machine with much else to do. Who
waits for what has to come waits for this long, and only a broken test does."""
FIRST_PAUSE_S = 0.0005
PAUSE_MAX_S = 0.02
REMOTE_PAUSE_S = 0.1
"""Between questions to a daemon over TCP."""

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, seconds: float = PATIENCE_S, every_s: float = FIRST_PAUSE_S) -> T:
    """Ask again and again until ``condition`` gives something true, and give that; fail with ``what`` after ``seconds``.

    ``every_s``: how long to wait between questions at least; over TCP the daemon answers so many in a second and no more.
    """
    give_up = time.monotonic() + seconds
    pause_s = every_s
    while not (result := condition()):
        assert time.monotonic() < give_up, f"within {seconds:g} s it did not come true that {what}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, max(every_s, PAUSE_MAX_S))
    return result
