"""The steps on pixels: from the bytes of a file straight into one row of a batch. Worker process.

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

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batchd import failpoints
from batchd.config.steps import Decode, Interpolation, Normalize, Step
from batchd.pipeline.decode import Decoder, decoder_versions
from batchd.pipeline.errors import SampleUndecodable
from batchd.pipeline.fields import channel_count, image_dtype, image_shape, is_channels_first
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

__all__ = ["Pipeline", "SampleUndecodable", "decoder_versions"]

AREA_FROM_REDUCTION: Final = 2
"""Where "auto" changes from linear to area: source divided by target, in pixels, of the side that shrinks more."""

_METHODS: dict[Interpolation, int] = {
    "nearest": cv2.INTER_NEAREST,
    "linear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "cubic": cv2.INTER_CUBIC,
}
_FLIP_CODES = {(True, False): 0, (False, True): 1, (True, True): -1}


class Pipeline:
    """The steps of one stream, ready to run on one sample after the other. Not for several threads at once."""

    def __init__(self, steps: Sequence[Step], seed: int) -> None:
        decode = steps[0]
        assert isinstance(decode, Decode), "check_steps comes first"
        self.shape: Final = image_shape(steps)
        self.dtype: Final = np.dtype(image_dtype(steps))
        self._random = SampleRandom(seed)
        self._scratch = Scratch()
        self._decoder = Decoder(decode, self._scratch)
        self._channels = channel_count(steps)
        self._pixels_max = decode.max_pixels
        self._applies_exif = decode.exif == "apply"
        self._scales_decoding = decode.scale == "auto"
        self._planners = [planner for planner in map(planner_for, steps) if planner]
        self._channels_first = is_channels_first(steps)
        self._tables = next((_tables(step) for step in steps if isinstance(step, Normalize)), None)
        self._writes_pixels = not self._channels_first and self._tables is None

    def run(self, data: memoryview, epoch: int, sample: int, attempt: int, out: Image) -> None:
        """Make the image of ``sample`` from the bytes of its file and write it into ``out``, one row of the image field.

        ``attempt`` is 0, or counts the samples that were tried in this one's place. Raises ``SampleUndecodable``, and then
        leaves ``out`` in no particular state.
        """
        assert out.shape == self.shape, f"a row of shape {out.shape} instead of {self.shape}"
        header = probe_image(data)
        self._decoder.check_limits(data, header)
        self._random.start(epoch, sample, attempt)
        geometry = Geometry(
            header.height, header.width, header.orientation if self._applies_exif else 1, self._pixels_max
        )
        for planner in self._planners:
            planner(geometry, self._random.random)
        moves, turn = geometry.moves, geometry.turn
        pixels = self._decode(data, header, moves)
        failpoints.passing("worker.sample.decoded", sample)
        pixels = self._move(pixels, moves, out if self._writes_pixels and not turn.transpose else None)
        if pixels is not out or turn != UPRIGHT:
            self._finish(pixels, turn, out)

    def _decode(self, data: memoryview, header: ImageHeader, moves: list[Move]) -> Pixels:
        """Decode no larger than the moves need, and make the first of them fit what was decoded."""
        whole = header.height, header.width
        factor = decode_factor(moves, *whole) if self._scales_decoding and header.format == "JPEG" else 1
        pixels = self._decoder.decode(data, header, factor)
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
