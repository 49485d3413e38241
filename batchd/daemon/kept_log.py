"""The last lines of the log, in memory, for `batchd logs` and `batchd status`. DAEMON process.

    a line is written --add--> lines     the last LINES_MAX of all levels
                          +--> warnings  the last WARNINGS_MAX, ALIKE_MAX at most of one event,
                                         until a repair, for LIVE_S at most

Invariant: memory and a ``Status`` message are bounded. A line is whole when it is added, and
foreign text in it is escaped already.
"""

from collections import deque
from time import time
from typing import NamedTuple

from batchd_wire.status import LogLine

LINES_MAX = 300
"""With texts of the most bytes, half of the longest message."""
WARNINGS_MAX = 10
ALIKE_MAX = 3
"""So that a folder of bad samples does not hide that a gateway has died."""
LIVE_S = 600.0
"""So long a warning is shown that nothing repairs; what lasts longer, the status says itself."""
TEXT_CHARACTERS_MAX = 400
_WARNINGS = {"warning", "error", "critical"}
_REPAIRS = {
    "storage back": {"storage away"},
    "worker started": {
        "worker ended",
        "worker killed",
        "worker not started",
        "fork server ended",
        "fork server killed",
    },
    "observing": {"HTTP disabled", "observer not started", "observer ended"},
    "listening for worker hosts": {"gateway not started", "gateway ended", "gateway killed", "gateway cannot listen"},
    "configuration reloaded": {"configuration not reloaded", "stream stopped", "bad sample", "sample quarantined"},
}
"""The warnings that an event ends: those of its stream, if it has one."""


class _Warning(NamedTuple):
    """A warning with its event and its stream; "" if it has none."""

    event: str
    stream: str
    line: LogLine


class KeptLog:
    """``place``: where the whole log is, for people; "" if that is not known."""

    def __init__(self, place: str = "") -> None:
        self.place = place
        self._lines: deque[LogLine] = deque(maxlen=LINES_MAX)
        self._warnings: deque[_Warning] = deque(maxlen=WARNINGS_MAX)
        """The newest last."""
        self._number = 0

    def add(self, level: str, event: str, stream: str, text: str) -> None:
        """Keep a line. ``text``: the event with its facts, on one line; it is cut if it is long."""
        self._number += 1
        shown = text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 1]}…"
        line = LogLine(self._number, time(), level, shown)
        self._lines.append(line)
        if level in _WARNINGS:
            alike = [kept for kept in self._warnings if kept.event == event]
            if len(alike) >= ALIKE_MAX:
                self._warnings.remove(alike[0])
            self._warnings.append(_Warning(event, stream, line))
        elif repaired := _REPAIRS.get(event):
            for kept in tuple(self._warnings):
                if kept.event in repaired and stream in ("", kept.stream):
                    self._warnings.remove(kept)

    @property
    def warnings(self) -> tuple[LogLine, ...]:
        """The last warnings and errors that nothing has repaired, the newest last."""
        since_s = time() - LIVE_S
        return tuple(kept.line for kept in self._warnings if kept.line.time_s >= since_s)

    def after(self, number: int) -> tuple[LogLine, ...]:
        """The kept lines with a larger number, the newest last."""
        return tuple(line for line in self._lines if line.number > number)
