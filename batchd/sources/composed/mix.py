"""Several sources mixed by weight: which sample of which part stands where is decided here, once. Daemon and workers.

Part k with weight w comes for the m-th time at the moment (m + 1/2) / w, and whoever's moment is
earlier comes first. So in each stretch of the order every part has its share, to within one sample.

    weights [2, 1]   moments of part 0: 0.75, 2.25, 3.75, 5.25 ...   of part 1: 1.5, 4.5 ...   order 0 1 0 | 0 1 0 | ...

    parts     uint8 [n]   which part each sample is of
    numbers   int64 [n]   its number within the part; a part that has come to its end begins again
"""

import math

import numpy as np
from numpy.typing import NDArray

from batchd.errors import SourceInvalid
from batchd.sources.composed.options import MixSource
from batchd.sources.composed.parts import ComposedReader, PartReaders, common_columns, join, places_in, scan_parts
from batchd.sources.interface import BuiltInKind
from batchd.storage.access import Storage
from batchd.storage.index import NUMBER, SourceIndex
from batchd.storage.survey import Survey

SAMPLES_MAX = 1 << 30
"""Of an epoch; each costs nine bytes."""


def _scan(source: MixSource, survey: Survey) -> SourceIndex:
    parts = scan_parts(source.sources, survey)
    expected = mixed_counts([len(part) for part in parts], source.weights, whole=source.until == "all")
    if sum(expected) > SAMPLES_MAX:
        raise SourceInvalid(
            f"weights = {list(source.weights)} of sources with {', '.join(str(len(part)) for part in parts)} samples "
            f'make an epoch of {sum(expected)}, more than {SAMPLES_MAX}; choose other weights, or until = "first"'
        )
    order, numbers = mixed_order([len(part) for part in parts], source.weights, whole=source.until == "all")
    return join(parts, len(order), {"order": "mix"}, {"parts": order, "numbers": numbers})


def mixed_order(
    samples: list[int], weights: tuple[float, ...], *, whole: bool
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Which part, and which of its samples, stands where: uint8 [n] and int64 [n]. The arguments are ``mixed_counts``' ones."""
    counts = mixed_counts(samples, weights, whole=whole)
    moments = np.concatenate([(np.arange(count) + 0.5) / weight for count, weight in zip(counts, weights, strict=True)])
    parts = np.repeat(np.arange(len(samples), dtype=np.uint8), counts)
    numbers = np.concatenate(
        [np.arange(count, dtype=NUMBER) % size for count, size in zip(counts, samples, strict=True)]
    )
    order = np.argsort(moments, kind="stable")
    return parts[order], numbers[order]


def mixed_counts(samples: list[int], weights: tuple[float, ...], *, whole: bool) -> list[int]:
    """How often each part comes. ``samples``: of each part, 1 or more.

    ``whole``: until every sample of every part has come; otherwise until a part has no further one.
    """
    rounds = [count / weight for count, weight in zip(samples, weights, strict=True)]
    end = max(rounds) if whole else min(rounds)
    return [math.ceil(weight * end - 0.5) for weight in weights]


def _open(source: MixSource, index: SourceIndex, max_bytes: int, storage: Storage) -> ComposedReader:
    readers = PartReaders(source.sources, index, max_bytes, storage)
    return ComposedReader(readers, places_in(index), source.source_field)


KIND = BuiltInKind(
    problems=lambda _source, _storage: [],
    columns=lambda source, storage: common_columns(source.sources, storage, source.source_field),
    scan=_scan,
    open=_open,
)
