"""Workers: their start, the reasons to kill them, and their orders."""

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.fleet import BACKOFF_FIRST_S, BACKOFF_MAX_S, SMALL_ORDERS_S, WorkerKind
from batchd.core.state import GAP_S
from support.core_invariants import CheckedWorld
from support.core_world import SAMPLE_TIMEOUT_S, WORKERS, make_spec, pick, work


def world_of(workers: int = 1, chunk_rows_max: int = 256, **changes) -> CheckedWorld:
    """One stream with a trainer that wants two batches, and workers that are ready."""
    world = CheckedWorld([make_spec(**changes)], workers, chunk_rows_max)
    world.start_workers()
    return world


def note_of(world: CheckedWorld, number: int) -> ev.Note:
    """A worker's note while it works on the first row of its oldest order."""
    order = world.workers[number].orders[0]
    return ev.Note(order.order, order.rows[0], world.samples(order)[0])


def rows_ordered(actions) -> list[tuple[int, int, int]]:
    """(step, first row, rows) of the orders given, in order."""
    return [(order.position.step, order.rows[0], len(order.rows)) for order in pick(act.OrderChunk, actions)]


def test_workers_are_started_by_the_first_tick():
    """One worker is started for each place, and no more later."""
    world = CheckedWorld([make_spec()], workers=3)
    assert world.do(ev.Ticked()) == [act.SpawnWorker(1), act.SpawnWorker(2), act.SpawnWorker(3)]
    assert world.do(ev.Ticked()) == []


def test_a_worker_gets_orders_when_it_is_ready_and_no_sooner():
    """A process that still imports modules cannot take any."""
    world = CheckedWorld([make_spec()])
    world.subscribe()
    assert pick(act.OrderChunk, world.do(ev.Ticked())) == []
    assert rows_ordered(world.ready(1)) == [(0, 0, 3), (1, 0, 3)]


@pytest.mark.parametrize("orders_max", [2, 4])
def test_a_worker_has_as_many_orders_as_its_kind_allows(orders_max):
    """One is in progress, and the others are queued for its end."""
    world = CheckedWorld([make_spec(window=5)], kind=WorkerKind(orders_max, 60.0, 0.0))
    world.start_workers()
    world.subscribe()
    assert len(world.workers[1].orders) == orders_max
    world.fill(1)
    assert len(world.workers[1].orders) == orders_max


def test_a_worker_without_any_order_is_served_first():
    """So all workers are busy before one has two orders."""
    world = world_of(workers=3, window=5)
    orders = pick(act.OrderChunk, world.subscribe())
    assert [order.worker for order in orders[:3]] == [1, 2, 3]
    assert sorted(order.worker for order in orders[3:]) == [1, 2]


def test_a_worker_that_worked_before_its_death_is_replaced_at_once():
    """The replacement has a new number and the same place."""
    world = world_of()
    world.subscribe()
    world.fill(1)
    assert world.kill(1) == [act.SpawnWorker(2)]
    assert [(one.number, one.place) for one in world.state.statistics().workers] == [(2, 0)]


def test_workers_that_die_without_a_chunk_are_restarted_less_and_less_often():
    """The pause is a tenth of a second, then twice as long each time, up to five seconds."""
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
    """A place whose worker finished a chunk starts again with the shortest pause."""
    world = world_of()
    world.subscribe()
    for number in (1, 2, 3):
        world.kill(number)
        world.now = world.state.fleet.next_spawn_s
        world.start_workers()
    world.fill(4)
    assert world.kill(4) == [act.SpawnWorker(5)]


def test_each_place_has_its_own_back_off():
    """A place whose workers die does not delay the restart of another place."""
    world = world_of(workers=2)
    world.subscribe()
    world.fill(2)
    world.kill(1)
    assert act.SpawnWorker(3) in world.kill(2)


def test_a_worker_stuck_on_a_sample_is_killed():
    """Its note is the same for ``sample_timeout_s``.

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


def test_a_worker_whose_note_arrives_late_gets_that_much_longer():
    """The note of a remote worker describes an earlier moment."""
    world = CheckedWorld([make_spec()], kind=WorkerKind(2, 60.0, note_delay_s=1.5))
    world.start_workers()
    world.subscribe()
    note = note_of(world, 1)
    world.do(ev.WorkerObserved(1, note))
    world.now = SAMPLE_TIMEOUT_S + 1.4
    assert world.do(ev.WorkerObserved(1, note)) == []
    world.now = SAMPLE_TIMEOUT_S + 1.5
    assert pick(act.KillWorker, world.do(ev.WorkerObserved(1, note))) != []


def test_a_worker_that_progresses_is_not_stuck():
    """Another row, another order, or no order: each restarts the timeout."""
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


def test_a_worker_that_finishes_orders_is_not_stuck_for_any_note():
    """Orders may be so short that each look at the note is between two of them."""
    world = world_of()
    world.subscribe()
    for _ in range(4):
        world.now += SAMPLE_TIMEOUT_S - 1
        assert pick(act.KillWorker, world.do(ev.WorkerObserved(1, None))) == []
        world.fill(1)
        world.pull(1)
    assert world.workers[1].orders


def test_a_worker_that_never_starts_its_order_is_stuck_too():
    """Its note stays empty although it has had an order for long."""
    world = world_of()
    world.subscribe()
    world.now = SAMPLE_TIMEOUT_S + 1
    assert pick(act.KillWorker, world.do(ev.WorkerObserved(1, None))) != []


def test_a_worker_that_does_not_start_is_killed():
    """It is killed once, after the start timeout of its kind."""
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


def test_a_pause_of_the_machine_kills_no_worker():
    """The workers did not run in an hour between two ticks.

    Neither a busy worker nor a starting one is killed.
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


def test_a_pause_of_the_machine_does_not_count_for_a_starting_worker():
    """Its minute to start continues after the pause."""
    world = CheckedWorld([make_spec()])
    world.do(ev.Ticked())
    world.now += 3600.0
    assert world.do(ev.Ticked()) == []
    world.now += 1.0
    assert world.do(ev.Ticked()) == []


def test_a_worker_that_was_idle_for_long_has_its_whole_time_for_the_next_order():
    """Its timeout starts with the order, at any distance from the last look."""
    world = world_of()
    world.now = 5000.0
    world.subscribe()
    assert world.do(ev.WorkerObserved(1, None)) == []
    world.now += SAMPLE_TIMEOUT_S - 1
    assert world.do(ev.WorkerObserved(1, None)) == []


def test_a_pause_does_not_extend_later_timeouts():
    """A note first seen after the pause has thirty seconds from then on."""
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


def test_ordinary_ticks_extend_no_timeout():
    """The timeout runs for up to two seconds between ticks."""
    world = world_of()
    world.subscribe()
    note = note_of(world, 1)
    world.do(ev.WorkerObserved(1, note))
    while world.now < SAMPLE_TIMEOUT_S:
        world.now += GAP_S
        world.do(ev.Ticked())
    assert pick(act.KillWorker, world.do(ev.WorkerObserved(1, note))) != []


def test_a_dead_workers_orders_are_carried_out_by_another():
    """Every row is ordered again, in order; only the order in progress is cut in two."""
    world = world_of()
    world.subscribe()
    world.kill(1)
    world.now = 1.0
    world.do(ev.Ticked())
    actions = world.ready(2) + world.fill_all()
    assert rows_ordered(actions) == [(0, 0, 1), (0, 1, 2), (1, 0, 3)]
    assert [lease.step for lease in pick(act.GrantLease, actions)] == [0, 1]


def test_a_dead_workers_note_names_the_order_in_progress():
    """This is the second one: so the first is repeated whole, and the named row is alone."""
    world = world_of()
    world.subscribe()
    world.kill(1, ev.Note(2, 1, 4))
    world.now = 1.0
    world.do(ev.Ticked())
    assert rows_ordered(world.ready(2) + world.fill_all()) == [(0, 0, 3), (1, 0, 1), (1, 1, 1), (1, 2, 1)]


def test_a_note_of_a_finished_order_makes_no_sample_suspect():
    """The worker died between two orders."""
    world = world_of()
    world.subscribe()
    world.kill(1, ev.Note(99, 0, 0))
    world.now = 1.0
    world.do(ev.Ticked())
    assert rows_ordered(world.ready(2)) == [(0, 0, 3), (1, 0, 3)]


def test_a_report_from_a_dying_worker_still_counts():
    """The daemon killed it, but it had filled the rows before."""
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
    """The sum of their expected work is limited; without a measurement, their number is."""
    world = CheckedWorld([make_spec(window=20, slots_max=30)], kind=SMALL)
    world.start_workers()
    world.subscribe()
    assert len(world.workers[1].orders) == 2
    for _ in range(20):
        world.fill(1, busy_us=int(order_s * 1e6))
        world.pull(1)

    assert len(world.workers[1].orders) == orders


def test_orders_that_are_reported_together_are_granted_together():
    """They keep their order; their time is that of all their samples."""
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


def test_time_on_orders_is_unreported_until_one_is_done():
    """It starts again with each report, and without orders there is none."""
    world = CheckedWorld([make_spec(window=2, slots_max=3)])
    world.start_workers()

    def unreported_s(now_s):
        return world.state.statistics(now_s).workers[0].unreported_s

    assert unreported_s(1.0) == 0.0
    world.subscribe()
    assert unreported_s(3.0) == 3.0
    world.now = 4.0
    world.fill(1)
    assert unreported_s(6.0) == 2.0
    world.fill(1)
    assert not world.workers[1].orders
    assert unreported_s(7.0) == 0.0


def test_small_orders_are_spread_over_all_workers():
    """The worker with the fewest orders gets the next."""
    world = CheckedWorld([make_spec(samples=60, window=10, slots_max=20)], workers=3, kind=SMALL)
    world.start_workers()
    world.subscribe(window=1)
    world.fill(1, busy_us=30)
    world.subscribe(session=2, epoch=1, window=9)

    assert [len(worker.orders) for worker in world.workers.values()] == [3, 3, 3]


@pytest.mark.parametrize(("sample_us", "first"), [(300, [1] * 5), (700, [1, 1, 2, 2, 1]), (2000, [1, 2, 1, 2, 1])])
def test_a_worker_gets_short_batches_several_at_a_time(sample_us, first):
    """One takes 0.9, 2.1 or 6 ms, and those of one choice 5 ms: no more than its part of all."""
    world = CheckedWorld([make_spec(samples=60, window=10, slots_max=20)], workers=2, kind=SMALL)
    world.start_workers()
    world.state.streams[1].sample_s = sample_us / 1e6
    orders = pick(act.OrderChunk, world.subscribe())

    assert [order.position.step for order in orders] == [*range(len(orders))]
    assert [order.worker for order in orders][:5] == first


@pytest.mark.parametrize("numbers", [(), (1, 77)], ids=["none", "one that it does not have"])
def test_a_worker_that_reports_orders_that_cannot_be_done_is_killed(numbers):
    world = world_of(window=3)
    world.subscribe()
    (kill,) = world.do(ev.ChunkDone(1, numbers, work(1000), [], ""))
    assert isinstance(kill, act.KillWorker)


def test_a_worker_that_reports_unknown_orders_is_killed():
    """It is killed once, and gets no further orders."""
    world = world_of(window=3)
    world.subscribe()
    first = world.do(ev.ChunkDone(1, (77,), work(1000), [], ""))
    assert first == [act.KillWorker(1, "it reports order 77, which it does not have")]
    assert world.do(ev.ChunkDone(1, (77,), work(1000), [], "")) == []
    assert pick(act.OrderChunk, world.fill(1)) == []


def test_a_draining_daemon_finishes_its_work_and_starts_nothing():
    """It gives no further orders and starts no workers; then it is drained."""
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


def test_the_work_of_workers_is_counted():
    """The counters are chunks, samples and busy time of each worker, and deaths of all."""
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
    world.slots_left = 2
    world.subscribe(session=1)
    world.fill(1)
    world.fill(1)
    world.slots_left = None
    assert world.workers[1].orders == []
    assert len(world.state.fleet.workers[1].orders) == 2
    world.lose_next()
    assert len(world.state.fleet.workers[1].orders) == 1
    assert pick(act.OrderChunk, world.pull(1)) != []
