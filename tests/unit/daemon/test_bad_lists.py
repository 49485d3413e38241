"""The file with all bad samples of a stream: whole lines, bounded, one writer, this user's own."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from batchd.core.suspicion import ListedBadSample
from batchd.daemon import bad_lists
from batchd.daemon.bad_lists import BadLists


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Have two samples begin a file."""
    monkeypatch.setattr(bad_lists, "FILE_FROM", 2)


@pytest.fixture
def lists(tmp_path):
    with closing(BadLists(tmp_path / "cache")) as lists:
        yield lists


def add(lists, stream, name, *samples):
    for sample in samples:
        lists.add(stream, name, sample, ListedBadSample(f"{sample}.jpg", "empty file"))


def names(lists, stream="photos"):
    return [json.loads(line)["path"] for line in Path(lists.path(stream)).read_text().splitlines()]


def test_a_file_has_each_sample_and_begins_again_with_another_stream(lists):
    """A reload that changes the stream makes another one of its name."""
    add(lists, 1, "photos", 0)
    assert lists.path("photos") == ""
    add(lists, 1, "photos", 1, 2, 7)
    add(lists, 2, "texts", 1, 2)
    assert names(lists) == ["0.jpg", "1.jpg", "2.jpg", "7.jpg"]
    assert names(lists, "texts") == ["1.jpg", "2.jpg"]

    add(lists, 3, "photos", 5, 6)
    assert names(lists) == ["5.jpg", "6.jpg"]


def test_a_full_file_keeps_whole_lines_and_the_log_counts_the_others(lists, monkeypatch):
    """A source of nothing but bad files does not fill the disk."""
    monkeypatch.setattr(bad_lists, "FILE_BYTES_MAX", 200)
    with capture_logs() as log:
        add(lists, 1, "photos", *range(10))

    assert names(lists) == ["0.jpg", "1.jpg", "2.jpg"]
    assert [(line["event"], line["missing"]) for line in log] == [("bad samples are missing in their file", 1)]


def test_what_others_may_write_or_another_daemon_writes_is_left_alone(lists, tmp_path):
    """There is no file then, and `batchd bad` names none."""
    with capture_logs() as log, closing(BadLists(tmp_path / "cache")) as other:
        add(lists, 1, "photos", 1, 2)
        add(other, 1, "photos", 3, 4)
        (tmp_path / "cache" / "batchd-texts.bad").symlink_to(tmp_path / "elsewhere")
        add(other, 2, "texts", 5, 6)
        assert (other.path("photos"), other.path("texts")) == ("", "")

    assert names(lists) == ["1.jpg", "2.jpg"]
    assert not (tmp_path / "elsewhere").exists()
    reasons = [line["reason"] for line in log]
    assert reasons == [os.strerror(11), f"{tmp_path}/cache/batchd-texts.bad is a link: remove it"]


def test_without_a_folder_there_is_no_file():
    lists = BadLists()
    add(lists, 1, "photos", 1, 2, 3)
    assert lists.path("photos") == ""
