"""An image file that is rewritten after the scan makes a bad sample, in every source of files."""

import json
import os

import pytest

import batchd_client
from batchd.commands.history.batches import Replayer
from batchd.commands.prepare import Output, PrepareJob, prepare
from batchd.config.load import load_config
from batchd.daemon.config_checks import preview_streams
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.stream.rings import plan_rings
from batchd_wire.position import Position
from support.commands import batchd as command
from support.images import jpeg, photo, write_photos
from support.settings import STREAM, write_settings

PHOTOS = 6


@pytest.fixture
def folder(tmp_path):
    """Photographs of two classes, and a list, a table and lines of JSON that name them."""
    root = tmp_path / "root"
    root.mkdir()
    write_photos(root, {"cat": 3, "dog": 3}, height=72, width=96)
    names = [str(file.relative_to(root)) for file in sorted(root.rglob("*.jpg"))]
    (root / "list.txt").write_text("".join(f"{name} 0\n" for name in names))
    (root / "table.csv").write_text("file,label\n" + "".join(f"{name},0\n" for name in names))
    (root / "lines.jsonl").write_text("".join(json.dumps({"image": name, "label": 0}) + "\n" for name in names))
    return root


def streams_of(root):
    """A stream of each kind of source whose samples are files, without a cache."""
    fields = {"image": "image", "label": "int64"}
    sources = {
        "folder": {"path": str(root)},
        "glob": {"root": str(root), "patterns": ["*/*.jpg"]},
        "list": {"path": str(root / "list.txt")},
        "csv": {"path": str(root / "table.csv"), "image": "file", "fields": {"label": "int64"}},
        "jsonl": {"root": str(root), "shards": ["lines.jsonl"], "fields": fields, "image_root": str(root)},
    }
    common = {**STREAM, "batch_size": PHOTOS, "shuffle": False, "cache": "off", "max_bad_fraction": 1.0}
    return {kind: {**common, "source": {"type": kind, **source}} for kind, source in sources.items()}


def indexes(daemon, kind, epoch):
    """The samples of the batch of an epoch: one that is bad has a substitute."""
    with batchd_client.connect(daemon.address) as connection, connection.stream(kind, epochs=epoch + 1) as batches:
        batches.seek(epoch, 0)
        return next(iter(batches))["index"].tolist()


@pytest.mark.parametrize("is_rewritten", [True, False])
def test_a_rewritten_file_is_a_bad_sample(start_daemon, folder, is_rewritten):
    """Its name and the reason are listed; a file whose mode or links change is still the same."""
    files = sorted(folder.rglob("*.jpg"))
    os.utime(files[0], (4e9, 4e9))  # a camera's wrong clock
    daemon = start_daemon(streams_of(folder))
    assert all(indexes(daemon, kind, 0) == list(range(PHOTOS)) for kind in streams_of(folder))
    if is_rewritten:
        files[3].write_bytes(jpeg(photo(72, 96, seed=99)))
    else:
        files[3].chmod(0o600)
        os.link(files[3], folder / "another name")

    for kind in streams_of(folder):
        found = indexes(daemon, kind, 1)
        bad = json.loads(command("bad", kind, "--json", address=daemon.address).stdout)

        assert (3 in found) == (not is_rewritten)
        text = json.dumps(bad)
        assert (files[3].name in text) == is_rewritten
        assert ("after its source was scanned; restart the daemon, or the command" in text) == is_rewritten


def prepared(config, folder):
    """Return why ``batchd prepare`` leaves out samples."""
    job = PrepareJob("folder", config.streams["folder"], config.daemon, IndexCache(folder / "cache"), Storage())
    made = prepare(job, Output(folder / "out", PHOTOS, "png", 90), lambda _all, _done, _bad: None)
    return [one.reason for one in made.left_out]


def replayed(config, _folder):
    """Return why ``batchd replay`` has no sample in a row."""
    with Replayer(config, "folder") as replayer:
        return [tried.reason for row in replayer.at(Position(0, 0)).rows for tried in row.tried]


def checked(config, _folder):
    """Return why ``batchd check`` can make no sample."""
    with Storage() as storage:
        rings = plan_rings(config, storage)
        return [str(one) for one in preview_streams(config, rings, storage)]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("read", "count"), [(prepared, PHOTOS), (replayed, PHOTOS), (checked, 1)])
def test_each_command_that_scans_and_reads_notices_a_rewritten_file(monkeypatch, tmp_path, folder, read, count):
    """All files are written again between its scan and its first sample."""
    begin_scan = Storage.begin_scan

    def rewrite(storage: Storage) -> None:
        begin_scan(storage)
        for file in folder.rglob("*.jpg"):
            data = file.read_bytes()
            while file.stat().st_mtime_ns <= storage.as_of_ns:  # the clock of files is coarse
                file.write_bytes(data)

    stream = {**streams_of(folder)["folder"], "on_error": "mask", "max_bad_fraction": 0.99}
    config = load_config(write_settings(tmp_path / "batchd.toml", {"folder": stream}, {"workers": 1}), {}, {})
    monkeypatch.setattr(Storage, "begin_scan", rewrite)

    reasons = read(config, tmp_path)

    assert len(reasons) == count
    assert all("after its source was scanned" in reason for reason in reasons)
