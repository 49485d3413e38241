"""The stages of the steps that decode media. Worker process.

Where a segment begins is decided in samples of the new rate, of which sample 0 is sample 0 of the
file; the samples of the file around them are read and resampled (``sound.resample``). So a sample
has the same value in every segment that it is in.
"""

from math import isfinite
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.media.clips import VideoStage
from batchd.data.pipeline.media.options import PLACES, DecodeAudio, DecodeVideo
from batchd.data.pipeline.media.sound_files import ConvertedSound, open_sound
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.stages import Row, make_stage
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.kept_files import FileFacts
from batchd.data.samples.values import MediaFile, Value, array_of

_INT16_SCALE: Final = 32768.0


class AudioStage:
    """Decodes one sound after the other. ``facts``: what a cache keeps of files, or None."""

    def __init__(self, step: DecodeAudio, before: Columns) -> None:
        self.step = step
        self.facts: FileFacts | None = None
        self._before = before

    def __call__(self, values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        """Replace the file by its samples. Raises ``SampleUndecodable``."""
        step = self.step
        share = random.random() if step.is_random else 0.0
        value = values[step.field]
        assert isinstance(value, memoryview | MediaFile), "the bytes of a file"
        wanted = 0.0
        if step.start_field is not None:
            wanted = float(array_of(self._before[step.start_field], values[step.start_field]))
        elif not isinstance(step.start, str):
            wanted = step.start
        with open_sound(value, step.formats, self.facts) as sound:
            wave, start = _segment(step, ConvertedSound(sound, step.form), wanted, share)
        if step.is_random and random.draws is not None:
            random.draws.append({"start_s": start / step.rate})
        if step.length_field is not None:
            values[step.length_field] = np.int32(len(wave))
        values[step.field] = _stored(step, wave)


@make_stage.register
def _decode_audio(step: DecodeAudio, before: Columns, _after: Columns) -> AudioStage:
    return AudioStage(step, before)


@make_stage.register
def _decode_video(step: DecodeVideo, _before: Columns, _after: Columns) -> VideoStage:
    return VideoStage(step)


def _segment(
    step: DecodeAudio, sound: ConvertedSound, wanted_s: float, share: float
) -> tuple[NDArray[np.float32], int]:
    """The samples of the file in a segment, [samples, channels], and the number of its first one.

    ``wanted_s``: where it begins, if the step says so. ``share``: of the room that is left.
    """
    if not step.samples:
        return _whole(step, sound), 0
    length = sound.length
    room = max(0, length - step.samples)
    if step.is_random:
        start = int((room + 1) * share)
    elif step.start in PLACES:
        start = room // 2
    else:
        if not isfinite(wanted_s) or wanted_s < 0:
            raise SampleUndecodable(f"begins at {wanted_s:g} s, as {step.start!r} says, which is no place in a file")
        start = round(min(wanted_s, 1e9) * step.rate)
        if start >= length:
            raise SampleUndecodable(f"lasts {sound.seconds:.3f} s, and its segment begins at {wanted_s:g} s")
    count = min(step.samples, length - start)
    if count < step.samples and step.short == "bad":
        raise SampleUndecodable(
            f"ends {(step.samples - count) / step.rate:.3f} s before its segment of {step.seconds:g} s does"
        )
    return sound.read(start, count), start


def _whole(step: DecodeAudio, sound: ConvertedSound) -> NDArray[np.float32]:
    if sound.seconds > step.max_seconds:
        raise SampleUndecodable(f"lasts {sound.seconds:.3f} s, more than max_seconds = {step.max_seconds:g}")
    if not sound.seconds:
        raise SampleUndecodable("has no sample in it")
    return sound.read(0, sound.length)


def _stored(step: DecodeAudio, wave: NDArray[np.float32]) -> NDArray[np.float32] | NDArray[np.int16]:
    """The samples in the type of the field, with zeros behind those of a short file."""
    shape = (step.samples or len(wave), *wave.shape[1:])
    if step.dtype == "float32" and wave.shape == shape:
        return wave[:, 0] if step.channels == 1 else wave
    made: NDArray[np.float32] | NDArray[np.int16] = np.zeros(shape, step.dtype)
    if step.dtype == "int16":
        whole = np.rint(wave.astype(np.float64) * _INT16_SCALE)
        made[: len(wave)] = np.clip(whole, -_INT16_SCALE, _INT16_SCALE - 1)
    else:
        made[: len(wave)] = wave
    return made[:, 0] if step.channels == 1 else made
