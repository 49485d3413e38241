"""The daemon as a service: readiness, status and watchdog, by systemd's protocol. DAEMON process.

  scanning ... -> the loop runs -(every worker is ready)-> READY=1 -> STATUS=, WATCHDOG=1 -> STOPPING=1
                                                              |   ^
                                                  RELOADING=1 +---+ READY=1

    NOTIFY_SOCKET   <- READY=1, STATUS=, WATCHDOG=1, RELOADING=1, STOPPING=1, EXTEND_TIMEOUT_USEC=

Each message is one datagram (sd_notify(3)). Without a service manager nothing is sent. The
variables are removed from the environment, so that neither workers nor users' functions speak for
the daemon. A reload that begins or ends before the first READY=1 is sent as a status only: it makes
no daemon ready.

Invariant: the watchdog is fed at the end of a round of the loop, after all the work of that round.
There is no timer that would go on while the loop does not. Invariant: sending never waits and never
fails: a message that a full or vanished socket does not take is lost, and the service manager then
acts as if the daemon had been silent.
"""

import os
import socket
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress
from math import floor
from time import monotonic, monotonic_ns
from typing import Self

import structlog

from batchd.core.state import DaemonState
from batchd.samples.sizes import round_bytes
from batchd_wire.status import DaemonStatistics
from batchd_wire.wording import counted

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE = "WATCHDOG_PID"
EXTENSION_S = 60.0
"""How long the service manager waits for the next message of a start that makes progress, once its
own timeout is over."""
MICROSECONDS_IN_S = 1_000_000
NANOSECONDS_IN_MICROSECOND = 1_000


class Notifier:
    """Sends to the service manager.

    ``watchdog_s``: seconds without progress after which it acts; None: never.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = "\0" + address[1:] if address is not None and address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Self:
        """Take the service manager's variables away; ignore another process's watchdog."""
        address = environment.pop(SOCKET_VARIABLE, None)
        interval_us = environment.pop(WATCHDOG_VARIABLE, "")
        watched = environment.pop(WATCHDOG_PID_VARIABLE, "") in {"", str(os.getpid())}
        if not address or address[0] not in "/@":
            return cls()
        is_watched = watched and interval_us.isdecimal() and int(interval_us) > 0
        return cls(address, int(interval_us) / MICROSECONDS_IN_S if is_watched else None)

    @property
    def is_heard(self) -> bool:
        """True if there is a service manager."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """Report that trainers can connect, or that a reload is over."""
        self._tell(["READY=1", _status(status)])

    def status(self, text: str) -> None:
        """Say in a line how things are, for ``systemctl status``."""
        self._tell([_status(text)])

    def reloading(self, status: str) -> None:
        """Report a reload; ``ready`` follows, whatever its outcome."""
        now_us = monotonic_ns() // NANOSECONDS_IN_MICROSECOND
        self._tell(["RELOADING=1", f"MONOTONIC_USEC={now_us}", _status(status)])

    def stopping(self, status: str) -> None:
        """Nothing new is begun any more."""
        self._tell(["STOPPING=1", _status(status)])

    def progressed(self) -> None:
        """Feed the watchdog, after progress only."""
        if self.watchdog_s is not None:
            self._tell(["WATCHDOG=1"])

    def scanning(self, status: str) -> None:
        """Report the progress of a scan: a start or a reload may take longer than usual.

        sd_notify(3) mentions only starting and stopping, but the service manager extends the
        timeout of any wait, also of ``ExecReload=``, and the watchdog's.
        """
        self._tell([f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * MICROSECONDS_IN_S)}", _status(status)])

    def close(self) -> None:
        """Say nothing any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, lines: Iterable[str]) -> None:
        if self._socket is None:
            return
        assert self._address is not None
        with suppress(OSError):  # full or gone: it must not block the daemon
            self._socket.sendto("\n".join(lines).encode(errors="replace"), self._address)


def _status(text: str) -> str:
    """Make one line of any text: a second line would be another message."""
    return f"STATUS={' '.join(text.split())}"


_log = structlog.get_logger()

STATUS_EVERY_S = 5.0
SCANNING_EVERY_S = 1.0
READING = "reading the configuration again"
FEEDINGS = 3
"""So often is the watchdog fed within its time: one late round is no stall."""


class Service:
    """Reports the state to the service manager. ``workers``: how many the configuration wants."""

    def __init__(self, notifier: Notifier, workers: int, clock: Callable[[], float] = monotonic) -> None:
        self.notifier = notifier
        self.is_ready = False
        self._workers = workers
        self._clock = clock
        self._told_s = float("-inf")
        self._counted_s = float("-inf")
        self._fed_s = float("-inf")
        self._scanned_s = float("-inf")
        self._reserved_s = float("-inf")
        self._delivered: dict[int, int] = {}
        """By the stream's number."""
        self._is_reloading = False
        self._is_stopping = False

    def scanned(self, stream: str, found: int) -> None:
        """Report the samples found in a stream so far; at most once a second."""
        if self._scan_goes_on(stream, found):
            self.notifier.progressed()

    def rescanned(self, stream: str, found: int) -> None:
        """The same for a reload, whose scan is in another process: no watchdog."""
        self._scan_goes_on(stream, found)

    def _scan_goes_on(self, stream: str, found: int) -> bool:
        now = self._clock()
        if now - self._scanned_s < SCANNING_EVERY_S:
            return False
        self._scanned_s = now
        self.notifier.scanning(f"scanning {stream}: {counted(found, 'sample')} so far")
        return True

    def waiting(self, what: str) -> None:
        """Report that the start waits; the caller limits the wait."""
        self.notifier.scanning(what)
        self.notifier.progressed()

    def reserved(self, memory_bytes: int) -> None:
        """Report the ring memory that is reserved so far; at most once a second."""
        now = self._clock()
        if now - self._reserved_s >= SCANNING_EVERY_S:
            self._reserved_s = now
            self.notifier.scanning(f"reserving memory: {round_bytes(memory_bytes, floor)} so far")
            self.notifier.progressed()

    def round_ended(self, state: DaemonState, *, has_memory: bool = True) -> None:
        """Report the end of a round of the loop, after all its work.

        ``has_memory``: the rings have all the memory that they need before the daemon is ready.
        """
        if not self.notifier.is_heard:
            return
        now = self._clock()
        self._feed(now)
        if state.draining:
            self.stopping()
        elif not self.is_ready:
            if has_memory:
                self._begin(state, now)
        elif not self._is_reloading and now - self._told_s >= STATUS_EVERY_S:
            statistics = state.statistics()
            self.notifier.status(status_line(statistics, self._samples_per_s(statistics, now)))
            self._told_s = now

    def reloading(self) -> None:
        """The configuration is being read again. Paired with ``reloaded``."""
        self._is_reloading = True
        self._scanned_s = float("-inf")  # report its first scan at once
        if self.is_ready:
            self.notifier.reloading(READING)
        else:
            self.notifier.status(READING)

    def reloaded(self, workers: int, outcome: str) -> None:
        """Report the end of a reload, successful or not.

        It does not wait for workers: trainers are served, if they were before.
        """
        self._workers = workers
        self._is_reloading = False
        self._told_s = self._clock()
        if self.is_ready:
            self.notifier.ready(outcome)
        else:
            self.notifier.status(outcome)

    def stopping(self) -> None:
        """Nothing new is begun. Told once, however often it is said."""
        if not self._is_stopping:
            self._is_stopping = True
            self.notifier.stopping("finishing what the workers have in hand")

    def _feed(self, now: float) -> None:
        watchdog_s = self.notifier.watchdog_s
        if watchdog_s is not None and now - self._fed_s >= watchdog_s / FEEDINGS:
            self.notifier.progressed()
            self._fed_s = now

    def _begin(self, state: DaemonState, now: float) -> None:
        """Report readiness once every worker is ready: before that a trainer would have to wait."""
        if state.fleet.ready < self._workers:
            return
        self.is_ready = True
        statistics = state.statistics()
        self._samples_per_s(statistics, now)
        self._told_s = now
        self.notifier.ready(status_line(statistics, 0.0))
        _log.info("ready", workers=state.fleet.ready)

    def _samples_per_s(self, statistics: DaemonStatistics, now: float) -> float:
        """Samples per second since the last report, without streams that are gone."""
        delivered = {stream.number: stream.delivered_samples for stream in statistics.streams}
        samples = sum(count - self._delivered.get(number, 0) for number, count in delivered.items())
        passed_s = now - self._counted_s
        self._delivered, self._counted_s = delivered, now
        return samples / passed_s if passed_s > 0 else 0.0


def status_line(statistics: DaemonStatistics, samples_per_s: float) -> str:
    """Say in one line what the daemon does: "2 streams, 8 workers, 3 trainers, 5,120 samples/s"."""
    sessions = {one.session for stream in statistics.streams for one in stream.subscriptions}
    ready = sum(worker.state == "ready" for worker in statistics.workers)
    starting = sum(worker.state == "starting" for worker in statistics.workers)
    parts = [
        counted(len(statistics.streams), "stream"),
        counted(ready, "worker") + (f" and {starting} more to come" if starting else ""),
        counted(len(sessions), "trainer"),
        f"{samples_per_s:,.0f} samples/s",
    ]
    stopped = [stream.name for stream in statistics.streams if stream.stopped is not None]
    if stopped:
        parts.append(f"stopped: {', '.join(stopped)}")
    return ", ".join(parts)
