"""A trainer reports that a batch does not have the bytes that were written.

The batch is decoded again, and no trainer gets the damaged one.
"""

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from support.core_invariants import CheckedWorld
from support.core_world import make_spec, pick


@pytest.fixture
def world():
    """Make one stream, one worker, and one trainer that reads the first batches."""
    world = CheckedWorld([make_spec()])
    world.start_workers()
    world.subscribe()
    world.fill_all()
    return world


def statistics(world):
    """Return the statistics of the one stream."""
    return world.state.statistics().streams[0]


def test_a_mismatched_batch_is_decoded_again_for_the_next_trainer(world):
    """The new batch has another generation, although the damaged one is still being read."""
    first = world.trainers[1].grants[0]
    actions = world.mismatch(1, 0)
    world.end(1)
    world.subscribe(session=2)
    world.fill_all()

    assert pick(act.ReportMismatch, actions)[0].position == (0, 0)
    assert world.trainers[2].grants[0] != first
    assert statistics(world).mismatched_batches == 1


def test_a_claim_on_the_spoilt_batch_goes_to_another_slot():
    """A trainer in lockstep behind the first one had a claim on the same slot."""
    world = CheckedWorld([make_spec(window=3)])
    world.start_workers()
    world.subscribe(session=1)
    world.subscribe(session=2)
    world.fill_all()
    world.pull(1)
    world.fill_all()
    claimed = [claim.slot for claim in world.state.streams[1].delivery.subscriptions[2].claims]
    shared = [
        sequence for sequence, grant in enumerate(world.trainers[1].grants) if grant[0] in {c.number for c in claimed}
    ]
    assert shared, "the second trainer has no claim on the first trainer's batch"

    world.mismatch(1, shared[0])
    world.fill_all()
    world.pull(2)

    assert world.trainers[2].granted > shared[0]
    assert world.trainers[1].grants[shared[0]] not in world.trainers[2].grants


def test_who_reads_the_spoilt_batch_may_go_on(world):
    """A lease stays valid until its trainer releases it."""
    world.subscribe(session=2)
    world.fill_all()
    world.mismatch(1, 0)

    assert world.trainers[2].leases[0] == world.trainers[1].grants[0]
    world.pull(2)


def test_no_trainer_can_have_batches_decoded_more_often_than_once_a_second(world):
    """All mismatches are counted, also those that cause no new decode."""
    world.mismatch(1, 0)
    world.mismatch(1, 1)
    assert [world.slots[slot].spoilt for slot, _generation in world.trainers[1].grants] == [True, False]

    world.now += 1
    world.mismatch(1, 1)
    assert [world.slots[slot].spoilt for slot, _generation in world.trainers[1].grants] == [True, True]
    assert statistics(world).mismatched_batches == 3


def test_a_batch_that_was_not_handed_over_cannot_mismatch(world):
    """Future batches, other generations and other sessions are rejected."""
    slot, generation = world.trainers[1].grants[0]
    for session, sequence, number in ((1, 2, generation), (1, 1 << 60, generation), (2, 0, generation)):
        assert world.do(ev.BatchMismatched(session, 1, sequence, number)) == []
    assert pick(act.ReportMismatch, world.do(ev.BatchMismatched(1, 1, 0, generation + 1)))

    assert not world.slots[slot].spoilt
    assert statistics(world).mismatched_batches == 1


def test_a_batch_that_is_gone_already_is_only_counted(world):
    """The slot holds another batch by now."""
    for _ in range(12):
        world.pull(1)
        world.fill_all()
    world.mismatch(1, 0)

    assert not any(slot.spoilt for slot in world.slots.values())
    assert statistics(world).mismatched_batches == 1


def test_a_mismatch_of_a_stream_that_repeats_spoils_the_batch_of_every_epoch():
    """All epochs share the same slot."""
    world = CheckedWorld([make_spec(equal_epochs=True)])
    world.start_workers()
    world.subscribe()
    for _ in range(6):
        world.fill_all()
        world.pull(1)
    decoded = statistics(world).decoded_batches
    world.now += 5
    world.mismatch(1, world.trainers[1].granted - 1)
    for _ in range(6):
        world.fill_all()
        world.pull(1)

    assert statistics(world).decoded_batches == decoded + 1


def test_a_late_report_of_the_spoilt_batch_leaves_its_successor_alone():
    """Another slot, maybe in its first filling, holds the position by then."""
    world = CheckedWorld([make_spec(samples=1, batch_size=1, equal_epochs=True)])
    world.do(ev.SlotWanted())
    world.do(ev.SlotWanted())
    world.start_workers()
    world.subscribe()
    world.fill_all()
    world.now += 5
    world.mismatch(1, 0)
    world.pull(1, release=0)
    world.fill_all()
    world.now += 5
    world.mismatch(1, 0)

    assert [slot.spoilt for slot in world.slots.values() if slot.committed is not None] == [True, False]
