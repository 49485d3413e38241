"""The slots of one stream, and what is being filled into them: a cache of positions. Pure code.

    take -> FILLING --(every row filled)--> READY --(not claimed, not leased)--> take again
              |                                                                     ^
              +-------(not claimed, no order under way)-----------------------------+

A slot gets memory when its first row is ordered (``begin``). So trainers that take each batch as
soon as it is ready need fewer slots than their windows: the next batch is filled into the slot of
one that they have released. A slot without memory is not idle: it is dropped with its last claim.

Invariants: a slot is taken only when no trainer leases or claims it and no worker has an order for
it; each position is in at most one slot; a generation, which a filling gets when it begins, is
given once in a ring; ``idle`` has exactly the slots that may be taken; ``pending`` has exactly
those with rows that no worker has.

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batchd.core.course import NextUse, Readers
from batchd.core.rows import Rows, ascending
from batchd_wire.position import Position

ANY_SHARE = 0
"""The share of rows that every worker host may fill alike."""
UNDIVIDED = -1
"""The share of rows that were not divided yet."""


class Part(NamedTuple):
    """Rows that are ordered together, or in smaller parts, in turn. ``share``: see ``shares``."""

    rows: Rows
    share: int


@dataclass(slots=True, eq=False)
class Fill:
    """The rows of one batch still to be filled."""

    pending: list[Part]
    """Rows that no worker has."""
    under_way: dict[int, Rows] = field(default_factory=dict)
    """Rows at workers, by order."""
    doubted: list[tuple[Rows, int]] = field(default_factory=list)
    """Rows that only a local worker may fill, and the link that reported them bad, or 0."""
    links: dict[int, int] = field(default_factory=dict)
    """The orders that had doubted rows, and the link of ``doubted`` for each."""
    losses: int = 0
    """Orders that were lost with a remote worker."""

    @property
    def is_done(self) -> bool:
        """Whether every row is filled."""
        return not self.pending and not self.under_way and not self.doubted

    @property
    def pending_rows(self) -> int:
        """The number of rows that no worker has."""
        return sum(len(part.rows) for part in self.pending) + sum(len(rows) for rows, _link in self.doubted)

    def choose(self, share: int) -> int:
        """Return the number of the part that an order for ``share`` is cut from.

        Rows that are in no share are tried in their order: some were at a worker before. The rows
        of another share are taken where most are left.
        """
        for number, part in enumerate(self.pending):
            if part.share <= ANY_SHARE or part.share == share:
                return number
        return max(range(len(self.pending)), key=lambda number: len(self.pending[number].rows))


@dataclass(slots=True, eq=False)
class Slot:
    """One batch worth of shared memory."""

    number: int
    is_made: bool = True
    """Whether it has memory."""
    generation: int = 0
    position: Position | None = None
    fill: Fill | None = None
    leases: int = 0
    claims: dict[int, int] = field(default_factory=dict)
    """Claims by subscription: that many times its trainer will read this filling."""
    proofs: int = 0
    """Comparisons with rows of worker hosts that still read it."""
    grants: int = 0
    """How often this filling was handed to a trainer; spectators do not count."""

    @property
    def is_ready(self) -> bool:
        """Whether the batch is whole."""
        return self.position is not None and self.fill is None

    @property
    def has_pending(self) -> bool:
        """Whether it has rows that no worker has."""
        return self.fill is not None and bool(self.fill.pending or self.fill.doubted)

    @property
    def is_awaited(self) -> bool:
        """True if a trainer will get its content, or a process reads or writes it."""
        return bool(self.claims) or self.proofs > 0 or (self.fill is not None and bool(self.fill.under_way))

    @property
    def is_idle(self) -> bool:
        """Whether it may be taken."""
        # no calls: this is asked several times for each batch
        fill = self.fill
        return not (self.leases or self.claims or self.proofs or (fill is not None and fill.under_way))

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
        """The position in each slot; None if no reader needs it."""
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
        if slot not in self._keys:
            return
        del self._keys[slot]
        self._loose.pop(slot, None)
        self._take_from_file(slot)

    def kept(self) -> Counter[int]:
        """Count the slots that each reader needs before any other reader does."""
        uses = [self._readers.nearest(key) for key in self._keys.values() if key is not None]
        return Counter(use.reader for use in uses if use is not None)

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

    def needed_last(self, beyond: int = -1) -> int | None:
        """Return the slot that is read last of all, if more than ``beyond`` batches are before it.

        Call it after ``unneeded`` has found none.
        """
        while self._files:
            stands = self._readers.next_sequence
            batches, slot = max((file[-1][0] - stands[reader], file[-1][1]) for reader, file in self._files.items())
            if batches <= beyond:
                return None
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
    """The slots of one stream, made one by one up to ``slots_max``, for its ``readers``.

    ``is_shared``: rows are divided among the caches of worker hosts (``shares``). ``kept_ahead``:
    see ``StreamSpec``.
    """

    def __init__(
        self, slots_max: int, readers: Readers, *, is_shared: bool = False, kept_ahead: int | None = None
    ) -> None:
        self.slots_max = slots_max
        self._kept_ahead = kept_ahead
        self.is_shared = is_shared
        self.slots: dict[int, Slot] = {}
        self.idle = Idle(readers)
        self.pending: set[int] = set()
        self.pending_anywhere: set[int] = set()
        """The slots of ``pending`` with rows that a remote worker may fill."""
        self.pending_in: dict[int, set[int]] = {}
        """The slots of ``pending_anywhere`` by the shares of their rows."""
        self._shares: dict[int, set[int]] = {}
        """By slot: the shares above."""
        self._by_position: dict[Position, Slot] = {}
        self._generation = 0
        """The last one that was given."""

    def find(self, position: Position) -> Slot | None:
        """Return the slot that holds, or will hold, ``position``."""
        return self._by_position.get(position)

    def add(self, number: int, *, is_made: bool = True) -> Slot:
        """Add a new slot: an idle one with memory, or one without, for a claim."""
        assert len(self.slots) < self.slots_max, "the ring is full"
        slot = self.slots[number] = Slot(number, is_made)
        if is_made:
            self.let_go(slot)
        return slot

    def drop(self, slot: Slot) -> None:
        """Forget a slot."""
        self.idle.remove(slot.number)
        self._no_rows(slot)
        del self.slots[slot.number]
        self.vacate(slot)

    def trim(self) -> list[Slot]:
        """Drop idle slots beyond ``slots_max``, those first that are needed last; return them."""
        dropped: list[Slot] = []
        while len(self.slots) > self.slots_max:
            number = self.idle.unneeded()
            number = self.idle.needed_last() if number is None else number
            if number is None:
                break
            dropped.append(self.slots[number])
            self.drop(dropped[-1])
        return dropped

    @property
    def unmade(self) -> list[Slot]:
        """The slots without memory."""
        return [slot for slot in self.slots.values() if not slot.is_made]

    @property
    def made(self) -> int:
        """The number of slots with memory."""
        return sum(slot.is_made for slot in self.slots.values())

    @property
    def can_grow(self) -> bool:
        """True if another slot may be made."""
        return len(self.slots) < self.slots_max

    def choose(self) -> Slot | None:
        """Return the idle slot that is needed last (Bélády's rule), or None without one.

        One that is needed soon again is evicted only when the ring cannot grow.
        """
        number = self.idle.unneeded()
        if number is None and not self.can_grow:
            number = self.idle.needed_last()
        elif number is None and self._kept_ahead is not None:
            number = self.idle.needed_last(self._kept_ahead)
        return None if number is None else self.slots[number]

    def take(self, slot: Slot, position: Position, rows: Rows) -> None:
        """Have ``position`` filled into an idle or new slot. Orders take ``rows``, all, in turn."""
        assert slot.is_idle, f"slot {slot.number} is in use"
        self.vacate(slot)
        slot.position = position
        slot.fill = Fill([Part(rows, UNDIVIDED)])
        self._sort_rows(slot)
        slot.grants = 0
        self._by_position[position] = slot
        if slot.is_made:
            self.begin(slot)
            self.let_go(slot)

    def begin(self, slot: Slot) -> None:
        """Give what is to be filled into a slot with memory its generation."""
        self._generation += 1
        slot.generation = self._generation

    def move_into(self, spare: Slot, slot: Slot) -> None:
        """Give ``slot``, which has no memory, that of ``spare``, an idle slot, and its number."""
        assert spare.is_idle, f"slot {spare.number} is in use"
        assert not slot.is_made, f"slot {slot.number} has memory"
        self.drop(spare)
        self._no_rows(slot)
        del self.slots[slot.number]
        slot.number, slot.is_made = spare.number, True
        self.slots[slot.number] = slot
        self._sort_rows(slot)

    def cut(
        self, slot: Slot, order: int, rows_max: int, *, is_remote: bool = False, share: int = 0
    ) -> tuple[Rows, int]:
        """Take pending rows for an order: (rows, the link that doubts them).

        Rows of another ``share`` are taken from the end: its own hosts begin with the first ones.
        Paired with ``put_back`` and ``doubt``.
        """
        fill = slot.fill
        assert fill is not None, f"slot {slot.number} is not being filled"
        link = 0
        if fill.doubted and not is_remote:
            whole, link = fill.doubted[0]
            rows, rest = whole[:rows_max], whole[rows_max:]
            fill.doubted[:1] = [(rest, link)] if rest else []
            fill.links[order] = link
        else:
            number = fill.choose(share)
            whole, owner = fill.pending[number]
            if owner <= ANY_SHARE or owner == share:
                rows, rest = whole[:rows_max], whole[rows_max:]
            else:
                at = max(0, len(whole) - rows_max)
                rows, rest = whole[at:], whole[:at]
            fill.pending[number : number + 1] = [Part(rest, owner)] if rest else []
        rows = ascending(rows)
        fill.under_way[order] = rows
        self._sort_rows(slot)
        return rows, link

    def undivided(self, slot: Slot) -> Rows:
        """Return the pending rows of a slot that were not divided yet, if there are any."""
        pending = slot.fill.pending if slot.fill is not None else []
        return ascending(next((part.rows for part in pending if part.share == UNDIVIDED), ()))

    def divide(self, slot: Slot, parts: Sequence[Part]) -> None:
        """Replace what ``undivided`` returns by its parts."""
        assert slot.fill is not None, f"slot {slot.number} is not being filled"
        slot.fill.pending = [part for part in slot.fill.pending if part.share != UNDIVIDED]
        slot.fill.pending += parts
        self._sort_rows(slot)

    def merge(self, slot: Slot, share: int) -> None:
        """Put pending rows of all shares into one, ``ANY_SHARE`` or ``UNDIVIDED``.

        Rows that failed are in no share, and stay in their parts.
        """
        assert slot.fill is not None, f"slot {slot.number} is not being filled"
        if all(part.share in (ANY_SHARE, share) for part in slot.fill.pending):
            return
        rows = sorted(row for part in slot.fill.pending if part.share != ANY_SHARE for row in part.rows)
        slot.fill.pending = [part for part in slot.fill.pending if part.share == ANY_SHARE]
        slot.fill.pending.append(Part(tuple(rows), share))
        self._sort_rows(slot)

    def shares_in(self, slot: Slot) -> set[int]:
        """Return the shares of a slot's rows that no worker has."""
        return self._shares.get(slot.number, set())

    def put_back(self, slot: Slot, order: int, parts: list[Rows]) -> None:
        """Have the rows of a failed order filled again, in these ``parts``, before any others.

        Doubted rows stay doubted: only a local worker decides about them.
        """
        assert slot.fill is not None, f"slot {slot.number} is not being filled"
        whole = slot.fill.under_way.pop(order)
        assert sum(map(len, parts)) == len(whole), f"parts {parts} of {whole}"
        if order in slot.fill.links:
            slot.fill.doubted[:0] = [(rows, slot.fill.links[order]) for rows in parts]
        else:
            slot.fill.pending[:0] = [Part(rows, ANY_SHARE) for rows in parts]
        self._sort_rows(slot)

    def doubt(self, slot: Slot, order: int, parts: list[Rows], link: int) -> None:
        """Have these rows of an order filled by a local worker; the others are filled."""
        assert slot.fill is not None, f"slot {slot.number} is not being filled"
        del slot.fill.under_way[order]
        slot.fill.doubted += [(rows, link) for rows in parts]
        self._sort_rows(slot)

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
        self._no_rows(slot)
        self.let_go(slot)

    def claim(self, slot: Slot, subscription: int) -> None:
        """Note that a subscription will read what is in a slot. Paired with ``Slot.unclaim``."""
        slot.claims[subscription] = slot.claims.get(subscription, 0) + 1
        self.idle.remove(slot.number)

    def let_go(self, slot: Slot) -> None:
        """File a slot as idle if it is, after a lease, claim, order or filling has ended."""
        if not slot.is_idle:
            return
        if slot.is_made:
            self.idle.put(slot.number, slot.position if slot.fill is None else None)
        else:
            self.drop(slot)

    def _sort_rows(self, slot: Slot) -> None:
        """Note which rows of a slot no worker has."""
        fill = slot.fill
        if slot.number in self.pending:
            self._no_rows(slot)
        if fill is not None and fill.pending:
            self.pending_anywhere.add(slot.number)
            self.pending.add(slot.number)
            if self.is_shared:
                self._shares[slot.number] = {part.share for part in fill.pending}
                for share in self._shares[slot.number]:
                    self.pending_in.setdefault(share, set()).add(slot.number)
        elif fill is not None and fill.doubted:
            self.pending.add(slot.number)

    def _no_rows(self, slot: Slot) -> None:
        self.pending.discard(slot.number)
        self.pending_anywhere.discard(slot.number)
        for share in self._shares.pop(slot.number, ()):
            self.pending_in[share].discard(slot.number)
            if not self.pending_in[share]:
                del self.pending_in[share]
