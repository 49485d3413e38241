"""How a trainer's waiting time is attributed, and what is kept of the workers' reports."""

import pytest

from batchd.core import events as ev
from batchd.core.measure import SLOWEST_LISTED_MAX, Moment, Spells, WorkDone
from batchd.core.state import DaemonState
from batchd.core.work import NO_WORK
from batchd_wire.status import SubscriptionStatistics, WaitStatistics, WorkStatistics
from support.core_invariants import CheckedWorld
from support.core_live import LiveWorld, live_spec
from support.core_world import World, make_spec


def trainer_of(world: World, number: int = 1) -> SubscriptionStatistics:
    """Return the statistics of a trainer."""
    streams = world.state.statistics().streams
    return next(one for stream in streams for one in stream.subscriptions if one.number == number)


def waits_of(world: World, number: int = 1) -> WaitStatistics:
    return trainer_of(world, number).waits


def work_of(state: DaemonState) -> WorkStatistics:
    return state.statistics().streams[0].work


def pass_time(world: World, seconds: float) -> None:
    """Let time pass and send the state a tick."""
    world.now += seconds
    world.do(ev.Ticked())


def test_waiting_for_a_batch_that_is_filled_is_put_down_to_the_workers() -> None:
    """The time counts from the trainer's pull until the batch is handed over, and not longer."""
    world = CheckedWorld([make_spec(window=1)])
    world.start_workers()
    world.subscribe()
    world.pull(1)
    pass_time(world, 3)
    running = waits_of(world)
    world.fill_all()
    pass_time(world, 5)

    assert running == WaitStatistics(workers_s=3)
    assert waits_of(world) == WaitStatistics(workers_s=3)


def test_waiting_is_counted_up_to_the_look_at_it() -> None:
    """The time is current in every status, because a rate divides by the time between statuses."""
    world = CheckedWorld([make_spec(window=1)])
    world.start_workers()
    world.subscribe()
    world.pull(1)

    (stream,) = world.state.statistics(world.now + 3).streams
    assert stream.subscriptions[0].waits == WaitStatistics(workers_s=3)


def test_a_trainer_that_is_busy_waits_for_nothing() -> None:
    """The trainer's batches are ready and it asks for none, so no waiting is counted."""
    world = CheckedWorld([make_spec(window=2)])
    world.start_workers()
    world.subscribe()
    world.fill_all()
    pass_time(world, 9)

    assert waits_of(world) == WaitStatistics()
    assert trainer_of(world).ready_ahead == 2


def test_a_ring_without_a_free_slot_is_put_down_to_memory() -> None:
    """Workers still write into its slots for a trainer that has disconnected."""
    world = CheckedWorld([make_spec(slots_max=2)])
    world.start_workers()
    world.subscribe()
    world.end_session(1)
    world.subscribe(session=2, epoch=1)
    world.pull(2)
    pass_time(world, 2)
    world.fill_all()

    waits = waits_of(world, 2)
    assert (waits.memory_s, waits.network_s, waits.trainers_s) == (2, 0, 0)


def test_wanting_more_ahead_than_the_ring_holds_is_counted() -> None:
    """The window is four, and the ring has room for two."""
    world = CheckedWorld([make_spec(slots_max=2, window=4)])
    world.start_workers()
    world.subscribe()
    world.fill_all()
    pass_time(world, 6)

    assert trainer_of(world).short_of_memory_s == 6


def test_a_ring_that_holds_the_window_is_short_of_nothing() -> None:
    """Otherwise `batchd why` would always advise more memory."""
    world = CheckedWorld([make_spec(slots_max=8, window=4)])
    world.start_workers()
    world.subscribe()
    for _ in range(3):
        world.fill_all()
        world.pull(1)
        pass_time(world, 1)

    assert trainer_of(world).short_of_memory_s == 0


def test_waiting_in_lockstep_is_put_down_to_the_other_trainers() -> None:
    """The fast trainer pauses because the slow trainer reads nothing."""
    world = CheckedWorld([make_spec(max_skew=1, window=4)])
    world.start_workers()
    world.subscribe()
    world.subscribe(session=2)
    for _ in range(4):
        world.pull(1)
        world.fill_all()
    before = waits_of(world)
    pass_time(world, 7)

    after = waits_of(world)
    assert (after.trainers_s - before.trainers_s, after.workers_s - before.workers_s) == (7, 0)


def test_waiting_for_samples_is_put_down_to_the_producers() -> None:
    """Producers are the cause until there are enough samples for a batch, and then the workers."""
    world = LiveWorld([live_spec(window=1)])
    world.start_workers()
    world.subscribe()
    world.pull(1)
    pass_time(world, 4)
    world.produce(1000)
    world.push_all(1000, 3)
    pass_time(world, 2)

    assert waits_of(world) == WaitStatistics(producers_s=4, workers_s=2)


def test_a_remote_trainer_waits_for_the_network_until_its_batch_has_left() -> None:
    """The workers' part ends when the batch is full."""
    world = CheckedWorld([make_spec(window=1)])
    world.start_workers()
    world.subscribe(is_remote=True)
    world.pull(1)
    pass_time(world, 1)
    world.fill_all()
    pass_time(world, 5)
    world.send(1)
    pass_time(world, 9)

    assert waits_of(world) == WaitStatistics(workers_s=1, network_s=5)


def test_a_remote_trainer_that_asks_for_what_is_being_sent_waits_for_the_network() -> None:
    """The batch was handed over before the trainer waited."""
    world = CheckedWorld([make_spec(window=2)])
    world.start_workers()
    world.subscribe(is_remote=True)
    world.fill_all()
    world.pull(1, consume=0)
    pass_time(world, 2)
    world.send(1)
    pass_time(world, 9)

    assert waits_of(world) == WaitStatistics(network_s=2)


def test_a_trainer_that_loses_a_claim_to_a_newcomer_waits_for_memory_from_then_on() -> None:
    """The first trainer has two batches in flight and one ready, and the ring has no free slot."""
    world = CheckedWorld([make_spec(window=3, slots_max=6)])
    world.start_workers()
    world.subscribe(is_remote=True)
    world.subscribe(session=2)
    world.fill_all()
    world.pull(1)
    world.pull(1)
    world.pull(1)
    pass_time(world, 2)
    assert waits_of(world) == WaitStatistics(network_s=2)

    world.subscribe(session=3)
    pass_time(world, 3)

    assert waits_of(world) == WaitStatistics(network_s=2, memory_s=3)


def test_what_a_remote_trainer_waits_beyond_what_is_known_here_is_the_network() -> None:
    """The batch is in buffers on the way, and the trainer's own count includes that time."""
    world = CheckedWorld([make_spec(window=1)])
    world.start_workers()
    world.subscribe(is_remote=True)
    world.pull(1)
    pass_time(world, 1)
    world.fill_all()
    world.send(1)
    pass_time(world, 6)
    world.do(ev.Pulled(1, 1, 1, False, 7_000_000, []))

    assert waits_of(world) == WaitStatistics(workers_s=1, network_s=6)


def test_a_trainer_that_is_gone_waits_no_more() -> None:
    """Its claim has ended, and only the batches that it still reads remain."""
    world = CheckedWorld([make_spec(window=1)])
    world.start_workers()
    world.subscribe()
    world.pull(1)
    world.fill_all()
    world.pull(1, release=0)
    pass_time(world, 1)
    world.cut_off(1)
    pass_time(world, 9)

    assert waits_of(world) == WaitStatistics(workers_s=1)


def test_a_spell_that_goes_on_is_counted_up_to_now() -> None:
    """A repeated call with the same value changes nothing."""
    moment = Moment()
    spells = Spells(moment)
    spells.turn(on=True)
    moment.now_s = 2
    spells.turn(on=True)
    moment.now_s = 3
    assert spells.total_s == 3
    spells.turn(on=False)
    moment.now_s = 9
    spells.turn(on=False)

    assert spells.total_s == 3


def test_the_workers_time_is_added_up_part_by_part() -> None:
    """The parts have the names that a worker reported."""
    world = CheckedWorld([make_spec()])
    world.start_workers()
    world.do(ev.PartsNamed(1, ("read", "decode")))
    world.subscribe()
    done = NO_WORK._replace(busy_us=5000, waited_us=7, cpu_us=4000, parts_us=[1000, 3000], read_bytes=90, usual_us=800)
    for _ in range(2):
        order = world.workers[1].orders.pop(0)
        world.slots[order.slot].rows.update((order.position, row) for row in order.rows)
        world.do(ev.ChunkDone(1, (order.order,), done, [], ""))

    work = work_of(world.state)
    assert (work.busy_s, work.waited_s, work.cpu_s, work.read_bytes) == (0.01, 14e-6, 0.008, 180)
    assert [(part.name, part.busy_s) for part in work.parts] == [("read", 0.002), ("decode", 0.006)]
    assert work.usual_sample_s == 0.0008


def slow_chunks(chunks: list[list[tuple[int, str, int]]]) -> WorkStatistics:
    """Return the samples kept after each chunk with these slow samples: number, path, us."""
    done = WorkDone()
    for slow in chunks:
        done.add(NO_WORK._replace(slow_rows=len(slow), slow_us=1000, slow=slow))
    return done.statistics()


def test_the_slowest_samples_are_kept_and_no_more_than_that() -> None:
    """Any number of samples gives a list of fixed length, with the slowest first."""
    chunks = [[(number, f"{number}.jpg", 1000 * number), (8, "8.jpg", 999_000)] for number in range(100)]
    work = slow_chunks(chunks)

    assert (work.slow_rows, work.slow_s) == (200, pytest.approx(0.1))
    assert [one.path for one in work.slowest[:3]] == ["8.jpg", "99.jpg", "98.jpg"]
    assert len(work.slowest) <= SLOWEST_LISTED_MAX
    assert work.slowest[0].slow_row == 200


def test_samples_that_were_slow_long_ago_are_listed_no_more() -> None:
    """Old entries would hide the samples that are slow now."""
    former = [[(number, f"former-{number}.jpg", 999_000)] for number in range(40)]
    now = [[(1000 + number % 40, f"now-{number % 40}.jpg", 1000)] for number in range(40)]
    work = slow_chunks(former + now * 13)
    assert {one.path.partition("-")[0] for one in work.slowest} == {"now"}

    newest = slow_chunks(former * 7 + now[:3])
    assert [one.path for one in newest.slowest[-3:]] == ["now-0.jpg", "now-1.jpg", "now-2.jpg"]


def test_waiting_for_a_cpu_is_unknown_until_a_worker_knows_it() -> None:
    """The value is unknown, not zero, until a worker reports it."""
    done = WorkDone()
    done.add(NO_WORK._replace(cpu_wait_us=None, read_cpu_us=7))
    assert done.statistics().cpu_wait_s is None
    done.add(NO_WORK._replace(cpu_wait_us=3000, read_cpu_us=7))

    assert (done.statistics().cpu_wait_s, done.statistics().read_cpu_s) == (0.003, 14e-6)
