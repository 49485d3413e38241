"""Samples of video files: one frame or several, as pixels. Workers only.

swscale, which is part of FFmpeg, converts colours and sizes in one pass. Everything that its result
depends on is fixed here: its bit-exact modes, which are the same on every processor, one thread,
and 8 bits in full range. The tags of a frame choose its matrix and its range; the defaults are
BT.601 and limited range. Gray is the luma, in full range.

Invariants: at most ``OPEN_MAX`` files are open in one worker for one stream, as each may hold the
memory of a decoder. The pixels are a function of the frame, its tags and the options.
"""

import os
from collections.abc import Mapping
from typing import Any

import av
import numpy as np
from av.sidedata.sidedata import Type
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from numpy.typing import NDArray

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value
from batchd.data.sources.files.reader import padded_text
from batchd.data.sources.video.files import reason_of
from batchd.data.sources.video.frames import FileFrames, VideoFrames, open_file
from batchd.data.sources.video.options import SAMPLE_BYTES_MAX, VideoSource
from batchd.data.storage.index import IndexMalformed, SourceIndex, readable
from batchd.data.storage.paths import bound_of

_FORMATS = {"rgb": "rgb24", "bgr": "bgr24", "gray": "gray"}
_EXACT = Interpolation.ACCURATE_RND | Interpolation.BITEXACT
"""FULL_CHR_H_INT would be nearer to the exact colours, but overflows at the most extreme ones,
and takes six times as long."""
_MATRIX_BYTES = 36


class Pixels:
    """Makes pixels of the frames of one source."""

    def __init__(self, source: VideoSource) -> None:
        self._source = source
        self._flags = Interpolation[source.interpolation.upper()] | _EXACT
        self._scaler = VideoReformatter()

    def of(self, frame: av.VideoFrame) -> NDArray[np.uint8]:
        """The pixels of a frame: [height, width, channels]. Raises ``SampleUnreadable``."""
        turn = self._turn(frame)
        if self._source.size is None:
            height, width = frame.height, frame.width
        else:
            height, width = self._source.size[:: -1 if turn.swaps_sides else 1]
        size = self._source.sample_bytes(height, width)
        if size > SAMPLE_BYTES_MAX:
            raise SampleUnreadable(f"its pixels are {size} bytes, more than {SAMPLE_BYTES_MAX}; scale it with size")
        luma = Colorspace.ITU601 if self._source.color == "gray" and not frame.format.is_rgb else None
        try:
            made = self._scaler.reformat(
                frame,
                width,
                height,
                _FORMATS[self._source.color],
                # named on both sides, no matrix comes between a video's luma and gray
                src_colorspace=luma,
                dst_colorspace=luma,
                interpolation=self._flags,
                dst_color_range=ColorRange.JPEG,
                threads=1,
            )
        except av.FFmpegError as error:
            raise SampleUnreadable(f"its colours cannot be made: {reason_of(error)}") from None
        pixels: NDArray[Any] = made.to_ndarray()
        return turn.of(pixels.reshape(height, width, self._source.channels))

    def _turn(self, frame: av.VideoFrame) -> "Rotation":
        side_data: Any = frame.side_data
        data = side_data.get(Type.DISPLAYMATRIX)
        if self._source.rotation == "ignore" or data is None or data.buffer_size < _MATRIX_BYTES:
            return Rotation(1, 0, 0, 1)
        matrix = np.frombuffer(bytes(data)[:_MATRIX_BYTES], np.int32)
        return Rotation(*np.sign(matrix[[0, 1, 3, 4]]).tolist())


class Rotation:
    """One of the eight ways to turn and mirror a picture: (x, y) becomes (a x + c y, b x + d y)."""

    def __init__(self, a: int, b: int, c: int, d: int) -> None:
        if (bool(a), bool(b)) != (bool(d), bool(c)) or bool(a) == bool(b):
            raise SampleUnreadable('its display matrix is no turn by 90 degrees; set rotation = "ignore"')
        self.swaps_sides = not a
        self._mirrors_x = (a or c) < 0
        self._mirrors_y = (d or b) < 0

    def of(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The turned picture; both are uint8 ``[height, width, channels]``."""
        if self.swaps_sides:
            pixels = pixels.transpose(1, 0, 2)
        return np.ascontiguousarray(pixels[:: -1 if self._mirrors_y else 1, :: -1 if self._mirrors_x else 1])


OPEN_MAX = 4
NAMES, SAMPLES, FRAMES, PACKETS = range(4)
"""Rows of the array ``files`` of the index."""


class VideoIndex:
    """An index as videos see it; ``video.scan`` has its arrays."""

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


class VideoReader:
    """Reads any sample; see ``interface.Reader``."""

    def __init__(self, source: VideoSource, index: SourceIndex, max_bytes: int) -> None:
        self._source = source
        self._index = VideoIndex(source, index)
        self._max_bytes = max_bytes
        self._bound = bound_of(source.root, allow_outside_root=source.allow_outside_root)
        self._pixels = Pixels(source)
        self._open: dict[int, VideoFrames] = {}
        """By the numbers of their files; those used lately last."""
        self._kept: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """The frames of the last clip, by file and number: the next clip may share some."""

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        file, frames = self._index.find(sample)
        image = self._frame(file, frames[0]) if self._source.frames == 1 else self._clip(file, frames)
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
        return self._pixels.of(self._video(file).frame(frame))

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


READERS = {VideoSource: lambda source, index, max_bytes, _storage: VideoReader(source, index, max_bytes)}
