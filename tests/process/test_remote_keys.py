"""Keys over TCP: which trainers may connect, what a key opens, and the errors of the others."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

import batchd_client
from batchd.runtime.keys import KeyDirectory
from batchd_client.errors import DaemonNotFound, KeyInvalid, KeyRefused
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.codes import ErrorCode
from batchd_wire.keys import Role, connection_file_text
from batchd_wire.messages import TO_TRAINER_REMOTE, Greet, Refused
from support.commands import batchd
from support.expected import Expected
from support.network import free_port
from support.seen import see
from support.settings import folder_stream
from support.waiting import wait_until

SILENCE_MS = 500


def write_key(folder, key):
    """Write a connection file, as `batchd keys new -o` does."""
    file = folder / f"{key.name}.conn"
    file.touch(0o600)
    file.write_text(connection_file_text(key))
    return str(file)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Make the daemon's keys."""
    directory = KeyDirectory(tmp_path_factory.mktemp("keys") / "keys")
    directory.make_daemon_key()
    return directory


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a folder for connection files."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def good(keys, files):
    """Make a key that opens every stream."""
    return write_key(files, keys.new("good", None))


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos, keys, good):
    """Serve two streams to trainers with keys."""
    assert good
    streams = {name: folder_stream(photos) for name in ("photos", "secret")}
    return start_shared_daemon(streams, tcp=f"127.0.0.1:{free_port()}", keys_dir=str(keys.path))


def connect(daemon, key):
    """Connect with a short timeout: the daemon answers these requests at once."""
    return batchd_client.connect(daemon.tcp_address, key=key, connect_timeout_s=5.0)


def test_a_known_key_opens_every_stream(daemon, good):
    """The daemon knows the key's name."""
    with connect(daemon, good) as connection:
        assert see(connection.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)
        (far,) = [one for one in daemon.status()["trainers"] if one["transport"] == "tcp"]
        assert far["key"] == "good"
        assert "tcp 127.0.0.1 (good)" in batchd("status", address=daemon.address).stdout


def test_the_key_may_come_from_the_environment(daemon, good, monkeypatch):
    """A job script sets it, with the address."""
    monkeypatch.setenv("BATCHD_ADDRESS", daemon.tcp_address)
    monkeypatch.setenv("BATCHD_KEY", good)
    with batchd_client.connect() as connection:
        assert connection.address == daemon.tcp_address


def test_a_key_for_some_streams_opens_no_other(daemon, keys, files):
    """The daemon does not even show them."""
    file = write_key(files, keys.new("half", frozenset({"photos"})))
    with connect(daemon, file) as connection:
        see(connection.stream("photos", epochs=1), 1)
        with pytest.raises(KeyRefused, match="the key does not open stream 'secret'"):
            connection.stream("secret")
        with pytest.raises(KeyRefused, match="the key does not open stream 'secret'"):
            connection.bad("secret")
        assert [stream["name"] for stream in connection.status()["streams"]] == ["photos"]
        assert connection.status()["daemon"]["config_file"] == ""
    assert daemon.status()["daemon"]["config_file"] == str(daemon.config)


def test_without_a_key_the_trainer_is_told_that_it_needs_one(daemon):
    """The error names the places of a key."""
    with pytest.raises(KeyRefused, match=r"requires a key, and none was given in \$BATCHD_KEY"):
        connect(daemon, None)


def test_a_revoked_key_is_told_so(daemon, keys, files):
    """The key fits the daemon, which no longer accepts it."""
    file = write_key(files, keys.new("gone", None))
    keys.revoke("gone")
    with pytest.raises(KeyRefused, match="does not know the key 'gone'"):
        connect(daemon, file)


def test_the_key_of_a_worker_host_opens_no_batch(daemon, keys, files):
    """The client rejects it before it connects; the daemon rejects a file that hides its role."""
    key = keys.new("pool", role=Role.WORKER)
    with pytest.raises(KeyInvalid, match="is the key of a worker host; a trainer needs a key of its own"):
        connect(daemon, write_key(files, key))
    with pytest.raises(KeyRefused, match="does not know the key 'pool'"):
        connect(daemon, write_key(files, replace(key, role=Role.TRAINER)))
    assert "the key 'pool' is a worker host's: worker_address of [daemon] admits it" in daemon.log
    assert "here a trainer's is needed: `batchd keys new --name NAME" in daemon.log


def test_a_key_made_for_another_daemon_is_told_so(daemon, tmp_path):
    """The key names another key of the daemon than this daemon has."""
    other = KeyDirectory(tmp_path / "other")
    with pytest.raises(KeyRefused, match="has other keys than those for which 'stray' was made"):
        connect(daemon, write_key(tmp_path, other.new("stray", None)))


def test_a_stopped_daemon_is_not_taken_for_something_else(daemon, good):
    """The kernel accepts the connection, and no greeting follows; later both sides continue."""
    daemon.send(signal.SIGSTOP)
    with pytest.raises(
        DaemonNotFound, match="took the connection but says nothing: stopped, hung, or no batchd daemon"
    ):
        batchd_client.connect(daemon.tcp_address, key=good, connect_timeout_s=0.5)
    daemon.send(signal.SIGCONT)
    with connect(daemon, good) as connection:
        assert see(connection.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)


def test_a_key_for_a_daemon_without_keys_is_told_so(start_daemon, tmp_path, good):
    """The environment is set for another daemon."""
    plain = start_daemon(tcp=f"127.0.0.1:{free_port()}", keys_dir=str(tmp_path / "none"))
    with pytest.raises(KeyRefused, match="has no keys, and a key was given"):
        connect(plain, good)


@pytest.mark.parametrize("content", [None, "", "nonsense", 'name = "x"\n'])
def test_a_file_that_is_no_key_is_named(tmp_path, content):
    """The file is missing, empty, or has other content."""
    file = tmp_path / "conn.key"
    if content is not None:
        file.touch(0o600)
        file.write_text(content)
    with pytest.raises(KeyInvalid, match=r"connect\(key=\): .*conn\.key"):
        batchd_client.connect("tcp://127.0.0.1:1", key=str(file))


def test_a_key_that_others_may_read_is_not_used(tmp_path, good):
    """A key that others can read is no secret."""
    file = tmp_path / "open.key"
    file.write_text(Path(good).read_text())
    file.chmod(0o644)
    with pytest.raises(KeyInvalid, match="chmod 600"):
        batchd_client.connect("tcp://127.0.0.1:1", key=str(file))


@pytest.mark.parametrize("mechanism", ["NULL", "PLAIN", "CURVE with an unknown key"])
def test_a_peer_without_a_key_gets_not_a_byte(daemon, keys, mechanism):
    """The daemon sends nothing back, whatever it receives, and continues to serve others."""
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    if mechanism == "PLAIN":
        stranger.plain_username, stranger.plain_password = b"good", b"good"
    elif mechanism != "NULL":
        stranger.curve_serverkey = keys.daemon_key()[0].encode()
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    try:
        stranger.connect(daemon.tcp_address)
        stranger.send(Greet(PROTOCOL_VERSION, "stranger", 1, "").encode())
        assert stranger.poll(SILENCE_MS) == 0
    finally:
        context.destroy()
    assert all(one["name"] != "stranger" for one in daemon.status()["trainers"])


def test_a_session_ends_with_its_key(daemon, keys, files):
    """The key is revoked while the trainer reads: its claims end within a tick or two."""
    file = write_key(files, keys.new("short", None))
    with connect(daemon, file) as connection:
        stream = connection.stream("photos", window=1)
        see(stream, 1)
        keys.revoke("short")
        wait_until(lambda: not daemon.stream_status()["subscriptions"], "its claim has ended")
        with pytest.raises(KeyRefused, match="revoked"):
            see(stream)


def test_a_revoked_key_does_not_come_in_by_the_name_of_its_successor(daemon, keys):
    """The holder connected, sent nothing, and lost the key; now another key has its name."""
    old = keys.new("heir", None)
    context = zmq.Context()
    early = context.socket(zmq.DEALER)
    early.linger = 0
    early.curve_serverkey, early.curve_publickey, early.curve_secretkey = (
        part.encode() for part in (old.daemon, old.public, old.secret)
    )
    shaken = early.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        early.connect(daemon.tcp_address)
        assert shaken.poll(5_000)
        keys.revoke("heir")
        keys.new("heir", None)
        early.send(Greet(PROTOCOL_VERSION, "early", 1, "").encode())
        assert early.poll(5_000)
        answer = TO_TRAINER_REMOTE.decode(early.recv())
    finally:
        early.disable_monitor()
        shaken.close()
        early.close()
        context.destroy()
    assert isinstance(answer, Refused)
    assert ErrorCode(answer.error) is ErrorCode.KEY_REFUSED


def test_a_refusal_does_not_send_a_long_name_back(daemon, keys, files):
    """The trainer could not read an answer that is longer than the limit for texts."""
    file = write_key(files, keys.new("narrow", frozenset({"photos"})))
    with connect(daemon, file) as connection, pytest.raises(KeyRefused, match="does not open"):
        connection.stream("x" * 16_000)


def test_listening_beyond_loopback_without_keys_is_refused_at_the_start(start_daemon, tmp_path):
    """The error has the command that makes one."""
    daemon = start_daemon(tcp=f"0.0.0.0:{free_port()}", keys_dir=str(tmp_path / "none"), ready=False)
    assert daemon.wait() == 2
    assert "batchd keys new --name" in daemon.log


def test_the_key_of_a_worker_host_does_not_open_the_trainers_address_beyond_loopback(start_daemon, tmp_path):
    """No trainer could connect, so the daemon does not start."""
    batchd(
        "keys",
        "new",
        "--role",
        "worker",
        "--name",
        "pool",
        "--keys-dir",
        tmp_path / "keys",
        "-o",
        tmp_path / "pool.key",
    )
    daemon = start_daemon(tcp=f"0.0.0.0:{free_port()}", keys_dir=str(tmp_path / "keys"), ready=False)
    assert daemon.wait() == 2
    assert "has no key of a trainer [missing-keys]\n = help: `batchd keys new --name NAME" in daemon.log


def test_a_port_that_is_taken_is_named(start_daemon, daemon):
    """The second daemon does not start."""
    other = start_daemon(tcp=daemon.tcp_address.removeprefix("tcp://"), ready=False)
    assert other.wait() != 0
    assert "cannot be listened on: Address already in use" in other.log
