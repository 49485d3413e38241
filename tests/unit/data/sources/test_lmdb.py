"""Records of LMDB databases: their samples, and the error for each kind of damage."""

import mmap
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import lmdb
import msgpack
import numpy as np
import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.interface import open_reader
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.storage.access import Storage
from batchd.errors import SourceInvalid
from support.lmdb_files import open_lmdb, scan_lmdb, write_lmdb

OCR = {
    key: value
    for number in range(1, 31)
    for key, value in (
        (b"image-%09d" % number, b"image %d " % number * 600),
        (b"label-%09d" % number, f"w\u00f6rd {number}".encode()),
    )
} | {b"num-samples": b"30"}
PAIRS = {"image": "image", "label": "text"}
pytestmark = pytest.mark.usefixtures("forked_scans")


@pytest.mark.parametrize("subdir", [True, False])
def test_records_whose_keys_belong_together_are_one_sample(tmp_path, subdir) -> None:
    """The samples have the order of the keys, and keys of another form are skipped."""
    write_lmdb(tmp_path / "db", OCR, subdir=subdir)

    reader = open_lmdb(tmp_path / "db", PAIRS, key="{field}-*")
    for sample in reversed(range(30)):
        values = reader.read(sample)
        assert bytes(values["image"]) == OCR[b"image-%09d" % (sample + 1)]
        assert values["label"] == f"w\u00f6rd {sample + 1}"
    assert reader.name(0) == f"{tmp_path}/db: image-000000001"
    assert reader.known(0) == {}
    reader.close()


def test_every_record_is_a_sample_where_nothing_else_is_said(tmp_path) -> None:
    """Without a pattern every record is a sample; with a pattern, only matching records are."""
    write_lmdb(tmp_path / "db", {b"b": b"two", b"a": b"one", b"\xff\x00": b"three"})

    reader = open_lmdb(tmp_path / "db", {"image": "image"})
    assert [bytes(reader.read(sample)["image"]) for sample in range(3)] == [b"one", b"two", b"three"]
    assert reader.name(2) == rf"{tmp_path}/db: \xff\x00"
    reader.close()
    (tmp_path / "db/data.mdb").unlink()
    write_lmdb(tmp_path / "db", {b"a-1": b"one", b"b-1": b"two", b"a-2": b"three", b"a-": b"four"})
    some = open_lmdb(tmp_path / "db", {"image": "image"}, key="a-*")
    assert [some.name(sample)[-3:] for sample in range(2)] == ["a-1", "a-2"]
    with pytest.raises(IndexError):
        some.read(2)
    some.close()


def test_the_name_of_a_field_may_stand_anywhere_in_a_key(tmp_path) -> None:
    """A field can have another name in the database than in the batch; numbers may be digits."""
    write_lmdb(
        tmp_path / "db", {b"7.jpg": b"seven", b"7.cls": b"12", b"8.cls": b"-3", b"8.jpg": b"eight", b"7.txt": b"x"}
    )

    reader = open_lmdb(
        tmp_path / "db",
        {"image": "image", "label": "int16"},
        key="*.{field}",
        names={"image": "jpg", "label": "cls"},
        format="text",
    )
    found = [reader.read(sample) for sample in range(2)]
    assert [(bytes(one["image"]), int(one["label"]), one["label"].dtype) for one in found] == [
        (b"seven", 12, np.int16),
        (b"eight", -3, np.int16),
    ]
    reader.close()


def test_arrays_are_read_as_the_field_says(tmp_path) -> None:
    """Arrays are little-endian, and the last dimension is contiguous."""
    digits = np.arange(12, dtype="<f4").reshape(2, 2, 3)
    write_lmdb(tmp_path / "db", {b"0": digits[0].tobytes(), b"1": digits[1].tobytes(), b"2": b"short"})

    fixed, open_ = open_lmdb(tmp_path / "db", {"x": "float32[2,3]"}), open_lmdb(tmp_path / "db", {"x": "uint8[?]"})
    assert np.array_equal([fixed.read(sample)["x"] for sample in range(2)], digits)
    assert open_.read(2)["x"].tobytes() == b"short"
    with pytest.raises(SampleUnreadable, match="x has 5 bytes, which are no whole number of float32"):
        fixed.read(2)
    fixed.close()
    open_.close()


def test_maps_in_msgpack_have_all_fields_of_a_sample(tmp_path) -> None:
    """Bytes, text, numbers and lists are read; fields that are not declared are skipped."""
    fields = {
        "image": "image",
        "caption": "text",
        "label": "int64",
        "tokens": "int32[?]",
        "digit": "uint8[2,2]",
        "score": "float32",
    }
    record = {
        "img": b"jpeg",
        "caption": "\u00e4",
        "label": 3,
        "tokens": [1, 2],
        "digit": bytes(4),
        "score": 1,
        "more": [{}],
    }
    write_lmdb(
        tmp_path / "db", {b"a": msgpack.packb(record), b"b": msgpack.packb(record | {"tokens": []}), b"__len__": b"2"}
    )

    reader = open_lmdb(tmp_path / "db", fields, format="msgpack", names={"image": "img"})
    values = reader.read(1)
    assert (bytes(values["image"]), values["caption"], int(values["label"])) == (b"jpeg", "\u00e4", 3)
    assert (values["tokens"].tolist(), values["tokens"].dtype, values["digit"].shape) == ([1, 2], np.int32, (2, 2))
    assert (values["score"].dtype, float(values["score"]), reader.read(2)["tokens"].size) == (np.float32, 1.0, 0)
    with pytest.raises(SampleUnreadable, match="is int in msgpack, not a map"):
        reader.read(0)
    reader.close()


class _Evil:
    def __reduce__(self):
        return os._exit, (77,)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (pickle.dumps(_Evil()), "looks like a pickle, which batchd never reads"),
        (pickle.dumps({"label": 1}, 2), "looks like a pickle"),
        (b"", "is not msgpack"),
        (b"\xc1", "is not msgpack"),
        (msgpack.packb({"label": 1})[:-1], "is not msgpack"),
        (msgpack.packb({"label": 1}) + b"x", "is not msgpack: ExtraData"),
        (b"\x81\xa5label" + b"\x91" * 5000, "is not msgpack"),
        (msgpack.packb({"label": msgpack.ExtType(5, b"code")}), "is not msgpack: ValueError extension 5"),
        (msgpack.packb([1]), "is list in msgpack, not a map"),
        (msgpack.packb({"lable": 1}), "has no 'label'; there are 'lable'"),
        (msgpack.packb({"label": "1"}), 'label is str in msgpack, not "uint8"'),
        (msgpack.packb({"label": b"1"}), 'label is bytes in msgpack, not "uint8"'),
        (msgpack.packb({"label": None}), "label is NoneType"),
        (msgpack.packb({"label": 256}), "label is 256, which no uint8 can be"),
        (msgpack.packb({"label": 1.5}), "label is 1.5, which no uint8 can be"),
        (msgpack.packb({"label": float("nan")}), "label is nan, which no uint8 can be"),
    ],
)
def test_records_that_are_not_what_they_should_be_are_bad_samples(tmp_path, record, reason) -> None:
    """Such a record is a bad sample, and no code in it runs."""
    write_lmdb(tmp_path / "db", {b"a": record, b"b": msgpack.packb({"label": 255})})

    reader = open_lmdb(tmp_path / "db", {"label": "uint8"}, format="msgpack")
    with pytest.raises(SampleUnreadable, match=reason):
        reader.read(0)
    assert int(reader.read(1)["label"]) == 255
    reader.close()


@pytest.mark.parametrize("list_", [[1, [2]], ["a"], [1, None], [1 << 70], [[1, 2], [3]]])
def test_lists_that_are_no_numbers_are_bad_samples(tmp_path, list_) -> None:
    """Lists with other values than numbers are bad samples at any depth."""
    record = msgpack.packb({"x": list_}) if list_ != [1 << 70] else msgpack.packb({"x": [(1 << 64) - 1]})
    write_lmdb(tmp_path / "db", {b"a": record})

    reader = open_lmdb(tmp_path / "db", {"x": "int64[?]"}, format="msgpack")
    with pytest.raises(SampleUnreadable, match="x "):
        reader.read(0)
    reader.close()


@pytest.mark.parametrize(
    ("field", "record", "reason"),
    [
        ("image", b"", "image is empty"),
        ("image", b"x" * 101, "image has 101 bytes, more than max_bytes = 100"),
        ("text", b"\xff", "x is no UTF-8: byte 0 of 1"),
        ("int64", b"cat", "x is 'cat', which is not int64"),
        ("int64", b"1" * 65, "which is not int64"),
        ("int8", b"200", "x is 200, which no int8 can be"),
        ("float32", b"", "x is '', which is not float32"),
    ],
)
def test_values_that_do_not_fit_are_bad_samples(tmp_path, field, record, reason) -> None:
    """The error of the bad sample gives the reason."""
    write_lmdb(tmp_path / "db", {b"a": record})

    reader = open_lmdb(tmp_path / "db", {"image" if field == "image" else "x": field}, max_bytes=100, format="text")
    with pytest.raises(SampleUnreadable, match=reason):
        reader.read(0)
    reader.close()


def test_a_sample_without_one_of_its_records_is_refused(tmp_path) -> None:
    """The error names the key that exists and the key that is missing."""
    write_lmdb(tmp_path / "db", {key: value for key, value in OCR.items() if key != b"label-000000007"})

    with pytest.raises(SourceInvalid, match=r"db has the key 'image-000000007' and no 'label-000000007'"):
        scan_lmdb(tmp_path / "db", PAIRS, key="{field}-*")


def test_a_database_without_samples_is_refused_with_keys_that_it_has(tmp_path) -> None:
    """The error shows example keys; an empty database is rejected, too."""
    write_lmdb(tmp_path / "db", OCR)
    with pytest.raises(
        SourceInvalid, match=r"no key looks like img-\*; there are 61, such as 'image-000000001', 'image-0"
    ):
        scan_lmdb(tmp_path / "db", {"img": "image"}, key="{field}-*")
    write_lmdb(tmp_path / "empty", {})
    with pytest.raises(SourceInvalid, match=r"empty(/data\.mdb)?.* (holds no record|is empty)"):
        scan_lmdb(tmp_path / "empty", {"img": "image"})


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"no database" * 2000, bytes(8192)])
def test_what_is_no_database_is_refused(tmp_path, data) -> None:
    """The error names the path."""
    (tmp_path / "data.mdb").write_bytes(data)

    with pytest.raises(SourceInvalid, match=rf"{tmp_path}: (is empty|is not an LMDB database, or is damaged)"):
        scan_lmdb(tmp_path, {"image": "image"})


def test_a_database_that_is_cut_anywhere_is_refused(tmp_path) -> None:
    """The check runs before any access, because a missing mapped page would kill the process."""
    file = write_lmdb(tmp_path / "db", OCR)
    size = file.stat().st_size
    for length in range(size - 1, 0, -size // 7):
        os.truncate(file, length)
        with pytest.raises(
            SourceInvalid,
            match=rf"{tmp_path}/db: (the database is cut: it has {length} bytes, and .* need {size}|is no)",
        ):
            scan_lmdb(tmp_path / "db", PAIRS, key="{field}-*")


def test_damaged_pages_never_end_the_one_who_asks(tmp_path) -> None:
    """The scan runs in its own process: it finds the samples, or batchd reports the reason."""
    file = write_lmdb(tmp_path / "db", OCR)
    data = file.read_bytes()
    chance = random.Random(3)
    outcomes = set()
    for _ in range(8):
        changed = bytearray(data)
        for _ in range(60):
            changed[4096 * chance.randrange(2, len(data) // 4096) + chance.randrange(40)] = chance.randrange(256)
        file.write_bytes(changed)
        try:
            scan_lmdb(tmp_path / "db", PAIRS, key="{field}-*")
            outcomes.add("read")
        except SourceInvalid as error:
            assert "db" in str(error)  # noqa: PT017  of many outcomes one
            outcomes.add("refused")
    assert "refused" in outcomes


def test_a_scan_that_ends_by_a_signal_is_said_to(tmp_path, monkeypatch) -> None:
    """The error names the signal, for example when a file is truncated during the scan."""
    write_lmdb(tmp_path / "db", OCR)
    monkeypatch.setenv("BATCHD_FAILPOINTS", "scan.isolated=segv")

    with pytest.raises(
        SourceInvalid, match=r"db is damaged, or was changed while it was scanned.*signal 11 \(SIGSEGV\)"
    ):
        scan_lmdb(tmp_path / "db", PAIRS, key="{field}-*")


def test_a_database_that_is_cut_later_makes_bad_samples(tmp_path) -> None:
    """The length is checked before each read, so every sample is bad."""
    file = write_lmdb(tmp_path / "db", OCR)
    reader = open_lmdb(tmp_path / "db", PAIRS, key="{field}-*")
    reader.read(0)
    os.truncate(file, 8192)

    for sample in (0, 29):
        with pytest.raises(SampleUnreadable, match="the database is cut: it has 8192 bytes"):
            reader.read(sample)
    reader.close()


def test_what_is_cut_while_it_is_in_use_ends_the_process_by_sigbus(tmp_path) -> None:
    """LMDB's design makes this crash unavoidable; the next worker finds the database truncated."""
    write_lmdb(tmp_path / "db", OCR)
    program = (
        "import os, sys; from pathlib import Path; from support.lmdb_files import open_lmdb;"
        "path = Path(sys.argv[1]); image = open_lmdb(path, {'image': 'image'}, key='image-*').read(9)['image'];"
        "os.truncate(path / 'data.mdb', 8192); print(bytes(image))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "db")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )
    assert ended.returncode == -signal.SIGBUS


def test_a_database_that_is_gone_or_replaced_before_it_is_opened_makes_bad_samples(tmp_path) -> None:
    """The bad sample's error names the missing key."""
    file = write_lmdb(tmp_path / "db", OCR)
    source, index = scan_lmdb(tmp_path / "db", PAIRS, key="{field}-*")

    def reason() -> str:
        reader = open_reader(source, index, 1 << 20, Storage())
        with pytest.raises(SampleUnreadable) as caught:
            reader.read(3)
        reader.close()
        return str(caught.value)

    file.unlink()
    assert "No such file" in reason()
    write_lmdb(tmp_path / "db", {b"other": b"1"})
    assert "there is no key 'image-000000004' any more" in reason()
    file.write_bytes(b"nonsense" * 2000)
    assert "is not an LMDB database, or is damaged" in reason()


def test_several_streams_of_a_worker_share_one_open_database(tmp_path) -> None:
    """LMDB cannot open a database twice, so they share it; the last stream closes it."""
    write_lmdb(tmp_path / "db", OCR)
    readers = [open_lmdb(tmp_path / "db", PAIRS, key="{field}-*") for _ in range(3)]
    for reader in readers:
        assert readers[-1].read(5)["label"] == reader.read(5)["label"]
        reader.close()
        reader.close()
    again = open_lmdb(tmp_path / "db", PAIRS, key="{field}-*")
    assert again.read(5)["label"] == "w\u00f6rd 6"
    again.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fields": {}}, "fields must name at least one field"),
        ({"key": "a"}, r"key must have one \*"),
        ({"key": "*-*"}, r"key must have one \*"),
        ({"key": "{field}{field}*"}, r"\{field\} at most once"),
        ({"fields": {"a": "image", "b": "text"}}, "a record is one field"),
        ({"key": "{field}*", "format": "msgpack"}, r"so key must not have \{field\}"),
        (
            {"format": "text", "fields": {"x": "int64[2]"}},
            r'format = "text" has no lists of numbers, and fields\.x is one',
        ),
        ({"names": {"y": "z"}}, "none of the fields"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, text) -> None:
    """The error names the key."""
    with pytest.raises(ValueError, match=text):
        LmdbSource(**{"path": Path("/a"), "fields": {"x": "image"}} | changes)


def test_keys_that_no_sample_has_are_noted(tmp_path) -> None:
    """They are skipped, as the pattern says, and counted."""
    write_lmdb(tmp_path / "db", {**OCR, b"about": b"x"})

    _source, index = scan_lmdb(tmp_path / "db", PAIRS, key="{field}-*")
    assert index.notes == (f"keys that do not look like key, which no sample has: {tmp_path}/db: 'about' and 1 more",)
    assert scan_lmdb(tmp_path / "db", {"x": "text"})[1].notes == ()


def test_what_is_no_record_of_its_own_is_refused(tmp_path) -> None:
    """A name of another database, and a key with several records, of which one would be read."""
    with lmdb.open(str(tmp_path / "named"), max_dbs=1) as environment:
        inner = environment.open_db(b"train")
        with environment.begin(write=True) as writing:
            writing.put(b"a", b"1" * 48)
            writing.put(b"1", b"one", db=inner)
    with pytest.raises(SourceInvalid, match="has databases with names in it, such as 'train'"):
        scan_lmdb(tmp_path / "named", {"x": "text"})

    file = write_lmdb(tmp_path / "twice", {b"a": b"1"})
    data, page = bytearray(file.read_bytes()), mmap.PAGESIZE
    for meta in (0, page):
        data[meta + 92] |= 4  # the library lets only programs in C set it
    file.write_bytes(data)
    with pytest.raises(SourceInvalid, match="has keys with several records"):
        scan_lmdb(tmp_path / "twice", {"x": "text"})
