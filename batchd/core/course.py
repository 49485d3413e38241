"""The positions of each subscription, and the next reader of each. Pure integer arithmetic.

A subscription that starts at (epoch, base) as rank r of W reads, counting its sequence from 0,

    first epoch     steps base + r, base + r + W, base + r + 2W, ...
    later epochs    steps        r,        r + W,        r + 2W, ...

All ranks get the same number of batches in an epoch: a round is one batch for each rank. Where the
last round has fewer batches than there are ranks, ``drop_last`` leaves it out; otherwise the ranks
share these batches by rows. With W = 4 and two batches left, ranks 0 and 1 read the halves of the
first, ranks 2 and 3 those of the second. So every sample is read exactly once, no batch is made up,
and the content of a position does not depend on W. Only where a batch has fewer rows than ranks to
share it, several ranks read the same row, since a loss over no rows is not a number.

A course may begin at a row within its first batch: whoever reads that batch gets the rest of it.

``Readers`` finds the subscription that reads a position next.

Invariant: ``at`` is a pure function of the sequence number; ranks that start together stay in the
same round.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from batchd.core.plan import Plan
from batchd_wire.position import Position


class Share(NamedTuple):
    """One place of a course: ``rows`` rows of one position, from row ``first`` on."""

    position: Position
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Course:
    """The positions of one rank from step ``base`` of ``epoch`` to ``end_epoch`` (None: no end).

    ``row``: of the batch at ``base``, the first that is read.
    """

    plan: Plan
    rank: int
    world_size: int
    epoch: int
    base: int
    end_epoch: int | None
    row: int = 0
    rounds: int = field(init=False, compare=False, repr=False)
    """Batches per rank in a whole epoch."""
    first_rounds: int = field(init=False, compare=False, repr=False)
    """Batches per rank in the first epoch of the course."""

    def __post_init__(self) -> None:
        for name, base in (("rounds", 0), ("first_rounds", self.base)):
            is_possible = self.world_size > 0  # a trainer that asked for another one is refused
            object.__setattr__(self, name, rounds_from(self.plan, self.world_size, base) if is_possible else 0)

    @property
    def sample(self) -> int | None:
        """The samples of the epoch before the course; None if it begins with a whole batch."""
        begin = Position(self.epoch, self.base)
        return self.plan.samples_before(begin, self.row) if self.row else None

    def at(self, sequence: int) -> Share | None:
        """Return what is read at place ``sequence`` of the course; None past its end."""
        epoch, base, turn = self.epoch, self.base, sequence
        if turn >= self.first_rounds:
            later, turn = divmod(turn - self.first_rounds, self.rounds)
            epoch, base = epoch + 1 + later, 0
        if self.end_epoch is not None and epoch >= self.end_epoch:
            return None
        return self._share(epoch, base, turn)

    def is_before(self, position: Position) -> bool:
        """Return whether a position lies before the course: an earlier session may have had it."""
        return position < (self.epoch, self.base)

    def sequence_of(self, position: Position) -> int | None:
        """Return where in the course a position is read; None if it is not. Looks at no plan."""
        later = position.epoch - self.epoch
        if later < 0 or position.step >= self.plan.steps:
            return None
        read = readers_of(self.plan, self.world_size, 0 if later else self.base, position.step)
        if read is None or self.rank not in read[1]:
            return None
        return read[0] + (self.first_rounds + (later - 1) * self.rounds if later else 0)

    def _share(self, epoch: int, base: int, turn: int) -> Share:
        start = base + turn * self.world_size
        left = self.plan.steps - start
        if left >= self.world_size:
            position = Position(epoch, start + self.rank)
            begin = self._first_row(position)
            return Share(position, begin, self.plan.rows(position) - begin)
        batch = self.rank * left // self.world_size
        sharers = _sharers(batch, left, self.world_size)
        members, member = len(sharers), self.rank - sharers.start
        position = Position(epoch, start + batch)
        begin = self._first_row(position)
        rows = self.plan.rows(position) - begin
        first, end = rows * member // members, rows * (member + 1) // members
        return Share(position, begin + first, max(1, end - first))

    def _first_row(self, position: Position) -> int:
        return self.row if self.row and position == (self.epoch, self.base) else 0


def rounds_from(plan: Plan, world_size: int, base: int) -> int:
    """Return the batches per rank in an epoch that is read from step ``base`` on."""
    full, rest = divmod(plan.steps - base, world_size)
    return full + (1 if rest and not plan.drop_last else 0)


def readers_of(plan: Plan, world_size: int, base: int, step: int) -> tuple[int, range] | None:
    """Return the round from ``base`` on and the ranks that read ``step``; None where none do."""
    if step < base:
        return None
    turn, batch = divmod(step - base, world_size)
    left = plan.steps - (step - batch)
    if left >= world_size:
        return turn, range(batch, batch + 1)
    if plan.drop_last:
        return None
    return turn, _sharers(batch, left, world_size)


def _sharers(batch: int, batches: int, world_size: int) -> range:
    """Return the ranks that share batch number ``batch`` of the ``batches`` in a last round."""
    return range(-(-batch * world_size // batches), -(-(batch + 1) * world_size // batches))


class NextUse(NamedTuple):
    """``reader`` will read a position after ``batches`` others."""

    batches: int
    reader: int


class _LinePlace(NamedTuple):
    """A reader's turn on a line, and its epochs there (counted from its own if they are equal)."""

    turn: int
    reader: int
    first_epoch: int
    end_epoch: float


_Line = list[_LinePlace]


class _Grid:
    """The lines of ranks that read epochs from ``start`` on in rounds of ``world_size`` batches."""

    def __init__(self, plan: Plan, world_size: int, start: int, *, equal_epochs: bool) -> None:
        self.world_size, self.start = world_size, start
        self.rounds = rounds_from(plan, world_size, start)
        self._plan, self._equal_epochs = plan, equal_epochs
        self.lines: dict[int, _Line] = {}

    def place(self, reader: int, turn: int, first_epoch: int, end_epoch: float) -> _LinePlace:
        """Return the place of a reader whose next batch is at ``turn``."""
        if not self._equal_epochs:
            return _LinePlace(turn, reader, first_epoch, end_epoch)
        epoch, within = divmod(turn, self.rounds)
        return _LinePlace(within, reader, first_epoch - epoch, end_epoch - epoch)

    def nearest(self, key: Position) -> NextUse | None:
        """Return the reader of this grid that reaches ``key`` first."""
        read = readers_of(self._plan, self.world_size, self.start, key.step)
        if read is None:
            return None
        turn, ranks = read
        best: NextUse | None = None
        few = ranks if len(ranks) <= len(self.lines) else self.lines
        for line in [self.lines[rank] for rank in few if rank in ranks and rank in self.lines]:
            for epoch in (0, 1) if self._equal_epochs else (key.epoch,):
                found = _last_before(line, epoch * self.rounds + turn, epoch)
                if found is not None:
                    best = found if best is None else min(best, found)
                    break
        return best


def _move(line: _Line, old: _LinePlace, new: _LinePlace) -> None:
    """Replace a place on a line, which stays in order."""
    at = bisect_left(line, old)
    if (at == 0 or line[at - 1] <= new) and (at + 1 == len(line) or new <= line[at + 1]):
        line[at] = new
    else:
        del line[at]
        insort(line, new)


def _last_before(line: _Line, turn: int, epoch: int) -> NextUse | None:
    """Return the nearest reader that is not beyond ``turn`` and has that epoch in its course."""
    at = bisect_left(line, (turn + 1,))
    while at:
        at -= 1
        stands, reader, first_epoch, end_epoch = line[at]
        if first_epoch <= epoch < end_epoch:
            return NextUse(turn - stands, reader)
    return None


class Readers:
    """Finds the next reader of a position, and its distance.

    Ranks of one world size that read an epoch from the same step on (modulo the world size) read it
    in the same rounds: they share a grid. On a grid a position is read at one turn, ``epoch *
    rounds + round``, by one rank, or by a few in a shared last round. A reader has the turn of its
    next batch. So on the line of each rank, where its readers are kept in order,

        line of rank 0   --o------o--------------x--------o--->  turns
                                  |--- batches --|
                           the nearest reader of x is the last one that is not beyond it

    A reader that starts in mid-epoch is on two grids until that epoch is over: on that of its first
    epoch, and on the one of all whole epochs, as far before the next epoch as it has batches left.
    With ``equal_epochs``, which have the same bytes, turns are counted within an epoch, a reader
    beyond a position reaches it in the next epoch, and positions are asked for in epoch 0.

    Invariant: ``nearest`` is what asking the course of each reader would give.
    """

    def __init__(self, plan: Plan, *, equal_epochs: bool) -> None:
        self._plan = plan
        self._equal_epochs = equal_epochs
        self._grids: dict[tuple[int, int], _Grid] = {}
        """By world size and start."""
        self._stands: dict[int, tuple[int, Sequence[tuple[_Grid, _LinePlace]]]] = {}
        """By reader: its rank, and its places on the grids."""
        self.next_sequence: dict[int, int] = {}
        """By reader: the place of its course that it reads next."""
        self._moved: dict[int, Course] = {}
        """Readers whose lines are out of date: readers move far more often than they are sought."""
        self._read_to: Position | None = None
        """A position before which the only reader reads nothing any more, if it is known."""

    def move(self, reader: int, course: Course, sequence: int) -> None:
        """Note that a reader reads place ``sequence`` of its course next, if there is one."""
        if sequence < self.next_sequence.get(reader, sequence + 1):  # it is new, or moves back
            self._read_to = None
        self.next_sequence[reader] = sequence
        self._moved[reader] = course

    def _stand(self, reader: int, course: Course, sequence: int) -> None:
        """Update the place of a reader; mostly its neighbours stay the same."""
        stands = self._places(reader, course, sequence)
        rank, before = self._stands.get(reader, (course.rank, ()))
        if rank != course.rank or [grid for grid, _place in before] != [grid for grid, _place in stands]:
            self._leave(reader)
            for grid, place in stands:
                insort(
                    self._grids.setdefault((grid.world_size, grid.start), grid).lines.setdefault(course.rank, []), place
                )
        else:
            for (grid, old), (_grid, new) in zip(before, stands, strict=True):
                _move(grid.lines[rank], old, new)
        if stands:
            self._stands[reader] = course.rank, stands

    def _places(self, reader: int, course: Course, sequence: int) -> list[tuple[_Grid, _LinePlace]]:
        """Return a reader's places on its grids; none after the end of its course."""
        end_epoch = inf if course.end_epoch is None else course.end_epoch
        start, left = course.base % course.world_size, course.first_rounds - sequence
        next_turn = (course.epoch + 1) * course.rounds
        if next_turn - left >= end_epoch * course.rounds:
            return []
        whole = self._grid(course, 0)
        stands = [(whole, whole.place(reader, next_turn - left, course.epoch + (start > 0), end_epoch))]
        if start and left > 0:
            first = self._grid(course, start)
            turn = (course.epoch + 1) * first.rounds - left
            stands.append((first, first.place(reader, turn, course.epoch, course.epoch + 1)))
        return stands

    def forget(self, reader: int) -> None:
        """Forget a reader that wants no more."""
        self.next_sequence.pop(reader, None)
        self._moved.pop(reader, None)
        self._leave(reader)

    def _leave(self, reader: int) -> None:
        rank, stands = self._stands.pop(reader, (0, ()))
        for grid, place in stands:
            line = grid.lines[rank]
            del line[bisect_left(line, place)]
            if not line:
                del grid.lines[rank]
                if not grid.lines:
                    del self._grids[grid.world_size, grid.start]

    def nearest(self, key: Position) -> NextUse | None:
        """Return the reader that reaches ``key`` first; None if no reader will."""
        if self._read_to is not None and key < self._read_to:
            return None
        while self._moved:
            reader, course = self._moved.popitem()
            self._stand(reader, course, self.next_sequence[reader])
            if len(self.next_sequence) == 1 and not self._equal_epochs:
                share = course.at(self.next_sequence[reader])
                self._read_to = share.position if share is not None else None
        best: NextUse | None = None
        for grid in self._grids.values():
            found = grid.nearest(key)
            if found is not None and (best is None or found < best):
                best = found
        return best

    def _grid(self, course: Course, start: int) -> _Grid:
        key = course.world_size, start
        return self._grids.get(key) or _Grid(self._plan, *key, equal_epochs=self._equal_epochs)
