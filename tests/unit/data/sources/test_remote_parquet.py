"""Parquet files on servers: the requests, their number, and errors of a failing server."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.interface import Reader, open_reader
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.scan import scan_source
from batchd.data.storage import index_cache as cache_module
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import SourceInvalid
from support.http_files import SECRET, Cut, Fault, FileServer, IgnoreRange, Stall, Status
from support.parquet_files import hugging_face, write_parquet
from support.samples import request
from support.source_files import nothing, source_problems

WELL = IgnoreRange()
"""A HEAD request, which asks for no range."""
IMAGES = [bytes([number]) * (1000 + 7 * number) for number in range(40)]
LONG = [np.random.default_rng(seed).bytes(100_000) for seed in range(6)]
BOTH = {"image": "image", "label": "int64"}
pytestmark = pytest.mark.usefixtures("scans_here")
Put = Callable[..., ParquetSource]


@pytest.fixture
def put(tmp_path: Path, web: FileServer) -> Put:
    """Write the file a.parquet, put it on the server, and return its source."""

    def put(images: list[bytes] = IMAGES, fields: dict[str, str] = BOTH, **options: Any) -> ParquetSource:
        columns = {"image": hugging_face(images), "label": np.arange(len(images)), "twice": pa.array(images)}
        web.files["a.parquet"] = write_parquet(tmp_path / "a.parquet", columns, **options).read_bytes()
        return ParquetSource(root=Path(web.url), shards=("a.parquet",), fields=fields)

    return put


def scan(storage: Storage, source: ParquetSource) -> SourceIndex:
    return scan_source(source, nothing, IndexCache(None), storage)


def opened(storage: Storage, source: ParquetSource) -> Reader:
    return open_reader(source, scan(storage, source), 1 << 30, storage)


def image(reader: Reader, sample: int) -> bytes:
    return bytes(reader.read(sample)["image"])  # type: ignore[arg-type]


def asked_bytes(web: FileServer) -> int:
    """Return how many bytes were requested from the server."""
    spans = [one.span.removeprefix("bytes=").split("-") for one in web.asked if one.span]
    return sum(int(last) - int(first) + 1 for first, last in spans)


def test_values_that_are_not_compressed_are_asked_for_by_their_bytes(
    web: FileServer, put: Put, storage: Storage
) -> None:
    """One request covers a value or several neighbours; footer and row group are not read."""
    reader = opened(storage, put(compression="none", row_group_size=1000, use_dictionary=False))
    web.asked.clear()
    assert image(reader, 7) == IMAGES[7]
    assert len(web.asked) == 1
    assert asked_bytes(web) == len(IMAGES[7])

    web.asked.clear()
    request(storage, reader, range(40))
    assert [image(reader, sample) for sample in range(40)] == IMAGES
    assert len(web.asked) == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_group_is_one_request_and_is_used_again(web: FileServer, put: Put, ahead: bool, storage: Storage) -> None:
    """The footer needs one more request."""
    reader = opened(storage, put(compression="snappy", row_group_size=10, use_dictionary=False))
    web.asked.clear()
    for sample in (25, 3, 29, 20, 0):
        if ahead:
            request(storage, reader, [sample])
        assert image(reader, sample) == IMAGES[sample]
    assert len(web.asked) == 3
    assert asked_bytes(web) < len(web.files["a.parquet"]) * 2


def test_a_chunk_asks_for_all_of_its_row_groups_at_once(web: FileServer, put: Put, storage: Storage) -> None:
    """Columns of a row group that are adjacent are one request."""
    reader = opened(storage, put(fields={**BOTH, "twice": "uint8[?]"}, compression="snappy", row_group_size=10))
    web.asked.clear()
    request(storage, reader, [35, 5, 15])
    requests = len(web.asked)
    assert requests <= 4
    for sample in (35, 36, 5, 15):
        assert image(reader, sample) == reader.read(sample)["twice"].tobytes() == IMAGES[sample]  # type: ignore[union-attr]
    assert len(web.asked) == requests


def test_a_long_row_group_is_asked_for_in_parts_at_once(web: FileServer, put: Put, storage: Storage) -> None:
    """One request is limited by the speed of one connection."""
    images = [np.random.default_rng(seed).bytes(1 << 20) for seed in range(10)]
    reader = opened(storage, put(images, compression="snappy", row_group_size=10, use_dictionary=False))
    web.asked.clear()
    assert image(reader, 9) == images[9]
    assert len(web.asked) == 4
    assert image(reader, 0) == images[0]
    assert len(web.asked) == 4


def test_a_footer_may_have_any_length(web: FileServer, put: Put, storage: Storage) -> None:
    """A longer footer takes a second request. With that and two row groups there are four."""
    images = [b"%d" % number for number in range(600)]
    reader = opened(storage, put(images, compression="snappy", row_group_size=1))
    assert int.from_bytes(web.files["a.parquet"][-8:-4], "little") > 1 << 16
    web.asked.clear()
    assert [image(reader, sample) for sample in (599, 0)] == [b"599", b"0"]
    assert len(web.asked) == 4


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("size", [5_000, 100_000, 3 << 20])
def test_a_scan_downloads_a_column_once(web: FileServer, put: Put, size: int, storage: Storage) -> None:
    """The values are compared with the file a little after pyarrow has read them."""
    random = np.random.default_rng(0)
    images = [random.bytes(size + number % 7) for number in range((12 << 20) // size)]
    source = put(images, compression="none", use_dictionary=False, fields={"image": "image"})
    index = scan(storage, source)
    assert (index.arrays["extents.image"][:, 1] == [len(one) for one in images]).all()
    half = len(web.files["a.parquet"]) / 2  # the other column is as long
    assert half < asked_bytes(web) < 1.01 * half + (1 << 20)


def test_a_scan_does_not_download_what_is_compressed(web: FileServer, put: Put, storage: Storage) -> None:
    """The workers download it."""
    images = [np.random.default_rng(seed).bytes(1 << 20) for seed in range(20)]
    scan(storage, put(images, compression="snappy", row_group_size=5))
    assert asked_bytes(web) < len(web.files["a.parquet"]) / 20


def test_a_check_finds_a_column_that_is_not_there(web: FileServer, put: Put, storage: Storage) -> None:
    """The check reads the first named file; for a pattern, the daemon finds the error."""
    assert source_problems(put(), storage) == []
    (problem,) = source_problems(put(fields={"labels": "int64"}), storage)
    assert problem.startswith(f"{web.url}/a.parquet has no column 'labels'")


class TestScansThatFail:
    """The error has the URL, the byte and the reason, and does not call the file damaged."""

    @pytest.mark.thorough(after_first=True)
    @pytest.mark.parametrize("compression", ["none", "snappy"])
    @pytest.mark.parametrize(
        "trouble",
        [
            (Status(503), r"its server answers 503 \(asked 3 times\)"),
            (Cut(after=3), r"the connection was closed within the answer \(asked 3 times\)"),
            (Stall(after=3), r"its server does not answer \(asked 3 times\)"),
            (IgnoreRange(), "its server ignores Range, so no part of a file can be read"),
        ],
    )
    @pytest.mark.parametrize("reads_before", [0, 1])
    def test_a_file_that_fails_within(
        self,
        web: FileServer,
        put: Put,
        compression: str,
        trouble: tuple[Fault, str],
        reads_before: int,
        storage: Storage,
    ) -> None:
        """The request fails at the footer, or in a column, which pyarrow reads."""
        fault, reason = trouble
        source = put(LONG, compression=compression, row_group_size=3, use_dictionary=False)
        web.faults["a.parquet"] = [WELL] * 2 + [Cut(1 << 30)] * reads_before + [fault] * 3

        with pytest.raises(SourceInvalid, match=rf"^{web.url}/a.parquet cannot be read at byte \d+: {reason}") as error:
            scan(storage, source)
        assert SECRET not in str(error.value)

    def test_a_fault_that_passes_is_not_noticed(self, put: Put, web: FileServer, storage: Storage) -> None:
        """This holds at every point of the scan."""
        source = put()
        web.faults["a.parquet"] = [Status(500), WELL, WELL, Cut(5), Status(503)]
        assert len(scan(storage, source)) == 40

    def test_a_file_that_changes_meanwhile(self, put: Put, web: FileServer, storage: Storage) -> None:
        """The file is rejected."""
        source = put(LONG, compression="none", use_dictionary=False)
        content = web.files["a.parquet"]

        class Changing(dict[str, bytes]):
            def get(self, *_name: Any) -> Any:
                return content if len(web.asked) <= 3 else content[:-1] + b"!"

        web.files = Changing()
        with pytest.raises(SourceInvalid, match=r"a\.parquet cannot be read at byte \d+: it has changed since"):
            scan(storage, source)


class TestSamplesThatFail:
    """The sample is bad with its reason, and readable after the server recovers."""

    @pytest.mark.thorough(after_first=True)
    @pytest.mark.parametrize(("compression", "reads_before"), [("none", 0), ("snappy", 0), ("snappy", 1)])
    @pytest.mark.parametrize(
        "trouble",
        [
            (Status(500), r"its server answers 500 \(asked 3 times\)"),
            (Cut(after=1), r"the connection was closed within the answer \(asked 3 times\)"),
            (Status(404), r"it is not there \(404\)"),
            (IgnoreRange(), "its server ignores Range.*"),
        ],
    )
    def test_servers_that_fail(
        self,
        web: FileServer,
        put: Put,
        compression: str,
        trouble: tuple[Fault, str],
        reads_before: int,
        storage: Storage,
    ) -> None:
        """It fails at the footer, the row group or the value, with and without reading ahead."""
        fault, reason = trouble
        place = r"(its file cannot be read at byte \d+|cannot be read at byte \d+ of its file)"
        for ahead in ([], [25]):
            reader = opened(storage, put(compression=compression, row_group_size=10))
            web.faults["a.parquet"] = [Cut(1 << 30)] * reads_before + [fault] * 3
            request(storage, reader, ahead)
            with pytest.raises(SampleUnreadable) as error:
                reader.read(25)
            assert re.fullmatch(rf"{place}: {reason} \(row group 2, row 5 of it\)", str(error.value))

            web.faults.clear()
            storage.client.head(f"{web.url}/a.parquet")  # ends the pause after failures
            request(storage, reader, ahead)
            assert image(reader, 25) == IMAGES[25]
            assert int(reader.known(25)["label"]) == 25  # type: ignore[arg-type]
        assert SECRET not in str(error.value)

    @pytest.mark.parametrize("compression", ["none", "snappy"])
    @pytest.mark.parametrize("honours_if_match", [True, False])
    @pytest.mark.parametrize("is_open", [True, False])
    def test_an_object_that_has_changed(
        self, web: FileServer, put: Put, compression: str, honours_if_match: bool, is_open: bool, storage: Storage
    ) -> None:
        """One byte is enough, also after the footer was read; decoded values stay in use."""
        web.honours_if_match = honours_if_match
        reader = opened(storage, put(compression=compression, row_group_size=10))
        if is_open:
            image(reader, 0)
        web.files["a.parquet"] = web.files["a.parquet"][:4] + b"!" + web.files["a.parquet"][5:]

        for sample in (25, 39):
            with pytest.raises(SampleUnreadable, match="it has changed since the source was scanned"):
                reader.read(sample)
        if is_open and compression == "snappy":
            assert image(reader, 1) == IMAGES[1]

    def test_without_etags_size_and_time_tell(self, web: FileServer, put: Put, storage: Storage) -> None:
        """The server must send size or time for this."""
        web.has_etags = False
        reader = opened(storage, put(compression="snappy", row_group_size=10))
        web.files["a.parquet"] += b" "
        with pytest.raises(SampleUnreadable, match=r"it had \d+ bytes, and has \d+"):
            reader.read(0)

    def test_a_damaged_page_is_one(self, web: FileServer, put: Put, storage: Storage) -> None:
        """Its checksum fails, as in a file, and it is not downloaded again for each of its rows."""
        images = [np.random.default_rng(seed).bytes(1000) for seed in range(20)]
        source = put(images, compression="snappy", row_group_size=10, write_page_checksum=True, use_dictionary=False)
        damaged = bytearray(web.files["a.parquet"])
        damaged[5000] ^= 0xFF
        web.files["a.parquet"] = bytes(damaged)
        reader = opened(storage, source)
        for sample in (3, 4):
            with pytest.raises(SampleUnreadable, match=rf"\(row group 0, row {sample} of it\)"):
                reader.read(sample)
        requests = len(web.asked)
        with pytest.raises(SampleUnreadable):
            reader.read(5)
        assert len(web.asked) == requests
        assert image(reader, 11) == images[11]


def test_a_path_in_a_file_is_below_its_url(tmp_path: Path, web: FileServer, storage: Storage) -> None:
    """A path that leads out of the root is rejected."""
    paths = ["photos/1.jpg", "../1.jpg", "/etc/passwd", "http://127.0.0.1:1/x.jpg"]
    file = write_parquet(tmp_path / "a.parquet", {"image": hugging_face([None] * 4, paths)})
    web.files.update({"d/a.parquet": file.read_bytes(), "d/photos/1.jpg": b"one", "1.jpg": b"outside"})
    source = ParquetSource(root=Path(f"{web.url}/d"), shards=("a.parquet",), fields={"image": "image"})
    reader = opened(storage, source)
    assert image(reader, 0) == b"one"
    for sample, reason in ((1, "may lead out of the root"), (2, "may lead out of the root"), (3, "its name is none")):
        with pytest.raises(SampleUnreadable, match=reason):
            reader.read(sample)


def test_a_kept_index_counts_while_the_etag_is_the_same(
    tmp_path: Path, web: FileServer, put: Put, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    """An unchanged file is not downloaded, and a changed one is scanned."""
    monkeypatch.setattr(cache_module, "SAMPLES_MIN", 1)
    cache = IndexCache(tmp_path / "cache")
    source = put(compression="none")
    first = scan_source(source, nothing, cache, storage)
    web.asked.clear()
    again = scan_source(source, nothing, cache, storage)
    assert (again.digest, again.place) == (first.digest, first.place)
    assert {one.method for one in web.asked} == {"HEAD"}

    put(IMAGES[::-1], compression="none")
    changed = scan_source(source, nothing, cache, storage)
    assert changed.digest != first.digest
    reader = open_reader(source, changed, 1 << 20, storage)
    assert image(reader, 0) == IMAGES[-1]
