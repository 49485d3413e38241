"""Samples of video files: one frame or several, as pixels. Workers only.

Invariant: at most ``OPEN_MAX`` files are open in one worker for one stream.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from batchd.data.media.frames import PixelOptions
from batchd.data.media.indexed import IndexedVideos, OpenLimits
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value
from batchd.data.sources.files.reader import padded_text
from batchd.data.sources.video.options import VideoSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import IndexMalformed, SourceIndex, readable
from batchd.data.storage.paths import bound_of

OPEN_MAX = 4


class VideoReader:
    """Reads any sample; see ``interface.Reader``."""

    def __init__(self, source: VideoSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        names, self._samples, *others = index.arrays["files"]
        if self._samples[-1] != len(index):
            raise IndexMalformed(f"{self._samples[-1]} samples of {len(index)}")
        self._source = source
        self._index = index
        self.videos = IndexedVideos(
            index,
            np.stack([names, *others]),
            lambda sample: dict([self._frames(sample)]),
            PixelOptions(source.frames, source.color, source.rotation, source.size, source.interpolation),
            OpenLimits(
                OPEN_MAX,
                source.max_pixels,
                max_bytes,
                bound_of(source.root, allow_outside_root=source.allow_outside_root),
            ),
            storage,
        )
        self.prefetch, self.close = self.videos.prefetch, self.videos.close
        self._last: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """The frames of the last sample, by file and number: the next one may share some."""

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        file, frames = self._frames(sample)
        last, self._last = self._last, {}
        with self.videos.making(sample) as pixels:
            for frame in frames:
                known = last.get((file, frame))
                self._last[file, frame] = pixels(file, frame) if known is None else known
        images = list(self._last.values())
        if len(shapes := {image.shape for image in images}) > 1:
            raise SampleUnreadable(f"its frames have several sizes ({sorted(shapes)}); scale them with size")
        return {"image": np.stack(images) if self._source.frames > 1 else images[0], **self.known(sample)}

    def known(self, sample: int) -> Mapping[str, Value]:
        """The index holds all values but the pixels."""
        file, frames = self._frames(sample)
        seconds = [self.videos.frames(file).seconds(frame) for frame in frames]
        known: dict[str, Value] = {
            "label": int(self._index.arrays["labels"][file]),
            "time": np.array(seconds) if self._source.frames > 1 else seconds[0],
        }
        if self._source.path_bytes:
            known["path"] = padded_text(self.videos.name(file), self._source.path_bytes)
        return known

    def name(self, sample: int) -> str:
        """See ``interface.Reader``. Frames are counted from 0."""
        file, frames = self._frames(sample)
        of_file = self.videos.frames(file)
        last = f" to {of_file.text(frames[-1])}" if self._source.frames > 1 else ""
        return f"{readable(self.videos.path(file))}: {of_file.text(frames[0])}{last}"

    def _frames(self, sample: int) -> tuple[int, range]:
        """The file of a sample, and the numbers of its frames in it. Raises ``IndexError``."""
        file = int(np.searchsorted(self._samples, self._index.checked(sample), "right")) - 1
        first = (sample - int(self._samples[file])) * self._source.every
        return file, range(first, first + self._source.span, self._source.stride)


READERS = {VideoSource: VideoReader}
