"""A number is the number that the data writes, whatever its type or its source."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.composed.options import SubsetSource
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.files.options import ListSource
from batchd.data.sources.interface import open_reader
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.storage.access import Storage
from batchd.errors import SourceInvalid
from support.lmdb_files import write_lmdb
from support.parquet_files import write_parquet
from support.samples import scan
from support.shards import write_shard

pytestmark = pytest.mark.usefixtures("scans_here", "forked_scans")
FIELDS = {"x": "int64"}
Make = Callable[[Path, Any], SourceOptions]


def in_jsonl(root: Path, value: Any, key: str = "x") -> SourceOptions:
    (root / "a.jsonl").write_text(f'{{"x": {_json(value)}}}\n')
    return JsonlSource(root=root, shards=("a.jsonl",), fields=FIELDS, names={"x": key})


def in_json_list(root: Path, value: Any) -> SourceOptions:
    return in_jsonl(root, [value], "x.0")


def in_member(root: Path, value: Any) -> SourceOptions:
    write_shard(root / "a.tar", [("1.json", f'{{"x": {_json(value)}}}'.encode())])
    return WebDatasetSource(root=root, shards=("*.tar",), fields=FIELDS)


def in_label(root: Path, value: Any) -> SourceOptions:
    write_shard(root / "a.tar", [("1.jpg", b"?"), ("1.json", f'{{"x": {_json(value)}}}'.encode())])
    return WebDatasetSource(root=root, shards=("*.tar",), label="json:x")


def in_map(root: Path, value: Any) -> SourceOptions:
    write_lmdb(root / "db", {b"1": msgpack.packb({"x": value})})
    return LmdbSource(path=root / "db", fields=FIELDS, format="msgpack")


def in_column(root: Path, value: Any) -> SourceOptions:
    write_parquet(root / "a.parquet", {"x": [value]})
    return ParquetSource(root=root, shards=("*.parquet",), fields=FIELDS)


def in_column_of_lists(root: Path, value: Any) -> SourceOptions:
    write_parquet(root / "a.parquet", {"x": [[value]]})
    return ParquetSource(root=root, shards=("*.parquet",), fields={"x": "int64[1]"})


TYPED = [in_jsonl, in_json_list, in_member, in_label, in_map, in_column, in_column_of_lists]


def _json(value: Any) -> str:
    return str(value).lower().replace("nan", "NaN")


@contextmanager
def reading(source: SourceOptions) -> Iterator[Any]:
    index = scan(source)
    reader = open_reader(source, index, 1 << 20, Storage())
    try:
        values = reader.read(0)
        yield values["label" if "label" in values else "x"]
    finally:
        reader.close()


@pytest.mark.parametrize("make", TYPED)
@pytest.mark.parametrize("value", [True, False, 5.0, -7.0, 3])
def test_what_loses_nothing_becomes_a_whole_number(tmp_path: Path, make: Make, value: Any) -> None:
    """So ``true`` is 1 and 5.0 is 5 in every source that has types."""
    with reading(make(tmp_path, value)) as found:
        assert np.asarray(found).dtype == np.int64
        assert np.asarray(found).item() == int(value)


@pytest.mark.parametrize("make", TYPED)
@pytest.mark.parametrize("value", [0.5, float("nan"), 1e300, 9007199254740993.0])
def test_what_would_lose_something_is_refused(tmp_path: Path, make: Make, value: float) -> None:
    """A float from 2**53 on may stand for another number than the one that was written."""
    with pytest.raises((SourceInvalid, SampleUnreadable)), reading(make(tmp_path, value)):
        pass


def spelt_in_table(root: Path, text: str) -> SourceOptions:
    (root / "a.csv").write_text(f"x\n{text}\n")
    return CsvSource(path=root / "a.csv", fields=FIELDS)


def spelt_in_floats(root: Path, text: str) -> SourceOptions:
    (root / "a.csv").write_text(f"x\n{text}\n")
    return CsvSource(path=root / "a.csv", fields={"x": "float32"})


def spelt_in_list(root: Path, text: str) -> SourceOptions:
    (root / "1.jpg").write_bytes(b"?")
    (root / "a.txt").write_text(f"1.jpg {text}\n")
    return ListSource(path=root / "a.txt")


def spelt_in_label(root: Path, text: str) -> SourceOptions:
    write_shard(root / "a.tar", [("1.jpg", b"?"), ("1.cls", text.encode())])
    return WebDatasetSource(root=root, shards=("*.tar",))


def spelt_in_member(root: Path, text: str) -> SourceOptions:
    write_shard(root / "a.tar", [("1.txt", text.encode())])
    return WebDatasetSource(root=root, shards=("*.tar",), fields=FIELDS, names={"x": "txt"})


def spelt_in_json(root: Path, text: str) -> SourceOptions:
    (root / "a.jsonl").write_text(f'{{"x": "{text}"}}\n', "utf-8")
    return JsonlSource(root=root, shards=("a.jsonl",), fields=FIELDS)


def spelt_in_record(root: Path, text: str) -> SourceOptions:
    write_lmdb(root / "db", {b"1": text.encode()})
    return LmdbSource(path=root / "db", fields=FIELDS, format="text")


def spelt_in_float_record(root: Path, text: str) -> SourceOptions:
    write_lmdb(root / "db", {b"1": text.encode()})
    return LmdbSource(path=root / "db", fields={"x": "float64"}, format="text")


def spelt_in_indices(root: Path, text: str) -> SourceOptions:
    (root / "numbers.txt").write_text(f"{text}\n")
    (root / "b.csv").write_text("x\n" + "1\n" * 20)
    return SubsetSource(of=CsvSource(path=root / "b.csv", fields=FIELDS), indices=root / "numbers.txt")


SPELT = [
    spelt_in_table,
    spelt_in_floats,
    spelt_in_list,
    spelt_in_label,
    spelt_in_member,
    spelt_in_json,
    spelt_in_record,
    spelt_in_float_record,
    spelt_in_indices,
]


@pytest.mark.parametrize("make", SPELT)
@pytest.mark.parametrize("text", ["1_0", "\u0661", "0x1", "1 0_0"])
def test_only_decimal_digits_are_a_number(tmp_path: Path, make: Make, text: str) -> None:
    """Python reads ``1_0`` as ten, and digits of other scripts: no table means that."""
    with pytest.raises((SourceInvalid, SampleUnreadable)), reading(make(tmp_path, text)):
        pass
