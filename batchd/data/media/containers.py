"""Video files, opened so that FFmpeg reads this one file and nothing else. Daemon and workers.

FFmpeg accepts playlists and other lists as videos, and would open the files that they name. So it
gets an open file instead of a path, and may use only demuxers of plain files, no protocol, and no
decoder to probe a file.

Invariant: opening and demuxing a file runs no decoder, and opens no other file.
"""

import os
from collections.abc import Iterator
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
_LIMITS = {"format_whitelist": FORMATS, "protocol_whitelist": "none", "codec_whitelist": "none"}

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


def _pread(descriptor: int, start: int, count: int) -> bytes:
    return os.pread(descriptor, count, start)


def open_video(file: PlainFile) -> tuple[InputContainer, VideoStream]:
    """The container, which the caller closes, and its first video. Raises ``VideoUnreadable``."""
    if file.size == 0:
        raise VideoUnreadable("is empty")
    try:
        container = av.open(
            file,
            "r",
            container_options=_LIMITS,
            metadata_errors="replace",
            buffer_size=READ_BYTES,
            io_open=_open_nothing,
        )
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
    raise PermissionError(f"a video may not open {url!r}")
