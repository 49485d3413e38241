"""Checks of sources by ``batchd check``: before a scan, and a trial scan within its time."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchd.data.sources import scan as isolated
from batchd.data.sources import source_checks
from batchd.data.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.files.options import GlobSource
from batchd.data.sources.interface import kind_of
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.lmdb.scan import MODULE
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.scan import isolated_scan
from batchd.data.sources.source_checks import try_source
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.sources.tokens.options import TokensSource
from batchd.data.sources.video.options import VideoSource
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.storage import patterns
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd.runtime.children import Child
from batchd.runtime.failpoints import VARIABLE
from support.lmdb_files import write_lmdb
from support.parquet_files import write_parquet
from support.source_files import make, nothing, source_problems

SHARDED: dict[str, Any] = {
    "webdataset": lambda root, *shards: WebDatasetSource(root=root, shards=shards),
    "tfrecord": lambda root, *shards: TFRecordSource(root=root, shards=shards, fields={"x": "int64"}),
    "parquet": lambda root, *shards: ParquetSource(root=root, shards=shards, fields={"x": "int64"}),
    "glob": lambda root, *shards: GlobSource(root=root, patterns=shards),
    "csv": lambda root, *shards: CsvSource(root=root, files=shards, fields={"x": "int64"}),
    "jsonl": lambda root, *shards: JsonlSource(root=root, shards=shards, fields={"x": "int64"}),
    "raw": lambda root, *shards: RawSource(root=root, files=shards, record={"x": "uint8"}),
    "tokens": lambda root, *shards: TokensSource(root=root, files=shards, dtype="uint16", length=2),
    "video": lambda root, *shards: VideoSource(root=root, files=shards),
}


def refused(source: SourceOptions) -> str:
    """The scan's error message for a source."""
    with pytest.raises(SourceInvalid) as caught:
        kind_of(source).scan(source, Survey(nothing))
    return str(caught.value)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("kind", SHARDED)
def test_files_that_are_named_and_not_there_are_found_as_the_scan_finds_them(tmp_path: Path, kind: str) -> None:
    """The message names the first few files and counts the rest."""
    make(tmp_path, "a-1")
    one, many = SHARDED[kind](tmp_path, "a-{1..2}"), SHARDED[kind](tmp_path, "a-{0..9}", "b*")

    assert source_problems(one) == [refused(one)] == [f"there is no file {tmp_path}/a-2"]
    names = ", ".join(f"{tmp_path}/a-{number}" for number in (0, 2, 3))
    assert source_problems(many) == [refused(many)] == [f"there is no file {names} and 6 more"]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("kind", SHARDED)
def test_patterns_that_match_nothing_are_found_as_the_scan_finds_them(tmp_path: Path, kind: str) -> None:
    """Folders do not count as files, at any depth."""
    make(tmp_path, "a/b.tar/c", "a/.hidden.tar")
    source = SHARDED[kind](tmp_path, "*.tar", "**/*.tar")

    assert source_problems(source) == [refused(source)] == [f"no file below {tmp_path} matches '*.tar', '**/*.tar'"]


def test_one_file_that_a_pattern_matches_is_enough(tmp_path: Path) -> None:
    """The file may be in any folder, and behind a link."""
    make(tmp_path / "elsewhere", "x/1.tar")
    make(tmp_path / "root", "y/z")
    (tmp_path / "root/y/link").symlink_to(tmp_path / "elsewhere")

    assert source_problems(WebDatasetSource(root=tmp_path / "root", shards=("no/*", "y/**/?.tar"))) == []


def test_what_would_take_long_to_find_is_left_to_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A circle of links is left to the scan, too, which refuses it by its name."""
    make(tmp_path, "a/1", "b/1", "c/1")
    source = GlobSource(root=tmp_path, patterns=("**/*.tar",))
    assert source_problems(source) == [f"no file below {tmp_path} matches '**/*.tar'"]
    monkeypatch.setattr(patterns, "FOLDERS_MAX", 3)
    assert source_problems(source) == []
    monkeypatch.undo()
    (tmp_path / "a/again").symlink_to(tmp_path)

    assert source_problems(source) == []
    assert "is a link to a folder that it lies in" in refused(source)


def test_a_file_that_is_not_whole_records_is_found_by_its_length(tmp_path: Path) -> None:
    """The check reports the same message as the scan."""
    (tmp_path / "x.bin").write_bytes(bytes(10))
    source = RawSource(path=tmp_path / "x.bin", record={"x": "uint8[4]"})

    assert source_problems(source) == [refused(source)]
    assert refused(source).endswith("10 bytes are not 0 and whole records of 4 bytes each; 2 are left")


def test_arrays_of_different_lengths_are_found_by_their_headers(tmp_path: Path) -> None:
    """The check covers one archive, and arrays in files of their own."""
    arrays = {"x": np.zeros(3), "y": np.zeros(4)}
    np.savez(tmp_path / "xy.npz", **arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    message = "the arrays have not as many samples each: x has 3, y has 4"

    for source in (
        NpzSource(path=tmp_path / "xy.npz"),
        NpySource(root=tmp_path, arrays={"x": "x.npy", "y": "y.npy"}),
    ):
        assert source_problems(source) == [refused(source)] == [message]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("shards", ["a.parquet", "*.parquet"])
def test_a_column_that_a_parquet_file_has_not_is_found_in_its_footer(tmp_path: Path, shards: str) -> None:
    """The message proposes the column that was probably meant."""
    file = write_parquet(tmp_path / "a.parquet", {"image": [b"x"], "label": [1]})
    source = ParquetSource(root=tmp_path, shards=(shards,), fields={"lable": "int64"})

    assert source_problems(source) == [refused(source)]
    assert refused(source) == f"{file} has no column 'lable' for the field lable; did you mean label?"
    assert source_problems(ParquetSource(root=tmp_path, shards=(shards,), fields={"label": "int64"})) == []


def test_a_table_that_is_empty_or_lacks_a_title_is_found(tmp_path: Path) -> None:
    """The check covers one file, and one of several files."""
    (tmp_path / "a.csv").write_text("")
    one = CsvSource(path=tmp_path / "a.csv", fields={"x": "int64"})
    several = CsvSource(root=tmp_path, files=("*.csv",), fields={"x": "int64"})
    for source in (one, several):
        assert source_problems(source) == [refused(source)] == [f"{tmp_path}/a.csv is empty"]
    (tmp_path / "a.csv").write_text("X,y\n1,2\n")
    for source in (one, several):
        assert source_problems(source) == [refused(source)] == [f"{tmp_path}/a.csv has no column 'x'; did you mean X?"]


@pytest.mark.usefixtures("forked_scans")
def test_a_trial_scan_ends_within_a_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group may be a whole file, and progress is reported only after it."""
    write_parquet(tmp_path / "a.parquet", {"x": [7]})
    source = ParquetSource(root=tmp_path, shards=("*.parquet",), fields={"x": "int64"})
    monkeypatch.setenv(VARIABLE, "scan.parquet.opening=hang")
    clock = count(0, source_checks.SECONDS_MAX / 6)

    left = try_source(source, (), Storage(), clock=lambda: next(clock))

    assert left[:3] == (None, (), ("everything behind the first 0 samples",))


@pytest.mark.usefixtures("forked_scans")
def test_the_start_of_another_process_takes_no_time_of_a_trial_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The imports of a process may take longer than the whole trial on a busy machine."""
    write_parquet(tmp_path / "a.parquet", {"x": [7]})
    source = ParquetSource(root=tmp_path, shards=("*.parquet",), fields={"x": "int64"})
    passed_s, start = [0.0], isolated.children.start

    def start_late(*arguments: Any, **how: Any) -> Child:
        passed_s[0] += 10 * source_checks.SECONDS_MAX
        return start(*arguments, **how)

    monkeypatch.setattr(isolated.children, "start", start_late)

    trial = try_source(source, (), Storage(), clock=lambda: passed_s[0])

    assert len(trial.whole or ()) == 1


class _Over(Exception):  # noqa: N818  no error: it ends a scan
    """The time for a trial scan is over."""


@pytest.mark.usefixtures("forked_scans")
def test_a_trial_scan_in_another_process_ends_while_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan ends before the silence timeout of the process."""
    write_lmdb(tmp_path / "db", {b"a": b"1"})
    monkeypatch.setenv(VARIABLE, "scan.isolated=hang")

    def looked() -> None:
        raise _Over

    source = LmdbSource(path=tmp_path / "db", fields={"x": "uint8[1]"})
    with pytest.raises(_Over):
        isolated_scan(MODULE, source, Survey(nothing, looked=looked), silence_max_s=5)
