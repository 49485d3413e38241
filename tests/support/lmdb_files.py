"""LMDB databases, written for tests and read as a worker reads them. For tests of sources."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmdb

from batchd.data.sources.interface import Reader, kind_of, open_reader
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.lmdb.scan import scan
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.survey import Survey
from support.source_files import as_shared, nothing

MAP_BYTES = 1 << 26


def write_lmdb(path: Path, records: Mapping[bytes, bytes], *, subdir: bool = True) -> Path:
    """Write records, and return the file that holds them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        lmdb.open(str(path), map_size=MAP_BYTES, subdir=subdir, lock=False) as env,
        env.begin(write=True) as transaction,
    ):
        for key, value in records.items():
            transaction.put(key, value)
    return path / "data.mdb" if subdir else path


def scan_lmdb(path: Path, fields: dict[str, str], **changes: Any) -> tuple[LmdbSource, SourceIndex]:
    """Return a source and its index as a worker gets it.

    Another process scans it, as in the daemon.
    """
    source = LmdbSource(path=path, fields=fields, **changes)
    return source, as_shared(kind_of(source).scan(source, Survey(nothing)))


def open_lmdb(path: Path, fields: dict[str, str], max_bytes: int = 1 << 26, **changes: Any) -> Reader:
    """Return a reader of a good database.

    This process scans it, because another process takes a third of a second.
    """
    source = LmdbSource(path=path, fields=fields, **changes)
    return open_reader(source, scan(source, Survey(nothing)), max_bytes, Storage())
