"""Samples of video files: one frame or several, as pixels. Workers only.

Invariant: at most ``OPEN_MAX`` files are open in one worker for one stream.
"""

import os
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from batchd.data.media import SAMPLE_BYTES_MAX
from batchd.data.media.frames import PixelOptions, Pixels
from batchd.data.media.indexed import IndexedFrames
from batchd.data.media.opened import OpenLimits, OpenVideos
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value
from batchd.data.sources.files.reader import padded_text
from batchd.data.sources.video.options import VideoSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import IndexMalformed, SourceIndex, readable
from batchd.data.storage.paths import bound_of

OPEN_MAX = 4
SAMPLES = 1
"""The row of the array ``files`` of the index with the samples; the others are of all videos."""


class VideoIndex(IndexedFrames):
    """An index as videos see it; ``video.scan`` has its arrays."""

    def __init__(self, source: VideoSource, index: SourceIndex) -> None:
        files = index.arrays["files"]
        super().__init__(index.arrays, np.delete(files, SAMPLES, 0), os.fsencode(index.place["root"]))
        self._source = source
        self._index = index
        self._labels = index.arrays["labels"]
        self._samples = files[SAMPLES]
        if self._samples[-1] != len(index):
            raise IndexMalformed(f"{self._samples[-1]} samples of {len(index)}")

    def find(self, sample: int) -> tuple[int, range]:
        """The file of a sample, and the numbers of its frames in it. Raises ``IndexError``."""
        file = int(np.searchsorted(self._samples, self._index.checked(sample), "right")) - 1
        first = (sample - int(self._samples[file])) * self._source.every
        return file, range(first, first + self._source.span, self._source.stride)

    def label(self, file: int) -> int:
        """The label of all samples of a file."""
        return int(self._labels[file])


class VideoReader:
    """Reads any sample; see ``interface.Reader``."""

    def __init__(self, source: VideoSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._source = source
        self._storage = storage
        self._index = VideoIndex(source, index)
        pixels = Pixels(PixelOptions(source.frames, source.color, source.rotation, source.size, source.interpolation))
        bound = bound_of(source.root, allow_outside_root=source.allow_outside_root)
        limits = OpenLimits(OPEN_MAX, source.max_pixels, max_bytes, bound)
        self._videos = OpenVideos(self._index, pixels, limits, lambda sample: [self._index.find(sample)])
        self._kept: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """The frames of the last clip, by file and number: the next clip may share some."""

    def prefetch(self, samples: Sequence[int]) -> None:
        """See ``interface.ReadsAhead``."""
        self._videos.announce(samples, self._storage)

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        file, frames = self._index.find(sample)
        self._videos.begin(sample)
        try:
            image = self._videos.frame(file, frames[0]) if self._source.frames == 1 else self._clip(file, frames)
            self._videos.finish()
        finally:
            self._videos.end(sample)
        return {"image": image, **self.known(sample)}

    def known(self, sample: int) -> Mapping[str, Value]:
        """The index holds all values but the pixels."""
        file, frames = self._index.find(sample)
        seconds = [self._index.frames(file).seconds(frame) for frame in frames]
        known: dict[str, Value] = {
            "label": self._index.label(file),
            "time": np.array(seconds) if self._source.frames > 1 else seconds[0],
        }
        if self._source.path_bytes:
            known["path"] = padded_text(self._index.name(file), self._source.path_bytes)
        return known

    def name(self, sample: int) -> str:
        """See ``interface.Reader``. Frames are counted from 0."""
        file, frames = self._index.find(sample)
        of_file = self._index.frames(file)
        last = f" to {of_file.text(frames[-1])}" if self._source.frames > 1 else ""
        return f"{readable(self._index.path(file))}: {of_file.text(frames[0])}{last}"

    def close(self) -> None:
        """Close all files."""
        self._videos.close()

    def _clip(self, file: int, frames: range) -> NDArray[np.uint8]:
        kept: dict[tuple[int, int], NDArray[np.uint8]] = {}
        size = 0
        for frame in frames:
            known = self._kept.get((file, frame))
            kept[file, frame] = pixels = self._videos.frame(file, frame) if known is None else known
            size += pixels.nbytes
            if size > SAMPLE_BYTES_MAX:
                raise SampleUnreadable(f"its frames are more than {SAMPLE_BYTES_MAX} bytes; scale them with size")
        self._kept = kept
        shapes = {pixels.shape for pixels in kept.values()}
        if len(shapes) > 1:
            raise SampleUnreadable(f"its frames have several sizes ({sorted(shapes)}); scale them with size")
        return np.stack(list(kept.values()))


READERS = {VideoSource: VideoReader}
