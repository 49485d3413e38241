"""Images rotated by an angle, the same on every machine: all arithmetic is in whole numbers. Worker process.

For each new pixel, where its centre comes from, in 1/2**32 of a pixel: the pixel that lies there
("nearest"), or between the four around it ("linear", at 1/2048 of a pixel), ``fill`` counting as
pixels outside. The extension ``_pixels`` does it; where it was not built, numpy makes the same
bytes in ten times the time. cv2 is not asked: what its ``warpAffine`` makes depends on its version
and on the processor, and so may the last bit of a sine on the C library.
"""

import math

import numpy as np
import numpy.typing as npt

from batchd.pipeline.image import resample
from batchd.pipeline.image.geometry import Warp
from batchd.pipeline.image.vision import Pixels

if resample.IS_BUILT:
    from batchd.pipeline import _pixels

_PLACE_BITS = 32
_FRACTION_BITS = 11
_CHANNELS_MAX = 4
_QUARTER_DEGREES = 90
_TERMS = 9
_FRAME = 2
"""Pixels of fill on each side that are all that outside is."""

Origin = tuple[int, int, int]
"""Where new pixels come from, along one side: factors of x, y and 1, in 1/2**32 of a pixel."""


def warp(pixels: Pixels, move: Warp, into: Pixels) -> None:
    """Rotate ``pixels`` as ``move`` says, into ``into`` of the same size."""
    fill = bytes(move.fill * _CHANNELS_MAX if len(move.fill) == 1 else move.fill).ljust(_CHANNELS_MAX, b"\0")
    is_linear = move.interpolation == "linear"
    across, down = origins(move)
    if resample.IS_BUILT:
        _pixels.warp(resample.side_by_side(pixels), into, across, down, is_linear, fill)
    else:
        _warp(pixels, into, (across, down), fill, is_linear=is_linear)


def origins(move: Warp) -> tuple[Origin, Origin]:
    """Where the columns and the rows of the new pixels come from, in coordinates in which a pixel's centre is a whole number.

    For "nearest" half a pixel further on, so that the whole part is the pixel, see ``Mirrored`` for
    the places between two; for "linear" half of the last bit of the fraction.
    """
    half = 1 << _PLACE_BITS - 1
    sine, cosine = (
        round(number * half) for number in sine_and_cosine(move.degrees)
    )  # of half a pixel, so of one below
    x, y = move.width - 1, move.height - 1  # twice the middle
    to_x, to_y = x * half - cosine * x + sine * y, y * half - sine * x - cosine * y
    if move.interpolation == "nearest":
        upside_down, right_to_left = move.mirrored
        to_x, to_y = to_x + half - right_to_left, to_y + half - upside_down
    else:
        to_x, to_y = to_x + (half >> _FRACTION_BITS), to_y + (half >> _FRACTION_BITS)
    return (2 * cosine, -2 * sine, to_x), (2 * sine, 2 * cosine, to_y)


def sine_and_cosine(degrees: float) -> tuple[float, float]:
    """Sine and cosine, by sums and products alone: the same on every machine, within 2**-52."""
    quarters = round(degrees / _QUARTER_DEGREES)
    angle = (degrees - quarters * _QUARTER_DEGREES) * (math.pi / 180)
    square = angle * angle
    sine = cosine = 0.0
    for term in range(2 * _TERMS, 0, -2):  # Horner's rule
        sine = -(1 + sine) * square / (term * (term + 1))
        cosine = -(1 + cosine) * square / (term * (term - 1))
    sine, cosine = angle + angle * sine, 1 + cosine
    for _ in range(quarters % 4):
        sine, cosine = cosine, -sine
    return sine, cosine


def _warp(pixels: Pixels, into: Pixels, origin: tuple[Origin, Origin], fill: bytes, *, is_linear: bool) -> None:
    """What the extension does, by numpy."""
    height, width, channels = pixels.shape
    framed = np.empty((height + 2 * _FRAME, width + 2 * _FRAME, channels), np.uint8)
    framed[...] = np.frombuffer(fill, np.uint8)[:channels]
    framed[_FRAME:-_FRAME, _FRAME:-_FRAME] = pixels
    rows, columns = np.ogrid[: into.shape[0], : into.shape[1]]
    across, down = (by_x * columns + by_y * rows + by_one for by_x, by_y, by_one in origin)
    row_bytes = width + 2 * _FRAME
    place = np.clip(down >> _PLACE_BITS, -_FRAME, height) + _FRAME
    place *= row_bytes
    place += np.clip(across >> _PLACE_BITS, -_FRAME, width) + _FRAME
    flat = framed.reshape(-1, channels)
    if not is_linear:
        np.take(flat, place, axis=0, out=into, mode="clip")
        return
    one = 1 << _FRACTION_BITS
    right, lower = (_fraction(positions) for positions in (across, down))
    upper = flat[place] * (one - right) + flat[place + 1] * right
    place += row_bytes
    under = flat[place] * (one - right) + flat[place + 1] * right
    into[...] = ((one - lower) * upper + lower * under + (1 << 2 * _FRACTION_BITS - 1)) >> 2 * _FRACTION_BITS


def _fraction(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    fraction = positions >> _PLACE_BITS - _FRACTION_BITS & (1 << _FRACTION_BITS) - 1
    return fraction.astype(np.int32)[:, :, np.newaxis]
