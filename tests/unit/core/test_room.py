"""The division of the ring among trainers.

The tests cover late trainers, hoarders, fair shares, and exhausted memory.
"""

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.tenants import Demand, divide_by_tenant
from batchd_wire.codes import ErrorCode
from support.core_invariants import CheckedWorld
from support.core_world import make_spec, pick


def world_of(workers=1, **changes) -> CheckedWorld:
    """Make one stream, and one worker if no other number is given."""
    world = CheckedWorld([make_spec(**changes)], workers=workers)
    world.start_workers()
    return world


def granted(actions) -> list[tuple[int, int, int]]:
    """Return (subscription, sequence, step) of the leases handed out, in order."""
    return [(lease.subscription, lease.sequence, lease.step) for lease in pick(act.GrantLease, actions)]


def test_a_late_trainer_gets_room_from_the_farthest_claims_of_the_trainer_with_most():
    """Claims are taken back, leases never."""
    world = world_of(slots_max=8, window=6)
    world.subscribe(session=1, window=2)
    world.subscribe(session=2, epoch=1)
    assert [len(one.claims) for one in world.state.streams[1].delivery.subscriptions.values()] == [2, 6]
    world.subscribe(session=3, epoch=2)
    usages = [one.usage for one in world.state.streams[1].delivery.subscriptions.values()]
    assert usages == [2, 4, 2]
    assert granted(world.fill_all())[-1:] != []


def test_a_hoarder_is_told_how_many_it_holds():
    """A trainer that holds every slot and waits for more never continues, so it fails at once."""
    world = world_of(slots_max=3, window=1)
    world.subscribe()
    for _ in range(3):
        world.fill_all()
        actions = world.pull(1, release=0)
    assert actions == [
        act.Refuse(1, 0, 1, ErrorCode.RING_EXHAUSTED, "this trainer holds 3 of the 3 slots of stream 'stream1'")
    ]
    world.pull(1, release=1)
    assert granted(world.fill_all()) == [(1, 3, 3)]


def test_a_hoarder_cannot_have_what_is_kept_for_others():
    """With another trainer, two of four slots are its limit, and the other trainer continues."""
    world = world_of(slots_max=4, window=1)
    world.subscribe(session=1)
    world.subscribe(session=2, epoch=3)
    world.fill_all()
    world.pull(1, release=0)
    world.fill_all()
    (refusal,) = world.pull(1, release=0)
    assert refusal.text == "this trainer holds 2 of the 4 slots of stream 'stream1', and 2 are kept for others"
    for _ in range(5):
        world.pull(2, release=max(0, len(world.trainers[2].leases) - 1))
        world.fill_all()
    assert world.trainers[2].granted >= 5


def test_a_waiting_trainer_is_told_when_a_late_one_takes_what_it_waited_for():
    """It holds two of four slots and its third is being filled; the other gets that slot."""
    world = world_of(slots_max=4, window=1)
    world.subscribe(session=1)
    world.fill(1)
    world.pull(1, release=0)
    world.fill(1)
    world.pull(1, release=0)
    assert world.trainers[1].waiting
    assert len(world.trainers[1].leases) == 2
    actions = world.subscribe(session=2, epoch=3)
    assert [(refusal.subscription, refusal.error) for refusal in pick(act.Refuse, actions)] == [
        (1, ErrorCode.RING_EXHAUSTED)
    ]


def test_a_waiting_trainer_is_told_when_one_that_goes_keeps_what_it_waited_for():
    """A trainer that disconnected still reads four of six slots.

    The other trainer has two and cannot get a third.
    """
    world = world_of(slots_max=6, window=2)
    world.subscribe(session=1, window=4)
    for _ in range(2):
        world.fill_all()
        world.pull(1, release=0)
    assert len(world.trainers[1].leases) == 4
    world.subscribe(session=2, epoch=3)
    world.fill_all()
    world.pull(1, release=0, waiting=False)
    assert world.pull(2, release=0) == []
    actions = world.end(1)
    assert [(refusal.subscription, refusal.error) for refusal in actions] == [(2, ErrorCode.RING_EXHAUSTED)]


def test_a_waiting_trainer_is_told_when_the_memory_it_waited_for_is_lost():
    """It has three of six slots and waits for a fourth.

    Now there are five slots, and two of them belong to the other trainer.
    """
    world = world_of(slots_max=6, window=1)
    world.subscribe(session=1)
    for _ in range(2):
        world.fill_all()
        world.pull(1, consume=1, release=0, waiting=False)
    world.fill_all()
    assert len(world.trainers[1].leases) == 3
    world.slots_left = 2
    world.subscribe(session=2, epoch=4, window=2)
    assert world.pull(1, release=0) == []
    world.fill_all()
    actions = world.lose_next()
    assert [(refusal.subscription, refusal.error) for refusal in pick(act.Refuse, actions)] == [
        (1, ErrorCode.RING_EXHAUSTED)
    ]


def test_memory_beyond_the_fair_share_is_for_those_who_have_less():
    """A slot released by a trainer with six of eight goes to the one with two."""
    world = world_of(slots_max=8, window=8)
    world.subscribe(session=1)
    world.subscribe(session=2, epoch=9)
    world.fill_all()
    delivery = world.state.streams[1].delivery
    usages = []
    for _ in range(4):
        delivery.subscriptions[2].served_s = 1000.0
        world.pull(1, consume=1, release=1, waiting=False)
        usages.append([one.usage for one in delivery.subscriptions.values()])
    assert usages == [[5, 3], [4, 4], [4, 4], [4, 4]]


def test_a_share_that_one_trainer_does_not_want_goes_to_the_others():
    """A trainer with a short window needs only three of eight slots.

    The other trainer has the remaining five.
    """
    world = world_of(slots_max=8, window=8)
    world.subscribe(session=1)
    world.subscribe(session=2, epoch=9, window=2)
    for turn in range(6):
        world.fill_all()
        world.pull(1, consume=1, release=1, waiting=False)
        world.pull(2, consume=1, release=min(1, turn), waiting=False)
        usages = [one.usage for one in world.state.streams[1].delivery.subscriptions.values()]
    assert usages == [5, 3]


def test_what_one_leaves_over_goes_on_to_the_next_at_once():
    """A third trainer disconnects.

    The one below its fair share takes the slots it lacks, and the one above takes the rest.
    """
    world = world_of(slots_max=9, window=9)
    world.subscribe(session=1)
    world.subscribe(session=2, epoch=9, window=3)
    world.subscribe(session=3, epoch=19)
    delivery = world.state.streams[1].delivery
    delivery.subscriptions[2].served_s = 1000.0
    world.end_session(3)
    assert sum(one.usage for one in delivery.subscriptions.values()) == 9
    assert delivery.subscriptions[2].usage == 3


def test_a_slot_without_memory_is_not_asked_for_again():
    """The ring continues with the slots that it has, and nothing is lost."""
    world = world_of(window=6)
    world.slots_left = 3
    world.subscribe()
    world.fill_all()
    while world.losses:
        world.lose_next()
    assert world.state.statistics().streams[0].slots_max == 3
    for _ in range(10):
        world.fill_all()
        world.pull(1)
    assert world.trainers[1].granted >= 8


def test_a_lost_slot_does_not_leave_a_trainer_waiting_for_one_that_holds_the_others():
    """Its nearest claim loses its slot while another trainer pauses with three.

    A farther claim makes room.
    """
    world = world_of(workers=2, slots_max=6, window=3)
    world.subscribe(session=1)
    world.fill_all()
    world.subscribe(session=2, epoch=4)
    world.slots[4].lost = True
    assert world.workers[2].orders.pop(0).slot == 4  # it is not sent
    world.losses.append(ev.SlotLost(1, 4, "Cannot allocate memory"))
    world.lose_next()
    for _ in range(5):
        world.fill_all()
        world.pull(2, release=max(0, len(world.trainers[2].leases) - 1))
    assert world.trainers[2].granted >= 5


def test_too_few_slots_stop_the_stream_with_the_numbers():
    """A ring needs two slots, and a waiting trainer gets the error."""
    world = world_of()
    world.slots_left = 1
    world.subscribe()
    world.pull(1)
    actions = world.lose_next()
    text = "memory for 1 slot could be had, and its trainers need 2: Cannot allocate memory"
    assert actions == [act.Refuse(1, 0, 1, ErrorCode.STREAM_STOPPED, text), act.ReportStopped(1, text)]


def test_slots_that_are_held_count_when_memory_runs_out():
    """Three slots are held, two are owed to another trainer, and four are left: too few."""
    world = world_of(slots_max=6, window=3)
    world.subscribe(session=1)
    world.fill_all()
    world.slots_left = 1
    world.pull(1, release=0, waiting=False)
    world.subscribe(session=2, epoch=3, window=2)
    (stopped,) = pick(act.ReportStopped, world.lose_next())
    assert "memory for 4 slots could be had, and its trainers need 5" in stopped.text


def test_a_ring_that_may_have_fewer_slots_gives_back_those_that_it_has_beyond():
    """Idle ones at once, the others as trainers release them; none that a trainer was promised."""
    world = world_of(slots_max=8, window=8)
    world.subscribe(session=1)
    for _ in range(4):
        world.fill_all()
        world.pull(1, release=0)
    freed = pick(act.FreeSlots, world.size_ring(1, 2))
    ring = world.state.streams[1].delivery.ring
    assert [len(one.slots) for one in freed] == [8 - len(world.trainers[1].leases)]
    assert ring.slots_max == len(world.trainers[1].leases) == len(ring.slots) > 2
    world.size_ring(1, 2)
    world.pull(1, waiting=False)
    world.size_ring(1, 2)
    assert len(ring.slots) == ring.slots_max == 2


def test_a_ring_that_may_have_more_slots_again_reads_ahead_again():
    """A trainer goes on with two slots, and with eight claims as many as before."""
    world = world_of(slots_max=8, window=8)
    world.subscribe(session=1)
    world.fill_all()
    before = world.state.streams[1].delivery.subscriptions[1].usage
    world.size_ring(1, 0)
    assert world.state.streams[1].delivery.subscriptions[1].usage == 2
    world.size_ring(1, 8)
    assert world.state.streams[1].delivery.subscriptions[1].usage == before == 8


@pytest.mark.parametrize(
    ("total", "demands", "parts"),
    [
        (100, {"a": (1, 0, 20), "b": (1, 0, 30)}, [20, 30]),
        (100, {"a": (3, 0, 200), "b": (1, 0, 200)}, [75, 25]),
        (100, {"a": (3, 0, 30), "b": (1, 0, 200)}, [30, 70]),
        (100, {"a": (3, 0, 200), "b": (1, 40, 200)}, [60, 40]),
        (10, {"a": (1, 20, 30), "b": (1, 20, 30)}, [20, 20]),
        (0, {}, []),
    ],
)
def test_memory_goes_to_tenants_by_weight_and_what_one_does_not_want_to_the_others(total, demands, parts):
    every = [(name, Demand(1.0, least, most)) for name, (_weight, least, most) in demands.items()]
    weights = tuple((name, float(weight)) for name, (weight, _least, _most) in demands.items())
    assert divide_by_tenant(total, every, weights) == pytest.approx(parts, abs=1)


def test_what_a_tenant_gets_is_divided_among_what_it_has():
    """Ten rings of one tenant have no more than one ring of another of the same weight."""
    rings = [*[("many", Demand(1.0, 2, 100))] * 10, ("one", Demand(1.0, 2, 100))]
    assert divide_by_tenant(100, rings, (("many", 1.0), ("one", 1.0))) == [5] * 10 + [50]
    unread = [("many", Demand(1e-6, 2, 100)), ("many", Demand(1.0, 2, 100))]
    assert divide_by_tenant(50, unread, ()) == [2, 48]
