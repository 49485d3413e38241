"""Batches over several TCP connections: the same batches in order, and one session."""

import socket

import pytest
import zmq

import batchd_client
from batchd.runtime.keys import KeyDirectory
from batchd.stream.served import REMOTE_BYTES_MAX
from batchd_client.errors import ConnectionsInvalid, ConnectTimeout, DaemonNotFound
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.codes import ErrorCode
from batchd_wire.keys import connection_file_text
from batchd_wire.messages import TO_TRAINER_REMOTE, AskStatus, Greet, Greeted, Join, Joined, Refused
from batchd_wire.tcp import PARTS_MAX
from support.commands import batchd
from support.expected import Expected
from support.network import Proxy, free_port
from support.seen import see
from support.settings import folder_stream
from support.waiting import PATIENCE_S, wait_until

LARGE = [{"op": "decode"}, {"op": "resize", "size": [512, 512]}]
"""Batches of 6.3 MB, so that there are pieces for several parts."""


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve small batches and large ones."""
    streams = {"photos": folder_stream(photos), "large": folder_stream(photos, pipeline=LARGE, verify=True)}
    return start_shared_daemon(streams, tcp=f"127.0.0.1:{free_port()}", memory="512MiB")


def port_of(daemon):
    """Return the daemon's TCP port."""
    return int(daemon.tcp_address.rpartition(":")[2])


def remote_trainers(daemon):
    """Return the status of the trainers that use TCP."""
    return [one for one in daemon.status()["trainers"] if one["transport"] == "tcp"]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("connections", [2, 3, PARTS_MAX])
@pytest.mark.parametrize("stream", ["photos", "large"])
def test_the_batches_are_the_same_over_any_number_of_connections(daemon, stream, connections):
    """Large batches are cut into parts; small ones use one connection each."""
    expected = Expected(daemon.config, stream)
    with batchd_client.connect(daemon.tcp_address, connections=connections) as far:
        batches = far.stream(stream, epochs=2)
        assert see(batches) == expected.epoch(0)
        assert see(batches) == expected.epoch(1)
        (trainer,) = remote_trainers(daemon)
        assert trainer["connections"] == connections
        assert f"tcp 127.0.0.1 x{connections}" in batchd("status", address=daemon.address).stdout
    wait_until(lambda: not remote_trainers(daemon), "the session has ended")


def test_the_number_may_come_from_the_environment(daemon, monkeypatch):
    """A job script sets it."""
    monkeypatch.setenv("BATCHD_CONNECTIONS", "4")
    with batchd_client.connect(daemon.tcp_address):
        assert remote_trainers(daemon)[0]["connections"] == 4


@pytest.mark.parametrize("number", ["0", "17", "-1", "two", "1.5"])
def test_a_number_that_cannot_be_is_refused_by_name(daemon, monkeypatch, number):
    """The error names the argument or the variable."""
    monkeypatch.setenv("BATCHD_CONNECTIONS", number)
    with pytest.raises(ConnectionsInvalid, match=rf"\$BATCHD_CONNECTIONS is '{number}'.* from 1 to 16"):
        batchd_client.connect(daemon.tcp_address)
    with pytest.raises(ConnectionsInvalid, match=r"connect\(connections=\)"):
        batchd_client.connect(daemon.tcp_address, connections=PARTS_MAX + 1)


@pytest.mark.thorough
def test_parts_go_over_all_connections(daemon):
    """Each connection carries a fair share of a large batch."""
    with Proxy(port_of(daemon)) as proxy:
        with batchd_client.connect(f"tcp://127.0.0.1:{proxy.port}", connections=3) as far:
            stream = far.stream("large", epochs=8)
            for _ in range(8):
                see(stream)
        assert proxy.connections == 3
        assert max(proxy.passed) < 1.5 * min(proxy.passed)


def test_when_one_of_the_connections_is_lost_the_session_is_and_the_trainer_goes_on(daemon):
    """The trainer continues at its own position, with the same number of new connections."""
    expected = Expected(daemon.config, "large")
    with Proxy(port_of(daemon)) as proxy, batchd_client.connect(f"tcp://127.0.0.1:{proxy.port}", connections=3) as far:
        stream = far.stream("large", epochs=2)
        seen = see(stream, 2)
        for lost in (1, 2):
            proxy.drop(only=lost)
            seen += see(stream, 2)
        seen += see(stream) + see(stream)
        assert seen == expected.epoch(0) + expected.epoch(1)
        assert proxy.connections >= 6
    wait_until(lambda: not remote_trainers(daemon), "the session has ended")


def test_a_killed_daemon_is_found_again_over_all_connections(start_daemon, photos):
    """The client makes a new session with all connections."""
    daemon = start_daemon({"photos": folder_stream(photos)}, tcp=f"127.0.0.1:{free_port()}")
    expected = Expected(daemon.config)
    with batchd_client.connect(daemon.tcp_address, connections=3) as far:
        stream = far.stream("photos", epochs=20)
        seen = see(stream, 2)
        daemon.restart()
        for _ in range(20):
            seen += see(stream)
        assert seen == [batch for epoch in range(20) for batch in expected.epoch(epoch)]
        assert remote_trainers(daemon)[0]["connections"] == 3


# --- joining a session ----------------------------------------------------------------------------


class Peer:
    """A socket that sends whatever a test asks for."""

    def __init__(self, context, port, key=None):
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        if key is not None:
            self.socket.curve_serverkey, self.socket.curve_publickey, self.socket.curve_secretkey = (
                part.encode() for part in (key.daemon, key.public, key.secret)
            )
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def ask(self, message):
        """Send a message, and return the answer."""
        self.socket.send(message.encode())
        assert self.socket.poll(PATIENCE_S * 1000), f"{message} was not answered"
        return TO_TRAINER_REMOTE.decode(self.socket.recv())


@pytest.fixture
def peer():
    """Make peers."""
    context, peers = zmq.Context(), []

    def make(port, key=None):
        peers.append(Peer(context, port, key))
        return peers[-1]

    yield make
    for one in peers:
        one.socket.close()
    context.term()


def greet():
    """Send the first message of a correct trainer."""
    return Greet(PROTOCOL_VERSION, "test", 1, "")


def test_only_a_peer_with_the_secret_joins_a_session(daemon, peer):
    """Rejected secrets are sixteen wrong bytes, no bytes, and that of an ended session."""
    first, other = peer(port_of(daemon)), peer(port_of(daemon))
    greeted = first.ask(greet())
    assert isinstance(greeted, Greeted)
    for secret in (bytes(16), b"", greeted.secret[:-1]):
        assert other.ask(Join(secret)).error == ErrorCode.UNKNOWN_SESSION
    assert other.ask(Join(greeted.secret)) == Joined()
    first.socket.close()
    wait_until(lambda: not remote_trainers(daemon), "the session has ended")
    assert peer(port_of(daemon)).ask(Join(greeted.secret)).error == ErrorCode.UNKNOWN_SESSION


def test_a_further_connection_is_for_batches_alone(daemon, peer):
    """The daemon refuses queries on it, and the session continues."""
    first, other = peer(port_of(daemon)), peer(port_of(daemon))
    other.ask(Join(first.ask(greet()).secret))
    for message in (AskStatus(1), greet(), Join(bytes(16))):
        refused = other.ask(message)
        assert isinstance(refused, Refused)
        assert refused.error == ErrorCode.UNEXPECTED_MESSAGE
    assert first.ask(AskStatus(2)).request == 2


def test_a_session_has_a_limited_number_of_connections(daemon, peer):
    """The answer refuses the surplus connection."""
    first = peer(port_of(daemon))
    secret = first.ask(greet()).secret
    others = [peer(port_of(daemon)) for _ in range(PARTS_MAX)]
    answers = [other.ask(Join(secret)) for other in others]
    assert answers[:-1] == [Joined()] * (PARTS_MAX - 1)
    assert answers[-1].error == ErrorCode.NOT_ALLOWED


def test_with_keys_only_the_same_key_joins(start_daemon, photos, peer, tmp_path):
    """The secret of another key's session does not help."""
    keys = KeyDirectory(tmp_path / "keys")
    keys.make_daemon_key()
    ours, theirs = keys.new("ours", None), keys.new("theirs", None)
    streams = {"photos": folder_stream(photos), "large": folder_stream(photos, pipeline=LARGE)}
    daemon = start_daemon(streams, tcp=f"127.0.0.1:{free_port()}", keys_dir=str(keys.path), memory="512MiB")
    secret = peer(port_of(daemon), ours).ask(greet()).secret
    assert peer(port_of(daemon), theirs).ask(Join(secret)).error == ErrorCode.UNKNOWN_SESSION
    assert peer(port_of(daemon), ours).ask(Join(secret)) == Joined()

    file = tmp_path / "ours.conn"
    file.touch(0o600)
    file.write_text(connection_file_text(ours))
    for connections in (1, 3):
        with batchd_client.connect(daemon.tcp_address, key=str(file), connections=connections) as far:
            for stream in streams:
                assert see(far.stream(stream, epochs=1)) == Expected(daemon.config, stream).epoch(0)


def test_a_daemon_that_lets_no_connection_join_is_an_error_and_not_a_hang(daemon):
    """The daemon accepts the first connection and no other; keys do not matter."""
    with Proxy(port_of(daemon)) as proxy:
        proxy.connections_max = 1
        with pytest.raises((ConnectTimeout, DaemonNotFound), match=r"took the first of 2 connections|hangs up at once"):
            batchd_client.connect(f"tcp://127.0.0.1:{proxy.port}", connections=2, connect_timeout_s=2.0)


def test_what_waits_in_a_remote_trainers_memory_is_bounded_in_bytes(start_daemon, photos):
    """A window of large batches shrinks to what fits; on this host it does not shrink."""
    pipeline = [{"op": "decode"}, {"op": "resize", "size": [2048, 2048]}]
    daemon = start_daemon(
        {"photos": folder_stream(photos, pipeline=pipeline, batch_size=16, window=64, memory="1GiB")},
        tcp=f"127.0.0.1:{free_port()}",
        memory="2GiB",
    )
    slot_bytes = 16 * 2048 * 2048 * 3
    with batchd_client.connect(daemon.tcp_address) as far, batchd_client.connect(daemon.address) as near:
        assert far.stream("photos").window == REMOTE_BYTES_MAX // (slot_bytes + 2 * 4096) == 5
        assert near.stream("photos").window == 64


def test_a_port_that_is_no_daemon_is_named_with_several_connections_too():
    """The error is the same as with one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(DaemonNotFound, match="nothing listens"):
        batchd_client.connect(f"tcp://127.0.0.1:{port}", connections=3, connect_timeout_s=1.0)
