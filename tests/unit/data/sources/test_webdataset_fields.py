"""Fields of tar shards' samples: their members, their values, and messages for each damage."""

import io
import json
import tomllib
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.commands.prepare import source_table
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.interface import Reader, open_reader
from batchd.data.sources.options import source_from_plain, source_to_plain
from batchd.data.sources.webdataset.options import Member, WebDatasetSource, usual_member
from batchd.data.sources.webdataset.scan import KINDS
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd.worker.members import MemberEncoder
from support.images import encode, jpeg, photo
from support.shards import write_shard
from support.source_files import as_shared, nothing

ALL = {"image": "image", "mask": "image", "caption": "text", "box": "float32[4]", "score": "float64", "label": "int64"}
"""A field of every kind, each from its usual member."""


def npy(array: Any) -> bytes:
    """The array as numpy saves it."""
    stream = io.BytesIO()
    np.save(stream, np.asarray(array))
    return stream.getvalue()


MEMBERS = {
    "jpg": b"an image",
    "mask.png": b"a mask",
    "caption.txt": "grün".encode(),
    "box.npy": npy(np.arange(4, dtype=np.float32)),
    "json": b'{"score": 0.1, "more": null}',
    "cls": b"7\n",
}


def source(root: Path, fields: dict[str, str] | None, **changes: object) -> WebDatasetSource:
    return WebDatasetSource(**{"root": root, "shards": ("*.tar",), "fields": fields} | changes)


def opened(of: WebDatasetSource, max_bytes: int = 1 << 20) -> Reader:
    """The reader of a worker, with the index as the worker gets it."""
    index = KINDS[WebDatasetSource].scan(of, Survey(nothing))
    return open_reader(of, as_shared(index), max_bytes, Storage())


def write(root: Path, *samples: dict[str, bytes]) -> Path:
    """Write a shard of samples that are called 0, 1, ..."""
    members = [(f"{number}.{end}", data) for number, sample in enumerate(samples) for end, data in sample.items()]
    return write_shard(root / "a.tar", members)


def plain(values: Any) -> dict[str, Any]:
    return {
        name: bytes(value)
        if isinstance(value, memoryview)
        else value
        if isinstance(value, (str, list, dict))
        else np.asarray(value)
        for name, value in values.items()
    }


def read_one(root: Path, kind: str, ending: str, data: bytes, **changes: object) -> Any:
    """The value of one field ``x`` that comes from one member."""
    write(root, {ending.partition(":")[0]: data})
    reader = opened(source(root, {"x": kind}, names={"x": ending}, **changes))
    try:
        return plain(reader.read(0))["x"]
    finally:
        reader.close()


def test_each_field_comes_from_its_member(tmp_path: Path) -> None:
    """Without ``names``, members are those that `prepare` writes, in any order, among others."""
    others = {ending: MEMBERS[ending] for ending in reversed(MEMBERS)} | {
        "cls": b"-8",
        "mp4": b"not read",
        "jpg": b"i" * 9,
    }
    write(tmp_path, MEMBERS, others)
    reader = opened(source(tmp_path, ALL))

    for sample, image, label in ((1, b"i" * 9, -8), (0, b"an image", 7)):
        found = plain(reader.read(sample))
        assert list(found) == list(ALL)
        assert (found["image"], found["mask"], found["caption"]) == (image, b"a mask", "grün")
        assert (found["box"].dtype, found["box"].tolist()) == (np.float32, [0, 1, 2, 3])
        assert (found["score"].dtype, found["score"].item()) == (np.float64, 0.1)
        assert (found["label"].dtype, found["label"].item()) == (np.int64, label)
    assert reader.name(1) == f"{tmp_path}/a.tar: 1"
    reader.close()


def test_names_say_which_member_it_is(tmp_path: Path) -> None:
    """A name may list alternatives, and several fields may share the keys of one object."""
    annotation = json.dumps({"w": 3, "size": [1, 2], "text": "wörter"}).encode()
    write(tmp_path, {"ann.json": annotation, "b.png": b"B", "c.png": b"C"}, {"ann.json": annotation, "c.png": b"C"})
    fields = {"a": "image", "width": "uint8", "size": "int16[2]", "said": "text", "all": "text"}
    names = {
        "a": "b.png;c.png",
        "width": "ann.json:w",
        "size": "ann.json:size",
        "said": "ann.json:text",
        "all": "ann.json",
    }
    reader = opened(source(tmp_path, fields, names=names))

    first, second = plain(reader.read(0)), plain(reader.read(1))

    assert (first["a"], second["a"]) == (b"B", b"C")
    assert (first["width"].item(), first["size"].tolist(), first["said"]) == (3, [1, 2], "wörter")
    assert json.loads(first["all"])["w"] == 3
    reader.close()


def test_a_name_may_have_the_dot_in_front_that_messages_show(tmp_path: Path) -> None:
    """The source is the same one: the digest does not change."""
    write(tmp_path, {"jpg": b"x", "seg.png": b"y", "json": b'{"w": 3}'})
    fields = {"image": "image", "mask": "image", "width": "int64"}
    plain, dotted = (
        KINDS[WebDatasetSource].scan(source(tmp_path, fields, names=names), Survey(nothing))
        for names in (
            {"image": "png;jpg", "mask": "seg.png", "width": "json:w"},
            {"image": ".png;.jpg", "mask": ".seg.png", "width": ".json:w"},
        )
    )

    assert len(dotted) == 1
    assert dotted.digest == plain.digest


def test_the_name_that_members_share_may_be_a_field(tmp_path: Path) -> None:
    """The field has its value for bad samples, too."""
    write_shard(tmp_path / "a.tar", [("v1.0/cat.jpg", b"x"), ("v1.0/cat.cls", b"1")])
    reader = opened(source(tmp_path, {"label": "int64"}, path_bytes=12))

    assert reader.read(0)["path"].tobytes() == b"v1.0/cat\0\0\0\0"
    assert reader.known(0)["path"].tobytes() == b"v1.0/cat\0\0\0\0"
    columns = KINDS[WebDatasetSource].columns(source(tmp_path, {"label": "int64"}, path_bytes=12), Storage())
    assert [column.text for column in columns] == [
        "int64",
        "uint8[12]",
    ]
    with pytest.raises(SourceInvalid, match=r"a\.tar: the name v1\.0/cat has 8 bytes, more than path_bytes = 7"):
        opened(source(tmp_path, {"label": "int64"}, path_bytes=7))
    reader.close()


def test_a_path_of_keys_leads_into_json(tmp_path: Path) -> None:
    """It leads to fields and to the label, as in lines of JSON.

    The whole name of a key comes first.
    """
    found = {"a": {"b": 7}, "boxes": [{"size": [1, 2]}, {"size": [3, 4]}], "c.d": 8, "c": {"d": 9}}
    write(tmp_path, {"json": json.dumps(found).encode(), "jpg": b"?"})
    names = {"x": "json:a.b", "y": "json:boxes.1.size", "z": "json:boxes.#", "w": "json:c.d"}
    fields = {"x": "int64", "y": "int64[2]", "z": "int64", "w": "int64"}

    with closing(opened(source(tmp_path, fields, names=names))) as reader:
        values = plain(reader.read(0))
    assert {name: value.tolist() for name, value in values.items()} == {"x": 7, "y": [3, 4], "z": 2, "w": 8}
    index = KINDS[WebDatasetSource].scan(source(tmp_path, None, label="json:boxes.0.size.1"), Survey(nothing))
    assert index.arrays["labels"].tolist() == [2]


@pytest.mark.parametrize(
    ("kind", "ending", "data", "value"),
    [
        ("int64", "cls", b" 12 ", 12),
        ("float32", "txt", b"-1.5e3", -1500),
        ("bool", "flag.txt", b"true", 1),
        ("float32[?,2]", "txt", b"1 2\n3 4\n", [[1, 2], [3, 4]]),
        ("int32[2]", "npy", npy(np.array([5, 6], ">i8")), [5, 6]),
        ("float64[?,?]", "npy", npy(np.asfortranarray(np.arange(6.0).reshape(2, 3))), [[0, 1, 2], [3, 4, 5]]),
        ("float32[?,4]", "npy", npy(np.empty((0, 4), np.float32)), []),
        ("uint8", "npy", npy(np.uint8(9)), 9),
        ("bool[2]", "npy", npy([True, False]), [1, 0]),
        ("uint8[3]", "bin", b"\x01\x02\x03", [1, 2, 3]),
        ("int16[?]", "bin", b"\x01\x00\xff\xff", [1, -1]),
        ("int32[2,2]", "json:x", b'{"x": [[1, 2], [3, 4]]}', [[1, 2], [3, 4]]),
        ("int32[2,2]", "json:x", b'{"x": [1, 2, 3, 4]}', [[1, 2], [3, 4]]),
        ("float32[?,4]", "json:x", b'{"x": []}', []),
        ("float32[?,?]", "json:x", b'{"x": [[1], [2]]}', [[1], [2]]),
        ("uint64", "json:x", b'{"x": 18446744073709551615}', (1 << 64) - 1),
        ("text", "json:x", '{"x": "ü"}'.encode(), "ü"),
        ("text", "txt", b"", ""),
    ],
)
def test_a_member_is_read_by_its_ending_and_its_field(
    tmp_path: Path, kind: str, ending: str, data: bytes, value: Any
) -> None:
    """Numbers come as digits, JSON, numpy arrays in any order, or plain bytes; texts as UTF-8."""
    found = read_one(tmp_path, kind, ending, data)

    if isinstance(value, str):
        assert found == value
        return
    column = KINDS[WebDatasetSource].columns(source(tmp_path, {"x": kind}, names={"x": ending}), Storage())[0]
    assert (found.dtype, found.ndim) == (column.dtype, len(column.shape))
    assert all(length in (None, there) for length, there in zip(column.shape, found.shape, strict=True))
    assert found.tolist() == value


@pytest.mark.parametrize(
    ("kind", "ending", "data", "reason"),
    [
        ("int64", "cls", b"cat", r"cls: x is 'cat', which is no whole number, so not int64"),
        ("uint8", "cls", b"256", r"cls: x is '256', and uint8 goes from 0 to 255"),
        ("int64", "cls", b"\xff", r"cls: x is no UTF-8: byte 0 of 1"),
        ("float32[4]", "txt", b"1 2 3", r"txt: x has 3 numbers, and float32\[4\] has 4"),
        ("text", "txt", b"a\xff", r"txt: x is no UTF-8: byte 1 of 2"),
        ("image", "jpg", b"", r"jpg: x is empty"),
        ("int64", "json:x", b"{", r"json: is no JSON: Expecting property name"),
        ("int64", "json:x", b"[" * 100_000, r"json: is no JSON"),
        ("int64", "json:x", b"\xff\xfe\x00", r"json: is no JSON"),
        ("int64", "json:x", b"[1]", r"json: is a list in JSON, not an object"),
        ("int64", "json:x", b'{"y": 1}', r"json:x: there is no 'x'; there are 'y', which the field x comes from"),
        ("int64", "json:x", b'{"x": null}', r"json:x: there is no 'x'"),
        ("int64", "json:x", b'{"x": "1"}', r'json:x: x is a text in JSON, not "int64"'),
        ("int64", "json:x", b'{"x": 1.5}', r"json:x: x is 1.5, which no int64 can be"),
        ("text", "json:size.w", b'{"size.w": 3}', r'json:size\.w: x is a number in JSON, not "text"'),
        ("int8", "json:x", b'{"x": 128}', r"json:x: x is 128, which no int8 can be"),
        ("int64", "json:x", b'{"x": 9007199254740993.0}', r"json:x: x is 9007199254740992.0, which no int64"),
        ("float32[2]", "json:x", b'{"x": [1, null]}', r"json:x: x is object, which is no kind of number"),
        ("float32[?,2]", "json:x", b'{"x": [[1, 2], [3]]}', r"json:x: x is object, which is no kind of number"),
        (
            "float32[2,3]",
            "json:x",
            b'{"x": [[1, 2], [3, 4], [5, 6]]}',
            r"json:x: x has the shape \[3, 2\], and is declared",
        ),
        ("float32[2]", "json:x", b'{"x": 1}', r"json:x: x is a number in JSON, not"),
        ("text", "json:x", b'{"x": {}}', r'json:x: x is an object in JSON, not "text"'),
        ("text", "json:x", b'{"x": "\\ud800"}', r"json:x: x has half a character in it"),
        (
            "float32[4]",
            "npy",
            npy(np.zeros(5, np.float32)),
            r'npy: x has the shape \[5\], and is declared as "float32\[4\]"',
        ),
        ("float32[4]", "npy", npy(np.zeros((2, 2), np.float32)), r"npy: x has the shape \[2, 2\]"),
        ("int32[4]", "npy", npy(np.full(4, 0.5)), r"npy: x is 0.5, which no int32 can be"),
        ("float32[4]", "npy", npy(np.zeros(4, np.complex64)), r"npy: x is of the type complex64"),
        (
            "float32[4]",
            "npy",
            npy(np.zeros(4, np.float32))[:-1],
            r"npy: x is cut: it has 143 bytes, and its header says 144",
        ),
        ("float32[4]", "npy", npy(np.zeros(4, np.float32)) + b"!", r"npy: x has something behind its array"),
        ("float32[4]", "npy", b"PK", r"npy: x is not a \.npy file: it begins with b'PK'"),
        ("float32[4]", "npy", b"", r"npy: x is not a \.npy file: it is empty"),
        ("int16[?]", "bin", b"\x01\x00\x02", r"bin: x has 3 bytes, which are no whole number of int16"),
    ],
)
def test_a_member_that_is_not_as_declared_is_a_bad_sample(
    tmp_path: Path, kind: str, ending: str, data: bytes, reason: str
) -> None:
    """The message has the member and what it is."""
    with pytest.raises(SampleUnreadable, match=f"^{reason}"):
        read_one(tmp_path, kind, ending, data)


def test_arrays_that_need_pickle_are_refused(tmp_path: Path) -> None:
    """Their headers show it, and nothing is unpickled."""
    stream = io.BytesIO()
    np.save(stream, np.array([{}], object), allow_pickle=True)

    with pytest.raises(SampleUnreadable, match="npy: x holds Python objects, which are never loaded"):
        read_one(tmp_path, "float32[1]", "npy", stream.getvalue())


def test_a_missing_member_is_a_bad_sample_or_its_default(tmp_path: Path) -> None:
    """The name has shard and key; a missing or null key of JSON counts as a missing member."""
    write(tmp_path, MEMBERS, {"jpg": b"x", "json": b'{"score": null}'}, {"jpg": b"x"})
    reader = opened(source(tmp_path, {"image": "image", "mask": "image"}))
    with pytest.raises(
        SampleUnreadable, match=r"^there is no member \.mask\.jpg or .*, which the field mask comes from$"
    ):
        reader.read(1)
    assert reader.name(1) == f"{tmp_path}/a.tar: 1"
    assert plain(reader.read(0))["mask"] == b"a mask"
    reader.close()

    fields = {name: kind for name, kind in ALL.items() if name != "mask"} | {"boxes": "int32[?,?]"}
    defaults = {"caption": "none", "box": (1, 2, 3, 4), "score": -1, "label": 5, "boxes": ()}
    filled = opened(source(tmp_path, fields, defaults=defaults))
    for sample in (1, 2):
        found = plain(filled.read(sample))
        assert (found["caption"], found["box"].tolist(), found["score"].item()) == ("none", [1, 2, 3, 4], -1)
        assert (found["label"].item(), found["boxes"].shape) == (5, (0, 0))
    filled.close()


def test_a_member_that_no_sample_has_is_said_at_the_start(tmp_path: Path) -> None:
    """A misspelt name must not give a million bad samples."""
    write(tmp_path, MEMBERS)

    with pytest.raises(
        SourceInvalid,
        match=r"no sample has a member \.segg\.png for the field mask; the first, 0 of .*a\.tar has \.jpg, \.mask",
    ):
        opened(source(tmp_path, {"mask": "image"}, names={"mask": "segg.png"}))


def test_members_that_are_too_large_are_bad_samples(tmp_path: Path) -> None:
    """Sizes are checked before anything is read; unused members of the sample do not count."""
    write(tmp_path, {**MEMBERS, "mask.png": b"m" * 300})

    reader = opened(source(tmp_path, ALL), 299)
    with pytest.raises(SampleUnreadable, match=r"^mask\.png: has 300 bytes, more than max_bytes = 299$"):
        reader.read(0)
    reader.close()
    reader = opened(source(tmp_path, {"image": "image"}), 299)
    assert plain(reader.read(0)) == {"image": b"an image"}
    reader.close()


def test_a_source_without_fields_is_what_it_was(tmp_path: Path) -> None:
    """Its digest is part of every saved position."""
    write(tmp_path, MEMBERS, {"jpg": b"more", "cls": b"3"})
    old = WebDatasetSource(root=tmp_path, shards=("*.tar",))

    index = KINDS[WebDatasetSource].scan(old, Survey(nothing))

    assert index.digest == "e2b6f8ab1432e407e275ade8f55a8e3647a8f6d75ef2c0484d9ccccdf6c495f2"
    assert [column.text for column in KINDS[WebDatasetSource].columns(old, Storage())] == ["image", "int64"]
    assert source_to_plain(old)["fields"] is None


@pytest.mark.parametrize(
    ("fields", "changes", "text"),
    [
        ({"a": "int65"}, {}, 'a = "int65" is not a valid type'),
        ({"index": "int64"}, {}, "every batch calls something else 'index'"),
        ({"a": "int64"}, {"names": {"b": "cls"}}, "names has 'b', which is none of the fields a"),
        ({"a": "int64"}, {"names": {"a": "json:"}}, 'names.a = "json:" is not a member'),
        ({"a": "image"}, {"names": {"a": "jpg;;png"}}, "is not a member"),
        ({"a": "image"}, {"names": {"a": "json:a"}}, "a is an image, and json:a is a value in JSON"),
        ({"a": "float32[2]"}, {"names": {"a": "pyd"}}, "a pickle, which batchd never reads"),
        ({"a": "float32[2]"}, {"names": {"a": "x.pth"}}, "a pickle, which batchd never reads"),
        ({"a": "float32[2]"}, {"names": {"a": "npz"}}, "holds several arrays"),
        ({"a": "float32[2]"}, {"names": {"a": "json"}}, 'name the key too, as in "json:a"'),
        ({"a": "float32[2]"}, {"names": {"a": "npy;txt"}}, "which are not read in the same way"),
        ({"a": "float32[?,?]"}, {"names": {"a": "txt"}}, "one length may differ from sample to sample, not several"),
        ({"a": "int8"}, {"defaults": {"b": 1}}, "defaults has 'b'"),
        ({"a": "int8"}, {"defaults": {"a": 300}}, "300 cannot be in it"),
        ({"a": "float32[?,?]"}, {"defaults": {"a": (1.0,)}}, "its default is"),
        ({"a": "image"}, {"defaults": {"a": "x"}}, "nothing can stand for it"),
        ({"path": "text"}, {"path_bytes": 4}, "path stands for two fields"),
        ({"image": "image"}, {"image": ("png",)}, "image and label are for a source without fields"),
        ({"image": "image"}, {"label": ""}, "image and label are for a source without fields"),
        (None, {"names": {"a": "b"}}, "names and defaults are of fields"),
        ({}, {}, 'fields must name at least one field, as in { image = "image", label = "int64" }'),
    ],
)
def test_fields_that_cannot_be_are_refused(
    fields: dict[str, str] | None, changes: dict[str, object], text: str
) -> None:
    """The configuration is refused before a shard is opened, with what to write instead."""
    with pytest.raises(ValueError, match=text.replace("[", r"\[").replace("?", r"\?")):
        source(Path("/a"), fields, **changes)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (Column("image", "encoded"), "jpg;jpeg;png;webp;gif;bmp"),
        (Column("mask", "encoded"), "mask.jpg;mask.jpeg;mask.png;mask.webp;mask.gif;mask.bmp"),
        (Column("label", dtype="uint8"), "cls"),
        (Column("label", dtype="float32"), "json:label"),
        (Column("box", dtype="float32", shape=(4,)), "box.npy"),
        (Column("caption", "text"), "caption.txt"),
    ],
)
def test_where_fields_usually_come_from(column: Column, text: str) -> None:
    """The members are those that `prepare` writes."""
    assert usual_member(column).text == text
    assert Member(("a", "b"), "k").text == "a;b:k"


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
_PLAIN = st.integers() | st.floats(allow_nan=False) | st.booleans() | _TEXT
NUMBERS = st.sampled_from(["bool", "uint8", "int16", "uint64", "int64", "float16", "float32", "float64"])


@st.composite
def columns_and_values(draw: st.DrawFn) -> tuple[dict[str, Column], list[dict[str, Any]]]:
    """Columns of any kind, under any name, and two samples of them."""
    names = draw(
        st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True), min_size=1, max_size=5, unique=True)
    )
    names = [name for name in names if name not in {"index", "valid"}] or ["label"]
    if draw(st.booleans()):
        names = list(dict.fromkeys([*names, *draw(st.permutations(["image", "label"]))]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    columns: dict[str, Column] = {}
    samples: list[dict[str, Any]] = [{}, {}]
    for name in names:
        kind = draw(st.sampled_from(["encoded", "text", "number", "array", "json", "bytes", "texts"]))
        if kind not in ("number", "array"):
            columns[name] = Column(name, kind, most=3 if kind == "texts" else 0)
        else:
            columns[name] = Column(name, dtype=draw(NUMBERS), shape=() if kind == "number" else (None, 3, None))
        for sample in samples:
            if kind == "encoded":
                sample[name] = memoryview(_IMAGES[rng.integers(2)])
            elif kind == "text":
                sample[name] = draw(_TEXT)
            elif kind == "texts":
                sample[name] = draw(st.lists(_TEXT, max_size=3))
            elif kind == "json":
                sample[name] = draw(st.recursive(_PLAIN, lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner)))
            elif kind == "bytes":
                sample[name] = memoryview(draw(st.binary(max_size=9)))
            else:
                shape = () if kind == "number" else (rng.integers(3), 3, rng.integers(1, 3))
                dtype = np.dtype(columns[name].dtype)
                raw = rng.integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
                sample[name] = raw.view(dtype).reshape(shape)
    return columns, samples


_IMAGES = [jpeg(photo(3, 4)), encode(photo(3, 4), ".png")]


@given(columns_and_values())
def test_what_prepare_writes_is_read_again_whole(made: tuple[dict[str, Column], list[dict[str, Any]]]) -> None:
    """The source that it prints reads any columns and values."""
    columns, samples = made
    encoder = MemberEncoder(columns, "png", 90, is_bgr=False)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        write(root, *(dict(encoder.members(sample)) for sample in samples))
        table = tomllib.loads(f"source = {source_table(root, 'a.tar', columns)}")["source"]
        plain_source = source_to_plain(WebDatasetSource(root=root, shards=("a.tar",))) | table
        reader = opened(source_from_plain(plain_source))
        for number, sample in enumerate(samples):
            found, expected = plain(reader.read(number)), plain(sample)
            assert list(found) == list(expected)
            for name, column in columns.items():
                if column.kind == "array":
                    assert (found[name].dtype, found[name].shape) == (column.dtype, expected[name].shape)
                    np.testing.assert_array_equal(found[name], expected[name])
                else:
                    assert found[name] == expected[name]
        reader.close()


@pytest.mark.parametrize(("image_format", "difference"), [("png", 0), ("jpg", 12)])
def test_pixels_come_back_as_images(tmp_path: Path, image_format: str, difference: int) -> None:
    """They are lossless in PNG and similar in JPEG; the first image has the plain ending."""
    columns = {
        "photo": Column("photo", dtype="uint8", shape=(None, None, 3)),
        "mask": Column("mask", dtype="uint8", shape=(64, 96, 1)),
        "planes": Column("planes", dtype="uint8", shape=(3, 4, 4), channels_first=True),
    }
    text = source_table(Path('/da"ta'), "a.tar", columns)

    assert tomllib.loads(f"source = {text}")["source"] == {
        "type": "webdataset",
        "root": '/da"ta',
        "shards": ["a.tar"],
        "fields": {"photo": "image", "mask": "image", "planes": "uint8[3,4,4]"},
        "names": {"photo": "jpg;jpeg;png;webp;gif;bmp"},
    }
    values = {"photo": photo(64, 96), "mask": photo(64, 96, seed=1)[:, :, :1], "planes": np.ones((3, 4, 4), np.uint8)}
    write(tmp_path, dict(MemberEncoder(columns, image_format, 90, is_bgr=False).members(values)))
    table = tomllib.loads(f"source = {source_table(tmp_path, 'a.tar', columns)}")["source"]
    reader = opened(source(tmp_path, table["fields"], names=table["names"]))
    found = reader.read(0)
    for name in ("photo", "mask"):
        pixels = cv2.imdecode(np.frombuffer(found[name], np.uint8), cv2.IMREAD_UNCHANGED)
        back = pixels.reshape(values[name].shape)[:, :, ::-1].astype(int)
        assert np.abs(back - values[name]).mean() <= difference
    assert np.array_equal(found["planes"], values["planes"])
    reader.close()


def test_an_image_and_a_label_need_no_fields() -> None:
    """The printed source has the shortest form that reads all fields."""
    pair = {"image": Column("image", "encoded"), "label": Column("label", dtype="int64")}

    assert "fields" not in source_table(Path("/a"), "a.tar", pair)
    assert 'fields = { label = "int64", image = "image" }' in source_table(
        Path("/a"), "a.tar", dict(reversed(pair.items()))
    )
    assert 'fields = { image = "image" }' in source_table(Path("/a"), "a.tar", {"image": pair["image"]})
