"""Batches and answers for the trainers of one stream. Pure code.

    Subscribe -> admit -> [ claim -> find a slot -> (filled) -> grant a lease -> release ]* -> end

``claims`` has the rules for memory, ``supply`` those for live streams and lockstep.
After every event each subscription has all that it may have now, or ``Subscription.blocked`` says
why not. ``Delivery.wake`` ends every event and tries the blocked ones again:

    blocked by   the subscription                              is retried when
    NO_SLOT      has a claim, and no slot is idle for it       any event of the stream has happened
    NO_MEMORY    wants a claim that the ring cannot promise    the ring can promise one more slot
    RESERVED     has a ready batch, and its lease would leave  a newcomer would find room after
                 a newcomer no room                            one more lease
    AHEAD        wants a position too far from the slowest     the slowest trainer has moved, or in
                 trainer, or one that the ring cannot hold     a live stream, a slot was let go
"""

from collections.abc import Callable

from batchd.core.actions import Action, AdmitSubscription, CommitSlot, GrantLease, Refuse, ReportMismatch
from batchd.core.admission import EPOCH_MAX, Refusal, refusal, ring_exhausted, ring_too_small
from batchd.core.claims import Claims
from batchd.core.course import Course
from batchd.core.events import BatchMismatched, BatchSent, Pulled, StreamSpec, SubscriptionAsked
from batchd.core.measure import Moment, Spells, WaitCause, Waits
from batchd.core.ring import Slot
from batchd.core.rows import Rows
from batchd.core.subscription import ENTITLEMENT_SLOTS, Blocked, Lease, Subscription
from batchd.core.tenants import Account
from batchd_wire.codes import ErrorCode
from batchd_wire.position import Position
from batchd_wire.wording import counted

REFILL_INTERVAL_S = 1.0
"""At most once in this time a batch is decoded again: reports may be false, and others wait."""


class Delivery:
    """One stream's ring and subscriptions. ``new_slot`` returns numbers that were never used."""

    def __init__(self, spec: StreamSpec, new_slot: Callable[[], int], moment: Moment) -> None:
        self.spec = spec
        self._moment = moment
        self.subscriptions: dict[int, Subscription] = {}
        self.claims = Claims(spec, self.subscriptions, new_slot)
        self.ring = self.claims.ring
        self.supply = self.claims.supply
        self.stopped: str | None = None
        self.retired: Refusal | None = None
        """Why the stream is not served any more, for its trainers."""
        self.decoded_batches = 0
        self.delivered_batches = 0
        self.delivered_samples = 0
        self.shared_batches = 0
        self.mismatched_batches = 0
        self._refilled_s = -REFILL_INTERVAL_S
        self._slots_most = spec.slots_max
        """Slots that the ring may have while no other needs their memory."""

    @property
    def is_in_last_epoch(self) -> bool:
        """True if there are trainers, and none of them will read a sample twice any more."""
        return bool(self.subscriptions) and all(map(_is_in_last_epoch, self.subscriptions.values()))

    @property
    def has_time_to_spare(self) -> bool:
        """True if each trainer has a batch to read next, and no claim but its last one lacks rows.

        Then no trainer will wait for a batch that takes longer.
        """
        return all(
            reader.granted + reader.ready_claims > reader.consumed and len(reader.claims) - reader.ready_claims <= 1
            for reader in self._active()
            if not reader.is_spectator
        )

    # --- what trainers do -------------------------------------------------------------------------

    def subscribe(self, asked: SubscriptionAsked, account: Account, actions: list[Action]) -> Subscription | None:
        """Admit a subscription, or refuse it with a reason; a refused one leaves nothing behind.

        It is at the expense of ``account``.
        """
        (epoch, step), row = self._beginning(asked)
        course = Course(self.spec.plan, asked.rank, asked.world_size, epoch, step, asked.end_epoch, row)
        problem = self.verdict or refusal(asked, course, self.spec) or self._too_small()
        if problem is not None:
            actions.append(Refuse(asked.session, asked.request, 0, *problem))
            return None
        window = asked.window or self.spec.window
        if asked.is_remote:
            window = min(window, self.spec.remote_window_max)
        subscription = Subscription(
            asked.subscription,
            asked.session,
            account,
            account.tenant,
            course,
            window,
            Waits(self._moment),
            Spells(self._moment),
            asked.is_spectator,
            asked.is_remote,
            asked.node,
        )
        self.claims.make_room(ENTITLEMENT_SLOTS)
        self.subscriptions[subscription.number] = subscription
        self.claims.tenants[subscription.tenant] += 1
        account.subscriptions += 1
        self.claims.next_is(subscription)
        self.claims.recount(subscription)
        self._set_pace(subscription)
        actions.append(
            AdmitSubscription(asked.session, asked.request, asked.subscription, self.spec.number, course, window)
        )
        self._advance(subscription, actions)
        self.wake(actions)
        self._answer_hoarders(actions)
        return subscription

    def _too_small(self) -> Refusal | None:
        active, slots = len(self._active()), self.ring.slots_max
        return ring_too_small(self.spec.name, slots, self._slots_most, active, self.claims.promised)

    def _beginning(self, asked: SubscriptionAsked) -> tuple[Position, int]:
        """Return the position where a subscription begins, and the row of its batch."""
        if asked.sample is None or self.spec.live is not None or asked.epoch > EPOCH_MAX:
            return self.supply.beginning(asked), 0
        step, row = self.spec.plan.begins_with(asked.epoch, asked.sample)
        return Position(asked.epoch, step), row

    def pull(self, pulled: Pulled, actions: list[Action]) -> None:
        """Take back what a trainer releases, and hand over what it wants next."""
        subscription = self.subscriptions[pulled.subscription]
        for sequence, generation in pulled.released:
            self._release(subscription, sequence, generation)
        self.claims.recount(subscription)
        if not subscription.ended:
            # A waiting trainer consumes a handle in flight without another `Pull`: count it.
            self._consume(subscription, min(pulled.consumed + pulled.waiting, subscription.granted))
            subscription.waiting = pulled.waiting and pulled.consumed == subscription.granted
            is_being_sent = pulled.waiting and subscription.is_remote and pulled.consumed in subscription.leases
            subscription.awaited = pulled.consumed if is_being_sent else None
            if pulled.wait_us > subscription.wait_us:
                subscription.wait_us = pulled.wait_us
                if subscription.is_remote:
                    subscription.waits.reported(pulled.wait_us / 1e6)
            self._advance(subscription, actions)
            if subscription.waiting:
                self._answer_waiting(subscription, actions)
        self._forget_if_over(subscription)
        self.wake(actions)

    def sent(self, sent: BatchSent, actions: list[Action]) -> None:
        """End the lease of a batch that was sent as bytes; the next one may follow."""
        subscription = self.subscriptions[sent.subscription]
        self._release(subscription, sent.sequence, sent.generation)
        self.claims.recount(subscription)
        if not subscription.ended:
            self._advance(subscription, actions)
        self._forget_if_over(subscription)
        self.wake(actions)

    def mismatched(self, event: BatchMismatched, actions: list[Action]) -> None:
        """Refill a batch that a trainer got wrong: hand out its slot, perhaps faulty, no more."""
        if self.retired is not None:
            return  # the trainer asks the stream that replaced this one
        subscription = self.subscriptions[event.subscription]
        share = subscription.course.at(event.sequence) if event.sequence < subscription.granted else None
        if share is None:
            return
        self.mismatched_batches += 1
        actions.append(ReportMismatch(self.spec.number, event.session, share.position))
        if not self.supply.can_refill:
            return  # the slot may be sound for other trainers, or when it is sent once more
        slot = self.claims.find(share.position)
        if slot is None or not slot.is_ready or slot.generation != event.generation:
            return
        if self._moment.now_s - self._refilled_s >= REFILL_INTERVAL_S:
            self._refilled_s = self._moment.now_s
            self.ring.vacate(slot)
            self.claims.move(slot)
            self.ring.let_go(slot)
            self.wake(actions)

    def end(self, subscriptions: list[Subscription], actions: list[Action], *, leases_from: int | None) -> None:
        """End subscriptions, and their leases from ``leases_from`` on (None: keep all)."""
        for subscription in subscriptions:
            if not subscription.ended:
                self.claims.withdraw(subscription, 0)
                subscription.ended = True
                subscription.waiting = False
                subscription.awaited = None
                self.claims.unblock(subscription)
                self.claims.recount(subscription)
                self.claims.forget(subscription)
                self.claims.account(subscription)
            if leases_from is not None:
                for sequence, lease in list(subscription.leases.items()):
                    if sequence >= leases_from:
                        self._release(subscription, sequence, lease.generation)
                self.claims.recount(subscription)
            self._forget_if_over(subscription)
        self.wake(actions)
        self._answer_hoarders(actions)

    # --- what workers do --------------------------------------------------------------------------

    def filled(self, slots: list[Slot], actions: list[Action]) -> None:
        """Every row is in these slots: hand them to the trainers that claimed them."""
        readers: dict[int, int] = {}
        for slot in slots:
            assert slot.position is not None
            slot.fill = None
            self.supply.let_go(slot)
            self.decoded_batches += 1
            rows = self.spec.plan.rows(slot.position)
            actions.append(CommitSlot(self.spec.number, slot.number, slot.generation, slot.position, rows))
            readers.update(slot.claims)
        for number in readers:
            self._advance(self.subscriptions[number], actions)
        self.wake(actions)

    def put_back(self, slot: Slot, order: int, parts: list[Rows], actions: list[Action]) -> None:
        """Have the rows of an order filled again, in these ``parts``."""
        self.ring.put_back(slot, order, parts)
        for number in slot.claims:
            subscription = self.subscriptions[number]
            subscription.has_rows(subscription.granted)
        self.supply.let_go(slot)
        self.wake(actions)

    def doubt(self, slot: Slot, order: int, parts: list[Rows], link: int, actions: list[Action]) -> None:
        """Have these rows of an order filled by a local worker, and count the others as filled."""
        self.ring.doubt(slot, order, parts, link)
        for number in slot.claims:
            subscription = self.subscriptions[number]
            subscription.has_rows(subscription.granted)
        self.supply.let_go(slot)
        self.wake(actions)

    def took(self, slot: Slot, taken_s: float) -> None:
        """Count for the trainers of a slot that a worker has died over it after so long."""
        for number in slot.claims:
            self.subscriptions[number].served_s += taken_s / len(slot.claims)

    def lose(self, slot: Slot, actions: list[Action]) -> str | None:
        """Forget a slot without memory; return why the stream stops if too few are left."""
        if slot.position is not None:
            self.supply.mailbox.unbind(slot.position)
        for unmade in (slot, *self.ring.unmade):
            self._drop(unmade)
        made, needed = min(len(self.ring.slots), self.ring.slots_max), max(ENTITLEMENT_SLOTS, self.claims.promised)
        if made < needed:
            self.ring.slots_max = self._slots_most = made
            return f"memory for {counted(made, 'slot')} could be had, and its trainers need {needed}"
        self._slots_most = made  # there is no memory for more
        self.fit(made, actions)
        return None

    def fit(self, slots_max: int, actions: list[Action]) -> None:
        """Let the ring have so many of its slots, or those that were promised to trainers, if more.

        ``Stream.trim`` frees those that it has beyond.
        """
        self.ring.slots_max = max(min(slots_max, self._slots_most), self.claims.promised)
        for unmade in self.ring.unmade:
            if len(self.ring.slots) > self.ring.slots_max:
                self._drop(unmade)
        self.claims.pace.fit(self.ring.slots_max)
        self.claims.make_room(0)
        self.wake(actions)
        self._answer_hoarders(actions)

    def awaited_slots(self) -> list[int]:
        """Return the slots that trainers wait for while workers fill them."""
        waiting = (
            reader
            for reader in self.subscriptions.values()
            if reader.waits.cause is WaitCause.WORKERS and reader.claims
        )
        return [slot.number for reader in waiting if (slot := reader.claims[0].slot) is not None]

    # --- the life of the stream -------------------------------------------------------------------

    def stop(self, text: str, actions: list[Action]) -> None:
        """Stop a stream that cannot continue, and refuse the trainers that wait."""
        self.stopped = text
        for subscription in self._active():
            self.claims.withdraw(subscription, 0)
            if subscription.waiting:
                self._answer_waiting(subscription, actions)
            self.claims.account(subscription)

    @property
    def verdict(self) -> Refusal | None:
        """Reason why the stream has ended, or None while it continues."""
        if self.retired is not None:
            return self.retired
        return None if self.stopped is None else (ErrorCode.STREAM_STOPPED, self.stopped)

    def wake(self, actions: list[Action]) -> None:
        """Retry the blocked subscriptions, by the table of the module. Paired with every event."""
        claims, blocked = self.claims, self.claims.blocked
        claims.reclaim_samples()
        # Hundreds may be blocked, and one slot free: only those that can have it are advanced.
        short = blocked[Blocked.NO_SLOT] | (blocked[Blocked.NO_MEMORY] if claims.has_room(1) else {})
        for reader in self._in_turn(short):
            if claims.has_room(1) or Blocked.NO_SLOT in reader.blocked:
                self._advance(reader, actions)
        if claims.newcomers_find_room:
            reserved = blocked[Blocked.RESERVED].items()
            readers = {number: reader for number, reader in reserved if claims.may_read_ahead(reader)}
            for reader in self._in_turn(readers):
                if claims.may_read_ahead(reader):
                    self._advance(reader, actions)
        while claims.pace.has_moved() or self.supply.has_changed():
            for reader in self._in_turn(blocked[Blocked.AHEAD]):
                self._advance(reader, actions)

    def _drop(self, slot: Slot) -> None:
        """Forget a slot; claims on it get another one."""
        self.ring.drop(slot)
        self.claims.move(slot)

    # --- the steps --------------------------------------------------------------------------------

    def _in_turn(self, subscriptions: dict[int, Subscription]) -> list[Subscription]:
        """Return those below their fair share first, then those with the least worker time."""
        if len(subscriptions) < 2:  # noqa: PLR2004  the usual case
            return list(subscriptions.values())
        fair = self.claims.fair_slots
        return sorted(
            subscriptions.values(), key=lambda reader: (reader.usage >= fair(reader), reader.served_s, reader.number)
        )

    def _advance(self, subscription: Subscription, actions: list[Action]) -> None:
        """Claim what a trainer wants and may have, and hand out what is ready, in order."""
        has_open_claims = Blocked.NO_SLOT in subscription.blocked
        self.claims.unblock(subscription)
        if self.stopped is None and not subscription.ended:
            if has_open_claims:
                self.claims.place_open(subscription, actions)
            self.claims.extend(subscription, actions)
            claims = subscription.claims
            while claims and (slot := claims[0].slot) is not None and slot.is_ready and self._may_grant(subscription):
                self._grant(subscription, slot, actions)
                self.claims.extend(subscription, actions)
        self.claims.account(subscription)

    def _may_grant(self, subscription: Subscription) -> bool:
        """Return whether the first claim may become a lease, which cannot be taken back."""
        leases = len(subscription.leases)
        if leases < ENTITLEMENT_SLOTS:
            return True
        if subscription.is_remote:
            return False
        if subscription.waiting or self.claims.may_read_ahead(subscription):
            return True
        self.claims.block(subscription, Blocked.RESERVED)
        return False

    def _grant(self, subscription: Subscription, slot: Slot, actions: list[Action]) -> None:
        """Turn the first claim into a lease; the usage stays the same."""
        claim = subscription.claims.popleft()
        slot.unclaim(subscription.number)
        slot.leases += 1
        subscription.leases[claim.sequence] = Lease(slot, slot.generation)
        subscription.account.held_bytes += self.spec.slot_bytes
        subscription.granted += 1
        self.claims.recount(subscription)
        if subscription.waiting:
            subscription.waiting = False
            subscription.awaited = claim.sequence if subscription.is_remote else None
            self._consume(subscription, subscription.granted)
        position, first, count = claim.share
        bucket = self.spec.bucket_of(position)
        subscription.delivered_samples += count
        subscription.account.delivered_samples += count
        subscription.account.delivered_bytes += count * self.spec.row_bytes[bucket]
        self.delivered_batches += 1
        self.delivered_samples += count
        if not (slot.grants or subscription.is_spectator):
            self.supply.record(slot, actions)
        actions.append(
            GrantLease(
                self.spec.number,
                subscription.session,
                subscription.number,
                claim.sequence,
                *position,
                slot.number,
                slot.generation,
                first,
                count,
                subscription.is_remote,
                subscription.is_spectator,
                bucket,
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
        """Note how far a trainer is; a smaller number was overtaken by a later message."""
        if consumed > subscription.consumed:
            subscription.consumed = consumed
            self._set_pace(subscription)

    def _set_pace(self, subscription: Subscription) -> None:
        if not subscription.is_spectator:
            self.claims.pace.stands(subscription.number, subscription.course, subscription.consumed)

    def _release(self, subscription: Subscription, sequence: int, generation: int) -> None:
        """End a lease; ignore a release of none, or of another generation: it is a repetition.

        ``Claims.recount`` follows.
        """
        lease = subscription.leases.get(sequence)
        if lease is None or lease.generation != generation:
            return
        del subscription.leases[sequence]
        subscription.account.held_bytes -= self.spec.slot_bytes
        if subscription.awaited == sequence:
            subscription.awaited = None
        lease.slot.leases -= 1
        self.supply.let_go(lease.slot)
        subscription.released += 1

    def _answer_waiting(self, subscription: Subscription, actions: list[Action]) -> None:
        """Refuse a trainer that waits in vain: the stream stopped, or it holds all it may."""
        problem = self.verdict
        if problem is None:
            if subscription.claims or subscription.is_remote or subscription.course.at(subscription.granted) is None:
                return  # claims will be filled, batches will be sent, the course may be over
            slots, held = self.ring.slots_max, len(subscription.leases)
            others = sum(
                len(other.leases) if other.ended else ENTITLEMENT_SLOTS
                for other in self.subscriptions.values()
                if other is not subscription
            )
            if held + others < slots:
                return
            problem = ring_exhausted(self.spec.name, slots, held, others)
        subscription.waiting = False
        self.claims.account(subscription)
        actions.append(Refuse(subscription.session, 0, subscription.number, *problem))

    def _answer_hoarders(self, actions: list[Action]) -> None:
        """Refuse the waiting trainers that can get no batch, after the ring can promise less."""
        for subscription in self._active():
            if subscription.waiting:
                self._answer_waiting(subscription, actions)

    def _forget_if_over(self, subscription: Subscription) -> None:
        number = subscription.number
        if subscription.ended and not subscription.leases and number in self.subscriptions:
            del self.subscriptions[number]
            tenant = subscription.tenant
            self.claims.tenants[tenant] -= 1
            if not self.claims.tenants[tenant]:
                del self.claims.tenants[tenant]
            subscription.account.subscriptions -= 1

    def _active(self) -> list[Subscription]:
        return [reader for reader in self.subscriptions.values() if not reader.ended]


def _is_in_last_epoch(subscription: Subscription) -> bool:
    course = subscription.course
    share = course.at(subscription.consumed)
    return share is None or share.position.epoch + 1 == course.end_epoch
