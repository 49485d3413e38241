"""The daemon's state: one event and the time go in, a list of actions comes out. Pure code.

    event, now --> handle --> [what the event means] --> [orders for idle workers] --> actions

Only ``handle`` changes streams, rings, subscriptions and the fleet, and it never asks the world.
Tests drive it without any process, and the same events always give the same actions.
"""

from collections.abc import Callable
from typing import Any

from batchd.core import events as ev
from batchd.core.actions import Action, AdmitProducer, CreateSlot, OrderChunk, Refuse
from batchd.core.admission import Refusal, not_live, unknown_stream
from batchd.core.delivery import Delivery
from batchd.core.fleet import Fleet, Order, WorkerKind
from batchd.core.measure import Moment
from batchd.core.spec import StreamSpec
from batchd.core.stream import Stream
from batchd_wire.codes import ErrorCode
from batchd_wire.status import DaemonStatistics

TICK_S = 0.5
"""The interval of ``Ticked``."""
GAP_S = 2.0
"""A longer pause between two ticks stopped the whole machine: it counts towards no time-out."""


DRAINING: Refusal = (ErrorCode.DRAINING, "the daemon is shutting down")


def _removed(name: str) -> Refusal:
    return (
        ErrorCode.STREAM_REMOVED,
        f"stream {name!r} was taken out of the daemon's configuration, and is not served any more",
    )


def _replaced(name: str) -> Refusal:
    return ErrorCode.STREAM_REPLACED, f"stream {name!r} has other settings or other files now; subscribe again"


class DaemonState:
    """Streams, trainers, ``workers`` of one ``kind``. ``chunk_rows_max``: most rows of an order."""

    def __init__(
        self, specs: list[StreamSpec], workers: int, kind: WorkerKind, *, sample_timeout_s: float, chunk_rows_max: int
    ) -> None:
        self._moment = Moment()
        self.streams = {spec.number: Stream(spec, chunk_rows_max, self._new_slot, self._moment) for spec in specs}
        """By number; also retired streams that trainers, workers or producers still use."""
        self._retired: set[int] = set()
        self.fleet = Fleet(workers, kind, sample_timeout_s, self._moment)
        self.draining = False
        self.numbers = {spec.name: spec.number for spec in specs}
        """The numbers of the streams that are served, by name."""
        self._stream_of: dict[int, Stream] = {}
        """By subscription."""
        self._last_slot = 0
        self._last_order = 0
        self._last_tick_s: float | None = None
        self._served_s = 0.0
        """The worker time that the last served subscription had had before; it never falls."""
        self._handlers: dict[type, Callable[[Any, list[Action]], None]] = {
            ev.SubscriptionAsked: self._subscribe,
            ev.Pulled: self._pulled,
            ev.BatchSent: self._sent,
            ev.BatchMismatched: self._mismatched,
            ev.SubscriptionEnded: self._end_subscription,
            ev.ProducerAsked: self._produce,
            ev.PlaceAsked: self._place_asked,
            ev.PlaceWithdrawn: self._place_withdrawn,
            ev.SamplePushed: self._pushed,
            ev.SessionEnded: self._end_session,
            ev.SessionCutOff: self._end_session,
            ev.WorkerReady: self._worker_ready,
            ev.PartsNamed: self._parts_named,
            ev.ChunkDone: self._chunk_done,
            ev.WorkerObserved: self._worker_observed,
            ev.WorkerGone: self._worker_gone,
            ev.SlotLost: self._slot_lost,
            ev.SlotWanted: self._slot_wanted,
            ev.Ticked: self._ticked,
            ev.Reconfigured: self._reconfigure,
            ev.DrainAsked: self._drain,
        }

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Handle an event at ``now``, in seconds of a monotonic clock; return the actions."""
        actions: list[Action] = []
        self._moment.now_s = now
        self._handlers[type(event)](event, actions)
        self._order_chunks(actions)
        self.fleet.dismiss_idle(actions)
        for number in sorted(self._retired):
            if self.streams[number].sweep(actions):
                self._retired.discard(number)
                del self.streams[number]
        return actions

    @property
    def is_drained(self) -> bool:
        """Whether nothing new is begun, and no order is under way."""
        return self.draining and not self.fleet.has_orders

    @property
    def has_all_slots(self) -> bool:
        """Whether every ring has all the slots that it can have."""
        return self._growing() is None

    def statistics(self, now: float | None = None) -> DaemonStatistics:
        """Return all counters up to ``now``; None: up to the last event."""
        if now is not None:
            self._moment.now_s = now
        return DaemonStatistics(
            workers=self.fleet.statistics(),
            streams=tuple(self.streams[number].statistics() for number in self.numbers.values()),
            worker_deaths=self.fleet.deaths,
            draining=self.draining,
            ending_slots=sum(len(self.streams[number].delivery.ring.slots) for number in self._retired),
        )

    # --- trainers ---------------------------------------------------------------------------------

    def _subscribe(self, event: ev.SubscriptionAsked, actions: list[Action]) -> None:
        stream = self._served(event, actions)
        if stream is not None and stream.delivery.subscribe(event, actions) is not None:
            self._stream_of[event.subscription] = stream

    def _served(self, event: ev.SubscriptionAsked | ev.ProducerAsked, actions: list[Action]) -> Stream | None:
        """Return the stream that a session asks for, or refuse the request."""
        number = self.numbers.get(event.stream)
        if number is not None and not self.draining:
            return self.streams[number]
        problem = DRAINING if self.draining else unknown_stream(event.stream, self.numbers)
        actions.append(Refuse(event.session, event.request, 0, *problem))
        return None

    def _pulled(self, event: ev.Pulled, actions: list[Action]) -> None:
        delivery = self._delivery(event.session, event.subscription)
        if delivery is None:
            text = f"subscription {event.subscription} is not one of this session"
            actions.append(Refuse(event.session, 0, event.subscription, ErrorCode.UNKNOWN_SUBSCRIPTION, text))
            return
        delivery.pull(event, actions)
        self._forget_if_over(event.subscription)

    def _sent(self, event: ev.BatchSent, actions: list[Action]) -> None:
        if delivery := self._delivery(event.session, event.subscription):
            delivery.sent(event, actions)
            self._forget_if_over(event.subscription)

    def _mismatched(self, event: ev.BatchMismatched, actions: list[Action]) -> None:
        if delivery := self._delivery(event.session, event.subscription):
            delivery.mismatched(event, actions)

    def _end_subscription(self, event: ev.SubscriptionEnded, actions: list[Action]) -> None:
        if delivery := self._delivery(event.session, event.subscription):
            subscription = delivery.subscriptions[event.subscription]
            delivery.end([subscription], actions, leases_from=event.consumed)
            self._forget_if_over(event.subscription)

    def _end_session(self, event: ev.SessionEnded | ev.SessionCutOff, actions: list[Action]) -> None:
        leases_from = 0 if isinstance(event, ev.SessionEnded) else None
        for stream in self.streams.values():
            ended = [one for one in stream.delivery.subscriptions.values() if one.session == event.session]
            if ended:
                stream.delivery.end(ended, actions, leases_from=leases_from)
            for subscription in ended:
                self._forget_if_over(subscription.number)
            mailbox = stream.delivery.supply.mailbox
            if leases_from is None:
                mailbox.dismiss(event.session)
            else:
                mailbox.end(event.session, actions)

    def _delivery(self, session: int, number: int) -> Delivery | None:
        """Return the delivery of a subscription; None where another session made it."""
        stream = self._stream_of.get(number)
        if stream is None or stream.delivery.subscriptions[number].session != session:
            return None
        return stream.delivery

    def _forget_if_over(self, number: int) -> None:
        if number not in self._stream_of[number].delivery.subscriptions:
            del self._stream_of[number]

    # --- producers --------------------------------------------------------------------------------

    def _produce(self, event: ev.ProducerAsked, actions: list[Action]) -> None:
        stream = self._served(event, actions)
        if stream is None:
            return
        if stream.spec.live is None:
            actions.append(Refuse(event.session, event.request, 0, *not_live(event.stream)))
        else:
            stream.delivery.supply.mailbox.producers.add(event.session)
            actions.append(AdmitProducer(event.session, event.request, stream.spec.number))

    def _place_asked(self, event: ev.PlaceAsked, actions: list[Action]) -> None:
        delivery = self._pushed_into(event.session, event.stream)
        if self.draining:
            problem = DRAINING
        elif delivery is None:
            problem = _not_yours(event.stream)
        elif delivery.verdict is not None:
            problem = delivery.verdict
        else:
            delivery.supply.mailbox.ask(event.session, event.request, actions)
            return
        actions.append(Refuse(event.session, event.request, 0, *problem))

    def _place_withdrawn(self, event: ev.PlaceWithdrawn, actions: list[Action]) -> None:
        if delivery := self._pushed_into(event.session, event.stream):
            delivery.supply.mailbox.withdraw(event.session, actions)

    def _pushed(self, event: ev.SamplePushed, actions: list[Action]) -> None:
        delivery = self._pushed_into(event.session, event.stream)
        if delivery is None:
            problem = _not_yours(event.stream)
        elif delivery.retired is not None:  # no trainer reads it
            problem = delivery.retired
        elif not delivery.supply.mailbox.push(event.session, event.request, event.place, actions):
            text = f"place {event.place} of the mailbox was not lent to this producer"
            problem = ErrorCode.PLACE_NOT_LENT, text
        else:
            return
        actions.append(Refuse(event.session, event.request, 0, *problem))

    def _pushed_into(self, session: int, number: int) -> Delivery | None:
        """Return the delivery of the live stream that a session pushes into."""
        stream = self.streams.get(number)
        if stream is None or session not in stream.delivery.supply.mailbox.producers:
            return None
        return stream.delivery

    # --- workers ----------------------------------------------------------------------------------

    def _worker_ready(self, event: ev.WorkerReady, _actions: list[Action]) -> None:
        self.fleet.is_up(event.worker)

    def _parts_named(self, event: ev.PartsNamed, _actions: list[Action]) -> None:
        stream = self.streams.get(event.stream)
        if stream is not None:  # a worker's invalid message must not end the daemon
            stream.work.name_parts(event.parts)

    def _chunk_done(self, event: ev.ChunkDone, actions: list[Action]) -> None:
        worker = self.fleet.workers[event.worker]
        if event.order not in worker.orders:
            self.fleet.end(worker, f"it reports order {event.order}, which it does not have", actions)
            return
        order = self.fleet.done(worker, event.order, event.work.busy_us)
        self.streams[order.stream].chunk_done(order, event, actions)

    def _worker_observed(self, event: ev.WorkerObserved, actions: list[Action]) -> None:
        self.fleet.observe(event.worker, event.note, actions)

    def _worker_gone(self, event: ev.WorkerGone, actions: list[Action]) -> None:
        """Give a dead worker's orders to others; only the one that it had in hand is suspected."""
        worker = self.fleet.gone(event.worker)
        orders = list(worker.orders.values())
        in_hand = event.note.order if event.note is not None else (orders[0].number if orders else None)
        for order in reversed(orders):
            if order.number == in_hand:
                self.streams[order.stream].chunk_lost(order, event, actions)
            else:
                whole = [(order.first, order.rows)]
                self.streams[order.stream].delivery.put_back(order.slot, order.number, whole, actions)
        if orders and all(order.number != in_hand for order in orders):
            self.streams[orders[0].stream].died_between_samples(event, actions)
        self.fleet.spawn_due(actions)

    def _slot_lost(self, event: ev.SlotLost, actions: list[Action]) -> None:
        stream = self.streams.get(event.stream)
        if stream is None:
            return  # the stream has ended meanwhile
        for order in stream.slot_lost(event.slot, event.reason, actions):
            self.fleet.recall(order)

    def _growing(self) -> Delivery | None:
        """Return a served stream whose ring can grow."""
        deliveries = (self.streams[number].delivery for number in self.numbers.values())
        return next((one for one in deliveries if one.verdict is None and one.ring.can_grow), None)

    def _slot_wanted(self, _event: ev.SlotWanted, actions: list[Action]) -> None:
        if delivery := self._growing():
            slot = delivery.ring.add(self._new_slot())
            actions.append(CreateSlot(delivery.spec.number, slot.number))

    def _ticked(self, _event: ev.Ticked, actions: list[Action]) -> None:
        now_s = self._moment.now_s
        if self._last_tick_s is not None and now_s - self._last_tick_s > GAP_S:
            self.fleet.forgive(now_s - self._last_tick_s)
        self._last_tick_s = now_s
        self.fleet.spawn_due(actions)
        self.fleet.kill_late(actions)

    def _reconfigure(self, event: ev.Reconfigured, actions: list[Action]) -> None:
        """Change what is served in one step. Streams that are not named go on unchanged."""
        for numbers, problem in ((event.removed, _removed), (event.replaced, _replaced)):
            for number in numbers:
                stream = self.streams[number]
                del self.numbers[stream.spec.name]
                self._retired.add(number)
                stream.retire(problem(stream.spec.name), actions)
        for spec in event.added:
            self.numbers[spec.name] = spec.number
            self.streams[spec.number] = Stream(spec, event.chunk_rows_max, self._new_slot, self._moment)
        for stream in self.streams.values():
            stream.chunk_rows_max = event.chunk_rows_max
        self.fleet.sample_timeout_s = event.sample_timeout_s
        self.fleet.resize(event.workers, renews=event.renews_workers)
        self.fleet.spawn_due(actions)

    def _drain(self, _event: ev.DrainAsked, _actions: list[Action]) -> None:
        self.draining = self.fleet.is_ending = True

    def _order_chunks(self, actions: list[Action]) -> None:
        """Give every worker that takes an order the rows that are needed most."""
        if self.draining:
            return
        while (worker := self.fleet.free()) is not None:
            wants = [
                (want, stream)
                for stream in self.streams.values()
                if (want := stream.delivery.claims.wanted(self._served_s))
            ]
            if not wants:
                return
            ((distance, self._served_s), subscription, slot), stream = min(wants, key=lambda want: want[0][0])
            fill, position = slot.fill, slot.position
            assert fill is not None
            assert position is not None
            self._last_order += 1
            rows_max = stream.chunk_rows(
                fill.pending_rows, len(self.fleet.workers), self.fleet.idle if distance == 0 else 0
            )
            first, rows, places = stream.delivery.claims.cut(slot, self._last_order, rows_max)
            subscription.served_s = self._served_s + rows * stream.sample_s
            order = Order(self._last_order, stream.spec.number, slot, position, first, rows)
            self.fleet.give(worker, order)
            actions.append(
                OrderChunk(worker.number, order.number, order.stream, slot.number, position, first, rows, places)
            )

    def _new_slot(self) -> int:
        self._last_slot += 1
        return self._last_slot


def _not_yours(stream: int) -> Refusal:
    return ErrorCode.PLACE_NOT_LENT, f"this session is no producer of stream number {stream}"
