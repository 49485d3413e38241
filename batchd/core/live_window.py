"""What can still be had of a live stream: a stretch of its positions, which moves forward. Nobody's process.

    gone for ever | kept in the ring, or to come with the next samples ...
                  ^ kept_from        ^ slowest        ^ claimed_to

A position has no content until its samples are there (see ``mailbox``), and what is evicted can never be had again. So nobody
claims what is so far from the slowest that the ring could not hold all positions between them beside what is in use elsewhere
(leases behind the slowest, and whatever spectators look at); and a subscription begins behind all that is gone, and so near to
the others that this stays so.

All places are counted in the stream's batches.
"""

from batchd.core.events import SubscriptionAsked
from batchd.core.pace import Pace, place_of
from batchd.core.plan import Plan
from batchd.core.ring import Ring
from batchd_wire.position import Position


class LiveWindow:
    """The stretch of one stream. ``pace`` knows where the slowest stands."""

    def __init__(self, plan: Plan, ring: Ring, pace: Pace) -> None:
        self._plan = plan
        self._ring = ring
        self._pace = pace
        self._kept_from = self._claimed_to = 0

    def claimed(self, position: Position) -> None:
        """A trainer claims this position."""
        self._claimed_to = max(self._claimed_to, place_of(self._plan, position) + 1)

    def is_gone(self, position: Position) -> None:
        """What a trainer has got of this position is forgotten."""
        self._kept_from = max(self._kept_from, place_of(self._plan, position) + 1)

    def beginning(self, asked: SubscriptionAsked) -> Position:
        """Where a subscription begins: where it asks to, but behind what is gone, and in step with its fellow ranks."""
        start, steps = Position(asked.epoch, asked.step), self._plan.steps
        if not 0 < asked.world_size <= steps:
            return start
        nearest = self._claimed_to - self._ring.slots_max + self._used_beside(self._claimed_to - self._ring.slots_max)
        first = max(self._kept_from, nearest)
        if place_of(self._plan, start) >= first:
            return start
        epoch, first_step = divmod(first, steps)
        base = asked.step if asked.epoch == epoch else 0
        step = base + -(-(first_step - base) // asked.world_size) * asked.world_size
        return Position(epoch, step) if step <= steps - asked.world_size else Position(epoch + 1, 0)

    def fits(self, position: Position) -> bool:
        """Could the ring hold this position with all those that the slowest still needs?"""
        slowest = self._pace.slowest
        if slowest is None:
            return True
        ahead = place_of(self._plan, position) - slowest
        return ahead <= 0 or ahead + self._used_beside(slowest) < self._ring.slots_max

    def spares_one(self) -> bool:
        """Could the ring keep what trainers have claimed if one more slot were in use beside that?"""
        slowest = self._pace.slowest
        return slowest is None or self._claimed_to - slowest + self._used_beside(slowest) < self._ring.slots_max

    def is_behind_all(self, position: Position) -> bool:
        """Are all trainers beyond this position?"""
        return self._pace.slowest is not None and place_of(self._plan, position) < self._pace.slowest

    def _used_beside(self, first: int) -> int:
        """How many slots are leased or claimed that hold none of the positions that the ring could hold from a place on."""
        used = [slot.position for slot in self._ring.slots.values() if slot.leases or slot.claims]
        stretch = range(first, first + self._ring.slots_max)
        return sum(position is None or place_of(self._plan, position) not in stretch for position in used)
