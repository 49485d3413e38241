"""The TCP listener under shortage and with odd peers: the core's events, and the log."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from math import inf
from typing import Any, cast

import pytest
import zmq
from structlog.testing import capture_logs

from batchd.core.actions import GrantLease
from batchd.core.events import BatchSent, Event, SessionCutOff
from batchd.daemon.doors import DaemonSide, Doors, Queue
from batchd.daemon.loop import Loop
from batchd.daemon.tcp import TcpDoor
from batchd.runtime.limits import SUBJECTS_MAX, SessionLimits
from batchd.runtime.poller import Poller
from batchd.runtime.slots import SlotPool
from batchd.runtime.tcp.connection_guard import ConnectionGuard, GuardLimits
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.codes import ErrorCode
from batchd_wire.fields import Field, place_fields
from batchd_wire.messages import AskStatus, Greet
from support.hostile_streams import frame, introduce
from support.waiting import PATIENCE_S, wait_until

FRAMES_MAX = GuardLimits(pending_max=2).frames_max

USED_AGAIN = bool
"""Another connection, which is not reported yet, has the descriptor of a closed one."""
LAYOUT = place_fields((Field("label", "int64", ()),), 4)


class ShortMemory(SlotPool):
    """Slots that cannot be mapped."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def mapped(self, slot: int) -> memoryview:  # noqa: ARG002  none can be
        raise self._error


@pytest.fixture
def events() -> list[Event]:
    """Collect the events for the core."""
    return []


@pytest.fixture
def memory() -> SlotPool:
    return ShortMemory(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))


@pytest.fixture
def remote(events, memory) -> Iterator[TcpDoor]:
    """Make a listener without a connection that is not bound."""
    with closing(Poller()) as poller:
        remote = TcpDoor(DaemonSide(poller, events.append, memory), SessionLimits(9, 9), None)
        yield remote
        remote.close()


@pytest.fixture
def guard(remote) -> ConnectionGuard:
    """Return the listener's guard of connections."""
    return remote.guard


class DeafRouter:
    """A ROUTER that has not noticed a disconnect yet, and silently drops what it sends.

    ``late``: messages that it hands over before others. ``sent``: how many it was asked to send.
    """

    sent = 0

    def __init__(self, router: "zmq.Socket[bytes]", *late: "list[zmq.Frame]") -> None:
        self._router = router
        self._late = list(late)

    def __getattr__(self, name: str) -> object:
        return getattr(self._router, name)

    def recv_multipart(self, *arguments: int, **options: bool) -> "list[zmq.Frame]":
        """Receive a message."""
        return self._late.pop() if self._late else self._router.recv_multipart(*arguments, **options)

    def send_multipart(self, *_message: object, **_options: object) -> None:
        """Count the message, and drop it."""
        self.sent += 1


def greeting(remote: TcpDoor, peer: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """Connect a peer and take its ``Greet`` before the listener handles it."""
    peer.connect(remote.router.getsockopt_string(zmq.LAST_ENDPOINT))
    peer.send(Greet(PROTOCOL_VERSION, "test", 1, "").encode())
    assert remote.router.poll(int(PATIENCE_S * 1000))
    return remote.router.recv_multipart(copy=False)


def test_a_session_that_is_greeted_after_its_end_was_told_is_ended_all_the_same(
    remote, guard, events, monkeypatch
) -> None:
    """That disconnect is reported only once. The session with a live connection stays."""
    remote.bind("tcp://127.0.0.1:0", "")
    with zmq.Context() as context, context.socket(zmq.DEALER) as staying:
        with context.socket(zmq.DEALER) as leaving:
            staying.connect(remote.router.getsockopt_string(zmq.LAST_ENDPOINT))
            staying.send(Greet(PROTOCOL_VERSION, "test", 1, "").encode())
            wait_until(lambda: hosts(remote), "one is greeted")
            late = greeting(remote, leaving)
        wait_until(lambda: remote.note_ends() or len(guard) == 1, "one connection is closed")
        remote.router = cast("zmq.Socket[bytes]", DeafRouter(remote.router, late))
        monkeypatch.setattr(guard, "_is_open", USED_AGAIN)
        assert len(hosts(remote)) == 2
        for _ in range(3):
            remote.tick()

        assert [session.number for session in remote.trainers()] == [1]
        assert events == [SessionCutOff(2)]


def test_a_session_whose_number_another_connection_has_by_now_is_ended_all_the_same(
    remote, guard, events, monkeypatch
) -> None:
    """The session is greeted after the disconnect, and the next connection reuses its number."""
    remote.bind("tcp://127.0.0.1:0", "")
    place = remote.router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.socket()) for _ in range(10)]
        with zmq.Context() as context, context.socket(zmq.DEALER) as leaving:
            late = greeting(remote, leaving)
        wait_until(lambda: remote.note_ends() or not len(guard), "the connection is closed")
        remote.router = cast("zmq.Socket[bytes]", DeafRouter(remote.router, late))
        monkeypatch.setattr(guard, "_is_open", USED_AGAIN)
        number = late[-1].get(zmq.SRCFD)
        assert hosts(remote)
        for one in silent:
            one.connect(("127.0.0.1", int(place)))
        wait_until(lambda: remote.note_ends() or guard.inode_of(number), "another uses the number")

        for _ in range(3):
            remote.tick()

        assert events == [SessionCutOff(1)]
        assert not remote.trainers()


def come_from(remote: TcpDoor, host: str) -> socket.socket:
    """Connect from a loopback host; what is sent from now on are ZeroMQ frames."""
    port = int(remote.router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE_S, (host, 0))
    introduce(connection)
    return connection


def is_closed(number: int) -> bool:
    """True if no file has this descriptor."""
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def replace_connection(remote: TcpDoor, former: socket.socket, number: int, host: str) -> socket.socket:
    """Close a connection and greet over another one with the same descriptor."""
    former.close()
    wait_until(lambda: is_closed(number), "ZeroMQ has closed the connection")
    connection = come_from(remote, host)
    assert not is_closed(number)
    connection.sendall(frame(Greet(PROTOCOL_VERSION, "next", 1, "").encode()))
    return connection


def hosts(remote: TcpDoor) -> list[str]:
    """Read everything available, and return the hosts of all trainers."""
    while remote.receive({remote.router}):
        pass
    return [session.host for session in remote.trainers()]


@pytest.mark.parametrize("host", ["127.0.0.2", "127.0.0.3"], ids=["same host", "other host"])
def test_a_greeting_over_the_number_of_a_closed_connection_is_heard(remote, guard, host) -> None:
    """The greeting arrives before the listener notices the disconnect and the new connection."""
    remote.bind("tcp://127.0.0.1:0", "")
    former = come_from(remote, "127.0.0.2")
    wait_until(lambda: remote.note_ends() or guard.pending(), "it is known")
    (number,) = guard.pending()
    guard.close_soon(number)
    guard.tick()
    guard.tick()
    assert guard.closed == 1
    with replace_connection(remote, former, number, host):
        assert remote.router.poll(int(PATIENCE_S * 1000))
        remote._take(remote.router.recv_multipart(copy=False))

        assert hosts(remote) == [host]


def test_what_a_flood_leaves_unread_is_not_held_against_the_next_connection(remote, guard) -> None:
    """That connection has the same number, and comes from another host."""
    remote.bind("tcp://127.0.0.1:0", "")
    former = come_from(remote, "127.0.0.2")
    wait_until(lambda: remote.note_ends() or guard.pending(), "it is known")
    (number,) = guard.pending()
    former.sendall(frame(AskStatus(1).encode()) * 2 * FRAMES_MAX)
    with replace_connection(remote, former, number, "127.0.0.3"):
        wait_until(lambda: hosts(remote) == ["127.0.0.3"], "the next connection is accepted")

        assert guard.pending() == {}
        assert guard.closed == 0


def test_a_failed_handshake_is_logged_with_its_host_or_without_one(remote, guard) -> None:
    """A connection that ends before the daemon looks at it has no host that could be named."""
    remote.bind("tcp://127.0.0.1:0", "")
    other_mechanism = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with capture_logs() as lines:
        for _ in range(2):
            port = int(remote.router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as peer:
                peer.sendall(other_mechanism)
                while peer.recv(1 << 10):
                    pass
        wait_until(lambda: remote.note_ends() or remote.failed_handshakes == 2, "both ends are reported")
        with come_from(remote, "127.0.0.3"):
            wait_until(lambda: remote.note_ends() or guard.pending(), "it is known")
        wait_until(lambda: remote.note_ends() or remote.failed_handshakes == 3, "its end is reported")

    failed = [line for line in lines if line["event"] == "remote handshake failed"]
    assert [(line.get("host"), line["failed"]) for line in failed] == [(None, 1), ("127.0.0.3", 3)]
    assert failed[0]["reason"] == "it ended before its host could be read"


def test_connections_that_have_ended_are_not_looked_at(remote, guard, monkeypatch) -> None:
    """Peers can connect and leave far more often in a second than the loop can look."""
    remote.bind("tcp://127.0.0.1:0", "")
    looks: list[int] = []
    monkeypatch.setattr(guard, "add", looks.append)
    events: list[tuple[int, int]] = []
    for _ in range(50):
        with come_from(remote, "127.0.0.2") as peer:
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(1 << 10):
                pass
    wait_until(lambda: events.extend(remote._zeromq.events()) or len(events) == 100, "all ends are reported")
    # another thread may report an end first
    events.sort(key=lambda event: event[0] != zmq.EVENT_ACCEPTED)
    monkeypatch.setattr(remote._zeromq, "events", lambda: iter(events))

    remote.note_ends()

    assert (looks, remote.failed_handshakes) == ([], 50)


@pytest.mark.parametrize("greets", [True, False])
def test_what_a_closed_connection_has_sent_is_dropped(remote, guard, events, greets) -> None:
    """ZeroMQ hands it over after it has reported the end; nobody would get an answer."""
    remote.bind("tcp://127.0.0.1:0", "")
    with come_from(remote, "127.0.0.2") as flooding:
        if greets:
            flooding.sendall(frame(Greet(PROTOCOL_VERSION, "flood", 1, "").encode()))
        flooding.sendall(frame(AskStatus(1).encode()) * 2 * FRAMES_MAX)
        wait_until(lambda: remote.note_ends() or guard.pending(), "it is known")
        (number,) = guard.pending()
    wait_until(lambda: remote.note_ends() or remote.failed_handshakes, "the end is reported")
    wait_until(lambda: is_closed(number), "ZeroMQ has closed the connection, a moment later")
    remote.router = router = DeafRouter(remote.router)

    assert hosts(remote) == []

    assert (router.sent, events) == (0, [])


def test_what_a_banned_connection_has_sent_is_dropped_after_its_end_as_before(remote, guard) -> None:
    """It gets answers up to the ban, and none from there on."""
    remote.bind("tcp://127.0.0.1:0", "")
    remote._next_audit_s = inf  # a slow machine reads fewer frames than that between two audits
    with come_from(remote, "127.0.0.2") as flooding:
        wait_until(lambda: remote.note_ends() or guard.pending(), "it is known")
        (number,) = guard.pending()
        flooding.sendall(frame(AskStatus(1).encode()) * 4 * FRAMES_MAX)
        remote.router = router = DeafRouter(remote.router)
        wait_until(lambda: hosts(remote) or guard.closed, "it is banned")
        wait_until(lambda: remote.note_ends() or not len(guard), "the end is reported")
        wait_until(lambda: is_closed(number), "ZeroMQ has closed the connection, a moment later")

        hosts(remote)

    assert router.sent <= FRAMES_MAX


@pytest.mark.parametrize(
    "memory", [ShortMemory(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))), ShortMemory(MemoryError("no page"))]
)
def test_a_batch_that_cannot_be_mapped_ends_its_session_and_no_other(remote, events) -> None:
    """The core gets its slot back, and the log has the reason."""
    remote.bind("tcp://127.0.0.1:0", "")
    with come_from(remote, "127.0.0.1") as first, come_from(remote, "127.0.0.1") as second, capture_logs() as lines:
        for trainer in (first, second):
            trainer.sendall(frame(Greet(PROTOCOL_VERSION, "test", 1, "").encode()))
        wait_until(lambda: len(hosts(remote)) == 2, "both are greeted")
        lines.clear()
        remote.deliver(GrantLease(1, 1, 5, 0, 0, 0, 3, 7, 0, 4, is_remote=True), LAYOUT)

    assert events == [SessionCutOff(1), BatchSent(1, 5, 0, 7)]
    assert [session.number for session in remote.trainers()] == [2]
    (line,) = lines
    assert (line["event"], line["session"]) == ("remote trainer gone", 1)
    assert "no memory to send it a batch from: " in line["reason"]


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_lease_for_a_trainer_that_is_gone_ends_where_nothing_else_ends_it(is_remote) -> None:
    """Only ``BatchSent`` ends a lease of a batch sent as bytes; a local lease needs none."""
    queue = Queue()
    parts = cast("Any", None)
    with closing(Poller()) as poller:
        loop = Loop(queue, parts, {}, parts, poller, cast("Any", []), Doors([]), parts, parts, parts, 0.0)
        loop._grant(GrantLease(1, 1, 5, 0, 0, 0, 3, 7, 0, 4, is_remote=is_remote))

    assert list(queue) == [BatchSent(1, 5, 0, 7)] * is_remote


def test_a_network_of_addresses_is_logged_once_and_silences_no_other_host(remote) -> None:
    """One IPv6 host has 2^64 addresses, so the log forgets its oldest complaints."""
    crowd = [f"2001:db8::{number:x}" for number in range(SUBJECTS_MAX + 1)]
    with capture_logs() as lines:
        for host in ("10.0.0.1", *crowd, "10.0.0.1", "2001:db8:1::1"):
            frame = cast("zmq.Frame", {"Peer-Address": host})
            remote._reject(b"nobody", frame, ErrorCode.MALFORMED_MESSAGE, "nonsense")

    assert [line["host"] for line in lines] == ["10.0.0.1", "2001:db8::0", "2001:db8:1::1"]
