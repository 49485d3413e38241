"""The number of orders that worker hosts may have: the windows alone, and in the core."""

import heapq

import pytest

from batchd.core import events as ev
from batchd.core.windows import BEGIN_ORDERS, GROWTH, LATE_S, LATE_TIMES, SHRINKING, Window, Windows
from support.core_world import World, make_spec
from unit.core.test_pool_model import pool_world, prove_one_other, remote_of

WORKERS = 8
ORDERS_EACH = 4


@pytest.fixture
def windows() -> Windows:
    """Two links of eight workers."""
    windows = Windows()
    for link in (1, 2):
        for worker in range(WORKERS):
            windows.join(link, worker, ORDERS_EACH)
    return windows


def fill(windows: Windows, window: Window) -> None:
    """Give a link all the orders that it may have."""
    while not window.is_full:
        windows.count(window, 1)


def test_a_new_link_begins_with_few_orders(windows) -> None:
    """A thousand workers may connect at once."""
    assert [window.limit for window in windows.by_link.values()] == [WORKERS * BEGIN_ORDERS] * 2
    assert windows.left == 2 * WORKERS * BEGIN_ORDERS


def test_a_window_grows_while_rows_come_soon_to_what_its_workers_can_have(windows) -> None:
    window = windows.by_link[1]
    for _ in range(200):
        fill(windows, window)
        windows.arrived(window, rows=8, way_s=0.001, given_s=0.0, now_s=1.0)
    assert window.limit == WORKERS * ORDERS_EACH
    assert windows.limit == pytest.approx(window.limit + WORKERS * BEGIN_ORDERS)


def test_a_window_that_limits_nothing_does_not_grow(windows) -> None:
    """Slow trainers say nothing about the network."""
    window = windows.by_link[1]
    windows.count(window, 1)
    windows.arrived(window, rows=8, way_s=0.001, given_s=0.0, now_s=1.0)
    assert window.limit == WORKERS * BEGIN_ORDERS


def test_late_rows_shrink_the_window_of_their_link_alone_and_once_for_all_orders_of_one_time(windows) -> None:
    """Orders from before the change cannot show whether the smaller window is still too large."""
    window, other = windows.by_link.values()
    fill(windows, window)
    windows.arrived(window, rows=8, way_s=0.001, given_s=0.0, now_s=0.5)
    limit = window.limit
    windows.count(window, 1)
    for _ in range(5):
        windows.arrived(window, rows=8, way_s=2 * LATE_S, given_s=1.0, now_s=2.0)
    assert window.limit == pytest.approx(limit * SHRINKING)
    assert window.growth == GROWTH
    assert other.limit == WORKERS * BEGIN_ORDERS

    windows.arrived(window, rows=8, way_s=2 * LATE_S, given_s=2.0, now_s=3.0)
    assert window.limit == pytest.approx(limit * SHRINKING**2)


def test_rows_that_always_take_long_are_late_only_if_they_take_still_longer(windows) -> None:
    """A video frame of 100 MB takes a second on 1 Gbit/s without any queue."""
    window = windows.by_link[1]
    fill(windows, window)
    for way_s in (1.0, LATE_TIMES):
        windows.arrived(window, rows=1, way_s=way_s, given_s=0.0, now_s=2.0)
    assert window.lowered_s < 0
    windows.arrived(window, rows=1, way_s=1.1 * LATE_TIMES, given_s=0.0, now_s=4.0)
    assert window.lowered_s == 4.0


def test_links_with_less_than_one_order_share_what_all_may_have(windows) -> None:
    """Each link has one order at most, and one order may always be given."""
    for window in windows.by_link.values():
        windows.set_limit(window, 0.4)
    assert windows.left == 1
    first, second = windows.by_link.values()
    windows.count(first, 1)
    assert first.is_full
    assert not second.is_full
    assert windows.left == 0
    windows.count(first, -1)
    assert windows.left == 1


def test_a_host_that_goes_takes_its_orders_and_its_window_along(windows) -> None:
    windows.count(windows.by_link[1], 2)
    for worker in range(WORKERS):
        windows.leave(1, worker, ORDERS_EACH, 2 if worker == 0 else 0)
    assert list(windows.by_link) == [2]
    assert (windows.orders, windows.workers) == (0, WORKERS)
    assert windows.limit == pytest.approx(WORKERS * BEGIN_ORDERS)


# --- in the core ----------------------------------------------------------------------------------


def test_a_host_whose_rows_come_soon_gets_all_orders_that_its_workers_can_have() -> None:
    world = pool_world(window=40, slots_max=80, samples=20_000)
    link = world.host_joins(2, at_first=True)
    prove_one_other(world, link)
    first, second = remote_of(world, link)
    assert len(world.workers[first].orders) + len(world.workers[second].orders) == 1
    for _ in range(30):
        for number in (first, second):
            if world.workers[number].orders:
                world.remote_fill(number)
    assert [len(world.workers[number].orders) for number in (first, second)] == [ORDERS_EACH] * 2


def test_behind_a_network_for_two_of_fifty_workers_no_order_is_late_for_its_trainer() -> None:
    """As many rows arrive as two workers make, and no row is sent in vain."""
    rows_s, row_s, seconds = 200.0, 0.01, 40.0
    world = World([make_spec(1, samples=100_000, batch_size=32, slots_max=120, window=100)], chunk_rows_max=32)
    world.start_workers()
    world.kill(min(world.workers))  # only remote workers fill rows from here on
    world.state.streams[1].sample_s = row_s
    world.subscribe(1)
    for _ in range(50):
        prove_one_other(world, world.host_joins(1, at_first=True))
    begun, done_s, due = set(), {}, [(0.0, 0, 0)]
    network_s, came = 0.0, 0
    while world.now < seconds:
        world.now, worker, order = heapq.heappop(due)
        if worker == 0:  # time passes, and the trainer takes all batches that are ready
            world.do(ev.Ticked())
            world.pull(1)
            heapq.heappush(due, (world.now + 0.05, 0, 0))
        elif order > 0:  # a worker is done, and its rows queue for the network
            (rows,) = (len(one.rows) for one in world.workers[worker].orders if one.order == order)
            network_s = max(network_s, world.now) + rows / rows_s
            heapq.heappush(due, (network_s, worker, -order))
        else:
            rows = len(world.workers[worker].orders[0].rows)
            world.remote_fill(worker, busy_us=round(1e6 * rows * row_s))
            came += rows if world.now > seconds / 2 else 0
        for number, one in world.workers.items():
            assert not one.withdrawing
            for given in one.orders:
                if given.order not in begun:
                    begun.add(given.order)
                    done_s[number] = max(world.now, done_s.get(number, 0.0)) + len(given.rows) * row_s
                    heapq.heappush(due, (done_s[number], number, given.order))
    assert came > 0.9 * rows_s * seconds / 2
    assert network_s - world.now < 2 * LATE_S
