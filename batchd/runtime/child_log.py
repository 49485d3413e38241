"""The log of the daemon's child processes: its lines are the daemon's. These processes, and DAEMON.

    structured    child --ChildLogged, over its channel--> write_line
    other output  child --standard error, a socket--> a thread --at most LINES_WAITING--> the loop

Other output is what users' functions print, what libraries warn of, and the last words of a process
that crashes: the socket keeps what a dead process has written, and the kernel says which process
that was (unix(7), SCM_CREDENTIALS). A thread reads it, so that a child never waits for the loop,
which may be busy, or not there yet. The loop reads what is left before it logs a worker's death.

Invariant: a child writes no line itself, since only the daemon knows the log's form and level.
Numbers of messages are never reused.
"""

import os
import select
import signal
import socket
import struct
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import partial
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NoReturn

import structlog

from batchd.errors import BatchdError
from batchd.runtime.limits import LINES_TOGETHER, LinesPerMinute, OncePerMinute
from batchd_wire.channel import ChannelClosed
from batchd_wire.codec import Message, message
from batchd_wire.threads import MORE_THREADS

if TYPE_CHECKING:  # a worker needs no ZeroMQ
    from batchd.runtime.poller import Poller

LEVELS = ("debug", "info", "warning", "error", "critical")
FACT_CHARACTERS_MAX = 4_000
"""As the log has it."""

READ_BYTES = 64 * 1024
LINES_WAITING = 1_000
"""Lines that wait for the loop."""
WRITERS_MAX = 256
"""Processes whose line without an end is kept until the rest comes."""
READS_AT_AN_END = 64
_CREDENTIALS = struct.Struct("iII")

_log = structlog.get_logger()


@message(56)
class ChildLogged(Message):
    """A line for the daemon's log: structlog's ``level``, the ``event``, and ``facts`` by name."""

    level: str
    event: str
    facts: dict[str, object]


class ChildOutput:
    """Logs what children write to ``descriptor``, line by line. Belongs to the loop.

    Raises ``BatchdError`` if its thread cannot be started.
    """

    def __init__(self, poller: "Poller", descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._lock = Lock()
        """Held by the thread or the loop while it reads."""
        self._unfinished: dict[int, bytes] = {}
        """By process: the line that it has not ended yet."""
        self._workers: dict[int, int] = {}
        """By process: the number of the worker. The loop's alone, as is the next one."""
        self._last: dict[int, str] = {}
        self._lines: deque[tuple[int, str]] = deque()
        self._dropped = 0
        """Lines that found no room; written under the lock."""
        self._told = 0
        self._limit, self._once = LinesPerMinute(LINES_TOGETHER), OncePerMinute()
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        poller.watch(self._wakes, self.log_lines)
        try:
            Thread(target=self._read, name="child output", daemon=True).start()
        except RuntimeError:
            raise BatchdError(f"no thread for the output of child processes could be started: {MORE_THREADS}") from None

    def close(self) -> None:
        """Log the last lines, and how many were left out."""
        self._read_on()
        self.log_lines()
        self._tell_dropped()

    def log_lines(self) -> None:
        """Log the lines that have come."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakes)
        while self._lines:
            pid, text = self._lines.popleft()
            worker = self._workers.get(pid)
            if worker is not None:
                self._last[pid] = text
            if self._limit.allows("output of a child process"):
                facts = {} if worker is None else {"worker": worker}
                _log.info("output of a child process", text=text, **facts, pid=pid)
        if self._dropped > self._told and self._once.allows("left out"):
            self._tell_dropped()

    def begin(self, pid: int, worker: int) -> None:
        """Name this worker in the lines of its process. Paired with ``end``."""
        self._workers[pid] = worker

    def end(self, pid: int) -> str:
        """Log all that a dead worker has written; returns its last line, "" for none."""
        self._read_on(pid)
        self.log_lines()
        self._workers.pop(pid, None)
        return self._last.pop(pid, "")

    def _tell_dropped(self) -> None:
        more = self._dropped - self._told
        if more:
            _log.warning("log lines left out", about="output of child processes", left_out=more)
            self._told += more

    def _read(self) -> None:
        """Read until the last writer has closed it. Runs in a thread, which handles no signal."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        is_open = True
        while is_open:
            poll.poll()
            with self._lock:
                is_open = self._receive() is not None
        self._socket.close()

    def _read_on(self, ended: int | None = None) -> None:
        """Read what is there, for the loop; lines without an end count, of ``ended`` or of all."""
        with self._lock:
            reads = 0
            while reads < READS_AT_AN_END and self._receive():
                reads += 1
            self._take_unfinished(list(self._unfinished) if ended is None else [ended])

    def _receive(self) -> bool | None:
        """Take one part; False if there is none now, None if there will be none. Under the lock."""
        try:
            data, about, _flags, _address = self._socket.recvmsg(READ_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return False
        except OSError:  # the thread has closed it
            return None
        if not data:
            self._take_unfinished(list(self._unfinished))
            return None
        pid = next((_CREDENTIALS.unpack(value)[0] for _level, _kind, value in about), 0)
        *lines, rest = (self._unfinished.pop(pid, b"") + data).split(b"\n")
        if len(rest) > FACT_CHARACTERS_MAX:
            lines, rest = [*lines, rest], b""
        if rest:
            self._unfinished[pid] = rest
        self._take(pid, lines)
        self._take_unfinished(list(self._unfinished)[:-WRITERS_MAX])
        return True

    def _take_unfinished(self, pids: list[int]) -> None:
        for pid in pids:
            self._take(pid, [self._unfinished.pop(pid, b"")])

    def _take(self, pid: int, lines: list[bytes]) -> None:
        kept = [text for line in lines if (text := line.decode("utf-8", "replace").strip())]
        room = max(0, LINES_WAITING - len(self._lines))
        self._lines.extend((pid, text) for text in kept[:room])
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
