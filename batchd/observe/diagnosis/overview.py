"""Overview of a daemon at one moment: ``batchd top`` and the page show the same. Pure.

    statuses in order --> StatusWindow --> Overview: streams, trainers with their verdicts, workers

Rates and shares are those of the last ``WINDOW_S``: the difference between the oldest status that
is kept and the newest.

Invariant: a number that is not known yet is None, never zero.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from batchd.observe.diagnosis.pool import PoolView, pool_view
from batchd.observe.diagnosis.readings import Reading, StreamReading, WorkReading, compare
from batchd.observe.diagnosis.verdicts import judge_trainers
from batchd_wire.status import (
    DaemonStatus,
    LogLine,
    StreamStatus,
    SubscriptionStatistics,
    TrainerStatistics,
    UsageStatistics,
    WorkerStatistics,
)
from batchd_wire.wording import BAD_PART

WINDOW_S = 5.0
STILL_S = 5.0
"""Time without progress after which a trainer is shown as still."""
NO_CPU_PART = "no CPU"
"""Name of the part in which a worker was ready to run and had no CPU."""
FILES_PART = "wait for files"
"""Name of the part of a sample's time that is spent waiting for a file server."""

SubscriptionKey = tuple[str, int]
"""A subscription: the name of its stream, and its number."""


GONE = TrainerStatistics(session=0, name="?", pid=None, user=None, transport="?")
"""The trainer of a subscription that has only batches in flight."""


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream. ``parts``: (name, ms per sample), in order of the work; see ``parts_of_sample``.

    ``ready_slots`` are not leased.
    """

    name: str
    now: StreamStatus
    leased_slots: int
    ready_slots: int
    filling_slots: int
    decoded_per_s: float | None
    delivered_per_s: float | None
    sample_ms: float | None
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class VerdictView:
    """A verdict as text. ``is_healthy``: nothing needs a remedy."""

    kind: str
    is_healthy: bool
    proof: str
    remedy: str


@dataclass(frozen=True, slots=True)
class TrainerView:
    """One subscription. ``still_s``: seconds without a batch."""

    name: str
    stream: str
    claim: SubscriptionStatistics
    trainer: TrainerStatistics
    ready_ahead: int
    still_s: float
    wait_share: float | None
    batches_per_s: float | None
    verdict: VerdictView | None

    @property
    def is_still(self) -> bool:
        """True if it has taken no batch for ``STILL_S``, although there are more."""
        return self.claim.epoch is not None and self.still_s >= STILL_S


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker. ``replaced``: how often a new one took its place since the first status."""

    now: WorkerStatistics
    replaced: int
    samples_per_s: float | None
    sample_ms: float | None
    busy_share: float | None


@dataclass(frozen=True, slots=True)
class UsageView:
    """What one owner has had of one stream. ``share``: of the worker time of all since the start.

    ``now_share``: of that since the first status.
    """

    now: UsageStatistics
    share: float
    now_share: float | None


@dataclass(frozen=True, slots=True)
class Overview:
    """The whole daemon. ``seconds``: time between the two statuses; None with a single one.

    ``busy_share``: of all workers, also those of worker hosts. ``workers``: those of this host.
    ``claims``: the trainers, and subscriptions without one, which have only batches in flight.
    """

    version: str
    pid: int
    uptime_s: float
    memory_bytes: int
    decoders: str
    draining: bool
    worker_deaths: int
    seconds: float | None
    busy_share: float | None
    streams: tuple[StreamView, ...]
    trainers: tuple[TrainerView, ...]
    workers: tuple[WorkerView, ...]
    claims: tuple[TrainerView, ...] = ()
    pool: PoolView | None = None
    host: str = ""
    address: str = ""
    warnings: tuple[LogLine, ...] = ()
    usage: tuple[UsageView, ...] = ()


@dataclass(slots=True)
class _Changes:
    """Changes that two statuses do not show: last progress of trainers, replaced workers."""

    since_s: dict[SubscriptionKey, tuple[tuple[int, bool], float]] = field(default_factory=dict)
    replaced: dict[int, tuple[int, int]] = field(default_factory=dict)

    def take(self, status: DaemonStatus) -> None:
        """Add a status. Ended subscriptions are dropped."""
        now_s = status.daemon.uptime_s
        since: dict[SubscriptionKey, tuple[tuple[int, bool], float]] = {}
        for stream in status.streams:
            for subscription in stream.subscriptions:
                key, state = (stream.name, subscription.number), (subscription.consumed_batches, subscription.waiting)
                known = self.since_s.get(key)
                since[key] = known if known is not None and known[0] == state else (state, now_s)
        self.since_s = since
        for worker in status.workers:
            number, times = self.replaced.get(worker.place, (worker.number, 0))
            self.replaced[worker.place] = (worker.number, times + (number != worker.number))


class StatusWindow:
    """The statuses of the last ``WINDOW_S``. A restarted daemon starts an empty window."""

    def __init__(self) -> None:
        self._kept: deque[DaemonStatus] = deque()
        self._changes = _Changes()

    def add(self, status: DaemonStatus) -> None:
        """Add a status."""
        daemon = status.daemon
        if self._kept:
            last = self._kept[-1].daemon
            if last.pid != daemon.pid or last.uptime_s > daemon.uptime_s:
                self._kept.clear()
                self._changes = _Changes()
        self._kept.append(status)
        while len(self._kept) > 2 and daemon.uptime_s - self._kept[1].daemon.uptime_s >= WINDOW_S:  # noqa: PLR2004  a difference needs two
            self._kept.popleft()
        self._changes.take(status)

    def overview(self) -> Overview | None:
        """The overview; None before the first status."""
        return overview_between(self._kept[0], self._kept[-1], self._changes) if self._kept else None


def overview_between(before: DaemonStatus, after: DaemonStatus, changes: _Changes | None = None) -> Overview:
    """Overview from two statuses of a daemon. If they are the same one, there are no rates."""
    changes = changes or _Changes()
    reading = compare(before, after)
    daemon = after.daemon
    readings = {stream.name: stream for stream in reading.streams} if reading else {}
    known = {worker.number for worker in before.workers}
    changed = {worker.number: worker for worker in reading.change.workers if worker.number in known} if reading else {}
    seconds = reading.seconds if reading else 0.0
    claims = tuple(_claims(after, reading, changes))
    return Overview(
        version=daemon.version,
        pid=daemon.pid,
        uptime_s=daemon.uptime_s,
        memory_bytes=daemon.memory_bytes,
        decoders=daemon.decoders,
        draining=daemon.draining,
        worker_deaths=daemon.worker_deaths,
        seconds=reading.seconds if reading else None,
        busy_share=reading.utilisation if reading and reading.workers else None,
        streams=tuple(_stream(stream, readings.get(stream.name), seconds) for stream in after.streams),
        trainers=tuple(claim for claim in claims if claim.trainer is not GONE),
        claims=claims,
        workers=tuple(
            _worker(worker, changed.get(worker.number), seconds, changes.replaced.get(worker.place, (0, 0))[1])
            for worker in sorted(after.workers, key=lambda worker: worker.place)
        ),
        pool=pool_view(after.pool, reading.pool if reading else None) if after.pool is not None else None,
        host=daemon.host,
        address=daemon.address,
        warnings=after.warnings,
        usage=tuple(_usage(after, reading)),
    )


def _usage(after: DaemonStatus, reading: Reading | None) -> Iterator[UsageView]:
    """Those with the most worker time first."""
    total_s = sum(one.work_s for one in after.usage)
    changes = {(one.owner, one.stream): one.work_s for one in reading.change.usage} if reading else {}
    change_s = sum(changes.values())
    for one in sorted(after.usage, key=lambda one: -one.work_s):
        now_s = changes.get((one.owner, one.stream), 0.0)
        yield UsageView(
            now=one,
            share=one.work_s / (total_s or 1.0),
            now_share=now_s / (change_s or 1.0) if reading else None,
        )


def _stream(now: StreamStatus, reading: StreamReading | None, seconds: float) -> StreamView:
    work = reading.work if reading else None
    return StreamView(
        name=now.name,
        now=now,
        leased_slots=now.leased_slots,
        ready_slots=max(0, now.ready_slots - now.leased_slots),
        filling_slots=max(0, now.slots - now.ready_slots) if now.filling_slots is None else now.filling_slots,
        decoded_per_s=work.samples / seconds if work is not None else None,
        delivered_per_s=reading.change.delivered_samples / seconds if reading else None,
        sample_ms=1000 * work.total_s / work.samples if work is not None and work.samples else None,
        parts=parts_of_sample(work) if work is not None else (),
    )


def parts_of_sample(work: WorkReading) -> tuple[tuple[str, float], ...]:
    """The parts of a sample's time: (name, ms), in order of the work.

    Each part is measured by the clock, so time without a CPU is in all of them. It becomes a part
    of its own, and the others lose it in proportion.
    """
    if not work.samples:
        return ()
    no_cpu_s = min(work.no_cpu_s, work.counts.busy_s)
    with_cpu = 1 - no_cpu_s / work.counts.busy_s if work.counts.busy_s else 1.0
    spent = [(name, part_s * with_cpu) for name, part_s in work.parts if part_s or name != BAD_PART]
    if no_cpu_s:
        spent.append((NO_CPU_PART, no_cpu_s))
    if work.counts.waited_s:
        spent.append((FILES_PART, work.counts.waited_s))
    return tuple((name, 1000 * part_s / work.samples) for name, part_s in spent)


def _claims(after: DaemonStatus, reading: Reading | None, changes: _Changes) -> Iterator[TrainerView]:
    trainers = {trainer.session: trainer for trainer in after.trainers}
    now_s = after.daemon.uptime_s
    judged = (
        {(read.stream.name, read.now.number): (read, found) for read, found in judge_trainers(reading)}
        if reading
        else {}
    )
    for stream in after.streams:
        for claim in stream.subscriptions:
            trainer = trainers.get(claim.session, GONE)
            key = (stream.name, claim.number)
            read, verdict = judged.get(key, (None, None))
            yield TrainerView(
                name=trainer.name,
                stream=stream.name,
                claim=claim,
                trainer=trainer,
                ready_ahead=read.ready_ahead if read else claim.ready_ahead,
                still_s=now_s - changes.since_s[key][1] if key in changes.since_s else 0.0,
                wait_share=read.wait_share if read else None,
                batches_per_s=read.batches / read.seconds if read else None,
                verdict=VerdictView(verdict.kind.value, verdict.kind.is_healthy, verdict.proof, verdict.remedy)
                if verdict
                else None,
            )


def _worker(worker: WorkerStatistics, change: WorkerStatistics | None, seconds: float, replaced: int) -> WorkerView:
    return WorkerView(
        now=worker,
        replaced=replaced,
        samples_per_s=change.samples / seconds if change else None,
        sample_ms=1000 * change.busy_s / change.samples if change and change.samples else None,
        busy_share=min(1.0, change.busy_s / seconds) if change else None,
    )
