"""Metrics: the numbers of the daemon's status, the text for Prometheus. OBSERVER process.

A field of the status that is a ``Counter`` or a ``Gauge`` is a metric of the **scope** that has its
class, see ``batchd_wire.status``; the page docs/metrics.md and the tests use the same table. A
scope yields rows: the values of its labels, and the part of the status that has the metrics'
values. Rows with equal labels (two steps of one name) become one value. The session distinguishes
trainers: a sum over several of one name would fall when one leaves, which a scraper takes for a
restarted counter.

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
from functools import partial
from itertools import accumulate
from threading import Lock
from time import monotonic
from typing import get_type_hints

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from batchd.observe.http.status_client import Answer, StatusClient
from batchd_wire.status import (
    REPORT_BOUNDS,
    CacheStatistics,
    Counter,
    DaemonFacts,
    DaemonStatus,
    Gauge,
    LinkStatistics,
    LiveStatistics,
    PartStatistics,
    PoolStatistics,
    ReloadOutcome,
    ReportStatistics,
    StreamStatus,
    SubscriptionStatistics,
    TcpCounts,
    TrainerStatistics,
    UsageStatistics,
    WorkerStatistics,
    WorkStatistics,
)

TRAINERS_MAX = 200
"""Further trainers are counted together, as ``OTHER``, by gauges alone."""
OTHER = "other"
SESSION = "session"
OWNERS_MAX = 200
"""Owners and their streams, those of the earliest trainers; `batchd usage` has all."""
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
    """A place in the status, ``where``. Its ``rows`` are of class ``of``, whose fields are metrics.

    ``prefix``: of the metrics' names.
    """

    where: str
    labels: tuple[str, ...]
    rows: Callable[[DaemonStatus], Iterable[Row]]
    of: type | None = None
    prefix: str = ""

    def is_others(self, labels: Labels) -> bool:
        """True for trainers and links beyond the limits: their set changes, so sums may fall."""
        return any(labels[self.labels.index(label)] == OTHER for label in (SESSION, LINK) if label in self.labels)

    def metrics(self) -> Iterator["Metric"]:
        """One for each counter and gauge that has a text, in the order of the fields."""
        hints = get_type_hints(self.of, include_extras=True) if self.of is not None else {}
        for key, hint in hints.items():
            for kind in getattr(hint, "__metadata__", ()):
                if isinstance(kind, Counter | Gauge) and kind.help:
                    unit = f"{key.removesuffix('_s')}_seconds" if key.endswith("_s") else key
                    name = kind.metric or self.prefix + unit
                    yield Metric(f"{name}_total" if isinstance(kind, Counter) else name, kind, self, key)


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
        yield (transport,), _Counted(count=sum(trainer.transport == transport for trainer in status.trainers))


def _trainers(status: DaemonStatus) -> Iterator[tuple[Labels, SubscriptionStatistics]]:
    """Subscriptions but those of spectators; the oldest ``TRAINERS_MAX`` have labels of their own.

    A trainer that disconnected may still have batches in flight; its name is then empty.
    """
    sessions = {trainer.session: trainer for trainer in status.trainers}
    claims = [
        (stream.name, claim) for stream in status.streams for claim in stream.subscriptions if not claim.is_spectator
    ]
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
    remote = sorted(
        (trainer for trainer in status.trainers if trainer.transport == "tcp"), key=lambda trainer: trainer.session
    )
    for place, trainer in enumerate(remote):
        yield (trainer.name, str(trainer.session)) if place < TRAINERS_MAX else (OTHER, OTHER), trainer


def _usage(status: DaemonStatus) -> Iterator[Row]:
    for one in status.usage[:OWNERS_MAX]:
        yield (one.owner, one.stream, one.tenant), one


def _links(status: DaemonStatus) -> Iterator[Row]:
    links = sorted(status.pool.links, key=lambda link: link.link) if status.pool is not None else []
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


_LABELS = {"streams[]": "name", "workers[]": "place", "parts[]": "name"}
"""Lists without a limit of their own, and what of an item is its label."""


def _rows(where: str, value: object, labels: Labels = ()) -> Iterator[Row]:
    """The rows at a place below ``value``; an item of a list has one label more."""
    name, _dot, rest = where.partition(".")
    found = getattr(value, name.removesuffix("[]"))
    items = (
        [((*labels, str(getattr(item, _LABELS[name]))), item) for item in found]
        if name in _LABELS
        else [(labels, found)]
    )
    for further, item in items:
        if item is not None:
            yield from _rows(rest, item, further) if rest else [(further, item)]


def _scope(where: str, labels: tuple[str, ...], of: type, prefix: str = "") -> Scope:
    return Scope(where, labels, partial(_rows, where), of, prefix)


DAEMON = _scope("daemon", (), DaemonFacts)
INFO = Scope(
    "daemon",
    ("version", "decoders"),
    lambda status: [((status.daemon.version, status.daemon.decoders), _Counted())],
)
RELOAD = _scope("daemon.reload", (), ReloadOutcome, "reload_")
TCP = _scope("daemon.tcp", (), TcpCounts, "tcp_")
POOL = _scope("pool", (), PoolStatistics, "pool_")
POOL_WORKERS = Scope("pool.links", (), _remote_workers)
POOL_LINKS = Scope("pool.links", ("state",), _link_states)
POOL_GATEWAYS = Scope("pool.links", ("gateway",), _gateways)
POOL_CAP = Scope("pool.capped_by", ("by",), _caps)
POOL_LINK = Scope("pool.links[]", ("name", LINK), _links, LinkStatistics, "link_")
WORKER_COUNTS = Scope("workers", ("state",), _worker_states)
WORKER = _scope("workers[]", ("worker",), WorkerStatistics, "worker_")
TRAINER_COUNTS = Scope("trainers", ("transport",), _transports)
STREAM = _scope("streams[]", ("stream",), StreamStatus, "stream_")
WORK = _scope("streams[].work", ("stream",), WorkStatistics, "stream_")
PART = _scope("streams[].work.parts[]", ("stream", "part"), PartStatistics)
CACHE = _scope("streams[].cache", ("stream",), CacheStatistics, "cache_")
"""Streams that share a cache all show it."""
MAILBOX = _scope("streams[].live", ("stream",), LiveStatistics, "mailbox_")
REPORTS = _scope("streams[].reports", ("stream",), ReportStatistics, "stream_")
TRAINER = Scope(
    "streams[].subscriptions[]",
    ("stream", "trainer", "rank", "transport", SESSION),
    _trainers,
    SubscriptionStatistics,
    "trainer_",
)
WAIT = Scope("streams[].subscriptions[].waits", (*TRAINER.labels, "cause"), _waits)
USAGE = Scope("usage[]", ("owner", "stream", "tenant"), _usage, UsageStatistics, "usage_")
REMOTE = Scope("trainers[]", ("trainer", SESSION), _remote, TrainerStatistics, "trainer_")

PREFIX = "batchd_"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``key``: the attribute of the scope's rows."""

    name: str
    kind: Counter | Gauge
    scope: Scope
    key: str

    @property
    def is_counter(self) -> bool:
        """Whether its values only grow."""
        return isinstance(self.kind, Counter)

    def values(self, status: DaemonStatus) -> Iterator[tuple[Labels, float]]:
        """The value for each set of labels, without unknown ones and sums that may fall."""
        of, merge = (None, sum) if isinstance(self.kind, Counter) else (self.kind.of, self.kind.merge)
        found: dict[Labels, list[float]] = {}
        for labels, row in self.scope.rows(status):
            value = getattr(row, self.key)
            number = of(value) if of is not None else value
            if number is not None and not (self.is_counter and self.scope.is_others(labels)):
                found.setdefault(labels, []).append(float(number))
        for labels, numbers in found.items():
            yield labels, merge(numbers)


METRICS: tuple[Metric, ...] = (
    Metric("info", Gauge("Always 1; its labels are the version and the decoders."), INFO, "one"),
    *DAEMON.metrics(),
    *RELOAD.metrics(),
    Metric("workers", Gauge("Workers by state."), WORKER_COUNTS, "count"),
    Metric("trainers", Gauge("Connected trainers by transport."), TRAINER_COUNTS, "count"),
    *TCP.metrics(),
    *WORKER.metrics(),
    *POOL.metrics(),
    Metric("pool_workers", Gauge("Remote workers."), POOL_WORKERS, "count"),
    Metric("pool_links", Gauge("Worker hosts by state."), POOL_LINKS, "count"),
    Metric("pool_gateway_links", Gauge("Worker hosts of each gateway that listens."), POOL_GATEWAYS, "count"),
    Metric("pool_capped", Gauge("1 for what keeps `workers_wanted` below what the trainers need."), POOL_CAP, "count"),
    *POOL_LINK.metrics(),
    *STREAM.metrics(),
    *WORK.metrics(),
    *PART.metrics(),
    *CACHE.metrics(),
    *MAILBOX.metrics(),
    *REPORTS.metrics(),
    *TRAINER.metrics(),
    Metric(
        "trainer_wait_cause_seconds_total", Counter("Time that the trainer has waited, by cause."), WAIT, "waited_s"
    ),
    *REMOTE.metrics(),
    *USAGE.metrics(),
)

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
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = kind(PREFIX + metric.name, metric.kind.help, labels=metric.scope.labels)
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
