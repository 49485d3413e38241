"""The number of remote workers that a stream needs: the rule, with synthetic numbers."""

import pytest

from batchd.observe.diagnosis.demand import PoolLimits, StreamLoad, WantedWorkers, needed_workers

ROW_BYTES_PER_BUSY_S = 100e6
"""One busy worker decodes a gigabyte in ten seconds."""


def load(busy: float = 1.7, share: float = 0.5, **facts) -> StreamLoad:
    """One stream with one trainer, which waits for workers half of the time."""
    known = {"name": "photos", "trainers": [(40, share)], "row_bytes_per_busy_s": ROW_BYTES_PER_BUSY_S}
    return StreamLoad(busy_workers=busy, **(known | facts))


def limits(local: int = 2, remote: int = 0, **facts) -> PoolLimits:
    """A host with two local workers."""
    return PoolLimits(local, remote, **facts)


def test_a_trainer_that_waits_half_of_the_time_needs_twice_the_workers() -> None:
    """The rule adds a reserve of 15 % of their time."""
    assert needed_workers(load()) == pytest.approx(4)
    assert needed_workers(load(share=0.0)) == pytest.approx(2)


def test_a_stream_without_trainers_needs_no_workers() -> None:
    """Their recent work for it does not count."""
    assert needed_workers(load(trainers=[])) == 0


def test_trainers_that_share_their_batches_are_not_counted_twice() -> None:
    """The work is that of all of them together."""
    assert needed_workers(load(trainers=[(40, 0.5), (40, 0.5)])) == pytest.approx(4)


def test_a_trainer_counts_in_proportion_to_its_reads() -> None:
    """The trainer that waits reads a tenth of the batches."""
    assert needed_workers(load(trainers=[(899, 0.0), (99, 0.5)])) == pytest.approx(2.2)


def test_a_trainer_with_endless_demand_requests_ten_times_the_workers() -> None:
    """With these workers the next measurement gives the next number."""
    assert needed_workers(load(share=1.0)) == pytest.approx(20)


def test_workers_that_have_finished_nothing_yet_count_as_at_least_one() -> None:
    """A sample may take longer than the whole period of the measurement."""
    idle = {"busy": 0.0, "row_bytes_per_busy_s": 0.0}

    assert needed_workers(load(share=1.0, **idle)) == pytest.approx(10 / 0.85)
    assert needed_workers(load(share=0.0, **idle)) == 0


def test_the_workers_of_this_host_are_subtracted() -> None:
    """The result counts remote workers only."""
    assert WantedWorkers().follow([load()], limits(local=1)).workers == 3
    assert WantedWorkers().follow([load()], limits(local=4)).workers == 0


def test_a_local_stream_needs_local_workers() -> None:
    """It needs no remote workers, and leaves fewer local ones to the other streams."""
    fixed = load(name="live", stays_here=True)

    assert WantedWorkers().follow([fixed], limits(local=2)).workers == 0
    assert WantedWorkers().follow([load(), fixed], limits(local=2)).workers == 4
    assert WantedWorkers().follow([load(), fixed], limits(local=5)).workers == 3


@pytest.mark.parametrize(("share", "workers"), [(0.02, 0), (0.021, 1)])
def test_without_waits_no_further_worker_is_needed(share: float, workers: int) -> None:
    """Busy workers alone are no reason: they keep up."""
    assert WantedWorkers().follow([load(share=share, busy=2.0)], limits(local=2)).workers == workers


def test_the_workers_that_prevent_waits_stay_needed() -> None:
    """This also holds for a new daemon to which they connected by themselves."""
    fed = load(busy=8.5, share=0.0)

    assert WantedWorkers().follow([fed], limits(local=2, remote=8)).workers == 8
    assert WantedWorkers().follow([fed], limits(local=2, remote=20)).workers == 8


def test_hosts_that_are_disconnected_for_a_moment_stay_needed() -> None:
    """The ring is still full, so no trainer waits yet."""
    rule = WantedWorkers()
    rule.follow([load(busy=5.1, share=0.5)], limits(local=2, remote=4))

    assert rule.follow([load(busy=8.5, share=0.0)], limits(local=2, remote=0)).workers == 8


def test_the_number_falls_as_soon_as_less_is_needed() -> None:
    """Autoscalers that use it wait before they stop a host."""
    rule = WantedWorkers()
    rule.follow([load(busy=17.0)], limits(remote=16))

    assert rule.follow([load(busy=3.4, share=0.0)], limits(remote=16)).workers == 2
    assert rule.follow([], limits(remote=16)).workers == 0


def test_the_network_caps_the_number() -> None:
    """Each worker sends a hundred megabytes a second, and the network has 10 Gbit/s."""
    wanted = WantedWorkers().follow([load(busy=8.5)], limits(interface="eth0", interface_bytes_per_s=1.25e9))

    assert (wanted.workers, wanted.capped_by) == (11, "network")
    assert wanted.cap == (
        "the NIC, not the cores: eth0 (10 Gbit/s) carries the rows of 11 remote workers, and the trainers need 18"
    )


def test_the_ring_caps_the_number() -> None:
    """Its free slots have rows for six workers, and two of these are local."""
    wanted = WantedWorkers().follow([load(busy=8.5, ring_workers=6.0)], limits(local=2))

    assert (wanted.workers, wanted.capped_by) == (4, "ring")
    assert wanted.cap == (
        "the ring, not the cores: the slots of stream 'photos' have rows for 6 workers, "
        "and its trainers need 20; raise its memory"
    )


def test_the_configured_maximum_caps_the_number() -> None:
    """The result names this limit."""
    wanted = WantedWorkers().follow([load(busy=8.5)], limits(max=16))

    assert (wanted.workers, wanted.capped_by) == (16, "max")
    assert wanted.cap == "daemon.pool_max = 16, and the trainers need 18"


def test_the_tightest_cap_is_named() -> None:
    """All limits cap the number here."""
    facts = {"interface": "eth0", "interface_bytes_per_s": 1.25e9}
    loads = [load(busy=8.5, ring_workers=16.0)]

    assert WantedWorkers().follow(loads, limits(max=12, **facts)).capped_by == "network"
    assert WantedWorkers().follow(loads, limits(max=10, **facts)).capped_by == "max"
    assert WantedWorkers().follow([load(busy=8.5, ring_workers=5.0)], limits(max=10, **facts)).capped_by == "ring"


def test_limits_that_do_not_cap_are_not_named() -> None:
    """The speed of the network is unknown, and the other limits are above the need."""
    assert WantedWorkers().follow([load(busy=8.5)], limits(interface="eth0", max=18)).capped_by == ""
