"""The moves and the turn of a plan, done to pixels. Worker process.

    cut      a view, nothing is copied
    scale    see ``image_stage`` for the conventions of each interpolation
    pad      copies the image into its frame
    warp     see ``warp``; within 1 of the same in float64
    turn     transposed first, then flipped

Everything but a cut writes into memory that it is given or that is used again for the next sample.
Every cv2 call that is told where to write is checked to have written there.
"""

from collections.abc import Hashable, Sequence
from typing import Final

from batchd.pipeline.image.geometry import UPRIGHT, Cut, Move, Orientation, Padding, Resampling
from batchd.pipeline.image.options import Fill
from batchd.pipeline.image.resample import resample, warp
from batchd.pipeline.image.vision import Pixels, Scratch, cv2, written

AREA_FROM_REDUCTION: Final = 2
"""Where "auto" changes from linear to area: source divided by target, in pixels, of the side that shrinks more."""

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
        if isinstance(move, Resampling):
            _scale(pixels, move, into)
        elif isinstance(move, Padding):
            _pad(pixels, move, into)
        else:
            warp(pixels, move, into)
        pixels = into
    return pixels


def follow_trail(mask: Pixels, trail: Sequence[Move | Orientation], scratch: Scratch, fill: int) -> Pixels:
    """Do to a mask [height, width, 1] what was done to its image, step by step; no number is made that was not there.

    A new pixel has the number of the pixel in which its centre lies.
    """
    for place, move in enumerate(trail):
        if isinstance(move, Cut):
            mask = cut_out(mask, move)
            continue
        if isinstance(move, Orientation):
            mask = turned(mask, move, scratch, None, place)
            continue
        into = scratch.image(place, (move.height, move.width, 1))
        if isinstance(move, Resampling):
            resample(mask, into, "nearest")
        elif isinstance(move, Padding):
            _pad(mask, move._replace(fill=(fill,)), into)
        else:
            warp(mask, move._replace(interpolation="nearest", fill=(fill,)), into)
        mask = into
    return mask


def turned(
    pixels: Pixels, turn: Orientation, scratch: Scratch, into: Pixels | None, place: Hashable = "turned"
) -> Pixels:
    """Turn an image, into ``into`` where that is given; it may hold the pixels, as long as nothing is transposed."""
    if turn == UPRIGHT:
        return pixels
    height, width, channels = pixels.shape
    if into is None:
        into = scratch.image(place, (width, height, channels) if turn.transpose else (height, width, channels))
    _turn(pixels, turn, into)
    return into


def _scale(pixels: Pixels, move: Resampling, into: Pixels) -> None:
    method = move.interpolation
    if method == "auto":
        height, width = pixels.shape[:2]
        shrinks = height >= AREA_FROM_REDUCTION * move.height or width >= AREA_FROM_REDUCTION * move.width
        method = "area" if shrinks else "linear"
    resample(pixels, into, method, move.mirrored)


def _pad(pixels: Pixels, move: Padding, into: Pixels) -> None:
    height, width = pixels.shape[:2]
    if pixels.size == 0:
        into[...] = move.fill
        return
    below, right = move.height - move.top - height, move.width - move.left - width
    around = move.top, below, move.left, right
    written(cv2.copyMakeBorder(pixels, *around, cv2.BORDER_CONSTANT, dst=into, value=_scalar(move.fill)), into)


def _scalar(fill: Fill) -> tuple[int, ...]:
    return fill * _CV2_CHANNELS_MAX if len(fill) == 1 else fill


def _turn(pixels: Pixels, turn: Orientation, into: Pixels) -> None:
    """Transpose first, then flip, in place where ``into`` holds the pixels: still in the cache, they are flipped in no time."""
    if turn.transpose:
        written(cv2.transpose(pixels, dst=into), into)
        pixels = into
    code = _FLIP_CODES.get((turn.vertical, turn.horizontal))
    if code is not None:
        written(cv2.flip(pixels, code, dst=into), into)
