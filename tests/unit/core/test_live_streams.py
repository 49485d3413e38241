"""Live streams: what happens to a pushed sample, by policy, wait and death."""

import random

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from batchd_wire.codes import ErrorCode
from batchd_wire.position import Position
from support.core_live import LiveWorld, live_spec
from support.core_world import make_spec, pick

ONE, OTHER = 1000, 1001
"""The sessions of two producers."""


def world_of(workers=1, **changes):
    """Make a world with one live stream of batches of 3 and two producers."""
    world = LiveWorld([live_spec(**changes)], workers)
    world.start_workers()
    world.produce(ONE)
    world.produce(OTHER)
    return world


def live(world):
    return world.state.statistics().streams[0].live


def read(world, number=1, turns=6):
    """Read all ready batches, and return the samples received so far, in order."""
    for _ in range(turns):
        world.fill_all()
        world.pull(number, release=max(0, len(world.trainers[number].leases) - 1))
    return sorted(world.seen.get(number, set()))


def test_a_batch_is_filled_when_there_are_samples_for_all_of_its_rows():
    """Two of three samples make no batch; the third starts a task that names their places."""
    world = world_of()
    world.subscribe()
    world.pull(1)
    world.push_all(ONE, 2)
    assert not world.workers[1].orders
    world.ask(ONE)
    (order,) = pick(act.OrderChunk, world.push(ONE))
    assert (order.position, order.rows[0], len(order.rows)) == (Position(0, 0), 0, 3)
    assert len(set(order.places)) == 3
    assert read(world) == [1, 2, 3]


def test_samples_wait_for_a_trainer():
    """Without a reader, samples are queued up to the capacity and later delivered in order."""
    world = world_of(capacity=9)
    assert world.push_all(ONE) == 9
    assert live(world).queued_samples == 9
    world.subscribe()
    assert read(world) == list(range(1, 10))


def test_block_lets_producers_wait_in_the_order_in_which_they_asked():
    """A place is lent only to a producer that asked for one."""
    world = world_of(capacity=3)
    world.push_all(ONE)
    world.ask(OTHER)
    assert [world.producers[one].place for one in (ONE, OTHER)] == [None, None]
    assert live(world).waiting_producers == 2
    world.subscribe()
    world.pull(1)
    world.fill_all()
    assert None not in [world.producers[one].place for one in (ONE, OTHER)]
    assert world.push_all(ONE) == 2, "its own place and one more"


def test_block_keeps_the_turn_of_a_producer_that_asks_again():
    """A producer that asks twice keeps its turn, and gets one place for both requests."""
    world = world_of(capacity=4, batch_size=1)
    world.push_all(ONE)
    world.ask(OTHER)
    world.ask(ONE)
    world.subscribe(window=1)
    world.fill_all()
    assert world.producers[ONE].place is not None
    assert world.producers[OTHER].place is None


def test_a_producer_that_gave_up_waiting_is_lent_nothing():
    """The turn of a producer that gave up passes to the next one."""
    world = world_of(capacity=3)
    world.push_all(ONE)
    world.ask(OTHER)
    world.withdraw(ONE)
    world.subscribe()
    world.pull(1)
    world.fill_all()
    assert world.producers[ONE].place is None
    assert world.producers[OTHER].place is not None


def test_a_batch_is_recorded_before_the_first_trainer_gets_it_and_once():
    """The record has the number of each push; a second trainer of the batch adds none."""
    world = world_of(capacity=12)
    for trainer in (1, 2):
        world.subscribe()
        world.pull(trainer)
    world.push_all(ONE, 3)
    made = [one for one in world.fill_all() if isinstance(one, (act.RecordBatch, act.GrantLease))]
    assert [type(one) for one in made] == [act.RecordBatch, act.GrantLease, act.GrantLease]
    assert (made[0].position, made[0].pushed, made[0].slot) == (Position(0, 0), (0, 1, 2), made[1].slot)


def test_drop_newest_tells_the_producer_and_counts():
    """The producer gets a negative answer, the counters rise, and the queued samples stay."""
    world = world_of(capacity=6, when_full="drop_newest")
    assert world.push_all(ONE) == 6
    assert not world.put(OTHER)
    assert world.producers[OTHER].dropped == 1
    assert live(world).dropped_newest == 2
    world.subscribe()
    assert read(world)[:6] == [1, 2, 3, 4, 5, 6]


def test_drop_oldest_drops_what_has_waited_longest():
    """The oldest waiting samples are dropped, so a trainer gets the newest ones."""
    world = world_of(capacity=6, when_full="drop_oldest")
    assert world.push_all(ONE, 10) == 10
    assert live(world).dropped_oldest == 4
    world.subscribe()
    assert read(world)[:6] == [5, 6, 7, 8, 9, 10]


def test_drop_oldest_never_takes_a_sample_that_is_part_of_a_batch():
    """If all samples are part of a batch, the newest one is dropped."""
    world = world_of(capacity=3, when_full="drop_oldest")
    world.subscribe()
    world.pull(1)
    world.push_all(ONE, 3)
    assert live(world).bound_samples == 3
    assert not world.put(OTHER)
    assert (live(world).dropped_oldest, live(world).dropped_newest) == (0, 1)
    assert read(world) == [1, 2, 3]


def test_a_dead_producers_place_goes_to_another_and_what_it_pushed_stays():
    """The daemon needs only the kernel's report that the producer is dead."""
    world = world_of(capacity=3)
    world.push_all(ONE, 2)
    world.ask(ONE)
    world.ask(OTHER)
    assert world.producers[OTHER].place is None
    world.end_producer(ONE)
    assert world.producers[OTHER].place is not None
    assert live(world).queued_samples == 2


def test_a_producer_that_is_cut_off_keeps_its_place_until_it_is_dead():
    """A disconnected producer may still write into its place, so the place stays reserved."""
    world = world_of(capacity=3)
    world.ask(ONE)
    world.state.handle(ev.SessionCutOff(ONE), 0.0)
    assert (live(world).producers, live(world).lent_places) == (1, 1)
    world.state.handle(ev.SessionEnded(ONE), 0.0)
    assert live(world).lent_places == 0


@pytest.mark.parametrize("note", ["in hand", "between samples"])
def test_a_dead_workers_rows_are_filled_with_the_same_samples(note):
    """No sample is read twice, and no sample is lost."""
    world = world_of()
    world.subscribe()
    world.push_all(ONE, 3)
    places = world.workers[1].orders[0].places
    if note == "in hand":
        world.kill_at(1, 1)
    else:
        world.kill(1, ev.Note(0, 0, 0))
    world.now += 10
    world.start_workers()
    (filled,) = [order.places for order in world.workers[2].orders if order.rows[0] == 0]
    assert filled == places[: len(filled)]
    assert read(world) == [1, 2, 3]


def test_samples_that_no_trainer_got_go_back_to_the_head_of_the_queue():
    """A trainer that disconnects leaves its unread batches to the next one."""
    world = world_of(capacity=15, slots_max=7)
    world.push_all(ONE)
    world.subscribe(window=5)
    world.fill_all()
    got = set(world.seen[1])
    assert live(world).bound_samples == 9
    world.end_session(1)
    assert live(world).bound_samples == 0
    world.subscribe(step=len(got) // 3)
    assert read(world, 2)[:3] == [max(got) + 1, max(got) + 2, max(got) + 3]


def test_a_second_trainer_begins_with_what_is_still_there():
    """The daemon sends the second trainer that position, in the rounds of its world."""
    world = world_of(slots_max=4, window=1)
    world.subscribe()
    for _ in range(10):
        world.push_all(ONE)
        read(world, turns=1)
    (admitted,) = pick(act.AdmitSubscription, world.subscribe(session=2, rank=1, world_size=2))
    assert admitted.course.base > 0
    assert admitted.course.base % 2 == 0


def test_a_trainer_goes_on_where_it_stood_with_a_daemon_that_knows_nothing():
    """A trainer's position is a number, and the daemon has no sample for it yet.

    Other trainers may reconnect before or after it.
    """
    world = world_of(capacity=30)
    world.subscribe(session=1, step=500 % 40)
    world.subscribe(session=2, step=503 % 40)
    world.push_all(ONE)
    starts = [world.trainers[number].upcoming.position.step for number in (1, 2)]
    assert starts[0] <= 500 % 40 + 3
    read(world, 1)
    assert read(world, 2, turns=12)
    assert read(world, 1)[:3] == [1, 2, 3]


def test_two_trainers_get_the_same_batches():
    """Each sample is decoded once, and both trainers receive every batch."""
    world = world_of(capacity=12)
    world.subscribe(session=1)
    world.subscribe(session=2)
    for _ in range(12):
        world.push_all(ONE)
        read(world, 1, turns=1)
        read(world, 2, turns=1)
    assert world.seen[1] == world.seen[2]
    assert live(world).lost_batches == 0


def test_ranks_share_the_samples():
    """Each sample goes to exactly one rank."""
    world = world_of(capacity=12)
    world.subscribe(session=1, rank=0, world_size=2)
    world.subscribe(session=2, rank=1, world_size=2)
    for _ in range(12):
        world.push_all(ONE)
        read(world, 1, turns=1)
        read(world, 2, turns=1)
    assert not world.seen[1] & world.seen[2]
    assert len(world.seen[1] | world.seen[2]) > 30


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
@pytest.mark.parametrize("world_size", [1, 3])
def test_trainers_that_read_at_any_pace_lose_nothing(seed, world_size):
    """Three mirrors or three ranks, any of which may be slow, lose nothing while workers die."""
    dice = random.Random(seed)
    world = world_of(workers=2, capacity=dice.choice([3, 7, 12, 30]), slots_max=dice.choice([6, 7, 9, 12]), window=4)
    for number in range(3):
        world.subscribe(session=number + 1, rank=number % world_size, world_size=world_size)
    for _ in range(600):
        number = dice.choice([1, 1, 1, 2, 2, 3])
        world.push_all(dice.choice([ONE, OTHER]), dice.randrange(4))
        for worker in [one for one, state in world.workers.items() if state.orders]:
            if dice.random() < 0.7:
                world.fill(worker)
            elif dice.random() < 0.1:
                world.kill(worker, ev.Note(0, 0, 0), from_outside=True)
                world.now += 6
                world.start_workers()
        if dice.random() < 0.5:
            world.pull(number, release=max(0, len(world.trainers[number].leases) - 1), waiting=dice.random() < 0.8)
    assert live(world).lost_batches == 0
    got = [world.seen[number] for number in (1, 2, 3)]
    assert min(map(len, got)) > 30
    if world_size == 3:
        assert len(set().union(*got)) == sum(map(len, got)), "a sample went to two ranks"


def test_what_is_ready_for_one_rank_leaves_room_for_another_that_waits():
    """Rank 0 holds a batch and waits for rank 1, not for its own next ones.

    The batches that are ready for rank 0 must not take every place.
    """
    world = world_of(capacity=3, slots_max=8, window=5)
    world.subscribe(session=1, rank=0, world_size=2)
    for _ in range(6):
        world.push_all(ONE)
        world.fill_all()
    world.pull(1, consume=1, release=0, waiting=False)
    world.subscribe(session=2, rank=1, world_size=2)
    for _ in range(6):
        world.pull(2)
        world.push_all(ONE)
        world.fill_all()
    assert world.trainers[2].granted > 0


def test_what_is_read_ahead_for_one_rank_takes_no_samples_of_an_earlier_batch():
    """There are samples for four batches, and the producer waits until both ranks have two."""
    world = world_of(capacity=12, slots_max=12)
    world.subscribe(session=1, rank=0, world_size=2, window=1)
    world.subscribe(session=2, rank=1, world_size=2, window=4)
    world.push_all(ONE, 12)
    world.fill_all()
    world.pull(1)
    world.fill_all()
    assert read(world, 1) == [1, 2, 3, *range(10, 13)]
    assert read(world, 2) == list(range(4, 10))


def test_a_producer_of_a_stream_that_stops_is_told_why():
    """A waiting producer gets the reason at once, and other producers when they ask."""
    world = world_of(capacity=3, on_error="fail")
    world.push_all(ONE)
    world.subscribe()
    world.pull(1)
    sample = world.samples(world.workers[1].orders[0])[0]
    assert world.producers[ONE].request is not None
    world.fill(1, bad=(sample,))
    assert ErrorCode.STREAM_STOPPED in world.producers[ONE].told
    world.ask(OTHER)
    assert ErrorCode.STREAM_STOPPED in world.producers[OTHER].told


@pytest.mark.parametrize(("name", "code"), [("nothing", ErrorCode.UNKNOWN_STREAM), ("stream2", ErrorCode.NOT_LIVE)])
def test_a_push_into_a_stream_that_is_not_live_is_refused(name, code):
    """A push to an unknown stream or to a stream of files is rejected."""
    world = LiveWorld([live_spec(1), make_spec(2)])
    (refused,) = world.state.handle(ev.ProducerAsked(ONE, 5, name), 0.0)
    assert (refused.request, refused.error) == (5, code)
    assert name in refused.text


def test_a_draining_daemon_takes_nothing_more():
    """Producers retry until another daemon accepts their samples."""
    world = world_of()
    world.state.handle(ev.DrainAsked(), 0.0)
    for event in (ev.ProducerAsked(ONE, 5, "stream1"), ev.PlaceAsked(ONE, 5, 1)):
        (refused,) = world.state.handle(event, 0.0)
        assert refused.error == ErrorCode.DRAINING


@pytest.mark.parametrize(
    "event",
    [
        ev.SamplePushed(ONE, 9, 1, 0),
        ev.SamplePushed(ONE, 9, 1, 1 << 60),
        ev.SamplePushed(ONE, 9, 3, 0),
        ev.SamplePushed(77, 9, 1, 0),
        ev.PlaceAsked(77, 9, 1),
        ev.PlaceAsked(ONE, 9, 1 << 60),
    ],
)
def test_who_speaks_of_places_that_are_not_his_is_refused(event):
    """A message about a place of another producer is rejected and changes no state."""
    world = world_of()
    before = live(world)
    (refused,) = world.state.handle(event, 0.0)
    assert (refused.request, refused.error) == (9, ErrorCode.PLACE_NOT_LENT)
    after = live(world)
    assert (before.queued_samples, before.lent_places) == (after.queued_samples, after.lent_places)


def test_a_producer_has_its_next_place_ahead_of_time_while_there_is_plenty_of_room():
    """Places ahead of time leave enough others to fill a batch without those producers."""
    world = world_of(capacity=20, batch_size=3)
    for session in range(1002, 1030):
        world.produce(session)
        world.put(session)
        world.subscribe(session=1) if session == 1002 else None
        world.fill_all()
        world.pull(1)
    assert 0 < live(world).lent_places <= 20 - 3


def test_crashes_of_many_pushed_samples_stop_the_stream():
    """If every sample crashes its worker, the decoder is broken, also on an endless stream."""
    world = world_of(capacity=30)
    world.subscribe()
    for _ in range(200):
        world.push_all(ONE)
        world.now += 10
        world.start_workers()
        for number in [number for number, worker in world.workers.items() if worker.orders]:
            order = world.workers[number].orders[0]
            sample = world.samples(order)[0]
            if (1, sample) in world.quarantined:
                world.fill(number)
            else:
                world.kill_at(number, order.rows[0])
        world.pull(1)
        if world.stopped:
            break
    assert world.stopped
    assert 10 < len(world.quarantined) < 15


# --- spectators -----------------------------------------------------------------------------------


def test_a_look_takes_no_samples_from_a_trainer_that_comes_later():
    """The first trainer receives the samples that a spectator has seen, in their order."""
    world = world_of(capacity=6)
    world.push_all(ONE)
    world.subscribe(session=9, is_spectator=True, window=1)
    world.pull(1, release=0)
    world.fill_all()
    assert world.trainers[1].granted > 0
    world.end_session(9)
    assert live(world).queued_samples == 6
    world.subscribe(session=1)
    assert read(world, 2) == [1, 2, 3, 4, 5, 6]


def test_a_spectator_that_stands_still_keeps_no_sample_from_a_trainer():
    """The spectator holds for ever the only batch for which there are samples.

    The trainer receives these samples nevertheless.
    """
    world = world_of(capacity=3)
    world.push_all(ONE)
    world.subscribe(session=9, is_spectator=True, window=1)
    world.pull(1, release=0)
    world.fill_all()
    world.subscribe(session=1, step=5)
    assert read(world, 2) == [1, 2, 3]
    assert world.trainers[1].leases


def test_a_look_at_a_batch_that_a_trainer_will_read_leaves_it_to_that_trainer():
    """The spectator receives the batch first, and disconnects.

    The trainer, to which two other batches are being sent, finds this batch filled.
    """
    world = world_of(capacity=12)
    world.subscribe(session=1, is_remote=True, window=4)
    for _ in range(2):
        world.push_all(ONE)
        world.fill_all()
    sent = world.trainers[1].granted
    decoded = world.state.statistics().streams[0].decoded_batches
    assert decoded > sent, "no batch is ready beyond those sent to the trainer"
    world.subscribe(session=9, is_spectator=True, window=1, step=sent)
    assert world.trainers[2].granted > 0
    world.end_session(9)
    assert world.state.statistics().streams[0].decoded_batches == decoded
    world.send(1)
    assert world.seen[1] == set(range(1, 3 * (sent + 1) + 1))


def test_a_look_at_what_a_trainer_has_got_binds_nothing():
    """The batch is still in the ring, so no worker gets a task and no place is taken."""
    world = world_of(capacity=6)
    world.push_all(ONE)
    world.subscribe(session=1)
    read(world)
    orders = world.state.statistics().streams[0].decoded_batches
    world.subscribe(session=9, is_spectator=True, window=1, step=1)
    assert world.trainers[2].granted == 1
    assert world.state.statistics().streams[0].decoded_batches == orders
    assert live(world).bound_samples == 0


@pytest.mark.parametrize("is_spectator", [True, False])
def test_a_batch_whose_only_waiter_is_gone_gives_its_samples_to_a_trainer_that_waits(is_spectator):
    """Nearly all places belong to a batch that the trainer reads later.

    The trainer waits for another batch, which needs these samples.
    """
    world = world_of(capacity=4, window=3)
    world.subscribe(session=9, step=1, is_spectator=is_spectator, window=1)
    world.pull(1, release=0)
    world.push_all(ONE)
    world.subscribe(session=1)
    if is_spectator:
        world.fill_all()
        assert world.trainers[1].granted == 1
    else:
        world.end_session(9)
        world.fill_all()
    assert live(world).bound_samples == 3, "the trainer's claim must keep them"

    assert read(world, 2)[:3] == [1, 2, 3]
