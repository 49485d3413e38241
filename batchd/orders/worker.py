"""Messages between daemon, workers and the fork server. Numbers are never reused.

They travel over private socket pairs:

    daemon                                        worker
       |  <-----------------------------------------  |   Ready
       |  -- ServeStream (+ fd: the source's index) -> |   once per stream, before its first order
       |        (live: + fd of the mailbox, to read)   |
       |        (with a cache: + its fds, to write)    |
       |  <-----------------------------------------  |   StreamMeasured
       |  -- UseSlot (+ fd, read and write) --------->  |   once per slot, before its first order
       |  -- FillChunk ------------------------------>  |   at most two at a time
       |  <-----------------------------------------  |   ChunkFilled
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
    +----------------+---------------+---------------+
"""

from struct import Struct
from typing import NamedTuple

from batchd_wire.codec import Message, Vocabulary, message

NOTE = Struct("<QQQ")
NOTE_BYTES = 4096
assert NOTE.size == 24  # noqa: PLR2004  as drawn above

OUT_OF_MEMORY_STATUS = 12
"""The exit status of a worker that found no memory for a sample: ENOMEM."""


@message(30)
class Ready(Message):
    """The worker has imported what it needs and takes orders. ``decoders``: what it decodes with, and versions."""

    decoders: str


class SampleRecipe(NamedTuple):
    """How the samples of a stream are made: all that its bytes depend on but the index of the source.

    ``source`` and ``steps`` are the validated configuration as plain data; ``columns``: what the
    source's samples consist of, as (name, type as people write it). The first ``cut`` steps make
    what a cache of decoded samples keeps, 0 for any other. ``record_bytes_max``: the longest record
    of the source; a longer one is a bad sample. ``rewritten``: the fields that a cache keeps as
    seekable files, each with the bytes that one may have. ``files``: the files that steps read, as
    (path, SHA-256 of what the daemon found in it). ``modules``: the same of the modules of the
    user's functions, by name, and ``python_path``: the folders that are searched for them first.
    """

    seed: int
    source: dict[str, object]
    columns: list[tuple[str, str]]
    steps: list[dict[str, object]]
    cut: int
    record_bytes_max: int
    rewritten: list[tuple[str, int]]
    files: list[tuple[str, str]]
    python_path: list[str]
    modules: list[tuple[str, str]]


@message(31)
class ServeStream(Message):
    """Everything a worker must know of a stream. Travels with one descriptor: the source's index, read-only.

    For a live stream there is a second one: the mailbox that its samples are pushed into,
    read-only. Where ``cache`` is not "off" there are two more, to read and write: the cache, and
    its claims; or three, of one on disk: its index, its notes, its file. ``cache`` says what is
    kept: "encoded" or "seekable" values of the source, or, "decoded", what the first steps make.

    ``layout`` is a ``SlotLayout``. ``storage``: how patient to be with servers of files, as (ms
    that one may say nothing, how often a request is made again, ms that a sample may take).
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


@message(34)
class FillChunk(Message):
    """Fill rows ``first`` to ``first + count`` of position (``epoch``, ``step``) into ``slot``.

    ``places``: of a live stream, in which place of the mailbox the sample of each of these rows
    lies; else empty.
    """

    order: int
    stream: int
    slot: int
    epoch: int
    step: int
    first: int
    count: int
    places: list[int]


class Work(NamedTuple):
    """Where a worker's time went in one chunk.

    ``busy_us`` from its begin to its end, but for the ``waited_us`` in which a server of files was
    waited for; ``cpu_us`` of it it had a CPU, ``read_cpu_us`` of that for reading; ``cpu_wait_us``
    it wanted one and had none, None where the kernel does not say. ``parts_us``: how long each part
    took, in the order of ``StreamMeasured.parts``. ``read_bytes``: of encoded samples.
    ``usual_us``: what half of the stream's samples stay below at this worker. ``slow_rows`` took
    several times as long, ``slow_us`` together; ``slow`` are the slowest of these, as (sample
    index, path, us). Of a stream with a cache ``cache_hits`` samples were in it, and
    ``cache_misses`` were not.
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


@message(35)
class ChunkFilled(Message):
    """The rows of ``order`` are in the slot. ``work``: where the time went, see ``Work``.

    ``bad``: (sample index, path, reason) of the samples that are not good. ``hopeless`` says, where
    it is not empty, why a row could not be filled with anything that the stream's policy allows.
    """

    order: int
    work: Work
    bad: list[tuple[int, str, str]]
    hopeless: str


@message(49)
class StreamMeasured(Message):
    """What the times of ``stream`` will be about: ``parts`` are the names of what a sample's way consists of, in order."""

    stream: int
    parts: list[str]


@message(36)
class Quarantine(Message):
    """These samples of the stream killed workers: never decode them, treat them as bad. Adds to what was said before."""

    stream: int
    samples: list[int]


@message(37)
class ForgetStream(Message):
    """No order will name the stream any more: close what is open for it."""

    stream: int


@message(38)
class ForgetSlots(Message):
    """No order will name any of ``slots`` any more: unmap them."""

    slots: list[int]


@message(39)
class UseStorage(Message):
    """Be as patient with servers of files from now on as ``storage`` says, in every stream; see ``ServeStream``."""

    storage: tuple[int, int, int]


REASON_BYTES_MAX = 200
PATH_BYTES_MAX = 250
CHUNK_ROWS_MAX = 256
READ_PART = "read"
KEEP_PART = "cache"
BAD_PART = "bad samples"
"""Names of parts in ``StreamMeasured`` that are no steps. The second one is for keeping samples, where there is a cache; the last
one has all time with samples that turned out to be bad."""
LONG_REASON_BYTES_MAX = 1500
LONG_REASONS_MAX = 4
"""So many bad samples of a chunk, its first ones, may have a reason that is longer: where a function of somebody's own failed."""
SLOW_LISTED_MAX = 4
"""So many slow samples of a chunk are named."""
HOPELESS_BYTES_MAX = 2000
"""So that even a chunk of nothing but bad samples fits into one message."""

TO_WORKER = Vocabulary(ServeStream, UseSlot, FillChunk, Quarantine, ForgetStream, ForgetSlots, UseStorage)
TO_DAEMON_FROM_WORKER = Vocabulary(Ready, StreamMeasured, ChunkFilled)


@message(57)
class Fork(Message):
    """Start ``worker``. Travels with two descriptors: its end of its channel, and its note, to write; see ``orders``."""

    worker: int


@message(58)
class Reap(Message):
    """The worker with process id ``pid`` has ended, and all is known of it: let it go."""

    pid: int


@message(59)
class Forked(Message):
    """``worker`` lives, as process ``pid``. Travels with one descriptor, of this process (pidfd_open(2))."""

    worker: int
    pid: int


@message(60)
class NotForked(Message):
    """There is no ``worker``, for a ``reason`` that the kernel gives: no memory, or too many processes."""

    worker: int
    reason: str


TO_FORKSERVER = Vocabulary(Fork, Reap)
TO_DAEMON_FROM_FORKSERVER = Vocabulary(Forked, NotForked)
