"""Rows that several samples of a source join, as a worker makes them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from batchd.worker.messages import Chunk, FillChunks
from support.images import write_photos
from support.worker_streams import WorkerStreams, fill, worker_streams

PHOTOS = 12
STEPS = (
    "{ op = 'decode' }, { op = 'resize', longer_side = 24 }, { op = 'mosaic', size = [24, 24] }, { op = 'random_flip' }"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photographs of one folder."""
    root = tmp_path / "photos"
    root.mkdir()
    write_photos(root, {"cat": PHOTOS}, height=40, width=32)
    return root


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[WorkerStreams]:
    with worker_streams(tmp_path) as made:
        yield made


def source(folder: Path) -> str:
    return f"{{ type = 'folder', path = '{folder}', allow_outside_root = true }}"


@pytest.mark.parametrize("cache", ["off", "encoded", "decoded", "pixels"])
@pytest.mark.parametrize("cache_dir", ["", "disk"])
def test_rows_are_the_same_in_any_order_and_from_any_cache(streams, folder, tmp_path, cache, cache_dir):
    """What joins a sample is read where it is needed, and kept like any other sample."""
    (tmp_path / "disk").mkdir()
    place = str(tmp_path / cache_dir) if cache_dir and cache != "off" else ""
    plain, other = streams.start(source(folder), STEPS), streams.start(source(folder), STEPS, "fail", cache, place)
    bad, rows = fill(plain)
    assert bad == []
    for _ in range(2):
        for row in reversed(range(PHOTOS)):
            _bad, alone = fill(other, row, 1)
            assert np.array_equal(alone["image"][0], rows["image"][row])
    assert not np.array_equal(fill(plain, epoch=1)[1]["image"], rows["image"])
    if cache != "off":
        work = next(
            iter(other.answer(FillChunks(1, [Chunk(9, 1, 0, 0, [(0, PHOTOS)], [])], is_packed=False), _slot(other)))
        ).work
        assert (work.cache_hits, work.cache_misses) == (4 * PHOTOS, 0)


def _slot(stream):
    return {1: (memoryview(bytearray(stream.layout.slot_bytes)), {})}


def test_copies_of_a_sample_are_joined_by_others(streams, folder):
    """With repeats, each copy draws numbers of its own."""
    stream = streams.start(source(folder), STEPS, repeats=2)
    (_bad, first), (_none, second) = fill(stream), fill(stream, step=1)

    assert np.array_equal(first["index"], second["index"])
    assert not np.array_equal(first["image"], second["image"])


def joins(stream) -> dict[int, list[int]]:
    """What joins each row of the first batch."""
    return {sample: stream._maker.others(0, sample) for sample in range(PHOTOS)}


@pytest.mark.parametrize("on_error", ["substitute", "mask", "fail"])
def test_a_bad_sample_is_named_wherever_it_would_join(streams, folder, on_error):
    """By the stream's rule another one stands in, or its place stays empty; other rows stay."""
    stream = streams.start(source(folder), STEPS, on_error)
    _bad, good = fill(stream)
    bad = 5
    sorted(folder.rglob("*.jpg"))[bad].write_bytes(b"no image")
    told, rows = fill(stream)

    whom = joins(stream)
    assert set(told) == {bad}
    assert len(told) == 1 + sum(others.count(bad) for sample, others in whom.items() if sample != bad)
    for sample, others in whom.items():
        is_same = bad != sample and bad not in others
        assert np.array_equal(rows["image"][sample], good["image"][sample]) == is_same
    if on_error == "mask":
        assert rows["valid"].tolist() == [sample != bad for sample in range(PHOTOS)]
        sample = next(sample for sample, others in whom.items() if bad in others and sample != bad)
        assert (rows["image"][sample] == 114).all(axis=2).sum() > (good["image"][sample] == 114).all(axis=2).sum()


def test_a_quarantined_sample_is_not_begun_and_the_note_names_who_is(streams, folder, monkeypatch):
    """A worker that dies while it reads what joins a row blames that sample, not the row's."""
    stream = streams.start(source(folder), STEPS, "substitute")
    whom = joins(stream)
    row, others = next(one for one in whom.items() if one[0] not in one[1])
    noted = []
    monkeypatch.setattr(stream._strategy._note, "take", lambda _row, sample: noted.append(sample))
    fill(stream, row, 1)
    assert noted == [row, *others, row]
    stream.quarantined.add(others[0])
    told, _rows = fill(stream, row, 1)
    assert set(told) == {others[0]}


def test_a_row_waits_for_the_storage_of_what_joins_it(streams, folder):
    """No sample is bad while the folder is away, also one that would join."""
    stream = streams.start(source(folder), STEPS, "substitute", waits_for_storage=True)
    gone = folder.with_name("gone")
    whom = joins(stream)
    read = stream._maker._reader.read

    def read_and_leave(sample):
        values = read(sample)
        memory = {name: memoryview(bytes(one)) if isinstance(one, memoryview) else one for name, one in values.items()}
        folder.rename(gone)
        return memory

    stream._maker._reader.read = read_and_leave
    (done,) = stream.answer(FillChunks(1, [Chunk(9, 1, 0, 0, [(0, 1)], [])], is_packed=False), _slot(stream))
    assert "cannot be reached" in done.away
    assert (done.bad, len(whom[0])) == ([], 3)
