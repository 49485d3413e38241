"""The WRITER of ``batchd prepare``: reads, processes, encodes and writes one order after another.

    NAME-000000.tar    members for each value, named by the sample's number

A shard is written as NAME.unfinished and flushed to the disk. The process of the command renames it
when it has noted which samples were left out.

Invariant: the output of an order is a function of the source, the steps, the seed and the encoding.
"""

import io
import os
import socket
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from batchd.commands.prepare import messages
from batchd.data.functions.load import FunctionUnusable
from batchd.data.pipeline.effects import StepInvalid
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.values import StorageLimits
from batchd.runtime import failpoints
from batchd.worker.members import MemberEncoder
from batchd.worker.messages import HOPELESS_BYTES_MAX, REASON_BYTES_MAX, SampleRecipe
from batchd.worker.process import NoteMemory
from batchd.worker.sample_maker import BAD, RecipeUnusable, SampleMaker, shortened
from batchd.worker.stopwatch import Stopwatch
from batchd_wire.channel import ChannelClosed, receive_message, send_message

EPOCH = 0
"""Random steps draw the numbers of the first epoch."""
AHEAD_SAMPLES = 64
"""Requested from a server at once."""
NAME_DIGITS = 9


class ShardWriter:
    """Owns the channel to the process of the command, which sends the orders."""

    def __init__(self, channel: socket.socket, note: NoteMemory) -> None:
        self._channel = channel
        self._note = note

    def run(self) -> None:
        """Write shards until the channel ends."""
        try:
            told, (index_descriptor,) = receive_message(self._channel, messages.TO_WRITER_FROM_PREPARE)
            assert isinstance(told, messages.PrepareStream), "the first message says what to prepare"
            problem = self._open(told, SourceIndex.from_descriptor(index_descriptor))
            while True:
                order, _ = receive_message(self._channel, messages.TO_WRITER_FROM_PREPARE)
                assert isinstance(order, messages.WriteShard), "the others are orders"
                send_message(self._channel, messages.ShardNotWritten(problem) if problem else self._carry_out(order))
                failpoints.passing("prepare.shard.written")
        except ChannelClosed:
            return

    def _open(self, told: messages.PrepareStream, index: SourceIndex) -> str:
        """Prepare for orders. Returns the reason if none can be carried out, else ""."""
        storage = Storage(StorageLimits.from_wire(told.storage))
        storage.as_of_ns = told.as_of_ns
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
        )
        self._folder = Path(told.folder)
        return ""

    def _carry_out(self, order: messages.WriteShard) -> messages.ShardWritten | messages.ShardNotWritten:
        unfinished = self._folder / f"{order.name}.unfinished"
        try:
            samples = self._write(order, unfinished)
            size = unfinished.stat().st_size
        except (OSError, FunctionUnusable, StepInvalid) as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else shortened(str(error), HOPELESS_BYTES_MAX)
            return messages.ShardNotWritten(f"{self._folder / order.name}: {reason}")
        self._note.clear()
        return messages.ShardWritten(samples, size)

    def _write(self, order: messages.WriteShard, file: Path) -> int:
        """Write all good samples; returns their number."""
        written, end = 0, order.first + order.count
        self._note.begin(order.first)
        with file.open("wb") as raw:
            # closed without an end if the context ends by an error
            with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for sample in range(order.first, end):
                    if (sample - order.first) % AHEAD_SAMPLES == 0:
                        self._maker.read_ahead(range(sample, min(sample + AHEAD_SAMPLES, end)))
                    self._note.take(sample - order.first, sample)
                    try:
                        if sample in order.skipped:
                            raise SampleUnreadable("killed the process that worked on it, twice")
                        failpoints.passing("prepare.sample.begin", sample)
                        self._add_members(tar, sample, self._maker.make(EPOCH, sample))
                        written += 1
                    except BAD as error:
                        name, reason = self._maker.shown_name(sample), shortened(str(error), REASON_BYTES_MAX)
                        send_message(self._channel, messages.SampleLeftOut(sample, name, reason))
            raw.flush()
            os.fsync(raw.fileno())
        return written

    def _add_members(self, tar: tarfile.TarFile, sample: int, values: Mapping[str, Value]) -> None:
        """Append a sample in WebDataset format. Members have no times and no owners.

        Raises ``OSError``; ``SampleUndecodable`` before it writes.
        """
        for ending, content in list(self._encoder.members(values)):
            member = tarfile.TarInfo(f"{sample:0{NAME_DIGITS}}.{ending}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
