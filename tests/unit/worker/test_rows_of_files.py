"""Rows of photographs that one call makes equal those that a worker makes one by one."""

import os
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from batchd.core.work import Work
from batchd.data.pipeline.image import jpeg_box
from batchd.data.samples.kept_files import has_points
from batchd.data.sources.cache.record import NO_VALUES, has_values, header_and_points, unpack, with_headers, with_points
from batchd.worker import filling, stopwatch
from batchd.worker.messages import NOTE, Chunk, FillChunks
from batchd_wire.slot import RowChecksums
from batchd_wire.views import slot_arrays
from support.images import arithmetic_jpeg, encode, jpeg, jpeg_with_exif, photo, progressive_jpeg
from support.jpeg_boxes import extension
from support.waiting import wait_until
from support.worker_streams import fill, worker_streams

if not jpeg_box.MAKES_ROWS:
    pytest.skip("the extensions are not built", allow_module_level=True)

CROP = "{ op = 'decode' }, { op = 'random_resized_crop', size = [32, 40] }, { op = 'random_flip' }"
USUAL = [0, 1, 3, 4, 5, 6]
"""Samples whose crop is not transposed."""
STEPS = {
    "a random crop": (CROP, USUAL),
    "grey": ("{ op = 'decode', color = 'gray' }, { op = 'random_resized_crop', size = [32, 40] }", USUAL),
    "a middle that is not turned": ("{ op = 'decode' }, { op = 'center_crop', size = [40, 40] }", [0, 1, 4, 5, 6]),
    "as stored": (
        "{ op = 'decode', scale = 'off', exif = 'ignore' }, { op = 'center_crop', size = [40, 40] }",
        [*range(7)],
    ),
}
OTHER_STEPS = {
    "another type": CROP + ", { op = 'to', dtype = 'float32' }",
    "channels first": CROP + ", { op = 'to', layout = 'nchw' }",
    "colours": CROP + ", { op = 'color_jitter', brightness = 0.5 }",
    "another step": CROP + ", { op = 'cast', field = 'label', dtype = 'int32' }",
}
PHOTOGRAPH = jpeg(photo(300, 400))


@cache
def photographs() -> dict[str, bytes]:
    """The files that one call may make."""
    return {
        "a": PHOTOGRAPH,
        "b": jpeg(photo(200, 150, 1), 80, "444"),
        "c-turned": jpeg_with_exif(jpeg(photo(160, 260, 2)), 6),
        "d-mirrored": jpeg_with_exif(jpeg(photo(160, 260, 2)), 2),
        "e-small": jpeg(photo(60, 70, 3)),
        "f-grey": jpeg(photo(170, 250, 4)[..., 0]),
        "g-large": jpeg(photo(700, 900, 5)),
    }


@cache
def unusual() -> dict[str, bytes]:
    """The files that are made one by one."""
    return {
        "h-progressive": progressive_jpeg(photo(200, 200, 6)),
        "i-png": encode(photo(160, 200, 7), ".png"),
        "j-arithmetic": arithmetic_jpeg(),
        "k-padded": jpeg(photo(200, 200, 8)) + bytes(7),
    }


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Make streams over a folder of these photographs; ``made`` has the samples of each call."""
    write(tmp_path / "photos", photographs() | unusual())
    made = []
    make_rows = jpeg_box.BoxDecoder.make_rows

    def noting(decoder, tasks, *rest):
        results = make_rows(decoder, tasks, *rest)
        made.append([task.sample for task, one in zip(tasks, results, strict=True) if one.is_made])
        return results

    monkeypatch.setattr(jpeg_box.BoxDecoder, "make_rows", noting)
    with worker_streams(tmp_path) as streams:
        yield Starter(tmp_path / "photos", streams, made)


class Starter:
    """Starts streams over ``folder``."""

    def __init__(self, folder, streams, made):
        self.folder, self.note, self.made = folder, streams.note, made
        self._streams = streams

    def start(self, steps=CROP, on_error="mask", cache="points", cache_dir="", **sharing):
        source = f"{{ type = 'folder', path = '{self.folder}' }}"
        files = len(list(self.folder.rglob("*.*")))
        return self._streams.start(source, steps, on_error, cache, cache_dir, samples=files, **sharing)


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write each file into the class of its first letter."""
    for name, data in files.items():
        (folder / name[0]).mkdir(parents=True, exist_ok=True)
        (folder / name[0] / f"{name}.{'png' if 'png' in name else 'jpg'}").write_bytes(data)


def assert_same(one, other) -> None:
    """Compare the bad samples and all rows of two calls of ``fill``."""
    assert one[0] == other[0]
    for name, rows in other[1].items():
        np.testing.assert_array_equal(one[1][name], rows, strict=True)


@pytest.mark.parametrize(("steps", "together"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_rows_made_by_one_call_equal_those_made_one_by_one(worker, tmp_path, steps, together, on_disk):
    """The first epoch finds the headers and the points; unusual files are made one by one."""
    alone = worker.start(steps, cache="off")
    stream = worker.start(steps, cache_dir=str(tmp_path) if on_disk else "")

    for epoch in range(3):
        assert_same(fill(stream, epoch=epoch), fill(alone, epoch=epoch))

    assert worker.made == [together] * 2


@pytest.mark.parametrize("steps", OTHER_STEPS.values(), ids=OTHER_STEPS)
def test_steps_that_take_more_than_one_call_make_rows_one_by_one(worker, steps):
    alone, stream = worker.start(steps, cache="off"), worker.start(steps)
    for epoch in range(2):
        assert_same(fill(stream, epoch=epoch), fill(alone, epoch=epoch))
    assert worker.made == []


def test_many_files_are_made_in_portions(worker, monkeypatch):
    monkeypatch.setattr(filling, "FILES_AT_ONCE", 3)
    alone, stream = worker.start(cache="off"), worker.start()
    fill(stream)
    assert_same(fill(stream, 1, 6, epoch=1), fill(alone, 1, 6, epoch=1))
    assert worker.made == [[1, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("left", "made", "reports"),
    [
        (60, [[0, 1, 3], [4, 5, 6]], [[5, 6, 7, 8]]),
        (2, [[0], [1], [3], [4, 5, 6]], [[5, 6, 7], [8]]),
        (0, [[0], [1], [3], [4, 5, 6]], [[5], [6], [7], [8]]),
    ],
)
def test_rows_of_short_chunks_are_made_by_one_call_until_a_report_is_due(worker, monkeypatch, left, made, reports):
    """Sample 2 is made alone. A row takes a second, and a report is due in ``left`` seconds."""
    monkeypatch.setattr(filling, "FILES_AT_ONCE", 4)
    alone, stream = worker.start(cache="off"), worker.start()
    fill(stream)
    monkeypatch.setattr(stopwatch.Stopwatch, "left_s", lambda _stopwatch, rows: left - rows)
    chunks = [
        Chunk(order, 1, 1, 0, [(row, count)], [])
        for order, (row, count) in enumerate([(0, 1), (1, 2), (3, 1), (4, 3)], 5)
    ]
    page = memoryview(bytearray(stream.layout.slot_bytes))

    told = list(stream.answer(FillChunks(1, chunks, is_packed=False), {1: (page, {})}))

    assert worker.made == made
    assert [report.orders for report in told] == reports
    assert RowChecksums(stream.layout).wrong_rows(page, 0, 7) == []
    expected = fill(alone, 0, 7, epoch=1)[1]
    for name, array in slot_arrays(page, stream.layout).items():
        np.testing.assert_array_equal(array[:7], expected[name], strict=True)


def test_copies_of_a_batch_have_other_crops_whoever_makes_them(worker):
    """Several copies in one message, too; the first are the rows of a stream without repeats."""
    once, alone = worker.start(cache="off"), worker.start(cache="off", repeats=3)
    stream = worker.start(repeats=3)
    fill(stream)
    copies = [fill(alone, epoch=1, step=step) for step in range(3)]
    pages = {slot: (memoryview(bytearray(stream.layout.slot_bytes)), {}) for slot in range(3)}
    chunks = [Chunk(5 + step, step, 1, step, [(0, 7)], []) for step in range(3)]

    assert_same(copies[0], fill(once, epoch=1))
    assert len({copy[1]["image"].tobytes() for copy in copies}) == 3
    assert len({copy[1]["index"].tobytes() for copy in copies}) == 1
    for step, copy in enumerate(copies):
        assert_same(fill(stream, epoch=1, step=step), copy)
    for _told in stream.answer(FillChunks(1, chunks, is_packed=False), pages):
        pass
    for (page, _arrays), copy in zip(pages.values(), copies, strict=True):
        for name, array in slot_arrays(page, stream.layout).items():
            np.testing.assert_array_equal(array[:7], copy[1][name][:7], strict=True)
    assert len(worker.made) > 3


def test_a_bad_sample_has_one_substitute_in_all_copies_with_other_crops(worker):
    (worker.folder / "a" / "a.jpg").write_bytes(b"")
    alone, stream = (worker.start(on_error="substitute", cache=cache, repeats=3) for cache in ("off", "points"))
    fill(stream, epoch=2)
    copies = [fill(alone, epoch=2, step=step) for step in range(3)]

    for step, copy in enumerate(copies):
        assert_same(fill(stream, epoch=2, step=step), copy)
    assert {copy[0][0] for copy in copies} == {0}
    (other,) = {int(copy[1]["index"][0]) for copy in copies}
    assert other != 0
    assert len({copy[1]["image"][0].tobytes() for copy in copies}) == 3


CHANGES = {
    "another length": jpeg(photo(300, 400, 9)),
    "another size": jpeg(photo(290, 400, 9)),
    "longer": PHOTOGRAPH + PHOTOGRAPH,
    "cut off": PHOTOGRAPH[:9000],
    "a hole": PHOTOGRAPH[:3000] + bytes(3000) + PHOTOGRAPH[6000:],
    "empty": b"",
    "too large for the memory": jpeg(photo(1500, 2000, 9), 100, "444"),
}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("data", CHANGES.values(), ids=CHANGES)
def test_a_file_that_changed_since_its_header_was_kept_is_made_as_without_a_cache(worker, data):
    """Whether good or bad, with the same reason; no other row is affected."""
    alone, stream = worker.start(cache="off"), worker.start()
    fill(stream)
    (worker.folder / "a" / "a.jpg").write_bytes(data)

    for epoch in (1, 2):
        assert_same(fill(stream, epoch=epoch), fill(alone, epoch=epoch))
    assert worker.made[0] == USUAL[1:]


def test_a_removed_file_and_a_link_in_its_place_are_bad_or_good_as_without_a_cache(worker):
    alone, stream = worker.start(cache="off"), worker.start()
    fill(stream)
    (worker.folder / "a" / "a.jpg").unlink()
    (worker.folder / "b" / "b.jpg").unlink()
    (worker.folder / "b" / "b.jpg").symlink_to(worker.folder / "e" / "e-small.jpg")
    made = fill(stream, epoch=1)
    assert_same(made, fill(alone, epoch=1))
    assert made[0] == [0]


def test_an_image_that_is_larger_than_allowed_is_bad_as_without_a_cache(worker):
    """Another stream, with other limits, may have kept its header."""
    small = CROP.replace("'decode'", "'decode', max_pixels = 100000")
    short = CROP.replace("'decode'", "'decode', max_bytes = 20000")
    for steps in (small, short):
        alone = worker.start(steps, cache="off")
        fill(worker.start())
        stream = worker.start(steps, shares_cache=True)
        assert_same(fill(stream), fill(alone))
        assert 6 in fill(stream, epoch=1)[0]


def test_a_quarantined_sample_is_not_read_among_many(worker):
    stream = worker.start()
    fill(stream)
    stream.quarantined.add(4)
    assert fill(stream, epoch=1)[0] == [4]
    assert worker.made == [[0, 1, 3, 5, 6]]


def test_work_counts_the_time_and_the_bytes_of_rows_made_by_one_call(worker):
    """Reading, decoding and resampling each take some of the time that the worker was busy."""
    stream = worker.start()
    fill(stream)
    page = memoryview(bytearray(stream.layout.slot_bytes))
    order = FillChunks(1, [Chunk(9, 1, 1, 0, [(0, 2), (3, 4)], [])], is_packed=False)
    (done,) = stream.answer(order, {1: (page, {})})
    work = Work(*done.work)

    assert worker.made == [USUAL]
    assert work.read_bytes == sum(len(data) for name, data in photographs().items() if name != "c-turned")
    read_us, *parts_us = work.parts_us
    assert read_us > 0
    assert sum(part_us > 0 for part_us in parts_us) == 2  # decode and crop
    assert read_us + sum(parts_us) <= work.busy_us
    assert 0 < work.read_cpu_us < work.cpu_us
    assert work.usual_us > 0


# --- the note -------------------------------------------------------------------------------------


def test_the_note_names_the_sample_that_a_call_waits_for(tmp_path):
    """A file that hangs is thus blamed on its own sample, as if it were made alone."""
    os.mkfifo(tmp_path / "hangs.jpg")
    (tmp_path / "good.jpg").write_bytes(PHOTOGRAPH)
    note = bytearray(NOTE.size)
    target = np.zeros((32, 40, 3), np.uint8)
    header = extension.probe(PHOTOGRAPH)

    def task(name, row):
        place = -1, bytes(tmp_path / name), os.O_RDONLY, 1 << 20, 0
        return (place, header, 8, (0, 0, 300, 400), None, target, True, False, False, 70 + row, row, 100 + row)

    results = np.full((3, 7), -1, np.int64)
    tasks = [task("good.jpg", 4), task("hangs.jpg", 5), task("good.jpg", 6)]
    arguments = (tasks, "rgb", bytearray(1 << 20), bytearray(1 << 20), note, results)
    calling = threading.Thread(target=extension.make_rows, args=arguments)
    calling.start()
    wait_until(lambda: NOTE.unpack_from(note)[1] == 6, "the call has reached the second file")

    assert NOTE.unpack_from(note) == (75, 6, 105)
    os.close(os.open(tmp_path / "hangs.jpg", os.O_WRONLY))
    calling.join()
    assert results[:, 0].tolist() == [1, 0, 1]
    assert NOTE.unpack_from(note) == (76, 7, 106)
    assert target.any()


@pytest.mark.parametrize(
    "changed",
    [
        {"color": "cmyk"},
        {"note": bytearray(23)},
        {"results": np.zeros((1, 6), np.int64)},
        {"task": {2: 3}},
        {"task": {5: None}},
        {"task": {5: np.zeros((4, 4, 1), np.uint8)}},
    ],
    ids=["color", "short note", "short results", "scale", "no target", "other channels"],
)
def test_arguments_that_do_not_fit_are_refused(changed):
    place = (-1, b"/none", os.O_RDONLY, 100, 0)
    parts = [place, extension.probe(PHOTOGRAPH), 8, (0, 0, 9, 9), None, np.zeros((4, 4, 3), np.uint8)]
    for number, value in changed.get("task", {}).items():
        parts[number] = value
    with pytest.raises(ValueError):  # noqa: PT011  each has its own words
        extension.make_rows(
            [(*parts, False, False, False, 0, 0, 0)],
            changed.get("color", "rgb"),
            bytearray(100),
            bytearray(100),
            changed.get("note", bytearray(24)),
            changed.get("results", np.zeros((1, 7), np.int64)),
        )


# --- the record -----------------------------------------------------------------------------------


def test_a_record_has_the_header_of_a_file_beside_its_points():
    header = ("JPEG", 300, 400, 1, 3, 12345, 0, 623)
    record = with_headers(with_points(NO_VALUES, {"image": b"points"}), {"image": header})
    facts, parts = memoryview(record.facts), memoryview(b"".join(record.values))

    found, points = header_and_points(facts, parts, "image")

    assert tuple(found) == header
    assert bytes(points) == b"points"
    assert not has_points(points)
    assert header_and_points(facts, parts, "mask") == (None, None)
    assert unpack(facts, parts) == ({}, {"image": b"points"})
    assert not has_values(facts)
