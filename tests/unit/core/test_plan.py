"""The plan: the fixed place of each sample in each epoch."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from batchd.core.plan import Plan
from batchd_wire.position import SIZE_BIT, Position

SIZES = [(1, 1), (1, 4), (4, 4), (5, 4), (7, 3), (12, 5), (100, 7), (257, 256), (1000, 64)]


def epoch_of(plan: Plan, epoch: int) -> list[int]:
    """Return every sample of an epoch in order."""
    return [
        index
        for step in range(plan.steps)
        for index in plan.indices(Position(epoch, step), 0, plan.rows(Position(epoch, step))).tolist()
    ]


@pytest.mark.parametrize(("samples", "batch_size"), SIZES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_every_sample_once(samples, batch_size, shuffle):
    """The last batch is partial if samples remain."""
    plan = Plan(samples, batch_size, 0, shuffle, drop_last=False)
    assert [plan.rows(Position(0, step)) for step in range(plan.steps - 1)] == [batch_size] * (plan.steps - 1)
    assert 0 < plan.rows(Position(0, plan.steps - 1)) <= batch_size
    for epoch in (0, 1, 1 << 39):
        assert sorted(epoch_of(plan, epoch)) == list(range(samples))


@pytest.mark.parametrize(("samples", "batch_size"), SIZES)
def test_drop_last_leaves_out_what_fills_no_batch(samples, batch_size):
    """All batches are then full, and no sample comes twice."""
    plan = Plan(samples, batch_size, 0, shuffle=True, drop_last=True)
    assert plan.steps == samples // batch_size
    indices = epoch_of(plan, 3)
    assert len(indices) == len(set(indices)) == plan.steps * batch_size


def test_without_shuffling_samples_stand_in_order():
    """Every epoch has the order of the source."""
    plan = Plan(10, 4, 9, shuffle=False, drop_last=False)
    assert epoch_of(plan, 0) == epoch_of(plan, 5) == list(range(10))
    assert plan.indices(Position(2, 1), 1, 2).tolist() == [5, 6]


def test_each_epoch_and_each_seed_has_its_own_order():
    """All these orders differ from each other and from the source's order."""
    orders = [
        epoch_of(Plan(100, 10, seed, shuffle=True, drop_last=False), epoch) for seed in (0, 1) for epoch in (0, 1, 2)
    ]
    assert len({tuple(order) for order in [*orders, list(range(100))]}) == 7


def test_a_position_names_the_same_samples_for_ever():
    """Saved states depend on these samples."""
    plan = Plan(1000, 8, 42, shuffle=True, drop_last=False)
    assert plan.indices(Position(3, 5), 0, 8).tolist() == [822, 626, 212, 176, 13, 30, 779, 71]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_chunks_of_a_batch_make_up_the_batch(chunk):
    """Workers that fill rows of one batch agree, however the batch is divided."""
    plan = Plan(1000, 64, 1, shuffle=True, drop_last=False)
    whole = plan.indices(Position(1, 15), 0, plan.rows(Position(1, 15)))
    cut = [plan.indices(Position(1, 15), first, min(chunk, 40 - first)) for first in range(0, 40, chunk)]
    assert plan.rows(Position(0, 15)) == 40
    assert np.array_equal(np.concatenate(cut), whole)
    assert whole.dtype == np.int64


def test_a_batch_out_of_a_thousand_million_samples_is_at_hand():
    """The last batch of a huge epoch is computed directly, without a search."""
    plan = Plan(10**9 + 1, 256, 0, shuffle=True, drop_last=False)
    last = Position(7, plan.steps - 1)
    assert plan.rows(last) == (10**9 + 1) % 256
    indices = plan.indices(last, 0, plan.rows(last))
    assert indices.min() >= 0
    assert indices.max() <= 10**9


@pytest.mark.parametrize("samples", [2, 3, 10, 10**9])
def test_a_substitute_is_another_sample_and_always_the_same(samples):
    """The plan determines the substitute for a bad sample, not the worker that decodes it."""
    plan = Plan(samples, 1, 5, shuffle=True, drop_last=False)
    for sample in {0, 1, samples // 2, samples - 1}:
        for attempt in range(1, 20):
            other = plan.substitute(3, sample, attempt)
            assert 0 <= other < samples
            assert other != sample
            assert other == Plan(samples, 64, 5, shuffle=False, drop_last=True).substitute(3, sample, attempt)


def test_a_lonely_sample_has_no_substitute():
    """The stream of one sample returns that sample, and the caller can see that it is the same."""
    assert Plan(1, 1, 0, shuffle=False, drop_last=False).substitute(0, 0, 1) == 0


def test_substitutes_are_drawn_evenly():
    """Over epochs and attempts, no sample is a substitute more often than others."""
    plan = Plan(40, 8, 2, shuffle=True, drop_last=False)
    counts = np.zeros(40)
    for epoch in range(300):
        for attempt in range(1, 14):
            counts[plan.substitute(epoch, 17, attempt)] += 1
    assert counts[17] == 0
    others = np.delete(counts, 17)
    chi_square = float(((others - 100) ** 2 / 100).sum())
    assert abs(chi_square - 38) / sqrt(2 * 38) < 4.5


@pytest.mark.parametrize(("repeats", "alike"), [(1, 1), (1, 4), (3, 1), (2, 4)])
def test_a_batch_draws_its_size_by_seed_epoch_and_step(repeats, alike):
    """Copies of a batch and the batches of a step draw together, and all sizes are as likely."""
    plan = Plan(8000, 2, 7, shuffle=True, drop_last=False, repeats=repeats, sizes=5, alike=alike)
    block = repeats * alike
    drawn = [plan.size_of(Position(1, step)) for step in range(plan.steps)]

    assert all(len(set(drawn[first : first + block])) == 1 for first in range(0, plan.steps, block))
    shares = np.bincount(drawn[::block], minlength=5) / (plan.steps // block)
    assert np.abs(shares - 1 / 5).max() < 0.05
    others = [replace(plan, seed=8), replace(plan, samples=16000)]
    of_seed, of_more = ([other.size_of(Position(1, step)) for step in range(plan.steps)] for other in others)
    assert of_more == drawn != of_seed
    assert drawn != [plan.size_of(Position(2, step)) for step in range(plan.steps)]
    assert {plan.draw_epoch(Position(1, step)) >> SIZE_BIT for step in range(plan.steps)} == set(range(5))


def test_the_sizes_of_batches_stay_what_they_are():
    """Saved states depend on them."""
    plan = Plan(1000, 8, 42, shuffle=True, drop_last=False, sizes=11)
    assert [plan.size_of(Position(3, step)) for step in range(12)] == [10, 7, 9, 2, 4, 5, 5, 0, 5, 5, 7, 1]


@pytest.mark.parametrize(("repeats", "shuffle"), [(1, False), (1, True), (3, True)])
def test_neighbours_are_in_the_same_row_of_the_batches_before(repeats, shuffle):
    """At the beginning of an epoch also of the first ones; never the sample itself."""
    plan = Plan(23, 4, 5, shuffle, drop_last=False, repeats=repeats)
    rows = [plan.indices(Position(2, step * repeats), 0, 4).tolist() for step in range(5)]
    rows.append(plan.indices(Position(2, 5 * repeats), 0, 3).tolist())
    for step, samples in enumerate(rows):
        for row, sample in enumerate(samples):
            window = range(max(0, step - 2), max(3, step + 1))
            assert plan.neighbours(2, sample, 3) == [rows[one][row] for one in window if one != step]
            all_steps = [one[row] for number, one in enumerate(rows) if number != step and row < len(one)]
            assert plan.neighbours(2, sample, 100) == all_steps
    assert Plan(4, 4, 5, shuffle, drop_last=False).neighbours(2, 0, 3) == []
