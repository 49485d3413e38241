"""Lockstep: no trainer runs ahead of the slowest, and none waits for a disconnected trainer."""

import random

import pytest

from batchd_wire.codes import ErrorCode
from support.core_invariants import CheckedWorld
from support.core_world import make_spec


def world_of(**changes) -> CheckedWorld:
    """Make one stream in lockstep, at most two batches apart, and one worker."""
    world = CheckedWorld([make_spec(**({"max_skew": 2, "samples": 300, "window": 5} | changes))])
    world.start_workers()
    return world


def read_all(world: CheckedWorld, number: int) -> int:
    """Read all available batches and return the total number of batches handed over."""
    for _ in range(10):
        world.fill_all()
        world.pull(number, release=max(0, len(world.trainers[number].leases) - 1))
    return world.trainers[number].granted


def test_a_fast_trainer_waits_for_the_slowest():
    """With the slowest at batch 0, it may read up to batch 2, and one more for each step."""
    world = world_of()
    world.subscribe(session=1)
    world.subscribe(session=2)
    assert read_all(world, 1) == 3
    for taken in range(1, 4):
        world.pull(2, consume=1, waiting=False)
        assert read_all(world, 1) == 3 + taken


def test_a_trainer_alone_is_its_own_slowest():
    """A single trainer reads without waiting for lockstep."""
    world = world_of(max_skew=1)
    world.subscribe()
    for _ in range(20):
        world.fill_all()
        world.pull(1)
    assert world.trainers[1].granted >= 20


@pytest.mark.parametrize("leaving", ["ends", "dies", "is over"])
def test_no_trainer_waits_for_one_that_wants_no_more(leaving):
    """A trainer that ended its claim, died or reached its end holds back no other trainer."""
    world = world_of()
    world.subscribe(session=1)
    world.subscribe(session=2, end_epoch=0 if leaving == "is over" else None)
    if leaving == "ends":
        assert read_all(world, 1) == 3
        world.end(2)
    if leaving == "dies":
        assert read_all(world, 1) == 3
        world.end_session(2)
    for _ in range(30):
        world.fill_all()
        world.pull(1)
    assert world.trainers[1].granted > 10


def test_a_late_trainer_far_behind_is_waited_for():
    """A trainer ahead pauses until the late trainer is close, and keeps its ready batches."""
    world = world_of()
    world.subscribe(session=1, epoch=1)
    world.fill_all()
    ahead = world.state.streams[1].delivery.subscriptions[1]
    ready = ahead.next_sequence
    world.subscribe(session=2)
    for _ in range(ready):
        world.pull(1)
        world.fill_all()
    assert (ahead.granted, ahead.next_sequence) == (ready, ready)
    assert read_all(world, 2) > 3


def test_a_spectator_holds_no_trainer_up():
    """No trainer waits for a spectator of the first batch, while it looks and afterwards."""
    world = world_of()
    world.subscribe(session=1, epoch=1)
    world.subscribe(session=2, is_spectator=True)
    world.fill_all()
    world.pull(2, waiting=False)
    assert read_all(world, 1) >= 10


def test_a_spectator_sees_what_the_foremost_rank_reads_however_far_the_slowest_is_behind():
    """Four ranks read, each at most one of its own batches ahead of the slowest.

    That is a difference of up to seven batches of the stream.
    """
    world = world_of(max_skew=1, slots_max=14)
    for rank in range(4):
        world.subscribe(session=rank + 1, rank=rank, world_size=4)
    world.fill_all()
    world.subscribe(session=9, is_spectator=True, window=1, step=7)
    world.fill_all()
    assert world.trainers[5].granted > 0


def test_a_trainer_that_came_and_went_holds_no_trainer_up():
    """The trainers that waited for the visitor continue, limited by the earlier slowest trainer."""
    world = world_of(max_skew=5, slots_max=12)
    world.subscribe(session=1, epoch=1)
    world.subscribe(session=2, epoch=0, step=99)
    world.end(2)
    world.fill_all()
    assert world.state.streams[1].delivery.subscriptions[1].next_sequence == 5


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_are_apart_by_their_own_batches(world_size):
    """A rank's next batch is ``world_size`` batches of the stream away, but one of its own.

    So the rank may prefetch it.
    """
    world = world_of(max_skew=1, slots_max=12)
    for rank in range(world_size):
        world.subscribe(session=rank + 1, rank=rank, world_size=world_size)
    world.fill_all()
    assert {one.granted for one in world.trainers.values()} == {2}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("trainers", [2, 3, 4])
@pytest.mark.parametrize("slots_max", [8, 9, 12])
def test_each_batch_is_decoded_once(trainers, slots_max):
    """This holds for mirror trainers at different speeds, also if the ring is below the skew."""
    world = world_of(max_skew=50, slots_max=slots_max)
    for session in range(1, trainers + 1):
        world.subscribe(session=session)
    chance = random.Random(trainers * 100 + slots_max)
    for _ in range(1200):
        busy = [number for number, worker in world.workers.items() if worker.orders]
        if busy and chance.random() < 0.4:
            world.fill(busy[0])
        number = min(chance.choices(list(world.trainers), k=3))
        world.pull(number, release=max(0, len(world.trainers[number].leases) - 1))
    reached = max(one.granted for one in world.trainers.values())
    assert min(one.granted for one in world.trainers.values()) > 10
    assert world.state.statistics().streams[0].decoded_batches <= reached + 2


def test_who_waits_for_slower_ones_keeps_no_memory_from_them():
    """The fast trainer has little memory and may get no more.

    So the slow trainer may hold more than its fair share.
    """
    world = world_of(slots_max=8, window=1, max_skew=3)
    world.subscribe(session=1)
    world.subscribe(session=2)
    while not world.trainers[1].told:
        read_all(world, 2)
        world.fill_all()
        world.pull(1, release=0)
    assert world.trainers[1].told == [ErrorCode.RING_EXHAUSTED]
    assert len(world.trainers[1].leases) == 6
