"""A daemon's status: typed values for commands, observer, trainers and tests. Every process.

    values --plain_status--> maps (a ``Status`` message, ``status --json``) --read_status--> values

Totals count from the start. A class grows by fields: an unknown key is skipped, and a field whose
key is missing has its default, or zero, "", False, None or () by its type. So a newer and an older
daemon can be asked.

Invariant: values from ``read_status`` have the types of their fields, whatever the other process
sent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from batchd_wire.codec import packed_bytes
from batchd_wire.record import record

T = TypeVar("T")


@record
class WorkerStatistics:
    """One worker.

    ``place`` is 0 to workers-1 and outlives it; ``state`` is starting, ready, leaving or ending.
    ``pid``: None where the worker has no process yet. ``unreported_s``: how long it has worked
    since its last report, which ``busy_s`` does not count yet; 0.0 without orders.
    """

    number: int
    place: int
    state: str
    orders: int
    chunks: int
    samples: int
    busy_s: float
    pid: int | None = None
    unreported_s: float = 0.0


@record
class WaitStatistics:
    """Seconds that a trainer waited for batches, by reason. See ``core.measure``.

    The daemon measures from the trainer's ``Pull`` with ``waiting`` until it has granted the batch,
    or sent it to another host.
    """

    workers_s: float = 0.0
    memory_s: float = 0.0
    trainers_s: float = 0.0
    producers_s: float = 0.0
    network_s: float = 0.0


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

    number: int
    session: int
    rank: int
    world_size: int
    window: int
    epoch: int | None
    step: int | None
    last_epoch: int | None
    last_step: int | None
    is_spectator: bool
    consumed_batches: int
    delivered_samples: int
    held_slots: int
    ready_ahead: int
    waiting: bool
    wait_s: float
    waits: WaitStatistics
    short_of_memory_s: float
    kept_slots: int = 0


@record
class LiveStatistics:
    """The mailbox of a live stream.

    ``queued_samples`` wait for a batch; ``bound_samples`` are in a batch that no trainer has yet.
    ``dropped_oldest`` and ``dropped_newest``: samples dropped because the mailbox was full.
    ``refused_pushes``: samples pushed into places that their producer did not have.
    ``lost_batches``: batches that one trainer got and another one missed, because the ring could
    not keep them.
    """

    capacity: int
    when_full: str
    producers: int
    waiting_producers: int
    queued_samples: int
    bound_samples: int
    lent_places: int
    pushed_samples: int
    dropped_oldest: int
    dropped_newest: int
    refused_pushes: int
    lost_batches: int


@record
class CacheStatistics:
    """The cache of a stream, shared by ``streams`` streams. ``kind``: what it keeps of a sample.

    ``folder``: the folder of its file; None for a cache in memory. ``spoilt_samples``: records that
    did not match their checksums.
    """

    kind: str
    held_samples: int
    used_bytes: int
    budget_bytes: int
    streams: int
    folder: str | None = None
    spoilt_samples: int = 0


@record
class PartStatistics:
    """Worker time of one part: "read", "decode", a step's name, "store", or "bad samples"."""

    name: str
    busy_s: float


@record
class SlowSample:
    """A slow sample. ``taken_s``: its latest time; ``slow_row``: the stream's slow rows by then."""

    sample: int
    path: str
    taken_s: float
    slow_row: int


@record
class WorkStatistics:
    """The workers' time for a stream, in seconds.

    ``busy_s``: time spent on its samples. Of that, the workers used a CPU for ``cpu_s``
    (``read_cpu_s`` of it for reading), and were runnable without a CPU for ``cpu_wait_s`` (None if
    the kernel does not tell). ``waited_s``: time spent waiting for a file server, not part of
    ``busy_s``. ``parts``: the parts of ``busy_s``, without the time between samples.
    ``usual_sample_s``: the median time of a sample. ``slow_rows`` took several times as long,
    ``slow_s`` in total; ``slowest``: some recent ones. ``cache_hits`` and ``cache_misses``: samples
    found and not found in the stream's cache; 0 without one.
    """

    busy_s: float
    waited_s: float
    cpu_s: float
    cpu_wait_s: float | None
    read_cpu_s: float
    read_bytes: int
    parts: tuple[PartStatistics, ...]
    usual_sample_s: float
    slow_rows: int
    slow_s: float
    slowest: tuple[SlowSample, ...]
    cache_hits: int = 0
    cache_misses: int = 0


REPORT_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds of the buckets in which reported values are counted; one more has the rest."""


@record
class ReportStatistics:
    """What trainers reported of a stream's batches, such as losses.

    ``kept`` reports are in the daemon's memory. ``received``: in total, without repeated ones;
    ``refused``: of wrong sizes, or about rows that the stream does not have. ``not_finite``: values
    that were NaN or infinite. ``values`` and ``sum``: of all others; ``buckets``: how many of them
    are in each, see ``REPORT_BOUNDS``.
    """

    kept: int
    received: int
    refused: int
    not_finite: int
    values: int
    sum: float
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
    last: int


@record
class StreamDescription:
    """What a stream is, for people.

    ``source``: its kind and place. ``fields`` of a batch: name, dtype and shape. ``pipeline``: each
    step with the options that are not its defaults.
    """

    source: str = ""
    fields: tuple[str, ...] = ()
    pipeline: tuple[str, ...] = ()


@record
class StreamStatistics:
    """One stream and its ring. A stream that a reload has changed gets a new ``number``.

    ``shared_batches``: decoded once, read by two trainers or more. ``mismatched_batches``: did not
    match their checksums in a trainer. ``live``: the mailbox of a live stream, which has no end, so
    its ``samples`` and ``steps`` have no meaning. ``own_source``: the source is the user's code.
    ``bgr_fields``: images with blue as their first channel. ``cache``: None without a cache.
    ``source``: equal for streams that read the same samples; "" if it is live, or not known.
    ``filling_slots``: batches that workers fill for a trainer; ``partial_slots``: partly filled
    ones that no trainer waits for any more (both None from an older daemon). ``description``: see
    ``StreamDescription``. ``reports``: None before the first. ``subscriptions_left_out``: how many
    are not in ``subscriptions``, since a status would be too long with them.
    """

    number: int
    name: str
    own_source: bool
    fingerprint: str
    samples: int
    batch_size: int
    steps: int
    slots: int
    slots_max: int
    ready_slots: int
    leased_slots: int
    decoded_batches: int
    decoded_samples: int
    delivered_batches: int
    delivered_samples: int
    shared_batches: int
    mismatched_batches: int
    bad_rows: int
    bad_samples: int
    quarantined_samples: int
    sample_s: float
    work: WorkStatistics
    stopped: str | None
    bgr_fields: tuple[str, ...]
    live: LiveStatistics | None
    subscriptions: tuple[SubscriptionStatistics, ...]
    cache: CacheStatistics | None = None
    source: str = ""
    filling_slots: int | None = None
    partial_slots: int | None = None
    description: StreamDescription | None = None
    reports: ReportStatistics | None = None
    subscriptions_left_out: int = 0


@record
class DaemonStatistics:
    """Counts of the pure core. ``ending_slots``: of ended streams, but still read or written."""

    workers: tuple[WorkerStatistics, ...]
    streams: tuple[StreamStatistics, ...]
    worker_deaths: int
    draining: bool
    ending_slots: int


@record
class TrainerStatistics:
    """One session. ``pid`` and ``user``: None where the kernel or the other host does not tell.

    ``transport``: "shared memory" or "tcp". ``host``, ``key`` (its name), ``sent_bytes`` and
    ``sent_bytes_per_s`` are None without TCP.
    """

    session: int
    name: str
    pid: int | None
    user: int | None
    transport: str
    host: str | None = None
    key: str | None = None
    sent_bytes: int | None = None
    sent_bytes_per_s: float | None = None
    connections: int = 1


@record
class ReloadOutcome:
    """The last reload, at Unix time ``time_s``. ``exit_code``: that of `batchd reload`."""

    time_s: float
    exit_code: int
    text: str

    @property
    def failed(self) -> bool:
        """Whether the configuration from before the reload is still in force."""
        return self.exit_code != 0


@record
class LocalCounts:
    """Local connections: open, without a session, and closed by the daemon."""

    connections: int
    strangers: int
    closed: int


@record
class TcpCounts:
    """TCP connections, as ``LocalCounts``. ``sent_bytes``: of batches, to all, in total."""

    connections: int
    strangers: int
    closed: int
    failed_handshakes: int
    sent_bytes: int


@record
class DaemonFacts:
    """The daemon as a process. ``memory_bytes``: memory of all slots. ``cpus``: CPUs it may use.

    ``http``: the observer's address. ``reload``: None before the first reload. ``tcp``: None if the
    daemon does not listen on TCP. ``host``: the name of its machine; ``address``: its own, for
    trainers there. ``log``: where it writes its log, for people.
    """

    version: str
    pid: int
    uptime_s: float
    memory_bytes: int
    cpus: int
    decoders: str
    reloading: bool
    reload: ReloadOutcome | None
    http: str | None
    local: LocalCounts
    tcp: TcpCounts | None
    worker_deaths: int
    draining: bool
    ending_slots: int
    host: str = ""
    address: str = ""
    log: str = ""


@record
class LogLine:
    """One line of the log. ``number`` counts from the start; ``time_s``: Unix time."""

    number: int
    time_s: float
    level: str
    text: str


@record
class LinkStatistics:
    """One worker host. ``state``: opening, proving, serving, leaving or closing.

    ``key``: the name of its key. ``machine``: its processor's architecture. ``since_s``: how long
    it has been here. ``orders``, ``samples``: filled into batches, ``busy_s`` of its workers' time.
    ``received_bytes`` of rows; ``late_rows`` came when they were not wanted any more. ``withdrawn``
    orders were given to others. ``disagreements``: samples that it reported bad and that are good.
    ``streams``: those that it fills; ``refused``: those that it cannot fill, each with the reason.
    ``gateway``: the number of the gateway through which it comes.
    """

    link: int
    name: str
    host: str
    key: str
    pid: int
    machine: str
    version: str
    decoders: str
    state: str
    since_s: float
    workers: int
    orders: int
    samples: int
    busy_s: float
    received_bytes: int
    late_rows: int
    withdrawn: int
    disagreements: int
    streams: tuple[str, ...]
    refused: tuple[str, ...]
    gateway: int = 0


@record
class PoolStatistics:
    """The worker hosts. ``ended_links``: how many have gone, ``last_end``: the last one and why.

    ``last_left``: that one was told to end, by a signal for example, and did not fail.
    ``wanted``: the number of remote workers that the trainers need. If something limits them,
    ``capped_by`` is "max", "network" or "ring", and ``cap`` says the same for people.
    ``interface`` and ``interface_bytes_per_s``: of ``address``; empty and None if not known.
    ``sent_away``: the last worker hosts that the daemon sent away, each with the reason.
    ``received_bytes``: of rows, from all worker hosts ever. ``gateways``: how many there should be;
    ``gateways_down``: the numbers of those that do not listen just now.
    """

    address: str
    links: tuple[LinkStatistics, ...]
    ended_links: int
    last_end: str
    wanted: int = 0
    cap: str = ""
    capped_by: str = ""
    interface: str = ""
    interface_bytes_per_s: float | None = None
    sent_away: tuple[str, ...] = ()
    received_bytes: int = 0
    gateways: int = 1
    gateways_down: tuple[int, ...] = ()
    last_left: bool = False


@record
class ContentPart:
    """One part of what a stream's fingerprint is made of. ``value``: JSON."""

    name: str
    value: str


@record
class DeliveredRows:
    """A digest of the ``rows`` that were delivered in ``epoch``, out of ``rows_max``: 64 digits."""

    epoch: int
    rows: int
    rows_max: int
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
    samples: int
    parts: tuple[ContentPart, ...]
    configuration: tuple[str, ...]
    digests: tuple[DeliveredRows, ...] = ()


@record
class LeftOut:
    """How many of each list are not in a status, since it would be too long with them."""

    streams: int = 0
    workers: int = 0
    trainers: int = 0
    links: int = 0


@record
class DaemonStatus:
    """The answer to ``AskStatus``. ``pool``: None if no worker hosts may come.

    ``warnings``: the last ones, and errors; ``log``: the last lines, if they were asked for, with
    nothing but ``daemon``. Both have the newest last, and are empty for other hosts. ``card``: of a
    stream, if it was asked for and there is one, with nothing but ``daemon``; ``reports``: a page
    of those about a stream, likewise. ``left_out``: see ``LeftOut``.
    """

    daemon: DaemonFacts
    workers: tuple[WorkerStatistics, ...]
    trainers: tuple[TrainerStatistics, ...]
    streams: tuple[StreamStatistics, ...]
    pool: PoolStatistics | None = None
    warnings: tuple[LogLine, ...] = ()
    log: tuple[LogLine, ...] = ()
    card: StreamCard | None = None
    reports: ReportPage | None = None
    left_out: LeftOut = LeftOut()

    def stream(self, name: str) -> StreamStatistics | None:
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
        return tuple([_plain(one) for one in value])
    names = getattr(kind, "field_names", None)
    return value if names is None else {name: _plain(getattr(value, name)) for name in names}


STATUS_BYTES_MAX = 896 << 10
"""Of the maps of a status, which are nearly the whole of a message."""
_LIST_BYTES_MAX = {"streams": 512 << 10, "workers": 96 << 10, "trainers": 160 << 10, "links": 128 << 10}
"""Of each list; subscriptions have the rest."""


def shorten(plain: dict[str, Any]) -> None:
    """End the lists of a status where it would be longer than a message; say what is missing."""
    streams = plain["streams"]
    subscriptions = [stream.pop("subscriptions") for stream in streams]
    lists = {name: plain[name] for name in ("streams", "workers", "trainers")}
    if "pool" in plain:
        lists["links"] = plain["pool"]["links"]
    left_out, listed_bytes = {}, 0
    for name, values in lists.items():
        kept, kept_bytes = first_that_fit(values, _LIST_BYTES_MAX[name])
        left_out[name] = len(values) - len(kept)
        (plain["pool"] if name == "links" else plain)[name] = kept
        listed_bytes += kept_bytes
    others = {**plain, "streams": (), "workers": (), "trainers": (), "pool": {**plain.get("pool", {}), "links": ()}}
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
        "digests": [asdict(one) for one in card.digests],
    }


def _read(kind: type, plain: object) -> object:
    known = plain if isinstance(plain, Mapping) else {}
    return kind(*[read(known[name]) if name in known else default for name, read, default in _fields(kind)])


@cache
def _fields(kind: type) -> list[tuple[str, Callable[[object], object], object]]:
    assert is_dataclass(kind)
    readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
    return [
        (one.name, readers[one.name], readers[one.name](None) if one.default is MISSING else one.default)
        for one in fields(kind)
    ]


def _reader(hint: object) -> Callable[[object], object]:
    """Make the reader of a field, which gives the type's empty value for one that does not fit."""
    if get_origin(hint) is tuple:
        read_item = _reader(get_args(hint)[0])
        return lambda value: tuple(map(read_item, value)) if isinstance(value, (list, tuple)) else ()
    if isinstance(hint, UnionType):
        (inner,) = (one for one in get_args(hint) if one is not type(None))
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
