"""The rules between one ring and its subscriptions: who may claim, what is evicted, who gets which slot. Nobody's process.

    Subscribe -> admit -> [ claim -> place in a slot -> (filled) -> grant a lease -> release ]*  -> end

``promises`` has the rule for memory, ``supply`` those for live streams, ``pace`` that for lockstep.
"""

from collections.abc import Callable

from batchd.core.actions import (
    Action,
    AdmitSubscription,
    CommitSlot,
    CreateSlot,
    GrantLease,
    Refuse,
    ReportMismatch,
    ReserveSlot,
)
from batchd.core.admission import Refusal, refusal, ring_exhausted, ring_too_small
from batchd.core.course import Course
from batchd.core.events import BatchMismatched, BatchSent, Pulled, SubscriptionAsked
from batchd.core.measure import Moment, Spells, WaitCause, Waits
from batchd.core.pace import Pace
from batchd.core.promises import Promises
from batchd.core.readers import Readers
from batchd.core.ring import Ring, Slot
from batchd.core.spec import StreamSpec
from batchd.core.subscription import ENTITLEMENT_SLOTS, Claim, Lease, Subscription
from batchd.core.supply import LiveSupply, Supply
from batchd_wire.codes import ErrorCode
from batchd_wire.position import Position
from batchd_wire.wording import counted

REFILL_INTERVAL_S = 1.0
"""How often a batch is decoded again because a trainer says that it does not match. Memory that often fails is to be
replaced; and nobody can keep others from their batches by saying so."""


class Delivery:
    """One stream's ring and subscriptions. ``new_slot`` gives numbers that were never used."""

    def __init__(self, spec: StreamSpec, new_slot: Callable[[], int], moment: Moment) -> None:
        self.spec = spec
        self._moment = moment
        self._readers = Readers(spec.plan, repeats=spec.repeats)
        self.ring = Ring(spec.slots_max, self._readers)
        self.subscriptions: dict[int, Subscription] = {}
        self.stopped: str | None = None
        self.retired: Refusal | None = None
        """Why the stream is not served any more, as its trainers are told."""
        self.decoded_batches = 0
        self.delivered_batches = 0
        self.delivered_samples = 0
        self.shared_batches = 0
        self.mismatched_batches = 0
        self._new_slot = new_slot
        self._refilled_s = -REFILL_INTERVAL_S
        self._promises = Promises(self.ring, self.subscriptions)
        self._pace = Pace(spec.max_skew, spec.slots_max)
        self.supply = (
            Supply(spec, self.ring) if spec.live is None else LiveSupply(spec, self.ring, self._readers, self._pace)
        )
        self._unplaced: set[int] = set()
        """Subscriptions with a claim that waits for a slot to be idle."""
        self._stalled: set[int] = set()
        """Subscriptions that want more memory than they may have just now."""
        self._kept: set[int] = set()
        """Subscriptions with a batch that is ready and kept from them, so that a newcomer finds room."""
        self._ahead: set[int] = set()
        """Subscriptions that wait for slower ones, in lockstep."""

    # --- what trainers do ---------------------------------------------------------------------------------------------

    def subscribe(self, asked: SubscriptionAsked, actions: list[Action]) -> Subscription | None:
        """Admit a claim or refuse it with a reason; a refused one leaves nothing behind."""
        start = self.supply.beginning(asked)
        course = Course(self.spec.plan, asked.rank, asked.world_size, *start, asked.end_epoch)
        problem = refusal(asked, course, self.spec.name, self.spec.fingerprint) or ring_too_small(
            self.spec.name, self.ring.slots_max, len(self._active()), self._promises.promised
        )
        if self.verdict is not None:
            problem = self.verdict
        if problem is not None:
            actions.append(Refuse(asked.session, asked.request, 0, *problem))
            return None
        window = asked.window or self.spec.window
        if asked.is_remote:
            window = min(window, self.spec.remote_window_max)
        subscription = Subscription(
            asked.subscription,
            asked.session,
            course,
            window,
            Waits(self._moment),
            Spells(self._moment),
            asked.is_spectator,
            asked.is_remote,
        )
        self._make_room(ENTITLEMENT_SLOTS)
        self.subscriptions[subscription.number] = subscription
        self._next_is(subscription)
        self._promises.recount(subscription)
        self._stands(subscription)
        actions.append(
            AdmitSubscription(asked.session, asked.request, asked.subscription, self.spec.number, course, window)
        )
        self._advance(subscription, actions)
        self.wake(actions)
        self._answer_hoarders(actions)
        return subscription

    def pull(self, pulled: Pulled, actions: list[Action]) -> None:
        """Take back what a trainer releases and hand it what it wants next."""
        subscription = self.subscriptions[pulled.subscription]
        for sequence, generation in pulled.released:
            self._release(subscription, sequence, generation)
        if not subscription.ended:
            # Who waits for a batch whose handle is on its way takes it in the same breath, and will not say so again.
            self._consume(subscription, min(pulled.consumed + pulled.waiting, subscription.granted))
            subscription.waiting = pulled.waiting and pulled.consumed == subscription.granted
            is_being_sent = pulled.waiting and subscription.is_remote and pulled.consumed in subscription.leases
            subscription.awaited = pulled.consumed if is_being_sent else None
            if pulled.wait_us > subscription.wait_us:
                subscription.wait_us = pulled.wait_us
                if subscription.is_remote:
                    subscription.waits.told(pulled.wait_us / 1e6)
            self._advance(subscription, actions)
            if subscription.waiting:
                self._answer_waiting(subscription, actions)
        self._forget_if_over(subscription)
        self.wake(actions)

    def sent(self, sent: BatchSent, actions: list[Action]) -> None:
        """End the lease of a batch that was sent as bytes; the next one may follow."""
        subscription = self.subscriptions[sent.subscription]
        self._release(subscription, sent.sequence, sent.generation)
        if not subscription.ended:
            self._advance(subscription, actions)
        self._forget_if_over(subscription)
        self.wake(actions)

    def mismatched(self, event: BatchMismatched, now: float, actions: list[Action]) -> None:
        """A trainer got other bytes than were written: nobody else shall be given what may be a spoilt slot."""
        if self.retired is not None:
            return  # it is asked for again of the stream that there is now, and this one's slots go back one by one
        subscription = self.subscriptions[event.subscription]
        share = subscription.course.at(event.sequence) if event.sequence < subscription.granted else None
        if share is None:
            return
        self.mismatched_batches += 1
        actions.append(ReportMismatch(self.spec.number, event.session, share.position))
        if not self.supply.can_refill:
            return  # it cannot be filled again, and may be sound for others, or when it is sent once more
        slot = self.ring.find(self._key(share.position))
        if slot is None or not slot.is_ready or slot.generation != event.generation:
            return
        if now - self._refilled_s >= REFILL_INTERVAL_S:
            self._refilled_s = now
            self.ring.spoil(slot)
            self._claim_elsewhere(slot)
            self.ring.let_go(slot)
            self.wake(actions)

    def end(self, subscriptions: list[Subscription], actions: list[Action], *, leases_from: int | None) -> None:
        """Claims are given up, with their leases from sequence ``leases_from`` on (None: the trainers keep them all)."""
        for subscription in subscriptions:
            self._end(subscription, leases_from)
        self.wake(actions)
        self._answer_hoarders(actions)

    # --- what workers do ----------------------------------------------------------------------------------------------

    def filled(self, slot: Slot, actions: list[Action]) -> None:
        """Every row is in the slot: hand it to those who claimed it."""
        assert slot.position is not None
        slot.fill = None
        self.supply.let_go(slot)
        self.decoded_batches += 1
        rows = self.spec.plan.rows(slot.position.step)
        actions.append(CommitSlot(self.spec.number, slot.number, slot.generation, slot.position, rows))
        for number in list(slot.claims):
            self._advance(self.subscriptions[number], actions)
        self.wake(actions)

    def put_back(self, slot: Slot, order: int, parts: list[tuple[int, int]], actions: list[Action]) -> None:
        """The rows of an order have to be filled again, in these ``parts``."""
        self.ring.put_back(slot, order, parts)
        for number in slot.claims:
            subscription = self.subscriptions[number]
            subscription.has_rows(subscription.granted)
        self.supply.let_go(slot)
        self.wake(actions)

    def lose(self, slot: Slot, actions: list[Action]) -> str | None:
        """The slot's memory could not be had: place its claims elsewhere. Says so where too few slots are left to go on."""
        if slot.position is not None:
            self.supply.mailbox.unbind(slot.position)
        self.ring.remove(slot)
        self._pace.fit(self.ring.slots_max)
        self._claim_elsewhere(slot)
        needed = max(ENTITLEMENT_SLOTS, self._promises.promised)
        if self.ring.slots_max < needed:
            return f"memory for {counted(self.ring.slots_max, 'slot')} could be had, and its trainers need {needed}"
        self._make_room(0)
        self.wake(actions)
        self._answer_hoarders(actions)
        return None

    def stop(self, text: str, actions: list[Action]) -> None:
        """The stream cannot go on: nothing is filled any more, and whoever waits is told why."""
        self.stopped = text
        for subscription in self._active():
            self._withdraw_claims(subscription, 0)
            if subscription.waiting:
                self._answer_waiting(subscription, actions)
            self._account(subscription)

    @property
    def verdict(self) -> Refusal | None:
        """Why nothing is handed out any more; None while the stream goes on."""
        if self.retired is not None:
            return self.retired
        return None if self.stopped is None else (ErrorCode.STREAM_STOPPED, self.stopped)

    def retire(self, problem: Refusal, actions: list[Action]) -> None:
        """The stream is not served any more: whoever waits for its next batch is told so, and leases stay until they end."""
        self.retired = problem
        self.stop(problem[1], actions)

    def extend_ring(self, actions: list[Action]) -> None:
        """Make a slot before anybody needs it; the ring can grow."""
        slot = self.ring.add(self._new_slot())
        actions.append(CreateSlot(self.spec.number, slot.number))

    def free_idle(self) -> list[int]:
        """Of a retired stream: forget the slots that nobody reads or writes any more."""
        idle = sorted(self.ring.idle.slots)
        for number in idle:
            self.ring.drop(self.ring.slots[number])
        return idle

    def wanted(self, least_served_s: float) -> tuple[tuple[int, float], Subscription, Slot] | None:
        """The filling that is needed most: a waiting trainer's first, then the nearest, then whoever had least of the workers.

        Nobody counts as having had less than ``least_served_s``: who wanted nothing for long has saved nothing up.
        """
        if not self.ring.pending:
            return None
        best = None
        for subscription in self.subscriptions.values():
            found = self._first_fillable(subscription)
            if found is None:
                continue
            ahead, slot = found
            waits = subscription.waiting and ahead == 0
            distance = 0 if waits else 1 + subscription.granted + ahead - subscription.consumed
            need = (distance, max(subscription.served_s, least_served_s))
            if best is None or need < best[0]:
                best = (need, subscription, slot)
        return best

    def cut(self, slot: Slot, order: int, rows_max: int) -> tuple[int, int, tuple[int, ...]]:
        """Cut pending rows of ``slot`` for an order; return the first, how many, and their mailbox places."""
        assert slot.position is not None
        if self.supply.bind(slot):
            for number in slot.claims:
                self._account(self.subscriptions[number])
        first, rows = self.ring.cut(slot, order, rows_max)
        return first, rows, self.supply.places(slot.position, first, rows)

    def wake(self, actions: list[Action]) -> None:
        """Something may have become free: let those who want more try again, whoever is below its fair share first."""
        self._leave_room_for_who_waits()
        self._try_again(self._unplaced | self._stalled if self._promises.has_room(1) else self._unplaced, actions)
        if self._kept and self._promises.newcomer_finds_room:
            self._try_again(self._kept, actions)
        while self._pace.has_moved() or self.supply.has_changed():
            self._try_again(self._ahead, actions)

    # --- the steps ----------------------------------------------------------------------------------------------------

    def _leave_room_for_who_waits(self) -> None:
        """In a live stream, a trainer that waits for samples is not kept from them by batches for which nobody waits.

        Such a batch takes their room where the one that waited for it is gone, or was a spectator. Its claims are placed anew.
        """
        if self.supply.has_room or not any(map(self._lacks_samples, self._active())):
            return
        first_claims = [one.claims[0].slot for one in self._active() if one.waiting and one.claims]
        awaited = {slot.number for slot in first_claims if slot is not None}
        while (slot := self.supply.reclaimable(awaited)) is not None:
            self._claim_elsewhere(slot)
            self.supply.take_back(slot)

    @property
    def _has_trainers(self) -> bool:
        return any(not one.is_spectator for one in self._active())

    def _lacks_samples(self, subscription: Subscription) -> bool:
        """Does a trainer wait for a batch that has no samples yet?"""
        return not subscription.is_spectator and self._cause(subscription) is WaitCause.PRODUCERS

    def _first_fillable(self, subscription: Subscription) -> tuple[int, Slot] | None:
        """The nearest claim with rows for a worker; in a live stream, of those that have samples or can get them now."""
        for ahead, slot in subscription.unfilled(self.ring.pending):
            waits = subscription.waiting and ahead == 0 and not (subscription.is_spectator and self._has_trainers)
            if self.supply.may_fill(slot, waits=waits):
                return ahead, slot
        return None

    def _try_again(self, numbers: set[int], actions: list[Action]) -> None:
        if not numbers:
            return
        fair_slots = self._promises.fair_slots
        subscriptions = [self.subscriptions[number] for number in numbers]
        for subscription in sorted(subscriptions, key=lambda one: (one.usage >= fair_slots, one.served_s)):
            self._advance(subscription, actions)

    def _advance(self, subscription: Subscription, actions: list[Action]) -> None:
        """Claim what it wants and may have, and hand out what is ready, in order."""
        has_unplaced = subscription.number in self._unplaced
        self._stop_waiting(subscription)
        if self.stopped is None and not subscription.ended:
            if has_unplaced:
                for claim in subscription.claims:
                    if claim.slot is None:
                        self._place(subscription, claim, actions)
            self._claim_and_grant(subscription, actions)
        self._account(subscription)

    def _claim_and_grant(self, subscription: Subscription, actions: list[Action]) -> None:
        self._extend(subscription, actions)
        claims = subscription.claims
        while claims and (slot := claims[0].slot) is not None and slot.is_ready and self._may_grant(subscription):
            self._grant(subscription, slot, actions)
            self._extend(subscription, actions)

    def _extend(self, subscription: Subscription, actions: list[Action]) -> None:
        limit = subscription.consumed + subscription.window
        while subscription.next_sequence < limit:
            share = subscription.course.at(subscription.next_sequence)
            if share is None:
                return
            if not self._may_go(subscription, share.position):
                self._ahead.add(subscription.number)
                return
            if not self._promises.may_claim(subscription, self._stalled):
                self._stalled.add(subscription.number)
                return
            claim = Claim(subscription.next_sequence, share)
            if not subscription.is_spectator:
                self.supply.claimed(share.position)
            subscription.claims.append(claim)
            self._next_is(subscription)
            self._promises.recount(subscription)
            self._place(subscription, claim, actions)

    def _may_go(self, subscription: Subscription, position: Position) -> bool:
        """Are the slower ones near enough? A spectator keeps pace with nobody, and gets one look at a live stream."""
        is_near = subscription.is_spectator or self._pace.allows(subscription.course, position)
        return is_near and self.supply.may_claim(subscription, position)

    def _account(self, subscription: Subscription) -> None:
        """Note what it waits for from now on, and whether it has as much ahead as it wants. After whatever may change that."""
        subscription.waits.turn(self._cause(subscription))
        number = subscription.number
        subscription.short_of_memory.turn(on=number in self._stalled or number in self._unplaced)

    def _cause(self, subscription: Subscription) -> WaitCause | None:
        if subscription.awaited is not None:
            return WaitCause.NETWORK
        if not subscription.waiting:
            return None
        if not subscription.claims:
            return WaitCause.TRAINERS if subscription.number in self._ahead else WaitCause.MEMORY
        slot = subscription.claims[0].slot
        if slot is None:
            return WaitCause.MEMORY
        if slot.is_ready:  # two batches before it are being sent
            return WaitCause.NETWORK
        return WaitCause.WORKERS if self.supply.has_samples(slot) else WaitCause.PRODUCERS

    def _may_grant(self, subscription: Subscription) -> bool:
        """May a claim become a lease, which cannot be taken back?

        For a batch read ahead only within a fair share that leaves a newcomer its own, and only while he finds two slots; so
        whether he is let in does not depend on how much of what is ready the others were handed before.
        """
        leases = len(subscription.leases)
        if leases < ENTITLEMENT_SLOTS:
            return True
        if subscription.is_remote:
            return False
        if subscription.waiting or self._promises.may_read_ahead(leases):
            return True
        self._kept.add(subscription.number)
        return False

    def _place(self, subscription: Subscription, claim: Claim, actions: list[Action]) -> None:
        """Find the slot that has, gets or shall get the claimed position."""
        position = self._key(claim.share.position)
        slot = self.ring.find(position)
        if slot is None:
            slot = self.ring.choose()
            if slot is None and self.ring.can_grow:
                slot = self.ring.add(self._new_slot())
                actions.append(CreateSlot(self.spec.number, slot.number))
            if slot is None:
                self._unplaced.add(subscription.number)
                return
            self.supply.replaced(slot)
            self.ring.take(slot, position, self.spec.plan.rows(position.step))
            actions.append(ReserveSlot(slot.number))
        claim.slot = slot
        subscription.has_rows(claim.sequence)
        self.ring.claim(slot, subscription.number)

    def _grant(self, subscription: Subscription, slot: Slot, actions: list[Action]) -> None:
        """The first claim becomes a lease; the usage stays the same."""
        claim = subscription.claims.popleft()
        slot.unclaim(subscription.number)
        slot.leases += 1
        subscription.leases[claim.sequence] = Lease(slot, slot.generation)
        subscription.granted += 1
        if subscription.waiting:
            subscription.waiting = False
            subscription.awaited = claim.sequence if subscription.is_remote else None
            self._consume(subscription, subscription.granted)
        (epoch, step), first, count = claim.share
        subscription.delivered_samples += count
        self.delivered_batches += 1
        self.delivered_samples += count
        actions.append(
            GrantLease(
                self.spec.number,
                subscription.session,
                subscription.number,
                claim.sequence,
                epoch,
                step,
                slot.number,
                slot.generation,
                first,
                count,
                subscription.is_remote,
            )
        )
        if subscription.is_spectator:
            self.supply.let_go(slot)
            return
        slot.grants += 1
        self.shared_batches += slot.grants == 2  # noqa: PLR2004  the second reader makes it shared
        if slot.grants == 1:
            self.supply.handed_over(claim.share.position, actions)

    def _consume(self, subscription: Subscription, consumed: int) -> None:
        """The trainer has got so far; what says less has been overtaken."""
        if consumed > subscription.consumed:
            subscription.consumed = consumed
            self._stands(subscription)

    def _stands(self, subscription: Subscription) -> None:
        if not subscription.is_spectator:
            self._pace.stands(subscription.number, subscription.course, subscription.consumed)

    def _stop_waiting(self, subscription: Subscription) -> None:
        for waiting in (self._unplaced, self._stalled, self._kept, self._ahead):
            waiting.discard(subscription.number)

    def _claim_elsewhere(self, slot: Slot) -> None:
        """Nobody will be given what is in the slot; its claims are placed anew."""
        for number in slot.claims:
            for claim in self.subscriptions[number].claims:
                if claim.slot is slot:
                    claim.slot = None
            self._unplaced.add(number)
        slot.claims.clear()

    def _release(self, subscription: Subscription, sequence: int, generation: int) -> None:
        """End a lease. A release that names no lease, or another generation, changes nothing (it may be a repetition)."""
        lease = subscription.leases.get(sequence)
        if lease is None or lease.generation != generation:
            return
        del subscription.leases[sequence]
        if subscription.awaited == sequence:
            subscription.awaited = None
        self._promises.recount(subscription)
        lease.slot.leases -= 1
        self.supply.let_go(lease.slot)
        subscription.released += 1

    def _end(self, subscription: Subscription, leases_from: int | None) -> None:
        if not subscription.ended:
            self._withdraw_claims(subscription, 0)
            subscription.ended = True
            subscription.waiting = False
            subscription.awaited = None
            self._promises.recount(subscription)
            self._pace.forget(subscription.number)
            self._readers.forget(subscription.number)
            self.ring.idle.forget(subscription.number)
            self._stop_waiting(subscription)
            self._account(subscription)
        if leases_from is not None:
            for sequence, lease in list(subscription.leases.items()):
                if sequence >= leases_from:
                    self._release(subscription, sequence, lease.generation)
        self._forget_if_over(subscription)

    def _withdraw_claims(self, subscription: Subscription, keep: int) -> None:
        """Take back the farthest claims until ``keep`` are left."""
        while len(subscription.claims) > keep:
            claim = subscription.claims.pop()
            self._next_is(subscription)
            if claim.slot is not None:
                claim.slot.unclaim(subscription.number)
                self.supply.let_go(claim.slot)
        self._promises.recount(subscription)

    def _make_room(self, slots: int) -> None:
        """Take claims back, the farthest one of whoever has most, until the ring can promise ``slots`` more."""
        while not self._promises.has_room(slots):
            richest = max((one for one in self._active() if one.claims), key=lambda one: one.usage)
            assert richest.usage > ENTITLEMENT_SLOTS, "what is promised beyond the entitlements is claims or leases"
            self._withdraw_claims(richest, len(richest.claims) - 1)
            self._stalled.add(richest.number)
            self._account(richest)

    def _answer_waiting(self, subscription: Subscription, actions: list[Action]) -> None:
        """Tell a trainer that waits for what can never come: the stream stopped, or it holds all that it may hold itself."""
        if self.verdict is not None:
            problem = self.verdict
        elif subscription.claims or subscription.is_remote or subscription.course.at(subscription.granted) is None:
            return  # what is claimed will come, what is being sent goes; and after the last batch nothing does
        else:
            slots, held = self.ring.slots_max, len(subscription.leases)
            others = sum(
                len(one.leases) if one.ended else ENTITLEMENT_SLOTS
                for one in self.subscriptions.values()
                if one is not subscription
            )
            if held + others < slots:
                return
            problem = ring_exhausted(self.spec.name, slots, held, others)
        subscription.waiting = False
        self._account(subscription)
        actions.append(Refuse(subscription.session, 0, subscription.number, *problem))

    def _answer_hoarders(self, actions: list[Action]) -> None:
        """There is less to be had than before: tell those who have been waiting for what they now cannot get."""
        for subscription in self._active():
            if subscription.waiting:
                self._answer_waiting(subscription, actions)

    def _forget_if_over(self, subscription: Subscription) -> None:
        if subscription.ended and not subscription.leases:
            self.subscriptions.pop(subscription.number, None)

    def _active(self) -> list[Subscription]:
        return [one for one in self.subscriptions.values() if not one.ended]

    def _key(self, position: Position) -> Position:
        """What names the bytes: where every epoch has the same, the step alone does."""
        return Position(0, position.step) if self.spec.repeats else position

    def _next_is(self, subscription: Subscription) -> None:
        """Keep what each reads next, whenever a claim was made or taken back; nothing is kept for a spectator."""
        if not subscription.is_spectator:
            self._readers.move(subscription.number, subscription.course, subscription.next_sequence)
