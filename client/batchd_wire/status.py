"""What a daemon does, in numbers: frozen values for commands, observer, trainers and tests. Every process; standard library.

    the daemon's values --plain_status--> maps, in a ``Status`` message and in ``batchd status --json`` --read_status--> values

Totals count from the start. A class grows by fields: an unknown key is skipped, and a field whose
key is missing has its default, or zero, "", False, None or () by its type. So a newer and an older
daemon can be asked.

Invariant: values from ``read_status`` have the types of their fields, whatever the other process
sent.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import get_args, get_origin, get_type_hints

from batchd_wire.record import record


@record
class WorkerStatistics:
    """One worker. ``place`` is 0 to workers-1 and outlives it; ``state`` is starting, ready, leaving or ending.

    ``pid``: None where the worker has no process yet.
    """

    number: int
    place: int
    state: str
    orders: int
    chunks: int
    samples: int
    busy_s: float
    pid: int | None = None


@record
class WaitStatistics:
    """How long a trainer stood still for a batch, by what it waited for. See ``core.measure``.

    It is what the daemon knows: from the trainer's word that it waits to its batch being handed
    over, or sent to another host.
    """

    workers_s: float = 0.0
    memory_s: float = 0.0
    trainers_s: float = 0.0
    producers_s: float = 0.0
    network_s: float = 0.0


@record
class SubscriptionStatistics:
    """One trainer's claim. ``epoch`` and ``step``: the next batch it has not consumed (None past its end).

    ``last_epoch`` and ``last_step``: the one that it took last (None before its first).
    ``is_spectator``: it only wants a look. ``ready_ahead``: how many batches from there on are
    ready, handed over already or not. ``wait_s``: how long the trainer says that it waited in all;
    ``waits``: what for. ``short_of_memory_s``: how long it wanted more batches ahead than the ring
    has room for.
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


@record
class LiveStatistics:
    """The mailbox of a live stream. ``queued_samples`` wait for a batch; ``bound_samples`` are in one that no trainer has yet.

    ``dropped_oldest`` and ``dropped_newest``: where a sample found the mailbox full, by what was
    dropped. ``refused_pushes``: samples said to be in places that their producer did not have.
    ``lost_batches``: what one trainer got, and another that wanted it did not, because the ring
    could not keep it.
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
    """The cache of a stream, which so many ``streams`` share. ``kind`` is what it keeps of a sample.

    ``folder``: where its file is, None for one in memory. ``spoilt_samples``: records that were not
    what had been written.
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
    """One part of a sample's way in a worker: "read", "decode", the names of steps, "store"; and "bad samples", all of theirs."""

    name: str
    busy_s: float


@record
class SlowSample:
    """A sample that took several times as long as most, and how long it took last. ``path``: where it is.

    ``slow_row``: how many slow rows the stream had had by then.
    """

    sample: int
    path: str
    taken_s: float
    slow_row: int


@record
class WorkStatistics:
    """The workers' time for a stream.

    ``busy_s``: with its samples; ``cpu_s`` of it they had a CPU, ``read_cpu_s`` of that for
    reading; ``cpu_wait_s`` they wanted one and had none, None where the kernel does not say.
    ``waited_s``: for a server of files, beside ``busy_s``. ``parts``: what ``busy_s`` consists of,
    but for what is between samples. ``usual_sample_s``: half of the samples stay below.
    ``slow_rows`` took several times as long, ``slow_s`` together; ``slowest``: some of these, of
    late. ``cache_hits`` samples were in the stream's cache, ``cache_misses`` were not; none where
    it has no cache.
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


@record
class StreamStatistics:
    """One stream and its ring. ``number``: a stream that a reload has changed is another one under the same name.

    ``shared_batches``: decoded once, read by two or more. ``mismatched_batches``: came to a trainer
    other than they were written. ``live``: its mailbox, where producers push its samples; such a
    stream has no end, and ``samples`` and ``steps`` say nothing. ``own_source``: its source is
    somebody's own code. ``bgr_fields``: images whose colours are blue first. ``cache``: None where
    the stream has none.
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


@record
class DaemonStatistics:
    """What the daemon's pure core counts. ``worker_deaths``: workers that ended without being asked to.

    ``ending_slots``: slots of streams that are not served any more, which somebody still reads or
    writes.
    """

    workers: tuple[WorkerStatistics, ...]
    streams: tuple[StreamStatistics, ...]
    worker_deaths: int
    draining: bool
    ending_slots: int


@record
class TrainerStatistics:
    """One session. ``pid`` and ``user`` are None where the kernel or the other host does not tell them.

    ``transport`` is "shared memory" or "tcp". ``host``, ``key`` (its name) and what was sent are
    None without TCP.
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
    """How the last reload ended: at ``time_s`` of the Unix clock, with 0 or the exit code of a command."""

    time_s: float
    exit_code: int
    text: str

    @property
    def failed(self) -> bool:
        """Whether the configuration from before the reload is still in force."""
        return self.exit_code != 0


@record
class LocalCounts:
    """Connections on the daemon's host: all, those without a session, and how many the daemon has closed."""

    connections: int
    strangers: int
    closed: int


@record
class TcpCounts:
    """Connections over TCP, likewise. ``sent_bytes``: of batches, to all trainers ever."""

    connections: int
    strangers: int
    closed: int
    failed_handshakes: int
    sent_bytes: int


@record
class DaemonFacts:
    """The daemon as a process. ``memory_bytes``: of all slots. ``cpus``: how many it may use. ``http``: the observer's address.

    ``reload``: None before the first reload. ``tcp``: None where the daemon does not listen on TCP.
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


@record
class DaemonStatus:
    """The answer to ``AskStatus``."""

    daemon: DaemonFacts
    workers: tuple[WorkerStatistics, ...]
    trainers: tuple[TrainerStatistics, ...]
    streams: tuple[StreamStatistics, ...]

    def stream(self, name: str) -> StreamStatistics | None:
        """Find a stream by its name."""
        return next((stream for stream in self.streams if stream.name == name), None)


def plain_status(status: DaemonStatus) -> dict[str, object]:
    """Make the maps of the wire and of ``batchd status --json``; without the key ``daemon.tcp`` where there is no TCP."""
    plain = asdict(status)
    if status.daemon.tcp is None:
        del plain["daemon"]["tcp"]
    return plain


def read_status(plain: Mapping[str, object]) -> DaemonStatus:
    """Read the maps of a ``Status`` message. Raises nothing: a value of another type than its field's reads as zero or empty."""
    status = _read(DaemonStatus, plain)
    assert isinstance(status, DaemonStatus)
    return status


def _read(kind: type, plain: object) -> object:
    known = plain if isinstance(plain, Mapping) else {}
    return kind(*[read(known[name]) if name in known else default for name, read, default in _fields(kind)])


@cache
def _fields(kind: type) -> list[tuple[str, Callable[[object], object], object]]:
    """Name, reader and default of each field."""
    assert is_dataclass(kind)
    readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
    return [
        (one.name, readers[one.name], readers[one.name](None) if one.default is MISSING else one.default)
        for one in fields(kind)
    ]


def _reader(hint: object) -> Callable[[object], object]:
    """Make the function that reads one field. It gives the empty value of the type for whatever does not fit, such as None."""
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
    """Whether a plain value is one of ``kind``: a map where that is a record, and a whole number also where it is float."""
    return (
        isinstance(value, Mapping)
        if is_dataclass(kind)
        else type(value) in ((int, float) if kind is float else (kind,))
    )
