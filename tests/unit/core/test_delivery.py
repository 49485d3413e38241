"""From claim to release: the daemon's actions for one event.

Each event is followed by a check of all invariants.
"""

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from batchd_wire.codes import ErrorCode
from batchd_wire.position import Position
from support.core_invariants import CheckedWorld
from support.core_world import make_spec, pick, work


def world_of(workers: int = 1, **changes) -> CheckedWorld:
    """A world of one stream."""
    world = CheckedWorld([make_spec(**changes)], workers)
    world.start_workers()
    return world


def granted(actions) -> list[tuple[int, int, int]]:
    """(subscription, sequence, step) of the granted leases, in order."""
    return [(lease.subscription, lease.sequence, lease.step) for lease in pick(act.GrantLease, actions)]


def reserved(actions) -> list[int]:
    """The slots that are reserved for a new batch."""
    return [action.slot for action in pick(act.ReserveSlot, actions)]


def test_a_subscription_claims_its_window_and_orders_it_at_once():
    """The actions are a message to the trainer, and two orders, each behind its slot."""
    world = world_of()
    actions = world.subscribe()
    course = actions[0].course
    assert actions == [
        act.AdmitSubscription(1, 1001, 1, 1, course, 2),
        act.CreateSlot(1, 1),
        act.ReserveSlot(1),
        act.OrderChunk(1, 1, 1, 1, Position(0, 0), range(3)),
        act.CreateSlot(1, 2),
        act.ReserveSlot(2),
        act.OrderChunk(1, 2, 1, 2, Position(0, 1), range(3)),
    ]


@pytest.mark.parametrize(
    ("ends", "epoch", "is_last"),
    [([], 0, False), ([1], 0, True), ([None], 0, False), ([2], 0, False), ([2], 1, True), ([1, 3], 0, False)],
    ids=["no-trainer", "one-epoch", "endless", "first-of-two", "second-of-two", "one-of-two-trainers"],
)
def test_samples_are_read_again_while_one_trainer_is_in_another_epoch(ends, epoch, is_last):
    """The caches for later epochs depend on this."""
    world = world_of()
    for session, end in enumerate(ends, 1):
        world.subscribe(session=session, epoch=epoch, end_epoch=end)
    assert world.state.streams[1].delivery.is_in_last_epoch is is_last


def test_workers_have_time_while_only_the_last_batch_of_each_window_lacks_rows():
    """No trainer then waits for what workers do beside their orders."""
    world = world_of(window=3)
    delivery = world.state.streams[1].delivery

    def filled() -> bool:
        world.fill(1)
        return delivery.has_time_to_spare

    world.subscribe()
    assert not delivery.has_time_to_spare
    assert [filled() for _ in range(3)] == [False, True, True]
    world.pull(1, consume=1, waiting=False)
    assert delivery.has_time_to_spare
    world.subscribe(session=2, step=2)
    assert not delivery.has_time_to_spare
    world.fill_all()
    assert delivery.has_time_to_spare
    world.pull(1, consume=3)
    assert not delivery.has_time_to_spare


def test_a_complete_batch_is_committed_and_handed_out():
    """The slot is marked complete before any trainer is notified."""
    world = world_of()
    world.subscribe()
    assert world.fill(1) == [
        act.CommitSlot(1, 1, 1, Position(0, 0), 3),
        act.GrantLease(1, 1, 1, 0, 0, 0, 1, 1, 0, 3, is_remote=False),
    ]


def test_a_batch_with_a_row_missing_is_not_handed_out():
    """Chunks of two rows and one row: only the second chunk completes the batch."""
    world = CheckedWorld([make_spec()], chunk_rows_max=2)
    world.start_workers()
    world.subscribe()
    assert granted(world.fill(1)) == []
    assert granted(world.fill(1)) == [(1, 0, 0)]


def test_batches_are_handed_out_in_order_although_they_are_filled_out_of_order():
    """The second batch is complete first, and waits for the first one."""
    world = world_of(workers=2)
    world.subscribe()
    second = next(number for number, worker in world.workers.items() if worker.orders[0].position.step == 1)
    assert granted(world.fill(second)) == []
    assert granted(world.fill_all()) == [(1, 0, 0), (1, 1, 1)]


def test_no_more_batches_are_handed_out_than_the_window():
    """The window is two batches; the next one follows when one of them is consumed."""
    world = world_of()
    world.subscribe()
    assert granted(world.fill_all()) == [(1, 0, 0), (1, 1, 1)]
    assert granted(world.fill_all()) == []
    world.pull(1, consume=1, waiting=False)
    assert granted(world.fill_all()) == [(1, 2, 2)]


def test_a_batch_for_a_waiting_trainer_counts_as_consumed():
    """So the daemon claims the next batch without another message from the trainer."""
    world = world_of(window=1)
    world.subscribe()
    world.pull(1)
    actions = world.fill(1)
    assert granted(actions) == [(1, 0, 0)]
    assert [order.position for order in pick(act.OrderChunk, actions)] == [Position(0, 1)]
    world.fill_all()
    assert world.trainers[1].granted == 2


def test_a_trainer_that_waits_for_a_handle_in_transit_has_consumed_it():
    """Its pull and the handle crossed: the batch counts as consumed; the next one is claimed."""
    world = world_of(window=1)
    world.subscribe()
    world.fill_all()
    actions = world.pull(1, consume=0)
    assert [order.position for order in pick(act.OrderChunk, actions)] == [Position(0, 1)]


def test_the_next_epoch_is_prefetched_without_a_gap():
    """Batch 0 of epoch 1 is claimed while the last batches of epoch 0 are read."""
    world = world_of()
    world.subscribe(step=3)
    assert granted(world.fill_all()) == [(1, 0, 3), (1, 1, 0)]
    assert world.slots[2].committed == Position(1, 0)


def test_a_finished_course_has_no_further_actions():
    """After the last batch nothing is claimed, granted or sent; releases are still accepted."""
    world = world_of(slots_max=2)
    world.subscribe(step=2, end_epoch=1)
    world.fill_all()
    assert world.pull(1, release=0) == []
    assert world.holders(1) == world.holders(2) == [1]
    assert world.pull(1) == []
    assert world.holders(1) == world.holders(2) == []


@pytest.mark.parametrize(
    ("session", "released"),
    [(1, [(0, 2)]), (1, [(0, 0)]), (1, [(1, 1)]), (1, [(77, 1)]), (2, [(0, 1)])],
    ids=["later generation", "earlier generation", "not handed out", "never was", "another session's"],
)
def test_an_invalid_release_frees_nothing(session, released):
    """Only the right subscription, sequence and generation free a slot."""
    world = world_of(window=1)
    world.subscribe()
    world.fill_all()
    world.do(ev.Pulled(session, 1, 0, False, 0, released))
    assert world.holders(1) == [1]


def test_a_repeated_release_frees_nothing_twice():
    """A pull that arrives twice has the effect of one."""
    world = world_of(window=1)
    world.subscribe()
    world.subscribe(session=2)
    world.fill_all()
    world.pull(1, waiting=False)
    world.do(ev.Pulled(1, 1, 1, False, 0, [(0, 1)]))
    assert world.holders(1) == [2]


def test_an_older_pull_takes_nothing_back():
    """Positions are totals, and the larger one counts."""
    world = world_of()
    world.subscribe()
    world.fill_all()
    world.pull(1, waiting=False)
    assert world.do(ev.Pulled(1, 1, 1, False, 0, [])) == []
    assert world.state.statistics().streams[0].subscriptions[0].consumed_batches == 2


def test_mirror_trainers_read_the_same_slot():
    """There are one order, one commit, and two leases of the same generation.

    The slot is free when both trainers have released it.
    """
    world = world_of(window=1)
    world.subscribe(session=1)
    assert pick(act.OrderChunk, world.subscribe(session=2)) == []
    leases = pick(act.GrantLease, world.fill_all())
    assert [(lease.subscription, lease.slot, lease.generation) for lease in leases] == [(1, 1, 1), (2, 1, 1)]
    world.pull(1)
    assert world.holders(1) == [2]
    stream = world.state.statistics().streams[0]
    assert (stream.decoded_batches, stream.delivered_batches, stream.shared_batches) == (1, 2, 1)


def test_ranks_that_share_a_batch_read_their_rows_of_one_slot():
    """The last batch of four, in a world of three: its three rows go to three ranks."""
    world = world_of()
    for rank in range(3):
        world.subscribe(session=rank + 1, rank=rank, world_size=3, step=3)
    leases = [lease for lease in pick(act.GrantLease, world.fill_all()) if lease.epoch == 0]
    assert [(lease.slot, lease.first, lease.count) for lease in leases] == [(1, 0, 1), (1, 1, 1), (1, 2, 1)]


def test_an_ended_subscription_keeps_its_batches_and_frees_those_in_transit():
    """The user may still read arrays; batches that have not arrived are free at once."""
    world = world_of()
    world.subscribe()
    world.fill_all()
    world.pull(1, consume=1, release=0, waiting=False)
    world.end(1)
    assert (world.holders(1), world.holders(2)) == ([1], [])
    world.pull(1, release=9)
    assert world.trainers == {}
    assert world.state.statistics().streams[0].subscriptions == ()


def test_a_dead_trainer_returns_everything():
    """This covers all leases, claims and waits of all subscriptions of its session.

    Other trainers keep theirs.
    """
    world = world_of(window=1)
    world.subscribe(session=1)
    world.subscribe(session=1)
    world.subscribe(session=2)
    world.fill_all()
    assert world.end_session(1) == []
    assert world.holders(1) == [3]
    assert [one.number for one in world.state.statistics().streams[0].subscriptions] == [3]


def test_nothing_is_granted_to_a_session_while_it_ends():
    """A slot that one of its subscriptions returns does not go to another one of the session."""
    world = world_of(slots_max=4, window=3)
    world.subscribe(session=1)
    world.subscribe(session=1, epoch=5)
    world.fill_all()
    assert world.end_session(1) == []


def test_a_disconnected_trainer_may_still_read_its_batches():
    """Only the end of its lifeline proves that it no longer reads."""
    world = world_of()
    world.subscribe()
    world.fill_all()
    world.cut_off(1)
    assert world.holders(1) == [1]
    world.end_session(1)
    assert world.holders(1) == []


def test_a_claim_waits_for_a_worker_that_still_writes_to_the_only_free_slot():
    """An abandoned fill keeps its slot until its order is done; then the slot is filled again."""
    world = world_of(slots_max=2)
    world.subscribe(session=1)
    world.end_session(1)
    assert pick(act.ReserveSlot, world.subscribe(session=2, epoch=1)) == []
    assert reserved(world.fill(1)) == [1]
    assert reserved(world.fill(1)) == [2]
    assert granted(world.fill_all()) == [(2, 0, 0), (2, 1, 1)]


@pytest.mark.parametrize("note", [None, ev.Note(2, 0, 3), ev.Note(77, 0, 0)], ids=["no note", "of the second", "stale"])
def test_a_claim_gets_the_slots_of_a_dead_workers_orders(note):
    """Both slots of the dead worker are free for the trainers that wait for them."""
    world = world_of(slots_max=2)
    world.subscribe(session=1)
    world.end_session(1)
    world.subscribe(session=2, epoch=1)
    assert sorted(reserved(world.kill(1, note))) == [1, 2]


@pytest.mark.parametrize(("batches_late", "slots"), [(0, 3), (3, 5)], ids=["fast-trainer", "slow-trainer"])
def test_a_slot_has_memory_from_its_first_order_on(batches_late, slots):
    """A trainer that workers cannot keep up with needs fewer slots than its window of four.

    It has a batch, the workers fill the next, and the first rows of a third are ordered.
    """
    world = CheckedWorld([make_spec(samples=300, window=4)], chunk_rows_max=1)
    world.start_workers()
    made = len(pick(act.CreateSlot, world.subscribe()))
    for _ in range(20):
        for _ in range(3 * (1 + batches_late)):
            if world.workers[1].orders:
                made += len(pick(act.CreateSlot, world.fill(1)))
        made += len(pick(act.CreateSlot, world.pull(1, consume=1)))

    assert made == world.state.statistics().streams[0].slots == slots


def test_without_memory_for_a_slot_the_claims_on_further_slots_move_to_those_that_there_are():
    """The ring stays as small as it is, and its trainer continues."""
    world = CheckedWorld([make_spec(samples=300, window=6)], chunk_rows_max=1)
    world.slots_left = 2
    world.start_workers()
    world.subscribe()
    while world.workers[1].orders:
        world.fill(1)
    assert len(world.losses) == 1
    world.lose_next()

    steps = [lease.step for _ in range(6) for lease in pick(act.GrantLease, world.fill_all() + world.pull(1))]

    assert world.state.streams[1].delivery.ring.slots_max == 2
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert len(steps) >= 4


def test_an_abandoned_fill_is_resumed():
    """Written rows stay for the next trainer that needs the batch."""
    world = CheckedWorld([make_spec()], chunk_rows_max=1)
    world.start_workers()
    world.subscribe(session=1)
    world.fill(1)
    world.end_session(1)
    world.fill_all()
    actions = world.subscribe(session=2)
    assert 1 not in reserved(actions)
    assert [(order.position.step, order.rows[0]) for order in pick(act.OrderChunk, actions)] == [(1, 0), (1, 1)]


def test_orders_have_neighbouring_samples_where_requests_are_slow():
    """The rows of one order are next to each other in the source, and each row is ordered once."""
    world = CheckedWorld(
        [make_spec(samples=32, batch_size=16, shuffle=True, groups_neighbours=True)], workers=2, chunk_rows_max=4
    )
    plan = world.state.streams[1].spec.plan
    world.start_workers()
    world.subscribe(session=1)
    orders = []
    while any(worker.orders for worker in world.workers.values()):
        busy = next(number for number, worker in world.workers.items() if worker.orders)
        orders += [one for one in world.workers[busy].orders[:1] if one.position == Position(0, 0)]
        world.fill(busy)

    everything = sorted(plan.indices(Position(0, 0), 0, 16).tolist())
    samples = [sorted(plan.indices_of(one.position, one.rows).tolist()) for one in orders]
    assert sorted(samples) == [everything[first : first + 4] for first in range(0, 16, 4)]
    assert sorted(row for one in orders for row in one.rows) == list(range(16))


def world_of_blocks(chunk_rows_max=4, **changes):
    """Two workers, and two batches of eight blocks each, all of them open together."""
    spec = make_spec(samples=32, batch_size=16, open_blocks=8, groups_neighbours=True, **changes)
    world = CheckedWorld([spec], workers=2, chunk_rows_max=chunk_rows_max)
    world.start_workers()
    return world


def places_of(world, order):
    """The places of the workers that the blocks of an order's rows belong to."""
    plan = world.state.streams[1].spec.plan
    samples = plan.indices_of(order.position, order.rows)
    return set((plan.order.ranks_of(order.position.epoch, samples) % 2).tolist())


def test_each_worker_fills_the_rows_of_its_own_blocks():
    """So that it reads each block once; an order names the share that the worker has."""
    world = world_of_blocks()
    orders = pick(act.OrderChunk, world.subscribe(session=1))
    while any(worker.orders for worker in world.workers.values()):
        for number in sorted(world.workers):
            orders += pick(act.OrderChunk, world.fill(number)) if world.workers[number].orders else []

    assert all(places_of(world, one) == {one.share[0]} for one in orders)
    assert {one.share for one in orders} == {(0, 2), (1, 2)}
    assert {world.state.fleet.workers[one.worker].place == one.share[0] for one in orders} == {True}
    assert sorted((one.position.step, row) for one in orders for row in one.rows) == [
        (step, row) for step in range(2) for row in range(16)
    ]


@pytest.mark.parametrize("busy_us", [1_000, 50_000])
def test_rows_of_long_work_are_filled_by_any_worker(busy_us):
    """One worker is done with its own blocks, and the other one has more than it takes.

    Short rows wait for the worker that has their blocks, until a tick has changed nothing.
    """
    world = world_of_blocks(chunk_rows_max=1, window=1)
    orders = pick(act.OrderChunk, world.subscribe(session=1)) + pick(act.OrderChunk, world.pull(1, release=0))
    fast = min(world.workers)
    while world.workers[fast].orders:
        orders += pick(act.OrderChunk, world.fill(fast, busy_us=busy_us))
    place = world.state.fleet.workers[fast].place
    assert ({1 - place} in [places_of(world, one) for one in orders if one.worker == fast]) == (busy_us > 10_000)

    later = [one for _tick in range(2) for one in pick(act.OrderChunk, world.do(ev.Ticked()))]
    assert later
    assert all((one.worker, places_of(world, one)) == (fast, {1 - place}) for one in later)


def test_a_stopped_stream_notifies_waiting_trainers_and_fills_no_more():
    """Later pulls get the same answer; leases can still be released."""
    world = world_of(on_error="fail", window=1)
    world.subscribe(session=1)
    world.subscribe(session=2)
    world.fill_all()
    world.pull(1)
    actions = world.fill(1, bad=(3,))
    assert [(one.subscription, one.error) for one in pick(act.Refuse, actions)] == [(1, ErrorCode.STREAM_STOPPED)]
    assert [one.stream for one in pick(act.ReportStopped, actions)] == [1]
    (again,) = world.pull(2, release=0)
    assert again.error == ErrorCode.STREAM_STOPPED
    assert world.holders(1) == [2]


def test_a_hopeless_chunk_stops_its_stream():
    """A worker that found no sample for a row reports why, and so does the stream."""
    world = world_of()
    world.subscribe()
    order = world.workers[1].orders.pop(0)
    world.slots[order.slot].rows.update((order.position, row) for row in range(3))
    actions = world.do(ev.ChunkDone(1, (order.order,), work(1000), [], "none of 32 samples could stand in for 0.jpg"))
    assert pick(act.GrantLease, actions) == []
    assert pick(act.ReportStopped, actions)[0].text == "none of 32 samples could stand in for 0.jpg"


def test_streams_do_not_affect_each_other():
    """A full ring or a stopped stream has no effect on other streams."""
    world = CheckedWorld([make_spec(1, on_error="fail"), make_spec(2)])
    world.start_workers()
    world.subscribe(1, session=1)
    world.subscribe(2, session=1)
    world.fill(1, bad=(0,))
    assert [lease.subscription for lease in pick(act.GrantLease, world.fill_all())] == [2, 2]


def test_a_session_controls_only_its_own_subscriptions():
    """A pull or an end for another subscription changes nothing; the pull gets an answer."""
    world = world_of()
    world.subscribe(session=1)
    before = world.state.statistics()
    (refusal,) = world.do(ev.Pulled(2, 1, 5, True, 0, [(0, 1)]))
    assert (refusal.session, refusal.error) == (2, ErrorCode.UNKNOWN_SUBSCRIPTION)
    assert world.do(ev.SubscriptionEnded(2, 1, 0)) == []
    assert world.state.statistics() == before


def test_a_remote_trainer_has_at_most_two_batches_in_transit():
    """More may be ready, and it may wait: a batch that is sent uses memory until it has left."""
    world = CheckedWorld([make_spec(samples=60, window=6)])
    world.start_workers()
    world.subscribe(is_remote=True)
    world.fill_all()
    assert len(world.trainers[1].leases) == 2
    assert granted(world.pull(1)) == []
    assert [sequence for _number, sequence, _step in granted(world.send(1))] == [2]
    assert len(world.trainers[1].leases) == 2


def test_releases_of_a_remote_trainer_end_no_lease():
    """The daemon may still read its batches to send them."""
    world = CheckedWorld([make_spec(samples=60)])
    world.start_workers()
    world.subscribe(is_remote=True)
    world.fill_all()
    held = dict(world.trainers[1].leases)
    world.pull(1, waiting=False)
    world.end(1)
    assert world.trainers[1].leases == held
    world.send(1)
    world.send(1)
    assert not world.trainers


def test_a_remote_trainer_that_waits_for_the_network_gets_no_message():
    """It holds no slot itself: its batches in transit arrive, also in the smallest ring."""
    world = CheckedWorld([make_spec(samples=60, slots_max=2)])
    world.start_workers()
    world.subscribe(is_remote=True)
    for _ in range(5):
        world.fill_all()
        assert pick(act.Refuse, world.pull(1)) == []
        while world.trainers[1].leases:
            world.send(1)
    assert world.trainers[1].granted >= 5


def test_a_batch_that_no_trainer_waits_for_any_more_is_partial_and_not_filling():
    """Orders in progress end; the rest of its rows is never ordered."""
    world = world_of()
    world.subscribe()

    def slots() -> tuple[int | None, int | None, int]:
        (stream,) = world.state.statistics(0.0).streams
        return stream.filling_slots, stream.partial_slots, stream.ready_slots

    assert slots() == (2, 0, 0)
    world.fill(1)
    assert slots() == (1, 0, 1)
    world.kill_at(1, 0)
    world.end_session(1)
    assert slots() == (0, 1, 1)
