"""The frames of one video file, as its packets tell, or the index of its container.

    order       uint32 [frames]       the packet of each frame, in display order
    keys        uint32 [frames]       the packet at which decoding begins that gives the frame
    times       int64 [packets]       when a packet's frame is shown; packets are in decoding order
    checksums   uint32 [packets]      CRC-32 of the data, or of its place and size

    packets     I0  P3  B1  B2  I4  P7  B5  B6
    order        0   2   3   1   4   6   7   5
    keys         0   0   0   0   4   4   4   4

Invariants: no decoder runs. Frames are in the order of their times, and no two times are the same.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from time import monotonic
from typing import NamedTuple
from zlib import crc32

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from batchd.data.media import DECODERS
from batchd.data.media.containers import (
    NO_KEY,
    OutlinedFile,
    VideoFile,
    VideoPacket,
    VideoUnreadable,
    open_video,
    packets_of,
    reason_of,
)
from batchd_wire.views import Array

PROGRESS_EVERY_S = 0.5
"""Between two reports of progress within a file; half of the shortest ``scan_timeout_s``."""
_VP8_SHOWN = 0x10
"""The bit of a VP8 frame's first byte that says whether it is shown: some frames are only
references for others."""
_REMUX = 'rewrite it without decoding it: "ffmpeg -fflags +genpts -i FILE -c copy NEW.mkv"'

_RECORD = Struct("<IIIII")
"""Of ``FileFrames``: version, frames, packets, unit; then times, order, keys, checksums."""
_READ_THROUGH, _OUTLINED = 1, 2
"""Versions of records: of all packets, or of the container's index."""
_PLACE = Struct("<qq")
_OUTLINED_CODECS = DECODERS - {"vp8", "mpeg1video", "mpeg2video"}
"""Those of which a packet is one frame, whatever is in it."""


class FileFrames(NamedTuple):
    """The frames of one file: see the module.

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
