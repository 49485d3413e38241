"""Waiting for a condition.

For tests of processes; the bound is there to end a broken test, not to time a good one.
"""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 240.0
"""Bound of every wait: far above any duration on a loaded machine, so only a hang reaches it."""
PAUSE_S = (0.0005, 0.1)
"""Least and longest pause between two checks.

In between, a pause is a tenth of the time waited so far: a check may need a process or a
connection, and takes processor time from the awaited thing.
"""
REMOTE_PAUSE_S = 0.1
"""The pause between requests to a daemon over TCP."""

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, seconds: float = PATIENCE_S, every_s: float = 0.0) -> T:
    """Check repeatedly until ``condition`` returns something true, and return that.

    Fail with ``what`` after ``seconds``.

    ``every_s``: the least pause between two checks; over TCP the daemon answers only so many in a
    second.
    """
    began = time.monotonic()
    while not (result := condition()):
        waited_s = time.monotonic() - began
        assert waited_s < seconds, f"this was not true within {seconds:g} s: {what}"
        time.sleep(max(every_s, min(max(PAUSE_S[0], waited_s / 10), PAUSE_S[1])))
    return result
