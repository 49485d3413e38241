"""Lines of JSON: their lines, their keys, the images that they name, and each kind of damage."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.interface import kind_of
from batchd.data.sources.jsonl import scan as jsonl_scan
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.recognise import recognise
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import quick_look
from batchd.errors import SourceInvalid
from support.samples import opened, read_samples, reason, scan
from support.source_files import source_problems

FIELDS = {"a": "text"}


def lines(folder: Path, content: bytes | str, name: str = "t.jsonl", **options) -> JsonlSource:
    """A source of one file with this content; by default the field is a text ``a``."""
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return JsonlSource(**{"root": folder, "shards": (name,), "fields": FIELDS, **options})


def texts(source: JsonlSource) -> list[str]:
    return [values["a"] for values in read_samples(source)]


def refused(source: JsonlSource) -> str:
    """Return the error text of the scan."""
    with pytest.raises(SourceInvalid) as caught:
        scan(source)
    assert str(source.root) in str(caught.value)
    return str(caught.value)


def bad(folder: Path, line: bytes | str, **options) -> str:
    """Return why the second of three lines is a bad sample."""
    line = line if isinstance(line, bytes) else line.encode()
    source = lines(folder, b'{"z": "other"}' + b"\n" + line + b"\n{}", **{"fields": FIELDS, **options})
    with opened(source) as (reader, index):
        assert len(index) == 3
        assert reader.name(1) == f"{folder}/t.jsonl: record 2 (byte 15)"
        return reason(reader, 1)


# --- lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a":"1"}\n{"a":"2"}\n', ["1", "2"]),
        (b'{"a":"1"}\r\n{"a":"2"}\r\n', ["1", "2"]),
        (b'{"a":"1"}\n{"a":"2"}', ["1", "2"]),
        (b'\xef\xbb\xbf{"a":"1"}\n{"a":"2"}', ["1", "2"]),
        (b'\n\r\n{"a":"1"}\n\n\r\n{"a":"2"}\n\n\r\n', ["1", "2"]),
        (b' {"a" : "1"} \n\t{"a":"2"}\t\r\n', ["1", "2"]),
        (b'{"a":"1\\n2"}\n{"a":"\\u00e9\\ud83d\\ude00"}\n', ["1\n2", "é😀"]),
        ('{"a":"ä€😀\u2028"}\n'.encode(), ["ä€😀\u2028"]),
        (b'{"a":"first","b":0,"a":"last"}\n', ["last"]),
        (b'{"a":"' + b"x" * 50 + b'"}\n\n{"a":"2"}', ["x" * 50, "2"]),
    ],
)
def test_each_line_that_is_not_blank_is_a_sample(tmp_path, monkeypatch, content, expected) -> None:
    """This holds for every end of the blocks in which the scan reads."""
    for block in (*range(3, 14), 1 << 20):
        monkeypatch.setattr(jsonl_scan, "BLOCK_BYTES", block)
        assert texts(lines(tmp_path, content)) == expected, block


@given(
    values=st.lists(st.text(max_size=8), min_size=1, max_size=12),
    ends=st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\r\n\r\n\n"]), min_size=12, max_size=12),
    block=st.integers(3, 40),
)
def test_written_lines_read_back_unchanged(tmp_path_factory, values, ends, block) -> None:
    """Texts have any characters, and lines any end."""
    text = "".join(json.dumps({"a": value}) + end for value, end in zip(values, ends, strict=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl_scan, "BLOCK_BYTES", block)
        source = lines(tmp_path_factory.getbasetemp(), text)

        assert texts(source) == values


@given(content=st.lists(st.sampled_from([b'{"a":"x"}', b"{", b'"', b"\n", b"\r", b"\0", b"\xff", b"1"]), max_size=20))
def test_bytes_of_any_kind_are_refused_or_read(tmp_path_factory, content) -> None:
    """No other error is raised, at the scan or later; each bad line is one bad sample."""
    source = lines(tmp_path_factory.getbasetemp(), b"".join(content))
    try:
        scan(source)
    except SourceInvalid:
        return
    with opened(source) as (reader, index):
        for sample in range(len(index)):
            with suppress(SampleUnreadable):
                assert reader.read(sample) == {"a": "x"}


def test_a_long_line_takes_no_memory_in_the_scan(tmp_path) -> None:
    """A sparse file has a line of 64 MiB; that line alone is a bad sample."""
    with (tmp_path / "t.jsonl").open("wb") as file:
        file.write(b'{"a":"1"}\n{"a":"')
        file.seek(64 << 20, os.SEEK_CUR)
        file.write(b'"}\n{"a":"3"}\n')
    source = JsonlSource(root=tmp_path, shards=("t.jsonl",), fields=FIELDS)

    with opened(source, max_bytes=1000) as (reader, index):
        assert index.arrays["starts"].tolist() == [0, 10, 19 + (64 << 20)]
        assert reader.read(2) == {"a": "3"}
        assert reason(reader, 1) == (
            f"has {(64 << 20) + 9} bytes, more than max_bytes = 1000; put long values into files of their own, or into "
            "parquet"
        )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "has no line that is not blank; leave it out of the shards"),
        (b"\xef\xbb\xbf\n\r\n\n", "has no line that is not blank"),
        (b'[{"a":"1"}]', "begins with '[': it is a list, and not an object on each line; convert it: jq -c '.[]'"),
        (b"\n\n <html>", r"begins with b'<html>', and JSON Lines with {"),
        (b"\x1f\x8b\x08\0abc", "is compressed (gzip), so its lines cannot be read one by one; unpack it: gzip -dc <"),
        (b"\x28\xb5\x2f\xfdabc", "is compressed (zstd)"),
        ('{"a":"1"}'.encode("utf-16"), "is UTF-16; save it as UTF-8"),
    ],
)
def test_a_file_of_another_format_is_refused(tmp_path, content, text) -> None:
    """The error has the remedy."""
    assert f"t.jsonl {text}" in refused(lines(tmp_path, content))


# --- values ---------------------------------------------------------------------------------------


def test_keys_become_fields_of_their_types(tmp_path) -> None:
    """A dot leads into an object or a list; the whole name as a key comes first."""
    fields = {
        "text": "text",
        "label": "int16",
        "score": "float32",
        "good": "bool",
        "box": "uint8[2,2]",
        "words": "int32[?]",
        "table": "float64[?,?]",
        "second": "text",
        "turns": "int64",
        "dotted": "int64",
    }
    names = {"label": "meta.label", "second": "turns.1.text", "turns": "turns.#", "dotted": "meta.x"}
    value = {
        "text": "é",
        "meta": {"label": -7, "x": 1},
        "meta.x": 2,
        "score": 3,
        "good": True,
        "box": [[1, 2], [3, 255]],
        "words": [],
        "table": [[1, 2.5]],
        "turns": [{"text": "one"}, {"text": "two"}],
        "unused": {"deep": [None]},
    }
    (found,) = read_samples(lines(tmp_path, json.dumps(value), fields=fields, names=names))

    assert list(found) == list(fields)
    assert (found["text"], found["second"]) == ("é", "two")
    assert (found["label"], found["label"].dtype) == (-7, np.int16)
    assert (found["score"], found["score"].dtype) == (3, np.float32)
    assert (found["good"], found["good"].dtype) == (True, np.bool_)
    np.testing.assert_array_equal(found["box"], np.array([[1, 2], [3, 255]], np.uint8), strict=True)
    np.testing.assert_array_equal(found["words"], np.zeros(0, np.int32), strict=True)
    np.testing.assert_array_equal(found["table"], np.array([[1, 2.5]]), strict=True)
    assert (found["turns"], found["dotted"]) == (2, 2)


def test_a_default_replaces_a_missing_key_and_null(tmp_path) -> None:
    """This holds at the end of a path, and for a path that leads nowhere."""
    content = '{}\n{"a":null,"m":null}\n{"a":"x","m":{"n":[]}}\n{"a":"x","m":[1]}\n{"a":"x","m":{"n":[0,5]}}'
    fields = {"a": "text", "n": "int64", "ids": "int32[?]"}
    options = {"names": {"n": "m.n.1", "ids": "m.n"}, "defaults": {"a": "none", "n": -1, "ids": ()}}
    found = read_samples(lines(tmp_path, content, fields=fields, **options))

    assert [values["a"] for values in found] == ["none", "none", "x", "x", "x"]
    assert [int(values["n"]) for values in found] == [-1, -1, -1, -1, 5]
    assert [values["ids"].tolist() for values in found] == [[], [], [], [], [0, 5]]


def test_numbers_that_json_does_not_have_are_those_of_python(tmp_path) -> None:
    """Python's ``json`` writes NaN and Infinity; a number that is too large is something else."""
    found = read_samples(lines(tmp_path, '{"x":[NaN,Infinity,-Infinity]}', fields={"x": "float32[3]"}))

    np.testing.assert_array_equal(found[0]["x"], [np.nan, np.inf, -np.inf])


@pytest.mark.parametrize(
    ("line", "fields", "text"),
    [
        ('{"a":', FIELDS, "is no JSON: Expecting value: line 1 column 6 (char 5)"),
        ("[1]", FIELDS, "is a list in JSON, not an object"),
        ("7", FIELDS, "is a number in JSON, not an object"),
        ("   ", FIELDS, "is no JSON: Expecting value"),
        ('{"a":"x"} {"a":"y"}', FIELDS, "is no JSON: Extra data: line 1 column 11 (char 10)"),
        ('{"a":' + "[" * 100_000, FIELDS, "is no JSON that can be read: it is nested too deeply"),
        (b'{"a":"\xff"}', FIELDS, "is not UTF-8: byte 0xff at byte 6 of the line"),
        (b'{"a":"\0"}', FIELDS, "is no JSON: Invalid control character"),
        ('{"a":"\\ud800"}', FIELDS, "'a': a has half a character in it, which no UTF-8 can hold"),
        ('{"b":1,"aa":2}', FIELDS, "has no 'a', only 'b', 'aa', and the field a has no default; did you mean aa?"),
        ('{"a":null}', FIELDS, "'a' is null, and the field a has no default"),
        ("{}", FIELDS, "has no 'a', only no keys, and the field a has no default"),
        ('{"a":1}', FIELDS, "'a': a is a number in JSON, not \"text\""),
        ('{"a":"1"}', {"a": "int64"}, "'a': a is a text in JSON, not \"int64\""),
        ('{"a":1.5}', {"a": "int64"}, "'a': a is 1.5, which no int64 can be"),
        ('{"a":2}', {"a": "bool"}, "'a': a is 2, which no bool can be"),
        ('{"a":300}', {"a": "uint8"}, "'a': a is 300, which no uint8 can be"),
        ('{"a":1e999}', {"a": "float64"}, "'a' has a number that is too large for float64"),
        ('{"a":' + "9" * 5000 + "}", {"a": "int64"}, "is no JSON: Exceeds the limit"),
        ('{"a":99999999999999999999}', {"a": "int64"}, "'a': a is object, which is no kind of number"),
        ('{"a":[1,2]}', {"a": "int64[3]"}, "'a': a has 2 numbers, not those of int64[3]"),
        ('{"a":[[1],[2,3]]}', {"a": "int64[?,?]"}, "'a': a is object, which is no kind of number"),
        ('{"a":[1,null]}', {"a": "int64[2]"}, "'a': a is object, which is no kind of number"),
        ('{"a":["1"]}', {"a": "int64[1]"}, "which is no kind of number"),
    ],
)
def test_a_line_that_does_not_fit_is_one_bad_sample(tmp_path, line, fields, text) -> None:
    """The name of the sample has file, number and byte, and the reason the key."""
    assert text in bad(tmp_path, line, fields=fields)


def test_long_keys_do_not_fill_a_reason(tmp_path) -> None:
    """Keys come from the data, so the reason shows the beginnings of a few."""
    keys = {f"{number}" + "k" * 10_000: 1 for number in range(100)}

    assert len(bad(tmp_path, json.dumps(keys))) < 1000


# --- images ---------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path) -> Path:
    """A folder of images, with one that is outside of it."""
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    for name in ("a", "b", "more/c", "../outside"):
        (folder / f"{name}.jpg").write_bytes(name.encode())
    return folder


def test_a_line_has_several_images_and_a_number_of_them_that_varies(pictures) -> None:
    """The default of an image is the path of another one; ``#`` counts those that there are."""
    content = '{"i":["a.jpg","b.jpg"]}\n{"i":["more/c.jpg"]}\n{"i":[]}'
    source = lines(
        pictures,
        content,
        fields={"first": "image", "second": "image", "count": "int64"},
        names={"first": "i.0", "second": "i.1", "count": "i.#"},
        defaults={"first": "a.jpg", "second": "a.jpg"},
    )
    found = [tuple(values.values()) for values in read_samples(source)]

    assert kind_of(source).columns(source, Storage())[0] == Column("first", "encoded")
    assert found == [(b"a", b"b", 2), (b"more/c", b"a", 1), (b"a", b"a", 0)]


def test_images_of_one_line_do_not_overwrite_each_other(pictures) -> None:
    """All values of a sample are valid until the next sample is read."""
    source = lines(pictures, '{"x":"a.jpg","y":"b.jpg"}', fields={"x": "image", "y": "image"})
    with opened(source) as (reader, _index):
        assert [bytes(value) for value in reader.read(0).values()] == [b"a", b"b"]


def test_paths_are_relative_to_the_file_or_to_the_image_root(pictures) -> None:
    """Each file has its own folder."""
    (pictures / "more" / "t.jsonl").write_text('{"x":"c.jpg"}')
    fields = {"x": "image"}
    beside = JsonlSource(root=pictures, shards=("*/t.jsonl",), fields=fields)
    assert read_samples(beside) == [{"x": b"more/c"}]

    (pictures / "more" / "t.jsonl").write_text('{"x":"more/c.jpg"}')
    rooted = JsonlSource(root=pictures, shards=("*/t.jsonl",), fields=fields, image_root=pictures)
    assert read_samples(rooted) == [{"x": b"more/c"}]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ('"../outside.jpg"', "a path that may lead out of the root"),
        ('"more/../../outside.jpg"', "a path that may lead out of the root"),
        ('"/etc/passwd"', "a path that may lead out of the root"),
        ('"link.jpg"', "a link leads out of the root, to "),
        ('"https://host/a.jpg"', "a URL that is not below "),
        ('"gone.jpg"', "No such file or directory"),
        ('"more"', "is a directory"),
        ('"\\u0000"', "embedded null"),
        ('"\\ud800"', "surrogates not allowed"),
        ('""', "is empty, and not the path of an image"),
        ("7", "'x' is a number in JSON, not the path of an image"),
        ("[]", "'x' is a list in JSON, not the path of an image"),
    ],
)
def test_an_image_that_cannot_be_used_is_a_bad_sample(pictures, path, text) -> None:
    """No path of the data leads out of the root."""
    (pictures / "link.jpg").symlink_to(pictures.parent / "outside.jpg")
    with opened(lines(pictures, f'{{"x":{path}}}', fields={"x": "image"})) as (reader, _index):
        assert text in reason(reader)


def test_images_may_be_anywhere_if_the_source_says_so(pictures) -> None:
    """This is for data of one's own."""
    content = json.dumps({"x": "../outside.jpg", "y": str(pictures / "a.jpg")})
    source = lines(pictures, content, fields={"x": "image", "y": "image"}, allow_outside_root=True)

    assert read_samples(source) == [{"x": b"../outside", "y": b"a"}]


# --- options, checks and the first configuration --------------------------------------------------


def test_options_that_make_no_sense_are_reported_together(tmp_path) -> None:
    """Each problem is in the text."""
    with pytest.raises(ValueError, match="shards must not be empty") as caught:
        JsonlSource(
            root=tmp_path,
            shards=(),
            fields={"a": "int64", "b": "image", "c": "image", "d": "floaty"},
            names={"e": "x"},
            defaults={"a": "text", "b": 7, "c": ""},
        )
    for text in (
        "names has 'e', which is none of the fields",
        "defaults: a is int64, so its default is a number",
        "defaults: b is an image, so its default is the path of an image file",
        "defaults: c is an image, so its default is the path of an image file",
        'd = "floaty" is not a valid type',
    ):
        assert text in str(caught.value)


def test_a_check_names_what_is_missing(tmp_path) -> None:
    """The file and the folder of the images are looked for, and no line is read."""
    source = JsonlSource(root=tmp_path, shards=("a.jsonl",), fields=FIELDS)
    assert any("a.jsonl" in problem for problem in source_problems(source))

    (tmp_path / "a.jsonl").write_text("{}")
    assert source_problems(source) == []
    absent = JsonlSource(root=tmp_path, shards=("a.jsonl",), fields=FIELDS, image_root=tmp_path / "gone")
    assert any("gone" in problem for problem in source_problems(absent))


def test_init_recognises_keys_and_images(pictures) -> None:
    """Keys that some lines lack, and values that no field can have, are left out."""
    rows = [
        {"file_name": "c.jpg", "meta": {"label": 1, "caption": "é"}, "vector": [0.5, 1], "some": 1, "turns": [{}]},
        {"file_name": "c.jpg", "meta": {"label": 2, "caption": ""}, "vector": [1, 2], "turns": []},
    ]
    (pictures / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = recognise(pictures, quick_look(Storage())).recognised

    assert found.source == JsonlSource(
        root=pictures,
        shards=("*.jsonl",),
        fields={"image": "image", "label": "int64", "meta_caption": "text", "vector": "float32[2]"},
        names={"image": "file_name", "label": "meta.label", "meta_caption": "meta.caption"},
        image_root=pictures / "more",
    )
    assert found.notes == (
        "1 key left out, missing or null in 1 of 2 samples: some",
        "1 key left out, lists of other things than numbers, or of different depth: turns",
    )
    assert {b"train.jsonl", b"more/c.jpg"} <= set(found.names)
    assert read_samples(found.source)[1]["label"] == 2


def test_init_names_a_file_without_objects(tmp_path) -> None:
    """The reason is that of the lines."""
    (tmp_path / "a.jsonl").write_text('{"a":\n{"b":\n')
    with pytest.raises(SourceInvalid, match=r"a\.jsonl has no line that can be read: one is no JSON"):
        recognise(tmp_path, quick_look(Storage()))


WRITE = """
import sys
import pyarrow
from datasets import Dataset

rows = {"text": ["é\\n1", "", "😀"], "label": [3, -1, 0], "ids": [[1], [], [2, 3]]}
rows["vector"] = [[0.5, 1.0], [1e-8, 2.0], [3.0, 4.0]]
rows["meta"] = [{"k": n, "none": None} for n in range(3)]
made = Dataset(pyarrow.table(rows), fingerprint="tests")  # it cannot make one with some versions of pyarrow
made.to_json(sys.argv[1])
made.to_json(sys.argv[1] + ".gz", compression="gzip")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
def test_lines_that_hugging_face_datasets_writes_are_read(tmp_path) -> None:
    """Its own ``to_json`` writes them; a compressed file is refused with the remedy."""
    command = [sys.executable, "-c", WRITE, str(tmp_path / "a.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = recognise(tmp_path / "a.jsonl", quick_look(Storage())).recognised.source

    assert isinstance(found, JsonlSource)
    assert found.fields == {
        "text": "text",
        "label": "int64",
        "ids": "int64[?]",
        "vector": "float32[2]",
        "meta_k": "int64",
    }
    samples = read_samples(found)
    assert [one["text"] for one in samples] == ["é\n1", "", "😀"]
    assert [one["ids"].tolist() for one in samples] == [[1], [], [2, 3]]
    assert [int(one["label"]) for one in samples] == [3, -1, 0]
    np.testing.assert_array_equal(samples[1]["vector"], np.array([1e-8, 2], np.float32))
    packed = JsonlSource(root=tmp_path, shards=("a.jsonl.gz",), fields=FIELDS)
    assert "compressed (gzip)" in refused(packed)
