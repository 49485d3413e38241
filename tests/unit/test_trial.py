"""A trial keeps its time also where a scan says little: within a large part of a file, and in another process."""

from itertools import count
from pathlib import Path

import pytest

from batchd.failpoints import VARIABLE
from batchd.sources import source_checks
from batchd.sources.lmdb.options import LmdbSource
from batchd.sources.lmdb.scan import MODULE
from batchd.sources.parquet.options import ParquetSource
from batchd.sources.scan import scan_apart
from batchd.sources.source_checks import try_source
from batchd.storage.access import Storage
from batchd.storage.survey import Survey
from support.lmdb_files import write_lmdb
from support.parquet_files import write_parquet
from support.source_files import nothing


@pytest.mark.parametrize(("kind", "value"), [("bytes", b"some bytes"), ("int64", 7)])
def test_a_trial_ends_within_a_row_group(tmp_path: Path, kind: str, value: object) -> None:
    """Which may hold a whole file, and is told of when it has been read."""
    write_parquet(tmp_path / "a.parquet", {"x": [value] * 200_000}, compression="none", use_dictionary=False)
    source = ParquetSource(root=tmp_path, shards=("*.parquet",), fields={"x": kind if kind == "int64" else "uint8[10]"})
    clock = count(0, source_checks.SECONDS_MAX / 6)

    left = try_source(source, (), Storage(), samples_max=1 << 30, clock=lambda: next(clock))

    assert left == (None, (), ("everything behind the first 0 samples",))


class _Over(Exception):  # noqa: N818  no error: it ends a scan
    """The time is over."""


def test_the_time_of_a_scan_in_another_process_ends_while_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it ends with the process, whether or not that would be given up for its silence."""
    write_lmdb(tmp_path / "db", {b"a": b"1"})
    monkeypatch.setenv(VARIABLE, "scan.apart=hang")

    def looked() -> None:
        raise _Over

    source = LmdbSource(path=tmp_path / "db", fields={"x": "uint8[1]"})
    with pytest.raises(_Over):
        scan_apart(MODULE, source, Survey(nothing, looked=looked), silence_max_s=5)
