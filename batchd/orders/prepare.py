"""Messages between ``batchd prepare`` and the processes that write its shards; numbers are never reused.

prepare                                       writer
|  -- PrepareStream (+ fd: the index) ------>  |   once
|  -- WriteShard -------------------------->   |   one at a time
|  <-----------------------------------------  |   SampleLeftOut: for each bad sample
|  <-----------------------------------------  |   ShardWritten | ShardNotWritten
"""

from batchd.orders.worker import SampleRecipe
from batchd_wire.codec import Message, Vocabulary, message


@message(44)
class PrepareStream(Message):
    """What a process of ``batchd prepare`` must know. Travels with one descriptor: the source's index, read-only.

    ``storage`` as in ``ServeStream``. ``folder``: where its shards go. Pixels are encoded as
    ``image_format`` with ``quality``. ``is_seekable``: JPEGs get restart markers. ``as_files``:
    images become files of their own, and each shard is a list of some of them.
    """

    recipe: SampleRecipe
    storage: tuple[int, int, int]
    folder: str
    image_format: str
    quality: int
    is_seekable: bool
    as_files: bool


@message(45)
class WriteShard(Message):
    """Write samples ``first`` to ``first + count`` into the file ``name`` of the folder. ``skipped``: these are not touched."""

    name: str
    first: int
    count: int
    skipped: list[int]


@message(46)
class SampleLeftOut(Message):
    """A sample of the shard in hand is bad: ``sample`` is its index, ``path`` where it is, ``reason`` why."""

    sample: int
    path: str
    reason: str


@message(47)
class ShardWritten(Message):
    """The shard in hand is on the disk, whole, with ``.unfinished`` behind its name: ``samples`` in ``shard_bytes`` bytes."""

    samples: int
    shard_bytes: int


@message(48)
class ShardNotWritten(Message):
    """The shard in hand cannot be written, for a ``reason`` that is not any sample's: the disk is full, say."""

    reason: str


TO_WRITER_FROM_PREPARE = Vocabulary(PrepareStream, WriteShard)
TO_PREPARE_FROM_WRITER = Vocabulary(SampleLeftOut, ShardWritten, ShardNotWritten)
