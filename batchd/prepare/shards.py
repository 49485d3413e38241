"""One order after the other: read, pipeline, encode, into one tar file or files of their own. A WRITER of ``batchd prepare``.

NAME.unfinished   flushed to the disk; whoever ordered it gives it its name, when it has noted what was left out
"""

import os
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from batchd import failpoints
from batchd.functions.load import FunctionUnusable
from batchd.orders.prepare import (
    TO_WRITER_FROM_PREPARE,
    PrepareStream,
    SampleLeftOut,
    ShardNotWritten,
    ShardWritten,
    WriteShard,
)
from batchd.orders.worker import HOPELESS_BYTES_MAX, REASON_BYTES_MAX, SampleRecipe
from batchd.pipeline.effects import StepInvalid
from batchd.prepare.members import MemberEncoder
from batchd.prepare.sinks import FileRun, NameUnusable, Sink, TarShard
from batchd.sources.files.index import FilesIndex
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.values import StorageLimits
from batchd.worker.process import NoteMemory
from batchd.worker.sample_maker import BAD, RecipeUnusable, SampleMaker, shortened
from batchd.worker.stopwatch import Stopwatch
from batchd_wire.channel import ChannelClosed, receive_message, send_message

EPOCH = 0
"""Random steps draw as they do in the first epoch."""
AHEAD_SAMPLES = 64
"""So many are asked of a server at once."""


class ShardWriter:
    """Owns the channel to the process that orders."""

    def __init__(self, channel: socket.socket, note: NoteMemory) -> None:
        self._channel = channel
        self._note = note

    def run(self) -> None:
        """Write shards until the channel ends."""
        try:
            told, (index_descriptor,) = receive_message(self._channel, TO_WRITER_FROM_PREPARE)
            assert isinstance(told, PrepareStream), "the first message says what to prepare"
            problem = self._open(told, SourceIndex.from_descriptor(index_descriptor))
            while True:
                order, _ = receive_message(self._channel, TO_WRITER_FROM_PREPARE)
                assert isinstance(order, WriteShard), "the others are orders"
                send_message(self._channel, ShardNotWritten(problem) if problem else self._obey(order))
                failpoints.passing("prepare.shard.written")
        except ChannelClosed:
            return

    def _open(self, told: PrepareStream, index: SourceIndex) -> str:
        """Get ready for orders; says why none can be obeyed, "" where they can."""
        storage = Storage(StorageLimits.from_wire(told.storage))
        recipe = SampleRecipe(*told.recipe)
        try:
            self._maker = SampleMaker(recipe, index, Stopwatch(), storage, has_rows=False)
        except RecipeUnusable as error:
            return shortened(str(error), HOPELESS_BYTES_MAX)
        self._encoder = MemberEncoder(
            self._maker.columns,
            told.image_format,
            told.quality,
            is_bgr=any(step["op"] == "decode" and step["color"] == "bgr" for step in recipe.steps),
            is_seekable=told.is_seekable,
        )
        self._folder = Path(told.folder)
        self._files = FilesIndex(index) if told.as_files else None
        return ""

    def _obey(self, order: WriteShard) -> ShardWritten | ShardNotWritten:
        unfinished = self._folder / f"{order.name}.unfinished"
        try:
            samples = self._write(order, unfinished)
            size = unfinished.stat().st_size
        except (OSError, FunctionUnusable, StepInvalid, NameUnusable) as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else shortened(str(error), HOPELESS_BYTES_MAX)
            return ShardNotWritten(f"{self._folder / order.name}: {reason}")
        self._note.clear()
        return ShardWritten(samples, size)

    def _write(self, order: WriteShard, file: Path) -> int:
        """Write all samples that are good; how many they are."""
        written = 0
        self._note.begin(order.first)
        with file.open("wb") as raw:
            with self._sink(raw) as sink:
                end = order.first + order.count
                for sample in range(order.first, end):
                    if (sample - order.first) % AHEAD_SAMPLES == 0:
                        self._maker.read_ahead(range(sample, min(sample + AHEAD_SAMPLES, end)))
                    self._note.take(sample - order.first, sample)
                    reason = self._add(sample, order.skipped, sink)
                    written += reason is None
                    if reason is not None:
                        name = self._maker.shown_name(sample)
                        send_message(self._channel, SampleLeftOut(sample, name, shortened(reason, REASON_BYTES_MAX)))
            raw.flush()
            os.fsync(raw.fileno())
        return written

    def _add(self, sample: int, skipped: Collection[int], sink: Sink) -> str | None:
        """Write one sample; says why it is bad, if it is."""
        if sample in skipped:
            return "killed the process that worked on it, twice"
        failpoints.passing("prepare.sample.begin", sample)
        try:
            sink.add(sample, self._maker.make(EPOCH, sample))
        except BAD as error:
            return str(error)
        return None

    def _sink(self, raw: BinaryIO) -> Sink:
        """Where the samples of an order go, of which ``raw`` is the file that is written last."""
        if self._files is None:
            return TarShard(raw, self._encoder)
        return FileRun(raw, self._encoder, self._files, self._folder)
