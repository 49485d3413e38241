"""Where the lines of the log go: a descriptor whose other end may be full, slow or gone. Runs in the DAEMON's process.

    room      write                     a pipe whose reader sleeps, a terminal that is held with Ctrl-S: no room
    no room   wait a moment, once; then lose lines without waiting, until there is room again
    refused   (no space on the disk, nobody at the other end) lose the line

Invariant: whatever becomes of a line, whoever logs goes on. Lines that are lost are counted, and
the next that is written says how many; a line that was cut is ended before the next begins.
"""

import os
import select
from collections.abc import MutableMapping
from typing import Any

PORTION_BYTES = select.PIPE_BUF
"""A pipe that has room at all has room for so much."""
PATIENCE_MS = 100
STANDARD_ERROR = 2


class LogLines:
    """A logger, as structlog takes it: all its levels write one line."""

    def __init__(self, descriptor: int) -> None:
        self.lost = 0
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._is_cut = False
        self._is_stuck = False

    def write(self, line: str) -> None:
        """Write a line, or count it as lost."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        if self._is_cut:
            data = b"\n" + data
        before = len(data)
        try:
            while data and self._has_room():
                data = data[os.write(self._descriptor, data[:PORTION_BYTES]) :]
        except OSError:
            self._is_stuck = False  # it does not make anybody wait: ask again with the next line
        if data:
            self.lost += 1
            self._is_cut = self._is_cut or len(data) < before
        else:
            self._is_cut = self._is_stuck = False
            self.lost = 0

    msg = debug = info = warning = error = critical = write

    def _has_room(self) -> bool:
        ready = bool(self._poll.poll(0 if self._is_stuck else PATIENCE_MS))
        self._is_stuck = not ready
        return ready

    def mention_lost(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A processor: have this line say how many before it were lost."""
        return {**event, "lost_lines": self.lost} if self.lost else event


def fill_standard_streams() -> None:
    """Have all three be there, whoever closed them: otherwise what is opened next would have their numbers.

    So nobody's socket is taken for the log, as long as nothing is opened before this is called.
    """
    for descriptor in range(STANDARD_ERROR + 1):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
            os.set_inheritable(nowhere, True)


def standard_error() -> int:
    """The descriptor to log to, which is there."""
    fill_standard_streams()
    return STANDARD_ERROR
