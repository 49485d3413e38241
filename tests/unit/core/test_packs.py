"""The packs of an epoch: every document once, no row too long, any position by itself."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.core.buckets import BucketOrder, BucketSizes, buckets_of
from batchd.core.packs import Cuts, PackLimits, Packs
from batchd.stream.grouping import BALANCE_BUCKETS

ROOM = 64
LENGTHS = st.lists(st.one_of(st.integers(-1, 3 * ROOM), st.just(-(1 << 62))), min_size=1, max_size=700).filter(
    lambda them: max(them) > 0
)


def limits_of(documents=ROOM, window=100, too_long="split"):
    return PackLimits(ROOM, documents, window, too_long)


def contents(packs, epoch=0, seed=3, *, shuffle=True):
    return packs.contents(epoch, np.arange(len(packs)), seed, shuffle=shuffle)


def pieces_of(lengths, too_long):
    """The parts (sample, first element) that an epoch must have, and the length of each."""
    found = {}
    for sample, length in enumerate(lengths):
        if too_long == "split":
            found |= {(sample, first): min(ROOM, length - first) for first in range(0, length, ROOM)}
        elif length > 0 and (length <= ROOM or too_long == "crop"):
            found[sample, 0] = min(ROOM, length)
    return found


@given(LENGTHS, st.sampled_from(["split", "crop", "drop"]), st.integers(1, ROOM), st.integers(1, 300), st.booleans())
def test_each_epoch_has_each_document_once_and_no_row_is_too_long(lengths, too_long, documents, window, shuffle):
    """Long documents are split, cropped or left out; empty ones and bad ones are in no row."""
    wanted = pieces_of(lengths, too_long)
    limits = limits_of(documents, window, too_long)
    if not wanted:
        with pytest.raises(ValueError, match="no sample has a length"):
            Packs.plan(np.array(lengths), limits)
        return
    packs = Packs.plan(np.array(lengths), limits)

    for epoch in range(2):
        found = contents(packs, epoch, shuffle=shuffle)
        parts = [(sample, first) for _pack, sample, first in found.tolist()]
        assert sorted(parts) == sorted(wanted)
        used = np.bincount(found[:, 0], weights=[wanted[part] for part in parts], minlength=len(packs))
        assert used.max() <= ROOM
        assert np.bincount(found[:, 0]).max() <= documents
    assert packs.elements == sum(wanted.values())
    assert packs.parts == len(wanted)


@given(LENGTHS, st.integers(0, 5), st.data())
def test_a_row_can_be_had_without_the_rows_before_it(lengths, epoch, data):
    """Any rows, in any order and number, are those of the whole epoch."""
    packs = Packs.plan(np.array(lengths), limits_of(window=40))
    whole = contents(packs, epoch)
    chosen = data.draw(st.lists(st.integers(0, len(packs) - 1), min_size=1, max_size=5))

    found = packs.contents(epoch, np.array(chosen), 3, shuffle=True)

    for place, pack in enumerate(chosen):
        assert found[found[:, 0] == place, 1:].tolist() == whole[whole[:, 0] == pack, 1:].tolist()


@given(LENGTHS)
def test_packs_are_the_same_after_a_way_through_an_index(lengths):
    packs = Packs.plan(np.array(lengths), limits_of())

    again = Packs.from_arrays(packs.to_arrays())

    assert again is not None
    assert (len(again), again.parts, again.elements) == (len(packs), packs.parts, packs.elements)
    assert np.array_equal(contents(again, 4), contents(packs, 4))
    assert Packs.from_arrays({"other": np.zeros(3)}) is None


def log_normal(samples):
    """Lengths as of documents: median 500, at most 4,096."""
    drawn = np.exp(np.random.default_rng(0).normal(np.log(500), 1.0, samples)).astype(np.int64)
    return drawn.clip(1, 4096)


@pytest.mark.parametrize(("samples", "window", "most"), [(40_000, 4096, 0.01), (200_000, 4096, 0.003)])
def test_little_room_is_left_empty(samples, window, most):
    """With so many documents in a window, half a percent and less; a padded batch leaves 80 %."""
    packs = Packs.plan(log_normal(samples), PackLimits(4096, 256, window, "split"))

    assert 1 - packs.elements / (len(packs) * 4096) < most


@given(st.lists(st.tuples(st.integers(0, ROOM), st.integers(0, 20)), min_size=1, max_size=400), st.integers(1, 60))
def test_no_row_has_more_of_a_second_length_than_it_may(sizes, window):
    """As of the patches of images; a document that has more is in no row."""
    lengths, patches = np.array(sizes).T
    limits = PackLimits(ROOM, ROOM, window, "drop", patches=16)
    wanted = np.flatnonzero((lengths > 0) & (patches <= 16))
    if not wanted.size:
        with pytest.raises(ValueError, match="no sample has a length"):
            Packs.plan(lengths, limits, patches)
        return
    packs = Packs.plan(lengths, limits, patches)

    found = contents(packs)
    assert sorted(found[:, 1].tolist()) == wanted.tolist()
    assert np.bincount(found[:, 0], weights=lengths[found[:, 1]]).max() <= ROOM
    assert np.bincount(found[:, 0], weights=patches[found[:, 1]]).max() <= 16


def test_other_documents_share_a_row_in_the_next_epoch():
    """Few of the pairs in one row meet again, although the lengths in a row stay the same."""
    packs = Packs.plan(log_normal(40_000), PackLimits(4096, 256, 4096, "split"))

    def pairs(epoch):
        found = contents(packs, epoch, seed=0)
        neighbours = found[1:, 0] == found[:-1, 0]
        return {frozenset(pair) for pair in zip(found[1:, 1][neighbours], found[:-1, 1][neighbours], strict=True)}

    first, second = pairs(0), pairs(1)
    assert len(first & second) / len(first) < 2 / 16


@pytest.mark.parametrize("rows", [1, 4])
def test_ranks_of_a_step_have_rows_of_nearly_the_same_cost(rows):
    """Attention costs the square of a length; at random, the most is over twice the mean."""
    lengths = log_normal(40_000)
    packs = Packs.plan(lengths, PackLimits(4096, 256, 4096, "split"))
    buckets = buckets_of(packs.attention(lengths, 4096), BALANCE_BUCKETS, 8 * rows)
    balanced = BucketOrder.from_arrays(buckets, 3)

    def excess(order):
        found = packs.contents(5, np.arange(len(packs)), 3, shuffle=True, order=order)
        assert np.array_equal(np.sort(found[:, 1]), np.arange(40_000))
        costs = np.bincount(found[:, 0], lengths[found[:, 1]] ** 2.0)
        of_steps = costs[: len(packs) // (8 * rows) * 8 * rows].reshape(-1, 8, rows).sum(2)
        return (of_steps.max(1) / of_steps.mean(1)).mean()

    found = packs.contents(5, np.arange(40), 3, shuffle=True, order=balanced)
    places = packs.places(np.array([5]), found[:, 1], 3, shuffle=True, order=balanced)
    assert places[:, 1].tolist() == found[:, 0].tolist()
    assert excess(balanced) <= 1.04
    assert excess(None) >= 1.5
    if rows == 1:
        sizes = BucketSizes(buckets)
        assert sizes.mean_largest / sizes.mean == pytest.approx(excess(balanced), abs=0.02)
        assert sizes.largest_of(8) / sizes.mean == pytest.approx(excess(None), rel=0.05)


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone():
    """These numbers must never change: saved positions mean them."""
    packs = Packs.plan(log_normal(5_000), PackLimits(4096, 256, 512, "split"))

    assert len(packs) == 976
    assert packs.contents(0, np.array([5, 400]), 7, shuffle=True).tolist() == [
        [0, 4212, 0],
        [0, 3204, 0],
        [0, 4649, 0],
        [1, 1567, 0],
        [1, 2747, 0],
    ]
    assert packs.contents(1, np.array([5]), 7, shuffle=True)[:, 1].tolist() == [2059, 1500, 3728]
    assert packs.contents(0, np.array([5]), 8, shuffle=True)[:, 1].tolist() == [4154, 373, 3651]


def test_the_table_takes_four_bytes_a_document():
    """So ten million documents take 40 MB, which all workers share."""
    lengths = log_normal(100_000)
    arrays = Packs.plan(lengths, PackLimits(4096, 256, 4096, "split")).to_arrays()

    assert sum(array.nbytes for array in arrays.values()) <= 4 * len(lengths) + 64 * 1024


def many_packs():
    """Ten million documents of 2,048 elements, of which two are in each row of 4,096."""
    strata, windows = 4_000, 2_500
    return Packs(
        np.arange(10**7, dtype=np.int32),
        np.zeros((0, 2), np.int64),
        np.array([windows, 2_048 * 10**7]),
        np.arange(strata, dtype=np.int32),
        np.arange(0, strata + 1, 2),
    )


@pytest.mark.parametrize(
    "make", [many_packs, lambda: Cuts.plan(np.full(10**7, 2_048), 4_096, 3, shuffle=False)], ids=["packs", "cuts"]
)
def test_rows_far_into_ten_million_documents_need_the_shared_table_alone(make):
    """At step 1,000,000 of batches of four rows; the memory is that of a batch."""
    packs = make()
    rows = 4 * 10**6 + np.arange(4)
    tracemalloc.start()
    try:
        parts = packs.contents(2, rows, 3, shuffle=True)
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(packs) == 5 * 10**6
    assert peak < 1 << 20
    assert np.bincount(parts[:, 0]).tolist() == [2] * 4
    assert len(set(parts[:, 1].tolist())) == 8
