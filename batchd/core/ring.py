"""The slots of one stream, and what is being filled into them: a cache of positions. Nobody's process.

    take -> FILLING --(every row filled)--> READY --(not claimed, not leased)--> take again
              |                                                                     ^
              +-------(not claimed, no order under way)-----------------------------+

Invariants: a slot is taken only when nobody leases or claims it and no worker has an order for it; each position is in at
most one slot; a slot's generation grows by one at each taking; ``idle`` has the slots that may be taken, and no others;
``pending`` has those with rows that no worker has, and no others.
"""

from dataclasses import dataclass, field

from batchd.core.idle import Idle
from batchd.core.readers import Readers
from batchd_wire.position import Position


class Fill:
    """The rows of one batch that are still to be filled: cut into chunks on demand, put back when a worker dies."""

    __slots__ = ("_pending", "rows", "under_way")

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._pending: list[tuple[int, int]] = [(0, rows)]
        self.under_way: dict[int, tuple[int, int]] = {}
        """Orders at workers: order -> (first row, count)."""

    @property
    def has_pending(self) -> bool:
        """Are there rows that no worker has?"""
        return bool(self._pending)

    @property
    def is_done(self) -> bool:
        """Is every row filled?"""
        return not self._pending and not self.under_way

    @property
    def pending_rows(self) -> int:
        """How many rows no worker has."""
        return sum(count for _first, count in self._pending)

    def cut(self, order: int, rows_max: int) -> tuple[int, int]:
        """Take up to ``rows_max`` pending rows for an order: (first, count). Ends by ``finish`` or ``put_back``."""
        first, count = self._pending.pop(0)
        if count > rows_max:
            self._pending.insert(0, (first + rows_max, count - rows_max))
            count = rows_max
        self.under_way[order] = (first, count)
        return first, count

    def finish(self, order: int) -> None:
        """The rows of ``order`` are in the slot."""
        del self.under_way[order]

    def put_back(self, order: int, parts: list[tuple[int, int]]) -> None:
        """The rows of ``order`` have to be filled again, in these ``parts``, before any others."""
        first, count = self.under_way.pop(order)
        assert sum(part for _first, part in parts) == count, f"parts {parts} of rows {first}+{count}"
        self._pending[:0] = parts


@dataclass(slots=True, eq=False)
class Slot:
    """One batch worth of shared memory."""

    number: int
    generation: int = 0
    position: Position | None = None
    fill: Fill | None = None
    leases: int = 0
    claims: dict[int, int] = field(default_factory=dict)
    """How many claims each subscription has on it: its trainer will read this filling."""
    grants: int = 0
    """How often this filling was handed to a trainer; who only wants a look does not count."""

    @property
    def is_ready(self) -> bool:
        """Is the batch whole?"""
        return self.position is not None and self.fill is None

    @property
    def is_awaited(self) -> bool:
        """Will somebody be given what is in it, or is it being written?"""
        return bool(self.claims) or (self.fill is not None and bool(self.fill.under_way))

    @property
    def is_idle(self) -> bool:
        """May it be taken?"""
        return not self.leases and not self.is_awaited

    def claim(self, subscription: int) -> None:
        """A subscription will read this filling. Paired with ``unclaim``."""
        self.claims[subscription] = self.claims.get(subscription, 0) + 1

    def unclaim(self, subscription: int) -> None:
        """The claim was withdrawn, or has become a lease."""
        self.claims[subscription] -= 1
        if not self.claims[subscription]:
            del self.claims[subscription]


class Ring:
    """The slots of one stream, made one by one up to ``slots_max``. ``readers`` are those who need what is in them."""

    def __init__(self, slots_max: int, readers: Readers) -> None:
        self.slots_max = slots_max
        self.slots: dict[int, Slot] = {}
        self.idle = Idle(readers)
        self.pending: set[int] = set()
        self._by_position: dict[Position, Slot] = {}

    def find(self, position: Position) -> Slot | None:
        """The slot that holds, or will hold, ``position``."""
        return self._by_position.get(position)

    def add(self, number: int) -> Slot:
        """Make room for one more slot."""
        assert len(self.slots) < self.slots_max, "the ring is full"
        slot = self.slots[number] = Slot(number)
        self.let_go(slot)
        return slot

    def remove(self, slot: Slot) -> None:
        """Forget a slot whose memory could not be had, and do not ask for that much again."""
        self.drop(slot)
        self.slots_max = len(self.slots)

    def drop(self, slot: Slot) -> None:
        """Forget a slot."""
        self.idle.remove(slot.number)
        self.pending.discard(slot.number)
        del self.slots[slot.number]
        if slot.position is not None:
            del self._by_position[slot.position]

    @property
    def can_grow(self) -> bool:
        """May one more slot be made?"""
        return len(self.slots) < self.slots_max

    def choose(self) -> Slot | None:
        """The idle slot whose position is needed last (Bélády's rule), or None where none is idle.

        A slot that is needed again is given up only when the ring cannot grow.
        """
        number = self.idle.unneeded()
        if number is None and not self.can_grow:
            number = self.idle.needed_last()
        return None if number is None else self.slots[number]

    def take(self, slot: Slot, position: Position, rows: int) -> None:
        """Begin to fill ``position`` into an idle slot."""
        assert slot.is_idle, f"slot {slot.number} is in use"
        if slot.position is not None:
            del self._by_position[slot.position]
        slot.generation += 1
        slot.position = position
        slot.fill = Fill(rows)
        self.pending.add(slot.number)
        slot.grants = 0
        self._by_position[position] = slot
        self.let_go(slot)

    def cut(self, slot: Slot, order: int, rows_max: int) -> tuple[int, int]:
        """Take pending rows of a slot for an order, as ``Fill.cut`` does."""
        assert slot.fill is not None, f"slot {slot.number} is not being filled"
        rows = slot.fill.cut(order, rows_max)
        if not slot.fill.has_pending:
            self.pending.discard(slot.number)
        return rows

    def put_back(self, slot: Slot, order: int, parts: list[tuple[int, int]]) -> None:
        """Have the rows of an order that was not carried out filled again, as ``Fill.put_back`` does."""
        assert slot.fill is not None, f"slot {slot.number} is not being filled"
        slot.fill.put_back(order, parts)
        self.pending.add(slot.number)

    def spoil(self, slot: Slot) -> None:
        """What is in a ready slot is not to be handed out again; who reads it may go on. Its claims must go elsewhere."""
        assert slot.position is not None, f"slot {slot.number} holds nothing"
        del self._by_position[slot.position]
        slot.position = None

    def empty(self, slot: Slot) -> None:
        """What is in an idle slot, or was to be filled into it, is of no use to anybody."""
        assert slot.is_idle, f"slot {slot.number} is in use"
        if slot.position is not None:
            del self._by_position[slot.position]
        slot.position = slot.fill = None
        self.pending.discard(slot.number)
        self.let_go(slot)

    def claim(self, slot: Slot, subscription: int) -> None:
        """A subscription will read what is in a slot, which is idle no more."""
        slot.claim(subscription)
        self.idle.remove(slot.number)

    def let_go(self, slot: Slot) -> None:
        """A lease, a claim, an order or the filling of a slot has ended: it may be idle now."""
        if slot.is_idle:
            self.idle.put(slot.number, slot.position if slot.is_ready else None)
