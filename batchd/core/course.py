"""The course of a subscription: which positions it reads, in order. Pure integer arithmetic.

A subscription that starts at (epoch, base) as rank r of W reads, counting its sequence from 0,

    first epoch     steps base + r, base + r + W, base + r + 2W, ...
    later epochs    steps        r,        r + W,        r + 2W, ...

All ranks get the same number of batches in an epoch: a round is one batch for each rank. Where the
last round has fewer batches than there are ranks, ``drop_last`` leaves it out; otherwise the ranks
share these batches by rows. With W = 4 and two batches left, ranks 0 and 1 read the halves of the
first, ranks 2 and 3 those of the second. So every sample is read exactly once, no batch is made up,
and the content of a position does not depend on W. Only where a batch has fewer rows than ranks to
share it, several ranks read the same row, since a loss over no rows is not a number.

Invariant: ``at`` is a pure function of the sequence number; ranks that start together stay in the
same round.
"""

from dataclasses import dataclass
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
    """The positions of one rank from step ``base`` of ``epoch`` to ``end_epoch`` (None: no end)."""

    plan: Plan
    rank: int
    world_size: int
    epoch: int
    base: int
    end_epoch: int | None

    @property
    def rounds(self) -> int:
        """Batches per rank in a whole epoch."""
        return rounds_from(self.plan, self.world_size, 0)

    @property
    def first_rounds(self) -> int:
        """Batches per rank in the first epoch of the course."""
        return rounds_from(self.plan, self.world_size, self.base)

    def at(self, sequence: int) -> Share | None:
        """Return what is read at place ``sequence`` of the course; None past its end."""
        epoch, base, turn = self.epoch, self.base, sequence
        if turn >= self.first_rounds:
            later, turn = divmod(turn - self.first_rounds, self.rounds)
            epoch, base = epoch + 1 + later, 0
        if self.end_epoch is not None and epoch >= self.end_epoch:
            return None
        return self._share(epoch, base, turn)

    def _share(self, epoch: int, base: int, turn: int) -> Share:
        start = base + turn * self.world_size
        left = self.plan.steps - start
        if left >= self.world_size:
            step = start + self.rank
            return Share(Position(epoch, step), 0, self.plan.rows(step))
        batch = self.rank * left // self.world_size
        sharers = _sharers(batch, left, self.world_size)
        members, member = len(sharers), self.rank - sharers.start
        rows = self.plan.rows(start + batch)
        first, end = rows * member // members, rows * (member + 1) // members
        return Share(Position(epoch, start + batch), first, max(1, end - first))


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
