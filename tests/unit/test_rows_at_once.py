"""Rows that a worker makes at once are those that it makes one by one, whatever is wrong with one."""

import os
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from batchd.config.load import load_config
from batchd.daemon.stream_plan import plan_stream
from batchd.orders.worker import NOTE_BYTES, FillChunk, ServeStream
from batchd.pipeline.execute import Pipeline
from batchd.pipeline.fields.options import Drop, Rename
from batchd.pipeline.numbers.options import Cast, Clip, OneHot, Scale
from batchd.pipeline.sample_fields import sample_fields
from batchd.samples.columns import Column
from batchd.samples.errors import SampleUndecodable
from batchd.sources.interface import kind_of
from batchd.storage.access import Storage
from batchd.worker import loop
from batchd.worker.loop import WorkerStream
from batchd.worker.process import NoteMemory
from batchd.worker.sample_maker import SampleMaker
from batchd_wire.fields import CHECKSUM, place_fields
from batchd_wire.slot import RowChecksums
from batchd_wire.views import slot_arrays
from support.samples import scan

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
    """The values of all samples, by column."""
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
        lambda made: [made[name].__setitem__(..., all_) for name, all_ in values().items()], rows, SAMPLES, 0
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
        pipeline.run_rows(lambda made: made.update(values()), rows, SAMPLES, 0)


# --- a worker -------------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Make a worker's stream of files in this folder; notes how many rows it made at once."""
    descriptor = os.memfd_create("note")
    os.truncate(descriptor, NOTE_BYTES)
    note = NoteMemory(descriptor)
    at_once = []
    fill_rows = SampleMaker.fill_rows
    monkeypatch.setattr(
        SampleMaker,
        "fill_rows",
        lambda maker, samples, rows: at_once.append(fill_rows(maker, samples, rows)) or at_once[-1],
    )

    def start(source: str, steps: str = "", on_error: str = "fail") -> tuple[WorkerStream, list[bool]]:
        (tmp_path / "batchd.toml").write_text(
            f"[streams.rows]\nbatch_size = {SAMPLES}\non_error = '{on_error}'\nsource = {source}\npipeline = [{steps}]\n"
        )
        config = load_config(tmp_path / "batchd.toml", {}, {}).streams["rows"]
        columns = kind_of(config.source).columns(config.source, Storage())
        plan = plan_stream("rows", config, columns, ())
        fields = (*sample_fields(columns, plan.pipeline.steps, config.on_error), CHECKSUM)
        index = scan(config.source)
        told = ServeStream(
            stream=1,
            name="rows",
            recipe=plan.recipe(),
            samples=len(index),
            batch_size=SAMPLES,
            shuffle=False,
            on_error=config.on_error,
            storage=(5000, 3, 24000),
            layout=place_fields(fields, SAMPLES).to_wire(),
            cache="off",
        )
        memory = index.to_memfd()
        try:
            return stack.enter_context(closing(WorkerStream(told, memory, [], note, Storage()))), at_once
        finally:
            os.close(memory)

    with ExitStack() as stack:
        stack.callback(note._memory.close)
        yield start


def fill(stream: WorkerStream, first: int = 0, count: int = SAMPLES) -> tuple[list[int], dict[str, np.ndarray]]:
    """The bad samples, and the rows of the first batch, whose checksums are right."""
    page = memoryview(bytearray(b"\x4d" * stream.layout.slot_bytes))
    done = stream.fill(FillChunk(1, 1, 1, 0, 0, [(first, count)], is_packed=False, places=[]), page, {})
    assert done.hopeless == ""
    assert RowChecksums(stream.layout).wrong_rows(page, first, count) == []
    arrays = slot_arrays(page, stream.layout)
    return [sample for sample, _name, _reason in done.bad], {
        name: array[first : first + count] for name, array in arrays.items()
    }


def files(folder: Path, **changes: np.ndarray) -> str:
    """A source of the values above, or others, in a file for each."""
    for name, array in {**values(), **changes}.items():
        np.save(folder / f"{name}.npy", array)
    names = ", ".join(f"{name} = '{name}.npy'" for name in values())
    return f"{{ type = 'npy', root = '{folder}', arrays = {{ {names} }} }}"


def test_rows_of_arrays_are_made_at_once(worker, tmp_path):
    """Also a part of a batch, and only there."""
    stream, at_once = worker(files(tmp_path), "{ op = 'scale', field = 'x', factor = 0.5, dtype = 'float32' }")
    bad, rows = fill(stream, 3, 8)
    assert (bad, at_once) == ([], [True])
    np.testing.assert_array_equal(rows["label"], np.arange(3, 11))
    np.testing.assert_array_equal(rows["index"], np.arange(3, 11))
    np.testing.assert_array_equal(rows["x"], values()["x"][3:11] * np.float32(0.5), strict=True)
    np.testing.assert_array_equal(rows["y"], values()["y"][3:11])


def test_a_bad_sample_among_them_costs_no_other_one(worker, tmp_path):
    """The rows are made one by one then, which finds it; all others are theirs."""
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
    """What it did to its worker may be a matter of its bytes."""
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
    """Those in Fortran order one by one: a sample is in many places."""
    stream, at_once = worker(files(tmp_path, x=array))
    _bad, rows = fill(stream)
    np.testing.assert_array_equal(rows["x"], array)
    assert at_once == ([] if why else [True])


def test_rows_of_numbers_in_a_table_are_made_at_once(worker, tmp_path):
    """They are in the index."""
    parquet.write_table(pa.table({"y": values()["y"], "label": values()["label"]}), tmp_path / "a.parquet")
    fields = "{ y = 'float32', label = 'int64' }"
    stream, at_once = worker(f"{{ type = 'parquet', root = '{tmp_path}', shards = ['a.parquet'], fields = {fields} }}")
    _bad, rows = fill(stream, 2, 9)
    np.testing.assert_array_equal(rows["y"], values()["y"][2:11], strict=True)
    np.testing.assert_array_equal(rows["label"], np.arange(2, 11))
    assert at_once == [True]


def test_many_rows_are_made_in_portions_and_the_note_tells_each(worker, tmp_path, monkeypatch):
    """So a worker that reads slowly is not taken for one that hangs; a bad sample costs its portion."""
    monkeypatch.setattr(loop, "ROWS_AT_ONCE", 5)
    noted = []
    monkeypatch.setattr(NoteMemory, "take_many", lambda _note, row: noted.append(row))
    stream, at_once = worker(files(tmp_path), "{ op = 'one_hot', field = 'label', classes = 11 }", "mask")
    bad, rows = fill(stream)
    assert (noted, at_once, bad) == ([0, 5, 10], [True, True, False], [11])
    np.testing.assert_array_equal(rows["x"][:11], values()["x"][:11])
