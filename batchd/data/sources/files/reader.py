"""Read samples that are files, or records in files. Workers only."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from batchd.data.samples.location import is_url
from batchd.data.samples.values import MediaFile, Value
from batchd.data.sources.files.index import FilesIndex
from batchd.data.sources.files.options import FolderSource, GlobSource, ListSource
from batchd.data.sources.interface import FilePlace
from batchd.data.sources.webdataset.options import WebDatasetSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.paths import bound_of
from batchd.data.storage.reader import BytesReader, Extent, RemoteBytes


class SampleReader(BytesReader):
    """Reads the bytes of samples."""

    def __init__(self, index: FilesIndex, max_bytes: int, storage: Storage, bound: bytes | None = None) -> None:
        super().__init__(RemoteBytes(storage, index.root, index.index.place), max_bytes, bound=bound)
        self._index = index
        self.with_points = False
        self.points: memoryview | None = None
        """The access points of the last sample, if they are read, and it has some."""

    def open(self, sample: int) -> memoryview | MediaFile:
        """A sample to be read in parts, until the next call. Raises ``SampleUnreadable``."""
        return self.open_file(self._index.file(sample), sample)

    def read(self, sample: int) -> memoryview:
        """The bytes of a sample, until the next call. Raises ``SampleUnreadable``."""
        extent, file = self._index.extent(sample), self._index.file(sample)
        self.points = None
        if extent is None:
            return self.read_file(file, sample)
        start, size = extent
        first, end = self._points_at(sample)
        data = self.read_extent(file, start, end or size)
        self.points = data[first:end] if end else None
        return data[:size]

    def _points_at(self, sample: int) -> tuple[int, int]:
        """The first byte of the access points behind a sample, and their end; zeros: none."""
        if not self.with_points or self._index.points is None:
            return 0, 0
        first, count = self._index.points[sample].tolist()
        return (first, first + count) if count and first + count <= self._max_bytes else (0, 0)

    def read_part(self, sample: int, first: int, end: int) -> memoryview:
        """Some bytes of a sample, as ``read``."""
        part = self._part(sample, first, end)
        return self.read_extent(part.path, part.start, end - first)

    def read_ahead(self, samples: Sequence[int], parts: Mapping[int, tuple[int, int]] = MappingProxyType({})) -> None:
        """Announce the bytes of all these samples, or ``parts`` of them: see ``prefetch``."""
        self.prefetch(
            self._part(sample, *parts[sample]) if sample in parts else self._whole(sample) for sample in samples
        )

    def _whole(self, sample: int) -> Extent:
        start, size = self._index.extent(sample) or (0, None)
        return Extent(self._index.file(sample), start, self._points_at(sample)[1] or size)

    def _part(self, sample: int, first: int, end: int) -> Extent:
        start, _size = self._index.extent(sample) or (0, None)
        return Extent(self._index.file(sample), start + first, end - first)


class FilesReader:
    """Reads ``image`` (bytes), ``label`` (int64) and, with ``path_bytes``, ``path``."""

    def __init__(
        self,
        source: FolderSource | ListSource | GlobSource | WebDatasetSource,
        index: SourceIndex,
        max_bytes: int,
        storage: Storage,
    ) -> None:
        self._index = FilesIndex(index)
        bound = bound_of(self._index.root, allow_outside_root=source.allow_outside_root)
        self._bytes = SampleReader(self._index, max_bytes, storage, bound)
        self._path_bytes = source.path_bytes
        self._media = "image" if isinstance(source, WebDatasetSource) else source.media
        self.name, self.file = self._index.path, self._index.file
        if self._bytes.reads_ahead or self._index.extents is not None:
            self.prefetch = self.prefetch_with = self._bytes.read_ahead
        self.close = self._bytes.close
        self.points: dict[str, memoryview] = {}

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        if self._media != "image":
            return {self._media: self._bytes.open(sample), **self.known(sample)}
        image, points = self._bytes.read(sample), self._bytes.points
        self.points = {} if points is None else {"image": points}
        return {"image": image, **self.known(sample)}

    def read_points(self) -> bool:
        """See ``interface.ReadsPoints``."""
        self._bytes.with_points = self._index.points is not None
        return self._bytes.with_points

    def place(self, sample: int) -> FilePlace | None:
        """See ``interface.PlacesFiles``: records in files have none."""
        is_whole = self._index.extents is None and self._media == "image"
        return self._bytes.place(self._index.file(sample)) if is_whole else None

    def memory(self) -> memoryview:
        """See ``interface.PlacesFiles``."""
        return self._bytes.memory()

    def reads_parts(self) -> bool:
        """See ``interface.ReadsParts``: a part of a local file saves nothing."""
        return is_url(self._index.root) and self._media == "image"

    def read_part(self, sample: int, first: int, end: int) -> Mapping[str, Value]:
        """See ``interface.ReadsParts``."""
        return {"image": self._bytes.read_part(sample, first, end), **self.known(sample)}

    def known(self, sample: int) -> Mapping[str, Value]:
        """Label and path, from the index."""
        known: dict[str, Value] = {"label": self._index.labels[sample]}
        if self._path_bytes:
            known["path"] = padded_text(self._index.name(sample), self._path_bytes)
        return known


def padded_text(text: bytes, length: int) -> npt.NDArray[np.uint8]:
    """A text, which has to fit, padded with zeros: uint8 ``[length]``."""
    return np.frombuffer(text.ljust(length, b"\0"), np.uint8)


READERS = dict.fromkeys((FolderSource, ListSource, GlobSource), FilesReader)
