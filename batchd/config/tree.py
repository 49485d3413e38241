"""The configuration as one frozen tree. Daemon and CLI; workers have no pydantic.

    Config ── daemon: DaemonConfig
           └─ streams: NAME → StreamConfig ── source: FolderSource | ListSource | …
                                           └─ pipeline: Decode, …

A field has its limits, default, unit and meaning here, or in the ``options`` of its kind, and only
there. The reader of TOML, error messages, ``batchd config``, the JSON Schema and the manual derive
from it. Marks say what else a key means: see ``Mark``.

Invariant: a ``Config`` is valid in itself. ``batchd check`` and the daemon's start check whether
its files exist and its memory suffices.
"""

from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self, TypedDict

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from batchd.data.pipeline import cache_split
from batchd.data.pipeline.augment.options import ERASED_MAX, Area, Aspect, check_range
from batchd.data.pipeline.image.options import CropToBucket, SizedStep
from batchd.data.pipeline.join.options import JoinStep
from batchd.data.pipeline.options import STEP_KINDS, StepOptions
from batchd.data.pipeline.sample_fields import bucket_crop_of, drawn_sizes, pack_of
from batchd.data.samples.checks import Checks, Example, OptionsInvalid
from batchd.data.samples.kinds import IS_WHOLE, OneOf
from batchd.data.samples.location import Url, as_location, check_local
from batchd.data.sources.composed.options import MixSource, sources_in
from batchd.data.sources.options import SOURCE_KINDS, DeclaredOptions, SourceOptions
from batchd.data.sources.push.options import PushSource
from batchd.data.storage.values import StorageLimits
from batchd.runtime.addresses import HTTP_DEFAULT, PORT_MAX, host_name, parse_http, parse_tcp
from batchd.runtime.cpus import available_cpus
from batchd.runtime.sizes import AMOUNT_PATTERN, format_bytes, parse_bytes
from batchd_wire.fields import BUCKETS_MAX
from batchd_wire.keys import STREAM_NAME_PATTERN

MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30
MEMORY_BYTES_MIN = 1 << 16
MEMORY_BYTES_MAX = 1 << 50
BATCH_SIZE_MAX = 65_536
BLOCKS_MAX = 65_536
BLOCK_SAMPLES_MAX = 1 << 30
DRAWS_MAX = 1 << 32
BALANCE_MAX = 1024
BUDGET_MAX = 1 << 40
ALPHA_MIN, ALPHA_MAX = 0.01, 100.0
"""Of a mix, if it is not 0."""
STEPS_MAX = 128
STREAMS_MAX = 1024
REPEATS_MAX = 64
DERIVED_PART = 4
"""Part of the daemon's memory that is kept for derived streams, if nothing else is set."""
SAMPLE_SHARE = 0.8
"""Of ``sample_timeout_s``: a slow server makes a bad sample before the worker counts as stuck."""

PUSH_DEFAULTS: dict[str, object] = {"lag": "lockstep", "on_error": "mask"}
"""Defaults of a stream with a push source."""

OnError = Literal["substitute", "mask", "fail"]
Lag = Literal["independent", "lockstep"]
CacheKind = Literal["auto", "off", "points", "pixels", "media", "encoded", "decoded"]
SHORT_SIDE_MAX = 4_096


class Mark(Enum):
    """Facts of a key, as metadata of its field: ``keys_marked(Mark.LIVE, DaemonConfig)``."""

    DECIDES_BYTES = "its value is part of the stream's fingerprint; source and pipeline are, by their content"
    ORDERS = "its value decides which samples are in which batch, and the stream's index has the result"
    LIVE = "a reload changes it in the running daemon; all other keys of [daemon] need a restart"
    OF_CACHE = "it counts only with a cache"
    DERIVES = "a trainer may set it, where the operator allows that: daemon.stream(name, set={key: value})"
    DEFINES = "a trainer may set it in a stream of his own, beside those that he may derive: daemon.define(name, table)"


def _bytes_from_text(value: object) -> object:
    """Read "4GiB"; numbers go on to the number's own check, where ``true`` and 1.5 end."""
    return parse_bytes(value) if isinstance(value, str) else value


def _within_memory_limits(count: int) -> int:
    if not MEMORY_BYTES_MIN <= count <= MEMORY_BYTES_MAX:
        raise ValueError(f"must be from 64KiB to 1024TiB, not {count} bytes")
    return count


def _named_by_parts(path: Path) -> Path:
    """Refuse an empty path, which would be the current directory, and NUL, as the kernel does."""
    if not path.parts or "\0" in str(path):
        raise ValueError("must name a directory")
    check_local("it", path)
    return path


def _local_file(path: Path) -> Path:
    if not path.parts or "\0" in str(path):
        raise ValueError("must name a file")
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
Directory = Annotated[Path, AfterValidator(_named_by_parts)]
StreamName = Annotated[str, Field(pattern=STREAM_NAME_PATTERN)]


class _Branch(BaseModel):
    """Base of all tables: frozen, strict, no unknown keys; docstrings are the meanings."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=IS_WHOLE,
    )


def keys_marked(mark: Mark, table: type[_Branch]) -> tuple[str, ...]:
    """The keys of ``table`` with a mark, in the order of the manual."""
    return tuple(name for name, field in table.model_fields.items() if mark in field.metadata)


class TenantShare(_Branch):
    """A tenant of the daemon, and its part of the workers' time and of the memory for slots."""

    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Its part, compared with the weights of the others that want something at the moment."""

    users: Annotated[tuple[str, ...], Example(["anna"])] = ()
    """Users of this host whose trainers belong to it, by name or number."""

    groups: Annotated[tuple[str, ...], Example(["ml"])] = ()
    """Groups of this host whose members belong to it, by name or number; users count first."""

    keys: Annotated[tuple[str, ...], Example(["team-a"])] = ()
    """Keys whose trainers belong to it, by the names that `batchd keys` gave them."""

    sessions_max: Annotated[Annotated[int, Field(ge=1, le=65_536)] | None, Example(32)] = None
    """Maximum number of its connected trainers, so that others always find a place below the
    sessions_max of [daemon]. When not set, it has no limit of its own."""


def _definer(text: str) -> str:
    kind, _colon, name = text.partition(":")
    if kind not in {"user", "group", "key"} or not name:
        raise ValueError(f'is "user:NAME" or "group:NAME" of this host, or "key:NAME" of another one, not {text!r}')
    return text


def _root(text: str) -> str:
    path = as_location("it", Path(text))
    if not isinstance(path, Url) and (not path.is_absolute() or "\0" in text):
        raise ValueError("must name a folder, or the beginning of URLs")
    return text


class DefineConfig(_Branch):
    """What others than the operator may define from their programs: docs/define.md."""

    who: Annotated[
        tuple[Annotated[str, AfterValidator(_definer)], ...],
        Field(min_length=1),
        Example(["group:ml", "user:anna", "key:team-a"]),
    ]
    """Who may: "user:NAME" and "group:NAME" of this host, or their numbers, and on other hosts
    "key:NAME", a key of `batchd keys`. Root and the daemon's own user may as well."""

    what: Literal["derived", "streams"] = "streams"
    """What they may define. "streams": streams of any data below roots, with
    `daemon.define(name, table)`, and derived ones; "derived": only streams with other settings over
    those of the file, as with derive, which allows that to all."""

    roots: Annotated[
        tuple[Annotated[str, AfterValidator(_root), WithJsonSchema({"type": "string", "format": "path"})], ...],
        Example(["/data", "s3://bucket/sets/"]),
    ] = ()
    """Folders, and beginnings of URLs, that every file of a defined stream is below. A user of this
    host has to have the right to read the files himself; what is on servers, and what the holder of
    a key names, is read with the rights of the daemon."""

    code: bool = False
    """Whether their streams may have functions ("call" steps, sources that are code) of the modules
    in python_path. They run with the rights of the daemon's user, on what they are given."""

    streams_max: Annotated[int, Field(ge=1, le=256)] = 8
    """Maximum number of streams that one of them has defined."""

    memory: Annotated[Memory | None, Example("8GiB")] = None
    """Most memory for the rings of the streams that one of them has defined, in bytes or as "8GiB";
    each may take 1/streams_max of it, or what it sets as its memory. When not set, as much as
    derive_memory keeps for all of them together."""

    @property
    def places(self) -> list[Path]:
        """The roots as paths and URLs."""
        return [as_location("it", Path(root)) for root in self.roots]

    @model_validator(mode="after")
    def _has_roots(self) -> Self:
        if self.what == "streams" and not self.roots:
            raise OptionsInvalid(
                [(("roots",), 'name the folders of the data, such as roots = ["/data"], or what = "derived"')]
            )
        return self


class DaemonConfig(_Branch):
    """Settings of the whole daemon."""

    runtime_dir: Annotated[Directory | None, Example("/run/batchd")] = None
    """Directory for the sockets and the lock file. Members of its group may connect. When not set,
    the first of /run/batchd and $XDG_RUNTIME_DIR/batchd that this user may write."""

    tcp: Annotated[Annotated[str, AfterValidator(_host_and_port)] | None, Example("10.0.0.5:7070")] = None
    """Listening address for trainers on other hosts: an address of this machine (or a network
    interface, or "*" for all) and a port, such as "10.0.0.5:7070" or "[::1]:7070". Beyond loopback
    it needs keys: `batchd keys new`. When not set, the daemon does not listen on TCP."""

    worker_address: Annotated[Annotated[str, AfterValidator(_host_and_port)] | None, Example("10.0.0.5:7072")] = None
    """Listening address for worker hosts (`batchd worker`), which decode on other machines: an
    address of this machine (or a network interface, or "*" for all) and a port, such as
    "10.0.0.5:7072". Beyond loopback it needs keys: `batchd keys new --role worker`. When not set,
    all workers are on this host."""

    pool_max: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Maximum number of workers on other machines that batchd asks for (`batchd ray`,
    batchd_workers_wanted); 0: no maximum."""

    pool_accept: Literal["same", "any"] = "same"
    """Worker hosts that may fill batches. "same": those that make the same bytes as this host,
    which each of them has to show for every stream. "any": all of them; the same position may then
    have other bytes, and positions that were saved with "same" do not fit."""

    pool_audit: Annotated[float, Field(ge=0, le=1)] = 0.001
    """The part of the orders of each worker host that is compared again with what a worker of this
    host makes; none with `pool_accept = "any"`."""

    pool_cache: Literal["each", "shared"] = "each"
    """Content of the caches of worker hosts, for streams with a `cache`. "each": each host the
    samples that it happens to get, in time all of them. "shared": each host fills, if it can, the
    rows of its own share of the samples, so that the caches of N hosts keep N times as much. Orders
    then have at most the rows of a batch that are in one share; local workers, and hosts without
    other work, fill rows of any share, so no trainer waits for a host. Positions and bytes are the
    same."""

    pool_withdraw_after_s: Annotated[float, Field(gt=0, le=10)] = 1.0
    """How long a trainer waits for rows that are at a worker host, in seconds; then another worker
    gets them. A host that always takes long has four times its usual time."""

    pool_hosts_max: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """Maximum number of worker hosts; further ones are refused with a message."""

    pool_hosts_per_key: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """Maximum number of worker hosts with the same key, or from the same host if there are no keys;
    further ones are refused with a message."""

    pool_gateways: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of gateways: processes that receive the rows of worker hosts. Each uses one core. With
    more than one, they listen on the port of worker_address and the ports after it (open them in
    firewalls), and each admits its part of pool_hosts_max and pool_hosts_per_key."""

    keys_dir: Annotated[Directory | None, Example("/etc/batchd/keys")] = None
    """Directory of the keys that `batchd keys` makes: the daemon's own, and those of remote
    trainers and worker hosts. When not set, systemd's credentials
    (LoadCredential=keys:/etc/batchd/keys) if there are any, /etc/batchd/keys for root, and
    $XDG_CONFIG_HOME/batchd/keys or ~/.config/batchd/keys for other users."""

    http: Annotated[str, AfterValidator(_http_place)] = HTTP_DEFAULT
    """Listening address for /metrics, /healthz, /readyz and /status.json: an address of this
    machine (or a name of it, or "*" for all) and a port (0: any free one), or "off". Plain HTTP
    without authentication: do not expose it on an untrusted network. A daemon inside a script has
    none unless this is set. If this is not set, the process that answers is started by the first
    request, and where the port is taken, the daemon runs without HTTP."""

    http_details: bool = False
    """Whether every client that reaches the HTTP port may see everything: the page, contact sheets
    (pictures of the training data), names and paths of bad files, process ids and users
    (/status.json). false: only users of this machine who may connect to the daemon anyway, over
    loopback and not through a proxy."""

    http_names: Annotated[
        tuple[Annotated[str, AfterValidator(host_name)], ...] | None, Example(["batchd.example.org"])
    ] = None
    """Further names of this machine in HTTP requests, such as ["batchd.example.org"] for a proxy's.
    Its addresses, its own name with and without domain, and the name in http are always accepted; a
    request for any other name is refused, because a web page may have made it (DNS rebinding)."""

    cache_dir: Annotated[Directory | None, Example("/var/cache/batchd")] = None
    """Directory of the indexes of large sources, so that only changed sources are scanned again.
    When not set, $CACHE_DIRECTORY (which systemd sets), /var/cache/batchd for root, and
    $XDG_CACHE_HOME/batchd or ~/.cache/batchd for other users."""

    python_path: Annotated[tuple[Directory, ...] | None, Mark.LIVE, Example(["/srv/training"])] = None
    """Folders with the modules of your own functions ("call" steps, "python" and "generator"
    sources), searched before Python's own path. When not set, the folder of the configuration file.
    Every user who can write there can run code as the daemon's user."""

    workers: Annotated[Annotated[int, Field(ge=1, le=1024)] | Literal["auto"], Mark.LIVE] = "auto"
    """Number of decoding processes. "auto": one for each CPU that the daemon may use, by affinity
    and cgroup quota."""

    numa: Literal["auto", "off"] = "auto"
    """Whether workers and rings are placed by the memory nodes (NUMA) of the machine. "auto": if it
    has several, each worker runs on the CPUs of one and rather fills for trainers there, and a
    stream whose trainers are all on one has its ring there. "off": the kernel decides."""

    memory: Annotated[Memory, Mark.LIVE] = 4 * GIBIBYTE
    """Shared memory for the rings of all streams together, in bytes or as "4GiB", "512MiB"."""

    sample_timeout_s: Annotated[float, Field(gt=0, le=3600), Mark.LIVE] = 30.0
    """Timeout of one sample in a worker, in seconds: the daemon kills a worker that takes longer,
    and names the file."""

    drain_timeout_s: Annotated[float, Field(ge=0, lt=10), Mark.LIVE] = 8.0
    """How long workers may finish their orders after SIGTERM, in seconds; then the daemon ends."""

    storage_timeout_s: Annotated[float, Field(gt=0, le=600), Mark.LIVE] = 5.0
    """Timeout of a request to http, s3 or gs without an answer, in seconds; then it is retried. A
    whole sample takes at most 0.8 of sample_timeout_s: then it is a bad sample, and no worker is
    killed."""

    storage_retries: Annotated[int, Field(ge=0, le=100), Mark.LIVE] = 3
    """Number of retries of a request to http, s3 or gs, with growing pauses, after a timeout, a
    status of 429 or 500 and more, or a connection that closes too soon."""

    reserve: Literal["demand", "start"] = "demand"
    """When the rings get their memory. "demand": slot by slot, when a trainer first needs it.
    "start": all of it before the service manager learns that the daemon is ready; if there is not
    enough, the daemon ends with an error. Streams that a reload adds or changes get theirs on
    demand."""

    chunk_rows: Annotated[Annotated[int, Field(ge=1, le=256)] | Literal["auto"], Mark.LIVE] = "auto"
    """Maximum number of samples in one order to a worker. "auto" measures: about 20 ms of work, so
    that messages cost nothing and all workers end a batch together; more with more than 64
    workers, and for worker hosts if the ring is large enough."""

    sessions_max: Annotated[int, Field(ge=1, le=65_536), Mark.LIVE] = 256
    """Maximum number of connected trainers; further ones are refused with a message."""

    sessions_per_peer: Annotated[int, Field(ge=1, le=65_536), Mark.LIVE] = 256
    """Maximum number of trainers connected over TCP with the same key, or from the same host if
    there are no keys; further ones are refused with a message."""

    derive: bool = False
    """Whether trainers may have a stream with other settings than the file's:
    `daemon.stream("photos", set={"pipeline.1.scale": [0.2, 1]})`. Such a stream ends with its last
    trainer. docs/sharing.md says what they may set."""

    derive_max: Annotated[int, Field(ge=1, le=256)] = 8
    """Maximum number of streams that trainers have derived, of all trainers together."""

    derive_memory: Annotated[Memory | None, Example("2GiB")] = None
    """Part of memory that is kept for the rings of derived and defined streams, in bytes or as
    "2GiB"; each derived one may take 1/derive_max of it, or what it sets as its memory. When not
    set, a quarter of memory."""

    define: Annotated[DefineConfig | None, Mark.LIVE, Example({"who": ["group:ml"], "roots": ["/data"]})] = None
    """What others than the operator may define from their programs, as a table. When not set,
    nothing."""

    shares: Annotated[
        dict[StreamName, TenantShare],
        Mark.LIVE,
        Field(max_length=256),
        Example({"team-a": {"weight": 3, "keys": ["team-a"]}}),
    ] = {}
    """Tenants by name, such as team-a = { weight = 3, keys = ["team-a"] }. Workers' time, slots and
    the memory of defined streams go to them by weight; what one does not use goes to the others at
    once. Trainers that no table names are one tenant, "default", with weight 1 unless it has a
    table. docs/sharing.md says more."""

    sandbox: Literal["auto", "on", "off"] = "auto"
    """Whether workers, scans of binary files and the observer give up all but reading what streams
    name, before they read any of it: other files, writing, other servers, other processes. "auto":
    where the kernel can (Linux with Landlock), unless a stream has functions of your own and no
    read; "on": the daemon does not start otherwise; "off": they may do what the daemon's user may,
    also those of commands and of worker hosts."""

    writable_slots: bool = False
    """Whether trainers on this host that ask for it, as the PyTorch loader does for a GPU, may map
    slots writable: some GPU drivers only register memory that is mapped so. A trainer with a bug
    could then corrupt the batches of others; `verify = true` detects that. A malicious trainer
    could do so undetected."""

    @model_validator(mode="after")
    def _ports_fit(self) -> Self:
        """Refuse gateways beyond the last port."""
        if self.worker_address is not None:
            port = parse_tcp(self.worker_address)[1]
            if port + self.pool_gateways - 1 > PORT_MAX:
                text = f"need the ports {port} to {port + self.pool_gateways - 1}, and the last one is {PORT_MAX}"
                raise OptionsInvalid([(("pool_gateways",), f"{self.pool_gateways} gateways {text}")])
        return self

    @property
    def encloses(self) -> bool:
        """Whether processes that read data give up all else, where they can."""
        return self.sandbox != "off"

    def storage_limits(self) -> StorageLimits:
        """Timeouts and retries of requests to servers of files."""
        return StorageLimits(self.storage_timeout_s, self.storage_retries, SAMPLE_SHARE * self.sample_timeout_s)

    @property
    def derived_bytes(self) -> int:
        """Memory that is kept for the rings of derived and defined streams."""
        if not self.derive and self.define is None:
            return 0
        return self.memory // DERIVED_PART if self.derive_memory is None else self.derive_memory

    @property
    def defined_bytes(self) -> int:
        """The most memory for the rings of what one user or key has defined."""
        own = self.define.memory if self.define is not None else None
        return self.derived_bytes if own is None else min(own, self.derived_bytes)

    @property
    def rings_bytes(self) -> int:
        """Memory for the rings of the streams of the file."""
        return self.memory - self.derived_bytes

    def worker_count(self) -> int:
        """The number of workers, with "auto" resolved for this process."""
        return available_cpus() if self.workers == "auto" else self.workers


class BlockShuffle(_Branch):
    """A shuffle for storage with slow answers: of blocks of neighbours, and in a few of them.

    docs/positions.md says what it costs in randomness.
    """

    blocks: Annotated[int, Field(ge=1, le=BLOCKS_MAX), Example(64)]
    """Number of blocks that are open at a time: their samples are shuffled together. More blocks
    mix better. From a server, the workers keep them and the next ones: together up to about twice
    the bytes of the open blocks, each worker at most 512 MiB."""

    block_bytes: Memory | None = None
    """Size of a block, in bytes or as "8MiB": it has the samples that begin in the same stretch of
    this size of their file. Instead of block_samples, where the index of the source has sizes."""

    block_samples: Annotated[int, Field(ge=1, le=BLOCK_SAMPLES_MAX)] | None = None
    """Number of samples of a block; the last block of a file has what is left."""

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if (self.block_bytes is None) == (self.block_samples is None):
            raise ValueError('name the size of a block: block_bytes, such as "8MiB", or block_samples, and not both')
        return self

    @property
    def text(self) -> str:
        """The options as TOML writes them."""
        size = f"block_samples = {self.block_samples}"
        if self.block_bytes is not None:
            size = f'block_bytes = "{format_bytes(self.block_bytes)}"'
        return f"{{ blocks = {self.blocks}, {size} }}"


def _shuffle_tag(value: object) -> str:
    """The tag of a form of ``shuffle``, which no key of its table has."""
    return "<blocks>" if isinstance(value, (dict, BlockShuffle)) else "<all>"


Shuffle = Annotated[
    Annotated[bool, Tag("<all>")] | Annotated[BlockShuffle, Tag("<blocks>")], Discriminator(_shuffle_tag)
]


class Weights(_Branch):
    """How often samples are drawn, if not each once in an epoch.

    docs/positions.md says how they are drawn.
    """

    by: Literal["class"] | None = None
    """What weighs: "class" is the label of a sample, where the index of the source has labels. Use
    it instead of a file."""

    power: Annotated[float, Field(ge=0, le=1)] = 0.0
    """With by = "class": the share of a class in an epoch grows with its number of samples to this
    power. 0 gives all classes the same share, 1 the one that they have, 0.5 something between."""

    file: Annotated[Annotated[Path, AfterValidator(_local_file)] | None, Example("/data/weights.npy")] = None
    """A .npy file of numbers, one for each sample of the source: the weight of each, 0 or more."""

    replacement: bool = True
    """Whether a sample may be drawn several times in an epoch. false draws each at most once, so an
    epoch must have fewer samples than the source: see samples."""

    samples: Annotated[int, Field(ge=1, le=DRAWS_MAX)] | None = None
    """Samples in an epoch; when not set, as many as the source has."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.by is None) == (self.file is None):
            raise ValueError('name what weighs: by = "class", or a file of weights, and not both')
        if self.by is None and "power" in self.model_fields_set:
            raise ValueError('power counts only with by = "class"')
        if not self.replacement and self.samples is None:
            raise ValueError("replacement = false needs samples: how many of the source's an epoch has")
        return self


class Mix(_Branch):
    """How rows of a batch are mixed with others of it: mixup, cutmix, or one of both by chance.

    Each batch gets the numbers, as the fields mix_row, mix_lambda and mix_box; the trainer applies
    them. docs/steps.md says how.
    """

    mixup: Annotated[float, Field(ge=0, le=ALPHA_MAX)] = 0.0
    """Alpha of mixup: the share of a row is drawn from Beta(alpha, alpha). 0: no mixup."""

    cutmix: Annotated[float, Field(ge=0, le=ALPHA_MAX)] = 0.0
    """Alpha of cutmix, likewise. 0: no cutmix."""

    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Probability of a mix at all."""

    switch: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With both, the probability of cutmix in place of mixup."""

    by: Literal["batch", "row"] = "batch"
    """Whether all rows of a batch have the same share and box, or each its own."""

    field: Annotated[str | None, Example("image")] = None
    """The images that are mixed, whose size cutmix needs. When not set, the only field that holds
    images of one size."""

    @model_validator(mode="after")
    def _mixes(self) -> Self:
        if not self.mixup and not self.cutmix:
            raise ValueError("give mixup, cutmix, or both an alpha above 0, such as mixup = 0.8, cutmix = 1.0")
        for name in ("mixup", "cutmix"):
            if 0 < getattr(self, name) < ALPHA_MIN:
                raise ValueError(f"{name} = {getattr(self, name)}: alpha is 0, or at least {ALPHA_MIN}")
        return self


class Erasing(_Branch):
    """Which rectangles of the rows of a batch the trainer covers, after it has normalised them.

    Each batch gets the numbers, as the fields erase_box and erase_key. The step "erase" covers
    pixels in the workers instead. docs/steps.md says how.
    """

    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How often a row is covered at all."""

    area: tuple[Area, Area] = (0.02, 0.33)
    """Smallest and largest area of a rectangle, as a fraction of the image's."""

    aspect: tuple[Aspect, Aspect] = (0.3, 3.3)
    """Smallest and largest width of a rectangle divided by its height; drawn evenly from the
    logarithm."""

    count: Annotated[int, Field(ge=1, le=ERASED_MAX)] = 1
    """How many rectangles. They may overlap."""

    fill: Literal["mean", "color", "noise"] = "mean"
    """What covers them: "mean" is 0, the mean of normalised pixels; "noise" is a normal number for
    each channel of each pixel, "color" one for each channel of a rectangle."""

    field: Annotated[str | None, Example("image")] = None
    """The images that are covered. When not set, the only field that holds images of one size."""

    @model_validator(mode="after")
    def _goes_upwards(self) -> Self:
        for name in ("area", "aspect"):
            check_range(name, getattr(self, name))
        return self


class Bucket(_Branch):
    """Batches of samples of nearly the same size, so that little of a padded batch is filling.

    All samples are sorted by size and cut into buckets; a batch has samples of one bucket. The
    sizes are found before the first batch.
    """

    field: Annotated[str, Example("tokens")]
    """The field whose size counts: for "length" and "value" a field after the steps, for "aspect"
    and "pixels" a field of the source, an image file or pixels, for "seconds" a file of sound or
    video of the source, for "bytes" any field of the source."""

    by: Literal["length", "aspect", "pixels", "bytes", "value", "seconds"] = "length"
    """What the size of a sample is: the elements of the first dimension of the field; the width of
    the upright image divided by its height; its width times its height; the bytes of the field as
    the source has it; the number in the field, above 0, such as what a "call" step of your own
    makes of a sample; or how long a sound or a video lasts, by its header, or as counted where
    that does not tell."""

    count: Annotated[int, Field(ge=2, le=BUCKETS_MAX)] = 16
    """Number of buckets, with as many samples each. More buckets leave less filling and mix
    less."""

    bounds: Annotated[
        Annotated[tuple[Annotated[float, Field(gt=0, lt=1e12)], ...], Field(min_length=1, max_length=BUCKETS_MAX - 1)]
        | None,
        Example([128, 512]),
    ] = None
    """Instead of count, the largest size in each bucket but the last, ascending: [128, 512]."""

    budget: Annotated[int, Field(ge=1, le=BUDGET_MAX)] | None = None
    """When set, a batch has as many samples as this holds of the largest size of its bucket, such
    as 65536 elements, and at most batch_size: many small ones or few large ones. Where lengths or
    pixels are counted, a batch takes memory for no more than that."""

    @model_validator(mode="after")
    def _has_one_division(self) -> Self:
        if self.budget is not None and self.by == "aspect":
            raise ValueError(
                'a budget needs sizes that add up: by = "length", "pixels", "bytes", "value", "seconds", not "aspect"; images of '
                'one aspect ratio in a budget are steps "patches" and "pack"'
            )
        if self.bounds is not None and "count" in self.model_fields_set:
            raise ValueError("name count, the number of buckets, or their bounds, and not both")
        if self.bounds is not None and any(low >= high for low, high in pairwise(self.bounds)):
            raise ValueError(f"bounds = {list(self.bounds)} must ascend")
        return self


def _without_seekable(cache: object) -> object:
    """Say what replaces a kind of earlier versions."""
    if cache == "seekable":
        raise ValueError(
            '"seekable" is no more: write "encoded", which keeps the same positions; progressive JPEGs are decoded as fast as '
            "others from shards that `batchd prepare` has written"
        )
    return cache


class BatchDraws(TypedDict):
    """Options of a ``core.plan.Plan``."""

    repeats: int
    sizes: int
    alike: int


class StreamConfig(_Branch):
    """One stream: a source, what is done to its samples, and how they become batches."""

    source: Annotated[
        SourceOptions, OneOf(SOURCE_KINDS, "type"), Mark.DEFINES, Example({"type": "folder", "path": "/data/photos"})
    ]
    """Source of the samples."""

    pipeline: Annotated[
        tuple[Annotated[StepOptions, OneOf(STEP_KINDS, "op")], ...],
        Field(max_length=STEPS_MAX),
        Mark.DERIVES,
        Example([{"op": "decode"}, {"op": "random_resized_crop", "size": [224, 224]}, {"op": "random_flip"}]),
    ] = ()
    """The steps that each sample goes through, in order. Encoded images need a "decode" step
    first."""

    batch_size: Annotated[int, Field(ge=1, le=BATCH_SIZE_MAX), Mark.DECIDES_BYTES, Mark.DERIVES, Example(256)]
    """Samples per batch, per rank. In the last round of an epoch the remaining samples are split
    between the ranks, at least one each."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63), Mark.DECIDES_BYTES, Mark.DERIVES] = 0
    """Decides the shuffle and every random step; the same seed gives the same bytes. Two streams
    with the same seed draw the same numbers for the same sample of the same epoch, so give streams
    that must differ different seeds."""

    shuffle: Annotated[Shuffle, Mark.DECIDES_BYTES, Mark.DERIVES, Example({"blocks": 64, "block_bytes": "8MiB"})] = True
    """Whether each epoch has its own order; false keeps the order of the source. A table such as
    { blocks = 64, block_bytes = "8MiB" } keeps neighbours in storage near each other. A push source
    has only the order of arrival."""

    weights: Annotated[Weights | None, Mark.DECIDES_BYTES, Mark.DERIVES, Example({"by": "class", "power": 0.5})] = None
    """How often each sample is drawn, as { by = "class", power = 0.5 } or { file = "weights.npy" };
    unset, each is once in an epoch. For shares of several sources, and for shares that change with
    the training, see the weights of a mix source."""

    repeats: Annotated[int, Field(ge=1, le=REPEATS_MAX), Mark.DECIDES_BYTES, Mark.DERIVES, Example(3)] = 1
    """Number of rows of an epoch that each sample is in, each time with random numbers of its own
    (repeated augmentation). So many consecutive batches, which different ranks read, have the same
    samples in the same rows; an epoch has as many times more batches."""

    bucket: Annotated[Bucket | None, Mark.ORDERS, Mark.DERIVES, Example({"field": "tokens", "count": 16})] = None
    """When set, a batch has samples of nearly the same size, such as
    { field = "tokens", count = 16 }, and batches of all sizes are mixed. With shuffle = false, the
    smallest samples are first."""

    balance: Annotated[Annotated[int, Field(ge=2, le=BALANCE_MAX)] | None, Mark.ORDERS, Mark.DERIVES, Example(8)] = None
    """Number of ranks that get batches of nearly the same cost in each step, so that no rank waits
    for another. With a bucket, so many consecutive steps are of one bucket; with "pack", their rows
    cost attention about the same; where batches draw a size for their images, so many steps draw
    the same. Every world size that divides the number is served as well."""

    mix: Annotated[Mix | None, Mark.DECIDES_BYTES, Mark.DERIVES, Example({"mixup": 0.8, "cutmix": 1.0})] = None
    """When set, rows of a batch are mixed in pairs (mixup, cutmix), such as
    { mixup = 0.8, cutmix = 1.0 }: batches have the numbers, and the loader applies them."""

    erase: Annotated[
        Erasing | None, Mark.DECIDES_BYTES, Mark.DERIVES, Example({"probability": 0.25, "fill": "noise"})
    ] = None
    """When set, random rectangles of rows are covered, such as
    { probability = 0.25, fill = "noise" }: batches have the numbers, and the loader applies them
    after it has normalised the images."""

    drop_last: Annotated[bool, Mark.DECIDES_BYTES, Mark.DERIVES] = False
    """Whether an epoch ends with its last whole batch; false keeps the remaining samples as a
    smaller last batch. With W ranks, true also leaves out the last batches that do not make one for
    each rank, up to W - 1 whole ones; false has the ranks share them."""

    verify: Annotated[bool, Mark.DEFINES] = False
    """Whether every row has a CRC-32 that the worker makes and the trainer compares; the client
    asks again for a batch that does not match, and counts it. For untrusted networks and memory;
    costs both sides some 0.2 ms for each MB."""

    digest: Annotated[bool, Mark.DERIVES] = False
    """Whether the daemon keeps a digest of the rows that it delivered in each epoch, for
    `batchd card` and `batchd diff`. It is made of the checksums of `verify`, and includes that."""

    read: Annotated[tuple[Directory, ...] | None, Example(["/srv/lexicon"])] = None
    """Files and folders that your own functions in this stream read, beside python_path and the
    files of the source; [] for none. Workers can then be enclosed, see sandbox in [daemon]."""

    network: bool = False
    """Whether your own functions in this stream reach servers. It counts with read."""

    journal: Annotated[Memory | None, Example("64MiB")] = None
    """With a push source: the size of a file in which the daemon notes the content of each batch
    that it delivers: of each row the number of its push, its small fields, such as a label or a
    key, and its checksum. `batchd replay` and `batchd seen` read it. Where it is full, the oldest
    batches make room. The file is in cache_dir of [daemon], on a local disk. Includes `verify`."""

    on_error: Annotated[OnError, Mark.DECIDES_BYTES, Mark.DERIVES] = "substitute"
    """Replacement for a sample that cannot be read or decoded: "substitute" takes another sample
    (always the same one), "mask" zeros (a padded field its fill) with valid = false, "fail" stops
    the stream. With a push source "mask" or "fail"."""

    max_bad_fraction: Annotated[float, Field(ge=0, le=1), Mark.DERIVES] = 0.05
    """The stream stops above this share of bad samples among those read."""

    storage_away_s: Annotated[float, Field(ge=0, le=30 * 86_400), Mark.DEFINES] = 3600.0
    """Seconds for which the stream waits if the folder, mount or server of its source is away, with
    every sample that is tried. When it is back, the stream goes on at the same batches; after that
    time it stops. 0 does not wait: such samples are bad ones."""

    window: Annotated[Annotated[int, Field(ge=1, le=64)] | Literal["auto"], Mark.DERIVES] = "auto"
    """Number of batches prepared ahead of each trainer. "auto": 16 MiB of them, at least 3,
    and more if that takes more to keep all workers busy; no more than 64, or than fit into the ring
    beside the one that is read."""

    lag: Annotated[Lag, Mark.DERIVES] = "independent"
    """Whether a trainer may run ahead of others that read the same batches: "independent" allows
    it; "lockstep" makes it wait, so that each batch is decoded once, also for a trainer that starts
    later, until that is near. With a push source always "lockstep"."""

    max_skew: Annotated[int, Field(ge=1, le=1024), Mark.DERIVES] = 8
    """With lag = "lockstep": how many batches the first trainer may be ahead of the last."""

    memory: Annotated[Memory | None, Mark.DERIVES, Example("1GiB")] = None
    """Part of the daemon's memory for this stream's ring, in bytes or as "1GiB". When not set,
    streams share the remaining memory equally, and a ring keeps for a trainer that is behind the
    others what it reads within the next 128 MiB, or 8 batches; when set, as much as fits."""

    report_memory: Memory = 64 * MEBIBYTE
    """Most memory for what trainers report of their batches (stream.report, loader.report), in
    bytes or as "64MiB": for `batchd blame`, the page and the metrics. A report takes 400 bytes and
    4 for each value; the last 100,000 are kept, and none before the first."""

    decode_at: Literal["anywhere", "here"] = "anywhere"
    """Place where the samples are decoded, if there may be worker hosts: "here" keeps them on this
    host, for files that no other machine has. Live streams always stay here."""

    cache: Annotated[CacheKind, BeforeValidator(_without_seekable), Mark.DEFINES] = "auto"
    """Part of a sample that is kept in memory after its first read, for all epochs. "auto": with no
    budget "points", if a crop follows "decode" directly, or "media", if sound or video is decoded;
    with cache_memory "pixels", if images are decoded; with a budget and a source on a server
    "encoded"; else "off". It refuses no key of a cache; `batchd check` names those that it does not
    use. "points": where in JPEGs decoding can begin, so that crops of them take less time from the
    second epoch on; some 4 kB an image, and half a decode more in the first epoch. "pixels": each
    image as decoded whole, 3 bytes a pixel, so that each is decoded once, and points of those that
    have no room. "encoded": the source's values, such as the bytes of an image file, so that slow
    storage is read once, and the points of its JPEGs. "media": where each frame of a video is, 20
    bytes each, and how long a sound is whose file does not tell (MP3 without a table, AAC,
    Matroska), and where packets of MP3 and AAC are, so that one worker finds it once, and all
    others fetch what a clip or a segment needs. None of these changes a byte of a batch. "decoded"
    does: it keeps the result of the steps before the first random one, as pixels of 8 bits, or as
    tokens; `batchd check --explain` names these steps. In memory, it keeps tokens from the moment
    when the daemon makes them to measure samples for rows or buckets. Streams with the same source
    and the same cache_memory share one cache (of "decoded", if these steps are the same). Later
    changes on the storage take effect when the daemon is restarted, or a reload finds another
    source; with cache_dir, when the file of the cache is removed. Points are not used for a file
    that has changed."""

    cache_memory: Annotated[Memory | None, Mark.OF_CACHE, Example("160GiB")] = None
    """With a cache in memory: its maximum size, in bytes or as "200GiB", in addition to [daemon]
    memory, which is for rings. If it is less than all samples need, the cache keeps those that were
    read first, and evicts none. For points, the default is 1/16 of the memory of the machine."""

    cache_dir: Annotated[Directory | None, Mark.OF_CACHE, Example("/var/cache/batchd")] = None
    """Folder of the cache's file, which outlives the daemon. The folder must exist, preferably on a
    local disk. When not set, the cache is in memory, and ends with the daemon."""

    cache_size: Annotated[Memory | None, Mark.OF_CACHE, Example("160GiB")] = None
    """With cache_dir: the maximum size of the cache's file, in bytes or as "200GiB"; for a cache in
    memory use cache_memory. For points, the default is 64 KiB for each sample."""

    cache_short_side: Annotated[Annotated[int, Field(ge=1, le=SHORT_SIDE_MAX)] | None, Mark.OF_CACHE, Example(256)] = (
        None
    )
    """With cache = "decoded": the shorter side of the kept images, in pixels, like a resize to
    shorter_side after "decode". Images of full size take many times the memory of their files."""

    @property
    def why_here(self) -> str:
        """Why no worker host may fill the stream; "" if some may."""
        if self.source.is_live:
            return f'samples of type "{self.source.type}" arrive on this host'
        return f'decode_at = "{self.decode_at}"' if self.decode_at == "here" else ""

    @property
    def is_shuffled(self) -> bool:
        """True if each epoch has its own order; live samples have no order to shuffle."""
        return bool(self.shuffle) and not self.source.is_live

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        self.checked().done()
        return self

    def checked(self, *, is_partial: bool = False) -> Checks:
        """The problems between the options; ``is_partial``: those that are wrong are not set."""
        checks = Checks(is_partial=is_partial)
        rules = self._check_source, self._check_pack, self._check_buckets, self._check_push, self._check_cache
        for rule in rules:
            with checks.at():
                rule(checks)
        return checks

    def _check_source(self, checks: Checks) -> None:
        """Refuse options that do not fit the source."""
        with checks.at("shuffle"):
            if "shuffle" in self.model_fields_set and self.shuffle and self.source.is_live:
                given = self.shuffle.text if isinstance(self.shuffle, BlockShuffle) else "true"
                raise ValueError(
                    f'samples of type "{self.source.type}" come in their own order, so shuffle = {given} cannot be done; '
                    "leave it out, and have them made in random order"
                )
        with checks.at("weights"):
            grouping = self._grouping
            if self.weights is not None and (grouping or self.source.is_live):
                why = f"{grouping} needs each sample once" if grouping else "live samples come in their own order"
                instead = " (a mix of sources can have fixed weights)" if grouping else ""
                raise ValueError(f"{why}, so none can be drawn by weight; leave weights out{instead}")
        with checks.at():
            if isinstance(self.source, MixSource) and self.source.changes:
                self._check_changing_mix(checks)
        with checks.at("repeats"):
            if self.repeats > 1 and self.source.is_live:
                raise ValueError(
                    f'samples of type "{self.source.type}" come once, each to one row, so none can be in '
                    f"{self.repeats}; leave repeats out"
                )
        for place, step in enumerate(self.pipeline):
            if isinstance(step, JoinStep) and self.source.is_live:
                text = f'samples of type "{self.source.type}" come once, each to one row, so no other can join it'
                checks.say(f'"{step.op}" cannot be done: {text}', "pipeline", place)
            if isinstance(step, JoinStep) and step.near is not None and self.buckets is not None:
                text = f"{self._grouping} gives batches rows by size, so a row has no others before it; leave near out"
                checks.say(text, "pipeline", place, "near")
        with checks.at("digest"):
            if self.digest and self.source.is_live:
                raise ValueError(f'samples of type "{self.source.type}" have no epochs, so there is nothing to digest')
        with checks.at("journal"):
            if self.journal is not None and not isinstance(self.source, PushSource):
                raise ValueError(f'samples of type "{self.source.type}" need no journal: only those of "push" have one')

    @property
    def draws(self) -> BatchDraws:
        """What a ``Plan`` has to know to draw for batches, beside the seed."""
        return {"repeats": self.repeats, "sizes": drawn_sizes(self.pipeline), "alike": self.alike}

    @property
    def alike(self) -> int:
        """How many batches in a row draw the same size for their images."""
        return self.balance or 1 if drawn_sizes(self.pipeline) > 1 else 1

    @property
    def buckets(self) -> Bucket | None:
        """How the samples of a batch are chosen by size: ``bucket``, or what a step needs."""
        crop = bucket_crop_of(self.pipeline)
        if crop is None or pack_of(self.pipeline) is not None:
            return self.bucket
        return Bucket(field=crop.field, by="aspect")

    @property
    def orders_by_size(self) -> bool:
        """Whether workers measure samples before the first batch."""
        return bool(self._grouping)

    @property
    def _grouping(self) -> str:
        """The key or step that orders samples by their sizes; "" for none."""
        if self.bucket is not None:
            return "bucket"
        crop, pack = bucket_crop_of(self.pipeline), pack_of(self.pipeline)
        return f'"{step.op}"' if (step := crop or pack) is not None else ""

    def _check_changing_mix(self, checks: Checks) -> None:
        """Refuse what puts samples of a changing mix into another order."""
        text = "has the order of its own rows, as its weights change with them"
        if self.weights is not None:
            checks.say(f"a mix whose weights change {text}; leave weights of the stream out", "weights")
        if isinstance(self.shuffle, BlockShuffle):
            checks.say(f"a mix whose weights change {text}; use shuffle = true", "shuffle")
        advice = "give the mix fixed weights, and each stage of the training a stream of its own"
        if self.bucket is not None or bucket_crop_of(self.pipeline) is not None:
            text = f"{text}, and {self._grouping} orders samples by their sizes"
            checks.say(f"a mix whose weights change {text}; {advice}", "source", "weights")
        elif self.balance is not None and pack_of(self.pipeline) is not None:
            text = f"{text}, and balance orders rows by their cost; leave balance out, or {advice}"
            checks.say(f"a mix whose weights change {text}", "balance")

    def _check_pack(self, checks: Checks) -> None:
        """Refuse to pack samples that are not there yet, and to mask documents of a row."""
        pack = pack_of(self.pipeline)
        if pack is None:
            return
        place = self.pipeline.index(pack)
        if self.source.is_live:
            text = f'samples of type "{self.source.type}" are not there yet when the rows of an epoch are planned'
            checks.say(f'"pack" needs the lengths of all samples, and {text}', "pipeline", place)
        if isinstance(self.shuffle, BlockShuffle):
            text = (
                "puts samples together by their lengths, so neighbours in storage are in no order; use shuffle = true"
            )
            checks.say(f'"pack" {text}', "shuffle")
        if self.on_error == "mask":
            text = 'a bad sample leaves its room in the row empty: use "substitute" (its usual meaning does not count) or "fail"'
            checks.say(f'on_error = "mask" cannot be done with "pack": {text}', "on_error")

    def _check_buckets(self, checks: Checks) -> None:
        """Refuse buckets of samples that are not there yet, or that share rows or blocks."""
        draws_sizes = drawn_sizes(self.pipeline) > 1
        for key in keys_marked(Mark.ORDERS, StreamConfig):
            if key == "balance" and draws_sizes and not self._grouping:
                continue
            with checks.at(key):
                if getattr(self, key) is not None and self.source.is_live:
                    text = "are not there yet when the batches of an epoch are planned"
                    raise ValueError(f'samples of type "{self.source.type}" {text}; leave {key} out')
            with checks.at("shuffle"):
                if getattr(self, key) is not None and isinstance(self.shuffle, BlockShuffle):
                    text = "puts samples together by their sizes, so neighbours in storage are in no order"
                    raise ValueError(f"{key} {text}; use shuffle = true")
        if self.bucket is not None and pack_of(self.pipeline) is not None:
            text = 'rows of "pack" are full whatever the lengths in them are, so they need no buckets'
            checks.say(f"{text}; leave bucket out", "bucket")
        if self.balance is not None and not self._grouping and not draws_sizes:
            text = (
                'balance needs the costs of samples: set bucket, or end the pipeline with "pack"; '
                'or give "resize" or "letterbox" several sizes'
            )
            checks.say(text, "balance")
        self._check_bucket_crops(checks)
        self._check_drawn_sizes(checks)

    def _check_drawn_sizes(self, checks: Checks) -> None:
        """Refuse sizes that are not drawn together, or that something else decides."""
        steps = [
            (place, step) for place, step in enumerate(self.pipeline) if isinstance(step, SizedStep) and step.drawn
        ]
        for place, step in steps:
            others = [other for _place, other in steps if other is not step]
            is_apart = any(len(other.drawn) != len(step.drawn) for other in others)
            if is_apart or any(other.sizes != step.sizes for other in others if other.sizes and step.sizes):
                text = f'"{step.op}" draws one of {len(step.drawn)} sizes, and another step one of others; a batch draws once'
                checks.say(f"{text}: give both the same sizes", "pipeline", place)
            elif bucket_crop_of(self.pipeline) is not None:
                text = f'"crop_to_bucket" decides the size of a batch, so "{step.op}" can draw none; give it one size'
                checks.say(text, "pipeline", place)
            elif step.sizes and self.bucket is not None and self.bucket.budget is not None:
                text = f'"{step.op}" draws the size of the images of a batch, and a budget the room of its rows'
                checks.say(f"{text}; leave budget out", "bucket", "budget")

    def _check_bucket_crops(self, checks: Checks) -> None:
        """Refuse a crop to the size of a bucket where something else decides the batches."""
        crops = [(place, step) for place, step in enumerate(self.pipeline) if isinstance(step, CropToBucket)]
        if not crops:
            return
        first = crops[0][1]
        why = ""
        if self.source.is_live:
            why = f'samples of type "{self.source.type}" are not there yet when the batches of an epoch are planned'
        elif isinstance(self.shuffle, BlockShuffle):
            why = "so neighbours in storage are in no order; use shuffle = true"
        elif self.bucket is not None:
            why = "so leave bucket out"
        if why:
            text = '"crop_to_bucket" puts images of alike proportions together'
            checks.say(f"{text}{', ' if why.startswith('so ') else ', and '}{why}", "pipeline", crops[0][0])
        for place, step in crops[1:]:
            if step.bucket_sizes != first.bucket_sizes:
                text = (
                    f"all images of a batch have the size of its bucket, and that of {first.field!r} is one of others"
                )
                checks.say(f"{text}; give both steps the same sizes", "pipeline", place)

    def _check_cache(self, checks: Checks) -> None:
        """Refuse a cache of a live source or without a budget; "auto" refuses nothing."""
        if self.cache == "auto":  # see ``unused_by_cache``
            return
        if self.cache not in {"off", "decoded"} and self.cache_short_side is not None:
            text = f'cache_short_side counts only with cache = "decoded": of "{self.cache}" images keep their size'
            checks.say(text, "cache_short_side")
        if self.cache == "off":
            kinds = '"points", "pixels", "media", "encoded" or "decoded"'
            for key in keys_marked(Mark.OF_CACHE, StreamConfig):
                if getattr(self, key) is not None:
                    checks.say(f"{key} counts only with a cache: cache = {kinds}", key)
        elif self.source.is_live:
            text = (
                f'samples of type "{self.source.type}" come once, so there is nothing to keep of them; leave cache out'
            )
            checks.say(text, "cache")
        elif self.cache_dir is None:
            self._check_budget(checks, "cache_memory", "cache_size", "cache_size counts only with cache_dir")
        else:
            self._check_budget(checks, "cache_size", "cache_memory", "the cache is a file in cache_dir: say cache_size")

    def _check_budget(self, checks: Checks, needed: str, other: str, why_not: str) -> None:
        if getattr(self, other) is not None:
            checks.say(f"{why_not}, not {other}" if other == "cache_memory" else why_not, other)
        if getattr(self, needed) is None and self.cache not in cache_split.KINDS_OF_FACTS:
            checks.say(f'cache = "{self.cache}" needs {needed}, the most that it may take, such as "8GiB"', "cache")

    @property
    def cache_kind(self) -> CacheKind:
        """The kind of the cache, where "auto" is decided."""
        return self._auto_cache()[0] if self.cache == "auto" else self.cache

    @property
    def cache_reason(self) -> str:
        """Why "auto" is this kind of cache; "" if the configuration names the kind."""
        return self._auto_cache()[1] if self.cache == "auto" else ""

    def _auto_cache(self) -> tuple[CacheKind, str]:
        """What ``cache = "auto"`` is, and why."""
        if self.source.is_live:
            return "off", f'samples of type "{self.source.type}" come once, so there is nothing to keep of them'
        has_budget = self.cache_bytes is not None
        declared = [one for _key, one in sources_in(self.source) if isinstance(one, DeclaredOptions)]
        lists = {column.name for one in declared for column in one.columns if column.kind == "images"}
        if has_budget and any(source.reads_urls for _key, source in sources_in(self.source)):
            return "encoded", "the source is on a server, and there is a budget"
        files, cropped = (
            found.keys() - lists
            for found in (cache_split.decoded_files(self.pipeline), cache_split.cropped_files(self.pipeline))
        )
        if has_budget and files and self.cache_dir is None:
            return "pixels", "images are decoded from files, and there is cache_memory"
        if not cropped and cache_split.media_fields(self.pipeline):
            return "media", "sound or video is decoded, and some files have to be read through to know them"
        if not cropped and lists:
            return (
                "off",
                f"the images of {min(lists)!r} are a list, and access points and pixels are kept of single ones",
            )
        if not cropped:
            return "off", "no crop follows decode directly" if files else "no image is decoded from a file"
        if not cache_split.has_crop_decoder():
            return "off", "the extension that decodes crops of JPEGs is not built"
        more = "a disk is rarely faster than a decoder" if has_budget else "there is no budget for more"
        return "points", f"a crop follows decode, and {more}"

    @property
    def has_checksums(self) -> bool:
        """Whether workers write a checksum of each row."""
        return self.verify or self.digest or self.journal is not None

    @property
    def unused_by_cache(self) -> str:
        """Keys without effect under cache = "auto", and which cache would use them; "" if none."""
        given = [key for key in keys_marked(Mark.OF_CACHE, StreamConfig) if getattr(self, key) is not None]
        if self.cache != "auto" or not given:
            return ""
        if self.source.is_live:
            return f"{', '.join(given)}: {self.cache_reason}"
        found, other = [], "cache_size" if self.cache_dir is None else "cache_memory"
        if other in given:
            is_file = self.cache_dir is not None
            found.append(
                f"{other}: {'the size of a file in cache_dir is cache_size' if is_file else 'there is no cache_dir'}"
            )
        if "cache_short_side" in given:
            found.append('cache_short_side: it counts only with cache = "decoded"')
        kept = [key for key in given if key not in {other, "cache_short_side"}]
        wanted = 'cache = "encoded" keeps what the source gives'
        wanted += ', and "pixels" images as decoded' if cache_split.decoded_files(self.pipeline) else ""
        if kept and self.cache_kind == "off":
            found.append(f"{', '.join(kept)}: {self.cache_reason}, so nothing is kept; {wanted}")
        elif self.cache_kind == "points" and "cache_size" in kept:
            found.append(f"cache_size: only access points are kept, which need little: {self.cache_reason}; {wanted}")
        return "; ".join(found)

    @property
    def cache_bytes(self) -> int | None:
        """Budget of the cache in bytes, in memory or on disk; None: its default."""
        return self.cache_memory if self.cache_dir is None else self.cache_size

    def _check_push(self, checks: Checks) -> None:
        """Set the defaults of a push stream, and refuse what needs a sample twice."""
        if not isinstance(self.source, PushSource):
            if "max_skew" in self.model_fields_set and self.lag != "lockstep":
                checks.say('max_skew counts only with lag = "lockstep"', "max_skew")
            return
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
        if self.source.capacity < self.batch_size:
            checks.say(
                f"a batch of {self.batch_size} samples never comes together in a mailbox of {self.source.capacity}: "
                "capacity must be batch_size or more, and is better several times that",
                "batch_size",
            )


class Config(_Branch):
    """The whole configuration of one daemon."""

    daemon: DaemonConfig = DaemonConfig()
    """Settings of the whole daemon."""

    streams: Annotated[dict[StreamName, StreamConfig], Field(min_length=1, max_length=STREAMS_MAX)]
    """The streams, by name: letters, digits, "_", "." and "-", at most 64 characters."""
