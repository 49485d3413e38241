"""The slots of one stream, and what is being filled into them: a cache of positions. Pure code.

    take -> FILLING --(every row filled)--> READY --(not claimed, not leased)--> take again
              |                                                                     ^
              +-------(not claimed, no order under way)-----------------------------+

Invariants: a slot is taken only when no trainer leases or claims it and no worker has an order for
it; each position is in at most one slot; a generation, which a slot gets when it is taken, is given
once in a ring; ``idle`` has exactly the slots that may be taken; ``pending`` has exactly those with
rows that no worker has.

Idle slots are filed so that the one to evict is found without a look at all of them:

    loose     examined when a slot is wanted: no reader needs it, or that is not known yet
    filed     under a reader that needs it, at its place in the course of that reader

Readers only move towards what is filed under them, so the order within a file stays. Another reader
can only be nearer than the one that a slot is filed under. So the farthest among the last slots of
all files is the one that is needed last, once an examination of its readers confirms that; a slot
whose nearest reader has changed is filed again.

Invariant: no slot is needed later than its file says.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from batchd.core.course import NextUse, Readers
from batchd_wire.position import Position


@dataclass(slots=True, eq=False)
class Fill:
    """The rows of one batch still to be filled, as (first row, rows)."""

    pending: list[tuple[int, int]]
    """Rows that no worker has."""
    under_way: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rows at workers, by order."""

    @property
    def is_done(self) -> bool:
        """Whether every row is filled."""
        return not self.pending and not self.under_way

    @property
    def pending_rows(self) -> int:
        """The number of rows that no worker has."""
        return sum(count for _first, count in self.pending)


@dataclass(slots=True, eq=False)
class Slot:
    """One batch worth of shared memory."""

    number: int
    generation: int = 0
    position: Position | None = None
    fill: Fill | None = None
    leases: int = 0
    claims: dict[int, int] = field(default_factory=dict)
    """Claims by subscription: that many times its trainer will read this filling."""
    grants: int = 0
    """How often this filling was handed to a trainer; spectators do not count."""

    @property
    def is_ready(self) -> bool:
        """Whether the batch is whole."""
        return self.position is not None and self.fill is None

    @property
    def is_awaited(self) -> bool:
        """Whether a trainer will be handed what is in it, or a worker is writing it."""
        return bool(self.claims) or (self.fill is not None and bool(self.fill.under_way))

    @property
    def is_idle(self) -> bool:
        """Whether it may be taken."""
        return not self.leases and not self.is_awaited

    def unclaim(self, subscription: int) -> None:
        """Note that a claim was withdrawn, or has become a lease."""
        self.claims[subscription] -= 1
        if not self.claims[subscription]:
            del self.claims[subscription]


class Idle:
    """The idle slots of one ring, by number."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._keys: dict[int, Position | None] = {}
        """What is in each slot; None where no reader has a use for it."""
        self._loose: dict[int, None] = {}
        self._filed: dict[int, tuple[int, int]] = {}
        """By slot: (reader, place of its course)."""
        self._files: dict[int, list[tuple[int, int]]] = {}
        """By reader: (place of its course, slot), in order."""

    @property
    def slots(self) -> set[int]:
        """The numbers of all idle slots."""
        return set(self._keys)

    def put(self, slot: int, key: Position | None) -> None:
        """File a slot that is idle, or that holds something else than when it was put here."""
        self.remove(slot)
        self._keys[slot] = key
        self._loose[slot] = None

    def remove(self, slot: int) -> None:
        """Remove a slot that is in use or gone, if it is here."""
        self._keys.pop(slot, None)
        self._loose.pop(slot, None)
        self._take_from_file(slot)

    def forget(self, reader: int) -> None:
        """Unfile the slots of a reader that is gone: their next readers are not known any more."""
        for _place, slot in self._files.pop(reader, ()):
            del self._filed[slot]
            self._loose[slot] = None

    def unneeded(self) -> int | None:
        """Return a slot that no trainer will read again."""
        while self._loose:
            slot = next(iter(self._loose))
            if self._look(slot) is None:
                return slot
        return None

    def needed_last(self) -> int | None:
        """Return the slot that is read last of all. Call it after ``unneeded`` has found none."""
        while self._files:
            stands = self._readers.next_sequence
            batches, slot = max((file[-1][0] - stands[reader], file[-1][1]) for reader, file in self._files.items())
            reading = self._look(slot)
            if reading is None or reading.batches == batches:
                return slot
        return None

    def _look(self, slot: int) -> NextUse | None:
        """File a slot under the reader that needs it first; without such a reader it is loose."""
        key = self._keys[slot]
        reading = None if key is None else self._readers.nearest(key)
        self._take_from_file(slot)
        if reading is None:
            self._loose[slot] = None
            return None
        self._loose.pop(slot, None)
        place = self._readers.next_sequence[reading.reader] + reading.batches
        self._filed[slot] = reading.reader, place
        insort(self._files.setdefault(reading.reader, []), (place, slot))
        return reading

    def _take_from_file(self, slot: int) -> None:
        filed = self._filed.pop(slot, None)
        if filed is None:
            return
        reader, place = filed
        file = self._files[reader]
        del file[bisect_left(file, (place, slot))]
        if not file:
            del self._files[reader]


class Ring:
    """The slots of one stream, made one by one up to ``slots_max``, for its ``readers``."""

    def __init__(self, slots_max: int, readers: Readers) -> None:
        self.slots_max = slots_max
        self.slots: dict[int, Slot] = {}
        self.idle = Idle(readers)
        self.pending: set[int] = set()
        self._by_position: dict[Position, Slot] = {}
        self._generation = 0
        """The last one that was given."""

    def find(self, position: Position) -> Slot | None:
        """Return the slot that holds, or will hold, ``position``."""
        return self._by_position.get(position)

    def add(self, number: int) -> Slot:
        """Add a new slot."""
        assert len(self.slots) < self.slots_max, "the ring is full"
        slot = self.slots[number] = Slot(number)
        self.let_go(slot)
        return slot

    def drop(self, slot: Slot) -> None:
        """Forget a slot."""
        self.idle.remove(slot.number)
        self.pending.discard(slot.number)
        del self.slots[slot.number]
        self.vacate(slot)

    @property
    def can_grow(self) -> bool:
        """Whether one more slot may be made."""
        return len(self.slots) < self.slots_max

    def choose(self) -> Slot | None:
        """Return the idle slot that is needed last (Bélády's rule), or None without one.

        One that is needed again is evicted only when the ring cannot grow.
        """
        number = self.idle.unneeded()
        if number is None and not self.can_grow:
            number = self.idle.needed_last()
        return None if number is None else self.slots[number]

    def take(self, slot: Slot, position: Position, rows: int) -> None:
        """Begin to fill ``position`` into an idle slot."""
        assert slot.is_idle, f"slot {slot.number} is in use"
        self.vacate(slot)
        self._generation += 1
        slot.generation = self._generation
        slot.position = position
        slot.fill = Fill([(0, rows)])
        self.pending.add(slot.number)
        slot.grants = 0
        self._by_position[position] = slot
        self.let_go(slot)

    def cut(self, slot: Slot, order: int, rows_max: int) -> tuple[int, int]:
        """Take pending rows of a slot for an order: (first, count). Paired with ``put_back``."""
        fill = slot.fill
        assert fill is not None, f"slot {slot.number} is not being filled"
        first, count = fill.pending.pop(0)
        if count > rows_max:
            fill.pending.insert(0, (first + rows_max, count - rows_max))
            count = rows_max
        fill.under_way[order] = (first, count)
        if not fill.pending:
            self.pending.discard(slot.number)
        return first, count

    def put_back(self, slot: Slot, order: int, parts: list[tuple[int, int]]) -> None:
        """Have the rows of a failed order filled again, in these ``parts``, before any others."""
        assert slot.fill is not None, f"slot {slot.number} is not being filled"
        first, count = slot.fill.under_way.pop(order)
        assert sum(part for _first, part in parts) == count, f"parts {parts} of rows {first}+{count}"
        slot.fill.pending[:0] = parts
        self.pending.add(slot.number)

    def vacate(self, slot: Slot) -> None:
        """Hand out what is in a slot no more; its leases go on. Paired with ``Claims.move``."""
        if slot.position is not None:
            del self._by_position[slot.position]
            slot.position = None

    def empty(self, slot: Slot) -> None:
        """Drop what is in an idle slot, or was to be filled into it."""
        assert slot.is_idle, f"slot {slot.number} is in use"
        self.vacate(slot)
        slot.fill = None
        self.pending.discard(slot.number)
        self.let_go(slot)

    def claim(self, slot: Slot, subscription: int) -> None:
        """Note that a subscription will read what is in a slot. Paired with ``Slot.unclaim``."""
        slot.claims[subscription] = slot.claims.get(subscription, 0) + 1
        self.idle.remove(slot.number)

    def let_go(self, slot: Slot) -> None:
        """File a slot as idle if it is, after a lease, claim, order or filling has ended."""
        if slot.is_idle:
            self.idle.put(slot.number, slot.position if slot.is_ready else None)
