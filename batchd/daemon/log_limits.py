"""One log line a minute for each kind of trouble, or so many. DAEMON process.

A peer that talks nonsense as fast as it can must not fill the disk with our complaints, nor one
that comes and goes.
"""

from time import monotonic

import structlog

_log = structlog.get_logger()

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


class Ration:
    """So many lines a minute about each peer, or each stream: for what is worth a line each, unless there is no end of it.

    What is more goes to the developer's level, and one warning says that it does.
    """

    def __init__(self, lines_max: int) -> None:
        self._lines_max = lines_max
        self._said: dict[str, tuple[float, int]] = {}
        """For each whom it may be about: when its minute began, and how many lines it has had since."""

    def allows(self, about: str) -> bool:
        """May one more line be written about it in this minute?"""
        now = monotonic()
        began_s, lines = self._said.get(about, (now, 0))
        if now - began_s >= PERIOD_S:
            began_s, lines = now, 0
        if about not in self._said and len(self._said) >= KINDS_MAX:
            self._said.clear()
        self._said[about] = (began_s, lines + 1)
        if lines == self._lines_max:
            _log.warning("log lines left out", about=about, lines_per_minute=self._lines_max)
        return lines < self._lines_max
