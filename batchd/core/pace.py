"""How far trainers of one stream may be apart: ``lag = "lockstep"`` lets nobody run away from the slowest. Nobody's process.

    slowest          fastest
       |-- max_skew --->|       counted in the batches of the trainer that is ahead

The skew is never more than the ring can bridge: it must hold the batches between the two, the one that the slowest reads next,
the one that it reads, and the one before, which it gives back with its next word. So each batch is decoded once.

Invariant: the slowest may always go on. A trainer at the end of its course, or gone, holds up nobody.
"""

from batchd.core.course import Course
from batchd.core.plan import Plan
from batchd_wire.position import Position

BESIDE_SKEW_SLOTS = 3


class Pace:
    """Where each trainer stands. With ``max_skew`` None each goes at its own pace and nothing is kept."""

    def __init__(self, max_skew: int | None, slots_max: int) -> None:
        self._max_skew = max_skew
        self._limit = 0
        self.fit(slots_max)
        self._places: dict[int, int] = {}
        self._slowest: int | None = None
        self._has_moved = False

    def fit(self, slots_max: int) -> None:
        """The ring has so many slots."""
        if self._max_skew is not None:
            self._limit = max(0, min(self._max_skew, slots_max - BESIDE_SKEW_SLOTS))

    def stands(self, subscription: int, course: Course, consumed: int) -> None:
        """A trainer has read ``consumed`` batches of its course."""
        if self._max_skew is None:
            return
        share = course.at(consumed)
        if share is None:
            self._places.pop(subscription, None)
        else:
            self._places[subscription] = place_of(course.plan, share.position)
        self._look()

    def forget(self, subscription: int) -> None:
        """A trainer wants no more."""
        if self._places.pop(subscription, None) is not None:
            self._look()

    def allows(self, course: Course, position: Position) -> bool:
        """May a trainer of this course have ``position`` already?"""
        if self._max_skew is None or self._slowest is None:
            return True
        return (place_of(course.plan, position) - self._slowest) // course.world_size <= self._limit

    @property
    def slowest(self) -> int | None:
        """Where the slowest stands, counted in the stream's batches; None where nobody is waited for."""
        return self._slowest

    def has_moved(self) -> bool:
        """Is the slowest somewhere else than when this was last asked?"""
        moved, self._has_moved = self._has_moved, False
        return moved

    def _look(self) -> None:
        slowest = min(self._places.values(), default=None)
        if slowest != self._slowest:
            self._slowest = slowest
            self._has_moved = True


def place_of(plan: Plan, position: Position) -> int:
    """Count the stream's batches up to a position."""
    return position.epoch * plan.steps + position.step
