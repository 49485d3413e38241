"""Lists of images as fields: each source gives the same files, however many a sample has."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pytest

from batchd.cli.first_config import look_at, steps_for
from batchd.data.samples.values import Value
from batchd.data.sources.cache.record import pack, unpack
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.options import DeclaredOptions, SourceOptions
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.recognise import recognise
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from support.images import jpeg, photo
from support.lmdb_files import write_lmdb
from support.parquet_files import IMAGE, write_parquet
from support.samples import opened, read_samples, reason, scan
from support.shards import write_shard
from support.source_files import nothing
from support.tfrecords import example, write_records

FILES = [jpeg(photo(height, 24)) for height in (16, 24, 32)]
FIELDS = {"pictures": "image[<=3]"}
NAMES = ["a.jpg", "deep/b.jpg", "c.jpg"]
pytestmark = pytest.mark.usefixtures("forked_scans")


def write_files(root: Path) -> None:
    (root / "deep").mkdir()
    for name, file in zip(NAMES, FILES, strict=True):
        (root / name).write_bytes(file)


def of_jsonl(root: Path) -> SourceOptions:
    write_files(root)
    (root / "a.jsonl").write_text(f'{json.dumps({"files": NAMES})}\n{{"files": []}}\n{{"files": ["c.jpg"]}}')
    return JsonlSource(root=root, shards=("a.jsonl",), fields=FIELDS, names={"pictures": "files"})


def of_parquet(root: Path) -> SourceOptions:
    """As Hugging Face's ``datasets`` writes List(Image()): bytes, or paths of files."""
    write_files(root)
    rows: list[list[dict[str, Any]]] = [
        [{"bytes": FILES[0], "path": None}, {"bytes": None, "path": NAMES[1]}, {"bytes": FILES[2], "path": "x"}],
        [],
        [{"bytes": FILES[2], "path": None}],
    ]
    write_parquet(root / "a.parquet", {"pictures": pa.array(rows, pa.list_(IMAGE))}, row_group_size=2)
    return ParquetSource(root=root, shards=("a.parquet",), fields=FIELDS)


def of_parquet_with_bytes(root: Path) -> SourceOptions:
    write_parquet(root / "a.parquet", {"pictures": [FILES, [], FILES[2:]]})
    return ParquetSource(root=root, shards=("a.parquet",), fields=FIELDS)


def of_webdataset(root: Path) -> SourceOptions:
    members = [(f"1.{place}.jpg", file) for place, file in enumerate(FILES)]
    write_shard(root / "a.tar", [*members, ("2.txt", b""), ("3.0.jpeg", FILES[2])])
    names = {"pictures": "{0..2}.jpg;{0..2}.jpeg"}
    return WebDatasetSource(root=root, shards=("a.tar",), fields=FIELDS, names=names, defaults={"pictures": ()})


def of_tfrecord(root: Path) -> SourceOptions:
    write_records(root / "a.tfrecord", [example(pictures=FILES), example(pictures=[]), example(pictures=FILES[2:])])
    return TFRecordSource(root=root, shards=("a.tfrecord",), fields=FIELDS)


def of_lmdb(root: Path) -> SourceOptions:
    records = [FILES, [], FILES[2:]]
    write_lmdb(root / "a", {b"%d" % key: msgpack.packb({"pictures": files}) for key, files in enumerate(records)})
    return LmdbSource(path=root / "a", fields=FIELDS, format="msgpack")


def listed(values: Any) -> list[bytes]:
    return [bytes(file) for file in values["pictures"]]


@pytest.mark.parametrize(
    "source_of", [of_jsonl, of_parquet, of_parquet_with_bytes, of_webdataset, of_tfrecord, of_lmdb]
)
def test_lists_of_images_are_the_same_from_every_source(source_of, tmp_path: Path) -> None:
    """Three images, none, and one; later reads leave them, and a cache keeps them."""
    with opened(source_of(tmp_path)) as (reader, index):
        read: list[Any] = [reader.read(sample) for sample in range(len(index))]

    assert [listed(values) for values in read] == [FILES, [], FILES[2:]]
    for values in read:
        record = pack(values)
        kept: Any = unpack(memoryview(record.facts), memoryview(b"".join(record.values)))[0]
        assert listed(kept) == listed(values)


def lines_of(root: Path) -> None:
    write_files(root)
    (root / "a.jsonl").write_text("\n".join(json.dumps({"images": names}) for names in (NAMES, NAMES[:1])))


def table_of(root: Path) -> None:
    rows = [[{"bytes": file, "path": None} for file in files] for files in (FILES, FILES[:1])]
    write_parquet(root / "a.parquet", {"images": pa.array(rows, pa.list_(IMAGE))})


def bytes_of(root: Path) -> None:
    write_parquet(root / "a.parquet", {"images": [FILES, FILES[:1]]})


def shard_of(root: Path) -> None:
    write_shard(
        root / "a.tar", [*((f"1.{place}.jpg", file) for place, file in enumerate(FILES)), ("2.0.jpg", FILES[0])]
    )


def longer_shard_of(root: Path) -> None:
    write_shard(root / "a.tar", [(f"1.images.{place}.jpg", FILES[1]) for place in range(9)])


@pytest.mark.parametrize(
    ("write", "room"), [(lines_of, 8), (table_of, 8), (bytes_of, 8), (shard_of, 8), (longer_shard_of, 16)]
)
def test_init_finds_lists_of_images(write: Callable[[Path], None], room: int, tmp_path: Path) -> None:
    """With steps that give them a place in a batch, and room for longer lists."""
    write(tmp_path)

    source = recognise(tmp_path, Survey(nothing)).recognised.source
    steps = steps_for(look_at(source, scan(source), Storage()))

    assert isinstance(source, DeclaredOptions)
    assert source.fields == {"images": f"image[<={room}]"}
    assert steps == [
        {"op": "decode", "field": "images"},
        {"op": "resize", "field": "images", "size": [24, 24]},
        {"op": "ragged", "field": "images", "max_shape": [room, 24, 24, 3]},
    ]


def test_a_path_alone_is_a_list_of_it(tmp_path: Path) -> None:
    """As the data of LLaVA has it, where samples of text have no image."""
    of_jsonl(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"image": "a.jpg"}\n{}')
    names, defaults = {"pictures": "image"}, {"pictures": ()}
    source = JsonlSource(root=tmp_path, shards=("a.jsonl",), fields=FIELDS, names=names, defaults=defaults)

    assert [listed(values) for values in read_samples(source)] == [FILES[:1], []]


def test_a_record_of_a_cache_has_what_is_around_a_list() -> None:
    """The values behind it begin where it ends."""
    values: dict[str, Value] = {
        "a": memoryview(b"1"),
        "of": [memoryview(b"22"), memoryview(b"")],
        "b": memoryview(b"3"),
    }
    record = pack(values)

    assert unpack(memoryview(record.facts), memoryview(b"".join(record.values)))[0] == values


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (["a.jpg"] * 4, r"pictures has 4 images, more than image\[<=3\] has"),
        (["a.jpg", None], r"'files'\[1\] is null in JSON, not the path of an image"),
        (["a.jpg", "none.jpg"], r"none.jpg"),
        (["a.jpg", "../a.jpg"], r"'files\[1\]' is '../a.jpg'"),
        (["a.jpg", ""], r"'files\[1\]' is empty"),
        (7, "'files' is a number in JSON, not a list of paths of images"),
        (None, "'files' is null, and the field pictures has no default"),
    ],
)
def test_a_bad_image_of_a_list_is_named(found: object, why: str, tmp_path: Path) -> None:
    """By its place in the list; one that is too long says by how much."""
    source = of_jsonl(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({"files": found}))

    with opened(source) as (reader, _index):
        assert re.search(why, reason(reader))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([{"bytes": b"", "path": None}], r"pictures\[0\] is empty"),
        ([{"bytes": b"x"}, {"bytes": None, "path": None}], r"pictures\[1\] has neither bytes nor a path"),
        ([{"bytes": b"x"}, None], r"pictures\[1\] is null, not the bytes of an image"),
        ([{"bytes": b"x"}] * 4, r"pictures has 4 images, more than image\[<=3\] has"),
        (None, "there is no pictures"),
    ],
)
def test_a_bad_image_of_a_parquet_list_is_named(row: object, why: str, tmp_path: Path) -> None:
    """As those that lines of JSON name."""
    write_parquet(tmp_path / "a.parquet", {"pictures": pa.array([row], pa.list_(IMAGE))})

    with opened(ParquetSource(root=tmp_path, shards=("a.parquet",), fields=FIELDS)) as (reader, _index):
        assert re.search(why, reason(reader))


def test_no_images_stand_for_a_null(tmp_path: Path) -> None:
    """``defaults`` has an empty list; other files cannot stand for images."""
    write_parquet(tmp_path / "a.parquet", {"pictures": pa.array([None, [FILES[0]]], pa.list_(pa.binary()))})
    source = ParquetSource(root=tmp_path, shards=("a.parquet",), fields=FIELDS, defaults={"pictures": ()})

    assert [len(values["pictures"]) for values in read_samples(source)] == [0, 1]
    with pytest.raises(ValueError, match=r"pictures is image\[<=3\], so its default is \[\]"):
        ParquetSource(root=tmp_path, shards=("a.parquet",), fields=FIELDS, defaults={"pictures": ("a.jpg",)})
