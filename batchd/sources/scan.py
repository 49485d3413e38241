"""A source becomes an index. The daemon, once at the start of each stream, before its workers get orders."""

from batchd.config.sources import Source
from batchd.sources.index import SourceIndex
from batchd.sources.kinds import kind_of
from batchd.sources.survey import ReportProgress, Survey


def scan_source(source: Source, progress: ReportProgress) -> SourceIndex:
    """Find all samples of a source. Raises ``SourceInvalid`` naming the folder, or the file and line, that is wrong."""
    return kind_of(source).scan(source, Survey(progress))
