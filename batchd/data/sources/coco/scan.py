"""Find the images of a JSON of COCO, and the objects of each. Daemon.

    names      uint8 [bytes]     file names, one right after the other
    offsets    int64 [n + 1]     image i is called names[offsets[i]:offsets[i + 1]]
    image_ids  int64 [n]
    sizes      int32 [n, 2]      height and width as the JSON says; 0 where it does not
    firsts     int64 [n + 1]     its objects are firsts[i] to firsts[i + 1]
    extents    int64 [m, 2]      (first byte, bytes) of each annotation in the JSON
    ids        int64 [m]         of annotations; -1 without one
    repeated   int64 [r]         images whose id, or an annotation's, another image has, too: bad
                                 samples

The daemon reads the JSON once; of annotations it keeps where they are, and workers parse those of
their samples. Objects of an image are in the order of the file.

Invariant: each annotation belongs to an image, or is noted.
"""

import os
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchd.data.sources.coco.document import Document
from batchd.data.sources.coco.options import NO_ID, CocoSource
from batchd.data.sources.finding import FilePattern, NamedSamples
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.neighbours import in_order
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, blob, number_array
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

Numbers = NDArray[np.int64]
_INT64_MAX = (1 << 63) - 1
_SIDE_MAX = (1 << 31) - 1
_PROGRESS_EVERY = 4096
_CLASS_ID_MAX = 1 << 16
"""Ids above it have no names in the index: their numbers would need a list as long."""


class _Content:
    """What a JSON has."""

    def __init__(self) -> None:
        self.names = bytearray()
        self.offsets = array("q", [0])
        self.image_ids = array("q")
        self.sizes = array("i")
        self.of_image = array("q")
        self.extents = array("q")
        self.ids = array("q")
        self.categories: dict[int, str] = {}

    def add_image(self, image: Mapping[str, Any]) -> None:
        """Raises ``ValueError``, as all of these."""
        name = image.get("file_name")
        if not isinstance(name, str) or not name or "\0" in name:
            raise ValueError(f'"file_name" is {name!r}, and no name of a file')
        self.image_ids.append(_whole(image, "id"))
        sides = [image.get(side, 0) for side in ("height", "width")]
        self.sizes.extend(side if type(side) is int and 0 < side <= _SIDE_MAX else 0 for side in sides)
        self.names += name.encode()
        self.offsets.append(len(self.names))

    def add_annotation(self, annotation: Mapping[str, Any], start: int, end: int, *, crowds: bool) -> None:
        """Add it, unless it stands for a crowd, and these are left out."""
        image, number = _whole(annotation, "image_id"), annotation.get("id")
        if annotation.get("iscrowd") and not crowds:
            return
        self.of_image.append(image)
        self.ids.append(number if type(number) is int and abs(number) <= _INT64_MAX else NO_ID)
        self.extents.extend((start, end - start))

    def add_category(self, category: Mapping[str, Any]) -> None:
        """Add it."""
        name = category.get("name")
        self.categories[_whole(category, "id")] = name if isinstance(name, str) else ""


def _whole(record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if type(value) is not int or abs(value) > _INT64_MAX:
        raise ValueError(f'"{key}" is {value!r}, and no whole number')
    return value


def _scan(source: CocoSource, survey: Survey) -> SourceIndex:
    found = _Content()
    with survey.open(source.path) as stream:
        document = Document(source.path, stream)
        for count, (key, start, end, value) in enumerate(document.elements()):
            if count % _PROGRESS_EVERY == 0:
                survey.looked()
                survey.progress(len(found.image_ids))
            try:
                if key in ("images", "annotations", "categories") and not isinstance(value, dict):
                    raise ValueError("is no object")
                if key == "images":
                    found.add_image(value)
                elif key == "annotations":
                    found.add_annotation(value, start, end, crowds=source.crowds)
                elif key == "categories":
                    found.add_category(value)
            except ValueError as error:
                raise SourceInvalid(f'{source.path}: of "{key}" the object at byte {start}: {error}') from None
    if not found.image_ids:
        raise SourceInvalid(f'{source.path} names no images: it has no "images", or none in them')
    return _index(source, survey, found, document)


def _index(source: CocoSource, survey: Survey, found: _Content, document: Document) -> SourceIndex:
    image_ids, of_image = np.asarray(found.image_ids, np.int64), np.asarray(found.of_image, np.int64)
    by_id = np.argsort(image_ids, kind="stable")
    place = np.searchsorted(image_ids, of_image, sorter=by_id)
    image = by_id[np.minimum(place, len(by_id) - 1)]
    is_there = image_ids[image] == of_image
    ids = np.asarray(found.ids, np.int64)
    if not is_there.all():
        first = int(np.flatnonzero(~is_there)[0])
        survey.note(
            "annotations of images that it does not have, which are left out",
            f"annotation {ids[first]} of image {of_image[first]} in {source.path}",
            count=int((~is_there).sum()),
        )
    order = np.flatnonzero(is_there)[np.argsort(image[is_there], kind="stable")]
    counts = np.bincount(image[is_there], minlength=len(image_ids))
    same = np.flatnonzero(np.diff(image_ids[by_id]) == 0)
    repeated = np.unique(by_id[np.concatenate([same, same + 1])])
    if len(repeated):
        where = f"image {image_ids[repeated[0]]} in {source.path}"
        survey.note("images with the id of another one, which are bad samples", where, count=len(repeated))
    if source.needs_objects:
        shared = _images_that_share(ids[order], image[order])
        if len(shared):
            where = f"image {image_ids[shared[0]]} in {source.path}"
            what = "images with the id of an annotation of another one, which are bad samples"
            survey.note(what, where, count=len(shared))
        repeated = np.union1d(repeated, shared)
    names, offsets = np.frombuffer(bytes(found.names), np.uint8), np.asarray(found.offsets, np.int64)
    sizes = np.asarray(found.sizes, np.int32).reshape(-1, 2)
    if not source.empty:
        kept = counts > 0
        if not kept.any():
            raise SourceInvalid(f"{source.path}: no image has an object, and empty = false leaves all of them out")
        lengths = np.diff(offsets)
        names, offsets = names[np.repeat(kept, lengths)], np.append(0, np.cumsum(lengths[kept]))
        repeated = np.flatnonzero(np.isin(np.flatnonzero(kept), repeated))
        image_ids, sizes, counts = image_ids[kept], sizes[kept], counts[kept]
    arrays = {
        "names": names,
        "offsets": number_array(offsets),
        "image_ids": number_array(image_ids),
        "sizes": number_array(sizes),
        "firsts": number_array(np.append(0, np.cumsum(counts))),
        "extents": number_array(np.asarray(found.extents, np.int64).reshape(-1, 2)[order]),
        "ids": number_array(ids[order]),
        "repeated": number_array(repeated),
        "classes": blob(_class_names(source, found.categories)),
    }
    facts = {
        "file": [document.size, document.checksum],
        "categories": sorted(found.categories),
        "fields": [source.class_numbers, source.keypoints, *source.fields],
    }
    roots = {"images": source.images, "segments": source.segments}
    places = {name: str(root.absolute()) for name, root in roots.items() if root is not None}
    file = {"path": str(source.path.absolute())}
    return SourceIndex.build(len(image_ids), facts, arrays, {**file, **places, **survey.place()})


def _images_that_share(ids: Numbers, images: Numbers) -> Numbers:
    """The images with an annotation whose id one of another image has. Both: int64 ``[m]``."""
    by_id = np.argsort(ids, kind="stable")
    ids, images = ids[by_id], images[by_id]
    pairs = np.flatnonzero((ids[1:] == ids[:-1]) & (images[1:] != images[:-1]) & (ids[1:] != NO_ID))
    return np.unique(images[np.concatenate([pairs, pairs + 1])])


def _class_names(source: CocoSource, categories: Mapping[int, str]) -> list[bytes]:
    """The names of the numbers in "classes", as far as these are few."""
    numbers = sorted(categories)
    if source.class_numbers == "ids":
        is_few = numbers and numbers[0] >= 0 and numbers[-1] < _CLASS_ID_MAX
        numbers = list(range(numbers[-1] + 1)) if is_few else []
    return [categories.get(number, "").replace("\0", "").encode(errors="replace") for number in numbers]


def _problems(source: CocoSource, storage: Storage) -> list[str]:
    problems = storage.at(source.path).file_problems(source.path, "the annotations")
    for root in (source.images, source.segments):
        problems += storage.at(root).folder_problems(root) if root is not None else []
    return problems


def _find(_source: CocoSource, index: SourceIndex, pattern: FilePattern) -> Numbers:
    before = os.fsencode(index.place["images"]).rstrip(b"/") + b"/"
    return NamedSamples(index.arrays["offsets"], index.arrays["names"], before).find(pattern)


def _lengths(source: CocoSource, index: SourceIndex, field: str) -> Numbers | None:
    has_rows = any(column.name == field and None in column.shape for column in source.columns)
    return np.diff(index.arrays["firsts"]) if has_rows and not source.segments else None


KINDS = {
    CocoSource: BuiltInKind(
        problems=_problems,
        scan=_scan,
        neighbours=lambda _source, index: in_order(index, "each sample is a file, and the index has no sizes of files"),
        labels=lambda _source, _index: None,
        find=_find,
        lengths=_lengths,
    )
}
