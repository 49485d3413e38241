"""A shuffle of blocks: samples that are neighbours in storage stay near each other. Pure code.

    source   | block 0 | block 1 | block 2 | block 3 | block 4 |    neighbours in one file or shard
                    keyed permutation of the blocks, of (seed, epoch)
    ranks    | block 3 | block 0 | block 4 | block 2 | block 1 |
             |<--- window 0 --->|<--- window 1 --->|<- the rest     ``open_blocks`` in each, here 2
                    keyed permutation of the samples of each window, of (seed, epoch, window)
    places   3 0 0 3 3 0 0 3    4 2 2 4 ...

While a window is read, only its blocks are open. A window of b samples needs the table of blocks of
its epoch, which is one permutation of all blocks and one sum, and no walk through the epoch.

Invariant: each sample has one place in each epoch, whatever the lengths of the blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Permutation, permutation

EPOCHS_KEPT = 4
"""Trainers are in few epochs at a time."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Epoch:
    """Blocks in the order of one epoch.

    ``blocks``: the block of each rank, int64 ``[blocks]``. ``ends``: the place behind the last of
    its samples before they are mixed, int64 ``[blocks]``. ``window_ends``: int64 ``[windows]``.
    """

    blocks: Numbers
    ends: Numbers
    window_ends: Numbers

    def first_of(self, window: int) -> int:
        """Return the first place of a window."""
        return int(self.window_ends[window - 1]) if window else 0


class BlockOrder:
    """See the module. ``starts``: the first sample of each block, and the number of all samples.

    int64 ``[blocks + 1]``, ascending from 0.
    """

    def __init__(self, starts: Numbers, open_blocks: int, seed: int) -> None:
        self._starts = starts
        self._lengths = np.diff(starts)
        self.open_blocks = open_blocks
        self._seed = seed
        self._epochs: dict[int, _Epoch] = {}

    has_each_once = True

    @property
    def samples(self) -> int:
        """See ``EpochOrder``."""
        return int(self._starts[-1])

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self._lengths)

    @property
    def digest(self) -> str:
        """Digest of what decides the order beside seed and epoch."""
        return sha256(b"%d\0" % self.open_blocks + self._starts.astype("<i8").tobytes()).hexdigest()

    @property
    def window_samples(self) -> float:
        """The mean number of samples that are permuted together."""
        return float(self._starts[-1]) / -(-self.blocks // self.open_blocks)

    def samples_at(self, epoch: int, places: Numbers) -> Numbers:
        """See ``EpochOrder``."""
        table = self._epoch(epoch)
        samples = np.empty(places.shape, np.int64)
        for window, first, chosen in _each(np.searchsorted(table.window_ends, places, "right"), table):
            mixing = self._mixing(epoch, table, window)
            unmixed = mixing((places[chosen] - first).astype(np.uint64)).astype(np.int64) + first
            ranks = np.searchsorted(table.ends, unmixed, "right")
            samples[chosen] = self._starts[table.blocks[ranks] + 1] - table.ends[ranks] + unmixed
        return samples

    def places_of(self, epoch: int, samples: Numbers) -> Numbers:
        """See ``EpochOrder``."""
        table = self._epoch(epoch)
        blocks, ranks = self._blocks_of(samples), self.ranks_of(epoch, samples)
        unmixed = table.ends[ranks] - self._starts[blocks + 1] + samples
        places = np.empty(samples.shape, np.int64)
        for window, first, chosen in _each(ranks // self.open_blocks, table):
            mixing = self._mixing(epoch, table, window)
            places[chosen] = mixing.inverse((unmixed[chosen] - first).astype(np.uint64)).astype(np.int64) + first
        return places

    def ranks_of(self, epoch: int, samples: Numbers) -> Numbers:
        """Return the ranks of the blocks of some samples in an epoch: int64 of the same shape."""
        return self._ranking(epoch).inverse(self._blocks_of(samples).astype(np.uint64)).astype(np.int64)

    def block_at(self, epoch: int, rank: int) -> range:
        """Return the samples of the block of a rank."""
        block = self._epoch(epoch).blocks[rank]
        return range(int(self._starts[block]), int(self._starts[block + 1]))

    def _blocks_of(self, samples: Numbers) -> Numbers:
        return np.searchsorted(self._starts, samples, "right") - 1

    def occurrences(self, epoch: int, sample: int) -> Numbers:
        """See ``EpochOrder``; there is one."""
        return self.places_of(epoch, np.asarray([sample], np.int64))

    def _epoch(self, epoch: int) -> _Epoch:
        table = self._epochs.get(epoch)
        if table is None:
            while len(self._epochs) >= EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            blocks = self._ranking(epoch)(np.arange(self.blocks, dtype=np.uint64)).astype(np.int64)
            ends = np.cumsum(self._lengths[blocks])
            last = np.minimum(
                np.arange(self.open_blocks, self.blocks + self.open_blocks, self.open_blocks), self.blocks
            )
            table = self._epochs[epoch] = _Epoch(blocks, ends, ends[last - 1])
        return table

    def _ranking(self, epoch: int) -> Permutation:
        """Return the permutation from ranks to blocks."""
        return permutation(self.blocks, (self._seed, epoch, 0))

    def _mixing(self, epoch: int, table: _Epoch, window: int) -> Permutation:
        """Return the permutation of a window's samples."""
        length = int(table.window_ends[window]) - table.first_of(window)
        return permutation(length, (self._seed, epoch, 1 + window))


def _each(windows: Numbers, table: _Epoch) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """Yield each window once, its first place, and which of the given numbers are in it."""
    for window in np.unique(windows).tolist():
        yield window, table.first_of(window), windows == window
