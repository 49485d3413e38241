"""A mix whose shares change: each part goes on pass after pass, and any row is arithmetic."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.core.mixtures import BLOCK, Mixture, Segment, rows_of_parts
from batchd.core.plan import Plan
from batchd_wire.position import Position

KEYS = st.integers(0, (1 << 63) - 1)
SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=4)


@st.composite
def mixtures(draw):
    """Return a mixture of small parts with some changes, and its rows in an epoch."""
    sizes, rows = draw(SIZES), draw(st.integers(1, 120))
    share = st.lists(st.one_of(st.just(0.0), st.floats(0.01, 9)), min_size=len(sizes), max_size=len(sizes)).filter(any)
    firsts = [0, *sorted(draw(st.sets(st.integers(1, 300), max_size=3)))]
    segments = [Segment(first, draw(share)) for first in firsts]
    return Mixture(sizes, segments, rows, draw(KEYS), shuffle=draw(st.booleans())), sizes, segments, rows


def run_of(mixture, rows, epochs):
    return np.concatenate([mixture.samples_at(epoch, np.arange(rows)) for epoch in range(epochs)])


@given(mixtures())
def test_each_segment_has_its_shares(made):
    mixture, sizes, segments, rows = made
    run = run_of(mixture, rows, 4)
    parts = np.searchsorted(np.cumsum(sizes), run, "right")
    for segment, after in zip(segments, [*segments[1:], None], strict=True):
        if after is not None and after.first <= len(run):
            counts = np.bincount(parts[segment.first : after.first], minlength=len(sizes))
            assert counts.tolist() == rows_of_parts(segment.shares, after.first - segment.first)
        unused = np.flatnonzero(np.asarray(segment.shares) == 0)
        assert not np.isin(parts[segment.first : None if after is None else after.first], unused).any()


@given(sizes=SIZES, length=st.integers(1, 400), seed=KEYS, shuffle=st.booleans())
def test_each_pass_of_a_part_has_each_sample_once(sizes, length, seed, shuffle):
    """Over a whole segment, whose end is the end of its last block."""
    segments = [Segment(0, [1.0] * len(sizes)), Segment(length, [1.0, *[0.0] * (len(sizes) - 1)])]
    run = Mixture(sizes, segments, length, seed, shuffle=shuffle).samples_at(0, np.arange(length))
    first = np.cumsum([0, *sizes])
    for part, size in enumerate(sizes):
        counts = np.bincount(run[(run >= first[part]) & (run < first[part + 1])] - first[part], minlength=size)
        assert counts.max() - counts.min() <= 1


@pytest.mark.thorough
@given(mixtures())
def test_all_places_of_a_sample_are_known(made):
    mixture, sizes, _segments, rows = made
    for epoch in (0, 3):
        drawn = mixture.samples_at(epoch, np.arange(rows))
        for sample in range(sum(sizes)):
            assert mixture.occurrences(epoch, sample).tolist() == np.flatnonzero(drawn == sample).tolist()


@given(mixtures(), st.lists(st.integers(0, 10**6), min_size=1, max_size=9))
def test_rows_do_not_depend_on_what_is_asked_together(made, places):
    mixture, _sizes, _segments, rows = made
    asked = np.asarray([place % rows for place in places])

    together = mixture.samples_at(2, asked)

    assert together.tolist() == [int(mixture.samples_at(2, asked[n : n + 1])[0]) for n in range(len(asked))]


@given(shares=st.lists(st.floats(0, 100), min_size=1, max_size=9).filter(any), rows=st.integers(0, 5000))
def test_rows_are_dealt_as_the_shares_say(shares, rows):
    counts = rows_of_parts(shares, rows)

    assert sum(counts) == rows
    used = sum(share > 0 for share in shares)
    exact = [rows * share / sum(shares) for share in shares]
    assert all(abs(count - one) < 1 + used for count, one in zip(counts, exact, strict=True))
    assert all(bool(count) == bool(share) for count, share in zip(counts, shares, strict=True)) or rows < used
    assert not any(count for count, share in zip(counts, shares, strict=True) if not share)


def test_a_change_is_at_its_row_in_any_epoch_without_a_walk():
    """Epochs of 10,000,000 rows; the change is in the third."""
    first = 2 * 10**7 + 123_457
    mixture = Mixture([5_000_000, 700_000_000], [Segment(0, [1, 0]), Segment(first, [0, 1])], 10**7, 5, shuffle=True)

    around = mixture.samples_at(2, np.arange(123_450, 123_470))
    assert (around < 5_000_000).tolist() == [True] * 7 + [False] * 13
    assert mixture.occurrences(2, int(around[0])).tolist().count(123_450) == 1


def test_without_a_shuffle_every_stretch_has_its_shares():
    mixture = Mixture([100, 100, 100], [Segment(0, [3, 2, 1])], 600, 0, shuffle=False)
    parts = mixture.samples_at(0, np.arange(600)) // 100

    for begin in range(0, 600, 60):
        assert np.bincount(parts[begin : begin + 60], minlength=3) == pytest.approx([30, 20, 10], abs=1)
    assert mixture.share_at(0) == pytest.approx([1 / 2, 1 / 3, 1 / 6], abs=1 / BLOCK)


def test_a_plan_of_a_mixture_counts_the_rows_of_an_epoch():
    mixture = Mixture([3, 4], [Segment(0, [1, 1])], 10, 0, shuffle=True)
    plan = Plan(10, 4, 0, shuffle=True, drop_last=False, order=mixture)

    assert (plan.steps, plan.source_samples) == (3, 7)
    drawn = [plan.indices(Position(1, step), 0, plan.rows(Position(1, step))).tolist() for step in range(3)]
    assert list(chain(*drawn)) == mixture.samples_at(1, np.arange(10)).tolist()
    assert all(0 <= plan.substitute(1, sample, 1) < 7 for sample in range(7))
