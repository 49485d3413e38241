"""The interpolation contract, checked against a float64 reference written from its text alone."""

import numpy as np
import pytest

from batchd.data.pipeline.image.geometry import Geometry, planner_for
from batchd.data.pipeline.image.options import Decode, RandomResizedCrop, Resize
from batchd.data.pipeline.randomness import SampleRandom
from support.images import encode, photo
from support.pipelines import run_once

TOLERANCE = {"nearest": 0, "linear": 0.03, "area": 0.03, "cubic": 0.03}

SIZES = [
    ((60, 80), (60, 80)),
    ((60, 80), (59, 79)),
    ((60, 80), (45, 47)),
    ((60, 80), (31, 41)),
    ((60, 80), (30, 40)),
    ((60, 80), (23, 17)),
    ((60, 80), (20, 20)),
    ((60, 80), (7, 5)),
    ((60, 80), (1, 1)),
    ((60, 80), (90, 100)),
    ((60, 80), (131, 33)),
    ((60, 80), (9, 100)),
    ((5, 3), (64, 64)),
    ((1, 1), (9, 9)),
]


def weights(source, target, method):
    """Return the share of source pixels in target pixels: [target, source], rows sum to 1."""
    if method == "nearest":
        return np.eye(source)[(2 * np.arange(target) + 1) * source // (2 * target)]
    if method == "area":
        return area_weights(source, target)
    return kernel_weights(source, target, cubic_kernel if method == "cubic" else linear_kernel)


def area_weights(source, target):
    """Return the share of each source pixel's interval [i, i + 1) in the target's interval."""
    width = source / target
    start = np.arange(target)[:, np.newaxis] * width
    first = np.arange(source)[np.newaxis, :]
    overlap = np.minimum(start + width, first + 1) - np.maximum(start, first)
    return np.clip(overlap, 0, None) / width


def kernel_weights(source, target, kernel):
    """Sample a kernel around each target pixel's centre, one source pixel wide; edges repeat."""
    result = np.zeros((target, source))
    for row in range(target):
        centre = (row + 0.5) * source / target - 0.5
        for pixel in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
            result[row, min(max(pixel, 0), source - 1)] += kernel(abs(pixel - centre))
    return result


def linear_kernel(distance):
    """Fall from 1 to 0 within one pixel."""
    return max(0.0, 1 - distance)


def cubic_kernel(distance, a=-0.75):
    """Evaluate the cubic convolution kernel with the coefficient ``a``."""
    if distance <= 1:
        return (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    return a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a if distance < 2 else 0.0


def reference(image, size, method):
    """Resample an image in float64, unrounded."""
    down, across = weights(image.shape[0], size[0], method), weights(image.shape[1], size[1], method)
    return np.clip(np.einsum("ti,ijc,uj->tuc", down, image.astype(np.float64), across, optimize=True), 0, 255)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("method", ["nearest", "linear", "area", "cubic"])
@pytest.mark.parametrize(("source", "target"), SIZES)
def test_resampling_is_what_its_name_says(source, target, method):
    """Each method shrinks and grows an image within the documented tolerance."""
    image = np.random.default_rng(0).integers(0, 256, (*source, 3), np.uint8)

    result = run_once([Decode(), Resize(size=target, interpolation=method)], encode(image, ".png"))

    assert np.abs(result - reference(image, target, method)).max() <= TOLERANCE[method] + 0.5


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ((31, 41), "linear"),
        ((45, 79), "linear"),
        ((90, 100), "linear"),
        ((30, 41), "area"),
        ((90, 9), "area"),
        ((31, 40), "area"),
        ((7, 5), "area"),
    ],
)
def test_auto_smooths_from_a_reduction_of_two_on(target, method):
    """The mode is linear while both sides shrink by less than 2 or grow, and area otherwise."""
    data = encode(photo(60, 80), ".png")

    automatic = run_once([Decode(), Resize(size=target)], data)

    assert np.array_equal(automatic, run_once([Decode(), Resize(size=target, interpolation=method)], data))


def test_auto_keeps_fine_stripes_from_coming_back_as_coarse_ones():
    """Single-pixel stripes shrunk by 5 become grey; without smoothing they would stay stripes."""
    stripes = np.zeros((100, 100, 3), np.uint8)
    stripes[:, ::2] = 255
    data = encode(stripes, ".png")

    smooth = run_once([Decode(), Resize(size=(20, 20))], data)
    folded = run_once([Decode(), Resize(size=(20, 20), interpolation="nearest")], data)

    assert np.abs(smooth.astype(int) - 127).max() <= 26
    assert folded.std() > 100


def test_a_crop_is_interpolated_within_its_own_borders():
    """Pixels outside the box do not affect the result: the box is cut first, then scaled."""
    image = photo(60, 80)
    step = RandomResizedCrop(size=(32, 32), interpolation="linear", scale=(0.2, 0.4))

    result = run_once([Decode(), step], encode(image, ".png"), sample=3)

    candidates = (image[top : top + height, left : left + width] for top, left, height, width in all_boxes(step))
    assert any(np.abs(result - reference(box, (32, 32), "linear")).max() <= 1.5 for box in candidates)


def all_boxes(step):
    """Return the box that the documented randomness draws for sample 3 of a 60 x 80 image."""
    random = SampleRandom(0)
    random.start(0, 3, 0)
    geometry = Geometry(60, 80, 1, 10**6)
    planner_for(step)(geometry, random.random)
    return [geometry.moves[0]]
