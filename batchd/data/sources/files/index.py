"""The index of samples that are files, or records in files. Daemon and workers.

    offsets   int64 [n + 1]   sample i is called paths[offsets[i]:offsets[i + 1]]
    paths     uint8 [bytes]   one name right after the other
    labels    int64 [n]
    classes   uint8 [bytes]   the names of the labels, a NUL after each
    shards    uint8 [bytes]   the paths of the files that hold records, a NUL after each; absent if
                              each sample is a file
    extents   int64 [n, 3]    (shard, first byte, bytes), if there are shards
    points    uint32 [n, 2]   (first byte, bytes) of the access points of a record, counted from its
                              own first byte; zeros without; absent if no record has any

A path is relative to the root unless it starts with a slash. With shards, a sample's name is one
within its shard.

Invariant: names are bytes, as they need not be text, and no list of all of them is ever made.
"""

import os
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.columns import Column, parse_column
from batchd.data.sources.finding import FilePattern, NamedSamples, find_in_shards
from batchd.data.sources.neighbours import Neighbours, in_files, in_order
from batchd.data.storage.index import IndexMalformed, SourceIndex, blob, number_array, readable
from batchd.data.storage.survey import ReportProgress, Survey
from batchd.errors import SourceInvalid
from batchd_wire.views import Array

PROGRESS_EVERY = 4096
"""Samples between two reports of progress."""


class FilesIndex:
    """The index as readers of files and records use it."""

    def __init__(self, index: SourceIndex) -> None:
        self.index = index
        self.digest = index.digest
        self.class_names = index.class_names
        self.root: bytes = os.fsencode(index.place["root"])
        self.labels: NDArray[np.int64] = index.arrays["labels"]
        self._offsets: NDArray[np.int64] = index.arrays["offsets"]
        self._starts = self._offsets.data
        """The same, with Python integers as items."""
        self._paths = index.arrays["paths"].data.cast("B")
        self._before_names = self.root if self.root.endswith(b"/") else self.root + b"/"
        self.extents: NDArray[np.int64] | None = index.arrays.get("extents")
        self.points: NDArray[np.uint32] | None = index.arrays.get("points")
        if len(self.labels) != len(index) or len(self._offsets) != len(index) + 1:
            raise IndexMalformed(f"{len(self.labels)} labels and {len(self._offsets)} offsets of {len(index)} samples")

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def shards(self) -> tuple[bytes, ...]:
        """The paths of the files that hold records; empty if each sample is a file."""
        return self.index.names("shards")

    def label(self, sample: int) -> int:
        """The label of a sample. Raises ``IndexError`` if there is no such sample."""
        return int(self.labels[self.index.checked(sample)])

    def path(self, sample: int) -> str:
        """The place of a sample, readable, for messages. Raises ``IndexError``."""
        file, extent = readable(self.file(sample)), self.extent(sample)
        return f"{file}: {readable(self.name(sample))} (byte {extent[0]})" if extent is not None else file

    def file(self, sample: int) -> bytes:
        """The path of a sample's file. Raises ``IndexError``."""
        if self.extents is None:
            name = self.name(sample)
            return name if name.startswith(b"/") else self._before_names + name
        return os.path.join(self.root, self.shards[int(self.extents[self.index.checked(sample), 0])])  # noqa: PTH118  bytes

    def extent(self, sample: int) -> tuple[int, int] | None:
        """(first byte, bytes) of a record in its file; None for a file. Raises ``IndexError``."""
        if self.extents is None:
            return None
        _shard, start, count = self.extents[self.index.checked(sample)].tolist()
        return start, count

    def name(self, sample: int) -> bytes:
        """The path of a sample: relative, absolute, or in its shard. Raises ``IndexError``."""
        sample = self.index.checked(sample)
        start, end = self._starts[sample], self._starts[sample + 1]
        if not 0 <= start <= end <= len(self._paths):
            raise IndexMalformed(f"sample {sample} has its path at bytes {start} to {end} of {len(self._paths)}")
        return bytes(self._paths[start:end])


def find_files(_source: object, index: SourceIndex, pattern: FilePattern) -> NDArray[np.int64]:
    """The samples of the files that match: files, or the records of shards."""
    extents = index.arrays.get("extents")
    if extents is None:
        root = os.fsencode(index.place["root"])
        before = root if root.endswith(b"/") else root + b"/"
        return NamedSamples(index.arrays["offsets"], index.arrays["paths"], before).find(pattern)
    firsts = np.searchsorted(extents[:, 0], np.arange(len(index.names("shards"))))
    return find_in_shards(pattern, index, firsts)


class GrowingIndex:
    """Builds an index of files. ``path_bytes``: the longest path that batches carry; 0: none do."""

    def __init__(self, progress: ReportProgress, path_bytes: int) -> None:
        self._path_bytes = path_bytes
        self._paths = bytearray()
        self._offsets = array("q", [0])
        self._labels = array("q")
        self._extents = array("q")
        self._points = array("I")
        self._progress = progress

    def add(
        self, path: bytes, label: int, extent: tuple[int, int, int] | None = None, points: tuple[int, int] = (0, 0)
    ) -> None:
        """Add one sample, by a relative or absolute path.

        ``extent``: shard, first byte, bytes. ``points``: as in the index.
        """
        check_path_length("the path", path, self._path_bytes)
        self._paths += path
        self._offsets.append(len(self._paths))
        self._labels.append(label)
        if extent is not None:
            self._extents.extend(extent)
            self._points.extend(points)
        if len(self._labels) % PROGRESS_EVERY == 0:
            self._progress(len(self._labels))

    def add_all(self, paths: NDArray[np.uint8], lengths: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """Add samples by their paths, one right after the other."""
        ends = np.cumsum(lengths)
        for long in np.flatnonzero(lengths > self._path_bytes)[:1] if self._path_bytes else ():
            check_path_length("the path", paths[ends[long] - lengths[long] : ends[long]].tobytes(), self._path_bytes)
        self._offsets.frombytes((ends + len(self._paths)).astype(np.int64).tobytes())
        self._paths += paths.tobytes()
        self._labels.frombytes(labels.tobytes())
        self._progress(len(self._labels))

    def __len__(self) -> int:
        return len(self._labels)

    def finish(
        self, root: Path, class_names: Sequence[bytes], survey: Survey, shards: Sequence[bytes] = ()
    ) -> SourceIndex:
        """Make the index; nothing may be added afterwards."""
        self._progress(len(self._labels))
        arrays: dict[str, Array] = {
            "offsets": number_array(self._offsets),
            "labels": number_array(self._labels),
            "paths": np.frombuffer(self._paths, np.uint8),
            "classes": blob(tuple(class_names)),
        }
        if shards:
            arrays |= {"extents": number_array(self._extents).reshape(-1, 3), "shards": blob(tuple(shards))}
            if any(self._points):
                arrays["points"] = number_array(self._points).reshape(-1, 2)
        place = {"root": os.fsdecode(root.absolute()), **survey.place()}
        return SourceIndex.build(len(self._labels), {}, arrays, place)


def files_neighbours(_source: object, index: SourceIndex) -> Neighbours:
    """Neighbours are records of one shard, or files in the order of the listing."""
    extents = index.arrays.get("extents")
    if extents is None:
        return in_order(index, "each sample is a file, and the index has no sizes of files")
    firsts = np.append(0, np.flatnonzero(np.diff(extents[:, 0])) + 1)
    return in_files(firsts, len(index), begins=np.ascontiguousarray(extents[:, 1]))


def check_path_length(what: str, path: bytes, path_bytes: int) -> None:
    """Raise ``SourceInvalid`` for a path that the field ``path`` cannot hold, if there is one."""
    if path_bytes and len(path) > path_bytes:
        raise SourceInvalid(f"{what} {readable(path)} has {len(path)} bytes, more than path_bytes = {path_bytes}")


def image_columns(path_bytes: int, media: str = "image") -> tuple[Column, ...]:
    """The columns of a sample that is one image, or video, with a label."""
    return parse_column(media, media), Column("label", dtype="int64"), *path_columns(path_bytes)


def path_columns(path_bytes: int) -> tuple[Column, ...]:
    """The column ``path``, uint8 ``[path_bytes]``; none if ``path_bytes`` is 0."""
    return (Column("path", shape=(path_bytes,)),) if path_bytes else ()
