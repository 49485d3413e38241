"""The step that decodes videos: the frames of clips, one after the other. Worker process.

    the packets of the file -> clips on paper (windows) -> decode from the key frame before each
        -> colours, upright -> the steps on images behind it, or an array of all frames

Frames go on as they are decoded, so a clip takes the memory of one frame and of what the steps
behind leave of the others. Frames of several clips are decoded in one pass over the file, and kept
until their clips are made, where ``KEPT_BYTES_MAX`` is enough for them.

Invariant: a frame is decoded from the same packets, whatever else was decoded before it, by one
thread. Damaged packets make a bad sample of the clips that need them, which names their second.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.image.opencv import Pixels as Image
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.stages import Row, make_stage
from batchd.data.pipeline.video.options import DecodeVideo
from batchd.data.pipeline.video.windows import frames_of_clips
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.values import Clips, MediaFile, Value
from batchd_wire.views import Array

if TYPE_CHECKING:
    from batchd.data.media.frames import FileFrames, Pixels, VideoFrames

KEPT_BYTES_MAX = 32 << 20
"""Decoded frames of one sample that are kept for a later clip."""
KNOWN_BYTES_MAX = 8 << 20
"""The packets of files, 20 bytes each, that are kept for other samples of these files."""
_BYTES_PER_PIXEL = 1.5
_HDR = {16: "PQ", 18: "HLG"}
"""Curves of brighter pictures, which 8 bits and the curve of a screen cannot show, by FFmpeg's
numbers."""


class VideoStage:
    """Decodes the clips of one video after the other.

    ``is_streaming``: the next stage takes the frames while they are decoded.
    """

    def __init__(self, step: DecodeVideo) -> None:
        self._step = step
        self.into = step.into
        self.is_streaming = False
        self.lap: Callable[[], None] = lambda: None
        """Counts the time until now for this step."""
        self._pixels: Pixels | None = None
        self._video: VideoFrames | None = None
        self._known: dict[object, FileFrames] = {}
        """The packets of files that were read lately, the last ones last."""

    def __call__(self, values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        """Replace the file by its clips. Raises ``SampleUndecodable``."""
        step, video = self._step, self._opened(values.pop(self._step.field))
        known = video.frames
        ticks, unit = known.times[known.order], Fraction(*known.unit)
        clips = frames_of_clips(step, ticks, unit, self._places(values, random))
        if random.draws is not None and step.is_random:
            starts = [round(float(ticks[clip[0]] * unit), 6) for clip in clips]
            random.draws.append({"starts": starts})
        if step.times:
            values[step.times] = (ticks[np.stack(clips)] * float(unit)).reshape(step.lengths)
        made = Clips(step.lengths, self._frames(video, clips))
        values[step.into] = made if self.is_streaming else made.array()

    def _opened(self, value: Value) -> "VideoFrames":
        """The video, until the next call. Raises ``SampleUndecodable``."""
        from batchd.data.media.frames import PixelOptions, Pixels, VideoFrames  # noqa: PLC0415  needs an extra

        if self._video is not None:
            self._video.close()
            self._video = None
        if self._pixels is None:
            self._pixels = Pixels(PixelOptions(1, self._step.color, self._step.rotation))
        assert isinstance(value, MediaFile | memoryview), "a video"
        file = value if isinstance(value, MediaFile) else MediaFile.of(value)
        known = self._known.pop(file.name, None)
        try:
            self._video = VideoFrames(file, known, self._step.max_pixels, self._step.max_bytes)
        except SampleUnreadable as error:
            raise SampleUndecodable(f"a video that {error}") from None
        if file.name is not None:
            self._known[file.name] = self._video.frames
        while sum(frames.nbytes for frames in self._known.values()) > KNOWN_BYTES_MAX:
            del self._known[next(iter(self._known))]
        codec = self._video.codec
        if self._step.codecs and codec not in self._step.codecs:
            raise SampleUndecodable(
                f"a video that is coded as {codec}, which is none of codecs = {[*self._step.codecs]}"
            )
        return self._video

    def _places(self, values: dict[str, Value], random: SampleRandom) -> list[float]:
        """Where each clip is: see ``frames_of_clips``."""
        step = self._step
        if step.is_random:
            return [random.random() for _clip in range(step.clips)]
        if step.start == "uniform":
            if step.fps is None and step.stride is None:
                return [(clip + 0.5) / step.clips for clip in range(step.clips)]
            return [clip / (step.clips - 1) for clip in range(step.clips)] if step.clips > 1 else [0.5]
        starts = step.start if step.start_field is None else values[step.start_field]
        places = np.asarray(starts, np.float64).reshape(-1).tolist()
        if not np.isfinite(places).all():
            raise SampleUndecodable(f"a clip would start at {places} s")
        return places

    def _frames(self, video: "VideoFrames", clips: Sequence[Array]) -> Iterator[Image]:
        """The pixels of each clip's frames. Raises ``SampleUndecodable``."""
        assert self._pixels is not None, "a video is open"
        numbers = sorted({number for clip in clips for number in clip.tolist()})
        kept: dict[int, Any] = {}
        try:
            if len(clips) > 1 and len(numbers) * video.frame_pixels * _BYTES_PER_PIXEL <= KEPT_BYTES_MAX:
                kept = {number: video.frame(number) for number in numbers}
            for clip in clips:
                last, pixels = -1, np.empty((0, 0, 0), np.uint8)
                for number in clip.tolist():
                    if number != last:
                        frame = kept.get(number) or video.frame(number)
                        self._check_curve(frame)
                        last, pixels = number, self._pixels.of(frame)
                    self.lap()
                    yield pixels
        except SampleUnreadable as error:
            raise SampleUndecodable(str(error)) from None

    @staticmethod
    def _check_curve(frame: Any) -> None:
        if frame.color_trc in _HDR:
            curve = _HDR[frame.color_trc]
            raise SampleUndecodable(
                f"is HDR ({curve}), which 8 bits cannot show: convert it, as by the filters zscale and tonemap of ffmpeg"
            )


@make_stage.register
def _decode_video(step: DecodeVideo, _before: Columns, _after: Columns) -> VideoStage:
    return VideoStage(step)
