"""Rows that a worker makes together equal those made one by one, also with bad samples."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from threading import Thread

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from batchd.core.work import Work
from batchd.data.functions.load import FunctionUnusable
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import Cast, Clip, Drop, OneHot, Rename, Scale
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.storage import rows as stored_rows
from batchd.data.storage.rows import RowsFile
from batchd.worker import filling, loop, stopwatch
from batchd.worker import messages as orders
from batchd.worker.loop import WorkerStream
from batchd.worker.messages import MANY_ROWS, NOTE, Chunk, FillChunks
from batchd.worker.process import NoteMemory
from batchd.worker.sample_maker import SampleMaker
from batchd_wire.channel import receive_message, send_message
from batchd_wire.codec import Message
from batchd_wire.fields import layout_from_wire
from batchd_wire.slot import RowChecksums
from batchd_wire.views import slot_arrays
from support.images import encode, photo
from support.waiting import PATIENCE_S
from support.worker_streams import WorkerStreams, fill, worker_streams

COLUMNS = (Column("label", dtype="int64"), Column("x", dtype="uint8", shape=(3, 2)), Column("y", dtype="float32"))
SAMPLES = 12
STEPS = {
    "no step": (),
    "another type": (Cast(field="x", dtype="float32"),),
    "a formula": (Scale(field="x", factor=0.5, offset=-3.0, dtype="float32"), Clip(field="x", min=0.0, max=40.0)),
    "classes": (OneHot(field="label", classes=20, dtype="uint8"),),
    "one field less": (Drop(fields=("x",)),),
    "another name": (Rename(field="y", to="z"), Scale(field="z", factor=2.0, dtype="float64")),
    "names exchanged": (Rename(field="label", to="w"), Rename(field="y", to="label"), Rename(field="w", to="y")),
}


def values() -> dict[str, np.ndarray]:
    """Return the values of all samples, by column."""
    return {
        "label": np.arange(SAMPLES),
        "x": (np.arange(SAMPLES * 6) % 251).astype("uint8").reshape(SAMPLES, 3, 2),
        "y": np.linspace(-1, 1, SAMPLES, dtype="float32"),
    }


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_each_step_makes_of_many_samples_what_it_makes_of_each(steps):
    pipeline = Pipeline(COLUMNS, steps, seed=0)
    assert pipeline.runs_rows
    rows, single = (
        {name: np.full((SAMPLES, *one.fixed_shape), 77, one.dtype) for name, one in pipeline.columns.items()}
        for _ in range(2)
    )

    pipeline.run_rows(
        lambda made: [
            chunk[name].__setitem__(..., part)
            for name, all_ in values().items()
            for chunk, part in zip(made, (all_[:5], all_[5:]), strict=True)
        ],
        [{name: array[part] for name, array in rows.items()} for part in (slice(5), slice(5, None))],
        0,
    )

    for sample in range(SAMPLES):
        one = {name: all_[sample] for name, all_ in values().items()}
        pipeline.run(one, 0, sample, 0, {name: array[sample, ...] for name, array in single.items()})
    for name, array in single.items():
        np.testing.assert_array_equal(rows[name], array, strict=True)


def test_a_number_that_one_sample_must_not_have_is_bad_among_many():
    pipeline = Pipeline(COLUMNS, (OneHot(field="label", classes=SAMPLES - 1),), seed=0)
    rows = {name: np.zeros((SAMPLES, *one.fixed_shape), one.dtype) for name, one in pipeline.columns.items()}
    with pytest.raises(SampleUndecodable):
        pipeline.run_rows(lambda made: made[0].update(values()), [rows], 0)


# --- a worker -------------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Make a worker's stream over this folder, and count the rows that it makes at once."""
    at_once = []
    monkeypatch.setattr(stopwatch, "REPORT_AFTER_S", 60.0)
    make_rows = SampleMaker.make_rows
    monkeypatch.setattr(
        SampleMaker,
        "make_rows",
        lambda maker, samples, rows, begin: at_once.append(make_rows(maker, samples, rows, begin)) or at_once[-1],
    )

    with worker_streams(tmp_path) as streams:
        yield lambda *arguments, **keys: (streams.start(*arguments, **keys), at_once)


def files(folder: Path, **changes: np.ndarray) -> str:
    """Make a source of the values above, or of others, with a file for each."""
    for name, array in {**values(), **changes}.items():
        np.save(folder / f"{name}.npy", array)
    names = ", ".join(f"{name} = '{name}.npy'" for name in values())
    return f"{{ type = 'npy', root = '{folder}', arrays = {{ {names} }} }}"


def test_rows_of_arrays_are_made_at_once(worker, tmp_path):
    """This works for a part of a batch, too, and only these rows are written."""
    stream, at_once = worker(files(tmp_path), "{ op = 'scale', field = 'x', factor = 0.5, dtype = 'float32' }")
    bad, rows = fill(stream, 3, 8)
    assert (bad, at_once) == ([], [True])
    np.testing.assert_array_equal(rows["label"], np.arange(3, 11))
    np.testing.assert_array_equal(rows["index"], np.arange(3, 11))
    np.testing.assert_array_equal(rows["x"], values()["x"][3:11] * np.float32(0.5), strict=True)
    np.testing.assert_array_equal(rows["y"], values()["y"][3:11])


def test_windows_of_tokens_are_made_at_once(worker, tmp_path):
    """They overlap in the file, and a step may change their type."""
    (tmp_path / "a.bin").write_bytes(np.arange(3 * SAMPLES + 1, dtype=np.uint16).tobytes())
    source = f"{{ type = 'tokens', path = '{tmp_path}/a.bin', dtype = 'uint16', length = 4, overlap = 1 }}"
    stream, at_once = worker(source, "{ op = 'cast', field = 'tokens', dtype = 'int64' }")
    bad, rows = fill(stream)
    assert (bad, at_once) == ([], [True])
    np.testing.assert_array_equal(rows["tokens"], np.arange(SAMPLES)[:, None] * 3 + np.arange(4), strict=True)


def test_a_bad_sample_among_them_costs_no_other_one(worker, tmp_path):
    """The rows are then made one by one, and every other sample keeps its own values."""
    stream, at_once = worker(files(tmp_path), "{ op = 'one_hot', field = 'label', classes = 11 }", "mask")
    bad, rows = fill(stream)
    assert (bad, at_once) == ([11], [False])
    assert rows["valid"].tolist() == [True] * 11 + [False]
    np.testing.assert_array_equal(rows["label"], np.eye(12, 11))
    np.testing.assert_array_equal(rows["x"][:11], values()["x"][:11])
    assert fill(stream, 0, 11)[0] == []
    assert at_once == [False, True]


@pytest.mark.parametrize("change", [lambda file: os.utime(file, ns=(1, 1)), lambda file: os.truncate(file, 140)])
def test_a_file_that_is_another_one_by_now_makes_no_good_row(worker, tmp_path, change):
    stream, at_once = worker(files(tmp_path), on_error="mask")
    fill(stream, 0, 1)
    change(tmp_path / "x.npy")
    bad, _rows = fill(stream)
    assert (bad, at_once) == ([*range(SAMPLES)], [True, False])


def test_a_quarantined_sample_is_not_read(worker, tmp_path):
    """Its bytes may be what killed the worker."""
    stream, at_once = worker(files(tmp_path), on_error="mask")
    stream.quarantined.add(4)
    assert (fill(stream)[0], at_once) == ([4], [])
    assert (fill(stream, 5, 7)[0], at_once) == ([], [True])


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.asfortranarray(values()["x"]), "Fortran order"),
        (values()["y"].astype(">f4"), None),
        (np.arange(12) > 3, None),
    ],
    ids=["in Fortran order", "big-endian", "bool"],
)
def test_any_array_gives_its_rows(worker, tmp_path, array, why):
    """Arrays in Fortran order are read one by one, because each sample is scattered."""
    stream, at_once = worker(files(tmp_path, x=array))
    _bad, rows = fill(stream)
    np.testing.assert_array_equal(rows["x"], array)
    assert at_once == ([] if why else [True])


@pytest.mark.usefixtures("scans_here")
def test_rows_of_numbers_in_a_table_are_made_at_once(worker, tmp_path):
    """The numbers are in the index."""
    parquet.write_table(pa.table({"y": values()["y"], "label": values()["label"]}), tmp_path / "a.parquet")
    fields = "{ y = 'float32', label = 'int64' }"
    stream, at_once = worker(f"{{ type = 'parquet', root = '{tmp_path}', shards = ['a.parquet'], fields = {fields} }}")
    _bad, rows = fill(stream, 2, 9)
    np.testing.assert_array_equal(rows["y"], values()["y"][2:11], strict=True)
    np.testing.assert_array_equal(rows["label"], np.arange(2, 11))
    assert at_once == [True]


def test_many_rows_are_made_in_portions_and_the_note_tells_each(worker, tmp_path, monkeypatch):
    """A slow worker then does not count as hung, and a bad sample affects only its portion."""
    monkeypatch.setattr(filling, "ROWS_AT_ONCE", 5)
    noted = []
    monkeypatch.setattr(NoteMemory, "take_many", lambda _note, row: noted.append(row))
    stream, at_once = worker(files(tmp_path), "{ op = 'one_hot', field = 'label', classes = 11 }", "mask")
    bad, rows = fill(stream)
    assert (noted, at_once, bad) == ([0, 5, 10], [True, True, False], [11])
    np.testing.assert_array_equal(rows["x"][:11], values()["x"][:11])


# --- a cache --------------------------------------------------------------------------------------

IMAGES = {
    "pixels": "{ op = 'decode' }, { op = 'resize', size = [9, 7] }",
    "few grey pixels": "{ op = 'decode', color = 'gray' }, { op = 'resize', size = [3, 3] }",
    "many pixels": "{ op = 'decode' }, { op = 'resize', size = [60, 50] }",
    "planes": "{ op = 'decode' }, { op = 'resize', size = [9, 7] }, { op = 'layout' }",
    "floating-point numbers": "{ op = 'decode' }, { op = 'resize', size = [9, 7] }, { op = 'normalize' }",
    "and planes of them": "{ op = 'decode' }, { op = 'resize', size = [9, 7] }, { op = 'normalize', dtype = 'float16' }, "
    "{ op = 'layout' }",
    "steps on numbers": "{ op = 'decode' }, { op = 'resize', size = [9, 7] }, { op = 'to', dtype = 'float32' }, "
    "{ op = 'scale', field = 'label', factor = 0.5, dtype = 'float32' }, { op = 'rename', field = 'label', to = 'half' }",
}


@pytest.fixture
def images(tmp_path):
    """Make a table of images; the records of their labels differ in length."""
    for sample in range(SAMPLES):
        (tmp_path / f"{sample}.png").write_bytes(encode(photo(20 + sample, 24, seed=sample), ".png"))
    lines = [f"{sample}.png,{29 * sample}" for sample in range(SAMPLES)]
    (tmp_path / "images.csv").write_text("\n".join(["file,label", *lines, ""]))
    return f"{{ type = 'csv', path = '{tmp_path}/images.csv', image = 'file', fields = {{ label = 'int64' }} }}"


@pytest.fixture(params=["memory", "disk"])
def cached(request, worker, tmp_path):
    """Make a worker's stream with a cache of decoded samples."""
    cache_dir = str(tmp_path) if request.param == "disk" else ""
    return lambda source, steps, on_error="fail": worker(source, steps, on_error, cache="decoded", cache_dir=cache_dir)


@pytest.mark.parametrize("steps", IMAGES.values(), ids=IMAGES)
def test_cached_samples_are_made_at_once(cached, images, steps):
    """They have the bytes of the decoded samples, and count as cache hits."""
    stream, at_once = cached(images, steps)
    _bad, decoded = fill(stream)
    kept = {name: array.copy() for name, array in decoded.items()}
    for _ in range(2):  # the second time, the layout of a record is known
        bad, rows = fill(stream)
        assert bad == []
        for name, array in kept.items():
            np.testing.assert_array_equal(rows[name], array, strict=True)
    fill(stream, 3, 5)
    assert at_once == [False, True, True, True]
    assert rows["index"].tolist() == [*range(SAMPLES)]


def test_cached_samples_that_are_made_at_once_are_hits(cached, images):
    stream, _at_once = cached(images, IMAGES["pixels"])
    hits = []
    for _ in range(2):
        page = memoryview(bytearray(stream.layout.slot_bytes))
        (done,) = stream.answer(
            FillChunks(1, [Chunk(1, 1, 0, 0, [(0, SAMPLES)], [])], is_packed=False), {1: (page, {})}
        )
        work = Work(*done.work)
        hits.append((work.cache_hits, work.cache_misses, work.read_bytes > 0))
    assert hits == [(0, SAMPLES, True), (SAMPLES, 0, False)]


def test_a_sample_that_the_cache_lacks_costs_no_other_one(cached, images, tmp_path):
    """That sample is read, and all are made one by one, since it may be a bad one."""
    stream, at_once = cached(images, IMAGES["pixels"], "mask")
    (tmp_path / "4.png").write_bytes(b"no image")
    assert (fill(stream)[0], fill(stream)[0], at_once) == ([4], [4], [False, False])
    (tmp_path / "4.png").write_bytes((tmp_path / "5.png").read_bytes())
    assert fill(stream)[0] == []
    bad, rows = fill(stream)
    assert (bad, at_once[2:]) == ([], [False, True])
    np.testing.assert_array_equal(rows["image"][4], rows["image"][5])


def test_a_quarantined_sample_of_a_cache_is_not_made(cached, images):
    stream, at_once = cached(images, IMAGES["pixels"], "mask")
    fill(stream)
    stream.quarantined.add(4)
    assert (fill(stream)[0], at_once) == ([4], [False])


def test_numbers_that_are_bad_after_the_cut_are_found_one_by_one(cached, images):
    """The step runs on all samples, then on each, so that the error belongs to its sample."""
    steps = f"{IMAGES['floating-point numbers']}, {{ op = 'one_hot', field = 'label', classes = 300 }}"
    stream, at_once = cached(images, steps, "mask")
    assert (fill(stream)[0], fill(stream)[0], at_once) == ([11], [11], [False, False])
    assert (fill(stream, 0, 11)[0], at_once[2:]) == ([], [True])


@pytest.mark.parametrize("at", ["sample", "facts", "values"])
def test_a_record_that_is_damaged_on_disk_is_made_from_its_file_again(worker, images, tmp_path, at):
    """The checksum detects any damage, and the sample is stored in the cache again."""
    stream, at_once = worker(images, IMAGES["pixels"], cache="decoded", cache_dir=str(tmp_path))
    _bad, decoded = fill(stream)
    kept = decoded["image"].copy()
    (path,) = tmp_path.glob("*.cache")
    content = bytearray(path.read_bytes())
    start = int.from_bytes(content[4096 + 8 * 5 :][:8], "little")
    content[start + {"sample": 0, "facts": 30, "values": 80}[at]] ^= 4
    with path.open("r+b") as file:
        file.write(content)

    for _ in range(2):
        bad, rows = fill(stream)
        assert bad == []
        np.testing.assert_array_equal(rows["image"], kept)
    assert at_once == [False, False, True]


def test_numbers_that_a_cache_keeps_as_they_are_come_at_once_too(worker, tmp_path):
    """A record holds several arrays, one after the other."""
    stream, at_once = worker(
        files(tmp_path), "{ op = 'scale', field = 'x', factor = 0.5, dtype = 'float32' }", cache="encoded"
    )
    for _ in range(2):
        _bad, rows = fill(stream)
        np.testing.assert_array_equal(rows["x"], values()["x"] * np.float32(0.5), strict=True)
        np.testing.assert_array_equal(rows["y"], values()["y"], strict=True)
        np.testing.assert_array_equal(rows["label"], values()["label"], strict=True)
    assert at_once == [False, True]


# --- rows of a file -------------------------------------------------------------------------------


@pytest.fixture(params=["built", "not built"])
def read_rows(request, monkeypatch):
    """Read rows with the extension, and without."""
    if request.param == "not built":
        monkeypatch.setattr(stored_rows, "IS_BUILT", False)
    elif not stored_rows.IS_BUILT:
        pytest.skip("the extension is not built")
    return stored_rows.read_rows


@pytest.fixture
def file(tmp_path):
    """Open a file of 100 bytes that count up."""
    (tmp_path / "file").write_bytes(bytes(range(100)))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_rows_are_read_to_their_places(read_rows, file):
    """Rows come from any place, one of them twice; other places of the target stay unchanged."""
    rows = np.full((4, 10), 255, np.uint8)
    count = read_rows(file, numbers(90, 3, 3), numbers(2, 0, 3), rows.reshape(-1).data, 10)
    assert count == 3
    expected = [[*range(3, 13)], [255] * 10, [*range(90, 100)], [*range(3, 13)]]
    assert rows.tolist() == expected


@pytest.mark.parametrize("start", [91, 100, 1 << 40])
def test_a_row_behind_the_end_of_the_file_ends_the_reading(read_rows, file, start):
    rows = np.zeros((3, 10), np.uint8)
    assert read_rows(file, numbers(0, start, 10), numbers(0, 1, 2), rows.reshape(-1).data, 10) == 1


def test_a_file_that_cannot_be_read_is_an_error_of_the_system(read_rows):
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_rows(-1, numbers(0), numbers(0), np.zeros(10, np.uint8).data, 10)


@pytest.mark.parametrize(
    ("starts", "places", "size"),
    [
        (numbers(0, 0), numbers(0), 10),
        (numbers(0), numbers(3), 10),
        (numbers(0), numbers(-1), 10),
        (numbers(0), numbers(0), 0),
        (numbers(0), numbers(0), -10),
        (numbers(0), numbers(0), 31),
        (numbers(0), numbers(0), 1 << 62),
        (numbers(0).view(np.uint8)[:7], numbers(0).view(np.uint8)[:7], 10),
    ],
    ids=["fewer places", "beyond the array", "before it", "no byte", "negative", "too long", "far too long", "cut"],
)
def test_the_extension_writes_nowhere_else_than_into_the_array(file, starts, places, size):
    if not stored_rows.IS_BUILT:
        pytest.skip("the extension is not built")
    for read, what in ((stored_rows._rows.read_rows, file), (stored_rows._rows.copy_rows, bytes(100))):
        with pytest.raises(ValueError, match="each place is a row"):
            read(what, starts, places, np.zeros(30, np.uint8), size)


# --- rows of a file in memory ---------------------------------------------------------------------

MAPPED_BYTES = 16 * 4096


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    """Open a file whose rows, of a page each, are copied from a mapping after two readings."""
    if not stored_rows.IS_BUILT:
        pytest.skip("the extension is not built")
    monkeypatch.setattr(stored_rows, "QUICK_READS", 2)
    monkeypatch.setattr(stored_rows, "SLOW_NS", 60_000_000_000)
    path = tmp_path / "pages"
    path.write_bytes(bytes(at // 4096 + 1 for at in range(MAPPED_BYTES)))
    descriptor = os.open(path, os.O_RDONLY)
    rows = RowsFile(descriptor)
    yield rows, path
    rows.close()
    os.close(descriptor)


def pages(file: RowsFile, *numbers_: int) -> tuple[int, list[int]]:
    """Read these pages: (the number that were read, the first byte of each)."""
    rows = np.zeros((len(numbers_), 4096), np.uint8)
    count = file.read(numbers(*numbers_) * 4096, np.arange(len(numbers_)), rows.reshape(-1).data, 4096)
    assert (rows == rows[:, :1]).all()
    return count, rows[:, 0].tolist()


def test_a_file_that_is_in_memory_is_mapped_after_some_readings(mapped):
    file, _path = mapped
    found = [(pages(file, 3, 15, 0), file.is_mapped) for _ in range(3)]
    assert found == [((3, [4, 16, 1]), False), ((3, [4, 16, 1]), True), ((3, [4, 16, 1]), True)]


def test_a_file_that_has_to_be_waited_for_is_not_mapped(mapped, monkeypatch):
    file, _path = mapped
    monkeypatch.setattr(stored_rows, "SLOW_NS", -60_000_000_000)
    assert [(pages(file, 3), file.is_mapped) for _ in range(4)] == [((1, [4]), False)] * 4


def test_a_mapped_file_is_read_again_once_a_page_is_not_in_memory(mapped, monkeypatch):
    file, _path = mapped
    for _ in range(2):
        pages(file, 3)
    monkeypatch.setattr(stored_rows._rows, "copy_rows", lambda _mapped, starts, *_others: (len(starts), 1))
    pages(file, 3)
    assert not file.is_mapped
    assert pages(file, 3) == (1, [4])


def test_a_long_file_is_not_mapped(mapped, monkeypatch):
    """Its page tables would take memory in each worker."""
    file, _path = mapped
    monkeypatch.setattr(stored_rows, "MAPPED_BYTES_MAX", MAPPED_BYTES - 1)
    assert [(pages(file, 3), file.is_mapped) for _ in range(4)] == [((1, [4]), False)] * 4


@pytest.mark.parametrize("length", [0, 4096, 3 * 4096 + 1])
def test_a_mapped_file_that_was_cut_gives_the_rows_before_the_cut(mapped, length):
    """The kernel sends SIGBUS for the page behind the end, and the process goes on."""
    file, path = mapped
    for _ in range(2):
        pages(file, 3)
    os.truncate(path, length)
    whole = length // 4096
    assert pages(file, *range(whole), 9)[0] == whole
    assert not file.is_mapped
    assert pages(file, *range(whole), 9)[0] == whole


def test_a_row_beyond_a_mapping_is_not_copied(mapped):
    file, _path = mapped
    for _ in range(2):
        pages(file, 3)
    assert pages(file, 15, 16, 0)[0] == 1
    for _ in range(2):
        pages(file, 3)
    assert file.is_mapped
    rows = np.zeros(4096, np.uint8)
    assert file.read(numbers(-1), numbers(0), rows.data, 4096) == 0


def test_a_sigbus_elsewhere_still_ends_the_process(mapped):
    """The guard is there for one call."""
    _file, path = mapped
    program = (
        "import mmap, os, sys\n"
        "import numpy as np\n"
        "from batchd.data.storage import _rows\n"
        "file = os.open(sys.argv[1], os.O_RDWR)\n"
        "mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ)\n"
        "os.truncate(file, 0)\n"
        "one = np.zeros(1, np.int64)\n"
        "assert _rows.copy_rows(mapped, one, one, bytearray(1), 1)[0] == 0\n"
        "print('guarded', flush=True)\n"
        "mapped[0]\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, check=False)
    assert (done.stdout, done.returncode) == (b"guarded\n", -signal.SIGBUS)


# --- several chunks in one message ----------------------------------------------------------------


def message_of(*chunks: tuple[int, int]) -> FillChunks:
    """Make chunks of the first batch, by (first row, rows), each with a slot of its own."""
    made = [Chunk(10 + at, at, 0, 0, [rows], []) for at, rows in enumerate(chunks)]
    return FillChunks(1, made, is_packed=False)


class LoopOfWorker:
    """A worker's loop with streams 1 and 2 over the same files, and four slots."""

    def __init__(self, streams: WorkerStreams, source: str) -> None:
        messages = [streams.serve(source, on_error="mask", number=number) for number in (1, 2)]
        self.layout = layout_from_wire(messages[0][0].layout)
        self._note = streams.note
        self._slots = [os.memfd_create("slot") for _ in range(4)]
        for slot in self._slots:
            os.posix_fallocate(slot, 0, self.layout.slot_bytes)
        slots = [(orders.UseSlot(at, self.layout.slot_bytes), [slot]) for at, slot in enumerate(self._slots)]
        self._begin = [*messages, *slots]
        self._opened = [index for _message, (index,) in messages] + self._slots

    def close(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)

    def answers(self, *messages: Message) -> list[orders.ChunksFilled]:
        """Run the loop until these messages are answered, and the daemon is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            for message, descriptors in [*self._begin, *((message, []) for message in messages)]:
                send_message(ours, message, descriptors)
            for stream in (1, 2):
                send_message(ours, orders.ForgetStream(stream))
            ours.settimeout(PATIENCE_S)
            worker = Thread(target=loop.WorkerLoop(theirs, self._note).run)
            worker.start()
            done: list[orders.ChunksFilled] = []
            left = sum(len(message.chunks) for message in messages if isinstance(message, FillChunks))
            while left:
                message, _none = receive_message(ours, orders.TO_DAEMON_FROM_WORKER)
                if isinstance(message, orders.ChunksFilled):
                    done.append(message)
                    left -= len(message.orders)
            ours.shutdown(socket.SHUT_WR)
            worker.join()
        return done

    def arrays(self, slot: int) -> dict[str, np.ndarray]:
        """Return the fields of a slot."""
        page = os.pread(self._slots[slot], self.layout.slot_bytes, 0)
        return slot_arrays(memoryview(bytearray(page)), self.layout)


@pytest.fixture
def worker_loop(tmp_path):
    """Make a worker's loop over arrays."""
    with worker_streams(tmp_path) as streams, closing(LoopOfWorker(streams, files(tmp_path))) as worker_loop:
        yield worker_loop


def slots_of(stream: WorkerStream, count: int) -> dict[int, tuple[memoryview, dict[str, np.ndarray]]]:
    return {at: (memoryview(bytearray(stream.layout.slot_bytes)), {}) for at in range(count)}


def test_small_chunks_are_reported_together(worker, tmp_path):
    """Each chunk has its slot, and the report has all of their time."""
    stream, _at_once = worker(files(tmp_path))
    slots = slots_of(stream, 3)
    (done,) = stream.answer(message_of((0, 4), (4, 4), (8, 4)), slots)

    assert (done.orders, done.bad, done.hopeless) == ([10, 11, 12], [], "")
    for at in range(3):
        rows = slice(4 * at, 4 * at + 4)
        np.testing.assert_array_equal(slot_arrays(slots[at][0], stream.layout)["x"][rows], values()["x"][rows])


@pytest.mark.parametrize("parts", [1, 2])
def test_short_chunks_are_made_together_and_the_note_tells_each(worker, tmp_path, monkeypatch, parts):
    """A worker that is killed meanwhile is then suspected with the right order."""
    noted = []
    take_many = NoteMemory.take_many
    monkeypatch.setattr(
        NoteMemory,
        "take_many",
        lambda note, row: take_many(note, row) or noted.append(NOTE.unpack_from(note.memory)[:2]),
    )
    if parts == 1:
        source = files(tmp_path)
    else:
        for name, part in (("a", slice(7)), ("b", slice(7, None))):
            (tmp_path / f"{name}.bin").write_bytes(values()["x"][part].tobytes())
        record = "{ x = 'uint8[3,2]' }"
        source = f"{{ type = 'raw', root = '{tmp_path}', files = ['*.bin'], record = {record} }}"
    stream, at_once = worker(source)
    slots = slots_of(stream, 3)
    (done,) = stream.answer(message_of((0, 4), (4, 6), (10, 2)), slots)
    assert (done.orders, at_once) == ([10, 11, 12], [True])
    assert list(dict.fromkeys(noted)) == [(10, MANY_ROWS + 1), (11, MANY_ROWS + 5), (12, MANY_ROWS + 11)]
    for at, rows in enumerate((slice(0, 4), slice(4, 10), slice(10, 12))):
        arrays = slot_arrays(slots[at][0], stream.layout)
        np.testing.assert_array_equal(arrays["x"][rows], values()["x"][rows])
        np.testing.assert_array_equal(arrays["index"][rows], np.arange(SAMPLES)[rows])
        assert RowChecksums(stream.layout).wrong_rows(slots[at][0], rows.start, rows.stop - rows.start) == []


def test_chunks_are_reported_when_some_time_has_passed(worker, tmp_path, monkeypatch):
    """A trainer waits for the first of them. Rows of several chunks are read within that time."""
    stream, _at_once = worker(files(tmp_path))
    monkeypatch.setattr(stopwatch, "REPORT_AFTER_S", 0.0)
    (done,) = stream.answer(message_of((0, 4), (4, 4), (8, 4)), slots_of(stream, 3))
    assert done.orders == [10, 11, 12]
    monkeypatch.setattr(filling, "TOGETHER_BYTES_MAX", 4 * stream.layout.row_bytes)
    done = list(stream.answer(message_of((0, 4), (4, 4), (8, 4)), slots_of(stream, 3)))
    assert [one.orders for one in done] == [[10], [11], [12]]


def test_a_chunk_with_a_bad_sample_is_reported_with_those_before_it(worker, tmp_path):
    """So the list of bad samples always fits into a message."""
    stream, _at_once = worker(files(tmp_path), "{ op = 'one_hot', field = 'label', classes = 7 }", "mask")
    done = list(stream.answer(message_of((0, 4), (4, 4), (8, 4)), slots_of(stream, 3)))
    assert [(one.orders, len(one.bad)) for one in done] == [([10, 11], 1), ([12], 4)]


def test_where_no_sample_can_be_requested_no_chunk_is_left_over(worker, tmp_path, monkeypatch):
    """The first report has the reason; every row is zero, and every order is answered."""
    stream, _at_once = worker(files(tmp_path))
    stream.maker.reads_ahead = True

    def refuse(_maker: SampleMaker, _samples: list[int], _epoch: int | None) -> None:
        raise FunctionUnusable("not here")

    monkeypatch.setattr(SampleMaker, "announce", refuse)
    slots = slots_of(stream, 2)
    done = list(stream.answer(message_of((0, 4), (4, 8)), slots))
    assert [(one.orders, one.hopeless) for one in done] == [([10], "not here"), ([11], "not here")]
    assert not any(bytes(page).strip(b"\0") for page, _arrays in slots.values())


@pytest.mark.parametrize(("left", "reports"), [(60, [[10, 11, 12], [13]]), (5, [[10, 11], [12], [13]])])
def test_orders_of_several_messages_are_reported_together(worker_loop, monkeypatch, left, reports):
    """Not one of another stream; and none with whose rows the report would be late."""
    row_bytes = worker_loop.layout.row_bytes
    monkeypatch.setattr(filling, "TOGETHER_BYTES_MAX", row_bytes)
    monkeypatch.setattr(stopwatch.Stopwatch, "left_s", lambda _stopwatch, rows: left - rows)
    chunks = message_of((0, 1), (1, 1), (2, 6), (8, 4)).chunks
    done = worker_loop.answers(
        *(FillChunks(of, [chunk], is_packed=False) for of, chunk in zip((1, 1, 1, 2), chunks, strict=True))
    )
    assert [one.orders for one in done] == reports
    np.testing.assert_array_equal(worker_loop.arrays(2)["x"][2:8], values()["x"][2:8])


def test_a_sample_that_is_quarantined_meanwhile_is_not_begun_in_these_chunks(worker_loop):
    """The message about it follows the order in the same channel, and is read before their rows.

    Another message waits: the slot is there until its chunk is filled.
    """
    done = worker_loop.answers(
        message_of((0, 4), (4, 4), (8, 4)), orders.ForgetSlots([1]), orders.Quarantine(1, [2, 5])
    )
    assert [[sample for sample, _path, _reason in one.bad] for one in done] == [[2], [5], []]
    assert [one.orders for one in done] == [[10], [11], [12]]
