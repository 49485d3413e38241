"""The idle slots of one ring, filed so that the one to give up is found without looking at all of them. Nobody's process.

    loose     looked at when a slot is wanted: nobody needs it, or nobody knows yet
    filed     under a reader that needs it, at the place of that reader's course

Readers only move towards what is filed under them, so the order within a file stays; and another reader can only be nearer than
the one that a slot is filed under. So the farthest of the last in each file is the slot that is needed last, once a look at
its readers confirms it; a slot whose nearest reader is another by now is filed anew.

Invariant: no slot is needed later than where it is filed says.
"""

from bisect import bisect_left, insort

from batchd.core.readers import Readers, Reading
from batchd_wire.position import Position


class Idle:
    """Slots by number."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._keys: dict[int, Position | None] = {}
        """What is in each slot; None where it is of no use to anybody."""
        self._loose: dict[int, None] = {}
        self._filed: dict[int, tuple[int, int]] = {}
        """By slot: (reader, place of its course)."""
        self._files: dict[int, list[tuple[int, int]]] = {}
        """By reader: (place of its course, slot), in order."""

    @property
    def slots(self) -> set[int]:
        """Which slots are idle."""
        return set(self._keys)

    def put(self, slot: int, key: Position | None) -> None:
        """A slot is idle, or holds something else than when it was put here."""
        self.remove(slot)
        self._keys[slot] = key
        self._loose[slot] = None

    def remove(self, slot: int) -> None:
        """A slot is in use, or gone; no matter if it was not here."""
        self._keys.pop(slot, None)
        self._loose.pop(slot, None)
        self._take_from_file(slot)

    def forget(self, reader: int) -> None:
        """A reader is gone: who needs what was filed under it is not known any more."""
        for _place, slot in self._files.pop(reader, ()):
            del self._filed[slot]
            self._loose[slot] = None

    def unneeded(self) -> int | None:
        """A slot that nobody will read again."""
        while self._loose:
            slot = next(iter(self._loose))
            if self._look(slot) is None:
                return slot
        return None

    def needed_last(self) -> int | None:
        """The slot that is read later than all others, where ``unneeded`` has found none."""
        while self._files:
            stands = self._readers.next_sequence
            batches, slot = max((file[-1][0] - stands[reader], file[-1][1]) for reader, file in self._files.items())
            reading = self._look(slot)
            if reading is None or reading.batches == batches:
                return slot
        return None

    def _look(self, slot: int) -> Reading | None:
        """File a slot under the reader that needs it first; where there is none it is loose."""
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
