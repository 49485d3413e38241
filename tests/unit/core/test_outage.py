"""Storage that is away: one row is tried again after growing pauses, and no row is bad for it."""

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from batchd_wire.codes import ErrorCode
from support.core_invariants import CheckedWorld
from support.core_world import AWAY, make_spec, pick

REASON = AWAY


def world_of(workers: int = 1, **changes: object) -> CheckedWorld:
    """A started world of one stream that waits an hour for its storage."""
    world = CheckedWorld([make_spec(**{"storage_away_s": 3600.0, **changes})], workers)
    world.start_workers()
    return world


def tick(world: CheckedWorld, seconds: float) -> list[act.Action]:
    """Let time pass."""
    world.now += seconds
    return world.do(ev.Ticked())


def test_rows_of_storage_that_is_away_are_tried_again_one_at_a_time() -> None:
    """The pauses grow from 1 s to 30 s, and in between no worker has an order of the stream."""
    world = world_of(workers=2)
    world.subscribe()
    world.pull(1)
    busy = [number for number, worker in world.workers.items() if worker.orders]
    assert len(busy) == 2
    assert pick(act.ReportAway, world.find_away(busy[0])) == [act.ReportAway(1, REASON)]
    for _ in range(10):
        for number in busy:
            while world.workers[number].orders:
                assert not pick(act.ReportAway, world.find_away(number)), "it is reported once"

    pauses = []
    for _ in range(8):
        waited = 0.0
        while not (orders := pick(act.OrderChunk, tick(world, 0.5))):
            waited += 0.5
        assert [len(order.rows) for order in orders] == [1]
        pauses.append(waited + 0.5)
        world.find_away(orders[0].worker)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    status = world.state.statistics().streams[0]
    assert (status.away, status.away_s, status.stopped) == (REASON, sum(pauses), None)
    assert (status.bad_rows, status.bad_samples, status.decoded_samples) == (0, 0, 0)


def test_a_stream_goes_on_at_the_same_position_when_its_storage_is_back() -> None:
    """The probe that succeeds ends the outage; its row counts, and all others are ordered."""
    world = world_of()
    world.subscribe()
    world.pull(1)
    while world.workers[1].orders:
        world.find_away(1)
    tick(world, 1.0)
    assert pick(act.ReportBack, world.fill(1)) == [act.ReportBack(1, 1.0)]
    leases = pick(act.GrantLease, world.fill_all())
    assert [(lease.epoch, lease.step) for lease in leases] == [(0, 0), (0, 1)]
    assert world.state.statistics().streams[0].decoded_samples == 9
    assert world.state.statistics().streams[0].away is None


def test_a_stream_whose_storage_stays_away_stops_with_the_cure() -> None:
    """The last try is when the time is over; then trainers get the reason, and the command."""
    world = world_of(storage_away_s=5.0)
    world.subscribe()
    world.pull(1)
    while world.workers[1].orders:
        world.find_away(1)
    for seconds in (1.0, 2.0, 2.0):
        assert not world.stopped
        tick(world, seconds)
        actions = world.find_away(1)
    (stopped,) = pick(act.ReportStopped, actions)
    assert stopped.text.startswith(f"{REASON}; it was waited for during 5 s (storage_away_s = 5)")
    assert "`batchd reload` starts the stream again" in stopped.text
    assert [one.error for one in pick(act.Refuse, actions)] == [ErrorCode.STREAM_STOPPED]
    assert world.state.statistics().streams[0].away is None
    assert not pick(act.OrderChunk, tick(world, 60.0))


def test_a_worker_that_dies_with_the_probe_costs_a_pause() -> None:
    """Its row is tried again: the stream does not wait for an order that nobody has."""
    world = world_of(workers=2)
    world.subscribe()
    world.pull(1)
    for number in list(world.workers):
        while world.workers[number].orders:
            world.find_away(number)
    (probe,) = pick(act.OrderChunk, tick(world, 1.0))
    assert not pick(act.OrderChunk, world.kill(probe.worker, from_outside=True))
    (again,) = pick(act.OrderChunk, tick(world, 1.0))
    assert again.order != probe.order


def test_a_stream_without_trainers_does_not_stop_for_storage_that_was_away() -> None:
    """Nothing is tried for it; the next trainer's first row is, and the storage is there."""
    world = world_of(storage_away_s=5.0)
    world.subscribe()
    world.pull(1)
    while world.workers[1].orders:
        world.find_away(1)
    world.end(1)
    assert not pick(act.OrderChunk, tick(world, 100.0))
    world.subscribe(session=2)
    assert pick(act.ReportBack, world.fill(1)) == [act.ReportBack(1, 100.0)]
    assert not world.stopped


def test_other_streams_go_on_while_the_storage_of_one_is_away() -> None:
    """A filled order of before does not end the outage, and says nothing about the storage."""
    world = CheckedWorld([make_spec(1, storage_away_s=9.0), make_spec(2)])
    world.start_workers()
    world.subscribe(1, session=1)
    while world.workers[1].orders:
        world.find_away(1)
    world.subscribe(2, session=2)
    assert [lease.subscription for lease in pick(act.GrantLease, world.fill_all())] == [2, 2]
    assert world.state.statistics().streams[0].away == REASON


@pytest.mark.parametrize("open_blocks", [None, 3])
def test_worker_hosts_get_no_order_of_a_stream_whose_storage_is_away_here(open_blocks: int | None) -> None:
    """The probe is a local worker's, whatever worker hosts could do."""
    world = world_of(open_blocks=open_blocks)
    world.host_joins(1)
    world.subscribe()
    world.pull(1)
    while world.workers[1].orders:
        world.find_away(1)
    assert [order.worker for order in pick(act.OrderChunk, tick(world, 1.0))] == [1]
