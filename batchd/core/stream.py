"""One stream: its delivery, bad samples, size of orders, and outages. Pure code."""

from collections.abc import Callable
from itertools import islice

import numpy as np

from batchd.core.actions import (
    Action,
    EndStream,
    FreeSlots,
    QuarantineSample,
    Refuse,
    ReportAway,
    ReportBack,
    ReportBad,
    ReportStopped,
)
from batchd.core.admission import Refusal
from batchd.core.blocks import BlockOrder
from batchd.core.delivery import Delivery
from batchd.core.events import ChunkDone, Note, OrderFilled, StreamSpec, WorkerGone
from batchd.core.fleet import Order
from batchd.core.measure import Moment, WorkDone
from batchd.core.ring import ANY_SHARE, UNDIVIDED, Part, Slot
from batchd.core.rows import ascending
from batchd.core.shares import Shares
from batchd.core.subscription import Subscription
from batchd.core.suspicion import BadSampleList, Suspects, split
from batchd_wire.codes import ErrorCode
from batchd_wire.position import Position
from batchd_wire.status import StreamStatus, SubscriptionStatistics

CHUNK_TARGET_S = 0.02
"""Long enough that messages cost nothing, short enough that workers end a batch together."""
REMOTE_TARGET_S = 0.1
"""The same for remote workers, if there are rows enough: their orders cost two processes more."""
ORDERS_PER_S_MAX = 2_000
"""From 40 workers on orders are longer, so that half a core can handle all of them."""
FIRST_CHUNK_ROWS = 8
"""The rows of an order before any time was measured."""
BLANK_DEATHS_MAX = 20
"""Number of deaths between samples, without progress, after which the stream stops."""
SMOOTHING = 0.2
"""Weight of the newest chunk in the mean time for a sample."""
SIBLING_ROWS_MAX = 32
"""Consecutive rows for one worker, in streams of one order."""
SIBLING_BATCHES = 4
"""So many batches have rows for each worker."""
PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 30.0
PAUSE_GROWTH = 2.0
"""Of the pauses between tries while the storage is away."""


class Stream:
    """See the module. An order has at most ``chunk_rows_max`` rows."""

    def __init__(self, spec: StreamSpec, chunk_rows_max: int, new_slot: Callable[[], int], moment: Moment) -> None:
        self.spec = spec
        self._moment = moment
        self.delivery = Delivery(spec, new_slot, moment)
        self.work = WorkDone()
        self.bad = BadSampleList(spec.plan.source_samples, spec.bad_fraction_max)
        self.suspects = Suspects(spec.plan.source_samples if spec.live is None else 0)
        self.outage: Outage | None = None
        """Set while the storage of its source is away."""
        self.decoded_samples = 0
        self.sample_s = 0.0
        self.chunk_rows_max = chunk_rows_max
        plan = spec.plan
        may_divide = spec.groups_neighbours and not spec.shares_caches and plan.draws is None and plan.documents is None
        self.blocks = plan.order if may_divide and isinstance(plan.order, BlockOrder) else None
        """The blocks, if each is for one local worker to read; None if rows are not divided."""
        self.may_have_siblings = bool(spec.siblings) and self.blocks is None and not spec.shares_caches
        self._joins_near = spec.joins_near and self.blocks is None and not spec.shares_caches
        self.has_siblings = False
        """Whether trainers read another stream of its order, too, so each row is for one worker."""
        self.shares: Shares | None = None
        """By which pending rows are divided; None: each worker host may fill any of them."""
        self._stalled: dict[int, tuple[int, int]] = {}
        """Slots that a trainer waited for at the last tick: generation, rows that no worker had."""
        self._blank_deaths = 0
        self._is_empty = False

    def chunk_rows(
        self, pending_rows: int, workers: int, idle: int, slowness: float, *, may_be_long: bool = False
    ) -> int:
        """Return the rows of the next order, with ``workers`` in all.

        If a trainer waits, the ``idle`` workers share the rest of its batch, so it is ready sooner.
        Busy workers do not count: where trainers are faster than workers, orders must be few. A
        worker with a ``slowness`` above 1 gets fewer rows. An order that ``may_be_long``, since the
        way to a remote worker is not the limit, has more if the ring has as many for all others.
        """
        sample_s = self.sample_s * max(1.0, slowness)
        rows = int(max(CHUNK_TARGET_S, workers / ORDERS_PER_S_MAX) / sample_s) if sample_s else FIRST_CHUNK_ROWS
        if may_be_long and sample_s:
            unordered_rows = len(self.delivery.ring.pending) * self.spec.plan.batch_size
            rows = max(rows, min(int(REMOTE_TARGET_S / sample_s), unordered_rows // workers))
        if idle > 0:
            rows = min(rows, -(-pending_rows // idle))
        return max(1, min(rows, self.chunk_rows_max))

    def chunks_done(self, orders: list[Order], done: ChunkDone, actions: list[Action]) -> None:
        """Note that the rows of ``orders`` are in their slots."""
        rows = 0
        for order in orders:
            fill = order.slot.fill
            assert fill is not None, f"order {order.number} was for a slot that is not being filled"
            del fill.under_way[order.number]
            self.delivery.supply.let_go(order.slot)
            rows += len(order.rows)
            if self.suspects.deaths:
                self.suspects.acquit(self.samples_of(order))
        self._blank_deaths = 0
        self._count(rows, done)
        measured_s = done.work.busy_us / 1e6 / rows
        self.sample_s += (measured_s - self.sample_s) * (SMOOTHING if self.sample_s else 1.0)
        planned = {sample for order in orders for sample in self.samples_of(order)} if done.bad else set[int]()
        for sample, path, message in done.bad:
            reason = self.suspects.quarantined.get(sample, message)
            if self.bad.record(sample, path, reason, is_row=not planned or sample in planned):
                actions.append(ReportBad(self.spec.number, sample, path, reason))
            if self.spec.on_error == "fail":
                self._stop_if(f"{path} (sample {sample}) is bad and on_error = fail: {reason}", actions)
        if done.bad:
            self._stop_if(self.bad.excess(), actions)
        self._stop_if(done.hopeless, actions)
        if self.outage is not None and self.outage.is_of(set(done.orders)):
            actions.append(ReportBack(self.spec.number, self._moment.now_s - self.outage.since_s))
            self.outage = None
        slots = {order.slot.number: order.slot for order in orders}
        self.delivery.filled([slot for slot in slots.values() if slot.fill is not None and slot.fill.is_done], actions)

    def chunks_away(self, orders: list[Order], done: ChunkDone, actions: list[Action]) -> None:
        """Have the rows of ``orders`` filled later: the storage is away, and no sample is bad."""
        for order in orders:
            self.delivery.put_back(order.slot, order.number, [order.rows], actions)
        now_s = self._moment.now_s
        if self.delivery.verdict is not None:
            return
        if self.outage is None:
            self.outage = Outage(done.away, now_s, self.spec.storage_away_s)
            actions.append(ReportAway(self.spec.number, done.away))
        elif self.outage.is_of({order.number for order in orders}):
            self._stop_if(self.outage.failed(done.away, now_s), actions)

    def remote_done(self, order: Order, link: int, done: OrderFilled, actions: list[Action]) -> None:
        """Note that a worker host has filled an order; a local worker decides what is bad."""
        bad = {sample for sample, _path, _reason in done.bad}
        samples = self.samples_of(order) if bad else []
        parts = [order.rows[at : at + 1] for at, sample in enumerate(samples) if sample in bad]
        if done.hopeless or not bad.issubset(samples):  # of packs, and what joins others, by no row
            parts = [order.rows]
        good_rows = len(order.rows) - sum(map(len, parts))
        if good_rows:
            self._count(good_rows, done)
        self.delivery.doubt(order.slot, order.number, parts, 0 if done.hopeless else link, actions)
        fill = order.slot.fill
        if fill is not None and fill.is_done:
            self.delivery.filled([order.slot], actions)

    def remote_lost(self, order: Order, actions: list[Action], *, in_hand: bool) -> None:
        """Have the rows of a dead or late remote worker filled by others.

        One of the rows in progress may have killed it, or may hang. So the second time that a batch
        loses such rows, local workers fill them: only they decide which sample is at fault.
        """
        fill = order.slot.fill
        assert fill is not None, f"order {order.number} was for a slot that is not being filled"
        fill.losses += in_hand
        if in_hand and fill.losses > 1:
            self.delivery.doubt(order.slot, order.number, [order.rows], 0, actions)
        else:
            self.delivery.put_back(order.slot, order.number, [order.rows], actions)

    def use_shares(self, shares: Shares | None) -> None:
        """Divide rows by these shares from now on. Rows that were divided by others are merged."""
        if shares is not self.shares:
            self.shares = shares
            ring = self.delivery.ring
            for number in list(ring.pending_anywhere):
                ring.merge(ring.slots[number], UNDIVIDED)

    def divide(self, slot: Slot) -> bool:
        """Divide the pending rows of a slot among worker hosts; return whether there were any."""
        rows = self.delivery.ring.undivided(slot)
        if not rows or self.shares is None or slot.position is None:
            return False
        samples = self.spec.plan.indices_of(slot.position, rows)
        self.delivery.ring.divide(slot, [Part(*part) for part in self.shares.divide(samples, rows)])
        return True

    def divide_blocks(self, slot: Slot, workers: int) -> None:
        """Divide the pending rows of a slot among the places of local workers, by their blocks.

        The share of a place is one more than the place.
        """
        rows = self.delivery.ring.undivided(slot)
        if not rows:
            return
        assert self.blocks is not None, "there are blocks"
        assert slot.position is not None, f"slot {slot.number} has no position"
        samples = self.spec.plan.indices_of(slot.position, rows)
        owners = self.blocks.ranks_of(slot.position.epoch, samples) % workers
        order = np.lexsort((samples, owners))
        parts = np.split(order, np.flatnonzero(np.diff(owners[order])) + 1)
        shares = [Part(tuple(rows[at] for at in part.tolist()), 1 + int(owners[part[0]])) for part in parts]
        self.delivery.ring.divide(slot, shares)

    def use_siblings(self, *, has_siblings: bool) -> None:
        """Divide rows among workers from now on, or no more; rows that were divided are merged."""
        if self.has_siblings and not has_siblings:
            ring = self.delivery.ring
            for number in list(ring.pending_anywhere):
                ring.merge(ring.slots[number], UNDIVIDED)
        self.has_siblings = has_siblings

    @property
    def is_divided(self) -> bool:
        """True if each row is for one of the local workers."""
        return self.blocks is not None or self.has_siblings or self._joins_near

    def divide_among(self, slot: Slot, workers: int) -> None:
        """Divide the pending rows of a slot among the places of local workers.

        The share of a place is one more than the place.
        """
        if self.blocks is not None:
            self.divide_blocks(slot, workers)
            return
        ring, parts = self.delivery.ring, dict[int, list[int]]()
        rows = ring.undivided(slot)
        if not rows:
            return
        assert slot.position is not None, f"slot {slot.number} has no position"
        for row in rows:
            parts.setdefault(self._place_of(slot.position, row, workers), []).append(row)
        ring.divide(slot, [Part(ascending(tuple(owned)), 1 + place) for place, owned in parts.items()])

    def _place_of(self, position: Position, row: int, workers: int) -> int:
        """The place of the worker for a row.

        Where samples join those of their row in batches before, it is the same in all of these. If
        workers are more than rows, each has a row of every second batch, or of every third, ...
        """
        if not self._joins_near:
            return self.sibling_place(position, row, workers)
        batch_size, step = self.spec.plan.batch_size, position.step // self.spec.plan.repeats
        batches = -(-workers // batch_size)
        return (step % batches * batch_size + row) * workers // (batches * batch_size)

    def sibling_place(self, position: Position, row: int, workers: int) -> int:
        """The place of the worker for a row, in all streams of one order."""
        batch_size = self.spec.plan.batch_size
        together = min(max(1, SIBLING_BATCHES * batch_size // workers), SIBLING_ROWS_MAX)
        return (position.step * batch_size + row) // together % workers

    def share_stalled(self) -> None:
        """Let all fill rows that a trainer waits for and that were not ordered meanwhile.

        Their own hosts, or workers, are late or have too much to do. Called with each tick.
        """
        ring, before = self.delivery.ring, self._stalled
        self._stalled = {}
        for number in set(self.delivery.awaited_slots()) & ring.pending_anywhere:
            slot = ring.slots[number]
            assert slot.fill is not None, f"slot {number} is not being filled"
            state = slot.generation, slot.fill.pending_rows
            if before.get(number) == state:
                ring.merge(slot, ANY_SHARE)
            else:
                self._stalled[number] = state

    def samples_of(self, order: Order) -> list[int]:
        """Return the samples of an order's rows by the plan; of packs none, as they have many."""
        if self.spec.plan.documents is not None:
            return []
        samples: list[int] = self.spec.plan.indices_of(order.position, order.rows).tolist()
        return samples

    def good_rows(self, order: Order, bad: set[int]) -> int:
        """Count the rows of an order that have no bad sample, as far as the plan tells."""
        samples = self.samples_of(order) if bad else []
        if not bad.issubset(samples):
            return 0
        return sum(sample not in bad for sample in samples) if bad else len(order.rows)

    def _count(self, rows: int, done: ChunkDone | OrderFilled) -> None:
        """Count rows that were filled, and the time that they took."""
        self.decoded_samples += rows
        self.bad.rows += rows
        self.work.add(done.work)

    def chunk_lost(self, order: Order, gone: WorkerGone, actions: list[Action]) -> None:
        """Cut the order over which a worker died, unless it was killed, to isolate the suspect."""
        if gone.from_outside:
            parts = [order.rows]
        else:
            if not gone.out_of_memory:
                self.suspects.crashed_s.append(self._moment.now_s)
            parts = split(order.rows, gone.note.row if gone.note is not None else None)
        suspect = self._suspect(order, gone.note)
        if suspect is not None and self.suspects.accuse(
            suspect, gone.how, from_outside=gone.from_outside, out_of_memory=gone.out_of_memory
        ):
            actions.append(QuarantineSample(self.spec.number, suspect, self.suspects.quarantined[suspect]))
        self._stop_if(self.suspects.excess(), actions)
        self.delivery.put_back(order.slot, order.number, parts, actions)

    def died_between_samples(self, gone: WorkerGone, actions: list[Action]) -> None:
        """Count a worker with orders of this stream that died between samples."""
        if gone.from_outside:
            return
        self._blank_deaths += 1
        if self._blank_deaths >= BLANK_DEATHS_MAX:
            text = (
                f"{self._blank_deaths} workers in a row ended before they had done anything for it, the last by {gone.how}: "
                "something is wrong with the machine, with what they import, or with batchd itself; see the log"
            )
            self._stop_if(text, actions)

    def slot_lost(self, number: int, reason: str, actions: list[Action]) -> list[int]:
        """Forget a slot without memory; return the orders that will never be carried out."""
        slot = self.delivery.ring.slots.get(number)
        if slot is None:
            return []
        orders = list(slot.fill.under_way) if slot.fill is not None else []
        problem = self.delivery.lose(slot, actions)
        self._stop_if(problem and f"{problem}: {reason}", actions)
        return orders

    def retire(self, problem: Refusal, actions: list[Action]) -> None:
        """Serve the stream no more, and tell all that wait. ``sweep`` frees its slots in time."""
        self.delivery.retired = problem
        self.delivery.stop(problem[1], actions)
        self._answer_producers(problem, actions)

    def sweep(self, actions: list[Action]) -> bool:
        """Free a retired stream's idle slots; return whether no trainer or producer is left."""
        ring = self.delivery.ring
        if idle := sorted(ring.idle.slots):
            for number in idle:
                ring.drop(ring.slots[number])
            actions.append(FreeSlots(self.spec.number, tuple(idle)))
        if not ring.slots and not self._is_empty:
            self._is_empty = True
            actions.append(EndStream(self.spec.number))
        return self._is_empty and not self.delivery.subscriptions and not self.delivery.supply.mailbox.producers

    def trim(self, actions: list[Action]) -> bool:
        """Free idle slots beyond those that its ring may have; return whether no more are left."""
        ring = self.delivery.ring
        if dropped := ring.trim():
            actions.append(FreeSlots(self.spec.number, tuple(slot.number for slot in dropped)))
        return len(ring.slots) <= ring.slots_max

    def statistics(self, subscriptions_max: int | None = None) -> StreamStatus:
        """Return the counters of the stream, and of so many subscriptions; None: of all."""
        delivery, plan, kept = self.delivery, self.spec.plan, self.delivery.ring.idle.kept()
        slots = [slot for slot in delivery.ring.slots.values() if slot.is_made]
        return StreamStatus(
            number=self.spec.number,
            name=self.spec.name,
            own_source=self.spec.own_source,
            source=self.spec.source,
            fingerprint=self.spec.fingerprint,
            samples=plan.samples,
            batch_size=plan.batch_size,
            steps=plan.steps,
            repeats=plan.repeats,
            slots=len(slots),
            slots_max=delivery.ring.slots_max,
            ready_slots=sum(slot.is_ready for slot in slots),
            leased_slots=sum(slot.leases > 0 for slot in slots),
            decoded_batches=delivery.decoded_batches,
            decoded_samples=self.decoded_samples,
            delivered_batches=delivery.delivered_batches,
            delivered_samples=delivery.delivered_samples,
            shared_batches=delivery.shared_batches,
            mismatched_batches=delivery.mismatched_batches,
            bad_rows=self.bad.bad_rows,
            bad_samples=self.bad.total,
            quarantined_samples=len(self.suspects.quarantined),
            sample_s=self.sample_s,
            work=self.work.statistics(),
            stopped=delivery.stopped,
            bgr_fields=self.spec.bgr_fields,
            live=delivery.supply.statistics(),
            subscriptions=tuple(
                _subscription_statistics(subscription, kept[subscription.number])
                for subscription in islice(delivery.subscriptions.values(), subscriptions_max)
            ),
            subscriptions_left_out=max(0, len(delivery.subscriptions) - subscriptions_max)
            if subscriptions_max is not None
            else 0,
            filling_slots=sum(slot.fill is not None and slot.is_awaited for slot in slots),
            partial_slots=sum(slot.fill is not None and not slot.is_awaited for slot in slots),
            away=self.outage.reason if self.outage is not None else None,
            away_s=self._moment.now_s - self.outage.since_s if self.outage is not None else 0.0,
        )

    def _suspect(self, order: Order, note: Note | None) -> int | None:
        """Return the sample that a dead worker was decoding, if known."""
        if note is not None and note.row in order.rows and note.sample < self.spec.plan.source_samples:
            return note.sample
        samples = self.samples_of(order)
        return samples[0] if len(samples) == 1 else None

    def _stop_if(self, text: str | None, actions: list[Action]) -> None:
        if text and self.delivery.stopped is None:
            self.outage = None
            self.delivery.stop(text, actions)
            actions.append(ReportStopped(self.spec.number, text))
            self._answer_producers((ErrorCode.STREAM_STOPPED, text), actions)

    def _answer_producers(self, problem: Refusal, actions: list[Action]) -> None:
        """Refuse the producers that wait for a place: none will be free any more."""
        for session, request in self.delivery.supply.mailbox.forget_waiting():
            actions.append(Refuse(session, request, 0, *problem))


def _subscription_statistics(subscription: Subscription, kept_slots: int) -> SubscriptionStatistics:
    share = subscription.course.at(subscription.consumed)
    last = subscription.course.at(subscription.consumed - 1) if subscription.consumed else None
    return SubscriptionStatistics(
        number=subscription.number,
        session=subscription.session,
        rank=subscription.course.rank,
        world_size=subscription.course.world_size,
        window=subscription.window,
        epoch=share.position.epoch if share else None,
        step=share.position.step if share else None,
        last_epoch=last.position.epoch if last else None,
        last_step=last.position.step if last else None,
        is_spectator=subscription.is_spectator,
        consumed_batches=subscription.consumed,
        delivered_samples=subscription.delivered_samples,
        held_slots=len(subscription.leases),
        ready_ahead=subscription.granted - subscription.consumed + subscription.ready_claims,
        waiting=subscription.waits.cause is not None,
        wait_s=subscription.wait_us / 1e6,
        waits=subscription.waits.statistics(),
        short_of_memory_s=subscription.short_of_memory.total_s,
        kept_slots=kept_slots,
    )


class Outage:
    """A stream whose storage is away: one row is tried again after each pause.

        a worker says "away" --> pause 1 s --> probe --> away --> pause 2 s --> ... at most 30 s
                                                 |                 over after storage_away_s: stop
                                                 +--> filled: the stream goes on as before

    Begins at ``now_s`` for a worker's ``reason``; the stream stops ``patience_s`` later. Invariant:
    while a stream is away, no worker gets an order of it but the probe, which has one row.
    """

    def __init__(self, reason: str, now_s: float, patience_s: float) -> None:
        self.reason = reason
        self.since_s = now_s
        self._patience_s = patience_s
        self._pause_s = PAUSE_FIRST_S
        self._next_s = self._after_pause(now_s)
        self._probe: Order | None = None

    def may_probe(self, now_s: float) -> bool:
        """Return whether an order may be tried now: the pause is over, and no other one is."""
        return now_s >= self._next_s and not self._is_probing

    def begin(self, probe: Order, now_s: float) -> None:
        """Note the order that is tried; if its worker dies, the next one follows after a pause."""
        self._probe = probe
        self._next_s = self._after_pause(now_s)

    def is_of(self, numbers: set[int]) -> bool:
        """Return whether the probe is one of these orders."""
        return self._probe is not None and self._probe.number in numbers

    def failed(self, reason: str, now_s: float) -> str | None:
        """Note that the probe found the storage away; return why the stream stops, if it does."""
        self.reason, self._probe = reason, None
        self._pause_s = min(PAUSE_GROWTH * self._pause_s, PAUSE_MAX_S)
        self._next_s = self._after_pause(now_s)
        if now_s < self.since_s + self._patience_s:
            return None
        return (
            f"{reason}; it was waited for during {now_s - self.since_s:.0f} s (storage_away_s = {self._patience_s:g}): "
            "when it is back, `batchd reload` starts the stream again"
        )

    @property
    def _is_probing(self) -> bool:
        """True while a worker has the probe: an order that was lost is not one of its slot."""
        return self._probe is not None and (
            self._probe.slot.fill is not None and self._probe.number in self._probe.slot.fill.under_way
        )

    def _after_pause(self, now_s: float) -> float:
        """The end of a pause that begins now: no later than the last try."""
        end_s = self.since_s + self._patience_s
        return min(now_s + self._pause_s, end_s) if now_s < end_s else now_s + self._pause_s
