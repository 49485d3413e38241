"""The followers of an image: mask, boxes and points, moved step by step as the image is.

Worker process.

    source                            here
    a PNG, or uint8 [height, width] -> mask    uint8 [height, width], by ``follow_trail``
    float32 [n, 4]                  -> boxes   left, top, right, bottom
    any [n, ...]                    -> labels  the rows of the boxes that are left
    float32 [n, 2]                  -> points  x, y

Coordinates are those of the upright image in pixels, x to the right and y down; the first pixel
reaches from 0 to 1. So its centre is at 1/2, and a flip of an image of width w moves x to w - x.
They are computed in float64, and rounded to float32 behind each stage.

A box is cut off at the image's edge after each step, so that a later padding does not bring back
what a crop removed. A box that is rotated by an angle becomes the smallest upright one around it. A
box without area, from the start or because too little of it is left, vanishes: it becomes four
zeros in its place, or its row leaves the boxes and all labels. Too little is what one step leaves
of the area that it found; so it makes no difference in how many stages the steps are done.

The bytes of a mask must be a file that keeps numbers as they are: a PNG of one channel, up to 8
bits, or with a palette, whose indices count. (cv2 gives colours instead of indices, so it gets the
file without its palette, as the grey one with the same bits; it stretches 1, 2 and 4 bits to 0 to
255, which is undone.) Gamma, transparency and the EXIF tag are ignored.

Invariant: nothing here depends on how the image was stored or at which scale it was decoded, and no
random number is drawn.
"""

import zlib
from collections.abc import Mapping, Sequence
from struct import pack, unpack_from
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.image.containers import SIGNATURE_BYTES, png_chunks
from batchd.data.pipeline.image.geometry import (
    Cut,
    Geometry,
    Motion,
    Move,
    Orientation,
    Padding,
    Resampling,
    TrailPart,
    Warp,
)
from batchd.data.pipeline.image.opencv import Image, Pixels, Scratch, cv2, decode_file
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.image.resample import follow_trail, sine_and_cosine
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value

Coordinates = npt.NDArray[np.float64]
_CORNERS = ([0, 1], [2, 1], [2, 3], [0, 3])
"""x and y of each corner of a box, in the order of its four numbers."""


class CoordinateMap(NamedTuple):
    """The move of (x, y) by one step: ``across`` and ``down`` have the factors of x, y and 1."""

    across: tuple[float, float, float]
    down: tuple[float, float, float]
    height: int
    width: int
    """The size of the image afterwards."""

    def moved(self, points: Coordinates) -> Coordinates:
        """The points [..., 2] afterwards."""
        x, y = points[..., 0], points[..., 1]
        return np.stack([a * x + b * y + c for a, b, c in (self.across, self.down)], axis=-1)


class Followers:
    """The followers of one image; those in ``writes`` go into the row."""

    def __init__(
        self,
        lead: Column,
        before: Mapping[str, Column],
        after: Mapping[str, Column],
        writes: frozenset[str],
    ) -> None:
        names = dict(lead.followers)
        self._mask_name, self._boxes, self._points = (names.get(role) for role in ("mask", "boxes", "points"))
        self._labels = [name for role, name in lead.followers if role == "label"]
        self._drops_boxes, self._min_visible = lead.drops_boxes, lead.min_visible
        if self._mask_name is not None:
            self._mask_is_encoded = before[self._mask_name].kind == "encoded"
            self._mask_fill = int(after[self._mask_name].fill)
        self._writes = writes
        self._scratch = Scratch()

    def run(
        self, values: dict[str, Value], row: Mapping[str, Image], size: tuple[int, int], geometry: Geometry
    ) -> None:
        """Do to the followers what was done to the image, which had ``size`` before it, in pixels.

        Raises ``SampleUndecodable`` for another size, no mask, or a coordinate that is no number.
        """
        assert geometry.trail is not None, "the image is followed"
        if (name := self._mask_name) is not None:
            mask = follow_trail(self._mask(name, values[name], size), geometry.trail, self._scratch, self._mask_fill)
            values[name] = mask[:, :, 0]
            if name in self._writes:
                np.copyto(row[name], mask[:, :, 0])
                values[name] = row[name]
        if self._boxes is not None or self._points is not None:
            maps = coordinate_maps(geometry.trail, *size)
            if self._boxes is not None:
                self._move_boxes(values, self._boxes, maps, size)
            if self._points is not None:
                points = _numbers(values, self._points).astype(np.float64)
                for step in maps:
                    points = step.moved(points)
                values[self._points] = points.astype(np.float32)

    def _move_boxes(
        self, values: dict[str, Value], name: str, maps: Sequence[CoordinateMap | Motion], size: tuple[int, int]
    ) -> None:
        boxes, is_left = moved_boxes(_numbers(values, name), maps, size, self._min_visible)
        values[name] = boxes[is_left] if self._drops_boxes else boxes
        for label in self._labels:
            rows = np.asarray(values[label])
            if len(rows) != len(boxes):
                raise SampleUndecodable(f"its {label!r} has {len(rows)} rows, and its {name!r} {len(boxes)}")
            values[label] = rows[is_left] if self._drops_boxes else rows

    def _mask(self, name: str, value: Value, size: tuple[int, int]) -> Pixels:
        """Return the mask of the source, uint8 [height, width, 1]."""
        if self._mask_is_encoded:
            assert isinstance(value, memoryview)
            try:
                return decode_mask(value, size)
            except SampleUndecodable as problem:
                raise SampleUndecodable(f"its {name!r}: {problem}") from None
        mask = np.asarray(value)
        if mask.shape != size:
            raise SampleUndecodable(
                f"its {name!r} has {mask.shape[1]} x {mask.shape[0]} pixels, and the image {size[1]} x {size[0]}"
            )
        return mask[:, :, np.newaxis]


def coordinate_maps(trail: Sequence[TrailPart], height: int, width: int) -> list[CoordinateMap | Motion]:
    """The move of coordinates by each step of a trail, for an image of this size."""
    maps: list[CoordinateMap | Motion] = []
    for move in trail:
        step = move if isinstance(move, Motion) else _coordinate_map(move, height, width)
        maps.append(step)
        height, width = step.height, step.width
    return maps


def moved_boxes(
    boxes: npt.NDArray[np.float32],
    maps: Sequence[CoordinateMap | Motion],
    size: tuple[int, int],
    min_visible: float = 0.0,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Move boxes, float32 [n, 4], of an image of ``size``.

    Gives them, zeros for each that has vanished, and which of them have not.
    """
    moved, is_left = _cut_off(boxes.astype(np.float64), *size, min_visible)
    for step in maps:
        corners = step.moved(moved[:, _CORNERS])
        moved = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
        moved, is_still_left = _cut_off(moved, step.height, step.width, min_visible)
        is_left &= is_still_left
    moved[~is_left] = 0
    return moved.astype(np.float32), is_left


def _cut_off(
    boxes: Coordinates, height: int, width: int, min_visible: float
) -> tuple[Coordinates, npt.NDArray[np.bool_]]:
    """Cut boxes off at the edge of an image. Gives them, and which of them have enough area."""
    inside = np.clip(boxes, 0, [width, height, width, height])
    is_left = (inside[:, 0] < inside[:, 2]) & (inside[:, 1] < inside[:, 3])
    if min_visible:
        area, whole = ((sides[:, 2] - sides[:, 0]) * (sides[:, 3] - sides[:, 1]) for sides in (inside, boxes))
        is_left &= area >= min_visible * whole
    return inside, is_left


def _coordinate_map(move: Move | Orientation, height: int, width: int) -> CoordinateMap:
    match move:
        case Cut():
            return CoordinateMap((1, 0, -move.left), (0, 1, -move.top), move.height, move.width)
        case Padding():
            return CoordinateMap((1, 0, move.left), (0, 1, move.top), move.height, move.width)
        case Resampling():
            return CoordinateMap((move.width / width, 0, 0), (0, move.height / height, 0), move.height, move.width)
        case Warp():
            # about the middle of the image, counter-clockwise for the viewer: y points down
            sine, cosine = sine_and_cosine(move.degrees)
            x, y = move.width / 2, move.height / 2
            across = cosine, sine, x - cosine * x - sine * y
            down = -sine, cosine, y + sine * x - cosine * y
            return CoordinateMap(across, down, move.height, move.width)
        case Orientation():
            if move.transpose:
                height, width = width, height
            by_x, by_y = (0.0, 1.0) if move.transpose else (1.0, 0.0)
            across = (-by_x, -by_y, width) if move.horizontal else (by_x, by_y, 0.0)
            down = (-by_y, -by_x, height) if move.vertical else (by_y, by_x, 0.0)
            return CoordinateMap(across, down, height, width)


def _numbers(values: Mapping[str, Value], name: str) -> npt.NDArray[np.float32]:
    numbers = np.asarray(values[name], np.float32)
    if not np.isfinite(numbers).all():
        raise SampleUndecodable(f"its {name!r} has a coordinate that is no finite number")
    return numbers


_KEPT = frozenset({b"IHDR", b"IDAT", b"IEND"})
_HEADER_START, _HEADER_END = SIGNATURE_BYTES + 4, SIGNATURE_BYTES + 21
"""The kind and the content of the first chunk, which its checksum is of."""
_BITS_AT, _COLORS_AT = SIGNATURE_BYTES + 16, SIGNATURE_BYTES + 17
_GREY, _PALETTE = 0, 3
_OTHER_CHANNELS = {4: "grey and alpha", 6: "colours and alpha"}
_BITS_MAX = 8


def decode_mask(data: memoryview, size: tuple[int, int]) -> Pixels:
    """Decode a mask of ``size`` to uint8 [height, width, 1]. Raises ``SampleUndecodable``."""
    header = probe_image(data)
    if header.format not in ("PNG", "APNG"):
        raise SampleUndecodable(f"a {header.format} file; a mask is a PNG, which keeps its numbers as they are")
    if (header.height, header.width) != size:
        raise SampleUndecodable(
            f"has {header.width} x {header.height} pixels, and the image {size[1]} x {size[0]}; see exif of decode"
        )
    bits, colors = unpack_from("BB", data, _BITS_AT)
    if colors not in (_GREY, _PALETTE) or bits > _BITS_MAX:
        what = f"{bits} bits" if bits > _BITS_MAX else _OTHER_CHANNELS.get(colors, "colours")
        raise SampleUndecodable(f"a PNG of {what}; a mask has one channel of 8 bits, or a palette")
    pixels, said = decode_file(memoryview(_plain(data, colors)), cv2.IMREAD_GRAYSCALE)
    if pixels is None or pixels.shape[:2] != size:
        raise SampleUndecodable(f"OpenCV cannot decode it{': ' if said else ''}{said}")
    mask: Pixels = pixels.reshape(*size, 1)
    return mask if bits == _BITS_MAX else mask // np.uint8(255 // ((1 << bits) - 1))


def _plain(data: memoryview, colors: int) -> bytes:
    """Return the file with its pixels only; a palette index becomes a level of grey."""
    kept = bytearray(data[:SIGNATURE_BYTES])
    for chunk in png_chunks(data):
        if chunk.kind in _KEPT:
            kept += data[chunk.start : chunk.end]
    if colors == _PALETTE:
        kept[_COLORS_AT] = _GREY
        kept[_HEADER_END : _HEADER_END + 4] = pack(">I", zlib.crc32(kept[_HEADER_START:_HEADER_END]))
    return bytes(kept)
