"""Two hosts in network namespaces, a pulled cable: exact positions, lost hosts noticed."""

import pytest

from support.commands import batchd
from support.expected import Expected
from support.network import two_hosts
from support.settings import folder_stream
from support.trainer_process import TrainerFailed, TrainerProcess
from support.waiting import wait_until

PORT = 7071
VANISHED_S = 15.0
"""The documented time: heartbeats of 3 s, and 9 s without an answer."""


@pytest.fixture(scope="module")
def hosts():
    """Make two hosts and a cable."""
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def key(tmp_path):
    """Make a directory for the keys of a daemon, and a connection file."""
    file = tmp_path / "conn.key"
    keys = tmp_path / "keys"
    new_key(keys, "gpu-box", file)
    return keys, file


def new_key(keys, name, file):
    """Make a key as an operator does."""
    batchd("keys", "new", "--name", name, "--keys-dir", keys, "-o", file)


def revoke(keys, name):
    """Revoke a key as an operator does."""
    batchd("keys", "revoke", name, "--keys-dir", keys)


@pytest.fixture
def start_far(hosts, key):
    """Start trainers on the other host; they end with the test."""
    trainers = []

    def start(**options):
        connect = {"key": str(key[1]), "connect_timeout_s": 5.0, **options.pop("connect", {})}
        trainer = TrainerProcess(f"tcp://{hosts.ours}:{PORT}", connect=connect, through=hosts.on_the_other(), **options)
        trainers.append(trainer)
        return trainer

    yield start
    for trainer in trainers:
        trainer.close()


@pytest.fixture
def daemon(hosts, start_daemon, key, photos):
    """Start a daemon that listens on the cable."""
    return start_daemon(
        {"photos": folder_stream(photos, batch_size=2)}, tcp=f"{hosts.ours}:{PORT}", keys_dir=str(key[0])
    )


def claims(daemon):
    """Return the number of the stream's trainers."""
    return len(daemon.stream_status()["subscriptions"])


@pytest.mark.thorough
def test_a_pulled_cable_costs_time_and_no_batch(hosts, daemon, start_far):
    """An interruption below the heartbeats' timeout costs time: TCP sends lost data again.

    A longer one leaves half-open connections: the daemon frees the session, the trainer returns.
    """
    trainer = start_far(epochs=2).ready()
    seen = trainer.take(3)
    hosts.pull_cable()
    trainer.begin(do="take", batches=17)
    hosts.plug_in()
    seen += trainer.finish()[0]
    assert claims(daemon) == 1
    hosts.pull_cable()
    trainer.begin(do="take")
    wait_until(lambda: claims(daemon) == 0, "the daemon has ended its session", VANISHED_S)
    hosts.plug_in()
    expected = Expected(daemon.config)
    assert seen + trainer.finish()[0] == expected.epoch(0) + expected.epoch(1)


@pytest.mark.thorough
@pytest.mark.usefixtures("daemon")
def test_a_network_that_never_comes_back_is_an_error_in_the_end(hosts, start_far):
    """The error comes after ``reconnect_timeout_s``, with the reason."""
    trainer = start_far(connect={"reconnect_timeout_s": 2.0}).ready()
    trainer.take(1)
    hosts.pull_cable()
    with pytest.raises(TrainerFailed, match=r"ReconnectTimeout[\s\S]*no answer"):
        trainer.take()
    hosts.plug_in()


@pytest.mark.thorough
def test_a_revoked_key_ends_its_session_and_a_new_one_of_its_name_does_not_help_it(daemon, start_far, key):
    """No restart is needed; the trainer gets the reason, and cannot connect again."""
    keys, file = key
    trainer = start_far(connect={"reconnect_timeout_s": 2.0}).ready()
    trainer.take(1)
    revoke(keys, "gpu-box")
    wait_until(lambda: claims(daemon) == 0, "its session has ended")
    new_key(keys, "gpu-box", file.with_name("other.key"))
    with pytest.raises(TrainerFailed, match="KeyRefused: the daemon says: the key has been revoked"):
        trainer.take()
    with pytest.raises(TrainerFailed, match=r"KeyRefused: .* does not know the key 'gpu-box'"):
        start_far().ready()


def test_a_restarted_daemon_is_found_over_the_network_with_the_right_keys(daemon, start_far, key):
    """The daemon is killed and restarted: the trainer continues at its position.

    While the daemon has other keys, trainers with the old ones wait until the old ones return.
    """
    keys, _file = key
    trainer = start_far(epochs=2).ready()
    seen = trainer.take(5)
    daemon.kill()
    trainer.begin(do="take", batches=10)
    daemon.start()
    seen += trainer.finish()[0]
    daemon.kill()
    trainer.begin(do="take")
    kept = keys.rename(keys.with_name("kept"))
    new_key(keys, "somebody", keys.with_name("somebody.key"))
    daemon.start()
    wait_until(lambda: daemon.log_lines("remote handshake failed"), "it was refused with the old key")
    daemon.kill()
    keys.rename(keys.with_name("others"))
    kept.rename(keys)
    daemon.start()
    expected = Expected(daemon.config)
    assert seen + trainer.finish()[0] == expected.epoch(0) + expected.epoch(1)
