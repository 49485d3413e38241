"""Read files that belong together, and the objects that a text or an XML names. Workers only.

Invariant: a sample has all objects of its image in rows of each field, in the order of the file, or
it is bad, and says which line or object is wrong.
"""

import os
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.columns import Column, ColumnKind
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value, real_number
from batchd.data.sources.interface import PlainReader
from batchd.data.sources.pairs.options import PairedOptions, PairsSource, VocSource, YoloSource
from batchd.data.sources.webdataset.options import Coding
from batchd.data.sources.webdataset.reader import value_of
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.paths import bound_of
from batchd.data.storage.reader import BytesReader, Extent, RemoteBytes

OBJECTS_BYTES_MAX = 16 << 20
"""Of the text or XML of an image."""
_BOX = 5
"""Numbers of a class and its box."""
_FRACTION_MAX = 1.01
"""What rounding may make of 1, as ultralytics takes it."""
_CODINGS: Mapping[ColumnKind, Coding] = {"encoded": "image", "text": "text", "array": "npy"}
Rows = Mapping[str, object]
"""The fields of all objects of an image."""


class PairsReader(PlainReader):
    """Reads the files of a sample, each into a buffer of its own."""

    def __init__(self, source: PairedOptions, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._index = index
        self._root = os.fsencode(index.place["root"]).rstrip(b"/") + b"/"
        bound = bound_of(self._root, allow_outside_root=source.allow_outside_root)
        remote = RemoteBytes(storage, self._root, index.place)
        self._fields = list(source.patterns)
        self._bytes = [BytesReader(remote, max_bytes, "file", bound) for _field in self._fields]
        self._max_bytes = max_bytes
        self._columns = {column.name: column for column in source.columns}
        arrays = [(f"{place}." if place else "") for place in range(len(self._fields))]
        self._offsets = [index.arrays[f"{prefix}offsets"] for prefix in arrays]
        self._names = [index.arrays[f"{prefix}names"].data.cast("B") for prefix in arrays]
        if self._bytes[0].reads_ahead:
            self.prefetch = self._prefetch

    def name(self, sample: int) -> str:
        """See ``interface.Reader``."""
        return readable(self.file(sample))

    def file(self, sample: int) -> bytes:
        """See ``interface.NamesFiles``."""
        return self._path(0, sample)

    def close(self) -> None:
        """See ``interface.Reader``."""
        for one in self._bytes:
            one.close()

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        return {
            name: value_of(column, _CODINGS[column.kind], self._content(place, sample), self._max_bytes)
            for place, (name, column) in enumerate(self._columns.items())
        }

    def _content(self, place: int, sample: int) -> memoryview:
        """A file of a sample. Raises ``SampleUnreadable``, naming it if it is not the first."""
        path = self._path(place, sample)
        try:
            return self._bytes[place].read_file(path, sample)
        except SampleUnreadable as error:
            raise (SampleUnreadable(f"{readable(path)}: {error}") if place else error) from None

    def _path(self, place: int, sample: int) -> bytes:
        """The path of a file; that of the root where there is none."""
        offsets, sample = self._offsets[place], self._index.checked(sample)
        return self._root + bytes(self._names[place][int(offsets[sample]) : int(offsets[sample + 1])])

    def _prefetch(self, samples: Sequence[int]) -> None:
        for place, one in enumerate(self._bytes):
            paths = [self._path(place, sample) for sample in samples]
            one.prefetch(Extent(path, 0, None) for path in paths if path != self._root)


class ObjectsReader(PairsReader):
    """Base of the readers of an image and its objects."""

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        values: dict[str, Value] = {}
        if self._columns.keys() - {"image"}:
            rows = self._objects(sample)
            values |= {name: _array(column, rows[name]) for name, column in self._columns.items() if name in rows}
        if "image" in self._columns:
            values["image"] = self._content(0, sample)
        return {name: values[name] for name in self._columns}

    def _objects(self, sample: int) -> Rows:
        """The fields of the objects. Raises ``SampleUnreadable``, naming their file."""
        path = self._path(1, sample)
        content = b"" if path == self._root else bytes(self._content(1, sample)[: OBJECTS_BYTES_MAX + 1])
        try:
            if len(content) > OBJECTS_BYTES_MAX:
                raise SampleUnreadable("has more than 16 MiB")
            return self._rows(content)
        except SampleUnreadable as error:
            raise SampleUnreadable(f"{readable(path)}: {error}") from None

    def _rows(self, content: bytes) -> Rows:
        raise NotImplementedError


def _array(column: Column, rows: object) -> NDArray[np.generic]:
    array = np.asarray(rows, column.dtype)
    return array.reshape([len(array), *(length or 0 for length in column.shape[1:])])


class YoloReader(ObjectsReader):
    """Reads an image, and a line of numbers for each object."""

    def __init__(self, source: YoloSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        super().__init__(source, index, max_bytes, storage)
        self._points, self._classes = source.keypoints, len(source.names)
        self._bytes[1].takes_empty = True

    def _rows(self, content: bytes) -> Rows:
        rows: dict[str, list[object]] = {"classes": [], "boxes": [], "keypoints": []}
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                try:
                    self._add(rows, [real_number(word.decode("ascii", "replace")) for word in line.split()])
                except ValueError as error:
                    raise SampleUnreadable(f"line {number} {error}") from None
        return rows

    def _add(self, rows: Mapping[str, list[object]], numbers: Sequence[float | None]) -> None:
        """Add the numbers of a line. Raises ``ValueError``."""
        row = np.array([np.nan if one is None else one for one in numbers])
        if not np.isfinite(row).all():
            raise ValueError("has something that is no number")
        if len(row) < _BOX:
            raise ValueError(f"has {len(row)} numbers, and an object a class and the four of its box")
        label, rest = row[0], row[1:]
        if label < 0 or label != int(label) or (self._classes and label >= self._classes):
            raise ValueError(f"begins with {label:g}, which is no number of a class")
        box, points = rest[:4], rest[4:].reshape(-1)
        if self._points:
            if len(points) not in (2 * self._points, 3 * self._points):
                raise ValueError(f"has {len(points)} numbers behind its box, which are not {self._points} keypoints")
            of_point = points.reshape(self._points, -1)
            seen = of_point[:, 2:] if of_point.shape[1] == 3 else np.where(of_point.any(1, keepdims=True), 2.0, 0.0)  # noqa: PLR2004
            rows["keypoints"].append(np.concatenate([of_point[:, :2], seen], 1))
            rest = np.concatenate([box, of_point[:, :2].reshape(-1)])
        elif len(points):
            if len(rest) % 2 or len(rest) < 6:  # noqa: PLR2004  a triangle
                raise ValueError(f"has {len(row)} numbers, which are neither a box nor the corners of a polygon")
            corners = rest.reshape(-1, 2)
            low, high = corners.min(0), corners.max(0)
            box = np.concatenate([(low + high) / 2, high - low])
        if rest.min() < 1 - _FRACTION_MAX or rest.max() > _FRACTION_MAX:
            raise ValueError("has a coordinate outside of 0 to 1: they are fractions of the image's width and height")
        rows["classes"].append(int(label))
        rows["boxes"].append(box)


class VocReader(ObjectsReader):
    """Reads an image, and the objects of its XML."""

    def __init__(self, source: VocSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        super().__init__(source, index, max_bytes, storage)
        self._classes = {name: number for number, name in enumerate(source.names)}

    def _rows(self, content: bytes) -> Rows:
        if b"<!" in content.replace(b"<!--", b""):
            raise SampleUnreadable("declares entities, or a type of document, which annotations do not need")
        try:
            objects = ET.fromstring(content).findall("object")  # noqa: S314  no entities: see above
        except ET.ParseError as error:
            raise SampleUnreadable(f"is no XML: {error}") from None
        rows: dict[str, list[object]] = {"classes": [], "boxes": [], "difficult": [], "truncated": []}
        for number, one in enumerate(objects, 1):
            try:
                rows["boxes"].append(_box(one))
                name = (one.findtext("name") or "").strip()
                if name not in self._classes:
                    raise ValueError(f"is of the class {name!r}, which names does not have")
                rows["classes"].append(self._classes[name])
                for flag in ("difficult", "truncated"):
                    rows[flag].append(_flag(one, flag))
            except ValueError as error:
                raise SampleUnreadable(f"object {number} {error}") from None
        return rows


def _box(one: ET.Element) -> list[float]:
    """Left, top, right, bottom; pixels are numbered from 1, and the last one is inside."""
    ends = [real_number((one.findtext(f"bndbox/{end}") or "").strip()) for end in ("xmin", "ymin", "xmax", "ymax")]
    numbers = [end for end in ends if end is not None and np.isfinite(end)]
    if len(numbers) < len(ends):
        raise ValueError("has no bndbox of four numbers: xmin, ymin, xmax, ymax")
    left, top, right, bottom = numbers
    if left > right or top > bottom:
        raise ValueError("has a bndbox whose end is before its beginning")
    return [left - 1, top - 1, right, bottom]


def _flag(one: ET.Element, name: str) -> int:
    text = (one.findtext(name) or "0").strip()
    if text not in ("0", "1"):
        raise ValueError(f"has {name} {text!r}, and not 0 or 1")
    return int(text)


READERS = {PairsSource: PairsReader, YoloSource: YoloReader, VocSource: VocReader}
