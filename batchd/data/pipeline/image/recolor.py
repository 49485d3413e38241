"""The steps that change the values of pixels, on an upright image of 8 bits. Worker process.

Each works in place, except "gray" where it changes the number of channels. All rounding is to the
nearest of 0 to 255; the errors given are those before rounding:

    brightness  f * pixel                     exact, halves to even
    contrast    f * pixel + (1 - f) * mean    exact, halves to even; float64 mean of the grey levels
    saturation  f * pixel + (1 - f) * grey    in float32: within 0.001
    hue         in HSV, in whole numbers      within 0.002
    grey        0.299 red + 0.587 green + 0.114 blue, as cv2 does in fixed point: within 0.005

The extension ``_pixels`` makes the four of one image together; where it was not built, and of an
image that has not three channels, numpy and cv2 make the same bytes.

Invariant: each draws the same number of random numbers for every image, whatever it draws, and
whether it then acts or not.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from itertools import permutations
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.image import resample
from batchd.data.pipeline.image.geometry import RandomNumber, TrailPart
from batchd.data.pipeline.image.opencv import Pixels, Scratch, cv2, written
from batchd.data.pipeline.image.options import ColorJitter, Cutout, Gray
from batchd.data.pipeline.options import StepOptions

if resample.IS_BUILT:
    from batchd.data.pipeline import _pixels

COLOR_CHANNELS = 3
_SIXTHS = 6
_HUE_BITS = 16
_FACTOR_BITS = 14
_LEVELS = np.arange(256, dtype=np.float64)
_GREY_WEIGHTS = np.array((9798, 19235, 3735), np.int32)
"""0.299, 0.587 and 0.114 of 2**15, as OpenCV rounds them."""
_PILLOW_GREY_WEIGHTS = np.array((19595, 38470, 7471), np.int32)
"""The same of 2**16, as Pillow rounds them."""
_NAMES = ("brightness", "contrast", "saturation", "hue")


class Change(NamedTuple):
    """The work of a step on one image, with all its numbers drawn."""

    make: Callable[[Pixels, Pixels | None], Pixels]
    """Changes pixels, uint8 ``[height, width, channels]``, in place and returns them; or writes
    into the second argument, which is the row where there is one, or into memory of its own."""
    drew: Mapping[str, object] = {}
    """The numbers, for ``batchd replay``."""
    trail: Sequence[TrailPart] = ()
    """What it does to the fields that follow the image."""


Recolor: TypeAlias = Callable[[RandomNumber, tuple[int, ...]], Change]
"""Draws the numbers of a step for one image of a shape, ``(height, width, channels)``."""


@singledispatch
def recolor_for(_step: StepOptions, _scratch: Scratch, *, is_bgr: bool) -> Recolor | None:  # noqa: ARG001  others use it
    """Make the function that changes pixels as a step says; None for steps that change none."""
    return None


class _Grey:
    def __init__(self, scratch: Scratch, *, is_bgr: bool) -> None:
        self._scratch = scratch
        self._code = cv2.COLOR_BGR2GRAY if is_bgr else cv2.COLOR_RGB2GRAY

    def of(self, pixels: Pixels, into: Pixels | None = None) -> Pixels:
        """The grey levels of ``[height, width, channels]``, uint8 ``[height, width, 1]``."""
        if pixels.shape[2] == 1:
            return pixels
        if into is None:
            into = self._scratch.image("grey", (*pixels.shape[:2], 1))
        written(cv2.cvtColor(pixels, self._code, dst=into), into)
        return into

    def colored(self, pixels: Pixels, into: Pixels) -> Pixels:
        """The grey levels once for each of three channels, uint8 ``[height, width, 3]``."""
        written(cv2.cvtColor(self.of(pixels), cv2.COLOR_GRAY2RGB, dst=into), into)
        return into


@recolor_for.register(Gray)
class _Gray:
    def __init__(self, step: Gray, scratch: Scratch, *, is_bgr: bool) -> None:
        self._channels = step.channels
        self._scratch = scratch
        self._grey = _Grey(scratch, is_bgr=is_bgr)

    def __call__(self, _random: RandomNumber, _shape: tuple[int, ...]) -> Change:
        """Draw nothing."""
        return Change(self._make)

    def _make(self, pixels: Pixels, out: Pixels | None) -> Pixels:
        """Write into ``out`` if the channels change to those of ``out``, else into own memory.

        ``pixels`` and the result: uint8 ``[height, width, channels]``.
        """
        if pixels.shape[2] == self._channels == 1:
            return pixels
        shape = (*pixels.shape[:2], self._channels)
        if pixels.shape == shape:
            into = pixels
        else:
            into = out if out is not None and out.shape == shape else self._scratch.image("gray", shape)
        return self._grey.of(pixels, into) if self._channels == 1 else self._grey.colored(pixels, into)


@recolor_for.register
def _cutout(step: Cutout, _scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others use it
    height, width = step.size

    def draw(random: RandomNumber, shape: tuple[int, ...]) -> Change:
        holes = [
            (int(shape[0] * random()) - height // 2, int(shape[1] * random()) - width // 2) for _ in range(step.holes)
        ]

        def cut(pixels: Pixels, _out: Pixels | None) -> Pixels:
            for top, left in holes:
                pixels[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)] = step.fill
            return pixels

        return Change(cut, {"holes": [{"top": top, "left": left} for top, left in holes]})

    return draw


BRIGHTNESS, CONTRAST, SATURATION, HUE, PILLOW_SATURATION = range(5)
"""Kinds of changes, as in ``_pixels_color.c``."""
ColorChange: TypeAlias = tuple[int, float]
"""A kind and its number: a factor, from 0 to 11; of a hue, the rounds of the circle."""


class Colors:
    """The changes by a number, in place; of pixels ``[height, width, channels]``."""

    def __init__(self, scratch: Scratch, *, is_bgr: bool) -> None:
        self._grey = _Grey(scratch, is_bgr=is_bgr)
        self._is_bgr = is_bgr

    def change(self, pixels: Pixels, changes: Sequence[ColorChange]) -> Pixels:
        """Make the changes, one after the other. An image without colours keeps its saturation."""
        if pixels.shape[2] != COLOR_CHANNELS:
            for kind, number in changes:
                if kind in {BRIGHTNESS, CONTRAST}:
                    self._change_levels(pixels, kind, number)
        elif resample.IS_BUILT:
            _pixels.recolor(pixels, tuple([(kind, _units(kind, number)) for kind, number in changes]), self._is_bgr)
        else:
            in_rgb = pixels[:, :, ::-1] if self._is_bgr else pixels
            for kind, number in changes:
                if kind in {BRIGHTNESS, CONTRAST}:
                    self._change_levels(pixels, kind, number)
                else:
                    in_rgb[...] = _BY_NUMPY[kind](in_rgb, _units(kind, number))
        return pixels

    def _change_levels(self, pixels: Pixels, kind: int, factor: float) -> None:
        """Mix with black, or with the mean grey level."""
        mean = float(self._grey.of(pixels).mean(dtype=np.float64)) if kind == CONTRAST else 0.0
        table = np.clip(np.rint(factor * _LEVELS + (1 - factor) * mean), 0, 255).astype(np.uint8)
        written(cv2.LUT(pixels, table, dst=pixels), pixels)


@recolor_for.register(ColorJitter)
class _Jitter:
    """Make the four changes in a random order; one without strength draws no number."""

    def __init__(self, step: ColorJitter, scratch: Scratch, *, is_bgr: bool) -> None:
        self._colors = Colors(scratch, is_bgr=is_bgr)
        strengths = {BRIGHTNESS: step.brightness, CONTRAST: step.contrast, SATURATION: step.saturation}
        self._changes = [(kind, max(0.0, 1 - by), 1 + by) for kind, by in strengths.items() if by]
        if step.hue:
            self._changes.append((HUE, -step.hue, step.hue))
        self._orders = list(permutations(range(len(self._changes))))

    def __call__(self, random: RandomNumber, _shape: tuple[int, ...]) -> Change:
        order = self._orders[int(len(self._orders) * random())]
        drawn = [(kind, low + (high - low) * random()) for kind, low, high in self._changes]
        changes = [drawn[place] for place in order]
        return Change(
            lambda pixels, _out: self._colors.change(pixels, changes),
            {_NAMES[kind]: number for kind, number in changes},
        )


def _units(kind: int, number: float) -> float:
    """The number as whole steps, where a change is made in whole numbers."""
    if kind == HUE:
        return round(number % 1 * (_SIXTHS << _HUE_BITS))
    return round(number * (1 << _FACTOR_BITS)) if kind == PILLOW_SATURATION else number


# --- the same as the extension, by numpy: of red, green and blue ----------------------------------


def _saturated(pixels: Pixels, factor: float) -> npt.NDArray[np.float32]:
    grey = ((pixels * _GREY_WEIGHTS).sum(axis=2, keepdims=True, dtype=np.int32) + (1 << 14)) >> 15
    rest = grey.astype(np.float32) * np.float32(1 - factor)
    mixed = pixels.astype(np.float64) * float(np.float32(factor)) + rest  # its products are exact
    return np.asarray(np.clip(np.rint(mixed.astype(np.float32)), 0, 255))


def _saturated_as_pillow(pixels: Pixels, parts: float) -> npt.NDArray[np.int32]:
    grey = ((pixels * _PILLOW_GREY_WEIGHTS).sum(axis=2, keepdims=True, dtype=np.int32) + (1 << 15)) >> 16
    one, half = 1 << _FACTOR_BITS, 1 << _FACTOR_BITS - 1
    return np.asarray(np.clip((pixels * np.int32(parts) + (one - int(parts)) * grey + half) >> _FACTOR_BITS, 0, 255))


def _shifted(pixels: Pixels, by: float) -> npt.NDArray[np.int32]:
    """Hue in whole numbers: sixths of the circle, times the chroma."""
    shift = int(by)
    red, green, blue = (pixels[:, :, channel].astype(np.int32) for channel in range(COLOR_CHANNELS))
    most = np.maximum(np.maximum(red, green), blue)
    chroma = most - np.minimum(np.minimum(red, green), blue)
    hue = np.where(
        most == red, green - blue, np.where(most == green, 2 * chroma + blue - red, 4 * chroma + red - green)
    )
    hue = (hue << _HUE_BITS) + shift * chroma
    full = chroma << _HUE_BITS
    made = np.empty(pixels.shape, np.int32)
    for channel, sixths in enumerate((5, 3, 1)):
        place = (hue + sixths * full) % np.maximum(_SIXTHS * full, 1)
        off = np.clip(np.minimum(place, 4 * full - place), 0, full)
        made[:, :, channel] = ((most << _HUE_BITS) - off + (1 << _HUE_BITS - 1)) >> _HUE_BITS
    return made


_BY_NUMPY: Mapping[int, Callable[[Pixels, float], npt.NDArray[np.int32] | npt.NDArray[np.float32]]] = {
    SATURATION: _saturated,
    HUE: _shifted,
    PILLOW_SATURATION: _saturated_as_pillow,
}
