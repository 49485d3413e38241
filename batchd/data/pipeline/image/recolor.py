"""The steps that change the values of pixels, on an upright image of 8 bits. Worker process.

Each works in place, except "gray" where it changes the number of channels. All rounding is to the
nearest of 0 to 255; the errors given are those before rounding:

    brightness  f * pixel                     exact, halves to even
    contrast    f * pixel + (1 - f) * mean    exact, halves to even; float64 mean of the grey levels
    saturation  f * pixel + (1 - f) * grey    by cv2 in float32: within 0.001
    hue         in HSV, in whole numbers      within 0.002
    grey        0.299 red + 0.587 green + 0.114 blue, by cv2 in fixed point: within 0.005

Invariant: each draws the same number of random numbers for every image, whatever it draws, and
whether it then acts or not.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, singledispatch
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
_LEVELS = np.arange(256, dtype=np.float64)


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


class Colors:
    """The changes by a factor, in place; of pixels ``[height, width, channels]``."""

    def __init__(self, scratch: Scratch, *, is_bgr: bool) -> None:
        self._scratch = scratch
        self._grey = _Grey(scratch, is_bgr=is_bgr)

    def brighten(self, pixels: Pixels, factor: float) -> None:
        """Mix with black."""
        _look_up(pixels, factor * _LEVELS)

    def contrast(self, pixels: Pixels, factor: float) -> None:
        """Mix with the mean grey level."""
        mean = float(self._grey.of(pixels).mean(dtype=np.float64))
        _look_up(pixels, factor * _LEVELS + (1 - factor) * mean)

    def saturate(self, pixels: Pixels, factor: float) -> None:
        """Mix with the pixel's own grey level."""
        if pixels.shape[2] == COLOR_CHANNELS:
            grey = self._grey.colored(pixels, self._scratch.image("colored", pixels.shape))
            written(cv2.addWeighted(pixels, factor, grey, 1 - factor, 0, dst=pixels), pixels)


@recolor_for.register(ColorJitter)
class _Jitter:
    """Make the four changes in a random order; one without strength draws no number."""

    def __init__(self, step: ColorJitter, scratch: Scratch, *, is_bgr: bool) -> None:
        colors = Colors(scratch, is_bgr=is_bgr)
        strengths = (
            (colors.brighten, step.brightness),
            (colors.contrast, step.contrast),
            (colors.saturate, step.saturation),
        )
        self._changes: list[tuple[Callable[[Pixels, float], None], float, float]]
        self._changes = [(change, max(0.0, 1 - strength), 1 + strength) for change, strength in strengths if strength]
        if step.hue:
            self._changes.append((partial(shift_hue, is_bgr=is_bgr), -step.hue, step.hue))
        names = ("brightness", "contrast", "saturation", "hue")
        self._names = [name for name in names if getattr(step, name)]
        self._orders = list(permutations(range(len(self._changes))))

    def __call__(self, random: RandomNumber, _shape: tuple[int, ...]) -> Change:
        order = self._orders[int(len(self._orders) * random())]
        drawn = [low + (high - low) * random() for _change, low, high in self._changes]

        def jitter(pixels: Pixels, _out: Pixels | None) -> Pixels:
            for place in order:
                self._changes[place][0](pixels, drawn[place])
            return pixels

        return Change(jitter, {self._names[place]: drawn[place] for place in order})


def shift_hue(pixels: Pixels, turns: float, *, is_bgr: bool) -> None:
    """Shift hues (HSV) by rounds of the circle, in whole numbers: its sixths, times the chroma.

    ``pixels``: uint8 ``[height, width, channels]``, changed in place.
    """
    if pixels.shape[2] != COLOR_CHANNELS:
        return
    shift = round(turns % 1 * (_SIXTHS << _HUE_BITS))
    if resample.IS_BUILT:
        _pixels.shift_hue(pixels, shift, is_bgr)
    else:
        pixels[...] = _shifted(pixels[:, :, ::-1], shift)[:, :, ::-1] if is_bgr else _shifted(pixels, shift)


def _shifted(pixels: Pixels, shift: int) -> npt.NDArray[np.int32]:
    """The same as the extension, by numpy."""
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


def _look_up(pixels: Pixels, levels: npt.NDArray[np.floating]) -> None:
    """Replace each pixel by what ``levels`` has for it, rounded."""
    table = np.clip(np.rint(levels), 0, 255).astype(np.uint8)
    written(cv2.LUT(pixels, table, dst=pixels), pixels)
