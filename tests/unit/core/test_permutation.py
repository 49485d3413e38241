"""The shuffle: each index once, statistically random, for every length, without memory.

The keys are fixed, so the results are, too.
"""

import tracemalloc
from itertools import pairwise, permutations
from math import factorial, sqrt

import numpy as np
import pytest

from batchd.core.plan import LENGTH_MAX, SMALL_LENGTH, Permutation

PRIMES = (5, 7, 13, 31, 61, 127, 251, 257, 509, 997, 4099, 65_537, 99_991)
POWERS = (4, 8, 9, 16, 25, 27, 49, 64, 81, 121, 125, 128, 255, 256, 512, 625, 1000, 1024, 4096, 59_049, 65_536, 100_000)
DEVIATIONS = 4.5
"""The tolerance: a good shuffle deviates by more once in 150,000 tries.

The keys are fixed, so the result never varies.
"""


def order(length: int, *key: int) -> np.ndarray:
    """Return the whole shuffle of a length."""
    return Permutation(length, key)(np.arange(length, dtype=np.uint64)).astype(np.int64)


def deviations(counts: np.ndarray, expected: float, freedom: int) -> float:
    """Return by how many standard deviations the chi-square of ``counts`` differs from its mean."""
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return (chi_square - freedom) / sqrt(2 * freedom)


@pytest.mark.parametrize("lengths", [range(1, 301), PRIMES, POWERS], ids=["small", "primes", "powers"])
def test_every_index_comes_exactly_once(lengths):
    """The shuffle of each length is a permutation, for several keys."""
    for length in lengths:
        for key in range(3):
            assert np.array_equal(np.sort(order(length, 7, key)), np.arange(length)), f"length {length}, key {key}"


def test_a_million_indices_come_exactly_once():
    """This holds for a large length that is not a round number."""
    length = 1_281_167
    seen = np.zeros(length, dtype=bool)
    seen[order(length, 0, 0)] = True
    assert seen.all()


@pytest.mark.parametrize("length", [1, 2, 97, 256, 10_007])
def test_an_index_goes_to_the_same_place_in_every_call(length):
    """Single calls, reversed calls and calls in pieces give what one whole call gives.

    The argument is not changed.
    """
    whole = order(length, 3, 1)
    permutation = Permutation(length, (3, 1))
    asked = np.arange(length, dtype=np.uint64)[::-1].copy()
    assert np.array_equal(permutation(asked), whole[::-1])
    assert asked[0] == length - 1
    for first in range(0, length, max(1, length // 7)):
        part = np.arange(first, min(length, first + 5), dtype=np.uint64)
        assert np.array_equal(permutation(part), whole[first : first + 5])


def test_the_order_of_a_key_never_changes():
    """Saved states depend on these orders.

    A change here changes the order of every user's dataset.
    """
    assert order(10, 0, 0).tolist() == [9, 8, 4, 7, 1, 0, 3, 6, 2, 5]
    assert order(1000, 1, 2)[:8].tolist() == [963, 193, 568, 150, 611, 809, 958, 599]
    far = Permutation(10**12, (3, 4))(np.array([0, 1, 10**12 - 1], dtype=np.uint64))
    assert far.tolist() == [444133121369, 123801851613, 330065936564]


@pytest.mark.parametrize("length", [0, -1, LENGTH_MAX + 1])
def test_lengths_out_of_range_are_refused(length):
    """An empty shuffle, and one that would overflow, report the permitted sizes."""
    with pytest.raises(ValueError, match="1 to 4611686018427387904"):
        Permutation(length, (0,))


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_a_tiny_length_are_equally_likely(length):
    """A dataset of a few samples gets each of its orders equally often."""
    places = {one: place for place, one in enumerate(permutations(range(length)))}
    counts, epochs = np.zeros(factorial(length)), 600
    for epoch in range(epochs):
        counts[places[tuple(order(length, 11, epoch).tolist())]] += 1
    assert abs(deviations(counts, epochs / factorial(length), factorial(length) - 1)) < DEVIATIONS


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("length", [31, 64, 100, SMALL_LENGTH - 1, SMALL_LENGTH, 289])
def test_every_index_stands_equally_often_at_every_position(length):
    """Over epochs, the table of index by position is as flat as chance allows."""
    epochs = 8 * length
    counts = np.zeros((length, length))
    for epoch in range(epochs):
        counts[np.arange(length), order(length, 5, epoch)] += 1
    assert abs(deviations(counts, epochs / length, (length - 1) ** 2)) < DEVIATIONS


@pytest.mark.parametrize("length", [31, 101, 257, 1009])
def test_neighbours_are_torn_apart(length):
    """The distance between two former neighbours is distributed as for any two indices."""
    counts = np.zeros(length)
    epochs = 40
    for epoch in range(epochs):
        where = order(length, 9, epoch)
        np.add.at(counts, (where[1:] - where[:-1]) % length, 1)
    assert counts[0] == 0
    expected = epochs * (length - 1) / (length - 1)
    assert abs(deviations(counts[1:], expected, length - 2)) < DEVIATIONS


@pytest.mark.parametrize("length", [64, 300, 5003, 100_000])
def test_epochs_and_seeds_have_nothing_to_do_with_each_other(length):
    """The orders of two epochs, or of two seeds, are uncorrelated."""
    for one, other in [((1, 0), (1, 1)), ((1, 0), (2, 0)), ((0, 1), (1, 0)), ((0, 7), (0, 1 << 40))]:
        correlation = np.corrcoef(order(length, *one), order(length, *other))[0, 1]
        assert abs(correlation) * sqrt(length) < DEVIATIONS


@pytest.mark.parametrize("length", [17, 300, 10_007])
def test_as_many_indices_stay_as_chance_would_leave(length):
    """Between epochs one index keeps its place on average, with a variance of one."""
    epochs = 400
    orders = [order(length, 13, epoch) for epoch in range(epochs + 1)]
    stay = sum(int((before == after).sum()) for before, after in pairwise(orders))
    assert abs(stay - epochs) / sqrt(epochs) < DEVIATIONS


def test_order_itself_is_no_order():
    """No index is more likely to come before a later one.

    Half of all pairs are in reverse order.
    """
    length = 512
    where = order(length, 21, 4)
    inversions = int((where[:, None] > where[None, :])[np.triu_indices(length, 1)].sum())
    pairs = length * (length - 1) / 2
    spread = sqrt(length * (length - 1) * (2 * length + 5) / 72)
    assert abs(inversions - pairs / 2) / spread < DEVIATIONS


def test_a_thousand_million_samples_take_no_memory():
    """A batch out of 10^9 costs as much as one out of 10^3, and no state is kept per sample."""
    tracemalloc.start()
    try:
        permutation = Permutation(10**9, (1, 2))
        batches = [permutation(np.arange(first, first + 256, dtype=np.uint64)) for first in range(0, 10**9, 10**8)]
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * 1024
    drawn = np.concatenate(batches)
    assert len(np.unique(drawn)) == len(drawn)
    assert drawn.max() < 10**9


def test_a_batch_of_a_huge_length_is_spread_over_all_of_it():
    """The first 4096 places of 10^9 samples come evenly from the whole range."""
    drawn = Permutation(10**9, (1, 2))(np.arange(4096, dtype=np.uint64))
    counts = np.bincount((drawn // np.uint64(10**9 // 64)).astype(np.int64), minlength=64)[:64]
    assert abs(deviations(counts, 4096 / 64, 63)) < DEVIATIONS
