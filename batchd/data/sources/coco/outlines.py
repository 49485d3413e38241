"""Masks of outlines and of run lengths, as COCO's own tools make them. Workers only.

    [[x, y, x, y, ...], ...]            polygons: inside of any of them
    {"size": [h, w], "counts": [...]}   lengths of runs of zeros and ones, in turn, down the columns
    {"size": [h, w], "counts": "..."}   the same as text: 5 bits in a character, differences from
                                        the length two places before

Invariant: a mask equals that of pycocotools, bit by bit. Its rule for polygons: corners are rounded
to a fifth of a pixel, and lines between them go along their longer axis in steps of it. A line that
crosses the middle of a column of pixels turns all pixels below it, from the next middle of one on.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.errors import SampleUnreadable

try:
    from batchd.data.pipeline import _pixels
except ImportError:  # not built: numpy does the same, in some six times the time
    IS_BUILT = False
else:
    IS_BUILT = True

Mask = NDArray[np.uint8]
_Places = NDArray[np.int64]

STEPS = 5
"""In a pixel."""
_MIDDLE = 2
"""The step that ends in the middle of a pixel."""
CORNER_MAX = 1 << 20
"""Farther away no image reaches: coordinates are cut off there."""
STEPS_MAX = 1 << 22
"""Of all lines of a polygon."""
_BITS, _MORE, _SIGN, _ZERO = 5, 0x20, 0x10, 48
_CHARACTERS_MAX = 13
"""Of a number: 64 bits."""


def mask_of(outline: object, mask: Mask) -> None:
    """Set the pixels of an outline in ``mask``, uint8 [height, width], zeros before, to 1.

    ``outline``: as JSON has it. Raises ``SampleUnreadable``.
    """
    if isinstance(outline, list):
        for polygon in outline:
            _fill_polygon(mask, _corners(polygon))
    elif isinstance(outline, dict):
        ends = _run_ends(outline, *mask.shape)
        if IS_BUILT:
            _pixels.fill_runs(ends, mask, *mask.shape)
        else:
            _fill(mask, ends)
    else:
        raise SampleUnreadable("segmentation is neither a list of polygons nor run lengths")


def numbers_of(value: object) -> NDArray[np.float64] | None:
    """A list of numbers, at any depth, as float64; None for anything else."""
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError):
        return None
    return found.astype(np.float64) if isinstance(value, list) and (found.dtype.kind in "iuf" or not value) else None


def _corners(polygon: object) -> NDArray[np.float64]:
    """The corners of a polygon, float64 [corners, 2]."""
    numbers = numbers_of(polygon)
    if numbers is None or numbers.ndim != 1 or len(numbers) % 2 or len(numbers) < 6:  # noqa: PLR2004  a triangle
        raise SampleUnreadable("segmentation has a polygon that is no list of three corners or more, x and y of each")
    if not np.isfinite(numbers).all():
        raise SampleUnreadable("segmentation has a coordinate that is no finite number")
    return numbers.reshape(-1, 2)


def _fill_polygon(mask: Mask, corners: NDArray[np.float64]) -> None:
    corners = corners.clip(-CORNER_MAX, CORNER_MAX)
    begin = np.trunc(corners * STEPS + 0.5)
    if np.abs(begin - np.roll(begin, -1, axis=0)).max(axis=1).sum() > STEPS_MAX:
        raise SampleUnreadable("segmentation has a polygon that is too long")
    if IS_BUILT:
        _pixels.fill_polygon(np.ascontiguousarray(corners), mask, *mask.shape)
    else:
        _fill(mask, _crossings(begin.astype(np.int64), *mask.shape))


def _crossings(begin: _Places, height: int, width: int) -> _Places:
    """Where a polygon turns pixels, counted down the columns: int64, ascending.

    ``begin``: its corners in steps.
    """
    end = np.concatenate([begin[1:], begin[:1]])
    way = np.abs(end - begin)
    is_flat, lengths = way[:, 0] >= way[:, 1], way.max(axis=1)
    # From here on, the longer axis comes first, and lines begin at its smaller end.
    begin, end = (np.where(is_flat[:, np.newaxis], one, one[:, ::-1]) for one in (begin, end))
    is_back = begin[:, 0] > end[:, 0]
    first = np.where(is_back[:, np.newaxis], end, begin)
    slopes = (begin + end - 2 * first)[:, 1] / np.maximum(lengths, 1)
    line = np.repeat(np.arange(len(begin)), lengths + 1)
    step = np.arange(len(line)) - (np.cumsum(lengths + 1) - lengths - 1)[line]
    step = np.where(is_back[line], lengths[line] - step, step)
    along = first[line, 0] + step
    beside = np.trunc(first[line, 1] + slopes[line] * step + 0.5).astype(np.int64)
    x, y = np.where(is_flat[line], along, beside), np.where(is_flat[line], beside, along)
    left, upper = np.minimum(x[1:], x[:-1]), np.minimum(y[1:], y[:-1])
    column, rest = np.divmod(left - _MIDDLE, STEPS)
    crosses = (x[1:] != x[:-1]) & (rest == 0) & (column >= 0) & (column < width)
    row = np.clip(-((_MIDDLE - upper[crosses]) // STEPS), 0, height)
    return np.sort(column[crosses] * height + row)


def _run_ends(outline: Mapping[str, object], height: int, width: int) -> _Places:
    """Where runs end, counted down the columns: int64, ascending."""
    if outline.get("size") != [height, width]:
        raise SampleUnreadable(
            f"segmentation has run lengths of the size {outline.get('size')}, and the image [{height}, {width}]"
        )
    counts = outline.get("counts")
    lengths = _from_text(counts) if isinstance(counts, str) else numbers_of(counts)
    is_whole = lengths is not None and lengths.ndim == 1 and bool((lengths == np.floor(lengths)).all())
    if lengths is None or not is_whole or (lengths < 0).any() or lengths.sum() != height * width:
        raise SampleUnreadable(f"segmentation has run lengths that do not fill {height} x {width} pixels")
    return np.cumsum(lengths.astype(np.int64))[:-1]


def _from_text(text: str) -> NDArray[np.float64] | None:
    """The run lengths in a text; None if it has none."""
    try:
        codes = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64) - _ZERO
    except UnicodeEncodeError:
        return None
    last = np.flatnonzero((codes & _MORE) == 0)
    if not len(codes) or ((codes < 0) | (codes >= 2 * _MORE)).any() or last[-1:].tolist() != [len(codes) - 1]:
        return None
    first = np.append(0, last[:-1] + 1)
    sizes = last - first + 1
    if sizes.max() > _CHARACTERS_MAX - 1:
        return None
    place = np.arange(len(codes)) - np.repeat(first, sizes)
    numbers = np.add.reduceat((codes & (_MORE - 1)) << (_BITS * place), first)
    numbers -= np.where(codes[last] & _SIGN, np.int64(1) << (_BITS * sizes), 0)
    for chain in (numbers[1::2], numbers[2::2]):
        np.cumsum(chain, out=chain)
    return numbers.astype(np.float64)


def _fill(mask: Mask, places: _Places) -> None:
    """Turn the pixels of ``mask`` from each place on, counted down the columns, to its end."""
    if not len(places):
        return
    height, width = mask.shape
    first, end = int(places[0]) // height, min(width, int(places[-1]) // height + 1)
    turns = np.bincount(places - first * height, minlength=(end - first) * height)[: (end - first) * height]
    inside = (np.cumsum(turns, dtype=np.uint8) & 1).reshape(end - first, height)
    if len(places) % 2 and end < width:
        mask[:, end:] = 1
    mask[:, first:end] |= inside.T
