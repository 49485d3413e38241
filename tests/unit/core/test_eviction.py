"""Eviction: first the batches that no trainer needs, then the one that is needed last."""

import random

import pytest

from batchd.core import actions as act
from batchd.core.course import Course, Readers
from batchd.core.plan import Plan
from batchd.core.ring import Fill, Ring
from batchd_wire.position import Position
from support.core_invariants import CheckedWorld
from support.core_world import make_spec, pick


def world_of(**changes) -> CheckedWorld:
    """A world of one stream and one worker."""
    world = CheckedWorld([make_spec(**changes)])
    world.start_workers()
    return world


def ring_of(slots_max: int, *steps: int, readers_at: tuple[int, ...] = ()) -> Ring:
    """A ring with complete batches of epoch 0, and trainers at these steps of it."""
    plan = Plan(60, 3, 0, shuffle=False, drop_last=False)
    readers = Readers(plan, equal_epochs=False)
    for number, step in enumerate(readers_at, 1):
        readers.move(number, Course(plan, 0, 1, 0, 0, 1), step)
    ring = Ring(slots_max, readers)
    for number, step in enumerate(steps, 1):
        slot = ring.add(number)
        ring.take(slot, Position(0, step), 3)
        slot.fill = None
        ring.let_go(slot)
    return ring


def steps_held(world: CheckedWorld) -> set[int]:
    """The steps whose batches are complete in the ring."""
    return {slot.committed.step for slot in world.slots.values() if slot.committed is not None}


def read_on(world: CheckedWorld, number: int, batches: int) -> list[act.Action]:
    """A trainer takes some batches and releases each at once."""
    actions = []
    for _ in range(batches):
        actions += world.fill_all()
        actions += world.pull(number, consume=1, release=1, waiting=False)
    return actions + world.fill_all()


def test_the_batch_that_is_needed_last_is_evicted():
    """A full ring evicts step 7, which is five batches before its reader.

    Step 9 is only one batch before another trainer.
    """
    ring = ring_of(3, 3, 7, 9, readers_at=(2, 8))
    assert ring.choose() is ring.slots[2]


def test_a_batch_that_no_trainer_needs_is_evicted_first():
    """This holds while the ring could still grow: untouched memory stays untouched."""
    ring = ring_of(8, 5, 1, 6, readers_at=(2,))
    assert ring.choose() is ring.slots[2]


def test_a_batch_that_is_needed_stays_while_the_ring_can_grow():
    """The time of the need does not matter."""
    assert ring_of(4, 0, 1, 19, readers_at=(0,)).choose() is None


@pytest.mark.parametrize(("kept_ahead", "chosen"), [(18, 3), (19, None)])
def test_a_batch_that_is_needed_late_is_evicted_before_the_ring_grows(kept_ahead, chosen):
    """With a limit, a trainer that is far behind does not fill the memory."""
    ring = ring_of(4, 0, 1, 19, readers_at=(0,))
    ring._kept_ahead = kept_ahead
    assert ring.choose() is ring.slots.get(chosen)


def test_slots_in_use_are_never_evicted():
    """A lease, a claim or an order protects a slot with any content."""
    ring = ring_of(3, 0, 1, 2)
    for slot in ring.slots.values():
        ring.claim(slot, 7)
    ring.slots[1].leases = 1
    ring.slots[1].unclaim(7)
    ring.let_go(ring.slots[1])
    ring.slots[3].fill = Fill([(1, 2)], {1: (0, 1)})
    ring.slots[3].unclaim(7)
    ring.let_go(ring.slots[3])
    assert ring.choose() is None


def test_an_abandoned_fill_is_evicted_before_complete_batches():
    """Half a batch is worth less than a needed complete one, and than untouched memory."""
    for slots_max in (3, 4):
        ring = ring_of(slots_max, 0, 1, 2, readers_at=(0,))
        ring.take(ring.slots[2], Position(0, 7), 3)
        assert ring.choose() is ring.slots[2]


def test_a_trainer_leaves_batches_for_a_slower_one():
    """The ring keeps the batches between the two; the slower one gets them without a worker."""
    world = world_of(window=1, slots_max=8)
    world.subscribe(session=1)
    world.subscribe(session=2)
    read_on(world, 1, 4)
    actions = read_on(world, 2, 4)
    assert [order.position for order in pick(act.OrderChunk, actions)] == []
    assert world.state.statistics().streams[0].shared_batches >= 4


@pytest.mark.parametrize(("kept_ahead", "kept"), [(None, 6), (2, 3)])
def test_slots_that_are_kept_for_a_trainer_behind_are_counted(kept_ahead, kept):
    """It finds these in the ring, and its next one; of ten batches the others are decoded again."""
    world = world_of(samples=60, window=1, slots_max=8, kept_ahead=kept_ahead)
    world.subscribe(session=1)
    world.subscribe(session=2)
    read_on(world, 1, 10)

    assert [one.kept_slots for one in world.state.statistics().streams[0].subscriptions] == [0, kept]

    actions = read_on(world, 2, 10)
    assert len({order.position for order in pick(act.OrderChunk, actions)}) == 10 - 1 - kept


def test_a_trainer_too_far_behind_has_its_own_batches_decoded():
    """A full ring evicts the batches that it needs last, and keeps those that it needs next."""
    world = world_of(window=1, slots_max=5, samples=60)
    world.subscribe(session=1)
    world.subscribe(session=2)
    read_on(world, 1, 10)
    assert {0, 1} <= steps_held(world)
    reached = world.trainers[1].granted
    read_on(world, 2, 10)
    stream = world.state.statistics().streams[0]
    assert reached < stream.decoded_batches < reached + world.trainers[2].granted


def test_batches_for_a_trainer_that_left_are_evicted():
    """A full ring keeps batches 0 and 1 for the slower trainer.

    When that trainer leaves, the other one's next batches take their slots.
    """
    world = world_of(window=1, slots_max=5, samples=60)
    world.subscribe(session=1)
    world.subscribe(session=2)
    read_on(world, 1, 10)
    assert {0, 1} <= steps_held(world)
    world.end(2)
    read_on(world, 1, 4)
    assert not {0, 1} & steps_held(world)


def test_batches_that_repeat_are_decoded_in_the_first_epoch_only():
    """If all epochs have the same bytes and fit into the ring, later ones need no worker."""
    world = world_of(equal_epochs=True, slots_max=6)
    world.subscribe()
    read_on(world, 1, 4)
    later = read_on(world, 1, 40)
    assert pick(act.OrderChunk, later) == []
    assert len(pick(act.GrantLease, later)) >= 40
    assert world.state.statistics().streams[0].decoded_batches == 4


def test_a_ring_that_holds_part_of_a_repeating_epoch_saves_that_part():
    """In a cycle, the batches that are needed soonest save decodes in every epoch.

    The latest batches would save none.
    """
    world = world_of(equal_epochs=True, slots_max=8, samples=30, window=1)
    world.subscribe()
    read_on(world, 1, 10)
    before = world.state.statistics().streams[0].decoded_batches
    read_on(world, 1, 100)
    decoded = world.state.statistics().streams[0].decoded_batches - before
    assert decoded <= 100 * (10 - 6) / 10


def test_repeating_batches_serve_trainers_in_different_epochs():
    """One trainer in epoch 0 and one in epoch 7 read the same slots."""
    world = world_of(equal_epochs=True, slots_max=8)
    world.subscribe(session=1)
    world.subscribe(session=2, epoch=7)
    leases = pick(act.GrantLease, world.fill_all())
    assert {lease.slot for lease in leases if lease.epoch == 0} == {lease.slot for lease in leases if lease.epoch == 7}
    assert world.state.statistics().streams[0].decoded_batches == 2


def test_a_window_longer_than_a_repeating_epoch_leases_a_slot_twice():
    """The same slot is batch 0 and batch 1 of a stream with one batch in each epoch.

    It is free when both leases are released.
    """
    world = world_of(equal_epochs=True, samples=3, window=3)
    world.subscribe()
    world.fill_all()
    world.pull(1, consume=2, release=0, waiting=False)
    assert world.holders(1) == [1, 1, 1]
    assert world.state.statistics().streams[0].slots == 1


def test_eviction_is_as_good_as_the_optimal_choice():
    """Repeated epochs cost at most the decodes of the best choice with one slot less."""
    steps, slots = 7, 4
    world = world_of(equal_epochs=True, samples=3 * steps, slots_max=slots, window=1)
    world.subscribe()
    read_on(world, 1, 6 * steps)
    reads = [sequence % steps for sequence in range(world.trainers[1].granted)]
    assert world.state.statistics().streams[0].decoded_batches <= fewest_decodes(reads, slots - 1)


def fewest_decodes(reads: list[int], slots: int) -> int:
    """Bélády's algorithm: on a miss with a full cache, evict the batch that is read last."""
    cache: set[int] = set()
    decodes = 0
    for place, step in enumerate(reads):
        if step in cache:
            continue
        decodes += 1
        if len(cache) == slots:
            later = reads[place:]
            cache.remove(max(cache, key=lambda held: (later.index(held) if held in later else len(later), held)))
        cache.add(step)
    return decodes


def test_mirror_trainers_that_drift_share_the_batches_of_the_ring():
    """Four trainers that drift apart by less than the ring decode hardly more than one would."""
    world = world_of(slots_max=20, window=2, samples=300)
    for session in range(1, 5):
        world.subscribe(session=session)
    chance = random.Random(5)
    for _ in range(400):
        behind = sorted(world.trainers.values(), key=lambda one: one.granted)
        slow = [one for one in behind if one.granted <= behind[0].granted + 6]
        read_on(world, chance.choice(slow).number, 1)
    farthest = max(one.granted for one in world.trainers.values())
    assert world.state.statistics().streams[0].decoded_batches <= farthest + 2
