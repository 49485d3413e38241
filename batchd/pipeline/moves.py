"""The moves and the turn of a plan, done to pixels. Worker process.

    cut      a view, nothing is copied
    scale    see ``image_stage`` for the conventions of each interpolation
    pad      copies the image into its frame
    warp     for each new pixel, where its centre comes from: the pixel that lies there ("nearest") or between the four around it
             ("linear"), ``fill`` counting as pixels outside; within 1 of it in float64 with OpenCV 5. OpenCV 4 takes positions to
             1/32 of a pixel, which makes up to 8 of 255 where neighbours are black and white
    turn     transposed first, then flipped

Everything but a cut writes into memory that it is given or that is used again for the next sample. Every cv2 call that is told
where to write is checked to have written there.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from batchd.config.geometry_steps import Fill
from batchd.config.step import Interpolation
from batchd.pipeline.geometry import UPRIGHT, Cut, Move, Pad, Scale, Turn, Warp
from batchd.pipeline.scratch import Scratch
from batchd.pipeline.vision import Pixels, cv2, written

AREA_FROM_REDUCTION: Final = 2
"""Where "auto" changes from linear to area: source divided by target, in pixels, of the side that shrinks more."""

_METHODS: dict[Interpolation, int] = {
    "nearest": cv2.INTER_NEAREST,
    "linear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "cubic": cv2.INTER_CUBIC,
}
_FLIP_CODES = {(True, False): 0, (False, True): 1, (True, True): -1}
_CV2_CHANNELS_MAX = 4


def cut_out(pixels: Pixels, box: Cut) -> Pixels:
    """The box, as a view."""
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def make_moves(pixels: Pixels, moves: Sequence[Move], scratch: Scratch, out: Pixels | None) -> Pixels:
    """Make the moves; the last one writes into ``out``, where that is given and the move writes at all."""
    last = len(moves) - 1
    for place, move in enumerate(moves):
        if isinstance(move, Cut):
            pixels = cut_out(pixels, move)
            continue
        shape = (move.height, move.width, pixels.shape[2])
        into = out if out is not None and place == last else scratch.image(place, shape)
        if isinstance(move, Scale):
            _scale(pixels, move, scratch, into)
        elif isinstance(move, Pad):
            _pad(pixels, move, into)
        else:
            _warp(pixels, move, into, _METHODS[move.interpolation], move.fill)
        pixels = into
    return pixels


def follow_trail(mask: Pixels, trail: Sequence[Move | Turn], scratch: Scratch, fill: int) -> Pixels:
    """Do to a mask [height, width, 1] what was done to its image, step by step; no number is made that was not there.

    A new pixel has the number of the pixel in which its centre lies.
    """
    for place, move in enumerate(trail):
        if isinstance(move, Cut):
            mask = cut_out(mask, move)
            continue
        if isinstance(move, Turn):
            mask = turned(mask, move, scratch, None, place)
            continue
        into = scratch.image(place, (move.height, move.width, 1))
        if isinstance(move, Scale):
            rows, columns = _middles(mask.shape[0], move.height), _middles(mask.shape[1], move.width)
            np.take(mask[rows], columns, axis=1, out=into, mode="clip")
        elif isinstance(move, Pad):
            _pad(mask, move._replace(fill=(fill,)), into)
        else:
            _warp(mask, move, into, cv2.INTER_NEAREST, (fill,))
        mask = into
    return mask


def _middles(source: int, target: int) -> npt.NDArray[np.intp]:
    """The source's pixels in which the centres of the target's lie, along one side; in whole numbers, so exact."""
    return (2 * np.arange(target) + 1) * source // (2 * target)


def turned(pixels: Pixels, turn: Turn, scratch: Scratch, into: Pixels | None, place: Hashable = "turned") -> Pixels:
    """Turn an image, into ``into`` where that is given; it may hold the pixels, as long as nothing is transposed."""
    if turn == UPRIGHT:
        return pixels
    height, width, channels = pixels.shape
    if into is None:
        into = scratch.image(place, (width, height, channels) if turn.transpose else (height, width, channels))
    _turn(pixels, turn, into)
    return into


def _scale(pixels: Pixels, move: Scale, scratch: Scratch, into: Pixels) -> None:
    height, width, channels = pixels.shape
    method = move.interpolation
    if method == "auto":
        shrinks = height >= AREA_FROM_REDUCTION * move.height or width >= AREA_FROM_REDUCTION * move.width
        method = "area" if shrinks else "linear"
    if method == "area" and (height < move.height) != (width < move.width):
        # Where one side grows, cv2 leaves the other one unsmoothed, so that one goes first.
        shrunk = scratch.image("shrunk", (min(height, move.height), min(width, move.width), channels))
        _resize(pixels, shrunk, "area")
        pixels = shrunk
    _resize(pixels, into, method)


def _resize(pixels: Pixels, into: Pixels, method: Interpolation) -> None:
    size = into.shape[1], into.shape[0]
    written(cv2.resize(pixels, size, dst=into, interpolation=_METHODS[method]), into)


def _pad(pixels: Pixels, move: Pad, into: Pixels) -> None:
    height, width = pixels.shape[:2]
    if pixels.size == 0:
        into[...] = move.fill
        return
    below, right = move.height - move.top - height, move.width - move.left - width
    around = move.top, below, move.left, right
    written(cv2.copyMakeBorder(pixels, *around, cv2.BORDER_CONSTANT, dst=into, value=_scalar(move.fill)), into)


def _warp(pixels: Pixels, move: Warp, into: Pixels, method: int, fill: Fill) -> None:
    """cv2 wants to know where a new pixel comes from, in coordinates in which a pixel's centre is a whole number."""
    angle = math.radians(move.degrees)
    cosine, sine = math.cos(angle), math.sin(angle)
    middle_x, middle_y = (move.width - 1) / 2, (move.height - 1) / 2
    origin = np.array(
        [
            [cosine, -sine, middle_x - cosine * middle_x + sine * middle_y],
            [sine, cosine, middle_y - sine * middle_x - cosine * middle_y],
        ]
    )
    made = cv2.warpAffine(
        pixels,
        origin,
        (move.width, move.height),
        dst=into,
        flags=method | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=_scalar(fill),
    )
    written(made, into)


def _scalar(fill: Fill) -> tuple[int, ...]:
    return fill * _CV2_CHANNELS_MAX if len(fill) == 1 else fill


def _turn(pixels: Pixels, turn: Turn, into: Pixels) -> None:
    """Transpose first, then flip, in place where ``into`` holds the pixels: still in the cache, they are flipped in no time."""
    if turn.transpose:
        written(cv2.transpose(pixels, dst=into), into)
        pixels = into
    code = _FLIP_CODES.get((turn.vertical, turn.horizontal))
    if code is not None:
        written(cv2.flip(pixels, code, dst=into), into)
