"""The daemon's state: one event and the time go in, a list of actions comes out. Pure code.

    event, now --> handle --> [what the event means] --> [orders for idle workers] --> actions

Only ``handle`` changes streams, rings, subscriptions and the fleet, and it never asks the world.
Tests drive it without any process, and the same events always give the same actions.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from batchd.core import events as ev
from batchd.core.actions import (
    Action,
    AdmitProducer,
    CreateSlot,
    ProveChunk,
    Refuse,
    ReportServing,
    WithdrawOrder,
)
from batchd.core.admission import SUBSCRIPTIONS_MAX, Refusal, not_live, too_many_subscriptions, unknown_stream
from batchd.core.course import Course
from batchd.core.delivery import Delivery
from batchd.core.events import StreamSpec
from batchd.core.fleet import REMOTE_NUMBERS, SMOOTHING, Fleet, Order, Worker, WorkerKind, remote_number
from batchd.core.links import Link, LinkRules, Links
from batchd.core.measure import Moment
from batchd.core.ordering import Ordering
from batchd.core.ring import Slot
from batchd.core.stream import Stream
from batchd.core.tenants import Tenants, Weights
from batchd.core.work import Work
from batchd_wire.codes import ErrorCode
from batchd_wire.status import DaemonStatistics

SUBSCRIPTIONS_SHOWN_MAX = 1_024
"""In a status, of all streams together: each takes some 40 us."""
TICK_S = 0.5
"""The interval of ``Ticked``."""
GAP_S = 2.0
"""A longer pause between two ticks stopped the whole machine: it counts towards no time-out."""


LATE_FACTOR = 4
"""Multiple of its usual time after which a remote worker is late with awaited rows."""
LATE_S = 10.0
"""It is late with any rows after that time."""
SLOWNESS_MAX = 100.0
NO_SLOT = Slot(0)
"""The slot of an order that only compares rows, when these have been copied."""

DRAINING: Refusal = (ErrorCode.DRAINING, "the daemon is shutting down")


def _parts_of(counts: list[int], most: int) -> list[int]:
    """Return how many of each can be shown, so that those with few of them are shown whole."""
    parts = list(counts)
    for left, number in zip(range(len(counts), 0, -1), sorted(range(len(counts)), key=counts.__getitem__), strict=True):
        parts[number] = min(counts[number], most // left)
        most -= parts[number]
    return parts


def _removed(name: str) -> Refusal:
    return (
        ErrorCode.STREAM_REMOVED,
        f"stream {name!r} was taken out of the daemon's configuration, and is not served any more",
    )


def _replaced(name: str) -> Refusal:
    return ErrorCode.STREAM_REPLACED, f"stream {name!r} has other settings or other files now; subscribe again"


class DaemonState:
    """Streams, trainers, ``workers`` of one ``kind``. ``chunk_rows_max``: most rows of an order.

    Remote workers are of ``remote_kind``, and their links follow the ``rules``. ``weights``: of the
    tenants. ``nodes``: see ``Fleet``.
    """

    def __init__(  # noqa: PLR0913  facts of the configuration
        self,
        specs: list[StreamSpec],
        workers: int,
        kind: WorkerKind,
        *,
        sample_timeout_s: float,
        chunk_rows_max: int,
        rules: LinkRules = LinkRules(),  # noqa: B008  frozen
        remote_kind: WorkerKind | None = None,
        weights: Weights = (),
        nodes: Sequence[int] = (),
    ) -> None:
        self._moment = Moment()
        self.streams = {spec.number: Stream(spec, chunk_rows_max, self._new_slot, self._moment) for spec in specs}
        """By number; also retired streams that trainers, workers or producers still use."""
        self._retired: set[int] = set()
        self._oversized: set[int] = set()
        """Numbers of streams whose rings have more slots than they may have."""
        self.fleet = Fleet(workers, kind, sample_timeout_s, self._moment, nodes)
        self.links = Links(rules, lambda link: self.fleet.may_fill(link.workers, link.may_fill))
        self.tenants = Tenants(weights)
        self._ordering = Ordering(self.streams, self.fleet, self.links, self.tenants, self._moment)
        self._remote_kind = remote_kind
        self.draining = False
        self.numbers = {spec.name: spec.number for spec in specs}
        """The numbers of the streams that are served, by name."""
        self._stream_of: dict[int, Stream] = {}
        """By subscription."""
        self._subscriptions_of: dict[int, set[int]] = {}
        """By session: what it has in ``_stream_of``."""
        self._last_slot = 0
        self._last_tick_s: float | None = None
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
            ev.LinkBegun: self._link_begun,
            ev.StreamOpened: self._stream_opened,
            ev.StreamRefused: self._stream_refused,
            ev.WorkerUp: self._worker_up,
            ev.WorkerDown: self._worker_down,
            ev.OrderFilled: self._order_filled,
            ev.OrderWithdrawn: self._order_withdrawn,
            ev.ReferenceCopied: self._reference_copied,
            ev.OrderProved: self._order_proved,
            ev.HostLeaves: self._host_leaves,
            ev.LinkClosed: self._link_closed,
            ev.SlotLost: self._slot_lost,
            ev.SlotWanted: self._slot_wanted,
            ev.Ticked: self._ticked,
            ev.Reconfigured: self._reconfigure,
            ev.RingsSized: self._size_rings,
            ev.DrainAsked: self._drain,
        }

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Handle an event at ``now``, in seconds of a monotonic clock; return the actions."""
        actions: list[Action] = []
        self._moment.now_s = now
        self._handlers[type(event)](event, actions)
        if not self.draining:
            self._ordering.order_chunks(actions)
        self.fleet.dismiss_idle(actions)
        self.links.release_idle(self.fleet.workers, actions)
        for number in sorted(self._retired):
            if self.streams[number].sweep(actions):
                self._retired.discard(number)
                self.links.forget_stream(number)
                del self.streams[number]
        self._oversized -= {number for number in self._oversized if self._is_trimmed(number, actions)}
        return actions

    @property
    def now_s(self) -> float:
        """The time of the last event, up to which all counters count."""
        return self._moment.now_s

    @property
    def is_drained(self) -> bool:
        """True if the daemon drains, and no order is in flight."""
        return self.draining and not self.fleet.has_orders

    @property
    def has_all_slots(self) -> bool:
        """Whether every ring has all the slots that it can have."""
        return self._growing() is None

    def statistics(self, now: float | None = None) -> DaemonStatistics:
        """Return all counters up to ``now``; None: up to the last event."""
        if now is not None:
            self._moment.now_s = now
        served = [self.streams[number] for number in self.numbers.values()]
        parts = _parts_of([len(stream.delivery.subscriptions) for stream in served], SUBSCRIPTIONS_SHOWN_MAX)
        return DaemonStatistics(
            workers=self.fleet.statistics(),
            streams=tuple(stream.statistics(part) for stream, part in zip(served, parts, strict=True)),
            worker_deaths=self.fleet.deaths,
            draining=self.draining,
            ending_slots=self.ending_slots,
            usage=tuple(self.tenants.usage(self._moment.now_s)),
        )

    @property
    def ending_slots(self) -> int:
        """Slots of ended streams, but still read or written."""
        return sum(self.streams[number].delivery.ring.made for number in self._retired)

    # --- trainers ---------------------------------------------------------------------------------

    def _subscribe(self, event: ev.SubscriptionAsked, actions: list[Action]) -> None:
        if len(self._subscriptions_of.get(event.session, ())) >= SUBSCRIPTIONS_MAX:
            actions.append(Refuse(event.session, event.request, 0, *too_many_subscriptions()))
            return
        stream = self._served(event, actions)
        if stream is None:
            return
        account = self.tenants.account(event.owner, event.tenant, event.stream, self._moment.now_s)
        if stream.delivery.subscribe(event, account, actions) is not None:
            self._stream_of[event.subscription] = stream
            self._subscriptions_of.setdefault(event.session, set()).add(event.subscription)
            self._find_siblings()

    def _find_siblings(self) -> None:
        """Find the streams of one order that trainers read."""
        able = [stream for stream in self.streams.values() if stream.may_have_siblings]
        read = Counter(stream.spec.siblings for stream in able if stream.delivery.subscriptions)
        for stream in able:
            stream.use_siblings(has_siblings=read[stream.spec.siblings] > 1)

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
        self._forget_if_over(event.session, event.subscription)

    def _sent(self, event: ev.BatchSent, actions: list[Action]) -> None:
        if delivery := self._delivery(event.session, event.subscription):
            delivery.sent(event, actions)
            self._forget_if_over(event.session, event.subscription)

    def _mismatched(self, event: ev.BatchMismatched, actions: list[Action]) -> None:
        if delivery := self._delivery(event.session, event.subscription):
            delivery.mismatched(event, actions)

    def _end_subscription(self, event: ev.SubscriptionEnded, actions: list[Action]) -> None:
        if delivery := self._delivery(event.session, event.subscription):
            subscription = delivery.subscriptions[event.subscription]
            delivery.end([subscription], actions, leases_from=event.consumed)
            self._forget_if_over(event.session, event.subscription)

    def _end_session(self, event: ev.SessionEnded | ev.SessionCutOff, actions: list[Action]) -> None:
        leases_from = 0 if isinstance(event, ev.SessionEnded) else None
        for stream in self.streams.values():
            ended = [one for one in stream.delivery.subscriptions.values() if one.session == event.session]
            if ended:
                stream.delivery.end(ended, actions, leases_from=leases_from)
            for subscription in ended:
                self._forget_if_over(event.session, subscription.number)
            mailbox = stream.delivery.supply.mailbox
            if leases_from is None:
                mailbox.dismiss(event.session)
            else:
                mailbox.end(event.session, actions)

    def subscriptions_of(self, session: int) -> list[int]:
        """Return the numbers of a session's subscriptions, in their order."""
        return sorted(self._subscriptions_of.get(session, ()))

    def course_of(self, session: int, number: int) -> tuple[int, Course, int] | None:
        """The stream's number, the course of a subscription, and how much of it was granted.

        None if the session has no such subscription.
        """
        delivery = self._delivery(session, number)
        if delivery is None:
            return None
        subscription = delivery.subscriptions[number]
        return delivery.spec.number, subscription.course, subscription.granted

    def _delivery(self, session: int, number: int) -> Delivery | None:
        """Return the delivery of a subscription; None where another session made it."""
        stream = self._stream_of.get(number)
        if stream is None or stream.delivery.subscriptions[number].session != session:
            return None
        return stream.delivery

    def _forget_if_over(self, session: int, number: int) -> None:
        if number not in self._stream_of[number].delivery.subscriptions:
            del self._stream_of[number]
            self._subscriptions_of[session].discard(number)
            if not self._subscriptions_of[session]:
                del self._subscriptions_of[session]

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
        problem = worker.not_reportable(event.orders)
        if problem is not None:
            self.fleet.end(worker, problem, actions)
            return
        orders = self.fleet.done(worker, event.orders, event.work.busy_us)
        self._settle(orders, event.work)
        stream = self.streams[orders[0].stream]
        if event.away:
            stream.chunks_away(orders, event, actions)
            return
        if self.links.by_number and not event.hopeless:
            for order in orders:
                self._compare_links(stream, order, event, actions)
        stream.chunks_done(orders, event, actions)

    def _settle(self, orders: Sequence[Order], work: Work) -> None:
        """Count what orders took, at the expense of those for whom they were."""
        rows = sum(len(order.rows) for order in orders)
        for order in orders:
            order.account.settle(work, len(order.rows), rows, order.expected_s)

    def _compare_links(self, stream: Stream, order: Order, event: ev.ChunkDone, actions: list[Action]) -> None:
        """Have links fill what a local worker has filled; count what they were wrong about."""
        if not event.bad:  # what cannot be read here may be good there, and the other way round
            self._prove(order, actions)
        if order.disputed_link:
            bad = {sample for sample, _path, _reason in event.bad}
            self.links.disagreed(order.disputed_link, stream.good_rows(order, bad), actions)

    def _prove(self, order: Order, actions: list[Action]) -> None:
        """Have the rows that a local worker has filled filled by links that must be compared."""
        if order.stream not in self.numbers.values() or self.draining:
            return
        for link in self.links.due(order.stream):
            # beyond the limit of orders: a host that always has enough to do is compared, too
            worker = self.fleet.least_busy(link.workers)
            if worker is None:
                continue
            proof = replace(order, number=self._ordering.next_number(), given_s=self._moment.now_s, is_proof=True)
            order.slot.proofs += 1
            link.proofs += 1
            self.fleet.give(worker, proof)
            where = order.stream, order.slot.number, order.position
            actions.append(ProveChunk(worker.number, proof.number, *where, order.rows))

    def _worker_observed(self, event: ev.WorkerObserved, actions: list[Action]) -> None:
        self.fleet.observe(event.worker, event.note, actions)

    def _worker_gone(self, event: ev.WorkerGone, actions: list[Action]) -> None:
        """Give a dead worker's orders to others; only the one in progress is suspected."""
        worker = self.fleet.gone(event.worker)
        orders = list(worker.orders.values())
        in_hand = event.note.order if event.note is not None else (orders[0].number if orders else None)
        taken_s = self._moment.now_s - worker.reported_s
        for order in reversed(orders):
            order.account.lost(taken_s if order.number == in_hand else 0.0, order.expected_s)
            if order.number == in_hand:
                self.streams[order.stream].delivery.took(order.slot, taken_s)
                self.streams[order.stream].chunk_lost(order, event, actions)
            else:
                self.streams[order.stream].delivery.put_back(order.slot, order.number, [order.rows], actions)
        if orders and all(order.number != in_hand for order in orders):
            self.streams[orders[0].stream].died_between_samples(event, actions)
        self.fleet.spawn_due(actions)

    # --- worker hosts -----------------------------------------------------------------------------

    def _link_begun(self, event: ev.LinkBegun, _actions: list[Action]) -> None:
        self.links.begin(event.link, event.name, event.workers)

    def _stream_opened(self, event: ev.StreamOpened, actions: list[Action]) -> None:
        stream = self.streams.get(event.stream)
        if stream is not None and not stream.spec.decodes_here:
            self.links.opened(event.link, event.stream, stream.spec.plan.samples, actions)

    def _stream_refused(self, event: ev.StreamRefused, actions: list[Action]) -> None:
        if (link := self.links.by_number.get(event.link)) and event.stream in self.streams:
            self.links.lost(link, event.stream)
            actions.append(ReportServing(event.link, event.stream, event.reason))

    def _host_leaves(self, event: ev.HostLeaves, _actions: list[Action]) -> None:
        if link := self.links.by_number.get(event.link):
            self.links.leaves(link)
            self.fleet.leave(link.workers)

    def _link_closed(self, event: ev.LinkClosed, actions: list[Action]) -> None:
        for number in sorted(self.links.by_number[event.link].workers):
            self._remote_gone(number, actions)
        self.links.end(event.link)

    def _worker_up(self, event: ev.WorkerUp, _actions: list[Action]) -> None:
        assert self._remote_kind is not None
        link, number = self.links.by_number[event.link], remote_number(event.link, event.worker)
        link.workers.add(number)
        self.fleet.join(number, event.link, self._remote_kind, link.may_fill)
        if link.is_leaving:
            self.fleet.leave([number])

    def _worker_down(self, event: ev.WorkerDown, actions: list[Action]) -> None:
        self._remote_gone(remote_number(event.link, event.worker), actions)

    def _order_filled(self, event: ev.OrderFilled, actions: list[Action]) -> None:
        """Count what a remote worker has filled; one that can fill nothing gets no more orders."""
        worker = self._remote(event)
        if event.order in worker.unsettled:
            self.fleet.settled(worker, event.order)
            return
        problem = worker.not_reportable([event.order])
        if problem is not None:
            self.fleet.end(worker, problem, actions)
            return
        self.fleet.arrived(worker, worker.orders[event.order], (event.work.busy_us + event.work.waited_us) / 1e6)
        (order,) = self.fleet.done(worker, [event.order], event.work.busy_us)
        self._settle([order], event.work)
        stream, link = self.streams[order.stream], self.links.by_number[worker.link]
        if stream.sample_s:
            slowness = min(SLOWNESS_MAX, event.work.busy_us / 1e6 / len(order.rows) / stream.sample_s)
            worker.slowness += (slowness - worker.slowness) * SMOOTHING
        for _sample, path, reason in event.bad[-1:]:
            link.last_bad = f"{path}: {reason}"
        if event.hopeless:
            self.links.lost(link, order.stream)
        else:
            self.links.filled(link, len(order.rows), event.work.busy_us)
        stream.remote_done(order, link.number, event, actions)

    def _remote(self, event: ev.OrderFilled | ev.OrderWithdrawn | ev.ReferenceCopied | ev.OrderProved) -> Worker:
        return self.fleet.workers[remote_number(event.link, event.worker)]

    def _remote_gone(self, number: int, actions: list[Action]) -> None:
        """Give the orders of a dead remote worker to others; the first one was in progress."""
        worker = self.fleet.gone(number)
        orders = list(worker.orders.values())
        self.links.by_number[worker.link].workers.discard(number)
        in_hand = next((order.number for order in orders if not order.is_proof), None)
        for order in reversed(orders):
            if order.is_proof:
                self._end_proof(worker, order, actions)
            else:
                self.streams[order.stream].remote_lost(order, actions, in_hand=order.number == in_hand)

    def _withdraw_late(self, actions: list[Action]) -> None:
        """Withdraw the orders that remote workers are late with."""
        awaited = {slot for stream in self.streams.values() for slot in stream.delivery.awaited_slots()}
        for link in self.links.by_number.values():
            for worker in map(self.fleet.workers.__getitem__, link.workers):
                patience_s = max(self.links.rules.withdraw_after_s, LATE_FACTOR * self.fleet.usual_s(worker))
                for order in worker.orders.values():
                    late_s = min(LATE_S, patience_s) if order.slot.number in awaited else LATE_S
                    if self._moment.now_s - order.given_s >= late_s and order.number not in worker.withdrawing:
                        worker.withdrawing.add(order.number)
                        actions.append(WithdrawOrder(*divmod(worker.number, REMOTE_NUMBERS), order.number))

    def _order_withdrawn(self, event: ev.OrderWithdrawn, actions: list[Action]) -> None:
        worker = self._remote(event)
        order = self.fleet.withdrawn(worker, event.order)
        if order.is_proof:
            self._end_proof(worker, order, actions)
            return
        self.links.by_number[worker.link].withdrawn += 1
        self.streams[order.stream].remote_lost(order, actions, in_hand=True)

    def _reference_copied(self, event: ev.ReferenceCopied, actions: list[Action]) -> None:
        worker = self._remote(event)
        order = worker.orders[event.order]
        worker.orders[event.order] = replace(order, slot=NO_SLOT)
        self._let_go_of_reference(order, actions)

    def _order_proved(self, event: ev.OrderProved, actions: list[Action]) -> None:
        worker = self._remote(event)
        (order,) = self.fleet.done(worker, [event.order], 0)
        link = self._end_proof(worker, order, actions)
        if event.is_hopeless:
            self.links.lost(link, order.stream)
        elif event.bad_rows:  # other rows stand in for them
            link.last_bad = event.last_bad
            self.links.disagreed(link.number, event.bad_rows, actions)
        else:
            self.links.compared(link, order.stream, len(order.rows), event.difference, actions)

    def _end_proof(self, worker: Worker, order: Order, actions: list[Action]) -> Link:
        """Note that the rows of a link are compared no more."""
        self._let_go_of_reference(order, actions)
        link = self.links.by_number[worker.link]
        link.proofs -= 1
        return link

    def _let_go_of_reference(self, order: Order, actions: list[Action]) -> None:
        if order.slot is not NO_SLOT:
            order.slot.proofs -= 1
            delivery = self.streams[order.stream].delivery
            delivery.supply.let_go(order.slot)
            delivery.wake(actions)

    # --- memory, time, configuration --------------------------------------------------------------

    def _slot_lost(self, event: ev.SlotLost, actions: list[Action]) -> None:
        stream = self.streams.get(event.stream)
        if stream is None:
            return  # the stream has ended meanwhile
        for order in stream.slot_lost(event.slot, event.reason, actions):
            self.fleet.recall(order)

    def _growing(self) -> Delivery | None:
        """Return a served stream whose ring has less memory than it may have."""
        deliveries = (self.streams[number].delivery for number in self.numbers.values())
        return next((one for one in deliveries if one.verdict is None and one.ring.made < one.ring.slots_max), None)

    def _slot_wanted(self, _event: ev.SlotWanted, actions: list[Action]) -> None:
        delivery = self._growing()
        if delivery is not None and delivery.ring.can_grow:
            slot = delivery.ring.add(self._new_slot())
            actions.append(CreateSlot(delivery.spec.number, slot.number, delivery.claims.node))
        elif delivery is not None:
            delivery.claims.provide(delivery.ring.unmade[0], actions)

    def _ticked(self, _event: ev.Ticked, actions: list[Action]) -> None:
        now_s = self._moment.now_s
        if self._last_tick_s is not None and now_s - self._last_tick_s > GAP_S:
            self.fleet.forgive(now_s - self._last_tick_s)
        self._last_tick_s = now_s
        self.fleet.spawn_due(actions)
        self.fleet.kill_late(actions)
        if self.links.by_number:
            self._withdraw_late(actions)
        for stream in self.streams.values():
            if stream.shares is not None or stream.is_divided:
                stream.share_stalled()
        self._find_siblings()

    def _reconfigure(self, event: ev.Reconfigured, actions: list[Action]) -> None:
        """Change the served streams in one step. Streams that are not named continue unchanged."""
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
        self.tenants.weigh(event.weights)
        self.fleet.sample_timeout_s = event.sample_timeout_s
        self.fleet.resize(event.workers, renews=event.renews_workers)
        self.fleet.spawn_due(actions)

    def _size_rings(self, event: ev.RingsSized, actions: list[Action]) -> None:
        for number, slots_max in event.slots_max.items():
            stream = self.streams.get(number)
            if stream is not None and stream.delivery.verdict is None and stream.spec.live is None:
                stream.delivery.fit(slots_max, actions)
                self._oversized.add(number)

    def _is_trimmed(self, number: int, actions: list[Action]) -> bool:
        """Free what a ring has beyond its size; True if that is all."""
        return number in self._retired or number not in self.streams or self.streams[number].trim(actions)

    def _drain(self, _event: ev.DrainAsked, _actions: list[Action]) -> None:
        self.draining = self.fleet.is_ending = True

    def _new_slot(self) -> int:
        self._last_slot += 1
        return self._last_slot


def _not_yours(stream: int) -> Refusal:
    return ErrorCode.PLACE_NOT_LENT, f"this session is no producer of stream number {stream}"
