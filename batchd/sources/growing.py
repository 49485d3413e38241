"""An index while a source is being scanned: flat arrays that grow. Daemon.

Invariant: no list of all paths is ever made.
"""

import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from batchd.errors import SourceInvalid
from batchd.sources.index import NO_EXTENTS, NUMBER, SourceIndex, readable

PROGRESS_EVERY = 4096
"""Samples between two reports of progress."""

ReportProgress = Callable[[int], None]
"""Called now and then with the number of samples found so far."""


class GrowingIndex:
    """An index while it is built. ``path_bytes`` is how long a path may be, where batches carry them, else 0."""

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

    def finish(self, root: Path, class_names: list[bytes], shards: Sequence[bytes] = ()) -> SourceIndex:
        """Make the index; nothing may be added afterwards."""
        self._progress(len(self._labels))
        offsets, labels, extents = (
            np.frombuffer(numbers, np.int64).astype(NUMBER, copy=False) if numbers else NO_EXTENTS
            for numbers in (self._offsets, self._labels, self._extents)
        )
        return SourceIndex.build(
            os.fsencode(root.absolute()),
            class_names,
            offsets,
            labels,
            memoryview(self._paths),
            shards=shards,
            extents=extents.reshape(-1, 3),
        )
