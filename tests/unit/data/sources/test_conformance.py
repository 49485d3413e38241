"""What every kind of source promises, and the outcomes of bad input: see ``support.source_kinds``.

There are two outcomes. The scan refuses a source that cannot be served (``SourceInvalid``), and a
sample that becomes bad after the scan raises ``SampleUnreadable``. Both name the file. Nothing
hangs, no other error is raised, and each value that is read has the type of its column.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import MediaFile
from batchd.data.sources.interface import Reader, ReadsRows, kind_of, open_reader
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import SourceInvalid
from support.http_files import FileServer
from support.s3_server import BucketServer
from support.samples import copied, opened, read_samples, reason, request, scan
from support.source_files import nothing, source_problems
from support.source_kinds import KINDS, Kind

NUMBERS = range(4)
MAX_BYTES = 1000
SHORT_BYTES = 200
Made = tuple[Kind, SourceOptions, Path]
"""A kind, a source of a file "a" with four samples, and the file, which a test damages."""


def is_bound(source: SourceOptions) -> bool:
    return getattr(source, "root", None) is not None and hasattr(source, "allow_outside_root")


ONE_FILE = [name for name, kind in KINDS.items() if not kind.is_scanned and not kind.is_file_each]
"""Kinds whose samples are in the file that a test damages."""
REMOTE = [name for name, kind in KINDS.items() if kind.is_remote]
BOUND = [name for name, kind in KINDS.items() if is_bound(kind.source(Path("/"), "a"))]
"""Kinds whose files must be below a root."""
pytestmark = pytest.mark.usefixtures("forked_scans")
everywhere = pytest.mark.parametrize("tries", [10, pytest.param(1000, marks=pytest.mark.slow)])


def places(data: bytes, tries: int) -> range:
    """Every place of a short file, and some of a longer one."""
    return range(0, len(data), 1 if len(data) < SHORT_BYTES else max(1, len(data) // tries))


def write(name: str, root: Path, numbers: range = NUMBERS) -> Made:
    """Write a file "a" of a kind into a new folder."""
    root.mkdir(exist_ok=True, parents=True)
    kind = KINDS[name]
    file = kind.write(root / "a", numbers)
    return kind, kind.source(root, "a"), file


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    return write(request.param, tmp_path / "data")


def outcome(made: Made) -> str:
    """Scan and read everything: "refused", or one sign for each sample; see ``read``."""
    _kind, _source, file = made
    try:
        read_all = scanned(made)
    except SourceInvalid as error:
        named = str(error)
        assert str(file) in named or str(file.parent) in named, f"the file is not named: {named}"
        return "refused"
    return read_all()


def scanned(made: Made) -> Callable[[], str]:
    """Scan; return a function that reads everything and returns its ``outcome``."""
    kind, source, _file = made
    columns = {column.name: column for column in kind_of(source).columns(source, Storage())}
    index = scan(source)

    def read_all() -> str:
        reader = open_reader(source, index, MAX_BYTES, Storage())
        told = "".join(read(kind, reader, sample, columns) for sample in range(len(index)))
        reader.close()
        return told

    return read_all


def read(kind: Kind, reader: Reader, sample: int, columns: dict[str, Column]) -> str:
    """Give "+" for a sample as it was written, "?" for another one of its types, "-" if bad."""
    assert "/data/" in reader.name(sample)
    try:
        values = reader.read(sample)
    except SampleUnreadable as bad:
        return "-" if str(bad) else "no reason"
    for name, column in columns.items():
        check(values[name], column)
    return "+" if kind.number(values) == sample else "?"


def check(value: Any, column: Column) -> None:
    """Assert that a value has the type of its column."""
    if column.kind == "encoded":
        assert isinstance(value, memoryview)
        assert 0 < len(value) <= MAX_BYTES
    elif column.kind in ("video", "audio"):
        assert (value.size if isinstance(value, MediaFile) else value.nbytes) > 0
    elif column.kind == "text":
        assert isinstance(value, str)
    else:
        array = np.asarray(value)
        assert column.takes(array.shape)
        assert np.can_cast(array.dtype, column.dtype, "same_kind")


# --- samples --------------------------------------------------------------------------------------


def test_every_sample_is_read_in_any_order(made: Made) -> None:
    """Rows that are read together are equal, too (``read_samples`` compares them)."""
    kind, source, _file = made

    assert source_problems(source) == []
    assert outcome(made) == "++++"
    assert [kind.number(values) for values in read_samples(source)] == list(NUMBERS)
    with opened(source) as (reader, _index):
        assert (isinstance(reader, ReadsRows) and reader.reads_rows()) == kind.reads_rows
        with pytest.raises(IndexError):
            reader.read(len(NUMBERS))


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.takes_several])
def test_files_follow_each_other_by_name(name: str, tmp_path: Path) -> None:
    """The samples of each are in order."""
    kind = KINDS[name]
    kind.write(tmp_path / "b", range(4, 8))
    kind.write(tmp_path / "a", range(4))

    with opened(kind.source(tmp_path, "a", "b")) as (reader, index):
        assert [kind.number(reader.read(sample)) for sample in range(len(index))] == list(range(8))
        assert reader.name(2) == f"{tmp_path}/{kind.name}"
        assert reader.name(6).startswith(f"{tmp_path}/b")


@pytest.mark.parametrize("name", KINDS)
def test_the_digest_names_the_content_and_the_options_but_not_the_place(name: str, tmp_path: Path) -> None:
    """Other samples of the same size count, and each option that changes samples."""
    kind, source, _file = write(name, tmp_path / "one")
    digest = scan(source).digest
    others = [scan(write(name, tmp_path / "two", range(4, 8))[1]).digest]
    others += [scan(replace(source, **change)).digest for change in kind.changes]

    assert scan(write(name, tmp_path / "elsewhere")[1]).digest == digest
    assert len({digest, *others}) == 2 + len(kind.changes)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.index_bytes is not None])
def test_the_index_takes_a_few_bytes_for_each_sample(name: str, tmp_path: Path) -> None:
    """All workers share it."""
    kind, source, _file = write(name, tmp_path, range(5000))
    index = scan(source)

    assert len(index) == 5000
    assert sum(array.nbytes for array in index.arrays.values()) <= (kind.index_bytes or 0) * 5000 + 100


def test_a_record_that_is_too_large_is_a_bad_sample(made: Made) -> None:
    """No source reads more than ``max_bytes`` for one sample; a step reads files in parts."""
    if made[0].is_read_in_parts and made[0].is_file_each:
        return
    with opened(made[1], 3) as (reader, index):
        for sample in range(len(index)):
            assert re.search(r"has \d+ bytes, more than max_bytes = 3\b", reason(reader, sample))


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, library) for name, kind in KINDS.items() for library in kind.source(Path("/"), "a").requires],
)
def test_where_a_library_is_not_installed_it_is_said_what_to_install(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`batchd check` shows the message, and only for users of this kind of source."""
    source = KINDS[name].source(Path("/"), "a")
    monkeypatch.setitem(sys.modules, library, None)
    (problem,) = source_problems(source)

    install = f"{sys.executable} -m pip install 'batchd[{source.extra}]'"
    assert problem == f'a source of type "{source.type}" needs {library}, which is not installed: {install}'


# --- servers --------------------------------------------------------------------------------------


def contents(storage: Storage, source: SourceOptions, *, ahead: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """The digest of a source and all its samples, with their names below the source's root."""
    index = scan_source(source, nothing, IndexCache(None), storage)
    reader = open_reader(source, index, 1 << 20, storage)
    if ahead:
        request(storage, reader, range(len(index)))
    found = [
        {
            name: value if isinstance(value, bytes) else np.asarray(value).tolist()
            for name, value in copied(reader.read(sample)).items()
        }
        for sample in range(len(index))
    ]
    reader.close()
    return index.digest, found


def write_files(name: str, root: Path) -> tuple[SourceOptions, dict[str, bytes], Callable[[str], SourceOptions]]:
    """Write one or two files: a source here, all files by name, and the source at a URL."""
    kind = KINDS[name]
    names = ("a", "b") if kind.takes_several else ("a",)
    for number, file in enumerate(names):
        kind.write(root / file, range(4 * number, 4 * number + 4))
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return kind.source(root, *names), files, lambda url: kind.source(Path(url), *names)


@pytest.mark.usefixtures("scans_here")
@pytest.mark.parametrize("name", [name for name in REMOTE if not KINDS[name].is_listed])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_source_over_http_is_what_the_files_are(
    name: str, ahead: bool, tmp_path: Path, web: FileServer, storage: Storage
) -> None:
    """Samples, columns and digest are equal, and samples are named by their URL."""
    here, web.files, at = write_files(name, tmp_path)
    there = at(web.url)

    assert source_problems(there, storage) == []
    assert kind_of(there).columns(there, storage) == kind_of(here).columns(here, storage)
    assert contents(storage, there, ahead=ahead) == contents(storage, here, ahead=ahead)
    reader = open_reader(there, scan_source(there, nothing, IndexCache(None), storage), 1000, storage)
    assert reader.name(2) == f"{web.url}/{KINDS[name].name}"
    reader.close()


@pytest.mark.parametrize("name", [name for name in REMOTE if KINDS[name].is_listed])
def test_http_servers_cannot_list_files(name: str, web: FileServer, storage: Storage) -> None:
    """`batchd check` says so without a request, and so does the scan."""
    source = KINDS[name].source(Path(web.url), "a")
    (problem,) = source_problems(source, storage)

    assert "http servers cannot list files" in problem
    with pytest.raises(SourceInvalid) as refusal:
        scan_source(source, nothing, IndexCache(None), storage)
    assert str(refusal.value) == problem
    assert web.asked == []


@pytest.fixture(scope="module")
def bucket(_network_library: None) -> Iterator[BucketServer]:
    """Start one S3 server: each kind has a folder in its bucket."""
    server = BucketServer()
    yield server
    server.close()


@pytest.mark.thorough(after_first=True)
@pytest.mark.usefixtures("scans_here")
@pytest.mark.parametrize("name", REMOTE)
def test_a_source_in_a_bucket_is_what_the_files_are(
    name: str, tmp_path: Path, bucket: BucketServer, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes sources that list names."""
    for variable, value in bucket.environment.items():
        monkeypatch.setenv(variable, value)
    here, files, at = write_files(name, tmp_path)
    bucket.put({f"{name}/{file}": content for file, content in files.items()})
    there = at(f"s3://bucket/{name}")

    assert source_problems(there, storage) == []
    assert contents(storage, there) == contents(storage, here)
    assert not any(secret in str(there) for secret in ("a-key-for-tests", "a-secret-for-tests"))


@pytest.mark.thorough(after_first=True)
@pytest.mark.usefixtures("scans_here")
@pytest.mark.parametrize("name", REMOTE)
def test_a_source_in_a_bucket_of_google_is_what_the_files_are(
    name: str, tmp_path: Path, google: FileServer, storage: Storage
) -> None:
    """This includes sources that list names."""
    here, files, at = write_files(name, tmp_path)
    google.files.update({f"bucket/deep/{file}": content for file, content in files.items()})
    there = at("gs://bucket/deep")

    assert source_problems(there, storage) == []
    assert contents(storage, there) == contents(storage, here)


# --- bad input ------------------------------------------------------------------------------------


def test_a_file_that_is_missing_is_refused(made: Made) -> None:
    """A missing file among many images is not an error: the scan does not list it."""
    kind, source, file = made
    file.unlink()

    assert outcome(made) == ("++?" if kind.is_file_each else "refused")
    assert kind.is_file_each or source_problems(source)


def test_a_file_that_is_empty_is_refused_or_a_bad_sample(made: Made) -> None:
    """An empty file never gives a sample without bytes."""
    kind, _source, file = made
    file.write_bytes(b"")

    assert outcome(made) == ("++-+" if kind.is_file_each else "refused")


@pytest.mark.thorough(after_first=True)
@everywhere
def test_a_file_that_is_cut_anywhere_has_an_outcome(made: Made, tries: int) -> None:
    """Each length of the file is read, refused or bad; only the last sample may be another one."""
    _kind, _source, file = made
    data = file.read_bytes()
    for length in (*places(data, tries), len(data) - 1):
        file.write_bytes(data[:length])
        assert re.fullmatch(r"refused|[+-]*[?]?", outcome(made)), length


@pytest.mark.thorough(after_first=True)
@everywhere
def test_a_file_with_any_byte_changed_has_an_outcome(made: Made, tries: int) -> None:
    """The test changes every few bytes in two ways."""
    _kind, _source, file = made
    data = file.read_bytes()
    for place in places(data, tries):
        for mask in (0x01, 0xFF):
            file.write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
            assert re.fullmatch(r"refused|[?+-]*", outcome(made)), (place, mask)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("content", [b"\0" * 3000, b"\xff" * 3000, b"<html>not found</html>", b"\x1f\x8b\x08\0" * 99])
def test_a_file_of_something_else_has_an_outcome(content: bytes, made: Made) -> None:
    """The file holds zeros, ones, a web page or compressed bytes."""
    kind, _source, file = made
    file.write_bytes(content)

    told = outcome(made)

    assert told == "refused" or kind.is_file_each or kind.is_any


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("what", ["fifo", "folder", "loop"])
def test_a_path_without_a_regular_file_is_refused_at_once(what: str, made: Made) -> None:
    """A FIFO without a writer does not block the scan."""
    kind, _source, file = made
    file.unlink()
    if what == "fifo":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    else:
        file.symlink_to(file)

    told = outcome(made)

    assert told == "refused" or kind.is_file_each


@pytest.mark.parametrize("name", BOUND)
def test_a_file_that_is_a_link_out_of_the_root_is_refused_unless_that_is_allowed(name: str, tmp_path: Path) -> None:
    """A file that becomes such a link after the scan makes bad samples."""
    kind, source, file = made = write(name, tmp_path / "data")
    read_all = scanned(made)
    file.unlink()
    file.symlink_to(write(name, tmp_path / "elsewhere", range(4, 8))[2])

    assert read_all() == ("++-+" if kind.is_file_each else "----")
    with pytest.raises(SourceInvalid, match=rf"{file.name} is a link that leads out of the root, to .*/elsewhere"):
        scan(source)
    allowed = replace(source, allow_outside_root=True)
    assert outcome((kind, allowed, file)) != "refused"


@pytest.mark.parametrize("what", ["gone", "fifo"])
def test_a_file_that_vanishes_after_the_scan_makes_bad_samples(made: Made, what: str) -> None:
    """Only the samples of that file are bad, and no reader waits for a FIFO."""
    kind, _source, file = made
    read_all = scanned(made)
    shutil.move(file, file.parent.parent / "elsewhere")
    if what == "fifo":
        os.mkfifo(file)

    assert read_all() == ("++-+" if kind.is_file_each else "++++" if kind.is_scanned else "----")


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", ONE_FILE)
@pytest.mark.parametrize("damage", ["vanished", "cut"])
def test_the_error_of_a_lost_record_has_its_place_and_the_state_of_its_file(
    name: str, damage: str, tmp_path: Path
) -> None:
    """The sample's name has file and record once; the reason has the remaining size of the file."""
    kind, source, file = write(name, tmp_path / "data")
    reader = open_reader(source, scan(source), MAX_BYTES, Storage())
    left = file.stat().st_size // 3
    if damage == "vanished":
        file.unlink()
    else:
        os.truncate(file, left)

    lost = reason(reader, 2)
    named = reader.name(2)
    reader.close()

    assert named == f"{tmp_path}/data/{kind.name}"
    if damage == "vanished":
        assert "No such file" in lost
    else:
        assert re.search("has changed" if name in {"video", "lerobot"} else rf"\b{left}\b", lost)
    assert str(file) not in lost
    assert "record 2" not in lost
    assert name != "parquet" or "(row group 1, row 0 of it)" in lost


def test_a_file_that_is_cut_after_the_scan_makes_bad_samples(made: Made) -> None:
    """No process gets a SIGBUS."""
    kind, _source, file = made
    if kind.is_mapped:
        pytest.skip("only a test with a daemon can show the outcome")
    read_all = scanned(made)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])

    told = read_all()

    assert "-" in told or kind.is_scanned or kind.is_file_each


@pytest.mark.parametrize("name", ONE_FILE)
def test_a_file_that_is_rewritten_after_the_scan_makes_bad_samples(name: str, tmp_path: Path) -> None:
    """Another sample may have the place and the length of the old one."""
    made = write(name, tmp_path / "data")
    read_all = scanned(made)
    status = made[2].stat()
    made[2].write_bytes(write(name, tmp_path / "other", range(4, 8))[2].read_bytes())
    os.utime(made[2], ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    assert read_all() == "----"
