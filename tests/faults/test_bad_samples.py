"""Unusable files end to end: the trainer's batches, the operator's reports, stopped streams."""

import json
import os
from pathlib import Path

import pytest

import batchd_client
from batchd_client.errors import StreamStopped
from support.commands import batchd
from support.expected import Expected
from support.images import huge_jpeg_header, jpeg, photo, write_photos
from support.seen import samples, see
from support.settings import folder_stream, list_stream

GOOD_JPEG = jpeg(photo(72, 96))

REASONS = {
    "directory": "is a directory, not a regular file",
    "empty": "is empty",
    "fifo": "is a FIFO, not a regular file",
    "gone": "No such file or directory",
    "huge": "65500 x 65500",
    "link": "Too many levels of symbolic links",
    "text": "not a JPEG, PNG, WebP, BMP or GIF",
    "truncated": "truncated",
}
"""The reason of the file of each name, as the operator reads it."""


def spoil(folder):
    """Turn good photographs in ``folder`` into one file of each bad kind."""
    for kind in REASONS:
        (folder / f"{kind}.jpg").unlink()
    (folder / "directory.jpg").mkdir()
    (folder / "empty.jpg").touch()
    os.mkfifo(folder / "fifo.jpg")
    (folder / "huge.jpg").write_bytes(huge_jpeg_header())
    (folder / "link.jpg").symlink_to("link.jpg")
    (folder / "text.jpg").write_text("no image at all, but long enough to look at")
    (folder / "truncated.jpg").write_bytes(GOOD_JPEG[: len(GOOD_JPEG) // 2])
    for kind in ("empty", "huge", "text", "truncated"):
        os.utime(folder / f"{kind}.jpg", (0, 0))  # a later time: not the scanned file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a flat folder of forty good photographs, and the files that ``spoil`` will damage."""
    folder = tmp_path_factory.mktemp("bad")
    write_photos(folder, {"": 40}, height=72, width=96)
    for kind in REASONS:
        (folder / f"{kind}.jpg").write_bytes(GOOD_JPEG)
    return folder


@pytest.fixture(scope="module")
def served(start_shared_daemon, folder, tmp_path_factory):
    """Serve the folder under each policy, and a list per kind of bad file; then spoil the files.

    Return the daemon, and what its streams should give: it is computed later, from the files that
    existed at the start.
    """
    lists = tmp_path_factory.mktemp("lists")
    streams = {
        policy: folder_stream(folder, on_error=policy, max_bad_fraction=0.5) for policy in ("substitute", "mask")
    }
    for kind in REASONS:
        file = lists / f"{kind}.txt"
        file.write_text("".join(f"{number:05}.jpg 0\n" for number in range(15)) + f"{kind}.jpg 0\n")
        streams[kind] = list_stream(file, folder, on_error="fail", max_bad_fraction=0.5, shuffle=False)
    daemon = start_shared_daemon(streams, workers=2)
    expected = {policy: Expected(daemon.config, policy) for policy in ("substitute", "mask")}
    spoil(folder)
    return daemon, expected


@pytest.fixture
def daemon(served):
    """Return the daemon of this module."""
    return served[0]


@pytest.fixture
def expected(served):
    """Return the expected batches of its streams, by name."""
    return served[1]


def listed(daemon, stream):
    """Return the bad samples of a stream: reasons by file name."""
    with batchd_client.connect(daemon.address) as connection:
        report = connection.bad(stream)
    assert report.total == len(report.samples)
    return {Path(bad.path).name: bad.reason for bad in report.samples}


def check_reasons(found):
    """Check that every bad file, and no other, is listed with its own reason."""
    assert found.keys() == {f"{kind}.jpg" for kind in REASONS}
    for kind, reason in REASONS.items():
        assert reason in found[f"{kind}.jpg"]


def test_substitutes_fill_the_rows_of_bad_samples(daemon, expected):
    """Each batch has full size, equals that of a single process, and no good sample is missing."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("substitute", epochs=2)
        first, second = see(stream), see(stream)

    assert first + second == expected["substitute"].epoch(0) + expected["substitute"].epoch(1)
    assert [len(one.samples) for one in first] == [8] * 6
    assert len(set(samples(first))) == 40
    check_reasons(listed(daemon, "substitute"))


@pytest.mark.parametrize("division", [{"workers": 1, "chunk_rows": 256}, {"workers": 3, "chunk_rows": 1}])
def test_substitution_does_not_depend_on_the_workers(served, start_daemon, tmp_path, division):
    """The source is a list: in a folder, the directory named like a photograph would be a class."""
    daemon, plain = served[0], served[1]["substitute"]
    file = tmp_path / "list.txt"
    file.write_text("".join(f"{plain.path(sample)} 0\n" for sample in range(plain.plan.samples)))
    streams = {"substitute": list_stream(file, "/", max_bad_fraction=0.5)}
    streams["substitute"]["source"]["allow_outside_root"] = True
    other = start_daemon(streams, **division)
    with batchd_client.connect(daemon.address) as one, batchd_client.connect(other.address) as two:
        assert see(one.stream("substitute", epochs=1)) == see(two.stream("substitute", epochs=1))


def test_masked_rows_are_zero_and_say_so(daemon, expected):
    """Index and label are those of the bad sample, and all other rows are valid."""
    bad = {sample for sample in range(48) if Path(expected["mask"].path(sample)).stem in REASONS}
    with batchd_client.connect(daemon.address) as connection:
        batches = list(connection.stream("mask", epochs=1))
        for batch in batches:
            valid = batch["valid"]
            assert batch.samples == len(valid) == 8
            assert not batch["image"][~valid].any()
            assert all(image.any() for image in batch["image"][valid])
            assert set(batch["index"][~valid].tolist()) <= bad
            assert not set(batch["index"][valid].tolist()) & bad
        indices = sorted(index for batch in batches for index in batch["index"].tolist())
        del batches, batch, valid

    assert indices == list(range(48))
    check_reasons(listed(daemon, "mask"))


@pytest.mark.parametrize("kind", sorted(REASONS))
def test_fail_stops_the_stream_and_names_the_file(daemon, expected, folder, kind):
    """The trainer gets path and reason, and so do later trainers; other streams continue."""
    with batchd_client.connect(daemon.address) as connection:
        with pytest.raises(StreamStopped, match="on_error = fail") as told:
            see(connection.stream(kind, epochs=1))
        assert str(folder / f"{kind}.jpg") in str(told.value)
        assert REASONS[kind] in str(told.value)
        with pytest.raises(StreamStopped) as told_later:
            connection.stream(kind)
        assert str(told_later.value) == str(told.value)
        assert see(connection.stream("substitute", epochs=1), 1) == [expected["substitute"].batch(0, 0)]
    assert listed(daemon, kind).keys() == {f"{kind}.jpg"}


def test_each_bad_sample_is_logged_once_with_its_path_and_reason(daemon, folder):
    """Further encounters of the sample add no line."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("substitute", epochs=3)
        for _ in range(3):
            see(stream)
    lines = [line for line in daemon.log_lines("bad sample") if line["stream"] == "substitute"]

    check_reasons({Path(line["path"]).name: line["reason"] for line in lines})
    assert len(lines) == len(REASONS)
    assert all(line["path"].startswith(str(folder)) and line["treatment"] == "substitute" for line in lines)


def test_batchd_bad_lists_path_and_reason(daemon):
    """The command prints text and JSON."""
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("mask", epochs=1))
    text = batchd("bad", "mask", address=daemon.address).stdout
    entries = json.loads(batchd("bad", "mask", "--json", address=daemon.address).stdout)["samples"]

    check_reasons({Path(entry["path"]).name: entry["reason"] for entry in entries})
    for entry in entries:
        assert f"{entry['path']}: {entry['reason']}" in text


def test_every_name_of_many_bad_samples_can_be_had(start_daemon, tmp_path):
    """The command says how many there are and what it left out, and names the file with all."""
    source, cache = tmp_path / "empty", tmp_path / "cache"
    (source / "cat").mkdir(parents=True)
    for number in range(150):
        (source / "cat" / f"{number:03}.jpg").touch()
    (source / "cat" / "good.jpg").write_bytes(GOOD_JPEG)
    stream = folder_stream(source, on_error="mask", max_bad_fraction=1.0)
    daemon = start_daemon({"photos": stream}, cache_dir=str(cache), workers=2)
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("photos", epochs=1))
        assert connection.bad("photos").total == 150
    plain = json.loads(batchd("bad", "photos", "--json", address=daemon.address).stdout)

    assert (plain["total"], plain["left_out"], plain["file"]) == (150, 0, None)
    listed = [json.loads(line) for line in (cache / "batchd-photos.bad").read_text().splitlines()]
    assert {one["path"] for one in listed} == {one["path"] for one in plain["samples"]}
    assert {one["sample"] for one in listed} == {one["sample"] for one in plain["samples"]}


def test_a_stream_that_is_broken_ends_with_a_message_or_with_masks(start_daemon, tmp_path):
    """Beyond ``max_bad_fraction``, trainers get a typed error with the numbers and the key.

    Without one good file there is no substitute, so the search has to end. Masks need none.
    """
    write_photos(tmp_path / "mostly", {"good": 30}, height=72, width=96)
    (tmp_path / "all" / "bad").mkdir(parents=True)
    for number in range(10):
        (tmp_path / "mostly" / "good" / f"bad{number}.jpg").write_bytes(b"broken")
    for number in range(8):
        (tmp_path / "all" / "bad" / f"{number}.jpg").write_bytes(b"broken")
    streams = {
        "photos": folder_stream(tmp_path / "mostly", max_bad_fraction=0.1),
        "substitute": folder_stream(tmp_path / "all", on_error="substitute", max_bad_fraction=1.0),
        "mask": folder_stream(tmp_path / "all", on_error="mask", max_bad_fraction=1.0),
    }
    daemon = start_daemon(streams)

    with batchd_client.connect(daemon.address) as connection:
        with pytest.raises(StreamStopped, match=r"\d+ of 40 samples are bad, more than max_bad_fraction = 0\.1"):
            see(connection.stream("photos", epochs=1))
        with pytest.raises(StreamStopped, match="none of 32 samples could stand in for"):
            see(connection.stream("substitute", epochs=1))
        (batch,) = connection.stream("mask", epochs=1)
        assert not batch["valid"].any()
        assert not batch["image"].any()
        del batch
    assert "max_bad_fraction = 0.1" in daemon.stream_status()["stopped"]
    assert "stream photos has stopped: " in batchd("status", address=daemon.address).stdout
    lines = daemon.log_lines("stream stopped")
    assert [(line["stream"], line["level"]) for line in lines] == [("photos", "error"), ("substitute", "error")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_a_bad_sample(start_daemon, tmp_path):
    """The reason is the system's message."""
    (path, *_) = write_photos(tmp_path, {"cat": 40}, height=72, width=96)
    path.chmod(0)
    daemon = start_daemon({"photos": folder_stream(tmp_path)})
    with batchd_client.connect(daemon.address) as connection:
        see(connection.stream("photos", epochs=1))
        (bad,) = connection.bad("photos").samples
    assert (bad.path, bad.reason) == (str(path), "Permission denied")
