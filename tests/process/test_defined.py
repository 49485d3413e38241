"""Streams that trainers define: `daemon.define`, of data that the daemon's file does not name."""

import json
import os
import pwd
import sys
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import batchd_client
from batchd_client.errors import DefinitionRefused, SettingsInvalid, StreamUnknown
from support.expected import Expected
from support.images import write_photos
from support.seen import see
from support.settings import PIPELINE, folder_stream
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
def users(serving, tmp_path):
    """Start a daemon of root that serves users of the group ML, and a folder for their data."""
    data = tmp_path / "data"
    write_photos(data / "open", {"cat": 4, "owl": 4}, height=40, width=40)
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 1:  # those of pytest are closed
            folder.chmod(0o711)

    def start(**options):
        define = {"who": [f"group:{ML}"], "roots": [str(data)], **options.pop("define", {})}
        daemon = serving(define=define, through=python_for_all(), **options)
        daemon.runtime_dir.parent.parent.chmod(0o711)
        daemon.runtime_dir.parent.chmod(0o711)
        for path in (daemon.runtime_dir, *daemon.runtime_dir.glob("*.sock")):
            os.chown(path, -1, ML)
        daemon.runtime_dir.chmod(0o750)
        return daemon

    return start, data


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
    r"weights\.file: /etc/passwd is not below": {"weights": {"file": "/etc/passwd"}},
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
    r"deeper than 32": {"pipeline": [{"op": "resize", "size": json.loads("[" * 40 + "]" * 40)}]},
    r"deeper than 32|too deep": {"seed": json.loads("[" * 90 + "]" * 90)},
    r"the table has 1 to 262144 bytes": {"seed": "9" * 300_000},
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
