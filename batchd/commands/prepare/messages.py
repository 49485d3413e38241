"""Messages between ``batchd prepare`` and its writers of shards. Numbers are never reused.

prepare                                       writer
|  -- PrepareStream (+ fd: the index) ------>  |   once
|  -- WriteShard -------------------------->   |   one at a time
|  <-----------------------------------------  |   SampleLeftOut: for each bad sample
|  <-----------------------------------------  |   ShardWritten | ShardNotWritten
"""

from batchd.worker.messages import SampleRecipe
from batchd_wire.codec import Message, Vocabulary, message


@message(44)
class PrepareStream(Message):
    """The stream for a writer of ``batchd prepare``. Travels with the source's index, read-only.

    ``storage`` and ``as_of_ns`` as in ``ServeStream``. ``folder``: where its shards are written.
    Pixels are encoded as ``image_format`` with ``quality``.
    """

    recipe: SampleRecipe
    storage: tuple[int, int, int]
    folder: str
    image_format: str
    quality: int
    as_of_ns: int = 0


@message(45)
class WriteShard(Message):
    """Write samples ``first`` to ``first + count``, except ``skipped``, into the file ``name``."""

    name: str
    first: int
    count: int
    skipped: list[int]


@message(46)
class SampleLeftOut(Message):
    """A sample of the current shard is bad: its index ``sample``, its ``path``, the ``reason``."""

    sample: int
    path: str
    reason: str


@message(47)
class ShardWritten(Message):
    """The current shard is written, as NAME.unfinished: ``samples`` in ``shard_bytes`` bytes."""

    samples: int
    shard_bytes: int


@message(48)
class ShardNotWritten(Message):
    """The current shard cannot be written, for a ``reason`` like a full disk."""

    reason: str


TO_WRITER_FROM_PREPARE = Vocabulary(PrepareStream, WriteShard)
TO_PREPARE_FROM_WRITER = Vocabulary(SampleLeftOut, ShardWritten, ShardNotWritten)
