"""Streams that trainers define: `daemon.define`, of data that the daemon's file does not name."""

import json
import os
import pwd
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count as count_from
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread
from time import monotonic

import numpy as np
import pytest

import batchd_client
from batchd.runtime.keys import KeyDirectory
from batchd_client.asking import asking
from batchd_client.errors import (
    DefinitionRefused,
    PermissionDenied,
    RingTooSmall,
    SettingsInvalid,
    StreamRemoved,
    StreamUnknown,
)
from batchd_wire.keys import connection_file_text
from batchd_wire.messages import AskRemoval, Removed
from support.commands import batchd as command
from support.expected import Expected
from support.good_trainers import private_bytes
from support.images import write_photos
from support.kernel import children_called, children_of, descriptors_of, is_stopped
from support.network import free_port
from support.seen import see
from support.settings import PIPELINE, SLOT_BYTES, folder_stream, write_settings
from support.waiting import wait_until


@pytest.fixture
def serving(start_daemon, photos):
    """Start a daemon that lets the group of the test define streams of the photographs."""

    def start(streams=None, define=None, **options):
        rules = {"who": [f"group:{os.getegid()}"], "roots": [str(photos)], **(define or {})}
        streams = {"photos": folder_stream(photos, memory="1MiB"), **(streams or {})}
        return start_daemon(streams, define=rules, **options)

    return start


def served(daemon):
    return {stream["name"] for stream in daemon.status()["streams"]}


def test_a_defined_stream_is_the_one_that_the_file_would_have(serving, photos):
    """Fingerprint, bytes and states are the same; all who define it share one stream."""
    table = folder_stream(photos, batch_size=4, seed=3)
    daemon = serving({"twin": {**table, "memory": "1MiB"}})

    with batchd_client.connect(daemon.address) as one, batchd_client.connect(daemon.address) as other:
        first = one.define("trial", table, epochs=1, keep_s=0)
        second = other.define("trial", table, epochs=1, keep_s=0)
        assert first.name == second.name == "trial"
        assert first.fingerprint == one.stream("twin").fingerprint
        expected = Expected(daemon.config, "twin").epoch(0)
        for batch in expected:
            assert see(first, 1) == see(second, 1) == [batch]
        status = daemon.stream_status("trial")
        assert status["decoded_batches"] == len(expected)
        assert status["description"]["owner"] == f"user:{pwd.getpwuid(os.geteuid()).pw_name}"
        state = json.loads(json.dumps(first.state_dict()))
        assert state["define"] == table
    wait_until(lambda: served(daemon) == {"photos", "twin"}, "it ends with its last trainer")
    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("trial", state={**state, "epoch": 0, "step": 1}), 1) == expected[1:2]


ANNA, BEN, ML = 51_234, 51_235, 51_300
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as other users")


OPENED = """
set -e
mount -t tmpfs -o mode=755 tmpfs {kept} && mount --rbind {home} {kept}
mount -t tmpfs -o mode=755 tmpfs {home}
mkdir -p {python} && mount --rbind {kept}/{inside} {python}
exec "$@"
"""


def python_for_all():
    """Words before a command that let all users read Python, which is often in a closed home."""
    python = Path(sys.base_prefix)
    closed = next((parent for parent in reversed(python.parents) if not parent.stat().st_mode & 1), None)
    if closed is None:
        return []
    words = OPENED.format(home=closed, python=python, inside=python.relative_to(closed), kept="/mnt")
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", words, "sh"]


@contextmanager
def as_user(user):
    """Connect as a user of this host whose second group is ML: the kernel notes who connects."""
    before = os.getgroups()
    os.setgroups([user, ML])
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


@pytest.fixture
def users(serving):
    """Start a daemon of root that serves users of the group ML, and a folder for their data."""
    with TemporaryDirectory(prefix="batchd-data-") as folder:  # pytest closes its own to others
        data = Path(folder)
        data.chmod(0o755)
        write_photos(data / "open", {"cat": 4, "owl": 4}, height=40, width=40)
        yield partial(_start_for_users, serving, data), data


def _start_for_users(serving, data, **options):
    define = {"who": [f"group:{ML}"], "roots": [str(data)], **options.pop("define", {})}
    daemon = serving(define=define, through=[*python_for_all(), *options.pop("through", [])], **options)
    for folder in daemon.runtime_dir.parents[:2]:
        folder.chmod(0o711)
    for path in (daemon.runtime_dir, *daemon.runtime_dir.glob("*.sock")):
        os.chown(path, -1, ML)
    daemon.runtime_dir.chmod(0o750)
    return daemon


def connect_as(user, daemon):
    with as_user(user):
        return batchd_client.connect(daemon.address)


@as_root
def test_a_stream_reads_nothing_that_who_defines_it_may_not_read(users):
    """The kernel checks the user at the scan, and at each sample: also of a file that changes."""
    start, data = users
    daemon = start()
    rows = data / "rows.npy"
    np.save(rows, np.arange(64, dtype="float32").reshape(16, 4))
    rows.chmod(0o600)
    closed = folder_stream(data / "open", cache="points", on_error="mask", max_bad_fraction=1.0)
    with connect_as(ANNA, daemon) as anna:
        table = {"source": {"type": "npy", "root": str(data), "arrays": {"x": rows.name}}, "batch_size": 4}
        with pytest.raises(DefinitionRefused, match=r"rows\.npy.*Permission denied"):
            anna.define("rows", table)
        rows.chmod(0o604)
        assert len(see(anna.define("rows", table), 1)) == 1
        rows.chmod(0o600)
        names = sorted((data / "open").rglob("*.jpg"))
        names[0].chmod(0o600)
        stream = anna.define("photos-of-anna", closed, epochs=1)
        valid = [flag for batch in islice(stream, 1) for flag in batch["valid"].tolist()]
        assert valid.count(False) == 1
        assert [(bad.path, bad.reason) for bad in anna.bad("photos-of-anna").samples] == [
            (str(names[0]), "Permission denied")
        ]
        names[0].chmod(0o604)
        bucket = {"field": "image", "by": "aspect", "count": 2}
        measured = anna.define("measured", {**closed, "bucket": bucket})
        names[0].chmod(0o600)
        with batchd_client.connect(daemon.address) as root:
            assert root.define("measured-too", {**closed, "bucket": bucket}).fingerprint == measured.fingerprint
            assert all(next(iter(root.define("of-root", closed, epochs=1)))["valid"])


SERVER = 51_400
"""A user that daemons run as."""


@as_root
@pytest.mark.parametrize("missing", ["", "setuid", "setgid", "kill"])
def test_a_daemon_of_another_user_reads_for_others_with_three_capabilities_alone(users, missing):
    """It may not read their files itself. Without one of the three it refuses, and names it."""
    start, data = users
    own = ",".join(f"+{name}" for name in ("setuid", "setgid", "kill") if name != missing)
    words = ["sh", "-c", 'chmod 711 .. && chown -R "$0" . && exec "$@"', str(SERVER)]
    words += ["setpriv", "--reuid", str(SERVER), "--regid", str(ML), "--clear-groups"]
    readable = {"photos": folder_stream(data / "open", memory="1MiB")}
    daemon = start(streams=readable, through=[*words, "--inh-caps", own, "--ambient-caps", own])
    assert f"Uid:\t{SERVER}\t" in Path(f"/proc/{daemon.pid}/status").read_text()
    rows = data / "rows.npy"
    np.save(rows, np.arange(64, dtype="float32").reshape(16, 4))
    os.chown(rows, ANNA, ANNA)
    rows.chmod(0o400)
    table = {"source": {"type": "npy", "root": str(data), "arrays": {"x": rows.name}}, "batch_size": 4}
    with connect_as(ANNA, daemon) as anna, connect_as(BEN, daemon) as ben:
        if missing:
            with pytest.raises(
                DefinitionRefused, match=f"user {SERVER} without CAP_{missing.upper()}, and cannot read"
            ):
                anna.define("rows", table)
            return
        assert len(see(anna.define("rows", table), 2)) == 2
        with pytest.raises(DefinitionRefused, match=r"rows\.npy.*Permission denied"):
            ben.define("others-rows", table)
        bucket = {"field": "image", "by": "aspect", "count": 2}
        assert len(see(ben.define("photos-of-ben", folder_stream(data / "open", bucket=bucket)), 1)) == 1


STREAMS_OF_ONE = 10
ACCOUNTS_BYTES = 64 << 10
"""Of a user who has had so many streams: they stay in `batchd usage`."""


def define_read_and_leave(daemon, table, user, connecting):
    """Be a user who has as many streams as he may, and leaves."""
    with connecting:  # the user is one of the whole process
        connection = connect_as(user, daemon)
    with connection:
        streams = [
            connection.define(f"of-{user}-{seed}", {**table, "seed": seed}, epochs=1, keep_s=0)
            for seed in range(STREAMS_OF_ONE)
        ]
        with pytest.raises(DefinitionRefused, match=rf"user:{user} has defined {STREAMS_OF_ONE} of up to"):
            connection.define(f"of-{user}-more", table)
        return [len(see(stream, 1)) for stream in streams]


@as_root
@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_many_users_define_read_and_leave_and_nothing_of_them_stays(users, count):
    """Each has all that it may; one who reads a stream of the file meanwhile notices nothing."""
    start, data = users
    daemon = start(
        define={"streams_max": STREAMS_OF_ONE},
        streams={"photos": folder_stream(data / "open", memory="1MiB")},
        shares={"half": {"users": [str(ANNA + number) for number in range(0, count, 2)]}},
        memory="64MiB",
        derive_memory="32MiB",
    )
    table = folder_stream(data / "open", memory=2 * SLOT_BYTES)
    connecting, is_over, batches = Lock(), Event(), count_from(0)

    def read():
        with batchd_client.connect(daemon.address) as connection:
            stream = connection.stream("photos")
            while not is_over.is_set():
                see(stream, 1)
                next(batches)

    def all_leave():
        wait_until(lambda: served(daemon) == {"photos"}, "their streams have ended")
        (process,) = children_called(daemon.pid, b"batchd.daemon.derive.process")
        wait_until(lambda: not children_of(process), "no fork is left")
        return process, len(descriptors_of(daemon.pid)), private_bytes(daemon.pid)

    reader = Thread(target=read, daemon=True)
    reader.start()
    with ThreadPoolExecutor(4) as pool:
        seen = [pool.submit(define_read_and_leave, daemon, table, ANNA + number, connecting) for number in range(4)]
        rows = [one.result() for one in seen]
        process, descriptors, before = all_leave()
        kept = len(descriptors_of(process))
        seen = [
            pool.submit(define_read_and_leave, daemon, table, ANNA + number, connecting) for number in range(4, count)
        ]
        rows += [one.result() for one in seen]
    read_until_now = next(batches)
    wait_until(lambda: next(batches) > read_until_now + 3, "the other one goes on")
    is_over.set()
    reader.join()
    assert rows == [[1] * STREAMS_OF_ONE] * count
    assert read_until_now > count
    process, now, after = all_leave()
    assert now <= descriptors + 2
    assert len(descriptors_of(process)) <= kept + 2 * count
    assert after - before < count * ACCOUNTS_BYTES


@as_root
def test_what_one_has_defined_is_not_for_another(users):
    """Neither its name nor its rows: the refusal says whose it is. The operator may read all."""
    start, data = users
    daemon = start()
    table = folder_stream(data / "open")
    with connect_as(ANNA, daemon) as anna, connect_as(BEN, daemon) as ben:
        rows = see(anna.define("trial", table), 1)
        for words, refused in {
            f"user:{ANNA} has defined stream 'trial'": lambda: ben.define("trial", table),
            "'photos' is a stream of the daemon's file": lambda: ben.define("photos", table),
        }.items():
            with pytest.raises(DefinitionRefused, match=words):
                refused()
        with pytest.raises(StreamUnknown, match=f"user:{ANNA} has defined"):
            ben.stream("trial")
        with pytest.raises(StreamUnknown):
            ben.bad("trial")
        assert see(ben.define("trial-of-ben", table), 1) == rows
        with batchd_client.connect(daemon.address) as root:
            assert see(root.stream("trial"), 1) == rows


@as_root
def test_who_is_not_named_defines_nothing(users):
    """The sentence says what the operator has to write."""
    start, data = users
    daemon = start(define={"who": [f"user:{BEN}", "group:no-such-group", "key:team"]})
    assert "unknown user or group" in daemon.log
    table = folder_stream(data / "open")
    with connect_as(ANNA, daemon) as anna, connect_as(BEN, daemon) as ben:
        with pytest.raises(DefinitionRefused, match=rf"user:{ANNA} may not define .* who in \[daemon.define\]"):
            anna.define("trial", table)
        with pytest.raises(SettingsInvalid, match=f"user:{ANNA} may derive no streams"):
            anna.stream("photos", set={"seed": 3})
        assert len(see(ben.define("trial", table), 1)) == 1
        assert ben.stream("photos", set={"seed": 3}).name == "photos+1"


REFUSED = {
    r"source\.path: /etc is not below the roots": {"source": {"type": "folder", "path": "/etc"}},
    r"source\.path: .*/way-out is not below the roots": {"source": {"type": "folder", "path": "ROOT/way-out"}},
    r"'photos': paths .* begin with /": {"source": {"type": "folder", "path": "photos"}},
    r"s3://bucket/x is not below": {"source": {"type": "folder", "path": "s3://bucket/x"}},
    r"a\.jpg is a link that leads out of the root": {"source": {"type": "folder", "path": "ROOT/linked"}},
    r"leads out of the roots": {"source": {"type": "folder", "path": "ROOT/linked", "allow_outside_root": True}},
    r"source\.sources\[0\]\.path: /etc is not below": {
        "source": {"type": "concat", "sources": [{"type": "folder", "path": "/etc"}]}
    },
    r"weights\.file: /etc/passwd is not below": {"weights": {"file": "/etc/passwd"}},
    r"source\.part: '\.\./x' leads out of the root": {"source": {"type": "voc", "root": "ROOT", "part": "../x"}},
    r"source\.max_pixels: may be 100000000 at most": {
        "source": {"type": "lerobot", "root": "ROOT", "max_pixels": 100_000_001}
    },
    r"source\.cache_bytes: may be 134217728 at most": {
        "source": {"type": "parquet", "root": "ROOT", "shards": ["*"], "fields": {"x": "int64"}, "cache_bytes": 1 << 40}
    },
    r"cache_dir: is for the operator": {"cache_dir": "ROOT", "cache": "encoded", "cache_size": "1GiB"},
    r"journal: is for the operator": {"journal": "1MiB"},
    r"\"call\" runs functions of its own": {"pipeline": [*PIPELINE, {"op": "call", "function": "os:getcwd"}]},
    r"'python' runs functions of its own": {
        "source": {"type": "python", "function": "os:getcwd", "fields": {"x": "int64"}}
    },
    r"samples of 'push' come once": {
        "source": {"type": "push", "fields": {"x": "int64"}, "capacity": 64},
        "pipeline": [],
    },
    r"unknown key; did you mean size\?\n.*sise.*\n +\^\^\^\^\n": {
        "pipeline": [PIPELINE[0], {"op": "resize", "sise": [8, 8]}]
    },
    r"pipeline\[1\]\.size: may be 4096 pixels at most": {
        "pipeline": [PIPELINE[0], {"op": "resize", "size": [9000, 9000]}, {"op": "resize", "size": [8, 8]}]
    },
    r"pipeline\[0\]\.max_pixels: may be \d+ at most": {
        "pipeline": [{"op": "decode", "max_pixels": 1 << 30}, *PIPELINE[1:]]
    },
    r"deeper than 32": {"pipeline": [{"op": "resize", "size": json.loads("[" * 40 + "]" * 40)}]},
    r"deeper than 32|too deep": {"seed": json.loads("[" * 90 + "]" * 90)},
    r"the table has 1 to 61440 bytes": {"seed": "9" * 62_000},
    r"seed: must be an integer": {"seed": "9" * 61_000},
    r"memory: all streams that you define have 16\.0 MiB": {"memory": "1GiB"},
    r"need .* for 2 slots of 65,000 samples": {"batch_size": 65_000},
}


def test_what_an_operator_would_not_serve_is_refused_with_its_place(serving, tmp_path):
    """Files elsewhere, code, links, caches, hostile forms; the daemon goes on."""
    root = tmp_path / "root"
    write_photos(root / "linked", {"cat": 2}, height=40, width=40)
    (root / "linked/cat/a.jpg").symlink_to("/etc/hostname")
    (root / "way-out").symlink_to(tmp_path)
    daemon = serving(define={"roots": [str(root)]})
    with batchd_client.connect(daemon.address) as connection:
        for words, keys in REFUSED.items():
            text = json.dumps(folder_stream(root / "linked", **keys)).replace("ROOT", str(root))
            with pytest.raises(DefinitionRefused, match=words):
                connection.define("trial", json.loads(text))
        with pytest.raises(DefinitionRefused, match="is no name of a stream"):
            connection.define("photos+1", {"batch_size": 8})
        assert served(daemon) == {"photos"}
        (root / "linked/cat/a.jpg").unlink()
        assert len(see(connection.define("trial", folder_stream(root / "linked", batch_size=2)), 1)) == 1


def test_a_daemon_without_the_table_says_what_its_operator_has_to_write(start_daemon, photos):
    """The connection stays."""
    daemon = start_daemon()
    with batchd_client.connect(daemon.address) as connection:
        with pytest.raises(DefinitionRefused, match=r"a table \[daemon.define\] with who = .* and roots = "):
            connection.define("trial", folder_stream(photos))
        assert len(see(connection.stream("photos"), 1)) == 1


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_loop_goes_on_after_a_restart_of_the_daemon(serving, photos, how):
    """The client defines the stream again, and gets the same batches."""
    table = folder_stream(photos, seed=5)
    daemon = serving()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.define("trial", table, epochs=2)
        fingerprint, before = stream.fingerprint, see(stream, 2)
        getattr(daemon, how)()
        daemon.start()
        rest = see(stream, 2)
        assert stream.fingerprint == fingerprint
        assert see(connection.stream("trial", define=table), 4) == [*before, *rest]


def test_batches_of_a_defined_stream_are_replayed_from_its_state(serving, photos, tmp_path):
    """The card has the table; neither the daemon nor its file is needed."""
    daemon = serving()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.define("trial", folder_stream(photos))
        (batch,) = islice(stream, 1)
        crc32 = batch.crc32()
        file = tmp_path / "state.json"
        file.write_text(json.dumps(stream.state_dict(card=True)))
    daemon.terminate()
    command("replay", "trial", "--card", file, "--back", "1", "--verify", f"{crc32:08x}")


def test_streams_of_one_owner_have_limits_and_those_that_nobody_reads_make_room(serving, photos):
    """What is read or kept stays; a table that differs takes the place of one that nobody reads."""
    daemon = serving(define={"streams_max": 2, "memory": 24 * SLOT_BYTES}, memory="8MiB")
    table = folder_stream(photos)
    with batchd_client.connect(daemon.address) as connection:
        first = connection.define("first", table, keep_s=600)
        assert daemon.stream_status("first")["slots_max"] == 12
        with pytest.raises(DefinitionRefused, match="'first' with another table, and it is read"):
            connection.define("first", {**table, "seed": 3})
        second = connection.define("second", table, keep=True)
        with pytest.raises(DefinitionRefused, match=r"has defined 2 of up to 2 streams \(streams_max"):
            connection.define("third", table)
        second.close()
        with pytest.raises(DefinitionRefused, match="has defined 2 of up to 2"):
            connection.define("third", table)
        first.close()
        assert connection.define("first", {**table, "seed": 3}, keep_s=600).fingerprint != first.fingerprint
        connection.define("third", {**table, "memory": 8 * SLOT_BYTES}, keep_s=0).close()
        wait_until(lambda: served(daemon) == {"photos", "second"}, "the third has made room, and has ended")


def slots_of(daemon, name):
    return daemon.stream_status(name)["slots_max"]


def test_rings_of_defined_streams_are_divided_by_weight_while_all_want_them(serving, photos, tmp_path):
    """One tenant has what nobody else wants, and gives it back while its trainers read on.

    Where its least does not fit, the error names its share. What it had goes to others again.
    """
    keys = KeyDirectory(tmp_path / "keys")
    key = tmp_path / "team.key"
    key.touch(0o600)
    key.write_text(connection_file_text(keys.new("team")))
    daemon = serving(
        define={"who": ["key:team", f"user:{os.getuid()}"], "streams_max": 20},
        tcp=f"127.0.0.1:{free_port()}",
        keys_dir=str(tmp_path / "keys"),
        shares={"team": {"weight": 3, "keys": ["team"]}},
        memory="8MiB",
        derive_memory=16 * SLOT_BYTES,
    )
    with (
        batchd_client.connect(daemon.address) as here,
        batchd_client.connect(daemon.tcp_address, key=str(key)) as there,
    ):
        own = here.define("own", folder_stream(photos, memory=8 * SLOT_BYTES, window=7))
        assert slots_of(daemon, "own") == 8
        held = list(islice(own, 3))
        theirs = there.define("theirs", folder_stream(photos, memory=16 * SLOT_BYTES, seed=4))
        seen = see(theirs, 3)
        for batch in held:
            batch.release()
        see(own, 9)
        wait_until(lambda: (slots_of(daemon, "own"), slots_of(daemon, "theirs")) == (4, 12), "3 to 1")
        more = here.define("more", folder_stream(photos, memory=6 * SLOT_BYTES, seed=5))
        with pytest.raises(
            DefinitionRefused, match=r"have 0.* beside the least that the streams of the share 'default'"
        ):
            here.define("too-much", folder_stream(photos, memory=2 * SLOT_BYTES, seed=6))
        with pytest.raises(RingTooSmall, match="have 0"):
            here.stream("more")
        own.close()
        again = here.stream("more")
        assert see(again, 2) == see(more, 2)
        theirs.close()
        with there.stream("theirs") as theirs:
            assert see(theirs, 3) == seen
        wait_until(lambda: slots_of(daemon, "more") == 6, "it has what nobody else wants again")


def test_over_tcp_the_key_is_the_owner_and_its_streams_end_with_it(serving, photos, tmp_path):
    """A key that is not named defines nothing; a revoked one loses what it has defined."""
    keys = KeyDirectory(tmp_path / "keys")
    files = {name: tmp_path / f"{name}.key" for name in ("team", "other")}
    for name, file in files.items():
        file.touch(0o600)
        file.write_text(connection_file_text(keys.new(name)))
    daemon = serving(
        define={"who": ["key:team"]}, tcp=f"127.0.0.1:{free_port()}", keys_dir=str(tmp_path / "keys"), derive=True
    )
    table = folder_stream(photos, seed=4)
    with (
        batchd_client.connect(daemon.tcp_address, key=str(files["team"]), reconnect_timeout_s=1) as team,
        batchd_client.connect(daemon.tcp_address, key=str(files["other"])) as other,
        batchd_client.connect(daemon.address) as here,
    ):
        stream = team.define("trial", table, keep=True)
        assert see(stream, 2) == see(here.define("mine", table), 2)
        with pytest.raises(DefinitionRefused, match="key:other may not define"):
            other.define("trial-of-other", table)
        with pytest.raises(StreamUnknown, match="key:team has defined"):
            other.stream("trial")
        assert {one["name"] for one in other.status()["streams"]} == {"photos"}
        keys.trainers.path_of("team.key").unlink()
        wait_until(lambda: served(daemon) == {"photos", "mine"}, "its streams have ended")


def test_a_process_that_dies_over_a_table_is_an_error_of_who_sent_it(serving, photos):
    """The next definition is worked out."""
    daemon = serving(faults={"daemon.define.scan": "kill"})
    with batchd_client.connect(daemon.address) as connection:
        with pytest.raises(DefinitionRefused, match=r"has ended: signal 9 \(SIGKILL\)"):
            connection.define("trial", folder_stream(photos))
        assert len(see(connection.define("trial", folder_stream(photos)), 1)) == 1


def test_a_scan_that_hangs_keeps_no_other_definition_waiting(serving, photos):
    """Its process is ended alone; who asked for it is told."""
    daemon = serving(faults={"daemon.define.scan": "stop"})
    refused = []

    def define_slowly():
        connection = batchd_client.connect(daemon.address, reconnect_timeout_s=1)
        with connection, pytest.raises(DefinitionRefused) as caught:
            connection.define("slow", folder_stream(photos))
        refused.append(str(caught.value))

    def forks():
        return [
            fork for one in children_called(daemon.pid, b"batchd.daemon.derive.process") for fork in children_of(one)
        ]

    thread = Thread(target=define_slowly, daemon=True)
    thread.start()
    wait_until(lambda: [is_stopped(fork) for fork in forks()] == [True], "its fork hangs")
    with batchd_client.connect(daemon.address) as connection:
        assert len(see(connection.define("quick", folder_stream(photos)), 1)) == 1
        assert len(see(connection.stream("photos"), 1)) == 1
    wait_until(lambda: len(forks()) == 1, "the other one has ended")
    os.kill(*forks(), signal.SIGKILL)
    thread.join()
    assert "signal 9 (SIGKILL)" in refused[0]
    assert served(daemon) >= {"photos"}


@as_root
def test_commands_define_list_and_remove_streams(users, tmp_path):
    """Problems of the file have their lines; only the owner and root remove a stream."""
    start, data = users
    daemon = start()
    file = write_settings(tmp_path / "mine.toml", {"mine": folder_stream(data / "open")}, {})
    assert "mine: 8 samples, fingerprint " in command("define", file, "--keep", address=daemon.address).stdout
    shown = command("streams", "list", address=daemon.address).stdout
    assert [line.split()[:3] for line in shown.splitlines()[1:]] == [
        ["photos", "file", "0"],
        ["mine", f"user:{pwd.getpwuid(os.geteuid()).pw_name}", "0"],
    ]
    (found,) = (one for one in json.loads(command("streams", "list", "--json", address=daemon.address).stdout)[1:])
    assert (found["name"], found["trainers"]) == ("mine", 0)
    with connect_as(ANNA, daemon) as anna:
        stream = anna.define("hers", folder_stream(data / "open"), epochs=99)
        see(stream, 1)
        refused = pytest.raises(PermissionDenied, match=f"user:{ANNA} has defined")
        with as_user(BEN), asking(daemon.address) as session, refused:
            session.request(lambda request: AskRemoval(request, "hers"), Removed, monotonic() + 9)
        command("streams", "remove", "hers", address=daemon.address)
        with pytest.raises(StreamRemoved):
            assert [see(stream, 1) for _epoch in range(98)]
    command("streams", "remove", "mine", address=daemon.address)
    assert "file" in command("streams", "remove", "photos", address=daemon.address, status=1).stderr
    wait_until(lambda: served(daemon) == {"photos"}, "they are gone")
    elsewhere = write_settings(tmp_path / "elsewhere.toml", {"mine": folder_stream("/etc")}, {})
    assert re.search(
        r"\n  source\.path: /etc is not below the roots .*\n.*\n +\^\^\^\^\n",
        command("define", elsewhere, address=daemon.address, status=1).stderr,
    )
    file.write_text(file.read_text().replace("batch_size", "batch_sise"))
    assert "batch_size" in command("define", file, address=daemon.address, status=2).stderr


def test_a_stream_of_the_file_takes_the_name_of_a_defined_one(serving, photos):
    """A reload that adds it ends the other; other defined streams stay as they are."""
    daemon = serving()
    table = folder_stream(photos)
    with batchd_client.connect(daemon.address) as connection:
        stream, other = (connection.define(name, table, epochs=99) for name in ("trial", "other"))
        see(stream, 1)
        first, photos_table, rest = daemon.config.read_text().partition("[streams.photos]")
        daemon.config.write_text(f"{first}{photos_table}{rest}[streams.trial]{rest}")
        daemon.reload()
        with pytest.raises(DefinitionRefused, match="'trial' is a stream of the daemon's file"):
            assert [see(stream, 1) for _epoch in range(9)]
        assert len(see(other, 3)) == 3
        assert len(see(connection.stream("trial"), 1)) == 1


def changed(daemon, define):
    """Reload with another [daemon.define], or without it; the outcome."""
    lines = [line for line in daemon.config.read_text().splitlines() if not line.startswith("define = ")]
    (table,) = write_settings(daemon.config.with_suffix(".part"), {}, {"define": define}).read_text().splitlines()[1:]
    daemon.config.write_text("\n".join([lines[0], *([table] if define else []), *lines[1:]]))
    return daemon.reload()


def test_a_reload_changes_what_may_be_defined_and_ends_what_may_not(serving, photos, tmp_path):
    """Trainers below a root that is gone ask again, and are told so; others notice nothing."""
    second, third = (tmp_path / name for name in ("second", "third"))
    for folder in (second, third):
        write_photos(folder, {"cat": 8}, height=40, width=40)
    daemon = serving(define={"roots": [str(photos), str(second)]})
    rules = {"who": [f"group:{os.getegid()}"], "roots": [str(photos), str(third)]}
    with batchd_client.connect(daemon.address) as connection:
        stays, goes = (
            connection.define(name, folder_stream(folder), epochs=99)
            for name, folder in {"stays": photos, "goes": second}.items()
        )
        assert see(stays, 1) != see(goes, 1)
        with pytest.raises(DefinitionRefused, match="is not below the roots"):
            connection.define("third", folder_stream(third))
        assert "define changed" in changed(daemon, rules)
        with pytest.raises(DefinitionRefused, match=f"{second} is not below the roots"):
            assert [see(goes, 1) for _batch in range(99)]
        assert len(see(stays, 3)) == 3
        assert len(see(connection.define("third", folder_stream(third)), 1)) == 1
        assert served(daemon) == {"photos", "stays", "third"}
        workers = daemon.worker_pids()
        changed(daemon, {**rules, "what": "derived"})
        wait_until(lambda: not workers & daemon.worker_pids(), "no worker may read what is below the roots")
        with pytest.raises(DefinitionRefused, match="serves the streams of its file alone"):
            assert [see(stays, 1) for _batch in range(99)]
        changed(daemon, None)
        assert served(daemon) == {"photos"}
        changed(daemon, rules)
        assert len(see(connection.define("again", folder_stream(third)), 1)) == 1


@as_root
def test_who_may_not_define_any_more_loses_what_is_defined(users):
    """By a reload: what is kept for trainers that are not there goes with it."""
    start, data = users
    daemon = start()
    table = folder_stream(data / "open")
    with connect_as(ANNA, daemon) as anna, connect_as(BEN, daemon) as ben:
        hers, his = (one.define(name, table, epochs=99) for name, one in {"hers": anna, "his": ben}.items())
        anna.define("kept", table, keep=True).close()
        assert see(hers, 1) == see(his, 1)
        changed(daemon, {"who": [f"user:{BEN}", "key:team"], "roots": [str(data)]})
        with pytest.raises(DefinitionRefused, match=rf"user:{ANNA} may not define"):
            assert [see(hers, 1) for _batch in range(99)]
        assert len(see(his, 1)) == 1
        assert served(daemon) == {"photos", "his"}
        with pytest.raises(AssertionError, match="this machine has no user 'no-such-user'"):
            changed(daemon, {"who": ["user:no-such-user"], "roots": [str(data)]})
        assert len(see(his, 1)) == 1


def test_functions_of_the_operators_modules_run_where_code_is_allowed(serving, photos, code, write):
    """In enclosed workers, too: they are below python_path."""
    write("mine.py", "def darker(sample, rng):\n    return {'image': sample['image'] // 2}")
    call = {"op": "call", "function": "mine:darker", "outputs": {"image": "uint8[32,32,3]"}}
    daemon = serving(define={"code": True}, python_path=[str(code)])
    with batchd_client.connect(daemon.address) as connection:
        plain = connection.define("plain", folder_stream(photos))
        dark = connection.define("dark", folder_stream(photos, pipeline=[*PIPELINE, call]))
        (one,), (other,) = islice(plain, 1), islice(dark, 1)
        assert (other["image"] == one["image"] // 2).all()


def test_objects_below_a_root_on_a_server_are_read_with_the_daemons_credentials(serving, photos, bucket):
    """Others of the same server are refused."""
    files = [path for path in photos.rglob("*") if path.is_file()]
    bucket.put({f"sets/photos/{path.relative_to(photos)}": path.read_bytes() for path in files})
    daemon = serving(define={"roots": ["s3://bucket/sets/"]})
    table = folder_stream(photos, source={"type": "folder", "path": "s3://bucket/sets/photos"})
    with batchd_client.connect(daemon.address) as connection:
        remote = connection.define("remote", table)
        assert see(remote, 2) == see(connection.stream("photos"), 2)
        for place in ("settings", "sets/../other"):
            with pytest.raises(DefinitionRefused, match="is not below the roots"):
                connection.define("other", {**table, "source": {"type": "folder", "path": f"s3://bucket/{place}"}})
