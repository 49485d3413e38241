"""The stages of the steps on sound. Worker process.

Invariant: a number is computed in float64, in an order that nothing but the options decides, and
rounded once.
"""

from itertools import chain
from math import fsum, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.sound.exact import Numbers, exponential
from batchd.data.pipeline.sound.options import (
    ChanceSound,
    Gain,
    MelStep,
    Mfcc,
    NormalizeLoudness,
    SpecAugment,
    SpectrumStep,
    Speed,
)
from batchd.data.pipeline.sound.resample import Wave, length_at, resample
from batchd.data.pipeline.sound.spectra import (
    Bands,
    Frames,
    combine,
    cosines,
    logarithms,
    mel_bands,
    spectra,
    window_of,
)
from batchd.data.pipeline.stages import Row, Stage, make_stage
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value, array_of

_INT16_STEP: Final = np.float32(1 / 32768)
_LOG_10: Final = 2.302585092994046
_HUNDREDTHS: Final = 100
_COLUMNS: Final = 1024
_FACTORS: Final = {"ln": 1.0, "log10": 1 / _LOG_10, "db": 10 / _LOG_10}


@make_stage.register
def _spectrogram(step: SpectrumStep, before: Columns, _after: Columns) -> Stage:
    column, tables = before[step.field], _Tables(step)

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        wave = wave_of(column, values)
        if len(wave) < step.samples_min:
            raise SampleUndecodable(f'has {len(wave)} samples, and "{step.op}" needs {step.samples_min} or more')
        made = [tables.spectrogram(np.ascontiguousarray(wave[:, channel])) for channel in range(wave.shape[1])]
        values[step.field] = made[0] if len(column.shape) == 1 else np.stack(made, axis=2)

    return run


@make_stage.register
def _normalize_loudness(step: NormalizeLoudness, before: Columns, _after: Columns) -> Stage:
    column = before[step.field]

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        wave = wave_of(column, values)
        level = _rms(wave) if step.of == "rms" else float(np.abs(wave).max(initial=0))
        factor = _from_db(step.level_db) / level if level else 0.0
        values[step.field] = _scaled(wave, factor).reshape(_column_shape(column, wave))

    return run


@make_stage.register
def _gain(step: Gain, before: Columns, _after: Columns) -> Stage:
    column, (low, high) = before[step.field], step.db

    def run(values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        is_done, db = _acts(step, random), low + (high - low) * random.random()
        _note(random, {"db": db}, is_done=is_done)
        wave = wave_of(column, values)
        made = _scaled(wave, _from_db(db)) if is_done else wave
        values[step.field] = made.reshape(_column_shape(column, wave))

    return run


@make_stage.register
def _speed(step: Speed, before: Columns, _after: Columns) -> Stage:
    column = before[step.field]

    def run(values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        is_done, factor = _acts(step, random), step.factors[int(len(step.factors) * random.random())]
        _note(random, {"factor": factor}, is_done=is_done)
        wave, rate = wave_of(column, values), round(factor * _HUNDREDTHS) if is_done else _HUNDREDTHS
        made = resample(wave, rate, _HUNDREDTHS, 0, 0, length_at(len(wave), rate, _HUNDREDTHS))
        values[step.field] = made.reshape(_column_shape(column, made))

    return run


@make_stage.register
def _spec_augment(step: SpecAugment, before: Columns, _after: Columns) -> Stage:
    column = before[step.field]

    def run(values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        is_done, levels = _acts(step, random), array_of(column, values[step.field])
        widest = min(step.time_width, int(step.time_share * len(levels))), min(step.frequency_width, levels.shape[1])
        masks = [_range(widest[0], len(levels), random) for _ in range(step.time_masks)]
        bands = [_range(widest[1], levels.shape[1], random) for _ in range(step.frequency_masks)]
        _note(random, {"frames": list(chain(*masks)), "frequencies": list(chain(*bands))}, is_done=is_done)
        if not is_done:
            return
        levels = levels.copy()
        for begin, end in masks:
            levels[begin:end] = step.fill
        for begin, end in bands:
            levels[:, begin:end] = step.fill
        values[step.field] = levels

    return run


def _range(widest: int, length: int, random: SampleRandom) -> tuple[int, int]:
    width = int((widest + 1) * random.random())
    begin = int((length - width + 1) * random.random())
    return begin, begin + width


def _acts(step: ChanceSound, random: SampleRandom) -> bool:
    """Draw whether a step acts, before its own numbers; of one that always does, nothing."""
    return step.probability == 1 or random.random() < step.probability


def _note(random: SampleRandom, drawn: dict[str, object], *, is_done: bool) -> None:
    """Note what a step has drawn, for ``batchd replay``."""
    if random.draws is not None:
        random.draws.append(drawn if is_done else {"acts": False})


def _from_db(db: float) -> float:
    return float(exponential(np.array([db * _LOG_10 / 20]))[0])


def _rms(wave: Wave) -> float:
    """The root of the mean square: the sums of some columns, row by row, and then those."""
    flat = wave.astype(np.float64).ravel()
    squares = np.zeros(-(-len(flat) // _COLUMNS) * _COLUMNS)
    squares[: len(flat)] = flat * flat
    sums = np.zeros(_COLUMNS)
    for row in squares.reshape(-1, _COLUMNS):
        sums += row
    return sqrt(fsum(sums) / max(1, len(flat)))


def _scaled(wave: Wave, factor: float) -> Wave:
    made: Wave = (wave.astype(np.float64) * factor).astype(np.float32)
    if not np.isfinite(made).all():
        raise SampleUndecodable(f"becomes too large for float32, times {factor:g}")
    return made


def _column_shape(column: Column, wave: Wave) -> tuple[int, ...]:
    """The shape of a field of such samples, [samples] or [samples, channels]."""
    return wave.shape[: len(column.shape)]


def wave_of(column: Column, values: dict[str, Value]) -> Wave:
    """The samples, float32 [samples, channels]. Raises ``SampleUndecodable``."""
    numbers = array_of(column, values[column.name])
    wave: Wave = numbers.astype(np.float32) * _INT16_STEP if numbers.dtype == np.int16 else numbers
    if not np.isfinite(wave).all():
        place = tuple(map(int, np.argwhere(~np.isfinite(wave))[0]))
        raise SampleUndecodable(f"{wave[place]} at {list(place)} of {column.name} is no sound")
    return wave if wave.ndim > 1 else wave[:, np.newaxis]


class _Tables:
    """What a step multiplies with, for all samples."""

    def __init__(self, step: SpectrumStep) -> None:
        self._step = step
        window = window_of(step.window, step.frame_length)
        self._frames = Frames(window, step.n_fft, step.hop, step.power == 1, step.remove_mean, step.preemphasis)
        self._bands: Bands | None = None
        self._cosines: Numbers | None = None
        if isinstance(step, MelStep):
            ends = step.low_hz, step.end_hz
            self._bands = mel_bands(step.bands, step.n_fft, step.rate, *ends, step.scale, is_normed=step.norm)
        if isinstance(step, Mfcc):
            self._cosines = cosines(step.bands, step.coefficients)

    def spectrogram(self, wave: NDArray[np.float32]) -> NDArray[np.float32]:
        """The frames of one channel, [frames, width]."""
        step = self._step
        count = step.frames(len(wave))
        if step.edges != "cut":
            behind = max(0, (count - 1) * step.hop - step.lead + step.frame_length - len(wave))
            ends = step.lead, behind
            wave = np.pad(wave, ends, "reflect") if step.edges == "reflect" else np.pad(wave, ends)
        levels = spectra(wave, self._frames, count, self._bands)
        if step.log != "none":
            factor = _FACTORS[step.log] * (2 if step.log == "db" and step.power == 1 else 1)
            logarithms(levels, step.floor, factor)
        if step.top is not None:
            np.maximum(levels, levels.max() - step.top, out=levels)
        if self._cosines is not None:
            levels = combine(levels, self._cosines)
        return levels.astype(np.float32)
