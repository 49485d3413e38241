"""The stages of the steps on sound. Worker process.

Invariant: a number is computed in float64, in an order that nothing but the options decides, and
rounded once.
"""

from itertools import chain
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.sound import mixing
from batchd.data.pipeline.sound.exact import Numbers
from batchd.data.pipeline.sound.levels import acts, column_shape, factor_of, note, rms, scaled, wave_of
from batchd.data.pipeline.sound.options import (
    Gain,
    MelStep,
    Mfcc,
    NormalizeLoudness,
    SpecAugment,
    SpectrumStep,
    Speed,
    Trim,
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
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value, array_of

_LOG_10: Final = 2.302585092994046
_HUNDREDTHS: Final = 100
_LEVEL_MIN: Final = 1e-5
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
        level = rms(wave) if step.of == "rms" else float(np.abs(wave).max(initial=0))
        factor = factor_of(step.level_db) / level if level else 0.0
        values[step.field] = scaled(wave, factor).reshape(column_shape(column, wave))

    return run


@make_stage.register
def _trim(step: Trim, before: Columns, _after: Columns) -> Stage:
    column = before[step.field]

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        levels = _levels(wave_of(column, values), step.frame, step.hop)
        loudest = max(_LEVEL_MIN * _LEVEL_MIN, float(levels.max()))
        share = factor_of(-step.top_db)
        heard = np.flatnonzero(np.maximum(levels, _LEVEL_MIN * _LEVEL_MIN) > loudest * (share * share))
        first, end = (int(heard[0]), int(heard[-1]) + 1) if len(heard) else (0, 0)
        values[step.field] = array_of(column, values[step.field])[first * step.hop : end * step.hop]

    return run


def _levels(wave: Wave, frame: int, hop: int) -> Numbers:
    """The mean square of the frames centred at every ``hop``-th sample, of the loudest channel.

    Sums of as many samples as fit into frame and hop; then, sums of these.
    """
    each = gcd(frame, hop)
    count = 1 + (len(wave) + 2 * (frame // 2) - frame) // hop
    if count < 1:
        raise SampleUndecodable(f"has {len(wave)} samples, fewer than a frame")
    padded = np.zeros((-(-((count - 1) * hop + frame) // each) * each, wave.shape[1]))
    behind = min(len(wave), len(padded) - frame // 2)
    padded[frame // 2 : frame // 2 + behind] = wave[:behind]
    padded *= padded
    pieces = np.zeros((len(padded) // each, wave.shape[1]))
    for place in range(each):
        pieces += padded[place::each]
    sums = np.zeros((count, wave.shape[1]))
    for place in range(frame // each):
        sums += pieces[place :: hop // each][:count]
    made: Numbers = sums.max(axis=1) / frame
    return made


@make_stage.register
def _gain(step: Gain, before: Columns, _after: Columns) -> Stage:
    column, (low, high) = before[step.field], step.db

    def run(values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        is_done, db = acts(step, random), low + (high - low) * random.random()
        note(random, {"db": db}, is_done=is_done)
        wave = wave_of(column, values)
        made = scaled(wave, factor_of(db)) if is_done else wave
        values[step.field] = made.reshape(column_shape(column, wave))

    return run


@make_stage.register
def _speed(step: Speed, before: Columns, _after: Columns) -> Stage:
    column = before[step.field]

    def run(values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        is_done, factor = acts(step, random), step.factors[int(len(step.factors) * random.random())]
        note(random, {"factor": factor}, is_done=is_done)
        wave, rate = wave_of(column, values), round(factor * _HUNDREDTHS) if is_done else _HUNDREDTHS
        made = resample(wave, rate, _HUNDREDTHS, 0, 0, length_at(len(wave), rate, _HUNDREDTHS))
        values[step.field] = made.reshape(column_shape(column, made))

    return run


@make_stage.register
def _spec_augment(step: SpecAugment, before: Columns, _after: Columns) -> Stage:
    column = before[step.field]

    def run(values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        is_done, levels = acts(step, random), array_of(column, values[step.field])
        widest = min(step.time_width, int(step.time_share * len(levels))), min(step.frequency_width, levels.shape[1])
        masks = [_range(widest[0], len(levels), random) for _ in range(step.time_masks)]
        bands = [_range(widest[1], levels.shape[1], random) for _ in range(step.frequency_masks)]
        note(random, {"frames": list(chain(*masks)), "frequencies": list(chain(*bands))}, is_done=is_done)
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


__all__ = ["mixing"]
