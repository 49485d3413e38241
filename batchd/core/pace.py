"""How far trainers of one stream may be apart, with ``lag = "lockstep"``. Pure code.

    slowest          fastest
       |-- max_skew --->|       counted in the batches of the trainer that is ahead

The skew is never more than the ring can bridge. The ring must hold the batches between the two
trainers, the one that the slowest reads next, the one that it reads now, and the one before, which
it releases with its next message. So each batch is decoded once.

Invariant: the slowest may always go on. A trainer that is gone or at the end of its course delays
no other.
"""

from batchd.core.course import Course
from batchd.core.plan import Plan
from batchd_wire.position import Position

BESIDE_SKEW_SLOTS = 3


class Pace:
    """Where each trainer is; nothing is kept with ``max_skew`` None (no lockstep)."""

    def __init__(self, max_skew: int | None, slots_max: int) -> None:
        self._max_skew = max_skew
        self._limit = 0
        self.fit(slots_max)
        self._places: dict[int, int] = {}
        self.slowest: int | None = None
        """The place of the slowest trainer, in batches of the stream; None: all may go on."""
        self._has_moved = False

    def fit(self, slots_max: int) -> None:
        """Note how many slots the ring has."""
        if self._max_skew is not None:
            self._limit = max(0, min(self._max_skew, slots_max - BESIDE_SKEW_SLOTS))

    def stands(self, subscription: int, course: Course, consumed: int) -> None:
        """Note that a trainer has read ``consumed`` batches of its course."""
        if self._max_skew is None:
            return
        share = course.at(consumed)
        if share is None:
            self._places.pop(subscription, None)
        else:
            self._places[subscription] = place_of(course.plan, share.position)
        self._look()

    def forget(self, subscription: int) -> None:
        """Forget a trainer that wants no more."""
        if self._places.pop(subscription, None) is not None:
            self._look()

    def allows(self, course: Course, position: Position) -> bool:
        """Return whether a trainer of this course may have ``position`` already."""
        if self._max_skew is None or self.slowest is None:
            return True
        return (place_of(course.plan, position) - self.slowest) // course.world_size <= self._limit

    def has_moved(self) -> bool:
        """Return whether the slowest trainer is at another place than at the last call."""
        moved, self._has_moved = self._has_moved, False
        return moved

    def _look(self) -> None:
        slowest = min(self._places.values(), default=None)
        if slowest != self.slowest:
            self.slowest = slowest
            self._has_moved = True


def place_of(plan: Plan, position: Position) -> int:
    """Return the number of the stream's batches before ``position``."""
    return position.epoch * plan.steps + position.step
