"""The daemon as a service: readiness, status and watchdog, by systemd's protocol. DAEMON process.

  scanning -> the loop runs -(every worker is ready)-> READY=1 -> STATUS=, WATCHDOG=1 -> STOPPING=1
                                                          |   ^
                                              RELOADING=1 +---+ READY=1

    NOTIFY_SOCKET   <- READY=1, STATUS=, WATCHDOG=1, RELOADING=1, STOPPING=1, EXTEND_TIMEOUT_USEC=

Each message is one datagram (sd_notify(3)). Without a service manager nothing is sent. The
variables are removed from the environment, so that neither workers nor users' functions speak for
the daemon. A reload that begins or ends before the first READY=1 is sent as a status only: it makes
no daemon ready.

Invariant: the watchdog is fed at the end of a round of the loop, after all the work of that round.
There is no timer that would go on while the loop does not. Invariant: sending never waits and never
fails: a message that a full or vanished socket does not take is lost.
"""

import os
import socket
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from math import floor
from time import monotonic, monotonic_ns
from typing import Self

import structlog

from batchd.core.state import DaemonState
from batchd.runtime.sizes import round_bytes
from batchd_wire.status import DaemonStatistics
from batchd_wire.wording import counted

_log = structlog.get_logger()

EXTENSION_S = 60.0
"""Once the service manager's timeout is over, each message of progress allows so much more."""
MICROSECONDS_IN_S = 1_000_000
NANOSECONDS_IN_MICROSECOND = 1_000
STATUS_EVERY_S = 5.0
SCANNING_EVERY_S = 1.0
READING = "reading the configuration again"
FEEDINGS = 3
"""The watchdog is fed so often within its time: one late round is no stall."""


class Notifier:
    """Sends to the service manager, which acts after ``watchdog_s`` without progress."""

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], *, is_embedded: bool = False) -> Self:
        """Take the service manager's variables away; ignore another process's watchdog.

        An embedded daemon is silent: the service manager is that of its script.
        """
        address = environment.pop("NOTIFY_SOCKET", "")
        interval_us = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", "") in {"", str(os.getpid())}
        if is_embedded or not address.startswith(("/", "@")):
            return cls()
        is_watched = watched and interval_us.isdecimal() and int(interval_us) > 0
        return cls(address, int(interval_us) / MICROSECONDS_IN_S if is_watched else None)

    @property
    def is_heard(self) -> bool:
        """True if there is a service manager."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """Report that trainers can connect, or that a reload is over."""
        self._tell("READY=1", status=status)

    def status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows."""
        self._tell(status=text)

    def reloading(self, status: str) -> None:
        """Report a reload; ``ready`` follows, whatever its outcome."""
        now_us = monotonic_ns() // NANOSECONDS_IN_MICROSECOND
        self._tell("RELOADING=1", f"MONOTONIC_USEC={now_us}", status=status)

    def stopping(self, status: str) -> None:
        """Report that nothing new is begun any more."""
        self._tell("STOPPING=1", status=status)

    def progressed(self) -> None:
        """Feed the watchdog, after progress only."""
        if self.watchdog_s is not None:
            self._tell("WATCHDOG=1")

    def scanning(self, status: str) -> None:
        """Report the progress of a scan: a start or a reload may take longer than usual.

        sd_notify(3) mentions only starting and stopping, but the service manager extends the
        timeout of any wait, also of ``ExecReload=``, and the watchdog's.
        """
        self._tell(f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * MICROSECONDS_IN_S)}", status=status)

    def close(self) -> None:
        """Send nothing any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, *lines: str, status: str | None = None) -> None:
        if self._socket is None:
            return
        if status is not None:  # on one line: a second one would be another message
            lines = (*lines, f"STATUS={' '.join(status.split())}")
        with suppress(OSError):  # full or gone: it must not block the daemon
            self._socket.sendto("\n".join(lines).encode(errors="replace"), self._address)


class Service:
    """Reports the state to the service manager. ``workers``: how many the configuration wants."""

    def __init__(self, notifier: Notifier, workers: int, clock: Callable[[], float] = monotonic) -> None:
        self.notifier = notifier
        self.is_ready = False
        self._workers = workers
        self._clock = clock
        self._last_s: dict[str, float] = {}
        """When each kind of message was sent last."""
        self._counted_s = float("-inf")
        self._delivered: dict[int, int] = {}
        self._is_reloading = False
        self._is_stopping = False

    def scanned(self, stream: str, found: int) -> None:
        """Report the samples found in a stream so far; at most once a second.

        During a reload another process scans, so its progress feeds no watchdog.
        """
        if self._is_due("scan", SCANNING_EVERY_S):
            self.notifier.scanning(f"scanning {stream}: {counted(found, 'sample')} so far")
            if not self._is_reloading:
                self.notifier.progressed()

    def waiting(self, what: str) -> None:
        """Report that the start waits; the caller limits the wait."""
        self.notifier.scanning(what)
        self.notifier.progressed()

    def reserved(self, memory_bytes: int) -> None:
        """Report the ring memory that is reserved so far; at most once a second."""
        if self._is_due("memory", SCANNING_EVERY_S):
            self.waiting(f"reserving memory: {round_bytes(memory_bytes, floor)} so far")

    def round_ended(self, state: DaemonState, *, has_memory: bool = True) -> None:
        """Report the end of a round of the loop. ``has_memory``: the rings have what they need."""
        if not self.notifier.is_heard:
            return
        watchdog_s = self.notifier.watchdog_s
        if watchdog_s is not None and self._is_due("watchdog", watchdog_s / FEEDINGS):
            self.notifier.progressed()
        if state.draining:
            self.stopping()
        elif not self.is_ready:
            # before that a trainer would have to wait
            if has_memory and state.fleet.ready >= self._workers:
                self.is_ready = True
                statistics = state.statistics()
                self._samples_per_s(statistics)
                self._last_s["status"] = self._clock()
                self.notifier.ready(status_line(statistics, 0.0))
                _log.info("ready", workers=state.fleet.ready)
        elif not self._is_reloading and self._is_due("status", STATUS_EVERY_S):
            statistics = state.statistics()
            self.notifier.status(status_line(statistics, self._samples_per_s(statistics)))

    def reloading(self) -> None:
        """Report that the configuration is being read again. Paired with ``reloaded``."""
        self._is_reloading = True
        self._last_s.pop("scan", None)  # report its first scan at once
        if self.is_ready:
            self.notifier.reloading(READING)
        else:
            self.notifier.status(READING)

    def reloaded(self, workers: int, outcome: str) -> None:
        """Report the end of a reload, successful or not; it does not wait for the workers."""
        self._workers = workers
        self._is_reloading = False
        self._last_s["status"] = self._clock()
        if self.is_ready:
            self.notifier.ready(outcome)
        else:
            self.notifier.status(outcome)

    def stopping(self) -> None:
        """Report, once, that nothing new is begun."""
        if not self._is_stopping:
            self._is_stopping = True
            self.notifier.stopping("finishing the work in progress")

    def _is_due(self, kind: str, every_s: float) -> bool:
        now = self._clock()
        if now - self._last_s.get(kind, float("-inf")) < every_s:
            return False
        self._last_s[kind] = now
        return True

    def _samples_per_s(self, statistics: DaemonStatistics) -> float:
        """Samples per second since the last report, without those of removed streams."""
        delivered = {stream.number: stream.delivered_samples for stream in statistics.streams}
        samples = sum(count - self._delivered.get(number, 0) for number, count in delivered.items())
        now = self._clock()
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
    away = [stream.name for stream in statistics.streams if stream.away is not None]
    if away:
        parts.append(f"storage away: {', '.join(away)}")
    return ", ".join(parts)
