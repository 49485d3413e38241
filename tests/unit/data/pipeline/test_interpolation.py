"""The interpolation contract, checked against a float64 reference written from its text alone."""

import numpy as np
import pytest

from batchd.data.pipeline.image.geometry import Geometry, planner_for
from batchd.data.pipeline.image.options import Decode, Letterbox, RandomResizedCrop, Resize
from batchd.data.pipeline.randomness import SampleRandom
from support.images import encode, photo, png_with_exif, stored_as
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


def lanczos(source, target):
    """Return the share of source pixels in target pixels by a Lanczos window of three lobes."""
    scale = source / target
    wide = max(1.0, scale)
    centre = (np.arange(target)[:, np.newaxis] + 0.5) * scale
    place = (np.arange(source)[np.newaxis, :] + 0.5 - centre) / wide
    shares = np.where(np.abs(place) < 3, np.sinc(place) * np.sinc(place / 3), 0)
    return shares / shares.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_lanczos_weighs_rows_then_columns(source, target):
    """Between them lies an image of 8 bits, as in Pillow; either rounding may be off by one."""
    image = np.random.default_rng(0).integers(0, 256, (*source, 3), np.uint8)
    middle = np.einsum("ui,hic->huc", lanczos(source[1], target[1]), image.astype(float))
    middle = np.clip(np.rint(middle), 0, 255)
    expected = np.clip(np.einsum("ti,iuc->tuc", lanczos(source[0], target[0]), middle), 0, 255)

    result = run_once([Decode(), Resize(size=target, interpolation="lanczos")], encode(image, ".png"))

    assert np.abs(result - expected).max() <= 2
    assert np.abs(result - expected).mean() <= 0.27


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_lanczos_is_within_two_of_pillow(orientation):
    """Nearly all numbers are equal, also of black and white noise, which overshoots most.

    From version 13 on, Pillow begins with columns for some sizes, but not for these.
    """
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0).choice([0, 255], (120, 160, 3)).astype(np.uint8)
    for pixels in (photo(120, 160), noise):
        for size in ((50, 60), (224, 224), (300, 30)):
            theirs = np.array(image.fromarray(pixels).resize(size[::-1], image.Resampling.LANCZOS))
            stored = png_with_exif(encode(stored_as(pixels, orientation), ".png"), orientation)
            mine = run_once([Decode(), Resize(size=size, interpolation="lanczos")], stored)

            difference = np.abs(mine.astype(int) - theirs)
            assert difference.max() <= 2
            assert (difference > 0).mean() < 0.04


def resized(height, width, **options):
    """Return the size of an image after a resize."""
    geometry = Geometry(height, width, 1, 10**9)
    planner_for(Resize(**options))(geometry, None)
    return geometry.height, geometry.width


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({"longer_side": 100}, (300, 400), (75, 100)),
        ({"longer_side": 100}, (400, 300), (100, 75)),
        ({"longer_side": 100}, (30, 40), (75, 100)),
        ({"longer_side": 100}, (1000, 3), (100, 1)),
        ({"longer_side": 50}, (7, 7), (50, 50)),
        ({"shorter_side": 800, "max_longer_side": 1333}, (480, 640), (800, 1066)),
        ({"shorter_side": 800, "max_longer_side": 1333}, (400, 1000), (533, 1333)),
        ({"shorter_side": 800, "max_longer_side": 1333}, (1000, 400), (1333, 533)),
        ({"shorter_side": 8, "max_longer_side": 10}, (1, 1000), (1, 10)),
        ({"shorter_side": 100, "multiple_of": 32}, (300, 400), (96, 128)),
        ({"longer_side": 100, "multiple_of": 32}, (3, 400), (32, 96)),
        ({"shorter_side": 100, "max_longer_side": 150, "multiple_of": 32}, (300, 900), (64, 128)),
        ({"shorter_side": 100, "max_longer_side": 100, "multiple_of": 64}, (1, 1), (64, 64)),
        ({"longer_side": 16384, "multiple_of": 16383}, (9, 9), (16383, 16383)),
    ],
)
def test_a_resize_by_one_side_keeps_proportions(options, before, after):
    """The longer side has a limit, and both sides may be multiples."""
    assert resized(*before, **options) == after


def test_a_limit_of_the_longer_side_is_that_of_torchvision():
    """Sizes equal those that torchvision computes, of images of any proportions."""
    for height, width in np.random.default_rng(0).integers(1, 3000, (300, 2)).tolist():
        short, long = sorted((height, width))
        new_short, new_long = 80, int(80 * long / short)
        if new_long > 133:
            new_short, new_long = int(133 * new_short / new_long), 133
        expected = (new_short, new_long) if height <= width else (new_long, new_short)

        assert resized(height, width, shorter_side=80, max_longer_side=133) == tuple(max(1, side) for side in expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": (2, 2), "longer_side": 2},
        {"shorter_side": 2, "longer_side": 2},
        {"longer_side": 2, "max_longer_side": 2},
        {"size": (2, 2), "multiple_of": 2},
        {"shorter_side": 9, "max_longer_side": 8},
        {"shorter_side": 2, "max_longer_side": 8, "multiple_of": 9},
    ],
)
def test_contradictions_of_a_resize_are_refused(options):
    """One of the three sizes is given, and limits fit it."""
    with pytest.raises(ValueError, match=r"resize needs|max_longer_side|multiple_of"):
        Resize(**options)


@pytest.mark.parametrize(
    ("options", "before", "box"),
    [
        ({}, (30, 60), (10, 0, 20, 40)),
        ({}, (60, 30), (0, 10, 40, 20)),
        ({}, (10, 10), (0, 0, 40, 40)),
        ({"enlarge": False}, (10, 11), (15, 14, 10, 11)),
        ({"enlarge": False}, (10, 80), (17, 0, 5, 40)),
        ({"place": "top_left"}, (30, 60), (0, 0, 20, 40)),
        ({}, (1, 900), (19, 0, 1, 40)),
    ],
)
def test_a_letterbox_has_the_whole_image(options, before, box):
    """The image is scaled until one side fits; its place is the middle or the corner."""
    image = np.full((*before, 3), 255, np.uint8)
    top, left, height, width = box

    result = run_once([Decode(), Letterbox(size=(40, 40), fill=(1, 2, 3), **options)], encode(image, ".png"))

    expected = np.full((40, 40, 3), (1, 2, 3), np.uint8)
    expected[top : top + height, left : left + width] = 255
    assert np.array_equal(result, expected)
