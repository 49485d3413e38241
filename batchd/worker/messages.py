"""Messages between daemon, workers and the fork server. Numbers are never reused.

They travel over private socket pairs:

    daemon                                        worker
       |  <-----------------------------------------  |   Ready
       |  -- ServeStream (+ fd: the source's index) -> |   once per stream, before its first order
       |        (live: + fd of the mailbox, to read)   |
       |        (with a cache: + its fds, to write)    |
       |  <-----------------------------------------  |   StreamMeasured
       |  -- UseSlot (+ fd, read and write) --------->  |   once per slot, before its first order
       |  -- FillChunks ----------------------------->  |   two chunks at a time, or many small ones
       |  <-----------------------------------------  |   ChunksFilled: of one message or several
       |  -- Quarantine ----------------------------->  |
       |  -- ForgetSlots, ForgetStream, UseStorage ---> |   after a reload of the configuration
       |                 end of file, either way: the other side is gone

    batchd prepare, or who measures samples       worker
       |  -- PrepareStream, MeasureStream (+ fds: the source's index, a cache)
       |  -- WriteShard, MeasureSamples ------------->  |   one at a time
       |  <-----------------------------------------  |   SampleBad: for each bad sample
       |  <-----------------------------------------  |   ShardWritten, SamplesMeasured

    daemon                                   fork server              worker
       |  -- Fork (+ fds: channel, note) -------> |                       .
       |                                          |  -- fork(2) --------> |
       |  <------------ Forked (+ fd: a pidfd) -- |                       |  Ready, on its channel
       |                                          |                       x  pidfd: it has ended
       |  -- Reap ------------------------------> |
       |         end of file: the daemon is gone, so the fork server ends with all of its workers

Next to the channel each worker owns one small note in shared memory (its fd is inherited): the
order it works on, the current row, and the sample that it decodes for the row (another sample than
the row's own if that one is bad). The worker is its only writer. The daemon reads it when a worker
is stuck or dead, to learn which sample it was decoding.

    0                8               16              24
    +----------------+---------------+---------------+
    | order          | row + 1       | sample        |      row + 1 = 0: between samples
    +----------------+---------------+---------------+      row + 1 >= MANY_ROWS: many at once
    64
    +-------------------------------------------------+
    | what decoders print while they decode a file    |      zeros: nothing
    +-------------------------------------------------+
"""

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from batchd.core.work import Work
from batchd.runtime.sandbox import Access
from batchd_wire.codec import Message, Vocabulary, message

NOTE = Struct("<QQQ")
NOTE_BYTES = 4096
NOTE_TEXT_AT = 64
MANY_ROWS = 1 << 32
"""Added to ``row + 1`` while several rows are made at once: none of their samples is suspected."""
assert NOTE.size == 24  # noqa: PLR2004  as drawn above

OUT_OF_MEMORY_STATUS = 12
"""The exit status of a worker that found no memory for a sample: ENOMEM."""


@message(30)
class Ready(Message):
    """The worker has finished its imports. ``decoders``: their names and versions."""

    decoders: str


@message(33)
class Enclose(Message):
    """Give up all but what rules allow, for good: comes before the first stream, if at all.

    With the descriptor of ``sandbox.rules_of``.
    """

    has_network: bool


class SampleRecipe(NamedTuple):
    """How the samples of a stream are made: what decides their bytes, beside the source's index.

    ``source`` and ``steps`` are the validated configuration as plain data; ``columns``: the columns
    of the source's samples, as (name, type as in the configuration). The first ``cut`` steps make
    the content of a cache of decoded samples, 0 for any other. ``record_bytes_max``: a longer
    record of the source is a bad sample. ``cropped``: the fields for whose files a cache keeps
    access points, each with its maximum size in bytes. ``files``: the files that steps read, as
    (path, SHA-256 of the content that the daemon read). ``modules``: the modules of users'
    functions, as (name, SHA-256); ``python_path``: the folders that are searched for them first.
    ``access`` decides no byte: one, of what their makers have to reach; none if nobody knows that.
    """

    seed: int
    source: dict[str, object]
    columns: list[tuple[str, str]]
    steps: list[dict[str, object]]
    cut: int
    record_bytes_max: int
    cropped: list[tuple[str, int]]
    files: list[tuple[str, str]]
    python_path: list[str]
    modules: list[tuple[str, str]]
    access: list[Access]

    @property
    def needed(self) -> Access | None:
        """``access``, if it is known."""
        return Access(*self.access[0]) if self.access else None


@message(31)
class ServeStream(Message):
    """All facts about a stream that a worker needs. Travels with the source's index, read-only.

    A live stream has a second descriptor: the mailbox for its samples, read-only. If ``cache`` is
    not "off", two more follow, to read and write: the cache and its claims; or, on disk, its index,
    its notes, its file and, unless it cannot be opened again, that once more, to append. ``cache``
    names its content: "points" of JPEGs, what is known of "media", "encoded" values of the source,
    their "pixels", or "decoded", the result of the first steps.

    ``pack``: the step of a packed stream, as plain data, else empty; then ``samples`` are packs,
    and the index has them, too. ``layout`` is a ``SlotLayout``. ``storage``: limits for file
    servers, as (ms without data, number of retries, ms per sample). ``tells_rows``: each row is
    followed by a ``RowMade``; only ``batchd replay`` asks for it. ``as_of_ns``: when the scan
    began, see ``Storage``. ``waits_for_storage``: see ``ChunksFilled.away``. ``mixing``
    and ``erasing``: a ``core.mixing.RowMixing`` and a ``core.erasing.RowErasing`` as plain data;
    None without. ``repeats``, ``sizes``, ``alike``: as of ``Plan``. ``siblings``: as of
    ``StreamSpec``. ``reader``: the user, his group and all his groups, whose rights decide which
    files are read; none: the worker's own.
    """

    stream: int
    name: str
    recipe: SampleRecipe
    samples: int
    batch_size: int
    shuffle: bool
    on_error: str
    storage: tuple[int, int, int]
    layout: object
    cache: str
    pack: dict[str, object]
    tells_rows: bool = False
    as_of_ns: int = 0
    waits_for_storage: bool = False
    mixing: object = None
    erasing: object = None
    repeats: int = 1
    sizes: int = 1
    alike: int = 1
    siblings: str = ""
    reader: list[int] | None = None


@message(32)
class UseSlot(Message):
    """Travels with one descriptor: the memory of ``slot`` for writing."""

    slot: int
    slot_bytes: int


class Chunk(NamedTuple):
    """Fill the rows of ``runs`` (``core.rows``) of position (``epoch``, ``step``) into ``slot``.

    ``places``: for a live stream, the place in the mailbox of each row's sample; else empty.
    ``share``, of a shuffle of blocks, and of siblings: (place of the worker, number of workers that
    divide the rows); no worker, if they are not divided.
    """

    order: int
    slot: int
    epoch: int
    step: int
    runs: list[tuple[int, int]]
    places: list[int]
    share: tuple[int, int] = (0, 0)


@message(102)
class FillChunks(Message):
    """Fill ``chunks`` of ``stream``, in this order.

    ``is_packed``: write the rows to the first rows of the slot, consecutively: a worker host's
    memory has only these rows.
    """

    stream: int
    chunks: list[Chunk]
    is_packed: bool


@message(103)
class ChunksFilled(Message):
    """The rows of ``orders``, of one stream, are in their slots. ``work``: see ``Work``.

    ``bad``: (sample index, path, reason) of bad samples. ``hopeless``, unless empty: the reason why
    the stream's policy left a row without a sample. ``away``, unless empty: why no row of these
    orders counts, as the storage of the source is away; only if the stream ``waits_for_storage``.
    """

    orders: list[int]
    work: Work
    bad: list[tuple[int, str, str]]
    hopeless: str
    away: str = ""


@message(110)
class RowMade(Message):
    """How a row of ``order`` was made: of ``sample``, called ``name``; ``planned`` is the plan's.

    ``is_good``: false if the stream's policy left it without a sample. ``tried``: the samples that
    were bad before it, as (index, path, reason); the first one is the planned one.
    ``modified_ns``: when the file of the sample was last written, in ns since 1970; 0 if not known.
    ``draws``: of each random step, in order, by the names of its results. A packed row has no
    sample of its own: ``planned`` and ``sample`` are 0.
    """

    order: int
    row: int
    planned: int
    sample: int
    name: str
    is_good: bool
    tried: list[tuple[int, str, str]]
    modified_ns: int
    draws: list[dict[str, object]]


@message(111)
class DocumentMade(Message):
    """How a document of a packed ``row`` of ``order`` was made; it comes before its ``RowMade``.

    ``first``: its first element in ``sample``; ``offset`` and ``length``: its elements in the row.
    ``reason``: why the sample is bad; then it has no element in the row. The rest as ``RowMade``.
    """

    order: int
    row: int
    sample: int
    name: str
    first: int
    offset: int
    length: int
    reason: str
    modified_ns: int
    draws: list[dict[str, object]]


@message(44)
class PrepareStream(Message):
    """A stream whose samples are written into shards. Travels with the source's index, read-only.

    ``storage`` and ``as_of_ns`` as in ``ServeStream``. ``folder``: where the shards are written.
    Pixels are encoded as ``image_format`` with ``quality``. ``short_groups``: frames of the longest
    group of pictures of videos; 0 leaves them as they are.
    """

    recipe: SampleRecipe
    storage: tuple[int, int, int]
    as_of_ns: int
    folder: str
    image_format: str
    quality: int
    short_groups: int = 0


@message(45)
class WriteShard(Message):
    """Write samples ``first`` to ``first + count`` into the file ``name``."""

    order: int
    name: str
    first: int
    count: int


@message(46)
class SampleBad(Message):
    """A sample of the current shard, or of those that are measured, is bad."""

    sample: int
    path: str
    reason: str


@message(47)
class ShardWritten(Message):
    """The current shard is written, as NAME.unfinished; unless empty, ``hopeless`` says why not."""

    shard_bytes: int
    hopeless: str


@message(114)
class MeasureStream(Message):
    """A stream whose samples are measured. Travels with the source's index, read-only.

    ``storage`` and ``as_of_ns`` as in ``ServeStream``. ``by``: as ``config.tree.Bucket`` has it;
    "aspect", "value" and "seconds" times ``ASPECT_UNIT``. Without it, samples are made as rows of a
    batch: 1 for a good one; with "steps" after each step. ``epoch``: that of random numbers. With a
    ``cache``, whose descriptors follow that of the index, it keeps what is made.
    """

    recipe: SampleRecipe
    storage: tuple[int, int, int]
    as_of_ns: int
    field: str
    by: str
    epoch: int = 0
    cache: str = "off"


@message(115)
class MeasureSamples(Message):
    """Measure the samples of ``runs`` (``core.rows``), at most ``SAMPLES_AT_ONCE``."""

    order: int
    runs: list[tuple[int, int]]


@message(116)
class SamplesMeasured(Message):
    """The sizes of the ordered samples; 0: it is bad, or has no element.

    Unless empty, ``hopeless`` says why none can be measured. ``after``, by "steps": the values of
    the first good sample in the source and after each step, as texts; only those that differ from
    the texts before.
    """

    sizes: list[int]
    hopeless: str
    after: list[dict[str, str]]


SAMPLES_AT_ONCE = 256
"""Of ``MeasureSamples``: they are read ahead together."""
ASPECT_UNIT = 1_000_000
"""The size of a square image by aspect, and of the number 1 by value."""
AFTER_STEPS = {"length", "value"}
"""The sizes that a field has after the steps; the others are those of a field of the source."""


@message(49)
class StreamMeasured(Message):
    """The names of the timed ``parts`` of ``stream``, in order."""

    stream: int
    parts: list[str]


@message(36)
class Quarantine(Message):
    """Further samples that killed workers: treat them as bad, without decoding them."""

    stream: int
    samples: list[int]


@message(37)
class ForgetStream(Message):
    """No further order will name the stream: close its files."""

    stream: int


@message(38)
class ForgetSlots(Message):
    """No order will name any of ``slots`` any more: unmap them."""

    slots: list[int]


@message(39)
class UseStorage(Message):
    """Use these limits for file servers from now on, in every stream; see ``ServeStream``."""

    storage: tuple[int, int, int]


REASON_BYTES_MAX = 200
PATH_BYTES_MAX = 250
CHUNK_ROWS_MAX = 256
CHUNKS_AT_ONCE = 32
"""Chunks in one ``FillChunks``, so that it fits into one message."""
QUARANTINED_AT_ONCE = 1_024
"""Samples in one ``Quarantine``; a stream that has more gets several."""
LONG_REASON_BYTES_MAX = 1500
LONG_REASONS_MAX = 4
"""Number of bad samples of a chunk that may have a longer reason, such as a traceback."""
SLOW_LISTED_MAX = 4
"""Number of slow samples of a chunk that are listed."""
HOPELESS_BYTES_MAX = 2000
"""Small enough for a chunk of bad samples alone to fit into one message."""


def quarantines(stream: int, samples: Sequence[int]) -> Iterator[Quarantine]:
    """The messages that name all ``samples`` of a stream."""
    for first in range(0, len(samples), QUARANTINED_AT_ONCE):
        yield Quarantine(stream, list(samples[first : first + QUARANTINED_AT_ONCE]))


TO_WORKER = Vocabulary(
    *(Enclose, ServeStream, UseSlot, FillChunks, Quarantine, ForgetStream, ForgetSlots, UseStorage),
    *(PrepareStream, WriteShard, MeasureStream, MeasureSamples),
)
OPENING = ServeStream, PrepareStream, MeasureStream
"""After these a worker reads data."""
TO_DAEMON_FROM_WORKER = Vocabulary(Ready, StreamMeasured, ChunksFilled)
ORDER_DONE = ChunksFilled, ShardWritten, SamplesMeasured
"""The last report of an order."""
TO_RUNNER_FROM_WORKER = Vocabulary(Ready, StreamMeasured, RowMade, DocumentMade, SampleBad, *ORDER_DONE)


@message(57)
class Fork(Message):
    """Start ``worker``. Travels with its end of its channel, and its note, both writable."""

    worker: int


@message(58)
class Reap(Message):
    """The worker with process id ``pid`` has ended, and its pidfd was read: reap it."""

    pid: int


@message(59)
class Forked(Message):
    """``worker`` lives, as process ``pid``. Travels with its pidfd (pidfd_open(2))."""

    worker: int
    pid: int


@message(60)
class NotForked(Message):
    """``worker`` was not started, for the kernel's ``reason`` (no memory, too many processes)."""

    worker: int
    reason: str


TO_FORKSERVER = Vocabulary(Fork, Reap)
TO_DAEMON_FROM_FORKSERVER = Vocabulary(Forked, NotForked)
