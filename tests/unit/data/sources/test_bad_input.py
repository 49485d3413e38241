"""Outcomes of bad input: a table of all sources that read files, and of all kinds of damage.

There are two outcomes. The scan refuses a source that cannot be served (``SourceInvalid``), and a
sample that becomes bad after the scan raises ``SampleUnreadable``. Both name the file. Nothing
hangs, no other error is raised, and each value that is read has the type of its column.
"""

import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.files.options import FolderSource, GlobSource, ListSource
from batchd.data.sources.interface import Reader, kind_of, open_reader
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.scan import scan_source
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.sources.tokens.options import TokensSource
from batchd.data.sources.video.options import VideoSource
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import SourceInvalid
from support.lmdb_files import write_lmdb
from support.megatron import write_megatron
from support.parquet_files import write_parquet
from support.shards import write_shard
from support.source_files import nothing, source_problems
from support.tfrecords import example, write_records
from support.videos import Coding, write_video

IMAGES = [bytes([number]) * (40 + number) for number in range(4)]
MAX_BYTES = 1000
Made = tuple[SourceOptions, Path]
"""A source, and its file that the test damages."""


def folder(root: Path) -> Made:
    for number, image in enumerate(IMAGES):
        (root / f"{number}.jpg").write_bytes(image)
    return FolderSource(path=root), root / "2.jpg"


def glob(root: Path) -> Made:
    return GlobSource(root=root, patterns=("*.jpg",), path_bytes=20), folder(root)[1]


def list_of_files(root: Path) -> Made:
    folder(root)
    (root / "list.txt").write_text("".join(f"{number}.jpg {number}\n" for number in range(4)))
    return ListSource(path=root / "list.txt"), root / "list.txt"


def webdataset(root: Path) -> Made:
    members = [(f"{n}.{end}", data) for n, image in enumerate(IMAGES) for end, data in (("jpg", image), ("cls", b"7"))]
    return WebDatasetSource(root=root, shards=("*.tar",)), write_shard(root / "a.tar", members)


def webdataset_fields(root: Path) -> Made:
    box = io.BytesIO()
    np.save(box, np.arange(4, dtype=np.float32))
    endings = {"seg.png": b"mask", "txt": b"a text", "box.npy": box.getvalue(), "json": b'{"score": 1.5}', "cls": b"7"}
    members = [
        (f"{n}.{end}", data) for n, image in enumerate(IMAGES) for end, data in (("jpg", image), *endings.items())
    ]
    fields = {
        "image": "image",
        "mask": "image",
        "caption": "text",
        "box": "float32[4]",
        "score": "float32",
        "label": "int64",
    }
    names = {"mask": "seg.png", "caption": "txt"}
    return WebDatasetSource(root=root, shards=("*.tar",), fields=fields, names=names), write_shard(
        root / "a.tar", members
    )


def tfrecord(root: Path) -> Made:
    file = write_records(root / "a.rec", [example(image=[image], label=[n]) for n, image in enumerate(IMAGES)])
    return TFRecordSource(root=root, shards=("*.rec",), fields={"image": "image", "label": "int64"}), file


def csv(root: Path) -> Made:
    (root / "a.csv").write_text('x,name\n1.5,one\n2,two\n3,"th""ree"\n4,four\n')
    return CsvSource(path=root / "a.csv", fields={"x": "float32", "name": "text"}), root / "a.csv"


def jsonl(root: Path) -> Made:
    rows = "".join(f'{{"x": {n}.5, "meta": {{"ids": [{n}, 7]}}, "name": "n{n}"}}\n' for n in range(4))
    (root / "a.jsonl").write_text(rows)
    fields = {"x": "float32", "ids": "int16[2]", "name": "text"}
    return JsonlSource(root=root, shards=("*.jsonl",), fields=fields, names={"ids": "meta.ids"}), root / "a.jsonl"


def npy(root: Path) -> Made:
    array = np.arange(24, dtype=np.int16).reshape(4, 6)
    np.save(root / "a.npy", array)
    return NpySource(path=root / "a.npy", field="x"), root / "a.npy"


def npz(root: Path) -> Made:
    np.savez(root / "a.npz", x=np.arange(24.0).reshape(4, 6), y=np.arange(4))
    return NpzSource(path=root / "a.npz"), root / "a.npz"


def raw(root: Path) -> Made:
    (root / "a.bin").write_bytes(bytes(range(4 * 7)))
    return RawSource(path=root / "a.bin", record={"label": "uint8", "x": "uint8[2,3]"}), root / "a.bin"


def tokens(root: Path) -> Made:
    (root / "a.bin").write_bytes(np.arange(8, dtype=np.uint16).tobytes())
    return TokensSource(path=root / "a.bin", dtype="uint16", length=2), root / "a.bin"


def documents(root: Path) -> Made:
    write_megatron(root / "a.bin", [[[n, 1]] for n in range(4)], "int32")
    return TokensSource(path=root / "a.bin", format="megatron", dtype="int32", field="x"), root / "a.bin"


def index_of_documents(root: Path) -> Made:
    return documents(root)[0], root / "a.idx"


def parquet(root: Path) -> Made:
    columns = {"image": pa.array(IMAGES, pa.binary()), "label": pa.array(range(4), pa.int64())}
    file = write_parquet(root / "a.parquet", columns, row_group_size=2)
    return ParquetSource(root=root, shards=("*.parquet",), fields={"image": "image", "label": "int64"}), file


def lmdb(root: Path) -> Made:
    file = write_lmdb(root / "a.lmdb", {b"%d" % number: image for number, image in enumerate(IMAGES)}, subdir=False)
    return LmdbSource(path=file, fields={"image": "image"}), file


def video(root: Path) -> Made:
    file = write_video(root / "a.avi", 4, Coding("mjpeg", {"strict": "-2"}, pixels="yuvj420p", b_frames=0))
    return VideoSource(root=root, files=("*.avi",), size=(24, 32)), file


KINDS: dict[str, Callable[[Path], Made]] = {
    kind.__name__: kind
    for kind in (
        folder,
        glob,
        list_of_files,
        webdataset,
        webdataset_fields,
        tfrecord,
        csv,
        jsonl,
        npy,
        npz,
        raw,
        tokens,
        documents,
        index_of_documents,
        parquet,
        lmdb,
        video,
    )
}
SCANNED = {"list_of_files", "index_of_documents"}
"""Kinds whose file is read by the scan alone."""
HELD = {"lmdb"}
"""Kinds that map their file: a cut kills the process, which ``tests/process`` tests."""


pytestmark = pytest.mark.usefixtures("forked_scans")
everywhere = pytest.mark.parametrize("tries", [20, pytest.param(1000, marks=pytest.mark.slow)])


def places(data: bytes, tries: int) -> range:
    return range(0, len(data), max(1, len(data) // tries))


@pytest.fixture
def made_by(request: pytest.FixtureRequest) -> str:
    """The source of this name in the table."""
    return request.node.callspec.params["made"]


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    root = tmp_path / "data"
    root.mkdir()
    return KINDS[request.param](root)


def outcome(source: SourceOptions, file: Path) -> str:
    """Scan and read everything: "refused", or "+" for each readable and "-" for each bad sample."""
    try:
        scanned = scan(source)
    except SourceInvalid as error:
        named = str(error)
        assert str(file) in named or str(file.parent) in named, f"the file is not named: {named}"
        return "refused"
    return scanned()


def scan(source: SourceOptions) -> Callable[[], str]:
    """Scan; return a function that reads everything and returns its ``outcome``."""
    columns = {column.name: column for column in kind_of(source).columns(source, Storage())}
    index = scan_source(source, nothing, IndexCache(None), Storage())

    def read_all() -> str:
        reader = open_reader(source, index, MAX_BYTES, Storage())
        told = "".join(read(reader, sample, columns) for sample in range(len(index)))
        reader.close()
        return told

    return read_all


def read(reader: Reader, sample: int, columns: dict[str, Column]) -> str:
    assert "/data/" in reader.name(sample)
    try:
        values = reader.read(sample)
    except SampleUnreadable as bad:
        return "-" if str(bad) else "no reason"
    for name, column in columns.items():
        check(values[name], column)
    return "+"


def check(value: Any, column: Column) -> None:
    """Assert that a value has the type of its column."""
    if column.kind == "encoded":
        assert isinstance(value, memoryview)
        assert 0 < len(value) <= MAX_BYTES
    elif column.kind == "text":
        assert isinstance(value, str)
    else:
        array = np.asarray(value)
        assert column.takes(array.shape)
        assert np.can_cast(array.dtype, column.dtype, "same_kind")


def test_good_input_is_read(made: Made) -> None:
    """This shows that the other tests start from readable input."""
    source, file = made

    assert source_problems(source) == []
    assert outcome(source, file) == "++++"


def test_a_file_that_is_missing_is_refused(made: Made) -> None:
    """A missing file among many images is not an error: the scan does not list it."""
    source, file = made
    file.unlink()

    assert outcome(source, file) == ("+++" if isinstance(source, FolderSource | GlobSource) else "refused")


def test_a_file_that_is_empty_is_refused_or_a_bad_sample(made: Made) -> None:
    """An empty file never gives a sample without bytes."""
    source, file = made
    file.write_bytes(b"")

    assert outcome(source, file) == ("++-+" if isinstance(source, FolderSource | GlobSource) else "refused")


@pytest.mark.thorough(after_first=True)
@everywhere
def test_a_file_that_is_cut_anywhere_has_an_outcome(made: Made, tries: int) -> None:
    """Each length of the file is read, refused or bad."""
    source, file = made
    data = file.read_bytes()
    for length in (*places(data, tries), len(data) - 1):
        file.write_bytes(data[:length])
        outcome(source, file)


@pytest.mark.thorough(after_first=True)
@everywhere
def test_a_file_with_any_byte_changed_has_an_outcome(made: Made, tries: int) -> None:
    """The test changes every few bytes in two ways."""
    source, file = made
    data = file.read_bytes()
    for place in places(data, tries):
        for mask in (0x01, 0xFF):
            file.write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
            outcome(source, file)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("content", [b"\0" * 3000, b"\xff" * 3000, b"<html>not found</html>", b"\x1f\x8b\x08\0" * 99])
def test_a_file_of_something_else_has_an_outcome(content: bytes, made: Made) -> None:
    """The file holds zeros, ones, a web page or compressed bytes."""
    source, file = made
    file.write_bytes(content)

    told = outcome(source, file)

    assert told == "refused" or isinstance(source, FolderSource | GlobSource | RawSource | TokensSource)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("what", ["fifo", "folder", "loop"])
def test_a_path_without_a_regular_file_is_refused_at_once(what: str, made: Made) -> None:
    """A FIFO without a writer does not block the scan."""
    source, file = made
    file.unlink()
    if what == "fifo":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    else:
        file.symlink_to(file)

    told = outcome(source, file)

    assert told == "refused" or isinstance(source, FolderSource | GlobSource)


def test_a_file_that_vanishes_after_the_scan_makes_bad_samples(made: Made, made_by: str) -> None:
    """Only the samples of that file are bad."""
    source, file = made
    read_all = scan(source)
    shutil.move(file, file.parent.parent / "elsewhere")

    told = read_all()

    one_of_many = isinstance(source, FolderSource | GlobSource)
    assert told == ("++-+" if one_of_many else "++++" if made_by in SCANNED else "----")


RECORDS = {
    "webdataset": "a.tar: 2.jpg (byte 4608)",
    "tfrecord": "a.rec: record 2 (byte 179)",
    "csv": "a.csv: record 3 (byte 21)",
    "jsonl": "a.jsonl: record 3 (byte 100)",
    "npy": "a.npy: sample 2 (byte 152)",
    "raw": "a.bin: sample 2 (byte 14)",
    "tokens": "a.bin: sample 2 (byte 8)",
    "documents": "a.bin: document 2 (byte 16)",
    "parquet": "a.parquet: row 2",
    "lmdb": "a.lmdb: 2",
}
"""Name of the third sample's file, with its record and its place where the kind has these."""


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("damage", ["vanished", "cut"])
def test_the_error_of_a_lost_record_has_its_place_and_the_state_of_its_file(
    kind: str, damage: str, tmp_path: Path
) -> None:
    """The sample's name has file and record once; the reason has the remaining size of the file."""
    root = tmp_path / "data"
    root.mkdir()
    source, file = KINDS[kind](root)
    index = scan_source(source, nothing, IndexCache(None), Storage())
    reader = open_reader(source, index, MAX_BYTES, Storage())
    left = file.stat().st_size // 3
    if damage == "vanished":
        file.unlink()
    else:
        os.truncate(file, left)

    with pytest.raises(SampleUnreadable) as lost:
        reader.read(2)
    name, reason = reader.name(2), str(lost.value)
    reader.close()

    assert name == f"{root}/{RECORDS[kind]}"
    assert re.search("No such file" if damage == "vanished" else rf"\b{left}\b", reason)
    assert str(file) not in reason
    assert "record 2" not in reason
    assert kind != "parquet" or "(row group 1, row 0 of it)" in reason


def test_a_file_that_is_cut_after_the_scan_makes_bad_samples(made: Made, made_by: str) -> None:
    """No process gets a SIGBUS."""
    source, file = made
    if made_by in HELD:
        pytest.skip("only a test with a daemon can show the outcome")
    read_all = scan(source)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])

    told = read_all()

    assert "-" in told or made_by in SCANNED or isinstance(source, FolderSource | GlobSource)


def test_a_record_that_is_too_large_is_a_bad_sample(made: Made) -> None:
    """No kind of source reads more than ``max_bytes`` for one sample."""
    source, _ = made
    index = scan_source(source, nothing, IndexCache(None), Storage())
    reader = open_reader(source, index, 3, Storage())

    for sample in range(len(index)):
        with pytest.raises(SampleUnreadable, match="more than"):
            reader.read(sample)
    reader.close()
