"""A reload of the configuration, as the core handles it.

Streams end and begin in one step, and workers start and stop.
"""

import dataclasses

from batchd.core import actions as act
from batchd.core import events as ev
from batchd_wire.codes import ErrorCode
from support.core_invariants import CheckedWorld
from support.core_live import LiveWorld, live_spec
from support.core_world import make_spec, pick


def started(*specs, workers=1):
    """Make a world with a trainer of the first stream that has its first window."""
    world = CheckedWorld(list(specs or (make_spec(1), make_spec(2))), workers)
    world.start_workers()
    world.subscribe(1, 1)
    world.fill_all()
    return world


def refusals(actions):
    return [(one.session, one.subscription, ErrorCode(one.error)) for one in pick(act.Refuse, actions)]


def test_a_stream_that_is_taken_out_is_freed_slot_by_slot_as_its_leases_end():
    """The trainer keeps both of its batches.

    Each release frees one slot, and the last release frees the stream.
    """
    world = started()
    actions = world.reconfigure(removed=(1,))
    assert not pick(act.EndStream, actions)
    freed = [slot for one in pick(act.FreeSlots, actions) for slot in one.slots]
    assert world.state.statistics().ending_slots == 2
    assert not set(freed) & {slot for slot, _generation in world.trainers[1].leases.values()}

    world.pull(1, waiting=False, release=0)
    actions = world.pull(1, release=1)
    assert refusals(actions) == [(1, 1, ErrorCode.STREAM_REMOVED)]
    assert len(pick(act.FreeSlots, actions)) == 1
    actions = world.pull(1, waiting=False)
    assert pick(act.EndStream, actions) == [act.EndStream(1)]
    world.end(1)
    assert set(world.state.streams) == {2}


def test_a_trainer_that_waits_is_told_at_once_that_its_stream_is_another_one():
    """The trainer subscribes to the new stream of the same name, at its position."""
    world = started()
    world.pull(1)
    world.fill_all()
    world.pull(1)
    assert world.trainers[1].waiting
    new = dataclasses.replace(make_spec(3, window=3), name="stream1")
    assert refusals(world.reconfigure((new,), replaced=(1,))) == [(1, 1, ErrorCode.STREAM_REPLACED)]
    (admitted,) = pick(act.AdmitSubscription, world.subscribe(3, 1, step=2))
    assert (admitted.stream, admitted.window) == (3, 3)


def test_orders_of_a_stream_that_is_taken_out_are_carried_out_before_its_slots_go():
    """A worker may still write until it reports the end, or the kernel its death."""
    world = CheckedWorld([make_spec(1), make_spec(2)], 2)
    world.start_workers()
    world.subscribe(1, 1)
    assert world.workers[1].orders
    actions = world.reconfigure(removed=(1,))
    assert not pick(act.EndStream, actions)
    world.fill(1)
    actions = world.kill(2) if world.workers[2].orders else []
    actions += world.fill_all()
    world.end(1)
    assert world.ended == {1}


def test_streams_that_are_not_named_do_not_notice():
    """No refusal is sent, and no slot or order changes."""
    world = started()
    before = world.state.streams[1]
    actions = world.reconfigure((make_spec(3),), removed=(2,))
    assert actions == [act.EndStream(2)]
    assert world.state.streams[1] is before


def test_surplus_workers_finish_what_they_have_and_are_no_deaths():
    """They get no new orders, are dismissed when they have none, and are not replaced."""
    world = CheckedWorld([make_spec(1, samples=600, batch_size=100)], 3)
    world.start_workers()
    world.subscribe(1, 1)
    assert all(worker.orders for worker in world.workers.values())
    assert not pick(act.DismissWorker, world.reconfigure(workers=1))
    actions = world.fill_all()
    assert {one.worker for one in pick(act.DismissWorker, actions)} == {2, 3}
    for number in (2, 3):
        world.kill(number)
    assert world.state.fleet.deaths == 0
    world.now += 60
    assert not pick(act.SpawnWorker, world.do(ev.Ticked()))


def test_a_surplus_worker_that_dies_over_a_sample_is_a_death():
    """Another worker fills its rows."""
    world = CheckedWorld([make_spec(1, samples=600, batch_size=100)], 2)
    world.start_workers()
    world.subscribe(1, 1)
    world.reconfigure(workers=1)
    assert world.workers[2].orders
    world.kill(2)
    assert world.state.fleet.deaths == 1
    world.fill_all()
    assert set(world.workers) == {1}


def test_more_workers_are_started_at_once():
    """They do not wait for the next tick."""
    world = started()
    assert len(pick(act.SpawnWorker, world.reconfigure(workers=4))) == 3


def test_workers_are_renewed_where_they_have_imported_what_is_not_right_any_more():
    """All workers leave, and as many new ones start."""
    world = started(workers=2)
    actions = world.reconfigure(renews_workers=True)
    assert len(pick(act.SpawnWorker, actions)) == 2
    assert len(pick(act.DismissWorker, actions)) == 2


def test_a_worker_that_speaks_of_a_stream_that_there_is_not_is_not_heard():
    """The worker may be damaged, and the daemon ignores its message."""
    world = started()
    world.state.handle(ev.PartsNamed(99, ("read",)), world.now)
    assert set(world.state.streams) == {1, 2}


def test_a_dismissed_worker_that_does_not_go_is_killed():
    """The limit is ten seconds, counted while the process could run."""
    world = started(workers=2)
    world.reconfigure(workers=1)
    world.workers[2].killed = False
    for _ in range(12):
        world.now += 1.0
        actions = world.do(ev.Ticked())
        if pick(act.KillWorker, actions):
            break
    assert [one.worker for one in pick(act.KillWorker, actions)] == [2]


def test_a_producer_of_a_stream_that_is_another_one_is_told_and_its_sample_is_not_taken():
    """A producer that waits for a place gets an answer.

    A push into the old mailbox is rejected, since no worker reads it there.
    """
    world = LiveWorld([live_spec(1, capacity=3)])
    state = world.state
    for session in range(1, 5):
        state.handle(ev.ProducerAsked(session, 1, "stream1"), 0.0)
        state.handle(ev.PlaceAsked(session, 2, 1), 0.0)
    new = dataclasses.replace(live_spec(2), name="stream1")
    actions = state.handle(ev.Reconfigured((new,), (), (1,), 1, 30.0, 256), 0.0)
    assert [(one.session, one.error) for one in pick(act.Refuse, actions)] == [(4, ErrorCode.STREAM_REPLACED)]
    (refused,) = pick(act.Refuse, state.handle(ev.SamplePushed(1, 3, 1, 0), 0.0))
    assert refused.error == ErrorCode.STREAM_REPLACED
    for session in range(1, 5):
        state.handle(ev.SessionEnded(session), 0.0)
    assert set(state.streams) == {2}
