"""The workers of this host, and their orders. WORKER HOST process.

    FillRows -> waiting, in order -> at its worker (two at most) -> OrderFilled + rows
                   |                      |        |
              WithdrawOrder           WithdrawOrder  +--(it dies)--> WorkerDown
                   |                      |
              OrderFilled, at once    OrderFilled when it is done; both without rows

The workers are those of a daemon (``worker.supervisor``), and so are the rules for starts,
restarts and stuck workers (``core.fleet``). The difference: a worker's further orders wait here, so
an order that is withdrawn early is never begun.

Where no sample of a stream can be read here, for example without credentials, the worker host
refuses the stream with the reason, after its answer.

Invariant: each order of the present link gets one answer, or its worker is reported dead. Results
of orders of former links are dropped.
"""

import mmap
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from time import monotonic

import structlog

from batchd.core import events
from batchd.core.actions import Action, DismissWorker, KillWorker, SpawnWorker
from batchd.core.fleet import Fleet, Order, Worker, WorkerState
from batchd.core.measure import Moment
from batchd.core.ring import Slot
from batchd.core.rows import Rows, are_runs, rows_of
from batchd.core.state import GAP_S, TICK_S
from batchd.core.tenants import EVERYBODY, Account, Tenant
from batchd.core.work import NO_WORK, Work
from batchd.pool.messages import ORDERS_MAX, ROW_FRAME_BYTES, FillRows
from batchd.pool.worker_host.streams import OpenedStream
from batchd.runtime.child_log import ChildOutput
from batchd.runtime.children import Linked
from batchd.runtime.poller import Poller
from batchd.runtime.sandbox import Access
from batchd.runtime.slots import map_readable
from batchd.runtime.tcp.sent_memory import SentMemory
from batchd.worker import messages as orders
from batchd.worker.supervisor import WorkerProcesses
from batchd_wire.codec import Message
from batchd_wire.fields import SlotLayout
from batchd_wire.position import Position
from batchd_wire.tcp import pieces

_log = structlog.get_logger()

MEMORY_NAME = "batchd-scratch"
SCRATCH_MAX = 3
"""Number for one worker and one stream: two at the worker, and one that is being sent."""
KEPT_IDLE_S = 10.0
"""Time for which an idle one keeps its pages: fresh pages cost more than the rows."""
SAMPLE_TIMEOUT_S = 60.0
"""Placeholder until a gateway sends the timeout; there are no orders before that."""
_DAEMON = Account("", Tenant(EVERYBODY), "", 0.0)
"""At whose expense orders are: the daemon has the accounts of its trainers."""


class OrderMemory:
    """Memory for the rows of one order at a time: a worker writes, ZeroMQ sends from it.

        free --take--> at its worker --rows--> being sent --(ZeroMQ has finished)--> free
                            |                                                        |
                            +--- withdrawn, or its link has ended ------------------>+

    It has the layout of a slot with room for the longest order; an order uses its first rows. Each
    belongs to one worker and one stream: a ragged row relies on the bytes that this worker left in
    it (``data.pipeline.shapes.stages``). With buckets, each order has the layout of its own. Raises
    ``OSError`` without memory or descriptors.

    Invariant: a worker does not get it while ZeroMQ sends from it. Each page that a worker writes
    was reserved, so without memory the reservation fails instead of the worker.
    """

    def __init__(self, number: int, layout: SlotLayout) -> None:
        self.number = number
        self.layout = layout
        self.is_free = True
        self._reserved: dict[int, int] = {}
        """Rows whose memory is reserved, by the bucket of their layout."""
        self._used_s = monotonic()
        with ExitStack() as where_it_fails:
            self.descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
            where_it_fails.callback(os.close, self.descriptor)
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, layout.slot_bytes)
            self._mapped: mmap.mmap | None = map_readable(self.descriptor, layout.slot_bytes)
            where_it_fails.pop_all()

    def take(self, rows: int, bucket: int = 0) -> None:
        """Reserve memory for ``rows`` rows and mark it as used. Raises ``OSError`` without it."""
        if rows > self._reserved.get(bucket, 0):
            for field in self.layout.of(bucket).fields:
                os.posix_fallocate(self.descriptor, field.offset, rows * field.row_bytes)
            self._reserved[bucket] = rows
        self.is_free = False

    def memory(self) -> memoryview:
        """The whole memory, read-only: uint8 ``[slot_bytes]``. It may outlive the scratch."""
        assert self._mapped is not None, "it is open"
        return memoryview(self._mapped)

    def frames(self, view: memoryview, rows: int, bucket: int = 0) -> list[memoryview]:
        """Cut the first ``rows`` rows out of a view of ``memory`` into the frames to send."""
        return [view[start:end] for start, end in pieces(self.layout.of(bucket), 0, rows, ROW_FRAME_BYTES)]

    def release(self) -> None:
        """Mark it as free: its rows were sent, or are not needed."""
        self.is_free = True
        self._used_s = monotonic()

    def rest(self) -> None:
        """Give the pages back if it has been idle for long; then its bytes are zeros."""
        if self.is_free and self._reserved and monotonic() - self._used_s > KEPT_IDLE_S:
            os.ftruncate(self.descriptor, 0)
            os.ftruncate(self.descriptor, self.layout.slot_bytes)
            self._reserved.clear()

    def close(self) -> None:
        """Close it. The memory lasts until its worker and ZeroMQ have released it."""
        os.close(self.descriptor)
        self._mapped = None


@dataclass(slots=True, eq=False)
class _HostOrder:
    """An order of a gateway. ``number``: the number on this host, never used twice."""

    number: int
    fill: FillRows
    stream: OpenedStream
    rows: Rows
    scratch: OrderMemory | None = None
    is_withdrawn: bool = False


class HostWorkers:
    """Starts workers, gives them orders, and sends the rows."""

    def __init__(
        self,
        poller: Poller,
        count: int,
        send: Callable[[Message, Sequence[memoryview]], None],
        launched: Linked | None = None,
        output: ChildOutput | None = None,
    ) -> None:
        self._events: deque[events.Event] = deque()
        self._processes = WorkerProcesses(poller, self._events.append, launched, output)
        self._count = count
        self._moment = Moment()
        self._moment.now_s = monotonic()
        self._fleet = Fleet(count, self._processes.kind, SAMPLE_TIMEOUT_S, self._moment)
        self._sent = SentMemory(poller)
        self._send = send
        self._link = 0
        self._reported: set[int] = set()
        """Workers that the present link knows."""
        self._waiting: defaultdict[int, deque[_HostOrder]] = defaultdict(deque)
        self._in_hand: dict[int, _HostOrder] = {}
        """By number: orders that their worker has."""
        self._scratches: defaultdict[tuple[int, int], list[OrderMemory]] = defaultdict(list)
        """By worker and stream."""
        self._reasons: dict[int, str] = {}
        """Why a worker is being killed."""
        self._last_number = 0
        self._last_scratch = 0
        poller.every(TICK_S, self._pass_time)
        poller.at(lambda: self._fleet.next_spawn_s or inf, self._pass_time)

    # --- the link ---------------------------------------------------------------------------------

    def begin_link(self, link: int, sample_timeout_s: float) -> None:
        """Report the workers that take orders to the gateway of a new link."""
        self._link = link
        self.use_limits(sample_timeout_s)
        for worker in self._fleet.workers.values():
            if worker.state is WorkerState.READY:
                self._report_up(worker.number)

    def use_limits(self, sample_timeout_s: float) -> None:
        """Kill workers whose sample takes longer than ``sample_timeout_s``."""
        self._fleet.sample_timeout_s = sample_timeout_s

    def end_link(self) -> None:
        """Forget the orders of the link. Rows of orders that workers have begun are dropped."""
        self._link = 0
        self._reported.clear()
        self._waiting.clear()

    def fill(self, message: FillRows, stream: OpenedStream) -> bool:
        """Take an order; false if it is invalid. Its worker may be gone already."""
        rows = rows_of(message.runs) if are_runs(message.runs, stream.message.batch_size) else ()
        buckets = len(stream.layout.buckets) or 1
        if message.bucket >= buckets or not 0 < len(rows) <= stream.layout.of(message.bucket).rows:
            return False
        if message.worker in self._fleet.workers:
            if len(self._waiting[message.worker]) >= ORDERS_MAX:
                return False
            self._last_number += 1
            self._waiting[message.worker].append(_HostOrder(self._last_number, message, stream, rows))
            self._begin_orders(message.worker)
        return True

    def withdraw(self, worker: int, order: int) -> None:
        """Drop an order that waits, and do not send the rows of one that was begun."""
        for begun in self._in_hand.values():
            if (begun.fill.link, begun.fill.worker, begun.fill.order) == (self._link, worker, order):
                begun.is_withdrawn = True
        for waiting in [waiting for waiting in self._waiting.get(worker, ()) if waiting.fill.order == order]:
            self._drop(worker, waiting)

    def quarantine(self, stream: OpenedStream, samples: Sequence[int]) -> None:
        """Treat further samples of a stream as bad."""
        stream.quarantined += samples
        self._processes.quarantine(stream.number, samples)

    def use_storage(self, storage: tuple[int, int, int]) -> None:
        """Have all workers use these limits for file servers."""
        self._processes.use_storage(storage)

    def renew(self, reason: str) -> None:
        """Replace all workers; their orders end with them."""
        self._moment.now_s = monotonic()
        actions: list[Action] = []
        for worker in self._fleet.workers.values():
            self._fleet.end(worker, reason, actions)
        self._perform(actions)

    def enclose(self, needed: Access | None) -> None:
        """Let workers reach what one more stream needs: others replace those that cannot."""
        if self._processes.enclose(needed):
            self._moment.now_s = monotonic()
            self._fleet.resize(self._count, renews=True)
            self._pass_time()

    def forget(self, stream: OpenedStream) -> None:
        """Close a stream. Workers first finish its orders that they have begun."""
        for begun in self._in_hand.values():
            begun.is_withdrawn |= begun.stream is stream
        for worker, waiting in self._waiting.items():
            for order in [order for order in waiting if order.stream is stream]:
                self._drop(worker, order)
        keys = [key for key in self._scratches if key[1] == stream.number]
        scratches = [scratch for key in keys for scratch in self._scratches.pop(key)]
        self._processes.forget_slots([scratch.number for scratch in scratches])
        self._processes.forget_stream(stream.number)
        for scratch in scratches:
            scratch.close()

    # --- the loop ---------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True if no order of the link is left, and all rows were sent."""
        has_any = any(self._waiting.values()) or any(begun.fill.link == self._link for begun in self._in_hand.values())
        return not has_any and not len(self._sent)

    @property
    def ready(self) -> int:
        """Workers that take orders."""
        return self._fleet.ready

    def leave(self) -> None:
        """Start no further worker."""
        self._fleet.is_ending = True

    def handle_events(self) -> None:
        """Act on what the workers did, in each round of the loop."""
        while self._events:
            self._moment.now_s = monotonic()
            event = self._events.popleft()
            if isinstance(event, events.WorkerReady):
                self._fleet.is_up(event.worker)
                if self._fleet.workers[event.worker].state is WorkerState.READY:
                    self._report_up(event.worker)
            elif isinstance(event, events.ChunkDone):
                self._done(event)
            elif isinstance(event, events.WorkerGone):
                self._gone(event)

    def close(self, wait_s: float) -> None:
        """End all workers. The connection is closed, so ZeroMQ has released all rows."""
        self._processes.close(wait_s)
        self._sent.close()
        for scratches in self._scratches.values():
            for scratch in scratches:
                scratch.close()
        self._scratches.clear()

    def _pass_time(self) -> None:
        actions: list[Action] = []
        now = monotonic()
        gap_s, self._moment.now_s = now - self._moment.now_s, now
        if gap_s > GAP_S:  # the machine was paused
            self._fleet.forgive(gap_s)
        self._fleet.dismiss_idle(actions)
        self._fleet.spawn_due(actions)
        self._fleet.kill_late(actions)
        for worker in self._processes.pids():
            self._fleet.observe(worker, self._processes.note(worker), actions)
        self._perform(actions)
        for scratches in self._scratches.values():
            for scratch in scratches:
                scratch.rest()

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SpawnWorker():
                    self._processes.start(action.worker)
                case KillWorker():
                    self._reasons[action.worker] = action.reason
                    self._processes.kill(action.worker, action.reason)
                case DismissWorker():
                    self._processes.dismiss(action.worker)

    # --- orders -----------------------------------------------------------------------------------

    def _drop(self, worker: int, order: _HostOrder) -> None:
        """End an order that was not sent to its worker."""
        self._waiting[worker].remove(order)
        self._send(events.OrderFilled(self._link, worker, order.fill.order, NO_WORK, [], ""), ())

    def _begin_orders(self, number: int) -> None:
        """Send waiting orders to a worker while it takes orders and has memory for them."""
        worker, waiting = self._fleet.workers.get(number), self._waiting.get(number)
        while waiting and worker is not None and worker.state is WorkerState.READY:
            if len(worker.orders) >= worker.kind.orders_max:
                return
            order = waiting[0]
            try:
                scratch = self._take_scratch(number, order)
            except OSError as error:
                actions: list[Action] = []
                self._fleet.end(worker, f"no memory for its rows: {error.strerror}", actions)
                self._perform(actions)
                return
            if scratch is None:
                return  # all of them are being sent
            order.scratch = scratch
            waiting.popleft()
            self._give(worker, order, scratch)

    def _take_scratch(self, worker: int, order: _HostOrder) -> OrderMemory | None:
        """Free memory of a worker for a stream; None if all is in use. Raises ``OSError``."""
        scratches = self._scratches[worker, order.stream.number]
        scratch = next((scratch for scratch in scratches if scratch.is_free), None)
        if scratch is None and len(scratches) < SCRATCH_MAX:
            self._last_scratch += 1
            scratch = OrderMemory(self._last_scratch, order.stream.layout)
            scratches.append(scratch)
        if scratch is not None:
            scratch.take(len(order.rows), order.fill.bucket)
        return scratch

    def _give(self, worker: Worker, order: _HostOrder, scratch: OrderMemory) -> None:
        """Send an order, after the stream and the memory if the worker does not know them."""
        stream, fill, number = order.stream, order.fill, worker.number
        if self._processes.lacks_stream(number, stream.number):
            with stream.descriptors() as descriptors:
                self._processes.send(number, stream.message, *descriptors)
            self._processes.send_quarantined(number, stream.number, stream.quarantined)
        if self._processes.lacks_slot(number, scratch.number):
            self._processes.send(number, orders.UseSlot(scratch.number, stream.layout.slot_bytes), scratch.descriptor)
        position = Position(fill.epoch, fill.step)
        slot = Slot(scratch.number)
        self._fleet.give(worker, Order(order.number, stream.number, slot, position, order.rows, _DAEMON))
        self._in_hand[order.number] = order
        chunk = orders.Chunk(order.number, scratch.number, *position, fill.runs, [])
        self._processes.send(number, orders.FillChunks(stream.number, [chunk], is_packed=True))

    def _done(self, event: events.ChunkDone) -> None:
        """Send the rows of a finished order from the memory that the worker has filled."""
        (number,) = event.orders
        order = self._in_hand.pop(number)
        fill, scratch = order.fill, order.scratch
        assert scratch is not None, "the order is at a worker"
        self._fleet.done(self._fleet.workers[event.worker], event.orders, event.work.busy_us)
        is_wanted = fill.link == self._link and not order.is_withdrawn
        frames = self._frames(scratch, order) if is_wanted else ()
        if not is_wanted:
            scratch.release()
        if fill.link == self._link:
            work: Work = order.stream.as_daemon_counts(event.work)
            self._send(events.OrderFilled(fill.link, fill.worker, fill.order, work, event.bad, event.hopeless), frames)
            if event.hopeless:
                _log.error("stream cannot be filled here", stream=order.stream.name, reason=event.hopeless)
                self._send(events.StreamRefused(fill.link, fill.stream, event.hopeless), ())
        self._begin_orders(event.worker)

    def _frames(self, scratch: OrderMemory, order: _HostOrder) -> Sequence[memoryview]:
        """The frames of an order's rows; the memory is free again when ZeroMQ has sent them."""

        def released() -> None:
            scratch.release()
            self._begin_orders(order.fill.worker)

        view = self._sent.view(scratch.memory(), released)
        return scratch.frames(view, len(order.rows), order.fill.bucket)

    # --- workers ----------------------------------------------------------------------------------

    def _report_up(self, worker: int) -> None:
        if self._link:
            self._reported.add(worker)
            self._send(events.WorkerUp(self._link, worker, self._processes.decoders), ())

    def _gone(self, event: events.WorkerGone) -> None:
        """Remove a dead worker with its orders and its memory, and report it."""
        number = event.worker
        worker = self._fleet.gone(number)
        self._waiting.pop(number, None)
        for order in worker.orders:
            del self._in_hand[order]
        for key in [key for key in self._scratches if key[0] == number]:
            for scratch in self._scratches.pop(key):
                scratch.close()
        reason = self._reasons.pop(number, "")
        if number in self._reported:
            self._reported.discard(number)
            self._send(events.WorkerDown(self._link, number, f"{event.how}: {reason}" if reason else event.how), ())
