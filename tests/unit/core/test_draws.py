"""Samples drawn by weight: in their share, for ever the same, and with all places known."""

from dataclasses import replace
from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.core.blocks import BlockOrder
from batchd.core.draws import POINT_BITS, EvenDraws, SingleDraws, bounds_of
from batchd.core.plan import Plan
from batchd_wire.position import Position

DEVIATIONS = 4.5
"""See ``test_permutation``: the keys are fixed, so the result never varies."""
KEYS = st.integers(0, (1 << 63) - 1)
WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=60).filter(any)


def plan_of(draws, rows, seed=0, *, shuffle=True, order=None):
    return Plan(rows, 4, seed, shuffle, drop_last=False, order=order, draws=draws)


def epoch_of(plan, epoch):
    positions = [Position(epoch, step) for step in range(plan.steps)]
    return np.concatenate([plan.indices(position, 0, plan.rows(position)) for position in positions])


def even(weights, rows, seed=0):
    return EvenDraws(bounds_of(np.asarray(weights, np.float64), rows), seed)


@given(weights=WEIGHTS, rows=st.integers(1, 200), seed=KEYS, epoch=st.integers(0, 1 << 40))
def test_each_sample_is_drawn_in_its_share_to_within_two(weights, rows, seed, epoch):
    """A sample of weight 0 is never drawn."""
    drawn = np.bincount(epoch_of(plan_of(even(weights, rows, seed), rows, seed), epoch), minlength=len(weights))

    expected = np.asarray(weights) * (rows / sum(weights))
    assert (np.abs(drawn - expected) < 2 + rows / (1 << 20)).all()
    assert not drawn[np.asarray(weights) == 0].any()


@given(weights=WEIGHTS, rows=st.integers(1, 80), seed=KEYS, shuffle=st.booleans(), epoch=st.integers(0, 9))
def test_all_places_of_a_sample_are_known(weights, rows, seed, shuffle, epoch):
    plan = plan_of(even(weights, rows, seed), rows, seed, shuffle=shuffle)
    drawn = epoch_of(plan, epoch)

    for sample in range(len(weights)):
        assert plan.occurrences(epoch, sample).tolist() == np.flatnonzero(drawn == sample).tolist()
    first = [list(drawn).index(sample) if sample in drawn else -1 for sample in range(len(weights))]
    assert plan.places(epoch, np.arange(len(weights))).tolist() == first


@given(samples=st.integers(1, 300), seed=KEYS, epoch=st.integers(0, 99))
def test_equal_weights_draw_each_sample_once(samples, seed, epoch):
    plan = plan_of(even([0.3] * samples, samples, seed), samples, seed)

    assert sorted(epoch_of(plan, epoch)) == list(range(samples))


def test_shares_over_many_epochs_are_the_weights():
    """The chi-squared of independent draws would be larger: strata leave less to chance."""
    weights = np.random.default_rng(1).gamma(0.5, size=500)
    draws = even(weights, 2000, 5)
    drawn = sum(np.bincount(draws.samples_of(epoch, np.arange(2000)), minlength=500) for epoch in range(500))

    expected = 500 * 2000 * weights / weights.sum()
    assert ((drawn - expected) ** 2 / expected).sum() < 500 + 2.33 * sqrt(2 * 500)  # p > 0.01
    assert (np.abs(drawn - expected) <= DEVIATIONS * np.sqrt(expected)).all()


def test_two_samples_that_share_a_draw_both_have_epochs():
    """A weight of one half is every second epoch by chance, and not by turns."""
    plan = plan_of(even([1, 1], 1), 1)
    drawn = [int(epoch_of(plan, epoch)[0]) for epoch in range(400)]

    assert abs(sum(drawn) - 200) < DEVIATIONS * 10
    changes = sum(one != other for one, other in pairwise(drawn))
    assert abs(changes - 200) < DEVIATIONS * 10


@given(
    weights=WEIGHTS.filter(lambda one: sum(map(bool, one)) > 1),
    part=st.floats(0.01, 1),
    seed=KEYS,
    epoch=st.integers(0, 9),
)
def test_without_replacement_no_sample_is_drawn_twice(weights, part, seed, epoch):
    rows = max(1, int(part * sum(map(bool, weights))))
    plan = plan_of(SingleDraws(np.asarray(weights), rows, seed), rows, seed)
    drawn = epoch_of(plan, epoch)

    assert len(set(drawn.tolist())) == rows
    assert all(weights[sample] for sample in drawn)
    for sample in range(len(weights)):
        assert plan.occurrences(epoch, sample).tolist() == np.flatnonzero(drawn == sample).tolist()


def test_without_replacement_shares_are_the_weights():
    weights = np.repeat([1.0, 2.0, 4.0], 400)
    draws = SingleDraws(weights, 120, 3)
    drawn = sum(np.bincount(draws.samples_of(epoch, np.arange(120)), minlength=1200) for epoch in range(300))

    shares = drawn.reshape(3, 400).sum(1) / (300 * 120)
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.03)


def test_without_replacement_equal_keys_are_taken_in_the_order_of_samples():
    """The sample of a tie at the end must not depend on how a library sorts."""
    draws = SingleDraws(np.full(1000, np.inf), 10, 0)  # every key is 0

    assert draws.samples_of(0, np.arange(10)).tolist() == list(range(10))


@pytest.mark.thorough
@given(weights=st.lists(st.floats(0.1, 9), min_size=12, max_size=60), seed=KEYS, epoch=st.integers(0, 9))
def test_draws_of_blocks_stay_near_each_other(weights, seed, epoch):
    """A shuffle of blocks with one open block has the draws of each block together."""
    rows, bounds = 2 * len(weights), bounds_of(np.asarray(weights), 2 * len(weights))
    starts = np.unique(np.append(0, -(-bounds[[4, 9, len(weights) - 1]] >> POINT_BITS)))
    plan = plan_of(EvenDraws(bounds, seed), rows, seed, order=BlockOrder(starts, 1, seed))
    drawn = epoch_of(plan, epoch)

    assert sorted(drawn) == sorted(epoch_of(plan_of(EvenDraws(bounds, seed), rows, seed), epoch))
    samples = [plan.draws.samples_of(epoch, np.arange(first, end)).tolist() for first, end in pairwise(starts.tolist())]
    opened = [sorted(one) for one in samples]
    begun = 0
    while opened:
        block = next(one for one in opened if sorted(drawn[begun : begun + len(one)].tolist()) == one)
        opened.remove(block)
        begun += len(block)
    assert begun == rows
    for sample in range(len(weights)):
        assert plan.occurrences(epoch, sample).tolist() == np.flatnonzero(drawn == sample).tolist()


@pytest.mark.thorough
def test_a_position_far_away_takes_no_walk():
    """10,000,000 samples: a batch of step 1,000,000 takes what a batch of step 0 takes."""
    weights = np.random.default_rng(2).gamma(0.5, size=10**7)
    plan = Plan(10**7, 10, 4, shuffle=True, drop_last=False, draws=even(weights, 10**7, 4))

    far = plan.indices(Position(7, 999_999), 0, 10)
    assert all(9_999_990 + row in plan.occurrences(7, sample) for row, sample in enumerate(far.tolist()))


def test_a_substitute_is_one_that_is_drawn():
    """A weight of 0 may be there because a file is bad."""
    plan = plan_of(even([0, 1, 0, 2, 0], 9), 9)

    assert {plan.substitute(epoch, 1, attempt) for epoch in range(9) for attempt in range(1, 9)} == {1, 3}
    assert plan.source_samples == 5


def test_neighbours_of_a_drawn_sample_are_those_of_its_first_row():
    """One that the epoch does not draw has none."""
    weights = np.arange(1, 8, dtype=np.float64)
    plan = replace(plan_of(even(weights, 12, 3), 12, 3), batch_size=5)
    for sample in range(plan.source_samples):
        places = plan.occurrences(0, sample)
        found = plan.neighbours(0, sample, 2)
        assert len(found) == (1 if len(places) else 0)
        if found:
            other = places[0] + plan.batch_size * (-1 if places[0] >= plan.batch_size else 1)
            assert found == plan.indices(Position(0, other // plan.batch_size), other % plan.batch_size, 1).tolist()
