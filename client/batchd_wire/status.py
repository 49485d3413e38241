"""A daemon's status: typed values for commands, observer, trainers and tests. Every process.

    values --plain_status--> maps (a ``Status`` message, ``status --json``) --read_status--> values

Every number says what it is: a ``Counter`` counts from the start, of daemon, worker or trainer, a
``Gauge`` rises and falls, and a ``Fact`` has no value over time. The metrics of the observer and
the differences of two statuses follow from that.

A class grows by fields: an unknown key is skipped, and a field whose key is missing has its
default, or zero, "", False, None or () by its type. So a newer and an older daemon can be asked.

Invariant: values from ``read_status`` have the types of their fields, whatever the other process
sent.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from batchd_wire.codec import packed_bytes
from batchd_wire.record import record

T = TypeVar("T")
Fact = Annotated[T, "fact"]


class Counter(NamedTuple):
    """A number that only grows. ``help``: of its metric; "" if it has none of its own.

    ``metric``: its name without ``_total``, if not made of those of the place and the field.
    """

    help: str = ""
    metric: str = ""


class Gauge(NamedTuple):
    """A number that rises and falls, as ``Counter``. ``of``: makes a number of a value.

    ``merge``: makes one number of those of one trainer that reads a stream several times.
    """

    help: str
    metric: str = ""
    merge: Callable[[Iterable[float]], float] = sum
    of: Callable[[Any], float] | None = None


@record
class WorkerStatistics:
    """One worker.

    ``place`` is 0 to workers-1 and outlives it; ``state`` is starting, ready, leaving or ending.
    ``pid``: None where the worker has no process yet. ``unreported_s``: how long it has worked
    since its last report, which ``busy_s`` does not count yet; 0.0 without orders.
    """

    number: Fact[int]
    place: Fact[int]
    state: str
    orders: Annotated[int, Gauge("Orders that the worker works on, or has in its socket.")]
    chunks: Annotated[int, Counter("Chunks that the worker has filled.")]
    samples: Annotated[int, Counter("Samples that the worker has written.")]
    busy_s: Annotated[float, Counter("Time that the worker has spent on chunks.")]
    pid: Fact[int | None] = None
    unreported_s: Fact[float] = 0.0


@record
class WaitStatistics:
    """Seconds that a trainer waited for batches, by reason. See ``core.measure``.

    The daemon measures from the trainer's ``Pull`` with ``waiting`` until it has granted the batch,
    or sent it to another host.
    """

    workers_s: Annotated[float, Counter()] = 0.0
    memory_s: Annotated[float, Counter()] = 0.0
    trainers_s: Annotated[float, Counter()] = 0.0
    producers_s: Annotated[float, Counter()] = 0.0
    network_s: Annotated[float, Counter()] = 0.0


@record
class SubscriptionStatistics:
    """One trainer's claim.

    ``epoch`` and ``step``: the next batch it has not consumed (None past its end). ``last_epoch``
    and ``last_step``: the batch it took last (None before its first). ``is_spectator``: see
    ``Subscribe``. ``ready_ahead``: batches from there on that are ready, granted or not.
    ``wait_s``: total waiting time as the trainer reports it; ``waits``: by reason.
    ``short_of_memory_s``: how long its window was larger than the ring had room for.
    ``kept_slots``: idle slots whose batches it reads, before any other trainer does.
    """

    number: Fact[int]
    session: Fact[int]
    rank: Fact[int]
    world_size: Fact[int]
    window: Annotated[int, Gauge("Batches that the trainer wants ready ahead of it.")]
    epoch: Annotated[int | None, Gauge("Epoch of its next batch; absent at its end; of several, the last.", merge=max)]
    step: Annotated[int | None, Gauge("Step of its next batch; absent at its end; of several, the last.", merge=max)]
    last_epoch: Fact[int | None]
    last_step: Fact[int | None]
    is_spectator: Fact[bool]
    consumed_batches: Annotated[int, Counter("Batches that the trainer has consumed.")]
    delivered_samples: Annotated[int, Counter("Samples handed to the trainer.")]
    held_slots: Annotated[int, Gauge("Slots that the trainer holds.")]
    ready_ahead: Annotated[int, Gauge("Batches that are ready ahead of the trainer.")]
    waiting: Annotated[bool, Gauge("1 while the trainer waits; of several, how many do.")]
    wait_s: Annotated[float, Counter("Time that the trainer has waited for batches.")]
    waits: WaitStatistics
    short_of_memory_s: Annotated[float, Counter("Time with too few slots in the ring.")]
    kept_slots: Annotated[int, Gauge("Idle slots that are kept for the trainer.")] = 0


@record
class LiveStatistics:
    """The mailbox of a live stream.

    ``dropped_oldest`` and ``dropped_newest``: because the mailbox was full. ``lost_batches``: of
    those that missed them, and other trainers got, because the ring could not keep them.
    """

    capacity: Annotated[int, Gauge("Places of a live stream's mailbox.", "mailbox_places")]
    when_full: str
    producers: Annotated[int, Gauge("Producers that are connected.")]
    waiting_producers: Annotated[int, Gauge("Producers that wait for a place.")]
    queued_samples: Annotated[int, Gauge("Samples that wait for a batch.")]
    bound_samples: Annotated[int, Gauge("Samples of batches that no trainer has received yet.")]
    lent_places: Annotated[int, Gauge("Places that producers are filling.")]
    pushed_samples: Annotated[int, Counter("Samples that producers have pushed.")]
    dropped_oldest: Annotated[int, Counter("Samples dropped for newer ones.")]
    dropped_newest: Annotated[int, Counter("Samples dropped on arrival.")]
    refused_pushes: Annotated[int, Counter("Pushes from places not lent to the producer.")]
    lost_batches: Annotated[int, Counter("Batches that some trainers of the stream missed.")]


@record
class CacheStatistics:
    """The cache of a stream, shared by ``streams`` streams. ``kind``: what it keeps of a sample.

    ``folder``: the folder of its file; None for a cache in memory.
    """

    kind: str
    held_samples: Annotated[int, Gauge("Samples in the cache; all streams that share it show it.")]
    used_bytes: Annotated[int, Gauge("Memory, or space on disk, that the cache takes.")]
    budget_bytes: Annotated[int, Gauge("Memory, or space on disk, that the cache may take at most.")]
    streams: Fact[int]
    folder: str | None = None
    spoilt_samples: Annotated[int, Counter("Records of a cache on disk that were damaged.")] = 0


@record
class PartStatistics:
    """Worker time of one part: "read", "decode", a step's name, "store", or "bad samples"."""

    name: str
    busy_s: Annotated[float, Counter("Time that workers spent on one part: reading, or a step.", "stream_part_seconds")]


@record
class SlowSample:
    """A slow sample. ``taken_s``: its latest time; ``slow_row``: the stream's slow rows by then."""

    sample: Fact[int]
    path: str
    taken_s: Fact[float]
    slow_row: Fact[int]


@record
class WorkStatistics:
    """The workers' time for a stream, in seconds.

    ``busy_s``: time spent on its samples. Of that, the workers used a CPU for ``cpu_s``
    (``read_cpu_s`` of it for reading), and were runnable without a CPU for ``cpu_wait_s`` (None if
    the kernel does not tell). ``waited_s``: time spent waiting for a file server, not part of
    ``busy_s``. ``parts``: the parts of ``busy_s``, without the time between samples.
    ``usual_sample_s``: the median time of a sample. ``slowest``: some recent slow ones.
    ``cache_hits`` and ``cache_misses``: 0 without a cache.
    """

    busy_s: Annotated[float, Counter("Time that workers spent on the samples of the stream.")]
    waited_s: Annotated[
        float, Counter("Further time in which workers waited for a file server.", "stream_fetch_seconds")
    ]
    cpu_s: Annotated[float, Counter("The part of the busy time that had a CPU.")]
    cpu_wait_s: Annotated[float | None, Counter("Seconds in which workers were runnable and had no CPU.")]
    read_cpu_s: Annotated[float, Counter("The part of the CPU time that was spent on reading.")]
    read_bytes: Annotated[int, Counter("Bytes of encoded samples that were read.")]
    parts: tuple[PartStatistics, ...]
    usual_sample_s: Annotated[float, Gauge("Half of the samples take less time than this.")]
    slow_rows: Annotated[int, Counter("Rows whose sample took several times as long as usual.")]
    slow_s: Annotated[float, Counter("Time that workers spent on slow rows.")]
    slowest: tuple[SlowSample, ...]
    cache_hits: Annotated[int, Counter("Samples that were in the stream's cache.")] = 0
    cache_misses: Annotated[int, Counter("Samples that were not in the stream's cache.")] = 0
    shared_samples: Annotated[int, Counter("Samples that were decoded with those of another stream.")] = 0


REPORT_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds of the buckets in which reported values are counted; one more has the rest."""


@record
class ReportStatistics:
    """What trainers reported of a stream's batches, such as losses.

    ``refused``: of wrong sizes, or about rows that the stream does not have. ``values`` and
    ``sum``: of finite numbers; ``buckets``: how many of them are in each, see ``REPORT_BOUNDS``.
    """

    kept: Annotated[int, Gauge("Reports about batches, such as losses, in the daemon's memory.", "stream_reports")]
    received: Annotated[int, Counter("Reports from trainers, without repeated ones.", "stream_reports")]
    refused: Annotated[int, Counter("Reports that did not fit the stream.", "stream_refused_reports")]
    not_finite: Annotated[int, Counter("Reported values that were NaN or infinite.", "stream_not_finite_values")]
    values: Annotated[int, Counter()]
    sum: Annotated[float, Counter()]
    buckets: tuple[int, ...]


@record
class ReportPage:
    """A page of reports, see ``batchd_wire.reports``. ``last``: the number to ask after.

    ``runs`` and ``run_numbers``: the names of runs, and their numbers in the heads.
    """

    runs: tuple[str, ...]
    run_numbers: tuple[int, ...]
    heads: bytes
    values: bytes
    last: Fact[int]


@record
class StreamDescription:
    """What a stream is, for people.

    ``source``: its kind and place. ``fields`` of a batch: name, dtype and shape. ``pipeline``: each
    step with the options that are not its defaults. ``settings``: of a derived stream, as JSON.
    ``owner``: who has defined the stream; "" of one of the file.
    """

    source: str = ""
    fields: tuple[str, ...] = ()
    pipeline: tuple[str, ...] = ()
    settings: str = ""
    owner: str = ""


@record
class StreamStatus:
    """One stream and its ring. A stream that a reload has changed gets a new ``number``.

    ``live``: the mailbox of a live stream, which has no end, so its ``samples`` and ``steps`` have
    no meaning. ``own_source``: the source is the user's code. ``bgr_fields``: images with blue as
    their first channel. ``cache``: None without a cache. ``source``: equal for streams that read
    the same samples; "" if it is live, or not known. ``filling_slots`` and ``partial_slots``: None
    from an older daemon. ``away``: why its storage is away, None while it is there. ``reports``:
    None before the first. ``subscriptions_left_out``: how many are not in ``subscriptions``, since
    a status would be too long with them.
    """

    number: Fact[int]
    name: str
    own_source: Fact[bool]
    fingerprint: str
    samples: Annotated[int, Gauge("Samples of one epoch.")]
    batch_size: Annotated[int, Gauge("Samples of a full batch.")]
    steps: Annotated[int, Gauge("Batches of one epoch.")]
    slots: Annotated[int, Gauge("Slots of the ring now.")]
    slots_max: Annotated[int, Gauge("Slots of the ring that its memory suffices for.")]
    ready_slots: Annotated[int, Gauge("Slots with a complete batch.")]
    leased_slots: Annotated[int, Gauge("Slots that trainers read.")]
    decoded_batches: Annotated[int, Counter("Batches that workers have filled.")]
    decoded_samples: Annotated[int, Counter("Samples that workers have written.")]
    delivered_batches: Annotated[int, Counter("Batches handed out, to all trainers ever.")]
    delivered_samples: Annotated[int, Counter("Samples handed out, to all trainers ever.")]
    shared_batches: Annotated[int, Counter("Batches decoded once and read by two or more.")]
    mismatched_batches: Annotated[int, Counter("Batches that did not match their checksums.")]
    bad_rows: Annotated[int, Counter("Rows whose sample was bad, each occurrence.")]
    bad_samples: Annotated[int, Gauge("Different samples found bad so far.")]
    quarantined_samples: Annotated[int, Gauge("Samples skipped because they crash workers.")]
    sample_s: Annotated[float, Gauge("Worker time for one sample at present.")]
    work: WorkStatistics
    stopped: Annotated[str | None, Gauge("1 if the stream has stopped; `batchd status` shows the reason.", of=bool)]
    bgr_fields: tuple[str, ...]
    live: LiveStatistics | None
    subscriptions: tuple[SubscriptionStatistics, ...]
    cache: CacheStatistics | None = None
    source: str = ""
    filling_slots: Annotated[int | None, Gauge("Slots that workers fill for a trainer.")] = None
    partial_slots: Annotated[int | None, Gauge("Slots partly filled, that no trainer waits for.")] = None
    description: StreamDescription | None = None
    reports: ReportStatistics | None = None
    subscriptions_left_out: Annotated[int, Gauge("Trainers without metrics of their own, as there are too many.")] = 0
    away: Annotated[
        str | None, Gauge("1 while its storage is away and waited for; `batchd status` says why.", of=bool)
    ] = None
    away_s: Annotated[float, Gauge("Seconds for which its storage has been away; 0 while it is there.")] = 0.0
    repeats: Annotated[int, Gauge("Rows of one epoch that each sample is in.")] = 1


@record
class UsageStatistics:
    """What the trainers of one ``owner``, a user or a key, have had of one stream.

    ``tenant``: whose share of the workers' time they have, with its ``weight``. ``age_s``: time
    since the first subscription; ``cpu_s`` of ``work_s`` was on a CPU. ``made_samples`` were made
    for them; ``delivered_samples`` were handed to them, also those that were made for others.
    """

    owner: str
    stream: str
    tenant: str
    weight: Annotated[float, Gauge("Weight of the tenant.")]
    age_s: Fact[float]
    subscriptions: Annotated[int, Gauge("Subscriptions of the owner.")]
    held_bytes: Annotated[int, Gauge("Bytes of the slots that the owner's trainers hold.")]
    work_s: Annotated[float, Counter("Worker time spent for the owner.")]
    cpu_s: Annotated[float, Counter("CPU time of workers spent for the owner.")]
    read_bytes: Annotated[int, Counter("Bytes of encoded samples read for the owner.")]
    made_samples: Annotated[int, Counter("Samples made for the owner.")]
    delivered_samples: Annotated[int, Counter("Samples handed to the owner's trainers.")]
    delivered_bytes: Annotated[int, Counter("Bytes of these samples.")]


@record
class DaemonStatistics:
    """Counts of the pure core, as in ``DaemonStatus`` and ``DaemonFacts``."""

    workers: tuple[WorkerStatistics, ...]
    streams: tuple[StreamStatus, ...]
    worker_deaths: int
    draining: bool
    ending_slots: int
    usage: tuple[UsageStatistics, ...] = ()


@record
class TrainerStatistics:
    """One session. ``pid`` and ``user``: None where the kernel or the other host does not tell.

    ``transport``: "shared memory" or "tcp". ``host``, ``key`` (its name), ``sent_bytes`` and
    ``sent_bytes_per_s`` are None without TCP.
    """

    session: Fact[int]
    name: str
    pid: Fact[int | None]
    user: Fact[int | None]
    transport: str
    host: str | None = None
    key: str | None = None
    sent_bytes: Annotated[int | None, Counter("Bytes of batches sent to a trainer over TCP.")] = None
    sent_bytes_per_s: Fact[float | None] = None
    connections: Annotated[int, Gauge("Connections of a trainer over TCP.")] = 1


@record
class ReloadOutcome:
    """The last reload, at Unix time ``time_s``. ``exit_code``: that of `batchd reload`."""

    time_s: Annotated[float, Gauge("Unix time at which the last reload ended.", "reload_timestamp_seconds")]
    exit_code: Annotated[
        int, Gauge("1 if the last reload was refused or failed; absent before the first.", "reload_failed", of=bool)
    ]
    text: str

    @property
    def failed(self) -> bool:
        """Whether the configuration from before the reload is still in force."""
        return self.exit_code != 0


@record
class LocalCounts:
    """Local connections: open, without a session, and closed by the daemon."""

    connections: Fact[int]
    strangers: Fact[int]
    closed: Annotated[int, Counter()]


@record
class TcpCounts:
    """TCP connections, as ``LocalCounts``."""

    connections: Annotated[int, Gauge("Connections over TCP, with or without a session.")]
    strangers: Annotated[int, Gauge("Connections over TCP without a session.")]
    closed: Annotated[int, Counter("Connections over TCP that the daemon closed by itself.")]
    failed_handshakes: Annotated[int, Counter("TCP peers that failed to prove a key.")]
    sent_bytes: Annotated[int, Counter("Bytes of batches sent over TCP, to all trainers ever.")]


@record
class DaemonFacts:
    """The daemon as a process. ``cpus``: CPUs it may use.

    ``http``: the observer's address. ``reload``: None before the first reload. ``tcp``: None if the
    daemon does not listen on TCP. ``host``: the name of its machine; ``address``: its own, for
    trainers there. ``log``: where it writes its log, for people. ``config_file``: its batchd.toml;
    empty for trainers elsewhere, and for the daemon of one script.
    """

    version: str
    pid: Fact[int]
    uptime_s: Annotated[float, Gauge("How long the daemon has been up.")]
    memory_bytes: Annotated[int, Gauge("Shared memory of all slots.", "slot_memory_bytes")]
    cpus: Fact[int]
    decoders: str
    reloading: Fact[bool]
    reload: ReloadOutcome | None
    http: str | None
    local: LocalCounts
    tcp: TcpCounts | None
    worker_deaths: Annotated[int, Counter("Workers that ended without an order to.")]
    draining: Annotated[bool, Gauge("1 while the daemon finishes work in progress and starts no more.")]
    ending_slots: Annotated[int, Gauge("Slots of ended streams that trainers or workers still hold.")]
    host: str = ""
    address: str = ""
    log: str = ""
    config_file: str = ""


@record
class LogLine:
    """One line of the log. ``number`` counts from the start; ``time_s``: Unix time."""

    number: Fact[int]
    time_s: Fact[float]
    level: str
    text: str


@record
class LinkStatistics:
    """One worker host. ``state``: opening, proving, serving, leaving or closing.

    ``key``: the name of its key. ``machine``: its processor's architecture. ``since_s``: how long
    it has been here. ``streams``: those that it fills; ``refused``: those that it cannot fill, each
    with the reason.
    ``gateway``: the number of the gateway through which it comes.
    """

    link: Fact[int]
    name: str
    host: str
    key: str
    pid: Fact[int]
    machine: str
    version: str
    decoders: str
    state: str
    since_s: Fact[float]
    workers: Annotated[int, Gauge("Workers of the worker host.")]
    orders: Annotated[int, Counter("Orders that the worker host has filled into batches.")]
    samples: Annotated[int, Counter("Samples that the worker host has filled into batches.")]
    busy_s: Annotated[float, Counter("Time that its workers have spent on them.")]
    received_bytes: Annotated[int, Counter("Bytes of rows from the worker host.")]
    late_rows: Annotated[int, Counter("Its rows that came after their order was withdrawn, and were dropped.")]
    withdrawn: Annotated[int, Counter("Its orders that were given to other workers.", "link_withdrawn_orders")]
    disagreements: Annotated[int, Counter("Good samples that it reported bad.")]
    streams: tuple[str, ...]
    refused: tuple[str, ...]
    gateway: Fact[int] = 0


@record
class PoolStatistics:
    """The worker hosts. ``ended_links``: how many have gone, ``last_end``: the last one and why.

    ``last_left``: that one was told to end, by a signal for example, and did not fail.
    ``wanted``: the number of remote workers that the trainers need. If something limits them,
    ``capped_by`` is "max", "network" or "ring", and ``cap`` says the same for people.
    ``interface`` and ``interface_bytes_per_s``: of ``address``; empty and None if not known.
    ``sent_away``: the last worker hosts that the daemon sent away, each with the reason.
    ``gateways``: how many there should be; ``gateways_down``: the numbers of those that do not
    listen just now.
    """

    address: str
    links: tuple[LinkStatistics, ...]
    ended_links: Annotated[int, Counter("Worker hosts that have gone.")]
    last_end: str
    wanted: Annotated[int, Gauge("Remote workers that the trainers need, within what caps them.", "workers_wanted")] = 0
    cap: str = ""
    capped_by: str = ""
    interface: str = ""
    interface_bytes_per_s: Fact[float | None] = None
    sent_away: tuple[str, ...] = ()
    received_bytes: Annotated[int, Counter("Bytes of rows from worker hosts, from all ever.")] = 0
    gateways: Fact[int] = 1
    gateways_down: tuple[int, ...] = ()
    last_left: Fact[bool] = False


@record
class ContentPart:
    """One part of what a stream's fingerprint is made of. ``value``: JSON."""

    name: str
    value: str


@record
class DeliveredRows:
    """A digest of the ``rows`` that were delivered in ``epoch``, out of ``rows_max``: 64 digits."""

    epoch: Fact[int]
    rows: Fact[int]
    rows_max: Fact[int]
    digest: str


CARD_VERSION = 1
"""Of a card as JSON."""


@record
class StreamCard:
    """What it takes to make a stream's batches again, for `batchd card` and `batchd replay`.

    ``parts``: all that the ``fingerprint`` is a digest of. ``samples``: those of an epoch.
    ``configuration``: pieces of one JSON text, as `batchd.toml` with this stream alone.
    ``digests``: of a stream with ``digest = true``, in the order of epochs.
    """

    stream: str
    fingerprint: str
    samples: Fact[int]
    parts: tuple[ContentPart, ...]
    configuration: tuple[str, ...]
    digests: tuple[DeliveredRows, ...] = ()


@record
class LeftOut:
    """How many of each list are not in a status, since it would be too long with them."""

    streams: Fact[int] = 0
    workers: Fact[int] = 0
    trainers: Fact[int] = 0
    links: Fact[int] = 0
    usage: Fact[int] = 0


@record
class DaemonStatus:
    """The answer to ``AskStatus``. ``pool``: None if no worker hosts may come.

    ``warnings``: the last ones, and errors; ``log``: the last lines, if they were asked for, with
    nothing but ``daemon``. Both have the newest last, and are empty for other hosts. ``card``: of a
    stream, if it was asked for and there is one, with nothing but ``daemon``; ``reports``: a page
    of those about a stream, likewise. ``left_out``: see ``LeftOut``. ``usage``: for other hosts,
    what their own key has had.
    """

    daemon: DaemonFacts
    workers: tuple[WorkerStatistics, ...]
    trainers: tuple[TrainerStatistics, ...]
    streams: tuple[StreamStatus, ...]
    pool: PoolStatistics | None = None
    warnings: tuple[LogLine, ...] = ()
    log: tuple[LogLine, ...] = ()
    card: StreamCard | None = None
    reports: ReportPage | None = None
    left_out: LeftOut = LeftOut()
    usage: tuple[UsageStatistics, ...] = ()

    def stream(self, name: str) -> StreamStatus | None:
        """Find a stream by its name."""
        return next((stream for stream in self.streams if stream.name == name), None)


def plain_status(status: DaemonStatus) -> dict[str, object]:
    """Make the maps of the wire and of ``batchd status --json``, without absent values."""
    plain: dict[str, Any] = _plain(status)
    if status.daemon.tcp is None:
        del plain["daemon"]["tcp"]
    if status.pool is None:
        del plain["pool"]
    if not status.log:
        del plain["log"]
    if status.card is None:
        del plain["card"]
    if status.reports is None:
        del plain["reports"]
    if status.left_out == LeftOut():
        del plain["left_out"]
    return plain


def _plain(value: Any) -> Any:
    """As ``dataclasses.asdict``, in a seventh of its time.

    A status may have a thousand trainers.
    """
    kind = type(value)
    if kind is tuple:
        return tuple([_plain(item) for item in value])
    names = getattr(kind, "field_names", None)
    return value if names is None else {name: _plain(getattr(value, name)) for name in names}


STATUS_BYTES_MAX = 896 << 10
"""Of the maps of a status, which are nearly the whole of a message."""
_LIST_BYTES_MAX = {
    "streams": 512 << 10,
    "workers": 96 << 10,
    "trainers": 128 << 10,
    "links": 96 << 10,
    "usage": 64 << 10,
}
"""Of each list; subscriptions have the rest."""


def shorten(plain: dict[str, Any]) -> None:
    """End the lists of a status where it would be longer than a message; say what is missing."""
    streams = plain["streams"]
    subscriptions = [stream.pop("subscriptions") for stream in streams]
    lists = {name: plain[name] for name in ("streams", "workers", "trainers", "usage")}
    if "pool" in plain:
        lists["links"] = plain["pool"]["links"]
    left_out, listed_bytes = {}, 0
    for name, values in lists.items():
        kept, kept_bytes = first_that_fit(values, _LIST_BYTES_MAX[name])
        left_out[name] = len(values) - len(kept)
        (plain["pool"] if name == "links" else plain)[name] = kept
        listed_bytes += kept_bytes
    others = {
        **plain,
        "streams": (),
        "workers": (),
        "trainers": (),
        "usage": (),
        "pool": {**plain.get("pool", {}), "links": ()},
    }
    room = STATUS_BYTES_MAX - listed_bytes - packed_bytes(others)
    for stream, values in zip(plain["streams"], subscriptions, strict=False):
        stream["subscriptions"], kept_bytes = first_that_fit(values, room)
        stream["subscriptions_left_out"] += len(values) - len(stream["subscriptions"])
        room -= kept_bytes
    if any(left_out.values()):
        plain["left_out"] = {"links": 0, **left_out}


def first_that_fit(values: Sequence[T], bytes_max: int) -> tuple[Sequence[T], int]:
    """Return the first values that take at most ``bytes_max``, and how much they take."""
    taken = 0
    for count, value in enumerate(values):
        value_bytes = packed_bytes(value)
        if taken + value_bytes > bytes_max:
            return values[:count], taken
        taken += value_bytes
    return values, taken


def difference(before: T, after: T) -> T:
    """Make ``after`` with what its counters have grown by. ``before`` is an earlier one.

    The first field of a record tells it from the others of a list. A record that is not in
    ``before`` keeps its counts; one that is only there is left out.
    """
    kind: Any = type(after)
    counters = _counters(kind)
    made: T = kind(
        *[_change(getattr(before, name), getattr(after, name), name in counters) for name in kind.field_names]
    )
    return made


@cache
def _counters(kind: type) -> frozenset[str]:
    hints = get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return frozenset(name for name, found in marks.items() if any(isinstance(mark, Counter) for mark in found))


def _change(before: Any, after: Any, is_counter: bool) -> Any:
    if is_counter:
        return after if after is None else after - (before or 0)
    if isinstance(after, tuple) and after and is_dataclass(after[0]):
        return tuple(new if old is None else difference(old, new) for old, new in _pairs(before, after))
    return difference(before, after) if before is not None and is_dataclass(after) else after


def _pairs(before: Sequence[T], after: Sequence[T]) -> Iterator[tuple[T | None, T]]:
    """Each record of ``after`` with the former one; of several with one key, in their order."""
    former: dict[object, list[T]] = {}
    for old in before:
        former.setdefault(_key(old), []).append(old)
    for new in after:
        same = former.get(_key(new))
        yield same.pop(0) if same else None, new


def _key(record: Any) -> object:
    return getattr(record, record.field_names[0])


def read_status(plain: Mapping[str, object]) -> DaemonStatus:
    """Read the maps of a ``Status`` message: a value of a wrong type reads as zero or empty."""
    status = _read(DaemonStatus, plain)
    assert isinstance(status, DaemonStatus)
    return status


def read_card(plain: Mapping[str, object]) -> StreamCard:
    """Read the maps of a ``StreamCard``, as ``read_status``."""
    card = _read(StreamCard, plain)
    assert isinstance(card, StreamCard)
    return card


def plain_card(card: StreamCard, versions: Mapping[str, str], time_s: float) -> dict[str, object]:
    """A card as `batchd card` writes it, and as a state has it.

    ``versions``: by name. ``time_s``: when it was made, in Unix time.

    Raises ``ValueError`` if a part is no JSON.
    """
    return {
        "card": CARD_VERSION,
        "stream": card.stream,
        "fingerprint": card.fingerprint,
        "samples": card.samples,
        "parts": {part.name: json.loads(part.value) for part in card.parts},
        "versions": dict(versions),
        "configuration": json.loads("".join(card.configuration)),
        "time_s": time_s,
        "digests": [asdict(delivered) for delivered in card.digests],
    }


def _read(kind: type, plain: object) -> object:
    known = plain if isinstance(plain, Mapping) else {}
    return kind(*[read(known[name]) if name in known else default for name, read, default in _fields(kind)])


@cache
def _fields(kind: type) -> list[tuple[str, Callable[[object], object], object]]:
    assert is_dataclass(kind)
    readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
    return [
        (entry.name, readers[entry.name], readers[entry.name](None) if entry.default is MISSING else entry.default)
        for entry in fields(kind)
    ]


def _reader(hint: object) -> Callable[[object], object]:
    """Make the reader of a field, which gives the type's empty value for one that does not fit."""
    if get_origin(hint) is tuple:
        read_item = _reader(get_args(hint)[0])
        return lambda value: tuple(map(read_item, value)) if isinstance(value, (list, tuple)) else ()
    if isinstance(hint, UnionType):
        (inner,) = (part for part in get_args(hint) if part is not type(None))
        read = _reader(inner)
        return lambda value: read(value) if _fits(value, inner) else None
    assert isinstance(hint, type)
    if is_dataclass(hint):
        return partial(_read, hint)
    return lambda value: hint(value) if _fits(value, hint) else hint()


def _fits(value: object, kind: object) -> bool:
    """Whether a plain value is one of ``kind``: a map for a record, also an int for float."""
    return (
        isinstance(value, Mapping)
        if is_dataclass(kind)
        else type(value) in ((int, float) if kind is float else (kind,))
    )
