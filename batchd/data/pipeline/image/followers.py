"""The followers of an image: masks, boxes and points, moved step by step as the image is.

Worker process.

    source                             here
    a PNG, or [height, width]       -> mask       [height, width]; see ``masks``
    uint8 [n, height, width]        -> masks      uint8 [n, height, width]
    float32 [n, 4], in any form     -> boxes      left, top, right, bottom
    any [n, ...]                    -> labels     the rows of the objects that are left
    float32 [n, points, 2 or 3]     -> keypoints  x, y, perhaps visibility
    float32 [n, 2]                  -> points     x, y

Coordinates are in pixels, x to the right and y down; the first pixel reaches from 0 to 1. So its
centre is at 1/2, and a flip of an image of width w moves x to w - x. They are computed in float64,
and rounded to float32 behind each stage. What belongs to the stored picture begins with the turn
that its EXIF tag asks for, as the first step.

In this order, for each step: a box moves, and becomes the smallest upright one around its corners;
it is cut off at the image's edge, so that a later padding does not bring back what a crop removed;
and if too little of it is left, it vanishes. Too little is no area, less than ``min_area``, or less
than ``min_visible`` of the area that the step found; so it makes no difference in how many stages
the steps are done. A box that vanishes becomes zeros in its place, or its row leaves the boxes and
all that has a row for each of them. Only then are the masks and keypoints of those that are left
moved.

Invariant: nothing here depends on how the image was stored or at which scale it was decoded, and no
random number is drawn. A box that is not said to have vanished has an area, also after rounding.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.image.geometry import (
    Cut,
    Motion,
    Move,
    Orientation,
    Padding,
    Resampling,
    TrailPart,
    Warp,
)
from batchd.data.pipeline.image.masks import decode_mask, moved_masks
from batchd.data.pipeline.image.opencv import Image, Scratch
from batchd.data.pipeline.image.options import BoxForm, BoxNumbers, Follow
from batchd.data.pipeline.image.resample import sine_and_cosine
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.stages import Row, Stage, make_stage
from batchd.data.samples.columns import Column, Following
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value, array_of
from batchd_wire.views import Array

Coordinates = npt.NDArray[np.float64]
Rows = npt.NDArray[np.bool_]
Length = int | npt.NDArray[np.int64]
"""Of an image, or of that of each box."""
_CORNERS = ([0, 1], [2, 1], [2, 3], [0, 3])
"""x and y of each corner of a box, in the order of its four numbers."""
_RELATIVE_MAX = 2.0
"""An object may lie outside of the picture in part; a coordinate in pixels is beyond this."""
_WITH_VISIBILITY = 3


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


class OnCanvas(NamedTuple):
    """What follows an image that is put on a canvas: boxes, and labels by field.

    ``numbers``: height and width of the image, top, left, height and width of the part that is
    seen, and its top and left on the canvas.
    """

    boxes: Coordinates
    labels: dict[str, Array]
    numbers: tuple[int, ...]


class Followers:
    """The followers of one image; those in ``writes`` go into the row.

    ``follow``: the step, if this stage is the one that takes them over from the source.
    """

    def __init__(
        self,
        lead: Column,
        before: Mapping[str, Column],
        after: Mapping[str, Column],
        writes: frozenset[str],
        follow: Follow | None,
    ) -> None:
        self._following, self._follow = lead.following, follow
        names = dict(lead.followers)
        self._mask, self._masks, self._boxes, self._points, self._keypoints = (
            names.get(role) for role in ("mask", "masks", "boxes", "points", "keypoints")
        )
        self._labels = [name for role, name in lead.followers if role == "label"]
        self._columns = {name: before[name] for _role, name in lead.followers}
        self._mask_made = None if self._mask is None else after[self._mask]
        self._writes = writes
        self._scratch = Scratch()

    @property
    def are_boxes(self) -> bool:
        """Whether boxes and their labels are all that follows."""
        others = self._mask, self._masks, self._points, self._keypoints
        return self._boxes is not None and not any(others)

    def taken(self, values: Mapping[str, Value], numbers: tuple[int, ...]) -> OnCanvas:
        """Copies of boxes and labels, for ``placed``. Raises as ``run``."""
        assert self._boxes is not None, "there are boxes"
        boxes = self._box_corners(values, self._boxes, (numbers[0], numbers[1]))
        labels = {name: np.array(array_of(self._columns[name], values[name])) for name in self._labels}
        for name, label in labels.items():
            if len(label) != len(boxes):
                raise SampleUndecodable(f"its {name!r} has {len(label)} rows, and its {self._boxes!r} {len(boxes)}")
        return OnCanvas(boxes, labels, numbers)

    def placed(self, parts: Sequence[OnCanvas], size: tuple[int, int]) -> dict[str, Array]:
        """Boxes and labels of images on a canvas of ``size``: as ``run`` of each, at once."""
        assert self._boxes is not None, "there are boxes"
        counts = [len(part.boxes) for part in parts]
        numbers = np.repeat(np.array([part.numbers for part in parts], np.int64), counts, axis=0)
        height, width, top, left, rows, columns, down, across = numbers.T
        maps = [_Placing(-left, -top, rows, columns), _Placing(across, down, *size)]
        before = np.concatenate([part.boxes for part in parts])
        boxes, is_left = moved_boxes(before, maps, (height, width), self._following)
        made: dict[str, Array] = {self._boxes: self._in_place(boxes[is_left], is_left)}
        for name in self._labels:
            labels = np.concatenate([part.labels[name] for part in parts])
            made[name] = labels[is_left] if self._following.drops_rows else labels
        return made

    @property
    def starts_stored(self) -> bool:
        """Whether what the source gives belongs to the picture as it is stored."""
        return self._follow is not None and self._follow.annotated == "stored"

    def run(
        self, values: dict[str, Value], row: Mapping[str, Image], size: tuple[int, int], trail: Sequence[TrailPart]
    ) -> None:
        """Do to the followers what was done to the image, which had ``size`` before it, in pixels.

        Raises ``SampleUndecodable`` for another size, no mask, numbers of rows that differ, and a
        coordinate that is no number.
        """
        if self._mask is not None:
            self._move_mask(self._mask, values, row, size, trail)
        maps = coordinate_maps(trail, *size) if self._boxes or self._points or self._keypoints else []
        if self._points is not None:
            points = self._coordinates(values, self._points, size)
            values[self._points] = _moved_points(points, maps).astype(np.float32)
        if self._boxes is not None:
            boxes, is_left = moved_boxes(self._box_corners(values, self._boxes, size), maps, size, self._following)
            values[self._boxes] = self._in_place(boxes[is_left], is_left)
            self._move_objects(values, size, trail, maps, is_left)
        elif self._masks is not None:
            masks = self._moved_masks(self._masks, values, size, trail, None)
            is_left = masks.reshape(len(masks), -1).max(axis=1, initial=0) > 0
            values[self._masks] = self._in_place(masks[is_left], is_left)
            self._move_objects(values, size, trail, maps, is_left)
        elif self._keypoints is not None:
            is_left = np.ones(len(np.asarray(values[self._keypoints])), np.bool_)
            self._move_objects(values, size, trail, maps, is_left)

    def _move_objects(
        self,
        values: dict[str, Value],
        size: tuple[int, int],
        trail: Sequence[TrailPart],
        maps: Sequence["CoordinateMap | Motion"],
        is_left: Rows,
    ) -> None:
        """Move what objects have besides what decides which of them are left."""
        first = self._boxes or self._masks or self._keypoints
        for name in self._following.of_objects:
            if name != first and (rows := len(np.asarray(values[name]))) != len(is_left):
                raise SampleUndecodable(f"its {name!r} has {rows} rows, and its {first!r} {len(is_left)}")
        if self._masks is not None and self._boxes is not None:
            masks = self._moved_masks(self._masks, values, size, trail, is_left)
            values[self._masks] = self._in_place(masks, is_left)
        if self._keypoints is not None:
            keypoints = self._coordinates(values, self._keypoints, size)[is_left]
            moved = self._moved_keypoints(keypoints, trail, maps, size)
            values[self._keypoints] = self._in_place(moved.astype(np.float32), is_left)
        if self._following.drops_rows:
            for label in self._labels:
                values[label] = np.asarray(values[label])[is_left]

    def _in_place(self, rows: Array, is_left: Rows) -> Array:
        """The rows of the objects that are left, with zeros between them unless rows leave."""
        if self._following.drops_rows:
            return rows
        made = np.zeros((len(is_left), *rows.shape[1:]), rows.dtype)
        made[is_left] = rows
        return made

    def _move_mask(
        self,
        name: str,
        values: dict[str, Value],
        row: Mapping[str, Image],
        size: tuple[int, int],
        trail: Sequence[TrailPart],
    ) -> None:
        assert self._mask_made is not None, "there is a mask"
        column = self._columns[name]
        if column.kind == "encoded":
            value = values[name]
            assert isinstance(value, memoryview)
            try:
                mask = decode_mask(value, size, self._mask_made.dtype)
            except SampleUndecodable as problem:
                raise SampleUndecodable(f"its {name!r}: {problem}") from None
        else:
            mask = array_of(column, values[name])
            _check_size(name, mask.shape, size)
        moved = moved_masks(mask[np.newaxis], trail, int(self._mask_made.fill), self._scratch, name)[0]
        if name in self._writes:
            np.copyto(row[name], moved)
            moved = row[name]
        values[name] = moved

    def _moved_masks(
        self,
        name: str,
        values: dict[str, Value],
        size: tuple[int, int],
        trail: Sequence[TrailPart],
        is_left: Rows | None,
    ) -> Array:
        masks = array_of(self._columns[name], values[name])
        if len(masks):
            _check_size(name, masks.shape[1:], size)
        else:
            masks = np.zeros((0, *size), np.uint8)  # of no object, in any size
        # where all are left there is no copy, which takes as long as to move them
        if is_left is not None and not is_left.all():
            masks = masks[is_left]
        return moved_masks(masks, trail, 0, self._scratch, name)

    def _moved_keypoints(
        self,
        keypoints: Coordinates,
        trail: Sequence[TrailPart],
        maps: Sequence["CoordinateMap | Motion"],
        size: tuple[int, int],
    ) -> Coordinates:
        """Move keypoints, [n, points, 2 or 3]; those that leave the image become zeros."""
        has_visibility = keypoints.shape[-1] == _WITH_VISIBILITY
        is_seen = keypoints[..., 2] > 0 if has_visibility else None
        places = keypoints[..., :2]
        if is_seen is not None:
            is_seen &= _is_inside(places, *size)
        for part, step in zip(trail, maps, strict=True):
            places = step.moved(places)
            if isinstance(part, Orientation) and sum(part) % 2 and self._following.flip_indices:
                places, keypoints = (one[:, list(self._following.flip_indices)] for one in (places, keypoints))
                is_seen = None if is_seen is None else is_seen[:, list(self._following.flip_indices)]
            if is_seen is not None:
                is_seen &= _is_inside(places, step.height, step.width)
        if is_seen is None:
            return places
        return np.where(is_seen[..., np.newaxis], np.concatenate([places, keypoints[..., 2:]], axis=-1), 0.0)

    def _coordinates(self, values: Mapping[str, Value], name: str, size: tuple[int, int]) -> Coordinates:
        """Points of the source in pixels, x and y first. Raises ``SampleUndecodable``."""
        numbers = array_of(self._columns[name], values[name]).astype(np.float64)
        _refuse(name, numbers, ~np.isfinite(numbers), "has a coordinate that is no finite number")
        if name == self._keypoints and (indices := self._following.flip_indices) and numbers.shape[1] != len(indices):
            raise SampleUndecodable(f"its {name!r} has {numbers.shape[1]} points, and flip_indices {len(indices)}")
        if self._follow is not None and self._follow.relative:
            sides = slice(None) if name == self._boxes else slice(2)
            far = np.asarray(np.abs(numbers[..., sides]) > _RELATIVE_MAX)
            _refuse(name, numbers, far, "has a coordinate that is no fraction of the picture, as relative = true says")
            high, wide = size
            numbers[..., sides] *= (wide, high, wide, high) if name == self._boxes else (wide, high)
        return numbers

    def _box_corners(self, values: Mapping[str, Value], name: str, size: tuple[int, int]) -> Coordinates:
        """The boxes, [n, 4], as left, top, right, bottom. Raises ``SampleUndecodable``."""
        boxes = self._coordinates(values, name, size)
        if self._follow is None:
            return boxes
        corners = _corners_of(boxes, self._follow.form)
        if self._follow.form != "xyxy":  # else it has no area, and vanishes
            is_negative: Rows = np.any(corners[:, 2:] < corners[:, :2], axis=1)
            _refuse(name, boxes, is_negative, "has a box of negative width or height")
        return corners


def _refuse(name: str, numbers: Array, is_bad: Rows, why: str) -> None:
    """Raise ``SampleUndecodable`` with the first row that has something bad."""
    if is_bad.any():
        row = int(np.argwhere(is_bad)[0, 0])
        shown = ", ".join(f"{number:.6g}" for number in numbers[row].reshape(-1)[:_SHOWN_MAX])
        more = ", .." if numbers[row].size > _SHOWN_MAX else ""
        raise SampleUndecodable(f"its {name!r} {why}: row {row} is [{shown}{more}]")


_SHOWN_MAX = 6


def _check_size(name: str, shape: Sequence[int], size: tuple[int, int]) -> None:
    if tuple(shape) != size:
        raise SampleUndecodable(
            f"its {name!r} has {shape[1]} x {shape[0]} pixels, and the image {size[1]} x {size[0]}; see annotated of follow"
        )


def _is_inside(places: Coordinates, height: int, width: int) -> Rows:
    return np.asarray(((places >= 0) & (places <= (width, height))).all(axis=-1))


def _moved_points(points: Coordinates, maps: Sequence["CoordinateMap | Motion"]) -> Coordinates:
    for step in maps:
        points = step.moved(points)
    return points


def _corners_of(boxes: Coordinates, form: BoxNumbers) -> Coordinates:
    """Boxes [n, 4] of a form as left, top, right, bottom."""
    first, last = boxes[:, :2], boxes[:, 2:]
    match form:
        case "xyxy":
            return boxes
        case "xywh":
            return np.concatenate([first, first + last], axis=1)
        case "cxcywh":
            return np.concatenate([first - last / 2, first + last / 2], axis=1)


def _formed(corners: Coordinates, form: BoxNumbers) -> Coordinates:
    """Boxes [n, 4] of left, top, right, bottom in another form."""
    first, last = corners[:, :2], corners[:, 2:]
    match form:
        case "xyxy":
            return corners
        case "xywh":
            return np.concatenate([first, last - first], axis=1)
        case "cxcywh":
            return np.concatenate([(first + last) / 2, last - first], axis=1)


@make_stage.register
def _box_form(step: BoxForm, before: Columns, _after: Columns) -> Stage:
    column, image = before[step.field], before[step.image]

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        boxes = _formed(array_of(column, values[column.name]).astype(np.float64), step.form)
        if step.relative:
            height, width = np.asarray(values[image.name]).shape[image.channels_first :][:2]
            boxes = boxes / (width, height, width, height)
        values[column.name] = boxes.astype(np.float32)

    return run


def coordinate_maps(trail: Sequence[TrailPart], height: int, width: int) -> list[CoordinateMap | Motion]:
    """The move of coordinates by each step of a trail, for an image of this size."""
    maps: list[CoordinateMap | Motion] = []
    for move in trail:
        step = move if isinstance(move, Motion) else _coordinate_map(move, height, width)
        maps.append(step)
        height, width = step.height, step.width
    return maps


class _Placing(NamedTuple):
    """The move of each box by numbers of its own, [n]: as ``CoordinateMap``."""

    left: npt.NDArray[np.int64]
    top: npt.NDArray[np.int64]
    height: Length
    width: Length

    def moved(self, points: Coordinates) -> Coordinates:
        """The points [n, corners, 2] afterwards."""
        return points + np.stack([self.left, self.top], axis=-1)[:, np.newaxis]


def moved_boxes(
    boxes: Coordinates,
    maps: Sequence[CoordinateMap | Motion | _Placing],
    size: tuple[Length, Length],
    following: Following,
) -> tuple[npt.NDArray[np.float32], Rows]:
    """Move boxes, [n, 4], of an image of ``size``. Gives them, and which of them are left."""
    moved, is_left = _cut_off(boxes, *size, following)
    for step in maps:
        corners = step.moved(moved[:, _CORNERS])
        moved = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
        moved, is_still_left = _cut_off(moved, step.height, step.width, following)
        is_left &= is_still_left
    rounded = moved.astype(np.float32)
    return rounded, is_left & _has_area(rounded.astype(np.float64), following.min_area)


def _cut_off(boxes: Coordinates, height: Length, width: Length, following: Following) -> tuple[Coordinates, Rows]:
    """Cut boxes off at the edge of an image. Gives them, and which of them have enough area."""
    inside = np.clip(boxes, 0, np.array([width, height, width, height]).T)
    is_left = _has_area(inside, following.min_area)
    if following.min_visible:
        is_left &= _areas(inside) >= following.min_visible * _areas(boxes)
    return inside, is_left


def _has_area(boxes: Coordinates, min_area: float) -> Rows:
    is_left = (boxes[:, 0] < boxes[:, 2]) & (boxes[:, 1] < boxes[:, 3])
    return np.asarray(is_left & (_areas(boxes) >= min_area) if min_area else is_left)


def _areas(boxes: Coordinates) -> Coordinates:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


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
