"""Rows that several samples of a source join, as a worker makes them."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from batchd.worker.messages import Chunk, FillChunks
from batchd.worker.others import NearSamples
from batchd.worker.process import NoteMemory
from support.images import write_photos
from support.worker_streams import fill

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


NEAR = STEPS.replace("size = [24, 24] }", "size = [24, 24], near = 3 }")
BATCH = 2


@pytest.mark.parametrize("cache", ["off", "encoded", "decoded", "pixels"])
def test_near_samples_are_those_of_the_row_and_decoded_once(streams, folder, monkeypatch, cache):
    """A row has the same bytes, whatever the worker still keeps of the rows before it."""
    plain = streams.start(source(folder), NEAR, "fail", cache, samples=BATCH)
    read, decoded = list[int](), Counter[int]()
    take, make = plain.maker.reader.read, plain.maker.first_steps.make
    monkeypatch.setattr(plain.maker.reader, "read", lambda sample: (read.append(sample), take(sample))[1])
    monkeypatch.setattr(plain.maker.first_steps, "make", lambda *args: (decoded.update([args[2]]), make(*args))[1])
    rows = {
        (step, row): fill(plain, row, 1, 0, step)[1]["image"][0]
        for row in range(BATCH)
        for step in range(PHOTOS // BATCH)
    }
    assert max(decoded.values()) == 1
    assert len(decoded) == len(read) == PHOTOS
    for step, row in reversed(rows):
        others = plain.maker.others(0, step * BATCH + row)
        window = set(range(max(0, step - 2), max(3, step + 1))) - {step}
        assert {other % BATCH for other in others} == {row}
        assert {other // BATCH for other in others} <= window
        alone = streams.start(source(folder), NEAR, samples=BATCH)
        assert np.array_equal(fill(alone, row, 1, 0, step)[1]["image"][0], rows[step, row])


def test_only_so_many_bytes_are_kept():
    """The oldest samples go first; a sample beyond all room is not kept."""
    near = NearSamples(bytes_max=20)
    values = {"image": np.arange(9, dtype=np.uint8), "names": [np.zeros(1, np.uint8)], "id": 7}
    kept = near.keep(1, values)
    near.keep(2, values)
    values["image"][:] = 0
    assert (1 in near, 2 in near) == (True, True)
    assert near.find(1) is kept
    assert kept["image"].tolist() == list(range(9))
    with pytest.raises(ValueError, match="read-only"):
        kept["image"][0] = 1
    near.keep(3, values)
    assert [sample for sample in range(4) if sample in near] == [2, 3]
    near.keep(4, {"image": np.zeros(21, np.uint8)})
    assert not any(sample in near for sample in range(5))


def joins(stream) -> dict[int, list[int]]:
    """What joins each row of the first batch."""
    return {sample: stream.maker.others(0, sample) for sample in range(PHOTOS)}


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
    monkeypatch.setattr(NoteMemory, "take", lambda _note, _row, sample: noted.append(sample))
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
    read = stream.maker.reader.read

    def read_and_leave(sample):
        values = read(sample)
        memory = {name: memoryview(bytes(one)) if isinstance(one, memoryview) else one for name, one in values.items()}
        folder.rename(gone)
        return memory

    stream.maker.reader.read = read_and_leave
    (done,) = stream.answer(FillChunks(1, [Chunk(9, 1, 0, 0, [(0, 1)], [])], is_packed=False), _slot(stream))
    assert "cannot be reached" in done.away
    assert (done.bad, len(whom[0])) == ([], 3)
