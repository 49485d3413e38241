"""Random erasing of a batch by the numbers that come with it. Runs in the trainer.

    erase_box    int32 [rows, count, 4]   left, top, right and bottom of each rectangle; 0: none
    erase_key    int32 [rows]             with fill = "noise"
                 int32 [rows, count]      with fill = "color"; "mean" has none

A stream with ``erase = { … }`` has these fields. Pixels are normalised before: a rectangle gets
numbers of mean 0 and variance 1, for each pixel or one colour for all of it, or zeros. These are
the modes "pixel", "rand" and "const" of timm's ``RandomErasing``.

    key, row, column -->  h       32 bits; the row and the column of a colour are 0
    channel c        -->  number  q(h * 0x9E3779B1^c modulo 2^32, divided by 2^20)

q(k) is the quantile (2 k + 1) / 2^13 of the normal distribution, as a multiple of 2^-12. h is the
hash lowbias32 of (row << 16) + column + key, with the key added once more before its second factor
(https://nullprogram.com/blog/2018/07/31/).

Invariant: whole numbers decide, so a position has the same noise on each device, in each library.
"""

from collections.abc import Container, Mapping
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from batchd_client.errors import TensorsInvalid
from batchd_client.pixels import (
    Values,
    beside,
    channels_first,
    is_inside,
    is_on_host,
    is_writable,
    namespace,
    numbers_below,
    on_host,
    pixels_of,
)
from batchd_wire.views import Array

ERASE_BOX, ERASE_KEY = "erase_box", "erase_key"
ERASE_FIELDS = (ERASE_BOX, ERASE_KEY)
IMAGE_DIMENSIONS = 4
"""With the rows."""
_ROW_BITS = 16
_QUANTILE_BITS, _FRACTION_BITS = 12, 12
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))
_CHANNELS = tuple((pow(0x9E3779B1, channel, 1 << 32) ^ 1 << 31) - (1 << 31) for channel in range(4))


def erase_fields(has: Container[str], image: str) -> tuple[str, ...]:
    """The fields of the numbers that erase an ``image``, among those that a stream ``has``.

    Raises ``TensorsInvalid`` if it lacks them.
    """
    for name in (image, ERASE_BOX):
        if name not in has:
            raise TensorsInvalid(
                f"erase: the stream has no field {name!r}; set erase = {{ probability = 0.25 }} for it in batchd.toml, and name "
                'its images, as in erase="photo"'
            )
    return tuple(name for name in ERASE_FIELDS if name in has)


def check_erasable(dtype: object) -> None:
    """Raise ``TensorsInvalid`` if images have a dtype of whole numbers, so are not normalised."""
    if "float" not in str(dtype):
        raise TensorsInvalid(
            f"erase: images are {dtype}, and what covers them has mean 0 and variance 1: normalise them before, as with "
            "normalize=(mean, std) of the loader"
        )


def erased(fields: Mapping[str, Values], image: str = "image", *, in_place: bool = False) -> Values:
    """Return the images of a batch's ``fields`` with the rectangles that were drawn for them.

    Images are floating-point numbers ``[rows, height, width, channels]``, or have the channels
    before the sides, and keep their dtype. ``in_place``: they are the caller's own, and may be
    written if their library can; use what is returned.

    Raises ``TensorsInvalid`` if a field is missing, or has another dtype or shape.
    """
    names = erase_fields(fields, image)
    images = fields[image]
    check_erasable(images.dtype)
    if images.ndim != IMAGE_DIMENSIONS:
        raise TensorsInvalid(f"erase: images [rows, …] of three dimensions are erased, not {list(images.shape)}")
    boxes, *keys = (fields[name] for name in names)
    if not is_writable(images):
        return _masked(images, boxes, *keys)
    whole = images if in_place else namespace(images).empty_like(images)
    if not in_place:
        whole[...] = images
    written = channels_first(on_host(whole) if is_on_host(whole) else whole)
    write_noise(written, *map(on_host, (boxes, *keys)))
    return whole


def write_noise(pixels: Values, boxes: NDArray[np.int32], keys: NDArray[np.int32] | None = None) -> None:
    """Cover the boxes, one of each row after the other: where two overlap, the later one counts.

    ``pixels``: floating-point numbers ``[rows, channels, height, width]``, which are written.
    ``boxes`` and ``keys``: int32, the fields of ``ERASE_FIELDS``.
    """
    for number in range(boxes.shape[1]):
        of_rows, is_color = boxes[:, number], keys is not None and keys.ndim > 1
        key = keys[:, number] if keys is not None and is_color else keys
        rows = np.flatnonzero(of_rows[:, 2] > of_rows[:, 0])
        cover = _cover_in_cache if isinstance(pixels, np.ndarray) else _cover_at_once
        cover(pixels, rows, of_rows[rows], None if key is None else key[rows], is_color=is_color)


def _cover_in_cache(
    pixels: Array, rows: NDArray[np.intp], boxes: NDArray[np.int32], keys: NDArray[np.int32] | None, *, is_color: bool
) -> None:
    """Cover a box of each of some rows, while the processor has it in its cache."""
    down, across = (np.arange(length, dtype=np.int32) for length in pixels.shape[2:])
    places = (down[:, None] << _ROW_BITS) + across
    made: Values = 0
    for place, (row, (left, top, right, bottom)) in enumerate(zip(rows, boxes, strict=True)):
        if keys is not None:
            made = _normal(hashed(places[:1, :1] if is_color else places[top:bottom, left:right], keys[place]), pixels)
        pixels[row, :, top:bottom, left:right] = made


def _cover_at_once(
    pixels: Values, rows: NDArray[np.intp], boxes: NDArray[np.int32], keys: NDArray[np.int32] | None, *, is_color: bool
) -> None:
    """Cover a box of each of some rows on a device, in as many calls for all as for one."""
    down, across, of, *key = pixels_of(boxes, np.stack([rows] if keys is None else [rows, keys]), pixels)
    made: Values = 0
    if key:
        made = _normal(hashed(down * 0 if is_color else (down << _ROW_BITS) + across, key[0]), pixels).T
    pixels[of, :, down, across] = made


def _masked(images: Values, boxes: Values, keys: Values = None) -> Values:
    """Images of a library whose arrays never change: one expression, which a compiler fuses."""
    of_library, pixels = namespace(images), channels_first(images)
    is_last, (height, width) = pixels is not images, pixels.shape[2:]
    down, across = (numbers_below(length, boxes).astype(np.int32) for length in (height, width))
    places, made = (down[:, None] << _ROW_BITS) + across, 0
    for number in range(boxes.shape[1]):
        if keys is not None:
            of_rows = (places, keys) if keys.ndim == 1 else (places[:1, :1] * 0, keys[:, number])
            made = of_library.moveaxis(_normal(hashed(of_rows[0], of_rows[1][:, None, None]), pixels), 0, 1)
        pixels = of_library.where(is_inside(boxes[:, number], height, width), made, pixels)
    return of_library.moveaxis(pixels, 1, -1) if is_last else pixels


def hashed(places: Values, keys: Values) -> Values:
    """Random bits of places for each of some keys: int32, of the shape of both."""
    words = places + keys
    words = (words ^ words >> 16 & 0xFFFF) * _FACTORS[0]
    words = (words ^ words >> 15 & 0x1FFFF) + keys
    words = words * _FACTORS[1]
    return words ^ words >> 16 & 0xFFFF


def _normal(words: Values, pixels: Values) -> Values:
    """Normal numbers of the dtype of ``pixels``, for each channel: ``[channels, ...]``.

    ``words``: random bits, int32 ``[...]``.
    """
    channels = pixels.shape[1]
    factors = np.array(_CHANNELS[:channels], np.int32).reshape(channels, *(1,) * words.ndim)
    places = words * beside(pixels, factors) >> 32 - _QUANTILE_BITS & (1 << _QUANTILE_BITS) - 1
    table = beside(pixels, quantiles(), pixels.dtype)
    return table.take(places) if isinstance(table, np.ndarray) else table[places]


@lru_cache(maxsize=1)
def quantiles() -> NDArray[np.float32]:
    """The normal numbers: float32 ``[2^12]``."""
    find, steps, whole = NormalDist().inv_cdf, 2 << _QUANTILE_BITS, 1 << _FRACTION_BITS
    return np.array([round(find(place / steps) * whole) / whole for place in range(1, steps, 2)], np.float32)
