"""Rows for one worker each: of streams of one order, and of samples that join those near them."""

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from support.core_invariants import CheckedWorld
from support.core_world import make_spec, pick

ORDER = {"siblings": "one", "samples": 320, "batch_size": 64, "window": 3}


def world_of(*specs, workers=2, chunk_rows_max=8):
    """Streams of these settings, each with a trainer."""
    made = [make_spec(number, **{**ORDER, **changes}) for number, changes in enumerate(specs, 1)]
    world = CheckedWorld(made, workers, chunk_rows_max)
    world.start_workers()
    return world, [one for number in world.specs for one in world.subscribe(number, session=number)]


def places_of(world, orders):
    """The place of the worker for each row, by stream and step, and whether the orders say so."""
    fleet = world.state.fleet.workers
    return {
        (one.stream, one.position.step, row): (fleet[one.worker].place, one.share)
        for one in pick(act.OrderChunk, orders)
        for row in one.rows
    }


def test_both_streams_have_each_row_made_by_the_same_worker():
    """Each worker has 32 consecutive rows in turn, from the second trainer on.

    At the end, one that has no rows of its own left makes some of the other's.
    """
    world, actions = world_of({}, {})
    first = {key for key in places_of(world, actions) if key[:2] == (1, 0)}
    places = {key: value for key, value in places_of(world, actions + world.fill_all()).items() if key not in first}

    own = {key: ((key[1] * 64 + key[2]) // 32 % 2) for key in places}
    other = [key for key, value in places.items() if value != (own[key], (own[key], 2))]
    assert {key[1] for key in other} <= {2}
    assert {places[key] for key in other} <= {(0, (0, 0)), (1, (0, 0))}
    assert len(places) == 2 * 3 * 64 - len(first)


@pytest.mark.parametrize("other", [{"siblings": "other"}, {"siblings": ""}, {"shares_caches": True}])
def test_streams_of_other_orders_are_for_any_worker(other):
    """Also those that worker hosts divide among their caches."""
    world, actions = world_of({}, other)
    assert {share for _place, share in places_of(world, actions + world.fill_all()).values()} == {(0, 0)}


def test_a_worker_without_any_own_row_makes_those_of_a_busy_one():
    """It is not told to decode for others, whose rows the busy one makes."""
    world, _actions = world_of({}, {})
    idle = min(world.workers)
    place = world.state.fleet.workers[idle].place
    taken = {}
    while world.workers[idle].orders:
        taken |= places_of(world, [one for one in world.fill(idle) if getattr(one, "worker", 0) == idle])

    of_the_other = {
        share for (_stream, step, row), (_place, share) in taken.items() if (step * 64 + row) // 32 % 2 != place
    }
    assert of_the_other == {(0, 0)}


def test_rows_of_a_dead_worker_are_made_by_the_others():
    """Until its successor is ready."""
    world, _actions = world_of({}, {})
    dead, left = sorted(world.workers)
    world.kill(dead, from_outside=True)
    world.fill_all()
    assert all(stream.delivery.ring.pending == set() for stream in world.state.streams.values())
    assert world.state.fleet.workers[left].samples == 2 * 3 * 64


def test_the_last_trainer_of_an_order_has_the_rows_of_all_workers():
    """From the next tick on, whatever was divided before."""
    world, _actions = world_of({}, {})
    world.end(2)
    world.do(ev.Ticked())
    assert {share for _place, share in places_of(world, world.fill_all()).values()} == {(0, 0)}


@pytest.mark.parametrize(("workers", "batch_size"), [(2, 64), (3, 8), (5, 2)])
def test_a_row_of_samples_that_join_near_ones_is_for_one_worker(workers, batch_size):
    """In each batch, or in every second or third one if workers are more than rows."""
    near = {"joins_near": True, "siblings": "", "batch_size": batch_size, "samples": 6 * batch_size, "window": 6}
    world, actions = world_of(near, workers=workers)
    places = places_of(world, actions + world.fill_all())

    turns = -(-workers // batch_size)
    assert len(places) == 6 * batch_size
    assert {place for place, _share in places.values()} == set(range(workers))
    for (_stream, step, row), (place, _share) in places.items():
        assert place == (step % turns * batch_size + row) * workers // (turns * batch_size)
