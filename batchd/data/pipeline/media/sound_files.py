"""Sound files, of which any segment can be read. Worker process.

    WAV, FLAC, AIFF      libsndfile: samples are stored, and each has its place
    Vorbis               libsndfile, which would leave damaged pages out: they are found before
    MP3, Opus, AAC, …    FFmpeg: decoded from some time in front of the segment on (``ffmpeg``)

Sample 0 is the first one that is meant to be heard: what an encoder put in front of it, as gapless
tags and edit lists say, is not counted. Channels are mixed in float64, in their order, and rounded
once.

Invariants: the samples of a segment are those of the whole file, or the file is a bad sample, which
says at which second it is damaged or ends. A file is read through this process alone: no content of
it opens another file, and no library prints. What a header announces takes no memory.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np

from batchd.data.pipeline.media.options import CHANNELS_MAX, EXACT_FORMATS, RATE_MAX_HZ, RATE_MIN_HZ, SoundForm
from batchd.data.pipeline.media.streams import INT16_STEP, SHOWN, ByteStream, Counted, Wave, announced, mixed, tag_bytes
from batchd.data.pipeline.sound.resample import RATIO_MAX, length_at, needed, resample
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.kept_files import FileFacts
from batchd.data.samples.values import MediaFile
from batchd.runtime.suggestions import pip_command

BLOCK_SAMPLES: Final = 1 << 18
"""Read at once."""
_STREAMED: Final = 0x7FFF_0000
"""From here on, or 0, is what programs write as the length of a WAV that they could not go back
to."""
_UNKNOWN: Final = (1 << 63) - 1
"""The number of samples that libsndfile gives of a FLAC that does not tell."""
_CHUNKS_MAX: Final = 64
_SYNC, _SYNC_BITS, _LAYER_BITS = 0xFF, 0xE0, 0x06
"""The first byte of a frame of MPEG, the least second one, and those of its bits that AAC has not.
"""
_HEAD_BYTES: Final = 64
_VORBIS: Final = b"\x01vorbis"
_PAGE, _PAGE_BYTES, _PAGE_BYTES_MAX = b"OggS", 27, 65_307
_NO_PLACE: Final = (1 << 64) - 1
"""Of a page in which no packet ends."""
_MIRRORED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
"""Each byte with its bits in reverse order."""


class Sound(Protocol):
    """An open file."""

    rate: int
    channels: int
    start_s: float
    """When sample 0 is heard, in seconds of the container's own time."""
    known: Counted | None
    """What reading the file through has told before."""
    counted: Counted | None
    """The same, if it had to be read through now."""
    is_kept: bool
    """Whether that will be known when the file is opened again."""

    @property
    def frames(self) -> int:
        """Its samples of each channel. Raises ``SampleUndecodable`` for what cannot be true."""

    def read(self, first: int, count: int, *, is_mono: bool) -> Wave:
        """Samples from number ``first`` on, all of them, mixed if ``is_mono``.

        Raises ``SampleUndecodable``, or ``SampleUnreadable``.
        """

    def close(self) -> None:
        """Give the memory back."""


@contextmanager
def open_sound(
    value: memoryview | MediaFile, formats: Sequence[str] = (), facts: FileFacts | None = None
) -> Iterator[Sound]:
    """Open a file. Raises ``SampleUndecodable`` for one that is not of these formats, or damaged.

    ``formats``: empty for all. ``facts``: of files, in which samples are kept that had to be
    counted.
    """
    stream = ByteStream(value)
    kind = format_of(stream)
    if kind is None:
        stream.check()
        raise SampleUndecodable(f"is no sound file: it begins with {stream.bytes_at(0, 8)!r}")
    if formats and kind not in formats:
        raise SampleUndecodable(f"is {SHOWN[kind]}, and formats = {list(formats)}")
    is_vorbis = kind == "ogg" and _VORBIS in stream.bytes_at(0, _HEAD_BYTES)
    by_sndfile = kind in EXACT_FORMATS or is_vorbis
    with closing(SndFileSound(stream, kind) if by_sndfile else _open_coded(stream, kind)) as sound:
        try:
            _check_form(sound)
            key = value.key("samples") if facts is not None and isinstance(value, MediaFile) else None
            known = facts.find(key) if facts is not None and key is not None else None
            sound.known = None if known is None else Counted.from_bytes(known, stream.size)
            sound.is_kept = key is not None
            yield sound
            stream.check()
            if facts is not None and key is not None and sound.counted is not None:
                facts.keep(key, sound.counted.to_bytes())
        except SampleUndecodable:
            stream.check()
            raise


def _check_form(sound: Sound) -> None:
    if not RATE_MIN_HZ <= sound.rate <= RATE_MAX_HZ:
        raise SampleUndecodable(f"has {sound.rate} Hz, which is not from {RATE_MIN_HZ} to {RATE_MAX_HZ}")
    if not 1 <= sound.channels <= CHANNELS_MAX:
        raise SampleUndecodable(f"has {sound.channels} channels, which are not from 1 to {CHANNELS_MAX}")


class ConvertedSound:
    """The samples of a file in another form."""

    def __init__(self, sound: Sound, form: SoundForm) -> None:
        """Raises ``SampleUndecodable`` if the file cannot be had in this form."""
        rate, channels, _quality = form
        if sound.channels != channels and 1 not in (sound.channels, channels):
            raise SampleUndecodable(
                f"has {sound.channels} channels, and channels = {channels}; one channel is made of any number"
            )
        if max(sound.rate, rate) > RATIO_MAX * min(sound.rate, rate):
            raise SampleUndecodable(f"has {sound.rate} Hz, more than {RATIO_MAX} times or less than that of {rate} Hz")
        self.file = sound
        self.form = form

    @property
    def length(self) -> int:
        """Its samples. Raises ``SampleUndecodable`` for what cannot be true."""
        return length_at(self.file.frames, self.file.rate, self.form.rate)

    @property
    def seconds(self) -> float:
        """How long it lasts. Raises as ``length``."""
        return self.file.frames / self.file.rate

    def read(self, start: int, count: int) -> Wave:
        """The ``count`` samples from ``start`` on: [count, channels]. Raises as ``Sound.read``."""
        sound, (rate, channels, quality) = self.file, self.form
        first, end = needed(sound.rate, rate, start, count, quality)
        first = max(0, first)
        wave = sound.read(first, min(end, sound.frames) - first, is_mono=channels == 1)
        made = resample(wave, sound.rate, rate, first, start, count, quality)
        return np.repeat(made, channels, axis=1) if made.shape[1] < channels else made


def _open_coded(stream: ByteStream, kind: str) -> Sound:
    try:
        from batchd.data.pipeline.media.ffmpeg import CodedSound  # noqa: PLC0415  others do without it
    except ImportError:
        raise missing("av") from None
    return CodedSound(stream, kind)


def format_of(stream: ByteStream) -> str | None:
    """The format of a file by its first bytes, as ``formats`` of the step names it; else None."""
    tag = tag_bytes(stream)
    start = stream.bytes_at(tag, _HEAD_BYTES)
    if tag and not start.startswith((b"fLaC", b"\xff")):
        start = b"\xff\xfb"  # of an MP3, whose tag may have room behind it
    kind = next((kind for kind, begins in _BEGINS.items() if start.startswith(begins)), None)
    if start[:4] in (b"RIFF", b"RF64"):
        return {b"WAVE": "wav", b"AVI ": "avi"}.get(start[8:12])
    if start[:4] == b"FORM":
        return "aiff" if start[8:12] in (b"AIFF", b"AIFC") else None
    if kind is None and start[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mp4"
    if kind is None and len(start) > 1 and start[0] == _SYNC and start[1] >= _SYNC_BITS:
        return "mp3" if start[1] & _LAYER_BITS else "aac"
    return kind


_BEGINS = {"wav": b"riff.\x91\xcf\x11", "flac": b"fLaC", "ogg": b"OggS", "matroska": b"\x1a\x45\xdf\xa3"}


def missing(what: str) -> SampleUndecodable:
    """The error where a library is not installed."""
    return SampleUndecodable(f"needs {what}, which is not installed: {pip_command('batchd[sound]')}")


class SndFileSound:
    """A file that libsndfile reads: by its descriptor, if it has one, as calls of ours take time.

    Samples of 16 bits are read as such: its conversion to float32 takes a fifth of a FLAC's time.

    What goes wrong then is read again by our calls, which tell the storage's errors from damage.
    """

    start_s = 0.0

    def __init__(self, stream: ByteStream, kind: str) -> None:
        """Raises ``SampleUndecodable``."""
        try:
            import soundfile  # noqa: PLC0415  other formats do without it
        except (ImportError, OSError):  # the library that it loads
            raise missing("soundfile") from None
        self.known: Counted | None = None
        self.counted: Counted | None = None
        self.is_kept = False
        self._stream = stream
        self._descriptor = stream.descriptor
        self._kind = kind
        self._opener, self._errors = soundfile.SoundFile, soundfile.LibsndfileError
        if kind in ("wav", "aiff"):
            _check_length(stream)
        try:
            self._open()
        except SampleUndecodable:
            if self._descriptor is None:
                raise
            self._reopen()
        if int(self._file.frames) == _UNKNOWN and self._descriptor is not None:
            self.close()
            self._reopen()
        self.rate = int(self._file.samplerate)
        self.channels = int(self._file.channels)

    def close(self) -> None:
        """Give the memory back."""
        self._file.close()

    def _open(self) -> None:
        self._stream.seek(0)
        if self._descriptor is not None:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        try:
            self._file = self._opener(self._stream if self._descriptor is None else self._descriptor, closefd=False)
        except self._errors as error:
            self._stream.check()
            raise SampleUndecodable(f"is {SHOWN[self._kind]} that cannot be read: {reason_of(error)}") from None
        # It would seek to where it is behind each read, and a FLAC may not tell where that is.
        self._file.seekable = lambda: False

    def _reopen(self) -> None:
        """Open it by our calls."""
        self._descriptor = None
        self._open()

    @cached_property
    def frames(self) -> int:
        """See ``Sound``; a FLAC file may not tell, and is then decoded to its end."""
        if int(self._file.frames) != _UNKNOWN:
            return announced(int(self._file.frames), self._stream)
        if self.known is not None:
            return announced(self.known.samples, self._stream)
        with self._naming(0):
            self._file.seek(0)
            found = 0
            while part := len(self._file.read(BLOCK_SAMPLES, "float32", always_2d=True)):
                found += part
        self.counted = Counted(found, np.empty((0, 2), np.int64))
        return found

    def read(self, first: int, count: int, *, is_mono: bool) -> Wave:
        """See ``Sound``."""
        try:
            return self._read(first, count, is_mono=is_mono)
        except SampleUndecodable:
            if self._descriptor is None:
                raise
        self.close()
        self._reopen()
        return self._read(first, count, is_mono=is_mono)

    def _read(self, first: int, count: int, *, is_mono: bool) -> Wave:
        made = np.empty((count, 1 if is_mono else self.channels), np.float32)
        is_mixed, is_int16 = is_mono and self.channels > 1, self._file.subtype == "PCM_16"
        done, before = 0, 0
        if self._kind == "ogg":
            before = first - _checked_place(self._stream, first, first + count, self.rate)
        with self._naming(first):
            self._file.seek(first - before)
            while before > 0 and (part := self._file.read(min(BLOCK_SAMPLES, before), "float32", always_2d=True)).size:
                before -= len(part)
            while done < count:
                room = made[done : done + BLOCK_SAMPLES]
                if is_mixed:
                    part = self._file.read(len(room), "int16" if is_int16 else "float64", always_2d=True)
                    room[: len(part)] = mixed(part)
                elif is_int16:
                    part = self._file.read(len(room), "int16", always_2d=True)
                    np.multiply(part, INT16_STEP, out=room[: len(part)])
                else:
                    part = self._file.read(out=room)
                if not len(part):
                    break
                done += len(part)
        self._stream.check()
        if done < count:
            end = (first + done) / self.rate
            raise SampleUndecodable(f"ends at {end:.3f} s, and its header announces {self.frames / self.rate:.3f} s")
        if "FLOAT" in self._file.subtype or "DOUBLE" in self._file.subtype:
            _check_finite(made, first, self.rate)
        return made

    @contextmanager
    def _naming(self, first: int) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            self._stream.check()
            second = self._bad_second(first)
            raise SampleUndecodable(f"is damaged at {second:.1f} s: {reason_of(error)}") from None

    def _bad_second(self, first: int) -> float:
        """The tenth of a second, from sample ``first`` on, that cannot be read."""
        step = max(1, self.rate // 10)
        with suppress(self._errors, SampleUndecodable):
            self.close()
            self._open()  # after an error it would stay there
            self._file.seek(first)
            while self._file.read(step, "float32", always_2d=True).size:
                first += step
        return first / self.rate


def reason_of(error: Exception) -> str:
    """The reason that libsndfile gives."""
    return str(getattr(error, "error_string", error)).rstrip(".").removeprefix("Error : ").lower()


def _check_finite(wave: Wave, first: int, rate: int) -> None:
    bad = np.flatnonzero(~np.isfinite(wave).all(axis=1))
    if len(bad):
        raise SampleUndecodable(f"has a sample that is no number, at {(first + int(bad[0])) / rate:.3f} s")


def _check_length(stream: ByteStream) -> None:
    """Raise ``SampleUndecodable`` for a WAV or AIFF whose samples end before its header says."""
    kind, place, length64 = stream.bytes_at(0, 4), 12, None
    order: Literal["big", "little"] = "big" if kind == b"FORM" else "little"
    if kind == b"riff":
        return  # W64, which has other chunks
    for _chunk in range(_CHUNKS_MAX):
        head = stream.bytes_at(place, 24)
        size = int.from_bytes(head[4:8], order)
        if head[:4] == b"ds64":
            length64 = int.from_bytes(head[16:24], order)
        elif head[:4] in (b"data", b"SSND"):
            size = length64 if kind == b"RF64" and length64 is not None else size
            is_streamed = kind == b"RIFF" and (size == 0 or size >= _STREAMED)
            if size > stream.size - place - 8 and not is_streamed:
                text = f"announces {size} bytes of samples, and has {max(0, stream.size - place - 8)}"
                raise SampleUndecodable(f"{text}: it is cut, or its header is wrong")
            return
        if len(head) < 8:  # noqa: PLR2004  bytes of the head of a chunk
            return  # libsndfile says what is wrong
        place += 8 + size + size % 2


class _Page(NamedTuple):
    """A page of an Ogg file: where it is, and which sample is behind it, if it says."""

    start: int
    end: int
    sample: int
    number: int
    is_good: bool


def _page_at(stream: ByteStream, start: int) -> _Page | None:
    """The page that begins at this byte; None if none does, or the file ends in it."""
    data = stream.bytes_at(start, _PAGE_BYTES_MAX)
    size = _PAGE_BYTES + (data[_PAGE_BYTES - 1] if len(data) >= _PAGE_BYTES else 0)
    size += sum(data[_PAGE_BYTES:size])
    if not data.startswith(_PAGE) or len(data) < size:
        return None
    # CRC-32 as zlib has it, but of bits in the other order, and without its inversions.
    zeroed = data[:22] + bytes(4) + data[26:size]
    found = zlib.crc32(zeroed.translate(_MIRRORED), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    told = int.from_bytes(data[22:26].translate(_MIRRORED), "big")
    sample, number = (int.from_bytes(data[first:end], "little") for first, end in ((6, 14), (18, 22)))
    return _Page(start, start + size, sample, number, found == told)


def _checked_place(stream: ByteStream, first: int, end: int, rate: int) -> int:
    """A sample up to ``first`` to which libsndfile finds exactly: in the last page it does not.

    Raises ``SampleUndecodable`` if a page with the samples from there to ``end`` is damaged, or
    missing.
    """
    low, high = 0, stream.size
    while high - low > 2 * _PAGE_BYTES_MAX:
        middle = (low + high) // 2
        page = _good_page(stream, middle)
        if page is not None and page.sample < first:
            low = page.start
        else:
            high = middle
    page, reached, place = _page_at(stream, low), 0, 0
    while page is not None and reached < end:
        if page.sample != _NO_PLACE:
            reached = page.sample
            place = max(0, reached - 1) if reached < first else place
        following = _page_at(stream, page.end)
        is_next = following is not None and following.is_good and following.number == page.number + 1
        if not is_next and reached < end and (following is not None or page.end < stream.size):
            following = _good_page(stream, page.end)
            if following is not None and following.sample < first:
                page = following  # what is before the segment need not be whole
                continue
            raise SampleUndecodable(f"is damaged at {reached / rate:.1f} s: a page of it is not as it was written")
        page = following
    return place


def _good_page(stream: ByteStream, start: int) -> _Page | None:
    """The first page from a byte on that is not damaged, and says which sample it ends with."""
    around = stream.bytes_at(start, 4 * _PAGE_BYTES_MAX)
    at = around.find(_PAGE)
    while at >= 0:
        page = _page_at(stream, start + at)
        if page is not None and page.is_good and page.sample != _NO_PLACE:
            return page
        at = around.find(_PAGE, at + 1)
    return None
