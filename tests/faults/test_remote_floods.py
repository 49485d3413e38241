"""Floods over TCP: the daemon disconnects, refuses the host for a while, and serves the others."""

import itertools
import socket
import struct
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
import zmq

import batchd_client
from batchd.core.admission import SUBSCRIPTIONS_MAX
from batchd.core.state import TICK_S
from batchd.runtime.limits import QUESTIONS_PER_TICK
from batchd.runtime.tcp.connection_guard import BAN_S
from batchd_client.errors import DaemonNotFound
from batchd_wire import PROTOCOL_VERSION
from batchd_wire import messages as wire
from batchd_wire.codes import ErrorCode
from support.good_trainers import good_trainers, private_bytes
from support.hostile_streams import COMMAND, frame, introduce
from support.network import free_port
from support.waiting import PATIENCE_S, wait_until

PING = frame(b"\x04PING\x00\x00", COMMAND)
MORE = 1
FLOOD_S = 0.4
FLOODS = 4
GROWTH_BYTES_MAX = 256 << 20
"""The daemon keeps input between two audits: at least 64 bytes a frame, four hosts."""
_hosts = (f"127.{number >> 8}.{number & 255}.9" for number in itertools.count(256))


def elsewhere():
    """Return an address that no test has used: the daemon refuses a flooding one for a while."""
    return next(_hosts)


FLOODING = {
    "nonsense with pings": frame(b"\x91\x7f") * 20 + PING,
    "pulls of nothing": frame(wire.Pull(1, 0, False, 0, []).encode()),
    "questions": frame(wire.AskStatus(1).encode()),
    "a message that never ends": frame(b"x", MORE),
    "a message of large frames that never ends": frame(bytes(60_000), MORE | 2),
    "pings": PING,
}
"""One part of each flood."""


@pytest.fixture
def daemon(start_daemon):
    """Start a daemon without keys, to which any peer may send messages.

    Each test has its own: all loopback addresses are one host in the log, with one line a minute.
    """
    return start_daemon(tcp=f"127.0.0.1:{free_port()}")


def connect(daemon, host):
    """Connect from this host; the connection can carry messages."""
    address, port = daemon.tcp_address.removeprefix("tcp://").split(":")
    with ExitStack() as unless_it_fails:
        connection = unless_it_fails.enter_context(
            socket.create_connection((address, int(port)), PATIENCE_S, (host, 0))
        )
        introduce(connection)
        unless_it_fails.pop_all()
    return connection


@contextmanager
def zmq_dealer(daemon):
    """Make a trainer that sends whatever a test asks for."""
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(daemon.tcp_address)
        yield dealer
    context.term()


def hear(dealer):
    """Return the next message; batches without their bytes."""
    assert dealer.poll(PATIENCE_S * 1000)
    return wire.TO_TRAINER_REMOTE.decode(dealer.recv_multipart()[0])


def closed(daemon):
    """Return the number of connections that the daemon has closed so far."""
    return daemon.status()["daemon"]["tcp"]["closed"]


def lines_about(daemon, host):
    """Return the log lines about closed connections from this host."""
    return [line for line in daemon.log_lines("remote connection closed") if line["host"] == host]


def flood(daemon, part, *, greets, host, is_over=lambda: True):
    """Connect and send for a while; reset the connection once the daemon has closed its end."""
    words = part * max(1, (1 << 16) // len(part))
    with connect(daemon, host) as connection:
        with suppress(ConnectionError, TimeoutError):
            if greets:
                connection.sendall(frame(wire.Greet(PROTOCOL_VERSION, "flood", 1, "").encode()))
            connection.settimeout(FLOOD_S)
            until_s = time.monotonic() + FLOOD_S
            while time.monotonic() < until_s:
                connection.sendall(words)
        wait_until(is_over, "the daemon has closed the connection")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("words", FLOODING)
def test_a_flood_ends_and_others_read_on(daemon, words):
    """Any content, with and without a session; memory grows by one audit's input at most."""
    with good_trainers(daemon) as good:
        good.read()
        before, closed_before = private_bytes(daemon.pid), closed(daemon)
        hosts = [elsewhere() for _ in range(FLOODS)]
        for number, host in enumerate(hosts):
            # ZeroMQ answers each ping, so pings never exceed a limit
            is_over = lambda count=closed_before + number: words == "pings" or closed(daemon) > count  # noqa: E731
            flood(daemon, FLOODING[words], greets=number % 2 == 0, host=host, is_over=is_over)
            good.read()
            assert private_bytes(daemon.pid) - before < GROWTH_BYTES_MAX
        wait_until(lambda: good.status()["daemon"]["tcp"]["connections"] == 1, "the flood is over")
        good.read()
        if words == "pings":
            return
        assert closed(daemon) - closed_before == FLOODS
    (line,) = lines_about(daemon, hosts[0])
    assert "unread" in line["reason"] or "it sent more than" in line["reason"]


@pytest.mark.parametrize("words", ["a message that never ends", "a message of large frames that never ends"])
def test_a_trickle_that_is_never_read_ends_too(daemon, words):
    """The speed does not matter: the unread bytes count."""
    host = elsewhere()
    with good_trainers(daemon) as good, connect(daemon, host) as connection:
        connection.sendall(frame(wire.Greet(PROTOCOL_VERSION, "trickle", 1, "").encode()))
        before = private_bytes(daemon.pid)
        part = FLOODING[words] * max(1, 3_000 // len(FLOODING[words]))
        with suppress(ConnectionError):
            for _ in range(2_000):
                connection.sendall(part)
                time.sleep(0.005)
        assert private_bytes(daemon.pid) - before < GROWTH_BYTES_MAX / 4
        good.read()
    (line,) = lines_about(daemon, host)
    assert "of it are unread" in line["reason"]


def test_questions_are_answered_so_many_at_a_time(daemon):
    """The answers are long; the daemon refuses further queries, and the session continues."""
    with zmq_dealer(daemon) as dealer:
        dealer.send(wire.Greet(PROTOCOL_VERSION, "curious", 1, "").encode())
        assert isinstance(hear(dealer), wire.Greeted)
        began_s = time.monotonic()
        for number in range(1, 101):
            dealer.send(wire.AskStatus(number).encode())
        answers = [hear(dealer) for _ in range(100)]
        ticks = 2 + (time.monotonic() - began_s) / TICK_S
        put_off = [one for one in answers if isinstance(one, wire.Refused)]
        assert QUESTIONS_PER_TICK <= 100 - len(put_off) <= ticks * QUESTIONS_PER_TICK
        assert {one.error for one in put_off} <= {ErrorCode.TOO_OFTEN}

        def answered():
            dealer.send(wire.AskStatus(101).encode())
            return isinstance(hear(dealer), wire.Status)

        wait_until(answered, "the next tick has begun", every_s=TICK_S / QUESTIONS_PER_TICK)


def test_a_session_has_so_many_claims_whatever_it_gives_up(daemon):
    """Ending unknown claims, or one claim twice, does not permit further claims."""
    with zmq_dealer(daemon) as dealer:
        dealer.send(wire.Greet(PROTOCOL_VERSION, "greedy", 1, "").encode())
        hear(dealer)
        admitted = []
        for number in range(1, SUBSCRIPTIONS_MAX + 10):
            dealer.send(wire.Subscribe(number, "photos", 0, 1, 1, 0, 0, None, None, is_spectator=True).encode())
            dealer.send(wire.Unsubscribe(1 << 40, 0).encode())
            answer = next(
                one for one in iter(lambda: hear(dealer), None) if isinstance(one, wire.Subscribed | wire.Refused)
            )
            admitted.append(answer.subscription if isinstance(answer, wire.Subscribed) else answer.error)
        assert admitted.index(ErrorCode.NOT_ALLOWED) == SUBSCRIPTIONS_MAX
        assert set(admitted[SUBSCRIPTIONS_MAX:]) == {ErrorCode.NOT_ALLOWED}
        for _ in range(3):
            dealer.send(wire.Unsubscribe(admitted[0], 0).encode())
        for number, admits in ((200, True), (201, False)):
            dealer.send(wire.Subscribe(number, "photos", 0, 1, 1, 0, 0, None, None, is_spectator=True).encode())
            answer = next(
                one for one in iter(lambda: hear(dealer), None) if isinstance(one, wire.Subscribed | wire.Refused)
            )
            assert isinstance(answer, wire.Subscribed) is admits


def test_the_host_of_a_flood_is_refused_for_a_while(daemon):
    """An honest trainer of that host waits as for an absent daemon; other hosts connect."""
    host, before = elsewhere(), closed(daemon)
    flood(daemon, FLOODING["questions"], greets=True, host=host)
    wait_until(lambda: lines_about(daemon, host), "it was disconnected")
    with suppress(ConnectionError), connect(daemon, host) as kept_out:
        kept_out.sendall(frame(wire.Greet(PROTOCOL_VERSION, "honest", 1, "").encode()))
        while kept_out.recv(1 << 10):
            pass
    with batchd_client.connect(daemon.tcp_address) as other:
        tcp = wait_until(
            lambda: (counts := other.status()["daemon"]["tcp"])["connections"] == 1 and counts, "both are closed"
        )
        assert tcp["closed"] - before == 2, "the daemon must close it, and not ZeroMQ after five seconds"


@pytest.mark.thorough
def test_a_trainer_that_is_kept_out_is_told_so_by_its_deadline(daemon):
    """The trainer only knows that its connections are cut."""
    flood(daemon, FLOODING["questions"], greets=True, host="127.0.0.1")
    wait_until(lambda: lines_about(daemon, "127.0.0.1"), "it was disconnected")
    with pytest.raises(DaemonNotFound, match="keeps this host out for some"):
        batchd_client.connect(daemon.tcp_address, connect_timeout_s=1.0)
    batchd_client.connect(daemon.tcp_address, connect_timeout_s=3 * BAN_S).close()
