"""The reservation of all ring memory before the daemon is ready: slot by slot, or not at all."""

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.events import Event, SlotWanted
from batchd.daemon.serve import Reservation
from batchd.errors import MemoryTooSmall
from support.core_invariants import CheckedWorld
from support.core_world import make_spec, pick


@pytest.fixture
def world() -> CheckedWorld:
    """Make two streams, with three and two slots."""
    return CheckedWorld([make_spec(1, slots_max=3), make_spec(2, slots_max=2)])


def test_every_ring_gets_all_of_its_slots_one_by_one(world: CheckedWorld) -> None:
    """No further slot is requested."""
    made = [pick(act.CreateSlot, world.do(SlotWanted())) for _ in range(6)]

    assert [[one.stream for one in each] for each in made] == [[1], [1], [1], [2], [2], []]
    assert world.state.has_all_slots


def test_slots_that_were_made_ahead_are_the_ones_that_trainers_get(world: CheckedWorld) -> None:
    """No slot is made when a trainer connects."""
    while not world.state.has_all_slots:
        world.do(SlotWanted())
    world.start_workers()

    actions = world.subscribe(1, 1) + world.fill_all()

    assert not pick(act.CreateSlot, actions)
    assert pick(act.GrantLease, actions)


def test_it_asks_for_one_slot_a_round_until_there_are_all(world: CheckedWorld) -> None:
    """Other events are handled in between."""
    asked: list[Event] = []
    reservation = Reservation(world.state, asked.append, is_wanted=True)
    rounds = 0
    while not reservation.is_complete:
        reservation.round_ended(None, 0)
        for event in asked:
            world.do(event)
        assert len(asked) <= 1
        asked.clear()
        rounds += 1

    assert rounds == 6
    assert sum(len(stream.delivery.ring.slots) for stream in world.state.streams.values()) == 5


def test_a_lack_of_memory_ends_the_daemon_before_it_is_ready(world: CheckedWorld) -> None:
    """The error names the reason and the key."""
    reservation = Reservation(world.state, lambda _event: None, is_wanted=True)

    with pytest.raises(MemoryTooSmall, match=r"daemon\.memory: no memory for a slot of stream 'photos'"):
        reservation.round_ended("no memory for a slot of stream 'photos': none", 0)


def test_on_demand_nothing_is_made_ahead_and_a_lack_is_no_end(world: CheckedWorld) -> None:
    """The ring stays smaller, and the daemon becomes ready."""
    reservation = Reservation(world.state, lambda event: pytest.fail(f"{event} was asked for"), is_wanted=False)

    reservation.round_ended("no memory", 0)

    assert reservation.is_complete


def test_a_stream_that_has_stopped_does_not_delay_readiness(world: CheckedWorld) -> None:
    """The slots of a stopped stream are not needed."""
    world.start_workers()
    for stream in world.state.streams.values():
        stream.delivery.stop("it is broken", [])

    assert world.state.has_all_slots
    assert not pick(act.CreateSlot, world.state.handle(ev.SlotWanted(), world.now))


def test_slots_that_a_trainer_has_claimed_meanwhile_get_their_memory_too(world: CheckedWorld) -> None:
    """A trainer connects during the reservation: its claims count as slots to make."""
    world.subscribe(1, 1)
    made = 0
    while not world.state.has_all_slots:
        made += len(pick(act.CreateSlot, world.do(SlotWanted())))

    assert made == 5
    assert len(world.slots) == 5
