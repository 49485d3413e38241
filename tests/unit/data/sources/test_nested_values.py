"""JSON, lists of texts and bytes as fields: each source gives the same values, exactly."""

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pytest

from batchd.config.load import read_config
from batchd.data.samples.values import JSON_DEPTH_MAX
from batchd.data.sources.cache.record import pack, unpack
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.sources.webdataset.options import WebDatasetSource
from support.lmdb_files import write_lmdb
from support.parquet_files import hugging_face, write_parquet
from support.samples import opened, read_samples, reason, scan
from support.shards import write_shard
from support.tfrecords import example, write_records

CHAT: list[Any] = [
    {"role": "user", "content": "Größe? 😀\n", "tool_calls": None},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]},
]
TEXTS = ["a dog", "", "ein Hund, groß"]
FIELDS = {"messages": "json", "captions": "text[<=4]"}
pytestmark = pytest.mark.usefixtures("forked_scans")


def of_jsonl(root: Path) -> SourceOptions:
    (root / "a.jsonl").write_text(json.dumps({"messages": CHAT, "meta": {"captions": TEXTS}}))
    return JsonlSource(root=root, shards=("a.jsonl",), fields=FIELDS, names={"captions": "meta.captions"})


def of_parquet(root: Path) -> SourceOptions:
    write_parquet(root / "a.parquet", {"messages": [CHAT], "captions": [TEXTS]})
    return ParquetSource(root=root, shards=("a.parquet",), fields=FIELDS)


def of_parquet_in_texts(root: Path) -> SourceOptions:
    write_parquet(root / "a.parquet", {"messages": [json.dumps(CHAT)], "captions": [json.dumps(TEXTS)]})
    return ParquetSource(root=root, shards=("a.parquet",), fields=FIELDS)


def of_arrow(root: Path) -> SourceOptions:
    table = pa.table({"messages": [CHAT], "captions": [TEXTS]})
    with pa.OSFile(str(root / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return ParquetSource(root=root, shards=("a.arrow",), fields=FIELDS)


def of_webdataset(root: Path) -> SourceOptions:
    members = {"messages.json": json.dumps(CHAT), "json": json.dumps({"all": {"captions": TEXTS}})}
    write_shard(root / "a.tar", [(f"1.{ending}", text.encode()) for ending, text in members.items()])
    return WebDatasetSource(root=root, shards=("a.tar",), fields=FIELDS, names={"captions": "json:all.captions"})


def of_webdataset_in_members(root: Path) -> SourceOptions:
    members = {"json": json.dumps({"chat": CHAT}), **{f"{number}.txt": text for number, text in enumerate(TEXTS)}}
    write_shard(root / "a.tar", [(f"1.{ending}", text.encode()) for ending, text in members.items()])
    names = {"captions": "{0..3}.txt", "messages": "json:chat"}
    return WebDatasetSource(root=root, shards=("a.tar",), fields=FIELDS, names=names)


def of_csv(root: Path) -> SourceOptions:
    cells = ['"' + json.dumps(value).replace('"', '""') + '"' for value in (CHAT, TEXTS)]
    (root / "a.csv").write_text("messages,captions\n" + ",".join(cells) + "\n")
    return CsvSource(path=root / "a.csv", fields=FIELDS)


def of_tfrecord(root: Path) -> SourceOptions:
    texts = [text.encode() for text in TEXTS]
    write_records(root / "a.tfrecord", [example(messages=json.dumps(CHAT).encode(), captions=texts)])
    return TFRecordSource(root=root, shards=("a.tfrecord",), fields=FIELDS)


def of_lmdb(root: Path) -> SourceOptions:
    write_lmdb(root / "a", {b"0": msgpack.packb({"messages": CHAT, "captions": TEXTS})})
    return LmdbSource(path=root / "a", fields=FIELDS, format="msgpack")


SOURCES = [
    of_jsonl,
    of_parquet,
    of_parquet_in_texts,
    of_arrow,
    of_webdataset,
    of_webdataset_in_members,
    of_csv,
    of_tfrecord,
    of_lmdb,
]


@pytest.mark.parametrize("source_of", SOURCES)
def test_messages_and_captions_are_the_same_from_every_source(source_of, tmp_path: Path) -> None:
    """Keys, nulls, characters beyond ASCII and empty texts stay; a cache keeps them, too."""
    (values,) = read_samples(source_of(tmp_path))

    assert values == {"messages": CHAT, "captions": TEXTS}
    record = pack(values)
    assert unpack(memoryview(record.facts), memoryview(b"".join(record.values)))[0] == values


def test_any_bytes_are_a_field(tmp_path: Path) -> None:
    """A member of a shard, a binary column, and a file as Hugging Face stores sound."""
    sound = b"RIFF\0\xff"
    write_shard(tmp_path / "a.tar", [("1.wav", sound), ("1.pkl", b"")])
    write_parquet(tmp_path / "a.parquet", {"wav": hugging_face([sound]), "raw": [b"\0"]})
    fields = {"wav": "bytes", "raw": "bytes"}

    (member,) = read_samples(
        WebDatasetSource(root=tmp_path, shards=("a.tar",), fields=fields, names={"wav": "wav", "raw": "pkl"})
    )
    (row,) = read_samples(ParquetSource(root=tmp_path, shards=("a.parquet",), fields=fields))

    assert (bytes(member["wav"]), bytes(member["raw"])) == (sound, b"")
    assert (bytes(row["wav"]), bytes(row["raw"])) == (sound, b"\0")


@pytest.mark.parametrize(
    "value",
    [
        [1 << 80, -0.0, 1e308, True, None, "\ud800", {"": []}],
        1 << 70,
        {"b": 1, "a": [[[]]]},
        "text",
        float("inf"),
        [],
    ],
)
def test_a_cache_keeps_every_value_of_json(value: Any) -> None:
    """Numbers beyond 64 bits, infinities, halves of characters, the order of keys, and depth."""
    record = pack({"it": value, "raw": memoryview(b"\0\1")})
    found, _points = unpack(memoryview(record.facts), memoryview(b"".join(map(bytes, record.values))))

    assert repr(found["it"]) == repr(value)
    assert bytes(found["raw"]) == b"\0\1"


def nested(depth: int) -> Any:
    value: Any = 0
    for _level in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"captions": ["a"] * 5}, r"'captions': captions has 5 texts, more than text\[<=4\] has"),
        ({"captions": ["a", None]}, r"'captions': captions\[1\] is null, not a text"),
        ({"captions": ["a", 3]}, r"captions\[1\] is int, not a text"),
        ({"captions": ["\ud83d"]}, r"captions\[0\] has half a character"),
        ({"captions": "a dog"}, "captions is str, not a list of texts"),
        ({"captions": None}, "'captions' is null, and the field captions has no default"),
        ({"messages": nested(JSON_DEPTH_MAX + 1)}, f"messages is nested deeper than {JSON_DEPTH_MAX} levels"),
        ({}, "nested too deeply"),
    ],
)
def test_a_value_that_is_not_as_declared_is_a_bad_sample(values: dict[str, Any], why: str, tmp_path: Path) -> None:
    """The reason names the key, and the place in the list."""
    depth = 100_000 if "too deeply" in why else 0
    line = json.dumps({"messages": [], "captions": [], **({} if depth else values)})
    line = line.replace('"messages": []', f'"messages": {"[" * depth}{"]" * depth}') if depth else line
    (tmp_path / "a.jsonl").write_text(line)

    with opened(JsonlSource(root=tmp_path, shards=("a.jsonl",), fields=FIELDS)) as (reader, _index):
        assert re.search(why, reason(reader))


def test_json_of_the_greatest_depth_is_read(tmp_path: Path) -> None:
    """The limit itself is allowed."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"it": nested(JSON_DEPTH_MAX)}))

    (values,) = read_samples(JsonlSource(root=tmp_path, shards=("a.jsonl",), fields={"it": "json"}))

    assert values["it"] == nested(JSON_DEPTH_MAX)


def test_defaults_stand_for_nulls(tmp_path: Path) -> None:
    """In columns of Parquet files, lines of JSON, and samples of shards without a member."""
    fields = {**FIELDS, "score": "float32", "ids": "int32[?]", "text": "text"}
    defaults = {"messages": (), "captions": ("none",), "score": -1.5, "ids": (7,), "text": "?"}
    columns = {"messages": [None, CHAT], "captions": [None, TEXTS], "score": [None, 2.0], "ids": [None, [1]]}
    write_parquet(tmp_path / "a.parquet", {**columns, "text": [None, "t"]})
    lines = ({}, {"messages": CHAT, "captions": TEXTS, "score": 2.0, "ids": [1], "text": "t"})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    members = [
        ("1.other", b""),
        ("2.messages.json", json.dumps(CHAT).encode()),
        ("2.0.txt", b"one"),
        ("2.2.txt", b"two"),
    ]
    write_shard(tmp_path / "a.tar", members)

    rows = read_samples(ParquetSource(root=tmp_path, shards=("a.parquet",), fields=fields, defaults=defaults))
    objects = read_samples(JsonlSource(root=tmp_path, shards=("a.jsonl",), fields=fields, defaults=defaults))
    of_shard = read_samples(
        WebDatasetSource(
            root=tmp_path,
            shards=("a.tar",),
            fields=FIELDS,
            names={"captions": "{0..3}.txt"},
            defaults={"messages": (), "captions": ()},
        )
    )

    for missing, there in (rows, objects):
        assert (missing["messages"], missing["captions"], missing["text"]) == ([], ["none"], "?")
        assert (missing["score"].item(), missing["ids"].tolist()) == (-1.5, [7])
        assert (there["messages"], there["captions"], there["text"]) == (CHAT, TEXTS, "t")
        assert (there["score"].item(), there["ids"].tolist()) == (2.0, [1])
    assert of_shard == [{"messages": [], "captions": []}, {"messages": CHAT, "captions": ["one", "two"]}]


def test_a_default_is_a_part_of_the_digest_and_no_default_is_not(tmp_path: Path) -> None:
    """A number in a null's place changes batches, so it changes the fingerprint."""
    write_parquet(tmp_path / "a.parquet", {"x": [1, None]})
    fields = {"x": "int64"}
    source = ParquetSource(root=tmp_path, shards=("a.parquet",), fields=fields, defaults={"x": 3})

    assert scan(source).digest != scan(ParquetSource(**{**vars_of(source), "defaults": {"x": 4}})).digest
    write_parquet(tmp_path / "a.parquet", {"x": [1, 3]})
    assert "defaults" not in scan(ParquetSource(**{**vars_of(source), "defaults": {}})).facts


def vars_of(source: ParquetSource) -> dict[str, Any]:
    return {"root": source.root, "shards": source.shards, "fields": source.fields}


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('{ type = "jsonl", root = "/", shards = ["a"], fields = { x = "bytes" } }', "JSON has no bytes"),
        ('{ type = "csv", path = "/a", fields = { x = "bytes" } }', "a table in text has no bytes"),
        ('{ type = "push", fields = { x = "json" } }', "producers push no such values"),
        ('{ type = "jsonl", root = "/", shards = ["a"], fields = { x = "text[8]" } }', r'did you mean "text\[<=8\]"'),
        ('{ type = "jsonl", root = "/", shards = ["a"], fields = { x = "text[<=0]" } }', "1 to 65536 texts at most"),
        (
            '{ type = "jsonl", root = "/", shards = ["a"], fields = { x = "text[<=1]" }, defaults = { x = ["", ""] } }',
            r'x is text\[<=1\], so its default is a list of 1 texts at most, such as \[\] or \[""\]',
        ),
        (
            '{ type = "webdataset", root = "/", shards = ["a"], fields = { x = "bytes" }, names = { x = "json:x" } }',
            "x is bytes, and json:x is a value in JSON",
        ),
        ('{ type = "jsonl", root = "/", shards = ["a"], fields = { x = "images" } }', r'did you mean "image\[<=8\]"'),
        ('{ type = "jsonl", root = "/", shards = ["a"], fields = { x = "image[4]" } }', r'did you mean "image\[<=4\]"'),
        ('{ type = "csv", path = "/a", fields = { x = "image[<=2]" } }', "a table names one image in a row"),
        ('{ type = "lmdb", path = "/a", fields = { x = "image[<=2]" } }', 'records of format = "msgpack"'),
        ('{ type = "push", fields = { x = "image[<=2]" } }', "producers push no such values"),
        (
            '{ type = "webdataset", root = "/", shards = ["a"], fields = { x = "image[<=2]" }, names = { x = "{0,1}.a;b" } }',
            "names a different number of members for each ending",
        ),
    ],
)
def test_what_a_source_cannot_have_is_said_by_check(source: str, why: str, tmp_path: Path) -> None:
    """Each says what to write instead."""
    (tmp_path / "batchd.toml").write_text(f"[streams.s]\nsource = {source}\nbatch_size = 1\n")

    texts = [str(problem) for problem in read_config(tmp_path / "batchd.toml", environment={}).problems]

    assert len(texts) == 1
    assert re.search(why, texts[0]), texts[0]
