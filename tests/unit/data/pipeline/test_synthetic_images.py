"""The images of the demo and the benchmarks are like photographs for a decoder."""

import numpy as np
import pytest

from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.image.synthetic_images import PATTERNS, make_photos


def files(folder):
    """Return the files below ``folder`` by their path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jpg"))}


def test_photos_are_sorted_into_classes_and_look_like_photographs_to_a_decoder(tmp_path):
    """There are as many as requested, in all classes and usual sizes, and no two are equal."""
    reports = []

    make_photos(tmp_path, 40, 0, reports.append)

    made = files(tmp_path)
    headers = [probe_image(memoryview(data)) for data in made.values()]
    assert len(made) == len(set(made.values())) == 40
    assert {path.split("/")[0] for path in made} == set(PATTERNS)
    assert reports == [16, 32, 40]
    assert all(header.format == "JPEG" and {header.height, header.width} <= {333, 375, 500} for header in headers)
    assert all(60_000 < len(data) < 120_000 for data in made.values())


@pytest.mark.thorough
def test_a_seed_gives_the_same_photos_and_another_seed_gives_others(tmp_path):
    """A larger count adds photos and changes none of the others."""
    for name, count, seed in (("one", 9, 3), ("more", 10, 3), ("other", 9, 4)):
        make_photos(tmp_path / name, count, seed, lambda _: None)

    one, more, other = (files(tmp_path / name) for name in ("one", "more", "other"))
    assert one.items() < more.items()
    assert not set(one.values()) & set(other.values())


def test_the_texture_has_the_spectrum_of_photographs(tmp_path):
    """Detail falls off with frequency but exists: neither flat colour nor white noise."""
    from batchd.data.pipeline.image.opencv import cv2  # noqa: PLC0415  after the module that sets it up

    make_photos(tmp_path, 8, 0, lambda _: None)
    for data in files(tmp_path).values():
        grey = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE).astype(float)
        power = np.abs(np.fft.fft2(grey - grey.mean())) ** 2
        frequency = np.hypot(np.fft.fftfreq(grey.shape[0])[:, np.newaxis], np.fft.fftfreq(grey.shape[1])[np.newaxis, :])
        coarse, fine = power[(frequency > 0.02) & (frequency < 0.06)].mean(), power[frequency > 0.3].mean()
        assert 5 < coarse / fine < 5_000
