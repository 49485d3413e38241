"""What is wrong with a source, as texts alone. For tests of sources."""

from batchd.sources.options import SourceOptions
from batchd.sources.source_checks import check_source
from batchd.storage.access import Storage


def source_problems(source: SourceOptions, storage: Storage | None = None) -> list[str]:
    """What a look at a source finds wrong, without the keys."""
    return [problem.text for problem in check_source(source, storage or Storage()).problems]
