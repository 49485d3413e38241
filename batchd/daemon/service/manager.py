"""The daemon as a service: it is ready, how much it serves, that it gets on. DAEMON process; the loop calls it.

    scanning ... --> the loop runs --(every worker is ready)--> READY=1 --> STATUS= and WATCHDOG=1 now and then --> STOPPING=1
                                                                  |   ^
                                                      RELOADING=1 +---+ READY=1

A reload that begins or ends before the first READY=1 is told as a status alone: it makes nobody
ready.

Invariant: the watchdog is fed by the end of a round of the loop, behind everything that this round
had to do. There is no timer that would go on while the loop does not.
"""

from collections.abc import Callable
from math import floor
from time import monotonic

import structlog

from batchd.core.state import DaemonState
from batchd.daemon.service.notify import Notifier
from batchd.samples.sizes import round_bytes
from batchd_wire.status import DaemonStatistics
from batchd_wire.wording import counted

_log = structlog.get_logger()

STATUS_EVERY_S = 5.0
SCANNING_EVERY_S = 1.0
READING = "reading the configuration again"
FEEDINGS = 3
"""So often is the watchdog fed within its time: one late round is no stall."""


class Service:
    """Watches the state and tells the service manager. ``workers``: how many the configuration wants."""

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
        """So many samples of a stream are found; told at most once a second."""
        if self._scan_goes_on(stream, found):
            self.notifier.progressed()

    def rescanned(self, stream: str, found: int) -> None:
        """The same, of a reload. The watchdog is the loop's then, and the loop does not wait for the scan."""
        self._scan_goes_on(stream, found)

    def _scan_goes_on(self, stream: str, found: int) -> bool:
        now = self._clock()
        if now - self._scanned_s < SCANNING_EVERY_S:
            return False
        self._scanned_s = now
        self.notifier.scanning(f"scanning {stream}: {counted(found, 'sample')} so far")
        return True

    def waiting(self, what: str) -> None:
        """The start waits for something that may come; whoever says so knows for how long at most."""
        self.notifier.scanning(what)
        self.notifier.progressed()

    def reserved(self, memory_bytes: int) -> None:
        """So much memory of the rings is taken, and more is to come; told at most once a second."""
        now = self._clock()
        if now - self._reserved_s >= SCANNING_EVERY_S:
            self._reserved_s = now
            self.notifier.scanning(f"reserving memory: {round_bytes(memory_bytes, floor)} so far")
            self.notifier.progressed()

    def round_ended(self, state: DaemonState, *, has_memory: bool = True) -> None:
        """The loop has waited, heard everybody and done what followed. Called after each of its rounds.

        ``has_memory``: the rings have what they shall have before the daemon is ready.
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
        self._scanned_s = float("-inf")  # its first scan is told at once, however soon it follows another
        if self.is_ready:
            self.notifier.reloading(READING)
        else:
            self.notifier.status(READING)

    def reloaded(self, workers: int, outcome: str) -> None:
        """The reload is over, well or not. It does not wait for workers: trainers are being served, if they were before."""
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
        """Be ready when every worker is: before that a trainer would wait for what cannot be served yet."""
        if state.fleet.ready < self._workers:
            return
        self.is_ready = True
        statistics = state.statistics()
        self._samples_per_s(statistics, now)
        self._told_s = now
        self.notifier.ready(status_line(statistics, 0.0))
        _log.info("ready", workers=state.fleet.ready)

    def _samples_per_s(self, statistics: DaemonStatistics, now: float) -> float:
        """What trainers have got since the last time. A stream that is gone takes its count with it."""
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
