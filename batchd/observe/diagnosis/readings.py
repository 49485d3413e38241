"""The difference between two statuses of a daemon. Pure; in any process.

A stream or a trainer that is in one status only is left out, also if a reload has replaced it:
there is nothing to compare.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from batchd_wire.status import (
    CacheStatistics,
    DaemonStatus,
    LinkStatistics,
    PoolStatistics,
    StreamStatistics,
    SubscriptionStatistics,
    TrainerStatistics,
    WorkStatistics,
)
from batchd_wire.wording import BAD_PART, READ_PART

OWN_PART = "call"
"""The step that is a user's function."""


@dataclass(frozen=True, slots=True)
class WorkReading:
    """The workers' time for one stream, in seconds.

    ``parts``: by name, in order. ``slowest``: (path, seconds), worst first. ``cpu_wait_s`` is None
    if the kernel does not count it. ``cache_hits``: samples from the stream's cache.
    """

    samples: int
    busy_s: float
    waited_s: float
    cpu_s: float
    cpu_wait_s: float | None
    read_cpu_s: float
    read_bytes: int
    parts: tuple[tuple[str, float], ...]
    usual_sample_s: float
    slow_rows: int
    slow_s: float
    slowest: tuple[tuple[str, float], ...]
    bad_rows: int
    cache_hits: int = 0

    @property
    def storage_wait_s(self) -> float:
        """Waiting for files, and in reads, where sources such as videos and tables also compute."""
        return self.waited_s + max(0.0, self._part_s(READ_PART) - self.read_cpu_s - self.no_cpu_s)

    @property
    def no_cpu_s(self) -> float:
        """Time in which workers were runnable and had no CPU."""
        if self.cpu_wait_s is not None:
            return self.cpu_wait_s
        # All computing without a CPU, but that in users' functions, which may wait themselves.
        computing_s = self.busy_s - self._part_s(READ_PART) - self._part_s(OWN_PART) - self.bad_s
        return max(0.0, computing_s - (self.cpu_s - self.read_cpu_s))

    @property
    def bad_s(self) -> float:
        """Time spent on bad samples."""
        return self._part_s(BAD_PART)

    def _part_s(self, name: str) -> float:
        return sum(spent_s for part, spent_s in self.parts if part == name)

    @property
    def total_s(self) -> float:
        """Time of computing and of waiting for files."""
        return self.busy_s + self.waited_s


@dataclass(frozen=True, slots=True)
class StreamReading:
    """One stream. ``now``: its second status. ``cache_grows``: its cache has more samples now."""

    now: StreamStatistics
    work: WorkReading
    cache_grows: bool

    @property
    def name(self) -> str:
        """Name of the stream."""
        return self.now.name

    @property
    def samples_cache(self) -> CacheStatistics | None:
        """Its cache, if that keeps samples, and not only access points."""
        return self.now.cache if self.now.cache is not None and self.now.cache.kind != "points" else None


@dataclass(frozen=True, slots=True)
class TrainerReading:
    """One subscription: its second status (``now``, ``who``), and the differences from the first.

    ``waits_s``: by cause, see ``core.measure``. ``ready_ahead``: the smaller of both statuses.
    """

    now: SubscriptionStatistics
    who: TrainerStatistics
    stream: StreamReading
    seconds: float
    waits_s: Mapping[str, float]
    short_of_memory_s: float
    batches: int
    ready_ahead: int

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
    """One worker host: its second status (``now``), and the differences from the first."""

    now: LinkStatistics
    seconds: float
    samples: int
    busy_s: float
    received_bytes: int

    @property
    def samples_per_s(self) -> float:
        """Samples that it filled."""
        return self.samples / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes of rows that came from it."""
        return self.received_bytes / self.seconds

    @property
    def busy_share(self) -> float | None:
        """The part of its workers' time in which they were busy, 0 to 1; None without workers."""
        workers = self.now.workers
        return min(1.0, self.busy_s / (self.seconds * workers)) if workers else None


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
    """The whole daemon. ``workers`` take orders; ``free_cpus`` are beyond those of this host.

    ``local_workers``: those of this host. ``pool``: None if no worker hosts may come. ``deaths``:
    local workers that died or were killed. ``work_s``: the workers' time in ``seconds``, for
    all streams together: also of orders that are not finished, or whose worker died.
    """

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
    known = {stream.number: stream for stream in before.streams}
    trainers = {trainer.session: trainer for trainer in after.trainers}
    streams, found = [], []
    deaths = after.daemon.worker_deaths - before.daemon.worker_deaths
    work_s = _uncounted_s(before, after, seconds, deaths)
    for stream in after.streams:
        former = known.get(stream.number)
        if former is None:
            work_s += stream.work.busy_s + stream.work.waited_s
            continue
        cached = [one.cache.held_samples if one.cache is not None else 0 for one in (former, stream)]
        reading = StreamReading(stream, _work(former, stream), cache_grows=cached[1] > cached[0])
        work_s += reading.work.total_s
        streams.append(reading)
        subscriptions = {one.number: one for one in former.subscriptions}
        found += [
            _trainer(subscriptions[one.number], one, trainers[one.session], reading, seconds)
            for one in stream.subscriptions
            if one.number in subscriptions and one.session in trainers
        ]
    local = sum(worker.state == "ready" for worker in after.workers)
    pool = _pool(before.pool, after.pool, seconds) if after.pool is not None else None
    remote = sum(one.now.workers for one in pool.hosts if one.now.streams) if pool is not None else 0
    free_cpus = max(0, after.daemon.cpus - len({worker.place for worker in after.workers}))
    return Reading(
        seconds=seconds,
        workers=local + remote,
        local_workers=local,
        free_cpus=free_cpus,
        deaths=deaths,
        work_s=max(0.0, work_s),
        streams=tuple(streams),
        trainers=tuple(found),
        pool=pool,
    )


def _pool(before: PoolStatistics | None, after: PoolStatistics, seconds: float) -> PoolReading:
    known = {link.link: link for link in before.links} if before is not None else {}
    hosts = [
        HostReading(
            now=link,
            seconds=seconds,
            samples=link.samples - former.samples,
            busy_s=link.busy_s - former.busy_s,
            received_bytes=link.received_bytes - former.received_bytes,
        )
        for link in after.links
        if (former := known.get(link.link)) is not None
    ]
    came_bytes = after.received_bytes - (before.received_bytes if before is not None else 0)
    return PoolReading(after, tuple(hosts), max(0, came_bytes) / seconds)


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


def work_since_start(stream: StreamStatistics) -> WorkReading:
    """The workers' time for a stream since the daemon started."""
    nothing = WorkStatistics(0.0, 0.0, 0.0, None, 0.0, 0, (), 0.0, 0, 0.0, ())
    return _work(replace(stream, decoded_samples=0, bad_rows=0, work=nothing), stream)


def _work(before: StreamStatistics, after: StreamStatistics) -> WorkReading:
    former, work = before.work, after.work
    spent: dict[str, float] = {}
    for sign, parts in ((1, work.parts), (-1, former.parts)):
        for part in parts:
            spent[part.name] = spent.get(part.name, 0.0) + sign * part.busy_s
    slow = [one for one in work.slowest if one.slow_row > former.slow_rows]
    cpu_wait_s = work.cpu_wait_s
    return WorkReading(
        samples=after.decoded_samples - before.decoded_samples,
        busy_s=work.busy_s - former.busy_s,
        waited_s=work.waited_s - former.waited_s,
        cpu_s=work.cpu_s - former.cpu_s,
        cpu_wait_s=cpu_wait_s - (former.cpu_wait_s or 0.0) if cpu_wait_s is not None else None,
        read_cpu_s=work.read_cpu_s - former.read_cpu_s,
        read_bytes=work.read_bytes - former.read_bytes,
        parts=tuple(spent.items()),
        usual_sample_s=work.usual_sample_s,
        slow_rows=work.slow_rows - former.slow_rows,
        slow_s=work.slow_s - former.slow_s,
        slowest=tuple(sorted(((one.path, one.taken_s) for one in slow), key=lambda one: -one[1])),
        bad_rows=after.bad_rows - before.bad_rows,
        cache_hits=work.cache_hits - former.cache_hits,
    )


def _trainer(
    before: SubscriptionStatistics,
    after: SubscriptionStatistics,
    who: TrainerStatistics,
    stream: StreamReading,
    seconds: float,
) -> TrainerReading:
    waited_before = asdict(before.waits)
    waits = {cause.removesuffix("_s"): total - waited_before[cause] for cause, total in asdict(after.waits).items()}
    return TrainerReading(
        now=after,
        who=who,
        stream=stream,
        seconds=seconds,
        waits_s=waits,
        short_of_memory_s=after.short_of_memory_s - before.short_of_memory_s,
        batches=after.consumed_batches - before.consumed_batches,
        ready_ahead=min(before.ready_ahead, after.ready_ahead),
    )
