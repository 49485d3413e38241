"""Samples of video files: one frame or several, as pixels. Workers only.

Invariant: at most ``OPEN_MAX`` files are open in one worker for one stream, as each may hold the
memory of a decoder.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

from batchd.data.media import SAMPLE_BYTES_MAX
from batchd.data.media.frames import CHANGED, FileFrames, PixelOptions, Pixels, VideoFrames
from batchd.data.media.shared import SHARED_BYTES_MAX, SharedFrames, Wants, wants_of
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value
from batchd.data.sources.files.reader import padded_text
from batchd.data.sources.video.options import VideoSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import IndexMalformed, SourceIndex, readable
from batchd.data.storage.paths import blaming_the_sample, bound_of, open_within
from batchd_wire.views import Array


def open_file(path: bytes, bound: bytes | None) -> int:
    """Open a regular file within ``bound``. Raises ``SampleUnreadable``."""
    with ExitStack() as where_it_fails:
        with blaming_the_sample():
            descriptor = open_within(path, bound)
        where_it_fails.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SampleUnreadable(f"is not a regular file: {CHANGED}")
        where_it_fails.pop_all()
    return descriptor


OPEN_MAX = 4
NAMES, SAMPLES, FRAMES, PACKETS = range(4)
"""Rows of the array ``files`` of the index."""


class VideoIndex:
    """An index as videos see it; ``video.scan`` has its arrays."""

    def __init__(self, source: VideoSource, index: SourceIndex) -> None:
        self._source = source
        self._index = index
        self._arrays: dict[str, Array] = dict(index.arrays)
        self._files: NDArray[np.int64] = self._arrays["files"]
        self._samples = self._files[SAMPLES]
        self._root = os.fsencode(index.place["root"])
        if self._samples[-1] != len(index):
            raise IndexMalformed(f"{self._samples[-1]} samples of {len(index)}")

    def find(self, sample: int) -> tuple[int, range]:
        """The file of a sample, and the numbers of its frames in it. Raises ``IndexError``."""
        file = int(np.searchsorted(self._samples, self._index.checked(sample), "right")) - 1
        first = (sample - int(self._samples[file])) * self._source.every
        return file, range(first, first + self._source.span, self._source.stride)

    def frames(self, file: int) -> FileFrames:
        """The frames of a file."""
        frames = self._part(file, FRAMES)
        packets = self._part(file, PACKETS)
        numerator, denominator = self._arrays["units"][file].tolist()
        return FileFrames(
            self._arrays["order"][frames],
            self._arrays["keys"][frames],
            self._arrays["times"][packets],
            self._arrays["checksums"][packets],
            (numerator, denominator),
        )

    def name(self, file: int) -> bytes:
        """The path of a file below the root."""
        return self._arrays["names"][self._part(file, NAMES)].tobytes()

    def path(self, file: int) -> bytes:
        """The path of a file as the kernel takes it."""
        return os.path.join(self._root, self.name(file))  # noqa: PTH118  bytes

    def label(self, file: int) -> int:
        """The label of all samples of a file."""
        return int(self._arrays["labels"][file])

    def _part(self, file: int, row: int) -> slice:
        return slice(*self._files[row, file : file + 2].tolist())


class VideoReader:
    """Reads any sample; see ``interface.Reader``."""

    def __init__(self, source: VideoSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._source = source
        self._storage = storage
        self._announced: Counter[int] = Counter()
        """How often samples were announced, and not read since."""
        self._index = VideoIndex(source, index)
        self._max_bytes = max_bytes
        self._bound = bound_of(source.root, allow_outside_root=source.allow_outside_root)
        self._pixels = Pixels(
            PixelOptions(source.frames, source.color, source.rotation, source.size, source.interpolation)
        )
        self._shared = SharedFrames(self._pixels.of, lambda pixels: pixels.nbytes, SHARED_BYTES_MAX)
        self._open: dict[int, VideoFrames] = {}
        """By the numbers of their files; those used lately last."""
        self._kept: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """The frames of the last clip, by file and number: the next clip may share some."""

    def prefetch(self, samples: Sequence[int]) -> None:
        """See ``interface.ReadsAhead``: what they have in common is decoded once."""
        for sample in samples:
            self._announce(sample)
        self._storage.requested.at_end(partial(self._forget, list(samples)))

    def _announce(self, sample: int) -> None:
        self._announced[sample] += 1
        self._shared.add(*self._wants(sample))

    def _forget(self, samples: Iterable[int]) -> None:
        """Drop what samples want that were announced and not read."""
        for sample in samples:
            if self._announced[sample] > 0:
                self._announced[sample] -= 1
                self._shared.discard(*self._wants(sample))

    def _wants(self, sample: int) -> tuple[int, Wants]:
        file, frames = self._index.find(sample)
        return file, wants_of(self._index.frames(file), frames)

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        file, frames = self._index.find(sample)
        if not self._announced[sample]:
            self._announce(sample)
        try:
            image = self._frame(file, frames[0]) if self._source.frames == 1 else self._clip(file, frames)
            self._shared.finish()
        finally:
            self._forget([sample])
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
        """A frame; those of its group that announced samples want are decoded in the same pass."""
        return self._shared.frame(file, partial(self._video, file), frame)

    def _video(self, file: int) -> VideoFrames:
        """An open file; the least recently used one is closed if there are too many."""
        video = self._open.pop(file, None)
        if video is None:
            if len(self._open) >= OPEN_MAX:
                self._open.pop(next(iter(self._open))).close()
            descriptor = open_file(self._index.path(file), self._bound)
            video = VideoFrames(descriptor, self._index.frames(file), self._source.max_pixels, self._max_bytes)
        self._open[file] = video
        return video


READERS = {VideoSource: VideoReader}
