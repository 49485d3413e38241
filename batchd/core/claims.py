"""Decides which subscription of a stream may claim another slot, and which one. Pure code.

    next position of a trainer -> claim -> slot: one that holds it, or one that is taken for it

A claim is a promise of memory, so it is made only if the ring can keep it whatever other trainers
do. With U(i) the leases and claims of subscription i, each claim and each admission keeps

    sum over i of max(2, U(i))  <=  slots of the ring

A slot that several trainers share counts once for each of them. So the slots in use are never more
than that sum, and every claim finds a slot: an idle one, or one that becomes idle when the present
orders of the workers end. A subscription below its two slots may always claim. So each admitted
subscription continues even if all others stop: no deadlock.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import NamedTuple

from batchd.core.actions import Action, CreateSlot, ReserveSlot
from batchd.core.course import Readers
from batchd.core.events import StreamSpec
from batchd.core.measure import WaitCause
from batchd.core.ring import Ring, Slot
from batchd.core.rows import Rows
from batchd.core.subscription import ENTITLEMENT_SLOTS, Blocked, Claim, Subscription
from batchd.core.supply import LiveSupply, Pace, Supply
from batchd.core.tenants import Tenant
from batchd_wire.position import Position


class Want(NamedTuple):
    """A filling that is wanted.

    ``need``: (the turn of its tenant, its distance, the subscription's worker time). ``is_extra``:
    its rows are for another worker, which has no time for them.
    """

    need: tuple[float, int, float]
    subscription: Subscription
    slot: Slot
    is_extra: bool = False


class Claims:
    """See the module. ``subscriptions``: all that are admitted, by number, now and later."""

    def __init__(
        self, spec: StreamSpec, subscriptions: Mapping[int, Subscription], new_slot: Callable[[], int]
    ) -> None:
        self._spec = spec
        self._subscriptions = subscriptions
        self._new_slot = new_slot
        self._readers = Readers(spec.plan, equal_epochs=spec.equal_epochs)
        self.ring = Ring(spec.slots_max, self._readers, is_shared=spec.shares_caches, kept_ahead=spec.kept_ahead)
        self.pace = Pace(spec.max_skew, spec.slots_max)
        self.supply = Supply(spec, self.ring)
        if spec.live is not None:
            self.supply = LiveSupply(spec, self.ring, self._readers, self.pace)
        self.committed = 0
        """The sum above, kept as it changes."""
        self.promised = 0
        """Slots that cannot be taken back: all entitlements, and the leases beyond them."""
        self.tenants: Counter[Tenant] = Counter()
        """The subscriptions of each tenant."""
        self.blocked: dict[Blocked, dict[int, Subscription]] = {reason: {} for reason in Blocked}
        """For each reason the subscriptions that are blocked by it, by number."""

    # --- the account of memory --------------------------------------------------------------------

    def recount(self, subscription: Subscription) -> None:
        """Keep the sums after the leases or claims of a subscription have changed."""
        before, now = subscription.counted, subscription.owed
        if now != before:
            subscription.counted = now
            self.committed += now[0] - before[0]
            self.promised += now[1] - before[1]

    def has_room(self, slots: int) -> bool:
        """Return whether the ring can promise ``slots`` more."""
        return self.committed + slots <= self.ring.slots_max

    def fair_slots(self, subscription: Subscription) -> int:
        """Slots for a subscription where all of them want as many as they can get.

        Tenants get slots by their weights, and the subscriptions of one equal parts of these.
        """
        tenants, own = self.tenants, subscription.tenant
        slots = self.ring.slots_max
        if len(tenants) > 1:
            slots = int(slots * own.weight / sum(tenant.weight for tenant in tenants))
        return max(ENTITLEMENT_SLOTS, slots // max(1, tenants[own]))

    @property
    def trainers_to_come(self) -> int:
        """How many more trainers find room, whatever those that are here got unasked: one at least.

        Two fifths of the slots are the most trainers, so a fifth of the ring is read ahead.
        """
        return max(1, self.ring.slots_max * 2 // 5 - len(self._subscriptions))

    @property
    def newcomers_find_room(self) -> bool:
        """True if the trainers to come would be admitted even after another lease."""
        return self.promised + 1 + ENTITLEMENT_SLOTS * self.trainers_to_come <= self.ring.slots_max

    def may_read_ahead(self, subscription: Subscription) -> bool:
        """Return whether a trainer may get a batch that it does not wait for.

        A lease cannot be taken back, and the trainer may stop here. So it leaves room for the
        trainers to come, all get equal parts of the rest, and each one more for two that it read.
        """
        count = len(self._subscriptions)
        spare = self.ring.slots_max - ENTITLEMENT_SLOTS * (count + self.trainers_to_come)
        ahead = len(subscription.leases) - ENTITLEMENT_SLOTS
        return ahead < min(spare // count, subscription.consumed // 2) and self.newcomers_find_room

    def _may_claim(self, subscription: Subscription) -> bool:
        """Return whether a slot can be promised that no trainer below its fair share wants."""
        if subscription.usage < ENTITLEMENT_SLOTS:
            return True
        if not self.has_room(1):
            return False
        others = self.blocked[Blocked.NO_MEMORY]
        if not others:
            return True
        if subscription.usage < self.fair_slots(subscription):
            return True
        return all(other.usage >= self.fair_slots(other) for other in others.values())

    # --- making claims and taking them back -------------------------------------------------------

    def next_is(self, subscription: Subscription) -> None:
        """Record what a trainer (no spectator) reads next, whenever its claims change."""
        if not subscription.is_spectator:
            self._readers.move(subscription.number, subscription.course, subscription.next_sequence)

    def extend(self, subscription: Subscription, actions: list[Action]) -> None:
        """Claim all positions of the window, or note what blocks the next claim."""
        limit = subscription.consumed + subscription.window
        for sequence in range(subscription.next_sequence, limit):
            share = subscription.course.at(sequence)
            if share is None:
                return
            if not self._is_near(subscription, share.position):
                self.block(subscription, Blocked.AHEAD)
                return
            if not self._may_claim(subscription):
                self.block(subscription, Blocked.NO_MEMORY)
                return
            claim = Claim(sequence, share)
            if not subscription.is_spectator:
                self.supply.claimed(share.position)
            subscription.claims.append(claim)
            self.next_is(subscription)
            self.recount(subscription)
            self._place(subscription, claim, actions)

    def block(self, subscription: Subscription, reason: Blocked) -> None:
        """Note why a subscription has less than it wants. Paired with ``unblock``."""
        subscription.blocked.add(reason)
        self.blocked[reason][subscription.number] = subscription

    def unblock(self, subscription: Subscription) -> None:
        """Forget why a subscription had less than it wants."""
        for reason in subscription.blocked:
            del self.blocked[reason][subscription.number]
        subscription.blocked.clear()

    def place_open(self, subscription: Subscription, actions: list[Action]) -> None:
        """Find slots for the claims that have none."""
        for claim in subscription.claims:
            if claim.slot is None:
                self._place(subscription, claim, actions)

    def move(self, slot: Slot) -> None:
        """Take all claims off ``slot``, whose batch no trainer will get: they need another."""
        for number in slot.claims:
            subscription = self._subscriptions[number]
            for claim in subscription.claims:
                if claim.slot is slot:
                    claim.slot = None
            self.block(subscription, Blocked.NO_SLOT)
        slot.claims.clear()

    def withdraw(self, subscription: Subscription, keep: int) -> None:
        """Withdraw the farthest claims until ``keep`` are left."""
        while len(subscription.claims) > keep:
            claim = subscription.claims.pop()
            self.next_is(subscription)
            if claim.slot is not None:
                claim.slot.unclaim(subscription.number)
                self.supply.let_go(claim.slot)
        self.recount(subscription)

    def make_room(self, slots: int) -> None:
        """Withdraw claims of those that use most for their part, until there is room for ``slots``.

        What is promised beyond the entitlements is claims or leases.
        """
        while not self.has_room(slots):
            claimants = (claimant for claimant in self._subscriptions.values() if claimant.claims)
            rich = (claimant for claimant in claimants if claimant.usage > ENTITLEMENT_SLOTS)
            richest = max(rich, key=lambda claimant: claimant.usage / self.fair_slots(claimant))
            self.withdraw(richest, len(richest.claims) - 1)
            self.block(richest, Blocked.NO_MEMORY)
            self.account(richest)

    def reclaim_samples(self) -> None:
        """Make room in a live stream's mailbox for the batch that a trainer waits for.

        Batches that only a spectator or an ended trainer waited for lose their samples; claims on
        them are placed again.
        """
        if self.supply.has_room:
            return
        active = [reader for reader in self._subscriptions.values() if not reader.ended]
        if not any(self.cause(reader) is WaitCause.PRODUCERS for reader in active if not reader.is_spectator):
            return
        first_claims = [reader.claims[0].slot for reader in active if reader.waiting and reader.claims]
        awaited = {slot.number for slot in first_claims if slot is not None}
        while (slot := self.supply.reclaimable(awaited)) is not None:
            self.move(slot)
            self.supply.take_back(slot)

    def forget(self, subscription: Subscription) -> None:
        """Forget a trainer's position and next reads: it needs no more batches."""
        self.pace.forget(subscription.number)
        self._readers.forget(subscription.number)
        self.ring.idle.forget(subscription.number)

    def find(self, position: Position) -> Slot | None:
        """Return the slot that holds, or will hold, ``position``."""
        return self.ring.find(self._key(position))

    def _key(self, position: Position) -> Position:
        """Return what names the bytes: the step alone where every epoch has the same ones."""
        return Position(0, position.step) if self._spec.equal_epochs else position

    def _is_near(self, subscription: Subscription, position: Position) -> bool:
        """Return whether slower trainers are near enough; a spectator ignores them."""
        is_in_step = subscription.is_spectator or self.pace.allows(subscription.course, position)
        return is_in_step and self.supply.may_claim(subscription, position)

    def _place(self, subscription: Subscription, claim: Claim, actions: list[Action]) -> None:
        """Find the slot that holds the claimed position, or take one for it."""
        position = self._key(claim.share.position)
        slot = self.ring.find(position)
        if slot is None:
            slot = self.ring.choose()
            if slot is None and self.ring.can_grow:
                slot = self.ring.add(self._new_slot(), is_made=False)
            if slot is None:
                self.block(subscription, Blocked.NO_SLOT)
                return
            self.supply.replaced(slot)
            plan = self._spec.plan
            rows = plan.rows_by_sample(position) if self._spec.groups_neighbours else range(plan.rows(position))
            self.ring.take(slot, position, rows)
            if slot.is_made:
                actions.append(ReserveSlot(slot.number))
        claim.slot = slot
        subscription.has_rows(claim.sequence)
        self.ring.claim(slot, subscription.number)

    @property
    def node(self) -> int | None:
        """The memory node of all trainers, if they have the same one."""
        nodes = {subscription.node for subscription in self._subscriptions.values()}
        return nodes.pop() if len(nodes) == 1 else None

    def provide(self, slot: Slot, actions: list[Action]) -> None:
        """Give a slot memory before its first row is ordered.

        The memory is that of a batch that no trainer will read again, or is new.
        """
        if slot.is_made:
            return
        spare = self.ring.idle.unneeded()
        if spare is None:
            slot.is_made = True
            actions.append(CreateSlot(self._spec.number, slot.number, self.node))
        else:
            self.supply.replaced(self.ring.slots[spare])
            self.ring.move_into(self.ring.slots[spare], slot)
        self.ring.begin(slot)
        actions.append(ReserveSlot(slot.number))

    # --- what is filled next, and what trainers wait for ------------------------------------------

    def wanted(self, least_turn_s: float, pending: set[int]) -> Want | None:
        """Return the most urgent filling of the ``pending`` slots, which are some of the ring's.

        It is of the tenant whose turn it is. Of this one the batch that a trainer waits for comes
        first, then the nearest to its trainer, then that of the subscription with the least worker
        time. A tenant or trainer that wanted nothing for long has saved nothing up: no turn counts
        as less than ``least_turn_s``, and no worker time as less than that of the subscription of
        the same tenant that was served last.
        """
        if not pending:
            return None
        best: Want | None = None
        for subscription in self._subscriptions.values():
            # no calls: with hundreds of trainers a look at each is long, and few are the next
            tenant = subscription.tenant
            turn_s = max(least_turn_s, tenant.turn_s)
            granted, exhausted = subscription.granted, subscription.exhausted
            if exhausted > granted:
                distance = 1 + exhausted - subscription.consumed
            else:
                distance = 0 if subscription.waiting else 1 + granted - subscription.consumed
            served_s = max(tenant.served_s, subscription.served_s)
            if best is not None and (turn_s, distance, served_s) >= best[0]:
                continue  # whatever claim it has
            found = self._first_fillable(subscription, pending)
            if found is not None:
                sequence, slot = found
                need = turn_s, subscription.distance(sequence), served_s
                if best is None or need < best[0]:
                    best = Want(need, subscription, slot)
        return best

    def cut(
        self, slot: Slot, order: int, rows_max: int, *, is_remote: bool = False, share: int = 0
    ) -> tuple[Rows, int, tuple[int, ...]]:
        """Cut rows of ``slot``: (rows, the link that doubts them, their places in the mailbox)."""
        assert slot.position is not None
        if self.supply.bind(slot):
            for number in slot.claims:
                self.account(self._subscriptions[number])
        rows, disputed_link = self.ring.cut(slot, order, rows_max, is_remote=is_remote, share=share)
        return rows, disputed_link, self.supply.mailbox.places(slot.position, rows)

    def account(self, subscription: Subscription) -> None:
        """Count time from now on for what a trainer waits for; call it when that changes."""
        subscription.waits.turn(self.cause(subscription))
        blocked = subscription.blocked
        subscription.short_of_memory.turn(on=Blocked.NO_MEMORY in blocked or Blocked.NO_SLOT in blocked)

    def cause(self, subscription: Subscription) -> WaitCause | None:
        """Return what a trainer waits for; None while it does not wait."""
        if subscription.awaited is not None:
            return WaitCause.NETWORK
        if not subscription.waiting:
            return None
        if not subscription.claims:
            return WaitCause.TRAINERS if Blocked.AHEAD in subscription.blocked else WaitCause.MEMORY
        slot = subscription.claims[0].slot
        if slot is None:
            return WaitCause.MEMORY
        if slot.is_ready:  # two batches before it are being sent
            return WaitCause.NETWORK
        return WaitCause.WORKERS if self.supply.has_samples(slot) else WaitCause.PRODUCERS

    def _first_fillable(self, subscription: Subscription, pending: set[int]) -> tuple[int, Slot] | None:
        """Return the nearest claim on a ``pending`` slot: (its sequence, its slot)."""
        is_every = len(pending) == len(self.ring.pending)
        if self.supply.can_refill:  # stored samples are always there
            return subscription.first_unfilled(pending, is_every=is_every)
        for sequence, slot in subscription.unfilled(pending, is_every=is_every):
            waits = subscription.waiting and sequence == subscription.granted
            if waits and subscription.is_spectator:
                waits = all(reader.ended or reader.is_spectator for reader in self._subscriptions.values())
            if self.supply.may_fill(slot, waits=waits) and (waits or not self._overtakes(slot)):
                return sequence, slot
        return None

    def _overtakes(self, slot: Slot) -> bool:
        """Return whether a batch would take the samples of earlier ones that trainers read next."""
        if self.supply.has_samples(slot):
            return False
        assert slot.position is not None
        spare = self.supply.mailbox.queued // self._spec.plan.batch_size - 1
        earlier = set()
        for reader in self._subscriptions.values():
            if reader.ended or reader.is_spectator:
                continue
            for sequence in count(reader.granted):
                share = reader.course.at(sequence)
                if share is None or share.position >= slot.position:
                    break
                found = self.ring.find(share.position)
                if found is None or not (found.is_ready or self.supply.has_samples(found)):
                    earlier.add(share.position)
                    if len(earlier) > spare:
                        return True
        return False
