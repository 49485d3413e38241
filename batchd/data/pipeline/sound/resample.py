"""Sound at another rate, the same on every machine, and of any part of a file. Worker process.

    place of sample n at the new rate = n * from_rate / to_rate samples of the file

Each new sample is a sum of the samples around its place, weighted by a sinc in a Kaiser window, in
float64; it is rounded once, to float32. The lower of the two rates decides: up to a share of half
of it everything stays, and half of it and more is damped. The samples before a file and after it
are zeros.

The extension ``_sound`` does it; where it was not built, numpy makes the same bytes, in more time.

Invariant: a new sample is a function of its number and the samples within ``margins`` of its place,
so those of a segment are those of the whole file.
"""

from functools import lru_cache
from math import fsum, gcd
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.sound.exact import Numbers, bessel, sine

try:
    from batchd.data.pipeline import _sound
except ImportError:  # not built
    IS_BUILT = False
else:
    IS_BUILT = True

Wave = NDArray[np.float32]
"""Samples of a file, [samples, channels]."""

RATE_MAX_HZ: Final = 1 << 24
RATIO_MAX: Final = 256
"""Of two rates."""
_PHASES: Final = 1024
"""Places between two samples of the higher rate that have weights of their own, at most; those
between two of them are interpolated, within 2e-6 of the weight in the middle."""
_LANES: Final = 16
_CACHE_LINE: Final = 64
"""Bytes. A vector of AVX-512 has as many: one across two lines is read twice."""
_BLOCK: Final = 1024


class _Filter(NamedTuple):
    """``passed``: the share of half of the lower rate up to which everything stays.

    ``reach``: samples of the lower rate on each side, for this damping beyond it (Kaiser).
    """

    damping_db: float
    passed: float
    reach: int


_FILTERS: Final = {"high": _Filter(120, 0.913, 90), "fast": _Filter(80, 0.827, 29)}
"""By ``quality`` of "decode_audio". "high" passes and damps what soxr's "HQ" does."""
HIGH: Final = "high"


def margins(from_rate: int, to_rate: int, quality: str = HIGH) -> int:
    """How many samples of the file on each side of its place a new sample is made of."""
    if from_rate == to_rate:
        return 0
    reach = -(-_FILTERS[quality].reach * max(from_rate, to_rate) // to_rate)
    return -(-reach // (_LANES // 2)) * (_LANES // 2)


def needed(from_rate: int, to_rate: int, start: int, count: int, quality: str = HIGH) -> tuple[int, int]:
    """(first, end) of the samples that ``count`` new ones are made of; beyond a file, too."""
    around = margins(from_rate, to_rate, quality)
    if not around:
        return start, start + count
    last = (start + count - 1) * from_rate // to_rate
    return start * from_rate // to_rate - around + 1, last + around + 1


def length_at(samples: int, from_rate: int, to_rate: int) -> int:
    """The samples of a file at another rate: those whose places are before its end."""
    return -(-samples * to_rate // from_rate)


def resample(  # noqa: PLR0913, PLR0917  two rates, three places
    wave: Wave, from_rate: int, to_rate: int, first_in: int, start: int, count: int, quality: str = HIGH
) -> Wave:
    """The ``count`` samples from ``start`` on of the file at ``to_rate``, [count, channels].

    ``wave``: float32 [samples, channels], from number ``first_in`` of the file on; it has all that
    are ``needed`` and that the file has. Rates: 1 to ``RATE_MAX_HZ``, one at most ``RATIO_MAX``
    times the other.
    """
    assert 0 < from_rate <= RATE_MAX_HZ, f"{from_rate} Hz"
    assert 0 < to_rate <= RATE_MAX_HZ, f"{to_rate} Hz"
    assert max(from_rate, to_rate) <= RATIO_MAX * min(from_rate, to_rate), f"{from_rate} to {to_rate} Hz"
    if from_rate == to_rate and 0 <= start - first_in <= len(wave) - count:
        return wave[start - first_in :][:count]
    if from_rate == to_rate:
        made = np.zeros((count, wave.shape[1]), np.float32)
        first, end = max(start, first_in), min(start + count, first_in + len(wave))
        made[first - start : max(first, end) - start] = wave[first - first_in : max(first, end) - first_in]
        return made
    common = gcd(from_rate, to_rate)
    up, down = to_rate // common, from_rate // common
    weights, made = kernel(up, down, quality), np.empty((count, wave.shape[1]), np.float32)
    if IS_BUILT:
        _sound.resample(np.ascontiguousarray(wave), made, weights, up, down, first_in, start)
    else:
        _resample(wave, made, weights, up, down, first_in, start)
    return made


@lru_cache(maxsize=16)
def kernel(up: int, down: int, quality: str = HIGH) -> Numbers:
    """The weights of the samples around a place: [phases + 1, 2 * margins], each row adds up to 1.

    Row p is for the place p / phases after the sample at column ``margins`` - 1.
    """
    lower, (damping_db, passed, reach) = min(1.0, up / down), _FILTERS[quality]
    around, phases = margins(down, up, quality), min(up, max(1, int(_PHASES * lower)))
    width, cutoff, beta = reach / lower, (1 + passed) / 2, 0.1102 * (damping_db - 8.7)
    columns = np.arange(1 - around, around + 1, dtype=np.float64)
    places = columns - np.arange(phases + 1, dtype=np.float64)[:, np.newaxis] / phases
    at_middle = places == 0
    turns = places * (cutoff * lower / 2)
    sinc = sine(turns) / np.where(at_middle, 1.0, turns)
    inside = 1 - (places / width) * (places / width)
    window = np.where(inside > 0, bessel(np.maximum(inside, 0.0) * (beta * beta / 4)), 0.0)
    weights = np.where(at_middle, 2 * np.pi, sinc) * window
    weights /= np.array([fsum(row) for row in weights])[:, np.newaxis]
    memory = np.empty(weights.nbytes + _CACHE_LINE, np.uint8)
    memory = memory[-memory.ctypes.data % _CACHE_LINE :][: weights.nbytes]
    aligned = memory.view(np.float64).reshape(weights.shape)
    aligned[:] = weights
    aligned.flags.writeable = False
    return aligned


def _resample(  # noqa: PLR0913, PLR0917  what the extension takes
    wave: Wave, made: Wave, weights: Numbers, up: int, down: int, first_in: int, start: int
) -> None:
    """What the extension does, by numpy."""
    phases, taps = len(weights) - 1, weights.shape[1]
    for begin in range(0, len(made), _BLOCK):
        numbers = np.arange(start + begin, start + min(begin + _BLOCK, len(made)))
        whole, part = np.divmod(numbers * down, up)
        phase, rest = np.divmod(part * phases, up)
        share = (rest / up)[:, np.newaxis]
        places = whole[:, np.newaxis] + np.arange(1 - taps // 2, taps // 2 + 1) - first_in
        is_there = (places >= 0) & (places < len(wave))
        for channel in range(wave.shape[1]):
            line = np.append(wave[:, channel].astype(np.float64), 0.0)
            samples = line[np.where(is_there, places, len(wave))]
            sums = _dot(samples, weights[phase])
            between = sums + (_dot(samples, weights[np.minimum(phase + 1, phases)]) - sums) * share[:, 0]
            made[begin : begin + _BLOCK, channel] = np.where(rest > 0, between, sums)


def _dot(samples: Numbers, weights: Numbers) -> Numbers:
    products = (samples * weights).reshape(len(samples), -1, _LANES)
    sums = np.zeros((len(samples), _LANES))
    for place in range(products.shape[1]):
        sums += products[:, place]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]
