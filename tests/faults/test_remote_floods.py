"""Peers over TCP that say more than the daemon can read: it hangs up, keeps them out for a while, and serves the others."""

import socket
import struct
import time
from contextlib import suppress

import pytest

import batchd_client
from batchd.daemon.doorstep import BAN_S
from batchd_client.errors import DaemonNotFound
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.messages import AskStatus, Greet, Pull
from support.good_trainers import good_trainers, private_bytes
from support.hostile_streams import COMMAND, frame
from support.network import free_port
from support.waiting import PATIENCE_S, wait_until

GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x00NULL").ljust(64, b"\0")
READY = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER", COMMAND)
PING = frame(b"\x04PING\x00\x00", COMMAND)
MORE = 1
FLOOD_S = 0.4
FLOODS = 4
GROWTH_BYTES_MAX = 256 << 20
"""What comes in between two audits is kept until it is read away: 64 bytes at least for each frame, from four hosts."""
ELSEWHERE = "127.0.0.9"
"""Another host than that of the good ones."""

FLOODING = {
    "nonsense with pings": frame(b"\x91\x7f") * 20 + PING,
    "pulls of nothing": frame(Pull(1, 0, False, 0, []).encode()),
    "questions": frame(AskStatus(1).encode()),
    "a message that never ends": frame(b"x", MORE),
    "a message of large frames that never ends": frame(bytes(60_000), MORE | 2),
    "pings": PING,
}
"""One part of each flood."""


@pytest.fixture
def daemon(start_daemon):
    """A daemon without keys, where everybody may say something."""
    return start_daemon(tcp=f"127.0.0.1:{free_port()}")


def connect(daemon, host=ELSEWHERE):
    """A connection from this host over which messages may go."""
    address, port = daemon.tcp_address.removeprefix("tcp://").split(":")
    connection = socket.create_connection((address, int(port)), PATIENCE_S, (host, 0))
    connection.sendall(GREETING + READY)
    heard = b""
    while b"READY" not in heard:
        heard += connection.recv(1 << 10)
        assert heard, "the daemon hung up"
    return connection


def flood(daemon, part, *, greets, host=ELSEWHERE):
    """Connect, and say it for a while; then reset the connection."""
    words = part * max(1, (1 << 16) // len(part))
    with connect(daemon, host) as connection:
        with suppress(ConnectionError, TimeoutError):
            if greets:
                connection.sendall(frame(Greet(PROTOCOL_VERSION, "flood", 1, "").encode()))
            connection.settimeout(FLOOD_S)
            until_s = time.monotonic() + FLOOD_S
            while time.monotonic() < until_s:
                connection.sendall(words)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("words", FLOODING)
def test_a_flood_ends_and_others_read_on(daemon, words):
    """Whatever it consists of, with a session and without; the daemon's memory grows by what came in one audit."""
    with good_trainers(daemon) as good:
        good.read()
        before = private_bytes(daemon.pid)
        for number in range(FLOODS):
            flood(daemon, FLOODING[words], greets=number % 2 == 0, host=f"127.0.0.{9 + number}")
            good.read()
            assert private_bytes(daemon.pid) - before < GROWTH_BYTES_MAX
        wait_until(lambda: good.status()["daemon"]["tcp"]["connections"] == 1, "the flood is over")
        good.read()
        if words == "pings":  # ZeroMQ answers each, so there are never many
            return
        assert good.status()["daemon"]["tcp"]["closed"] == FLOODS
    (line,) = daemon.log_lines("remote connection closed")[:1]
    assert line["host"] == ELSEWHERE
    assert "it sent more than" in line["reason"]


def test_from_where_a_flood_came_nobody_comes_in_for_a_while(daemon):
    """An honest trainer of that host waits for it, as for a daemon that is away; from elsewhere they come."""
    flood(daemon, FLOODING["questions"], greets=True)
    flooded_s = time.monotonic()
    with suppress(ConnectionError, AssertionError), connect(daemon) as kept_out:
        while kept_out.recv(1 << 10):
            pass
    assert time.monotonic() - flooded_s < BAN_S / 2
    with batchd_client.connect(daemon.tcp_address) as elsewhere:
        assert elsewhere.status()["daemon"]["tcp"]["connections"] == 1


def test_a_trainer_that_is_kept_out_is_told_so_by_its_deadline(start_daemon):
    """It cannot know more than that its connections are cut."""
    daemon = start_daemon(tcp=f"127.0.0.1:{free_port()}")
    flood(daemon, FLOODING["questions"], greets=True, host="127.0.0.1")
    wait_until(lambda: daemon.log_lines("remote connection closed"), "it was cut off")
    with pytest.raises(DaemonNotFound, match="cut"):
        batchd_client.connect(daemon.tcp_address, connect_timeout_s=1.0)
    batchd_client.connect(daemon.tcp_address, connect_timeout_s=3 * BAN_S).close()
