"""Courses, compared with a model that deals batches out by hand.

The tests cover every world size, every start, shared and dropped last rounds.
"""

from collections import Counter
from itertools import islice, product

import numpy as np
import pytest

from batchd.core.buckets import buckets_of
from batchd.core.course import Course, Share
from batchd.core.epochs import planned
from batchd.core.plan import Plan
from batchd_wire.position import Position
from support.core_course import reading, rounds_of, sequence_of

PLANS = [
    Plan(samples, batch_size, 0, shuffle, drop_last)
    for samples, batch_size in [(1, 1), (2, 3), (5, 1), (6, 2), (7, 2), (10, 3), (11, 1), (13, 4)]
    for shuffle, drop_last in [(False, False), (True, True)]
    if samples // batch_size or not drop_last
]
PLANS += [
    planned(Plan(len(sizes), 4, 0, shuffle, drop_last), {}, buckets_of(np.array(sizes), 3, 4, ranks, 12))
    for sizes, ranks in [([9] * 3 + [2] * 11, 1), ([3, 3, 4, 6, 6, 12, 12], 2)]
    for shuffle, drop_last in [(False, False), (True, True)]
]
"""Those of a budget have 1 to 4 rows in a batch."""
WORLD_SIZES = range(1, 8)


def courses(plan: Plan, world_size: int, base: int = 0, epoch: int = 0, end_epoch: int | None = None) -> list[Course]:
    """The courses of all ranks, which start together."""
    return [Course(plan, rank, world_size, epoch, base, end_epoch) for rank in range(world_size)]


def read(course: Course) -> list[Share]:
    """All shares of a course that ends."""
    shares = []
    while (share := course.at(len(shares))) is not None:
        shares.append(share)
    return shares


def rows_read(plan: Plan, shares: list[Share]) -> Counter[tuple[Position, int]]:
    """The number of times that each row is read.

    If more ranks than rows share a batch, each row counts once, and each rank must have a row.
    """
    readers = Counter(share.position for share in shares)
    counts = Counter((share.position, share.first + row) for share in shares for row in range(share.rows))
    assert all(share.rows for share in shares)
    return Counter({row: 1 if readers[row[0]] > plan.rows(row[0]) else times for row, times in counts.items()})


def all_rows(plan: Plan, epoch: int, steps: range) -> Counter[tuple[Position, int]]:
    """Every row of some batches, once."""
    return Counter((Position(epoch, step), row) for step in steps for row in range(plan.rows(Position(epoch, step))))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_course_reads_what_dealing_by_hand_gives(plan):
    """This holds for every rank of every world, from every start, over three epochs."""
    for world_size in WORLD_SIZES:
        for base in range(plan.steps + 1):
            for course in courses(plan, world_size, base, epoch=2):
                if course.rounds == 0:
                    continue
                expected = list(islice(reading(plan, course.rank, world_size, Position(2, base), None), 3 * plan.steps))
                assert [course.at(sequence) for sequence in range(len(expected))] == expected


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_sequence_of_is_the_inverse_of_at(plan):
    """The inverse finds a position that is read at its place, and other positions nowhere."""
    for world_size, base, end_epoch in product(WORLD_SIZES, range(plan.steps + 1), (4, None)):
        for course in courses(plan, world_size, base, 2, end_epoch):
            if course.rounds == 0:
                continue
            places = {share.position: n for n in range(2 * plan.steps + 2) if (share := course.at(n)) is not None}
            for position in (Position(epoch, step) for epoch in range(4) for step in range(plan.steps + world_size)):
                assert sequence_of(course, position) == places.get(position)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_all_ranks_get_equally_many_batches(plan):
    """``first_rounds`` counts a partial first epoch, and ``rounds`` whole ones."""
    for world_size in WORLD_SIZES:
        for base in range(plan.steps + 1):
            both = courses(plan, world_size, base, epoch=1, end_epoch=3)
            if both[0].rounds == 0:
                continue
            assert {len(read(course)) for course in both} == {both[0].first_rounds + both[0].rounds}
            assert both[0].first_rounds == len(rounds_of(plan, world_size, base))
            assert both[0].rounds == len(rounds_of(plan, world_size, 0))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_ranks_together_read_every_sample_exactly_once(plan):
    """This also holds if the last round has fewer batches than ranks.

    Only ``drop_last`` leaves that round out.
    """
    for world_size in WORLD_SIZES:
        ranks = courses(plan, world_size, end_epoch=1)
        if ranks[0].rounds == 0:
            continue
        steps = plan.steps - plan.steps % world_size if plan.drop_last else plan.steps
        shares = [share for course in ranks for share in read(course)]
        assert rows_read(plan, shares) == all_rows(plan, 0, range(steps))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_resuming_at_any_round_with_another_world_size_loses_and_repeats_nothing(plan):
    """The batches of the former and of the new ranks make up the epoch, each sample once."""
    for before, after in product(WORLD_SIZES, WORLD_SIZES):
        for rounds in range(plan.steps // before + 1):
            base = rounds * before
            resumed = courses(plan, after, base, end_epoch=1)
            if resumed[0].rounds == 0:
                continue
            shares = [share for one in courses(plan, before) for n in range(rounds) if (share := one.at(n)) is not None]
            shares += [share for course in resumed for share in read(course)]
            left_over = (plan.steps - base) % after if plan.drop_last else 0
            assert rows_read(plan, shares) == all_rows(plan, 0, range(plan.steps - left_over))


def test_a_shared_last_round_is_cut_as_the_drawing_says():
    """Four ranks, two batches left: two ranks read the halves of each, in order."""
    plan = Plan(samples=24, batch_size=4, seed=0, shuffle=False, drop_last=False)
    last = [course.at(1) for course in courses(plan, 4)]
    assert last == [
        Share(Position(0, 4), 0, 2),
        Share(Position(0, 4), 2, 2),
        Share(Position(0, 5), 0, 2),
        Share(Position(0, 5), 2, 2),
    ]


def test_a_course_ends_before_its_end_epoch():
    """``end_epoch`` itself is not read, and a course that starts there is empty."""
    plan = Plan(samples=6, batch_size=2, seed=0, shuffle=False, drop_last=False)
    assert [share.position for share in read(Course(plan, 0, 1, 1, 2, 3))] == [(1, 2), (2, 0), (2, 1), (2, 2)]
    assert read(Course(plan, 0, 1, 3, 0, 3)) == []
    assert Course(plan, 0, 1, 1, 0, None).at(10**12) == Share(Position(1 + 10**12 // 3, 10**12 % 3), 0, 2)


def test_far_places_cost_nothing():
    """A course is computed: the millionth epoch takes no longer than the first."""
    course = Course(Plan(10**9, 256, 0, shuffle=True, drop_last=False), 5, 8, 0, 0, None)
    share = course.at(10**15)
    assert share is not None
    assert sequence_of(course, share.position) == 10**15
