"""Orders, one after the other: read, decode, transform, write once into the slot. WORKER process.

    plan: rows -> sample indices         policy for a bad sample
    for each row: read -> pipeline ----> substitute: another sample, chosen by the plan
                    straight into        mask: zeros or fill, valid = False
                    the slot's row       fail: zeros; the daemon stops the stream

                                         then its checksum, if the stream has them

    rows of numbers in arrays, and of samples that are all in a cache and need no random step:
    many at once, straight into the slot; each by itself if one is wrong

    rows of photographs whose headers and access points are in a cache: planned one after the other,
    then read, decoded and resampled by one call; each by itself if its file is another one

    a file that a step reads has changed since the daemon read it,
    or a user's function cannot be imported ----------------> zeros; the daemon stops the stream

Each slot is mapped once, when the daemon hands over its descriptor, and stays mapped: no system
call per batch. The memory was reserved before (``posix_fallocate``), so touching it cannot fail.
The header page is never written here.

Invariant: every field of every ordered row is written, whatever happens to a sample (except zeros
that are there already), so no former content of the slot can reach a trainer. Any other failure
than a bad sample (a bug, no memory) ends the process, and the daemon bisects: a sample that finds
no memory even alone then counts as bad. Invariant: an order is answered with exactly one
``ChunksFilled``, or the process ends. The worker waits only for its channel and its files.
"""

import mmap
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.core.blocks import BlockOrder
from batchd.core.epochs import planned
from batchd.core.plan import Plan
from batchd.core.rows import Rows, rows_of
from batchd.core.work import NO_WORK
from batchd.data.functions.load import FunctionUnusable
from batchd.data.pipeline.effects import INDEX, VALID, StepInvalid
from batchd.data.pipeline.image.decode import decoder_versions
from batchd.data.pipeline.kinds import step_from_plain
from batchd.data.pipeline.stages import Row
from batchd.data.storage.access import Storage
from batchd.data.storage.ahead import Requested
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.values import StorageLimits
from batchd.runtime import failpoints
from batchd.worker import messages as orders
from batchd.worker.blocks import BlocksAhead
from batchd.worker.process import NoteMemory
from batchd.worker.sample_maker import Announced, RecipeUnusable, SampleMaker, WantedRow, shortened
from batchd.worker.stopwatch import RunQueue, Stopwatch
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import Message
from batchd_wire.fields import layout_from_wire, sizes_field
from batchd_wire.position import Position
from batchd_wire.slot import RowChecksums
from batchd_wire.views import slot_arrays

Arrays = dict[str, np.ndarray]
"""The writable fields of a slot, each ``[rows, *shape]``."""
SlotArrays = dict[int, Arrays]
"""The fields of a slot in the layout of each bucket that it was filled for; 0 without buckets."""
Slots = Mapping[int, tuple[memoryview, SlotArrays]]
"""By number: the memory of a slot and, from the first order on, its fields."""
Sums = Callable[..., None]
"""Writes the checksums of complete rows of a slot, which it is called with, if there are any."""
Bad = list[tuple[int, str, str]]
"""Bad samples: (index, path, reason)."""


class WorkerLoop:
    """Owns the channel to the daemon."""

    def __init__(self, channel: socket.socket, note: NoteMemory) -> None:
        self._channel = channel
        self._note = note
        self._slots: dict[int, tuple[memoryview, SlotArrays]] = {}
        self._storage = Storage()
        self._streams: dict[int, WorkerStream] = {}
        self._heard: Heard = deque()
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    def run(self) -> None:
        """Work until the daemon closes the channel or is gone."""
        try:
            failpoints.passing("worker.starting")
            send_message(self._channel, orders.Ready(decoder_versions()))
            while True:
                failpoints.passing("worker.idle")
                self._handle(*(self._heard.popleft() if self._heard else self._receive()))
        except ChannelClosed:
            self._storage.close()

    def _handle(self, message: Message, descriptors: list[int]) -> None:
        match message, descriptors:
            case orders.FillChunks(), []:
                self._fill(message)
            case orders.UseSlot(), [descriptor]:
                memory = mmap.mmap(descriptor, message.slot_bytes)
                os.close(descriptor)  # the mapping keeps the memory
                memory.madvise(mmap.MADV_DONTDUMP)
                self._slots[message.slot] = memoryview(memory), {}
            case orders.ServeStream(), [index, *others]:
                stream = self._streams[message.stream] = _open_stream(message, index, others, self._note, self._storage)
                for descriptor in [index, *(others if message.cache != "off" else [])]:
                    os.close(descriptor)
                send_message(self._channel, orders.StreamMeasured(message.stream, stream.parts))
            case orders.ForgetSlots(), []:
                for slot in message.slots:  # the mapping ends with the last array over it
                    self._slots.pop(slot, None)
            case orders.ForgetStream(), []:
                self._streams.pop(message.stream).close()
            case orders.UseStorage(), []:
                self._storage.limits = StorageLimits.from_wire(message.storage)
            case orders.Quarantine(), []:
                self._streams[message.stream].quarantined.update(message.samples)
            case _:
                raise AssertionError(f"{type(message).__name__} came with {len(descriptors)} descriptors")

    def _receive(self) -> tuple[Message, list[int]]:
        return receive_message(self._channel, orders.TO_WORKER)

    def _fill(self, message: orders.FillChunks) -> None:
        failpoints.passing("worker.order.received")
        for filled in self._streams[message.stream].answer(message, self._slots, self._listen, self._heard):
            send_message(self._channel, filled)
            failpoints.passing("worker.done.sent")

    def _listen(self) -> None:
        """Receive what arrived during the current order; all but a quarantine waits.

        A quarantined sample may be in the next chunk. What a further order needs from servers is
        requested now.
        """
        while self._poll.poll(0):
            message, descriptors = self._receive()
            if isinstance(message, orders.Quarantine) and message.stream in self._streams:
                self._handle(message, descriptors)
                continue
            if isinstance(message, orders.FillChunks) and message.stream in self._streams:
                self._streams[message.stream].expect(message)
            self._heard.append((message, descriptors))


ROWS_AHEAD = 4096
"""Rows whose samples are planned at once, also of further batches."""
ROWS_AT_ONCE = 256
"""Rows that may be made at once: after each portion, the daemon sees the worker's progress."""
FILES_AT_ONCE = 32
"""Files that may be made by one call: planning them costs little more for each if they are more."""
TOGETHER_BYTES_MAX = 8 << 20
"""Rows of several chunks that may be read together, in some 1 ms where they are in memory."""
SUBSTITUTES_MAX = 32
"""Tries for one row. With half of all samples bad, one row in four thousand million finds none."""


class PlannedOrder(NamedTuple):
    """The chunks of an order: of each its rows, and the samples that fill them.

    ``announced``: the samples that are requested from servers; None if that saves nothing.
    """

    chunks: list[orders.Chunk]
    rows: list[Rows]
    samples: list[NDArray[np.int64]]
    announced: Announced | None

    @property
    def asks_servers(self) -> bool:
        """True if servers were asked for its samples, or could not be yet."""
        if self.announced is None:
            return False
        requested, _parts, blocks = self.announced
        return bool(requested.has_begun or not requested.is_whole or blocks)


PlannedChunk = tuple[orders.Chunk, Rows, NDArray[np.int64]]
"""A chunk, the rows of its slot to write, and the sample of each: int64 ``[rows]``."""
Heard = deque[tuple[Message, list[int]]]
"""Messages that wait behind the current order, with their descriptors."""


class WantedRows(NamedTuple):
    """Rows ``target`` of an order, which is for a slot with ``arrays``.

    ``samples``: int64 ``[rows]``.
    """

    order: int
    target: Rows
    samples: NDArray[np.int64]
    arrays: Arrays


class WorkerStream:
    """A stream in a worker: plan, source and pipeline, made once from ``ServeStream``.

    ``others``: the descriptors of the mailbox or the cache. ``storage`` is one for all streams.
    """

    def __init__(
        self, message: orders.ServeStream, index_descriptor: int, others: list[int], note: NoteMemory, storage: Storage
    ) -> None:
        recipe = orders.SampleRecipe(*message.recipe)
        storage.limits = StorageLimits.from_wire(message.storage)
        storage.as_of_ns = message.as_of_ns
        self._number = message.stream
        self._index = SourceIndex.from_descriptor(index_descriptor)
        self._pack = step_from_plain(message.pack) if message.pack else None
        self.layout = layout_from_wire(message.layout)
        self.quarantined: set[int] = set()
        self._checksums = [RowChecksums(layout) for layout in self.layout.buckets or (self.layout,)]
        sizes = [sizes_field(field) for field in self.layout.fields if self.layout.buckets]
        self._sizes = [field.name for field in sizes if field is not None]
        """Fields of sizes in slots whose former batch may have had another layout."""
        plan = Plan(message.samples, message.batch_size, recipe.seed, message.shuffle, drop_last=False)
        self._plan = planned(plan, self._index.facts, self._index.arrays)
        self._rows = PlannedRows(self._plan)
        self._on_error = message.on_error
        self._note = note
        run_queue = RunQueue()
        self._stopwatch = Stopwatch(run_queue.waited_ns)
        self._opened = ExitStack()
        self._opened.callback(run_queue.close)
        self._blocks: BlocksAhead | None = None
        """The blocks that this worker reads; None if the order has none."""
        self._hopeless: str | None = None
        self._listen: Callable[[], None] = _nothing
        """Called before each row, so that the next order is requested early."""
        self._done: set[tuple[int, int]] = set()
        """(order, row) that are made ahead of their turn."""
        self._filled: set[int] = set()
        """Orders whose rows are all made ahead of their turn."""
        self._tried: list[tuple[int, str, str]] = []
        """Bad samples of the current row: (index, path, reason)."""
        self._expected: dict[int, PlannedOrder] = {}
        """Orders that wait behind others, by the number of their first chunk."""
        self._made: list[orders.RowMade | orders.DocumentMade] | None = [] if message.tells_rows else None
        """Rows that were made and are not reported yet; None if no one asks how."""
        self._draws: list[dict[str, object]] = []
        try:
            self._maker = SampleMaker(
                recipe,
                self._index,
                self._stopwatch,
                storage,
                cache=message.cache,
                others=others,
                has_rows=self._pack is None,
            )
            self._opened.callback(self._maker.close)
            if isinstance(self._plan.order, BlockOrder):
                self._blocks = BlocksAhead(self._plan.order, self._maker.request_block)
                self._opened.callback(self._blocks.close)
            if message.tells_rows:
                self._draws = self._maker.note_draws()
        except RecipeUnusable as error:
            self._hopeless = str(error)

    def close(self) -> None:
        """Close the files of the stream; no order follows."""
        self._opened.close()

    def expect(self, message: orders.FillChunks) -> None:
        """Request from servers what an order needs that waits behind others. ``answer`` follows."""
        order = self._planned_order(message)
        self._expected[order.chunks[0].order] = order

    def answer(
        self,
        message: orders.FillChunks,
        slots: Slots,
        listen: Callable[[], None] = lambda: None,
        heard: Heard | None = None,
    ) -> Iterator[orders.ChunksFilled | orders.RowMade | orders.DocumentMade]:
        """Fill rows of slots; report the chunks that are filled, all together or some at a time.

        Reports each row before its chunk, if asked to.

        ``listen`` is called before chunks are filled, and wherever servers are waited for. It
        appends messages to ``heard``, from which this takes further orders of the stream: those of
        few rows are then reported together, however few of them came in one message.
        """
        self._stopwatch.begin()
        order = self._expected.pop(orders.Chunk(*message.chunks[0]).order, None)
        if order is None or (order.announced is not None and not order.announced.requested.is_whole):
            late, order = order, self._planned_order(message)  # there may be room now
            if late is not None and late.announced is not None:
                late.announced.requested.forget()
        try:
            if order.announced is not None:
                listen()
                self._maker.begin_announced(order.announced, listen)
                waits = order.announced.requested.has_begun or order.announced.blocks
                self._listen = listen if waits else _nothing
            targets = [range(len(rows)) if message.is_packed else rows for rows in order.rows]
            rest = deque(zip(order.chunks, targets, order.samples, strict=True))
            joined = deque() if heard is None or message.is_packed or order.asks_servers else heard
            yield from self._fill_planned(rest, slots, listen, joined)
        finally:
            if order.announced is not None:
                order.announced.requested.forget()

    def _planned_order(self, message: orders.FillChunks) -> PlannedOrder:
        chunks = [orders.Chunk(*chunk) for chunk in message.chunks]
        ordered = [rows_of(chunk.runs) for chunk in chunks]
        planned = [
            self._plan_rows(Position(chunk.epoch, chunk.step), rows)
            for chunk, rows in zip(chunks, ordered, strict=True)
        ]
        announced = None
        if self._hopeless is None and self._maker.reads_ahead:
            try:
                announced = self._announce(chunks, planned)
            except (StepInvalid, FunctionUnusable) as error:
                self._hopeless = str(error)
        return PlannedOrder(chunks, ordered, planned, announced)

    def _join(self, rest: deque[PlannedChunk], heard: Heard) -> None:
        """Take the stream's further orders for which no server is asked."""
        while heard:
            message, _descriptors = heard[0]
            if not isinstance(message, orders.FillChunks) or message.stream != self._number or message.is_packed:
                return
            first = orders.Chunk(*message.chunks[0]).order
            order = self._expected.pop(first, None) or self._planned_order(message)
            if order.asks_servers:
                self._expected[first] = order
                return
            if order.announced is not None:
                order.announced.requested.forget()
            heard.popleft()
            rest.extend(zip(order.chunks, order.rows, order.samples, strict=True))

    def _fill_planned(
        self, rest: deque[PlannedChunk], slots: Slots, listen: Callable[[], None], heard: Heard
    ) -> Iterator[orders.ChunksFilled | orders.RowMade | orders.DocumentMade]:
        filled: list[int] = []
        together = 0
        while rest:
            if not together:
                listen()
                self._join(rest, heard)
                together = self._fill_together(rest, slots)
            chunk, target, samples = rest.popleft()
            together = max(0, together - 1)
            bad: Bad = []
            hopeless = ""
            if chunk.order in self._filled:
                self._filled.remove(chunk.order)
            else:
                sums, arrays = self._slot(chunk, slots)
                bad, hopeless = self._fill_or_clear(chunk, samples, target, arrays, sums)
            if self._blocks is not None:
                self._blocks.made(chunk.epoch, samples)
            filled.append(chunk.order)
            if self._made:
                yield from self._made
                self._made.clear()
            if not rest:
                listen()
                self._join(rest, heard)
            is_due = not rest or (not together and self._stopwatch.left_s(len(rest[0][1])) < 0)
            if is_due or bad or hopeless:
                work = self._stopwatch.work() if self._hopeless is None else NO_WORK
                yield orders.ChunksFilled(filled, work, bad, shortened(hopeless, orders.HOPELESS_BYTES_MAX))
                filled = []
                self._stopwatch.begin()

    def _fill_or_clear(
        self, chunk: orders.Chunk, samples: NDArray[np.int64], target: Rows, arrays: Arrays, sums: Sums
    ) -> tuple[Bad, str]:
        """Fill the rows ``target`` with ``samples``; return bad ones, and why rows are empty."""
        if self._hopeless is None:
            try:
                return self._fill(chunk, samples, target, arrays, sums)
            except (StepInvalid, FunctionUnusable) as error:
                self._hopeless = str(error)
                self._note.clear()
        for array in arrays.values():
            array[_places(target)] = 0
        return [], self._hopeless

    def _plan_rows(self, position: Position, rows: Rows) -> NDArray[np.int64]:
        """The sample of each row, int64 ``[rows]``."""
        return self._rows.samples(position, rows)

    @property
    def parts(self) -> list[str]:
        """Names of the timed parts of its samples."""
        return self._stopwatch.parts

    def _fill(
        self, chunk: orders.Chunk, samples: NDArray[np.int64], target: Rows, arrays: Arrays, sums: Sums
    ) -> tuple[Bad, str]:
        self._note.begin(chunk.order)
        if self._maker.mailbox is not None:
            self._maker.mailbox.expect(int(samples[0]), tuple(chunk.places))
        for name in self._sizes:
            arrays[name][_places(target)] = -1
        self._write_others(samples, target, arrays)
        bad: Bad = []
        hopeless = ""
        left = self._not_filled_at_once(chunk.order, samples, target, arrays, sums)
        if self._made is not None:
            alone = {row for row, _sample in left}
            rows = zip(target, samples.tolist(), strict=True)
            self._made += [self._row_made(chunk, row, sample, sample) for row, sample in rows if row not in alone]
        for row, sample in left:
            fields = {name: array[row, ...] for name, array in arrays.items()}
            reason = self._fill_row(chunk.epoch, row, sample, 0, fields)
            if reason is not None:
                self._tell(bad, sample, reason)
                if not self._treat(chunk.epoch, row, sample, fields):
                    name = self._maker.shown_name(sample)
                    hopeless = f"none of {SUBSTITUTES_MAX} samples could stand in for {name}: {reason}"
            sums(row)
            if self._made is not None:
                is_good = reason is None or (self._on_error == "substitute" and not hopeless)
                made = self._row_made(chunk, row, sample, int(fields[INDEX]), is_good=is_good, draws=self._draws)
                self._made.append(made)
            self._tried.clear()
        self._note.clear()
        failpoints.passing("worker.chunk.written")
        return bad, hopeless

    def _write_others(self, samples: NDArray[np.int64], target: Rows, arrays: Arrays) -> None:
        """Write the fields that no source has."""
        place = _places(target)
        arrays[INDEX][place] = samples
        if VALID in arrays:
            arrays[VALID][place] = True

    def _tell(self, bad: Bad, sample: int, reason: str) -> None:
        """Add a bad sample to those that are reported."""
        bytes_max = orders.LONG_REASON_BYTES_MAX if len(bad) < orders.LONG_REASONS_MAX else orders.REASON_BYTES_MAX
        bad.append((sample, self._maker.shown_name(sample), shortened(reason, bytes_max)))

    def _row_made(  # noqa: PLR0913  each is a fact of the row
        self,
        chunk: orders.Chunk,
        row: int,
        planned: int,
        sample: int,
        *,
        is_good: bool = True,
        draws: Sequence[dict[str, object]] = (),
    ) -> orders.RowMade:
        return orders.RowMade(
            order=chunk.order,
            row=row,
            planned=planned,
            sample=sample,
            name=self._maker.shown_name(sample),
            is_good=is_good,
            tried=list(self._tried),
            modified_ns=self._maker.modified_ns(sample),
            draws=list(draws) if is_good else [],
        )

    def _not_filled_at_once(
        self, order: int, samples: NDArray[np.int64], target: Rows, arrays: Arrays, sums: Sums
    ) -> list[tuple[int, int]]:
        """Fill as many rows at once as can be; return the others with their samples."""
        if self._maker.makes_files:
            return self._not_done(order, samples, target, sums)
        left: list[tuple[int, int]] = []
        step = ROWS_AT_ONCE if self._maker.makes_rows else len(target)
        for start in range(0, len(target), step):
            rows, chosen = target[start : start + step], samples[start : start + step]
            if not self._maker.makes_rows or not self._fill_rows([WantedRows(order, rows, chosen, arrays)]):
                left += zip(rows, chosen.tolist(), strict=True)
            else:
                sums(*rows)
        return left

    def _fill_together(self, rest: Iterable[PlannedChunk], slots: Slots) -> int:
        """Fill rows of the first chunk, and of short ones behind it, in fewer steps than by turns.

        Returns the number of these chunks. Rows that are not filled here are made in their turn.
        """
        if self._hopeless is not None:
            return 0
        try:
            if self._maker.makes_files:
                return self._fill_files(rest, slots)
            is_short = self._maker.makes_rows and self._made is None
            return self._fill_short(rest, slots) if is_short else 0
        except (StepInvalid, FunctionUnusable) as error:
            self._hopeless = str(error)
            self._note.clear()
            return 0

    def _fill_files(self, rest: Iterable[PlannedChunk], slots: Slots) -> int:
        """Fill rows whose files a cache knows: of the first chunk, and of others until a report."""
        wanted: list[WantedRow] = []
        count = rows = 0
        for chunk, target, samples in rest:
            rows += len(target)
            if count and (rows > FILES_AT_ONCE or self._stopwatch.left_s(rows) < 0):
                break
            count += 1
            _sums, arrays = self._slot(chunk, slots)
            good = [one for one in zip(target, samples.tolist(), strict=True) if one[1] not in self.quarantined]
            wanted += [WantedRow(chunk.order, chunk.epoch, row, sample, arrays) for row, sample in good]
        for start in range(0, len(wanted), FILES_AT_ONCE):
            self._done |= self._maker.make_files(wanted[start : start + FILES_AT_ONCE], self._note)
        return count

    def _fill_short(self, rest: Iterable[PlannedChunk], slots: Slots) -> int:
        """Fill rows of numbers, of several chunks at once if they are short; return how many."""
        wanted: list[WantedRows] = []
        sums: list[Sums] = []
        rows_left = TOGETHER_BYTES_MAX // self.layout.row_bytes
        for chunk, target, samples in rest:
            rows_left -= len(target)
            if rows_left < 0 or len(target) > ROWS_AT_ONCE:
                break
            sums_of_slot, arrays = self._slot(chunk, slots)
            sums.append(sums_of_slot)
            wanted.append(WantedRows(chunk.order, target, samples, arrays))
        if len(wanted) > 1 and self._fill_rows(wanted):
            for one, sums_of_slot in zip(wanted, sums, strict=True):
                self._write_others(one.samples, one.target, one.arrays)
                sums_of_slot(*one.target)
                self._filled.add(one.order)
                failpoints.passing("worker.chunk.written")
            self._note.clear()
        return max(1, len(wanted))

    def _not_done(self, order: int, samples: NDArray[np.int64], target: Rows, sums: Sums) -> list[tuple[int, int]]:
        """Return the rows of an order that ``_fill_files`` has not made, with their samples."""
        left: list[tuple[int, int]] = []
        for row, sample in zip(target, samples.tolist(), strict=True):
            if (order, row) not in self._done:
                left.append((row, sample))
                continue
            self._done.remove((order, row))
            self._note.take(row, sample)
            failpoints.passing("worker.sample.written", sample)
            sums(row)
        return left

    def _slot(self, chunk: orders.Chunk, slots: Slots) -> tuple[Sums, Arrays]:
        """The slot of a chunk, in the layout of its batch."""
        page, of_buckets = slots[chunk.slot]  # a slot belongs to one stream
        bucket = self._plan.bucket_of(Position(chunk.epoch, chunk.step)) if self.layout.buckets else 0
        if bucket not in of_buckets:
            of_buckets[bucket] = slot_arrays(page, self.layout.of(bucket))
        return partial(self._checksums[bucket].write, page), of_buckets[bucket]

    def _announce(self, chunks: list[orders.Chunk], planned: list[NDArray[np.int64]]) -> Announced:
        """Request the samples of an order: by the blocks that are this worker's, else by rows."""
        blocks: list[Requested] = []
        wanted: list[int] = []
        for chunk, rows in zip(chunks, planned, strict=True):
            samples = self._samples_of(rows)
            if self._blocks is not None:
                found, samples = self._blocks.begin(chunk.epoch, samples, chunk.share)
                blocks += found
            wanted += [sample for sample in samples.tolist() if sample not in self.quarantined]
        epochs = {chunk.epoch for chunk in chunks}
        announced = self._maker.announce(wanted, min(epochs) if len(epochs) == 1 else None)
        return announced._replace(blocks=tuple(blocks))

    def _samples_of(self, planned: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples of planned rows."""
        return planned

    def _fill_rows(self, wanted: Sequence[WantedRows]) -> bool:
        """Fill rows of numbers at once; False if they must be made one by one."""
        current = begun = -1

        def begin(number: int) -> None:
            nonlocal current, begun
            if number != current:
                current = number
                self._note.begin(wanted[number].order)
                self._note.take_many(wanted[number].target[0])
            if number > begun:
                begun = number
                failpoints.passing("worker.rows.begin", int(wanted[number].samples[0]))

        samples = wanted[0].samples if len(wanted) == 1 else np.concatenate([one.samples for one in wanted])
        if self.quarantined and not self.quarantined.isdisjoint(samples.tolist()):
            return False
        chunks = []
        for one in wanted:
            place = _places(one.target)
            if not isinstance(place, slice):
                return False
            chunks.append({name: array[place] for name, array in one.arrays.items()})
        return self._maker.make_rows(samples, chunks, begin)

    def _fill_row(self, epoch: int, row: int, sample: int, attempt: int, fields: Row) -> str | None:
        """Make the ``fields`` of ``row`` of ``sample``; says why it is bad, if it is."""
        self._listen()
        self._note.take(row, sample)
        if sample in self.quarantined:
            reason: str | None = "quarantined"
        else:
            failpoints.passing("worker.sample.begin", sample)
            reason = self._maker.make_row(epoch, sample, attempt, fields)
        if reason is None:
            failpoints.passing("worker.sample.written", sample)
        elif self._made is not None:
            short = shortened(reason, orders.REASON_BYTES_MAX)
            self._tried.append((sample, self._maker.shown_name(sample), short))
        return reason

    def _treat(self, epoch: int, row: int, sample: int, fields: Row) -> bool:
        """Fill a bad sample's row by the stream's policy; False if no sample is left."""
        if self._on_error == "substitute":
            for attempt in range(1, SUBSTITUTES_MAX + 1):
                other = sample if self._maker.is_live else self._plan.substitute(epoch, sample, attempt)
                if self._fill_row(epoch, row, other, attempt, fields) is None:
                    fields[INDEX][...] = other
                    return True
        self._maker.keep_known(sample, fields)
        if VALID in fields:
            fields[VALID][...] = False
        return self._on_error != "substitute"


def _open_stream(
    message: orders.ServeStream, index: int, others: list[int], note: NoteMemory, storage: Storage
) -> WorkerStream:
    if message.pack:
        from batchd.worker.packs import PackedStream  # noqa: PLC0415  of these streams alone

        return PackedStream(message, index, others, note, storage)
    return WorkerStream(message, index, others, note, storage)


class PlannedRows:
    """Plans the samples of an order's rows, and of the epoch's rows behind them.

    The next order is mostly about these, and two hundred cost as much as twenty: a call of NumPy.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._epoch = -1
        self._first = 0
        """The row, counted from the epoch's first, that ``_samples`` begin with."""
        self._samples: NDArray[np.int64] = np.empty(0, np.int64)

    def samples(self, position: Position, rows: Rows) -> NDArray[np.int64]:
        """As ``Plan.indices_of``: int64 ``[rows]``, shared, so it must not be written to."""
        first, count = position.step * self._plan.batch_size + rows[0], rows[-1] + 1 - rows[0]
        start = first - self._first
        if position.epoch != self._epoch or start < 0 or start + count > len(self._samples):
            planned = max(count, min(ROWS_AHEAD, self._plan.samples - first))
            self._epoch, self._first, start = position.epoch, first, 0
            self._samples = self._plan.indices(position, rows[0], planned)
        samples = self._samples[start : start + count]
        return samples if len(rows) == count else samples[_numbers(rows) - rows[0]]


def _nothing() -> None:
    """Do nothing."""


def _places(rows: Rows) -> slice | NDArray[np.int64]:
    """The index that selects these rows of an array."""
    if isinstance(rows, range):
        return slice(rows.start, rows.stop)
    return slice(rows[0], rows[-1] + 1) if len(rows) == rows[-1] + 1 - rows[0] else _numbers(rows)


def _numbers(rows: Rows) -> NDArray[np.int64]:
    return np.asarray(rows, np.int64)
