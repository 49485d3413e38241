"""The configuration as one frozen tree. Daemon and CLI; workers never import this, because pydantic costs them memory.

    Config ── daemon: DaemonConfig
           └─ streams: NAME → StreamConfig ── source: FolderSource | ListSource
                                           └─ pipeline: Decode, …

Field, limits, default, unit and meaning stand here (and in ``sources`` and ``steps``) once; what the TOML file may hold, what
error messages say, ``batchd config``, the JSON Schema and the manual are all made from it.

Invariant: a ``Config`` that exists is valid in itself. Whether its files exist and its memory suffices is checked by
``batchd check`` and at the daemon's start.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from batchd.config.checks import Checks
from batchd.config.cpus import available_cpus
from batchd.config.http import DEFAULT, host_name, parse_http
from batchd.config.kinds import IS_WHOLE, OneOf
from batchd.config.live_sources import PushSource
from batchd.config.sizes import AMOUNT_PATTERN, parse_bytes
from batchd.config.sources import SOURCE_KINDS, Source
from batchd.config.steps import STEP_KINDS, Step
from batchd.config.tcp import parse_tcp
from batchd.storage.location import check_local
from batchd.storage.values import StorageLimits

GIBIBYTE = 1 << 30
MEMORY_BYTES_MIN = 1 << 16
MEMORY_BYTES_MAX = 1 << 50
BATCH_SIZE_MAX = 65_536
STEPS_MAX = 64
STREAMS_MAX = 1024
SAMPLE_SHARE = 0.8
"""Of ``sample_timeout_s``: a slow server makes a bad sample before the worker counts as stuck."""
STREAM_NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"

PUSH_DEFAULTS: dict[str, object] = {"lag": "lockstep", "on_error": "mask"}
"""In a stream whose samples are pushed."""

OnError = Literal["substitute", "mask", "fail"]
Lag = Literal["independent", "lockstep"]
CacheKind = Literal["off", "encoded", "seekable", "decoded"]
CACHE_KEYS = ("cache", "cache_memory", "cache_dir", "cache_size", "cache_short_side")
SHORT_SIDE_MAX = 4_096


def _bytes_from_text(value: object) -> object:
    """Read "4GiB"; numbers go on to the number's own check, where ``true`` and 1.5 end."""
    return parse_bytes(value) if isinstance(value, str) else value


def _within_memory_limits(count: int) -> int:
    if not MEMORY_BYTES_MIN <= count <= MEMORY_BYTES_MAX:
        raise ValueError(f"must be from 64KiB to 1024TiB, not {count} bytes")
    return count


def _named_by_parts(path: Path) -> Path:
    """An empty path would mean the current directory, which nobody means; the kernel takes no NUL."""
    if not path.parts or "\0" in str(path):
        raise ValueError("must name a directory")
    check_local("it", path)
    return path


def _host_and_port(text: str) -> str:
    parse_tcp(text)
    return text


def _http_place(text: str) -> str:
    parse_http(text)
    return text


Memory = Annotated[
    int,
    BeforeValidator(_bytes_from_text),
    AfterValidator(_within_memory_limits),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": MEMORY_BYTES_MIN, "maximum": MEMORY_BYTES_MAX},
                {"type": "string", "pattern": AMOUNT_PATTERN},
            ],
            "x-unit": "bytes",
        }
    ),
]
StreamName = Annotated[str, Field(pattern=STREAM_NAME_PATTERN)]


class _Branch(BaseModel):
    """What all tables have in common: frozen, strict, no unknown keys, meanings from the strings under the fields."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=IS_WHOLE,
    )


class DaemonConfig(_Branch):
    """What concerns the daemon as a whole."""

    runtime_dir: Annotated[Path, AfterValidator(_named_by_parts)] | None = None
    """Directory of the sockets and the lock; its group is who may connect. When not set, the first of /run/batchd and
    $XDG_RUNTIME_DIR/batchd that this user may write."""

    tcp: Annotated[str, AfterValidator(_host_and_port)] | None = None
    """Where trainers on other hosts come in: an address of this machine (or a network interface, or "*" for all) and a port,
    such as "10.0.0.5:7070" or "[::1]:7070". Beyond loopback it needs keys: `batchd keys new`. When not set, nobody comes over
    TCP."""

    keys_dir: Annotated[Path, AfterValidator(_named_by_parts)] | None = None
    """Directory of the keys that `batchd keys` makes: the daemon's, and who may come over TCP. When not set, what systemd gives
    (LoadCredential=keys:/etc/batchd/keys) where it gives credentials, /etc/batchd/keys for root, and
    $XDG_CONFIG_HOME/batchd/keys or ~/.config/batchd/keys for others."""

    http: Annotated[str, AfterValidator(_http_place)] = DEFAULT
    """Where /metrics, /healthz, /readyz and /status.json are answered: an address of this machine (or a name of it, or "*" for
    all) and a port (0: any that is free), or "off". It is plain HTTP without passwords, so think before you name more than
    loopback. A daemon inside a script has none unless this is set. Where this is not set and the port is taken, the daemon goes
    on without."""

    http_details: bool = False
    """Whether everybody who reaches the HTTP port may see everything there is: the page, contact sheets (pictures of the training
    data), names and paths of bad files, process ids and users (/status.json). false: only users of this machine who may connect
    to the daemon anyway, over loopback and not through a proxy."""

    http_names: tuple[Annotated[str, AfterValidator(host_name)], ...] | None = None
    """Further names by which people ask for this machine over HTTP, such as ["batchd.example.org"] for a proxy's. Its addresses,
    its own name with and without domain, and what http says are known anyway; a request for any other name is refused, as a web
    page may have made it (DNS rebinding)."""

    cache_dir: Annotated[Path, AfterValidator(_named_by_parts)] | None = None
    """Directory where indexes of large sources are kept, so that only what has changed is scanned again. When not set,
    $CACHE_DIRECTORY (which systemd gives), /var/cache/batchd for root, and $XDG_CACHE_HOME/batchd or ~/.cache/batchd for
    others."""

    python_path: tuple[Annotated[Path, AfterValidator(_named_by_parts)], ...] | None = None
    """Folders in which modules of your own functions are looked for, before what Python itself has: those of "call" steps and of
    "python" and "generator" sources. When not set, the folder of the configuration file. Whoever may write there runs code as
    the daemon's user."""

    workers: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Number of decoding processes. "auto" is one for each CPU that the daemon may use: affinity and cgroup quota count."""

    memory: Memory = 4 * GIBIBYTE
    """Shared memory for the rings of all streams together, in bytes or as "4GiB", "512MiB"."""

    sample_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long one sample may keep a worker busy, in seconds; a worker that takes longer is killed and the file is named."""

    drain_timeout_s: Annotated[float, Field(ge=0, lt=10)] = 8.0
    """How long workers may take to finish what they have in hand after SIGTERM, in seconds; then the daemon ends."""

    storage_timeout_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """How long a server of http, s3 or gs may say nothing, in seconds, before the request is given up and made again. A whole
    sample takes at most 0.8 of sample_timeout_s: then it is a bad sample, and no worker is killed."""

    storage_retries: Annotated[int, Field(ge=0, le=100)] = 3
    """How often a request to http, s3 or gs is made again, with growing pauses, when its server says nothing, answers 429 or
    500 and more, or closes the connection too soon."""

    reserve: Literal["demand", "start"] = "demand"
    """When the memory of the rings is taken. "demand": slot by slot, when a trainer first needs it. "start": all of it before a
    service manager is told that the daemon is ready; where it cannot be had, the daemon ends with an error. Streams that a
    reload adds or changes get theirs on demand."""

    chunk_rows: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = "auto"
    """Most samples that a worker gets at once. "auto" measures: about 20 ms of work, so that messages cost nothing and all
    workers end a batch together; more with more than 64 workers."""

    sessions_max: Annotated[int, Field(ge=1, le=65_536)] = 256
    """How many trainers may be connected at once; further ones are refused with a message."""

    sessions_per_peer: Annotated[int, Field(ge=1, le=65_536)] = 256
    """How many trainers may be connected over TCP at once with the same key, or from the same host where there are no keys;
    further ones are refused with a message."""

    writable_slots: bool = False
    """Whether trainers on this host that ask for it, as the PyTorch loader does for a GPU, may map slots writable: most GPUs read
    memory by themselves only if it is mapped so. A trainer with a bug could then spoil the batches of others; `verify = true`
    notices that. One that means harm could do so unnoticed."""

    def storage_limits(self) -> StorageLimits:
        """How patient to be with servers of files."""
        return StorageLimits(self.storage_timeout_s, self.storage_retries, SAMPLE_SHARE * self.sample_timeout_s)

    def worker_count(self) -> int:
        """The number of workers, with "auto" resolved for this process."""
        return available_cpus() if self.workers == "auto" else self.workers


class StreamConfig(_Branch):
    """One stream: a source, what is done to its samples, and how they become batches."""

    source: Annotated[Source, OneOf(SOURCE_KINDS, "type")]
    """Where the samples come from."""

    pipeline: Annotated[tuple[Annotated[Step, OneOf(STEP_KINDS, "op")], ...], Field(max_length=STEPS_MAX)] = ()
    """What is done to each sample, step by step. What is the bytes of an image file at first needs "decode"."""

    batch_size: Annotated[int, Field(ge=1, le=BATCH_SIZE_MAX)]
    """Samples in one batch. Each goes to one rank whole, but for an epoch's last round, where ranks share what is left,
    and get a sample each at least."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Decides the shuffle and every random step; the same seed gives the same bytes. Two streams with the same seed draw the same
    numbers for the same sample of the same epoch, so give streams that must differ different seeds."""

    shuffle: bool = True
    """Whether each epoch has an order of its own; false keeps the order of the source. A push source has no other."""

    drop_last: bool = False
    """Whether an epoch ends with its last whole batch; false keeps the samples that are left as a smaller last batch. With W
    ranks, true also leaves out the last batches that do not make one for each rank, up to W - 1 whole ones; false has the ranks
    share them."""

    verify: bool = False
    """Whether every row carries a CRC-32 that the worker makes and the trainer compares; a batch that does not match is
    asked for again and counted. For networks and memory that are not trusted; costs both sides some 0.2 ms for each MB."""

    on_error: OnError = "substitute"
    """What stands for a sample that cannot be read or decoded: "substitute" another sample (always the same one), "mask" it
    with zeros (a padded field with its fill) and valid = false, or "fail" and stop the stream. With a push source "mask", or
    "fail"."""

    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of bad samples among those seen above which the stream stops."""

    window: Annotated[int, Field(ge=1, le=64)] = 4
    """How many batches ahead of each trainer are made ready."""

    lag: Lag = "independent"
    """Whether a trainer may run ahead of the others that read the same batches: "independent" lets it, "lockstep" makes it wait
    so that each batch is decoded once; a trainer that starts later is waited for until it has come near. With a push source
    always "lockstep"."""

    max_skew: Annotated[int, Field(ge=1, le=1024)] = 8
    """With lag = "lockstep": how many batches the first trainer may be ahead of the last."""

    memory: Memory | None = None
    """Part of the daemon's memory for this stream's ring, in bytes or as "1GiB". When not set, streams share equally what the
    others leave."""

    cache: CacheKind = "off"
    """What of a sample is kept in memory once it was read, for all epochs. "encoded": what the source gave, such as the bytes of
    an image file, so that slow storage is read once. "seekable": the same, with restart markers in JPEGs, so that crops of them
    take less time; to write them takes as long as some four decodes, once. "decoded": what the steps in front of the first
    random one make of it, as pixels of 8 bits, so that each image is decoded once; `batchd check --explain` says which steps
    these are. Streams with the same source, the same such steps and the same cache_memory share one cache. What has changed on
    the storage since is not seen before the daemon is restarted, or a reload finds another source; with cache_dir, not before
    the file of the cache is removed."""

    cache_memory: Memory | None = None
    """With a cache in memory: the most memory that it takes, in bytes or as "200GiB"; no part of [daemon] memory, which is
    for rings. Where it is less than all samples have, those that were read first are kept, and none of them makes room."""

    cache_dir: Annotated[Path, AfterValidator(_named_by_parts)] | None = None
    """Folder in which the cache is a file, which outlives the daemon; it has to be there, better on a local disk. When not set,
    the cache is in memory, and gone with the daemon."""

    cache_size: Memory | None = None
    """With cache_dir: the most space that the file of the cache takes there, in bytes or as "200GiB"; in memory it is
    cache_memory."""

    cache_short_side: Annotated[int, Field(ge=1, le=SHORT_SIDE_MAX)] | None = None
    """With cache = "decoded": the shorter side of the images that are kept, in pixels, as if a resize to shorter_side stood
    behind "decode". Images of their full size take many times the memory of their files."""

    @property
    def is_shuffled(self) -> bool:
        """Has each epoch an order of its own? Samples that come as they come have none to begin with."""
        return self.shuffle and not self.source.is_live

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        """Refuse what a source cannot do, and an option that nobody would read."""
        checks = Checks()
        if self.source.is_live and self.shuffle and "shuffle" in self.model_fields_set:
            checks.say(
                f'samples of type "{self.source.type}" come in their own order, so shuffle = true cannot be done; leave it out, '
                "and have them made in random order",
                "shuffle",
            )
        if isinstance(self.source, PushSource):
            self._check_push(checks, self.source)
        elif "max_skew" in self.model_fields_set and self.lag != "lockstep":
            checks.say('max_skew counts only with lag = "lockstep"', "max_skew")
        self._check_cache(checks)
        checks.done()
        return self

    def _check_cache(self, checks: Checks) -> None:
        """Refuse a cache of what never comes again, one without a budget, and a budget without a cache."""
        if self.cache == "off":
            for key in CACHE_KEYS[1:]:
                if getattr(self, key) is not None:
                    checks.say(f'{key} counts only with a cache: cache = "encoded", "seekable" or "decoded"', key)
        elif self.source.is_live:
            text = (
                f'samples of type "{self.source.type}" come once, so there is nothing to keep of them; leave cache out'
            )
            checks.say(text, "cache")
        elif self.cache_dir is None:
            self._check_budget(checks, "cache_memory", "cache_size", "cache_size counts only with cache_dir")
        else:
            self._check_budget(checks, "cache_size", "cache_memory", "the cache is a file in cache_dir: say cache_size")
        self._check_short_side(checks)

    def _check_short_side(self, checks: Checks) -> None:
        if self.cache in {"encoded", "seekable"} and self.cache_short_side is not None:
            text = f'cache_short_side counts only with cache = "decoded": of "{self.cache}" files keep their size'
            checks.say(text, "cache_short_side")

    def _check_budget(self, checks: Checks, needed: str, other: str, why_not: str) -> None:
        if getattr(self, other) is not None:
            checks.say(f"{why_not}, not {other}" if other == "cache_memory" else why_not, other)
        if getattr(self, needed) is None:
            checks.say(f'cache = "{self.cache}" needs {needed}, the most that it may take, such as "8GiB"', "cache")

    @property
    def cache_bytes(self) -> int | None:
        """The budget of the cache, in memory or on disk."""
        return self.cache_memory if self.cache_dir is None else self.cache_size

    def _check_push(self, checks: Checks, source: PushSource) -> None:
        """What is pushed comes once: refuse what needs samples that can be had again; it is not the default either."""
        self.__dict__.update(
            (name, value) for name, value in PUSH_DEFAULTS.items() if name not in self.model_fields_set
        )
        if self.lag != "lockstep":
            checks.say(
                f'lag = "{self.lag}" needs samples that can be had again: what is pushed comes once, so trainers go in '
                '"lockstep"',
                "lag",
            )
        if self.on_error == "substitute":
            text = 'on_error = "substitute" needs another sample: what is pushed comes once, to one batch; use "mask" or "fail"'
            checks.say(text, "on_error")
        if source.capacity < self.batch_size:
            checks.say(
                f"a batch of {self.batch_size} samples never comes together in a mailbox of {source.capacity}: capacity "
                "must be batch_size or more, and is better several times that",
                "batch_size",
            )


class Config(_Branch):
    """The whole configuration of one daemon."""

    daemon: DaemonConfig = DaemonConfig()
    """What concerns the daemon as a whole."""

    streams: Annotated[dict[StreamName, StreamConfig], Field(min_length=1, max_length=STREAMS_MAX)]
    """What trainers may ask for, by name: letters, digits, "_", "." and "-", at most 64 characters."""
