"""The loop: waits, makes events, lets the core decide, performs its actions. DAEMON process.

    zmq.Poller( ROUTER over TCP | epoll( local trainers, worker channels, pidfds, signals ) )
         |                                     |
         +------- callbacks only enqueue ------+--> queue -> DaemonState.handle -> actions, in order

Single-threaded: there is nothing to lock. Invariant: an action is performed after all actions that
were decided before it, and only ``DaemonState`` decides.
"""

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import structlog
import zmq

from batchd import failpoints
from batchd.core.actions import (
    AdmitProducer,
    AdmitSubscription,
    CommitSlot,
    CreateSlot,
    DismissWorker,
    EndStream,
    FreeSlots,
    GrantLease,
    KillWorker,
    LendPlace,
    OrderChunk,
    QuarantineSample,
    Refuse,
    ReportBad,
    ReportMismatch,
    ReportStopped,
    ReserveSlot,
    SpawnWorker,
    TakeSample,
)
from batchd.core.events import BatchSent, DrainAsked, SlotLost, Ticked, WorkerGone, WorkerObserved
from batchd.core.state import TICK_S, DaemonState
from batchd.daemon.descriptors import Selector
from batchd.daemon.doors import Doors, Query, Queue, SessionLog
from batchd.daemon.limits import LinesPerMinute, OncePerMinute
from batchd.daemon.memory.available import available_bytes
from batchd.daemon.memory.cache_file import CacheOnDisk
from batchd.daemon.memory.cache_memory import CacheMemory, allow_caches, different
from batchd.daemon.memory.slots import SlotPool
from batchd.daemon.queries import Queries
from batchd.daemon.service.observer import ObserverProcess
from batchd.daemon.streams import ServedStream
from batchd.daemon.workers.interface import WorkerBook, Workers
from batchd.orders.worker import FillChunk, ForgetSlots, ForgetStream, Quarantine, UseSlot
from batchd_wire.messages import PlaceLent, Producing, PushTaken, Refused, Subscribed
from batchd_wire.slot import SlotHeader

_log = structlog.get_logger()

BAD_SAMPLE_LINES_PER_MINUTE = 120
"""Lines about bad samples of one stream; `batchd bad` has all of them."""


@dataclass(slots=True, eq=False)
class Loop:
    """Handles the events of the queue, and has the clock. It opens and closes no part."""

    queue: Queue
    """Made first, and filled by all that is given here."""
    state: DaemonState
    streams: dict[int, ServedStream]
    memory: SlotPool
    selector: Selector
    workers: Workers
    doors: Doors
    observer: ObserverProcess
    queries: Queries
    lack: str | None = None
    """Why there was no memory for a slot, the last time that there was none."""
    _once_per_minute: OncePerMinute = field(default_factory=OncePerMinute)
    _lines_per_minute: LinesPerMinute = field(default_factory=lambda: LinesPerMinute(BAD_SAMPLE_LINES_PER_MINUTE))
    _session_log: SessionLog = field(default_factory=SessionLog)
    _book: WorkerBook = field(default_factory=WorkerBook)
    _poller: zmq.Poller = field(default_factory=zmq.Poller)
    _next_tick_s: float = 0.0
    _deadline_s: float | None = None
    _performers: dict[type, Callable[[Any], None]] = field(init=False)

    def __post_init__(self) -> None:
        self._poller.register(self.selector.fileno(), zmq.POLLIN)
        for one in (one for door in self.doors for one in door.sockets):
            self._poller.register(one, zmq.POLLIN)
        self._performers = {
            SpawnWorker: self._spawn_worker,
            KillWorker: self._kill_worker,
            DismissWorker: self._dismiss_worker,
            CreateSlot: self._create_slot,
            ReserveSlot: self._reserve_slot,
            CommitSlot: self._commit_slot,
            OrderChunk: self._order_chunk,
            AdmitSubscription: self._admit,
            GrantLease: self._grant,
            AdmitProducer: self._admit_producer,
            LendPlace: self._lend_place,
            TakeSample: self._take_sample,
            Refuse: self._refuse,
            ReportBad: self._report_bad,
            ReportMismatch: self._report_mismatch,
            QuarantineSample: self._quarantine,
            ReportStopped: self._report_stopped,
            FreeSlots: self._free_slots,
            EndStream: self._end_stream,
        }

    def drain(self, within_s: float) -> None:
        """Start nothing new; end when work in progress is done, or after ``within_s`` seconds."""
        if self._deadline_s is None:
            self._deadline_s = monotonic() + within_s
            self.queue.append(DrainAsked())
            failpoints.passing("daemon.draining")

    def stop(self) -> None:
        """End now."""
        self._deadline_s = monotonic()

    def run(self, after_round: Callable[[], None]) -> None:
        """Run until drained or stopped; ``after_round`` is called at the end of each round."""
        self._tick()
        self._handle_queue()  # the core must know of the workers that were started ahead before it hears from them
        more = False
        while not self._is_over():
            ready = dict(self._poller.poll(0 if more or self.queue else self._patience_ms()))
            if self.selector.fileno() in ready:
                self.selector.dispatch()
            heard = [door.receive(ready) for door in self.doors]
            self._tick()
            self._handle_queue()
            more = self.memory.free_some() or any(heard)
            after_round()

    def _handle_queue(self) -> None:
        while self.queue:
            event = self.queue.popleft()
            if isinstance(event, Query):
                self.queries.answer(event)
                continue
            self._session_log.observe(event)
            if isinstance(event, WorkerGone):
                self._book.drop_worker(event.worker)
            for action in self.state.handle(event, monotonic()):
                self._performers[type(action)](action)

    def _is_over(self) -> bool:
        return self._deadline_s is not None and (self.state.is_drained or monotonic() >= self._deadline_s)

    def _patience_ms(self) -> int:
        """How long nothing has to be done unless something happens."""
        due_s = min(self._next_tick_s, *(monotonic() + door.patience_s for door in self.doors))
        spawn_s = self.state.fleet.next_spawn_s
        if spawn_s is not None:
            due_s = min(due_s, spawn_s)
        return max(0, min(int(TICK_S * 1000), int((due_s - monotonic()) * 1000) + 1))

    def _tick(self) -> None:
        """Let time pass for the core, and show it what the workers have in hand."""
        now = monotonic()
        spawn_s = self.state.fleet.next_spawn_s
        if now < self._next_tick_s and (spawn_s is None or now < spawn_s):
            return
        self._next_tick_s = now + TICK_S
        for door in self.doors:
            door.tick()
        self.observer.tick()
        self._allow_caches()
        self.queue.append(Ticked())
        for worker in self.workers.pids():
            self.queue.append(WorkerObserved(worker, self.workers.note(worker)))

    def _allow_caches(self) -> None:
        """Let caches fill with memory that no ring was promised. Log trouble with their files."""
        every = different(stream.cache for stream in self.streams.values())
        for cache in every:
            if isinstance(cache, CacheOnDisk):
                cache.tell_troubles()
        caches = [cache for cache in every if isinstance(cache, CacheMemory)]
        if caches:
            rings_bytes = sum(stream.spec.slots_max * stream.layout.slot_bytes for stream in self.streams.values())
            with suppress(OSError):  # to find out takes a descriptor: where there is none, what was said before counts
                allow_caches(caches, available_bytes() - max(0, rings_bytes - self.memory.total_bytes))

    # --- performing ---------------------------------------------------------------------------------------------------

    def _spawn_worker(self, action: SpawnWorker) -> None:
        try:
            self.workers.spawn(action.worker)
        except OSError as error:
            _log.error("worker not started", worker=action.worker, reason=str(error))
            self.queue.append(WorkerGone(action.worker, "it could not be started", None))
        failpoints.passing("daemon.worker.spawned")

    def _kill_worker(self, action: KillWorker) -> None:
        self.workers.kill(action.worker, action.reason)

    def _dismiss_worker(self, action: DismissWorker) -> None:
        self.workers.dismiss(action.worker)

    def _create_slot(self, action: CreateSlot) -> None:
        stream = self.streams[action.stream]
        try:
            self.memory.create(action.slot, stream.layout.slot_bytes)
            failpoints.passing("daemon.slot.created")
        except (MemoryError, OSError) as error:
            self.lack = f"no memory for a slot of stream {stream.name!r}: {error}"
            if self._once_per_minute.allows(f"no memory {action.stream}"):
                advice = "the ring stays smaller; set memory = to less, or give the machine or the cgroup more"
                _log.warning("no memory for a slot", stream=stream.name, reason=str(error), advice=advice)
            self.queue.append(SlotLost(action.stream, action.slot, str(error)))

    def _reserve_slot(self, action: ReserveSlot) -> None:
        if action.slot in self.memory:
            self.memory.reserve(action.slot)
            failpoints.passing("daemon.slot.reserved")

    def _commit_slot(self, action: CommitSlot) -> None:
        failpoints.passing("daemon.done.received")
        layout = self.streams[action.stream].layout
        payload_bytes = action.samples * layout.row_bytes
        epoch, step = action.position
        self.memory.commit(
            action.slot, SlotHeader(action.generation, action.slot, epoch, step, action.samples, payload_bytes)
        )

    def _order_chunk(self, action: OrderChunk) -> None:
        """Send an order, behind whatever the worker must know for it."""
        if action.slot not in self.memory:
            return  # its memory could not be had; SlotLost is in the queue
        stream, worker = self.streams[action.stream], action.worker
        if self._book.enter_stream(worker, action.stream):
            self.workers.send(worker, stream.message, *stream.descriptors)
            for first in range(0, len(stream.quarantined), _QUARANTINED_AT_ONCE):
                part = stream.quarantined[first : first + _QUARANTINED_AT_ONCE]
                self.workers.send(worker, Quarantine(action.stream, part))
        if self._book.enter_slot(worker, action.slot):
            message = UseSlot(action.slot, self.memory.slot_bytes(action.slot))
            self.workers.send(worker, message, self.memory.writable(action.slot))
        epoch, step = action.position
        rows = action.first, action.count
        places = list(action.places)
        self.workers.send(worker, FillChunk(action.order, action.stream, action.slot, epoch, step, *rows, places))
        failpoints.passing("daemon.order.sent")

    def _admit(self, action: AdmitSubscription) -> None:
        stream = self.streams[action.stream]
        course = action.course
        self.doors.send(
            action.session,
            Subscribed(
                request=action.request,
                subscription=action.subscription,
                epoch=course.epoch,
                step=course.base,
                fingerprint=stream.spec.fingerprint,
                samples=course.plan.samples,
                batch_size=course.plan.batch_size,
                steps=course.plan.steps,
                rounds=course.rounds,
                first_rounds=course.first_rounds,
                window=action.window,
                layout=stream.layout.to_wire(),
                classes=stream.classes,
            ),
        )
        self._session_log.subscribed(action, stream.name, self.doors.peer(action.session))
        failpoints.passing("daemon.subscribed")

    def _grant(self, action: GrantLease) -> None:
        door = self.doors.of(action.session)
        if door is not None:
            door.deliver(action, self.streams[action.stream].layout)
        elif action.is_remote:  # its trainer is gone, and such a lease ends by this event alone
            sent = BatchSent(action.session, action.subscription, action.sequence, action.generation)
            self.queue.append(sent)

    def _admit_producer(self, action: AdmitProducer) -> None:
        stream = self.streams[action.stream]
        live, mailbox = stream.spec.live, stream.mailbox
        assert live is not None, "the core admits producers to live streams alone"
        assert mailbox is not None
        door = self.doors.of(action.session)
        if door is not None:
            door.share_mailbox(action.session, action.stream, mailbox)
            door.send(action.session, Producing(action.request, action.stream, live.capacity, stream.place_layout))
        self._session_log.produces(action, stream.name, self.doors.peer(action.session))
        failpoints.passing("daemon.producer.admitted")

    def _lend_place(self, action: LendPlace) -> None:
        self.doors.send(action.session, PlaceLent(action.request, action.place))
        failpoints.passing("daemon.place.lent")

    def _take_sample(self, action: TakeSample) -> None:
        failpoints.passing("daemon.push.received")
        self.doors.send(action.session, PushTaken(action.request, action.next_place))

    def _refuse(self, action: Refuse) -> None:
        self.doors.send(action.session, Refused(action.request, action.subscription, action.error, action.text))

    def _report_bad(self, action: ReportBad) -> None:
        stream = self.streams[action.stream]
        write = _log.warning if self._lines_per_minute.allows(f"bad samples of {stream.name}") else _log.debug
        write(
            "bad sample",
            stream=stream.name,
            path=action.path,
            reason=action.reason,
            treatment=stream.spec.on_error,
        )

    def _report_mismatch(self, action: ReportMismatch) -> None:
        stream = self.streams[action.stream]
        if self._once_per_minute.allows(f"mismatch {action.session}"):
            _log.warning(
                "batch did not match its checksums",
                stream=stream.name,
                session=action.session,
                epoch=action.position.epoch,
                step=action.position.step,
                advice="memory or a network between here and there is not sound; batchd status counts how often",
            )

    def _quarantine(self, action: QuarantineSample) -> None:
        stream = self.streams[action.stream]
        stream.quarantined.append(action.sample)
        _log.error("sample quarantined", stream=stream.name, sample=action.sample, reason=action.reason)
        for worker in self._book.workers_of(action.stream):
            self.workers.send(worker, Quarantine(action.stream, [action.sample]))

    def _report_stopped(self, action: ReportStopped) -> None:
        _log.error("stream stopped", stream=self.streams[action.stream].name, reason=action.text)

    def _free_slots(self, action: FreeSlots) -> None:
        for worker, slots in self._book.drop_slots(action.slots).items():
            self.workers.send(worker, ForgetSlots(slots))
        for door in self.doors:
            door.withdraw_slots(action.slots)
        self.memory.free(action.slots)
        failpoints.passing("daemon.slots.freed")

    def _end_stream(self, action: EndStream) -> None:
        stream = self.streams.pop(action.stream)
        for worker in self._book.drop_stream(action.stream):
            self.workers.send(worker, ForgetStream(action.stream))
        stream.close()
        failpoints.passing("daemon.stream.ended")


_QUARANTINED_AT_ONCE = 1024


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """SIGTERM, SIGINT and SIGHUP through a descriptor, which the loop reads."""

    def __init__(self, selector: Selector, callback: Callable[[int], None]) -> None:
        self.selector = selector
        self._callback = callback
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        # The descriptor is set before the handlers: a signal between the two would be lost.
        self._wakeup_before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _ignore) for number in _SIGNALS}
        selector.add(self._ours.fileno(), self._read)

    def close(self) -> None:
        """Put everything back as it was."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self.selector.remove(self._ours.fileno())
        self._ours.close()
        self._theirs.close()

    def _read(self) -> None:
        for number in os.read(self._ours.fileno(), 64):
            self._callback(number)


def _ignore(_number: int, _frame: object) -> None:
    """Nothing to do: the interpreter has written the signal's number to the wake-up descriptor."""
