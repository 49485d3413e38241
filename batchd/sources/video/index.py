"""Frames of videos: their packets, and when they are shown. Daemon and workers.

    names       uint8 [bytes]         the paths of the files below the root, joined
    files       int64 [4, files + 1]  where each file begins in names, samples, frames and packets, and
                                      where the last one ends
    units       int64 [files, 2]      a time of the file is so many numerator / denominator seconds
    labels      int64 [files]
    digests     uint8 [files, 32]     of the bytes of the file, or of some of them if it is long
    classes     uint8 [bytes]         the names of the labels, a NUL after each
    order       uint32 [frames]       the packet of each frame, in display order
    keys        uint32 [frames]       the packet at which decoding begins that gives the frame
    times       int64 [packets]       when the frame of a packet is shown; packets are in decoding order
    checksums   uint32 [packets]      CRC-32 of the data

    packets     I0  P3  B1  B2  I4  P7  B5  B6
    order        0   2   3   1   4   6   7   5
    keys         0   0   0   0   4   4   4   4

Frames and packets are counted within their file. Samples have no arrays of their own: they begin
at each ``every``-th frame.

Invariant: within a file, frames are in the order of their times, and no two times are the same.
"""

import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchd.sources.video.options import VideoSource
from batchd.storage.index import IndexMalformed, SourceIndex

NAMES, SAMPLES, FRAMES, PACKETS = range(4)
"""Rows of ``files``."""
PACKET = np.dtype("<u4")
NO_KEY = (1 << 32) - 1
"""In ``keys``: no key frame is at or before this frame."""


@dataclass(frozen=True, slots=True)
class FileFrames:
    """The frames of one file."""

    order: NDArray[np.uint32]
    keys: NDArray[np.uint32]
    times: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    unit: tuple[int, int]

    def seconds(self, frame: int) -> float:
        """When a frame is shown."""
        numerator, denominator = self.unit
        return int(self.times[self.order[frame]]) * numerator / denominator

    def text(self, frame: int) -> str:
        """A frame, for messages."""
        return f"frame {frame} at {self.seconds(frame):.3f} s"

    def group(self, key: int) -> range:
        """The frames whose decoding begins at the packet ``key``."""
        frames, time = range(len(self.order)), int(self.times[key])
        return range(bisect_left(frames, time, key=self._key_time), bisect_right(frames, time, key=self._key_time))

    def _key_time(self, frame: int) -> int:
        key = int(self.keys[frame])
        return int(np.iinfo(np.int64).min if key == NO_KEY else self.times[key])


class VideoIndex:
    """An index as videos see it."""

    def __init__(self, source: VideoSource, index: SourceIndex) -> None:
        self._source = source
        self._index = index
        self._arrays: dict[str, NDArray[Any]] = dict(index.arrays)
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
