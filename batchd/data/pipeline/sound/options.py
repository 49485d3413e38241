"""The steps on sound, as plain data. Daemon, workers, CLI; standard library only.

Sound is a field of samples, float32 or int16, [samples] or [samples, channels], from any source.
int16 becomes float32, divided by 32768. A number that is not finite makes a bad sample.
"""

from math import exp, log
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from batchd.data.pipeline.media.options import RATE_MIN_HZ, Quality, SoundFormats, is_exact, libraries_of
from batchd.data.pipeline.options import FieldStep
from batchd.data.samples.checks import Example, Range
from batchd.data.samples.location import check_path
from batchd.data.storage.patterns import Pattern, resolve_braces
from batchd_wire.record import options

N_FFT_MAX = 1 << 16
PRIME_MAX = 31
BANDS_MAX = 4096
RATE_MAX_HZ = 768_000
FLOOR_MIN = 1e-300
SPEED_MIN, SPEED_MAX, SPEEDS_MAX = 0.5, 2.0, 16
MASKS_MAX = 100
PATTERNS_MAX = 1000
SLANEY_HZ, SLANEY_MEL = 1000, 15

Length: TypeAlias = Annotated[int, Range(1, N_FFT_MAX)]


@options
class SoundStep(FieldStep):
    """Base of the steps on sound."""

    op: str
    field: str = "audio"


@options
class SpectrumStep(SoundStep):
    """Base of the steps that make spectra of frames."""

    op: str
    n_fft: Length = 400
    """Length of the Fourier transform, in samples; without prime factors above 31."""
    window_length: Annotated[Length | None, Example(400)] = None
    """Samples of a frame; zeros fill the rest of ``n_fft``. When not set, ``n_fft``."""
    hop: Length = 160
    """Samples from the start of a frame to the next."""
    window: Literal["hann", "hamming", "povey", "rectangular"] = "hann"
    """The weights of the samples of a frame: "hann" and "hamming" are periodic, as torch's and
    librosa's; "povey" is Kaldi's."""
    edges: Literal["reflect", "zeros", "cut"] = "reflect"
    """The frames at the ends: "reflect" and "zeros" centre frame j at sample j * hop, with the
    sound mirrored, or zeros, beyond its ends (``center`` of torch and librosa); "cut" has whole
    frames only, frame j begins at sample j * hop."""
    drop_last: bool = False
    """Whether the last frame is left out, as Whisper does: 3,000 frames of 30 s, not 3,001."""
    remove_mean: bool = False
    """Whether the mean of each frame is subtracted from it first, as Kaldi does."""
    preemphasis: Annotated[float, Range(0.0, 1.0)] = 0.0
    """The share of the sample before it that is subtracted from each sample of a frame, of the
    first one from itself. Kaldi: 0.97."""
    power: Annotated[int, Range(1, 2)] = 2
    """2 for the power, 1 for the magnitude."""
    log: Literal["none", "ln", "log10", "db"] = "none"
    """The logarithm of the result; "db" is 10 * log10 of a power, 20 * log10 of a magnitude."""
    floor: Annotated[float, Range(FLOOR_MIN, 1e300)] = 1e-10
    """The smallest number of which a logarithm is made; smaller ones become it."""
    top: Annotated[Annotated[float, Range(0.0, 1e6)] | None, Example(80.0)] = None
    """Results further below the largest of the sample become those so far below, in the unit of
    ``log``. torchaudio's and librosa's ``top_db``: 80. Whisper, with log10: 8."""

    def __post_init__(self) -> None:
        left = self.n_fft
        for prime in range(2, PRIME_MAX + 1):
            while left % prime == 0:
                left //= prime
        if left > 1:
            raise ValueError(f"n_fft = {self.n_fft} is a multiple of {left}, and prime factors are {PRIME_MAX} at most")
        if self.frame_length > self.n_fft:
            raise ValueError(f"window_length = {self.frame_length} is more than n_fft = {self.n_fft}")

    @property
    def frame_length(self) -> int:
        """Samples of a frame."""
        return self.window_length or self.n_fft

    @property
    def lead(self) -> int:
        """Samples from the start of a frame to the one at which it is centred; 0 if none are."""
        return 0 if self.edges == "cut" else self.n_fft // 2 - (self.n_fft - self.frame_length) // 2

    @property
    def samples_min(self) -> int:
        """The fewest samples of which it makes a frame."""
        fewest = {"cut": self.frame_length, "zeros": 1 + self.n_fft % 2, "reflect": self.lead + 1}[self.edges]
        return max(fewest, 1) + (self.hop if self.drop_last else 0)

    @property
    def width(self) -> int:
        """Numbers of a frame afterwards."""
        return self.n_fft // 2 + 1

    def frames(self, samples: int) -> int:
        """How many frames there are of at least ``samples_min`` samples."""
        whole = samples - self.frame_length if self.edges == "cut" else samples - self.n_fft % 2
        return whole // self.hop + 1 - self.drop_last


@options
class Spectrogram(SpectrumStep):
    """Turn sound into the power of its frequencies, from 0 to half the rate, over time.

    Samples become float32 [frames, n_fft / 2 + 1], those of several channels [frames, n_fft / 2 +
    1, channels]; computed in float64 and rounded once. A sample that is too short for a frame is
    bad.
    """

    op: Literal["spectrogram"] = "spectrogram"


@options
class MelStep(SpectrumStep):
    """Base of the steps that make bands of a mel scale."""

    op: str
    rate: Annotated[int, Range(1, RATE_MAX_HZ)] = 16_000
    """Samples per second of the sound, in Hz."""
    bands: Annotated[int, Range(1, BANDS_MAX)] = 80
    """How many bands there are."""
    low_hz: Annotated[float, Range(0.0, RATE_MAX_HZ)] = 0.0
    """The lower end of the lowest band, in Hz."""
    high_hz: Annotated[Annotated[float, Range(0.0, RATE_MAX_HZ)] | None, Example(8000.0)] = None
    """The upper end of the highest band, in Hz. When not set, half of the rate."""
    scale: Literal["htk", "slaney", "kaldi"] = "htk"
    """The mel scale: "htk" as torchaudio's default, "slaney" as librosa's and Whisper's, "kaldi" as
    Kaldi's, whose triangles have straight sides over mels."""
    norm: bool = False
    """Whether all triangles have the same area over Hz ("slaney" of torchaudio and librosa)."""

    def __post_init__(self) -> None:
        SpectrumStep.__post_init__(self)
        if not self.low_hz < self.end_hz <= self.rate / 2:
            raise ValueError(
                f"bands from {self.low_hz:g} to {self.end_hz:g} Hz: they go upwards, to half of rate = {self.rate} at most"
            )

        empty = self._empty_band()
        if empty is not None:
            raise ValueError(
                f"bands = {self.bands}: band {empty} is so narrow that no frequency of n_fft = {self.n_fft} is in it; "
                "fewer bands, or a larger n_fft with the same window_length"
            )

    def _empty_band(self) -> int | None:
        """The first band without a frequency, from 0; None if each has one."""
        low, high = (_mel(hz, self.scale) for hz in (self.low_hz, self.end_hz))
        corners = [_hz(low + (high - low) * place / (self.bands + 1), self.scale) for place in range(self.bands + 2)]
        step = self.rate / self.n_fft
        for band, (left, right) in enumerate(zip(corners, corners[2:], strict=False)):
            if (int(left / step) + 1) * step >= right:
                return band
        return None

    @property
    def end_hz(self) -> float:
        """The upper end of the highest band, in Hz."""
        return self.rate / 2 if self.high_hz is None else self.high_hz

    @property
    def width(self) -> int:
        """Numbers of a frame afterwards."""
        return self.bands


@options
class LogMel(MelStep):
    """Turn sound into the logarithm of its power in bands of a mel scale, over time.

    Samples become float32 [frames, bands]. Each band is a triangle over frequencies, from the
    middle of the one below to that of the one above.
    """

    op: Literal["log_mel"] = "log_mel"
    log: Literal["none", "ln", "log10", "db"] = "ln"


@options
class Mfcc(MelStep):
    """Turn sound into mel-frequency cepstral coefficients, over time.

    Samples become float32 [frames, coefficients]: the cosine transform (DCT-II, orthonormal) of the
    logarithms of the bands, as torchaudio's MFCC.
    """

    op: Literal["mfcc"] = "mfcc"
    coefficients: Annotated[int, Range(1, BANDS_MAX)] = 40
    """How many coefficients are kept, from the first."""
    log: Literal["none", "ln", "log10", "db"] = "db"
    top: Annotated[float, Range(0.0, 1e6)] | None = 80.0

    def __post_init__(self) -> None:
        MelStep.__post_init__(self)
        if self.coefficients > self.bands:
            raise ValueError(f"coefficients = {self.coefficients} are more than bands = {self.bands}")

    @property
    def width(self) -> int:
        """Numbers of a frame afterwards."""
        return self.coefficients


@options
class NormalizeLoudness(SoundStep):
    """Scale sound to one level: samples become float32; silence stays."""

    keeps_length: ClassVar[bool] = True
    op: Literal["normalize_loudness"] = "normalize_loudness"
    level_db: Annotated[float, Range(-200.0, 200.0)] = -20.0
    """The level afterwards, in dB; 0 dB is 1, the largest sample of a file."""
    of: Literal["rms", "peak"] = "rms"
    """What has this level: the root of the mean square of all samples, or the largest of them."""


@options
class Trim(SoundStep):
    """Cut silence off both ends of sound; the samples between stay as they are.

    The same as ``librosa.effects.trim``: frames of ``frame`` samples, centred at every ``hop``-th
    sample with zeros beyond the ends, are silence if their root mean square, of the loudest
    channel, is ``top_db`` or more below that of the loudest frame; a level below 1e-5 counts as
    1e-5. What is left begins at the centre of the first frame that is none, and ends ``hop`` behind
    that of the last. Sound that is 0 everywhere stays whole.
    """

    op: Literal["trim"] = "trim"
    top_db: Annotated[float, Range(0.0, 200.0)] = 60.0
    """How far below the loudest frame silence begins, in dB."""
    frame: Length = 2048
    """Samples of a frame."""
    hop: Length = 512
    """Samples from the centre of a frame to the next."""


@options
class ChanceSound(SoundStep):
    """Base of the steps that change some of the sounds.

    A step draws the same numbers whether it acts or not, so those of later steps are the same.
    """

    keeps_length: ClassVar[bool] = True
    op: str
    probability: Annotated[float, Range(0.0, 1.0)] = 1.0
    """How often the step acts, from 0 (never) to 1 (always)."""

    @property
    def is_random(self) -> bool:
        """True unless it never acts."""
        return self.probability > 0


@options
class Gain(ChanceSound):
    """Multiply sound by a factor that is drawn in dB: samples become float32, and are not clipped.

    Draws the factor.
    """

    op: Literal["gain"] = "gain"
    db: tuple[Annotated[float, Range(-200.0, 200.0)], Annotated[float, Range(-200.0, 200.0)]] = (-6.0, 6.0)
    """The smallest and the largest factor, in dB; 6 is about twice."""

    def __post_init__(self) -> None:
        if self.db[0] > self.db[1]:
            raise ValueError(f"db = [{self.db[0]:g}, {self.db[1]:g}] goes downwards; write the smaller number first")


@options
class Speed(ChanceSound):
    """Play sound faster or slower, by resampling: pitch and length change, samples become float32.

    Draws one of ``factors``. The lengths of a sample differ between epochs, so neither ``bucket``
    nor ``pack`` can be by them.
    """

    keeps_length: ClassVar[bool] = False
    op: Literal["speed"] = "speed"
    factors: tuple[Annotated[float, Range(SPEED_MIN, SPEED_MAX)], ...] = (0.9, 1.0, 1.1)
    """The speeds, each equally often, in hundredths; 1.1 leaves 10 / 11 of the samples."""

    def __post_init__(self) -> None:
        if not 0 < len(self.factors) <= SPEEDS_MAX:
            raise ValueError(f"factors has {len(self.factors)} speeds, and it has 1 to {SPEEDS_MAX}")
        for factor in self.factors:
            if round(factor * 100) != round(factor * 100, 6):
                raise ValueError(f"factors has {factor:g}, which is no hundredth, such as {round(factor, 2):g}")


@options
class FolderSound(ChanceSound):
    """Base of the steps that join sound with that of a file, drawn from those of a folder."""

    later: ClassVar[frozenset[str]] = frozenset({"quality"})

    op: str
    root: Annotated[Path, Example("/data/noise")]
    """The folder, on this machine. All that is in it counts for the fingerprint of the stream, and
    links do not lead out of it."""
    patterns: tuple[str, ...] = ("**/*.wav", "**/*.flac")
    """The files below ``root``, as patterns of paths; each is drawn equally often."""
    rate: Annotated[int, Range(RATE_MIN_HZ, RATE_MAX_HZ)] = 16_000
    """Samples per second of the sound, in Hz: files of another rate are resampled."""
    quality: Quality = "high"
    """The filter of files of another rate, as ``quality`` of "decode_audio"."""
    formats: SoundFormats = ("wav", "flac", "aiff")
    """The formats that a file may have, by its first bytes. With others than these three, the
    versions of PyAV and soundfile are in the stream's fingerprint."""

    def __post_init__(self) -> None:
        check_path("root", self.root, "the files are read for each sample, so copy them here")
        if not 0 < len(self.patterns) <= PATTERNS_MAX:
            raise ValueError(f"patterns has {len(self.patterns)} of them, and it has 1 to {PATTERNS_MAX}")
        for text in self.patterns:
            for plain in resolve_braces(text):
                Pattern(plain)
        if not self.formats:
            raise ValueError('formats has none; write those of the files, such as ["wav"]')

    @property
    def folders(self) -> frozenset[str]:
        """The root."""
        return frozenset({"root"})

    @property
    def libraries(self) -> tuple[str, ...]:
        """Those that decode such files."""
        return () if is_exact(self.formats) else libraries_of(self.formats)


@options
class AddNoise(FolderSound):
    """Add noise from the files of a folder, at a ratio of signal to noise that is drawn.

    Samples become ``x + sqrt(E(x) / E(n)) * 10 ** (-snr / 20) * n``, float32, not clipped, where E
    is the sum of squares over all samples of a channel: as ``torchaudio.functional.add_noise``.
    Noise that is longer is cut, shorter noise is repeated. Silence, and noise that is silent there,
    add nothing. Draws the file, then its start, then the ratio.
    """

    op: Literal["add_noise"] = "add_noise"
    snr_db: tuple[Annotated[float, Range(-200.0, 200.0)], Annotated[float, Range(-200.0, 200.0)]] = (0.0, 20.0)
    """The smallest and the largest ratio, in dB; 0 is noise as loud as the sound."""

    def __post_init__(self) -> None:
        FolderSound.__post_init__(self)
        if self.snr_db[0] > self.snr_db[1]:
            raise ValueError(
                f"snr_db = [{self.snr_db[0]:g}, {self.snr_db[1]:g}] goes downwards; write the smaller number first"
            )


@options
class Room(FolderSound):
    """Put sound into a room: convolve it with an impulse response from the files of a folder.

    Samples become float32, as many as before: sample n of them is the sum of ``h[p + j] * x[n -
    j]``, where p is the largest sample of the response, so the direct sound keeps its place, as
    Kaldi's ``wav-reverberate --shift-output``. Computed in float64. Sound of one channel takes the
    first of the response's. Draws the file.
    """

    op: Literal["room"] = "room"
    normalize: Literal["level", "energy", "none"] = "level"
    """The level afterwards: "level" keeps the root mean square of the sound, as Kaldi's
    ``--normalize-output``; "energy" divides the response by the root of the sum of its squares;
    "none" leaves it."""
    max_seconds: Annotated[float, Range(0.001, 60.0)] = 10.0
    """Length of a response, in seconds, above which its file is a bad one."""


@options
class SpecAugment(ChanceSound):
    """Cover random frames and frequencies of a spectrogram, [frames, bands] (SpecAugment, 2019).

    Draws for each mask its width, then its place: first those of time, then those of frequency.
    """

    op: Literal["spec_augment"] = "spec_augment"
    time_masks: Annotated[int, Range(0, MASKS_MAX)] = 2
    """How many ranges of frames are covered."""
    time_width: Annotated[int, Range(0, N_FFT_MAX)] = 100
    """The most frames of such a range; from 0 on, each width is drawn equally often."""
    time_share: Annotated[float, Range(0.0, 1.0)] = 1.0
    """The most of all frames that such a range has, from 0 to 1."""
    frequency_masks: Annotated[int, Range(0, MASKS_MAX)] = 2
    """How many ranges of frequencies are covered."""
    frequency_width: Annotated[int, Range(0, N_FFT_MAX)] = 27
    """The most frequencies of such a range, at most all."""
    fill: Annotated[float, Range(-1e30, 1e30)] = 0.0
    """The number that covers them."""


def _mel(hz: float, scale: str) -> float:
    """About the mel of a frequency; ``spectra`` has it to the last bit."""
    if scale == "slaney":
        return hz * 3 / 200 if hz < SLANEY_HZ else SLANEY_MEL + 27 * log(hz / SLANEY_HZ) / log(6.4)
    return log(1 + hz / 700)


def _hz(mel: float, scale: str) -> float:
    if scale == "slaney":
        return mel * 200 / 3 if mel < SLANEY_MEL else SLANEY_HZ * exp((mel - SLANEY_MEL) * log(6.4) / 27)
    return 700 * (exp(mel) - 1)


SOUND_TYPES = ("float32", "int16")
