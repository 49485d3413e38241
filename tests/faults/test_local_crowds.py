"""Crowds at the local sockets, few descriptors: the daemon lives, good trainers lose no batch."""

import errno
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import batchd_client
from support.expected import Expected
from support.good_trainers import good_trainers
from support.seen import see
from support.settings import folder_stream
from support.waiting import PATIENCE_S, wait_until

LIMITS = [120, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (90, 400, 1_024, 4_096))]
"""With 120 a full ring leaves some 30 for connections; with 90 only two, which a crowd of 90 takes
in turn for a minute."""
OUR_LIMIT = 4 * 4_096
TRAINERS = 30
"""Number of ordinary trainers at once; each reads an epoch and disconnects."""
SOCKETS = {"lifeline.sock": socket.SOCK_SEQPACKET, "batchd.sock": socket.SOCK_STREAM}
CONNECTING = "02"
"""The state, in /proc/net/unix, of a connection that is not yet accepted."""


@contextmanager
def silent_connections(daemon, name, count):
    """Open as many silent connections to a socket as the kernel queues."""
    with ExitStack() as stack:
        crowd = []
        for _ in range(count):
            one = stack.enter_context(socket.socket(socket.AF_UNIX, SOCKETS[name] | socket.SOCK_NONBLOCK))
            try:
                one.connect(str(daemon.runtime_dir / name))
            except OSError as error:
                assert error.errno in {errno.EAGAIN, errno.ECONNREFUSED}  # noqa: PT017  as many wait as may
            crowd.append(one)
        yield crowd


def queued(daemon, name):
    """Tell whether a connection waits to be accepted."""
    path = str(daemon.runtime_dir / name)
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(path)]
    return any(line[5] == CONNECTING for line in lines)


def read_an_epoch(daemon):
    """Be an ordinary trainer: connect, read everything, disconnect."""
    with batchd_client.connect(daemon.address, connect_timeout_s=PATIENCE_S) as connection:
        return see(connection.stream("photos", epochs=1))


def ordinary_trainers(daemon):
    """Run so many trainers at once; each gets the expected batches."""
    expected = Expected(daemon.config).epoch(0)
    with ThreadPoolExecutor(TRAINERS) as pool:
        seen = list(pool.map(read_an_epoch, [daemon] * TRAINERS))
    assert seen == [expected] * TRAINERS


@pytest.fixture(scope="module", params=LIMITS)
def daemon(request, start_shared_daemon, photos):
    """Start a daemon with few descriptors; this process has more. The last test kills a worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, OUR_LIMIT), hard))
    yield start_shared_daemon(
        {"photos": folder_stream(photos, batch_size=4)}, descriptors_max=request.param, memory="4 MiB"
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit_of(daemon):
    """Return the daemon's limit of descriptors."""
    return resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)[0]


@pytest.mark.thorough
def test_ordinary_trainers_that_are_more_than_there_are_descriptors_wait_their_turn(daemon):
    """The daemon refuses no trainer, and no trainer misses a batch."""
    with good_trainers(daemon) as good:
        ordinary_trainers(daemon)
        good.read()


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", SOCKETS)
def test_a_silent_crowd_keeps_no_trainer_out_for_long(daemon, name):
    """The crowd exceeds the descriptors: trainers read on, and ordinary ones connect."""
    with good_trainers(daemon) as good, silent_connections(daemon, name, limit_of(daemon)):
        for _ in range(50):
            good.read()
        ordinary_trainers(daemon)
        good.read()


def test_crowds_at_both_sockets_leave_descriptors_for_what_the_daemon_has_to_do(daemon):
    """A dead worker is replaced during the crowd, and a trainer reads on."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=1)
        seen = see(stream, 1)
        with ExitStack() as stack:
            for name in SOCKETS:
                stack.enter_context(silent_connections(daemon, name, limit_of(daemon)))
            daemon.kill_a_worker()
            wait_until(lambda: daemon.log_lines("worker started"), "it is replaced")
            seen += see(stream)
    assert seen == Expected(daemon.config).epoch(0)
    assert not daemon.log_lines("worker not started")


@pytest.mark.thorough
def test_a_connection_that_never_greets_is_closed_in_the_end(start_daemon):
    """Both sockets close it, even if no other connection waits; sessions stay."""
    daemon = start_daemon()
    with (
        good_trainers(daemon) as good,
        silent_connections(daemon, "batchd.sock", 3) as at_zeromq,
        silent_connections(daemon, "lifeline.sock", 3) as at_lifeline,
    ):
        wait_until(lambda: good.status()["daemon"]["local"]["strangers"] == 6, "all are connected")
        wait_until(lambda: good.status()["daemon"]["local"]["strangers"] == 0, "all are closed")
        assert good.status()["daemon"]["local"]["closed"] == 6
        for one in at_zeromq + at_lifeline:
            while one.recv(1 << 10):
                pass
    (line,) = daemon.log_lines("local connections closed")
    assert line["reason"] == "no session came of it"


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", SOCKETS)
def test_more_silent_connections_than_may_be_lose_the_oldest(start_daemon, name):
    """The oldest end at once, before their timeout."""
    daemon = start_daemon()
    with good_trainers(daemon) as good, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(silent_connections(daemon, name, 100))
            wait_until(lambda: not queued(daemon, name), "all are accepted")
        good.read()
        assert good.status()["daemon"]["local"]["strangers"] <= 256
    (line,) = daemon.log_lines("local connections closed")
    assert line["reason"] == "more than 256 connections that are no sessions"
