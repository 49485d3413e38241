"""A source becomes an index. The daemon, once at the start of each stream, before its workers get orders."""

from collections.abc import Sequence
from pathlib import Path

from batchd.config.sources import Source
from batchd.sources import storage
from batchd.sources.cache import IndexCache
from batchd.sources.index import SourceIndex
from batchd.sources.kinds import kind_of
from batchd.sources.survey import ReportProgress, Survey


def scan_source(
    source: Source, progress: ReportProgress, cache: IndexCache, python_path: Sequence[Path] = ()
) -> SourceIndex:
    """Find all samples of a source, or know them from before, where nothing has changed.

    Raises ``SourceInvalid`` naming the folder, or the file and the line, record or byte, that is wrong.
    """
    kind = kind_of(source)
    try:
        known = cache.load(source)
        if known is not None:
            progress(len(known))
            return known
        survey = Survey(progress, python_path)
        index = kind.scan(source, survey)
        cache.keep(source, index, survey)
        return index
    finally:
        storage.close()  # who has scanned asks no server any more
