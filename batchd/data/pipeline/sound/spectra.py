"""Spectra of sound: the power of each frequency in short frames, or of bands. Worker process.

    frame j       the samples in the window that begins, or is centred, at j * hop
    power         |X[k]|**2, k <= n_fft / 2; X[k] = sum of w[j] * x[j] * exp(-2 pi i j k / n_fft)
    band          sum of a triangle of weights times the powers

in float64, each sum in one order; the caller rounds once. The extension ``_sound`` does it; where
it was not built, numpy makes the same bytes, in more time.

Sources of the formulas: windows and centred frames as torch.stft and librosa.stft; HTK's scale and
triangles as torchaudio.functional.melscale_fbanks; Slaney's scale and norm as librosa.filters.mel
(the Auditory Toolbox, 1998); Kaldi's as feat/mel-computations.cc and feat/feature-window.cc; the
cosines of ``mfcc`` as torchaudio.functional.create_dct (DCT-II, orthonormal).
"""

from functools import lru_cache
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.sound import resample
from batchd.data.pipeline.sound.exact import Numbers, cosine, exponential, logarithm, sine
from batchd.data.pipeline.sound.options import SLANEY_HZ, SLANEY_MEL

if resample.IS_BUILT:
    from batchd.data.pipeline import _sound

Window: TypeAlias = Literal["hann", "hamming", "povey", "rectangular"]
Scale: TypeAlias = Literal["htk", "slaney", "kaldi"]

_POVEY_POWER: Final = 0.85
_BATCH: Final = 256
"""Frames that numpy transforms at once."""
_LOG_10: Final = 2.302585092994046


class Frames(NamedTuple):
    """How samples become spectra."""

    window: Numbers
    """As long as a frame."""
    length: int
    """Of the transform: n_fft."""
    hop: int
    is_magnitude: bool
    is_centered: bool
    """Whether the mean of each frame is taken off."""
    emphasis: float
    """How much of the sample before it is taken off each sample of a frame."""


class Bands(NamedTuple):
    """Sums of frequencies."""

    firsts: NDArray[np.int32]
    """The first frequency of each."""
    ends: NDArray[np.int32]
    """The end of the weights of each."""
    weights: Numbers


def spectra(samples: NDArray[np.float32], frames: Frames, count: int, bands: Bands | None) -> Numbers:
    """The powers, or sums of them, of ``count`` frames: [frames, n_fft / 2 + 1 or bands]."""
    bins = frames.length // 2 + 1 if bands is None else len(bands.firsts)
    levels = np.empty((count, bins))
    roots = roots_of_one(frames.length)
    if resample.IS_BUILT:
        window, _length, hop, is_magnitude, is_centered, emphasis = frames
        wave = np.ascontiguousarray(samples)
        _sound.spectra(wave, levels, window, roots, hop, is_magnitude, is_centered, emphasis, bands)
        return levels
    for begin in range(0, count, _BATCH):
        end = min(count, begin + _BATCH)
        powers = _powers(samples, frames, begin, end, roots)
        levels[begin:end] = powers.T if bands is None else _summed(powers, bands)
    return levels


def logarithms(levels: Numbers, floor: float, factor: float) -> None:
    """Replace each number, or ``floor`` where that is more, by ``factor`` times its logarithm."""
    if resample.IS_BUILT:
        _sound.logarithms(levels, floor, factor)
    else:
        levels[...] = logarithm(np.where(levels > floor, levels, floor)) * factor


def combine(levels: Numbers, weights: Numbers) -> Numbers:
    """The sums of each row times ``weights``, [numbers, sums]."""
    sums = np.zeros((len(levels), weights.shape[1]))
    if resample.IS_BUILT:
        _sound.combine(levels, weights, sums)
    else:
        for place, row in enumerate(weights):
            sums += levels[:, place, np.newaxis] * row
    return sums


@lru_cache(maxsize=16)
def roots_of_one(length: int) -> Numbers:
    """Cosine and minus sine of each part of a turn: [length, 2]."""
    turns = np.arange(length, dtype=np.float64) / length
    return np.stack([cosine(turns), -sine(turns)], axis=1)


def window_of(kind: Window, length: int) -> Numbers:
    """The weights of the samples of a frame; "hann" and "hamming" are periodic, as for FFTs."""
    if kind == "rectangular":
        return np.ones(length)
    turns = np.arange(length, dtype=np.float64) / (max(1, length - 1) if kind == "povey" else length)
    if kind == "hamming":
        return 0.54 - 0.46 * cosine(turns)
    hann = 0.5 - 0.5 * cosine(turns)
    if kind == "hann":
        return hann
    return np.where(hann > 0, exponential(logarithm(np.maximum(hann, 1e-300)) * _POVEY_POWER), 0.0)


def mel_bands(  # noqa: PLR0913, PLR0917  a scale and its range
    count: int, length: int, rate_hz: int, low_hz: float, high_hz: float, scale: Scale, *, is_normed: bool
) -> Bands:
    """Triangles of equal width on a mel scale; ``is_normed``: each has the same area, over Hz."""
    low, high = _mel(np.array([low_hz, high_hz]), scale)
    mels = low + (high - low) * np.arange(count + 2) / (count + 1)
    frequencies = np.arange(length // 2 + 1, dtype=np.float64) * (rate_hz / length)
    corners = _hz(mels, scale)
    edges, places = (mels, _mel(frequencies, scale)) if scale == "kaldi" else (corners, frequencies)
    left, middle, right = (edges[place : count + place, np.newaxis] for place in range(3))
    weights = np.maximum(0.0, np.minimum((places - left) / (middle - left), (right - places) / (right - middle)))
    if is_normed:
        weights *= (2 / (corners[2:] - corners[:-2]))[:, np.newaxis]
    found = weights > 0
    counts = found.shape[1] - found[:, ::-1].argmax(axis=1) - found.argmax(axis=1)
    firsts, ends = found.argmax(axis=1), np.cumsum(np.where(found.any(axis=1), counts, 0))
    kept = [
        row[first : first + size] for row, first, size in zip(weights, firsts, np.diff(ends, prepend=0), strict=True)
    ]
    return Bands(firsts.astype(np.int32), ends.astype(np.int32), np.concatenate(kept))


def cosines(numbers: int, sums: int) -> Numbers:
    """The weights of the discrete cosine transform, [numbers, sums]; their squares add up to 1."""
    places = (2 * np.arange(numbers) + 1)[:, np.newaxis] * np.arange(sums)
    weights: Numbers = cosine(places % (4 * numbers) / (4 * numbers)) * np.sqrt(2 / numbers)
    weights[:, 0] = np.sqrt(1 / numbers)
    return weights


def _mel(frequencies: Numbers, scale: Scale) -> Numbers:
    if scale == "htk":
        return logarithm(1 + frequencies / 700) * (2595 / _LOG_10)
    if scale == "kaldi":
        return logarithm(1 + frequencies / 700) * 1127
    above = SLANEY_MEL + logarithm(np.maximum(frequencies, SLANEY_HZ) / SLANEY_HZ) * (27 / _slaney_step())
    return np.where(frequencies < SLANEY_HZ, frequencies * 3 / 200, above)


def _hz(mels: Numbers, scale: Scale) -> Numbers:
    if scale != "slaney":
        return 700 * (exponential(mels / (2595 / _LOG_10 if scale == "htk" else 1127)) - 1)
    above = SLANEY_HZ * exponential(np.maximum(mels - SLANEY_MEL, 0) * (_slaney_step() / 27))
    return np.where(mels < SLANEY_MEL, mels * 200 / 3, above)


def _slaney_step() -> float:
    return float(logarithm(np.array([6.4]))[0])


def _powers(samples: NDArray[np.float32], frames: Frames, begin: int, end: int, roots: Numbers) -> Numbers:
    """What the extension does, by numpy: [frequencies, frames]."""
    size, length = len(frames.window), frames.length
    places = np.arange(begin, end) * frames.hop + np.arange(size)[:, np.newaxis]
    line = np.zeros((length, end - begin))
    line[:size] = samples[places]
    if frames.is_centered:
        total = np.zeros(end - begin)
        for row in line[:size]:
            total += row
        line[:size] -= total / size
    if frames.emphasis:
        line[:size] -= frames.emphasis * np.concatenate([line[:1], line[: size - 1]])
    line[:size] *= frames.window[:, np.newaxis]
    powers = _odd_powers(line, roots) if length % 2 else _even_powers(line, roots)
    return np.sqrt(powers) if frames.is_magnitude else powers


def _odd_powers(line: Numbers, roots: Numbers) -> Numbers:
    real, imaginary = (part[: len(line) // 2 + 1] for part in transformed(line, np.zeros_like(line), roots))
    return real * real + imaginary * imaginary


def _even_powers(line: Numbers, roots: Numbers) -> Numbers:
    points = len(line) // 2
    real, imaginary = transformed(line[0::2], line[1::2], roots)
    at = np.arange(points + 1) % points
    mirrored = -np.arange(points + 1) % points
    even = (real[at] + real[mirrored]) * 0.5, (imaginary[at] - imaginary[mirrored]) * 0.5
    odd = (imaginary[at] + imaginary[mirrored]) * 0.5, (real[mirrored] - real[at]) * 0.5
    by, turn = (roots[: points + 1, part, np.newaxis] for part in range(2))
    x, y = even[0] + (odd[0] * by - odd[1] * turn), even[1] + (odd[0] * turn + odd[1] * by)
    return x * x + y * y


def transformed(real: Numbers, imaginary: Numbers, roots: Numbers) -> tuple[Numbers, Numbers]:
    """Stockham's FFT over the first dimension, [points, frames], in the order of the extension."""
    points, frames = real.shape
    every, apart, length = len(roots) // points, 1, points
    for radix in radices(points):
        of_each = length // radix
        x, y = (part.reshape(radix, of_each, apart, frames) for part in (real, imaginary))
        x, y = _by_odd(x, y, radix, roots) if radix % 2 else _EVEN[radix](x, y)
        turns = np.arange(radix)[:, np.newaxis] * np.arange(of_each) * (apart * every)
        by, turn = (roots[turns, part][:, :, np.newaxis, np.newaxis] for part in range(2))
        turned = [x * by - y * turn, x * turn + y * by]
        turned[0][0], turned[1][0] = x[0], y[0]
        real, imaginary = (np.moveaxis(part, 0, 1).reshape(points, frames) for part in turned)
        apart, length = apart * radix, of_each
    return real, imaginary


def radices(points: int) -> list[int]:
    """The factors of a length in the order of the stages of its transform."""
    found, radix = [], 4
    while points > 1:
        while points % radix == 0:
            found.append(radix)
            points //= radix
        radix = {4: 2, 2: 3}.get(radix, radix + 2)
    return found


def _by_two(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    return np.stack([x[0] + x[1], x[0] - x[1]]), np.stack([y[0] + y[1], y[0] - y[1]])


def _by_four(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    (sum_x, odd_x), (sum_y, odd_y) = ((part[0] + part[2], part[1] + part[3]) for part in (x, y))
    less_x, less_y, turn_x, turn_y = x[0] - x[2], y[0] - y[2], y[3] - y[1], x[1] - x[3]
    return (
        np.stack([sum_x + odd_x, less_x - turn_x, sum_x - odd_x, less_x + turn_x]),
        np.stack([sum_y + odd_y, less_y - turn_y, sum_y - odd_y, less_y + turn_y]),
    )


_EVEN: Final = {2: _by_two, 4: _by_four}


def _by_odd(x: Numbers, y: Numbers, radix: int, roots: Numbers) -> tuple[Numbers, Numbers]:
    half, each = radix // 2, len(roots) // radix
    made_x, made_y = np.empty_like(x), np.empty_like(y)
    made_x[0], made_y[0] = x[0], y[0]
    for j in range(1, half + 1):
        made_x[0] += x[j] + x[radix - j]
        made_y[0] += y[j] + y[radix - j]
    for k in range(1, half + 1):
        even_x, even_y, odd_x, odd_y = x[0].copy(), y[0].copy(), np.zeros_like(x[0]), np.zeros_like(y[0])
        for j in range(1, half + 1):
            by, turn = roots[each * (j * k % radix)]
            even_x += by * (x[j] + x[radix - j])
            even_y += by * (y[j] + y[radix - j])
            odd_x += turn * (x[j] - x[radix - j])
            odd_y += turn * (y[j] - y[radix - j])
        made_x[k], made_y[k] = even_x - odd_y, even_y + odd_x
        made_x[radix - k], made_y[radix - k] = even_x + odd_y, even_y - odd_x
    return made_x, made_y


def _summed(powers: Numbers, bands: Bands) -> Numbers:
    sums = np.zeros((powers.shape[1], len(bands.firsts)))
    begin = 0
    for band, (first, end) in enumerate(zip(bands.firsts, bands.ends, strict=True)):
        for place in range(begin, end):
            sums[:, band] += bands.weights[place] * powers[first + place - begin]
        begin = end
    return sums
