"""Connections that are not sessions.

The guard counts them, closes them in time, and never closes anything else instead.
"""

import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from structlog.testing import capture_logs

from batchd.runtime.tcp.connection_guard import (
    BAN_S,
    BANNED_MAX,
    PENDING_TICKS,
    ConnectionGuard,
    GuardLimits,
    HeldDescriptor,
)
from support.waiting import PATIENCE_S

TRAINERS = GuardLimits(pending_max=2)
FRAMES_MAX, UNREAD_BYTES_MAX = TRAINERS.frames_max, TRAINERS.unread_bytes_max
HOST = "127.0.0.1"
"""The host of connections by default."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes everything at the end of the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def server(stack) -> socket.socket:
    """A listening socket on loopback."""
    return stack.enter_context(socket.create_server(("127.0.0.1", 0)))


@pytest.fixture
def connect(stack, server):
    """Connect from an address of loopback; return our end and the other one."""

    def connect(host=HOST):
        theirs = stack.enter_context(socket.create_connection(server.getsockname(), PATIENCE_S, (host, 0)))
        ours, _ = server.accept()
        stack.enter_context(ours)
        return ours, theirs

    return connect


@pytest.fixture
def sessions() -> set[int]:
    """The descriptors that are sessions."""
    return set()


@pytest.fixture
def guard(stack, server, sessions) -> ConnectionGuard:
    """A guard that allows two pending connections."""
    guard = ConnectionGuard(sessions, TRAINERS)
    stack.callback(guard.close)
    guard.open(server.getsockname()[1])
    return guard


def has_ended(theirs: socket.socket) -> bool:
    """Whether the other end has seen the end of the connection."""
    return bool(select.select([theirs], [], [], 0)[0]) and theirs.recv(1) == b""


def let_pass(guard: ConnectionGuard, ticks: int) -> None:
    for _ in range(ticks):
        guard.tick()


def test_a_connection_without_a_session_is_closed_in_time(guard, connect) -> None:
    """The guard closes it not earlier, and only once."""
    ours, theirs = connect()
    guard.add(ours.fileno())

    let_pass(guard, PENDING_TICKS)
    assert not has_ended(theirs)
    with capture_logs() as lines:
        let_pass(guard, 5)
    assert has_ended(theirs)
    assert [(line["event"], line["host"], line["closed"]) for line in lines] == [
        ("remote connection closed", "127.0.0.1", 1)
    ]
    assert len(guard) == 1
    guard.remove(ours.fileno())
    assert (len(guard), guard.pending()) == (0, {})


def test_a_session_stays_and_its_connection_is_closed_some_time_later(guard, sessions, connect) -> None:
    """The last messages of the session have time to arrive."""
    ours, theirs = connect()
    guard.add(ours.fileno())
    let_pass(guard, PENDING_TICKS // 2)
    sessions.add(ours.fileno())
    let_pass(guard, 10 * PENDING_TICKS)
    sessions.clear()
    let_pass(guard, PENDING_TICKS)
    assert not has_ended(theirs)
    let_pass(guard, 1)
    assert has_ended(theirs)


@pytest.mark.parametrize("has_other", [False, True], ids=["closed", "another's"])
def test_a_connection_whose_end_is_reported_before_its_beginning_is_forgotten(guard, connect, has_other) -> None:
    """No second report follows. The guard does not close the next user of its number instead."""
    ours, _theirs = connect()
    guard.add(ours.fileno())
    number = ours.fileno()
    other = connect() if has_other else None
    ours.close()
    if other is not None:
        os.dup2(other[0].fileno(), number)

    let_pass(guard, 1)
    assert guard.inode_of(number) is not None
    let_pass(guard, 1)
    assert guard.inode_of(number) is None
    assert guard.closed == 0
    if other is not None:
        os.close(number)
        assert not has_ended(other[1])


def test_the_host_with_most_pending_connections_loses_its_oldest(guard, sessions, connect) -> None:
    """Sessions do not count, and many connections of one host do not affect another host."""
    alone, peer = connect("127.0.0.2"), connect()
    crowd = [connect() for _ in range(4)]
    sessions.add(peer[0].fileno())
    for ours, _ in (alone, peer, *crowd):
        guard.add(ours.fileno())

    guard.limit_pending()
    guard.limit_pending()

    assert [has_ended(theirs) for _, theirs in (alone, peer, *crowd)] == [False, False, True, True, True, False]
    assert guard.pending() == {alone[0].fileno(): "127.0.0.2", crowd[3][0].fileno(): "127.0.0.1"}
    assert guard.closed == 3


def test_a_number_that_has_been_reused_is_left_alone(guard, connect, stack) -> None:
    """ZeroMQ may close a connection at any moment, and the kernel reuses its number."""
    ours, _ = connect()
    number = ours.fileno()
    guard.add(number)
    other, its_peer = connect()
    pair, its_end = (stack.enter_context(one) for one in socket.socketpair())
    reading, writing = os.pipe()
    stack.callback(os.close, writing)

    for stand_in, peer in ((other.fileno(), its_peer), (pair.fileno(), its_end), (reading, None)):
        os.dup2(stand_in, number, inheritable=False)
        guard._shut_down(number, "test")
        assert peer is None or not has_ended(peer)

    os.write(writing, b"x")
    assert os.read(number, 1) == b"x"
    os.close(reading)
    assert guard.closed == 0


def test_descriptors_that_are_no_connection_to_our_port_are_never_noted(guard, connect, server, stack) -> None:
    """A closed number, a pipe, a local socket, a listener, the other end, a datagram socket."""
    _, theirs = connect()
    pair, _end = (stack.enter_context(one) for one in socket.socketpair())
    datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    reading, writing = os.pipe()
    os.close(writing)
    for number in (reading, pair.fileno(), server.fileno(), theirs.fileno(), datagrams.fileno()):
        guard.add(number)
    os.close(reading)
    guard.add(reading)
    assert len(guard) == 0


def test_a_number_that_is_accepted_again_is_the_new_connection(guard, connect) -> None:
    """The report of the first connection's end may have been lost."""
    first, _ = connect()
    guard.add(first.fileno())
    let_pass(guard, PENDING_TICKS)
    second, theirs = connect()
    os.dup2(second.fileno(), first.fileno(), inheritable=False)
    guard.add(first.fileno())

    let_pass(guard, PENDING_TICKS)
    assert not has_ended(theirs)
    let_pass(guard, 1)
    assert has_ended(theirs)


def say(theirs: socket.socket, ours: socket.socket, count: int) -> None:
    """Send this many bytes and let the other end receive them."""
    taken = 0
    theirs.setblocking(False)
    while taken < count:
        if select.select([], [theirs], [], 0)[1] and theirs.send(bytes(min(1 << 16, count - taken))):
            taken += len(ours.recv(1 << 20))


@pytest.mark.parametrize("is_session", [False, True])
def test_a_peer_that_sends_more_than_is_read_is_disconnected(guard, sessions, connect, is_session) -> None:
    """This holds for a session, too. Bytes that were read do not count, in any amount."""
    ours, theirs = connect()
    guard.add(ours.fileno())
    if is_session:
        sessions.add(ours.fileno())
    for _ in range(5):
        say(theirs, ours, UNREAD_BYTES_MAX)
        assert guard.count_message(ours.fileno(), HOST, UNREAD_BYTES_MAX, 1)
        guard.audit()
    assert not has_ended(theirs)
    say(theirs, ours, UNREAD_BYTES_MAX + 1000)
    guard.audit()
    assert has_ended(theirs)
    assert not guard.count_message(ours.fileno(), HOST, 1, 1)


def test_slow_unread_bytes_count_like_fast_ones(guard, connect, monkeypatch) -> None:
    """An endless message may arrive in small parts; heartbeats are slower still, and expire."""
    now = 1000.0
    monkeypatch.setattr("batchd.runtime.tcp.connection_guard.monotonic", lambda: now)
    guard.audit()
    slow, quiet = connect(), connect()
    for ours, _theirs in (slow, quiet):
        guard.add(ours.fileno())
    for _ in range(80):
        now += 1.0
        say(slow[1], slow[0], 4_096)
        say(quiet[1], quiet[0], 500)
        guard.audit()
    assert not has_ended(slow[1])
    for _ in range(6):
        now += 1.0
        say(slow[1], slow[0], 4_096)
        guard.audit()
    assert (has_ended(slow[1]), has_ended(quiet[1])) == (True, False)


def test_reading_more_than_arrived_earns_nothing(guard, connect) -> None:
    """Otherwise a peer could save credit for an endless message."""
    ours, theirs = connect()
    guard.add(ours.fileno())
    for _ in range(50):
        assert guard.count_message(ours.fileno(), HOST, UNREAD_BYTES_MAX, 1)
        guard.audit()
    say(theirs, ours, UNREAD_BYTES_MAX + 1000)
    guard.audit()
    assert has_ended(theirs)


def test_a_host_with_too_much_unread_loses_the_connection_with_most_of_it(guard, sessions, connect) -> None:
    """No single connection has too much; other hosts are not affected."""
    part = UNREAD_BYTES_MAX * 3 // 4
    crowd, other = [connect() for _ in range(7)], connect("127.0.0.2")
    for number, (ours, theirs) in enumerate((*crowd, other)):
        guard.add(ours.fileno())
        sessions.add(ours.fileno())
        say(theirs, ours, part + 1000 * (number == 3))
    guard.audit()
    assert [has_ended(theirs) for _, theirs in (*crowd, other)] == [number == 3 for number in range(8)]


def test_requested_bytes_may_be_unread(guard, connect) -> None:
    """The allowance ends with their receipt; other bytes of the connection always count."""
    ours, theirs = connect()
    guard.add(ours.fileno())
    asked = 10 * UNREAD_BYTES_MAX
    guard.expect(ours.fileno(), asked)
    say(theirs, ours, asked)
    guard.audit()
    assert guard.count_message(ours.fileno(), HOST, asked, 1)
    guard.expect(ours.fileno(), UNREAD_BYTES_MAX)
    guard.audit()
    say(theirs, ours, 2 * UNREAD_BYTES_MAX)
    guard.audit()
    assert not has_ended(theirs)
    say(theirs, ours, 1000)
    guard.audit()
    assert has_ended(theirs)
    guard.remove(ours.fileno())
    guard.expect(ours.fileno(), asked)


def test_bytes_asked_of_one_connection_are_not_unread_for_its_host(guard, sessions, connect) -> None:
    """Another connection of the host may not send them."""
    asked = 10 * TRAINERS.unread_host_bytes_max
    crowd = [connect() for _ in range(4)]
    for ours, _ in crowd:
        guard.add(ours.fileno())
        sessions.add(ours.fileno())
        guard.expect(ours.fileno(), asked)
        guard.expect(ours.fileno(), asked if ours is not crowd[3][0] else 0)
    for number, (ours, theirs) in enumerate(crowd):
        say(theirs, ours, asked if number == 0 else UNREAD_BYTES_MAX + 1000)
    guard.audit()
    assert [has_ended(theirs) for _, theirs in crowd] == [False, False, False, True]


def test_limits_belong_to_each_guard(stack, server, connect) -> None:
    """One guard may allow more or less than another."""
    wide = GuardLimits(9, FRAMES_MAX * 2, UNREAD_BYTES_MAX * 8, UNREAD_BYTES_MAX * 9)
    narrow = GuardLimits(9, 10, 1_000, 2_000)
    ended = []
    for limits in (wide, narrow):
        guard = ConnectionGuard((), limits)
        stack.callback(guard.close)
        guard.open(server.getsockname()[1])
        frames, unread = connect("127.0.0.2"), connect("127.0.0.3")
        for ours, _ in (frames, unread):
            guard.add(ours.fileno())
        guard.count_message(frames[0].fileno(), "127.0.0.2", 1, FRAMES_MAX + 1)
        say(unread[1], unread[0], UNREAD_BYTES_MAX * 8)
        guard.audit()
        ended.append([has_ended(theirs) for _, theirs in (frames, unread)])
    assert ended == [[False, False], [True, True]]


def test_a_peer_with_too_many_messages_between_two_audits_is_disconnected_and_ignored(guard, connect) -> None:
    """Small messages count as well, and so do the frames of one message."""
    ours, theirs = connect()
    guard.add(ours.fileno())
    for _ in range(2):
        assert all(guard.count_message(ours.fileno(), HOST, 1, 2) for _ in range(FRAMES_MAX // 2))
        guard.audit()
    assert not has_ended(theirs)
    assert guard.count_message(ours.fileno(), HOST, 1, FRAMES_MAX)
    assert [guard.count_message(ours.fileno(), HOST, 1, 1) for _ in range(2)] == [False, False]
    assert has_ended(theirs)
    assert guard.closed == 1


def test_a_host_that_sent_too_much_cannot_connect_for_a_while(guard, connect, monkeypatch) -> None:
    """Other hosts can, and existing connections stay."""
    now = 1000.0
    monkeypatch.setattr("batchd.runtime.tcp.connection_guard.monotonic", lambda: now)
    loud, before = connect(), connect()
    for ours, _theirs in (loud, before):
        guard.add(ours.fileno())
    guard.count_message(loud[0].fileno(), HOST, 1, FRAMES_MAX + 1)
    after, elsewhere = connect(), connect("127.0.0.2")
    for ours, _theirs in (after, elsewhere):
        guard.add(ours.fileno())
    assert [has_ended(theirs) for _, theirs in (loud, before, after, elsewhere)] == [True, False, True, False]

    now += BAN_S
    later = connect()
    guard.add(later[0].fileno())
    assert not has_ended(later[1])


def test_the_number_of_blocked_hosts_is_limited(guard, connect) -> None:
    """The host that was blocked first is removed first."""
    ours, _ = connect("127.0.0.3")
    guard.add(ours.fileno())
    for number in range(BANNED_MAX):
        guard.ban(str(number))
    guard.count_message(ours.fileno(), "127.0.0.3", 1, FRAMES_MAX + 1)
    assert [guard.is_banned(host) for host in ("0", "1", "127.0.0.3")] == [False, True, True]


def test_an_audit_checks_a_reused_number_and_harms_nothing(guard, connect, stack) -> None:
    """The number belongs to another connection with much traffic, to a pipe, or to nothing."""
    ours, _ = connect()
    number = ours.fileno()
    guard.add(number)
    other, its_peer = connect()
    say(its_peer, other, 2 * UNREAD_BYTES_MAX)
    os.dup2(other.fileno(), number, inheritable=False)
    guard.audit()
    assert not has_ended(its_peer)
    later = connect()
    guard.add(later[0].fileno())
    assert not has_ended(later[1]), "a host is blocked for the messages of another"
    reading, writing = os.pipe()
    stack.callback(os.close, writing)
    os.dup2(reading, number, inheritable=False)
    os.close(reading)
    guard.audit()
    os.write(writing, b"x")
    assert os.read(number, 1) == b"x"


def test_holding_a_descriptor_changes_nothing_about_it(stack) -> None:
    """No descriptor is added, and a non-blocking socket stays non-blocking."""
    pair, end = (stack.enter_context(one) for one in socket.socketpair())
    pair.setblocking(False)
    held_descriptor = HeldDescriptor()
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
    with held_descriptor.on(pair.fileno()) as held:
        assert held is not None
        assert os.fstat(held.fileno()).st_ino == os.fstat(pair.fileno()).st_ino
        assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert not os.get_blocking(pair.fileno())
    pair.close()
    assert has_ended(end)
    with held_descriptor.on(end.fileno() + 1000) as held:
        assert held is None
    held_descriptor.close()


def test_a_connection_whose_session_has_ended_is_closed_soon_unless_another_begins(guard, sessions, connect) -> None:
    """It is closed after two ticks, in which the last messages arrive."""
    (leaving, told_to_leave), (staying, told_to_stay) = connect(), connect()
    for ours in (leaving, staying):
        guard.add(ours.fileno())
        guard.close_soon(ours.fileno())
    sessions.add(staying.fileno())

    let_pass(guard, 1)
    assert not has_ended(told_to_leave)
    let_pass(guard, 1)
    assert has_ended(told_to_leave)
    let_pass(guard, PENDING_TICKS)
    assert not has_ended(told_to_stay)
    guard.close_soon(999_999)


def test_a_blocked_host_gets_no_further_connection(guard, connect) -> None:
    """Its existing connection stays; other hosts can connect."""
    ours, theirs = connect()
    guard.add(ours.fileno())
    guard.ban("127.0.0.1")
    assert guard.is_banned("127.0.0.1")
    assert not guard.is_banned("127.0.0.2")
    further, other = connect(), connect("127.0.0.2")
    guard.add(further[0].fileno())
    guard.add(other[0].fileno())

    assert has_ended(further[1])
    assert not has_ended(theirs)
    assert not has_ended(other[1])
