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
from batchd.config.columns import parse_column
from batchd.config.image_steps import Decode
from batchd.config.sources import source_from_plain
from batchd.config.steps import step_from_plain
from batchd.functions.load import FunctionUnusable, expect
from batchd.orders.prepare import (
    TO_WRITER_FROM_PREPARE,
    PrepareStream,
    SampleLeftOut,
    ShardNotWritten,
    ShardWritten,
    WriteShard,
)
from batchd.orders.worker import HOPELESS_BYTES_MAX, PATH_BYTES_MAX, REASON_BYTES_MAX
from batchd.pipeline.effects import StepInvalid
from batchd.pipeline.errors import SampleUndecodable
from batchd.pipeline.execute import Pipeline
from batchd.pipeline.record_length import record_bytes_max
from batchd.pipeline.step_files import changed_file
from batchd.prepare.members import MemberEncoder
from batchd.prepare.sinks import FileRun, NameUnusable, Sink, TarShard
from batchd.samples.errors import SampleUnreadable
from batchd.sources.files import FilesIndex
from batchd.sources.kinds import kind_of, read_ahead
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.values import StorageLimits
from batchd.worker.note import Note
from batchd_wire.channel import ChannelClosed, receive_message, send_message

EPOCH = 0
"""Random steps draw as they do in the first epoch."""
AHEAD_SAMPLES = 64
"""So many are asked of a server at once."""


class ShardWriter:
    """Owns the channel to the process that orders."""

    def __init__(self, channel: socket.socket, note: Note) -> None:
        self._channel = channel
        self._note = note

    def run(self) -> None:
        """Write shards until the channel ends."""
        try:
            told, (index_descriptor,) = receive_message(self._channel, TO_WRITER_FROM_PREPARE)
            assert isinstance(told, PrepareStream), "the first message says what to prepare"
            stream = _stream_or_problem(told, SourceIndex.from_descriptor(index_descriptor))
            while True:
                order, _ = receive_message(self._channel, TO_WRITER_FROM_PREPARE)
                assert isinstance(order, WriteShard), "the others are orders"
                if isinstance(stream, _Stream):
                    self._obey(stream, order)
                else:
                    send_message(self._channel, ShardNotWritten(stream))
        except ChannelClosed:
            return

    def _obey(self, stream: "_Stream", order: WriteShard) -> None:
        unfinished = stream.folder / f"{order.name}.unfinished"
        try:
            samples = self._write(stream, order, unfinished)
            size = unfinished.stat().st_size
        except (OSError, FunctionUnusable, StepInvalid, NameUnusable) as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else _shorten(str(error), HOPELESS_BYTES_MAX)
            send_message(self._channel, ShardNotWritten(f"{stream.folder / order.name}: {reason}"))
            return
        self._note.clear()
        send_message(self._channel, ShardWritten(samples, size))
        failpoints.passing("prepare.shard.written")

    def _write(self, stream: "_Stream", order: WriteShard, file: Path) -> int:
        """Write all samples that are good; how many they are."""
        written = 0
        skipped = set(order.skipped)
        self._note.begin(order.first)
        with file.open("wb") as raw:
            with stream.sink(raw) as sink:
                end = order.first + order.count
                for sample in range(order.first, end):
                    if (sample - order.first) % AHEAD_SAMPLES == 0:
                        stream.storage.begin_reading_ahead()
                        read_ahead(stream.reader, range(sample, min(sample + AHEAD_SAMPLES, end)))
                    self._note.take(sample - order.first, sample)
                    reason = self._add(stream, sample, skipped, sink)
                    written += reason is None
                    if reason is not None:
                        name = _shorten(stream.reader.name(sample), PATH_BYTES_MAX)
                        send_message(self._channel, SampleLeftOut(sample, name, _shorten(reason, REASON_BYTES_MAX)))
            raw.flush()
            os.fsync(raw.fileno())
        return written

    def _add(self, stream: "_Stream", sample: int, skipped: Collection[int], sink: Sink) -> str | None:
        """Write one sample; says why it is bad, if it is."""
        if sample in skipped:
            return "killed the process that worked on it, twice"
        failpoints.passing("prepare.sample.begin", sample)
        try:
            values = stream.pipeline.make(stream.reader.read(sample), EPOCH, sample, 0)
            sink.add(sample, values)
        except (SampleUnreadable, SampleUndecodable) as error:
            return str(error)
        return None


class _Stream:
    """What is read, done and written."""

    def __init__(self, told: PrepareStream, index: SourceIndex) -> None:
        self.storage = Storage(StorageLimits.from_wire(told.storage))
        steps = [step_from_plain(step) for step in told.steps]
        source = source_from_plain(told.source)
        columns = [parse_column(name, text) for name, text in told.columns]
        expect(told.python_path, {name: str(digest) for name, digest in told.modules.items()})
        is_bgr = any(isinstance(step, Decode) and step.color == "bgr" for step in steps)
        self.folder = Path(told.folder)
        self.reader = kind_of(source).open(source, index, record_bytes_max(steps), self.storage)
        self.pipeline = Pipeline(columns, steps, told.seed, has_rows=False)
        self._encoder = MemberEncoder(
            self.pipeline.columns, told.image_format, told.quality, is_bgr=is_bgr, is_seekable=told.is_seekable
        )
        self._files = FilesIndex(index) if told.as_files else None

    def sink(self, raw: BinaryIO) -> Sink:
        """Where the samples of an order go, of which ``raw`` is the file that is written last."""
        if self._files is None:
            return TarShard(raw, self._encoder)
        return FileRun(raw, self._encoder, self._files, self.folder)


def _stream_or_problem(told: PrepareStream, index: SourceIndex) -> "_Stream | str":
    """What is to be done, or why it cannot be: a function of somebody's own cannot be had, or a file of a step has changed."""
    problem: str | None
    try:
        stream = _Stream(told, index)
    except (FunctionUnusable, StepInvalid) as error:
        problem = changed_file(told.files) or str(error)
    else:
        problem = changed_file(told.files)
        if problem is None:
            return stream
    return _shorten(problem, HOPELESS_BYTES_MAX)


def _shorten(text: str, bytes_max: int) -> str:
    return text.encode("utf-8", "backslashreplace")[:bytes_max].decode("utf-8", "ignore")
