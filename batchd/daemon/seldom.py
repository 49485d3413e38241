"""One log line a minute for each kind of trouble. DAEMON process.

A peer that talks nonsense as fast as it can must not fill the disk with our complaints.
"""

from time import monotonic

PERIOD_S = 60.0
KINDS_MAX = 256


class Seldom:
    """Tells whether it is time to say something again."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}

    def now(self, kind: str) -> bool:
        """Is this the first ``kind`` of its minute?"""
        now = monotonic()
        last = self._said_s.get(kind)
        if last is not None and now - last < PERIOD_S:
            return False
        if len(self._said_s) >= KINDS_MAX:
            self._said_s.clear()
        self._said_s[kind] = now
        return True
