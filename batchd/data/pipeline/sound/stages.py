"""The stages of the steps on sound. Worker process.

Invariant: a number is computed in float64, in an order that nothing but the options decides, and
rounded once.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.sound.exact import Numbers
from batchd.data.pipeline.sound.options import MelStep, Mfcc, SpectrumStep
from batchd.data.pipeline.sound.resample import Wave
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
_FACTORS: Final = {"ln": 1.0, "log10": 1 / 2.302585092994046, "db": 10 / 2.302585092994046}


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
