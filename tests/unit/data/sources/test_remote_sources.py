"""Sources over http and s3: samples and digest as from files, and errors of failing servers."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources import interface as kinds
from batchd.data.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.data.sources.composed.options import ConcatSource
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.files.options import FolderSource, GlobSource, ListSource
from batchd.data.sources.interface import Reader, kind_of, open_reader
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.scan import scan_source
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.sources.tokens.options import TokensSource
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.storage import index_cache as cache_module
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.survey import Survey
from batchd.data.storage.values import StorageLimits
from batchd.errors import SourceInvalid
from support.http_files import SECRET, Cut, FileServer, IgnoreRange, Stall, Status
from support.megatron import write_megatron
from support.samples import request
from support.shards import write_shard
from support.source_files import nothing, source_problems
from support.tfrecords import example, write_records

WELL = IgnoreRange()
"""A HEAD request, which asks for no range."""
TAR_FIELDS = {"image": "image", "label": "int64"}


def make_files(root: Path) -> None:
    """Make one source of each kind below ``root``."""
    for name in (
        "photos/cat/1.jpg",
        "photos/cat/more/2.jpg",
        "photos/dog/é ü.jpg",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(f"bytes of {name}".encode())
    (root / "list.txt").write_text("photos/cat/1.jpg 7\nphotos/dog/é ü.jpg 8\n")
    (root / "t.csv").write_text("file,age\ncat/1.jpg,3\n\ndog/é ü.jpg,4\n")
    lines = ({"files": ["cat/1.jpg", "dog/é ü.jpg"], "n": [1, 2]}, {"files": ["cat/more/2.jpg"], "n": [3]})
    (root / "t.jsonl").write_text("".join(f"{json.dumps(one, ensure_ascii=False)}\r\n\n" for one in lines))
    for shard in range(2):
        members = [(f"{row}.{ending}", f"{shard}{row}".encode()) for row in range(5) for ending in ("jpg", "cls")]
        write_shard(root / f"shards/s-{shard}.tar", members)
        records = [example(image=[f"{shard}{row}".encode()], label=[row]) for row in range(5)]
        write_records(root / f"records/r-{shard}", records)
    (root / "arrays").mkdir()
    np.save(root / "arrays/x.npy", np.arange(60).reshape(10, 6))
    np.save(root / "arrays/f.npy", np.asfortranarray(np.arange(20.0).reshape(10, 2)))
    np.savez(root / "arrays/xy.npz", x=np.arange(10), y=np.arange(30).reshape(10, 3))
    (root / "arrays/raw.bin").write_bytes(bytes(range(100)))
    write_megatron(root / "arrays/words.bin", [[[n] * (n + 1)] for n in range(8)], "uint16")


SOURCES: dict[str, Callable[[Path], SourceOptions]] = {
    "list": lambda root: ListSource(path=root / "list.txt", path_bytes=40),
    "webdataset": lambda root: WebDatasetSource(root=root / "shards", shards=("s-{0..1}.tar",)),
    "tfrecord": lambda root: TFRecordSource(root=root, shards=("records/r-{0..1}",), fields=TAR_FIELDS),
    "csv": lambda root: CsvSource(
        path=root / "t.csv", fields={"age": "int64"}, image="file", image_root=root / "photos"
    ),
    "jsonl": lambda root: JsonlSource(
        root=root,
        shards=("t.jsonl",),
        fields={"image": "image", "other": "image", "n": "int64[?]"},
        names={"image": "files.0", "other": "files.1"},
        defaults={"other": "cat/1.jpg"},
        image_root=root / "photos",
    ),
    "npy": lambda root: NpySource(root=root / "arrays", arrays={"x": "x.npy", "f": "f.npy"}),
    "npz": lambda root: NpzSource(path=root / "arrays/xy.npz"),
    "raw": lambda root: RawSource(path=root / "arrays/raw.bin", record={"a": "uint8[10]"}),
    "tokens": lambda root: TokensSource(path=root / "arrays/words.bin", dtype="uint16", length=5, overlap=1),
    "documents": lambda root: TokensSource(root=root, files=("arrays/words.bin",), format="megatron", dtype="uint16"),
    "concat": lambda root: ConcatSource(sources=(SOURCES["webdataset"](root), ListSource(path=root / "list.txt"))),  # type: ignore[arg-type]
}


def scan(storage: Storage, source: SourceOptions) -> SourceIndex:
    """Return the index of a source."""
    return scan_source(source, nothing, IndexCache(None), storage)  # type: ignore[arg-type]


def opened(
    storage: Storage, source: SourceOptions, index: SourceIndex | None = None, max_bytes: int = 1 << 20
) -> Reader:
    """Make a reader, as a worker does."""
    return open_reader(source, index or scan(storage, source), max_bytes, storage)


def plain(values: Any) -> dict[str, Any]:
    """Convert values so that they can be compared."""
    return {
        name: bytes(value) if isinstance(value, memoryview) else np.asarray(value).tolist()
        for name, value in values.items()
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with one source of each kind, which no test changes."""
    root = tmp_path_factory.mktemp("files")
    make_files(root)
    return root


def by_name(root: Path) -> dict[str, bytes]:
    """Return the files below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def served(web: FileServer, files: Path) -> FileServer:
    """Serve ``files`` over http."""
    web.files.update(by_name(files))
    return web


def test_a_shard_that_is_cut_between_two_members_is_refused(tmp_path: Path, web: FileServer, storage: Storage) -> None:
    """An object ends at the point of the cut, like a file."""
    shard = write_shard(tmp_path / "s-0.tar", [("a.jpg", b"a"), ("b.jpg", b"b")])
    web.files["s-0.tar"] = shard.read_bytes()[:1024]

    with pytest.raises(
        SourceInvalid, match=r"s-0\.tar: no end-of-archive block at byte 1024: the shard is cut; copy it"
    ):
        scan(storage, WebDatasetSource(root=Path(web.url), shards=("s-0.tar",), label=""))


def test_a_chunk_is_read_in_a_few_requests(served: FileServer, storage: Storage) -> None:
    """Samples that are close to each other share a request."""
    for kind, requests in {
        "webdataset": 2,
        "tfrecord": 2,
        "npy": 1,
        "csv": 3,
        "jsonl": 4,
        "tokens": 1,
        "documents": 1,
        "list": 2,
        "concat": 4,
    }.items():
        source = SOURCES[kind](Path(served.url))
        index = scan(storage, source)
        reader = opened(storage, source, index)
        served.asked.clear()
        request(storage, reader, range(len(index)))
        assert len(served.asked) == requests
        for sample in range(len(index)):
            reader.read(sample)
        assert len(served.asked) == requests + (20 if kind == "npy" else 0), "only Fortran order needs more requests"


class TestScansThatFail:
    """Each failed file is rejected with the URL and the reason."""

    @pytest.mark.thorough(after_first=True)
    @pytest.mark.parametrize(
        ("faults", "reason"),
        [
            ([Status(404)], r"it is not there \(404\)"),
            ([Status(403)], r"it may not be read \(403\)"),
            ([Status(500)] * 3, r"its server answers 500 \(asked 3 times\)"),
            ([Stall()] * 3, r"its server does not answer \(asked 3 times\)"),
        ],
    )
    @pytest.mark.parametrize("kind", ["csv", "npz", "raw"])
    def test_a_file_that_cannot_be_had(
        self, served: FileServer, kind: str, faults: Any, reason: str, storage: Storage
    ) -> None:
        """The error does not repeat the server's answer."""
        source = SOURCES[kind](Path(served.url))
        served.faults[source.place.removeprefix(f"{served.url}/")] = list(faults)

        with pytest.raises(SourceInvalid, match=rf"^{source.place} cannot be read: {reason}$") as problem:
            scan(storage, source)
        assert SECRET not in str(problem.value)

    @pytest.mark.thorough(after_first=True)
    @pytest.mark.parametrize("kind", ["webdataset", "tfrecord", "csv", "jsonl", "npy", "npz", "raw", "list"])
    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            (Cut(after=3), r"the connection was closed within the answer \(asked 3 times\)"),
            (Stall(after=3), r"its server does not answer \(asked 3 times\)"),
            (IgnoreRange(), "its server ignores Range, so no part of a file can be read"),
        ],
    )
    def test_a_file_that_fails_within(
        self, served: FileServer, kind: str, fault: Any, reason: str, storage: Storage
    ) -> None:
        """The error names the byte, and does not call the file damaged."""
        source = SOURCES[kind](Path(served.url))
        heads = 2 if kind in ("webdataset", "tfrecord", "jsonl") else 1
        names = {"webdataset": "shards/s-0.tar", "tfrecord": "records/r-0", "jsonl": "t.jsonl", "npy": "arrays/x.npy"}
        name = names.get(kind) or source.place.removeprefix(f"{served.url}/")
        served.faults[name] = [WELL] * heads + [fault] * 3

        with pytest.raises(SourceInvalid, match=rf"^{served.url}/{name} cannot be read at byte \d+: {reason}"):
            scan(storage, source)

    def test_a_fault_that_passes_is_not_noticed(self, served: FileServer, storage: Storage) -> None:
        """This holds at every point of the scan."""
        served.faults["shards/s-0.tar"] = [Status(500), Status(503), WELL, Status(500), WELL, Cut(5), Cut(0)]

        assert len(scan(storage, SOURCES["webdataset"](Path(served.url)))) == 10

    def test_a_shard_that_is_named_and_not_there(self, web: FileServer, storage: Storage) -> None:
        """The error names the first missing shard."""
        web.files["s-0.tar"] = b"x"
        source = WebDatasetSource(root=Path(web.url), shards=("s-{0..5}.tar",))

        with pytest.raises(SourceInvalid, match=rf"^{web.url}/s-1\.tar cannot be read: it is not there \(404\)$"):
            scan(storage, source)

    @pytest.mark.parametrize(
        ("source", "text"),
        [
            (lambda root: CsvSource(path=root / "e", fields={"a": "int8"}), "/e is empty"),
            (lambda root: ListSource(path=root / "e"), "/e names no sample"),
            (
                lambda root: JsonlSource(root=root, shards=("e",), fields={"a": "text"}),
                "/e has no line that is not blank",
            ),
            (lambda root: NpySource(path=root / "e"), "/e is not a .npy file: it is empty"),
            (lambda root: NpzSource(path=root / "e"), "/e is not a .npz file"),
            (lambda root: TFRecordSource(root=root, shards=("e",), fields=TAR_FIELDS), "/e is empty"),
            (lambda root: WebDatasetSource(root=root, shards=("e",)), "/e holds no sample|/e is not a tar file"),
            (lambda root: RawSource(path=root / "e", record={"a": "int8"}), "/e: 0 bytes hold no record"),
        ],
    )
    def test_an_object_that_is_empty(self, web: FileServer, source: Any, text: str, storage: Storage) -> None:
        """The error is that of an empty file."""
        web.files["e"] = b""

        with pytest.raises(SourceInvalid, match=text):
            scan(storage, source(Path(web.url)))

    @pytest.mark.usefixtures("bucket")
    def test_a_bucket_that_is_not_there(self, storage: Storage) -> None:
        """An empty folder gives an error as well."""
        assert source_problems(FolderSource(path=Path("s3://bucket/none")), storage) == [
            "there is nothing in s3://bucket/none"
        ]
        for source in (
            FolderSource(path=Path("s3://other")),
            WebDatasetSource(root=Path("s3://other"), shards=("*.tar",)),
        ):
            (problem,) = source_problems(source, storage)
            assert problem == "s3://other cannot be read: it is not there (404 NoSuchBucket)"
            with pytest.raises(
                SourceInvalid, match=r"^s3://other cannot be read: it is not there \(404 NoSuchBucket\)$"
            ):
                scan(storage, source)

    def test_a_machine_without_the_library(self, monkeypatch: pytest.MonkeyPatch, storage: Storage) -> None:
        """The error names the package to install."""
        monkeypatch.setitem(__import__("sys").modules, "obstore", None)
        monkeypatch.delitem(__import__("sys").modules, "batchd.data.storage.objects", raising=False)

        (problem,) = source_problems(ListSource(path=Path("http://127.0.0.1:1/list.txt")), storage)
        assert problem.endswith(f"obstore, which is not installed: {sys.executable} -m pip install 'batchd[cloud]'")


def test_a_check_reads_the_titles_of_the_table_that_is_named_first(served: FileServer, storage: Storage) -> None:
    """This works below a root, too."""
    (problem,) = source_problems(CsvSource(root=Path(served.url), files=("t.csv",), fields={"agee": "int64"}), storage)
    assert problem == f"{served.url}/t.csv has no column 'agee'; did you mean age?"


def test_a_check_is_quick_where_no_server_answers(web: FileServer, storage: Storage) -> None:
    """The check sends one request and no second one."""
    storage.limits = StorageLimits(timeout_s=0.3, retries=0, deadline_s=0.3)
    web.faults["*"] = [Stall()] * 10

    (problem,) = source_problems(WebDatasetSource(root=Path(web.url), shards=("s-{0..99}.tar",)), storage)
    assert problem == f"{web.url}/s-0.tar cannot be read: its server does not answer"
    assert len(web.asked) == 1


class TestSamplesThatFail:
    """The sample is bad with its reason, and the next sample is read."""

    @pytest.mark.thorough(after_first=True)
    @pytest.mark.parametrize(
        ("kind", "name", "reason"),
        [
            ("list", "photos/cat/1.jpg", ""),
            ("webdataset", "shards/s-0.tar", r"cannot be read at byte 512 of its shard: "),
            ("tfrecord", "records/r-0", r"cannot be read: "),
            ("raw", "arrays/raw.bin", r"cannot be read at byte 0 of its file: "),
            ("csv", "t.csv", r"cannot be read at byte 9 of its file: "),
            ("jsonl", "t.jsonl", r"cannot be read at byte 0 of its file: "),
        ],
    )
    def test_servers_that_fail(
        self, files: Path, served: FileServer, kind: str, name: str, reason: str, storage: Storage
    ) -> None:
        """The server fails for a while and recovers, with and without reading ahead."""
        source = SOURCES[kind](Path(served.url))
        reader = opened(storage, source)
        with closing(opened(storage, SOURCES[kind](files))) as here:
            expected = plain(here.read(0))

        for fault, ahead in product((Status(500), Cut(after=1)), ([], [0])):
            storage.client.head(f"{served.url}/list.txt")  # ends the pause after failures
            served.faults[name] = [fault] * 3
            request(storage, reader, ahead)
            with pytest.raises(SampleUnreadable, match=rf"^{reason}\D+(500)? \(asked 3 times\)$"):
                reader.read(0)
        storage.client.head(f"{served.url}/list.txt")
        request(storage, reader, [0])
        assert plain(reader.read(0)) == expected

    @pytest.mark.parametrize(
        "kind", ["webdataset", "tfrecord", "raw", "tokens", "documents", "csv", "jsonl", "npy", "npz"]
    )
    def test_objects_that_have_changed(self, served: FileServer, kind: str, storage: Storage) -> None:
        """A change of one byte is enough."""
        source = SOURCES[kind](Path(served.url))
        reader = opened(storage, source)
        for name in served.files:
            served.files[name] = served.files[name][:-1] + b"!"

        for sample in range(2):
            with pytest.raises(SampleUnreadable, match="has changed since the source was scanned"):
                reader.read(sample)

    def test_images_that_are_empty_missing_or_too_long(self, web: FileServer, storage: Storage) -> None:
        """The errors are those of files."""
        web.files.update({"list.txt": b"a.jpg 0\nb.jpg 0\nc.jpg 0\n", "a.jpg": b"", "b.jpg": b"b" * 100})
        reader = opened(storage, ListSource(path=Path(web.url) / "list.txt"), max_bytes=99)

        for ahead in (False, True):
            if ahead:
                request(storage, reader, [0, 1, 2])
            reasons = ["is empty", "has 100 bytes, more than max_bytes = 99", r"it is not there \(404\)"]
            for sample, reason in enumerate(reasons):
                with pytest.raises(SampleUnreadable, match=f"^{reason}$"):
                    reader.read(sample)

    def test_a_table_names_no_image_outside_of_its_root(self, web: FileServer, storage: Storage) -> None:
        """The path of the image leads out of the root."""
        web.files["t/t.csv"] = b"file\n../a.jpg\n/a.jpg\n"
        reader = opened(storage, CsvSource(path=Path(web.url) / "t/t.csv", image="file"))

        for sample in range(2):
            with pytest.raises(SampleUnreadable, match="may lead out of the root"):
                reader.read(sample)

    def test_a_line_names_images_by_urls_below_their_root(self, served: FileServer, storage: Storage) -> None:
        """Other URLs are bad samples, and no other server is asked."""
        url = served.url
        served.files["u.jsonl"] = "".join(
            f'{{"x": "{one}"}}\n'
            for one in (f"{url}/photos/cat/1.jpg", f"{url}/t.csv", f"{url}/photos/../t.csv", "http://other/1.jpg")
        ).encode()
        source = JsonlSource(
            root=Path(url), shards=("u.jsonl",), fields={"x": "image"}, image_root=Path(f"{url}/photos")
        )
        reader = opened(storage, source)

        request(storage, reader, range(4))
        assert plain(reader.read(0)) == {"x": b"bytes of photos/cat/1.jpg"}
        for sample, text in ((1, "not below"), (2, "may lead out of the root"), (3, "not below")):
            with pytest.raises(SampleUnreadable, match=text):
                reader.read(sample)


class TestKeptIndexes:
    """An index of an earlier scan is valid while the servers report no change."""

    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IndexCache:
        """Make a cache that keeps small sources."""
        monkeypatch.setattr(cache_module, "SAMPLES_MIN", 1)
        return IndexCache(tmp_path / "cache")

    def test_over_http_objects_are_asked_for_their_etags(
        self, served: FileServer, cache: IndexCache, storage: Storage
    ) -> None:
        """HEAD requests are sent, and nothing is downloaded."""
        source: Any = SOURCES["webdataset"](Path(served.url))
        first = scan_source(source, nothing, cache, storage)
        served.asked.clear()

        again = scan_source(source, nothing, cache, storage)
        assert (again.digest, again.place) == (first.digest, first.place)
        assert {one.method for one in served.asked} == {"HEAD"}
        served.files["shards/s-1.tar"] = served.files["shards/s-1.tar"].replace(b"1.jpg", b"x.jpg")
        served.asked.clear()
        with pytest.raises(SourceInvalid):
            scan_source(source, nothing, cache, storage)
        assert "GET" in {one.method for one in served.asked}

    def test_without_etags_and_times_nothing_is_kept(
        self, served: FileServer, cache: IndexCache, storage: Storage
    ) -> None:
        """No change of the source would be noticed."""
        served.has_etags = False
        source: Any = SOURCES["raw"](Path(served.url))
        for _ in range(2):
            served.asked.clear()
            scan_source(source, nothing, cache, storage)
            assert "GET" in {one.method for one in served.asked}

    def test_an_object_that_was_written_after_the_scan_is_refused(self, bucket: Any, storage: Storage) -> None:
        """Its server says when that was."""
        bucket.put({"d/1.jpg": b"1"})
        source = FolderSource(path=Path("s3://bucket/d"))
        index = kind_of(source).scan(source, Survey(nothing, storage=storage))

        storage.as_of_ns = time.time_ns() + 10_000_000_000
        assert bytes(open_reader(source, index, 100, storage).read(0)["image"]) == b"1"
        storage.as_of_ns -= 20_000_000_000
        with pytest.raises(SampleUnreadable, match="was written after the source was scanned; restart the daemon"):
            open_reader(source, index, 100, storage).read(0)

    def test_in_a_bucket_folders_are_listed_again(
        self, bucket: Any, cache: IndexCache, scans: list[str], storage: Storage
    ) -> None:
        """New objects are found."""
        bucket.put({"d/1.jpg": b"1", "d/e/2.jpg": b"2"})
        source = GlobSource(root=Path("s3://bucket/d"), patterns=("**/*.jpg",))
        for _ in range(2):
            assert len(scan_source(source, nothing, cache, storage)) == 2
        assert scans == ["glob"]

        bucket.put({"d/e/README": b"3", "d/.git/1": b"1"})
        assert len(scan_source(source, nothing, cache, storage)) == 2
        assert scans == ["glob"]
        bucket.put({"d/e/3.jpg": b"3"})
        assert len(scan_source(source, nothing, cache, storage)) == 3
        assert scans == ["glob", "glob"]

    @pytest.fixture
    def scans(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Collect the kinds of the scanned sources, one entry for each scan."""
        done: list[str] = []

        def watched(source: Any) -> kinds.BuiltInKind:
            kind = kind_of(source)
            return replace(kind, scan=lambda one, survey: done.append(one.type) or kind.scan(one, survey))

        monkeypatch.setattr("batchd.data.sources.scan.kind_of", watched)
        return done
