"""Limits per peer: handshakes per second, in a bounded table, and the definition of one peer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.runtime.limits import BURST, HOSTS_MAX, PER_S, HandshakeRate, SessionLimits, peer_network, peer_site


def admitted(rate: HandshakeRate, host: str, now: float, times: int) -> int:
    """Return how many of these simultaneous handshakes are admitted."""
    return sum(rate.admit(host, now) for _ in range(times))


def test_a_crowd_comes_in_at_once_and_then_so_many_a_second() -> None:
    """A rejected peer has to wait, and its retries cost it no further tokens."""
    rate = HandshakeRate(burst=256, per_s=32)

    assert admitted(rate, "a", 0.0, 300) == 256
    assert rate.refused == 44
    assert admitted(rate, "a", 1.0, 100) == 32
    assert admitted(rate, "a", 1.5, 100) == 16
    assert admitted(rate, "a", 1000.0, 300) == 256


def test_hosts_do_not_take_each_others_tokens() -> None:
    """Only the host that has no tokens left has to wait."""
    rate = HandshakeRate(burst=2, per_s=1)

    assert [rate.admit(host, 0.0) for host in ("a", "a", "a", "b", "a", "b", "b")] == [
        True,
        True,
        False,
        True,
        False,
        True,
        False,
    ]


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    """A clock that stops or runs backwards neither adds tokens nor removes them."""
    rate = HandshakeRate(burst=1, per_s=10)

    assert rate.admit("a", 5.0)
    assert not rate.admit("a", 5.0)
    assert not rate.admit("a", 4.0)
    assert rate.admit("a", 5.2)


def test_the_table_does_not_grow_and_keeps_those_who_took_most() -> None:
    """Many hosts that connect once each do not evict the host that connects all the time."""
    rate = HandshakeRate(burst=4, per_s=0.001)
    admitted(rate, "greedy", 0.0, 4)

    for number in range(3 * HOSTS_MAX):
        assert rate.admit(f"host {number}", 0.0)
        assert len(rate) <= HOSTS_MAX

    assert not rate.admit("greedy", 0.0)


def test_hosts_that_have_all_their_tokens_again_are_forgotten_first() -> None:
    """A host with all its tokens is equal to a new one, so its entry is removed first."""
    rate = HandshakeRate(burst=4, per_s=1)
    for number in range(HOSTS_MAX):
        rate.admit(f"host {number}", 0.0)

    rate.admit("late", 100.0)

    assert len(rate) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1)), max_size=200))
def test_no_host_ever_gets_more_than_the_burst_and_the_rate(asked) -> None:
    """The limit holds for any order and timing of handshakes from any hosts."""
    rate, now, came = HandshakeRate(burst=3, per_s=2), 0.0, {"a": 0, "b": 0, "c": 0}
    for host, pause_s in asked:
        now += pause_s
        came[host] += rate.admit(host, now)
        assert came[host] <= 3 + 2 * now + 1e-6


def test_the_complaint_names_host_limits_and_count() -> None:
    """The message serves the log and the rejected client."""
    rate = HandshakeRate()
    admitted(rate, "10.0.0.5", 0.0, BURST + 7)

    text = rate.complaint("10.0.0.5")

    assert "10.0.0.5 connects more often than 32 times a second, after 1024 at once; 7 handshakes" in text
    assert (BURST, PER_S) == (1024, 32)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("::1", "::/64"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("no address", "no address"),
        ("x" * 1000, "x" * 64),
    ],
)
def test_one_peer_is_an_address_or_a_network_of_version_6(address, network) -> None:
    """A client with one IPv6 address usually has its whole network, so the network counts."""
    assert peer_network(address) == network


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("127.3.2.1", "127.0.0.0/8"),
        ("::ffff:127.0.0.9", "127.0.0.0/8"),
        ("::1", "::/48"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1::/48"),
        ("no address", "no address"),
        ("", ""),
    ],
)
def test_one_peer_of_the_log_is_all_that_one_customer_or_host_has(address, site) -> None:
    """Addresses that cost nothing do not multiply log lines."""
    assert peer_site(address) == site


def test_a_whole_crowd_may_be_about_to_greet() -> None:
    """As many connections may be in their handshake as sessions are allowed, above a minimum."""
    assert SessionLimits(1000, 10).pending_max == 1000
    assert SessionLimits(1, 1).pending_max == 256
