"""The courses of trainers by brute force, for comparison with ``batchd.core.course``.

Tests only. Batches are dealt out round by round; a last round with too few batches is either left
out or shared row by row.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from batchd.core.buckets import BucketOrder
from batchd.core.course import Course, Share, rounds_from
from batchd.core.plan import Plan
from batchd_wire.position import Position


def rounds_of(
    plan: Plan, world_size: int, base: int, epoch: int = 0, row: int = 0
) -> Iterator[list[tuple[int, int, int]]]:
    """Every round of an epoch from ``row`` of step ``base`` on.

    For each rank (step, first row, rows).
    """
    begins = {base: row}
    for first in range(base, plan.steps, world_size):
        dealt = range(first, min(first + world_size, plan.steps))
        if len(dealt) == world_size:
            spans = [(step, begins.get(step, 0), rows_of(plan, epoch, step)) for step in dealt]
            yield [(step, begin, rows - begin) for step, begin, rows in spans]
        elif not plan.drop_last:
            yield _shared_round(plan, world_size, epoch, dealt, begins)


def rows_of(plan: Plan, epoch: int, step: int) -> int:
    """Count the samples of a batch; the last batch may have fewer, and so any of a budget."""
    step //= plan.repeats
    if isinstance(plan.order, BucketOrder):
        return _rows_in_batches(plan.order, plan.batch_size, epoch).get(step, 0)
    return len(range(plan.samples)[step * plan.batch_size : (step + 1) * plan.batch_size])


@lru_cache(maxsize=256)
def _rows_in_batches(order: BucketOrder, batch_size: int, epoch: int) -> Counter[int]:
    return Counter((order.places_of(epoch, np.arange(order.samples)) // batch_size).tolist())


def reading(
    plan: Plan, rank: int, world_size: int, start: Position, end_epoch: int | None, row: int = 0
) -> Iterator[Share]:
    """The batches that one rank reads, in order; endless if ``end_epoch`` is None."""
    epoch, base = start
    while end_epoch is None or epoch < end_epoch:
        for dealt in rounds_of(plan, world_size, base, epoch, row):
            step, first, rows = dealt[rank]
            yield Share(Position(epoch, step), first, rows)
        epoch, base, row = epoch + 1, 0, 0


def sequence_of(course: Course, position: Position) -> int | None:
    """The place of a course where ``position`` is read; None if it never is."""
    epoch, step = position
    if epoch < course.epoch or (course.end_epoch is not None and epoch >= course.end_epoch):
        return None
    base = course.base if epoch == course.epoch else 0
    turn = (step - base) // course.world_size
    if step < base or turn >= rounds_from(course.plan, course.world_size, base):
        return None
    passed = 0 if epoch == course.epoch else course.first_rounds + (epoch - course.epoch - 1) * course.rounds
    share = course.at(passed + turn)
    return passed + turn if share is not None and share.position == position else None


def _shared_round(
    plan: Plan, world_size: int, epoch: int, batches: Sequence[int], begins: Mapping[int, int]
) -> list[tuple[int, int, int]]:
    """Ranks in order are spread over the batches as evenly as possible.

    The ranks of one batch cut its rows evenly, at least one row each.
    """
    members: dict[int, list[int]] = {step: [] for step in batches}
    for rank in range(world_size):
        members[batches[rank * len(batches) // world_size]].append(rank)
    shares = []
    for step, ranks in members.items():
        begin = begins.get(step, 0)
        rows = rows_of(plan, epoch, step) - begin
        ends = [rows * (place + 1) // len(ranks) for place in range(len(ranks))]
        shares += [(step, begin + first, max(1, end - first)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]
    return shares
