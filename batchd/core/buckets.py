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

Invariant: each item of the table has one place in each epoch.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Self

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Permutation, Table, Tables, permutation

PREFIX = "buckets."
TABLE, STARTS, BLOCK, SIZES = f"{PREFIX}table", f"{PREFIX}starts", f"{PREFIX}block", f"{PREFIX}sizes"
"""Arrays in the index that workers get; see ``BucketOrder`` and ``BucketSizes``."""

Numbers = NDArray[np.int64]


def buckets_of(sizes: Numbers, bounds: tuple[int, ...] | int, block: int) -> dict[str, Table]:
    """Plan the buckets of items with these ``sizes``, int64 ``[items]``: arrays of an index.

    ``bounds``: the largest size in each bucket but the last, ascending; or how many buckets, of
    nearly as many items each.
    """
    table = np.argsort(sizes, kind="stable")
    if isinstance(bounds, int):
        ends = np.arange(1, bounds) * len(sizes) // bounds
    else:
        ends = np.searchsorted(sizes[table], bounds, side="right")
    ends = ends // block * block
    starts = np.unique([0, *ends[ends <= len(sizes) - block], len(sizes)]).astype(np.int64)
    ordered = np.maximum(sizes[table], 0)
    of_each = [ordered[starts[:-1]], ordered[starts[1:] - 1], np.add.reduceat(ordered, starts[:-1])]
    dtype = np.int32 if len(sizes) <= np.iinfo(np.int32).max else np.int64
    return {
        TABLE: table.astype(dtype),
        STARTS: starts,
        BLOCK: np.array([block], np.int64),
        SIZES: np.stack(of_each, axis=1).astype(np.int64),
    }


class BucketSizes:
    """What is known of the sizes in the buckets of an index, for people."""

    def __init__(self, arrays: Tables) -> None:
        self.counts: Numbers = np.diff(arrays[STARTS])
        """int64 ``[buckets]``: items."""
        self.smallest, self.largest, self._sums = arrays[SIZES].T

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
    table of each bucket, and the number of items, int64 ``[buckets + 1]``. ``block``: items.
    """

    def __init__(self, table: Table, starts: Numbers, block: int, seed: int | None) -> None:
        self.table, self.starts = table, starts
        self._block = block
        self._seed = seed
        self._whole = len(table) // block

    @classmethod
    def from_arrays(cls, arrays: Tables, seed: int | None) -> Self | None:
        """The order in the arrays of an index; None without one."""
        return cls(arrays[TABLE], arrays[STARTS], int(arrays[BLOCK][0]), seed) if STARTS in arrays else None

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
        return sha256(b"buckets %d\0" % self._block + self.starts.astype("<i8").tobytes()).hexdigest()

    def samples_at(self, epoch: int, places: Numbers) -> Numbers:
        """See ``EpochOrder``."""
        if self._seed is not None:
            places = self._moved(epoch, places)
            for mixing, first, chosen in self._mixings(epoch, places):
                places[chosen] = mixing((places[chosen] - first).astype(np.uint64)).astype(np.int64) + first
        return self.table[places].astype(np.int64)

    def places_of(self, epoch: int, samples: Numbers) -> Numbers:
        """See ``EpochOrder``. Makes the inverse of the table each time."""
        places = np.argsort(self.table)[samples]
        if self._seed is not None:
            for mixing, first, chosen in self._mixings(epoch, places):
                places[chosen] = mixing.inverse((places[chosen] - first).astype(np.uint64)).astype(np.int64) + first
            places = self._moved(epoch, places, back=True)
        return places

    def occurrences(self, epoch: int, sample: int) -> Numbers:
        """See ``EpochOrder``; there is one."""
        return self.places_of(epoch, np.asarray([sample], np.int64))

    def _moved(self, epoch: int, places: Numbers, *, back: bool = False) -> Numbers:
        """Apply the permutation of whole blocks, or its inverse: a new array of the same shape."""
        blocks, within = np.divmod(places, self._block)
        moves = np.flatnonzero(blocks < self._whole)
        if moves.size:
            order = self._permutation(self._whole, epoch, 0)
            apply = order.inverse if back else order
            blocks[moves] = apply(blocks[moves].astype(np.uint64)).astype(np.int64)
        moved: Numbers = blocks * self._block + within
        return moved

    def _mixings(self, epoch: int, places: Numbers) -> Iterator[tuple[Permutation, int, NDArray[np.bool_]]]:
        """Yield the permutation of each bucket, its first place, and which of the places it has."""
        buckets = np.searchsorted(self.starts, places, "right") - 1
        for bucket in np.unique(buckets).tolist():
            first, end = self.starts[bucket : bucket + 2].tolist()
            yield self._permutation(end - first, epoch, 1 + bucket), first, buckets == bucket

    def _permutation(self, length: int, epoch: int, which: int) -> Permutation:
        assert self._seed is not None, "the order is shuffled"
        return permutation(length, (self._seed, epoch, which))
