"""Batches of samples that are alike, by their size: pure code, for the daemon and workers.

All samples are sorted by size, and the sorted table is cut into **buckets**. A **block** is one
batch, or those of as many consecutive steps as ranks are to read batches that are alike. Each
bucket but the last has whole blocks: the largest samples that would be left over in it are the
first ones of the next bucket. The last bucket has a block at least.

    table    | small ....... | ........ | ............. large |     samples, by size
    buckets  |       0       |    1     |          2          |
    blocks   |  0 |  1 |  2  |  3 |  4  |  5 |  6 |  7 |  8 |-|     "-": the rest

    keyed permutation of the whole blocks, of (seed, epoch); the rest stays at the end
    keyed permutation of the samples of each bucket, of (seed, epoch, bucket)

So all batches of an epoch but the last are full, a batch has samples of one bucket, and any place
is arithmetic and one look into the table. Items may be the rows of a packed stream, too.

With a **budget**, the batches of a bucket have as many rows as it holds of the largest sample of
the bucket: many of small samples, few of large ones. Places of an epoch are counted as if all had
``batch_size`` rows, so the batch of a place, and the place of a row, need no table of batches; the
places that a smaller batch leaves over are none of the epoch. A bad sample is replaced by one of
its own bucket, or of a smaller one if it is alone there, so the substitute fits into its row.

Images that are **cropped to their bucket** have a budget without a limit, so each bucket has a
layout of its own. The samples left over in one are cropped to the size of the next.

Invariant: each item of the table has one place in each epoch.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from math import isqrt
from typing import Self

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Permutation, Table, Tables, permutation

PREFIX = "buckets."
TABLE, STARTS, BLOCK, SIZES = f"{PREFIX}table", f"{PREFIX}starts", f"{PREFIX}block", f"{PREFIX}sizes"
ROWS, CROPS = f"{PREFIX}rows", f"{PREFIX}crops"
"""Arrays in the index that workers get; see ``BucketOrder`` and ``BucketSizes``."""
UNLIMITED = 1 << 62
"""A budget that any batch keeps."""
MILLION = 1_000_000
SEARCHED_MAX = 64
"""Samples that are searched in the table one by one: each takes 1 % of an inverse at most."""
BATCHES_KNOWN = 4_096
"""An order remembers the number of rows of so many batches."""

Numbers = NDArray[np.int64]


class OverBudget(ValueError):  # noqa: N818  names what is wrong
    """A sample is larger than the budget of a batch. ``item``: its number; ``size``: its size."""

    def __init__(self, item: int, size: int) -> None:
        super().__init__(f"item {item} has the size {size}")
        self.item, self.size = item, size


def buckets_of(
    sizes: Numbers, bounds: tuple[int, ...] | int, batch_size: int, ranks: int = 1, budget: int | None = None
) -> dict[str, Table]:
    """Plan the buckets of items with these ``sizes``, int64 ``[items]``: arrays of an index.

    ``bounds``: the largest size in each bucket but the last, ascending; or how many buckets, of
    nearly as many items each. ``ranks``: consecutive batches of one bucket. ``budget``: the most
    that the rows of a batch times the largest size of its bucket may be.

    Raises ``OverBudget``.
    """
    table = np.argsort(sizes, kind="stable")
    ordered = np.maximum(sizes[table], 0)
    if isinstance(bounds, int):
        ends = np.arange(1, bounds) * len(sizes) // bounds
    else:
        ends = np.searchsorted(sizes[table], bounds, side="right")
    dtype = np.int32 if len(sizes) <= np.iinfo(np.int32).max else np.int64
    arrays: dict[str, Table] = {TABLE: table.astype(dtype)}
    if budget is None:
        block = batch_size * ranks
        ends = ends // block * block
        starts = np.unique([0, *ends[ends <= len(sizes) - block], len(sizes)]).astype(np.int64)
        arrays |= {STARTS: starts, BLOCK: np.array([block], np.int64)}
    else:
        if ordered[-1] > budget:
            raise OverBudget(int(table[-1]), int(ordered[-1]))
        starts, rows = _within_budget(ordered, [*np.unique(ends).tolist(), len(sizes)], batch_size, ranks, budget)
        arrays |= {STARTS: starts, BLOCK: np.array([batch_size, ranks], np.int64), ROWS: rows}
    return arrays | {SIZES: _sizes_of(ordered, starts)}


def _sizes_of(ordered: Numbers, starts: Numbers) -> Numbers:
    """The smallest and the largest size in each bucket, and their sum, int64 ``[buckets, 3]``."""
    of_each = [ordered[starts[:-1]], ordered[starts[1:] - 1], np.add.reduceat(ordered, starts[:-1])]
    return np.stack(of_each, axis=1).astype(np.int64)


def crop_buckets(
    ratios: Numbers, sizes: Sequence[tuple[int, int]], batch_size: int, ranks: int, unit: int
) -> dict[str, Table]:
    """Plan buckets whose images are cropped to one of ``sizes``: arrays of an index.

    ``ratios``: width / height of each item, in so many parts of ``unit``, int64 ``[items]``.
    ``sizes``: (height, width), the narrowest first. A bucket has the size that is nearest to most
    of its images. ``CROPS`` is int64 ``[buckets, 3]``: height, width, and the part of the pixels
    that is cut off: of each image, in millionths, added up.
    """
    bounds = _bounds_between(sizes, unit)
    arrays = buckets_of(ratios, bounds, batch_size, ranks, UNLIMITED)
    ordered, starts = ratios[arrays[TABLE]], arrays[STARTS]
    nearest = np.searchsorted(bounds, ordered)
    chosen = np.array([np.bincount(nearest[first:end]).argmax() for first, end in pairwise(starts.tolist())])
    is_first = np.append(True, chosen[1:] != chosen[:-1])
    starts, chosen = starts[np.append(is_first, True)], chosen[is_first]
    height, width = np.repeat(np.array(sizes, np.int64)[chosen], np.diff(starts), axis=0).T
    wide, high = ordered * height, unit * width
    lost = MILLION - MILLION * np.minimum(wide, high) // np.maximum(wide, high)
    crops = np.column_stack([np.array(sizes, np.int64)[chosen], np.add.reduceat(lost, starts[:-1])])
    return arrays | {
        STARTS: starts,
        ROWS: arrays[ROWS][is_first],
        SIZES: _sizes_of(ordered, starts),
        CROPS: crops,
    }


def _bounds_between(sizes: Sequence[tuple[int, int]], unit: int) -> tuple[int, ...]:
    """The widest image of each size but the last: as far, as a ratio, from one as from the next."""
    return tuple(
        isqrt(unit * unit * width * wider // (height * higher)) for (height, width), (higher, wider) in pairwise(sizes)
    )


def _within_budget(
    ordered: Numbers, ends: list[int], batch_size: int, ranks: int, budget: int
) -> tuple[Numbers, Numbers]:
    """Return the starts of buckets of whole blocks, and the rows of a batch of each bucket.

    ``ordered``: the sizes, ascending. ``ends``: those that are wanted, ascending.
    """
    starts, rows = [0], []
    for end in ends:
        most = min(batch_size, budget // max(1, int(ordered[end - 1])))
        block = most * ranks
        whole = end if end == len(ordered) else starts[-1] + (end - starts[-1]) // block * block
        if whole > starts[-1]:
            starts.append(whole)
            rows.append(most)
    return np.array(starts, np.int64), np.array(rows, np.int64)


class BucketSizes:
    """What is known of the sizes in the buckets of an index, for people."""

    def __init__(self, arrays: Tables) -> None:
        self.counts: Numbers = np.diff(arrays[STARTS])
        """int64 ``[buckets]``: items."""
        self.smallest, self.largest, self._sums = arrays[SIZES].T
        self.rows: Numbers | None = arrays.get(ROWS)
        """int64 ``[buckets]``: rows of a batch of each, if a budget decides."""
        self.crops: Numbers | None = arrays.get(CROPS)
        """See ``crop_buckets``; None where samples keep their sizes."""

    @property
    def mean(self) -> float:
        """The mean size of all items; 0 without any."""
        return float(self._sums.sum() / self.counts.sum())

    @property
    def mean_largest(self) -> float:
        """The mean, over all items, of the largest size in their bucket."""
        return float(self.largest @ self.counts / self.counts.sum())

    def largest_of(self, items: int) -> float:
        """The expected largest size of so many ``items`` of any buckets; it may be a bit less."""
        share = np.cumsum(self.counts) / self.counts.sum()
        return float(self.largest @ np.diff(share**items, prepend=0.0))


class BucketOrder:
    """See the module. ``seed`` is None without a shuffle: then the smallest items are first.

    ``table``: the items by size, int32 or int64 ``[items]``. ``starts``: the first place in the
    table of each bucket, and the number of items, int64 ``[buckets + 1]``. A block is ``ranks``
    batches of ``batch_size`` places. ``rows``: how many of them a batch of each bucket fills, int64
    ``[buckets]``; None: all.
    """

    def __init__(  # noqa: PLR0913, PLR0917  each is one thing that decides the order
        self, table: Table, starts: Numbers, rows: Numbers | None, batch_size: int, ranks: int, seed: int | None
    ) -> None:
        self.table, self.starts = table, starts
        self.has_budget = self.limits_rows = rows is not None
        self._rows = np.full(len(starts) - 1, batch_size, np.int64) if rows is None else rows
        self._batch_size, self._ranks = batch_size, ranks
        self._seed = seed
        blocks = np.diff(starts) // (self._rows * ranks)
        self._first_blocks = np.append(0, np.cumsum(blocks))
        self._whole = int(self._first_blocks[-1])
        self._rest = int((starts[-1] - starts[-2]) % (self._rows[-1] * ranks))
        """Items behind the last whole block."""
        self._batch = lru_cache(BATCHES_KNOWN)(self._batch_at)

    @classmethod
    def from_arrays(cls, arrays: Tables, seed: int | None) -> Self | None:
        """The order in the arrays of an index; None without one."""
        if STARTS not in arrays:
            return None
        batch_size, ranks = [*arrays[BLOCK].tolist(), 1][:2]
        order = cls(arrays[TABLE], arrays[STARTS], arrays.get(ROWS), batch_size, ranks, seed)
        order.limits_rows = order.has_budget and CROPS not in arrays
        return order

    @property
    def samples(self) -> int:
        """See ``EpochOrder``."""
        return len(self.table)

    @property
    def has_each_once(self) -> bool:
        """See ``EpochOrder``."""
        return True

    @property
    def digest(self) -> str:
        """Digest of what decides the order beside seed, epoch and the table in the index."""
        batches = b"%d\0" % self._batch_size
        if self.has_budget:
            batches = b"budget %d %d\0" % (self._batch_size, self._ranks) + self._rows.astype("<i8").tobytes()
        return sha256(b"buckets " + batches + self.starts.astype("<i8").tobytes()).hexdigest()

    def steps(self, *, drop_last: bool) -> int:
        """See ``RowCounts``."""
        rows = int(self._rows[-1])
        rest = self._rest if drop_last else self._rest + rows - 1
        return self._whole * self._ranks + rest // rows

    def rows_of(self, epoch: int, steps: Numbers) -> Numbers:
        """See ``RowCounts``."""
        first, buckets = self._in_table(epoch, steps * self._batch_size)
        rows: Numbers = np.minimum(self._rows[buckets], len(self.table) - first)
        return rows

    def rows(self, epoch: int, step: int) -> int:
        """See ``RowCounts``."""
        return self._batch(epoch, step)[0]

    def bucket(self, epoch: int, step: int) -> int:
        """See ``RowCounts``."""
        return self._batch(epoch, step)[1]

    def _batch_at(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the rows and the bucket of a batch."""
        (first,), (bucket,) = self._in_table(epoch, np.array([step * self._batch_size], np.int64))
        return int(min(self._rows[bucket], len(self.table) - first)), int(bucket)

    def substitutes(self, samples: Numbers, numbers: NDArray[np.uint64]) -> Numbers:
        """See ``RowCounts``. Looks at the whole table."""
        found = self._in_order(samples)
        buckets = np.searchsorted(self.starts, found, "right") - 1
        first, end = self.starts[buckets], self.starts[buckets + 1]
        first = np.where(end - first > 1, first, 0)
        others = np.maximum(end - first - 1, 1).astype(np.uint64)
        found = first + (found - first + 1 + (numbers % others).astype(np.int64)) % (end - first)
        chosen: Numbers = self.table[found].astype(np.int64)
        return chosen

    def samples_at(self, epoch: int, places: Numbers) -> Numbers:
        """See ``EpochOrder``. Places that a batch leaves over have other samples of its bucket."""
        found, buckets = self._in_table(epoch, places)
        for mixing, first, chosen in self._mixings(epoch, buckets):
            found[chosen] = mixing((found[chosen] - first).astype(np.uint64)).astype(np.int64) + first
        return self.table[found].astype(np.int64)

    def places_of(self, epoch: int, samples: Numbers) -> Numbers:
        """See ``EpochOrder``. Looks at the whole table."""
        found = self._in_order(samples)
        buckets = np.searchsorted(self.starts, found, "right") - 1
        for mixing, first, chosen in self._mixings(epoch, buckets):
            found[chosen] = mixing.inverse((found[chosen] - first).astype(np.uint64)).astype(np.int64) + first
        batches, rows = np.divmod(found - self.starts[buckets], self._rows[buckets])
        blocks, within = np.divmod(batches, self._ranks)
        blocks += self._first_blocks[buckets]
        self._move(epoch, blocks, back=True)
        places: Numbers = (blocks * self._ranks + within) * self._batch_size + rows
        return places

    def _in_order(self, samples: Numbers) -> Numbers:
        """Return the places of samples in the table, a new array. Many need its inverse."""
        if len(samples) > SEARCHED_MAX:
            return np.argsort(self.table)[samples]
        return np.array([np.flatnonzero(self.table == sample)[0] for sample in samples.tolist()], np.int64)

    def occurrences(self, epoch: int, sample: int) -> Numbers:
        """See ``EpochOrder``; there is one."""
        return self.places_of(epoch, np.asarray([sample], np.int64))

    def _in_table(self, epoch: int, places: Numbers) -> tuple[Numbers, Numbers]:
        """Return the places in the table before buckets are mixed, and the buckets: new arrays."""
        batches, rows = np.divmod(places, self._batch_size)
        blocks, within = np.divmod(batches, self._ranks)
        self._move(epoch, blocks, back=False)
        buckets = np.minimum(np.searchsorted(self._first_blocks, blocks, "right"), len(self._rows)) - 1
        size = self._rows[buckets]
        first = self.starts[buckets] + ((blocks - self._first_blocks[buckets]) * self._ranks + within) * size
        return np.minimum(first + rows % size, len(self.table) - 1), buckets

    def _move(self, epoch: int, blocks: Numbers, *, back: bool) -> None:
        """Apply the permutation of whole blocks, or its inverse, in place."""
        moves = np.flatnonzero(blocks < self._whole)
        if self._seed is not None and moves.size:
            order = self._permutation(self._whole, epoch, 0)
            apply = order.inverse if back else order
            blocks[moves] = apply(blocks[moves].astype(np.uint64)).astype(np.int64)

    def _mixings(self, epoch: int, buckets: Numbers) -> Iterator[tuple[Permutation, int, NDArray[np.bool_]]]:
        """Yield each bucket's permutation, its first place, and which of ``buckets`` it is."""
        for bucket in np.unique(buckets).tolist() if self._seed is not None else ():
            first, end = self.starts[bucket : bucket + 2].tolist()
            yield self._permutation(end - first, epoch, 1 + bucket), first, buckets == bucket

    def _permutation(self, length: int, epoch: int, which: int) -> Permutation:
        assert self._seed is not None, "the order is shuffled"
        return permutation(length, (self._seed, epoch, which))
