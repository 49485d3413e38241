"""Pictures of sound: waveforms and spectra, with the text of their axes."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from batchd.cli.contact_sheet import draw, image_fields
from batchd.cli.peeked import PeekedBatch
from batchd.cli.sound_sheet import ticks
from batchd.data.pipeline.media.options import DecodeAudio
from batchd.data.pipeline.sample_fields import overlays_of
from batchd.data.pipeline.sound.options import Gain, LogMel, Mfcc, Spectrogram
from batchd.data.samples.columns import Column
from batchd_client.sounds import SoundField, sounds_in

DARK, BRIGHT = (68, 1, 84), (253, 231, 37)
WAVE, PAPER = (0, 90, 170), (255, 255, 255)
GAIN = Gain(db=(-6, 6))
SPECTRUM = SoundField("audio", "spectrogram", 100.0, 0.0, 8000.0)


def overlays(*steps):
    """What a stream of sound says of its fields."""
    return overlays_of([Column("audio", "audio")], [DecodeAudio(rate=16000, seconds=1), *steps], {})


@pytest.mark.parametrize(
    ("step", "sound"),
    [
        (GAIN, SoundField("audio", "waveform", 16000.0)),
        (LogMel(bands=40, high_hz=7600.0), SoundField("audio", "spectrogram", 100.0, 0.0, 7600.0)),
        (Spectrogram(hop=320), SoundField("audio", "spectrogram", 50.0, 0.0, 8000.0, is_power=True)),
        (Mfcc(), SoundField("audio", "spectrogram", 100.0)),
    ],
)
def test_a_stream_says_which_of_its_fields_are_sound(step, sound):
    """With its rate, and the ends of its frequencies, of which coefficients have none."""
    assert sounds_in(overlays(step), {"audio"}) == [sound]
    assert sounds_in(overlays(step), {"label"}) == []


def test_a_wave_reaches_as_far_as_its_samples():
    """Above and below the middle, at their time; two channels are one below the other."""
    samples = np.zeros((1000, 2), np.float32)
    samples[500:510:2, 0], samples[900::2, 1] = 0.5, -0.25
    sound = SoundField("audio", "waveform", 1000.0)

    picture = sound.picture(samples, 80, 100)

    assert (picture[:19, 50] == WAVE).all()
    assert (picture[21:39, 50] == PAPER).all()
    assert (picture[62:, 95] == WAVE).all()
    assert (picture[41:58, 95] == PAPER).all()
    assert (sound.time_text(samples), sound.range_text(samples)) == ("1 s", "up to 0.5")


@pytest.mark.parametrize("is_power", [False, True])
def test_the_greatest_value_of_a_spectrum_is_brightest_where_it_is(is_power):
    """Low frequencies are at the bottom; powers are drawn by their logarithms."""
    values = np.full((20, 10), 1e-6, np.float32)
    values[15, 2] = 1.0

    picture = SPECTRUM._replace(is_power=is_power).picture(values, 50, 40)

    assert {tuple(pixel) for pixel in picture[35:40, 30:32].reshape(-1, 3)} == {BRIGHT}
    picture[35:40, 30:32] = DARK
    assert {tuple(pixel) for pixel in picture.reshape(-1, 3)} == {DARK}
    assert (SPECTRUM.time_text(values), SPECTRUM.range_text(values)) == ("0.2 s", "0 to 8,000 Hz")


@pytest.mark.parametrize("value", [np.zeros(0), np.zeros((0, 40)), np.full(30, np.nan), np.zeros((5, 40))])
def test_silence_nothing_and_numbers_that_are_none_are_drawn(value):
    """As an empty picture of the same size."""
    sound = SoundField("audio", "waveform", 16000.0) if value.ndim == 1 else SPECTRUM

    assert sound.picture(value, 30, 20).shape == (30, 20, 3)
    assert sound.time_text(value)
    assert sound.range_text(value)


@pytest.mark.parametrize(
    ("length", "found"),
    [(10, [0, 2, 4, 6, 8, 10]), (0.25, [0, 0.05, 0.1, 0.15, 0.2, 0.25]), (0, []), (3600, range(0, 3501, 500))],
)
def test_ticks_are_round_numbers(length, found):
    """Some, at equal distances, from 0 on."""
    assert ticks(length) == pytest.approx(found)


def test_a_sheet_has_the_sounds_below_the_images(tmp_path):
    """Of each sample of a batch; the sound alone, if it is asked for."""
    arrays = {"image": np.full((3, 20, 20, 3), 100, np.uint8), "audio": np.ones((3, 160), np.float32)}
    batch = PeekedBatch(0, 0, (), arrays)
    heard = replace(batch, overlays=overlays(GAIN))

    sizes = []
    for number, (one, field) in enumerate([(batch, None), (heard, None), (heard, "audio")]):
        draw(one, "clips", tmp_path / f"{number}.png", field)
        sizes.append(cv2.imread(str(tmp_path / f"{number}.png")).shape[0])

    assert sizes[1] == sizes[0] + sizes[2]
    assert image_fields(heard) == ["image"]
