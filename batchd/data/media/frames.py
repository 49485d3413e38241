"""Frames of one video file, by number, and their pixels. Workers; scans use the packets.

swscale, which is part of FFmpeg, converts colours and sizes in one pass. Everything that its result
depends on is fixed here: its bit-exact modes, which are the same on every processor, one thread,
and 8 bits in full range. The tags of a frame choose its matrix and its range; the defaults are
BT.601 and limited range. Gray is the luma, in full range.

Invariant: the pixels are a function of the frame, its tags and the options.
"""

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from struct import Struct
from time import monotonic
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import av
import numpy as np
from av.container import InputContainer
from av.sidedata.sidedata import Type
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from batchd.data.media import DECODERS, SAMPLE_BYTES_MAX
from batchd.data.media.containers import (
    NO_KEY,
    OutlinedFile,
    PlainFile,
    VideoFile,
    VideoPacket,
    VideoUnreadable,
    open_video,
    packets_of,
    reason_of,
)
from batchd.data.samples.errors import SampleUnreadable, check_bytes
from batchd.data.samples.kept_files import FileFacts
from batchd.data.samples.values import MediaFile
from batchd.data.storage.paths import blaming_the_sample
from batchd_wire.views import Array

CHANGED = "the file has changed since the source was scanned, or is damaged"

PROGRESS_EVERY_S = 0.5
"""Between two reports of progress within a file; half of the shortest ``scan_timeout_s``."""
_VP8_SHOWN = 0x10
"""The bit of a VP8 frame's first byte that says whether it is shown: some frames are only
references for others."""
_REMUX = 'rewrite it without decoding it: "ffmpeg -fflags +genpts -i FILE -c copy NEW.mkv"'

_SLICE, _ABOUT_PICTURES = 1, frozenset({6, 9, 12})
"""Types of units of H.264: a slice of no key frame; notes, delimiters and filling."""
_RECORD = Struct("<IIIII")
"""Of ``FileFrames``: version, frames, packets, unit; then times, order, keys, checksums."""
_READ_THROUGH, _OUTLINED = 1, 2
"""Versions of records: of all packets, or of the container's index."""
_PLACE = Struct("<qq")
_OUTLINED_CODECS = DECODERS - {"vp8", "mpeg1video", "mpeg2video"}
"""Those of which a packet is one frame, whatever is in it."""
_PROVED_PACKETS = 3

_Timed: TypeAlias = tuple[int, av.VideoFrame]
"""A frame, and when it is shown."""


class FileFrames(NamedTuple):
    """The frames of one file: see ``indexed`` for the arrays.

    ``is_outlined``: the container's index told them. Then a checksum is that of the packet's place
    and size, and a key frame is believed when its packet says so, too.
    """

    order: NDArray[np.uint32]
    keys: NDArray[np.uint32]
    times: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    unit: tuple[int, int]
    is_outlined: bool = False

    @property
    def nbytes(self) -> int:
        """The memory of the arrays."""
        return self.order.nbytes + self.keys.nbytes + self.times.nbytes + self.checksums.nbytes

    def to_bytes(self) -> bytes:
        """All of it, for ``from_bytes``."""
        head = _RECORD.pack(
            _OUTLINED if self.is_outlined else _READ_THROUGH, len(self.order), len(self.times), *self.unit
        )
        return head + b"".join(array.tobytes() for array in (self.times, self.order, self.keys, self.checksums))

    @classmethod
    def from_bytes(cls, record: memoryview) -> "FileFrames | None":
        """Copy a record; None for one of another version, or a damaged one."""
        if len(record) < _RECORD.size:
            return None
        version, frames, packets, *unit = _RECORD.unpack_from(record)
        sizes = [8 * packets, 4 * frames, 4 * frames, 4 * packets]
        is_known = version in (_READ_THROUGH, _OUTLINED)
        if not is_known or len(record) != _RECORD.size + sum(sizes) or not frames or min(unit) < 1:
            return None
        data, starts = bytes(record), np.cumsum([_RECORD.size, *sizes])
        times = np.frombuffer(data, np.int64, packets, starts[0])
        order, keys = (np.frombuffer(data, np.uint32, frames, start) for start in starts[1:3])
        checksums = np.frombuffer(data, np.uint32, packets, starts[3])
        if order.max() >= packets or (keys[keys != NO_KEY] >= packets).any():
            return None
        return cls(order, keys, times, checksums, (unit[0], unit[1]), version == _OUTLINED)

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

    def has(self, number: int, packet: VideoPacket) -> bool:
        """Whether a packet of the file is the one of this number."""
        return packet.pts == int(self.times[number]) and self.checksum(packet) == int(self.checksums[number])

    def checksum(self, packet: VideoPacket) -> int:
        """See ``is_outlined``."""
        return _place_checksum(packet) if self.is_outlined else crc32(packet)

    def _key_time(self, frame: int) -> int:
        key = int(self.keys[frame])
        return int(np.iinfo(np.int64).min if key == NO_KEY else self.times[key])


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


def outlined_frames(file: VideoFile) -> FileFrames | None:
    """The frames of an MP4 as its index tells, without its media data; None if that is too little.

    FFmpeg gives the same packets as of the whole file. But in H.264, VP9 and AV1 the data says what
    is a key frame, too; so there must be one at or before each frame.
    """
    plain = OutlinedFile(file)
    if not plain.has_holes:
        return None
    try:
        container, stream = open_video(plain, {"fflags": "+noparse"})
        with container:
            if not container.format.name.startswith("mov") or stream.codec_context.name not in _OUTLINED_CODECS:
                return None
            found = read_packets(container, stream, checksum=_place_checksum)
            frames = _frames_from(found, stream, is_outlined=True)
    except VideoUnreadable:
        return None
    has_keys = any(flags & 1 for flags in found.flags) and not (frames.keys == NO_KEY).any()
    return frames if has_keys else None


def _place_checksum(packet: VideoPacket) -> int:
    return crc32(_PLACE.pack(-1 if packet.pos is None else packet.pos, packet.size))


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


@dataclass(slots=True)
class Packets:
    """The facts of one file's packets, in the order in which they are decoded."""

    times: "array[int]" = field(default_factory=lambda: array("q"))
    checksums: "array[int]" = field(default_factory=lambda: array("I"))
    flags: bytearray = field(default_factory=bytearray)
    """1 where it is a key frame, plus 2 where its frame is shown."""


def read_packets(
    container: InputContainer,
    stream: VideoStream,
    progress: Callable[[], None] = lambda: None,
    checksum: Callable[[VideoPacket], int] = crc32,
) -> Packets:
    """All packets of a video, without decoding one. Raises ``VideoUnreadable``."""
    found, reported_s = Packets(), monotonic()
    codec = stream.codec_context
    is_vp8 = codec.name == "vp8"
    try:
        for packet in packets_of(container, stream):
            if packet.pts is None:
                raise VideoUnreadable(f"does not say when packet {len(found.times)} is shown; {_REMUX}")
            is_hidden = packet.is_discard or (is_vp8 and packet.size and not memoryview(packet)[0] & _VP8_SHOWN)
            found.times.append(packet.pts)
            found.checksums.append(checksum(packet))
            found.flags.append(packet.is_keyframe + 2 * (not is_hidden))
            if monotonic() - reported_s >= PROGRESS_EVERY_S:
                reported_s = monotonic()
                progress()
    except av.FFmpegError as error:
        raise VideoUnreadable(f"cannot be read behind packet {len(found.times)}: {reason_of(error)}") from None
    if not any(flags & 2 for flags in found.flags):
        raise VideoUnreadable("has no frame in it: it is cut, or was never finished")
    return found


def in_order(found: Packets) -> tuple[Array, Array]:
    """The packets of the frames in display order, and where the decoding of each begins.

    Raises ``VideoUnreadable``.
    """
    times = np.frombuffer(found.times, np.int64)
    flags = np.frombuffer(found.flags, np.uint8)
    shown, keys = np.flatnonzero(flags & 2), np.flatnonzero(flags & 1)
    order = shown[np.argsort(times[shown], kind="stable")]
    same = np.flatnonzero(np.diff(times[order]) == 0)
    if len(same):
        raise VideoUnreadable(f"shows frames {same[0]} and {same[0] + 1} at the same time; {_REMUX}")
    if not len(keys):
        return order, np.zeros(len(order), np.uint32)
    keys = keys[np.argsort(times[keys], kind="stable")]
    places = np.searchsorted(times[keys], times[order], "right") - 1
    return order, np.where(places < 0, NO_KEY, keys[places])


def frames_of(
    container: InputContainer, stream: VideoStream, progress: Callable[[], None] = lambda: None
) -> FileFrames:
    """The frames of a file, from all of its packets. Raises ``VideoUnreadable``."""
    return _frames_from(read_packets(container, stream, progress), stream, is_outlined=False)


def _frames_from(found: Packets, stream: VideoStream, *, is_outlined: bool) -> FileFrames:
    order, keys = in_order(found)
    unit = stream.time_base
    assert unit is not None, "as open_video found"
    return FileFrames(
        order.astype(np.uint32),
        keys.astype(np.uint32),
        np.frombuffer(found.times, np.int64),
        np.frombuffer(found.checksums, np.uint32),
        (unit.numerator, unit.denominator),
        is_outlined,
    )
