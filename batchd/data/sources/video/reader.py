"""Samples of video files: one frame or several, as pixels. Workers only.

Invariant: at most ``OPEN_MAX`` files are open in one worker for one stream, as each may hold the
memory of a decoder.
"""

import os
import stat
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from batchd.data.media import SAMPLE_BYTES_MAX
from batchd.data.media.frames import CHANGED, FileFrames, PixelOptions, Pixels, VideoFrames
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
SHARED_BYTES_MAX = 64 << 20
"""Pixels of frames that one worker keeps for samples which it will read, of one stream."""
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


class SharedFrames:
    """The frames of groups of pictures that samples have in common, each decoded in one pass.

        announced   samples --> the frames of each group that they want
        first read  key frame -> ... -> the last frame that is wanted of the group: all are kept
        later       taken; dropped when no announced sample wants them

    Frames that have no room are decoded again by the samples that want them.
    """

    def __init__(self) -> None:
        self._wanted: dict[tuple[int, int], Counter[int]] = {}
        """How many announced samples want a frame, by the file and the key frame of its group."""
        self._kept: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """By the file, and the number of the frame in it."""
        self._left_bytes = SHARED_BYTES_MAX

    def add(self, file: int, frames: FileFrames, numbers: Iterable[int]) -> None:
        """A sample that will be read wants these frames."""
        for number in numbers:
            self._wanted.setdefault((file, int(frames.keys[number])), Counter())[number] += 1

    def discard(self, file: int, frames: FileFrames, numbers: Iterable[int]) -> None:
        """The sample was read, or will not be."""
        for number in numbers:
            group = file, int(frames.keys[number])
            wanted = self._wanted[group]
            wanted[number] -= 1
            if not wanted[number]:
                del wanted[number]
                if (pixels := self._kept.pop((file, number), None)) is not None:
                    self._left_bytes += pixels.nbytes
            if not wanted:
                del self._wanted[group]

    def find(self, file: int, number: int) -> NDArray[np.uint8] | None:
        """A frame that is kept."""
        return self._kept.get((file, number))

    def keep(self, file: int, number: int, pixels: NDArray[np.uint8]) -> bool:
        """Keep a frame; returns whether there was room."""
        if pixels.nbytes > self._left_bytes:
            return False
        self._kept[file, number] = pixels
        self._left_bytes -= pixels.nbytes
        return True

    def others(self, file: int, key: int) -> list[int]:
        """The frames of a group that are wanted and not kept, ascending."""
        return sorted(number for number in self._wanted.get((file, key), ()) if (file, number) not in self._kept)


class VideoReader:
    """Reads any sample; see ``interface.Reader``."""

    def __init__(self, source: VideoSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._source = source
        self._storage = storage
        self._shared = SharedFrames()
        self._announced: Counter[int] = Counter()
        """How often samples were announced, and not read since."""
        self._index = VideoIndex(source, index)
        self._max_bytes = max_bytes
        self._bound = bound_of(source.root, allow_outside_root=source.allow_outside_root)
        self._pixels = Pixels(
            PixelOptions(source.frames, source.color, source.rotation, source.size, source.interpolation)
        )
        self._open: dict[int, VideoFrames] = {}
        """By the numbers of their files; those used lately last."""
        self._kept: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """The frames of the last clip, by file and number: the next clip may share some."""

    def prefetch(self, samples: Sequence[int]) -> None:
        """See ``interface.ReadsAhead``: what they have in common is decoded once."""
        for sample in samples:
            self._announced[sample] += 1
            file, frames = self._index.find(sample)
            self._shared.add(file, self._index.frames(file), frames)
        self._storage.requested.at_end(partial(self._forget, list(samples)))

    def _forget(self, samples: Iterable[int]) -> None:
        """Drop what samples want that were announced and not read."""
        for sample in samples:
            if self._announced[sample] > 0:
                self._announced[sample] -= 1
                file, frames = self._index.find(sample)
                self._shared.discard(file, self._index.frames(file), frames)

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        file, frames = self._index.find(sample)
        image = self._frame(file, frames[0]) if self._source.frames == 1 else self._clip(file, frames)
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
        known = self._shared.find(file, frame)
        if known is not None:
            return known
        video = self._video(file)
        others = self._shared.others(file, int(video.frames.keys[frame]))
        self._decode(video, file, others[: bisect_left(others, frame)])
        made = self._pixels.of(video.frame(frame))
        if frame in others and self._shared.keep(file, frame, made):
            self._decode(video, file, others[bisect_right(others, frame) :])
        return made

    def _decode(self, video: VideoFrames, file: int, frames: Iterable[int]) -> None:
        """Keep frames while there is room; the samples that want a damaged one will say so."""
        with suppress(SampleUnreadable):
            for frame in frames:
                if not self._shared.keep(file, frame, self._pixels.of(video.frame(frame))):
                    return

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
