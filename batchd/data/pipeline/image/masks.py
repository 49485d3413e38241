"""The masks of an image: read from a PNG, and moved as the image is. Worker process.

    PNG of one channel, up to 8 bits, or with a palette  -> uint8 [height, width]
    the same, 16 bits, or three colours of 8 bits        -> int32 [height, width]

The bytes of a mask must be a file that keeps numbers as they are. Of a palette the indices count.
(cv2 gives colours instead of indices, so it gets the file without its palette, as the grey one with
the same bits; it stretches 1, 2 and 4 bits to 0 to 255, which is undone.) Three colours are the
number red + 256 green + 65536 blue, as COCO's panoptic files have it. Gamma, transparency and the
EXIF tag are ignored.

A new pixel has the number of the old pixel in which its centre lies. Cuts, paddings, scalings and
turns in succession are one table of old rows and one of old columns, so each number is copied once;
of the mask of an object, only those of the rectangle around it.

Invariant: no number is made that the mask did not have, except its fill.
"""

import zlib
from collections.abc import Sequence
from itertools import groupby
from math import prod
from struct import pack, unpack_from
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.image.containers import SIGNATURE_BYTES, png_chunks
from batchd.data.pipeline.image.geometry import Cut, Motion, Orientation, Padding, Resampling, TrailPart, Warp
from batchd.data.pipeline.image.opencv import Scratch, cv2, decode_file
from batchd.data.pipeline.image.options import Fill
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.image.resample import nearest, warp
from batchd.data.samples.errors import SampleUndecodable
from batchd_wire.views import Array

Grid: TypeAlias = Cut | Padding | Resampling | Orientation
"""The moves that keep rows and columns together."""
_WARPED_TOGETHER = 4
"""Masks that are moved as the channels of one image."""
_OUTSIDE = -1


def moved_masks(masks: Array, trail: Sequence[TrailPart], fill: int, scratch: Scratch, name: str) -> Array:
    """Do to masks, uint8 or int32 [masks, height, width], what was done to their image.

    ``name``: of the memory in ``scratch`` that the result is in, unless it is ``masks``.
    """
    for number, (is_grid, moves) in enumerate(groupby(trail, lambda move: isinstance(move, Grid))):
        if is_grid:
            masks = _gathered(masks, [move for move in moves if isinstance(move, Grid)], fill, scratch, (name, number))
            continue
        for place, move in enumerate(moves):
            assert isinstance(move, Warp | Motion), "the others keep rows and columns"
            masks = _warped(masks, move, fill, _room(scratch, (name, number, place), masks, move.height, move.width))
    return masks


def _room(scratch: Scratch, place: tuple[object, ...], masks: Array, height: int, width: int) -> Array:
    """Memory for as many masks of another size, [masks, height, width]."""
    shape = len(masks), height, width
    needed = prod(shape) * masks.itemsize
    return scratch.bytes(place, needed)[:needed].view(masks.dtype).reshape(shape)


def _gathered(masks: Array, moves: Sequence[Grid], fill: int, scratch: Scratch, place: tuple[object, ...]) -> Array:
    rows, columns, is_transposed = _places(moves, *masks.shape[1:])
    made = _room(scratch, place, masks, len(rows), len(columns))
    made[...] = fill
    is_sparse = fill == 0 and masks.dtype == np.uint8
    for mask, into in zip(masks, made, strict=True):
        if not mask.size:
            continue
        left, top, width, height = cv2.boundingRect(mask) if is_sparse else (0, 0, mask.shape[1], mask.shape[0])
        if is_transposed:
            mask, left, top, width, height = mask.T, top, left, height, width  # noqa: PLW2901  seen the other way
        down, across = _within(rows, top, height), _within(columns, left, width)
        part = mask[rows[down], left : left + width]
        np.take(part, columns[across] - left, axis=1, out=into[down, across], mode="clip")
    return made


def _places(moves: Sequence[Grid], height: int, width: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], bool]:
    """The old row of each new one, the old column of each new one, -1 outside.

    Or the other way round, if the bool says that rows and columns are swapped.
    """
    rows, columns, is_transposed = np.arange(height), np.arange(width), False
    for move in moves:
        match move:
            case Cut():
                rows, columns = rows[move.top :][: move.height], columns[move.left :][: move.width]
            case Padding():
                rows = _padded(rows, move.top, move.height)
                columns = _padded(columns, move.left, move.width)
            case Resampling():
                rows, columns = rows[nearest(len(rows), move.height)], columns[nearest(len(columns), move.width)]
            case Orientation():
                if move.transpose:
                    rows, columns, is_transposed = columns, rows, not is_transposed
                rows = rows[::-1] if move.vertical else rows
                columns = columns[::-1] if move.horizontal else columns
    return rows, columns, is_transposed


def _padded(places: npt.NDArray[np.intp], before: int, length: int) -> npt.NDArray[np.intp]:
    padded = np.full(length, _OUTSIDE)
    padded[before : before + len(places)] = places
    return padded


def _within(places: npt.NDArray[np.intp], first: int, length: int) -> slice:
    """Where the places are within a range; they are in order, with those outside at the ends."""
    inside = np.flatnonzero((places >= first) & (places < first + length))
    return slice(inside[0], inside[-1] + 1) if inside.size else slice(0, 0)


def _warped(masks: Array, move: Warp | Motion, fill: int, made: Array) -> Array:
    if masks.dtype != np.uint8:  # the bytes of a number are the channels
        numbers = fill.to_bytes(masks.itemsize, "little")
        for mask, into in zip(np.ascontiguousarray(masks), made, strict=True):
            _move(_bytes_of(mask), move, tuple(numbers), _bytes_of(into))
        return made
    for first in range(0, len(masks), _WARPED_TOGETHER):
        several = [np.ascontiguousarray(mask, np.uint8) for mask in masks[first : first + _WARPED_TOGETHER]]
        channels = np.empty((move.height, move.width, len(several)), np.uint8)
        _move(np.asarray(cv2.merge(several), np.uint8).reshape(*several[0].shape, -1), move, (fill,), channels)
        made[first : first + len(several)] = cv2.split(channels)
    return made


def _move(pixels: npt.NDArray[np.uint8], move: Warp | Motion, fill: Fill, into: npt.NDArray[np.uint8]) -> None:
    if isinstance(move, Motion):
        move.move_mask(pixels, into, fill)
    else:
        warp(pixels, move._replace(interpolation="nearest", fill=fill), into)


def _bytes_of(mask: Array) -> npt.NDArray[np.uint8]:
    return mask.view(np.uint8).reshape(*mask.shape, mask.itemsize)


_KEPT = frozenset({b"IHDR", b"IDAT", b"IEND"})
_HEADER_START, _HEADER_END = SIGNATURE_BYTES + 4, SIGNATURE_BYTES + 21
"""The kind and the content of the first chunk, which its checksum is of."""
_BITS_AT, _COLORS_AT = SIGNATURE_BYTES + 16, SIGNATURE_BYTES + 17
_GREY, _RGB, _PALETTE = 0, 2, 3
_OTHER_CHANNELS = {_RGB: "colours", 4: "grey and alpha", 6: "colours and alpha"}
_BITS = 8
_OF_COLORS = 0xFFFFFF


def decode_mask(data: memoryview, size: tuple[int, int], dtype: str) -> Array:
    """Decode a mask of ``size`` to ``dtype``, "uint8" or "int32", [height, width].

    Raises ``SampleUndecodable``.
    """
    header = probe_image(data)
    if header.format not in ("PNG", "APNG"):
        raise SampleUndecodable(f"a {header.format} file; a mask is a PNG, which keeps its numbers as they are")
    if (header.height, header.width) != size:
        raise SampleUndecodable(
            f"has {header.width} x {header.height} pixels, and the image {size[1]} x {size[0]}; see annotated of follow"
        )
    bits, colors = unpack_from("BB", data, _BITS_AT)
    is_wide = dtype != "uint8"
    if colors not in (_GREY, _PALETTE) and not (is_wide and colors == _RGB):
        is_read = colors == _RGB and bits == _BITS
        raise _unfit(_OTHER_CHANNELS.get(colors, "other channels"), is_wide=is_wide, is_read=is_read)
    if bits > _BITS and (colors == _RGB or not is_wide):
        raise _unfit(f"{bits} bits", is_wide=is_wide, is_read=colors == _GREY)
    flags = cv2.IMREAD_COLOR if colors == _RGB else cv2.IMREAD_GRAYSCALE | cv2.IMREAD_ANYDEPTH
    pixels, said = decode_file(memoryview(_plain(data, colors)), flags)
    if pixels is None or pixels.shape[:2] != size:
        raise SampleUndecodable(f"OpenCV cannot decode it{': ' if said else ''}{said}")
    if colors == _RGB:
        with_alpha = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGBA)
        return np.asarray(with_alpha.view("<i4").reshape(size) & _OF_COLORS, dtype)
    numbers = pixels if bits >= _BITS else pixels // np.uint8(255 // ((1 << bits) - 1))
    return numbers.astype(dtype, copy=False)


def _unfit(what: str, *, is_wide: bool, is_read: bool) -> SampleUndecodable:
    wanted = "one channel, a palette, or three colours of 8 bits" if is_wide else "one channel of 8 bits, or a palette"
    advice = '; mask_type = "int32" reads it' if is_read and not is_wide else ""
    return SampleUndecodable(f"a PNG of {what}; a mask has {wanted}{advice}")


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
