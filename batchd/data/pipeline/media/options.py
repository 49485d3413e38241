"""The steps that decode media, as plain data. Daemon, workers, CLI; standard library only."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias

from batchd.data.media import CLIP_FRAMES_MAX, check_codecs, libraries_for
from batchd.data.pipeline.options import FILE_BYTES_MAX, FieldStep
from batchd.data.samples.checks import Example, Range
from batchd.data.samples.columns import check_field_names
from batchd.data.samples.image_header import PIXELS_MAX
from batchd_wire.record import options

RATE_MIN_HZ, RATE_MAX_HZ = 1_000, 768_000
"""Of the files that are decoded, too."""
CHANNELS_MAX = 64
SECONDS_MAX = 86_400.0
SEGMENT_SAMPLES_MAX = 1 << 30
"""Numbers of one sample, all channels together."""
CLIPS_MAX = 255
PLACES, CLIP_PLACES = ("random", "middle", "uniform"), ("random", "uniform")
"""Where a segment of sound begins, and a clip, in words."""
Seconds = Annotated[float, Range(0.0, SECONDS_MAX)]
Quality: TypeAlias = Literal["high", "fast"]
"""The filter of sound at another rate, see ``DecodeAudio``."""
SoundFormats: TypeAlias = tuple[Literal["wav", "flac", "aiff", "mp3", "ogg", "aac", "mp4", "matroska", "avi"], ...]
EXACT_FORMATS = frozenset({"wav", "flac", "aiff"})
"""Formats that store samples, so every version of a library reads the same ones."""


class SoundForm(NamedTuple):
    """What is made of the sound of a file: samples per second, in Hz, and channels."""

    rate: int
    channels: int
    quality: Quality


def is_exact(formats: Sequence[str]) -> bool:
    """Whether files of these formats have the same samples with every version of the libraries."""
    return bool(formats) and EXACT_FORMATS.issuperset(formats)


def libraries_of(formats: Sequence[str]) -> tuple[str, ...]:
    """The distributions that decode files of these formats; of all, if there are none."""
    by_sndfile = not formats or (EXACT_FORMATS | {"ogg"}).intersection(formats)
    return (*(("soundfile",) if by_sndfile else ()), *(() if is_exact(formats) else ("av",)))


@options
class DecodeAudio(FieldStep):
    """Turn the bytes of a sound file into numbers, at one rate and of so many channels.

    Of a long file, only the segment is read that ``seconds`` and ``start`` ask for: its samples are
    those of the whole file, wherever the segment starts. WAV, FLAC and AIFF; MP3, Ogg, Opus, AAC,
    M4A, and the sound of MP4, MOV, Matroska and AVI. Always the first step on its field.
    """

    later: ClassVar[frozenset[str]] = frozenset({"quality"})

    op: Literal["decode_audio"] = "decode_audio"
    field: str = "audio"
    """Name of the field that the step changes."""
    rate: Annotated[int, Range(RATE_MIN_HZ, RATE_MAX_HZ), Example(16000)]
    """Samples per second afterwards, in Hz. A file of another rate is resampled, in float64."""
    channels: Annotated[int, Range(1, CHANNELS_MAX)] = 1
    """Channels afterwards. 1 makes the mean of all that a file has, in float64, and a field
    [samples]; more make [samples, channels]: a file has to have as many, or one, which is repeated.
    """
    seconds: Annotated[Seconds | None, Example(10.0)] = None
    """Length of the segment, in seconds: ``seconds * rate`` samples, to the nearest. When not set,
    the whole file, so samples differ in length."""
    start: Seconds | str = "random"
    """Where the segment begins: "random" draws any place where it fits, "middle" (or "uniform")
    leaves as much in front as behind, a number is seconds from the start of the file, and the name
    of a field has these seconds."""
    short: Literal["pad", "bad"] = "pad"
    """The treatment of a file that ends before the segment does: "pad" puts zeros behind it, and
    ``FIELD_length`` has how many samples are of the file; "bad" makes it a bad sample, and there is
    no such field."""
    max_seconds: Seconds = 600.0
    """Without ``seconds``: length, in seconds, above which a file is a bad sample."""
    max_bytes: Annotated[int, Range(1, FILE_BYTES_MAX)] = 64 * 1024 * 1024
    """Length, in bytes, above which a file in a record or on a server is a bad sample, where it is
    read whole. Files of this machine are read in parts, however long they are."""
    dtype: Literal["float32", "int16"] = "float32"
    """Type of the numbers: "float32" from -1 to 1, "int16" these times 32768, to the nearest."""
    quality: Quality = "high"
    """The filter of a file of another rate: "high" keeps what is below 0.91 of half of the lower
    rate, and damps what would alias by 120 dB, as soxr's "HQ"; "fast" keeps what is below 0.82, and
    damps by 80 dB, in a third of the time."""
    formats: SoundFormats = ()
    """The formats that a file may have, such as ["flac", "wav"]; empty for all. Where all of them
    are of "wav", "flac" and "aiff", bytes are the same with every version of the libraries;
    otherwise the versions of PyAV and soundfile, which bring FFmpeg and libsndfile, are in the
    stream's fingerprint."""

    def __post_init__(self) -> None:
        if self.seconds is None:
            if self.start != "random":
                raise ValueError("start is of a segment: say its length too, as in seconds = 10")
            if self.short != "pad":
                raise ValueError("short is of a segment: say its length too, as in seconds = 10")
        elif self.samples < 1:
            raise ValueError(f"seconds = {self.seconds} are no sample at {self.rate} Hz")
        if self.start_field is not None:
            check_field_names(self.start_field)
        if self.samples_max * self.channels > SEGMENT_SAMPLES_MAX:
            raise ValueError(
                f"{self.samples_max} samples of {self.channels} channels are more than {SEGMENT_SAMPLES_MAX}"
            )

    @property
    def samples(self) -> int:
        """The samples of a segment; 0 for whole files."""
        return 0 if self.seconds is None else round(self.seconds * self.rate)

    @property
    def samples_max(self) -> int:
        """The most samples that are made of a file."""
        return self.samples or int(self.max_seconds * self.rate)

    @property
    def form(self) -> SoundForm:
        """What is made of a file."""
        return SoundForm(self.rate, self.channels, self.quality)

    @property
    def start_field(self) -> str | None:
        """The field that has the start of the segment; None if none does."""
        return self.start if isinstance(self.start, str) and self.start not in PLACES else None

    @property
    def length_field(self) -> str | None:
        """The field that it makes of how many samples are of the file; None if it makes none."""
        return f"{self.field}_length" if self.samples and self.short == "pad" else None

    @property
    def is_random(self) -> bool:
        """Whether the start is drawn."""
        return self.seconds is not None and self.start == "random"

    @property
    def draws_shape(self) -> bool:
        """A segment has as many samples wherever it begins."""
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        """The distributions that decode such files."""
        return libraries_of(self.formats)

    @property
    def libraries(self) -> tuple[str, ...]:
        """PyAV brings FFmpeg along, and soundfile libsndfile."""
        return () if is_exact(self.formats) else ("av", "soundfile")

    @property
    def touches(self) -> frozenset[str]:
        """The field, that of its start, and that of its length."""
        return frozenset(filter(None, (self.field, self.start_field, self.length_field)))

    @property
    def changes(self) -> frozenset[str]:
        """The field, and that of its length."""
        return frozenset(filter(None, (self.field, self.length_field)))


@options
class DecodeVideo(FieldStep):
    """Turn a video file into clips of frames: ``image``, [frames, height, width, 3].

    Always the first step on its field. Steps on images that follow do the same to all frames of a
    clip, with numbers drawn once. ``fps`` or ``stride`` is the distance of the frames; without both
    they are spread over all of the video.
    """

    shares_decoding: ClassVar[bool] = True
    later: ClassVar[frozenset[str]] = frozenset({"audio", "audio_rate", "audio_channels", "audio_quality", "no_audio"})

    op: Literal["decode_video"] = "decode_video"
    field: str = "video"
    """Name of the field of the video, which the frames replace."""
    frames: Annotated[int, Range(1, CLIP_FRAMES_MAX), Example(16)]
    """Frames of a clip: the first dimension."""
    fps: Annotated[float | None, Range(1e-3, 1e4)] = None
    """Frames per second of a clip: each is the one that the file shows at its time, whatever the
    rate of the file."""
    stride: Annotated[int | None, Range(1, 1 << 20)] = None
    """Instead of ``fps``: the distance of a clip's frames, in frames of the file."""
    start: Annotated[float, Range(0.0, 1e9)] | str = "random"
    """Where a clip begins: "random" draws any place where it fits; "uniform" is the middle, and
    spreads several clips evenly, the first at the start and the last at the end; a number is
    seconds of the file's own time, and the name of a field has these seconds, for several clips one
    each. Of frames that are spread over the video, "random" draws where in its part each is, and
    "uniform" takes the middle."""
    clips: Annotated[int, Range(1, CLIPS_MAX)] = 1
    """Clips of a video. With more than 1 they are a dimension in front, [clips, frames, height,
    width, 3], and draw numbers of their own."""
    short: Literal["repeat", "bad"] = "repeat"
    """The treatment of a video that ends before a clip does: "repeat" shows the last frame again,
    "bad" makes it a bad sample."""
    into: str = "image"
    """Name of the field of the frames."""
    times: str = ""
    """Name of a further field, with the second at which each frame is shown: float64 [frames]; ""
    for none."""
    audio: str = ""
    """Name of a further field, with the sound of the same seconds: float32 [frames / fps *
    audio_rate], of a clip with ``fps``; "" for none. The first sound of an MP4, MOV, Matroska, WebM
    or AVI; zeros where a clip reaches beyond it."""
    audio_rate: Annotated[int, Range(RATE_MIN_HZ, RATE_MAX_HZ)] = 16_000
    """Samples per second of the sound, in Hz; a file of another rate is resampled."""
    audio_channels: Annotated[int, Range(1, CHANNELS_MAX)] = 1
    """Channels of the sound, as ``channels`` of "decode_audio": more than 1 are a last dimension.
    """
    audio_quality: Quality = "high"
    """The filter of sound of another rate, as ``quality`` of "decode_audio"."""
    no_audio: Literal["bad", "zeros"] = "bad"
    """The treatment of a video without sound: "bad" makes it a bad sample, "zeros" is silence."""
    color: Literal["rgb", "bgr", "gray"] = "rgb"
    """Order of the channels: "rgb" and "bgr" give three, "gray" gives one, the luma."""
    rotation: Literal["apply", "ignore"] = "apply"
    """Whether the display matrix of a file turns its frames upright."""
    max_pixels: Annotated[int, Range(1, PIXELS_MAX)] = 100_000_000
    """Width times height, in pixels, above which a video is a bad sample, before it is decoded."""
    max_bytes: Annotated[int, Range(1, FILE_BYTES_MAX)] = 256 * 1024 * 1024
    """Length, in bytes, above which a video in a record or on a server is a bad sample, as it is
    read whole. Files of this machine are read in parts, however long they are."""

    codecs: tuple[str, ...] = ()
    """FFmpeg's names of the decoders that videos may need, such as ["h264", "vp9"]; empty for all
    that docs/sources/video.md names. Where all of them are lossless ("ffv1", "huffyuv", "utvideo",
    "rawvideo", "png"), bytes are the same with every version of FFmpeg; otherwise the version of
    PyAV, which brings it, is in the stream's fingerprint."""

    def __post_init__(self) -> None:
        if self.fps is not None and self.stride is not None:
            raise ValueError("fps and stride are both the distance of frames: leave one out")
        if self.start not in CLIP_PLACES and self.fps is None and self.stride is None:
            raise ValueError(f"start = {self.start!r} begins a clip, whose frames need a distance: add fps or stride")
        if self.start_field is not None:
            check_field_names(self.start_field)
        if isinstance(self.start, float) and self.clips > 1:
            raise ValueError(
                f"start = {self.start!r} would make {self.clips} equal clips; name a field with a start for each"
            )
        check_codecs(self.codecs)
        check_field_names(self.into, *filter(None, (self.times, self.audio)))
        if self.audio and self.fps is None:
            raise ValueError(f"audio = {self.audio!r} is the sound of a clip's seconds, which only fps says")
        if self.audio and not 0 < self.samples * self.audio_channels * self.clips <= SEGMENT_SAMPLES_MAX:
            raise ValueError(
                f"{self.clips} clips have {self.samples} samples of {self.audio_channels} channels each, and together 1 to "
                f"{SEGMENT_SAMPLES_MAX} are possible"
            )

    @property
    def libraries(self) -> tuple[str, ...]:
        """PyAV brings FFmpeg along."""
        return ("av",) if self.audio else libraries_for(self.codecs)

    @property
    def start_field(self) -> str | None:
        """The field that has the starts of the clips; None if none does."""
        return self.start if isinstance(self.start, str) and self.start not in CLIP_PLACES else None

    @property
    def samples(self) -> int:
        """Samples of a clip's sound; 0 without."""
        return round(self.frames / self.fps * self.audio_rate) if self.audio and self.fps is not None else 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """The dimensions in front of height and width."""
        return (*((self.clips,) if self.clips > 1 else ()), self.frames)

    @property
    def is_random(self) -> bool:
        """Whether starts are drawn."""
        return self.start == "random"

    @property
    def draws_shape(self) -> bool:
        """A clip has as many frames wherever it begins."""
        return False

    @property
    def touches(self) -> frozenset[str]:
        """The field, those that it makes, and that of the starts."""
        return frozenset(filter(None, (self.field, self.into, self.times, self.audio, self.start_field)))

    @property
    def changes(self) -> frozenset[str]:
        """The field, and those that it makes."""
        return frozenset(filter(None, (self.field, self.into, self.times, self.audio)))
