"""What a worker does while the storage of a source is away: its orders are to be filled later."""

from pathlib import Path

import pytest

from batchd.data.sources import outage
from batchd.worker.filling import OneByOne
from batchd.worker.loop import WorkerStream
from batchd.worker.messages import Chunk, ChunksFilled, FillChunks
from support.images import write_photos
from support.worker_streams import WorkerStreams

PHOTOS = 12
STEPS = "{ op = 'decode' }, { op = 'resize', size = [16, 16] }"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photographs of one folder."""
    root = tmp_path / "photos"
    root.mkdir()
    write_photos(root, {"cat": PHOTOS}, height=32, width=32)
    return root


@pytest.fixture
def make(streams: WorkerStreams, folder: Path):
    """Make a stream over the folder, or another source, that waits for its storage."""

    def make(on_error: str = "substitute", source: str = "", *, waits: bool = True) -> WorkerStream:
        source = source or f"{{ type = 'folder', path = '{folder}', allow_outside_root = true }}"
        return streams.start(source, STEPS, on_error, waits_for_storage=waits)

    return make


def answers(stream: WorkerStream, *counts: int) -> list[ChunksFilled]:
    """Have a worker fill consecutive chunks of so many rows."""
    page = memoryview(bytearray(stream.layout.slot_bytes))
    firsts = [sum(counts[:at]) for at in range(len(counts))]
    chunks = [Chunk(10 + at, 1, 0, 0, [(firsts[at], count)], []) for at, count in enumerate(counts)]
    return list(stream.answer(FillChunks(1, chunks, is_packed=False), {1: (page, {})}))


@pytest.mark.parametrize("on_error", ["substitute", "mask", "fail"])
def test_no_sample_is_bad_while_the_root_is_gone(make, folder, on_error):
    """Whatever the policy, each order is answered, and says why it does not count."""
    stream = make(on_error)
    folder.rename(folder.with_name("gone"))
    done = answers(stream, 4, 4, 4)
    reason = f"{folder} cannot be reached: No such file or directory"
    assert [(one.orders, one.bad, one.hopeless, one.away) for one in done] == [
        ([order], [], "", reason) for order in (10, 11, 12)
    ]
    folder.with_name("gone").rename(folder)
    done = answers(stream, 4, 4, 4)
    assert [order for one in done for order in one.orders] == [10, 11, 12]
    assert not any(one.bad or one.hopeless or one.away for one in done)


def test_orders_that_were_filled_before_count(make, folder, monkeypatch):
    """They have a report of their own, and their bad samples, too."""
    stream = make("mask")
    made, make_row = [], OneByOne._make

    def go_away(strategy, epoch, row, sample, attempt, fields):
        made.append(sample)
        if len(made) == 7:
            folder.rename(folder.with_name("gone"))
        return make_row(strategy, epoch, row, sample, attempt, fields)

    monkeypatch.setattr(OneByOne, "_make", go_away)
    done = answers(stream, 4, 4)
    assert [(one.orders, bool(one.away), one.bad) for one in done] == [([10], False, []), ([11], True, [])]


def test_a_sample_is_read_once_more_where_the_storage_is_back(make, folder, monkeypatch):
    """The storage was away when the file was opened, and back when the root was looked at."""
    stream = make("fail")
    gone = folder.with_name("gone")
    folder.rename(gone)
    looked = []

    def come_back(*facts):
        looked.append(facts)
        if gone.exists():
            gone.rename(folder)
        return outage.why_away(*facts)

    monkeypatch.setattr("batchd.worker.sample_maker.why_away", come_back)
    (done,) = answers(stream, 12)
    assert (done.bad, done.hopeless, done.away, len(looked)) == ([], "", "", 1)


def test_a_missing_file_is_a_bad_sample_while_others_are_there(make, folder):
    """It has a substitute, and the reason that it always had."""
    stream = make()
    next(folder.rglob("*.jpg")).unlink()
    (done,) = answers(stream, 12)
    assert [reason for _sample, _name, reason in done.bad] == ["No such file or directory"]
    assert (done.hopeless, done.away) == ("", "")


def test_files_that_are_all_gone_are_away_and_bad_where_no_one_waits(make, folder):
    """The message names a file, and how many others were tried."""
    waiting, other = make(), make(waits=False)
    for file in folder.rglob("*.jpg"):
        file.rename(file.with_suffix(".gone"))
    (done,) = answers(waiting, 1)
    assert done.away == f"{folder}/cat/00000.jpg cannot be opened, and none of {PHOTOS - 1} others"
    (done,) = answers(other, 1)
    assert done.away == ""
    assert "could stand in for" in done.hopeless


def test_each_part_of_a_source_may_be_away_alone(make, folder, tmp_path):
    """The samples of the part that is there are filled meanwhile."""
    more = tmp_path / "more"
    write_photos(more, {"cat": PHOTOS}, height=32, width=32)
    parts = ", ".join(f"{{ type = 'folder', path = '{one}', allow_outside_root = true }}" for one in (folder, more))
    stream = make(source=f"{{ type = 'concat', sources = [{parts}] }}")
    more.rename(tmp_path / "gone")
    (done,) = answers(stream, 12)  # its first samples, of the first part
    assert (done.bad, done.away) == ([], "")
    page = memoryview(bytearray(stream.layout.slot_bytes))
    message = FillChunks(1, [Chunk(1, 1, 0, 1, [(0, 12)], [])], is_packed=False)
    (done,) = stream.answer(message, {1: (page, {})})
    assert done.away == f"{more} cannot be reached: No such file or directory"
