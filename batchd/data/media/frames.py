"""Frames of one video file, by number, and their pixels. Workers.

swscale, which is part of FFmpeg, converts colours and sizes in one pass. Everything that its result
depends on is fixed here: its bit-exact modes, which are the same on every processor, one thread,
and 8 bits in full range. The tags of a frame choose its matrix and its range; the defaults are
BT.601 and limited range. Gray is the luma, in full range.

Invariant: the pixels are a function of the frame, its tags and the options.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import av
import numpy as np
from av.container import InputContainer
from av.sidedata.sidedata import Type
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from numpy.typing import NDArray

from batchd.data.media import SAMPLE_BYTES_MAX
from batchd.data.media.containers import (
    NO_KEY,
    PlainFile,
    VideoFile,
    VideoPacket,
    VideoUnreadable,
    open_video,
    packets_of,
    reason_of,
)
from batchd.data.media.packets import FileFrames, frames_of, outlined_frames
from batchd.data.samples.errors import SampleUnreadable, check_bytes
from batchd.data.samples.kept_files import FileFacts
from batchd.data.samples.values import MediaFile
from batchd.data.storage.paths import blaming_the_sample
from batchd_wire.views import Array

CHANGED = "the file has changed since the source was scanned, or is damaged"

_SLICE, _ABOUT_PICTURES = 1, frozenset({6, 9, 12})
"""Types of units of H.264: a slice of no key frame; notes, delimiters and filling."""
_PROVED_PACKETS = 3

_Timed: TypeAlias = tuple[int, av.VideoFrame]
"""A frame, and when it is shown."""


class _NoKeyFrame(SampleUnreadable):
    """A packet in which decoding cannot begin, though the index of its file says so."""


class VideoFrames:
    r"""Any frame of one file that stays open. Belongs to one reader, as a descriptor does.

        key frame -> packet -> packet -> ...  -> last packet of its group   one run of the decoder
                       \__ frames come out in the order in which they are shown, some packets later

    The frames that are shown from a key frame on, up to the next, are its group. A run begins with
    a reset decoder, and ends with the group. So a frame is always decoded from the same packets,
    whichever frames were read before it, and yet continuing in a group costs nothing: frames in
    their order are decoded once each.

    Frames in front of the one that is asked for are not decoded where no other refers to them, as
    packets of H.264 say: half of a file, as a rule. (In HEVC they say so of their layer alone.)
    Where a run fails, the frame is decoded by a run for itself, and then by one that leaves nothing
    out. So damage matters to the frames that need it, whichever others were asked for.

    Every packet is compared with ``frames``, which detects a changed file and a seek to a wrong
    packet. If it is no key frame although the index of the file says so, a run begins at the one
    before.

    Invariant: a returned frame is of a run in which no packet that it refers to was damaged.
    """

    def __init__(self, file: VideoFile, frames: FileFrames | None, max_pixels: int, max_bytes: int) -> None:
        """``frames``: as the scan found them; None reads the packets of the file."""
        self._max_pixels = max_pixels
        self._max_bytes = max_bytes
        self._next_packet: int | None = None
        """The packet that the container has next, where it is known."""
        self._is_spoilt = False
        """True after an error of the decoder, and without a decoder."""
        self._container: InputContainer
        self._file = file
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self.close)
            self._prepare()
            self.frames = frames or self._find_frames()
            where_it_fails.pop_all()
        self._group: Iterator[_Timed] = iter(())
        self._key = NO_KEY
        """The key frame that the group belongs to."""
        self._is_skipping = False
        """Whether what no wanted frame refers to is left out."""
        self._wanted = 0
        """The time of the frame that is taken from the group, or was taken last."""

    def frame(self, number: int) -> av.VideoFrame:
        """A frame by its number in the file. Raises ``SampleUnreadable``."""
        key, time = int(self.frames.keys[number]), int(self.frames.times[self.frames.order[number]])
        if key == NO_KEY:
            raise SampleUnreadable(f"{self.frames.text(number)} comes before the first key frame of the file")
        runs = [True, False] if self._length_bytes else [False]
        if not self.is_further(number):
            self._begin(key, is_skipping=runs.pop(0))
        self._wanted = time
        while True:
            with ExitStack() as where_it_fails:
                where_it_fails.callback(self._forget)
                try:
                    with blaming_the_sample():
                        frame = self._take(time)
                except SampleUnreadable as error:
                    if not runs:
                        raise SampleUnreadable(f"{self.frames.text(number)}: {error}") from None
                else:
                    where_it_fails.pop_all()
                    return frame
            self._begin(key, is_skipping=runs.pop(0))

    def is_further(self, number: int) -> bool:
        """True if a frame is further on in the group that was decoded last."""
        key, time = int(self.frames.keys[number]), int(self.frames.times[self.frames.order[number]])
        return key == self._key != NO_KEY and time > self._wanted

    def read_from(self, file: MediaFile) -> None:
        """Go on with the same file as it is open now."""
        self._file = file
        self._plain.read_from(file)

    def close(self) -> None:
        """Give back the file and the decoder."""
        self._group = iter(())
        self._close_container()
        if isinstance(self._file, int):
            os.close(self._file)

    def are_proved(self) -> bool:
        """Whether the first packets are as ``frames`` has them, key frames among them."""
        try:
            packets = self.packets(0, min(_PROVED_PACKETS, len(self.frames.times)) - 1)
            return all(packet.is_keyframe or number not in self.frames.keys for number, packet in packets)
        except SampleUnreadable:
            return False

    def _find_frames(self) -> FileFrames:
        try:
            with blaming_the_sample():
                found = frames_of(self._container, self._stream)
        except VideoUnreadable as error:
            raise SampleUnreadable(str(error)) from None
        self._next_packet = None
        return found

    def _take(self, time: int) -> av.VideoFrame:
        """The frame of this time, further on in the group. Raises ``SampleUnreadable``."""
        for its_time, frame in self._group:
            if its_time == time:
                return frame
            if its_time > time:
                break
        raise SampleUnreadable("the decoder has no frame of this time")

    def _begin(self, key: int, *, is_skipping: bool) -> None:
        """Begin a run."""
        self._key, self._group, self._is_skipping = key, self._decode_group(key), is_skipping

    def _forget(self) -> None:
        self._key, self._next_packet, self._group = NO_KEY, None, iter(())

    def _prepare(self) -> None:
        """Make the container and its decoder, also a second time. Raises ``SampleUnreadable``."""
        self._close_container()
        self._is_spoilt = True
        try:
            self._plain = PlainFile(self._file)
            self._container, self._stream = open_video(self._plain)
        except VideoUnreadable as error:
            raise SampleUnreadable(f"the file {error}; {CHANGED}") from None
        self._decoder = self._stream.codec_context
        pixels = self._decoder.width * self._decoder.height
        if pixels > self._max_pixels:
            size = f"{self._decoder.width} x {self._decoder.height}"
            raise SampleUnreadable(f"{size} is {pixels} pixels, more than max_pixels = {self._max_pixels}")
        self.frame_pixels, self.codec = pixels, str(self._decoder.name)
        extra = bytes(self._decoder.extradata or b"")
        is_avc = self.codec == "h264" and len(extra) > 4 and extra[0] == 1  # noqa: PLR2004  a record of avcC
        self._length_bytes = (extra[4] & 3) + 1 if is_avc else 0
        """Of the length in front of each unit of a packet of H.264; 0 if there is none."""
        self._decoder.thread_count = 1
        self._decoder.options = {"err_detect": "explode", "max_pixels": str(self._max_pixels)}
        self._next_packet = 0
        self._is_spoilt = False

    def _close_container(self) -> None:
        if hasattr(self, "_container"):
            self._container.close()

    def _decode_group(self, key: int) -> Iterator[_Timed]:
        """The frames of a key frame's group, in order. Raises ``SampleUnreadable``."""
        group = self.frames.group(key)
        last = int(self.frames.order[group.start : group.stop].max())
        shown, start, trouble = int(self.frames.times[key]) - 1, key, None
        while True:
            before = int(self.frames.keys[group.start - 1]) if group.start else NO_KEY
            try:
                for time, frame in self._run(start, last):
                    if time > shown:
                        shown = time
                        yield time, frame
            except SampleUnreadable as error:
                # Frames behind an open key frame may refer to the key frame before.
                if before in (start, NO_KEY) or (trouble is not None and not isinstance(error, _NoKeyFrame)):
                    raise trouble or error from None
                trouble = trouble if isinstance(error, _NoKeyFrame) else error
            else:
                return
            start, group = before, self.frames.group(before)

    def _run(self, start: int, last: int) -> Iterator[_Timed]:
        """The frames from a key frame on. Raises ``SampleUnreadable`` at the first bad packet."""
        start_time = int(self.frames.times[start])
        if self._is_spoilt:  # after an error the decoder would keep some state
            self._prepare()
        self._decoder.flush_buffers()
        for number, packet in self.packets(start, last):
            if number == start and self.frames.is_outlined and not packet.is_keyframe:
                raise _NoKeyFrame(f"packet {number} is no key frame, as the index of the file has it")
            if packet.is_corrupt:
                raise SampleUnreadable(f"packet {number} is cut")
            time = self.frames.times[number]
            # Frames behind the key frame that are shown before it refer to the group before.
            is_needed = time >= self._wanted or not self._is_skipping or not _is_unused(packet, self._length_bytes)
            if time >= start_time and is_needed:
                yield from self._decoded(packet, f"packet {number}")
        yield from self._decoded(None, f"packet {last}")

    def _decoded(self, packet: "VideoPacket | None", name: str) -> Iterator[_Timed]:
        """The frames of a packet; the last ones for None. Raises ``SampleUnreadable``."""
        try:
            frames = self._decoder.decode(packet)
        except av.FFmpegError as error:
            self._is_spoilt = True
            raise SampleUnreadable(f"{name} cannot be decoded: {reason_of(error)}") from None
        for frame in frames:
            if frame.is_corrupt:
                self._is_spoilt = True
                raise SampleUnreadable(f"{name} is damaged, or one before it")
            if frame.pts is not None:
                yield frame.pts, frame

    def packets(self, first: int, last: int) -> Iterator[tuple[int, VideoPacket]]:
        """Packets by their numbers, each exactly as in the scan. Raises ``SampleUnreadable``."""
        number = first
        try:
            for packet in self._from(first):
                if not self.frames.has(number, packet):
                    raise SampleUnreadable(f"packet {number} is not what it was: {CHANGED}")
                check_bytes(packet.size, self._max_bytes, f"packet {number} ")
                number += 1
                self._next_packet = number
                yield number - 1, packet
                if number > last:
                    return
        except av.FFmpegError as error:
            raise SampleUnreadable(f"packet {number} cannot be read: {reason_of(error)}") from None
        raise SampleUnreadable(f"the file ends before packet {number}: {CHANGED}")

    def _from(self, first: int) -> Iterator[VideoPacket]:
        """All packets from one on, or none where it is not found."""
        if self._next_packet == first:
            yield from packets_of(self._container, self._stream)
            return
        self._next_packet = None
        for from_the_start in (False, True):
            if not self._seek(first, from_the_start=from_the_start):
                continue
            packets = packets_of(self._container, self._stream)
            found = self._find(first, packets, from_the_start=from_the_start)
            if found is not None:
                yield found
                yield from packets
                return

    def _seek(self, packet: int, *, from_the_start: bool) -> bool:
        """Seek to a packet, or before it; the container is opened again if it cannot seek."""
        if from_the_start:
            self._prepare()
            return True
        try:
            self._container.seek(int(self.frames.times[packet]), stream=self._stream, backward=True)
        except av.FFmpegError:
            return False
        return True

    def _find(self, wanted: int, packets: Iterator[VideoPacket], *, from_the_start: bool) -> "VideoPacket | None":
        """The packet of this number; None if the seek went too far or the file has changed."""
        time = int(self.frames.times[wanted])
        for number, packet in enumerate(packets):
            if self.frames.has(wanted, packet):
                return packet
            if from_the_start and (number >= wanted or packet.pts != self.frames.times[number]):
                return None
            if not from_the_start and packet.is_keyframe and packet.pts is not None and packet.pts > time:
                return None
        return None


def _is_unused(packet: VideoPacket, length_bytes: int) -> bool:
    """Whether a packet of H.264 is one picture to which no other refers, as its units say."""
    data, place, has_slice = memoryview(packet), 0, False
    while place + length_bytes < len(data):
        first = place + length_bytes
        kind = data[first] & 0x1F
        if kind == _SLICE and not data[first] >> 5 & 3:
            has_slice = True
        elif kind not in _ABOUT_PICTURES:
            return False
        place = first + int.from_bytes(data[place:first], "big")
    return has_slice and place == len(data)


def open_frames(
    file: MediaFile, known: FileFrames | None, max_pixels: int, max_bytes: int, facts: FileFacts | None
) -> VideoFrames:
    """Open a file, whose frames are ``known``, or kept among the ``facts`` of files, or found now.

    Raises ``SampleUnreadable``.
    """
    key = file.key("frames") if facts is not None and known is None else None
    record = None if facts is None or key is None else facts.find(key)
    if record is not None:
        known = FileFrames.from_bytes(record)
    if known is not None:
        return VideoFrames(file, known, max_pixels, max_bytes)
    video = _open_outlined(file, max_pixels, max_bytes) or VideoFrames(file, None, max_pixels, max_bytes)
    if facts is not None and key is not None:
        facts.keep(key, video.frames.to_bytes())
    return video


def _open_outlined(file: MediaFile, max_pixels: int, max_bytes: int) -> VideoFrames | None:
    """The video with the frames that its index tells, if its first packets prove that."""
    with blaming_the_sample():
        frames = outlined_frames(file)
    if frames is None:
        return None
    video = VideoFrames(file, frames, max_pixels, max_bytes)
    if video.are_proved():
        return video
    video.close()
    return None


_FORMATS = {"rgb": "rgb24", "bgr": "bgr24", "gray": "gray"}
_EXACT = Interpolation.ACCURATE_RND | Interpolation.BITEXACT
"""FULL_CHR_H_INT would be nearer to the exact colours, but overflows at the most extreme ones,
and takes six times as long."""
_MATRIX_BYTES = 36


class PixelOptions(NamedTuple):
    """What decides the pixels of a frame; ``frames``: how many a sample has of them."""

    frames: int
    color: str
    rotation: str
    size: tuple[int, int] | None = None
    interpolation: str = "bilinear"


class Pixels:
    """Makes pixels of frames, as the options of a source or a step say."""

    def __init__(self, options: PixelOptions) -> None:
        self._options = options
        self.channels = 1 if options.color == "gray" else 3
        self._flags = Interpolation[options.interpolation.upper()] | _EXACT
        self._scaler = VideoReformatter()

    def of(self, frame: av.VideoFrame) -> NDArray[np.uint8]:
        """The pixels of a frame: [height, width, channels]. Raises ``SampleUnreadable``."""
        turn = self._turn(frame)
        if self._options.size is None:
            height, width = frame.height, frame.width
        else:
            height, width = self._options.size[:: -1 if turn.swaps_sides else 1]
        size = self._options.frames * height * width * self.channels
        if size > SAMPLE_BYTES_MAX:
            raise SampleUnreadable(f"its pixels are {size} bytes, more than {SAMPLE_BYTES_MAX}; scale it with size")
        luma = Colorspace.ITU601 if self._options.color == "gray" and not frame.format.is_rgb else None
        try:
            made = self._scaler.reformat(
                frame,
                width,
                height,
                _FORMATS[self._options.color],
                # named on both sides, no matrix comes between a video's luma and gray
                src_colorspace=luma,
                dst_colorspace=luma,
                interpolation=self._flags,
                dst_color_range=ColorRange.JPEG,
                threads=1,
            )
        except av.FFmpegError as error:
            raise SampleUnreadable(f"its colours cannot be made: {reason_of(error)}") from None
        pixels: Array = made.to_ndarray()
        return turn.of(pixels.reshape(height, width, self.channels))

    def _turn(self, frame: av.VideoFrame) -> "Rotation":
        side_data: Any = frame.side_data
        data = side_data.get(Type.DISPLAYMATRIX)
        if self._options.rotation == "ignore" or data is None or data.buffer_size < _MATRIX_BYTES:
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
