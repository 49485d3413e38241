"""Make the index of a source. Daemon, once for each stream, before its workers get orders."""

from collections.abc import Sequence
from pathlib import Path

from batchd.sources.interface import kind_of
from batchd.sources.kinds import source_to_plain
from batchd.sources.options import SourceOptions
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.index_cache import IndexCache
from batchd.storage.survey import ReportProgress, Survey


def scan_source(
    source: SourceOptions,
    progress: ReportProgress,
    cache: IndexCache,
    storage: Storage,
    python_path: Sequence[Path] = (),
) -> SourceIndex:
    """Find all samples of a source, or load them from the index cache if nothing has changed.

    Raises ``SourceInvalid``, which names the folder, or the file and the line, record or byte.
    """
    kind, plain = kind_of(source), source_to_plain(source)
    try:
        known = cache.load(plain, storage)
        if known is not None:
            progress(len(known))
            return known
        survey = Survey(progress, python_path, storage=storage)
        index = kind.scan(source, survey)
        cache.keep(plain, index, survey)
        return index
    finally:
        storage.close()  # no server is asked after the scan
