"""Samples of video files: one frame or several, as pixels. Workers only.

Invariant: at most ``OPEN_MAX`` files are open in one worker for one stream, as each may hold the memory of a decoder.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from batchd.config.values import Value
from batchd.config.video_sources import SAMPLE_BYTES_MAX, VideoSource
from batchd.samples.errors import SampleUnreadable
from batchd.sources.reader import padded_text
from batchd.sources.video_frames import VideoFrames, open_file
from batchd.sources.video_index import VideoIndex
from batchd.sources.video_pixels import Pixels
from batchd.storage.index import SourceIndex, readable
from batchd.storage.paths import bound_of

OPEN_MAX = 4


class VideoReader:
    """Reads any sample; see ``kinds.Reader``."""

    def __init__(self, source: VideoSource, index: SourceIndex, max_bytes: int) -> None:
        self._source = source
        self._index = VideoIndex(source, index)
        self._max_bytes = max_bytes
        self._bound = bound_of(source.root, allow_outside_root=source.allow_outside_root)
        self._pixels = Pixels(source)
        self._open: dict[int, VideoFrames] = {}
        """By the numbers of their files; those used lately last."""
        self._kept: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """The frames of the last clip, by file and number: the next clip may have some of them too."""

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        file, frames = self._index.find(sample)
        image = self._frame(file, frames[0]) if self._source.frames == 1 else self._clip(file, frames)
        return {"image": image, **self.known(sample)}

    def known(self, sample: int) -> Mapping[str, Value]:
        """All but the pixels stands in the index."""
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
        """See ``kinds.Reader``. Frames are counted from 0."""
        file, frames = self._index.find(sample)
        of_file = self._index.frames(file)
        last = f" to {of_file.text(frames[-1])}" if self._source.frames > 1 else ""
        return f"{readable(self._index.path(file))}: {of_file.text(frames[0])}{last}"

    def close(self) -> None:
        """Give back what is open."""
        while self._open:
            self._open.popitem()[1].close()

    def _clip(self, file: int, frames: range) -> NDArray[np.uint8]:
        kept: dict[tuple[int, int], NDArray[np.uint8]] = {}
        size = 0
        for frame in frames:
            known = self._kept.get((file, frame))
            kept[file, frame] = pixels = self._frame(file, frame) if known is None else known
            size += pixels.nbytes
            if size > SAMPLE_BYTES_MAX:
                raise SampleUnreadable(f"its frames are more than {SAMPLE_BYTES_MAX} bytes; scale them with size")
        self._kept = kept
        shapes = {pixels.shape for pixels in kept.values()}
        if len(shapes) > 1:
            raise SampleUnreadable(f"its frames have several sizes ({sorted(shapes)}); scale them with size")
        return np.stack(list(kept.values()))

    def _frame(self, file: int, frame: int) -> NDArray[np.uint8]:
        return self._pixels.of(self._video(file).frame(frame))

    def _video(self, file: int) -> VideoFrames:
        """A file, open; the one that was used least lately is closed where there are too many."""
        video = self._open.pop(file, None)
        if video is None:
            if len(self._open) >= OPEN_MAX:
                self._open.pop(next(iter(self._open))).close()
            descriptor = open_file(self._index.path(file), self._bound)
            video = VideoFrames(descriptor, self._index.frames(file), self._source.max_pixels, self._max_bytes)
        self._open[file] = video
        return video
