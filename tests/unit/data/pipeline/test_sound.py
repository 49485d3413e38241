"""Sound at another rate and its spectra: the same on any processor, and near numpy's float64."""

import itertools
from dataclasses import replace
from math import gcd

import numpy as np
import pytest

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.sample_fields import drawing_step
from batchd.data.pipeline.shapes.options import PadBatch
from batchd.data.pipeline.sound import resample as sound
from batchd.data.pipeline.sound import spectra
from batchd.data.pipeline.sound.options import Gain, LogMel, Mfcc, NormalizeLoudness, SpecAugment, Spectrogram, Speed
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.steps import check_steps

if sound.IS_BUILT:
    from batchd.data.pipeline import _sound

RATES = [(44100, 16000), (16000, 44100), (48000, 8000), (8000, 16000), (44101, 16000), (16000, 44101), (96, 100)]
RANDOM = np.random.default_rng(7)


def whole(wave, from_rate, to_rate, quality=sound.HIGH):
    """Return all samples at the new rate."""
    count = sound.length_at(len(wave), from_rate, to_rate)
    return sound.resample(wave, from_rate, to_rate, 0, 0, count, quality)


def of_each_kind(make):
    """Return the results with vectors of each width that the processor has, and of numpy."""
    if not sound.IS_BUILT:
        pytest.skip("the extension was not built")
    made = []
    try:
        for bits in (512, 256, 128, 0):
            sound.IS_BUILT = bits > 0
            _sound.use_vectors(bits)
            made.append(make())
    finally:
        sound.IS_BUILT = True
        _sound.use_vectors(512)
    return made


@pytest.mark.parametrize("rates", RATES)
def test_numpy_and_any_processor_make_the_same_samples(rates) -> None:
    """The sums have one order."""
    wave = RANDOM.standard_normal((3000, 2)).astype(np.float32)

    made = of_each_kind(lambda: np.stack([whole(wave, *rates, quality) for quality in ("high", "fast")]))

    assert len({each.tobytes() for each in made}) == 1


@pytest.mark.parametrize("rates", [*RATES, (16000, 16000)])
def test_a_segment_has_the_samples_of_the_whole_file(rates) -> None:
    """It is made of what is needed for it alone."""
    wave = RANDOM.standard_normal((4000, 1)).astype(np.float32)
    quality = str(RANDOM.choice(["high", "fast"]))
    all_of_it = whole(wave, *rates, quality)
    for _ in range(20):
        start = int(RANDOM.integers(0, len(all_of_it)))
        count = int(RANDOM.integers(0, len(all_of_it) - start)) + 1
        first, end = sound.needed(*rates, start, count, quality)
        first, end = max(0, first), min(end, len(wave))

        part = sound.resample(wave[first:end], *rates, first, start, count, quality)

        assert part.tobytes() == all_of_it[start : start + count].tobytes()


def test_the_needed_samples_are_within_the_margins() -> None:
    """They are on both sides of the first and of the last place."""
    for from_rate, to_rate in RATES:
        first, end = sound.needed(from_rate, to_rate, 1000, 50)
        around = sound.margins(from_rate, to_rate)

        assert first == 1000 * from_rate // to_rate - around + 1
        assert end == 1049 * from_rate // to_rate + around + 1


def test_another_file_length_is_rounded_up() -> None:
    """Samples have places before the end of the file."""
    assert sound.length_at(44100, 44100, 16000) == 16000
    assert sound.length_at(1, 44100, 16000) == 1
    assert sound.length_at(0, 44100, 16000) == 0
    assert sound.length_at(3, 1, 2) == 6


def gain_db(rates, share, quality):
    """Return the loudness of a tone, at a share of half the lower rate, after resampling."""
    from_rate, to_rate = rates
    tone = np.sin(np.pi * share * min(rates) / from_rate * np.arange(from_rate // 4))
    made = whole(tone.astype(np.float32)[:, np.newaxis], *rates, quality)
    around = sound.margins(to_rate, from_rate) + 8
    return 10 * np.log10(2 * np.mean(made[around:-around].astype(float) ** 2) + 1e-30)


@pytest.mark.parametrize("rates", [(44100, 16000), (16000, 44101), (48000, 8000)])
@pytest.mark.parametrize(("quality", "passed", "damped_db"), [("high", 0.913, 120), ("fast", 0.827, 80)])
def test_what_passes_stays_and_what_would_alias_goes(rates, quality, passed, damped_db) -> None:
    """The first up to a share of half the lower rate, within 0.01 dB."""
    for share in (0.1, 0.5, passed):
        assert abs(gain_db(rates, share, quality)) < 0.01
    if rates[0] > rates[1]:
        for share in (1.0, 1.01, 1.3, 1.7):
            assert gain_db(rates, share, quality) < -damped_db


def test_silence_and_a_constant_stay() -> None:
    """Weights add up to one."""
    for rates, level in itertools.product(RATES, (0.0, 0.5)):
        made = whole(np.full((6000, 1), level, np.float32), *rates)
        around = sound.margins(rates[1], rates[0])

        assert np.abs(made[around : len(made) - around] - level).max(initial=0) < 1e-6
        common = gcd(*rates)
        assert len(sound.kernel(rates[1] // common, rates[0] // common)) <= 1025


NOISE = (0.1 * RANDOM.standard_normal(4100)).astype(np.float32)


def make(step, wave):
    """Return what a pipeline of one step makes of samples."""
    columns = [Column("audio", dtype=wave.dtype.name, shape=(None, *wave.shape[1:]))]
    pipeline = Pipeline(columns, [step], 0, has_rows=False)
    return pipeline.make({"audio": wave}, 0, 0, 0)["audio"]


def powers(wave, n_fft, length, hop, window, pad):
    """Return the powers of the frames, by numpy."""
    wave = wave.astype(np.float64) if pad is None else np.pad(wave.astype(np.float64), n_fft // 2, pad)
    centred = np.zeros(n_fft)
    begin = (n_fft - length) // 2
    centred[begin : begin + length] = window
    count = (len(wave) - n_fft) // hop + 1
    places = np.arange(count)[:, np.newaxis] * hop + np.arange(n_fft)
    return np.abs(np.fft.rfft(wave[places] * centred)) ** 2


def hann(length):
    """Return the periodic window."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)


def htk_bands(count, n_fft, rate):
    """Return the triangles of torchaudio's default, [frequencies, bands]."""
    mels = np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), count + 2)
    hz = 700 * (10 ** (mels / 2595) - 1)
    places = (np.arange(n_fft // 2 + 1) * rate / n_fft)[:, np.newaxis]
    up, down = (places - hz[:-2]) / (hz[1:-1] - hz[:-2]), (hz[2:] - places) / (hz[2:] - hz[1:-1])
    return np.maximum(0, np.minimum(up, down))


@pytest.mark.parametrize(
    ("n_fft", "length", "hop"), [(400, 400, 160), (512, 400, 160), (441, 441, 100), (2 * 7 * 31, 300, 99), (8, 5, 3)]
)
@pytest.mark.parametrize(("edges", "pad"), [("reflect", "reflect"), ("zeros", "constant")])
def test_a_spectrogram_is_that_of_numpy(n_fft, length, hop, edges, pad) -> None:
    """A window that is shorter than the transform is in its middle."""
    step = Spectrogram(n_fft=n_fft, window_length=length, hop=hop, edges=edges)

    made = make(step, NOISE)

    wanted = powers(NOISE, n_fft, length, hop, hann(length), pad)
    assert made.shape == wanted.shape
    assert np.abs(made - wanted).max() < 1e-6 * wanted.max()


def test_frames_without_edges_are_whole() -> None:
    """The last samples may be in none."""
    made = make(Spectrogram(n_fft=512, hop=200, edges="cut", power=1), NOISE)

    assert np.allclose(made, np.sqrt(powers(NOISE, 512, 512, 200, hann(512), None)), rtol=1e-5)


def test_log_mel_is_within_a_millionth_of_float64() -> None:
    """The sum is of float64, and rounded once."""
    made = make(LogMel(), NOISE)

    wanted = np.log(np.maximum(powers(NOISE, 400, 400, 160, hann(400), "reflect") @ htk_bands(80, 400, 16000), 1e-10))
    assert made.shape == wanted.shape == (26, 80)
    assert made.dtype == np.float32
    assert np.abs(made - wanted).max() < 1e-6


def test_mfcc_is_the_cosine_transform_of_decibels() -> None:
    """Levels 80 dB below the largest are the lowest."""
    wave = NOISE * (np.arange(len(NOISE)) > 2000)

    made = make(Mfcc(coefficients=13), wave)

    mels = powers(wave, 400, 400, 160, hann(400), "reflect") @ htk_bands(80, 400, 16000)
    levels = 10 * np.log10(np.maximum(mels, 1e-10))
    levels = np.maximum(levels, levels.max() - 80)
    cosines = np.cos(np.pi / 80 * (np.arange(80) + 0.5)[:, np.newaxis] * np.arange(13)) * np.sqrt(2 / 80)
    cosines[:, 0] /= np.sqrt(2)
    assert np.allclose(made, levels @ cosines, atol=1e-3)


def test_whisper_is_written_with_these_options() -> None:
    """Slaney's bands of equal area, log10 within 8 of the largest, no last frame: 30 s, 3000."""
    step = LogMel(scale="slaney", norm=True, log="log10", top=8.0, drop_last=True)

    assert step.frames(480_000) == 3000
    made = make(step, NOISE)
    assert made.shape == (25, 80)
    assert made.min() >= made.max() - 8.001


def test_slaney_and_kaldi_have_known_bands() -> None:
    """Below 1 kHz Slaney's mels are linear; Kaldi's triangles are straight over mels."""
    slaney = spectra.mel_bands(40, 512, 16000, 0, 1000, "slaney", is_normed=True)
    first = slaney.weights[: slaney.ends[0]]
    width = 2 * 1000 / 41
    assert np.allclose(first, (1 - abs(np.arange(1, len(first) + 1) * 31.25 - width / 2) / (width / 2)) * 2 / width)
    kaldi = spectra.mel_bands(23, 512, 16000, 20, 8000, "kaldi", is_normed=False)
    mel = 1127 * np.log(1 + np.array([20.0, 8000.0, 5 * 31.25]) / 700)
    place = (mel[2] - mel[0]) / ((mel[1] - mel[0]) / 24)
    band = int(place)  # whose triangle falls there
    begin, at = (0 if band == 0 else kaldi.ends[band - 1]), kaldi.firsts[band]
    assert np.isclose(kaldi.weights[begin + 5 - at], place - band)


@pytest.mark.parametrize(
    "step",
    [
        Spectrogram(n_fft=7 * 31 * 2, window="hamming", remove_mean=True, preemphasis=0.97),
        Spectrogram(n_fft=225, hop=50, window="rectangular", power=1),
        LogMel(n_fft=512, window_length=400, window="povey", edges="cut", scale="kaldi"),
        Mfcc(log="ln", top=3.0),
        LogMel(n_fft=1024, hop=333, log="log10", scale="slaney", norm=True),
    ],
)
def test_numpy_and_any_processor_make_the_same_spectra(step) -> None:
    """Frames are transformed each by itself, so how many are side by side does not matter."""
    made = of_each_kind(lambda: make(step, NOISE))

    assert len({each.tobytes() for each in made}) == 1


def test_a_frame_does_not_depend_on_its_neighbours() -> None:
    """The frames of a part are those of the whole."""
    step = LogMel(edges="cut")
    whole = make(step, NOISE)

    for first in range(1, 6):
        part = make(step, NOISE[first * 160 :] if first % 2 else NOISE[first * 160 : first * 160 + 400])
        assert part[0].tobytes() == whole[first].tobytes()


def test_int16_is_a_fraction_and_channels_come_last() -> None:
    """Sound of int16 makes what its fractions make, and each channel what it makes alone."""
    levels = (NOISE * 32768).astype(np.int16)
    wave = levels.astype(np.float32) / 32768

    made = make(LogMel(), np.stack([levels, levels[::-1]], axis=1))

    assert made[..., 0].tobytes() == make(LogMel(), wave).tobytes()
    assert made[..., 1].tobytes() == make(LogMel(), np.ascontiguousarray(wave[::-1])).tobytes()


@pytest.mark.parametrize("step", [LogMel(), LogMel(edges="cut", drop_last=True), Spectrogram(n_fft=441, edges="zeros")])
def test_the_shortest_sample_and_a_shorter_one(step) -> None:
    """The first makes a frame, and the second is bad."""
    assert len(make(step, NOISE[: step.samples_min])) == step.frames(step.samples_min) >= 1
    with pytest.raises(SampleUndecodable, match=rf"^has {step.samples_min - 1} samples, and .* {step.samples_min} or"):
        make(step, NOISE[: step.samples_min - 1])


def test_a_number_that_is_no_sound_is_a_bad_sample() -> None:
    """It is named with its place."""
    wave = NOISE.copy()
    wave[7] = np.nan

    with pytest.raises(SampleUndecodable, match=r"^nan at \[7\] of audio is no sound"):
        make(LogMel(), wave)


def test_fields_are_planned_without_a_sample() -> None:
    """Samples of one length make frames of one count; of others, the count varies."""
    steps = [LogMel()]
    assert problems(16_000, steps) == []
    assert Pipeline([column(16_000)], steps, 0).columns["audio"].fixed_shape == (101, 80)
    (problem,) = problems(None, steps)
    assert "float32[?,80]" in problem
    assert problems(None, [*steps, PadBatch(field="audio", max_shape=(500, 80))]) == []


def column(samples, dtype="float32", *channels):
    """Return a column of samples."""
    return Column("audio", dtype=dtype, shape=(samples, *channels))


def problems(samples, steps):
    """Return the problems of steps on sound of a length."""
    return check_steps([column(samples)], steps)


def draw(step, wave, sample=0):
    """Return what a random step makes of a sample, and what it says it drew."""
    columns = [Column("audio", dtype=wave.dtype.name, shape=(None, *wave.shape[1:]))]
    pipeline = Pipeline(columns, [step], 3, has_rows=False)
    notes = pipeline.note_draws()
    return pipeline.make({"audio": wave}, 0, sample, 0)["audio"], notes[0]


def test_loudness_becomes_that_of_the_level() -> None:
    """The root mean square, or the largest sample; silence stays."""
    loud = make(NormalizeLoudness(level_db=-23), NOISE)
    assert np.isclose(20 * np.log10(np.sqrt(np.mean(loud.astype(float) ** 2))), -23, atol=1e-5)
    assert np.isclose(abs(make(NormalizeLoudness(level_db=-6, of="peak"), NOISE)).max(), 10**-0.3, rtol=1e-6)
    assert not make(NormalizeLoudness(), NOISE * 0).any()


def test_gain_multiplies_by_what_it_drew() -> None:
    """int16 is a fraction first."""
    for sample in range(5):
        made, drawn = draw(Gain(db=(-20, 12)), np.full((10, 2), 16384, np.int16), sample)
        assert -20 <= drawn["db"] <= 12
        assert np.allclose(made, 0.5 * 10 ** (drawn["db"] / 20), rtol=1e-6)


def test_speed_is_a_resampling_by_what_it_drew() -> None:
    """A tone of 100 samples has 80 at a speed of 1.25."""
    lengths = set()
    for sample in range(20):
        made, drawn = draw(Speed(factors=(0.8, 1.0, 1.25)), NOISE, sample)
        rate = round(100 * drawn["factor"])
        assert len(made) == -(-len(NOISE) * 100 // rate)
        assert made.tobytes() == whole(NOISE[:, np.newaxis], rate, 100).tobytes()
        lengths.add(len(made))
    assert len(lengths) == 3


def test_spec_augment_covers_what_it_drew() -> None:
    """No range is wider than it may be, and the rest stays."""
    levels = RANDOM.standard_normal((50, 30)).astype(np.float32)
    step = SpecAugment(time_masks=2, time_width=40, time_share=0.2, frequency_masks=1, frequency_width=7, fill=9.0)
    for sample in range(20):
        made, drawn = draw(step, levels, sample)
        wanted = levels.copy()
        for begin, end in np.reshape(drawn["frames"], (-1, 2)):
            assert 0 <= begin <= end <= min(50, begin + 10)
            wanted[begin:end] = 9
        for begin, end in np.reshape(drawn["frequencies"], (-1, 2)):
            assert 0 <= begin <= end <= min(30, begin + 7)
            wanted[:, begin:end] = 9
        assert np.array_equal(made, wanted)


@pytest.mark.parametrize("step", [Gain(), Speed(factors=(0.9, 1.1)), SpecAugment()])
def test_a_step_on_sound_draws_the_same_whether_it_acts_or_not(step) -> None:
    """So later steps stay as they are."""
    wave = NOISE[:, np.newaxis] if not isinstance(step, SpecAugment) else NOISE.reshape(41, 100)
    acted = []
    for sample in range(40):
        columns = [Column("audio", dtype="float32", shape=(None, wave.shape[1]))]
        later = Gain(db=(-3, 3), field="other")
        columns.append(Column("other", dtype="float32", shape=(None,)))
        drawn = []
        for chance in (0.5, 1e-9):
            pipeline = Pipeline(columns, [replace(step, probability=chance), later], 3, has_rows=False)
            drawn.append(pipeline.note_draws())
            made = pipeline.make({"audio": wave, "other": NOISE}, 0, sample, 0)["audio"]
        assert drawn[0][-1] == drawn[1][-1]
        assert np.array_equal(made, wave)
        acted.append(drawn[0][0] != {"acts": False})
    assert 8 < sum(acted) < 32


def test_only_steps_that_change_the_length_prevent_buckets() -> None:
    """The values may differ between epochs, the lengths may not."""
    assert drawing_step([Gain(), LogMel(), SpecAugment()], "audio") is None
    assert drawing_step([Speed(), LogMel()], "audio") == "speed"


def test_speeds_are_hundredths() -> None:
    """Another has too many weights."""
    with pytest.raises(ValueError, match=r"factors has 0\.333, which is no hundredth, such as 0\.33"):
        Speed(factors=(1.0, 0.333))
