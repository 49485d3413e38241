"""The shuffle of blocks: each sample once, near its neighbours, and at random within that."""

import tracemalloc
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.core.blocks import BlockOrder
from batchd.core.epochs import FACT, STARTS, planned
from batchd.core.plan import LENGTH_MAX, Permutation, Plan
from batchd_wire.position import Position

DEVIATIONS = 4.5
"""See ``test_permutation``: the keys are fixed, so the result never varies."""
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
KEYS = st.integers(0, (1 << 63) - 1)


def starts_of(lengths: list[int]) -> np.ndarray:
    """Return the first sample of each block, and the number of all samples."""
    return np.cumsum([0, *lengths])


def order_of(order: BlockOrder, epoch: int) -> np.ndarray:
    """Return all samples of an epoch in order."""
    return order.samples_at(epoch, np.arange(order.samples))


@given(length=st.integers(1, LENGTH_MAX), key=KEYS, chance=st.randoms(use_true_random=False))
def test_the_inverse_of_a_permutation_leads_back(length, key, chance):
    """This holds for any length and both ends of it."""
    indices = np.array([0, length - 1, *(chance.randrange(length) for _ in range(20))], np.uint64)
    permutation = Permutation(length, (key, 3))

    assert np.array_equal(permutation.inverse(permutation(indices)), indices)
    assert np.array_equal(permutation(permutation.inverse(indices)), indices)


@given(lengths=LENGTHS, open_blocks=st.integers(1, 70), seed=KEYS, epoch=st.integers(0, 1 << 40))
def test_every_sample_has_one_place_and_its_place_is_known(lengths, open_blocks, seed, epoch):
    """No sample is lost or repeated, whatever the lengths of the blocks."""
    order = BlockOrder(starts_of(lengths), open_blocks, seed)
    places = np.arange(sum(lengths))

    samples = order.samples_at(epoch, places)

    assert np.array_equal(np.sort(samples), places)
    assert np.array_equal(order.places_of(epoch, samples), places)


@given(lengths=LENGTHS, open_blocks=st.integers(1, 70), seed=KEYS)
def test_only_so_many_blocks_are_open_at_any_place(lengths, open_blocks, seed):
    """A block is first read after an earlier window is done, and its window has few blocks."""
    starts = starts_of(lengths)
    blocks = np.searchsorted(starts, order_of(BlockOrder(starts, open_blocks, seed), 1), "right") - 1
    first = {block: int(np.flatnonzero(blocks == block)[0]) for block in range(len(lengths))}
    last = {block: int(np.flatnonzero(blocks == block)[-1]) for block in range(len(lengths))}

    for place in range(len(blocks)):
        assert sum(first[block] <= place <= last[block] for block in first) <= open_blocks


@given(
    lengths=LENGTHS,
    kind=st.sampled_from(["order", "all", "blocks"]),
    batch_size=st.integers(1, 50),
    seed=KEYS,
    epoch=st.integers(0, 9),
)
def test_a_plan_knows_the_place_of_each_sample(lengths, kind, batch_size, seed, epoch):
    """The place gives step and row, for each kind of order."""
    order = BlockOrder(starts_of(lengths), 3, seed) if kind == "blocks" else None
    plan = Plan(sum(lengths), batch_size, seed, kind != "order", drop_last=False, order=order)

    batches = [plan.indices(Position(epoch, step), 0, plan.rows(Position(epoch, step))) for step in range(plan.steps)]
    assert np.array_equal(plan.places(epoch, np.concatenate(batches)), np.arange(plan.samples))


def test_the_order_of_blocks_never_changes():
    """Saved states depend on it. A change here changes the order of users' datasets."""
    order = BlockOrder(starts_of([3, 5, 2, 7, 4, 6]), 2, 42)

    samples = " ".join(map(str, order_of(order, 0).tolist()))
    assert samples == "5 15 11 16 7 6 4 14 3 13 12 10 1 24 25 21 0 23 26 22 2 20 9 19 18 17 8"
    assert order.digest == "8a53cac8f3e2021a5a22b3b42f82e4a5b6989ae40ac62212f88f712610f35b75"


def test_each_epoch_and_each_seed_has_its_own_order_of_blocks():
    """All orders differ."""
    starts = starts_of([8] * 32)
    orders = {tuple(order_of(BlockOrder(starts, 4, seed), epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}

    assert len(orders) == 6


def test_samples_of_a_window_stand_equally_often_at_each_of_its_places():
    """Over epochs, the table of sample by place is as flat as chance allows."""
    order, epochs = BlockOrder(starts_of([4] * 16), 16, 5), 400
    counts = np.zeros((64, 64))
    for epoch in range(epochs):
        counts[np.arange(64), order_of(order, epoch)] += 1
    chi_square = float(((counts - epochs / 64) ** 2 / (epochs / 64)).sum())

    assert abs(chi_square - 63**2) / sqrt(2 * 63**2) < DEVIATIONS


@pytest.mark.thorough
def test_blocks_are_equally_often_in_each_window():
    """Two blocks are in one window as often as any two others."""
    order, epochs, blocks = BlockOrder(starts_of([3] * 40), 5, 6), 250, 40
    together = np.zeros((blocks, blocks))
    for epoch in range(epochs):
        windows = np.empty(blocks, np.int64)
        windows[order_of(order, epoch) // 3] = np.arange(120) // 15
        together += windows[:, None] == windows[None, :]
    found = together[np.triu_indices(blocks, 1)]
    expected = epochs * 4 / 39
    chi_square = float(((found - expected) ** 2 / (expected * (1 - 4 / 39))).sum())

    assert abs(chi_square - len(found)) / sqrt(2 * len(found)) < DEVIATIONS


def test_a_batch_far_into_ten_million_samples_needs_the_table_of_blocks_alone():
    """The memory is that of the blocks, not of the samples, and a position needs no earlier one."""
    order = BlockOrder(np.arange(0, 10**7 + 1, 100), 64, 1)
    plan = Plan(10**7, 10, 1, shuffle=True, drop_last=False, order=order)
    tracemalloc.start()
    try:
        far = plan.indices(Position(0, 999_999), 0, 10)
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 20 * 8 * order.blocks
    assert len(set((far // 100).tolist())) > 5
    assert plan.places(0, far).tolist() == list(range(9_999_990, 10**7))


def test_an_index_describes_the_order():
    """Workers make it from the index that they get; an index without one has none."""
    starts = starts_of([3, 5, 2])
    plan = Plan(10, 4, 9, shuffle=True, drop_last=False)
    order = planned(plan, {FACT: {"open_blocks": 2}}, {STARTS: starts}).order

    assert order is not None
    assert order_of(order, 4).tolist() == order_of(BlockOrder(starts, 2, 9), 4).tolist()
    assert planned(plan, {}, {}).order is None


def test_blocks_and_their_number_are_in_the_digest():
    """The seed is in the fingerprint by itself."""
    digests = {BlockOrder(starts_of(lengths), k, 0).digest for lengths in ([2, 2], [1, 3], [4]) for k in (1, 2)}

    assert len(digests) == 6
