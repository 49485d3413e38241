"""Index cache on disk: when an index is valid, and when the source is scanned again."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchd.data.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.files.index import FilesIndex
from batchd.data.sources.files.options import FolderSource, GlobSource, ListSource
from batchd.data.sources.interface import kind_of
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.options import source_to_plain
from batchd.data.sources.scan import IndexExtension, scan_source
from batchd.data.sources.tokens.options import TokensSource
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.storage import index_cache as cache_module
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd.runtime.directories import default_cache_dir
from support.megatron import write_megatron
from support.shards import write_shard
from support.source_files import make, nothing


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IndexCache:
    """Make a cache that keeps small sources and trusts recent files, because a test cannot wait."""
    monkeypatch.setattr(cache_module, "SAMPLES_MIN", 1)
    monkeypatch.setattr(cache_module, "SETTLED_NS", -(10**12))
    return IndexCache(tmp_path / "cache")


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the kinds of the scanned sources, one entry for each scan."""
    done: list[str] = []

    def watched(source):
        kind = kind_of(source)
        return replace(kind, scan=lambda source, survey: done.append(source.type) or kind.scan(source, survey))

    monkeypatch.setattr("batchd.data.sources.scan.kind_of", watched)
    return done


def sources(root: Path) -> dict[str, tuple]:
    """Make a source of each kind over its own files, and a change that another scan would see."""
    make(root / "folder", "a/1.jpg", "b/c/2.jpg")
    make(root / "glob", "a/1.jpg", "b/2.jpg")
    (root / "list.txt").write_text("a.jpg 1\nb.jpg 2\n")
    (root / "t.csv").write_text("a\n1\n2\n")
    (root / "lines").mkdir()
    (root / "lines/t.jsonl").write_text('{"a":1}\n{"a":2}\n')
    np.save(root / "x.npy", np.arange(3))
    np.savez(root / "x.npz", x=np.arange(3))
    (root / "x.bin").write_bytes(b"abc")
    write_megatron(root / "m.bin", [[[1, 2]], [[3]]], "uint16")
    (root / "shards").mkdir()
    write_shard(root / "shards/0.tar", [("1.jpg", b"one"), ("1.cls", b"7")])
    return {
        "folder": (FolderSource(path=root / "folder"), lambda: make(root / "folder/b/c", "3.jpg")),
        "glob": (GlobSource(root=root / "glob", patterns=("**/*.jpg",)), (root / "glob/b/2.jpg").unlink),
        "list": (ListSource(path=root / "list.txt"), lambda: (root / "list.txt").write_text("c.jpg 1\nb.jpg 2\n")),
        "webdataset": (
            WebDatasetSource(root=root / "shards", shards=("*.tar",)),
            lambda: write_shard(root / "shards/0.tar", [("1.jpg", b"one"), ("1.cls", b"8")]),
        ),
        "webdataset fields": (
            WebDatasetSource(root=root / "shards", shards=("*.tar",), fields={"label": "int64"}),
            lambda: write_shard(root / "shards/0.tar", [("1.jpg", b"one"), ("1.cls", b"8")]),
        ),
        "csv": (
            CsvSource(path=root / "t.csv", fields={"a": "int64"}),
            lambda: (root / "t.csv").write_text("a\n1\n3\n"),
        ),
        "jsonl": (
            JsonlSource(root=root / "lines", shards=("t.jsonl",), fields={"a": "int64"}),
            lambda: (root / "lines/t.jsonl").write_text('{"a":1}\n{"a":3}\n'),
        ),
        "npy": (NpySource(path=root / "x.npy"), lambda: np.save(root / "x.npy", np.arange(1, 4))),
        "npz": (NpzSource(path=root / "x.npz"), lambda: np.savez(root / "x.npz", x=np.arange(1, 4))),
        "tokens": (
            TokensSource(path=root / "m.bin", format="megatron", dtype="uint16"),
            lambda: write_megatron(root / "m.bin", [[[1]], [[2, 3]]], "uint16"),
        ),
        "raw": (RawSource(path=root / "x.bin", record={"x": "int8"}), lambda: (root / "x.bin").write_bytes(b"abd")),
    }


@pytest.mark.parametrize(
    "kind", ["folder", "glob", "list", "webdataset", "webdataset fields", "csv", "jsonl", "npy", "npz", "tokens", "raw"]
)
def test_a_source_is_scanned_once_until_it_changes(
    kind: str, tmp_path: Path, cache: IndexCache, scans: list[str]
) -> None:
    """The cache keeps the result of a scan; any change that a scan would see causes a new scan."""
    source, change = sources(tmp_path)[kind]

    first = scan_source(source, nothing, cache, Storage())
    again = scan_source(source, nothing, cache, Storage())

    assert scans == [source.type]
    assert (again.digest, again.facts, again.place) == (first.digest, first.facts, first.place)
    assert all(np.array_equal(again.arrays[name], array) for name, array in first.arrays.items())
    assert again.arrays.keys() == first.arrays.keys()
    change()
    changed = scan_source(source, nothing, cache, Storage())
    assert scans == [source.type] * 2
    assert changed.digest != first.digest
    assert scan_source(source, nothing, cache, Storage()).digest == changed.digest
    assert scans == [source.type] * 2


def test_a_new_folder_within_a_folder_is_seen(tmp_path: Path, cache: IndexCache, scans: list[str]) -> None:
    """Every scanned folder is recorded, also a folder without images."""
    source = GlobSource(root=make(tmp_path / "photos", "a/1.jpg", "b/notes.txt"), patterns=("**/*.jpg",))
    scan_source(source, nothing, cache, Storage())

    make(tmp_path / "photos/b", "2.jpg")

    assert len(scan_source(source, nothing, cache, Storage())) == 2
    assert len(scans) == 2


def test_other_options_are_another_index(tmp_path: Path, cache: IndexCache, scans: list[str]) -> None:
    """Other options, for example other labels, give the same files a separate index."""
    root = make(tmp_path / "photos", "a/1.jpg", "b/2.jpg")

    plain = scan_source(GlobSource(root=root, patterns=("**/*.jpg",)), nothing, cache, Storage())
    classes = scan_source(GlobSource(root=root, patterns=("**/*.jpg",), classes="folder"), nothing, cache, Storage())

    assert FilesIndex(plain).labels.tolist() == [0, 0]
    assert FilesIndex(classes).labels.tolist() == [0, 1]
    assert len(scans) == 2


def test_fields_in_another_order_are_another_index(tmp_path: Path, cache: IndexCache, scans: list[str]) -> None:
    """The order of the fields of a raw record is the order of its bytes, so it is a new index."""
    (tmp_path / "x.bin").write_bytes(b"abc")
    records = [{"a": "int8", "b": "int16"}, {"b": "int16", "a": "int8"}]

    indexes = [
        scan_source(RawSource(path=tmp_path / "x.bin", record=one), nothing, cache, Storage()) for one in records
    ]

    assert [[field[0] for field in index.facts["fields"]] for index in indexes] == [["a", "b"], ["b", "a"]]
    assert len(scans) == 2


def test_progress_is_told_for_a_kept_index_too(tmp_path: Path, cache: IndexCache) -> None:
    """Progress shows the number of samples also if the index comes from the cache."""
    source = FolderSource(path=make(tmp_path / "photos", "1.jpg", "2.jpg"))
    told: list[int] = []
    scan_source(source, nothing, cache, Storage())

    scan_source(source, told.append, cache, Storage())

    assert told == [2]


def test_a_kept_index_is_in_the_memory_that_workers_get(tmp_path: Path, cache: IndexCache) -> None:
    """It is copied once, from its file; an index with further arrays is another memory."""
    source = FolderSource(path=make(tmp_path / "photos", "1.jpg", "2.jpg"))
    scan_source(source, nothing, cache, Storage())
    kept = scan_source(source, nothing, cache, Storage())

    memory, same = kept.to_memfd(), kept.to_memfd()
    other = replace(kept, facts={**kept.facts, "more": 1}).to_memfd()
    try:
        assert os.path.sameopenfile(memory, same)
        assert not os.path.sameopenfile(memory, other)
        assert SourceIndex.from_descriptor(memory).facts == kept.facts
        assert SourceIndex.from_descriptor(other).facts["more"] == 1
    finally:
        for descriptor in (memory, same, other):
            os.close(descriptor)


@pytest.mark.parametrize("at", [0, 9, 20, 70, 200, -1])
def test_a_damaged_file_costs_a_scan(at: int, tmp_path: Path, cache: IndexCache, scans: list[str]) -> None:
    """A flipped bit in any relevant place, or a truncated file, causes a new scan."""
    source = FolderSource(path=make(tmp_path / "photos", "1.jpg", "2.jpg"))
    found = scan_source(source, nothing, cache, Storage())
    (file,) = (tmp_path / "cache").iterdir()
    good = file.read_bytes()
    at %= len(good)

    for damaged in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
        scans.clear()
        file.write_bytes(damaged)
        assert scan_source(source, nothing, cache, Storage()).digest == found.digest
        assert scans == ["folder"]
        assert file.read_bytes() == good, "the scan did not write the index again"


def test_what_changed_just_before_the_scan_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recent file could change again within the same tick of the file system's clock."""
    monkeypatch.setattr(cache_module, "SAMPLES_MIN", 1)
    source = FolderSource(path=make(tmp_path / "photos", "1.jpg"))

    scan_source(source, nothing, IndexCache(tmp_path / "cache"), Storage())

    assert not (tmp_path / "cache").exists()


def test_a_scan_that_saw_nothing_is_never_settled() -> None:
    """A scan that recorded no file is never settled: no change of its source would be noticed."""
    assert not Survey(nothing).is_settled(0)


def test_small_sources_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sources are not cached, because a scan of them takes almost no time."""
    monkeypatch.setattr(cache_module, "SETTLED_NS", -(10**12))

    scan_source(
        FolderSource(path=make(tmp_path / "photos", "1.jpg")), nothing, IndexCache(tmp_path / "cache"), Storage()
    )

    assert not (tmp_path / "cache").exists()


def test_a_folder_that_others_may_write_is_not_believed(tmp_path: Path, cache: IndexCache, scans: list[str]) -> None:
    """The cache rejects such a folder, because an index names the files that the daemon opens."""
    source = FolderSource(path=make(tmp_path / "photos", "1.jpg"))
    scan_source(source, nothing, cache, Storage())
    (tmp_path / "cache").chmod(0o770)

    scan_source(source, nothing, cache, Storage())

    assert len(scans) == 2


def test_only_its_user_can_read_a_kept_index(tmp_path: Path, cache: IndexCache) -> None:
    """The paths in an index can be private, so its file is closed to other users."""
    scan_source(FolderSource(path=make(tmp_path / "photos", "1.jpg")), nothing, cache, Storage())

    (file,) = (tmp_path / "cache").iterdir()

    assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_written_costs_nothing_but_scans(
    tmp_path: Path, cache: IndexCache, scans: list[str]
) -> None:
    """If a file blocks the folder of the cache, sources still work and are scanned each time."""
    (tmp_path / "cache").touch()
    source = FolderSource(path=make(tmp_path / "photos", "1.jpg"))

    assert (
        len(scan_source(source, nothing, cache, Storage())) == len(scan_source(source, nothing, cache, Storage())) == 1
    )
    assert len(scans) == 2


def test_what_was_used_least_lately_makes_room(
    tmp_path: Path, cache: IndexCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used index is removed first, and old unfinished files are removed."""
    folders = [FolderSource(path=make(tmp_path / name, "1.jpg")) for name in ("one", "two", "three")]
    for source in folders[:2]:
        scan_source(source, nothing, cache, Storage())
    one, two = (cache._file(tmp_path / "cache", source_to_plain(source)) for source in folders[:2])
    os.utime(two, (1, 1))
    stale, fresh = (tmp_path / f"cache/{name}.unfinished" for name in ("stale", "fresh"))
    stale.touch()
    fresh.touch()
    os.utime(stale, (1, 1))
    monkeypatch.setattr(cache_module, "CACHE_BYTES_MAX", one.stat().st_size * 5 // 2)

    scan_source(folders[2], nothing, cache, Storage())

    assert [file.exists() for file in (one, two, stale, fresh)] == [True, False, False, True]


def test_where_a_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache uses the folder of systemd, then the system's for root, then the user's."""
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/other:/more")
    assert default_cache_dir() == Path("/var/cache/other")
    monkeypatch.delenv("CACHE_DIRECTORY")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_cache_dir() == Path("/var/cache/batchd")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_cache_dir() == Path("/caches/batchd")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setenv("HOME", "/home/x")
    assert default_cache_dir() == Path("/home/x/.cache/batchd")
    monkeypatch.setattr("os.path.expanduser", lambda text: text)
    assert default_cache_dir() is None


def test_what_a_stream_adds_to_an_index_is_kept_with_it(cache, scans, tmp_path):
    """It is made once for each key; the index of the source alone does not have it."""
    make(tmp_path / "folder", "a/1.jpg", "b/2.jpg")
    source, made = FolderSource(path=tmp_path / "folder"), []

    def scanned(key=None):
        def extend(index):
            made.append(key)
            return SourceIndex.build(len(index), index.facts, {**index.arrays, "added": np.arange(2)}, index.place)

        extension = None if key is None else IndexExtension(key, extend)
        return scan_source(source, nothing, cache, Storage(), extension=extension)

    digests = [scanned(key).digest for key in ("a", "a", "b")]

    assert made == ["a", "b"]
    assert len(scans) == 2
    assert len(set(digests)) == 1
    assert "added" not in scanned().arrays
    assert scanned("a").arrays["added"].tolist() == [0, 1]


@pytest.mark.parametrize("patterns", [("a/1.jpg", "b/2.jpg"), ("**/*.jpg",), ("?/[12].jpg",)])
def test_files_that_no_pattern_matches_cost_no_scan(
    tmp_path: Path, cache: IndexCache, scans: list[str], patterns: tuple[str, ...]
) -> None:
    """Nor do folders in which none can match; a file that matches does."""
    root = make(tmp_path / "photos", "a/1.jpg", "b/2.jpg", "b/old.txt")
    source = GlobSource(root=root, patterns=patterns)
    first = scan_source(source, nothing, cache, Storage())

    make(root, "README", "b/notes.txt", "b/.hidden.jpg", ".git/1")
    (root / "b/old.txt").unlink()
    again = scan_source(source, nothing, cache, Storage())

    assert len(scans) == 1
    assert again.digest == first.digest
    (root / "b/2.jpg").rename(root / "b/1.jpg")
    with suppress(SourceInvalid):  # if it is named
        scan_source(source, nothing, cache, Storage())
    assert len(scans) == 2


def test_files_beside_the_images_of_a_folder_cost_no_scan(tmp_path: Path, cache: IndexCache, scans: list[str]) -> None:
    """They are not read; a new class is, even without an image."""
    root = make(tmp_path / "photos", "a/1.jpg", "b/2.jpg")
    source = FolderSource(path=root)
    scan_source(source, nothing, cache, Storage())

    make(root, "README", "a/notes.txt", "b/.3.jpg")
    scan_source(source, nothing, cache, Storage())

    assert len(scans) == 1
    (root / "c").mkdir()
    with suppress(SourceInvalid):
        scan_source(source, nothing, cache, Storage())
    assert len(scans) == 2


def test_a_long_rule_is_not_kept_with_each_folder(tmp_path: Path, cache: IndexCache, scans: list[str]) -> None:
    """Then every change of a folder costs a scan."""
    root = make(tmp_path / "photos", "1.jpg")
    source = GlobSource(root=root, patterns=("1.jpg", *(f"{number:0100}*" for number in range(100))))
    scan_source(source, nothing, cache, Storage())
    assert sum(file.stat().st_size for file in (tmp_path / "cache").iterdir()) < 2_000

    make(root, "README")
    scan_source(source, nothing, cache, Storage())

    assert len(scans) == 2
