"""Greedy TCP peers with too many sessions or connections: they are refused, others read on."""

import socket
from contextlib import ExitStack, contextmanager

import pytest
import zmq

import batchd_client
from batchd.runtime.keys import KeyDirectory
from batchd.runtime.limits import BURST
from batchd_client.errors import PermissionDenied
from batchd_wire import OLDEST_VERSION
from batchd_wire.codes import ErrorCode
from batchd_wire.keys import connection_file_text
from batchd_wire.messages import TO_TRAINER_REMOTE, Greet
from support.expected import Expected
from support.kernel import descriptors_of
from support.network import free_port
from support.seen import see
from support.settings import folder_stream
from support.waiting import PATIENCE_S, REMOTE_PAUSE_S, wait_until

PATIENCE_MS = int(PATIENCE_S * 1000)
OLD_GREET = Greet(OLDEST_VERSION - 1, "raw", 1, "").encode()
ZMTP_1 = b"\x01\x00"
"""The whole greeting of ZeroMQ before version 3: an empty routing id, and no handshake."""


@contextmanager
def dealer(address):
    """Open a connection over which a test sends its own messages."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(address)
        yield socket
    finally:
        context.destroy(linger=0)


def hear(dealer):
    """Return the next answer."""
    assert dealer.poll(PATIENCE_MS)
    return TO_TRAINER_REMOTE.decode(dealer.recv())


@contextmanager
def plain_connections(daemon, count):
    """Open so many silent TCP connections."""
    host, port = daemon.tcp_address.removeprefix("tcp://").split(":")
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S)) for _ in range(count)
        ]


def has_ended(connection):
    """Wait until the daemon disconnects."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


def test_more_sessions_than_a_host_may_have_are_refused_with_the_setting(start_daemon):
    """The limit holds without keys; when one session ends, another one is admitted."""
    daemon = start_daemon(tcp=f"127.0.0.1:{free_port()}", sessions_per_peer=2)
    with batchd_client.connect(daemon.tcp_address) as first, batchd_client.connect(daemon.tcp_address):
        expected = r"127\.0\.0\.1 has 2 sessions already; raise sessions_per_peer in \[daemon\] \(now 2\)"
        with pytest.raises(PermissionDenied, match=expected):
            batchd_client.connect(daemon.tcp_address)
        assert see(first.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)
        assert len(daemon.log_lines("remote message rejected")) == 1
    wait_until(lambda: daemon.status()["daemon"]["tcp"]["connections"] == 0, "they are closed")
    batchd_client.connect(daemon.tcp_address).close()


def test_more_sessions_than_a_key_may_have_are_refused_and_other_keys_come_in(start_daemon, tmp_path):
    """All sessions use the same host: with keys the limit is per key."""
    keys = KeyDirectory(tmp_path / "keys")
    files = []
    for name in ("greedy", "modest"):
        files.append(tmp_path / name)
        files[-1].touch(0o600)
        files[-1].write_text(connection_file_text(keys.new(name)))
    daemon = start_daemon(tcp=f"127.0.0.1:{free_port()}", keys_dir=str(keys.path), sessions_per_peer=1)

    with batchd_client.connect(daemon.tcp_address, key=str(files[0])):
        with pytest.raises(PermissionDenied, match="the key 'greedy' has 1 session already; raise sessions_per_peer"):
            batchd_client.connect(daemon.tcp_address, key=str(files[0]))
        with batchd_client.connect(daemon.tcp_address, key=str(files[1])) as other:
            assert see(other.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)


def greet_often(peer):
    """Greet as often as a host may at once, and read every answer."""
    codes = []
    for _ in range(BURST // 128):
        for _ in range(128):
            peer.send(OLD_GREET)
        codes += [hear(peer).error for _ in range(128)]
    return codes


def test_a_host_that_greets_without_end_is_put_off_and_an_honest_client_comes_in_later(start_daemon):
    """The client gets an error number on which it retries; the log has one line."""
    daemon = start_daemon(tcp=f"127.0.0.1:{free_port()}")
    with dealer(daemon.tcp_address) as flood:
        assert set(greet_often(flood)) == {ErrorCode.UNSUPPORTED_VERSION}
        codes = greet_often(flood)
        assert codes.count(ErrorCode.TOO_OFTEN) > BURST / 2
        with batchd_client.connect(daemon.tcp_address) as honest:
            assert see(honest.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)
    (line,) = daemon.log_lines("remote message rejected")
    assert "127.0.0.1 connects more often than 32 times a second" in line["reason"]


@pytest.mark.thorough
def test_a_connection_that_never_greets_is_closed_and_a_session_stays(start_daemon):
    """Peers are silent after a handshake, too old for handshakes, or ignore a refusal."""
    daemon = start_daemon(tcp=f"127.0.0.1:{free_port()}")
    with (
        batchd_client.connect(daemon.tcp_address) as honest,
        plain_connections(daemon, 1) as (old,),
        dealer(daemon.tcp_address) as silent,
        dealer(daemon.tcp_address) as refused,
    ):
        ends = []
        for one in (silent, refused):
            one.reconnect_ivl = -1
            ends.append(one.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        old.sendall(ZMTP_1)
        refused.send(OLD_GREET)
        assert hear(refused).error == ErrorCode.UNSUPPORTED_VERSION
        wait_until(lambda: daemon.status()["daemon"]["tcp"]["strangers"] == 3, "all three are connected")
        assert has_ended(old)
        assert all(end.poll(PATIENCE_MS) for end in ends)
        for one, end in zip((silent, refused), ends, strict=True):
            one.disable_monitor()
            end.close(0)
        assert see(honest.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)
    assert len(daemon.log_lines("remote connection closed")) == 1


def test_a_silent_crowd_is_thinned_out_at_once_and_disturbs_no_trainer(start_daemon):
    """256 of 600 connections stay, long before their timeout; readers read on, others connect."""
    daemon = start_daemon(tcp=f"127.0.0.1:{free_port()}")
    with batchd_client.connect(daemon.tcp_address) as honest:
        stream = honest.stream("photos", epochs=1)
        seen = see(stream, 1)
        with plain_connections(daemon, 600) as crowd:
            assert has_ended(crowd[0])
            wait_until(lambda: daemon.status()["daemon"]["tcp"]["strangers"] <= 256, "most are closed")
            assert daemon.status()["daemon"]["tcp"]["closed"] >= 300
            batchd_client.connect(daemon.tcp_address).close()
            assert seen + see(stream) == Expected(daemon.config).epoch(0)


CROWD = 220
"""There are more connections than descriptors; the kernel queues no more than these."""


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("way", ["address", "tcp_address"], ids=["on this host", "over TCP"])
def test_slots_are_made_when_connections_have_taken_every_descriptor(start_daemon, photos, way):
    """The log warned of the low limit, the crowd gets the rest, and the ring still grows."""
    daemon = start_daemon(
        {"photos": folder_stream(photos, batch_size=1)}, tcp=f"127.0.0.1:{free_port()}", descriptors_max=300
    )
    (line,) = daemon.log_lines("descriptors may run out")
    assert "have 300" in line["reason"]
    with batchd_client.connect(getattr(daemon, way)) as connection:
        with plain_connections(daemon, CROWD):
            wait_until(lambda: len(descriptors_of(daemon.pid)) == 300, "no descriptor is left")
            stream = connection.stream("photos", epochs=1, window=30)
            wait_until(  # a slot whose batch is sent already may be filled again
                lambda: connection.status()["streams"][0]["decoded_batches"] >= 30,
                "thirty batches are ready, or sent",
                every_s=REMOTE_PAUSE_S,
            )
            assert see(stream) == Expected(daemon.config).epoch(0)
        batchd_client.connect(daemon.address).close()
    assert not daemon.log_lines("no memory for a slot")


@pytest.mark.thorough
def test_a_limit_below_what_the_streams_need_is_refused_at_the_start(start_daemon):
    """The message has both numbers and the place of the limit."""
    daemon = start_daemon(descriptors_max=70, ready=False)
    assert daemon.wait() == 2
    assert "descriptors at least, have 70 [too-few-descriptors]\n = help: raise the limit (LimitNOFILE=" in daemon.log
