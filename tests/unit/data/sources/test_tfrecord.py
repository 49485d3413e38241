"""TFRecord files: their records, the fields read of each, and messages for each damage."""

import os
import shlex
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.interface import open_reader
from batchd.data.sources.tfrecord import scan as tfrecord
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.sources.tfrecord.reader import TFRecordReader
from batchd.data.sources.tfrecord.scan import BLOCK_BYTES, KINDS
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from support.source_files import as_shared, nothing
from support.tfrecords import example, framed, sequence_example, write_records

FROM_TENSORFLOW = (
    "5f00000000000000503f28860a5d0a1b0a03626f78121412120a100000003f0000c03f000000c0000080400a140a0763617074696f6e12090a07"
    "0a056772c3bc6e0a0f0a0369647312081a060a040102ac020a170a056c6162656c120e1a0c0a0afdffffffffffffffff01e01d64a8"
)
"""A file that TensorFlow 2.21 wrote: box 0.5, 1.5, -2, 4; caption grün; ids 1, 2, 300; label -3."""
SEQUENCE_FROM_TENSORFLOW = (
    "5b000000000000001b01028a0a100a0e0a056c6162656c12051a030a010712470a1c0a0369647312150a051a030a01040a051a030a01050a05"
    "1a030a01060a270a07766563746f7273121c0a0c120a0a080000803f000000400a0c120a0a08000040400000804074937552"
)
"""Another: label 7 in the context; lists ids 4, 5, 6 and vectors [1, 2], [3, 4]."""
FIELDS = {"label": "int64"}


def source(root: Path, fields: dict[str, str] = FIELDS, **changes: object) -> TFRecordSource:
    return TFRecordSource(**{"root": root, "shards": ("*",), "fields": fields} | changes)


def opened(of: TFRecordSource, max_bytes: int = 1 << 20) -> TFRecordReader:
    """The reader of a worker, with the index as the worker gets it."""
    index = KINDS[TFRecordSource].scan(of, Survey(nothing))
    return open_reader(of, as_shared(index), max_bytes, Storage())


def read_one(root: Path, fields: dict[str, str], record: bytes, **changes: object) -> dict[str, object]:
    """The values of a record that is the only one in its file."""
    write_records(root / "a", [record])
    reader = opened(source(root, fields, **changes))
    try:
        return dict(reader.read(0))
    finally:
        reader.close()


def labels(root: Path, count: int, **changes: object) -> list[int]:
    """The labels of all samples, read from the last one to the first."""
    reader = opened(source(root, **changes))
    try:
        return [int(reader.read(sample)["label"]) for sample in reversed(range(count))][::-1]
    finally:
        reader.close()


# --- reading --------------------------------------------------------------------------------------


def test_what_tensorflow_writes_is_read(tmp_path) -> None:
    """The file is TensorFlow's own: its framing, checksums and field numbers."""
    (tmp_path / "a").write_bytes(bytes.fromhex(FROM_TENSORFLOW))
    fields = {"caption": "text", "ids": "int32[?]", "box": "float32[4]", "label": "int64"}
    reader = opened(source(tmp_path, fields))

    values = reader.read(0)
    reader.close()

    assert list(values) == list(fields)
    assert values["caption"] == "grün"
    assert (values["ids"].dtype, values["ids"].tolist()) == (np.int32, [1, 2, 300])
    assert (values["box"].dtype, values["box"].tolist()) == (np.float32, [0.5, 1.5, -2, 4])
    assert (values["label"].dtype, values["label"].shape, values["label"]) == (np.int64, (), -3)


def test_a_sequence_that_tensorflow_writes_is_read(tmp_path) -> None:
    """Context and feature lists are read, of numbers and of vectors."""
    (tmp_path / "a").write_bytes(bytes.fromhex(SEQUENCE_FROM_TENSORFLOW))
    reader = opened(source(tmp_path, {"label": "uint8", "ids": "int64[?]", "vectors": "float64[?,2]"}, sequence=True))

    values = reader.read(0)
    reader.close()

    assert (values["label"].dtype, int(values["label"])) == (np.uint8, 7)
    assert values["ids"].tolist() == [4, 5, 6]
    assert (values["vectors"].dtype, values["vectors"].tolist()) == (np.float64, [[1, 2], [3, 4]])


def test_what_the_tests_write_is_what_tensorflow_writes() -> None:
    """The writer of the tests makes the same bytes, so other tests are about real TFRecords."""
    written = example(box=[0.5, 1.5, -2.0, 4.0], caption="grün".encode(), ids=[1, 2, 300], label=[-3])
    lists = {"ids": [[4], [5], [6]], "vectors": [[1.0, 2.0], [3.0, 4.0]]}

    assert framed(written).hex() == FROM_TENSORFLOW
    assert framed(sequence_example({"label": [7]}, lists)).hex() == SEQUENCE_FROM_TENSORFLOW


def test_records_of_several_files_are_numbered_in_the_order_of_the_files(tmp_path) -> None:
    """The order is that of the paths, not of the patterns; each record has a name for messages."""
    for number in range(3):
        rows = [example(label=[10 * number + row]) for row in range(number + 1)]
        write_records(tmp_path / f"train-{number:05}-of-00003", rows)

    shards = ("train-{00001..00002}-of-00003", "train-00000-of-00003")
    reader = opened(source(tmp_path, shards=shards))

    assert [int(reader.read(sample)["label"]) for sample in (5, 0, 3, 1, 4, 2)] == [22, 0, 20, 10, 21, 11]
    assert (
        reader.name(4)
        == f"{tmp_path}/train-00002-of-00003: record 1 (byte {len(write_records(tmp_path / 'one', rows[:1]).read_bytes())})"
    )
    assert reader.known(4) == {}
    with pytest.raises(IndexError):
        reader.read(6)
    reader.close()


def test_the_bytes_of_an_image_come_as_they_are(tmp_path) -> None:
    """The value has the name of the field; the feature may have another name."""
    values = read_one(
        tmp_path,
        {"image": "image", "again": "uint8[?]", "label": "int64"},
        example(image__encoded=b"\xff\xd8 image", image__class__label=[3], other=[1.5]),
        names={"image": "image/encoded", "again": "image/encoded", "label": "image/class/label"},
    )

    assert bytes(values["image"]) == b"\xff\xd8 image"
    assert bytes(values["again"]) == b"\xff\xd8 image"
    assert values["label"] == 3
    assert KINDS[TFRecordSource].columns(source(tmp_path, {"image": "image", "x": "float32[?,4]"}), Storage()) == (
        Column("image", "encoded"),
        Column("x", dtype="float32", shape=(None, 4)),
    )


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("uint8[2,3]", [0, 1, 2, 253, 254, 255], np.array([[0, 1, 2], [253, 254, 255]], np.uint8)),
        ("uint8[2,3]", b"\x00\x01\x02\xfd\xfe\xff", np.array([[0, 1, 2], [253, 254, 255]], np.uint8)),
        ("uint8[?,3]", b"\x00\x01\x02\xfd\xfe\xff", np.array([[0, 1, 2], [253, 254, 255]], np.uint8)),
        ("uint8[?]", b"", np.empty(0, np.uint8)),
        ("int8", [-128], np.array(-128, np.int8)),
        ("uint64", [(1 << 63) - 1], np.array((1 << 63) - 1, np.uint64)),
        ("int64[2]", [-(1 << 63), (1 << 63) - 1], np.array([-(1 << 63), (1 << 63) - 1])),
        ("bool[3]", [1, 0, 1], np.array([True, False, True])),
        ("float16", [65504.0], np.array(65504, np.float16)),
        ("float32[?,2]", [1.0, 2.0, 3.0, 4.0], np.array([[1, 2], [3, 4]], np.float32)),
        ("float64[2,?]", [0.1, 2.0, 3.0, 4.0], np.array([[0.1, 2], [3, 4]], np.float32).astype(np.float64)),
        ("float32", [float("inf")], np.array(np.inf, np.float32)),
        ("float16", [float("-inf")], np.array(-np.inf, np.float16)),
        ("int64[?]", [], np.empty(0, np.int64)),
        ("int64[1]", [4], np.array([4])),
    ],
)
def test_numbers_have_the_type_and_the_shape_that_was_declared(tmp_path, text, values, expected) -> None:
    """A length of ? follows from the number of values."""
    value = read_one(tmp_path, {"x": text}, example(x=values))["x"]

    assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(value, expected)


@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1)),
    st.sampled_from(["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]),
)
def test_whole_numbers_come_as_they_are_or_not_at_all(tmp_path_factory, numbers, dtype) -> None:
    """No number wraps around."""
    root = tmp_path_factory.mktemp("numbers", numbered=True)
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if all(low <= number <= high for number in numbers):
        assert [int(number) for number in read_one(root, {"x": f"{dtype}[?]"}, example(x=numbers))["x"]] == numbers
    else:
        with pytest.raises(SampleUnreadable, match=rf"'x' is declared as {dtype}\[\?\], and has -?\d+ in it"):
            read_one(root, {"x": f"{dtype}[?]"}, example(x=numbers))


@pytest.mark.parametrize(
    ("text", "default", "expected"),
    [
        ("int64", -1, np.array(-1)),
        ("bool", True, np.array(True)),
        ("float32[2,2]", 0.5, np.full((2, 2), 0.5, np.float32)),
        ("float32[4]", (0, 0, 1, 1.5), np.array([0, 0, 1, 1.5], np.float32)),
        ("int32[?]", (), np.empty(0, np.int32)),
        ("int32[?,2]", (1, 2, 3, 4), np.array([[1, 2], [3, 4]], np.int32)),
        ("float64", float("nan"), np.array(np.nan)),
    ],
)
def test_a_default_stands_for_a_missing_feature(tmp_path, text, default, expected) -> None:
    """A feature without a kind counts as missing; present values override the default."""
    missing = read_one(tmp_path, {"x": text}, example(y=[1]), defaults={"x": default})["x"]

    assert (missing.dtype, missing.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(missing, expected, equal_nan=expected.dtype.kind == "f")
    assert read_one(tmp_path, {"x": "int64"}, example(x=[7]), defaults={"x": -1})["x"] == 7
    assert read_one(tmp_path, {"x": "text"}, example(), defaults={"x": "none"})["x"] == "none"
    assert read_one(tmp_path, {"x": "int64"}, bytes.fromhex("0a070a050a01781200"), defaults={"x": 5})["x"] == 5


@pytest.mark.parametrize(
    ("text", "steps", "expected"),
    [
        ("int64[?]", [[4], [5]], [4, 5]),
        ("int16[2]", [[4], [5]], [4, 5]),
        ("float32[?,2]", [], np.empty((0, 2))),
        ("uint8[?,2]", [b"ab", b"cd"], [[97, 98], [99, 100]]),
        ("float32[?,2,2]", [[1.0, 2.0, 3.0, 4.0]], [[[1, 2], [3, 4]]]),
        ("int64[2,?]", [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
    ],
)
def test_a_feature_list_gives_a_row_for_each_step(tmp_path, text, steps, expected) -> None:
    """Steps of one value give numbers, and steps of several give vectors."""
    value = read_one(tmp_path, {"x": text}, sequence_example({}, {"x": steps}), sequence=True)["x"]

    assert value.dtype == text.partition("[")[0]
    assert value.shape == np.shape(expected)
    assert np.array_equal(value, expected)


def test_a_length_of_question_mark_chooses_the_list_of_a_name_that_is_both(tmp_path) -> None:
    """Only the declaration can tell which of the two is meant."""
    record = sequence_example({"x": [1, 2]}, {"x": [[4], [5], [6]]})

    assert read_one(tmp_path, {"x": "int64[?]"}, record, sequence=True)["x"].tolist() == [4, 5, 6]
    assert read_one(tmp_path, {"x": "int64[2]"}, record, sequence=True)["x"].tolist() == [1, 2]
    assert read_one(tmp_path, {"x": "int64[?]"}, record)["x"].tolist() == [1, 2]


# --- bad samples ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "record", "what"),
    [
        ("int64", example(y=[1], z=[2]), r"is declared as int64, and is missing; there are 'y', 'z'"),
        ("int64", b"", r"is missing; there are none"),
        ("int64", example(x=[1, 2]), r"is declared as int64, and has 2 values"),
        ("int64[3]", example(x=[1, 2]), r"is declared as int64\[3\], and has 2 values"),
        ("int64", example(x=[]), r"has 0 values"),
        ("float32[?,3]", example(x=[1.0, 2.0]), r"is declared as float32\[\?,3\], and has 2 values"),
        ("int64", example(x=[1.0]), r"is declared as int64, and is of kind float_list, 1 long"),
        ("float32", example(x=[1]), r"is declared as float32, and is of kind int64_list, 1 long"),
        ("float32[?]", example(x=b"1234"), r"is of kind bytes_list, 1 long"),
        ("image", example(x=[1]), r"is declared as image, and is of kind int64_list, 1 long"),
        ("image", example(x=[b"a", b"b"]), r"is declared as image, and is of kind bytes_list, 2 long"),
        ("image", example(x=b""), r"is declared as image, and is empty"),
        ("uint8[?]", example(x=[b"a", b"b"]), r"is of kind bytes_list, 2 long"),
        ("uint8[3]", example(x=b"ab"), r"is declared as uint8\[3\], and has 2 values"),
        ("text", example(x=b"gr\xfcn"), r"is declared as text, and is not UTF-8 at its byte 2"),
        ("uint8", example(x=[256]), r"has 256 in it"),
        ("uint64", example(x=[-1]), r"has -1 in it"),
        ("bool", example(x=[2]), r"has 2 in it"),
        ("float16", example(x=[65520.0]), r"has 65520 in it"),
        ("int64", bytes.fromhex("0a070a050a01781200"), r"is declared as int64, and is of no kind"),
        ("int64[?]", sequence_example({}, {"x": [[1]]}), r"is a feature list: set sequence = true"),
    ],
)
def test_a_feature_that_is_not_what_was_declared_makes_a_bad_sample(tmp_path, text, record, what) -> None:
    """The message has the name of the field, its declaration and the value found."""
    with pytest.raises(SampleUnreadable, match=rf"^'x' .*{what}$"):
        read_one(tmp_path, {"x": text}, record)


@pytest.mark.parametrize(
    ("text", "steps", "what"),
    [
        ("int64[?]", [[1], [2.5]], r"in step 1 is of kind float_list, 1 long"),
        ("int64[?]", [[1], [2, 3]], r"in step 1 has 2 values"),
        ("int64[?]", [[1], [], [2]], r"in step 1 has 0 values"),
        ("int64[3]", [[1], [2]], r"is a feature list of 2"),
        ("int64", [[1]], r"is a feature list of 1"),
        ("text", [b"a"], r"is a feature list of 1"),
        ("float32[?,2]", [[1.0, 2.0, 3.0]], r"in step 0 has 3 values"),
        ("int64[2,?]", [[1, 2], [3]], r"in step 1 has 1 values, and 2 in step 0"),
        ("int8[?]", [[1], [300]], r"in step 1 has 300 in it"),
    ],
)
def test_a_feature_list_that_is_not_what_was_declared_makes_a_bad_sample(tmp_path, text, steps, what) -> None:
    """The message has the step, if one is at fault."""
    with pytest.raises(SampleUnreadable, match=rf"^'x' is declared as .*, and {what}$"):
        read_one(tmp_path, {"x": text}, sequence_example({}, {"x": steps}), sequence=True)


@pytest.mark.parametrize("data", [b"no example", b"\xff" * 9, example(x=[1])[:-1]])
def test_a_record_that_is_no_example_is_a_bad_sample(tmp_path, data) -> None:
    """The checksum of such a record may be right."""
    with pytest.raises(SampleUnreadable, match=r"^is not a tf\.train\.Example$"):
        read_one(tmp_path, FIELDS, data)
    with pytest.raises(SampleUnreadable, match=r"^is not a tf\.train\.SequenceExample$"):
        read_one(tmp_path, FIELDS, data, sequence=True)


@given(st.data())
def test_whatever_stands_in_a_record_is_a_sample_or_a_bad_one(tmp_path_factory, data) -> None:
    """There is no other outcome, even for a hostile record with a valid checksum."""
    root = tmp_path_factory.mktemp("any", numbered=True)
    good = bytearray(sequence_example({"a": [1], "b": b"text", "c": [0.5]}, {"d": [[1, 2], [3, 4]]}))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(good) - 1))
        good[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    fields = {"a": "int8", "b": "text", "c": "float16[1]", "d": "uint8[?,2]"}

    values, reason = None, ""
    try:
        values = read_one(root, fields, bytes(good), sequence=True)
    except SampleUnreadable as error:
        reason = str(error)

    if values is None:
        assert reason
        return
    assert (values["a"].dtype, values["a"].shape) == (np.int8, ())
    assert isinstance(values["b"], str)
    assert (values["c"].dtype, values["c"].shape) == (np.float16, (1,))
    assert (values["d"].dtype, values["d"].shape[1:]) == (np.uint8, (2,))


def test_a_file_that_changes_after_the_scan_makes_bad_samples(tmp_path) -> None:
    """The reason tells a damaged, cut, replaced or missing file."""
    file = write_records(tmp_path / "a", [example(label=[row]) for row in range(3)])
    good = file.read_bytes()
    size = len(good) // 3
    reader = opened(source(tmp_path))

    file.write_bytes(good[: 2 * size - 5] + b"\x77" + good[2 * size - 4 :])
    with pytest.raises(SampleUnreadable, match=r"^does not match its checksum: its data is damaged$"):
        reader.read(1)
    assert reader.read(2)["label"] == 2
    file.write_bytes(framed(example(label=[3])) + good[size:])
    with pytest.raises(SampleUnreadable, match=r"^has changed since the source was scanned$"):
        reader.read(0)
    os.truncate(file, 2 * size + 14)
    with pytest.raises(SampleUnreadable, match=rf"^is cut: the file ends at byte {2 * size + 14}$"):
        reader.read(2)
    assert reader.read(1)["label"] == 1
    reader.close()

    reader = TFRecordReader(source(tmp_path), reader._index, 1 << 20, Storage())
    file.unlink()
    with pytest.raises(SampleUnreadable, match="No such file"):
        reader.read(0)
    os.mkfifo(file)
    with pytest.raises(SampleUnreadable, match="Illegal seek"):
        reader.read(0)
    reader.close()


# --- errors of the scan ---------------------------------------------------------------------------


def test_every_bit_that_is_turned_is_found(tmp_path) -> None:
    """The scan finds errors in lengths, and the reader errors in data; other records stay good."""
    file = write_records(tmp_path / "a", [example(label=[row]) for row in range(3)])
    good = file.read_bytes()
    size = len(good) // 3
    for place in range(len(good)):
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        record, within = divmod(place, size)
        if within < 12:
            with pytest.raises(
                SourceInvalid, match=rf"{file}: the length of record {record} at byte {record * size} does not match"
            ):
                labels(tmp_path, 3)
            continue
        reader = opened(source(tmp_path))
        for sample in range(3):
            if sample == record:
                with pytest.raises(SampleUnreadable, match=r"^does not match"):
                    reader.read(sample)
            else:
                assert reader.read(sample)["label"] == sample
        reader.close()


def test_a_file_that_is_cut_anywhere_is_refused_with_the_record_and_the_byte(tmp_path) -> None:
    """A cut at the end of a record is the exception: the file gives no hint of further records."""
    file = write_records(tmp_path / "a", [example(label=[row]) for row in range(3)])
    good = file.read_bytes()
    size = len(good) // 3
    for end in range(1, len(good)):
        file.write_bytes(good[:end])
        record, within = divmod(end, size)
        if not within:
            assert labels(tmp_path, record) == list(range(record))
            continue
        text = (
            rf"{file} is cut: it ends at byte {end}, within record {record}, which begins at byte {record * size}; copy"
        )
        with pytest.raises(SourceInvalid, match=text):
            labels(tmp_path, 3)


@pytest.mark.parametrize(
    "bytes_in_record", [0, 1000, BLOCK_BYTES - 40, BLOCK_BYTES - 30, BLOCK_BYTES + 1, 2 * BLOCK_BYTES]
)
def test_records_are_found_wherever_blocks_end(tmp_path, bytes_in_record) -> None:
    """Records are shorter and longer than a block, and a block's end cuts some of them."""
    rows = [example(label=[row], more=b"x" * (bytes_in_record + row)) for row in range(6)]
    write_records(tmp_path / "a", rows * (300 if bytes_in_record < BLOCK_BYTES // 2 else 1))

    index = KINDS[TFRecordSource].scan(source(tmp_path), Survey(nothing))

    lengths = np.diff([*index.arrays["starts"], *index.arrays["sizes"]]) - 16
    assert lengths.tolist() == [len(row) for row in rows] * (len(index) // 6)


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=20), st.integers(16, 40))
def test_the_index_holds_each_record_whatever_the_block(tmp_path_factory, records, block_bytes) -> None:
    """With blocks of a few bytes, every seam meets the end of one."""
    root = tmp_path_factory.mktemp("blocks", numbered=True)
    file = write_records(root / "a", records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord, "BLOCK_BYTES", block_bytes)
        patch.setattr(tfrecord, "HEAD_BYTES", 16)
        index = KINDS[TFRecordSource].scan(source(root), Survey(nothing))

    data, ends = file.read_bytes(), [*index.arrays["starts"][1:], *index.arrays["sizes"]]
    assert [data[start + 12 : end - 4] for start, end in zip(index.arrays["starts"], ends, strict=True)] == records
    assert [struct.pack("<I", crc) for crc in index.arrays["checksums"]] == [data[end - 4 : end] for end in ends]


def test_an_empty_file_is_refused(tmp_path) -> None:
    """The message has its name, and the remedy."""
    write_records(tmp_path / "a", [example(label=[1])])
    (tmp_path / "b").touch()

    with pytest.raises(SourceInvalid, match=rf"{tmp_path}/b is empty; leave it out of the shards"):
        labels(tmp_path, 1)


@pytest.mark.parametrize("data", [b"no record at all" * 9, bytes(100), b"\xff" * 100, b"\xff\xd8\xff" + bytes(99)])
def test_what_is_no_tfrecord_file_is_refused(tmp_path, data) -> None:
    """The message names the file."""
    (tmp_path / "a").write_bytes(data)

    with pytest.raises(SourceInvalid, match=rf"{tmp_path}/a: the length of record 0 .* this is no TFRecord file"):
        labels(tmp_path, 1)


def test_a_length_that_no_record_can_have_is_refused(tmp_path) -> None:
    """The checksum of such a length may be right."""
    header = struct.pack("<Q", 1 << 40)
    (tmp_path / "a").write_bytes(framed(example(label=[1])) + header + framed_checksum(header) + bytes(100))

    with pytest.raises(
        SourceInvalid, match=r"a: record 1 at byte \d+ says that it has 1099511627776 bytes, and no record"
    ):
        labels(tmp_path, 1)


def framed_checksum(data: bytes) -> bytes:
    """The masked checksum of some bytes."""
    return framed(data)[-4:]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("kind", "compress"),
    [
        ("gzip", "import sys, gzip; sys.stdout.buffer.write(gzip.compress(sys.stdin.buffer.read()))"),
        ("ZLIB", "import sys, zlib; sys.stdout.buffer.write(zlib.compress(sys.stdin.buffer.read()))"),
        ("ZLIB", "import sys, zlib; sys.stdout.buffer.write(zlib.compress(sys.stdin.buffer.read(), 9))"),
    ],
)
def test_compressed_files_are_refused_with_a_command_that_unpacks_them(tmp_path, kind, compress) -> None:
    """The command, copied from the message, unpacks the file."""
    file = write_records(tmp_path / "a", [example(label=[row]) for row in range(3)])
    packed = subprocess.run(["python3", "-c", compress], input=file.read_bytes(), capture_output=True, check=True)
    file.write_bytes(packed.stdout)

    with pytest.raises(SourceInvalid, match=rf"a is compressed \({kind}\).*; unpack it: ") as caught:
        labels(tmp_path, 3)
    command = str(caught.value).partition("unpack it: ")[2].removesuffix(" < FILE > UNPACKED")
    unpacked = subprocess.run(shlex.split(command), input=file.read_bytes(), capture_output=True, check=True)
    file.write_bytes(unpacked.stdout)
    assert labels(tmp_path, 3) == [0, 1, 2]


def test_a_record_whose_length_looks_like_a_compressed_file_is_none(tmp_path) -> None:
    """35,615 bytes and 559,903 bytes, as little-endian numbers, are 1f 8b and 1f 8b 08."""
    for length in (0x8B1F, 0x088B1F, 0x9C78):
        name = "x" * 32
        overhead = len(example(label=[1], **{name: b"x" * 1000})) - 1000
        rows = [example(label=[1], **{name: b"x" * (length - overhead - extra)}) for extra in range(8)]
        (record,) = [row for row in rows if len(row) == length]
        write_records(tmp_path / "a", [record])

        assert labels(tmp_path, 1) == [1]


def test_the_scan_reports_what_it_looked_at(tmp_path) -> None:
    """The scan records each file, so an index is reused only for the same files."""
    write_records(tmp_path / "sub/a", [example(label=[1])])
    seen = Survey(nothing)
    KINDS[TFRecordSource].scan(source(tmp_path, shards=("sub/*",)), seen)

    assert {tmp_path / "sub", tmp_path / "sub/a"} <= {Path(one.path) for one in seen.witnesses}


def test_the_digest_ignores_the_notation_of_options(tmp_path) -> None:
    """A name that is the field's own, and a number that stands for several."""
    write_records(tmp_path / "a", [example(label=[1])])

    def digest(**changes: object) -> str:
        return KINDS[TFRecordSource].scan(source(tmp_path, **changes), Survey(nothing)).digest

    assert digest(names={"label": "label"}) == digest()
    fields = {"x": "float32[2]"}
    assert digest(fields=fields, defaults={"x": 1}) == digest(fields=fields, defaults={"x": (1.0, 1.0)})


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": ()}, "shards must not be empty"),
        ({"root": Path()}, "root must not be empty"),
        ({"fields": {}}, r'fields must say what a sample consists of, as in fields = \{ image = "image"'),
        ({"fields": {"x": "int"}}, r'x = "int" is not a valid type'),
        ({"fields": {"x": "int64[?,?]"}}, r'x = "int64\[\?,\?\]": one length may be \?'),
        ({"names": {"y": "z"}}, "names has 'y', which is none of the fields label"),
        ({"names": {"label": ""}}, "names.label must not be empty"),
        ({"defaults": {"y": 1}}, "defaults has 'y', which is none of the fields label"),
        (
            {"names": {"labl": "z"}, "defaults": {"lable": 1}},
            "did you mean label.; defaults has 'lable', which is none of the fields label; did you mean label",
        ),
        ({"defaults": {"label": "x"}}, "label is int64, so its default is a number"),
        ({"defaults": {"label": 1.5}}, r"label is int64, so 1\.5 cannot be in it"),
        ({"defaults": {"label": True}}, "label is int64, so True cannot be in it"),
        ({"defaults": {"label": 1 << 63}}, "label is int64, so 9223372036854775808 cannot be in it"),
        ({"defaults": {"label": (1,)}}, "label is int64, so its default is not 1 number"),
        ({"fields": {"x": "bool"}, "defaults": {"x": 2}}, "x is bool, so 2 cannot be in it"),
        ({"fields": {"x": "float16"}, "defaults": {"x": 1e6}}, r"x is float16, so 1000000\.0 cannot be in it"),
        ({"fields": {"x": "image"}, "defaults": {"x": ""}}, "x is image, so nothing can stand for it"),
        ({"fields": {"x": "text"}, "defaults": {"x": 1}}, "x is text, so its default is a text"),
        (
            {"fields": {"x": "int8[?]"}, "defaults": {"x": 1}},
            r"x is int8\[\?\], so its default is a list, such as \[\]",
        ),
        ({"fields": {"x": "int8[?,2]"}, "defaults": {"x": (1,)}}, r"so its default is not 1 number"),
        ({"fields": {"x": "int8[2]"}, "defaults": {"x": (1, 128)}}, r"x is int8\[2\], so 128 cannot be in it"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message) -> None:
    """The message has the key and the field."""
    with pytest.raises(ValueError, match=message):
        TFRecordSource(**{"root": Path("/a"), "shards": ("*",), "fields": FIELDS} | changes)


def test_patterns_are_checked_without_looking_at_any_file(tmp_path) -> None:
    """`batchd check` reports them, and a missing folder, too."""
    assert KINDS[TFRecordSource].problems(source(tmp_path, shards=("a-{9..1}",)), Storage()) == [
        "shards: {9..1} goes down; write the smaller number first"
    ]
    assert KINDS[TFRecordSource].problems(source(tmp_path / "b"), Storage()) == [f"there is no folder {tmp_path / 'b'}"]
