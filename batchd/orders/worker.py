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
       |  <-----------------------------------------  |   ChunksFilled: all of them, or some at a time
       |  -- Quarantine ----------------------------->  |
       |  -- ForgetSlots, ForgetStream, UseStorage ---> |   after a reload of the configuration
       |                 end of file, either way: the other side is gone

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
is stuck or dead, to find out the sample.

    0                8               16              24
    +----------------+---------------+---------------+
    | order          | row + 1       | sample        |      row + 1 = 0: between samples
    +----------------+---------------+---------------+      row + 1 >= MANY_ROWS: many at once
"""

from struct import Struct
from typing import NamedTuple

from batchd_wire.codec import Message, Vocabulary, message

NOTE = Struct("<QQQ")
NOTE_BYTES = 4096
MANY_ROWS = 1 << 32
"""Added to ``row + 1`` while rows from there on are made at once: no sample of them is suspected."""
assert NOTE.size == 24  # noqa: PLR2004  as drawn above

OUT_OF_MEMORY_STATUS = 12
"""The exit status of a worker that found no memory for a sample: ENOMEM."""


@message(30)
class Ready(Message):
    """The worker has finished its imports. ``decoders``: their names and versions."""

    decoders: str


class SampleRecipe(NamedTuple):
    """How the samples of a stream are made: what decides their bytes, beside the source's index.

    ``source`` and ``steps`` are the validated configuration as plain data; ``columns``: the columns
    of the source's samples, as (name, type as in the configuration). The first ``cut`` steps make
    the content of a cache of decoded samples, 0 for any other. ``record_bytes_max``: the longest
    record of the source; a longer one is a bad sample. ``cropped``: the fields of whose files a cache
    keeps the access points, each with its most bytes. ``files``: the files that steps read, as
    (path, SHA-256 of the content that the daemon read). ``modules``: the same of the modules of the user's
    functions, by name, and ``python_path``: the folders that are searched for them first.
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


@message(31)
class ServeStream(Message):
    """Everything a worker must know of a stream. Travels with the source's index, read-only.

    For a live stream there is a second descriptor: the mailbox for its samples, read-only. If
    ``cache`` is not "off" there are two more, to read and write: the cache, and its claims; or
    three, for one on disk: its index, its notes, its file. ``cache`` names its content: "points" of
    JPEGs, "encoded" or "seekable" values of the source, or, "decoded", the result of the first
    steps.

    ``layout`` is a ``SlotLayout``. ``storage``: limits for file servers, as (ms without data,
    number of retries, ms per sample).
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


@message(32)
class UseSlot(Message):
    """Travels with one descriptor: the memory of ``slot`` for writing."""

    slot: int
    slot_bytes: int


class Chunk(NamedTuple):
    """Fill the rows of ``runs`` (``orders.rows``) of position (``epoch``, ``step``) into ``slot``.

    ``places``: for a live stream, the place in the mailbox of each row's sample; else empty.
    """

    order: int
    slot: int
    epoch: int
    step: int
    runs: list[tuple[int, int]]
    places: list[int]


@message(102)
class FillChunks(Message):
    """Fill ``chunks`` of ``stream``, in this order.

    ``is_packed``: rows go to the first ones of their slot, one behind the other; a worker host's
    memory has only these rows.
    """

    stream: int
    chunks: list[Chunk]
    is_packed: bool


class Work(NamedTuple):
    """Where a worker's time went in one chunk, or in some that it filled one after the other.

    ``busy_us``: without the ``waited_us`` for servers of files. ``cpu_us`` of it on a CPU,
    ``read_cpu_us`` of that for reading; ``cpu_wait_us``: ready without a CPU, None where the kernel
    does not say. ``parts_us``: in the order of ``StreamMeasured.parts``. ``read_bytes``: of encoded
    samples. ``usual_us``: half of the worker's samples take less. ``slow_rows`` took several times
    as long, ``slow_us`` together; ``slow``: the slowest as (sample index, path, us).
    ``cache_hits`` samples were in the stream's cache, ``cache_misses`` were not.
    """

    busy_us: int
    waited_us: int
    cpu_us: int
    cpu_wait_us: int | None
    read_cpu_us: int
    parts_us: list[int]
    read_bytes: int
    usual_us: int
    slow_rows: int
    slow_us: int
    slow: list[tuple[int, str, int]]
    cache_hits: int
    cache_misses: int


NO_WORK = Work(0, 0, 0, 0, 0, [], 0, 0, 0, 0, [], 0, 0)


@message(103)
class ChunksFilled(Message):
    """The rows of ``orders``, of one stream, are in their slots. ``work``: see ``Work``.

    ``bad``: (sample index, path, reason) of bad samples. ``hopeless``, unless empty, says why a row
    could not be filled with anything that the stream's policy allows.
    """

    orders: list[int]
    work: Work
    bad: list[tuple[int, str, str]]
    hopeless: str


@message(49)
class StreamMeasured(Message):
    """The names of the timed ``parts`` of ``stream``, in order."""

    stream: int
    parts: list[str]


@message(36)
class Quarantine(Message):
    """These samples, too, killed workers: treat them as bad, without decoding them."""

    stream: int
    samples: list[int]


@message(37)
class ForgetStream(Message):
    """No further order names the stream: close its files."""

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
REPORT_AFTER_S = 0.005
"""A worker that has worked so long since its last report reports the chunks that are filled."""
QUARANTINED_AT_ONCE = 1_024
"""Samples in one ``Quarantine``; a stream that has more gets several."""
READ_PART = "read"
KEEP_PART = "cache"
BAD_PART = "bad samples"
"""Parts in ``StreamMeasured`` that are no steps: writing to a cache; all time of bad samples."""
LONG_REASON_BYTES_MAX = 1500
LONG_REASONS_MAX = 4
"""Only so many bad samples of a chunk may have a longer reason, such as a traceback."""
SLOW_LISTED_MAX = 4
"""Number of slow samples of a chunk that are listed."""
HOPELESS_BYTES_MAX = 2000
"""So that even a chunk of nothing but bad samples fits into one message."""

TO_WORKER = Vocabulary(ServeStream, UseSlot, FillChunks, Quarantine, ForgetStream, ForgetSlots, UseStorage)
TO_DAEMON_FROM_WORKER = Vocabulary(Ready, StreamMeasured, ChunksFilled)


@message(57)
class Fork(Message):
    """Start ``worker``. Travels with its end of its channel, and its note, both writable."""

    worker: int


@message(58)
class Reap(Message):
    """The worker with process id ``pid`` has ended, and all is known of it: let it go."""

    pid: int


@message(59)
class Forked(Message):
    """``worker`` lives, as process ``pid``. Travels with its pidfd (pidfd_open(2))."""

    worker: int
    pid: int


@message(60)
class NotForked(Message):
    """``worker`` was not started, for the kernel's ``reason``: no memory, or too many processes."""

    worker: int
    reason: str


TO_FORKSERVER = Vocabulary(Fork, Reap)
TO_DAEMON_FROM_FORKSERVER = Vocabulary(Forked, NotForked)
