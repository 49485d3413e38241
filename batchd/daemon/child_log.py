"""The log of the daemon's child processes: its lines are the daemon's. These processes, and DAEMON.

    structured    child --ChildLogged, over its channel--> write_line
    other output  child --standard error, a pipe--> a thread --at most LINES_WAITING--> the loop

Other output is what users' functions print, what libraries warn of, and the last words of a process
that crashes: the pipe keeps what a dead process has written. A thread reads it, so that a child
never waits for the loop, which may be busy, or not there yet.

Invariant: a child writes no line itself, since only the daemon knows the log's form and level.
"""

import os
import signal
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, NoReturn

import structlog

from batchd.daemon.descriptors import Selector
from batchd.daemon.limits import LINES_TOGETHER, LinesPerMinute, OncePerMinute
from batchd.orders.log import ChildLogged
from batchd_wire.channel import ChannelClosed

LEVELS = ("debug", "info", "warning", "error", "critical")
FACT_CHARACTERS_MAX = 4_000
"""As the log has it."""

READ_BYTES = 64 * 1024
LINES_WAITING = 1_000
"""Lines that wait for the loop."""

_log = structlog.get_logger()


class ChildOutput:
    """Logs what children write to ``descriptor``, line by line. Belongs to the loop."""

    def __init__(self, selector: Selector, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._lines: deque[str] = deque()
        self._dropped = 0
        """Lines that found no room; only the thread writes it."""
        self._told = 0
        self._limit, self._once = LinesPerMinute(LINES_TOGETHER), OncePerMinute()
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        selector.add(self._wakes, self.log_lines)
        Thread(target=self._read, name="child output", daemon=True).start()

    def close(self) -> None:
        """Log the last lines, and how many were left out."""
        self.log_lines()
        self._tell_dropped()

    def log_lines(self) -> None:
        """Log the lines that have come."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakes)
        while self._lines:
            text = self._lines.popleft()
            if self._limit.allows("output of a child process"):
                _log.info("output of a child process", text=text)
        if self._dropped > self._told and self._once.allows("left out"):
            self._tell_dropped()

    def _tell_dropped(self) -> None:
        more = self._dropped - self._told
        if more:
            _log.warning("log lines left out", about="output of child processes", left_out=more)
            self._told += more

    def _read(self) -> None:
        """Read until the last writer has closed it. Runs in a thread, which handles no signal."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        rest = b""
        while data := os.read(self._descriptor, READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > FACT_CHARACTERS_MAX:
                lines, rest = [*lines, rest], b""
            self._take(lines)
        os.close(self._descriptor)

    def _take(self, lines: list[bytes]) -> None:
        kept = [text for line in lines if (text := line.decode("utf-8", "replace").strip())]
        room = max(0, LINES_WAITING - len(self._lines))
        self._lines.extend(kept[:room])
        self._dropped += len(kept[room:])
        os.eventfd_write(self._wakes, 1)


def log_over(send: Callable[[ChildLogged], None]) -> None:
    """Send the lines of this process to the daemon."""
    structlog.configure(processors=[partial(_send, send)])


def write_line(line: ChildLogged) -> None:
    """Write a line of a child into the daemon's log."""
    if line.level in LEVELS:
        getattr(_log, line.level)(**{**line.facts, "event": line.event})


def _send(
    send: Callable[[ChildLogged], None], _logger: object, level: str, event: MutableMapping[str, Any]
) -> NoReturn:
    facts: dict[str, object] = {name: _printable(fact) for name, fact in event.items() if name != "event"}
    with suppress(ChannelClosed):
        send(ChildLogged(level, _printable(event["event"]), facts))
    raise structlog.DropEvent


def _printable(fact: object) -> str:
    """Text for a message, which the name of a file need not be."""
    return str(fact)[:FACT_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()
