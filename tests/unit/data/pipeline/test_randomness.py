"""The random numbers of one sample depend on (seed, epoch, sample, attempt) and on nothing else."""

import itertools

import numpy as np
import pytest

from batchd.core.plan import Plan
from batchd.data.pipeline.randomness import NUMBER_MAX, SampleRandom
from batchd_wire.position import Position


def numbers(seed=0, epoch=0, sample=0, attempt=0, count=8):
    """Draw with a new generator."""
    random = SampleRandom(seed)
    random.start(epoch, sample, attempt)
    return [random.random() for _ in range(count)]


def test_a_sample_draws_the_same_numbers_whatever_was_drawn_before():
    """Any number of draws of any kind by other samples leaves no trace."""
    random = SampleRandom(7)
    for other, draws in enumerate((0, 1, 3, 50)):
        random.start(5, other, 0)
        for _ in range(draws):
            random.random()
        random.generator.integers(0, 10, dtype=np.uint32)  # leaves half a number behind
        random.start(2, 41, 0)

        assert numbers(seed=7, epoch=2, sample=41) == [random.random() for _ in range(8)]


def test_seed_epoch_sample_and_attempt_each_change_all_numbers():
    """No two of the streams share a number, at either end of each range."""
    values = {"seed": (0, 1, NUMBER_MAX), "epoch": (0, 1, 2**40), "sample": (0, 1, 10**9), "attempt": (0, 1, 7)}
    streams = [numbers(**dict(zip(values, which, strict=True))) for which in itertools.product(*values.values())]

    drawn = [number for stream in streams for number in stream]

    assert len(set(drawn)) == len(drawn)


def test_the_stream_is_numpys_philox_at_the_documented_counter():
    """Another program can compute the same numbers from the drawing in the module."""
    reference = np.random.Generator(
        np.random.Philox(key=np.array([3, 0x6261746368640001], np.uint64), counter=[0, 1, 5, 9])
    )

    assert reference.random(8).tolist() == numbers(seed=3, attempt=1, epoch=5, sample=9)


def test_copies_of_a_sample_draw_other_numbers_and_the_first_those_of_a_sample_without():
    """The copy stands above the epoch in the counter, as the drawing has it."""
    plan = Plan(40, 4, 0, shuffle=True, drop_last=False, repeats=3)
    drawn = [numbers(epoch=plan.draw_epoch(Position(5, step)), sample=9) for step in (6, 7, 8)]
    reference = np.random.Generator(
        np.random.Philox(key=np.array([0, 0x6261746368640001], np.uint64), counter=[0, 0, 2 << 48 | 5, 9])
    )

    assert drawn[0] == numbers(epoch=5, sample=9)
    assert drawn[2] == reference.random(8).tolist()
    assert len({number for each in drawn for number in each}) == 24


def test_numbers_across_samples_and_epochs_are_uniform_and_uncorrelated():
    """First draws of neighbouring samples and epochs look independent."""
    random = SampleRandom(1)
    first = np.empty((2, 20_000))
    for epoch, sample in itertools.product(range(2), range(20_000)):
        random.start(epoch, sample, 0)
        first[epoch, sample] = random.random()

    counts = np.histogram(first, bins=50, range=(0, 1))[0]

    assert ((counts - 800) ** 2 / 800).sum() < 85  # chi-square of 49 degrees: 99.9 % are below
    assert abs(np.corrcoef(first[0], first[1])[0, 1]) < 0.03
    assert abs(np.corrcoef(first[0, :-1], first[0, 1:])[0, 1]) < 0.03


def test_a_seed_outside_the_range_is_our_own_mistake():
    """The configuration has rejected such a seed before."""
    for seed in (-1, NUMBER_MAX + 1):
        with pytest.raises(AssertionError, match="seed"):
            SampleRandom(seed)
