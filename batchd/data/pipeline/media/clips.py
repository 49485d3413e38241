"""The step that decodes videos: the frames of clips, one after the other. Worker process.

    the packets of the file -> clips on paper (windows) -> decode from the key frame before each
        -> colours, upright -> the steps on images behind it, or an array of all frames

Frames go on as they are decoded, so a clip takes the memory of one frame and of what the steps
behind leave of the others. Clips of one group of pictures, of this sample and of others that a
worker will make, are decoded in one pass: see ``data.media.opened``. Where the next step makes
frames smaller, to a size that it does not draw, that is done before they are kept; the step then
finds frames that have its size already.

Invariant: a frame is decoded from the same packets, whatever else was decoded before it, by one
thread. Damaged packets make a bad sample of the clips that need them, which names their second.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batchd.data.pipeline.image.geometry import UPRIGHT, Geometry, planner_for
from batchd.data.pipeline.image.opencv import Pixels as Image
from batchd.data.pipeline.image.opencv import Scratch
from batchd.data.pipeline.image.options import Resize
from batchd.data.pipeline.image.resample import make_moves
from batchd.data.pipeline.media.options import DecodeVideo, SoundForm
from batchd.data.pipeline.media.sound_files import ConvertedSound, open_sound
from batchd.data.pipeline.media.streams import SoundMissing
from batchd.data.pipeline.media.windows import frames_of_clips, seconds_of_clips
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.stages import Row
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.image_header import PIXELS_MAX
from batchd.data.samples.kept_files import FileFacts
from batchd.data.samples.values import Clips, MediaFile, Value
from batchd_wire.views import Array

if TYPE_CHECKING:
    from av import VideoFrame

    from batchd.data.media.frames import Pixels, VideoFrames
    from batchd.data.media.opened import OpenVideos
    from batchd.data.media.packets import FileFrames

OPEN_MAX = 4
"""Files that stay open, each with the memory of a decoder."""
KNOWN_BYTES_MAX = 8 << 20
"""The packets of files, 20 bytes each, that are kept for other samples of these files."""
_WITH_SOUND = ("mp4", "matroska", "avi")
"""The containers whose sound is read."""
_HDR = {16: "PQ", 18: "HLG"}
"""Curves of brighter pictures, which 8 bits and the curve of a screen cannot show, by FFmpeg's
numbers."""


class _Shrunk(NamedTuple):
    """A frame in the size of the next step.

    ``shape``: of its pixels before; ``curve``: that of its colours.
    """

    pixels: Image
    shape: tuple[int, ...]
    curve: int


class VideoStage:
    """Decodes the clips of one video after the other.

    ``is_streaming``: the next stage takes the frames while they are decoded. ``share``: so many
    stages of a pipeline divide the room for frames that samples share. ``resize``: the next step,
    if it is one, see ``shrinks``. ``facts``: what a cache keeps of files, if there is one.
    """

    def __init__(self, step: DecodeVideo) -> None:
        self.step = step
        self.share = 1
        self.into = step.into
        self.is_streaming = False
        self.resize: Resize | None = None
        self.facts: FileFacts | None = None
        self._scratch = Scratch()
        self.lap: Callable[[], None] = lambda: None
        """Counts the time until now for this step."""
        self._pixels: Pixels | None = None
        self._known: dict[Hashable, FileFrames] = {}
        """The packets of files that were read lately, the last ones last."""

    def __call__(self, values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        """Replace the file by its clips. Raises ``SampleUndecodable``."""
        step = self.step
        file = values.pop(step.field)
        name, video = self._opened(file)
        known = video.frames
        ticks, unit = known.times[known.order], Fraction(*known.unit)
        places = self._places(values, random)
        clips = frames_of_clips(step, ticks, unit, places)
        if random.draws is not None and step.is_random:
            starts = [round(float(ticks[clip[0]] * unit), 6) for clip in clips]
            random.draws.append({"starts": starts})
        if step.times:
            values[step.times] = (ticks[np.stack(clips)] * float(unit)).reshape(step.lengths)
        if step.audio:
            values[step.audio] = _sound(step, file, seconds_of_clips(step, ticks, unit, places), self.facts)
        self.videos.begin(random.place, {name: (known, _each(clips))})
        made = Clips(step.lengths, self._frames(name, video, clips))
        values[step.into] = made if self.is_streaming else made.array()

    @cached_property
    def videos(self) -> "OpenVideos[VideoFrame | _Shrunk]":
        """The open files, by their names, and the frames that samples share."""
        from batchd.data.media.opened import OpenVideos  # noqa: PLC0415  needs an extra

        videos = OpenVideos(self._shrunk, _bytes_of, OPEN_MAX, self.step.codecs)
        videos.bytes_max //= self.share
        return videos

    def _shrunk(self, frame: "VideoFrame") -> "VideoFrame | _Shrunk":
        """A frame as it is kept, smaller if that takes less memory. Raises ``SampleUnreadable``."""
        resize = self.resize
        if resize is None or frame.color_trc in _HDR:
            return frame
        size = _planned(resize, frame.height, frame.width)
        assert self._pixels is not None, "a video is open"
        if size.height * size.width * self._pixels.channels >= _bytes_of(frame):
            return frame
        pixels = self._pixels.of(frame)
        moves = _planned(resize, *pixels.shape[:2]).moves
        small = make_moves(pixels, moves, UPRIGHT, self._scratch, None).copy()
        return _Shrunk(small, pixels.shape, frame.color_trc)

    def announce(self, values: Mapping[str, Value], random: SampleRandom) -> bool:
        """Take note of the clips of a sample that will be made; paired with ``forget``.

        False if files are in memory: then no two samples have one in common.
        """
        value = values[self.step.field]
        if not isinstance(value, MediaFile) or value.name is None:
            return False
        try:
            places = self._places(values, random)
        except SampleUndecodable:
            return True  # a bad sample, which says so when it is made
        self.videos.announce(random.place, {value.name: lambda known: self._wanted(known, places)})
        return True

    def forget(self, sample: Hashable) -> None:
        """A sample was made, or will not be."""
        self.videos.forget(sample)

    def _wanted(self, known: "FileFrames", places: Sequence[float]) -> Iterator[int]:
        """The frames of clips at such places; none where the sample will be bad."""
        with suppress(SampleUndecodable):
            yield from _each(frames_of_clips(self.step, known.times[known.order], Fraction(*known.unit), places))

    def _opened(self, value: Value) -> tuple[Hashable, "VideoFrames"]:
        """The video, and the name of its file. Raises ``SampleUndecodable``."""
        from batchd.data.media.frames import PixelOptions, Pixels, open_frames  # noqa: PLC0415  needs an extra

        if self._pixels is None:
            self._pixels = Pixels(PixelOptions(1, self.step.color, self.step.rotation))
        assert isinstance(value, MediaFile | memoryview), "a video"
        file = value if isinstance(value, MediaFile) else MediaFile.of(value)
        step, name, known = self.step, file.name, self._known.pop(file.name, None)
        self.videos.close(None)
        try:
            video = self.videos.open(
                name, partial(open_frames, file, known, step.max_pixels, step.max_bytes, self.facts)
            )
        except SampleUnreadable as error:
            raise SampleUndecodable(f"a video that {error}") from None
        video.read_from(file)
        if name is not None:
            self._known[name] = video.frames
        while sum(frames.nbytes for frames in self._known.values()) > KNOWN_BYTES_MAX:
            oldest = next(iter(self._known))
            del self._known[oldest]
            if oldest != name:
                self.videos.close(oldest)
        return name, video

    def _places(self, values: Mapping[str, Value], random: SampleRandom) -> list[float]:
        """Where each clip is: see ``frames_of_clips``."""
        step = self.step
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

    def _frames(self, file: Hashable, video: "VideoFrames", clips: Sequence[Array]) -> Iterator[Image]:
        """The pixels of each clip's frames. Raises ``SampleUndecodable``."""
        assert self._pixels is not None, "a video is open"
        numbers = list(chain.from_iterable(clip.tolist() for clip in clips))
        last, pixels, shapes = -1, np.empty((0, 0, 0), np.uint8), set[tuple[int, ...]]()
        try:
            for place, number in enumerate(numbers):
                if number != last:
                    shown = self.videos.frame(file, lambda: video, number)
                    self._check_curve(shown.curve if isinstance(shown, _Shrunk) else shown.color_trc)
                    last, pixels = number, shown.pixels if isinstance(shown, _Shrunk) else self._pixels.of(shown)
                    shapes.add(shown.shape if isinstance(shown, _Shrunk) else pixels.shape)
                    if len(shapes) > 1:
                        raise SampleUndecodable(f"its frames have several sizes: {sorted(shapes)}")
                if place + 1 == len(numbers):
                    self.videos.finish()
                self.lap()
                yield pixels
        except SampleUnreadable as error:
            raise SampleUndecodable(str(error)) from None

    @staticmethod
    def _check_curve(curve: int) -> None:
        if curve in _HDR:
            raise SampleUndecodable(
                f"is HDR ({_HDR[curve]}), which 8 bits cannot show: convert it, as by the filters zscale and tonemap of ffmpeg"
            )


def _sound(step: DecodeVideo, file: Value, starts_s: Sequence[float], facts: FileFacts | None) -> Array:
    """The sound of each clip. Raises ``SampleUndecodable``, also for a file that has none."""
    assert isinstance(file, MediaFile | memoryview), "a video"
    form = SoundForm(step.audio_rate, step.audio_channels, step.audio_quality)
    made = np.zeros((len(starts_s), step.samples, form.channels), np.float32)
    try:
        with open_sound(file, _WITH_SOUND, facts) as opened:
            sound = ConvertedSound(opened, form)
            for clip, start_s in zip(made, starts_s, strict=True):
                start = round((start_s - opened.start_s) * form.rate)
                first, end = max(start, 0), min(start + step.samples, sound.length)
                if first < end:
                    clip[first - start : end - start] = sound.read(first, end - first)
    except SoundMissing as error:
        if step.no_audio == "bad":
            raise SampleUndecodable(f'{error}; no_audio = "zeros" of "decode_video" gives silence') from None
    except SampleUndecodable as error:
        raise SampleUndecodable(f"its sound: {error}") from None
    return made.reshape(*step.lengths[:-1], step.samples, *((form.channels,) if form.channels > 1 else ()))


def _bytes_of(frame: "VideoFrame | _Shrunk") -> int:
    return frame.pixels.nbytes if isinstance(frame, _Shrunk) else sum(plane.buffer_size for plane in frame.planes)


def shrinks(step: Resize) -> bool:
    """Whether a step that finds frames of its size leaves them as they are."""
    drawn, rounded = (step.sizes, step.shorter_sides), (step.max_longer_side, step.multiple_of, step.max_pixels)
    return not any((*drawn, *rounded))


def _planned(resize: Resize, height: int, width: int) -> Geometry:
    geometry = Geometry(height, width, 1, PIXELS_MAX)
    planner = planner_for(resize)
    assert planner is not None, "it moves pixels"
    planner(geometry, lambda: 0.0)
    return geometry


def _each(clips: Sequence[Array]) -> Iterator[int]:
    """The frames of all clips; one that a clip shows several times is there once."""
    return chain.from_iterable(np.unique(clip).tolist() for clip in clips)
