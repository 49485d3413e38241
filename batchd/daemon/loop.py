"""The loop: waits, makes events, lets the core decide, performs its actions. DAEMON process.

    Poller( ROUTER over TCP | local trainers, worker channels, pidfds, signals | timers )
              |                             |
              +--- handlers only enqueue ---+--> queue -> DaemonState.handle -> actions, in order
                                                   +----> side work: questions, reports

A portion of messages ends after ``PORTION_S`` of work for them, so that peers with messages that
take long get no more of a round than others.

Single-threaded: there is nothing to lock. Invariant: an action is performed after all actions that
were decided before it, and only ``DaemonState`` decides.
"""

import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import Any

import numpy as np
import structlog

from batchd.core import actions as act
from batchd.core import events
from batchd.core.admission import unknown_stream
from batchd.core.digests import EpochDigests
from batchd.core.state import TICK_S, DaemonState
from batchd.core.suspicion import ListedBadSample
from batchd.daemon.bad_lists import BadLists
from batchd.daemon.derive.requests import Deriver
from batchd.daemon.doors import Door, Doors, Query, Queue, Reported, SessionLog
from batchd.daemon.identity import weights_of
from batchd.daemon.kept_log import KeptLog
from batchd.daemon.observer import ObserverProcess
from batchd.daemon.reload.requests import Reloader
from batchd.daemon.reports import StreamReports, granted_part
from batchd.daemon.side_work import QUESTIONS_WAITING_MAX, GrantedReports, SideWork
from batchd.daemon.workers import AllWorkers
from batchd.runtime import __version__, failpoints
from batchd.runtime.available import available_bytes
from batchd.runtime.cpus import available_cpus
from batchd.runtime.limits import QUESTIONS_PER_TICK, LinesPerMinute, OncePerMinute
from batchd.runtime.mapped_files import unmap_loaded_pages
from batchd.runtime.poller import Poller, Timer
from batchd.runtime.slots import SlotPool
from batchd.stream.cache_file import CacheOnDisk
from batchd.stream.cache_memory import CacheMemory, allow_caches, different
from batchd.stream.fingerprints import changes_since
from batchd.stream.served import ServedStream
from batchd_wire import messages
from batchd_wire.codec import NUMBER_MAX, Message
from batchd_wire.codes import ErrorCode
from batchd_wire.fields import CHECKSUM
from batchd_wire.position import Position
from batchd_wire.reports import PULL_REPORTS
from batchd_wire.slot import SlotHeader
from batchd_wire.status import (
    STATUS_BYTES_MAX,
    DaemonFacts,
    DaemonStatus,
    LocalCounts,
    TcpCounts,
    first_that_fit,
    plain_status,
    shorten,
)

_log = structlog.get_logger()

BAD_SAMPLE_LINES_PER_MINUTE = 120
"""Lines about bad samples of one stream; `batchd bad` has all of them."""
BAD_SHOWN_MAX = 1_000
PORTION_S = 0.005
"""Of each door in a round: messages, and what follows from them, after which the rest waits."""
UNMAPPING_TICK = 2
"""The first one is before the first trainer, which shall not wait; the second one behind the first
batch, or a second later."""


@dataclass(slots=True, eq=False)
class Loop:
    """Handles the events of the queue, and has the clock. It opens and closes no part.

    ``queue`` is made first: all other parts put events into it. ``slot_error``: why a slot found no
    memory, the last time.
    """

    queue: Queue
    state: DaemonState
    streams: dict[int, ServedStream]
    memory: SlotPool
    poller: Poller
    workers: AllWorkers
    doors: Doors
    observer: ObserverProcess
    reloader: Reloader
    deriver: Deriver
    started_s: float
    slot_error: str | None = None
    address: str = ""
    """Of the runtime directory, for trainers on this host."""
    log: KeptLog = field(default_factory=KeptLog)
    bad_lists: BadLists = field(default_factory=BadLists)
    _cpus: int = field(default_factory=available_cpus)
    _once_per_minute: OncePerMinute = field(default_factory=OncePerMinute)
    _lines_per_minute: LinesPerMinute = field(default_factory=lambda: LinesPerMinute(BAD_SAMPLE_LINES_PER_MINUTE))
    _reasons_per_minute: LinesPerMinute = field(default_factory=lambda: LinesPerMinute(1, warns=False))
    """One function may make all samples of a stream bad, for the same reason."""
    _session_log: SessionLog = field(default_factory=SessionLog)
    _side_work: SideWork = field(init=False)
    _ended: deque[events.SessionEnded | events.SessionCutOff] = field(default_factory=deque)
    """Sessions that are gone, and whose subscriptions have not begun to end."""
    _departures: deque[events.Event] = field(default_factory=deque)
    """What is left of the session that is ending: its subscriptions, then itself.

    A round ends as many as it has time for.
    """
    _portion_end_s: float = 0.0
    _status: tuple[float, dict[str, Any]] = (-inf, {})
    """When the last status was made, which several may have asked for, and the status."""
    _reports: dict[int, StreamReports] = field(default_factory=dict)
    """By the stream's number, from its first report on."""
    _timer: Timer = field(init=False)
    _ticks: int = 0
    _delivering: set[int] = field(default_factory=set)
    """Numbers of the streams with a batch that was granted."""
    _deadline_s: float | None = None
    _performers: dict[type, Callable[[Any], None]] = field(init=False)

    def __post_init__(self) -> None:
        self._side_work = SideWork(self._answer, self._refuse_question, self._keep_reports)
        self._timer = self.poller.every(TICK_S, self._tick)
        self.poller.at(lambda: self.state.fleet.next_spawn_s or inf, lambda: self.queue.append(events.Ticked()))
        self.poller.at(lambda: self._side_work.due_s, self._side_work.run)
        for zmq_socket in (zmq_socket for door in self.doors for zmq_socket in door.sockets):
            self.poller.watch_socket(zmq_socket)
        self._performers = {
            act.KillWorker: self._kill_worker,
            act.CreateSlot: self._create_slot,
            act.ReserveSlot: self._reserve_slot,
            act.CommitSlot: self._commit_slot,
            act.OrderChunk: self._order_chunk,
            act.AdmitSubscription: self._admit,
            act.RecordBatch: self._record_batch,
            act.GrantLease: self._grant,
            act.AdmitProducer: self._admit_producer,
            act.LendPlace: self._lend_place,
            act.TakeSample: self._take_sample,
            act.Refuse: self._refuse,
            act.ReportBad: self._report_bad,
            act.ReportMismatch: self._report_mismatch,
            act.QuarantineSample: self._quarantine,
            act.ReportStopped: self._report_stopped,
            act.ReportAway: self._report_away,
            act.ReportBack: self._report_back,
            act.FreeSlots: self._free_slots,
            act.EndStream: self._end_stream,
        }
        for kind in self.workers:
            self._performers |= kind.performers

    def drain(self, within_s: float) -> None:
        """Start nothing new; end when work in progress is done, or after ``within_s`` seconds."""
        if self._deadline_s is None:
            self._deadline_s = monotonic() + within_s
            self.queue.append(events.DrainAsked())
            failpoints.passing("daemon.draining")

    def stop(self) -> None:
        """End now."""
        self._deadline_s = monotonic()

    def run(self, after_round: Callable[[], None]) -> None:
        """Run until drained or stopped; ``after_round`` is called at the end of each round."""
        # the core must know the workers that were started ahead before it hears from them
        self.poller.run_due()
        self._handle_queue()
        more = False
        while not self._is_over():
            ready = self.poller.wait(is_busy=bool(more or self.queue or self._ended or self._departures))
            self._handle_events()  # of the workers: not in the portions of the doors
            heard = [door.receive(ready, self._begin_portion()) for door in self.doors]
            self._handle_queue()
            more = self.memory.free_some() or any(heard)
            after_round()
            for door in self.doors:
                door.flush()

    def _begin_portion(self) -> Callable[[], bool]:
        """Return what handles the messages read so far, and tells whether the portion is over."""
        self._portion_end_s = monotonic() + PORTION_S

        def is_over() -> bool:
            self._handle_events()
            return monotonic() >= self._portion_end_s

        return is_over

    def _handle_queue(self) -> None:
        """Handle all events, but for some departures, and send what workers get by them."""
        self._portion_end_s = monotonic() + PORTION_S
        self._handle_events()
        while self._end_part():
            if monotonic() >= self._portion_end_s:
                break
        for kind in self.workers:
            kind.flush()

    def _handle_events(self) -> None:
        while self.queue:
            event = self.queue.popleft()
            if isinstance(event, Query):
                self._take_query(event)
            elif isinstance(event, Reported):
                self._take_reports(event)
            elif isinstance(event, events.SessionEnded | events.SessionCutOff):
                self._begin_departure(event)
            elif isinstance(event, events.SubscriptionAsked):
                resolved = self.deriver.resolved(event)
                if resolved is not None:
                    self._handle(self._compared(resolved))
            else:
                self._handle(event)

    def _compared(self, asked: events.SubscriptionAsked) -> events.SubscriptionAsked:
        """Say how a stream differs from the one of a trainer's state, or convert the state."""
        number = self.state.numbers.get(asked.stream)  # not of one that a reload has retired
        if number is None or asked.fingerprint is None:
            return asked
        stream = self.streams[number]
        if asked.fingerprint == stream.spec.fingerprint:
            return asked
        changes = changes_since(asked.fingerprint, asked.parts, stream.content)
        if changes.batch_size is None:
            return replace(asked, changes=changes.text)
        plan, sample = stream.spec.plan, asked.sample
        if sample is None:
            sample = plan.rows_before(Position(asked.epoch, asked.step), changes.batch_size)
        sample, every = min(sample, plan.epoch_rows), plan.convertible_every(changes.batch_size)
        if sample % every:
            text = f"{changes.text}; with repeats = {plan.repeats}, batches of both sizes have had the same samples"
            return replace(asked, changes=f"{text} only at multiples of {every:,} samples, and it is at {sample:,}")
        if asked.converts:
            return replace(asked, fingerprint=None, sample=sample)
        return replace(asked, changes=changes.text, is_convertible=True)

    def _begin_departure(self, event: events.SessionEnded | events.SessionCutOff) -> None:
        """End a session in parts: each subscription that ends has others claim what it had."""
        self._ended.append(event)
        while monotonic() < self._portion_end_s and self._end_part():
            pass

    def _end_part(self) -> bool:
        """End a subscription or a session; False if none is left."""
        if not self._departures and self._ended:
            event = self._ended.popleft()
            self._session_log.observe(event)
            leases_from = 0 if isinstance(event, events.SessionEnded) else NUMBER_MAX
            for subscription in self.state.subscriptions_of(event.session):
                self._departures.append(events.SubscriptionEnded(event.session, subscription, leases_from))
            self._departures.append(event)
        if not self._departures:
            return False
        self._handle(self._departures.popleft())
        return True

    def _handle(self, event: events.Event) -> None:
        """Let the core handle an event, and perform its actions."""
        self._session_log.observe(event)
        for action in self.state.handle(event, monotonic()):
            self._performers[type(action)](action)

    def _is_over(self) -> bool:
        return self._deadline_s is not None and (self.state.is_drained or monotonic() >= self._deadline_s)

    def _tick(self) -> None:
        """Half a second has passed, or a stream has delivered its first batch."""
        self._ticks += 1
        if self._ticks == UNMAPPING_TICK:
            unmap_loaded_pages()
        for door in self.doors:
            door.tick()
        self._side_work.tick()
        self.deriver.tick()
        self.observer.tick()
        self._allow_caches()
        self.queue.append(events.Ticked())
        for kind in self.workers:
            kind.tick(self.state)

    def _allow_caches(self) -> None:
        """Let caches fill with memory that no ring was promised. Log trouble with their files."""
        every = different(stream.cache for stream in self.streams.values())
        for cache in every:
            if isinstance(cache, CacheOnDisk):
                cache.tell_troubles()
        caches = [cache for cache in every if isinstance(cache, CacheMemory)]
        if caches:
            known = self.state.streams
            ending = {number for number, stream in known.items() if stream.delivery.is_in_last_epoch}
            useful = {
                id(stream.cache)
                for number, stream in self.streams.items()
                if number not in ending or (stream.cache is not None and stream.cache.spec.kind == "media")
            }
            useful -= {id(cache) for cache in caches if cache.spec.kind == "points" and not self._seeks_points(cache)}
            rings_bytes = sum(stream.ring_bytes for stream in self.streams.values() if not stream.is_derived)
            rings_bytes += self.reloader.applier.daemon.derived_bytes
            # to find out takes a descriptor: without one, the last limits stay
            with suppress(OSError):
                available = available_bytes() - max(0, rings_bytes - self.memory.total_bytes)
                allowed = [cache for cache in caches if id(cache) in useful]
                by_cache = {id(self.streams[number].cache): one for number, one in self.deriver.tenants.items()}
                tenants = [by_cache.get(id(cache)) for cache in allowed]
                allow_caches(allowed, available, tenants, weights_of(self.reloader.applier.daemon))
            for cache in caches:
                if cache.spec.kind == "points" and id(cache) not in useful:
                    cache.allow(0)

    def _seeks_points(self, cache: CacheMemory | CacheOnDisk) -> bool:
        """True if workers may walk files now for a cache of access points.

        A trainer waits for its first batch, so the files of that one are walked later. Points that
        are found in a last epoch are for the next run: they need a disk, and workers that would
        have nothing else to do.
        """
        known = self.state.streams
        begun = [
            stream.delivery
            for number, stream in known.items()
            if number in self._delivering and self.streams[number].cache is cache
        ]
        if any(one.subscriptions and not one.is_in_last_epoch for one in begun):
            return True
        is_kept = bool(begun) and isinstance(cache, CacheOnDisk)
        return is_kept and all(stream.delivery.has_time_to_spare for stream in known.values())

    # --- reports ----------------------------------------------------------------------------------

    def _take_reports(self, event: Reported) -> None:
        """Take what a trainer reports of its batches, if the subscription is its own."""
        found = self.state.course_of(event.session, event.subscription)
        if found is None:
            return
        reports = GrantedReports(*found, event.peer, event.reports)
        refused = self._side_work.report(event, reports)
        if refused:
            reason = f"more than {PULL_REPORTS} in a message, or more at once than are kept for later"
            self._refuse_reports(reports, refused, reason)

    def _keep_reports(self, part: GrantedReports) -> None:
        if part.stream not in self.streams:  # a reload has ended it
            return
        peer, course = part.peer, part.course
        allowed = granted_part(course, part.granted, part.reports)
        if len(allowed) < len(part.reports):
            reason = "they are of batches that the trainer was not granted"
            self._refuse_reports(part, len(part.reports) - len(allowed), reason)
        reason = self._reports_of(part.stream).add(peer.name, course.rank, course.world_size, allowed)
        if reason:
            self._refuse_reports(part, 0, reason)

    def _refuse_reports(self, whose: GrantedReports, count: int, reason: str) -> None:
        """Count reports that are refused, and log that."""
        self._reports_of(whose.stream).refuse(count)
        if self._once_per_minute.allows("reports refused", whose.peer.owner):
            name, pid = whose.peer.name, whose.peer.pid
            _log.warning("report refused", stream=self.streams[whose.stream].name, name=name, pid=pid, reason=reason)

    def _reports_of(self, number: int) -> StreamReports:
        if number not in self._reports:
            spec = self.streams[number].spec
            is_live = spec.live is not None
            self._reports[number] = StreamReports(spec.plan, is_live=is_live, memory_bytes=spec.report_memory)
        return self._reports[number]

    # --- queries ----------------------------------------------------------------------------------

    def _take_query(self, query: Query) -> None:
        """Begin a reload, which is answered at its end; leave any other query to the side work."""
        if isinstance(query.message, messages.AskReload):
            self.reloader.ask(query.session, query.message)
        else:
            self._side_work.ask(query)

    def _refuse_question(self, query: Query) -> None:
        text = f"a session may ask {QUESTIONS_PER_TICK} questions in half a second, and have {QUESTIONS_WAITING_MAX} more wait"
        door = self.doors.of(query.session)
        if door is not None:
            door.answer(query.session, messages.Refused(query.message.request, 0, ErrorCode.TOO_OFTEN, text))

    def _answer(self, query: Query, asked_s: float) -> None:
        message, door = query.message, self.doors.of(query.session)
        if door is None:
            return
        if isinstance(message, messages.AskBad):
            door.answer(query.session, self._bad_samples(message, query.session, is_remote=door.is_remote))
        elif isinstance(message, messages.AskRemoval):
            refusal = self.deriver.remove(query.session, message.stream)
            removed = messages.Removed(message.request)
            door.answer(query.session, messages.Refused(message.request, 0, *refusal) if refusal else removed)
        elif isinstance(message, messages.AskStatus):
            status = self._part_of_status(message, query.session, door)
            plain = self._whole_status(query.session, door, asked_s) if status is None else plain_status(status)
            door.answer(query.session, messages.Status(message.request, plain))

    def _part_of_status(self, asked: messages.AskStatus, session: int, door: Door) -> DaemonStatus | None:
        """The part of a status that was asked for; None for all of it."""
        now = monotonic()
        if asked.is_brief:
            return DaemonStatus(self._facts(now), (), (), ())
        if not door.is_remote and asked.card_of is not None:  # its door has checked the user
            number = self.state.numbers.get(asked.card_of)
            card = self.streams[number].dated_card() if number is not None else None
            return DaemonStatus(self._facts(now), (), (), (), card=card)
        if not door.is_remote and asked.log_after is not None:  # the message lacks one
            return DaemonStatus(self._facts(now), (), (), (), log=self.log.after(asked.log_after))
        number = self.state.numbers.get(asked.reports_of or "")
        if number is None or not self._may_see(session, door, asked.reports_of or ""):
            return None
        reports, last = self._reports.get(number), asked.reports_last
        page = None
        if reports is not None:
            page = reports.last(last) if last else reports.page(asked.reports_after)
        return DaemonStatus(self._facts(now), (), (), (), reports=page)

    def _may_see(self, session: int, door: Door, stream: str) -> bool:
        return door.may_read(session, stream) and self.deriver.may_read(session, stream)

    def _whole_status(self, session: int, door: Door, asked_s: float) -> dict[str, Any]:
        """The status as far as a session may see it, as it was when or after it was asked for."""
        made_s, plain = self._status
        if made_s < asked_s:
            made_s = monotonic()
            plain = plain_status(self._make_status(made_s))
            shorten(plain)
            self._status = made_s, plain
        if not door.is_remote:
            return plain
        shown = [stream for stream in plain["streams"] if self._may_see(session, door, stream["name"])]
        hidden = {"warnings"}  # lines name files, and other hosts
        if len(shown) < len(plain["streams"]):
            hidden.add("pool")  # links name streams, too
        daemon = plain["daemon"] | {"config_file": ""}
        shown_keys = {name: value for name, value in plain.items() if name not in hidden}
        owner = door.identity(session).owner
        usage = [one for one in plain["usage"] if one["owner"] == owner]
        return shown_keys | {"streams": shown, "daemon": daemon, "usage": usage}

    def _facts(self, now: float) -> DaemonFacts:
        """What the daemon knows of itself as a process."""
        doors = [door.counts() for door in self.doors]
        return DaemonFacts(
            version=__version__,
            pid=os.getpid(),
            uptime_s=now - self.started_s,
            memory_bytes=self.memory.total_bytes,
            cpus=self._cpus,
            decoders=self.workers.local.decoders,
            reloading=self.reloader.is_reading,
            reload=self.reloader.outcome,
            http=self.observer.address,
            local=next(counts for counts in doors if isinstance(counts, LocalCounts)),
            tcp=next((counts for counts in doors if isinstance(counts, TcpCounts)), None),
            worker_deaths=self.state.fleet.deaths,
            draining=self.state.draining,
            ending_slots=self.state.ending_slots,
            host=socket.gethostname(),
            address=self.address,
            log=self.log.place,
            config_file=str(self.reloader.origin.file) if self.reloader.origin is not None else "",
        )

    def _make_status(self, now: float) -> DaemonStatus:
        """Join what the core counts and what the daemon knows of its processes and connections."""
        counts, pids = self.state.statistics(now), self.workers.local.pids()
        pools = filter(None, (kind.statistics(self.state, now) for kind in self.workers))
        caches = {number: one.cache.statistics() for number, one in self.streams.items() if one.cache is not None}
        described = {number: one.facts.description for number, one in self.streams.items()}
        reported = {number: one.statistics() for number, one in self._reports.items()}
        return DaemonStatus(
            daemon=self._facts(now),
            workers=tuple(replace(worker, pid=pids.get(worker.number)) for worker in counts.workers),
            trainers=tuple(trainer for door in self.doors for trainer in door.statistics(now)),
            streams=tuple(
                replace(
                    stream,
                    cache=caches.get(stream.number),
                    description=described.get(stream.number),
                    reports=reported.get(stream.number),
                )
                for stream in counts.streams
            ),
            pool=next(pools, None),
            warnings=self.log.warnings,
            usage=counts.usage,
        )

    def _bad_samples(self, question: messages.AskBad, session: int, *, is_remote: bool) -> Message:
        number = self.state.numbers.get(question.stream)
        if number is None or not self.deriver.may_read(session, question.stream):
            return messages.Refused(question.request, 0, *unknown_stream(question.stream, self.state.numbers))
        bad = self.state.streams[number].bad
        listed = sorted(bad.listed.items())[:BAD_SHOWN_MAX]
        rows = [(sample, one.path, one.reason, one.times) for sample, one in listed]
        shown = list(first_that_fit(rows, STATUS_BYTES_MAX)[0])
        file = self.bad_lists.path(question.stream) if bad.total > len(shown) and not is_remote else ""
        return messages.BadSamples(question.request, bad.total, shown, file)

    # --- actions ----------------------------------------------------------------------------------

    def _create_slot(self, action: act.CreateSlot) -> None:
        stream = self.streams[action.stream]
        try:
            self.memory.create(action.slot, stream.layout.slot_bytes, action.node)
            failpoints.passing("daemon.slot.created")
        except (MemoryError, OSError) as error:
            self.slot_error = f"no memory for a slot of stream {stream.name!r}: {error}"
            if self._once_per_minute.allows("no memory", str(action.stream)):
                advice = "the ring stays smaller; set memory = to less, or give the machine or the cgroup more"
                _log.warning("no memory for a slot", stream=stream.name, reason=str(error), advice=advice)
            self.queue.append(events.SlotLost(action.stream, action.slot, str(error)))

    def _reserve_slot(self, action: act.ReserveSlot) -> None:
        if action.slot in self.memory:
            self.memory.reserve(action.slot)
            failpoints.passing("daemon.slot.reserved")

    def _commit_slot(self, action: act.CommitSlot) -> None:
        failpoints.passing("daemon.done.received")
        layout = self.streams[action.stream].layout_of(action.position)
        payload_bytes = action.samples * layout.row_bytes
        header = SlotHeader(action.generation, action.slot, *action.position, action.samples, payload_bytes)
        self.memory.commit(action.slot, header)

    def _order_chunk(self, action: act.OrderChunk) -> None:
        if action.slot not in self.memory:
            return  # there was no memory for it; SlotLost is in the queue
        cache = self.streams[action.stream].cache
        if isinstance(cache, CacheOnDisk) and cache.spec.kind == "points":
            cache.may_grow(is_open=self._seeks_points(cache))
        self.workers.of(action.worker).fill(action)

    def _kill_worker(self, action: act.KillWorker) -> None:
        self.workers.of(action.worker).kill(action.worker, action.reason)

    # --- trainers ---------------------------------------------------------------------------------

    def _admit(self, action: act.AdmitSubscription) -> None:
        stream, course = self.streams[action.stream], action.course
        self.doors.send(
            action.session,
            messages.Subscribed(
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
                classes=list(stream.facts.classes),
                keeps_reports=True,
                in_lockstep=stream.spec.max_skew is not None,
                sample=course.sample,
                parts=stream.facts.sketch,
                drop_last=course.plan.drop_last,
                repeats=course.plan.repeats,
                stream=stream.name,
                has_budget=course.plan.row_counts is not None and course.plan.row_counts.limits_rows,
                overlays=list(stream.facts.overlays),
                owner=stream.owner,
            ),
        )
        self._session_log.subscribed(action, stream.name, self.doors.peer(action.session))
        failpoints.passing("daemon.subscribed")

    def _grant(self, action: act.GrantLease) -> None:
        if action.stream not in self._delivering:
            self._delivering.add(action.stream)
            self._timer.hasten()  # its cache may fill
        door = self.doors.of(action.session)
        if door is not None:
            stream = self.streams[action.stream]
            if stream.digests is not None and not action.is_spectator:
                self._add_rows(stream.digests, action)
            door.deliver(action, stream.layout.of(action.bucket))
        elif action.is_remote:  # its trainer is gone, and such a lease ends by this event alone
            self.queue.append(events.BatchSent(action.session, action.subscription, action.sequence, action.generation))

    def _record_batch(self, action: act.RecordBatch) -> None:
        journal = self.streams[action.stream].journal
        if journal is not None:  # a reload may have given the file to another stream of this name
            journal.add(action.position, action.pushed, self.memory.readable(action.slot))

    def _add_rows(self, digests: EpochDigests, grant: act.GrantLease) -> None:
        """Add the rows of a lease to the digest of its epoch; the slot has their checksums."""
        if not digests.lacks(grant.epoch, grant.step, grant.first, grant.count):
            return
        layout = self.streams[grant.stream].layout.of(grant.bucket)
        sums = next(field for field in layout.fields if field.name == CHECKSUM.name)
        start = sums.offset + grant.first * sums.row_bytes
        found = os.pread(self.memory.readable(grant.slot), grant.count * sums.row_bytes, start)
        digests.add(grant.epoch, grant.step, grant.first, np.frombuffer(found, np.dtype(sums.dtype)))

    def _admit_producer(self, action: act.AdmitProducer) -> None:
        stream = self.streams[action.stream]
        live, mailbox = stream.spec.live, stream.mailbox
        assert live is not None, "the core admits producers to live streams alone"
        assert mailbox is not None
        door = self.doors.of(action.session)
        if door is not None:
            door.share_mailbox(action.session, action.stream, mailbox)
            door.send(
                action.session,
                messages.Producing(action.request, action.stream, live.capacity, stream.facts.place_layout),
            )
        self._session_log.produces(action, stream.name, self.doors.peer(action.session))
        failpoints.passing("daemon.producer.admitted")

    def _lend_place(self, action: act.LendPlace) -> None:
        self.doors.send(action.session, messages.PlaceLent(action.request, action.place))
        failpoints.passing("daemon.place.lent")

    def _take_sample(self, action: act.TakeSample) -> None:
        failpoints.passing("daemon.push.received")
        self.doors.send(action.session, messages.PushTaken(action.request, action.next_place))

    def _refuse(self, action: act.Refuse) -> None:
        self.doors.send(
            action.session, messages.Refused(action.request, action.subscription, action.error, action.text)
        )

    def _report_bad(self, action: act.ReportBad) -> None:
        stream = self.streams[action.stream]
        is_new = self._reasons_per_minute.allows("bad samples of a reason", f"{stream.name}: {action.reason}")
        is_said = is_new and self._lines_per_minute.allows("bad samples", stream.name)
        write = _log.warning if is_said else _log.debug
        write("bad sample", stream=stream.name, path=action.path, reason=action.reason, treatment=stream.spec.on_error)
        self.bad_lists.add(action.stream, stream.name, action.sample, ListedBadSample(action.path, action.reason))

    def _report_mismatch(self, action: act.ReportMismatch) -> None:
        if self._once_per_minute.allows("batches that did not match", self.doors.peer(action.session).owner):
            _log.warning(
                "batch did not match its checksums",
                stream=self.streams[action.stream].name,
                session=action.session,
                epoch=action.position.epoch,
                step=action.position.step,
                advice="memory or a network between here and there is not sound; batchd status counts how often",
            )

    def _quarantine(self, action: act.QuarantineSample) -> None:
        stream = self.streams[action.stream]
        stream.quarantined.append(action.sample)
        _log.error("sample quarantined", stream=stream.name, sample=action.sample, reason=action.reason)
        for kind in self.workers:
            kind.quarantine(action.stream, [action.sample])

    def _report_stopped(self, action: act.ReportStopped) -> None:
        _log.error("stream stopped", stream=self.streams[action.stream].name, reason=action.text)

    def _report_away(self, action: act.ReportAway) -> None:
        stream = self.streams[action.stream]
        _log.warning("storage away", stream=stream.name, reason=action.text, up_to_s=stream.facts.spec.storage_away_s)

    def _report_back(self, action: act.ReportBack) -> None:
        _log.info("storage back", stream=self.streams[action.stream].name, after_s=round(action.away_s, 1))

    def _free_slots(self, action: act.FreeSlots) -> None:
        for kind in self.workers:
            kind.forget_slots(action.slots)
        for door in self.doors:
            door.withdraw_slots(action.slots)
        self.memory.free(action.slots)
        failpoints.passing("daemon.slots.freed")

    def _end_stream(self, action: act.EndStream) -> None:
        stream = self.streams.pop(action.stream)
        self._reports.pop(action.stream, None)
        self._delivering.discard(action.stream)
        for kind in self.workers:
            kind.forget_stream(action.stream)
        stream.close()
        failpoints.passing("daemon.stream.ended")
