"""Sound that has to be decoded, one packet after the other, through FFmpeg. Worker process.

    |        before        |  segment   |
    +--------+-------------+------------+        decoding begins ``BEFORE_S`` in front of a segment:
             ^ seek        ^ first               what comes before it is cut off

FFmpeg gets an open file instead of a path, the demuxer of the format alone, and no protocol, as in
``data.media.containers``: no content of a file opens another one. It finds a packet of an MP3 or of
AAC (ADTS) by reading all before it. So where packets are is kept with what else reading a file
through has told (``Counted``), and a second container begins at the last one in front of the seek:
the decoder gets the same packets.

Invariant: pieces of a file follow each other without a gap, or the file is a bad sample.
"""

from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any, Final, TypeAlias

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from batchd.data.media.containers import open_container, reason_of
from batchd.data.pipeline.media.streams import (
    SHOWN,
    ByteStream,
    Counted,
    SoundMissing,
    Wave,
    announced,
    mixed,
    tag_bytes,
)
from batchd.data.samples.errors import SampleUndecodable

BEFORE_S: Final = Fraction(1, 2)
"""More than what a frame of any of the coders depends on."""
PLACES_S: Final = 4
"""Between packets of which it is kept where they are."""
PLACES_FROM_S: Final = 60
"""Nearer to the beginning, packets are found by reading what is before them."""
CELL_S: Final = 4
"""Decoders with a memory begin anew so often, at places of the file."""
_DEMUXERS: Final = {
    **{kind: kind for kind in ("mp3", "ogg", "aac", "avi")},
    "mp4": "mov,mp4",
    "matroska": "matroska,webm",
}
_DECODERS: Final = frozenset(
    {
        *("mp3float", "mp3", "mp2float", "mp2", "aac", "vorbis", "libvorbis", "opus", "libopus", "flac", "alac"),
        *("ac3", "eac3", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_f32le", "pcm_u8"),
    }
)
"""FFmpeg's names of the decoders that may be used."""
_NOT_IN_AVI: Final = frozenset({"vorbis", "libvorbis", "opus", "libopus", "flac", "alac"})
"""An AVI has no place for when their packets are heard, which are not all of one length."""
_WITH_MEMORY: Final = frozenset({"aac", "opus", "libopus", "ac3", "eac3", "mp2"})
"""Decoders whose samples depend on where decoding began: by drawn noise, or by a filter."""
_UNINDEXED: Final = ("mp3", "aac")
"""Formats of which FFmpeg finds a packet by reading all before it."""
_TAIL_S: Final = 2
_TABLES: Final = (b"Xing", b"Info", b"VBRI")
_FIRST_FRAMES_BYTES: Final = 4096
_JITTER: Final = Fraction(1, 500)
"""Seconds by which a time may be off in a container that counts milliseconds."""

Piece: TypeAlias = tuple[int, Wave]
"""The number of a first sample, and the samples from there on."""


class CodedSound:
    """The first sound of a file."""

    def __init__(self, stream: ByteStream, kind: str) -> None:
        """Raises ``SampleUndecodable``."""
        self.known: Counted | None = None
        self.counted: Counted | None = None
        self.is_kept = False
        self._base = 0
        """The number of the sample at time 0 of the packets that come next."""
        self._rest: InputContainer | None = None
        """The file from some packet on."""
        self._next: Iterator[av.Packet[AudioStream]] | None = None
        """The packets that come next, if they are not those of the container."""
        self._stream = stream
        self._kind = kind
        self._is_fresh = True
        """Whether the container is at its beginning."""
        self._open()
        context = self._sound.codec_context
        self.rate, self.channels = int(context.rate), int(context.channels)
        if not self.rate or self._sound.time_base is None:
            self._container.close()
            raise SampleUndecodable(f"is {SHOWN[kind]} that does not say its rate")
        self._unit = Fraction(self._sound.time_base) * self.rate
        """Samples of one unit of time: up to 1, times tell the sample; beyond, they are coarse."""
        self._origin = round(self._start * self._unit)
        self.start_s = self._origin / self.rate

    def close(self) -> None:
        """Give the memory back."""
        self._next = None
        self._container.close()
        if self._rest is not None:
            self._rest.close()

    @cached_property
    def frames(self) -> int:
        """See ``Sound``. What a file tells is believed where its format has a place for it."""
        duration = self._sound.duration
        if self.known is not None:
            found = self.known.samples
        elif self._kind == "aac" or not self._has_table:
            self.counted = self._count()
            found = self.counted.samples
        elif self._kind in ("matroska", "avi") or not duration or self._decoder in ("ac3", "eac3", "vorbis"):
            found = self._end()
            self.counted = Counted(found, np.empty((0, 2), np.int64))
        else:
            found = round(duration * self._unit) - self._skipped
        return announced(found, self._stream)

    def read(self, first: int, count: int, *, is_mono: bool) -> Wave:
        """See ``Sound``."""
        made = np.empty((count, 1 if is_mono else self.channels), np.float32)
        if not self._has_memory:
            self._fill(made, first, is_mono=is_mono)
            return made
        cell = CELL_S * self.rate
        for begin in range(first - first % cell, first + count, cell):
            part = made[max(0, begin - first) : begin + cell - first]
            self._fill(part, max(begin, first), from_=begin, is_mono=is_mono)
        return made

    def _fill(self, made: Wave, first: int, from_: int | None = None, *, is_mono: bool) -> None:
        """Write samples from number ``first`` on; decoding begins before ``from_``."""
        done = 0
        with closing(self._pieces(first if from_ is None else from_, first)) as pieces:
            for begin, wave in pieces:
                at = begin - first
                if at + len(wave) <= done:
                    continue
                if at > done:
                    self._stream.check()
                    raise SampleUndecodable(
                        f"is damaged at {(first + done) / self.rate:.1f} s: {at - done} samples are missing"
                    )
                part = wave[done - at : len(made) - at]
                made[done : done + len(part)] = mixed(part) if is_mono else part
                done += len(part)
                if done == len(made):
                    return
        self._stream.check()
        end = (first + done) / self.rate
        raise SampleUndecodable(f"ends at {end:.3f} s, and announces {self.frames / self.rate:.3f} s")

    def _open(self) -> None:
        self._stream.seek(0)
        self._container = self._container_of(self._stream)
        if not self._container.streams.audio:
            self._container.close()
            raise SoundMissing(f"is {SHOWN[self._kind]} without sound")
        self._sound = self._container.streams.audio[0]
        context: Any = self._sound.codec_context
        self._decoder = context.name if context is not None else "unknown"
        decoders = _DECODERS - _NOT_IN_AVI if self._kind == "avi" else _DECODERS
        if self._decoder not in decoders:
            self._container.close()
            what = f"is {SHOWN[self._kind]} coded as {self._decoder}"
            raise SampleUndecodable(f"{what}, which is not among {', '.join(sorted(decoders))}")
        context.thread_count = 1
        context.options = {"err_detect": "crccheck+explode"}

    def _container_of(self, stream: ByteStream) -> InputContainer:
        try:
            return open_container(stream, _DEMUXERS[self._kind], ",".join(sorted(_DECODERS)), {"usetoc": "0"})
        except av.FFmpegError as error:
            self._stream.check()
            raise SampleUndecodable(f"is {SHOWN[self._kind]} that cannot be read: {reason_of(error)}") from None

    @property
    def _has_table(self) -> bool:
        """False for an MP3 that does not tell how long it is."""
        if self._kind != "mp3":
            return True
        start = self._stream.bytes_at(tag_bytes(self._stream), _FIRST_FRAMES_BYTES)
        return any(table in start for table in _TABLES)

    @property
    def _has_memory(self) -> bool:
        return self._decoder in _WITH_MEMORY

    @property
    def _start(self) -> int:
        """When the first sample is heard, in units of time: no packet of a Vorbis tells it."""
        if self._is_sequential and self._unit > 1:
            self._is_fresh = False
            packets = self._container.demux(self._sound)
            with suppress(av.FFmpegError):
                return next((frame.pts or 0 for packet in packets for frame in packet.decode()), 0)
        return self._sound.start_time or 0

    @property
    def _is_sequential(self) -> bool:
        """Whether it is decoded from its beginning, as times do not tell which sample is which."""
        # the last page of an Ogg does not tell the time of its packets
        return self._decoder == ("flac" if self._kind == "ogg" else "vorbis")

    @property
    def _skipped(self) -> int:
        """The samples at the beginning that an Ogg counts, and an Opus decoder leaves out."""
        head = bytes(self._sound.codec_context.extradata or b"")
        return int.from_bytes(head[10:12], "little") if self._kind == "ogg" and head.startswith(b"OpusHead") else 0

    def _seek(self, first: int) -> None:
        """Go to some place before a sample, or to the beginning, with a decoder as new."""
        is_fresh, self._is_fresh = self._is_fresh, False
        self._next, self._base = None, -self._origin
        if self._is_sequential:
            first = 0
        if is_fresh and first <= 0:
            return
        if first <= 0 or self._has_memory:
            self.close()
            self._open()
        if first > 0:
            places = self._places(first)
            self._begin()
            if places is not None and self._go_to(first, places):
                self._sound.codec_context.flush_buffers()
                return
            try:
                self._container.seek(int((self._origin + first) / self._unit), stream=self._sound, backward=True)
            except av.FFmpegError as error:
                raise self._damaged(first, error) from None
            self._sound.codec_context.flush_buffers()

    def _places(self, first: int) -> NDArray[np.int64] | None:
        """Where packets are; None if it is not worth while to look them up, or of other formats."""
        if self._kind not in _UNINDEXED:
            return None
        found = self.known or self.counted
        if found is None and self.is_kept and first > PLACES_FROM_S * self.rate:
            found = self.counted = Counted(self.frames, self._count().places)
        return found.places if found is not None and len(found.places) else None

    def _go_to(self, first: int, places: NDArray[np.int64]) -> bool:
        """Go to the last packet that begins up to a sample; False if it is not where it was."""
        number = int(np.searchsorted(places[:, 0], first, "right")) - 1
        if number < 0:
            return False
        sample, byte = places[number].tolist()
        if self._rest is not None:
            self._rest.close()
        try:
            self._rest = self._container_of(self._stream.behind(byte))
            packets = self._rest.demux(self._rest.streams.audio[0])
            packet = next(packets)
            if packet.pos != 0 or packet.pts is None:
                return False
            self._base = sample - round(packet.pts * self._unit)
            for following in packets:
                if following.pts is None or round(following.pts * self._unit) + self._base > first:
                    self._next = chain((packet, following), packets)
                    return True
                packet = following
        except (av.FFmpegError, SampleUndecodable, IndexError, StopIteration):
            self._stream.check()
        self._base = -self._origin
        return False

    def _begin(self) -> None:
        """Decode the first packet, of which a decoder leaves out what it is told once."""
        for packet in self._packets():
            with suppress(av.FFmpegError):
                packet.decode()
            return

    def _pieces(self, first: int, needed: int) -> Generator[Piece]:
        """Decode to the end, from somewhat before ``first``; damage before ``needed`` is left out.

        Raises ``SampleUndecodable``.
        """
        grid = self._grid if self._unit > 1 else None
        self._seek(first - int(BEFORE_S * self.rate))
        following: int | None = None
        for packet in self._packets():
            place = (following or 0) if packet.pts is None else round(packet.pts * self._unit) + self._base
            try:
                frames = self._sound.codec_context.decode(packet)
            except av.FFmpegError as error:
                if place < needed - self.rate // 10:
                    following = None  # it is too far in front to matter
                    continue
                raise self._damaged(place, error) from None
            for frame in frames:
                wave = _samples_of(frame)
                if wave.shape[1] != self.channels or frame.sample_rate != self.rate:
                    what = f"{wave.shape[1]} channels at {frame.sample_rate} Hz"
                    raise SampleUndecodable(f"has {what} at {place / self.rate:.1f} s, and begins with others")
                at = self._place_of(frame.pts, following, grid)
                yield at, wave
                following = at + len(wave)

    def _packets(self) -> "Iterator[av.Packet[AudioStream]]":
        """The packets from here on, and an empty one. Raises ``SampleUndecodable``."""
        place = 0
        packets, self._next = self._next or self._container.demux(self._sound), None
        while True:
            try:
                packet = next(packets, None)
            except av.FFmpegError as error:
                raise self._damaged(place, error) from None
            if packet is None:
                return
            if packet.pts is not None:
                place = round(packet.pts * self._unit) + self._base
            yield packet

    def _damaged(self, place: int, error: av.FFmpegError) -> SampleUndecodable:
        self._stream.check()
        return SampleUndecodable(f"is damaged at {max(0, place) / self.rate:.1f} s: {reason_of(error)}")

    def _place_of(self, time: int | None, following: int | None, grid: tuple[int, int] | None) -> int:
        """The number of the first sample of a frame."""
        if time is None:
            return following or 0
        place = round(time * self._unit) + self._base
        if grid is None:
            return place
        if following is not None and abs(place - following) <= _JITTER * self.rate:
            return following
        if following is not None and self._kind == "avi":
            what = f"says at {following / self.rate:.3f} s that it is at {place / self.rate:.3f} s"
            raise SampleUndecodable(f"{what}: it is damaged, or its header is wrong")
        if following is not None:
            return place
        first, each = grid
        return 0 if place < first / 2 else first + round((place - first) / each) * each

    @cached_property
    def _grid(self) -> tuple[int, int]:
        """The samples of the first frame, and of each further one but the last."""
        self._seek(0)
        sizes: list[int] = []
        for packet in self._packets():
            try:
                sizes += [frame.samples for frame in packet.decode()]
            except av.FFmpegError as error:
                raise self._damaged(0, error) from None
            if len(sizes) > 1:
                break
        first, each = (*sizes, 1, 1)[:2]
        return first, each

    def _end(self) -> int:
        """The samples up to the last one, which is found by decoding the end."""
        length_s = Fraction(self._container.duration or 0, av.time_base)
        first = max(0, int((length_s - _TAIL_S) * self.rate))
        found = 0
        for begin, wave in self._pieces(first, first):
            found = begin + len(wave)
        return found

    def _count(self) -> Counted:
        """The samples of all packets, none of which is decoded, and where some of them are."""
        self._seek(0)
        ticks, places = 0, list[tuple[int, int]]()
        for packet in self._packets():
            ticks += packet.duration or 0
            if self._kind in _UNINDEXED and packet.pts is not None and packet.pos is not None and packet.pos >= 0:
                sample = round(packet.pts * self._unit) + self._base
                if sample >= (places[-1][0] + PLACES_S * self.rate if places else 0):
                    places.append((sample, packet.pos))
        return Counted(round(ticks * self._unit), np.array(places, np.int64).reshape(-1, 2))


def _samples_of(frame: av.AudioFrame) -> Wave:
    """The samples of a frame, [samples, channels], from -1 to 1."""
    stored = frame.to_ndarray()
    wave = stored.T if frame.format.is_planar else stored.reshape(-1, len(frame.layout.channels))
    if wave.dtype.kind == "f":
        return wave.astype(np.float32, copy=False)
    middle, scale = (128.0, 128.0) if wave.dtype.kind == "u" else (0.0, 2.0 ** (8 * wave.dtype.itemsize - 1))
    return ((wave.astype(np.float64) - middle) / scale).astype(np.float32)
