"""The plan: which sample stands where in which batch, as a pure function of (seed, epoch). Daemon and worker; nobody's process.

    place in the epoch   0 ............ B-1 | B ........... 2B-1 | ...            | samples-1
    batch (step)              step 0        |      step 1        | ...            | last, perhaps partial
    sample index         shuffle(place; seed, epoch), or the place itself without shuffling

Invariant: a position names the same samples in the same rows for ever: no worker, trainer, clock or crash has a part in it.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from batchd.core.permutation import Permutation, mixed
from batchd_wire.position import Position


@dataclass(frozen=True, slots=True)
class Plan:
    """A stream's arithmetic: ``samples`` and ``batch_size`` are at least 1, and so are the batches of an epoch."""

    samples: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool

    @property
    def steps(self) -> int:
        """Batches in an epoch of the whole stream."""
        if self.drop_last:
            return self.samples // self.batch_size
        return -(-self.samples // self.batch_size)

    def rows(self, step: int) -> int:
        """Samples in batch ``step``: the batch size, but for a partial last batch."""
        return min(self.batch_size, self.samples - step * self.batch_size)

    def indices(self, position: Position, first: int, count: int) -> NDArray[np.int64]:
        """Sample indices of rows ``first`` to ``first + count`` of a position: int64 ``[count]``."""
        start = position.step * self.batch_size + first
        places = np.arange(start, start + count, dtype=np.uint64)
        if not self.shuffle:
            return places.astype(np.int64)
        return _permutation(self.samples, self.seed, position.epoch)(places).astype(np.int64)

    def substitute(self, epoch: int, sample: int, attempt: int) -> int:
        """The sample that stands in for a bad one at its ``attempt``-th try (from 1): any other, the same for ever."""
        if self.samples == 1:
            return sample
        return (sample + 1 + mixed((self.seed, epoch, sample, attempt)) % (self.samples - 1)) % self.samples


@lru_cache(maxsize=16)
def _permutation(samples: int, seed: int, epoch: int) -> Permutation:
    """Remember the round keys of the few epochs that are read at one time."""
    return Permutation(samples, (seed, epoch))
