"""Account of time: the workers' time by stream, and the trainers' waiting by cause. Pure code.

A trainer that waits for a batch waits for exactly one thing at a time, and every change of that is
an event. So its waiting time is not sampled but added up, by its cause:

    WORKERS    its batch is being filled, or waits for a worker
    MEMORY     no slot of the ring is free for it
    TRAINERS   others are behind, and the stream is in lockstep
    PRODUCERS  too few samples have been pushed
    NETWORK    its batch is in flight to another host

The daemon does not see how long sent bytes stay in buffers. So a remote trainer's own count of its
waiting decides: all that it waited beyond the other causes was for the network.

Invariant: a moment counts for one cause, and totals never fall.
"""

from enum import Enum
from heapq import nlargest
from operator import attrgetter

from batchd.core.work import Work
from batchd_wire.status import PartStatistics, SlowSample, WaitStatistics, WorkStatistics

SLOWEST_LISTED_MAX = 32
SLOW_ROWS_KEPT = 256
"""A slow sample is forgotten after this number of further slow rows, or twice as many."""


class WaitCause(Enum):
    """See above."""

    WORKERS = "workers"
    MEMORY = "memory"
    TRAINERS = "trainers"
    PRODUCERS = "producers"
    NETWORK = "network"


class Moment:
    """The time of the current event, in seconds; only its owner (``DaemonState``) sets it."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0


class Spells:
    """The total time of a state that begins and ends again and again."""

    __slots__ = ("_moment", "_since_s", "_total_s")

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._since_s: float | None = None
        self._total_s = 0.0

    def turn(self, *, on: bool) -> None:
        """Begin or end the state now; no change where it is so already."""
        if on == (self._since_s is not None):
            return
        now_s = self._moment.now_s
        if self._since_s is not None:
            self._total_s += now_s - self._since_s
        self._since_s = now_s if on else None

    @property
    def total_s(self) -> float:
        """The total time in seconds, with the present spell."""
        return self._total_s + (self._moment.now_s - self._since_s if self._since_s is not None else 0.0)


class Waits:
    """One trainer's waiting, by its cause."""

    __slots__ = ("_on_the_way_s", "_spells", "cause")

    def __init__(self, moment: Moment) -> None:
        self.cause: WaitCause | None = None
        self._spells = {cause: Spells(moment) for cause in WaitCause}
        self._on_the_way_s = 0.0

    def turn(self, cause: WaitCause | None) -> None:
        """Note what the trainer waits for from now on; None: it does not wait."""
        if cause is self.cause:
            return
        if self.cause is not None:
            self._spells[self.cause].turn(on=False)
        if cause is not None:
            self._spells[cause].turn(on=True)
        self.cause = cause

    def reported(self, wait_s: float) -> None:
        """Note how long a remote trainer has waited in all, by its own count."""
        here_s = sum(spells.total_s for cause, spells in self._spells.items() if cause is not WaitCause.NETWORK)
        self._on_the_way_s = max(self._on_the_way_s, wait_s - here_s)

    @property
    def workers_s(self) -> float:
        """Seconds that the trainer has waited for workers."""
        return self._spells[WaitCause.WORKERS].total_s

    def statistics(self) -> WaitStatistics:
        """Return the totals."""
        totals = {f"{cause.value}_s": spells.total_s for cause, spells in self._spells.items()}
        totals["network_s"] = max(totals["network_s"], self._on_the_way_s)
        return WaitStatistics(**totals)


class SlowList:
    """Samples that were slow lately: the slowest of the last hundreds of slow rows, and the newest.

    Neither hides the other, and a sample that was slow once is forgotten in time.
    """

    def __init__(self) -> None:
        self._newest: dict[int, SlowSample] = {}
        self._slowest: dict[int, SlowSample] = {}
        """Of at most the last ``SLOW_ROWS_KEPT`` slow rows."""
        self._slowest_before: dict[int, SlowSample] = {}
        """Of as many slow rows before them."""
        self._begun_row = 0

    def add(self, slow: list[tuple[int, str, int]], row: int) -> None:
        """Add samples that a worker reports as (sample, path, µs); ``row``: slow rows so far."""
        if row > self._begun_row + SLOW_ROWS_KEPT:
            self._slowest_before, self._slowest = self._slowest, {}
            self._begun_row = row
        for sample, path, taken_us in slow:
            self._newest.pop(sample, None)  # so that it is last
            self._newest[sample] = self._slowest[sample] = SlowSample(sample, path, taken_us / 1e6, row)
        for sample in list(self._newest)[: -SLOWEST_LISTED_MAX // 2]:
            del self._newest[sample]
        slowest = nlargest(SLOWEST_LISTED_MAX // 4, self._slowest.values(), key=attrgetter("taken_s"))
        self._slowest = {one.sample: one for one in slowest}

    def listed(self) -> tuple[SlowSample, ...]:
        """All of them, the slowest first."""
        known = self._slowest_before | self._slowest | self._newest
        return tuple(sorted(known.values(), key=attrgetter("taken_s"), reverse=True))


class WorkDone:
    """The workers' time for one stream."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._parts_us: list[int] = []
        self._busy_us = self._waited_us = self._cpu_us = 0
        self._read_bytes = 0
        self._usual_us = 0
        self._cache_hits = self._cache_misses = self._shared = 0
        self._cpu_wait_us: int | None = None
        self._read_cpu_us = 0
        self._slow_rows = self._slow_us = 0
        self._slow = SlowList()

    def name_parts(self, names: tuple[str, ...]) -> None:
        """Set the names of the parts that ``add`` counts times of."""
        if names != self._names:
            self._names, self._parts_us = names, [0] * len(names)

    def add(self, work: Work) -> None:
        """Add the work of one chunk."""
        self._busy_us += work.busy_us
        self._waited_us += work.waited_us
        self._cpu_us += work.cpu_us
        self._read_cpu_us += work.read_cpu_us
        if work.cpu_wait_us is not None:
            self._cpu_wait_us = (self._cpu_wait_us or 0) + work.cpu_wait_us
        self._read_bytes += work.read_bytes
        self._cache_hits += work.cache_hits
        self._cache_misses += work.cache_misses
        self._shared += work.shared
        self._usual_us = work.usual_us or self._usual_us
        if len(work.parts_us) == len(self._parts_us):
            self._parts_us = [total + spent for total, spent in zip(self._parts_us, work.parts_us, strict=True)]
        if work.slow_rows:
            self._slow_rows += work.slow_rows
            self._slow_us += work.slow_us
            self._slow.add(work.slow, self._slow_rows)

    @property
    def total_s(self) -> float:
        """Seconds of work, and of waiting for files."""
        return (self._busy_us + self._waited_us) / 1e6

    def statistics(self) -> WorkStatistics:
        """Return the totals, and the slowest samples lately, the slowest first."""
        parts = zip(self._names, self._parts_us, strict=True)
        return WorkStatistics(
            busy_s=self._busy_us / 1e6,
            waited_s=self._waited_us / 1e6,
            cpu_s=self._cpu_us / 1e6,
            cpu_wait_s=self._cpu_wait_us / 1e6 if self._cpu_wait_us is not None else None,
            read_cpu_s=self._read_cpu_us / 1e6,
            read_bytes=self._read_bytes,
            parts=tuple(PartStatistics(name, spent / 1e6) for name, spent in parts),
            usual_sample_s=self._usual_us / 1e6,
            slow_rows=self._slow_rows,
            slow_s=self._slow_us / 1e6,
            slowest=self._slow.listed(),
            cache_hits=self._cache_hits,
            cache_misses=self._cache_misses,
            shared_samples=self._shared,
        )
