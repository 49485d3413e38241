"""Sound joined with that of a file: noise, and the response of a room. Worker process.

    add_noise  x + factor * n        n: a segment of a file, at the rate and with the channels of x
    room       sum of h[p + j] * x[n - j]    h: the response; p: its largest sample, the direct path

A file is drawn among those of a folder, in one order (``step_files.files_below``). A file that
cannot be decoded makes a bad sample, which names it, so another sample stands in by the plan; one
that has changed since the worker listed it stops the stream, as any file of a step does.

Invariant: what is added is a function of what was drawn, of the file, and of the options.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import log2, sqrt
from pathlib import Path
from typing import Final

import numpy as np

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.media.options import SoundForm
from batchd.data.pipeline.media.sound_files import ConvertedSound, open_sound
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.sound import resample
from batchd.data.pipeline.sound.exact import Numbers
from batchd.data.pipeline.sound.levels import acts, column_shape, energy, factor_of, note, rounded, wave_of
from batchd.data.pipeline.sound.options import AddNoise, FolderSound, Room
from batchd.data.pipeline.sound.resample import Wave
from batchd.data.pipeline.sound.spectra import roots_of_one, transformed
from batchd.data.pipeline.stages import Row, Stage, make_stage
from batchd.data.pipeline.step_files import ADVICE, StepFileInvalid, files_below, open_file
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import MediaFile, Value

if resample.IS_BUILT:
    from batchd.data.pipeline import _sound

_LANES: Final = 4
"""Transforms side by side; each is of two blocks."""
_BLOCKS: Final = 2 * _LANES
_LENGTHS: Final = tuple(1 << bits for bits in range(9, 15))
"""Of transforms."""


@make_stage.register
def _add_noise(step: AddNoise, before: Columns, _after: Columns) -> Stage:
    column, files, (low, high) = before[step.field], _SoundFolder(step), step.snr_db

    def run(values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        is_done, number, share = acts(step, random), files.drawn(random), random.random()
        snr_db = low + (high - low) * random.random()
        wave, start = wave_of(column, values), 0
        if is_done and len(wave):
            with files.open(number, wave.shape[1]) as sound:
                noise, start = _segment(sound, wave.shape, share)
            values[step.field] = _noisy(wave, noise, snr_db).reshape(column_shape(column, wave))
        else:
            values[step.field] = wave.reshape(column_shape(column, wave))
        drawn = {"file": files.names[number], "start_s": start / step.rate, "snr_db": snr_db}
        note(random, drawn, is_done=is_done)

    return run


@make_stage.register
def _room(step: Room, before: Columns, _after: Columns) -> Stage:
    column, files = before[step.field], _SoundFolder(step)

    def run(values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        is_done, number = acts(step, random), files.drawn(random)
        wave = made = wave_of(column, values)
        if is_done and len(wave):
            with files.open(number, wave.shape[1], is_mixed=False) as sound:
                response = _response(sound, step, wave.shape[1])
            made = _reverberated(wave, response, step)
        values[step.field] = made.reshape(column_shape(column, wave))
        note(random, {"file": files.names[number]}, is_done=is_done)

    return run


class _SoundFolder:
    """The sound files of a folder, as they were when the worker began."""

    def __init__(self, step: FolderSound) -> None:
        """Raises ``StepFileInvalid``."""
        self._step = step
        self.names = files_below(step.root, step.patterns)
        if not self.names:
            raise StepFileInvalid(f"{step.root} has no file any more that patterns = {list(step.patterns)} match")
        self._versions = [_version(step.root / name) for name in self.names]

    def drawn(self, random: SampleRandom) -> int:
        """Draw the number of a file."""
        return int(len(self.names) * random.random())

    @contextmanager
    def open(self, number: int, channels: int, *, is_mixed: bool = True) -> Iterator[ConvertedSound]:
        """Open a file for sound of so many channels. Raises ``SampleUndecodable``, which names it.

        ``is_mixed``: one channel is made of any number. Raises ``StepFileInvalid`` for one that has
        changed, also for the block.
        """
        path = self._step.root / self.names[number]
        with open_file(path) as file:
            version = _of_status(os.fstat(file.fileno()))
            if version != self._versions[number]:
                raise StepFileInvalid(f"{path} has changed since the worker started; {ADVICE}")
            read = partial(_read, file.fileno())
            try:
                with open_sound(MediaFile(version[0], read, None), self._step.formats) as sound:
                    channels = channels if is_mixed else sound.channels
                    yield ConvertedSound(sound, SoundForm(self._step.rate, channels, self._step.quality))
            except SampleUndecodable as error:
                raise SampleUndecodable(f'"{self._step.op}" draws {path}, which {error}') from None


def _version(path: Path) -> tuple[int, int]:
    with open_file(path) as file:
        return _of_status(os.fstat(file.fileno()))


def _of_status(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _read(descriptor: int, first: int, count: int) -> bytes:
    return os.pread(descriptor, count, first)


def _segment(sound: ConvertedSound, shape: tuple[int, ...], share: float) -> tuple[Wave, int]:
    """Noise of this shape, [samples, channels], and the number of its first sample in the file."""
    count, length = shape[0], sound.length
    if not length:
        raise SampleUndecodable("has no sample in it")
    if length >= count:
        start = int((length - count + 1) * share)
        return sound.read(start, count), start
    start = int(length * share)
    return sound.read(0, length)[np.arange(start, start + count) % length], start


def _noisy(wave: Wave, noise: Wave, snr_db: float) -> Wave:
    """The sum, each channel of the noise times its own factor."""
    made, scale = wave.astype(np.float64), factor_of(-snr_db)
    for channel in range(wave.shape[1]):
        of_noise = energy(noise[:, channel])
        if of_noise:
            made[:, channel] += noise[:, channel] * (scale * sqrt(energy(wave[:, channel]) / of_noise))
    return rounded(made, f"with noise of {snr_db:g} dB")


def _response(sound: ConvertedSound, step: Room, channels: int) -> Wave:
    """The response, at the rate of the sound, of one channel or as many as the sound has."""
    if not 0 < sound.length <= step.max_seconds * step.rate:
        raise SampleUndecodable(
            f"lasts {sound.seconds:.3f} s, and a response 1 sample to max_seconds = {step.max_seconds:g}"
        )
    response = sound.read(0, sound.length)
    if not response.any():
        raise SampleUndecodable("is silent")
    if channels == 1 or sound.form.channels == 1:
        return response[:, :1]
    if sound.form.channels != channels:
        raise SampleUndecodable(f"has {sound.form.channels} channels, and the sound {channels}")
    return response


def _reverberated(wave: Wave, response: Wave, step: Room) -> Wave:
    direct = int(np.abs(response).max(axis=1).argmax())
    made = np.empty(wave.shape)
    for channel in range(wave.shape[1]):
        of_channel = np.ascontiguousarray(response[:, channel % response.shape[1]])
        made[:, channel] = convolve(np.ascontiguousarray(wave[:, channel]), of_channel, direct)
    if step.normalize == "energy":
        made *= 1 / sqrt(energy(response))
    elif step.normalize == "level":
        after = energy(made)
        made *= sqrt(energy(wave) / after) if after else 0.0
    return rounded(made, "in a room")


def convolve(wave: Wave, response: Wave, first: int) -> Numbers:
    """As many samples of the convolution as there are of ``wave``, from number ``first`` on.

    Both are float32 [samples]. Blocks of the sound and parts of the response are multiplied as
    spectra in float64; overlapping ends are added, in order. The extension ``_sound`` does it;
    where it was not built, numpy makes the same bytes, in more time.
    """
    taps = len(response)
    length = min(_LENGTHS, key=lambda length: _cost(length, len(wave), taps))
    part = min(taps, length // 2)
    made, roots = np.zeros(len(wave)), roots_of_one(length)
    if resample.IS_BUILT:
        _sound.convolve(wave, response, made, roots, part, first)
    else:
        _convolve(wave, response, made, roots, part, first)
    return made


def _cost(length: int, samples: int, taps: int) -> int:
    """About the time that transforms of this length take."""
    part = min(taps, length // 2)
    parts, groups = -(-taps // part), -(-samples // (_BLOCKS * (length - part + 1)))
    return (-(-parts // _LANES) + groups * (1 + parts)) * length * round(log2(length))


def _convolve(wave: Wave, response: Wave, made: Numbers, roots: Numbers, part: int, first: int) -> None:  # noqa: PLR0913, PLR0917  what the extension takes
    """What the extension does, by numpy."""
    length, block = len(roots), len(roots) - part + 1
    spectra_of_parts = []
    for begin in range(0, len(response), _LANES * part):
        lanes = np.zeros((length, _LANES))
        for lane in range(_LANES):
            taps = response[begin + lane * part : begin + (lane + 1) * part]
            lanes[: len(taps), lane] = taps
        spectra_of_parts.append(transformed(lanes, np.zeros_like(lanes), roots))
    for begin in range(0, len(wave), _BLOCKS * block):
        blocks = np.zeros((2, length, _LANES))
        for number in range(_BLOCKS):
            samples = wave[begin + number * block : begin + (number + 1) * block]
            blocks[number // _LANES, : len(samples), number % _LANES] = samples
        x, y = transformed(blocks[0], blocks[1], roots)
        for number in range(-(-len(response) // part)):
            group, lane = divmod(number, _LANES)
            re, im = (plane[:, lane : lane + 1] for plane in spectra_of_parts[group])
            im_made, re_made = transformed(x * im + y * re, x * re - y * im, roots)
            for place in range(_BLOCKS):
                line = (im_made if place // _LANES else re_made)[:, place % _LANES]
                start = begin + place * block + number * part - first
                low, high = max(0, -start), min(length, len(made) - start)
                if low < high and begin + place * block < len(wave):
                    made[start + low : start + high] += line[low:high] * (1 / length)
