"""Video files, opened so that FFmpeg reads this one file and nothing else. Daemon and workers.

FFmpeg accepts playlists and other lists as videos, and would open the files that they name. So it
gets an open file instead of a path, and may use only demuxers of plain files, no protocol, and no
decoder to probe a file.

Invariant: opening and demuxing a file runs no decoder, and opens no other file.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn, TypeAlias

import av
import av.logging
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from batchd.data.media import DECODERS
from batchd.data.samples.values import MediaFile

FORMATS = "mov,mp4,matroska,webm,avi"
"""FFmpeg's names of the demuxers that may be used: each finds a key frame by its time, exactly."""
FORMATS_SHOWN = "mp4, mov, mkv, webm or avi"
READ_BYTES = 64 << 10
"""Read from a file at once."""
HOLE_BYTES = 4 * READ_BYTES
"""Media data of a box that is not shorter is left out of an outline."""
_HEAD_BYTES, _HEADS_BYTES, _BOXES_MAX = 16, 4096, 1 << 14
"""Of the head of a box, if its size has 64 bits; read for heads at once; how many are looked at."""
_open = partial(av.open, metadata_errors="replace") if int(av.__version__.partition(".")[0]) < 19 else av.open  # noqa: PLR2004
"""Texts that are no UTF-8 are no error; since PyAV 19 by itself."""

NO_KEY = (1 << 32) - 1
"""In the index, the key of a frame that no key frame is at or before."""

VideoPacket: TypeAlias = "Packet[VideoStream]"

av.logging.set_level(None)
"""FFmpeg would write to the standard error about each damaged packet."""


class VideoUnreadable(ValueError):  # noqa: N818  names what is wrong
    """A file that is no readable video; the text is the reason, without the file's name."""


VideoFile: TypeAlias = int | MediaFile
"""The descriptor of an open file, or a file that is read in parts."""


class PlainFile:
    """A file for FFmpeg. A damaged one may seek outside of it, where there are no bytes."""

    def __init__(self, file: VideoFile) -> None:
        self._place = 0
        self.read_from(file)

    def read_from(self, file: VideoFile) -> None:
        """Go on with this one, which has the same bytes."""
        self._read = partial(_pread, file) if isinstance(file, int) else file.read
        self.size = os.fstat(file).st_size if isinstance(file, int) else file.size

    def read(self, count: int) -> bytes:
        """The next bytes, or none."""
        if not 0 <= self._place < self.size:
            return b""
        data = self._read(self._place, count)
        self._place += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go anywhere, as ``lseek``."""
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.size}[whence]
        return self._place

    def tell(self) -> int:
        """The offset of the next byte to read."""
        return self._place


class OutlinedFile(PlainFile):
    """An MP4 without its media data (``mdat``), in whose place are zeros: no byte of it is read.

    The boxes that are left, ``moov`` and each ``moof``, say where and when each packet is.
    """

    def read_from(self, file: VideoFile) -> None:
        """See ``PlainFile``."""
        super().read_from(file)
        holes = list(self._media_data())
        self.has_holes = bool(holes)
        self._starts, self._ends = [start for start, _end in holes], [end for _start, end in holes]

    def read(self, count: int) -> bytes:
        """The next bytes, or none."""
        hole = bisect_right(self._ends, self._place)
        if hole < len(self._ends):
            if self._place >= self._starts[hole]:
                count = min(count, self._ends[hole] - self._place)
                self._place += count
                return bytes(count)
            count = min(count, self._starts[hole] - self._place)
        return super().read(count)

    def _media_data(self) -> Iterator[tuple[int, int]]:
        """Where media data is: its first byte, and the one behind its last."""
        place, first, heads = 0, 0, b""
        for _box in range(_BOXES_MAX):
            if place + _HEAD_BYTES > first + len(heads):
                first, heads = place, self._read(place, _HEADS_BYTES)
            head = heads[place - first : place - first + _HEAD_BYTES]
            size, begin = int.from_bytes(head[:4]), 8
            if size == 1:
                size, begin = int.from_bytes(head[8:]), _HEAD_BYTES
            end = place + size if size else self.size
            if len(head) < begin or end < place + begin:
                return
            if head[4:8] == b"mdat" and end - place >= HOLE_BYTES:
                yield place + begin, min(end, self.size)
            if end >= self.size:
                return
            place = end


def _pread(descriptor: int, start: int, count: int) -> bytes:
    return os.pread(descriptor, count, start)


def open_container(file: object, formats: str, codecs: str, options: Mapping[str, str] = {}) -> InputContainer:
    """An open file as FFmpeg reads it, by these demuxers and coders. Raises ``av.FFmpegError``."""
    limits = {"format_whitelist": formats, "protocol_whitelist": "none", "codec_whitelist": codecs, **options}
    container: InputContainer = _open(
        file, "r", container_options=limits, buffer_size=READ_BYTES, io_open=_open_nothing
    )
    return container


def open_video(file: PlainFile, options: Mapping[str, str] = {}) -> tuple[InputContainer, VideoStream]:
    """The container, which the caller closes, and its first video. Raises ``VideoUnreadable``."""
    if file.size == 0:
        raise VideoUnreadable("is empty")
    try:
        container = open_container(file, FORMATS, "none", options)
    except av.FFmpegError as error:
        raise VideoUnreadable(f"is no {FORMATS_SHOWN}, or damaged at its header: {reason_of(error)}") from None
    with ExitStack() as where_it_fails:
        where_it_fails.callback(container.close)
        videos = [one for one in container.streams.video if not one.disposition & one.disposition.attached_pic]
        if not videos:
            raise VideoUnreadable("has no video in it")
        context: Any = videos[0].codec_context
        name = context.name if context is not None else "unknown"
        if name not in DECODERS:
            raise VideoUnreadable(f"is coded as {name}, which is not among {', '.join(sorted(DECODERS))}")
        if not videos[0].time_base:
            raise VideoUnreadable("does not say in what unit its times are")
        where_it_fails.pop_all()
    return container, videos[0]


def packets_of(container: InputContainer, stream: VideoStream) -> Iterator[VideoPacket]:
    """The packets of a video from the container's present place up to the end of the file."""
    for packet in container.demux(stream):
        if packet.size == 0 and packet.pts is None:
            return
        yield packet


def reason_of(error: av.FFmpegError) -> str:
    """FFmpeg's reason for an error, which may be memory that a damaged file demands."""
    return (error.strerror or str(error)).lower()


def _open_nothing(url: str, *_others: object) -> NoReturn:
    """Refuse: no content of a file leads to another file."""
    raise PermissionError(f"a file of sound or video may not open {url!r}")
