"""Sound at another rate: the same for any part of a file, on any processor, and clean."""

import itertools
from math import gcd

import numpy as np
import pytest

from batchd.data.pipeline.sound import resample as sound

if sound.IS_BUILT:
    from batchd.data.pipeline import _sound

RATES = [(44100, 16000), (16000, 44100), (48000, 8000), (8000, 16000), (44101, 16000), (16000, 44101), (96, 100)]
RANDOM = np.random.default_rng(7)


def whole(wave, from_rate, to_rate):
    """Return all samples at the new rate."""
    count = sound.length_at(len(wave), from_rate, to_rate)
    return sound.resample(wave, from_rate, to_rate, 0, 0, count)


def of_each_kind(make):
    """Return the results with AVX2 (if the processor has it), without, and of numpy."""
    if not sound.IS_BUILT:
        pytest.skip("the extension was not built")
    made = []
    try:
        for kind in ("AVX2", "no AVX2", "numpy"):
            sound.IS_BUILT = kind != "numpy"
            _sound.use_avx2(kind == "AVX2")
            made.append(make())
    finally:
        sound.IS_BUILT = True
        _sound.use_avx2(True)
    return made


@pytest.mark.parametrize("rates", RATES)
def test_numpy_and_any_processor_make_the_same_samples(rates) -> None:
    """The sums have one order."""
    wave = RANDOM.standard_normal((3000, 2)).astype(np.float32)

    with_avx2, without, by_numpy = of_each_kind(lambda: whole(wave, *rates))

    assert with_avx2.tobytes() == without.tobytes() == by_numpy.tobytes()


@pytest.mark.parametrize("rates", [*RATES, (16000, 16000)])
def test_a_segment_has_the_samples_of_the_whole_file(rates) -> None:
    """It is made of what is needed for it alone."""
    wave = RANDOM.standard_normal((4000, 1)).astype(np.float32)
    all_of_it = whole(wave, *rates)
    for _ in range(20):
        start = int(RANDOM.integers(0, len(all_of_it)))
        count = int(RANDOM.integers(0, len(all_of_it) - start)) + 1
        first, end = sound.needed(*rates, start, count)
        first, end = max(0, first), min(end, len(wave))

        part = sound.resample(wave[first:end], *rates, first, start, count)

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


def gain_db(rates, share):
    """Return the loudness of a tone, at a share of half the lower rate, after resampling."""
    from_rate, to_rate = rates
    tone = np.sin(np.pi * share * min(rates) / from_rate * np.arange(from_rate // 4))
    made = whole(tone.astype(np.float32)[:, np.newaxis], *rates)
    around = sound.margins(to_rate, from_rate) + 8
    return 10 * np.log10(2 * np.mean(made[around:-around].astype(float) ** 2) + 1e-30)


@pytest.mark.parametrize("rates", [(44100, 16000), (16000, 44101), (48000, 8000)])
def test_what_passes_stays_and_what_would_alias_goes(rates) -> None:
    """The first up to 0.913 of half the lower rate, within 0.01 dB; the second is below -120 dB."""
    for share in (0.1, 0.5, 0.913):
        assert abs(gain_db(rates, share)) < 0.01
    if rates[0] > rates[1]:
        for share in (1.0, 1.01, 1.3, 1.7):
            assert gain_db(rates, share) < -120


def test_silence_and_a_constant_stay() -> None:
    """Weights add up to one."""
    for rates, level in itertools.product(RATES, (0.0, 0.5)):
        made = whole(np.full((6000, 1), level, np.float32), *rates)
        around = sound.margins(rates[1], rates[0])

        assert np.abs(made[around : len(made) - around] - level).max(initial=0) < 1e-6
        common = gcd(*rates)
        assert len(sound.kernel(rates[1] // common, rates[0] // common)) <= 1025
