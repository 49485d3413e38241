"""Rows cut from all documents as one sequence: no element lost, all rows full, any position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.core.buckets import BucketOrder, buckets_of
from batchd.core.packs import STRIDE, Cuts, packed_in
from batchd.data.pipeline.shapes.options import Pack

LENGTHS = st.lists(st.integers(-2, 70), min_size=1, max_size=200).filter(lambda them: max(them) > 0)
ROOM = st.integers(1, 40)


def elements_of(parts):
    """Every (sample, element) of some parts, in order."""
    return [
        (sample, element) for _row, sample, first, count in parts.tolist() for element in range(first, first + count)
    ]


@given(lengths=LENGTHS, room=ROOM, seed=st.integers(0, 99), shuffle=st.booleans(), epoch=st.integers(0, 9))
def test_each_epoch_has_each_element_once_and_all_rows_but_one_are_full(lengths, room, seed, shuffle, epoch):
    """Bad and empty samples are in no row."""
    cuts = Cuts.plan(np.array(lengths), room, seed, shuffle=shuffle)

    parts = cuts.contents(epoch, np.arange(len(cuts)), seed, shuffle=shuffle)

    found = elements_of(parts)
    assert sorted(found) == [(sample, at) for sample, length in enumerate(lengths) for at in range(length)]
    used = np.bincount(parts[:, 0], parts[:, 3])
    assert sorted(used)[1:] == [room] * (len(cuts) - 1)
    assert (parts[:, 3] > 0).all()
    if not shuffle:
        assert found == sorted(found)
    documents, costs = cuts.documents_and_costs()
    assert np.array_equal(np.sort(documents), np.sort(np.bincount(parts[:, 0])))
    assert np.array_equal(np.sort(costs), np.sort(np.bincount(parts[:, 0], parts[:, 3] ** 2.0)))


@given(lengths=LENGTHS, room=ROOM, data=st.data())
def test_a_row_can_be_had_without_the_rows_before_it(lengths, room, data):
    cuts = packed_in(Cuts.plan(np.array(lengths), room, 5, shuffle=True).to_arrays())
    whole = cuts.contents(3, np.arange(len(cuts)), 5, shuffle=True)
    chosen = data.draw(st.lists(st.integers(0, len(cuts) - 1), min_size=1, max_size=4))

    found = cuts.contents(3, np.array(chosen), 5, shuffle=True)

    for place, row in enumerate(chosen):
        assert found[found[:, 0] == place, 1:].tolist() == whole[whole[:, 0] == row, 1:].tolist()


@given(lengths=LENGTHS, room=ROOM, seed=st.integers(0, 99), shuffle=st.booleans(), epochs=st.sets(st.integers(0, 9)))
def test_the_rows_of_each_sample_are_those_that_contain_it(lengths, room, seed, shuffle, epochs):
    """The inverse of the contents of all rows, in several epochs at once."""
    cuts, samples = Cuts.plan(np.array(lengths), room, seed, shuffle=shuffle), np.arange(len(lengths))
    asked = [np.repeat(sorted(epochs), len(lengths)), np.tile(samples, len(epochs))]

    found = cuts.places(*asked, seed, shuffle=shuffle)

    for number, epoch in enumerate(sorted(epochs)):
        whole = cuts.contents(epoch, np.arange(len(cuts)), seed, shuffle=shuffle)
        here = found[found[:, 0] // len(lengths) == number] - [number * len(lengths), 0, 0]
        assert sorted(here[:, [1, 0, 2]].tolist()) == sorted(whole[:, :3].tolist())
    assert len(found) == len(epochs) * cuts.parts_of(samples, seed).sum()


def test_the_rows_of_a_sample_are_found_in_the_order_of_buckets_and_behind_many_documents():
    """Far behind the first stride of documents, and where rows of a step have similar costs."""
    cuts = Cuts.plan(np.random.default_rng(0).integers(0, 90, 5 * STRIDE), 100, 3, shuffle=True)
    order = BucketOrder.from_arrays(buckets_of(cuts.documents_and_costs()[1], 64, 8), 0)
    samples = np.array([7, 5 * STRIDE - 1, 3 * STRIDE])

    found = cuts.places(np.array([1, 1, 0]), samples, 3, shuffle=True, order=order)

    for which, row, first in found.tolist():
        parts = cuts.contents(0 if which == 2 else 1, np.array([row]), 3, shuffle=True, order=order)
        assert [samples[which], first] in parts[:, 1:3].tolist()
    assert np.array_equal(np.bincount(found[:, 0], minlength=3), cuts.parts_of(samples, 3))


def test_rows_far_behind_many_documents_are_found_by_their_sums():
    """Also where whole strides of documents have no element."""
    lengths = np.random.default_rng(0).integers(0, 9, 20 * STRIDE)
    lengths[3 * STRIDE : 6 * STRIDE] = 0
    cuts = Cuts.plan(lengths, 100, 1, shuffle=False)

    parts = cuts.contents(0, np.array([len(cuts) // 3, len(cuts) - 1]), 1, shuffle=False)

    begins = np.cumsum(lengths) - lengths
    for place, row in enumerate((len(cuts) // 3, len(cuts) - 1)):
        mine = parts[parts[:, 0] == place]
        at = begins[mine[:, 1]] + mine[:, 2]
        assert at[0] == 100 * row
        assert np.array_equal(at[1:], at[:-1] + mine[:-1, 3])


def test_rows_of_a_step_can_have_nearly_the_same_cost():
    lengths = np.exp(np.random.default_rng(0).normal(np.log(500), 1.0, 20_000)).astype(np.int64).clip(1, 4096)
    cuts = Cuts.plan(lengths, 4096, 0, shuffle=True)
    order = BucketOrder.from_arrays(buckets_of(cuts.documents_and_costs()[1], 64, 8), 0)

    parts = cuts.contents(0, np.arange(len(cuts)), 0, shuffle=True, order=order)

    costs = np.bincount(parts[:, 0], parts[:, 3] ** 2.0)
    steps = costs[: len(costs) // 8 * 8].reshape(-1, 8)
    assert (steps.max(1) / steps.mean(1)).mean() < 1.1


def test_the_order_of_rows_never_changes():
    """Saved positions mean them."""
    cuts = Cuts.plan(np.array([5, 3, 9, 1, 7]), 10, 42, shuffle=True)

    assert cuts.contents(1, np.arange(3), 42, shuffle=True).tolist() == [
        [0, 1, 0, 3],
        [0, 2, 0, 7],
        [1, 2, 7, 2],
        [1, 3, 0, 1],
        [1, 0, 0, 5],
        [1, 4, 0, 2],
        [2, 4, 2, 5],
    ]


def test_samples_without_an_element_make_no_row():
    with pytest.raises(ValueError, match="no sample has an element"):
        Cuts.plan(np.array([0, -1]), 10, 0, shuffle=True)


def test_the_table_takes_four_bytes_a_document():
    arrays = Cuts.plan(np.full(100_000, 700), 4096, 0, shuffle=True).to_arrays()

    assert sum(array.nbytes for array in arrays.values()) <= 4 * 100_000 + 4096


@pytest.mark.parametrize("options", [{"too_long": "drop"}, {"window": 5}])
def test_options_of_the_other_method_are_refused(options):
    with pytest.raises(ValueError, match='count only with method = "best-fit"'):
        Pack(field="tokens", length=8, method="concat-split", **options)
