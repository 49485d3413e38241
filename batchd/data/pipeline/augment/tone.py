"""The steps that change the levels of pixels, on an upright image of 8 bits. Worker process.

    solarize, posterize, equalize, autocontrast, invert   look-ups, exactly those of Pillow
    sharpen    in whole numbers, rounded once from a value within 0.02 of the formula
    blur       the weighted sums of ``image.resample``, within 0.03 of the formula
    erase      noise is a hash of (a number of the sample, row, column), so no order matters

Statistics are of the image after the earlier steps. The extension ``_pixels`` counts and sharpens;
where it was not built, numpy makes the same bytes.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.augment import options
from batchd.data.pipeline.augment.exact import KEY_BITS, exponential, gaussian_weights, logarithm, random_words
from batchd.data.pipeline.image import resample
from batchd.data.pipeline.image.geometry import Cut, RandomNumber
from batchd.data.pipeline.image.opencv import Pixels, Scratch, cv2, written
from batchd.data.pipeline.image.options import Fill
from batchd.data.pipeline.image.recolor import COLOR_CHANNELS, Change, Recolor, recolor_for
from batchd.data.pipeline.options import Size

if resample.IS_BUILT:
    from batchd.data.pipeline import _pixels

LEVELS: Final = 256
WHITE: Final = 255
MEAN_COLOR: Final = (124, 116, 104)
"""The mean of ImageNet's pixels: red, green and blue."""
MEAN_GREY: Final = 117
ERASE_ATTEMPTS: Final = 10
_ALL = np.arange(LEVELS)
_FACTOR_BITS = 14
_SMOOTH_SUM, _SMOOTH_CENTRE = 13, 5
_WEIGHT_BITS = 14
_KEPT_BITS = 7

Levels = npt.NDArray[np.uint8]
"""A level for each level: uint8 [256], or [1, 256, channels]."""


def drawn(ends: tuple[float, float], random: RandomNumber) -> float:
    """A number between two; where there is no choice, none is drawn."""
    low, high = ends
    return low + (high - low) * random() if high > low else low


def room_beside(pixels: Pixels, scratch: Scratch, out: Pixels | None, size: Size | None = None) -> Pixels:
    """Memory for an image of this shape, or of a size, beside ``pixels``: the row if possible."""
    shape = (*(size or pixels.shape[:2]), pixels.shape[2])
    if out is not None and out.shape == shape and out is not pixels:
        return out
    return next(room for place in ("one", "other") if (room := scratch.image(place, shape)) is not pixels)


# --- look-ups -------------------------------------------------------------------------------------


def solarized(threshold: float) -> Levels:
    """The levels of "solarize"."""
    return np.where(threshold > _ALL, _ALL, WHITE - _ALL).astype(np.uint8)


def posterized(bits: int) -> Levels:
    """The levels of "posterize"; with 0 bits all are black."""
    return (_ALL & (WHITE << 8 - bits)).astype(np.uint8)


def brightened_below(threshold: int, levels: int) -> Levels:
    """Add to the levels below a threshold."""
    return np.where(threshold > _ALL, np.minimum(_ALL + levels, WHITE), _ALL).astype(np.uint8)


INVERTED: Final[Levels] = (WHITE - _ALL).astype(np.uint8)


def level_counts(pixels: Pixels) -> npt.NDArray[np.uint32]:
    """How many pixels of each channel have each level: uint32 [channels, 256]."""
    counts = np.empty((pixels.shape[2], LEVELS), np.uint32)
    if resample.IS_BUILT:
        _pixels.count_levels(resample.side_by_side(pixels), counts)
    else:
        for channel, found in enumerate(counts):
            found[:] = np.bincount(pixels[:, :, channel].ravel(), minlength=LEVELS)
    return counts


def equalized(pixels: Pixels) -> Levels:
    """The levels of "equalize", by channel: Pillow's formula, in whole numbers."""
    counts = level_counts(pixels).astype(np.int64)
    tables = np.empty((1, LEVELS, len(counts)), np.uint8)
    for channel, found in enumerate(counts):
        last = found[np.flatnonzero(found)[-1]]
        step = int(found.sum() - last) // WHITE
        before = np.cumsum(found) - found
        tables[0, :, channel] = np.minimum((step // 2 + before) // step, WHITE) if step else _ALL
    return tables


def stretched(pixels: Pixels) -> Levels:
    """The levels of "autocontrast", by channel: Pillow's formula, its roundings included."""
    counts = level_counts(pixels)
    tables = np.empty((1, LEVELS, len(counts)), np.uint8)
    for channel, found in enumerate(counts):
        there = np.flatnonzero(found)
        low, high = int(there[0]), int(there[-1])
        if low == high:
            tables[0, :, channel] = _ALL
            continue
        scale = WHITE / (high - low)
        tables[0, :, channel] = np.clip(np.trunc(_ALL * scale + -low * scale), 0, WHITE)
    return tables


def replace_levels(pixels: Pixels, tables: Levels) -> Pixels:
    """Look each pixel up, in place."""
    written(cv2.LUT(pixels, tables, dst=pixels), pixels)
    return pixels


def _certain(make: Callable[[Pixels], Levels]) -> Recolor:
    """A step that draws nothing, and looks up what the pixels say."""
    change = Change(lambda pixels, _out: replace_levels(pixels, make(pixels)))
    return lambda _random, _shape: change


@recolor_for.register
def _solarize(step: options.Solarize, _scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others use it
    levels = solarized(step.threshold)
    return _certain(lambda _pixels: levels)


@recolor_for.register
def _posterize(step: options.Posterize, _scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others use it
    levels = posterized(step.bits)
    return _certain(lambda _pixels: levels)


@recolor_for.register
def _invert(_step: options.Invert, _scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others use it
    return _certain(lambda _pixels: INVERTED)


@recolor_for.register
def _equalize(_step: options.Equalize, _scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others use it
    return _certain(equalized)


@recolor_for.register
def _autocontrast(_step: options.Autocontrast, _scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others
    return _certain(stretched)


# --- neighbours -----------------------------------------------------------------------------------


def sharpened(pixels: Pixels, factor: float, into: Pixels) -> Pixels:
    """Write an image that is ``factor`` as sharp, 0 to 10, into other memory."""
    parts = round(factor * (1 << _FACTOR_BITS))
    if resample.IS_BUILT:
        _pixels.sharpen(resample.side_by_side(pixels), into, parts)
        return into
    into[...] = pixels
    if min(pixels.shape[:2]) > 2:  # noqa: PLR2004  an edge on each side
        rows, columns = pixels.shape[0] - 2, pixels.shape[1] - 2
        around = pixels.astype(np.int32)
        middle = around[1:-1, 1:-1]
        smooth = sum(around[down : down + rows, right : right + columns] for down in range(3) for right in range(3))
        smooth = smooth + (_SMOOTH_CENTRE - 1) * middle
        one, half = 1 << _FACTOR_BITS, _SMOOTH_SUM << _FACTOR_BITS - 1
        mixed = (parts * _SMOOTH_SUM * middle + (one - parts) * smooth + half) >> _FACTOR_BITS
        into[1:-1, 1:-1] = np.clip(mixed // _SMOOTH_SUM, 0, WHITE)
    return into


@recolor_for.register
def _sharpen(step: options.Sharpen, scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others use it
    def draw(random: RandomNumber, _shape: tuple[int, ...]) -> Change:
        factor = drawn(step.factor, random)
        return Change(
            lambda pixels, out: sharpened(pixels, factor, room_beside(pixels, scratch, out)), {"factor": factor}
        )

    return draw


@lru_cache(maxsize=8)
def blur_taps(side: int, sigma: float) -> resample.Taps:
    """What the pixels along a side are made of; beyond the ends lies the reflected side."""
    weights = gaussian(sigma, _WEIGHT_BITS)
    reach = len(weights) // 2
    count = min(side, len(weights))
    first = np.clip(np.arange(side) - reach, 0, side - count)
    made = np.zeros((side, count), np.int16)
    made[reach : side - reach] = weights[:count]
    ends = np.r_[: min(reach, side), max(side - reach, min(reach, side)) : side]
    around = np.abs(ends[:, np.newaxis] + np.arange(-reach, reach + 1)) % max(1, 2 * (side - 1))
    around = np.minimum(around, 2 * (side - 1) - around)
    np.add.at(made, (ends[:, np.newaxis], around - first[ends, np.newaxis]), weights)
    return resample.Taps(first.astype(np.int32), made, _WEIGHT_BITS)


def gaussian(sigma: float, bits: int) -> npt.NDArray[np.int16]:
    """The same on both sides, in whole numbers, which add up to ``1 << bits``."""
    weights = np.rint(np.array(gaussian_weights(sigma)) * (1 << bits)).astype(np.int16)
    weights[0] = (1 << bits) - 2 * weights[1:].sum(dtype=np.int64)
    return np.concatenate([weights[:0:-1], weights])


def blurred(pixels: Pixels, sigma: float, into: Pixels) -> Pixels:
    """Write a blurred image into other memory."""
    down, across = (blur_taps(side, sigma) for side in pixels.shape[:2])
    resample.weigh(pixels, into, down, across, _KEPT_BITS)
    return into


@recolor_for.register
def _blur(step: options.Blur, scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others use it
    def draw(random: RandomNumber, _shape: tuple[int, ...]) -> Change:
        sigma = drawn(step.sigma, random)
        return Change(lambda pixels, out: blurred(pixels, sigma, room_beside(pixels, scratch, out)), {"sigma": sigma})

    return draw


# --- erase ----------------------------------------------------------------------------------------


def noise(key: int, box: Cut, channels: int) -> Pixels:
    """Even random levels for a box of an image, by place: uint8 [height, width, channels]."""
    words = random_words(key, *box)
    return words.astype("<u8", copy=False).view(np.uint8).reshape(box.height, box.width, 8)[:, :, :channels]


@recolor_for.register
def _erase(step: options.Erase, _scratch: Scratch, *, is_bgr: bool) -> Recolor:
    log_narrow, log_wide = (logarithm(end) for end in step.aspect)

    def place(random: RandomNumber, height: int, width: int) -> Cut | None:
        for _ in range(ERASE_ATTEMPTS):
            area = height * width * (step.area[0] + (step.area[1] - step.area[0]) * random())
            aspect = exponential(log_narrow + (log_wide - log_narrow) * random())
            down, across = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 0 < down < height and 0 < across < width:
                return Cut(int((height - down + 1) * random()), int((width - across + 1) * random()), down, across)
        return None

    def draw(random: RandomNumber, shape: tuple[int, ...]) -> Change:
        height, width, channels = shape
        boxes = [box for _ in range(step.count) if (box := place(random, height, width)) is not None]
        key = int(random() * (1 << KEY_BITS)) if step.fill == "noise" else 0

        def erase(pixels: Pixels, _out: Pixels | None) -> Pixels:
            for box in boxes:
                part = resample.cut_out(pixels, box)
                part[...] = noise(key, box, channels) if step.fill == "noise" else fill
            return pixels

        fill = _color(step.fill, channels, is_bgr=is_bgr)
        return Change(erase, {"holes": [box._asdict() for box in boxes]})

    return draw


def _color(fill: str | Fill, channels: int, *, is_bgr: bool) -> Fill:
    if not isinstance(fill, str):
        return fill
    if channels != COLOR_CHANNELS:
        return (MEAN_GREY,)
    return MEAN_COLOR[::-1] if is_bgr else MEAN_COLOR
