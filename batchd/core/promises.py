"""What of a ring is promised to its subscriptions: who may claim one more slot, and when. Nobody's process.

A claim is a promise of memory, so it is made only if the ring can keep it whatever the others do. With U(i) the leases and
claims of subscription i, each claim and each admission keeps

    sum over i of max(2, U(i))  <=  slots of the ring

Slots that several trainers share are counted once for each, so the slots in use are never more than that sum, and every
claim finds a slot that is idle, or will be as soon as the workers' present orders end. A subscription below its two
slots may always claim. So each admitted subscription goes on, even if all the others stand still: no deadlock.
"""

from collections.abc import Iterable, Mapping

from batchd.core.ring import Ring
from batchd.core.subscription import ENTITLEMENT_SLOTS, Subscription


class Promises:
    """The account of one ring. ``subscriptions``: all that are admitted, by number, now and later."""

    def __init__(self, ring: Ring, subscriptions: Mapping[int, Subscription]) -> None:
        self._ring = ring
        self._subscriptions = subscriptions
        self._committed = 0
        """The sum above, kept as it changes."""

    def recount(self, subscription: Subscription) -> None:
        """Keep the sum, whenever a subscription's leases or claims have changed."""
        self._committed += subscription.committed - subscription.counted
        subscription.counted = subscription.committed

    def has_room(self, slots: int) -> bool:
        """Could so many slots be promised beside what is committed already?"""
        return self._committed + slots <= self._ring.slots_max

    @property
    def promised(self) -> int:
        """Slots that cannot be taken back from those who are admitted: their entitlements, and what they hold beyond."""
        return sum(one.promised for one in self._subscriptions.values())

    @property
    def fair_slots(self) -> int:
        """How many slots each may have where all want as many as they can get."""
        return max(ENTITLEMENT_SLOTS, self._ring.slots_max // max(1, len(self._subscriptions)))

    def may_claim(self, subscription: Subscription, stalled: Iterable[int]) -> bool:
        """Can the ring promise one more slot, and is none of the ``stalled`` ones, which want more too, below its fair share?"""
        if subscription.usage < ENTITLEMENT_SLOTS:
            return True
        if not self.has_room(1):
            return False
        fair_slots = self.fair_slots
        if subscription.usage < fair_slots:
            return True
        return all(self._subscriptions[number].usage >= fair_slots for number in stalled)

    def may_read_ahead(self, leases: int) -> bool:
        """May a trainer with so many leases, which cannot be taken back, have one more that it does not wait for?

        Only within a fair share that leaves a newcomer his own, and only while he finds two slots; so whether he is let in does
        not depend on how much of what is ready the others were handed before.
        """
        return leases < self._ring.slots_max // (len(self._subscriptions) + 1) and self.newcomer_finds_room

    @property
    def newcomer_finds_room(self) -> bool:
        """Would a newcomer be admitted even after one more lease?"""
        return self.promised + 1 + ENTITLEMENT_SLOTS <= self._ring.slots_max
