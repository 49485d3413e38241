"""Metrics: their places in the daemon's status, the table of all, the text for Prometheus.

OBSERVER process. The text, the page docs/metrics.md and the tests are made from the table: a new
number in the status is one line there. A **scope** yields rows: the values of its labels, and the
part of the status that has the metrics' values. Rows with equal labels (two steps of one name)
become one value. The session distinguishes trainers: a sum over several of one name would fall when
one leaves, which a scraper takes for a restarted counter.

Invariants:

* Streams, workers, ``TRAINERS_MAX`` and ``LINKS_MAX`` bound the values of a scope, whatever names
  trainers and worker hosts choose.
* A counter only grows while the thing that its labels name lives, and ends in ``_total``; a name
  says its unit. A trainer's counters end with the trainer, so lasting ones are counted by stream.
* Each scrape asks the daemon, so at the end of a run the numbers are exact. An answer (at most ten
  a second) is formatted once, however many scrapers ask.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from threading import Lock
from time import monotonic
from typing import Literal

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from batchd.observe.http.status_client import Answer, StatusClient
from batchd_wire.status import REPORT_BOUNDS, DaemonStatus, SubscriptionStatistics, TrainerStatistics

TRAINERS_MAX = 200
"""Further trainers are counted together, as ``OTHER``, by gauges alone."""
OTHER = "other"
SESSION = "session"
LINKS_MAX = 200
"""Further worker hosts are counted together, as ``OTHER``, by gauges alone."""
LINK = "link"
LINK_STATES = ("opening", "proving", "serving", "leaving", "closing")
CAPS = ("max", "network", "ring")
WORKER_STATES = ("starting", "ready", "leaving", "ending")
TRANSPORTS = ("shared memory", "tcp")

_GONE = TrainerStatistics(session=0, name="", pid=None, user=None, transport="")

Labels = tuple[str, ...]
Row = tuple[Labels, object]
"""The values of the labels, and the object whose attributes are values of metrics."""


@dataclass(frozen=True, slots=True)
class Scope:
    """``where``: the place in the status, for the documentation."""

    where: str
    labels: tuple[str, ...]
    rows: Callable[[DaemonStatus], Iterable[Row]]

    def is_others(self, labels: Labels) -> bool:
        """True for trainers and links beyond the limits: their set changes, so sums may fall."""
        return any(labels[self.labels.index(one)] == OTHER for one in (SESSION, LINK) if one in self.labels)


@dataclass(frozen=True, slots=True)
class _Counted:
    """Values that no object of the status has."""

    one: int = 1
    count: int = 0
    waited_s: float = 0.0


def _worker_states(status: DaemonStatus) -> Iterator[Row]:
    for state in WORKER_STATES:
        yield (state,), _Counted(count=sum(worker.state == state for worker in status.workers))


def _transports(status: DaemonStatus) -> Iterator[Row]:
    for transport in TRANSPORTS:
        yield (transport,), _Counted(count=sum(one.transport == transport for one in status.trainers))


def _trainers(status: DaemonStatus) -> Iterator[tuple[Labels, SubscriptionStatistics]]:
    """Subscriptions but those of spectators; the oldest ``TRAINERS_MAX`` have labels of their own.

    A trainer that disconnected may still have batches in flight; its name is then empty.
    """
    sessions = {one.session: one for one in status.trainers}
    claims = [(stream.name, one) for stream in status.streams for one in stream.subscriptions if not one.is_spectator]
    known: set[Labels] = set()
    for stream, claim in sorted(claims, key=lambda found: (found[1].session, found[0])):
        trainer = sessions.get(claim.session, _GONE)
        labels = (stream, trainer.name, str(claim.rank), trainer.transport, str(claim.session))
        if labels not in known and len(known) >= TRAINERS_MAX:
            labels = (stream, OTHER, OTHER, OTHER, OTHER)
        else:
            known.add(labels)
        yield labels, claim


def _waits(status: DaemonStatus) -> Iterator[Row]:
    for labels, claim in _trainers(status):
        for cause, waited_s in asdict(claim.waits).items():
            yield (*labels, cause.removesuffix("_s")), _Counted(waited_s=waited_s)


def _remote(status: DaemonStatus) -> Iterator[Row]:
    remote = sorted((one for one in status.trainers if one.transport == "tcp"), key=lambda one: one.session)
    for place, trainer in enumerate(remote):
        yield (trainer.name, str(trainer.session)) if place < TRAINERS_MAX else (OTHER, OTHER), trainer


def _links(status: DaemonStatus) -> Iterator[Row]:
    links = sorted(status.pool.links, key=lambda one: one.link) if status.pool is not None else []
    for place, link in enumerate(links):
        yield (link.name, str(link.link)) if place < LINKS_MAX else (OTHER, OTHER), link


def _link_states(status: DaemonStatus) -> Iterator[Row]:
    if status.pool is not None:
        for state in LINK_STATES:
            yield (state,), _Counted(count=sum(link.state == state for link in status.pool.links))


def _gateways(status: DaemonStatus) -> Iterator[Row]:
    if status.pool is not None:
        for gateway in sorted({*range(status.pool.gateways)} - {*status.pool.gateways_down}):
            yield (str(gateway),), _Counted(count=sum(link.gateway == gateway for link in status.pool.links))


def _remote_workers(status: DaemonStatus) -> Iterator[Row]:
    if status.pool is not None:
        yield (), _Counted(count=sum(link.workers for link in status.pool.links))


def _caps(status: DaemonStatus) -> Iterator[Row]:
    if status.pool is not None:
        for cap in CAPS:
            yield (cap,), _Counted(count=int(status.pool.capped_by == cap))


DAEMON = Scope("daemon", (), lambda status: [((), status.daemon)])
INFO = Scope(
    "daemon",
    ("version", "decoders"),
    lambda status: [((status.daemon.version, status.daemon.decoders), _Counted())],
)
RELOAD = Scope("daemon.reload", (), lambda status: [((), one) for one in [status.daemon.reload] if one is not None])
TCP = Scope("daemon.tcp", (), lambda status: [((), one) for one in [status.daemon.tcp] if one is not None])
POOL = Scope("pool", (), lambda status: [((), status.pool)] if status.pool is not None else [])
POOL_WORKERS = Scope("pool.links", (), _remote_workers)
POOL_LINKS = Scope("pool.links", ("state",), _link_states)
POOL_GATEWAYS = Scope("pool.links", ("gateway",), _gateways)
POOL_CAP = Scope("pool.capped_by", ("by",), _caps)
POOL_LINK = Scope("pool.links[]", ("name", LINK), _links)
WORKER_COUNTS = Scope("workers", ("state",), _worker_states)
WORKER = Scope("workers[]", ("worker",), lambda status: [((str(one.place),), one) for one in status.workers])
TRAINER_COUNTS = Scope("trainers", ("transport",), _transports)
STREAM = Scope("streams[]", ("stream",), lambda status: [((one.name,), one) for one in status.streams])
WORK = Scope("streams[].work", ("stream",), lambda status: [((one.name,), one.work) for one in status.streams])
PART = Scope(
    "streams[].work.parts[]",
    ("stream", "part"),
    lambda status: [((one.name, part.name), part) for one in status.streams for part in one.work.parts],
)
CACHE = Scope(  # streams that share a cache all show it
    "streams[].cache",
    ("stream",),
    lambda status: [((one.name,), one.cache) for one in status.streams if one.cache is not None],
)
MAILBOX = Scope(
    "streams[].live",
    ("stream",),
    lambda status: [((one.name,), one.live) for one in status.streams if one.live is not None],
)
REPORTS = Scope(
    "streams[].reports",
    ("stream",),
    lambda status: [((one.name,), one.reports) for one in status.streams if one.reports is not None],
)
TRAINER = Scope("streams[].subscriptions[]", ("stream", "trainer", "rank", "transport", SESSION), _trainers)
WAIT = Scope("streams[].subscriptions[].waits", (*TRAINER.labels, "cause"), _waits)
REMOTE = Scope("trainers[]", ("trainer", SESSION), _remote)


PREFIX = "batchd_"
COUNTER: Literal["counter"] = "counter"
GAUGE: Literal["gauge"] = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``key``: the attribute of the scope's rows; text and None become 1 and 0."""

    name: str
    kind: Literal["counter", "gauge"]
    scope: Scope
    key: str
    help: str
    merge: Callable[[Iterable[float]], float] = sum
    """Makes one value of several with the same labels."""

    def values(self, status: DaemonStatus) -> Iterator[tuple[Labels, float]]:
        """The value for each set of labels, without unknown ones and sums that may fall."""
        found: dict[Labels, list[float]] = {}
        for labels, row in self.scope.rows(status):
            value = getattr(row, self.key)
            if value is None and self.key in _NONE_IS_NOTHING:
                continue
            if self.kind == COUNTER and self.scope.is_others(labels):
                continue
            number = value if isinstance(value, (int, float)) else float(value is not None)
            found.setdefault(labels, []).append(number)
        for labels, numbers in found.items():
            yield labels, self.merge(numbers)


_NONE_IS_NOTHING = {"epoch", "step", "cpu_wait_s"}
"""Keys whose value may be unknown: past the end of a course, or not counted by the kernel."""


_C, _G = COUNTER, GAUGE

METRICS: tuple[Metric, ...] = (
    Metric("info", _G, INFO, "one", "Always 1; its labels are the version and the decoders."),
    Metric("uptime_seconds", _G, DAEMON, "uptime_s", "How long the daemon has been up."),
    Metric("slot_memory_bytes", _G, DAEMON, "memory_bytes", "Shared memory of all slots."),
    Metric("draining", _G, DAEMON, "draining", "1 while the daemon finishes work in progress and starts no more."),
    Metric("ending_slots", _G, DAEMON, "ending_slots", "Slots of ended streams that trainers or workers still hold."),
    Metric("reload_failed", _G, RELOAD, "failed", "1 if the last reload was refused or failed; absent before the first."),
    Metric("reload_timestamp_seconds", _G, RELOAD, "time_s", "Unix time at which the last reload ended."),
    Metric("worker_deaths_total", _C, DAEMON, "worker_deaths", "Workers that ended without an order to."),
    Metric("workers", _G, WORKER_COUNTS, "count", "Workers by state."),
    Metric("trainers", _G, TRAINER_COUNTS, "count", "Connected trainers by transport."),
    Metric("tcp_connections", _G, TCP, "connections", "Connections over TCP, with or without a session."),
    Metric("tcp_strangers", _G, TCP, "strangers", "Connections over TCP without a session."),
    Metric("tcp_closed_total", _C, TCP, "closed", "Connections over TCP that the daemon closed by itself."),
    Metric("tcp_failed_handshakes_total", _C, TCP, "failed_handshakes", "TCP peers that failed to prove a key."),
    Metric("tcp_sent_bytes_total", _C, TCP, "sent_bytes", "Bytes of batches sent over TCP, to all trainers ever."),
    # --- workers
    Metric("worker_orders", _G, WORKER, "orders", "Orders that the worker works on, or has in its socket."),
    Metric("worker_chunks_total", _C, WORKER, "chunks", "Chunks that the worker has filled."),
    Metric("worker_samples_total", _C, WORKER, "samples", "Samples that the worker has written."),
    Metric("worker_busy_seconds_total", _C, WORKER, "busy_s", "Time that the worker has spent on chunks."),
    # --- worker hosts
    Metric("workers_wanted", _G, POOL, "wanted", "Remote workers that the trainers need, within what caps them."),
    Metric("pool_received_bytes_total", _C, POOL, "received_bytes", "Bytes of rows from worker hosts, from all ever."),
    Metric("pool_ended_links_total", _C, POOL, "ended_links", "Worker hosts that have gone."),
    Metric("pool_workers", _G, POOL_WORKERS, "count", "Remote workers."),
    Metric("pool_links", _G, POOL_LINKS, "count", "Worker hosts by state."),
    Metric("pool_gateway_links", _G, POOL_GATEWAYS, "count", "Worker hosts of each gateway that listens."),
    Metric("pool_capped", _G, POOL_CAP, "count", "1 for what keeps `workers_wanted` below what the trainers need."),
    Metric("link_workers", _G, POOL_LINK, "workers", "Workers of the worker host."),
    Metric("link_orders_total", _C, POOL_LINK, "orders", "Orders that the worker host has filled into batches."),
    Metric("link_samples_total", _C, POOL_LINK, "samples", "Samples that the worker host has filled into batches."),
    Metric("link_busy_seconds_total", _C, POOL_LINK, "busy_s", "Time that its workers have spent on them."),
    Metric("link_received_bytes_total", _C, POOL_LINK, "received_bytes", "Bytes of rows from the worker host."),
    Metric("link_withdrawn_orders_total", _C, POOL_LINK, "withdrawn", "Its orders that were given to other workers."),
    Metric("link_late_rows_total", _C, POOL_LINK, "late_rows", "Its rows that came after that, and were dropped."),
    Metric("link_disagreements_total", _C, POOL_LINK, "disagreements", "Good samples that it reported bad."),
    # --- streams
    Metric("stream_samples", _G, STREAM, "samples", "Samples of one epoch."),
    Metric("stream_batch_size", _G, STREAM, "batch_size", "Samples of a full batch."),
    Metric("stream_steps", _G, STREAM, "steps", "Batches of one epoch."),
    Metric("stream_slots", _G, STREAM, "slots", "Slots of the ring now."),
    Metric("stream_slots_max", _G, STREAM, "slots_max", "Slots of the ring that its memory suffices for."),
    Metric("stream_ready_slots", _G, STREAM, "ready_slots", "Slots with a complete batch."),
    Metric("stream_filling_slots", _G, STREAM, "filling_slots", "Slots that workers fill for a trainer."),
    Metric("stream_partial_slots", _G, STREAM, "partial_slots", "Slots partly filled, that no trainer waits for."),
    Metric("stream_leased_slots", _G, STREAM, "leased_slots", "Slots that trainers read."),
    Metric("stream_decoded_batches_total", _C, STREAM, "decoded_batches", "Batches that workers have filled."),
    Metric("stream_decoded_samples_total", _C, STREAM, "decoded_samples", "Samples that workers have written."),
    Metric("stream_delivered_batches_total", _C, STREAM, "delivered_batches", "Batches handed out, to all trainers ever."),
    Metric("stream_delivered_samples_total", _C, STREAM, "delivered_samples", "Samples handed out, to all trainers ever."),
    Metric("stream_shared_batches_total", _C, STREAM, "shared_batches", "Batches decoded once and read by two or more."),
    Metric("stream_mismatched_batches_total", _C, STREAM, "mismatched_batches", "Batches that did not match their checksums."),
    Metric("stream_bad_rows_total", _C, STREAM, "bad_rows", "Rows whose sample was bad, each occurrence."),
    Metric("stream_bad_samples", _G, STREAM, "bad_samples", "Different samples found bad so far."),
    Metric("stream_quarantined_samples", _G, STREAM, "quarantined_samples", "Samples skipped because they crash workers."),
    Metric(
        "stream_subscriptions_left_out",
        _G,
        STREAM,
        "subscriptions_left_out",
        "Trainers without metrics of their own, as there are too many.",
    ),
    Metric("stream_sample_seconds", _G, STREAM, "sample_s", "Worker time for one sample at present."),
    Metric("stream_stopped", _G, STREAM, "stopped", "1 if the stream has stopped; `batchd status` shows the reason."),
    # --- the workers' time for a stream
    Metric("stream_busy_seconds_total", _C, WORK, "busy_s", "Time that workers spent on the samples of the stream."),
    Metric("stream_cpu_seconds_total", _C, WORK, "cpu_s", "The part of it with a CPU."),
    Metric("stream_cpu_wait_seconds_total", _C, WORK, "cpu_wait_s", "Seconds in which workers were runnable and had no CPU."),
    Metric("stream_read_cpu_seconds_total", _C, WORK, "read_cpu_s", "The part of the CPU time that was spent on reading."),
    Metric("stream_fetch_seconds_total", _C, WORK, "waited_s", "Further time in which workers waited for a file server."),
    Metric("stream_read_bytes_total", _C, WORK, "read_bytes", "Bytes of encoded samples that were read."),
    Metric("stream_usual_sample_seconds", _G, WORK, "usual_sample_s", "Half of the samples take less time than this."),
    Metric("stream_slow_rows_total", _C, WORK, "slow_rows", "Rows whose sample took several times as long as usual."),
    Metric("stream_slow_seconds_total", _C, WORK, "slow_s", "Time that workers spent on slow rows."),
    Metric("stream_part_seconds_total", _C, PART, "busy_s", "Time that workers spent on one part: reading, or a step."),
    # --- caches of samples
    Metric("stream_cache_hits_total", _C, WORK, "cache_hits", "Samples that were in the stream's cache."),
    Metric("stream_cache_misses_total", _C, WORK, "cache_misses", "Samples that were not in the stream's cache."),
    Metric("cache_held_samples", _G, CACHE, "held_samples", "Samples in the cache; all streams that share it show it."),
    Metric("cache_used_bytes", _G, CACHE, "used_bytes", "Memory, or space on disk, that the cache takes."),
    Metric("cache_budget_bytes", _G, CACHE, "budget_bytes", "Memory, or space on disk, that the cache may take at most."),
    Metric("cache_spoilt_samples_total", _C, CACHE, "spoilt_samples", "Records of a cache on disk that were damaged."),
    # --- live streams
    Metric("mailbox_places", _G, MAILBOX, "capacity", "Places of a live stream's mailbox."),
    Metric("mailbox_producers", _G, MAILBOX, "producers", "Producers that are connected."),
    Metric("mailbox_waiting_producers", _G, MAILBOX, "waiting_producers", "Producers that wait for a place."),
    Metric("mailbox_queued_samples", _G, MAILBOX, "queued_samples", "Samples that wait for a batch."),
    Metric("mailbox_bound_samples", _G, MAILBOX, "bound_samples", "Samples of batches that no trainer has received yet."),
    Metric("mailbox_lent_places", _G, MAILBOX, "lent_places", "Places that producers are filling."),
    Metric("mailbox_pushed_samples_total", _C, MAILBOX, "pushed_samples", "Samples that producers have pushed."),
    Metric("mailbox_dropped_oldest_total", _C, MAILBOX, "dropped_oldest", "Samples dropped for newer ones."),
    Metric("mailbox_dropped_newest_total", _C, MAILBOX, "dropped_newest", "Samples dropped on arrival."),
    Metric("mailbox_refused_pushes_total", _C, MAILBOX, "refused_pushes", "Pushes from places not lent to the producer."),
    Metric("mailbox_lost_batches_total", _C, MAILBOX, "lost_batches", "Batches that some trainers of the stream missed."),
    # --- what trainers report of batches
    Metric("stream_reports", _G, REPORTS, "kept", "Reports about batches, such as losses, in the daemon's memory."),
    Metric("stream_reports_total", _C, REPORTS, "received", "Reports from trainers, without repeated ones."),
    Metric("stream_refused_reports_total", _C, REPORTS, "refused", "Reports that did not fit the stream."),
    Metric("stream_not_finite_values_total", _C, REPORTS, "not_finite", "Reported values that were NaN or infinite."),
    # --- trainers
    Metric("trainer_consumed_batches_total", _C, TRAINER, "consumed_batches", "Batches that the trainer has consumed."),
    Metric("trainer_delivered_samples_total", _C, TRAINER, "delivered_samples", "Samples handed to the trainer."),
    Metric("trainer_wait_seconds_total", _C, TRAINER, "wait_s", "Time that the trainer has waited for batches."),
    Metric("trainer_short_of_memory_seconds_total", _C, TRAINER, "short_of_memory_s", "Time with too few slots in the ring."),
    Metric("trainer_waiting", _G, TRAINER, "waiting", "1 while the trainer waits; of several, how many do."),
    Metric("trainer_held_slots", _G, TRAINER, "held_slots", "Slots that the trainer holds."),
    Metric("trainer_kept_slots", _G, TRAINER, "kept_slots", "Idle slots that are kept for the trainer."),
    Metric("trainer_ready_ahead", _G, TRAINER, "ready_ahead", "Batches that are ready ahead of the trainer."),
    Metric("trainer_window", _G, TRAINER, "window", "Batches that the trainer wants ready ahead of it."),
    Metric("trainer_epoch", _G, TRAINER, "epoch", "Epoch of its next batch; absent at its end; of several, the last.", max),
    Metric("trainer_step", _G, TRAINER, "step", "Step of its next batch; absent at its end; of several, the last.", max),
    Metric("trainer_wait_cause_seconds_total", _C, WAIT, "waited_s", "Time that the trainer has waited, by cause."),
    Metric("trainer_sent_bytes_total", _C, REMOTE, "sent_bytes", "Bytes of batches sent to a trainer over TCP."),
    Metric("trainer_connections", _G, REMOTE, "connections", "Connections of a trainer over TCP."),
)  # fmt: skip

REPORTED = ("stream_reported_values", "Reported values that were finite numbers.")
"""The one histogram, of ``REPORTS``: name and meaning."""

OWN: tuple[tuple[str, str], ...] = (
    ("up", "1 while the daemon's loop answers the observer, else 0: then all other values are from its last answer."),
    ("status_age_seconds", "Age of the daemon's last answer, which all other values come from."),
)
"""The observer's own gauges: name and meaning. They have no labels."""


SCRAPE_S = 0.5
"""How long a scrape waits for a new answer before it uses the last one."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exposition:
    """Formats the metrics for Prometheus. Use from any thread."""

    def __init__(self, client: StatusClient) -> None:
        self._client = client
        self._lock = Lock()
        self._written: tuple[Answer, bytes] | None = None

    def text(self) -> bytes:
        """Ask the daemon and format its answer, if any, with the observer's own metrics."""
        answer = self._client.fresh(SCRAPE_S)
        if answer is None:
            return generate_latest(_Own({"up": 0.0}))
        own = _Own({"up": float(self._client.is_answered), "status_age_seconds": monotonic() - answer.received_s})
        with self._lock:
            if self._written is None or self._written[0] is not answer:
                self._written = answer, generate_latest(_Table(answer.status))
            return generate_latest(own) + self._written[1]


@dataclass(frozen=True, slots=True, eq=False)
class _Own(Collector):
    """The observer's own metrics that have a value."""

    values: dict[str, float]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, meaning in OWN:
            if name in self.values:
                yield GaugeMetricFamily(PREFIX + name, meaning, value=self.values[name])


@dataclass(frozen=True, slots=True, eq=False)
class _Table(Collector):
    """All metrics of the table, from one status."""

    status: DaemonStatus

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for metric in METRICS:
            kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
            family = kind(PREFIX + metric.name, metric.help, labels=metric.scope.labels)
            for labels, value in metric.values(self.status):
                family.add_metric(labels, value)
            yield family
        histogram = HistogramMetricFamily(PREFIX + REPORTED[0], REPORTED[1], labels=REPORTS.labels)
        bounds = [*map(str, REPORT_BOUNDS), "+Inf"]
        for stream in self.status.streams:
            reports = stream.reports
            if reports is not None and len(reports.buckets) == len(bounds):
                histogram.add_metric(
                    [stream.name], [*zip(bounds, accumulate(reports.buckets), strict=True)], reports.sum
                )
        yield histogram
