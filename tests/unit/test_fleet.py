"""Workers: when they start, when they are given up, and what becomes of their orders."""

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.fleet import BACKOFF_FIRST_S, BACKOFF_MAX_S, SMALL_ORDERS_S, WorkerKind
from batchd.core.state import GAP_S
from support.core_invariants import CheckedWorld
from support.core_world import SAMPLE_TIMEOUT_S, WORKERS, make_spec, pick, work


def world_of(workers: int = 1, chunk_rows_max: int = 256, **changes) -> CheckedWorld:
    """One stream with a trainer that wants two batches, and workers that are up."""
    world = CheckedWorld([make_spec(**changes)], workers, chunk_rows_max)
    world.start_workers()
    return world


def note_of(world: CheckedWorld, number: int) -> ev.Note:
    """What a worker's note says while it works on the first row of its oldest order."""
    order = world.workers[number].orders[0]
    return ev.Note(order.order, order.rows[0], world.samples(order)[0])


def rows_ordered(actions) -> list[tuple[int, int, int]]:
    """(step, first row, rows) of the orders given, in order."""
    return [(order.position.step, order.rows[0], len(order.rows)) for order in pick(act.OrderChunk, actions)]


def test_workers_are_started_by_the_first_tick():
    """One for each place, and no more later."""
    world = CheckedWorld([make_spec()], workers=3)
    assert world.do(ev.Ticked()) == [act.SpawnWorker(1), act.SpawnWorker(2), act.SpawnWorker(3)]
    assert world.do(ev.Ticked()) == []


def test_a_worker_gets_orders_when_it_is_ready_and_no_sooner():
    """A process that is still importing cannot take any."""
    world = CheckedWorld([make_spec()])
    world.subscribe()
    assert pick(act.OrderChunk, world.do(ev.Ticked())) == []
    assert rows_ordered(world.ready(1)) == [(0, 0, 3), (1, 0, 3)]


@pytest.mark.parametrize("orders_max", [2, 4])
def test_a_worker_has_as_many_orders_as_its_kind_allows(orders_max):
    """One in hand, and the others are there when it is done."""
    world = CheckedWorld([make_spec(window=5)], kind=WorkerKind(orders_max, 60.0, 0.0))
    world.start_workers()
    world.subscribe()
    assert len(world.workers[1].orders) == orders_max
    world.fill(1)
    assert len(world.workers[1].orders) == orders_max


def test_a_worker_without_any_order_is_served_first():
    """So that all of them work before one has two."""
    world = world_of(workers=3, window=5)
    orders = pick(act.OrderChunk, world.subscribe())
    assert [order.worker for order in orders[:3]] == [1, 2, 3]
    assert sorted(order.worker for order in orders[3:]) == [1, 2]


def test_a_worker_that_did_something_is_replaced_at_once():
    """Under a new number; its place is the same."""
    world = world_of()
    world.subscribe()
    world.fill(1)
    assert world.kill(1) == [act.SpawnWorker(2)]
    assert [(one.number, one.place) for one in world.state.statistics().workers] == [(2, 0)]


def test_workers_that_die_without_a_chunk_come_back_less_and_less_often():
    """A tenth of a second, then twice as long each time, up to five seconds."""
    world = world_of()
    pauses = []
    for number in range(1, 11):
        assert world.kill(number) == []
        before = world.now
        due_s = world.state.fleet.next_spawn_s
        pauses.append(due_s - before)
        world.now = due_s - 1e-6
        assert pick(act.SpawnWorker, world.do(ev.Ticked())) == []
        world.now = due_s
        assert pick(act.SpawnWorker, world.do(ev.Ticked())) == [act.SpawnWorker(number + 1)]
    expected = [min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**death) for death in range(10)]
    assert pauses == pytest.approx(expected)


def test_one_chunk_ends_the_back_off():
    """A place whose worker did something again starts over."""
    world = world_of()
    world.subscribe()
    for number in (1, 2, 3):
        world.kill(number)
        world.now = world.state.fleet.next_spawn_s
        world.start_workers()
    world.fill(4)
    assert world.kill(4) == [act.SpawnWorker(5)]


def test_each_place_has_its_own_back_off():
    """One place whose workers die does not keep the other's from coming back."""
    world = world_of(workers=2)
    world.subscribe()
    world.fill(2)
    world.kill(1)
    assert act.SpawnWorker(3) in world.kill(2)


def test_a_worker_stuck_on_a_sample_is_killed():
    """Its note says the same for ``sample_timeout_s``.

    It gets no further orders, and keeps its own until it is dead.
    """
    world = world_of()
    world.subscribe()
    note = note_of(world, 1)
    world.do(ev.WorkerObserved(1, note))
    world.now = SAMPLE_TIMEOUT_S - 0.1
    assert world.do(ev.WorkerObserved(1, note)) == []
    world.now = SAMPLE_TIMEOUT_S
    assert world.do(ev.WorkerObserved(1, note)) == [act.KillWorker(1, "it worked on one sample for 30 s")]
    assert world.do(ev.WorkerObserved(1, note)) == []
    assert [one.state for one in world.state.statistics().workers] == ["ending"]
    assert pick(act.OrderChunk, world.fill(1)) == []


def test_a_worker_whose_note_arrives_late_has_so_much_longer():
    """The note of a worker on another host says what it had in hand a while ago."""
    world = CheckedWorld([make_spec()], kind=WorkerKind(2, 60.0, note_delay_s=1.5))
    world.start_workers()
    world.subscribe()
    note = note_of(world, 1)
    world.do(ev.WorkerObserved(1, note))
    world.now = SAMPLE_TIMEOUT_S + 1.4
    assert world.do(ev.WorkerObserved(1, note)) == []
    world.now = SAMPLE_TIMEOUT_S + 1.5
    assert pick(act.KillWorker, world.do(ev.WorkerObserved(1, note))) != []


def test_a_worker_that_goes_on_is_not_stuck():
    """Another row, another order, or nothing to do: each starts the clock anew."""
    world = world_of()
    world.subscribe()
    first = note_of(world, 1)
    for note in (first, first._replace(row=1), first._replace(order=2, row=0)):
        world.do(ev.WorkerObserved(1, note))
        world.now += SAMPLE_TIMEOUT_S - 1
        assert world.do(ev.WorkerObserved(1, note)) == []
    world.fill_all()
    for _ in range(3):
        world.now += SAMPLE_TIMEOUT_S
        assert world.do(ev.WorkerObserved(1, None)) == []
    world.pull(1)
    assert world.do(ev.WorkerObserved(1, None)) == []


def test_a_worker_that_carries_out_orders_is_not_stuck_whatever_its_note_says():
    """Orders may take so little that each look at the note is between two of them."""
    world = world_of()
    world.subscribe()
    for _ in range(4):
        world.now += SAMPLE_TIMEOUT_S - 1
        assert pick(act.KillWorker, world.do(ev.WorkerObserved(1, None))) == []
        world.fill(1)
        world.pull(1)
    assert world.workers[1].orders


def test_a_worker_that_never_begins_its_order_is_stuck_too():
    """Its note stays empty although it has had an order for long."""
    world = world_of()
    world.subscribe()
    world.now = SAMPLE_TIMEOUT_S + 1
    assert pick(act.KillWorker, world.do(ev.WorkerObserved(1, None))) != []


def test_a_worker_that_does_not_come_up_is_killed():
    """After the start timeout of its kind, once."""
    world = CheckedWorld([make_spec()])
    world.do(ev.Ticked())
    while world.now < WORKERS.start_timeout_s:
        world.now += 1.0
        assert world.do(ev.Ticked()) == []
    world.now += 1.0
    assert world.do(ev.Ticked()) == [act.KillWorker(1, "it did not start within 60 s")]
    assert world.do(ev.WorkerReady(1)) == []
    world.now += 1.0
    assert world.do(ev.Ticked()) == []


def test_a_pause_of_the_machine_is_held_against_nobody():
    """An hour between two ticks was not the workers' hour.

    Neither the one at work nor the one coming up is killed.
    """
    world = world_of()
    world.subscribe()
    world.fill_all()
    world.kill(1)
    world.do(ev.Ticked())
    world.ready(2)
    world.pull(1)
    note = note_of(world, 2)
    world.do(ev.WorkerObserved(2, note))
    world.now += 3600.0
    assert world.do(ev.Ticked()) == []
    assert world.do(ev.WorkerObserved(2, note)) == []
    for _ in range(int(SAMPLE_TIMEOUT_S) - 1):
        world.now += 1.0
        world.do(ev.Ticked())
        assert world.do(ev.WorkerObserved(2, note)) == []
    world.now += 1.0
    assert pick(act.KillWorker, world.do(ev.WorkerObserved(2, note))) != []


def test_a_pause_of_the_machine_is_not_held_against_a_worker_that_comes_up():
    """Its minute to start goes on where it stopped."""
    world = CheckedWorld([make_spec()])
    world.do(ev.Ticked())
    world.now += 3600.0
    assert world.do(ev.Ticked()) == []
    world.now += 1.0
    assert world.do(ev.Ticked()) == []


def test_a_worker_that_was_idle_for_long_has_its_whole_time_for_the_next_order():
    """Its clock starts when it gets the order, whenever it was last looked at."""
    world = world_of()
    world.now = 5000.0
    world.subscribe()
    assert world.do(ev.WorkerObserved(1, None)) == []
    world.now += SAMPLE_TIMEOUT_S - 1
    assert world.do(ev.WorkerObserved(1, None)) == []


def test_a_pause_is_not_given_to_what_began_after_it():
    """A note first seen after the pause has its thirty seconds from then on."""
    world = world_of()
    world.subscribe()
    world.do(ev.Ticked())
    world.now += 3600.0
    note = note_of(world, 1)
    world.do(ev.WorkerObserved(1, note))
    world.do(ev.Ticked())
    for _ in range(int(SAMPLE_TIMEOUT_S)):
        world.now += 1.0
        world.do(ev.Ticked())
    assert pick(act.KillWorker, world.do(ev.WorkerObserved(1, note))) != []


def test_ordinary_ticks_forgive_nothing():
    """Up to two seconds between ticks the clock runs."""
    world = world_of()
    world.subscribe()
    note = note_of(world, 1)
    world.do(ev.WorkerObserved(1, note))
    while world.now < SAMPLE_TIMEOUT_S:
        world.now += GAP_S
        world.do(ev.Ticked())
    assert pick(act.KillWorker, world.do(ev.WorkerObserved(1, note))) != []


def test_a_dead_workers_orders_are_carried_out_by_another():
    """Every row once more, in order; only the order it had in hand is cut in two."""
    world = world_of()
    world.subscribe()
    world.kill(1)
    world.now = 1.0
    world.do(ev.Ticked())
    actions = world.ready(2) + world.fill_all()
    assert rows_ordered(actions) == [(0, 0, 1), (0, 1, 2), (1, 0, 3)]
    assert [lease.step for lease in pick(act.GrantLease, actions)] == [0, 1]


def test_a_dead_workers_note_says_which_order_it_had_in_hand():
    """The second one: so the first goes back whole, and the named row stands alone."""
    world = world_of()
    world.subscribe()
    world.kill(1, ev.Note(2, 1, 4))
    world.now = 1.0
    world.do(ev.Ticked())
    assert rows_ordered(world.ready(2) + world.fill_all()) == [(0, 0, 3), (1, 0, 1), (1, 1, 1), (1, 2, 1)]


def test_a_note_of_an_order_that_is_done_puts_nothing_under_suspicion():
    """The worker died between two orders."""
    world = world_of()
    world.subscribe()
    world.kill(1, ev.Note(99, 0, 0))
    world.now = 1.0
    world.do(ev.Ticked())
    assert rows_ordered(world.ready(2)) == [(0, 0, 3), (1, 0, 3)]


def test_a_report_that_arrives_from_a_dying_worker_still_counts():
    """It was told to die, but had filled the rows before."""
    world = world_of()
    world.subscribe()
    world.now = SAMPLE_TIMEOUT_S + 1
    world.do(ev.WorkerObserved(1, None))
    assert [lease.step for lease in pick(act.GrantLease, world.fill(1))] == [0]


SMALL = WorkerKind(2, 60.0, 0.0, small_orders_max=6)


@pytest.mark.parametrize(
    ("order_s", "orders"), [(SMALL_ORDERS_S / 100, 6), (SMALL_ORDERS_S / 4, 4), (SMALL_ORDERS_S, 2)]
)
def test_a_worker_has_many_orders_while_they_are_small(order_s, orders):
    """While their expected work is little; before a time was measured, as many as of any."""
    world = CheckedWorld([make_spec(window=20, slots_max=30)], kind=SMALL)
    world.start_workers()
    world.subscribe()
    assert len(world.workers[1].orders) == 2
    for _ in range(20):
        world.fill(1, busy_us=int(order_s * 1e6))
        world.pull(1)

    assert len(world.workers[1].orders) == orders


def test_orders_that_are_reported_together_are_handed_out_together():
    """In order; their time is that of all their samples."""
    world = CheckedWorld([make_spec(window=5)], kind=SMALL)
    world.start_workers()
    world.subscribe()
    for _ in range(2):
        world.fill(1, busy_us=30)
    assert len(world.workers[1].orders) == 3
    actions = world.fill(1, busy_us=900, orders=2)

    assert [commit.position.step for commit in pick(act.CommitSlot, actions)] == [2, 3]
    assert world.state.statistics().workers[0].busy_s == pytest.approx(960e-6)
    assert world.state.statistics().workers[0].chunks == 4
    assert len(world.workers[1].orders) == 1


def test_small_orders_are_spread_over_all_workers():
    """The one with the fewest gets the next."""
    world = CheckedWorld([make_spec(samples=60, window=10, slots_max=20)], workers=3, kind=SMALL)
    world.start_workers()
    world.subscribe(window=1)
    world.fill(1, busy_us=30)
    world.subscribe(session=2, epoch=1, window=9)

    assert [len(worker.orders) for worker in world.workers.values()] == [3, 3, 3]


@pytest.mark.parametrize("numbers", [(), (1, 77)], ids=["none", "one that it does not have"])
def test_a_worker_that_reports_orders_that_cannot_be_done_is_killed(numbers):
    world = world_of(window=3)
    world.subscribe()
    (kill,) = world.do(ev.ChunkDone(1, numbers, work(1000), [], ""))
    assert isinstance(kill, act.KillWorker)


def test_a_worker_that_reports_what_it_was_not_ordered_is_killed():
    """Once, and it is given nothing more."""
    world = world_of(window=3)
    world.subscribe()
    first = world.do(ev.ChunkDone(1, (77,), work(1000), [], ""))
    assert first == [act.KillWorker(1, "it reports order 77, which it does not have")]
    assert world.do(ev.ChunkDone(1, (77,), work(1000), [], "")) == []
    assert pick(act.OrderChunk, world.fill(1)) == []


def test_a_draining_daemon_finishes_what_is_under_way_and_begins_nothing():
    """No further orders, no further workers; then it is drained."""
    world = world_of(workers=2)
    world.subscribe()
    world.do(ev.DrainAsked())
    assert not world.state.is_drained
    assert pick(act.GrantLease, world.fill_all()) != []
    assert world.state.is_drained
    assert world.kill(1) == []
    assert pick(act.OrderChunk, world.pull(1)) == []
    world.now = 100.0
    assert pick(act.SpawnWorker, world.do(ev.Ticked())) == []
    assert world.state.fleet.next_spawn_s is None


def test_what_workers_did_is_counted():
    """Chunks, samples and busy time of each worker; deaths of all."""
    world = world_of(chunk_rows_max=2)
    world.subscribe(end_epoch=1)
    for _ in range(3):
        world.fill(1, busy_us=250_000)
    (worker,) = world.state.statistics().workers
    assert (worker.chunks, worker.samples, worker.busy_s, worker.state) == (3, 4, 0.75, "ready")
    world.kill(1)
    assert world.state.statistics().worker_deaths == 1


def test_a_lost_slots_orders_are_taken_from_the_workers():
    """They were never sent, and the worker is free for others at once."""
    world = world_of(slots_max=6, window=4)
    world.slots_left = 0
    world.subscribe(session=1)
    world.slots_left = None
    assert world.workers[1].orders == []
    assert len(world.state.fleet.workers[1].orders) == 2
    assert pick(act.OrderChunk, world.lose_next()) != []
