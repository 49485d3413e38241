"""Batches of samples that are alike: each sample once, one bucket in a batch, and any position."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.core.buckets import CROPS, STARTS, TABLE, BucketOrder, OverBudget, buckets_of, crop_buckets
from batchd.core.course import Course
from batchd.core.epochs import planned
from batchd.core.plan import Plan
from batchd.worker.loop import PlannedRows
from batchd_wire.position import Position

SIZES = st.lists(st.integers(-3, 60), min_size=1, max_size=300)
BOUNDS = st.one_of(
    st.integers(2, 9), st.lists(st.integers(-5, 70), min_size=1, max_size=6, unique=True).map(sorted).map(tuple)
)
KEYS = st.integers(0, (1 << 63) - 1)


def order_of(sizes, bounds, block, seed=3):
    order = BucketOrder.from_arrays(buckets_of(np.array(sizes), bounds, block), seed)
    assert order is not None
    return order


def budget_plan(sizes, bounds, batch_size, budget, *, ranks=1, seed=3, drop_last=False):
    """A plan whose batches have as many rows as the budget holds."""
    arrays = buckets_of(np.array(sizes), bounds, batch_size, ranks, budget)
    plan = Plan(len(sizes), batch_size, seed or 0, seed is not None, drop_last)
    return planned(plan, {}, arrays)


def batches_of(plan, epoch=0):
    positions = [Position(epoch, step) for step in range(plan.steps)]
    return [plan.indices(position, 0, plan.rows(position)) for position in positions]


def epoch_of(order, epoch=0):
    return order.samples_at(epoch, np.arange(len(order.table)))


@given(
    sizes=SIZES,
    bounds=BOUNDS,
    batch_size=st.integers(1, 20),
    ranks=st.integers(1, 4),
    seed=st.one_of(KEYS, st.none()),
    epoch=st.integers(0, 1 << 40),
)
def test_every_sample_has_one_place_and_all_batches_of_a_block_are_of_one_bucket(
    sizes, bounds, batch_size, ranks, seed, epoch
):
    """Whatever the sizes are: negative, equal, or less than fill a bucket."""
    order = order_of(sizes, bounds, batch_size * ranks, seed)
    places = np.arange(len(sizes))

    samples = order.samples_at(epoch, places)

    assert np.array_equal(np.sort(samples), places)
    assert np.array_equal(order.places_of(epoch, samples), places)
    in_table = np.argsort(order.table)[samples]
    buckets = np.searchsorted(order.starts, in_table, "right") - 1
    whole = len(sizes) // (batch_size * ranks) * batch_size * ranks
    assert all(len(set(block)) == 1 for block in buckets[:whole].reshape(-1, batch_size * ranks).tolist())
    assert len(set(buckets[whole:].tolist())) <= 1


@given(sizes=SIZES, bounds=BOUNDS.filter(lambda them: isinstance(them, tuple)), block=st.integers(1, 20))
def test_no_sample_is_larger_than_the_bound_of_its_bucket(sizes, bounds, block):
    """Samples that are left over in a bucket go to the next one, where they are the smallest."""
    order = order_of(sizes, bounds, block)
    *inner, _all = order.starts[1:].tolist()

    for end in inner:
        largest, next_one = (sizes[order.table[place]] for place in (end - 1, end))
        bound = next(bound for bound in bounds if sum(size <= bound for size in sizes) // block * block == end)
        assert largest <= next_one
        assert largest <= bound
        assert sum(size <= bound for size in sizes) - end < block


@given(sizes=SIZES, bounds=BOUNDS, block=st.integers(1, 20), data=st.data())
def test_any_places_are_those_of_the_whole_epoch(sizes, bounds, block, data):
    order = order_of(sizes, bounds, block)
    chosen = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=9))

    assert order.samples_at(7, np.array(chosen)).tolist() == epoch_of(order, 7)[chosen].tolist()


@given(
    sizes=SIZES,
    bounds=BOUNDS,
    batch_size=st.integers(1, 20),
    ranks=st.integers(1, 4),
    budget=st.integers(60, 400),
    seed=st.one_of(KEYS, st.none()),
    epoch=st.integers(0, 1 << 40),
)
def test_a_batch_has_as_many_rows_as_the_budget_holds(sizes, bounds, batch_size, ranks, budget, seed, epoch):
    """Each sample once, no batch above the budget, and each place is found from its sample."""
    plan = budget_plan(sizes, bounds, batch_size, budget, ranks=ranks, seed=seed)
    order = plan.order
    steps = np.arange(plan.steps)

    batches = batches_of(plan, epoch)

    assert np.sort(np.concatenate(batches)).tolist() == list(range(len(sizes)))
    places = [step * batch_size + row for step, samples in enumerate(batches) for row in range(len(samples))]
    assert plan.places(epoch, np.concatenate(batches)).tolist() == places
    assert plan.rows_of(np.full(plan.steps, epoch), steps).tolist() == [len(samples) for samples in batches]
    assert all(len(samples) * max(sizes[sample] for sample in samples) <= budget for samples in batches)
    assert max(map(len, batches)) <= batch_size
    in_table = np.argsort(order.table)
    buckets = [np.unique(np.searchsorted(order.starts, in_table[samples], "right")).tolist() for samples in batches]
    assert all(len(of_batch) == 1 for of_batch in buckets)
    whole = (plan.steps - -(-order._rest // int(order._rows[-1]))) // ranks
    assert all(buckets[ranks * turn] == buckets[ranks * turn + ranks - 1] for turn in range(whole))


@given(sizes=SIZES, bounds=BOUNDS, batch_size=st.integers(1, 20), ranks=st.integers(1, 4), data=st.data())
def test_any_places_of_a_budget_are_those_of_the_whole_epoch(sizes, bounds, batch_size, ranks, data):
    """Workers plan rows ahead, also places that a smaller batch leaves over."""
    plan = budget_plan(sizes, bounds, batch_size, 100, ranks=ranks)
    batches, planned_rows = batches_of(plan, 7), PlannedRows(plan)
    for _order in range(5):
        step = data.draw(st.integers(0, plan.steps - 1))
        first = data.draw(st.integers(0, len(batches[step]) - 1))
        rows = range(first, data.draw(st.integers(first + 1, len(batches[step]))))
        assert planned_rows.samples(Position(7, step), rows).tolist() == batches[step][rows[0] : rows[-1] + 1].tolist()


def test_small_samples_come_in_larger_batches():
    """A budget of 64 elements; the last batch has what is left."""
    plan = budget_plan([4] * 20 + [16] * 9 + [64] * 2, (4, 16), 10, 64, seed=None)

    assert [len(samples) for samples in batches_of(plan)] == [10, 10, 4, 4, 1, 1, 1]


@pytest.mark.parametrize(("ranks", "steps"), [(1, 3), (2, 3)])
def test_drop_last_leaves_out_a_partial_batch_of_a_budget(ranks, steps):
    plan = budget_plan([8] * 31, 2, 100, 80, ranks=ranks, drop_last=True)

    assert plan.steps == steps
    assert plan.epoch_rows == sum(map(len, batches_of(plan))) == 30
    assert budget_plan([8] * 30, 2, 100, 80, ranks=ranks, drop_last=True).epoch_rows == 30


def test_the_rows_of_a_budget_fill_it():
    """Lengths as of documents: a batch has 65,536 elements with their padding, and little of it."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(500), 1.0, 40_000)).astype(np.int64).clip(1, 4096)
    plan = budget_plan(lengths, 64, 4_096, 1 << 16)

    batches = batches_of(plan)

    rooms = np.array([len(samples) * lengths[samples].max() for samples in batches])
    assert rooms.max() <= 1 << 16
    assert rooms.mean() > 0.95 * (1 << 16)
    assert lengths.sum() > 0.95 * rooms.sum()
    assert sorted(map(len, batches))[1 :: len(batches) - 2] == [16, 851]  # the last batch has fewer


def test_a_batch_of_a_budget_far_into_an_epoch_needs_no_table_of_batches():
    """Of a million samples in 240,000 batches: any batch, its rows, and the place of a sample."""
    sizes = np.random.default_rng(0).integers(1, 400, 10**6)
    plan = budget_plan(sizes, 64, 50, 1_000)
    tracemalloc.start()
    try:
        far = Position(3, plan.steps - 1_000)
        samples = plan.indices(far, 0, plan.rows(far))
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert plan.steps > 200_000
    assert peak < 1 << 20
    assert len(samples) * sizes[samples].max() <= 1_000
    assert plan.places(3, samples).tolist() == [far.step * 50 + row for row in range(len(samples))]


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=80),
    bounds=BOUNDS,
    ranks=st.integers(1, 3),
    attempt=st.integers(1, 32),
)
def test_a_substitute_fits_into_the_row_of_its_sample(sizes, bounds, ranks, attempt):
    """It is another one of the same bucket, if there is one; else, one of a smaller bucket."""
    plan = budget_plan(sizes, bounds, 12, 60, ranks=ranks)
    order, samples = plan.order, np.arange(len(sizes))
    others = plan.substitutes(np.full(len(sizes), 3), samples, attempt)
    place = np.argsort(order.table)
    buckets, of_others = (np.searchsorted(order.starts, place[which], "right") - 1 for which in (samples, others))
    alone = np.diff(order.starts)[buckets] == 1

    assert (of_others[~alone] == buckets[~alone]).all()
    assert (of_others <= buckets).all()
    assert (others != samples).all() or len(sizes) == 1
    assert others.tolist() == [plan.substitute(3, sample, attempt) for sample in samples.tolist()]
    for step in range(plan.steps):
        rows = plan.indices(Position(2, step), 0, plan.rows(Position(2, step)))
        assert set(buckets[rows].tolist()) == {plan.bucket_of(Position(2, step))}


def test_a_sample_above_the_budget_is_named():
    with pytest.raises(OverBudget) as caught:
        budget_plan([3, 9, 5], 2, 4, 8)

    assert (caught.value.item, caught.value.size) == (1, 9)


def read_the_rest(plan, world_size, read):
    """Let ranks read an epoch on behind its batches ``read``: together they have each sample."""
    for course in [Course(plan, rank, world_size, 0, len(read), 1) for rank in range(world_size)]:
        shares = [course.at(sequence) for sequence in range(course.first_rounds)]
        assert course.at(course.first_rounds) is None
        read = [*read, *(plan.indices(share.position, share.first, share.rows) for share in shares)]

    assert set(np.concatenate(read).tolist()) == set(range(1_003))


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_ranks_have_equal_steps_of_a_budget(world_size):
    """Also from the middle of an epoch on: together each sample once."""
    plan = budget_plan(np.random.default_rng(0).integers(1, 90, 1_003), 5, 40, 400)
    read = batches_of(plan)[:20]
    read_the_rest(plan, world_size, read)


def test_batches_of_all_buckets_are_mixed_and_each_epoch_has_its_own():
    """The first batches of an epoch are not those of the smallest samples."""
    sizes = np.random.default_rng(0).integers(1, 1000, 4_000)
    order = order_of(sizes, 8, 20)

    means = [sizes[epoch_of(order, epoch)].reshape(-1, 20).mean(1) for epoch in (0, 1)]

    assert all(abs(np.corrcoef(one, np.arange(200))[0, 1]) < 0.2 for one in means)
    assert (means[0] != means[1]).sum() > 190


def test_samples_of_a_bucket_meet_others_in_the_next_epoch():
    order = order_of(np.arange(4_000), 4, 10)

    def pairs(epoch):
        samples = epoch_of(order, epoch)
        return {frozenset(pair) for pair in zip(samples[:-1:2].tolist(), samples[1::2].tolist(), strict=True)}

    assert len(pairs(0) & pairs(1)) / 2_000 < 0.01


def test_without_a_shuffle_the_smallest_are_first():
    sizes = np.random.default_rng(0).integers(1, 1000, 100)

    assert np.array_equal(sizes[epoch_of(order_of(sizes, 4, 10, seed=None), 5)], np.sort(sizes))


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_ranks_have_equal_steps_and_together_each_sample_once(world_size):
    """Also where they resume in the middle of an epoch that other ranks began."""
    order = order_of(np.random.default_rng(0).integers(1, 90, 1_003), 5, 7)
    plan = Plan(1_003, 7, 3, shuffle=True, drop_last=False, order=order)
    read = [plan.indices(Position(0, step), 0, 7) for step in range(50)]
    read_the_rest(plan, world_size, read)


def test_padding_is_little_and_ranks_of_a_step_have_batches_of_the_same_length():
    """Lengths as of documents, in batches of 32; ranks wait for the longest of a step."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(500), 1.0, 40_000)).astype(np.int64).clip(1, 4096)

    def longest(count, ranks):
        return lengths[epoch_of(order_of(lengths, count, 32 * ranks))].reshape(-1, 32).max(1)

    filling = {count: 1 - lengths.sum() / 32 / longest(count, 1).sum() for count in (1, 16, 64)}
    assert filling[1] > 0.75
    assert filling[16] < 0.15
    assert filling[64] < 0.04
    costs = {ranks: longest(16, ranks)[:1248].reshape(-1, 8) ** 2.0 for ranks in (1, 8)}
    assert {ranks: round((cost.max(1) / cost.mean(1)).mean(), 2) for ranks, cost in costs.items()} == {1: 4.75, 8: 1.01}


def test_the_order_of_buckets_never_changes():
    """Saved states depend on it. A change here changes the order of users' datasets."""
    order = order_of([5, 3, 9, 1, 7, 2, 8, 6, 4, 0, 11, 10], (4, 8), 2, seed=42)

    assert epoch_of(order).tolist() == [8, 7, 9, 1, 5, 3, 6, 2, 10, 11, 0, 4]
    assert order.digest == "d467ba3cb5263024c45c34adc8b5a33b34aeeb374c05b233cd1cfcb14c1f2578"
    of_budget = budget_plan([5, 3, 9, 1, 7, 2, 8, 6, 4, 0, 11, 10], (4, 8), 4, 16, seed=42)
    assert [samples.tolist() for samples in batches_of(of_budget)] == [
        [0, 4],
        [6],
        [2],
        [10],
        [8, 7],
        [11],
        [5, 3, 9, 1],
    ]
    assert of_budget.order.digest == "67d299fc7792b631bf6c935682f19b484c8197caee094c5c94d9c9d94c9a9346"


@pytest.mark.thorough
def test_a_batch_far_into_ten_million_samples_needs_the_shared_table_alone():
    """Four bytes a sample in the index that all workers share, and no other table."""
    sizes = np.random.default_rng(0).integers(1, 4_000, 10**7)
    arrays = buckets_of(sizes, 64, 32)
    order = BucketOrder.from_arrays(arrays, 1)
    plan = Plan(10**7, 32, 1, shuffle=True, drop_last=False, order=order)
    tracemalloc.start()
    try:
        far = plan.indices(Position(0, 300_000), 0, 32)
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1 << 20
    assert sum(array.nbytes for array in arrays.values()) < 41 << 20
    assert np.ptp(sizes[far]) <= 4_000 // 64 + 2


RATIO_UNIT = 1_000_000
SIZES_OF_IMAGES = st.lists(
    st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=2, max_size=9, unique_by=lambda size: size[1] / size[0]
).map(lambda sizes: sorted(sizes, key=lambda size: size[1] / size[0]))


@given(
    ratios=st.lists(st.integers(1, 64 * RATIO_UNIT), min_size=1, max_size=200),
    sizes=SIZES_OF_IMAGES,
    batch_size=st.integers(1, 12),
    ranks=st.integers(1, 3),
)
def test_images_go_to_the_size_of_the_nearest_proportions_or_to_the_next(ratios, sizes, batch_size, ranks):
    """What fills no block of a size is less than one, and goes to the size of the next bucket."""
    arrays = crop_buckets(np.array(ratios), sizes, batch_size, ranks, RATIO_UNIT)
    plan = planned(Plan(len(ratios), batch_size, 3, shuffle=True, drop_last=False), {}, arrays)
    of_buckets = [tuple(size) for size in arrays[CROPS][:, :2].tolist()]
    nearest = [min(sizes, key=lambda size: abs(np.log(size[1] / size[0] / (ratio / RATIO_UNIT)))) for ratio in ratios]

    batches = [(plan.bucket_of(Position(0, step)), one) for step, one in enumerate(batches_of(plan))]

    assert set(of_buckets) <= set(sizes)
    assert all(one != other for one, other in pairwise(of_buckets))
    assert sorted(sample for _bucket, one in batches for sample in one.tolist()) == list(range(len(ratios)))
    assert [len(one) for _bucket, one in batches[:-1]] == [batch_size] * (len(batches) - 1)
    others = 0
    for bucket, (first, end) in enumerate(pairwise(arrays[STARTS].tolist())):
        items, (height, width) = arrays[TABLE][first:end].tolist(), of_buckets[bucket]
        others += sum(nearest[item] != (height, width) for item in items)
        kept = [min(a, b) / max(a, b) for a, b in ((ratios[item] * height, RATIO_UNIT * width) for item in items)]
        assert arrays[CROPS][bucket, 2] == pytest.approx(sum(1 - part for part in kept) * 1e6, abs=len(items))
    assert others < batch_size * ranks * len(sizes)
