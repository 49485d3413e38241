"""Who has had how much: by user, by key, by stream; with shares by the operator's file."""

import json
import os
from contextlib import ExitStack, contextmanager

import pytest

import batchd_client
from batchd.observe.http.metrics import METRICS
from batchd.runtime.keys import KeyDirectory
from batchd_client.errors import BatchdClientError
from batchd_wire.keys import connection_file_text
from batchd_wire.status import read_status
from support.commands import batchd
from support.network import free_port
from support.seen import see
from support.settings import folder_stream
from support.waiting import wait_until

USER, GROUP = 4711, 4712
SHARES = {"team-a": {"weight": 3, "keys": ["team-a"]}, "lab": {"weight": 2, "groups": [str(GROUP)]}}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Make the daemon's keys, and those of two teams."""
    directory = KeyDirectory(tmp_path_factory.mktemp("keys") / "keys")
    directory.make_daemon_key()
    return directory


@pytest.fixture
def daemon(start_daemon, photos, keys):
    """Serve two streams, also to other hosts, with shares."""
    streams = {name: folder_stream(photos) for name in ("photos", "other")}
    return start_daemon(streams, tcp=f"127.0.0.1:{free_port()}", keys_dir=str(keys.path), shares=SHARES)


def write_key(keys, folder, name):
    file = folder / f"{name}.key"
    file.touch(0o600)
    file.write_text(connection_file_text(keys.new(name, None)))
    return str(file)


def connect_far(daemon, keys, folder, name):
    return batchd_client.connect(daemon.tcp_address, key=write_key(keys, folder, name))


@contextmanager
def another_user(runtime_dir):
    """Be a user of the group that may connect."""
    os.chown(runtime_dir, -1, GROUP)
    for path in (runtime_dir, *runtime_dir.iterdir()):
        os.chown(path, -1, GROUP)
        path.chmod(path.stat().st_mode | (0o050 if path.is_dir() else 0o060))
    for path in list(runtime_dir.parents)[:-2]:
        path.chmod(path.stat().st_mode | 0o055)
    os.setresgid(GROUP, GROUP, 0)
    os.setresuid(USER, USER, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


def accounts(status):
    return {(one["owner"], one["stream"]): one for one in status["usage"]}


@as_root
def test_each_user_and_key_has_an_account_of_its_share(daemon, keys, tmp_path):
    """The kernel and the key say who it is; work is counted for the one that needed it first."""
    with (
        batchd_client.connect(daemon.address) as near,
        connect_far(daemon, keys, tmp_path, "team-a") as far,
        connect_far(daemon, keys, tmp_path, "team-b") as stranger,
    ):
        rows = sum(len(batch["label"]) for batch in near.stream("photos", epochs=1))
        with another_user(daemon.runtime_dir):
            user = batchd_client.connect(daemon.address)
        with user:
            see(user.stream("photos", epochs=1))
            see(far.stream("other", epochs=1))
            see(stranger.stream("photos", epochs=1), 1)
            found = accounts(daemon.status())
            assert {key: one["tenant"] for key, one in found.items()} == {
                ("user:root", "photos"): "default",
                (f"user:{USER}", "photos"): "lab",
                ("key:team-a", "other"): "team-a",
                ("key:team-b", "photos"): "default",
            }
            own = found["user:root", "photos"]
            assert own["delivered_samples"] == rows
            assert own["made_samples"] >= rows
            assert own["work_s"] >= own["cpu_s"] > 0
            assert own["delivered_bytes"] > 0 < own["read_bytes"]
            made = sum(one["made_samples"] for one in found.values() if one["stream"] == "photos")
            assert made == daemon.stream_status("photos")["decoded_samples"]
            assert found["key:team-a", "other"]["weight"] == 3.0
            assert [one["owner"] for one in far.status()["usage"]] == ["key:team-a"], "others are not its business"
    wait_until(lambda: not any(one["held_bytes"] for one in daemon.status()["usage"]), "nothing is held")
    assert not any(one["subscriptions"] for one in daemon.status()["usage"])

    shown = batchd("usage", address=daemon.address).stdout
    assert f"user:{USER}" in shown
    told = json.loads(batchd("usage", "--json", address=daemon.address).stdout)
    assert {(one["owner"], one["stream"]) for one in told} == set(found)
    status = read_status(daemon.status())
    metrics = {metric.name: dict(metric.values(status)) for metric in METRICS}
    assert metrics["usage_delivered_samples_total"]["user:root", "photos", "default"] == rows


def test_a_reload_changes_shares(daemon):
    """A wrong name keeps the old ones; a right one counts for trainers that come afterwards."""
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("photos"), 1)
        whole = daemon.config.read_text()
        assert whole.count(str(GROUP)) == 1
        for user, status in (("no-such-user", 2), (str(os.geteuid()), 0)):
            changed = whole.replace(f'["{GROUP}"]', f'[], users = ["{user}"]')
            daemon.config.write_text(changed)
            batchd("reload", address=daemon.address, status=status)
        see(connection.stream("photos"), 1)
        (mine,) = daemon.status()["usage"]
        assert (mine["tenant"], mine["weight"]) == ("lab", 2.0)


def test_a_share_has_no_more_trainers_than_it_may(start_daemon, photos, keys, tmp_path):
    """Over both doors together; others still connect, and a place is free again when one leaves."""
    shares = {"few": {"sessions_max": 2, "users": [str(USER)], "keys": ["few"]}}
    address = f"127.0.0.1:{free_port()}"
    daemon = start_daemon({"photos": folder_stream(photos)}, tcp=address, keys_dir=str(keys.path), shares=shares)
    few = write_key(keys, tmp_path, "few")
    with ExitStack() as stack:
        far = stack.enter_context(batchd_client.connect(daemon.tcp_address, key=few))
        if os.geteuid() == 0:
            with another_user(daemon.runtime_dir):
                stack.enter_context(batchd_client.connect(daemon.address))
                with pytest.raises(BatchdClientError, match="2 trainers of the share 'few' are connected already"):
                    batchd_client.connect(daemon.address)
        else:
            stack.enter_context(batchd_client.connect(daemon.tcp_address, key=few))
        with pytest.raises(BatchdClientError, match="2 trainers of the share 'few' are connected already"):
            batchd_client.connect(daemon.tcp_address, key=few)
        with batchd_client.connect(daemon.tcp_address, key=write_key(keys, tmp_path, "other")) as other:
            assert see(other.stream("photos"), 1)
        before = len(daemon.status()["trainers"])
        far.close()
        wait_until(lambda: len(daemon.status()["trainers"]) < before, "the place is free")
        with batchd_client.connect(daemon.tcp_address, key=few) as again:
            assert see(again.stream("photos"), 1)


def test_before_any_trainer_the_table_is_empty(daemon):
    assert batchd("usage", address=daemon.address).stdout == "no trainer has subscribed yet\n"
