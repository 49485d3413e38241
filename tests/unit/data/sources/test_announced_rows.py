"""A scan takes the memory that the data needs, whatever number of rows a file announces."""

import io
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from batchd.data.sources import scan as scans
from batchd.data.sources.interface import kind_of
from batchd.data.sources.parquet import scan as parquet_scan
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd.runtime.sizes import round_bytes
from support.parquet_files import write_parquet
from support.source_files import nothing

ROWS = 300_000
LISTS = {"ids": "int64[?]"}
OF_20_000, OF_10_000 = b"\xc0\xb8\x02", b"\xa0\x9c\x01"
"""Numbers of values in Thrift."""


def lists(path: Path, rows: int = ROWS, **options: object) -> Path:
    """A file of rows without values, which takes a byte for many of them."""
    table = {"ids": pa.nulls(rows, pa.list_(pa.int64()))}
    return write_parquet(path, table, max_rows_per_page=20_000, row_group_size=rows, compression="none", **options)


def scan(root: Path, fields: dict[str, str] = LISTS) -> object:
    return parquet_scan.scan(ParquetSource(root=root, shards=("*.parquet",), fields=fields), Survey(nothing))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_many_rows_in_few_bytes_are_scanned(tmp_path: Path, version: str) -> None:
    """Nulls and repeated values are, and the scan keeps nothing for each row of such a column."""
    file = lists(tmp_path / "a.parquet", data_page_version=version)
    assert file.stat().st_size < ROWS // 30

    tracemalloc.start()
    index = scan(tmp_path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert len(index) == ROWS
    assert most < ROWS


def test_rows_that_are_in_no_page_are_refused(tmp_path: Path) -> None:
    """A footer may announce more values than the pages hold."""
    file = lists(tmp_path / "a.parquet")
    assert file.read_bytes().count(OF_20_000) > 9
    file.write_bytes(file.read_bytes().replace(OF_20_000, OF_10_000))

    with pytest.raises(
        SourceInvalid, match=r"'ids': its pages hold 150,000 values, and the footer announces 300,000 rows"
    ):
        scan(tmp_path)


def test_row_groups_that_have_the_same_bytes_are_refused(tmp_path: Path) -> None:
    """A footer may name the same pages again and again."""
    file = lists(tmp_path / "a.parquet")
    metadata = parquet.read_metadata(file)
    metadata.append_row_groups(parquet.read_metadata(file))
    footer = io.BytesIO()
    metadata.write_metadata_file(footer)
    data = file.read_bytes()
    length = int.from_bytes(data[-8:-4], "little") + 8
    file.write_bytes(data[:-length] + footer.getvalue()[4:])
    assert parquet.read_metadata(file).num_rows == 2 * ROWS

    with pytest.raises(SourceInvalid, match=r"row group 1, column 'ids': it has its bytes, .* in common with another"):
        scan(tmp_path)


@pytest.mark.parametrize("damage", range(40))
def test_damaged_page_headers_are_refused(tmp_path: Path, damage: int) -> None:
    """Every byte of a header may be any other, and the scan ends with a reason."""
    file = lists(tmp_path / "a.parquet")
    data = bytearray(file.read_bytes())
    data[4 + damage % 20] = (0xFF, 0x1C)[damage // 20]
    file.write_bytes(data)

    try:
        outcome = f"{file}: {len(scan(tmp_path))}"
    except SourceInvalid as error:
        outcome = str(error)
    assert outcome.startswith(f"{file}: ")


@pytest.mark.thorough
@pytest.mark.usefixtures("forked_scans")
def test_a_scan_in_its_own_process_has_a_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with what it may take, and the daemon's process is as it was."""
    monkeypatch.setattr(scans, "SCAN_BYTES_MIN", 64 << 20)
    monkeypatch.setattr(scans, "available_bytes", lambda: 128 << 20)
    write_parquet(tmp_path / "a.parquet", {"label": np.zeros(10_000_000, np.int64)})
    source = ParquetSource(root=tmp_path, shards=("*",), fields={"label": "int64"})

    with pytest.raises(SourceInvalid, match=r"needs more than 64\.0 MiB of memory, .* of the 128\.0 MiB that are free"):
        kind_of(source).scan(source, Survey(nothing))


SCAN_WITHIN_A_MEBIBYTE = """
import sys
from pathlib import Path
from batchd.errors import SourceInvalid
from batchd.data.sources import scan as scans
from batchd.data.sources.csv.options import CsvSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from support.source_files import nothing
scans.SCAN_BYTES_MIN, scans.available_bytes = 1 << 20, lambda: 2 << 20
try:
    scans.scan_source(CsvSource(path=Path(sys.argv[1]), fields={"a": "int64"}), nothing, IndexCache(None), Storage())
except SourceInvalid as error:
    print(error)
"""


@pytest.mark.thorough
def test_a_scan_in_the_daemons_process_has_a_limit_of_memory(tmp_path: Path) -> None:
    """Every other source reports its progress, and is refused with what it may take.

    In an interpreter of its own: this one may have room from former tests in its heap.
    """
    (tmp_path / "a.csv").write_text("a\n" + "1\n" * 2_000_000)
    command = [sys.executable, "-c", SCAN_WITHIN_A_MEBIBYTE, str(tmp_path / "a.csv")]

    said = subprocess.check_output(command, text=True, cwd=Path(__file__).parents[3])

    assert re.search(rf"the scan needs more than {round_bytes(1 << 20)} of memory.* found .* samples until then", said)
