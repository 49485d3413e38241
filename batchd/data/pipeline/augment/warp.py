"""The steps that move pixels anywhere, on an upright image of 8 bits. Worker process.

    affine       x = a X + b Y + c, y = d X + e Y + f, in 1/2**32 of a pixel
    perspective  the same divided by g X + h Y + 1, in float64, rounded once to 1/2048 of a pixel
    elastic      X and Y plus smooth noise, in float64, rounded once to 1/2048 of a pixel

(X, Y) is the centre of a new pixel, and (x, y) its place in the image. Float64 is divided, added
and multiplied in one order, and no function of a C library is called, so places are the same
everywhere. ``image.resample`` makes pixels of places.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.augment import options
from batchd.data.pipeline.augment.exact import KEY_BITS, gaussian_weights, random_words
from batchd.data.pipeline.augment.tone import drawn, room_beside
from batchd.data.pipeline.image import resample
from batchd.data.pipeline.image.geometry import WARPED_SIDE_PIXELS_MAX, Motion, RandomNumber
from batchd.data.pipeline.image.opencv import Pixels, Scratch
from batchd.data.pipeline.image.options import Fill
from batchd.data.pipeline.image.recolor import Change, Recolor, recolor_for
from batchd.data.pipeline.options import Size
from batchd.data.samples.errors import SampleUndecodable

Coordinates: TypeAlias = npt.NDArray[np.float64]
Places: TypeAlias = npt.NDArray[np.int32]
Matrix: TypeAlias = tuple[float, float, float, float, float, float]
"""a, b, c, d, e, f of x = a X + b Y + c and y = d X + e Y + f."""
_PLACE_BITS: Final = 32
_FRACTION_BITS: Final = 11
_FAR: Final = float(1 << 18)
"""A distance in pixels beyond which all is outside; places stay within 32 bits."""
_INVERSE_ROUNDS: Final = 8
_PORTION_PIXELS: Final = 1 << 14
"""So many stay in the processor's cache while their places are computed."""
ELASTIC_PIXELS_MAX: Final = 1 << 24
"""Noise is smoothed as a whole, in some 64 bytes for each pixel."""


def _size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width. Raises ``SampleUndecodable`` if places would need more bits."""
    height, width = shape[:2]
    if max(height, width) > WARPED_SIDE_PIXELS_MAX:
        raise SampleUndecodable(
            f"{width} x {height} pixels cannot be moved: sides of {WARPED_SIDE_PIXELS_MAX} pixels at most; "
            'a "resize" in front makes it fit'
        )
    return height, width


class AffineMotion(Motion):
    """A matrix from new places to old ones; the first pixel is from 0 to 1.

    ``size``: of the middle of the new image, if that is all to be made.
    """

    def __init__(self, shape: tuple[int, ...], matrix: Matrix, size: Size | None = None) -> None:
        whole = _size(shape)
        self.height, self.width = size or whole
        self._left, self._top = round((whole[1] - self.width) / 2), round((whole[0] - self.height) / 2)
        self._matrix = matrix

    def move(self, pixels: Pixels, into: Pixels, fill: Fill, *, is_linear: bool) -> Pixels:
        """Write the moved image into other memory."""
        one = 1 << _PLACE_BITS
        rounding = 1 << _PLACE_BITS - (_FRACTION_BITS + 1 if is_linear else 1)
        a, b, c, d, e, f = self._matrix
        across, down = (
            (round(by_x * one), round(by_y * one), round((by_one + (by_x + by_y - 1) / 2) * one) + rounding)
            for by_x, by_y, by_one in ((a, b, c), (d, e, f))
        )
        across, down = (
            (by_x, by_y, by_one + self._left * by_x + self._top * by_y) for by_x, by_y, by_one in (across, down)
        )
        resample.warp_from(pixels, into, (across, down), fill, is_linear=is_linear)
        return into

    def moved(self, points: Coordinates) -> Coordinates:
        """The points afterwards, by the inverse matrix."""
        a, b, c, d, e, f = self._matrix
        whole = a * e - b * d
        x, y = points[..., 0] - c, points[..., 1] - f
        return np.stack([(e * x - b * y) / whole - self._left, (a * y - d * x) / whole - self._top], axis=-1)

    def move_mask(self, mask: Pixels, into: Pixels, fill: Fill) -> None:
        """Take the nearest number."""
        self.move(mask, into, fill, is_linear=False)


class PlacedMotion(Motion):
    """A place for each new pixel, of some rows at a time, and a function that moves points."""

    def __init__(
        self, shape: tuple[int, ...], places: Callable[[slice], Places], moved: Callable[[Coordinates], Coordinates]
    ) -> None:
        self.height, self.width = _size(shape)
        self._places, self._moved = places, moved

    def move(self, pixels: Pixels, into: Pixels, fill: Fill, *, is_linear: bool) -> Pixels:
        """Write the moved image into other memory of the same shape."""
        step = max(1, _PORTION_PIXELS // self.width)
        for start in range(0, self.height, step):
            rows = slice(start, min(start + step, self.height))
            resample.remap(pixels, into[rows], self._places(rows), fill, is_linear=is_linear)
        return into

    def moved(self, points: Coordinates) -> Coordinates:
        """The points afterwards."""
        return self._moved(points)

    def move_mask(self, mask: Pixels, into: Pixels, fill: Fill) -> None:
        """Take the nearest number."""
        self.move(mask, into, fill, is_linear=False)


def change_of(motion: AffineMotion | PlacedMotion, step: options.WarpStep, scratch: Scratch, **drew: object) -> Change:
    """The change that a motion makes, as the step says."""

    def move(pixels: Pixels, out: Pixels | None) -> Pixels:
        into = room_beside(pixels, scratch, out, (motion.height, motion.width))
        return motion.move(pixels, into, step.fill, is_linear=step.interpolation == "linear")

    return Change(move, drew, (motion,))


# --- affine ---------------------------------------------------------------------------------------


def matrix_about_middle(  # noqa: PLR0913  each is one thing that is drawn
    shape: tuple[int, ...],
    *,
    degrees: float = 0.0,
    translate: tuple[int, int] = (0, 0),
    scale: float = 1.0,
    shear_x: float = 0.0,
    shear_y: float = 0.0,
) -> Matrix:
    """The matrix of torchvision's ``_get_inverse_affine_matrix``, for angles counter-clockwise."""
    sine, cosine = resample.sine_and_cosine(-degrees)
    slant_x, slant_y = (tangent(angle) for angle in (shear_x, shear_y))
    whole = 1 + slant_x * slant_y
    a, b = (whole * cosine - slant_x * sine) / scale, (whole * sine + slant_x * cosine) / scale
    d, e = (slant_y * cosine - sine) / scale, (slant_y * sine + cosine) / scale
    x, y = shape[1] / 2, shape[0] / 2
    from_x, from_y = x + translate[0], y + translate[1]
    return a, b, x - a * from_x - b * from_y, d, e, y - d * from_x - e * from_y


def tangent(degrees: float) -> float:
    """The tangent, the same everywhere."""
    sine, cosine = resample.sine_and_cosine(degrees)
    return sine / cosine


@recolor_for.register
def _affine(step: options.Affine, scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others use it
    def draw(random: RandomNumber, shape: tuple[int, ...]) -> Change:
        degrees = drawn(step.degrees, random)
        across, down = (
            round(drawn((-most * side, most * side), random))
            for most, side in zip(step.translate, (shape[1], shape[0]), strict=True)
        )
        scale, shear_x, shear_y = (drawn(ends, random) for ends in (step.scale, step.shear_x, step.shear_y))
        matrix = matrix_about_middle(
            shape, degrees=degrees, translate=(across, down), scale=scale, shear_x=shear_x, shear_y=shear_y
        )
        drew = {"degrees": degrees, "moved": (across, down), "scale": scale, "shear_x": shear_x, "shear_y": shear_y}
        return change_of(AffineMotion(shape, matrix, step.size), step, scratch, **drew)

    return draw


# --- perspective ----------------------------------------------------------------------------------

Corners: TypeAlias = list[tuple[int, int]]
"""x and y of the top left, top right, bottom right and bottom left one."""
Row: TypeAlias = tuple[float, float, float]
Homography: TypeAlias = tuple[Row, Row, Row]


def _to_corners(shape: tuple[int, ...], corners: Corners) -> Homography | None:
    """The matrix that moves the corners of an image to these; None if there is none.

    Heckbert, Fundamentals of Texture Mapping and Image Warping (1989), section 2.2.3.
    """
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = corners
    wide, high = shape[1] - 1, shape[0] - 1
    whole = (x1 - x2) * (y3 - y2) - (x3 - x2) * (y1 - y2)
    if not (whole and wide and high):
        return None
    sum_x, sum_y = x0 - x1 + x2 - x3, y0 - y1 + y2 - y3
    g = (sum_x * (y3 - y2) - (x3 - x2) * sum_y) / whole
    h = ((x1 - x2) * sum_y - sum_x * (y1 - y2)) / whole
    return (
        ((x1 - x0 + g * x1) / wide, (x3 - x0 + h * x3) / high, x0),
        ((y1 - y0 + g * y1) / wide, (y3 - y0 + h * y3) / high, y0),
        (g / wide, h / high, 1.0),
    )


def _inverse(matrix: Homography) -> Homography:
    """The inverse but for a factor, which a perspective does not have."""
    (a, b, c), (d, e, f), (g, h, i) = matrix
    return (
        (e * i - f * h, c * h - b * i, b * f - c * e),
        (f * g - d * i, a * i - c * g, c * d - a * f),
        (d * h - e * g, b * g - a * h, a * e - b * d),
    )


def _projected(matrix: Homography, x: Coordinates, y: Coordinates) -> tuple[Coordinates, Coordinates]:
    """Where a matrix moves points; very far away what lies behind the eye."""
    across, down, depth = (by_x * x + by_y * y + by_one for by_x, by_y, by_one in matrix)
    is_seen = depth > 0
    made = np.full((2, *depth.shape), _FAR, np.float64)
    for at, into in zip((across, down), made, strict=True):
        np.divide(at, depth, out=into, where=is_seen)
    return made[0], made[1]


def _centres(width: int, rows: slice) -> tuple[Coordinates, Coordinates]:
    y, x = np.ogrid[rows.start + 0.5 : rows.stop, 0.5:width]
    return x, y


def _rounded(x: Coordinates, y: Coordinates) -> Places:
    """Places of centres in 1/2048 of a pixel, whose own centres are whole numbers."""
    places = np.empty((*x.shape, 2), np.int32)
    for side, at in enumerate((x, y)):
        places[..., side] = np.rint((np.clip(at, -_FAR, _FAR) - 0.5) * (1 << _FRACTION_BITS))
    return places


def perspective_motion(shape: tuple[int, ...], corners: Corners) -> PlacedMotion | AffineMotion:
    """Move the corners of an image, the centres of its pixels there, to others."""
    forward = _to_corners(shape, corners)
    if forward is None:
        return AffineMotion(shape, (1.0, 0.0, 0.0, 0.0, 1.0, 0.0))
    backward = _inverse(forward)

    def moved(points: Coordinates) -> Coordinates:
        return np.stack(_projected(forward, points[..., 0], points[..., 1]), axis=-1)

    return PlacedMotion(shape, lambda rows: _rounded(*_projected(backward, *_centres(shape[1], rows))), moved)


@recolor_for.register
def _perspective(step: options.Perspective, scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others use it
    def draw(random: RandomNumber, shape: tuple[int, ...]) -> Change:
        high, wide = shape[:2]
        down, across = int(step.distortion * (high // 2)) + 1, int(step.distortion * (wide // 2)) + 1
        corners = []
        for is_right, is_low in ((0, 0), (1, 0), (1, 1), (0, 1)):
            x, y = (int(most * random()) for most in (across, down)) if step.varies else (0, 0)
            corners.append((wide - 1 - x if is_right else x, high - 1 - y if is_low else y))
        return change_of(perspective_motion(shape, corners), step, scratch, corners=corners)

    return draw


# --- elastic --------------------------------------------------------------------------------------


def smooth_noise(key: int, shape: tuple[int, ...], sigma: float) -> Coordinates:
    """Smooth noise by place, across and down: float64 [2, height, width], from -1 to 1."""
    words = random_words(key, 0, 0, shape[0], shape[1])
    noise = np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)]).astype(np.float64) / (1 << 31) - 1
    weights = gaussian_weights(sigma)
    for axis in (1, 2):
        noise = _smoothed(noise, weights, axis)
    return noise


def _smoothed(noise: Coordinates, weights: list[float], axis: int) -> Coordinates:
    """Weighted sums along an axis, from the centre outwards; the ends are reflected."""
    reach, side = len(weights) - 1, noise.shape[axis]
    around = np.abs(np.arange(-reach, side + reach)) % max(1, 2 * (side - 1))
    wide: Coordinates = np.take(noise, np.minimum(around, 2 * (side - 1) - around), axis)

    def part(start: int) -> Coordinates:
        return wide[:, start : start + side] if axis == 1 else wide[:, :, start : start + side]

    made: Coordinates = part(reach) * weights[0]
    pair = np.empty_like(made)
    for place in range(1, reach + 1):
        np.add(part(reach - place), part(reach + place), out=pair)
        np.multiply(pair, weights[place], out=pair)
        np.add(made, pair, out=made)
    return made


def elastic_motion(shape: tuple[int, ...], distance: Callable[[], Coordinates]) -> PlacedMotion:
    """Take each new pixel from ``distance``, in pixels across and down [2, height, width], away."""
    if shape[0] * shape[1] > ELASTIC_PIXELS_MAX:
        raise SampleUndecodable(
            f"{shape[1]} x {shape[0]} pixels cannot be moved one by one: {ELASTIC_PIXELS_MAX} at most; "
            'a "resize" or a crop in front makes it fit'
        )
    made: list[Coordinates] = []

    def distances() -> Coordinates:
        if not made:
            made.append(distance())
        return made[0]

    def places(rows: slice) -> Places:
        x, y = _centres(shape[1], rows)
        across, down = distances()[:, rows]
        return _rounded(x + across, y + down)

    def moved(points: Coordinates) -> Coordinates:
        # the new place of a point is that whose distance leads back to it
        at = points
        for _ in range(_INVERSE_ROUNDS):
            column, row = (
                np.clip(np.floor(at[..., side]), 0, shape[1 - side] - 1).astype(np.intp) for side in range(2)
            )
            at = points - np.stack([one[row, column] for one in distances()], axis=-1)
        return at

    return PlacedMotion(shape, places, moved)


@recolor_for.register
def _elastic(step: options.Elastic, scratch: Scratch, *, is_bgr: bool) -> Recolor:  # noqa: ARG001  others use it
    def draw(random: RandomNumber, shape: tuple[int, ...]) -> Change:
        key = int(random() * (1 << KEY_BITS))
        motion = elastic_motion(shape, lambda: step.alpha * smooth_noise(key, shape, step.sigma))
        return change_of(motion, step, scratch, alpha=step.alpha)

    return draw
