"""The gateway to which the first of several gateways sends worker hosts."""

from collections import Counter

from batchd.pool.gateway.links import ARRIVAL_S, HERE, GatewayChoice


def test_a_single_gateway_sends_no_host_away() -> None:
    """It knows no other gateway, even if it can admit no more hosts."""
    placement = GatewayChoice()
    assert [placement.choose(here, (), 0.0) for here in (0, 1_000, None)] == [HERE] * 3


def test_hosts_are_sent_to_the_gateway_with_the_fewest_links() -> None:
    placement = GatewayChoice()
    placement.tell([0, 7, 2, 5])
    assert placement.choose(3, (), 0.0) == 2


def test_simultaneous_hosts_are_spread_before_the_daemon_has_reported_them() -> None:
    """Hosts on their way count."""
    placement = GatewayChoice()
    placement.tell([0, 0, 0])
    here, found = 0, Counter[int]()
    for _ in range(30):
        gateway = placement.choose(here, (), 0.0)
        here += gateway == HERE
        found[gateway] += 1
    assert found == {0: 10, 1: 10, 2: 10}


def test_a_host_that_has_arrived_counts_once() -> None:
    """It counts as a link, and no longer as on its way."""
    placement = GatewayChoice()
    placement.tell([0, 0, 0])
    assert [placement.choose(1, (), 0.0) for _ in range(2)] == [1, 2]
    placement.tell([0, 1, 1])
    assert placement.choose(1, (), 0.0) == HERE
    assert placement.choose(2, (), 0.0) == 1


def test_a_host_that_does_not_arrive_is_forgotten() -> None:
    placement = GatewayChoice()
    placement.tell([0, 0])
    assert placement.choose(1, (), 0.0) == 1
    assert placement.choose(1, (), 0.0) == HERE
    assert placement.choose(1, (), 2 * ARRIVAL_S) == 1


def test_no_host_is_sent_to_a_gateway_that_is_down_or_did_not_admit_it() -> None:
    """It is admitted here instead; if that is impossible, it is refused here."""
    placement = GatewayChoice()
    placement.tell([0, None, 0])
    assert placement.choose(9, (), 0.0) == 2
    assert placement.choose(9, [2], 0.0) == HERE
    assert placement.choose(None, [2], 0.0) == HERE


def test_a_gateway_with_its_share_of_the_hosts_sends_further_ones_to_others() -> None:
    """Its links count as too many, whatever numbers the others have."""
    placement = GatewayChoice()
    placement.tell([0, 50])
    assert placement.choose(None, (), 0.0) == 1
