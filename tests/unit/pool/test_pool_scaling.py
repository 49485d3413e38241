"""The number of worker hosts follows the wanted workers, with an injected clock."""

import pytest

from batchd.pool.ray.scaling import DOUBLING_S, IDLE_S, HostCount, Limits

WORKERS = 8


class Pool:
    """A pool whose hosts start and leave at once, unless a test says otherwise."""

    def __init__(self, least: int = 0, most: int = 64, hosts: int = 0) -> None:
        self.count = HostCount(Limits(least, most, WORKERS), hosts)
        self.now_s = 1000.0

    def after(self, seconds: float, wanted: int | None, pending: int = 0, leaving: int = 0) -> int:
        """Return the target number of hosts after this many seconds."""
        self.now_s += seconds
        return self.count.follow(wanted, pending, leaving, self.now_s)


def test_a_pool_without_demand_has_its_least_hosts() -> None:
    """The pool starts these hosts at once, without doubling."""
    assert Pool().after(0, wanted=0) == 0
    assert Pool(least=5).after(0, wanted=0) == 5


def test_the_first_host_comes_at_once() -> None:
    """A demand of one worker is enough."""
    assert Pool().after(0, wanted=1) == 1


def test_a_pool_at_most_doubles_in_fifteen_seconds() -> None:
    """This holds for any number of workers that the daemon wants."""
    pool = Pool()

    hosts = [pool.after(DOUBLING_S if tick else 0, wanted=1000) for tick in range(8)]

    assert hosts == [1, 2, 4, 8, 16, 32, 64, 64]


def test_a_pool_grows_no_sooner_than_fifteen_seconds_after_it_has_grown() -> None:
    """A second check within that time changes nothing."""
    pool = Pool(hosts=2)

    assert pool.after(0, wanted=100) == 4
    assert pool.after(DOUBLING_S - 0.1, wanted=100) == 4
    assert pool.after(0.1, wanted=100) == 8


def test_a_pool_grows_no_further_than_wanted() -> None:
    """Hosts are whole, so the last one may have more workers than wanted."""
    pool = Pool(hosts=4)

    assert pool.after(0, wanted=5 * WORKERS + 1) == 6


def test_no_host_is_asked_for_while_another_one_is_pending() -> None:
    """The cluster is full, or it is adding machines."""
    pool = Pool(hosts=2)

    assert pool.after(3600, wanted=100, pending=1) == 2
    assert pool.after(0, wanted=100) == 4


def test_a_host_goes_after_five_idle_minutes() -> None:
    """The next idle host leaves when the first one has left."""
    pool = Pool(hosts=4)

    assert pool.after(0, wanted=WORKERS) == 4
    assert pool.after(IDLE_S - 0.1, wanted=WORKERS) == 4
    assert pool.after(0.1, wanted=WORKERS) == 3
    assert pool.after(1, wanted=WORKERS, leaving=1) == 3
    assert pool.after(1, wanted=WORKERS) == 2
    assert pool.after(1, wanted=WORKERS) == 1
    assert pool.after(3600, wanted=WORKERS) == 1


@pytest.mark.parametrize("wanted", [3 * WORKERS, 4 * WORKERS, None])
def test_the_five_minutes_begin_again_after_a_busy_moment(wanted) -> None:
    """A quarter of idle workers stops no host, and neither does an unreachable daemon."""
    pool = Pool(hosts=4)
    pool.after(0, wanted=WORKERS)

    assert pool.after(IDLE_S - 1, wanted=wanted) == 4
    assert pool.after(1, wanted=WORKERS) == 4
    assert pool.after(IDLE_S - 0.1, wanted=WORKERS) == 4
    assert pool.after(0.1, wanted=WORKERS) == 3


def test_the_last_host_stays_while_one_worker_is_wanted() -> None:
    """The host stays although seven of eight workers are idle."""
    pool = Pool(hosts=1)

    assert [pool.after(IDLE_S, wanted=1) for _ in range(3)] == [1, 1, 1]
    assert [pool.after(IDLE_S, wanted=0) for _ in range(2)] == [1, 0]


def test_a_pool_keeps_its_least_hosts() -> None:
    """The minimum stays, however long the hosts are idle."""
    pool = Pool(least=2, hosts=3)

    assert [pool.after(IDLE_S, wanted=0) for _ in range(4)] == [3, 2, 2, 2]


def test_hosts_beyond_the_most_leave_one_at_a_time() -> None:
    """They leave without the five minutes, because the user has set the limit."""
    pool = Pool(most=2, hosts=4)

    assert pool.after(0, wanted=100) == 3
    assert pool.after(1, wanted=100, leaving=1) == 3
    assert pool.after(1, wanted=None) == 2
    assert pool.after(1, wanted=100) == 2


def test_nothing_changes_while_the_daemon_is_away() -> None:
    """Worker hosts reconnect to the daemon by themselves."""
    pool = Pool(hosts=3)

    assert [pool.after(3600, wanted=None) for _ in range(3)] == [3, 3, 3]
