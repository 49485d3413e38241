"""Read images, and the objects in them. Workers only.

Invariant: a sample has all objects of its image in rows of each field, in the same order, or it is
bad, and says which annotation is wrong.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value, nested
from batchd.data.sources.coco.options import CAPTIONS, IMAGE, IMAGE_ID, KEYPOINTS, MASKS, NO_ID, SEGMENTS, CocoSource
from batchd.data.sources.coco.outlines import mask_of, numbers_of
from batchd.data.sources.interface import PlainReader
from batchd.data.sources.jsonl.values import json_object
from batchd.data.sources.records import NamedFile, NamedFiles
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.reader import BytesReader, Extent, RemoteBytes
from batchd_wire.views import Array

_Object = Mapping[str, Any]
MASK_BYTES_MAX = 1 << 30
"""Of all masks of an image."""


class CocoReader(PlainReader):
    """Reads the fields of any image."""

    def __init__(self, source: CocoSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._index = index
        self._source = source
        self._path = os.fsencode(index.place["path"])
        self._extents, self._ids = index.arrays["extents"], index.arrays["ids"]
        self._names = index.arrays["names"].data.cast("B")
        self._before = os.fsencode(index.place["images"]).rstrip(b"/") + b"/"
        self._numbers = {
            number: number if source.class_numbers == "ids" else place
            for place, number in enumerate(index.facts["categories"])
        }
        self._repeated: list[int] = index.arrays["repeated"].tolist()
        self._bytes = BytesReader(RemoteBytes(storage, self._path, index.place), max_bytes, "file")
        outside = source.allow_outside_root
        self._files = {
            name: NamedFiles([os.fsencode(index.place[place])], max_bytes, storage, allow_outside_root=outside)
            for name, place in ((IMAGE, "images"), (SEGMENTS, "segments"))
            if name in source.fields
        }
        self._columns = {column.name: column for column in source.columns}
        self.close = self._bytes.close

    def name(self, sample: int) -> str:
        """See ``interface.Reader``."""
        return readable(self.file(sample))

    def file(self, sample: int) -> bytes:
        """See ``interface.NamesFiles``."""
        name = self._name(sample)
        return name if name.startswith(b"/") else self._before + name

    def known(self, sample: int) -> Mapping[str, Value]:
        """The image's id, from the index."""
        return {IMAGE_ID: self._index.arrays["image_ids"][sample]} if IMAGE_ID in self._columns else {}

    def prefetch(self, samples: Sequence[int]) -> None:
        """Request the annotations and the images from servers at once."""
        if self._source.needs_objects:
            self._bytes.prefetch(
                Extent(self._path, *self._extents[place].tolist()) for one in samples for place in self._places(one)
            )
        if IMAGE in self._files:
            self._files[IMAGE].prefetch((0, os.fsdecode(self._name(sample))) for sample in samples)

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        self._check_id(sample)
        values: dict[str, Value] = dict(self.known(sample))
        if self._source.needs_objects:
            values |= self._of_objects(sample)
        if IMAGE in self._files:
            values[IMAGE] = self._files[IMAGE].read(NamedFile(0, os.fsdecode(self._name(sample)), "file_name"), sample)
        return {name: values[name] for name in self._columns}

    def _of_objects(self, sample: int) -> dict[str, Value]:
        objects = [self._object(place) for place in self._places(sample)]
        numbers = [number for one in objects if isinstance(number := one.get("id"), int)]
        if len(set(numbers)) < len(numbers):
            twice = next(number for number in numbers if numbers.count(number) > 1)
            raise SampleUnreadable(f"annotation {twice} is in the JSON more than once")
        values: dict[str, Value] = {}
        if self._source.segments is not None:
            objects, values[SEGMENTS] = self._panoptic(sample, objects)
        for name in self._columns:
            if name in _ROWS:
                values[name] = self._rows(name, objects, _ROWS[name])
        if MASKS in self._columns:
            values[MASKS] = self._masks(sample, objects)
        if KEYPOINTS in self._columns:
            values[KEYPOINTS] = self._rows(KEYPOINTS, objects, self._keypoints)
        if CAPTIONS in self._columns:
            values[CAPTIONS] = nested(self._columns[CAPTIONS], [one.get("caption") for one in objects])
        if "classes" in self._columns:
            values["classes"] = self._rows("classes", objects, self._class)
        return values

    def _rows(self, name: str, objects: Sequence[_Object], row: Callable[[_Object], object]) -> Array:
        """A field with a row for each object. Raises ``SampleUnreadable`` with the annotation."""
        column = self._columns[name]
        rows = []
        for one in objects:
            try:
                rows.append(row(one))
            except SampleUnreadable as error:
                raise SampleUnreadable(f"annotation {one.get('id')}: its {error}") from None
        shape = [-1 if length is None else length for length in column.shape]
        return np.asarray(rows, column.dtype).reshape([len(rows), *shape[1:]])

    def _masks(self, sample: int, objects: Sequence[_Object]) -> Array:
        height, width = self._index.arrays["sizes"][sample].tolist()
        if not height or not width:
            raise SampleUnreadable('has no "height" and "width" in the JSON, which its masks need')
        if len(objects) * height * width > MASK_BYTES_MAX:
            raise SampleUnreadable(f"has {len(objects)} masks of {width} x {height} pixels, more than 1 GiB together")
        masks = np.zeros((len(objects), height, width), np.uint8)
        for one, mask in zip(objects, masks, strict=True):
            try:
                mask_of(one.get("segmentation"), mask)
            except SampleUnreadable as error:
                raise SampleUnreadable(f"annotation {one.get('id')}: its {error}") from None
        return masks

    def _keypoints(self, one: _Object) -> Array:
        count = self._source.keypoints
        numbers = numbers_of(one.get(KEYPOINTS, [0] * (3 * count)))
        if numbers is None or numbers.shape != (3 * count,) or not np.isfinite(numbers).all():
            raise SampleUnreadable(f"keypoints are not x, y and visibility of {count} points")
        return numbers.reshape(count, 3)

    def _class(self, one: _Object) -> int:
        number = one.get("category_id")
        if type(number) is not int or number not in self._numbers:
            raise SampleUnreadable(f"category_id is {number!r}, which is the id of no category")
        return self._numbers[number]

    def _panoptic(self, sample: int, objects: Sequence[_Object]) -> tuple[list[_Object], Value]:
        """The segments of a panoptic annotation, and the bytes of its PNG."""
        if len(objects) != 1:
            raise SampleUnreadable(f"has {len(objects)} panoptic annotations, and not one")
        segments, name = objects[0].get("segments_info"), objects[0].get("file_name")
        if not isinstance(segments, list) or not all(isinstance(one, dict) for one in segments):
            raise SampleUnreadable('its annotation has no list "segments_info" of objects')
        if not isinstance(name, str):
            raise SampleUnreadable('its annotation has no "file_name" of a PNG')
        kept = [one for one in segments if self._source.crowds or not one.get("iscrowd")]
        return kept, self._files[SEGMENTS].read(NamedFile(0, name, "file_name"), sample)

    def _object(self, place: int) -> _Object:
        """An annotation. Raises ``SampleUnreadable``."""
        start, size = self._extents[place].tolist()
        try:
            return json_object(bytes(self._bytes.read_extent(self._path, start, size)))
        except SampleUnreadable as error:
            raise SampleUnreadable(f"annotation {self._ids[place]} {error}") from None

    def _places(self, sample: int) -> range:
        firsts = self._index.arrays["firsts"]
        return range(int(firsts[sample]), int(firsts[sample + 1]))

    def _name(self, sample: int) -> bytes:
        offsets = self._index.arrays["offsets"]
        return bytes(self._names[int(offsets[self._index.checked(sample)]) : int(offsets[sample + 1])])

    def _check_id(self, sample: int) -> None:
        place = bisect_left(self._repeated, self._index.checked(sample))
        if place == len(self._repeated) or self._repeated[place] != sample:
            return
        image_ids = self._index.arrays["image_ids"]
        number = image_ids[sample]
        if np.count_nonzero(np.asarray(image_ids) == number) > 1:
            raise SampleUnreadable(f"has the id {number}, as another image, so its objects are not known")
        ids, places = np.asarray(self._ids), self._places(sample)
        own = ids[places.start : places.stop]
        twice = next(one for one in own if one != NO_ID and np.count_nonzero(ids == one) > np.count_nonzero(own == one))
        raise SampleUnreadable(f"annotation {twice} is in the JSON more than once, of another image, too")


def _box(one: _Object) -> list[float]:
    numbers = numbers_of(one.get("bbox"))
    if numbers is None or numbers.shape != (4,):
        raise SampleUnreadable("bbox is no list of left, top, width and height")
    if not np.isfinite(numbers).all():
        raise SampleUnreadable("bbox has a number that is not finite")
    left, top, width, height = numbers.tolist()
    if width < 0 or height < 0:
        raise SampleUnreadable("bbox has a negative width or height")
    return [left, top, left + width, top + height]


def _area(one: _Object) -> float:
    area = one.get("area")
    if isinstance(area, bool) or not isinstance(area, (int, float)) or not np.isfinite(area):
        raise SampleUnreadable(f"area is {area!r}, and no number")
    return float(area)


def _number(one: _Object) -> int:
    number = one.get("id")
    if type(number) is not int or abs(number) >= 1 << 63:
        raise SampleUnreadable(f"id is {number!r}, and no whole number")
    return number


_ROWS: Mapping[str, Callable[[_Object], object]] = {
    "boxes": _box,
    "areas": _area,
    "ids": _number,
    "crowd": lambda one: bool(one.get("iscrowd")),
}


READERS = {CocoSource: CocoReader}
