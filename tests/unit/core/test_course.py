"""Courses, compared with a model that deals batches out by hand.

The tests cover every world size, every start, shared and dropped last rounds.
"""

from collections import Counter
from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest

from batchd.core.blocks import BlockOrder
from batchd.core.buckets import buckets_of
from batchd.core.course import Course, Share
from batchd.core.draws import EvenDraws, SingleDraws, bounds_of
from batchd.core.epochs import planned
from batchd.core.mixtures import Mixture, Segment
from batchd.core.packs import Cuts, PackLimits, Packs
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
PLANS += [replace(plan, repeats=2 + number % 2) for number, plan in enumerate(PLANS) if number % 3 == 0]
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
def test_a_course_may_begin_with_any_sample_of_an_epoch(plan):
    """Ranks read what dealing by hand gives: what is left of its batch, and then all others."""
    ends = np.cumsum([0, *(plan.rows(Position(2, step)) for step in range(plan.steps))]).tolist()
    for sample in range(ends[-1] + 1):
        step, row = plan.begins_with(2, sample)
        assert (step, row) == max((step, sample - end) for step, end in enumerate(ends) if end <= sample)
        assert plan.samples_before(Position(2, step), row) == sample
        for world_size in WORLD_SIZES:
            for rank in range(world_size):
                course = Course(plan, rank, world_size, 2, step, 4, row)
                if course.rounds == 0:
                    continue
                assert read(course) == list(reading(plan, rank, world_size, Position(2, step), 4, row))
                assert course.sample == (sample if row else None)
    assert plan.begins_with(2, ends[-1] + 1)[0] > plan.steps


@pytest.mark.thorough(after_first=True)
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
            assert both[0].first_rounds == len(list(rounds_of(plan, world_size, base)))
            assert both[0].rounds == len(list(rounds_of(plan, world_size, 0)))


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


SIZES = np.random.default_rng(0).integers(1, 90, 1_003)
PACKED = {
    "pack": Packs.plan(SIZES, PackLimits(128, 16, 100, "split")),
    "concat-split": Cuts.plan(SIZES, 128, 3, shuffle=True),
}


def plan_of(rows: int, **options: object) -> Plan:
    """A shuffled plan of batches of at most four rows."""
    return Plan(rows, 4, 3, shuffle=True, drop_last=False, **options)  # type: ignore[arg-type]


ORDERS = {
    "shuffle": plan_of(1_003),
    **{name: plan_of(len(packs), documents=1_003) for name, packs in PACKED.items()},
    "pack, balance": planned(
        plan_of(len(PACKED["pack"]), documents=1_003), {}, buckets_of(PACKED["pack"].attention(SIZES, 128), 64, 4, 8)
    ),
    "bucket": planned(plan_of(1_003), {}, buckets_of(SIZES, 5, 4)),
    "bucket, budget": planned(plan_of(1_003), {}, buckets_of(SIZES, 5, 4, 8, 200)),
    "blocks": plan_of(1_003, order=BlockOrder(np.append(np.arange(0, 1_003, 20), 1_003), 4, 3)),
    "weights": plan_of(1_003, draws=EvenDraws(bounds_of(SIZES.astype(float), 1_003), 3)),
    "weights, each once": plan_of(500, draws=SingleDraws(SIZES.astype(float), 500, 3)),
    "mix": plan_of(700, order=Mixture([900, 103], [Segment(0, [1, 0]), Segment(90, [0, 1])], 700, 3, shuffle=True)),
}
"""A plan of each kind of order; no window, bucket or segment ends with step 3, 11 or 17."""


def pieces_of(name: str, rows: Counter[tuple[Position, int]]) -> Counter[tuple[int, ...]]:
    """The samples of some rows; of packed rows the samples, first elements and, if cut, lengths."""
    plan, packs = ORDERS[name], PACKED.get(name.partition(",")[0])
    if packs is None:
        counts = Counter(position for position, _row in rows)
        samples = np.concatenate([plan.indices(position, 0, count) for position, count in counts.items()])
        return Counter((sample,) for sample in samples.tolist())
    numbers = np.array([position.step * plan.batch_size + row for position, row in rows])
    parts = packs.contents(0, numbers, plan.seed, shuffle=True, order=plan.order)
    return Counter(map(tuple, parts[:, 1:].tolist()))


@pytest.mark.parametrize("name", ORDERS)
def test_one_then_four_three_and_sixteen_ranks_read_an_epoch_of_any_order_together(name):
    """Each row once, and so each sample, or each part of it, as often as the epoch has it.

    All ranks have equally many steps.
    """
    plan, shares, base = ORDERS[name], [], 0
    for world_size, rounds in ((1, 3), (4, 2), (3, 2), (16, None)):
        taken = [read(course)[:rounds] for course in courses(plan, world_size, base, end_epoch=1)]
        assert len(set(map(len, taken))) == 1
        shares += [share for of_rank in taken for share in of_rank]
        base += world_size * (rounds or 0)

    rows = rows_read(plan, shares)
    assert rows == all_rows(plan, 0, range(plan.steps))
    pieces = pieces_of(name, rows)
    assert max(pieces.values()) == 1 or name in {"weights", "mix"}
    if name.startswith(("pack", "concat-split")):
        assert {sample for sample, *_part in pieces} == set(range(1_003))
    elif name not in {"weights", "weights, each once", "mix"}:
        assert pieces.keys() == {(sample,) for sample in range(1_003)}
    if name == "concat-split":
        assert sum(count for _sample, _first, count in pieces) == SIZES.sum()


@pytest.mark.parametrize("world_size", [1, 3, 4, 16])
def test_the_shares_of_a_mix_change_at_one_step_for_all_ranks(world_size):
    """Row 90 is the third of step 22, whichever rank reads it."""
    plan, seen = ORDERS["mix"], set[int]()
    for course in courses(plan, world_size, end_epoch=1):
        for share in read(course):
            rows = 4 * share.position.step + share.first + np.arange(share.rows)
            assert (plan.indices(*share) >= 900).tolist() == (rows >= 90).tolist()
            seen.update(rows.tolist())

    assert seen == set(range(700))


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
