"""The difference between two statuses of a daemon. Pure; in any process.

A stream or a trainer that is in one status only is left out, also if a reload has replaced it:
there is nothing to compare.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from batchd_wire.status import (
    CacheStatistics,
    DaemonStatus,
    LinkStatistics,
    PoolStatistics,
    StreamStatus,
    SubscriptionStatistics,
    TrainerStatistics,
    WorkStatistics,
    difference,
)
from batchd_wire.wording import BAD_PART, READ_PART

OWN_PART = "call"
"""The step that is a user's function."""


@dataclass(frozen=True, slots=True)
class WorkReading:
    """The workers' time for one stream, in seconds. ``counts``: what has been added.

    ``parts``: by name, in order. ``slowest``: (path, seconds), worst first.
    """

    samples: int
    bad_rows: int
    counts: WorkStatistics
    parts: tuple[tuple[str, float], ...]
    slowest: tuple[tuple[str, float], ...]

    @property
    def storage_wait_s(self) -> float:
        """Waiting for files, and in reads, where sources such as videos and tables also compute."""
        return self.counts.waited_s + max(0.0, self._part_s(READ_PART) - self.counts.read_cpu_s - self.no_cpu_s)

    @property
    def no_cpu_s(self) -> float:
        """Time in which workers were runnable and had no CPU."""
        if self.counts.cpu_wait_s is not None:
            return self.counts.cpu_wait_s
        # All computing without a CPU, but that in users' functions, which may wait themselves.
        computing_s = self.counts.busy_s - self._part_s(READ_PART) - self._part_s(OWN_PART) - self.bad_s
        return max(0.0, computing_s - (self.counts.cpu_s - self.counts.read_cpu_s))

    @property
    def bad_s(self) -> float:
        """Time spent on bad samples."""
        return self._part_s(BAD_PART)

    def _part_s(self, name: str) -> float:
        return sum(spent_s for part, spent_s in self.parts if part == name)

    @property
    def total_s(self) -> float:
        """Time of computing and of waiting for files."""
        return self.counts.busy_s + self.counts.waited_s


@dataclass(frozen=True, slots=True)
class StreamReading:
    """One stream. ``now``: its second status; ``change``: its counters, from the first.

    ``cache_grows``: its cache has more samples now.
    """

    now: StreamStatus
    change: StreamStatus
    work: WorkReading
    cache_grows: bool

    @property
    def name(self) -> str:
        """Name of the stream."""
        return self.now.name

    @property
    def samples_cache(self) -> CacheStatistics | None:
        """Its cache, if that keeps samples, and not only what is known of files."""
        cache = self.now.cache
        return None if cache is None or cache.kind in {"points", "media"} else cache


@dataclass(frozen=True, slots=True)
class TrainerReading:
    """One subscription: its second status (``now``, ``who``); ``change``: its counters.

    ``ready_ahead``: the smaller of both statuses.
    """

    now: SubscriptionStatistics
    change: SubscriptionStatistics
    who: TrainerStatistics
    stream: StreamReading
    seconds: float
    ready_ahead: int

    @property
    def batches(self) -> int:
        """Batches that it consumed."""
        return self.change.consumed_batches

    @property
    def waits_s(self) -> Mapping[str, float]:
        """Seconds in which it waited, by cause: see ``core.measure``."""
        return {cause.removesuffix("_s"): waited_s for cause, waited_s in asdict(self.change.waits).items()}

    @property
    def name(self) -> str:
        """Name of the trainer."""
        return self.who.name

    @property
    def wait_s(self) -> float:
        """Seconds in which it waited."""
        return sum(self.waits_s.values())

    @property
    def wait_share(self) -> float:
        """The part of the time in which it waited, 0 to 1."""
        return min(1.0, self.wait_s / self.seconds)


@dataclass(frozen=True, slots=True)
class HostReading:
    """One worker host: its second status; ``change``: its counters, from the first."""

    now: LinkStatistics
    change: LinkStatistics
    seconds: float

    @property
    def samples_per_s(self) -> float:
        """Samples that it filled."""
        return self.change.samples / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes of rows that came from it."""
        return self.change.received_bytes / self.seconds

    @property
    def busy_share(self) -> float | None:
        """The part of its workers' time in which they were busy, 0 to 1; None without workers."""
        workers = self.now.workers
        return min(1.0, self.change.busy_s / (self.seconds * workers)) if workers else None


@dataclass(frozen=True, slots=True)
class PoolReading:
    """All worker hosts. ``hosts``: those of both statuses; ``bytes_per_s`` of rows, from all."""

    now: PoolStatistics
    hosts: tuple[HostReading, ...]
    bytes_per_s: float

    @property
    def network_share(self) -> float | None:
        """The part of the interface's speed that rows take; None if the speed is not known."""
        speed = self.now.interface_bytes_per_s
        return self.bytes_per_s / speed if speed else None


@dataclass(frozen=True, slots=True)
class Reading:
    """The whole daemon; ``change``: all its counters. ``workers`` take orders.

    ``local_workers``: those of this host; ``free_cpus``: beyond them. ``pool``: None if no worker
    hosts may come. ``deaths``: local workers that died or were killed. ``work_s``: the workers'
    time in ``seconds``, for all streams together: also of orders that are not finished, or whose
    worker died.
    """

    change: DaemonStatus
    seconds: float
    workers: int
    local_workers: int
    free_cpus: int
    deaths: int
    work_s: float
    streams: tuple[StreamReading, ...]
    trainers: tuple[TrainerReading, ...]
    pool: PoolReading | None = None

    @property
    def utilisation(self) -> float:
        """The part of the workers' time in which they were busy or waited for files, 0 to 1."""
        return min(1.0, self.work_s / (self.seconds * self.workers)) if self.workers else 0.0


def compare(before: DaemonStatus, after: DaemonStatus) -> Reading | None:
    """The difference of two statuses; None if they are of two daemons, or at one time."""
    seconds = after.daemon.uptime_s - before.daemon.uptime_s
    if seconds <= 0 or before.daemon.pid != after.daemon.pid:
        return None
    change = difference(before, after)
    known = {stream.number: stream for stream in before.streams}
    trainers = {trainer.session: trainer for trainer in after.trainers}
    streams, found = [], []
    work_s = _uncounted_s(before, after, seconds, change.daemon.worker_deaths)
    for now, changed in zip(after.streams, change.streams, strict=True):
        work_s += changed.work.busy_s + changed.work.waited_s
        former = known.get(now.number)
        if former is None:
            continue
        cached = [status.cache.held_samples if status.cache is not None else 0 for status in (former, now)]
        reading = StreamReading(now, changed, _work(now, changed), cache_grows=cached[1] > cached[0])
        streams.append(reading)
        subscriptions = {claim.number: claim for claim in former.subscriptions}
        found += [
            TrainerReading(
                now=claim,
                change=changed_one,
                who=trainers[claim.session],
                stream=reading,
                seconds=seconds,
                ready_ahead=min(subscriptions[claim.number].ready_ahead, claim.ready_ahead),
            )
            for claim, changed_one in zip(now.subscriptions, changed.subscriptions, strict=True)
            if claim.number in subscriptions and claim.session in trainers
        ]
    local = sum(worker.state == "ready" for worker in after.workers)
    pool = _pool(before, after, change, seconds)
    remote = sum(host.now.workers for host in pool.hosts if host.now.streams) if pool is not None else 0
    free_cpus = max(0, after.daemon.cpus - len({worker.place for worker in after.workers}))
    return Reading(
        change=change,
        seconds=seconds,
        workers=local + remote,
        local_workers=local,
        free_cpus=free_cpus,
        deaths=change.daemon.worker_deaths,
        work_s=max(0.0, work_s),
        streams=tuple(streams),
        trainers=tuple(found),
        pool=pool,
    )


def _pool(before: DaemonStatus, after: DaemonStatus, change: DaemonStatus, seconds: float) -> PoolReading | None:
    if after.pool is None or change.pool is None:
        return None
    known = {link.link for link in before.pool.links} if before.pool is not None else set()
    hosts = [
        HostReading(now, changed, seconds)
        for now, changed in zip(after.pool.links, change.pool.links, strict=True)
        if now.link in known
    ]
    return PoolReading(after.pool, tuple(hosts), change.pool.received_bytes / seconds)


def _uncounted_s(before: DaemonStatus, after: DaemonStatus, seconds: float, deaths: int) -> float:
    """Time on orders that are not reported: begun since the last report, or lost with workers."""
    uncounted_s = sum(worker.unreported_s for worker in after.workers)
    numbers = {worker.number for worker in after.workers}
    counted_s = {worker.place: worker.busy_s + worker.unreported_s for worker in after.workers}
    for former in before.workers:
        if former.number not in numbers and former.orders and deaths:
            uncounted_s += max(0.0, seconds - counted_s.get(former.place, 0.0))
        else:
            uncounted_s -= former.unreported_s
    return uncounted_s


def work_since_start(stream: StreamStatus) -> WorkReading:
    """The workers' time for a stream since the daemon started."""
    return _work(stream, stream)


def _work(now: StreamStatus, change: StreamStatus) -> WorkReading:
    spent: dict[str, float] = {}
    for part in change.work.parts:
        spent[part.name] = spent.get(part.name, 0.0) + part.busy_s
    former_rows = now.work.slow_rows - change.work.slow_rows
    slow = [(sample.path, sample.taken_s) for sample in now.work.slowest if sample.slow_row > former_rows]
    return WorkReading(
        samples=change.decoded_samples,
        bad_rows=change.bad_rows,
        counts=change.work,
        parts=tuple(spent.items()),
        slowest=tuple(sorted(slow, key=lambda sample: -sample[1])),
    )
