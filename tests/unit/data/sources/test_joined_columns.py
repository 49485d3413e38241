"""Several columns of numbers as one field, in tables, lines of JSON, Parquet and Arrow files."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

Rows = list[dict[str, object]]
Write = Callable[[Path, Rows, dict[str, str], dict[str, str]], SourceOptions]


def csv_source(folder: Path, rows: Rows, fields: dict[str, str], names: dict[str, str]) -> SourceOptions:
    lines = [",".join(f'"{title}"' for title in rows[0])]
    lines += [",".join("" if value is None else str(value) for value in row.values()) for row in rows]
    (folder / "a.csv").write_text("\n".join(lines))
    return CsvSource(path=folder / "a.csv", fields=fields, names=names)


def jsonl_source(folder: Path, rows: Rows, fields: dict[str, str], names: dict[str, str]) -> SourceOptions:
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return JsonlSource(root=folder, shards=("a.jsonl",), fields=fields, names=names)


def parquet_source(folder: Path, rows: Rows, fields: dict[str, str], names: dict[str, str]) -> SourceOptions:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=2)
    return ParquetSource(root=folder, shards=("a.parquet",), fields=fields, names=names)


def arrow_source(folder: Path, rows: Rows, fields: dict[str, str], names: dict[str, str]) -> SourceOptions:
    table = pa.Table.from_pylist(rows)
    with ipc.new_stream(folder / "a.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    return ParquetSource(root=folder, shards=("a.arrow",), fields=fields, names=names)


SOURCES = pytest.mark.parametrize("write", [csv_source, jsonl_source, parquet_source, arrow_source])


def read(source: SourceOptions) -> list[dict[str, np.ndarray]]:
    """All samples. Raises ``SourceInvalid`` and ``SampleUnreadable``."""
    storage = Storage()
    problems = kind_of(source).problems(source, storage)
    if problems:
        raise SourceInvalid(getattr(problems[0], "text", problems[0]))
    index = kind_of(source).scan(source, Survey(lambda _found: None))
    with closing(open_reader(source, index, 1 << 20, storage)) as reader:
        return [{name: np.array(value) for name, value in reader.read(n).items()} for n in range(len(index))]


def table(count: int = 5) -> Rows:
    return [{"y": n, **{f"p{at}": 10 * n + at for at in range(6)}, "a b": n / 4, "w.h": -n} for n in range(count)]


@SOURCES
@pytest.mark.usefixtures("forked_scans")
def test_columns_are_one_field_of_a_shape(tmp_path: Path, write: Write) -> None:
    """A range, or a list of names; the numbers are in the order of the names, row by row."""
    fields = {"x": "float32[2,3]", "both": "float64[2]", "label": "int64", "back": "int16[2]"}
    names = {"x": "p{0..5}", "both": "{a b,w.h}", "label": "y", "back": "p{3,1}"}

    samples = read(write(tmp_path, table(), fields, names))

    for number, sample in enumerate(samples):
        assert sample["x"].dtype == np.float32
        assert sample["x"].tolist() == [[10 * number + at for at in row] for row in ((0, 1, 2), (3, 4, 5))]
        assert sample["both"].tolist() == [number / 4, -number]
        assert sample["back"].tolist() == [10 * number + 3, 10 * number + 1]
        assert sample["label"] == number
    assert len(samples) == 5


@SOURCES
@pytest.mark.usefixtures("forked_scans")
def test_a_column_whose_name_has_braces_comes_first(tmp_path: Path, write: Write) -> None:
    """So what was one column stays it."""
    rows: Rows = [{"p{0,1}": "1 2" if write is csv_source else [1, 2], "p0": 5, "p1": 6}] * 2

    assert read(write(tmp_path, rows, {"x": "int64[2]"}, {"x": "p{0,1}"}))[0]["x"].tolist() == [1, 2]


@SOURCES
@pytest.mark.usefixtures("forked_scans")
@pytest.mark.parametrize("value", [None, 300, "word"])
def test_a_number_that_is_none_is_named_with_its_column(tmp_path: Path, write: Write, value: object) -> None:
    """Never another number in its place.

    The scan of Parquet refuses what tables call a bad sample.
    """
    rows = [{**row, "p2": value} if row["y"] == 1 else row for row in table()]
    if value == "word" and write in (parquet_source, arrow_source):
        rows = [{**row, "p2": str(row["p2"])} for row in rows]

    with pytest.raises((SourceInvalid, SampleUnreadable), match=r"p2|300"):
        read(write(tmp_path, rows, {"x": "uint8[6]"}, {"x": "p{0..5}"}))


@SOURCES
@pytest.mark.usefixtures("forked_scans")
def test_a_column_that_is_absent_is_named(tmp_path: Path, write: Write) -> None:
    """Not the pattern of all."""
    with pytest.raises((SourceInvalid, SampleUnreadable), match=r"no.*'p6'"):
        read(write(tmp_path, table(), {"x": "uint8[7]"}, {"x": "p{0..6}"}))


@SOURCES
def test_names_that_are_not_as_many_as_the_numbers_are_refused(tmp_path: Path, write: Write) -> None:
    """The options are checked, before a file is read."""
    with pytest.raises(ValueError, match=r"names.x stands for 6 names, and float32\[2,2\] has 4 numbers"):
        write(tmp_path, table(), {"x": "float32[2,2]"}, {"x": "p{0..5}"})
