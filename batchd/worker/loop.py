"""Orders, one after the other: plan, request, fill, report. WORKER process.

    FillChunks --> plan: rows -> sample indices --> requests to servers, also of waiting orders
               --> worker.filling, chunk by chunk or several together --> the rows of slots
               --> ChunksFilled: of one order or several, at the latest when a report is due

    a file that a step reads has changed since the daemon read it,
    or a user's function cannot be imported ----------------> zeros; the daemon stops the stream
    the storage of the source is away ----------------------> nothing counts; the daemon asks again

Each slot is mapped once, when the daemon hands over its descriptor, and stays mapped: no system
call per batch. The memory was reserved before (``posix_fallocate``), so touching it cannot fail.
The header page is never written here.

Invariant: every field of every ordered row is written. Any other failure than a bad sample (a bug,
no memory) ends the process, and the daemon bisects: a sample that finds no memory even alone then
counts as bad. Invariant: an order is answered with exactly one ``ChunksFilled``, or the process
ends. The worker waits only for its channel and its files.
"""

import gc
import mmap
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.core.blocks import BlockOrder
from batchd.core.epochs import planned
from batchd.core.plan import Plan, Tables
from batchd.core.rows import Rows, rows_of
from batchd.core.work import NO_WORK
from batchd.data.functions.load import FunctionUnusable
from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.image.decode import decoder_versions
from batchd.data.samples.shared_boxes import SharedBoxes, Sibling
from batchd.data.storage.access import Storage
from batchd.data.storage.ahead import Requested
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.values import StorageLimits
from batchd.runtime import failpoints, sandbox
from batchd.runtime.rights import reading_as
from batchd.worker import messages as orders
from batchd.worker.blocks import BlocksAhead
from batchd.worker.filling import (
    Arrays,
    Bad,
    ChunkRows,
    ManyFiles,
    ManyRows,
    OneByOne,
    RowReport,
    Strategy,
    StreamContext,
)
from batchd.worker.process import NoteMemory
from batchd.worker.sample_maker import Announced, RecipeUnusable, SampleMaker, StorageAway, shortened
from batchd.worker.stopwatch import RunQueue, Stopwatch
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import Message
from batchd_wire.fields import layout_from_wire
from batchd_wire.position import COPY_BIT, Position
from batchd_wire.slot import RowChecksums
from batchd_wire.views import slot_arrays

if TYPE_CHECKING:  # few workers have one
    from batchd.worker.tasks import SampleTask

SlotArrays = dict[int, Arrays]
"""The fields of a slot in the layout of each bucket that it was filled for; 0 without buckets."""
Slots = Mapping[int, tuple[memoryview, SlotArrays]]
"""By number: the memory of a slot and, from the first order on, its fields."""


class WorkerLoop:
    """Owns the channel to the daemon."""

    def __init__(self, channel: socket.socket, note: NoteMemory) -> None:
        self._channel = channel
        self._note = note
        self._slots: dict[int, tuple[memoryview, SlotArrays]] = {}
        self._storage = Storage()
        self._streams: dict[int, WorkerStream] = {}
        self._shared = SharedBoxes()
        self._task: SampleTask | None = None
        """Of a worker that fills no rows."""
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
                with reading_as(message.reader):
                    stream = WorkerStream(message, index, others, self._note, self._storage, self._shared)
                self._streams[message.stream] = stream
                for descriptor in [index, *(others if message.cache != "off" else [])]:
                    os.close(descriptor)
                send_message(self._channel, orders.StreamMeasured(message.stream, stream.parts))
            case orders.ForgetSlots(), []:
                for slot in message.slots:  # the mapping ends with the last array over it
                    self._slots.pop(slot, None)
            case orders.ForgetStream(), []:
                self._streams.pop(message.stream).close()
                # parts of a stream know one another, and keep its index and its cache open
                gc.collect()
            case orders.Quarantine(), []:
                (self._task or self._streams[message.stream]).quarantined.update(message.samples)
            case _:
                self._handle_other(message, descriptors)

    def _handle_other(self, message: Message, descriptors: list[int]) -> None:
        match message, descriptors:
            case orders.Enclose(), [rules]:
                sandbox.enter(rules, has_network=message.has_network)
            case orders.UseStorage(), []:
                self._storage.limits = StorageLimits.from_wire(message.storage)
            case orders.PrepareStream() | orders.MeasureStream(), [index, *cache]:
                from batchd.worker.tasks import task_of  # noqa: PLC0415  few workers have one

                self._task = task_of(message, [index, *cache], self._note, self._storage)
                os.close(index)
            case orders.WriteShard() | orders.MeasureSamples(), []:
                assert self._task is not None, "it came before its orders"
                for report in self._task.carry_out(message):
                    send_message(self._channel, report)
            case _:
                raise AssertionError(f"{type(message).__name__} came with {len(descriptors)} descriptors")

    def _receive(self) -> tuple[Message, list[int]]:
        return receive_message(self._channel, orders.TO_WORKER)

    def _fill(self, message: orders.FillChunks) -> None:
        failpoints.passing("worker.order.received")
        stream = self._streams[message.stream]
        with reading_as(stream.reader):
            for filled in stream.answer(message, self._slots, self._listen, self._heard):
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

PlannedChunk = tuple[orders.Chunk, Rows, NDArray[np.int64]]
"""A chunk, the rows of its slot to write, and the sample of each, as ``ChunkRows`` has it."""
Heard = deque[tuple[Message, list[int]]]
"""Messages that wait behind the current order, with their descriptors."""


class PlannedOrder(NamedTuple):
    """The chunks of an order.

    ``announced``: the samples that are requested from servers; None if that saves nothing.
    """

    chunks: list[PlannedChunk]
    announced: Announced | None

    @property
    def asks_servers(self) -> bool:
        """True if servers were asked for its samples, or could not be yet."""
        if self.announced is None:
            return False
        requested, _parts, blocks = self.announced
        return bool(requested.has_begun or not requested.is_whole or blocks)

    def forget(self) -> None:
        """End the requests: the samples are made, or made otherwise."""
        if self.announced is not None:
            self.announced.requested.forget()


class WorkerStream:
    """A stream in a worker: its orders, which are planned, requested, filled and reported.

    Made from ``ServeStream``. ``others``: the descriptors of the mailbox or the cache. ``storage``
    and ``shared`` are one for all streams.
    """

    def __init__(  # noqa: PLR0913, PLR0917  each is one thing that a stream of a worker has
        self,
        message: orders.ServeStream,
        index_descriptor: int,
        others: list[int],
        note: NoteMemory,
        storage: Storage,
        shared: SharedBoxes | None = None,
    ) -> None:
        recipe = orders.SampleRecipe(*message.recipe)
        storage.limits = StorageLimits.from_wire(message.storage)
        storage.as_of_ns = message.as_of_ns
        self._number = message.stream
        self.reader = message.reader
        index = SourceIndex.from_descriptor(index_descriptor)
        self.layout = layout_from_wire(message.layout)
        self.quarantined: set[int] = set()
        self._checksums = [RowChecksums(layout) for layout in self.layout.buckets or (self.layout,)]
        rows = message.samples, message.batch_size
        plan = Plan(
            *rows,
            recipe.seed,
            message.shuffle,
            drop_last=False,
            repeats=message.repeats,
            sizes=message.sizes,
            alike=message.alike,
        )
        self._plan = planned(plan, index.facts, index.arrays)
        self._plan_rows = _planner(self._plan, index.arrays, is_packed=bool(message.pack))
        self._note = note
        run_queue = RunQueue()
        self._stopwatch = Stopwatch(run_queue.waited_ns)
        self._opened = ExitStack()
        self._opened.callback(run_queue.close)
        self._blocks: BlocksAhead | None = None
        """The blocks that this worker reads; None if the order has none."""
        self._sibling: Sibling | None = None
        """The stream among those that the worker decodes together."""
        self._hopeless: str | None = None
        """Why no sample can be made: rows get zeros."""
        self._expected: dict[int, PlannedOrder] = {}
        """Orders that wait behind others, by the number of their first chunk."""
        self._joined: dict[int, PlannedOrder] = {}
        """Orders that are filled with the one before them, by the number of their last chunk."""
        self._made: list[RowReport] | None = [] if message.tells_rows else None
        """Rows that were made and are not reported yet; None if no one asks how."""
        try:
            self.maker = SampleMaker(
                recipe,
                index,
                self._stopwatch,
                storage,
                cache=message.cache,
                others=others,
                has_rows=not message.pack,
                waits_for_storage=message.waits_for_storage,
                plan=self._plan,
                substitutes=message.on_error == "substitute",
            )
        except RecipeUnusable as error:
            self._hopeless = str(error)
            return
        self._opened.callback(self.maker.close)
        if shared is not None and message.siblings and not message.tells_rows:
            self.maker.join(shared, message.siblings)
            self._sibling = self.maker.sibling
        if isinstance(self._plan.order, BlockOrder):
            self._blocks = BlocksAhead(self._plan.order, self._request_block, self._plan.repeats)
            self._opened.callback(self._blocks.close)
        context = StreamContext(
            message=message,
            layout=self.layout,
            plan=self._plan,
            maker=self.maker,
            note=note,
            stopwatch=self._stopwatch,
            quarantined=self.quarantined,
            made=self._made,
            draws=self.maker.note_draws() if message.tells_rows else [],
        )
        self._strategy = _strategy(context)

    @property
    def parts(self) -> list[str]:
        """Names of the timed parts of its samples."""
        return self._stopwatch.parts

    def close(self) -> None:
        """Close the files of the stream; no order follows."""
        self._opened.close()

    def expect(self, message: orders.FillChunks) -> None:
        """Request from servers what an order needs that waits behind others. ``answer`` follows."""
        self._expected[orders.Chunk(*message.chunks[0]).order] = self._planned_order(message)

    def answer(
        self,
        message: orders.FillChunks,
        slots: Slots,
        listen: Callable[[], None] = lambda: None,
        heard: Heard | None = None,
    ) -> Iterator[orders.ChunksFilled | RowReport]:
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
            if late is not None:
                late.forget()
        try:
            if order.announced is not None:
                listen()
                self.maker.begin_announced(order.announced, listen)
                waits = order.announced.requested.has_begun or order.announced.blocks
                self._strategy.before_sample = listen if waits else None
            rest = deque(self._in_slot(*one, slots) for one in order.chunks)
            joined = deque() if heard is None or message.is_packed or order.asks_servers else heard
            yield from self._fill_and_report(rest, slots, listen, joined)
        finally:
            for one in (order, *self._joined.values()):
                one.forget()
            self._joined.clear()

    def _fill_and_report(
        self, rest: deque[ChunkRows], slots: Slots, listen: Callable[[], None], heard: Heard
    ) -> Iterator[orders.ChunksFilled | RowReport]:
        filled: list[int] = []
        ahead = 0
        while rest:
            if not ahead:
                listen()
                self._join(rest, slots, heard)
                ahead = self._fill_ahead(rest)
            chunk = rest.popleft()
            ahead = max(0, ahead - 1)
            away = ""
            try:
                bad, hopeless = self._fill(chunk)
            except StorageAway as error:
                away, bad, hopeless = str(error), [], ""
                self._note.clear()
            self._forget_made(chunk)
            if away:
                if filled:
                    yield orders.ChunksFilled(filled, self._stopwatch.work(), [], "")
                yield orders.ChunksFilled([chunk.order], NO_WORK, [], "", shortened(away, orders.HOPELESS_BYTES_MAX))
                filled = []
                self._stopwatch.begin()
                continue
            filled.append(chunk.order)
            if self._made:
                yield from self._made
                self._made.clear()
            if not rest:
                listen()
                self._join(rest, slots, heard)
            is_due = not rest or (not ahead and self._stopwatch.left_s(len(rest[0].rows)) < 0)
            if is_due or bad or hopeless:
                work = self._stopwatch.work() if self._hopeless is None else NO_WORK
                yield orders.ChunksFilled(filled, work, bad, shortened(hopeless, orders.HOPELESS_BYTES_MAX))
                filled = []
                self._stopwatch.begin()

    def _forget_made(self, chunk: ChunkRows) -> None:
        """Let go of what was requested for a chunk."""
        if self._blocks is not None:
            self._blocks.made(chunk.epoch, chunk.samples)
        if chunk.order in self._joined:
            self._joined.pop(chunk.order).forget()

    def _fill_ahead(self, chunks: Iterable[ChunkRows]) -> int:
        """Fill rows of the first chunks together, if that is faster; return how many chunks."""
        if self._hopeless is None:
            try:
                return self._strategy.fill_ahead(chunks)
            except (StepInvalid, FunctionUnusable) as error:
                self._hopeless = str(error)
                self._note.clear()
        return 0

    def _fill(self, chunk: ChunkRows) -> tuple[Bad, str]:
        """Fill rows of a chunk; return bad samples, and why rows are empty.

        Raises ``StorageAway``: then what is in the rows has no meaning.
        """
        if self._hopeless is None:
            try:
                return self._strategy.fill(chunk)
            except (StepInvalid, FunctionUnusable) as error:
                self._hopeless = str(error)
                self._note.clear()
        for array in chunk.arrays.values():
            array[chunk.selector] = 0
        return [], self._hopeless

    def _join(self, rest: deque[ChunkRows], slots: Slots, heard: Heard) -> None:
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
            heard.popleft()
            self._joined[order.chunks[-1][0].order] = order
            rest.extend(self._in_slot(*one, slots) for one in order.chunks)

    def _in_slot(self, chunk: orders.Chunk, rows: Rows, samples: NDArray[np.int64], slots: Slots) -> ChunkRows:
        """A planned chunk, with its slot in the layout of its batch."""
        page, of_buckets = slots[chunk.slot]  # a slot belongs to one stream
        position = Position(chunk.epoch, chunk.step)
        bucket = self._plan.bucket_of(position) if self.layout.buckets else 0
        if bucket not in of_buckets:
            of_buckets[bucket] = slot_arrays(page, self.layout.of(bucket))
        write_checksums = partial(self._checksums[bucket].write, page)
        is_shared = self._sibling is not None and self._sibling.has_others
        return ChunkRows(
            chunk.order,
            position,
            self._plan.draw_epoch(position),
            chunk.places,
            rows,
            samples,
            of_buckets[bucket],
            write_checksums,
            rows_of(chunk.runs),
            (chunk.epoch * self._plan.steps + chunk.step) * self._plan.batch_size,
            chunk.share[1] if is_shared else 0,
        )

    def _planned_order(self, message: orders.FillChunks) -> PlannedOrder:
        chunks: list[PlannedChunk] = []
        for chunk in (orders.Chunk(*chunk) for chunk in message.chunks):
            rows = rows_of(chunk.runs)
            samples = self._plan_rows(Position(chunk.epoch, chunk.step), rows)
            chunks.append((chunk, range(len(rows)) if message.is_packed else rows, samples))
        announced = None
        if self._hopeless is None and self.maker.reads_ahead:
            try:
                announced = self._announce(chunks)
            except (StepInvalid, FunctionUnusable) as error:
                self._hopeless = str(error)
        return PlannedOrder(chunks, announced)

    def _announce(self, chunks: list[PlannedChunk]) -> Announced:
        """Request the samples of an order: by the blocks that are this worker's, else by rows."""
        blocks: list[Requested] = []
        wanted: list[int] = []
        shared: list[tuple[int, int]] = []
        for chunk, _rows, contents in chunks:
            samples = contents if contents.ndim == 1 else contents[:, 1]  # of documents
            if self._blocks is not None:
                found, samples = self._blocks.begin(chunk.epoch, samples, chunk.share)
                blocks += found
            good = [sample for sample in samples.tolist() if sample not in self.quarantined]
            wanted += good
            draw_epoch = self._plan.draw_epoch(Position(chunk.epoch, chunk.step))
            shared += [(draw_epoch, sample) for sample in good]
            wanted += [other for sample in contents.flat for other in self.maker.others(draw_epoch, int(sample))]
        epochs = {self._plan.draw_epoch(Position(chunk.epoch, chunk.step)) for chunk, _rows, _samples in chunks}
        announced = self.maker.announce(self.maker.to_read(wanted), min(epochs) if len(epochs) == 1 else None)
        self.maker.share(shared, announced.requested)
        return announced._replace(blocks=tuple(blocks))

    def _request_block(self, epoch: int, samples: Sequence[int]) -> Requested:
        """Request a block for several orders."""
        requested = self.maker.request_block(samples)
        copies = (copy << COPY_BIT | epoch for copy in range(self._plan.repeats))
        self.maker.share(((copy, sample) for copy in copies for sample in samples), requested)
        return requested


def _strategy(context: StreamContext) -> Strategy:
    """The strategy of a stream."""
    if context.message.pack:
        from batchd.worker.packs import PackedRows  # noqa: PLC0415  of these streams alone

        return PackedRows(context)
    if context.maker.makes_files:
        return ManyFiles(context)
    return ManyRows(context) if context.maker.makes_rows else OneByOne(context)


def _planner(plan: Plan, tables: Tables, *, is_packed: bool) -> Callable[[Position, Rows], NDArray[np.int64]]:
    """The function that says what some rows of a position get: ``ChunkRows.samples``."""
    if is_packed:
        from batchd.worker.packs import planned_documents  # noqa: PLC0415  of these streams alone

        return partial(planned_documents, plan, tables)
    return PlannedRows(plan).samples


class PlannedRows:
    """Plans the samples of an order's rows, and of the epoch's rows behind them.

    The next order is mostly about these, and two hundred cost as much as twenty: a call of NumPy.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._epoch = -1
        self._first = 0
        """The place in the epoch that ``_samples`` begin with."""
        self._samples: NDArray[np.int64] = np.empty(0, np.int64)

    def samples(self, position: Position, rows: Rows) -> NDArray[np.int64]:
        """As ``Plan.indices_of``: int64 ``[rows]``, shared, so it must not be written to."""
        first, count = self._plan.first_place(position) + rows[0], rows[-1] + 1 - rows[0]
        start = first - self._first
        if position.epoch != self._epoch or start < 0 or start + count > len(self._samples):
            planned = max(count, min(ROWS_AHEAD, self._plan.samples - first))
            self._epoch, self._first, start = position.epoch, first, 0
            self._samples = self._plan.indices(position, rows[0], planned)
        samples = self._samples[start : start + count]
        return samples if len(rows) == count else samples[np.asarray(rows, np.int64) - rows[0]]
