"""Samples of a field as numbers, their levels, and what steps on sound draw. Worker process.

Invariant: sums are in one order, and all is rounded once.
"""

from math import fsum, sqrt
from typing import Final

import numpy as np

from batchd.data.pipeline.media.streams import INT16_STEP
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.sound.exact import Numbers, exponential
from batchd.data.pipeline.sound.options import ChanceSound
from batchd.data.pipeline.sound.resample import Wave
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value, array_of

_LOG_10: Final = 2.302585092994046
_COLUMNS: Final = 1024


def wave_of(column: Column, values: dict[str, Value]) -> Wave:
    """The samples, float32 [samples, channels]. Raises ``SampleUndecodable``."""
    numbers = array_of(column, values[column.name])
    wave: Wave = numbers.astype(np.float32) * INT16_STEP if numbers.dtype == np.int16 else numbers
    if not np.isfinite(wave).all():
        place = tuple(map(int, np.argwhere(~np.isfinite(wave))[0]))
        raise SampleUndecodable(f"{wave[place]} at {list(place)} of {column.name} is no sound")
    return wave if wave.ndim > 1 else wave[:, np.newaxis]


def column_shape(column: Column, wave: Wave) -> tuple[int, ...]:
    """The shape of a field of such samples, [samples] or [samples, channels]."""
    return wave.shape[: len(column.shape)]


def factor_of(db: float) -> float:
    """The factor of an amplitude that is so many dB."""
    return float(exponential(np.array([db * _LOG_10 / 20]))[0])


def energy(wave: Wave | Numbers) -> float:
    """The sum of squares: the sums of some columns, row by row, and then those."""
    flat = wave.astype(np.float64).ravel()
    squares = np.zeros(-(-len(flat) // _COLUMNS) * _COLUMNS)
    squares[: len(flat)] = flat * flat
    sums = np.zeros(_COLUMNS)
    for row in squares.reshape(-1, _COLUMNS):
        sums += row
    return fsum(sums)


def rms(wave: Wave) -> float:
    """The root of the mean square."""
    return sqrt(energy(wave) / max(1, wave.size))


def scaled(wave: Wave, factor: float) -> Wave:
    """Samples times a factor. Raises ``SampleUndecodable``."""
    return rounded(wave.astype(np.float64) * factor, f"times {factor:g}")


def rounded(made: Numbers, how: str) -> Wave:
    """Samples as float32. Raises ``SampleUndecodable``, with how they became too large."""
    wave: Wave = made.astype(np.float32)
    if not np.isfinite(wave).all():
        raise SampleUndecodable(f"becomes too large for float32, {how}")
    return wave


def acts(step: ChanceSound, random: SampleRandom) -> bool:
    """Draw whether a step acts, before its own numbers; of one that always does, nothing."""
    return step.probability == 1 or random.random() < step.probability


def note(random: SampleRandom, drawn: dict[str, object], *, is_done: bool) -> None:
    """Note what a step has drawn, for ``batchd replay``."""
    if random.draws is not None:
        random.draws.append(drawn if is_done else {"acts": False})
