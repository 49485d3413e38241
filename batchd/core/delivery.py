"""The rules between one ring and its subscriptions: who may claim, what is evicted, who gets which slot. Nobody's process.

    Subscribe -> admit -> [ claim -> place in a slot -> (filled) -> grant a lease -> release ]*  -> end

A claim is a promise of memory, so it is made only if the ring can keep it whatever the others do. With U(i) the leases and
claims of subscription i, each claim and each admission keeps

    sum over i of max(2, U(i))  <=  slots of the ring

Slots that several trainers share are counted once for each, so the slots in use are never more than that sum, and every
claim finds a slot that is idle, or will be as soon as the workers' present orders end. A subscription below its two
slots may always claim. So each admitted subscription goes on, even if all the others stand still: no deadlock.
"""

from collections.abc import Callable
from dataclasses import dataclass

from batchd.core.actions import Action, AdmitSubscription, CommitSlot, CreateSlot, GrantLease, Refuse, ReserveSlot
from batchd.core.admission import refusal
from batchd.core.course import Course, Share
from batchd.core.events import Pulled, SubscriptionAsked
from batchd.core.plan import Plan, Position
from batchd.core.ring import NEVER, Ring, Slot
from batchd.core.subscription import ENTITLEMENT_SLOTS, Claim, Lease, Subscription
from batchd_wire.codes import ErrorCode


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What the core must know of a stream. ``repeats``: every epoch has the same bytes, so filled slots serve all epochs.

    ``max_skew`` is how many batches a trainer may be ahead of the slowest; None lets each go at its own pace.
    """

    number: int
    name: str
    fingerprint: str
    plan: Plan
    repeats: bool
    window: int
    max_skew: int | None
    slots_max: int
    on_error: str
    bad_fraction_max: float


class Delivery:
    """One stream's ring and subscriptions. ``new_slot`` gives numbers that were never used."""

    def __init__(self, spec: StreamSpec, new_slot: Callable[[], int]) -> None:
        self.spec = spec
        self.ring = Ring(spec.slots_max)
        self.subscriptions: dict[int, Subscription] = {}
        self.stopped: str | None = None
        self.decoded_batches = 0
        self.delivered_batches = 0
        self.delivered_samples = 0
        self.shared_batches = 0
        self._new_slot = new_slot
        self._committed = 0
        self._stalled: set[int] = set()
        """Subscriptions that want more than they may have just now."""

    # --- what trainers do ---------------------------------------------------------------------------------------------

    def subscribe(self, asked: SubscriptionAsked, actions: list[Action]) -> Subscription | None:
        """Admit a claim or refuse it with a reason; a refused one leaves nothing behind."""
        course = Course(self.spec.plan, asked.rank, asked.world_size, asked.epoch, asked.step, asked.end_epoch)
        problem = refusal(asked, course, self.spec.name, self.spec.fingerprint) or self._lacks_memory()
        if self.stopped is not None:
            problem = (ErrorCode.STREAM_STOPPED, self.stopped)
        if problem is not None:
            actions.append(Refuse(asked.session, asked.request, 0, *problem))
            return None
        window = asked.window or self.spec.window
        subscription = Subscription(asked.subscription, asked.session, course, window)
        subscription.served_s = min((one.served_s for one in self._active()), default=0.0)
        self.subscriptions[subscription.number] = subscription
        self._committed += subscription.committed
        actions.append(
            AdmitSubscription(asked.session, asked.request, asked.subscription, self.spec.number, course, window)
        )
        self._advance(subscription, actions)
        return subscription

    def pull(self, pulled: Pulled, actions: list[Action]) -> None:
        """Take back what a trainer releases and hand it what it wants next."""
        subscription = self.subscriptions[pulled.subscription]
        for sequence, generation in pulled.released:
            self._release(subscription, sequence, generation)
        if not subscription.ended:
            consumed = min(pulled.consumed, subscription.granted)
            subscription.consumed = max(subscription.consumed, consumed)
            subscription.waiting = pulled.waiting and pulled.consumed == subscription.granted
            subscription.wait_us = max(subscription.wait_us, pulled.wait_us)
            self._advance(subscription, actions)
            if subscription.waiting:
                self._answer_waiting(subscription, actions)
        self._forget_if_over(subscription)
        self.wake_stalled(actions)

    def end(self, subscription: Subscription, actions: list[Action], *, leases_from: int | None) -> None:
        """A trainer gives up its claim, and its leases from sequence ``leases_from`` on (None: it keeps them all)."""
        if not subscription.ended:
            self._withdraw_claims(subscription, 0)
            before = subscription.committed
            subscription.ended = True
            subscription.waiting = False
            self._committed += subscription.committed - before
            self._stalled.discard(subscription.number)
        if leases_from is not None:
            for sequence, lease in list(subscription.leases.items()):
                if sequence >= leases_from:
                    self._release(subscription, sequence, lease.generation)
        self._forget_if_over(subscription)
        self.wake_stalled(actions)

    # --- what workers do ----------------------------------------------------------------------------------------------

    def filled(self, slot: Slot, actions: list[Action]) -> None:
        """Every row is in the slot: hand it to those who claimed it."""
        assert slot.position is not None
        slot.fill = None
        self.decoded_batches += 1
        rows = self.spec.plan.rows(slot.position.step)
        actions.append(CommitSlot(self.spec.number, slot.number, slot.generation, slot.position, rows))
        for number in list(slot.claims):
            self._advance(self.subscriptions[number], actions)
        self.wake_stalled(actions)

    def lose(self, slot: Slot, actions: list[Action]) -> str | None:
        """The slot's memory could not be had: place its claims elsewhere. Says so where too few slots are left to go on."""
        self.ring.remove(slot)
        for number in slot.claims:
            subscription = self.subscriptions[number]
            for claim in subscription.claims:
                if claim.slot is slot:
                    claim.slot = None
            self._stalled.add(number)
        slot.claims.clear()
        needed = ENTITLEMENT_SLOTS * max(1, len(self._active()))
        if self.ring.slots_max < needed:
            return f"memory for {self.ring.slots_max} slots could be had, and its trainers need {needed}"
        self.wake_stalled(actions)
        return None

    def stop(self, text: str, actions: list[Action]) -> None:
        """The stream cannot go on: nothing is filled any more, and whoever waits is told why."""
        self.stopped = text
        for subscription in self._active():
            self._withdraw_claims(subscription, 0)
            if subscription.waiting:
                self._answer_waiting(subscription, actions)

    def wanted(self) -> tuple[tuple[int, float], Subscription, Slot] | None:
        """The filling that is needed most: a waiting trainer's first, then the nearest, then whoever had least of the workers."""
        best = None
        for subscription in self.subscriptions.values():
            found = _first_unfilled(subscription)
            if found is None:
                continue
            ahead, slot = found
            waits = subscription.waiting and ahead == 0
            distance = 0 if waits else 1 + subscription.granted + ahead - subscription.consumed
            need = (distance, subscription.served_s)
            if best is None or need < best[0]:
                best = (need, subscription, slot)
        return best

    def wake_stalled(self, actions: list[Action]) -> None:
        """Something may have become free: let those who want more try again, whoever had least first."""
        if not self._stalled:
            return
        stalled = sorted(self._stalled, key=lambda number: self.subscriptions[number].served_s)
        self._stalled.clear()
        for number in stalled:
            self._advance(self.subscriptions[number], actions)

    # --- the steps ----------------------------------------------------------------------------------------------------

    def _advance(self, subscription: Subscription, actions: list[Action]) -> None:
        """Claim what it wants and may have, and hand out what is ready, in order."""
        if self.stopped is not None or subscription.ended:
            return
        for claim in subscription.claims:
            if claim.slot is None:
                self._place(subscription, claim, actions)
        self._extend(subscription, actions)
        claims = subscription.claims
        while claims and (slot := claims[0].slot) is not None and slot.is_ready:
            self._grant(subscription, slot, actions)
            self._extend(subscription, actions)

    def _extend(self, subscription: Subscription, actions: list[Action]) -> None:
        limit = subscription.consumed + subscription.window
        while subscription.next_sequence < limit:
            share = subscription.course.at(subscription.next_sequence)
            if share is None:
                return
            if not self._may_claim(subscription, share):
                self._stalled.add(subscription.number)
                return
            before = subscription.committed
            claim = Claim(subscription.next_sequence, share)
            subscription.claims.append(claim)
            self._committed += subscription.committed - before
            self._place(subscription, claim, actions)

    def _may_claim(self, subscription: Subscription, share: Share) -> bool:
        if self.spec.max_skew is not None and self._skew(share.position) > self.spec.max_skew:
            return False
        if subscription.usage < ENTITLEMENT_SLOTS:
            return True
        if self._committed >= self.ring.slots_max:
            return False
        fair_slots = max(ENTITLEMENT_SLOTS, self.ring.slots_max // len(self.subscriptions))
        if subscription.usage < fair_slots:
            return True
        others = (self.subscriptions[number] for number in self._stalled if number != subscription.number)
        return all(other.usage >= fair_slots for other in others)

    def _skew(self, position: Position) -> int:
        """How many batches ``position`` is ahead of the slowest trainer of the stream."""
        steps = self.spec.plan.steps
        slowest = min(
            (share.position.epoch * steps + share.position.step)
            for one in self._active()
            if (share := one.course.at(one.consumed)) is not None
        )
        return position.epoch * steps + position.step - slowest

    def _place(self, subscription: Subscription, claim: Claim, actions: list[Action]) -> None:
        """Find the slot that has, gets or shall get the claimed position."""
        position = self._key(claim.share.position)
        slot = self.ring.find(position)
        if slot is None:
            slot = self.ring.choose(self._next_use)
            if slot is None and self.ring.can_grow:
                slot = self.ring.add(self._new_slot())
                actions.append(CreateSlot(self.spec.number, slot.number))
            if slot is None:
                self._stalled.add(subscription.number)
                return
            self.ring.take(slot, position, self.spec.plan.rows(position.step))
            actions.append(ReserveSlot(slot.number))
        claim.slot = slot
        slot.claims[subscription.number] = slot.claims.get(subscription.number, 0) + 1

    def _grant(self, subscription: Subscription, slot: Slot, actions: list[Action]) -> None:
        """The first claim becomes a lease; the usage stays the same."""
        claim = subscription.claims.popleft()
        _unclaim(slot, subscription.number)
        slot.leases += 1
        slot.grants += 1
        subscription.leases[claim.sequence] = Lease(slot, slot.generation)
        subscription.granted += 1
        if subscription.waiting:
            subscription.waiting = False
            subscription.consumed = subscription.granted
        (epoch, step), first, count = claim.share
        subscription.delivered_samples += count
        self.delivered_batches += 1
        self.delivered_samples += count
        self.shared_batches += slot.grants == 2  # noqa: PLR2004  the second reader makes it shared
        actions.append(
            GrantLease(
                subscription.session,
                subscription.number,
                claim.sequence,
                epoch,
                step,
                slot.number,
                slot.generation,
                first,
                count,
            )
        )

    def _release(self, subscription: Subscription, sequence: int, generation: int) -> None:
        """End a lease. A release that names no lease, or another generation, changes nothing (it may be a repetition)."""
        lease = subscription.leases.get(sequence)
        if lease is None or lease.generation != generation:
            return
        before = subscription.committed
        del subscription.leases[sequence]
        self._committed += subscription.committed - before
        lease.slot.leases -= 1
        subscription.released += 1

    def _withdraw_claims(self, subscription: Subscription, keep: int) -> None:
        """Take back the farthest claims until ``keep`` are left."""
        before = subscription.committed
        while len(subscription.claims) > keep:
            claim = subscription.claims.pop()
            if claim.slot is not None:
                _unclaim(claim.slot, subscription.number)
        self._committed += subscription.committed - before

    def _lacks_memory(self) -> tuple[ErrorCode, str] | None:
        """Make room for one more subscription's two slots, or say why there is none."""
        slots, active = self.ring.slots_max, len(self._active())
        if ENTITLEMENT_SLOTS * (active + 1) > slots:
            return ErrorCode.RING_TOO_SMALL, (
                f"stream {self.spec.name!r} has {slots} slots and {active} trainers, and each needs {ENTITLEMENT_SLOTS}; "
                "give it more memory (memory = in batchd.toml)"
            )
        for subscription in self._active():
            if self._committed + ENTITLEMENT_SLOTS <= slots:
                break
            keep = max(0, ENTITLEMENT_SLOTS - len(subscription.leases))
            self._withdraw_claims(subscription, keep)
            self._stalled.add(subscription.number)
        if self._committed + ENTITLEMENT_SLOTS <= slots:
            return None
        held = sum(len(one.leases) for one in self.subscriptions.values())
        return ErrorCode.RING_TOO_SMALL, (
            f"{held} of the {slots} slots of stream {self.spec.name!r} are held by other trainers, and one more trainer needs "
            f"{ENTITLEMENT_SLOTS}; have them release batches, or give the stream more memory (memory = in batchd.toml)"
        )

    def _answer_waiting(self, subscription: Subscription, actions: list[Action]) -> None:
        """Tell a trainer that waits for what can never come: the stream stopped, or it holds all that it may hold itself."""
        if self.stopped is not None:
            problem = (ErrorCode.STREAM_STOPPED, self.stopped)
        else:
            held = len(subscription.leases)
            others = sum(
                len(one.leases) if one.ended else ENTITLEMENT_SLOTS
                for one in self.subscriptions.values()
                if one is not subscription
            )
            if subscription.claims or held < ENTITLEMENT_SLOTS or held + others < self.ring.slots_max:
                return
            if subscription.course.at(subscription.granted) is None:
                return
            problem = (
                ErrorCode.RING_EXHAUSTED,
                f"this trainer holds {held} of the {self.ring.slots_max} slots of stream {self.spec.name!r}"
                + (f", and {others} are kept for others" if others else ""),
            )
        subscription.waiting = False
        actions.append(Refuse(subscription.session, 0, subscription.number, *problem))

    def _forget_if_over(self, subscription: Subscription) -> None:
        if subscription.ended and not subscription.leases:
            self.subscriptions.pop(subscription.number, None)

    def _active(self) -> list[Subscription]:
        return [one for one in self.subscriptions.values() if not one.ended]

    def _key(self, position: Position) -> Position:
        """What names the bytes: where every epoch has the same, the step alone does."""
        return Position(0, position.step) if self.spec.repeats else position

    def _next_use(self, key: Position) -> float:
        """How many batches until somebody reads ``key``; ``NEVER`` where nobody will."""
        nearest = NEVER
        for one in self._active():
            share = one.course.at(one.next_sequence)
            if share is None:
                continue
            epochs = (share.position.epoch, share.position.epoch + 1) if self.spec.repeats else (key.epoch,)
            for epoch in epochs:
                sequence = one.course.sequence_of(Position(epoch, key.step))
                if sequence is not None and sequence >= one.next_sequence:
                    nearest = min(nearest, sequence - one.next_sequence)
        return nearest


def _first_unfilled(subscription: Subscription) -> tuple[int, Slot] | None:
    """The nearest claim that has rows for a worker: (how many claims stand before it, its slot)."""
    for ahead, claim in enumerate(subscription.claims):
        slot = claim.slot
        if slot is not None and slot.fill is not None and slot.fill.has_pending:
            return ahead, slot
    return None


def _unclaim(slot: Slot, subscription: int) -> None:
    slot.claims[subscription] -= 1
    if not slot.claims[subscription]:
        del slot.claims[subscription]
