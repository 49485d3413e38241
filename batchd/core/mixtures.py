"""Sources that are mixed by shares which change with the rows of a run. Pure code.

    rows of all epochs  | ... segment 0: shares 1 to 0 ... | ... segment 1: shares 1 to 3 ...
    blocks of a segment | BLOCK rows | BLOCK rows | rest |   all with the shares of the segment
    rows of a block       keyed permutation -> draws:  | part 0 | part 1 ............ |

The draws of a part are counted from the beginning of the run, over all blocks. A part has pass
after pass, each with a permutation of its own. So the sample in any row is arithmetic, and each
pass of a part has each of its samples once. An epoch is a fixed number of rows.

Invariants: no row depends on a batch, a rank or a worker; a part with a share above 0 has a row in
each whole block.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Indices, Permutation, permutation

BLOCK = 1 << 16
"""Rows in which the shares are exact, to within one row of each part."""

Numbers = NDArray[np.int64]


class Segment(NamedTuple):
    """The shares of the parts from row ``first`` on; finite, 0 or more, with a sum above 0."""

    first: int
    shares: Sequence[float]


def rows_of_parts(shares: Sequence[float], rows: int) -> list[int]:
    """Deal rows to parts by their shares: the largest remainders get those that are left over.

    Each part with a share above 0 gets one row or more if ``rows`` suffice.
    """
    largest = max(shares)
    total = sum(share / largest for share in shares)
    exact = [rows * (share / largest / total) for share in shares]
    least = 1 if rows >= sum(share > 0 for share in shares) else 0
    counts = [max(int(count), least if share > 0 else 0) for count, share in zip(exact, shares, strict=True)]
    order = sorted(range(len(shares)), key=lambda part: (counts[part] - exact[part], part))
    while sum(counts) < rows:
        counts[order[0]] += 1
        order.append(order.pop(0))
    while sum(counts) > rows:
        spare = [part for part, count in enumerate(counts) if count > least]
        counts[max(spare, key=lambda part: (counts[part] - exact[part], part))] -= 1
    return counts


class _Stretch(NamedTuple):
    """Blocks of equal length and shares: rows ``first`` to ``end`` (None: without an end).

    ``starts``: the first draw of each part in a block, and the block's length. ``before``: samples
    of each part in the rows before the stretch.
    """

    first: int
    end: int | None
    starts: Numbers
    before: Numbers

    @property
    def block(self) -> int:
        return int(self.starts[-1])


class Mixture:
    """An ``EpochOrder`` of parts one after the other; see the module."""

    has_each_once = False

    def __init__(
        self, sizes: Sequence[int], segments: Sequence[Segment], rows: int, seed: int, *, shuffle: bool
    ) -> None:
        """``sizes``: samples of each part. ``segments``: from row 0 on. ``rows``: of an epoch."""
        self.samples = sum(sizes)
        self.sizes = tuple(sizes)
        self.changes = [segment.first for segment in segments]
        self._sizes = np.asarray(sizes, np.int64)
        self._firsts = np.cumsum([0, *sizes])[:-1]
        self._segments = segments
        self._rows = self.rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._stretches = list(self._make_stretches())
        self._stretch_firsts = np.asarray([stretch.first for stretch in self._stretches], np.int64)

    @property
    def digest(self) -> str:
        """See ``EpochOrder``."""
        said = (
            self._sizes.tolist(),
            [(segment.first, list(segment.shares)) for segment in self._segments],
            self._rows,
            self._shuffle,
        )
        return sha256(repr(said).encode()).hexdigest()

    def samples_at(self, epoch: int, places: Numbers) -> Numbers:
        """See ``EpochOrder``."""
        return self._samples_of(*self._ordinals(epoch, places))

    def passes_at(self, epoch: int, places: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return the part, its pass, and the place in that pass, in the part's own order.

        Three times int64 of the shape of ``places``. Each pass has each place of its part once.
        """
        parts, ordinals = self._ordinals(epoch, places)
        return parts, *np.divmod(ordinals, self._sizes[parts])

    def _ordinals(self, epoch: int, places: Numbers) -> tuple[Numbers, Numbers]:
        """Return the part at each place, and how many of its samples came before."""
        rows = epoch * self._rows + places
        parts, ordinals = np.empty(rows.shape, np.int64), np.empty(rows.shape, np.int64)
        numbers = np.searchsorted(self._stretch_firsts, rows, "right") - 1
        for number in np.unique(numbers).tolist():
            stretch, chosen = self._stretches[number], numbers == number
            blocks, within = np.divmod(rows[chosen] - stretch.first, stretch.block)
            draws = self._drawn(number, blocks, within)
            parts[chosen] = own = np.searchsorted(stretch.starts, draws, "right") - 1
            counts = np.diff(stretch.starts)[own]
            ordinals[chosen] = stretch.before[own] + blocks * counts + draws - stretch.starts[own]
        return parts, ordinals

    def share_at(self, row: int) -> list[float]:
        """Return the part of the rows that each part has from row ``row`` of the run on."""
        stretch = self._stretches[int(np.searchsorted(self._stretch_firsts, row, "right")) - 1]
        return [count / stretch.block for count in np.diff(stretch.starts).tolist()]

    def _samples_of(self, parts: Numbers, ordinals: Numbers) -> Numbers:
        """Return the samples of parts by how many came before: int64 of the same shape."""
        passes, numbers = np.divmod(ordinals, self._sizes[parts])
        for part in np.unique(parts).tolist() if self._shuffle else ():
            chosen = parts == part
            numbers[chosen] = _signed(self._passing(part)(_bits(numbers[chosen]), _bits(passes[chosen])))
        return self._firsts[parts] + numbers

    def _drawn(self, number: int, blocks: Numbers, within: Numbers) -> Numbers:
        """Return the draws in some rows of blocks: int64 of the same shape."""
        if self._shuffle:
            return _signed(self._dealing(number)(_bits(within), _bits(blocks)))
        return _evenly(tuple(self._stretches[number].starts.tolist()))[within]

    def _passing(self, part: int) -> Permutation:
        """Return the permutations of a part's samples, one for each pass."""
        return permutation(int(self._sizes[part]), (self._seed, 3, part))

    def _dealing(self, number: int) -> Permutation:
        """Return the permutations from rows to draws in a stretch, one for each block."""
        return permutation(self._stretches[number].block, (self._seed, 4, number))

    def _make_stretches(self) -> Iterator[_Stretch]:
        before = np.zeros(len(self._sizes), np.int64)
        ends = [*(segment.first for segment in self._segments[1:]), None]
        for (first, shares), end in zip(self._segments, ends, strict=True):
            whole = None if end is None else (end - first) // BLOCK * BLOCK
            if whole != 0:
                starts = np.cumsum([0, *rows_of_parts(shares, BLOCK)])
                yield _Stretch(first, None if whole is None else first + whole, starts, before)
                before = before if whole is None else before + whole // BLOCK * np.diff(starts)
            if end is not None and whole is not None and first + whole < end:
                starts = np.cumsum([0, *rows_of_parts(shares, end - first - whole)])
                yield _Stretch(first + whole, end, starts, before)
                before = before + np.diff(starts)

    def places_of(self, epoch: int, samples: Numbers) -> Numbers:
        """See ``EpochOrder``."""
        first = (self.occurrences(epoch, sample)[:1] for sample in samples.tolist())
        return np.asarray([int(found[0]) if len(found) else -1 for found in first], np.int64)

    def occurrences(self, epoch: int, sample: int) -> Numbers:
        """See ``EpochOrder``."""
        part = int(np.searchsorted(self._firsts, sample, "right")) - 1
        number, size = sample - int(self._firsts[part]), int(self._sizes[part])
        begin, end = epoch * self._rows, (epoch + 1) * self._rows
        rows = [np.empty(0, np.int64)]
        for place, stretch in enumerate(self._stretches):
            first, last = max(begin, stretch.first), end if stretch.end is None else min(end, stretch.end)
            count = int(stretch.starts[part + 1] - stretch.starts[part])
            if first >= last or not count:
                continue
            blocks = (first - stretch.first) // stretch.block, -(-(last - stretch.first) // stretch.block)
            low, high = (int(stretch.before[part]) + block * count for block in blocks)
            passes = np.arange(low // size, -(-high // size))
            ordinals = passes * size + self._turns(number, part, passes)
            ordinals = ordinals[(ordinals >= low) & (ordinals < high)]
            block, draw = np.divmod(ordinals - stretch.before[part], count)
            within = self._rows_of(place, block, draw + stretch.starts[part])
            rows.append(stretch.first + block * stretch.block + within)
        found = np.sort(np.concatenate(rows))
        return found[(found >= begin) & (found < end)] - begin

    def _turns(self, number: int, part: int, passes: Numbers) -> Numbers:
        """Return when each pass of a part has one of its samples: int64 of the same shape."""
        numbers = np.full(passes.shape, number)
        return _signed(self._passing(part).inverse(_bits(numbers), _bits(passes))) if self._shuffle else numbers

    def _rows_of(self, number: int, blocks: Numbers, draws: Numbers) -> Numbers:
        """Return the rows of blocks that have some draws: int64 of the same shape."""
        if self._shuffle:
            return _signed(self._dealing(number).inverse(_bits(draws), _bits(blocks)))
        return np.argsort(_evenly(tuple(self._stretches[number].starts.tolist())))[draws]


def _bits(numbers: Numbers) -> Indices:
    return numbers.astype(np.uint64)


def _signed(indices: Indices) -> Numbers:
    return indices.astype(np.int64)


@lru_cache(maxsize=16)
def _evenly(starts: tuple[int, ...]) -> Numbers:
    """Return the draws of a block so that each stretch of rows has its share of each part."""
    counts = np.diff(starts)
    parts = np.repeat(np.arange(len(counts)), counts)
    draws = np.arange(starts[-1])
    moments = (draws - np.asarray(starts)[parts] + 0.5) / counts[parts]
    return np.lexsort((parts, moments)).astype(np.int64)
