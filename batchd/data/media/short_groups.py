"""Videos whose groups of pictures are short, so that any clip is near a key frame. Worker process.

    packets of the file -> longest group
        short, and a seek finds a key frame  the file as it is
        short, but it does not               "remuxed": the same packets, with an index of keys
        long                                 "re-encoded": H.264 by x264, a key frame each so many
                                             frames, all other streams of sound as they are

A frame of a new file is shown when the old one showed it, with the same tags of colour and the same
rotation; what an edit list hid is gone. The loss is measured: both files are decoded, and the PSNR
of the luma is that of all frames, and that of the worst one.

Invariant: a file that does not keep its frames, times, tags and rotation is refused, never written.
One thread, and a fixed speed: the same version of PyAV makes the same bytes.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer, OutputContainer
from av.sidedata.sidedata import Type
from av.video.stream import VideoStream
from numpy.typing import NDArray

from batchd.data.media import SAMPLE_BYTES_MAX
from batchd.data.media.containers import PlainFile, VideoUnreadable, open_video, packets_of, reason_of
from batchd.data.media.frames import VideoFrames
from batchd.data.media.packets import FileFrames
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.values import MediaFile

CRF = 18
"""Of x264: a loss that is hard to see."""
SPEED = "medium"
PIXELS = frozenset(
    {
        *("yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p", "gray"),
        *("yuv420p10le", "yuv422p10le", "yuv444p10le", "gray10le"),
    }
)
"""FFmpeg's names of the forms of pixels that x264 keeps."""
PSNR_EQUAL = 100.0
"""Decibels that stand for equal frames."""
_MATROSKA = "matroska,webm"
_TAGS = ("color_range", "colorspace", "color_primaries", "color_trc")


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A video with short groups. ``done``: "kept", "remuxed" or "re-encoded".

    ``longest``: frames of its longest group before. ``psnr``: of the luma, in dB, of all frames and
    of the worst one; None where nothing is lost.
    """

    content: bytes
    done: str
    longest: int
    bytes_before: int
    psnr: tuple[float, float] | None = None

    def facts(self) -> dict[str, object]:
        """For the report."""
        facts: dict[str, object] = {
            "done": self.done,
            "longest_group": self.longest,
            "bytes_before": self.bytes_before,
            "bytes": len(self.content),
        }
        return facts if self.psnr is None else {**facts, "psnr": self.psnr[0], "psnr_worst_frame": self.psnr[1]}


def with_short_groups(file: MediaFile, longest: int, max_pixels: int, max_bytes: int) -> Regrouped:
    """The video with groups of at most ``longest`` frames. Raises ``SampleUndecodable``."""
    psnr = None
    try:
        with ExitStack() as opened:
            old = VideoFrames(file, None, max_pixels, max_bytes)
            opened.callback(old.close)
            there = longest_group(old.frames)
            if there <= longest:
                done, made = ("kept", file.whole()) if _seeks(file, old.frames) else ("remuxed", _copied(file))
                content = bytes(made)
            else:
                done, content = "re-encoded", _encoded(file, old, longest)
            if done != "kept":
                new = VideoFrames(MediaFile.of(memoryview(content)), None, max_pixels, max_bytes)
                opened.callback(new.close)
                _check_frames(old, new, longest)
                if done == "re-encoded":
                    psnr = _psnr(old, new)
    except VideoUnreadable as error:
        raise SampleUndecodable(f"a video that {error}") from None
    except SampleUnreadable as error:
        raise SampleUndecodable(f"a video that cannot get short groups: {error}") from None
    except av.FFmpegError as error:
        raise SampleUndecodable(f"a video that cannot be written: {reason_of(error)}") from None
    return Regrouped(content, done, there, file.size, psnr)


def longest_group(frames: FileFrames) -> int:
    """Frames of the longest group: those that begin at one key frame."""
    _keys, counts = np.unique(frames.keys, return_counts=True)
    return int(counts.max())


def _seeks(file: MediaFile, frames: FileFrames) -> bool:
    """True if a seek to the last key frame goes there, and not to the beginning."""
    last = int(frames.times[frames.keys[-1]])
    container, stream = open_video(PlainFile(file))
    with container:
        try:
            container.seek(last, stream=stream, backward=True)
            packet = next(packets_of(container, stream), None)
        except av.FFmpegError:
            return False
        return packet is not None and packet.pts == last


class _Limited(io.BytesIO):
    """The bytes of a new file."""

    def write(self, data: Any) -> int:
        """Write, as ``io.BytesIO``. Raises ``SampleUndecodable``."""
        if self.tell() + len(data) > SAMPLE_BYTES_MAX:
            raise SampleUndecodable(f"a video that is more than {SAMPLE_BYTES_MAX} bytes with short groups")
        return super().write(data)


def _new_file(stack: ExitStack, name: str) -> tuple[OutputContainer, _Limited]:
    """A file of the same family as one that FFmpeg calls ``name``; a muxer that keeps its times."""
    content = _Limited()
    muxer = "matroska" if name == _MATROSKA else "mov"
    container = av.open(content, "w", format=muxer, container_options={"fflags": "+bitexact"})
    stack.callback(container.close)
    return container, content


def _copied(file: MediaFile) -> bytes:
    """The same packets of picture and sound in a new file."""
    container, stream = open_video(PlainFile(file))
    with ExitStack() as stack:
        stack.enter_context(container)
        new, content = _new_file(stack, container.format.name)
        into = {one.index: new.add_stream_from_template(one) for one in [stream, *container.streams.audio]}
        for packet in container.demux([stream, *container.streams.audio]):
            if packet.dts is not None and packet.stream.index in into:
                packet.stream = into[packet.stream.index]
                new.mux(packet)
    return content.getvalue()


def _encoded(file: MediaFile, old: VideoFrames, longest: int) -> bytes:
    """The frames in groups of so many, and the sound as it is."""
    container, stream = open_video(PlainFile(file))
    with ExitStack() as stack:
        stack.enter_context(container)
        first = old.frame(0)
        if first.format.name not in PIXELS:
            raise SampleUnreadable(
                f"its pixels are {first.format.name}, which H.264 does not keep: convert it to yuv420p, as by ffmpeg"
            )
        new, content = _new_file(stack, container.format.name)
        into = new.add_stream(
            "libx264",
            rate=stream.average_rate or stream.guessed_rate or 25,
            options={
                "preset": SPEED,
                "crf": str(CRF),
                "x264-params": f"keyint={longest}:min-keyint=1:scenecut=0:open-gop=0:threads=1",
            },
        )
        context = into.codec_context
        context.width, context.height, context.pix_fmt = first.width, first.height, first.format.name
        context.thread_count = 1
        assert stream.time_base is not None, "FFmpeg gives every stream of a file one"
        context.time_base = into.time_base = stream.time_base
        if stream.sample_aspect_ratio:
            context.sample_aspect_ratio = stream.sample_aspect_ratio
        for tag in _TAGS:
            setattr(context, tag, getattr(first, tag))
        if first.rotation:
            into.set_display_rotation(first.rotation)
        sounds = {one.index: new.add_stream_from_template(one) for one in container.streams.audio}
        sound = _sound_of(container, sounds)
        waiting = next(sound, None)
        for packet in _packets_of_frames(old, into, stream):
            while waiting is not None and waiting.dts * waiting.time_base <= packet.dts * packet.time_base:
                new.mux(waiting)
                waiting = next(sound, None)
            new.mux(packet)
        for packet in chain([waiting] if waiting is not None else [], sound):
            new.mux(packet)
    return content.getvalue()


def _sound_of(container: InputContainer, into: Mapping[int, AudioStream]) -> Iterator[Any]:
    for packet in container.demux(container.streams.audio) if into else ():
        if packet.dts is not None:
            packet.stream = into[packet.stream.index]
            yield packet


def _packets_of_frames(old: VideoFrames, into: VideoStream, stream: VideoStream) -> Iterator[Any]:
    """The packets of all frames. Raises ``SampleUnreadable``."""
    for number in range(len(old.frames.order)):
        frame = old.frame(number)
        frame.pts = int(old.frames.times[old.frames.order[number]])
        frame.time_base = stream.time_base
        frame.pict_type = 0
        yield from into.encode(frame)
    yield from into.encode(None)


def _check_frames(old: VideoFrames, new: VideoFrames, longest: int) -> None:
    """Raise ``SampleUnreadable`` if the new file shows other frames, or at other times."""
    before, after = (
        [frames.seconds(number) for number in range(len(frames.order))] for frames in (old.frames, new.frames)
    )
    if before != after:
        raise SampleUnreadable(f"a new file would show {len(after)} frames at other times than its {len(before)}")
    if longest_group(new.frames) > longest:
        raise SampleUnreadable(f"a new file would have groups of {longest_group(new.frames)} frames")
    shown, made = old.frame(0), new.frame(0)
    for tag in (*_TAGS, "width", "height"):
        if getattr(shown, tag) != getattr(made, tag):
            raise SampleUnreadable(f"a new file would have another {tag}")
    if _matrix(shown) != _matrix(made):
        raise SampleUnreadable("a new file would lose its display matrix, which is no rotation")


def _matrix(frame: Any) -> bytes:
    data = frame.side_data.get(Type.DISPLAYMATRIX)
    return b"" if data is None else bytes(data)


def _psnr(old: VideoFrames, new: VideoFrames) -> tuple[float, float]:
    """Of the luma, in dB: of all frames, and of the worst one."""
    errors = []
    for number in range(len(old.frames.order)):
        before, after = _luma(old.frame(number)), _luma(new.frame(number))
        errors.append(float(np.square(before - after).mean()))
    depth = old.frame(0).format.components[0].bits
    return _decibels(float(np.mean(errors)), depth), _decibels(max(errors), depth)


def _luma(frame: Any) -> NDArray[np.float32]:
    plane = frame.planes[0]
    dtype = np.dtype("<u2") if frame.format.components[0].bits > 8 else np.dtype(np.uint8)  # noqa: PLR2004
    rows = np.frombuffer(plane, dtype).reshape(plane.height, plane.line_size // dtype.itemsize)
    return rows[:, : plane.width].astype(np.float32)


def _decibels(mean_square: float, bits: int) -> float:
    """``10 log10(peak² / mean square)``, as in every textbook of coding."""
    peak = (1 << bits) - 1
    return PSNR_EQUAL if not mean_square else min(PSNR_EQUAL, round(10 * float(np.log10(peak**2 / mean_square)), 2))
