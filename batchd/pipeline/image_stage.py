"""The steps on pixels: from the bytes of a file, or from pixels, straight into one row of a batch. Worker process.

    probe header -> steps on paper (geometry) -> decode, no larger than needed -> cut, scale, pad -> turn -> finish
                                                 scratch                          scratch  ...            the row

The last thing that happens to the pixels writes into the row that was given; whatever comes before it writes into memory
that is used again for the next sample. Every cv2 call that is told where to write is checked to have written there.

Interpolation, which tests compare with a float64 reference. The centre of pixel ``i`` is at ``i + 1/2``, edges repeat, the
result is rounded to 8 bits, and differs from the reference by at most ``1`` (``cubic``: ``2``):

    nearest  the pixel in which ``floor(i * source / target)`` lies
    linear   between the two nearest pixels, in each direction; no smoothing before it
    area     the mean over the area that the target's pixel covers
    cubic    over four pixels in each direction, with the coefficient -0.75; no smoothing before it
    auto     linear where both sides shrink by less than 2 (or grow), else area

Without smoothing, shrinking folds detail finer than the target's pixels back into the image. "auto" bounds that: scaled
decoding has taken away all reductions of 2 and more that it can, by averaging, and "area" takes the rest.

Invariant: the bytes written are a function of (steps, seed, epoch, sample, attempt, the file) and the decoders' versions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batchd import failpoints
from batchd.config.columns import Column
from batchd.config.image_steps import Decode, Normalize
from batchd.config.step import PIXELS_MAX, Interpolation
from batchd.config.steps import Step
from batchd.config.values import Value
from batchd.pipeline.decode import Decoder
from batchd.pipeline.geometry import (
    UPRIGHT,
    Cut,
    Geometry,
    Move,
    Pad,
    Scale,
    Turn,
    decode_factor,
    planner_for,
    scaled_cut,
)
from batchd.pipeline.probe import ImageHeader, probe_image
from batchd.pipeline.randomness import SampleRandom
from batchd.pipeline.scratch import Scratch
from batchd.pipeline.vision import Image, Pixels, cv2, written

AREA_FROM_REDUCTION: Final = 2
"""Where "auto" changes from linear to area: source divided by target, in pixels, of the side that shrinks more."""

_METHODS: dict[Interpolation, int] = {
    "nearest": cv2.INTER_NEAREST,
    "linear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "cubic": cv2.INTER_CUBIC,
}
_FLIP_CODES = {(True, False): 0, (False, True): 1, (True, True): -1}


class ImageStage:
    """The steps on one image field, ready to run on one sample after the other.

    ``before`` is the field as it comes: ``encoded``, or pixels of 8 bits. ``writes_row``: whether what it makes is what the batch
    has, so that it goes straight into the row.
    """

    def __init__(self, steps: Sequence[Step], before: Column, after: Column, *, writes_row: bool) -> None:
        decode = steps[0] if isinstance(steps[0], Decode) else None
        self._field = before.name
        self._row_shape = after.fixed_shape if writes_row else None
        self._dtype = np.dtype(after.dtype)
        self._channels = _channel_count(after)
        self._channels_first = after.channels_first
        self._scratch = Scratch()
        self._decoder = Decoder(decode, self._scratch) if decode else None
        self._pixels_max = decode.max_pixels if decode else PIXELS_MAX
        self._applies_exif = decode is not None and decode.exif == "apply"
        self._scales_decoding = decode is not None and decode.scale == "auto"
        self._planners = [planner for planner in map(planner_for, steps) if planner]
        self._tables = next((_tables(step) for step in steps if isinstance(step, Normalize)), None)
        self._writes_pixels = not self._channels_first and self._tables is None

    def run(self, values: dict[str, Value], random: SampleRandom, row: Mapping[str, Image]) -> None:
        """See ``stages.Stage``. Raises ``SampleUndecodable``."""
        value = values[self._field]
        header = self._look(value)
        orientation = header.orientation if self._applies_exif else 1
        geometry = Geometry(header.height, header.width, orientation, self._pixels_max)
        for planner in self._planners:
            planner(geometry, random.random)
        moves, turn = geometry.moves, geometry.turn
        out = self._room(geometry.height, geometry.width) if self._row_shape is None else row[self._field]
        assert self._row_shape in (None, out.shape), f"a row of shape {out.shape} instead of {self._row_shape}"
        pixels = self._decode(value, header, moves)
        failpoints.passing("worker.sample.decoded", random.sample)
        pixels = self._move(pixels, moves, out if self._writes_pixels and not turn.transpose else None)
        if pixels is not out or turn != UPRIGHT:
            self._finish(pixels, turn, out)
        values[self._field] = out

    def _look(self, value: Value) -> ImageHeader:
        """Size and orientation of the image, before any pixel is touched."""
        if self._decoder is None:
            assert isinstance(value, np.ndarray), "pixels, as there is no decode step"
            return ImageHeader("pixels", value.shape[0], value.shape[1], 1, 0)
        assert isinstance(value, memoryview), "the bytes of a file, as there is a decode step"
        header = probe_image(value)
        self._decoder.check_limits(value, header)
        return header

    def _room(self, height: int, width: int) -> Image:
        """Memory for what later steps work on."""
        size = (self._channels, height, width) if self._channels_first else (height, width, self._channels)
        return np.empty(size, self._dtype)

    def _decode(self, value: Value, header: ImageHeader, moves: list[Move]) -> Pixels:
        """The pixels, decoded no larger than the moves need; makes the first of them fit what was decoded."""
        if self._decoder is None:
            assert isinstance(value, np.ndarray)
            return value
        assert isinstance(value, memoryview)
        whole = header.height, header.width
        factor = decode_factor(moves, *whole) if self._scales_decoding and header.format == "JPEG" else 1
        pixels = self._decoder.decode(value, header, factor)
        if factor > 1 and isinstance(moves[0], Cut):
            moves[0] = scaled_cut(moves[0], whole, (pixels.shape[0], pixels.shape[1]))
        return pixels

    def _move(self, pixels: Pixels, moves: list[Move], out: Image | None) -> Pixels:
        """Make the moves; the last one writes into ``out``, where that is given and the move writes at all."""
        last = len(moves) - 1
        for place, move in enumerate(moves):
            if isinstance(move, Cut):
                pixels = pixels[move.top : move.top + move.height, move.left : move.left + move.width]
                continue
            shape = (move.height, move.width, self._channels)
            into = out if out is not None and place == last else self._scratch.image(place, shape)
            if isinstance(move, Scale):
                self._scale(pixels, move, into)
            else:
                _pad(pixels, move, into)
            pixels = into
        return pixels

    def _scale(self, pixels: Pixels, move: Scale, into: Pixels) -> None:
        height, width = pixels.shape[:2]
        method = move.interpolation
        if method == "auto":
            shrinks = height >= AREA_FROM_REDUCTION * move.height or width >= AREA_FROM_REDUCTION * move.width
            method = "area" if shrinks else "linear"
        if method == "area" and (height < move.height) != (width < move.width):
            # Where one side grows, cv2 leaves the other one unsmoothed, so that one goes first.
            shrunk = self._scratch.image("shrunk", (min(height, move.height), min(width, move.width), self._channels))
            _resize(pixels, shrunk, "area")
            pixels = shrunk
        _resize(pixels, into, method)

    def _finish(self, pixels: Pixels, turn: Turn, out: Image) -> None:
        """Turn the image and write it into ``out`` in the type and the order that it has there."""
        if turn != UPRIGHT:
            height, width, channels = pixels.shape
            shape = (width, height, channels) if turn.transpose else (height, width, channels)
            into = out if self._writes_pixels else self._scratch.image("turned", shape)
            _turn(pixels, turn, into)
            pixels = into
        if self._channels_first:
            self._write_planes(pixels, out)
        elif self._tables is not None:
            _look_up(pixels, self._tables, out)
        elif pixels is not out:
            np.copyto(out, pixels)

    def _write_planes(self, pixels: Pixels, out: Image) -> None:
        for channel in range(self._channels):
            plane = out[channel]
            if self._tables is None:
                written(cv2.extractChannel(pixels, channel, dst=plane), plane)
            else:
                grey = self._scratch.image("plane", (*plane.shape, 1))
                written(cv2.extractChannel(pixels, channel, dst=grey), grey)
                _look_up(grey, self._tables[:, :, channel], plane[:, :, np.newaxis])


def _channel_count(column: Column) -> int:
    channels = column.shape[0 if column.channels_first else 2]
    assert channels is not None, f"{column.name} is {column.text}"
    return channels


def _resize(pixels: Pixels, into: Pixels, method: Interpolation) -> None:
    size = into.shape[1], into.shape[0]
    written(cv2.resize(pixels, size, dst=into, interpolation=_METHODS[method]), into)


def _pad(pixels: Pixels, move: Pad, into: Pixels) -> None:
    height, width = pixels.shape[:2]
    below, right = move.height - move.top - height, move.width - move.left - width
    written(cv2.copyMakeBorder(pixels, move.top, below, move.left, right, cv2.BORDER_CONSTANT, dst=into), into)


def _turn(pixels: Pixels, turn: Turn, into: Pixels) -> None:
    """Transpose first, then flip, in place where ``into`` holds the pixels: still in the cache, they are flipped in no time."""
    if turn.transpose:
        written(cv2.transpose(pixels, dst=into), into)
        pixels = into
    code = _FLIP_CODES.get((turn.vertical, turn.horizontal))
    if code is not None:
        written(cv2.flip(pixels, code, dst=into), into)


def _look_up(pixels: Pixels, tables: Image, out: Image) -> None:
    """Replace each pixel by its number. cv2 knows no tables of float16, but it only moves 16 bits, whatever they mean."""
    if out.dtype == np.float16:
        out, tables = out.view(np.int16), tables.view(np.int16)
    written(cv2.LUT(pixels, tables, dst=out), out)


def _tables(step: Normalize) -> npt.NDArray[np.floating[Any]]:
    """Compute every result of ``normalize``, [1, 256, channels], each rounded once."""
    pixel = np.arange(256, dtype=np.float64)[np.newaxis, :, np.newaxis]
    return np.ascontiguousarray(((pixel / 255 - np.array(step.mean)) / np.array(step.std)).astype(step.dtype))
