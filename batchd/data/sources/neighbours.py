"""Samples that are neighbours in storage, and the blocks that they form. Daemon and CLI.

    file, shard or row group |  ............ stretch 0 ............ |  ... stretch 1 ...  |
    block_samples = 4        | 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12    | 13 14 15 16 | 17 18 |
    block_bytes              | those whose first byte is in the same block_bytes of the file |

Invariant: the blocks contain each sample once, in the order of the source, and none crosses the end
of a stretch.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.storage.index import SourceIndex

Numbers = NDArray[np.int64]


class Neighbours(NamedTuple):
    """Which samples are neighbours in storage.

    ``firsts``: the first sample of each stretch: a file, shard or row group; int64 ``[stretches]``,
    ascending from 0. ``begins``: the byte in its file at which each sample begins, ascending in a
    stretch; int64 ``[samples]``. ``sample_bytes``: instead, the mean size of a stretch's samples;
    float64 ``[stretches]``. Neither: sizes are not known, for the reason ``why_no_bytes``.
    ``why_none``: why samples have no neighbours at all; "" if they have.
    """

    firsts: Numbers
    begins: Numbers | None = None
    sample_bytes: NDArray[np.float64] | None = None
    why_no_bytes: str = ""
    why_none: str = ""


def in_order(index: SourceIndex, why_no_bytes: str = "its index has no sizes of samples") -> Neighbours:
    """All samples as one stretch, in the order of the source; their sizes are not known."""
    return Neighbours(np.zeros(min(1, len(index)), np.int64), why_no_bytes=why_no_bytes)


def in_files(firsts: Numbers, samples: int, **sizes: Any) -> Neighbours:
    """Samples in several files; some may have none. ``sizes``: fields of ``Neighbours``."""
    firsts = np.unique(firsts).astype(np.int64)
    return Neighbours(firsts[firsts < samples], **sizes)


def in_records(index: SourceIndex, why_no_bytes: str = "") -> Neighbours:
    """Records of files, from ``facts`` and ``starts`` of the index; see ``records``."""
    firsts = np.cumsum([0, *(records for records, *_rest in index.facts["files"])])[:-1]
    if why_no_bytes:
        return in_files(firsts, len(index), why_no_bytes=why_no_bytes)
    return in_files(firsts, len(index), begins=index.arrays["starts"])


def blocks_of_samples(neighbours: Neighbours, samples: int, block_samples: int) -> Numbers:
    """The first sample of each block, and ``samples``: int64 ``[blocks + 1]``."""
    return _cut(neighbours.firsts, samples, np.full(len(neighbours.firsts), block_samples, np.int64))


def blocks_of_bytes(neighbours: Neighbours, samples: int, block_bytes: int) -> Numbers:
    """As ``blocks_of_samples``, for neighbours with known sizes."""
    if neighbours.begins is not None:
        part = neighbours.begins // block_bytes
        firsts = np.union1d(neighbours.firsts, np.flatnonzero(np.diff(part)) + 1)
        return np.append(firsts, samples)
    assert neighbours.sample_bytes is not None, "their sizes are known"
    lengths = np.maximum(1, block_bytes // np.maximum(1, neighbours.sample_bytes))
    return _cut(neighbours.firsts, samples, lengths.astype(np.int64))


def _cut(firsts: Numbers, samples: int, lengths: Numbers) -> Numbers:
    """Cut each stretch into blocks of its length, the last one shorter."""
    counts = -(-np.diff(firsts, append=samples) // lengths)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.append(np.repeat(firsts, counts) + numbers * np.repeat(lengths, counts), samples)


def joined(parts: list[tuple[int, Neighbours]]) -> Neighbours:
    """The neighbours of sources one after the other: (samples, neighbours) of each."""
    starts = np.cumsum([0, *(samples for samples, _one in parts)])[:-1]
    firsts = np.concatenate([part.firsts + start for start, (_samples, part) in zip(starts, parts, strict=True)])
    why_none = next((part.why_none for _samples, part in parts if part.why_none), "")
    why_no_bytes = next((part.why_no_bytes for _samples, part in parts if part.why_no_bytes), "")
    if why_none or why_no_bytes:
        return Neighbours(firsts, why_no_bytes=why_no_bytes, why_none=why_none)
    if all(part.sample_bytes is not None for _samples, part in parts):
        return Neighbours(firsts, sample_bytes=np.concatenate([part.sample_bytes for _samples, part in parts]))
    return Neighbours(firsts, begins=np.concatenate([_begins(samples, part) for samples, part in parts]))


def selected(whole: Neighbours, samples: int, numbers: Numbers) -> Neighbours:
    """The neighbours among some samples of a source, ``numbers``, in this order.

    A stretch ends where the numbers leave a stretch of the source, or do not ascend.
    """
    stretches = np.searchsorted(whole.firsts, numbers, "right")
    ends = np.flatnonzero((np.diff(stretches) != 0) | (np.diff(numbers) <= 0))
    firsts = np.concatenate([[0], ends + 1]).astype(np.int64)
    if 2 * len(firsts) > len(numbers) > 1:
        why_none = "few of its samples are next to each other in their files"
        return Neighbours(firsts, why_none=why_none)
    if whole.why_none or whole.why_no_bytes:
        return whole._replace(firsts=firsts)
    return Neighbours(firsts, begins=_begins(samples, whole)[numbers])


def _begins(samples: int, neighbours: Neighbours) -> Numbers:
    """The byte at which each sample begins, also where samples are alike."""
    if neighbours.begins is not None:
        return neighbours.begins
    assert neighbours.sample_bytes is not None, "their sizes are known"
    counts = np.diff(neighbours.firsts, append=samples)
    numbers = np.arange(samples) - np.repeat(neighbours.firsts, counts)
    return (numbers * np.repeat(neighbours.sample_bytes, counts)).astype(np.int64)
