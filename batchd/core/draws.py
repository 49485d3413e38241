"""Samples drawn by weight: an epoch has each in its share. Pure code.

    weights      1     | 3                     | 0 | 2             of samples 0 to 3
    draws        0 ... | 1 ....... 2 ....... 3 |   | 4 ....... 5   of an epoch of 6 rows
    bounds       0     1                       4   4               6

Draw k of an epoch is a point of [k, k + 1), chosen by (seed, epoch, k), and takes the sample whose
stretch contains it. So a sample's share of an epoch is exact on average, and within two draws of it
in each (stratified resampling: G. Kitagawa, "Monte Carlo Filter and Smoother for Non-Gaussian
Nonlinear State Space Models", 1996). Without replacement, the samples of the smallest u / w are
drawn, each once, with u uniform by (seed, epoch, sample) (E. Ohlsson, "Sequential Poisson
Sampling", 1998).

Draws ascend with their samples, so an epoch orders its draws as it orders samples without weights,
and draws next to each other are samples next to each other in storage.

Invariants: a draw is the same sample for ever, on every machine (whole numbers, and quotients as
IEEE 754 has them); a sample of weight 0 is never drawn.
"""

from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import mixed, mixed_all

POINT_BITS = 30
"""Of a draw's place between two whole numbers."""
SINGLE_MAX = 1 << 24
"""Most samples without replacement: each epoch's draw looks at all of them."""
EPOCHS_KEPT = 4

Numbers = NDArray[np.int64]


def bounds_of(weights: NDArray[np.float64], draws: int) -> Numbers:
    """Return where the stretch of each sample ends: int64 ``[samples]``, in 2**-POINT_BITS draws.

    ``weights``: float64 ``[samples]``, finite, 0 or more, with a sum above 0.
    """
    ends = np.cumsum(weights / weights.max())
    bounds: Numbers = np.floor(ends * (draws / ends[-1]) * (1 << POINT_BITS)).astype(np.int64)
    bounds[ends == ends[-1]] = draws << POINT_BITS
    return bounds


class EvenDraws:
    """Draws with replacement. ``bounds``: see ``bounds_of``."""

    def __init__(self, bounds: Numbers, seed: int) -> None:
        self.samples = len(bounds)
        self._bounds = bounds
        self._seed = seed

    @property
    def digest(self) -> str:
        """See ``Draws``."""
        return sha256(b"even\0" + self._bounds.astype("<i8").tobytes()).hexdigest()

    @property
    def expected(self) -> NDArray[np.float64]:
        """See ``Draws``."""
        return np.diff(self._bounds, prepend=0) / (1 << POINT_BITS)

    def samples_of(self, epoch: int, draws: Numbers) -> Numbers:
        """See ``Draws``."""
        points = (draws << POINT_BITS) + self._within(epoch, draws)
        return np.searchsorted(self._bounds, points, "right").astype(np.int64)

    def draws_of(self, epoch: int, sample: int) -> Numbers:
        """See ``Draws``."""
        first, end = int(self._bounds[sample - 1]) if sample else 0, int(self._bounds[sample])
        draws: Numbers = np.arange(first >> POINT_BITS, -(-end >> POINT_BITS), dtype=np.int64)
        found: Numbers = draws[self.samples_of(epoch, draws) == sample]
        return found

    def _within(self, epoch: int, draws: Numbers) -> Numbers:
        key = np.uint64(mixed((self._seed, epoch, 1)))
        return (mixed_all(draws.astype(np.uint64), key) >> np.uint64(32 - POINT_BITS)).astype(np.int64)


class SingleDraws:
    """Draws without replacement.

    ``weights``: float64 ``[samples]``; at least ``draws`` of them are above 0.
    """

    def __init__(self, weights: NDArray[np.float64], draws: int, seed: int) -> None:
        self.samples = len(weights)
        self._weights = weights
        self._draws = draws
        self._seed = seed
        self._epochs: dict[int, Numbers] = {}

    @property
    def digest(self) -> str:
        """See ``Draws``."""
        return sha256(b"single\0%d\0" % self._draws + self._weights.astype("<f8").tobytes()).hexdigest()

    @property
    def expected(self) -> NDArray[np.float64]:
        """See ``Draws``; nearly so, as a sample of a large weight is drawn once too."""
        expected: NDArray[np.float64] = np.minimum(1.0, self._weights * (self._draws / self._weights.sum()))
        return expected

    def samples_of(self, epoch: int, draws: Numbers) -> Numbers:
        """See ``Draws``."""
        return self._drawn(epoch)[draws]

    def draws_of(self, epoch: int, sample: int) -> Numbers:
        """See ``Draws``; there is at most one."""
        drawn = self._drawn(epoch)
        place = np.searchsorted(drawn, sample)
        return np.flatnonzero(drawn[place : place + 1] == sample) + place

    def _drawn(self, epoch: int) -> Numbers:
        """Return the samples of an epoch, ascending: int64 ``[draws]``."""
        found = self._epochs.get(epoch)
        if found is None:
            while len(self._epochs) >= EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            samples = np.flatnonzero(self._weights)
            uniform = mixed_all(samples.astype(np.uint64), np.uint64(mixed((self._seed, epoch, 2))))
            keys = (uniform.astype(np.float64) + 0.5) / self._weights[samples]
            last = np.partition(keys, self._draws - 1)[self._draws - 1]
            chosen = keys < last
            ties = np.flatnonzero(keys == last)[: self._draws - int(chosen.sum())]
            chosen[ties] = True
            found = self._epochs[epoch] = samples[chosen].astype(np.int64)
        return found
