"""Workers go to waiting trainers, then to the next to wait; equals get equal time.

The bound: over any period, among trainers that all wait, none gets more worker time than another by
more than the time of two orders, one of each. This holds for any length of the wait, any cost of
samples, and any earlier events.
"""

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.events import StreamSpec
from batchd.core.state import DaemonState
from batchd.core.stream import CHUNK_TARGET_S, FIRST_CHUNK_ROWS
from batchd.core.tenants import ACCOUNTS_MAX, EVERYBODY, OTHERS, Tenants, Weights
from support.core_world import WORKERS, make_spec, pick, work

ROWS = 1 << 30
"""Batches so large that no test finishes one."""
SLACK = 1.001
"""Tolerance: times are sums of floats."""


def endless(number: int = 1) -> StreamSpec:
    """A stream of huge batches."""
    return make_spec(number, samples=9 * ROWS, batch_size=ROWS)


class Workplace:
    """Workers that carry out orders first come, first served, at each stream's price for a sample.

    The object records every order.
    """

    def __init__(
        self,
        specs: list[StreamSpec],
        sample_us: dict[int, int],
        workers: int = 1,
        weights: Weights = (),
        nodes: tuple[int, ...] = (),
    ) -> None:
        self.sample_us = sample_us
        self.state = DaemonState(
            specs, workers, WORKERS, sample_timeout_s=30.0, chunk_rows_max=256, weights=weights, nodes=nodes
        )
        self.orders: list[act.OrderChunk] = []
        self.grants: list[act.GrantLease] = []
        self.made: list[act.CreateSlot] = []
        self.done = 0
        self.now_s = 0.0
        for spawned in pick(act.SpawnWorker, self.do(ev.Ticked())):
            self.do(ev.WorkerReady(spawned.worker))

    def do(self, event: ev.Event) -> list[act.Action]:
        """Handle one event and take the orders."""
        actions = self.state.handle(event, self.now_s)
        self.orders += pick(act.OrderChunk, actions)
        self.grants += pick(act.GrantLease, actions)
        self.made += pick(act.CreateSlot, actions)
        return actions

    def subscribe(
        self,
        number: int,
        stream: int = 1,
        epoch: int = 0,
        window: int = 0,
        tenant: str = EVERYBODY,
        node: int | None = None,
        *,
        waiting: bool = True,
    ) -> None:
        """A trainer subscribes, and optionally waits at once."""
        place = f"stream{stream}", 0, 1, window, epoch, 0, None, None
        asked = ev.SubscriptionAsked(
            number, number, number, *place, is_spectator=False, owner=f"user:{number}", tenant=tenant, node=node
        )
        self.do(asked)
        self.wait(number, waiting=waiting)

    def wait(self, number: int, *, waiting: bool = True, consumed: int = 0) -> None:
        """A trainer starts or stops to wait for its next batch."""
        self.do(ev.Pulled(number, number, consumed, waiting, 0, []))

    def work(self, orders: int) -> list[act.OrderChunk]:
        """Carry out this many orders; return those that were given meanwhile."""
        before = len(self.orders)
        for _ in range(orders):
            order = self.orders[self.done]
            self.done += 1
            self.do(
                ev.ChunkDone(order.worker, (order.order,), work(len(order.rows) * self.sample_us[order.stream]), [], "")
            )
        return self.orders[before:]

    def times(self, orders: list[act.OrderChunk]) -> dict[int, float]:
        """The worker time that orders take, by stream."""
        times = dict.fromkeys(self.sample_us, 0.0)
        for order in orders:
            times[order.stream] += len(order.rows) * self.sample_us[order.stream] / 1e6
        return times

    def spread(self, orders: list[act.OrderChunk]) -> float:
        """The largest lead in worker time of one stream over another, in any period."""
        worst = 0.0
        for one in self.sample_us:
            for other in self.sample_us:
                lead = lowest = 0.0
                for order in orders:
                    cost = len(order.rows) * self.sample_us[order.stream] / 1e6
                    lead += cost * ((order.stream == one) - (order.stream == other))
                    lowest = min(lowest, lead)
                    worst = max(worst, lead - lowest)
        return worst


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "sample_us",
    [{1: 1000, 2: 1000}, {1: 100, 2: 20_000}, {1: 50, 2: 1000, 3: 7000, 4: 30_000}],
    ids=["equal", "far", "four"],
)
def test_waiting_trainers_get_equal_time(workers, sample_us):
    """Samples are cheap or expensive: no stream ever leads another by more than two orders."""
    place = Workplace([endless(number) for number in sample_us], sample_us, workers)
    for number in sample_us:
        place.subscribe(number, stream=number)
    measured = 20 * len(sample_us) * workers
    place.work(measured)
    orders = place.work(2000)
    one_order_s = max(CHUNK_TARGET_S, max(sample_us.values()) / 1e6)
    assert place.spread(orders) <= 2 * one_order_s * SLACK
    assert min(place.times(orders).values()) > 0.9 * max(place.times(orders).values())


def test_trainers_of_one_stream_take_turns():
    """Three trainers in different epochs all wait: none ever leads by more than two orders."""
    place = Workplace([endless()], {1: 1000})
    for number in (1, 2, 3):
        place.subscribe(number, epoch=number)
    place.work(20)
    epochs = [order.position.epoch for order in place.work(300)]
    for one, other in ((1, 2), (2, 3), (3, 1)):
        leads = [0]
        for epoch in epochs:
            leads.append(leads[-1] + (epoch == one) - (epoch == other))
        assert max(leads) - min(leads) <= 2


def test_a_trainer_that_wanted_nothing_for_long_has_no_credit():
    """A trainer that paused while another had the workers does not shut it out later."""
    place = Workplace([endless(1), endless(2)], {1: 1000, 2: 1000})
    place.subscribe(1, stream=1)
    place.subscribe(2, stream=2)
    place.work(20)
    place.wait(2, waiting=False)
    place.work(10)
    alone = place.work(10_000)
    assert place.times(alone) == {1: pytest.approx(200.0), 2: 0.0}
    place.wait(2)
    together = place.work(100)
    assert place.spread(together) <= 2 * CHUNK_TARGET_S * SLACK


def test_a_newcomer_does_not_shut_out_the_others():
    """Its stream has had no cost so far, and still it gets no more than its half."""
    place = Workplace([endless(1), endless(2)], {1: 1000, 2: 1000})
    place.subscribe(1, stream=1)
    place.work(10_000)
    place.subscribe(2, stream=2)
    place.work(20)
    together = place.work(100)
    assert place.spread(together) <= 2 * CHUNK_TARGET_S * SLACK


def test_a_waiting_trainer_precedes_one_that_prefetches():
    """Its earlier worker time does not matter."""
    place = Workplace([endless(1), endless(2)], {1: 1000, 2: 1000})
    place.subscribe(1, stream=1, waiting=False)
    place.subscribe(2, stream=2, waiting=False)
    place.work(40)
    place.state.streams[2].delivery.subscriptions[2].served_s = 1e6
    place.wait(2)
    assert {order.stream for order in place.work(50)} == {2}


def test_the_batch_that_is_nearest_to_its_trainer_is_first():
    """No costs are measured yet.

    First batches precede second ones, and second ones third ones, for all trainers.
    """
    place = Workplace([make_spec(1), make_spec(2)], {1: 1000, 2: 1000})
    place.subscribe(1, stream=1, window=4, waiting=False)
    place.subscribe(2, stream=2, window=4, waiting=False)
    while place.done < 8:
        place.work(1)
    steps = [order.position.step for order in place.orders]
    assert steps[2:] == sorted(steps[2:])
    assert sorted((order.stream, order.position.step) for order in place.orders) == [
        (s, n) for s in (1, 2) for n in range(4)
    ]


def test_a_trainer_that_shares_a_batch_is_not_charged_for_it_twice():
    """The order is charged to the trainer that needed it most, and the other one pays nothing."""
    place = Workplace([endless()], {1: 1000})
    place.subscribe(1, waiting=False)
    place.subscribe(2)
    place.work(10)
    first, second = place.state.streams[1].delivery.subscriptions.values()
    assert first.served_s == 0.0
    assert second.served_s > 0.0


def test_chunks_start_small_and_then_reach_the_target():
    """Without a measurement a chunk has a few rows; then it has the rows of 20 ms of work."""
    place = Workplace([endless()], {1: 100})
    place.subscribe(1)
    assert [len(order.rows) for order in place.orders] == [FIRST_CHUNK_ROWS] * 2
    assert len(place.work(1)[0].rows) == 200
    place.sample_us[1] = 1000
    assert len(place.work(50)[-1].rows) == 20


@pytest.mark.parametrize(("sample_us", "rows"), [(1, 256), (19_999, 1), (500_000, 1)])
def test_chunks_have_at_least_a_row_and_fit_into_one_message(sample_us, rows):
    """This holds for cheap and expensive samples."""
    place = Workplace([endless()], {1: sample_us})
    place.subscribe(1)
    assert len(place.work(30)[-1].rows) == rows


def test_workers_share_the_batch_that_a_trainer_waits_for():
    """There are eight rows and four idle workers.

    Each gets two rows, so that all end together.
    """
    place = Workplace([make_spec(samples=80, batch_size=8, window=1)], {1: 1000}, workers=4)
    place.subscribe(1, waiting=False)
    place.work(len(place.orders))
    place.wait(1, consumed=1)
    rows = [len(order.rows) for order in place.orders if order.position.step == 1]
    assert rows == [2, 2, 2, 2]


def test_a_batch_that_a_trainer_waits_for_is_not_split_if_all_workers_are_busy():
    """Otherwise trainers faster than the workers would make orders small and messages many."""
    place = Workplace([make_spec(samples=800, batch_size=8, window=12, slots_max=16)], {1: 1000}, workers=4)
    place.subscribe(1)
    for consumed in range(40):
        while len(place.grants) <= consumed:
            place.work(1)
        taken = place.grants[consumed]
        place.do(ev.Pulled(1, 1, consumed + 1, True, 0, [(taken.sequence, taken.generation)]))
    assert {len(order.rows) for order in place.orders[-20:]} == {8}


def test_more_workers_get_longer_orders():
    """So the daemon has as many messages a second for any number of workers."""
    rows = {}
    for workers in (1, 64, 192):
        place = Workplace(
            [make_spec(samples=512_000, batch_size=512, window=12, slots_max=16)], {1: 1000}, workers=workers
        )
        place.subscribe(1, waiting=False)
        place.work(200)
        rows[workers] = max(len(order.rows) for order in place.orders[-50:])
    assert rows == {1: 20, 64: 32, 192: 96}


# --- tenants --------------------------------------------------------------------------------------

THREE_TO_ONE = (("large", 3.0), ("small", 1.0))
SMALL_STREAMS = tuple(range(2, 10))


def three_to_one(workers: int = 2) -> Workplace:
    """One stream of a tenant with three parts beside eight of a tenant with one; all wait."""
    sample_us = {1: 900, **{number: 200 * number for number in SMALL_STREAMS}}
    place = Workplace([endless(number) for number in sample_us], sample_us, workers, THREE_TO_ONE)
    place.subscribe(1, stream=1, tenant="large")
    for number in SMALL_STREAMS:
        place.subscribe(number, stream=number, tenant="small")
    place.work(200)
    return place


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_tenants_get_worker_time_by_their_weights(workers):
    """However many streams each has, and whatever its samples cost."""
    place = three_to_one(workers)
    times = place.times(place.work(4000))
    assert times[1] / sum(times.values()) == pytest.approx(0.75, abs=0.01)
    assert max(times[number] for number in SMALL_STREAMS) < 1.3 * min(times[number] for number in SMALL_STREAMS)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("busy_us", [100, 900, 20_000])
def test_a_tenant_pays_what_its_samples_took_and_not_what_was_expected(busy_us):
    """The prices of its samples change all the time, so no expectation is right."""
    place = three_to_one(workers=1)
    times = {1: 0.0, 2: 0.0}
    for turn in range(6000):
        place.sample_us[1] = busy_us if turn % 2 else 900
        order = place.orders[place.done]
        times[min(order.stream, 2)] += len(order.rows) * place.sample_us[order.stream] / 1e6
        place.work(1)
    assert times[1] / sum(times.values()) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("other", [EVERYBODY, "other"])
def test_who_has_samples_over_which_a_worker_dies_pays_for_its_time(other):
    """Else one whose samples hang would have all workers, again and again, for nothing.

    So it is with tenants, and with the trainers of one.
    """
    place = Workplace([endless(1), endless(2)], {1: 1000, 2: 1000})
    place.subscribe(1, stream=1)
    place.subscribe(2, stream=2, tenant=other)
    place.work(50)
    while place.orders[place.done].stream != 1:
        place.work(1)
    place.now_s += 30.0
    gone = ev.WorkerGone(place.orders[place.done].worker, "signal 9 (SIGKILL)", None)
    (successor,) = pick(act.SpawnWorker, place.do(gone))
    place.done = len(place.orders)
    place.do(ev.WorkerReady(successor.worker))
    assert place.times(place.work(1000)) == {1: 0.0, 2: pytest.approx(20.0, rel=0.1)}
    assert place.state.statistics().usage[0].work_s >= 30.0


def test_what_a_tenant_does_not_want_goes_to_the_others_at_once():
    """And it gets its share again with the next order that is given."""
    place = three_to_one()
    place.do(ev.SessionEnded(1))
    assert place.times(place.work(1000))[1] == 0.0
    first = len(place.orders)
    place.subscribe(10, stream=1, tenant="large")
    place.work(1)
    assert place.orders[first].stream == 1
    times = place.times(place.work(2000))
    assert times[1] / sum(times.values()) == pytest.approx(0.75, abs=0.01)


def test_a_tenant_without_a_weight_has_one_part():
    """Those that the operator does not name are one tenant together."""
    place = Workplace([endless(1), endless(2), endless(3)], {1: 500, 2: 700, 3: 900}, weights=(("large", 2.0),))
    place.subscribe(1, stream=1, tenant="large")
    place.subscribe(2, stream=2)
    place.subscribe(3, stream=3)
    place.work(50)
    times = place.times(place.work(3000))
    assert times[1] / sum(times.values()) == pytest.approx(2 / 3, abs=0.01)


def test_a_reload_changes_the_weights():
    """Present trainers have the new ones with the next order."""
    place = three_to_one()
    place.do(ev.Reconfigured((), (), (), 2, 30.0, 256, weights=(("small", 9.0),)))
    place.work(100)
    times = place.times(place.work(2000))
    assert times[1] / sum(times.values()) == pytest.approx(0.1, abs=0.01)


def test_the_time_of_workers_is_counted_for_those_for_whom_it_was():
    """The accounts have all of it, by owner and stream."""
    place = three_to_one()
    times = place.times(place.orders[: place.done])
    usage = {one.stream: one for one in place.state.statistics().usage}
    assert {stream: usage[f"stream{stream}"].work_s for stream in times} == pytest.approx(times)
    assert usage["stream1"].owner == "user:1"
    assert (usage["stream1"].tenant, usage["stream1"].weight) == ("large", 3.0)
    assert sum(one.made_samples for one in usage.values()) == sum(
        len(order.rows) for order in place.orders[: place.done]
    )


def test_accounts_have_a_limit():
    """The oldest without a trainer are counted together, and nothing of them is lost."""
    place = Workplace([endless()], {1: 1000})
    for number in range(1, ACCOUNTS_MAX + 20):
        place.subscribe(number)
        place.work(1)
        place.do(ev.SessionEnded(number))
    usage = place.state.statistics().usage
    assert len(usage) == ACCOUNTS_MAX + 1
    assert [one.owner for one in usage if one.owner == OTHERS] == [OTHERS]
    assert sum(one.work_s for one in usage) == pytest.approx(sum(place.times(place.orders[: place.done]).values()))


def test_the_account_of_a_newcomer_is_kept_where_all_others_have_trainers():
    """Then there are more than the limit, and none of them is lost."""
    tenants = Tenants(())
    for number in range(ACCOUNTS_MAX):
        tenants.account(f"user:{number}", EVERYBODY, "stream1", 0.0).subscriptions = 1
    newcomer = tenants.account("user:new", EVERYBODY, "stream1", 0.0)
    assert newcomer is tenants.account("user:new", EVERYBODY, "stream1", 1.0)
    assert len(list(tenants.usage(1.0))) == ACCOUNTS_MAX + 1


# --- memory nodes ---------------------------------------------------------------------------------


def test_workers_fill_rather_for_trainers_of_their_node():
    """With equal time for each, and the ring of each is on its node."""
    place = Workplace([endless(1), endless(2)], {1: 1000, 2: 700}, workers=6, nodes=(0, 1))
    place.subscribe(1, stream=1, node=0)
    place.subscribe(2, stream=2, node=1)
    place.work(100)
    orders = place.work(2000)
    nodes = {worker.number: worker.node for worker in place.state.fleet.workers.values()}
    rows = sum(len(order.rows) for order in orders)
    near = sum(len(order.rows) for order in orders if nodes[order.worker] == order.stream - 1)
    assert near > 0.85 * rows
    times = place.times(orders)
    assert times[1] == pytest.approx(times[2], rel=0.05)
    assert {(made.stream, made.node) for made in place.made} == {(1, 0), (2, 1)}


def test_workers_of_another_node_do_not_idle():
    """Where all trainers are on one node, all workers fill for them; so do those without a node."""
    place = Workplace([endless(1)], {1: 1000}, workers=4, nodes=(0, 1))
    place.subscribe(1, node=0)
    assert {order.worker for order in place.work(100)} == {1, 2, 3, 4}
    place.subscribe(2, epoch=5)
    assert {order.worker for order in place.work(100)} == {1, 2, 3, 4}


def test_a_ring_that_trainers_of_several_nodes_share_is_on_none():
    """The kernel decides where its slots are."""
    place = Workplace([make_spec(1, slots_max=8)], {1: 1000}, nodes=(0, 1))
    place.subscribe(1, node=0, epoch=1)
    place.subscribe(2, node=1, epoch=2)
    before = len(place.made)
    place.work(6)
    assert {made.node for made in place.made[before:]} == {None}
