"""Samples that are files, or records in files: which bytes of which file, called what, with which label. Daemon and workers.

    offsets   int64 [n + 1]   sample i is called paths[offsets[i]:offsets[i + 1]]
    paths     uint8 [bytes]   one name right after the other
    labels    int64 [n]
    classes   uint8 [bytes]   the names of the labels, a NUL after each
    shards    uint8 [bytes]   the paths of the files that records lie in, a NUL after each; not there where each sample is a file
    extents   int64 [n, 3]    (shard, first byte, bytes), where there are shards

A path is relative to the root unless it starts with a slash. Where there are shards, a sample's
name is one within its shard.

Invariant: names are bytes all the way, as they need not be text, and no list of all of them is ever
made.
"""

import os
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchd.errors import SourceInvalid
from batchd.samples.columns import Column
from batchd.storage.index import NUMBER, IndexMalformed, SourceIndex, blob, readable
from batchd.storage.survey import ReportProgress, Survey

PROGRESS_EVERY = 4096
"""Samples between two reports of progress."""


class FilesIndex:
    """An index as files and records see it."""

    def __init__(self, index: SourceIndex) -> None:
        self.index = index
        self.digest = index.digest
        self.class_names = index.class_names
        self.root: bytes = os.fsencode(index.place["root"])
        self.labels: NDArray[np.int64] = index.arrays["labels"]
        self._offsets: NDArray[np.int64] = index.arrays["offsets"]
        self._starts = self._offsets.data
        """The same, whose items are numbers of Python."""
        self._paths = index.arrays["paths"].data.cast("B")
        self._before_names = self.root if self.root.endswith(b"/") else self.root + b"/"
        self.extents: NDArray[np.int64] | None = index.arrays.get("extents")
        if len(self.labels) != len(index) or len(self._offsets) != len(index) + 1:
            raise IndexMalformed(f"{len(self.labels)} labels and {len(self._offsets)} offsets of {len(index)} samples")

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def shards(self) -> tuple[bytes, ...]:
        """The paths of the files that records lie in; none where each sample is a file."""
        return self.index.names("shards")

    def label(self, sample: int) -> int:
        """The label of a sample. Raises ``IndexError`` where there is no such sample."""
        return int(self.labels[self.index.checked(sample)])

    def path(self, sample: int) -> str:
        """Where a sample is, as people can read it and as every message can carry it. Raises ``IndexError``."""
        file, extent = readable(self.file(sample)), self.extent(sample)
        return f"{file}: {readable(self.name(sample))} (byte {extent[0]})" if extent is not None else file

    def file(self, sample: int) -> bytes:
        """The path of a sample's file as the kernel takes it, absolute where the root is. Raises ``IndexError``."""
        if self.extents is None:
            name = self.name(sample)
            return name if name.startswith(b"/") else self._before_names + name
        return os.path.join(self.root, self.shards[int(self.extents[self.index.checked(sample), 0])])  # noqa: PTH118  bytes

    def extent(self, sample: int) -> tuple[int, int] | None:
        """(first byte, bytes) of a record in its file; None where the sample is a file. Raises ``IndexError``."""
        if self.extents is None:
            return None
        _shard, start, count = self.extents[self.index.checked(sample)].tolist()
        return start, count

    def name(self, sample: int) -> bytes:
        """The path of a sample as it was found: relative to the root, absolute, or within its shard. Raises ``IndexError``."""
        sample = self.index.checked(sample)
        start, end = self._starts[sample], self._starts[sample + 1]
        if not 0 <= start <= end <= len(self._paths):
            raise IndexMalformed(f"sample {sample} has its path at bytes {start} to {end} of {len(self._paths)}")
        return bytes(self._paths[start:end])


class GrowingIndex:
    """An index of files while it is built. ``path_bytes`` is how long a path may be, where batches carry them, else 0."""

    def __init__(self, progress: ReportProgress, path_bytes: int) -> None:
        self._path_bytes = path_bytes
        self._paths = bytearray()
        self._offsets = array("q", [0])
        self._labels = array("q")
        self._extents = array("q")
        self._progress = progress

    def add(self, path: bytes, label: int, extent: tuple[int, int, int] | None = None) -> None:
        """Add one sample; ``path`` is relative to the root, or absolute. ``extent``: shard, first byte, bytes."""
        if self._path_bytes and len(path) > self._path_bytes:
            raise SourceInvalid(
                f"the path {readable(path)} has {len(path)} bytes, more than path_bytes = {self._path_bytes}"
            )
        self._paths += path
        self._offsets.append(len(self._paths))
        self._labels.append(label)
        if extent is not None:
            self._extents.extend(extent)
        if len(self._labels) % PROGRESS_EVERY == 0:
            self._progress(len(self._labels))

    def __len__(self) -> int:
        return len(self._labels)

    def finish(
        self, root: Path, class_names: Sequence[bytes], survey: Survey, shards: Sequence[bytes] = ()
    ) -> SourceIndex:
        """Make the index; nothing may be added afterwards."""
        self._progress(len(self._labels))
        arrays: dict[str, NDArray[Any]] = {
            "offsets": _numbers(self._offsets),
            "labels": _numbers(self._labels),
            "paths": np.frombuffer(self._paths, np.uint8),
            "classes": blob(tuple(class_names)),
        }
        if shards:
            arrays |= {"extents": _numbers(self._extents).reshape(-1, 3), "shards": blob(tuple(shards))}
        place = {"root": os.fsdecode(root.absolute()), **survey.place()}
        return SourceIndex.build(len(self._labels), {}, arrays, place)


def _numbers(grown: "array[int]") -> NDArray[np.int64]:
    return np.frombuffer(grown, np.int64).astype(NUMBER, copy=False) if grown else np.empty(0, NUMBER)


def image_columns(path_bytes: int) -> tuple[Column, ...]:
    """The columns of a sample that is one image with a label."""
    return Column("image", "encoded"), Column("label", dtype="int64"), *path_columns(path_bytes)


def path_columns(path_bytes: int) -> tuple[Column, ...]:
    """The column ``path``, uint8 ``[path_bytes]``; none if ``path_bytes`` is 0."""
    return (Column("path", shape=(path_bytes,)),) if path_bytes else ()
