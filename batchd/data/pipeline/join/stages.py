"""The stages of the steps that make one sample of several. Worker process.

    mosaic     +-----------+-----------+   four images around a point; each is moved there with its
               |    sample |  other    |   boxes, masks and points as by a crop and a padding, and
               +-----------*-----------+   the objects of all are one list, the sample's first
               |   other   |  other    |
               +-----------+-----------+

    mixup      levels of two images by a share, in whole numbers; the objects of both
    copy_paste some objects of another sample, or of the mirrored one, over those of the sample

``execute.Pipeline`` draws the others and makes them by the steps before.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.image.followers import Followers, OnCanvas
from batchd.data.pipeline.image.geometry import UPRIGHT, Geometry
from batchd.data.pipeline.image.opencv import Pixels, Scratch
from batchd.data.pipeline.join import options
from batchd.data.pipeline.stages import JoinStage, make_stage
from batchd.data.samples.columns import Column
from batchd.data.samples.image_header import PIXELS_MAX
from batchd.data.samples.values import Canvas, Value, array_of
from batchd_wire.views import Array

Rows: TypeAlias = npt.NDArray[np.bool_ | np.intp]
"""Which objects, or which pixels."""
_SHARES = 256
_AREA_MIN = 1e-9
_WITH_VISIBILITY, _HIDDEN = 3, 1


class _Objects:
    """The rows of the objects of several samples, which become one list."""

    def __init__(self, lead: Column, columns: Mapping[str, Column]) -> None:
        self._columns = [columns[name] for role, name in lead.followers if role != "mask"]
        self._points = dict(lead.followers).get("points")
        self._rows: dict[str, list[Array]] = {}

    def begin(self) -> None:
        """Begin without an object."""
        self._rows = {column.name: [] for column in self._columns}

    def add(self, values: Mapping[str, Value], of_objects: Rows | None = None) -> None:
        """Add those of a sample, or some of its objects; its values may be gone afterwards."""
        for column in self._columns:
            rows = array_of(column, values[column.name])
            if of_objects is not None and column.name != self._points:
                rows = rows[of_objects]
            self._rows[column.name].append(np.array(rows))

    def joined(self) -> dict[str, Array]:
        """The rows of all, by field."""
        return {name: np.concatenate(rows) for name, rows in self._rows.items()}


@make_stage.register(options.Mosaic)
class _Mosaic(JoinStage):
    def __init__(self, step: options.Mosaic, before: Columns, after: Columns) -> None:
        super().__init__(step, 2)
        self._size, self._fill, self._channels = step.size, step.fill, after[step.field].shape[2]
        lead = after[step.field]
        self._followers = Followers(lead, before, after, frozenset(), None) if lead.followers else None
        self._objects = _Objects(lead, after)
        self._mask = next((after[name] for role, name in lead.followers if role == "mask"), None)
        self._scratch = Scratch()
        self._placed: list[OnCanvas] = []
        """What follows the images, if that is boxes alone."""
        self._made: Pixels = np.empty((0, 0, 0), np.uint8)
        """The canvas, if it is made here."""

    def join(
        self, values: dict[str, Value], others: Iterable[dict[str, Value]], numbers: Sequence[float]
    ) -> dict[str, object]:
        """See ``JoinStage``."""
        down, across = (int(half / 2 + number * half) for half, number in zip(self._size, numbers, strict=True))
        canvas, mask = self._begun()
        for place, one in enumerate(_first_of(values, others)):
            height, width = np.asarray(one[self.step.field]).shape[:2]
            top, left = down - height * (place < 2), across - width * (place % 2 == 0)  # noqa: PLR2004  the upper row
            self._put(one, canvas, mask, top, left)
        self._end(values, canvas, mask)
        return {"centre": [across, down]}

    def alone(self, values: dict[str, Value]) -> None:
        """See ``JoinStage``."""
        canvas, mask = self._begun()
        height, width = np.asarray(values[self.step.field]).shape[:2]
        self._put(values, canvas, mask, self._size[0] - height // 2, self._size[1] - width // 2)
        self._end(values, canvas, mask)

    def _begun(self) -> tuple[Canvas, Array | None]:
        size = 2 * self._size[0], 2 * self._size[1]
        assert self._channels is not None, "an image of known channels"
        canvas = Canvas((*size, self._channels), self._fill, partial(self._scratch.image, "canvas"))
        self._objects.begin()
        self._placed.clear()
        if not self.passes_canvas:
            self._made = canvas.whole()
        return canvas, None if self._mask is None else np.full(size, self._mask.fill, self._mask.dtype)

    def _put(self, values: dict[str, Value], canvas: Canvas, mask: Array | None, top: int, left: int) -> None:
        """Put the image of a sample there, and what follows it."""
        pixels = _pixels_of(values, self.step.field)
        height, width = pixels.shape[:2]
        (rows, columns), seen = canvas.seen(pixels.shape, top, left)
        if not self.passes_canvas:
            self._made[rows, columns] = pixels[seen]
        elif self.values_stay():
            canvas.parts.append((pixels, top, left))
        else:
            part = pixels[seen]
            kept = self._scratch.image(("part", len(canvas.parts)), part.shape)
            np.copyto(kept, part)
            canvas.parts.append((kept, rows.start, columns.start))
        if self._followers is None:
            return
        if self._followers.are_boxes:
            box = (one for part in seen for one in (part.start, part.stop - part.start))
            first_row, high, first_column, wide = box
            numbers = height, width, first_row, first_column, high, wide, rows.start, columns.start
            self._placed.append(self._followers.taken(values, numbers))
            return
        geometry = Geometry(height, width, 1, PIXELS_MAX, is_followed=True)
        geometry.window(-top, -left, canvas.shape[0], canvas.shape[1], self._fill)
        moved = dict(values)
        assert geometry.trail is not None, "it is followed"
        self._followers.run(moved, {}, (height, width), geometry.trail)
        self._objects.add(moved)
        if mask is not None and self._mask is not None:
            mask[rows, columns] = np.asarray(moved[self._mask.name])[rows, columns]

    def _end(self, values: dict[str, Value], canvas: Canvas, mask: Array | None) -> None:
        if self._placed and self._followers is not None:
            values |= self._followers.placed(self._placed, canvas.shape[:2])
        else:
            values |= self._objects.joined()
        values[self.step.field] = canvas if self.passes_canvas else self._made
        if mask is not None and self._mask is not None:
            values[self._mask.name] = mask


@make_stage.register(options.MixUp)
class _MixUp(JoinStage):
    def __init__(self, step: options.MixUp, _before: Columns, after: Columns) -> None:
        # the median of an odd number of even numbers is from Beta(alpha, alpha)
        super().__init__(step, 2 * step.alpha - 1)
        lead = after[step.field]
        self._objects = _Objects(lead, after)
        self._mask = next((after[name] for role, name in lead.followers if role == "mask"), None)

    def join(
        self, values: dict[str, Value], others: Iterable[dict[str, Value]], numbers: Sequence[float]
    ) -> dict[str, object]:
        """See ``JoinStage``."""
        share = round(sorted(numbers)[len(numbers) // 2] * _SHARES)
        pixels = _copied(values, self.step.field, self._mask)
        self._objects.begin()
        self._objects.add(values)
        for other in others:
            blended = np.multiply(pixels, share, dtype=np.uint16)
            blended += np.multiply(_pixels_of(other, self.step.field), _SHARES - share, dtype=np.uint16)
            blended //= _SHARES
            values[self.step.field] = blended.astype(np.uint8)
            if self._mask is not None and 2 * share < _SHARES:
                values[self._mask.name] = np.array(other[self._mask.name])
            self._objects.add(other)
        values |= self._objects.joined()
        return {"share": share / _SHARES}


@make_stage.register(options.CopyPaste)
class _CopyPaste(JoinStage):
    def __init__(self, step: options.CopyPaste, before: Columns, after: Columns) -> None:
        super().__init__(step, 0)
        lead = after[step.field]
        self._fraction, self._max_overlap, self._is_mirrored = step.fraction, step.max_overlap, not step.others
        self._following = lead.following
        self._objects = _Objects(lead, after)
        names = dict(lead.followers)
        self._masks, self._boxes, self._keypoints = after[names["masks"]], names.get("boxes"), names.get("keypoints")
        self._mask = next((after[name] for role, name in lead.followers if role == "mask"), None)
        self._followers = Followers(lead, before, after, frozenset(), None)

    def join(
        self, values: dict[str, Value], others: Iterable[dict[str, Value]], _numbers: Sequence[float]
    ) -> dict[str, object]:
        """See ``JoinStage``."""
        pixels = _copied(values, self.step.field, self._mask)
        for _role, name in self._following.roles:
            values[name] = np.array(values[name])
        self._objects.begin()
        pasted = 0
        for other in [self._mirrored(values)] if self._is_mirrored else others:
            chosen = self._chosen(values, other)
            masks = np.asarray(other[self._masks.name])[chosen]
            covered = np.asarray(masks.any(axis=0)) if len(chosen) else np.zeros(pixels.shape[:2], np.bool_)
            pixels[covered] = _pixels_of(other, self.step.field)[covered]
            if self._mask is not None:
                np.asarray(values[self._mask.name])[covered] = np.asarray(other[self._mask.name])[covered]
            self._objects.add(values, self._left(values, covered))
            self._objects.add(other, chosen)
            pasted += len(chosen)
        if pasted:
            values |= self._objects.joined()
        return {"pasted": pasted}

    def _mirrored(self, values: Mapping[str, Value]) -> dict[str, Value]:
        other = dict(values)
        pixels = _pixels_of(values, self.step.field)
        self._followers.run(other, {}, pixels.shape[:2], [UPRIGHT._replace(horizontal=True)])
        return {**other, self.step.field: pixels[:, ::-1]}

    def _chosen(self, values: Mapping[str, Value], other: Mapping[str, Value]) -> Rows:
        """The numbers of the objects that are pasted, of those that cover little."""
        boxes, others = (self._boxes_of(one) for one in (values, other))
        low, high = boxes[:, :2], boxes[:, 2:]
        inner = np.minimum(others[:, None, 2:], high) - np.maximum(others[:, None, :2], low)
        areas = np.maximum((high - low).prod(axis=1), _AREA_MIN)
        most = (inner.clip(0).prod(axis=2) / areas).max(axis=1, initial=0.0)
        has_pixels = np.asarray(other[self._masks.name]).any(axis=(1, 2))
        may = np.flatnonzero((most < self._max_overlap) & has_pixels)
        ordered = may[np.argsort(most[may], kind="stable")]
        return np.asarray(ordered[: round(self._fraction * len(ordered))])

    def _boxes_of(self, values: Mapping[str, Value]) -> Array:
        """The boxes of objects, float64 [n, 4], or those around their masks."""
        if self._boxes is not None:
            return np.asarray(values[self._boxes]).astype(np.float64)
        return np.array([_extent(mask) for mask in np.asarray(values[self._masks.name])], np.float64).reshape(-1, 4)

    def _left(self, values: dict[str, Value], covered: Rows) -> Rows:
        """Take what is covered from the objects. Gives the numbers of those that stay."""
        masks = np.asarray(values[self._masks.name])
        before = np.count_nonzero(masks, axis=(1, 2))
        masks[:, covered] = 0
        after = np.count_nonzero(masks, axis=(1, 2))
        is_left = (after == before) | ((after > 0) & (after >= self._following.min_visible * before))
        if self._boxes is not None:
            boxes = np.asarray(values[self._boxes])
            for number in np.flatnonzero((after != before) & is_left):
                left, top, right, bottom = _extent(masks[number])
                boxes[number] = np.maximum(boxes[number], [left, top, 0, 0])
                boxes[number, 2:] = np.minimum(boxes[number, 2:], [right, bottom])
            sides = boxes[:, 2:] - boxes[:, :2]
            is_left &= (after == before) | ((sides > 0).all(axis=1) & (sides.prod(axis=1) >= self._following.min_area))
        if self._keypoints is not None:
            _hide(np.asarray(values[self._keypoints]), covered)
        if self._following.drops_rows:
            return np.flatnonzero(is_left)
        for name in (self._masks.name, self._boxes, self._keypoints):
            if name is not None:
                np.asarray(values[name])[~is_left] = 0
        return np.arange(len(masks))


def _hide(keypoints: Array, covered: Rows) -> None:
    """Make visible points that are covered now hidden ones, as COCO numbers them."""
    if keypoints.shape[-1] == _WITH_VISIBILITY:
        x, y = (np.clip(keypoints[..., side].astype(np.intp), 0, covered.shape[1 - side] - 1) for side in range(2))
        keypoints[..., 2][covered[y, x] & (keypoints[..., 2] > _HIDDEN)] = _HIDDEN


def _extent(mask: Array) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of what is not 0; zeros if all is."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if rows.size else (0, 0, 0, 0)


def _pixels_of(values: Mapping[str, Value], field: str) -> Pixels:
    """The image, uint8 [height, width, channels]."""
    pixels = np.asarray(values[field])
    return pixels.reshape(*pixels.shape[:2], -1)


def _copied(values: dict[str, Value], field: str, mask: Column | None) -> Pixels:
    """Copy image and mask, whose memory another sample takes, in ``values``; gives the image."""
    pixels = values[field] = _pixels_of(values, field).copy()
    if mask is not None:
        values[mask.name] = np.array(values[mask.name])
    return pixels


def _first_of(first: dict[str, Value], others: Iterable[dict[str, Value]]) -> Iterable[dict[str, Value]]:
    yield first
    yield from others
