"""The moves and the turn of a plan, done to pixels, the same on every machine. Worker process.

    cut      a view, nothing is copied
    scale    see ``image.stages`` for the conventions of each interpolation
    pad      copies the image into its frame
    warp     rotated by an angle; within 1 of the same in float64
    turn     transposed first, then flipped; a flip right after a scaling is made by it

Everything but a cut writes into memory that it is given or that is used again for the next sample.
Every cv2 call with a destination is checked to have written there.

Scale and warp compute in whole numbers. The extension ``_pixels`` does it; where it was not built,
numpy makes the same bytes in ten times the time or more. cv2 is not used: the results of its
``resize`` and ``warpAffine`` depend on its version, on IPP, and on the processor (on ARM "linear"
and "area" are different from x86), and the last bit of a sine may depend on the C library.

Another size: each new pixel is a weighted sum of source pixels, first of each column, then of each
row. The weights are whole numbers that add up to a power of two, made of the sizes alone.

An angle: for each new pixel, the place that its centre is from, in 1/2**32 of a pixel: the pixel at
that place ("nearest"), or between the four around it ("linear", at 1/2048 of a pixel), with
``fill`` as the pixels outside.

Invariant: no sum leaves 32 bits. Weights of one pixel: 15 bits each, whose magnitudes add up to 1.4
* 2**22 at most (``cubic``, else 2**22), times 8 bits; between the sides 7 bits behind the point are
kept, less where the second side's weights need them.
"""

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.image import geometry
from batchd.data.pipeline.image.opencv import Pixels, Scratch, cv2, written
from batchd.data.pipeline.image.options import Fill
from batchd.data.pipeline.options import Interpolation
from batchd.data.samples.values import Canvas
from batchd_wire.views import Array

try:
    from batchd.data.pipeline import _pixels
except ImportError:  # not built
    IS_BUILT = False
else:
    IS_BUILT = True

AREA_FROM_REDUCTION: Final = 2
""""auto" is "area" where source / target of a side, in pixels, is this or more, else "linear"."""

SCALED: Final = frozenset({"linear", "area"})
"""The methods whose weights the extension makes, too."""

_CHANNELS_MAX = 4
_FLIP_CODES = {(True, False): 0, (False, True): 1, (True, True): -1}


def cut_out(pixels: Pixels, box: geometry.Cut) -> Pixels:
    """The box of ``pixels`` as a view: uint8 ``[box.height, box.width, channels]``."""
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


class Scaling(NamedTuple):
    """The moves of a decoded box as one call: resample it into ``target``, and flip it there."""

    target: Pixels
    is_area: bool
    is_upside_down: bool
    is_mirrored: bool


def plan_scaling(
    decoding: geometry.DecodePlan, turn: geometry.Orientation, channels: int, scratch: Scratch, out: Pixels | None
) -> Scaling | None:
    """Plan the moves of a box as one call of the extension; None if it takes more."""
    _factor, box, moves = decoding
    if not IS_BUILT or turn.transpose or len(moves) > 1:
        return None
    if not moves:
        return Scaling(out, False, False, False) if out is not None and turn == geometry.UPRIGHT else None
    move = moves[0]
    if not isinstance(move, geometry.Resampling):
        return None
    method = _method(box.height, box.width, move)
    if method not in SCALED:
        return None
    target = scratch.image(0, (move.height, move.width, channels)) if out is None else out
    return Scaling(target, method == "area", turn.vertical, turn.horizontal)


def make_moves(
    pixels: Pixels, moves: Sequence[geometry.Move], turn: geometry.Orientation, scratch: Scratch, out: Pixels | None
) -> Pixels:
    """Make the moves, then the turn; the last one, but no cut, writes into ``out``, if given.

    ``pixels`` and the result: uint8 ``[height, width, channels]``, each of its own size.
    """
    last = len(moves) - 1
    for place, move in enumerate(moves):
        if isinstance(move, geometry.Cut):
            pixels = cut_out(pixels, move)
            continue
        is_last = place == last and not turn.transpose
        into = out if out is not None and is_last else scratch.image(place, (move.height, move.width, pixels.shape[2]))
        if isinstance(move, geometry.Resampling):
            method = _method(pixels.shape[0], pixels.shape[1], move)
            then = turn if is_last else geometry.UPRIGHT
            resample(pixels, into, method, move.mirrored, then, transposed=move.transposed)
            if is_last:
                return into
        elif isinstance(move, geometry.Padding):
            _pad(pixels, move, into)
        else:
            warp(pixels, move, into)
        pixels = into
    return turned(pixels, turn, scratch, out)


def turned(
    pixels: Pixels, turn: geometry.Orientation, scratch: Scratch, into: Pixels | None, place: Hashable = "turned"
) -> Pixels:
    """Turn an image, uint8 ``[height, width, channels]``.

    ``into`` may be ``pixels`` itself if nothing is transposed.
    """
    if turn == geometry.UPRIGHT:
        return pixels
    height, width, channels = pixels.shape
    if into is None:
        into = scratch.image(place, (width, height, channels) if turn.transpose else (height, width, channels))
    if turn.transpose:
        written(cv2.transpose(pixels, dst=into), into)
        pixels = into  # still in the processor's cache, where a flip takes no time
    code = _FLIP_CODES.get((turn.vertical, turn.horizontal))
    if code is not None:
        written(cv2.flip(pixels, code, dst=into), into)
    return into


def _method(height: int, width: int, move: geometry.Resampling) -> Interpolation:
    """The method of a move of ``height`` x ``width`` pixels: never "auto"."""
    if move.interpolation != "auto":
        return move.interpolation
    shrinks = height >= AREA_FROM_REDUCTION * move.height or width >= AREA_FROM_REDUCTION * move.width
    return "area" if shrinks else "linear"


def _pad(pixels: Pixels, move: geometry.Padding, into: Pixels) -> None:
    height, width = pixels.shape[:2]
    if pixels.size == 0:
        into[...] = move.fill
        return
    below, right = move.height - move.top - height, move.width - move.left - width
    fill = move.fill * _CHANNELS_MAX if len(move.fill) == 1 else move.fill
    around = move.top, below, move.left, right
    written(cv2.copyMakeBorder(pixels, *around, cv2.BORDER_CONSTANT, dst=into, value=fill), into)


_WEIGHT_BITS = 14
_SHIFT_MAX = 22
"""8 bits of a pixel and so many of the weights' sum are what 31 bits hold, with some room for what
"cubic" overshoots."""
_KEPT_BITS = 7
_BITS_BEHIND_THE_PIXEL = 23
_PORTION_NUMBERS = 40_000
_CACHED_SIDES = 1024
"""A random crop has as many sizes as a side has pixels; weights take as long as their use."""
_CUBIC = -0.75
_LOBES = 3
_LANCZOS_SHIFT_MAX, _LANCZOS_BITS = 18, 22
"""Magnitudes of weights add up to 1.6 times their sum: 22 bits of it, times 8 bits, fit into 31."""

Places = npt.NDArray[np.int32]
Weights = npt.NDArray[np.int16]
Number = TypeVar("Number", float, npt.NDArray[np.float64])


class Taps(NamedTuple):
    """``first`` source pixel of each new one, int32 [n]; its ``weights``, int16 [n, count]."""

    first: Places
    weights: Weights
    shift: int
    """The weights of each new pixel add up to ``1 << shift``."""


def resample(  # noqa: PLR0913  each is one thing that is known of the move
    pixels: Pixels,
    into: Pixels,
    method: Interpolation,
    mirrored: geometry.Mirrored = (False, False),
    turn: geometry.Orientation = geometry.UPRIGHT,
    *,
    transposed: bool = False,
) -> None:
    """Resample an image, uint8 [height, width, channels], into one of another size, flipped."""
    assert method != "auto", "a method that was chosen"
    assert not turn.transpose, "a flip at most"
    if pixels.shape == into.shape:
        if turn == geometry.UPRIGHT:
            into[...] = pixels
        else:
            written(cv2.flip(pixels, _FLIP_CODES[turn.vertical, turn.horizontal], dst=into), into)
        return
    if IS_BUILT and method in SCALED:
        _pixels.scale(side_by_side(pixels), into, method == "area", turn.vertical, turn.horizontal)
        return
    if not IS_BUILT:
        into = into[:: -1 if turn.vertical else 1, :: -1 if turn.horizontal else 1]
    height, width, _ = pixels.shape
    if method == "nearest" and not IS_BUILT:
        rows = nearest(height, into.shape[0], is_mirrored=mirrored[0])
        columns = nearest(width, into.shape[1], is_mirrored=mirrored[1])
        np.take(pixels[rows], columns, axis=1, out=into, mode="clip")
        return
    if method == "lanczos":
        _resample_lanczos(pixels, into, turn, columns_first=transposed)
        return
    down = taps(height, into.shape[0], method, is_mirrored=mirrored[0])
    across = taps(width, into.shape[1], method, is_mirrored=mirrored[1])
    kept_bits = min(_KEPT_BITS - (method == "cubic"), _BITS_BEHIND_THE_PIXEL - across.shift)
    weigh(pixels, into, down, across, kept_bits, turn)


def weigh(  # noqa: PLR0913, PLR0917  each is one thing that the extension takes
    pixels: Pixels,
    into: Pixels,
    down: Taps,
    across: Taps,
    kept_bits: int,
    turn: geometry.Orientation = geometry.UPRIGHT,
) -> None:
    """Make each new pixel of an image the weighted sum of pixels: along columns, then rows.

    ``kept_bits``: of the sums, behind the point. Without the extension, ``into`` is flipped.
    """
    if IS_BUILT:
        _pixels.resample(side_by_side(pixels), into, down, across, kept_bits, turn.vertical, turn.horizontal)
    else:
        _resample(pixels, into, down, across, kept_bits)


@lru_cache(maxsize=_CACHED_SIDES)
def taps(source: int, target: int, method: str, *, is_mirrored: bool = False) -> Taps:
    """What ``target`` pixels along a side of ``source`` pixels are made of."""
    if method == "nearest":
        first = nearest(source, target, is_mirrored=is_mirrored)
        return Taps(first.astype(np.int32), np.full((target, 1), 1 << _WEIGHT_BITS, np.int16), _WEIGHT_BITS)
    return _MAKERS[method](source, target)


def nearest(source: int, target: int, *, is_mirrored: bool = False) -> npt.NDArray[np.intp]:
    """The source pixel at the centre of each target pixel, [target]; see ``Mirrored`` for edges."""
    places = (2 * np.arange(target) + 1) * source // (2 * target)
    return source - 1 - places[::-1] if is_mirrored else places


def _area_taps(source: int, target: int) -> Taps:
    """Make each new pixel the mean of the area it covers, in units of 1/``target`` of a pixel."""
    count = min(source, -(-source // target) + (source % target > 0))
    begin = np.arange(target)[:, np.newaxis] * source
    first = np.minimum(begin // target, source - count)
    pixels = (first + np.arange(count)) * target
    shares = np.clip(np.minimum(begin + source, pixels + target) - np.maximum(begin, pixels), 0, None)
    shift = min(_SHIFT_MAX, _WEIGHT_BITS + max(0, (source // target).bit_length() - 1))
    # so that the weights add up
    sums = ((np.cumsum(shares, axis=1) << shift) + source // 2) // source
    return Taps(first[:, 0].astype(np.int32), np.diff(sums, axis=1, prepend=0).astype(np.int16), shift)


def _centres(source: int, target: int) -> npt.NDArray[np.intp]:
    """Return the centres of new pixels from that of the first, in 1 / (2 * ``target``) pixels."""
    return (2 * np.arange(target) + 1) * source - target


def _linear_taps(source: int, target: int) -> Taps:
    """Mix the two pixels around each new centre; outside of the outermost centres, use those."""
    centre = np.clip(_centres(source, target), 0, (source - 1) * 2 * target)
    first = np.clip(centre // (2 * target), 0, max(0, source - 2))
    second = ((centre - first * 2 * target << _WEIGHT_BITS) + target) // (2 * target)
    weights = np.stack([(1 << _WEIGHT_BITS) - second, second][: min(2, source)], axis=1)
    return Taps(first.astype(np.int32), weights.astype(np.int16), _WEIGHT_BITS)


def _cubic_taps(source: int, target: int) -> Taps:
    """Mix four pixels around each new centre; outside of the image, use the pixel at the edge."""
    centre = _centres(source, target)
    kernel = _cubic(centre % (2 * target) / (2 * target))
    places = (centre // (2 * target))[:, np.newaxis] + np.arange(-1, 3)
    count = min(4, source)
    first = np.clip(places[:, 0], 0, source - count)
    weights = np.zeros((target, count), np.int16)
    inside = np.clip(places, 0, source - 1) - first[:, np.newaxis]
    for tap in range(4):
        weights[np.arange(target), inside[:, tap]] += kernel[:, tap]
    return Taps(first.astype(np.int32), weights, _WEIGHT_BITS)


def _cubic(near: npt.NDArray[np.float64]) -> Weights:
    """Cubic convolution: float64 sums, products and one quotient, the same everywhere."""
    far = 1 - near

    def within(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1

    def beyond(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC

    exact = np.stack([beyond(1 + near), within(near), within(far), beyond(1 + far)], axis=1)
    rounded = np.rint(exact * (1 << _WEIGHT_BITS)).astype(np.int16)
    nearer = np.where(near < far, 1, 2)
    rounded[np.arange(len(near)), nearer] += ((1 << _WEIGHT_BITS) - rounded.sum(axis=1)).astype(np.int16)
    return rounded


def _lanczos_taps(source: int, target: int) -> Taps:
    """Mix the pixels below a Lanczos window of three lobes, which is as wide as it must be.

    Pillow's ``precompute_coeffs``: the window covers three source pixels on each side of a new
    centre, or three new pixels if those are larger.
    """
    scale = source / target
    wide = max(1.0, scale)
    centre = (np.arange(target) + 0.5) * scale
    begin = np.maximum(np.floor(centre - _LOBES * wide + 0.5), 0).astype(np.intp)
    end = np.minimum(np.floor(centre + _LOBES * wide + 0.5), source).astype(np.intp)
    count = int((end - begin).max())
    first = np.minimum(begin, source - count)
    pixels = first[:, np.newaxis] + np.arange(count)
    place = (pixels - centre[:, np.newaxis] + 0.5) / wide
    exact = np.where(np.abs(place) < _LOBES, _sinc(place) * _sinc(place / _LOBES), 0.0)
    exact[(pixels < begin[:, np.newaxis]) | (pixels >= end[:, np.newaxis])] = 0
    sums = np.cumsum(exact, axis=1)
    shift = min(_LANCZOS_SHIFT_MAX, _WEIGHT_BITS + max(0, (source // target).bit_length() - 1))
    # so that the weights add up
    rounded = np.rint(sums / sums[:, -1:] * (1 << shift)).astype(np.int64)
    return Taps(first.astype(np.int32), np.diff(rounded, axis=1, prepend=0).astype(np.int16), shift)


def _sinc(place: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``sin(pi x) / (pi x)``: float64 sums and products, the same everywhere."""
    half_turns = np.rint(place)
    sine = _small_sine((place - half_turns) * math.pi) * np.where(half_turns % 2, -1.0, 1.0)
    return np.divide(sine, place * math.pi, out=np.ones_like(place), where=place != 0)


def _resample_lanczos(pixels: Pixels, into: Pixels, turn: geometry.Orientation, *, columns_first: bool) -> None:
    """Resample rows, then columns, as Pillow does: 8 bits between them, cut off at 0 and 255.

    Of a window that overshoots, that is no small difference: a sum of both sides at once is up to
    60 levels away, where black and white meet.
    """
    height, width, channels = pixels.shape
    new_height, new_width = into.shape[:2]
    down, across = taps(height, new_height, "lanczos"), taps(width, new_width, "lanczos")
    size = (new_height, width) if columns_first else (height, new_width)
    middle = np.empty((*size, channels), np.uint8)
    same_down, same_across = (taps(side, side, "nearest") for side in size)
    kept_across = min(_KEPT_BITS, _LANCZOS_BITS - across.shift)
    if columns_first:
        weigh(pixels, middle, down, same_across, _KEPT_BITS - 1)
        weigh(middle, into, same_down, across, kept_across, turn)
    else:
        weigh(pixels, middle, same_down, across, kept_across)
        weigh(middle, into, down, same_across, _KEPT_BITS - 1, turn)


_MAKERS = {"linear": _linear_taps, "area": _area_taps, "cubic": _cubic_taps, "lanczos": _lanczos_taps}


def side_by_side(pixels: Pixels) -> Pixels:
    """Return the image, uint8 ``[height, width, channels]``, with contiguous pixels in each row.

    Rows may have any distance.
    """
    _, column, channel = pixels.strides
    return pixels if (column, channel) == (pixels.shape[2], 1) else np.ascontiguousarray(pixels)


def _resample(pixels: Pixels, into: Pixels, down: Taps, across: Taps, kept_bits: int) -> None:
    """The same as the extension, by numpy, in portions that stay in the processor's cache."""
    step = max(1, _PORTION_NUMBERS // pixels[0].size)
    for start in range(0, len(into), step):
        portion = Taps(down.first[start : start + step], down.weights[start : start + step], down.shift)
        kept = _weighted(pixels, portion, down.shift - kept_bits)
        made = _weighted(np.ascontiguousarray(kept.transpose(1, 0, 2)), across, across.shift + kept_bits)
        np.clip(made.transpose(1, 0, 2), 0, 255, out=into[start : start + step], casting="unsafe")


def _weighted(values: Array, taps: Taps, shift: int) -> npt.NDArray[np.int32]:
    """The weighted sums of rows, divided by ``1 << shift`` and rounded."""
    sums = np.full((len(taps.first), *values.shape[1:]), 1 << shift >> 1, np.int32)
    for tap in range(taps.weights.shape[1]):
        part = values[taps.first + tap].astype(np.int32, copy=False)  # indexing has copied
        part *= taps.weights[:, tap, np.newaxis, np.newaxis]
        sums += part
    sums >>= shift
    return sums


_PLACE_BITS = 32
_FRACTION_BITS = 11
_QUARTER_DEGREES = 90
_TERMS = 9
_FRAME = 2
"""Pixels of fill on each side that are all that outside is."""

Origin = tuple[int, int, int]
"""Origins of new pixels along one side: factors of x, y and 1, in 1/2**32 of a pixel."""


def warp(pixels: Pixels, move: geometry.Warp, into: Pixels) -> None:
    """Rotate ``pixels`` as ``move`` says, into ``into``.

    Both are uint8 ``[height, width, channels]``, of the same shape.
    """
    warp_from(pixels, into, origins(move), move.fill, is_linear=move.interpolation == "linear")


def warp_from(
    pixels: Pixels | Canvas, into: Pixels, origin: tuple[Origin, Origin], fill: Fill, *, is_linear: bool
) -> None:
    """Make each new pixel that of its origin, which is rounded as ``origins`` says."""
    if isinstance(pixels, Canvas):
        parts = tuple((side_by_side(part), top, left) for part, top, left in pixels.parts)
        ground = fill_bytes(pixels.ground)
        if (
            IS_BUILT
            and is_linear
            and _pixels.warp_parts(parts, pixels.shape[:2], ground, into, *origin, fill_bytes(fill))
        ):
            return
        pixels = pixels.whole()
    if IS_BUILT:
        _pixels.warp(side_by_side(pixels), into, *origin, is_linear, fill_bytes(fill))
    else:
        _warp(pixels, into, origin, fill_bytes(fill), is_linear=is_linear)


def fill_bytes(fill: Fill) -> bytes:
    """A colour as the extension takes it."""
    return bytes(fill * _CHANNELS_MAX if len(fill) == 1 else fill).ljust(_CHANNELS_MAX, b"\0")


def origins(move: geometry.Warp) -> tuple[Origin, Origin]:
    """Return the origins of the new columns and rows; centres of pixels are whole numbers.

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
    cosine = 0.0
    for term in range(2 * _TERMS, 0, -2):
        cosine = -(1 + cosine) * square / (term * (term - 1))
    sine, cosine = _small_sine(angle), 1 + cosine
    for _ in range(quarters % 4):
        sine, cosine = cosine, -sine
    return sine, cosine


def _small_sine(angle: Number) -> Number:
    """Sine of an angle of up to a quarter turn, in radians: Taylor's series by Horner's rule."""
    square = angle * angle
    sine = 0 * angle
    for term in range(2 * _TERMS, 0, -2):
        sine = -(1 + sine) * square / (term * (term + 1))
    return angle + angle * sine


def remap(pixels: Pixels, into: Pixels, places: npt.NDArray[np.int32], fill: Fill, *, is_linear: bool) -> None:
    """Make each new pixel that of a place: ``places``, int32 ``[height, width, 2]``, x and y.

    In 1/2048 of a pixel, of whose centres are whole numbers; the pixel at the place, or between
    the four around it, with ``fill`` outside of the image. ``into`` may have another size.
    """
    if not is_linear:
        places = places + np.int32(1 << _FRACTION_BITS - 1)
    if IS_BUILT:
        _pixels.remap(side_by_side(pixels), into, places, is_linear, fill_bytes(fill))
        return
    shift = _PLACE_BITS - _FRACTION_BITS
    across, down = (places[:, :, side].astype(np.int64) << shift for side in range(2))
    _take(pixels, into, across, down, fill_bytes(fill), is_linear=is_linear)


def _warp(pixels: Pixels, into: Pixels, origin: tuple[Origin, Origin], fill: bytes, *, is_linear: bool) -> None:
    """What the extension does, by numpy."""
    rows, columns = np.ogrid[: into.shape[0], : into.shape[1]]
    across, down = (by_x * columns + by_y * rows + by_one for by_x, by_y, by_one in origin)
    _take(pixels, into, across, down, fill, is_linear=is_linear)


def _take(  # noqa: PLR0913  each is one thing that the extension takes
    pixels: Pixels,
    into: Pixels,
    across: npt.NDArray[np.int64],
    down: npt.NDArray[np.int64],
    fill: bytes,
    *,
    is_linear: bool,
) -> None:
    height, width, channels = pixels.shape
    framed = np.empty((height + 2 * _FRAME, width + 2 * _FRAME, channels), np.uint8)
    framed[...] = np.frombuffer(fill, np.uint8)[:channels]
    framed[_FRAME:-_FRAME, _FRAME:-_FRAME] = pixels
    row_bytes = width + 2 * _FRAME
    place = np.clip(down >> _PLACE_BITS, -_FRAME, height) + _FRAME
    place *= row_bytes
    place += np.clip(across >> _PLACE_BITS, -_FRAME, width) + _FRAME
    flat = framed.reshape(-1, channels)
    if not is_linear:
        np.take(flat, place, axis=0, out=into, mode="clip")
        return
    one = 1 << _FRACTION_BITS
    fractions = (positions >> _PLACE_BITS - _FRACTION_BITS & one - 1 for positions in (across, down))
    right, lower = (fraction.astype(np.int32)[:, :, np.newaxis] for fraction in fractions)
    upper = flat[place] * (one - right) + flat[place + 1] * right
    place += row_bytes
    under = flat[place] * (one - right) + flat[place + 1] * right
    into[...] = ((one - lower) * upper + lower * under + (1 << 2 * _FRACTION_BITS - 1)) >> 2 * _FRACTION_BITS
