"""Several sources, one after the other. Daemon and workers.

sample   0 ........ n0-1 | n0 ........ n0+n1-1 | ...
of part 0       | of part 1           |
"""

from bisect import bisect_right
from itertools import accumulate

from batchd.sources.composed.options import ConcatSource
from batchd.sources.composed.parts import ComposedReader, PartReaders, Places, common_columns, join, scan_parts
from batchd.sources.interface import BuiltInKind, kind_of
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.survey import Survey


def _places(index: SourceIndex) -> Places:
    """Where samples are; nothing is kept for each."""
    starts = list(accumulate((samples for samples, _ in index.facts["parts"]), initial=0))

    def place(sample: int) -> tuple[int, int]:
        part = bisect_right(starts, index.checked(sample)) - 1
        return part, sample - starts[part]

    return place


def _scan(source: ConcatSource, survey: Survey) -> SourceIndex:
    parts = scan_parts(source.sources, survey)
    return join(parts, sum(map(len, parts)), {"order": "concat"}, {})


def _open(source: ConcatSource, index: SourceIndex, max_bytes: int, storage: Storage) -> ComposedReader:
    readers = PartReaders(source.sources, index, max_bytes, storage)
    return ComposedReader(readers, _places(index), source.source_field)


def _samples(source: ConcatSource, storage: Storage) -> int | None:
    samples = 0
    for part in source.sources:
        count = kind_of(part).samples(part, storage)
        if count is None:
            return None
        samples += count
    return samples


KIND = BuiltInKind(
    problems=lambda _source, _storage: [],
    columns=lambda source, storage: common_columns(source.sources, storage, source.source_field),
    scan=_scan,
    open=_open,
    samples=_samples,
)
