"""How a stream's batches get their samples, and how far ahead trainers may be. Pure code.

``Supply`` is for stored samples: every batch can be filled at any time, and again. ``LiveSupply``
is for samples that producers push. A live position has no content until its samples are in the
mailbox (see ``mailbox``), and an evicted one is lost. What trainers can still read is a stretch of
positions that moves forward, counted in the batches of the stream:

    lost | in the ring, or filled from the next samples ...
         ^ kept_from        ^ slowest        ^ claimed_to

Invariant of a live stream: the ring can hold all positions from the slowest trainer to the farthest
claim, beside the slots that are in use elsewhere (leases behind the slowest trainer, and the
batches that spectators look at). Claims that would break it are refused, and a new subscription
begins behind all lost positions, near enough to the others.
"""

from batchd.core.actions import Action, RecordBatch
from batchd.core.course import Course, Readers
from batchd.core.events import StreamSpec, SubscriptionAsked
from batchd.core.mailbox import LiveSpec, MailboxPlaces
from batchd.core.ring import Ring, Slot
from batchd.core.subscription import Subscription
from batchd_wire.position import Position
from batchd_wire.status import LiveStatistics

BESIDE_SKEW_SLOTS = 3
NO_PLACES = LiveSpec(0, "block")
"""The mailbox of a stored stream: no place, and no producer is ever admitted to it."""


class Pace:
    """How far trainers of one stream may be apart, with ``lag = "lockstep"``.

        slowest          fastest
           |-- max_skew --->|       counted in the batches of the trainer that is ahead

    The skew is never more than the ring can bridge. The ring must hold the batches between the two
    trainers, the one that the slowest reads next, the one that it reads now, and the one before,
    which it releases with its next message. So each batch is decoded once. With ``max_skew`` None
    (no lockstep) nothing is kept.

    Invariant: the slowest may always continue. A trainer that is gone or at the end of its course
    delays no other.
    """

    def __init__(self, max_skew: int | None, slots_max: int) -> None:
        self._max_skew = max_skew
        self._limit = 0
        self._places: dict[int, int] = {}
        self.slowest: int | None = None
        """The place of the slowest trainer, in batches of the stream; None: all may continue."""
        self._has_moved = False
        self.fit(slots_max)

    def fit(self, slots_max: int) -> None:
        """Note how many slots the ring has."""
        if self._max_skew is not None:
            self._limit = max(0, min(self._max_skew, slots_max - BESIDE_SKEW_SLOTS))
            self._has_moved = True

    def stands(self, subscription: int, course: Course, consumed: int) -> None:
        """Note that a trainer has read ``consumed`` batches of its course."""
        if self._max_skew is None:
            return
        share = course.at(consumed)
        if share is None:
            self._places.pop(subscription, None)
        else:
            self._places[subscription] = course.plan.place_of(share.position)
        self._look()

    def forget(self, subscription: int) -> None:
        """Forget a trainer that wants no more."""
        if self._places.pop(subscription, None) is not None:
            self._look()

    def allows(self, course: Course, position: Position) -> bool:
        """Return whether a trainer of this course may have ``position`` already."""
        if self._max_skew is None or self.slowest is None:
            return True
        return (course.plan.place_of(position) - self.slowest) // course.world_size <= self._limit

    def has_moved(self) -> bool:
        """Return whether the slowest trainer or the limit is another one than at the last call."""
        moved, self._has_moved = self._has_moved, False
        return moved

    def _look(self) -> None:
        slowest = min(self._places.values(), default=None)
        if slowest != self.slowest:
            self.slowest = slowest
            self._has_moved = True


class Supply:
    """Stored samples. A subclass overrides the rules that differ."""

    can_refill = True
    """Whether a batch that a trainer got can be filled again."""

    def __init__(self, spec: StreamSpec, ring: Ring) -> None:
        self._plan = spec.plan
        self._ring = ring
        self.mailbox = MailboxPlaces(spec.number, spec.live or NO_PLACES, spec.plan.batch_size)

    def beginning(self, asked: SubscriptionAsked) -> Position:
        """Return the position where a subscription begins."""
        return Position(asked.epoch, asked.step)

    def may_claim(self, _subscription: Subscription, _position: Position) -> bool:
        """Return whether the ring can hold ``position`` beside what slower trainers still need."""
        return True

    def claimed(self, position: Position) -> None:
        """Note that a trainer (not a spectator) claims ``position``."""

    def replaced(self, slot: Slot) -> None:
        """Note that the ring evicts what is in ``slot``."""

    def has_samples(self, _slot: Slot) -> bool:
        """Return whether the batch of ``slot`` has its samples."""
        return True

    def may_fill(self, _slot: Slot, *, waits: bool) -> bool:  # noqa: ARG002  a live stream's rule needs it
        """Return whether a worker can fill the batch now; ``waits``: a trainer waits for it."""
        return True

    def bind(self, _slot: Slot) -> bool:
        """Give the batch of ``slot`` its samples, if it needs any; return whether that was done."""
        return False

    def record(self, slot: Slot, actions: list[Action]) -> None:
        """Have the batch in ``slot`` noted, which its first trainer gets next."""

    def handed_over(self, position: Position, actions: list[Action]) -> None:
        """Note that the first trainer got the batch at ``position``."""

    def let_go(self, slot: Slot) -> None:
        """Note that a lease, a claim, an order or the filling of ``slot`` has ended."""
        self._ring.let_go(slot)

    def take_back(self, slot: Slot) -> None:
        """Drop the batch of ``slot``, which has no claims: its samples come next again."""
        assert slot.position is not None
        self.mailbox.unbind(slot.position)
        if slot.is_idle:
            self._ring.empty(slot)
        else:
            self._ring.vacate(slot)

    @property
    def has_room(self) -> bool:
        """True if another batch can get its samples beside all that have theirs."""
        return True

    def reclaimable(self, _awaited: set[int]) -> Slot | None:
        """Return the slot whose samples another batch may take; ``awaited``: slots that stay."""
        return None

    def has_changed(self) -> bool:
        """Return whether ``may_claim`` may say yes now where it said no before the last call."""
        return False

    def statistics(self) -> LiveStatistics | None:
        """Return the mailbox's counters; None for stored samples."""
        return None


class LiveSupply(Supply):
    """Pushed samples. ``pace`` has the place of the slowest trainer."""

    can_refill = False

    def __init__(self, spec: StreamSpec, ring: Ring, readers: Readers, pace: Pace) -> None:
        super().__init__(spec, ring)
        self._number = spec.number
        self._has_journal = spec.live is not None and spec.live.has_journal
        self._readers = readers
        self._pace = pace
        self._kept_from = self._claimed_to = 0
        self._has_changed = False
        self._lost_batches = 0

    def beginning(self, asked: SubscriptionAsked) -> Position:
        """Return the position asked for, or one behind all lost ones in the same rounds."""
        start, steps = super().beginning(asked), self._plan.steps
        if not 0 < asked.world_size <= steps:
            return start
        nearest = self._claimed_to - self._ring.slots_max
        first = max(self._kept_from, nearest + self._used_beside(nearest))
        if self._plan.place_of(start) >= first:
            return start
        epoch, first_step = divmod(first, steps)
        base = asked.step if asked.epoch == epoch else 0
        step = base + -(-(first_step - base) // asked.world_size) * asked.world_size
        return Position(epoch, step) if step <= steps - asked.world_size else Position(epoch + 1, 0)

    def may_claim(self, subscription: Subscription, position: Position) -> bool:
        """Return whether the ring can hold ``position``. A spectator gets one look at the stream.

        A look at what no trainer will read takes a slot that the ring must be able to spare.
        """
        slowest = self._pace.slowest
        if slowest is not None:
            ahead = self._plan.place_of(position) - slowest
            if ahead > 0 and ahead + self._used_beside(slowest) >= self._ring.slots_max:
                return False
        if not subscription.is_spectator:
            return True
        is_passed = slowest is not None and self._plan.place_of(position) < slowest
        is_needless = is_passed and self._ring.find(position) is None
        return not subscription.next_sequence and (not is_needless or self._spares_one())

    def claimed(self, position: Position) -> None:
        """Move the end of the stretch."""
        self._claimed_to = max(self._claimed_to, self._plan.place_of(position) + 1)

    def replaced(self, slot: Slot) -> None:
        """Move the beginning of the stretch; count a batch that a trainer still wants as lost."""
        if slot.grants and slot.position is not None:
            self._kept_from = max(self._kept_from, self._plan.place_of(slot.position) + 1)
            self._lost_batches += self._readers.nearest(slot.position) is not None

    def has_samples(self, slot: Slot) -> bool:
        """Return whether samples are bound to the batch."""
        return slot.position is not None and self.mailbox.is_bound(slot.position)

    def may_fill(self, slot: Slot, *, waits: bool) -> bool:
        """Return whether the batch has its samples, or can get them from the queue now."""
        assert slot.position is not None
        rows = self._plan.rows(slot.position)
        return self.has_samples(slot) or self.mailbox.may_bind(rows, waits=waits)

    def bind(self, slot: Slot) -> bool:
        """Bind the oldest samples of the queue to the batch, unless it has some."""
        assert slot.position is not None
        if self.mailbox.is_bound(slot.position):
            return False
        self.mailbox.bind(slot.position, self._plan.rows(slot.position))
        return True

    def record(self, slot: Slot, actions: list[Action]) -> None:
        """Have the journal note the numbers of the batch's samples, and the slot's fields."""
        assert slot.position is not None
        if self._has_journal:
            pushed = self.mailbox.numbers(slot.position)
            actions.append(RecordBatch(self._number, slot.number, slot.position, pushed))

    def handed_over(self, position: Position, actions: list[Action]) -> None:
        """Free the places of the batch's samples: the slot has their content."""
        self.mailbox.release(position, actions)

    def let_go(self, slot: Slot) -> None:
        """Take back a batch that no trainer got or claims; a look at it may use a spare slot."""
        super().let_go(slot)
        self._has_changed = True
        if slot.position is None or slot.grants or slot.is_awaited:
            return
        if slot.is_idle or self._spares_one():
            self.take_back(slot)

    @property
    def has_room(self) -> bool:
        """Whether the places that are not bound suffice for one batch."""
        return self.mailbox.has_room_for_one()

    def reclaimable(self, awaited: set[int]) -> Slot | None:
        """Return the farthest batch with samples that is neither being written nor ``awaited``."""
        bound = (
            (slot.position, slot)
            for slot in self._ring.slots.values()
            if slot.position is not None
            and slot.number not in awaited
            and self.mailbox.is_bound(slot.position)
            and not (slot.fill is not None and slot.fill.under_way)
        )
        return None if self.has_room else max(bound, key=lambda one: one[0], default=(None, None))[1]

    def has_changed(self) -> bool:
        """Return whether a slot was let go since the last call."""
        changed, self._has_changed = self._has_changed, False
        return changed

    def statistics(self) -> LiveStatistics:
        """Return the mailbox's counters and the lost batches."""
        return self.mailbox.statistics(self._lost_batches)

    def _spares_one(self) -> bool:
        """Return whether the ring could keep all claimed positions with one slot less."""
        slowest = self._pace.slowest
        return slowest is None or self._claimed_to - slowest + self._used_beside(slowest) < self._ring.slots_max

    def _used_beside(self, first: int) -> int:
        """Count the used slots of positions outside one ring's length from ``first`` on."""
        used = [slot.position for slot in self._ring.slots.values() if slot.leases or slot.claims]
        stretch = range(first, first + self._ring.slots_max)
        return sum(position is None or self._plan.place_of(position) not in stretch for position in used)
