"""Repeats: each sample in several rows of an epoch, in the same rows of consecutive batches."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from batchd.core.course import Course
from batchd.core.plan import Plan
from batchd_wire.position import COPY_BIT, EpochRows, Position
from support.core_plans import KINDS, plan_of

REPEATED = {
    "kind": st.sampled_from(KINDS),
    "batch_size": st.integers(1, 7),
    "seed": st.integers(0, 1 << 40),
    "drop_last": st.booleans(),
    "repeats": st.integers(2, 5),
    "epoch": st.integers(0, 3),
}


def plans(kind, batch_size, seed, drop_last, repeats):
    """Return a plan with repeats, and the same without."""
    plan, _packs = plan_of(kind, batch_size, seed, drop_last=drop_last, repeats=repeats)
    assume(plan.steps)
    return plan, replace(plan, repeats=1)


def rows_at(plan: Plan, epoch: int, step: int) -> list[int]:
    """Return what is in the rows of a batch: samples, or numbers of packs."""
    position = Position(epoch, step)
    return plan.indices(position, 0, plan.rows(position)).tolist()


@given(**REPEATED)
def test_each_batch_is_there_so_often_in_consecutive_steps(kind, batch_size, seed, drop_last, repeats, epoch):
    """Partial last batches, too, and with any order; each copy draws other random numbers."""
    plan, once = plans(kind, batch_size, seed, drop_last, repeats)

    assert plan.steps == once.steps * repeats
    for step in range(plan.steps):
        position, base = Position(epoch, step), Position(epoch, step // repeats)
        assert rows_at(plan, epoch, step) == rows_at(once, *base)
        assert plan.bucket_of(position) == once.bucket_of(base)
        assert plan.rows_by_sample(position) == once.rows_by_sample(base)
        assert plan.draw_epoch(position) == (step % repeats) << COPY_BIT | epoch
    rows = [plan.rows(Position(epoch, step)) for step in range(plan.steps)]
    assert plan.rows_of(np.full(plan.steps, epoch), np.arange(plan.steps)).tolist() == rows
    assert sum(rows) == plan.epoch_rows == once.epoch_rows * repeats


@given(**REPEATED)
def test_the_places_of_a_sample_are_the_rows_that_it_is_in(kind, batch_size, seed, drop_last, repeats, epoch):
    """The way back, for one sample and for all at once, agrees with the way there."""
    plan, _once = plans(kind, batch_size, seed, drop_last, repeats)
    samples = np.arange(plan.source_samples if plan.documents is None else plan.samples)
    there: dict[int, list[int]] = {sample: [] for sample in samples.tolist()}
    for step in range(plan.steps):
        for row, sample in enumerate(rows_at(plan, epoch, step)):
            there[sample].append(step * batch_size + row)

    pairs, places = plan.all_places(np.full(len(samples), epoch), samples)

    read = places // batch_size < plan.steps
    found = [sorted(places[read & (pairs == sample)].tolist()) for sample in samples.tolist()]
    assert found == list(there.values())
    for sample, expected in there.items():
        occurrences = [place for place in plan.occurrences(epoch, sample).tolist() if place // batch_size < plan.steps]
        assert occurrences == expected
    first = plan.places(epoch, samples)
    assert [expected[0] for expected in there.values() if expected] == [
        first[sample] for sample, expected in there.items() if expected
    ]


@given(world_size=st.integers(1, 7), **REPEATED)
def test_copies_of_a_sample_are_on_different_ranks(kind, batch_size, seed, drop_last, repeats, epoch, world_size):
    """With as many ranks as repeats, in all rounds of whole batches; ranks share the last one."""
    plan, once = plans(kind, batch_size, seed, drop_last, repeats)
    assume(repeats <= world_size <= plan.steps)
    whole = plan.steps - plan.steps % world_size
    readers: dict[tuple[int, int], list[int]] = {}
    for rank in range(world_size):
        course = Course(plan, rank, world_size, epoch, 0, epoch + 1)
        for share in (course.at(turn) for turn in range(whole // world_size)):
            for row in range(share.first, share.first + share.rows):
                readers.setdefault((share.position.step // repeats, row), []).append(rank)

    copies = Counter({row: len(ranks) for row, ranks in readers.items()})
    assert all(len(set(ranks)) == len(ranks) for ranks in readers.values())
    assert all(copies[row] == repeats for row in copies if row[0] < whole // repeats)
    assert len({step for step, _row in copies}) == min(-(-whole // repeats), once.steps)


@given(samples=st.integers(1, 40), batch_size=st.integers(1, 9), repeats=st.integers(1, 4))
def test_the_batch_of_a_row_and_the_rows_before_a_batch_agree(samples, batch_size, repeats):
    """Trainers and the daemon count the rows of an epoch in the same way."""
    plan = Plan(samples, batch_size, 0, shuffle=True, drop_last=False, repeats=repeats)
    cut = EpochRows(samples, batch_size, repeats)
    numbers = [(step, row) for step in range(plan.steps) for row in range(plan.rows(Position(0, step)))]

    assert [cut.find(number) for number in range(len(numbers))] == numbers
    assert [cut.before(step) + row for step, row in numbers] == list(range(len(numbers)))
    assert cut.find(len(numbers)) == (plan.steps, 0)
    assert cut.before(plan.steps) == plan.epoch_rows == len(numbers)


@given(st.integers(1, 15), st.integers(16, 30), st.integers(2, 4), st.integers(1, 3))
def test_batches_of_two_sizes_have_had_the_same_samples_where_a_state_can_be_converted(one, other, repeats, times):
    """At the same number of rows, each size has had the same samples equally often."""
    plans = [Plan(10_000, size, 3, shuffle=True, drop_last=False, repeats=repeats) for size in (one, other)]
    rows = plans[0].convertible_every(other) * times
    had = [
        Counter(sample for step in range(plan.begins_with(0, rows)[0]) for sample in rows_at(plan, 0, step))
        for plan in plans
    ]

    assert plans[1].convertible_every(one) * times == rows
    assert had[0] == had[1]
    assert set(had[0].values()) == {repeats}
    assert {plan.begins_with(0, rows)[1] for plan in plans} == {0}
