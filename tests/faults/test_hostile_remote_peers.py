"""TCP peers that send nonsense, forge names or stay silent: refused, and unnoticed by others."""

import random
import socket
import struct
from contextlib import ExitStack, contextmanager

import pytest
import zmq

import batchd_client
from batchd_wire import OLDEST_VERSION, PROTOCOL_VERSION
from batchd_wire.codes import ErrorCode
from batchd_wire.messages import TO_TRAINER_REMOTE, AskStatus, Greet, Greeted, Open, Pull, Refused, Unsubscribe
from support.expected import Expected
from support.network import free_port
from support.seen import see
from support.waiting import PATIENCE_S, wait_until

ANSWER_MS = 5_000


@pytest.fixture(scope="module")
def daemon(start_shared_daemon):
    """Serve forty samples on a port of loopback, without keys."""
    return start_shared_daemon(tcp=f"127.0.0.1:{free_port()}")


class RawRemote:
    """A DEALER that sends whatever a test asks for."""

    def __init__(self, context, address, identity=None):
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        if identity is not None:
            self._socket.routing_id = identity
        self._socket.connect(address)

    def close(self):
        """Disconnect."""
        self._socket.close()

    def say(self, *frames):
        """Send frames unchanged."""
        self._socket.send_multipart(frames)

    def hear(self, wait_ms=ANSWER_MS):
        """Return the next answer, decoded, or None without one."""
        if not self._socket.poll(wait_ms):
            return None
        return TO_TRAINER_REMOTE.decode(self._socket.recv_multipart()[0])

    def greet(self):
        """Open a session."""
        self.say(Greet(PROTOCOL_VERSION, "raw", 1, "").encode())
        assert isinstance(self.hear(), Greeted)
        return self


@pytest.fixture
def raw(daemon):
    """Make raw peers, which end with the test; at the end a good trainer still reads."""
    with ExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.destroy)

        def make(identity=None):
            peer = RawRemote(context, daemon.tcp_address, identity)
            stack.callback(peer.close)
            return peer

        yield make
    with batchd_client.connect(daemon.tcp_address) as good:
        assert see(good.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)
    assert "Traceback" not in daemon.log


def code_of(answer):
    """Return the number of a refusal."""
    assert isinstance(answer, Refused)
    return ErrorCode(answer.error)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("greeted", [False, True], ids=["a stranger", "in a session"])
def test_random_frames_are_answered_with_their_number(raw, seed, greeted):
    """Any number of frames has any content."""
    chance = random.Random(seed)
    peer = raw().greet() if greeted else raw()
    for _ in range(50):
        frames = [chance.randbytes(chance.choice([0, 1, 20, 1000])) for _ in range(chance.choice([1, 1, 2, 7, 200]))]
        peer.say(*frames)
        assert code_of(peer.hear()) in {ErrorCode.MALFORMED_MESSAGE, ErrorCode.UNKNOWN_SESSION}


@pytest.mark.parametrize(
    "message",
    [Pull(1, 0, True, 0, []), Unsubscribe(1, 0), AskStatus(1)],
    ids=lambda message: type(message).__name__,
)
def test_requests_before_a_greeting_are_refused(raw, message):
    """The protocol requires a greeting first."""
    peer = raw()
    peer.say(message.encode())
    assert code_of(peer.hear()) is ErrorCode.UNKNOWN_SESSION


def test_greeting_twice_is_an_answer_and_no_second_session(raw, daemon):
    """The first session continues."""
    peer = raw().greet()
    peer.say(Greet(PROTOCOL_VERSION, "again", 1, "").encode())
    assert code_of(peer.hear()) is ErrorCode.UNEXPECTED_MESSAGE
    assert [one["name"] for one in daemon.status()["trainers"] if one["transport"] == "tcp"] == ["raw"]


def test_a_word_of_the_other_socket_is_not_understood(raw):
    """``Open`` belongs to the lifeline."""
    peer = raw()
    peer.say(Open(PROTOCOL_VERSION, bytes(16)).encode())
    assert code_of(peer.hear()) is ErrorCode.MALFORMED_MESSAGE


@pytest.mark.parametrize(
    ("version", "older", "command"),
    [
        (OLDEST_VERSION - 1, "client, where", "pip install ./client"),
        (PROTOCOL_VERSION + 1, "daemon", "`sudo make install`"),
    ],
)
def test_another_version_is_refused_with_the_command_that_upgrades(raw, version, older, command):
    """The answer comes before any other message, and has the numbers of both."""
    peer = raw()
    peer.say(Greet(version, "raw", 1, "").encode())
    answer = peer.hear()
    assert code_of(answer) is ErrorCode.UNSUPPORTED_VERSION
    assert f"the versions {OLDEST_VERSION} to {PROTOCOL_VERSION} of the protocol" in answer.text
    assert f"speaks version {version}; upgrade the {older}" in answer.text
    assert command in answer.text


def test_a_subscription_of_another_session_cannot_be_touched(raw, daemon):
    """A peer can neither pull nor end it: it belongs to the connection that made it."""
    with batchd_client.connect(daemon.tcp_address) as good:
        stream = good.stream("photos", epochs=1)
        seen = see(stream, 1)
        peer = raw().greet()
        for number in range(1, 40):
            peer.say(Pull(number, 10, True, 0, [(sequence, 1) for sequence in range(8)]).encode())
            assert code_of(peer.hear()) is ErrorCode.UNKNOWN_SUBSCRIPTION
            peer.say(Unsubscribe(number, 0).encode())
        assert seen + see(stream) == Expected(daemon.config).epoch(0)


def test_a_forged_name_takes_no_session_over(raw, daemon):
    """A peer with the identity of a living connection is ignored."""
    first = raw(b"me").greet()
    second = raw(b"me")
    second.say(AskStatus(1).encode())
    assert second.hear(500) is None
    first.say(AskStatus(2).encode())
    assert first.hear().request == 2
    assert len([one for one in daemon.status()["trainers"] if one["transport"] == "tcp"]) == 1


def test_a_message_of_megabytes_ends_its_connection(raw, daemon):
    """The daemon does not read it."""
    peer = raw().greet()
    peer.say(bytes(10 << 20))
    wait_until(lambda: all(one["transport"] != "tcp" for one in daemon.status()["trainers"]), "its session is over")


@contextmanager
def plain_connection(daemon):
    """Open a plain TCP connection."""
    host, port = daemon.tcp_address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        yield connection


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("words", [b"", b"\xff" + bytes(8) + b"\x7f\x03"])
@pytest.mark.usefixtures("raw")
def test_a_peer_that_does_not_finish_its_greeting_is_dropped(daemon, words):
    """The handshake's timeout ends it, whatever it has sent."""
    with plain_connection(daemon) as connection:
        connection.sendall(words)
        while connection.recv(1 << 16):
            pass
    wait_until(
        lambda: "127.0.0.1" in [one["host"] for one in daemon.log_lines("remote handshake failed")], "it is logged"
    )


OLD_PEERS = {
    "ZMTP 1.0": bytes([1, 0]) + bytes([5, 0]) + b"word",
    "ZMTP 2.0": b"\xff" + bytes(8) + b"\x7f" + bytes([1, 5]) + bytes([0, 0]) + bytes([0, 4]) + b"word",
}
"""Greeting, empty name, one message."""


@pytest.mark.parametrize("words", OLD_PEERS.values(), ids=OLD_PEERS)
@pytest.mark.usefixtures("raw")
def test_a_peer_of_an_older_zeromq_is_not_heard(daemon, words):
    """ZeroMQ admits it where there are no keys, and has no data about its connection."""
    with plain_connection(daemon) as connection:
        connection.sendall(words)
        wait_until(lambda: "before version 3" in daemon.log, "its message has arrived")


@pytest.mark.usefixtures("raw")
def test_two_hundred_connections_cut_at_once_leave_nothing(daemon):
    """The connections are reset, as those of a crashed host."""
    connections = []
    with ExitStack() as stack:
        for _ in range(200):
            connection = stack.enter_context(plain_connection(daemon))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connections.append(connection)
    assert all(one["transport"] != "tcp" for one in daemon.status()["trainers"])
