"""Folders and lists of files, made, scanned and checked. For tests of sources."""

import os
from pathlib import Path

from batchd.data.sources.files.index import FilesIndex
from batchd.data.sources.files.options import FolderSource, ListSource
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.scan import scan_source
from batchd.data.sources.source_checks import check_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache


def nothing(_found: int) -> None:
    """Ignore progress."""


def source_problems(source: SourceOptions, storage: Storage | None = None) -> list[str]:
    """Return the texts of the problems that ``batchd check`` finds before it scans."""
    return [problem.text for problem in check_source(source, storage or Storage()).problems]


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(f"bytes of {name}".encode())
    return root


def scan_files(source: SourceOptions) -> FilesIndex:
    return FilesIndex(scan_source(source, nothing, IndexCache(None), Storage()))


def scan_folder(path: Path) -> FilesIndex:
    return scan_files(FolderSource(path=path))


def scan_list(
    path: Path, text: str | bytes, *, root: Path | None = None, allow_outside_root: bool = False
) -> FilesIndex:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return scan_files(ListSource(path=path, root=root, allow_outside_root=allow_outside_root))


def as_shared(index: SourceIndex) -> SourceIndex:
    """Return the index as a worker gets it: over memory whose descriptor is closed."""
    descriptor = index.to_memfd()
    try:
        shared = SourceIndex.from_descriptor(descriptor)
    finally:
        os.close(descriptor)
    assert (shared.digest, len(shared)) == (index.digest, len(index))
    return shared
