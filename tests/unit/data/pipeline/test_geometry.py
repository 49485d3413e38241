"""The geometry steps on paper: boxes, sizes and turns, and statistics of the random ones."""

import math

import numpy as np
import pytest

from batchd.data.pipeline.image.geometry import (
    UPRIGHT,
    Cut,
    DecodePlan,
    Geometry,
    Padding,
    Resampling,
    decode_factor,
    plan_decoding,
    planner_for,
    scaled_cut,
)
from batchd.data.pipeline.image.options import CenterCrop, RandomFlip, RandomResizedCrop, Resize
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.samples.errors import SampleUndecodable

PIXELS_MAX = 100_000_000
RANDOM = SampleRandom(0)

HALF = Resampling(250, 350, "auto")
PADDED = Padding(0, 0, 600, 10)


def plan(step, height, width, orientation=1, sample=0):
    """Apply one step to an image on paper."""
    RANDOM.start(0, sample, 0)
    geometry = Geometry(height, width, orientation, PIXELS_MAX)
    planner_for(step)(geometry, RANDOM.random)
    return geometry


def random_boxes(step, height, width, count):
    """Draw the boxes of ``count`` samples of the same size."""
    return np.array([plan(step, height, width, sample=sample).moves[0] for sample in range(count)])


def torchvision_boxes(height, width, count):
    """Draw boxes as torchvision's documentation describes, with random numbers of numpy."""
    random = np.random.default_rng(0)
    boxes = []
    while len(boxes) < count:
        area = height * width * random.uniform(0.08, 1, 10)
        ratio = np.exp(random.uniform(math.log(3 / 4), math.log(4 / 3), 10))
        widths, heights = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = np.flatnonzero((widths <= width) & (heights <= height))
        if fits.size:
            boxes.append((heights[fits[0]], widths[fits[0]]))
    return np.array(boxes)


def distance(one, other):
    """Kolmogorov-Smirnov distance of two samples' distributions: 0 equal, 1 disjoint."""
    points = np.sort(np.concatenate([one, other]))
    ranks = [np.searchsorted(np.sort(values), points, side="right") / len(values) for values in (one, other)]
    return np.abs(ranks[0] - ranks[1]).max()


def test_random_boxes_stay_within_area_and_proportions():
    """Areas are from 8 % to all, proportions from 3:4 to 4:3, up to the rounding to pixels.

    Boxes are always inside the image.
    """
    top, left, height, width = random_boxes(RandomResizedCrop(size=(224, 224)), 375, 500, 3000).T

    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 375).all()
    assert (left + width <= 500).all()
    assert 0.079 < (height * width).min() / (375 * 500) < 0.1
    assert 0.9 < (height * width).max() / (375 * 500) <= 1
    assert 0.74 < (width / height).min() < 0.76
    assert 1.32 < (width / height).max() < 1.35


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (1000, 1000)])
def test_random_boxes_have_the_distribution_of_torchvision(height, width):
    """Area and proportions follow the documented procedure, including rejections."""
    boxes = random_boxes(RandomResizedCrop(size=(224, 224)), height, width, 4000)
    reference = torchvision_boxes(height, width, 4000)

    assert distance(boxes[:, 2] * boxes[:, 3], reference[:, 0] * reference[:, 1]) < 0.043
    assert distance(boxes[:, 3] / boxes[:, 2], reference[:, 1] / reference[:, 0]) < 0.043


def test_random_boxes_are_uniform_over_all_places():
    """The place of a box is uniform over all places inside the image, both ends included."""
    top, left, height, width = random_boxes(
        RandomResizedCrop(size=(8, 8), scale=(0.3, 0.3), ratio=(1, 1)), 40, 50, 4000
    ).T

    assert set(top) == set(range(40 - height[0] + 1))
    assert set(left) == set(range(50 - width[0] + 1))
    for place in (top, left):
        counts = np.bincount(place)
        expected = 4000 / len(counts)
        assert ((counts - expected) ** 2 / expected).sum() < 3 * len(counts)


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [
        (10, 1000, Cut(0, 493, 10, 13)),
        (1000, 10, Cut(493, 0, 13, 10)),
        (1, 5000, Cut(0, 2499, 1, 1)),
        (1, 1, Cut(0, 0, 1, 1)),
    ],
)
def test_if_no_random_box_fits_the_largest_central_one_is_used(height, width, box):
    """After ten attempts the box is as large as the proportions allow, central and not empty."""
    assert plan(RandomResizedCrop(size=(224, 224), scale=(1, 1)), height, width).moves[0] == box


def test_the_whole_image_is_used_if_only_that_is_in_range():
    """The range allows only the whole area in the proportions of the image."""
    assert plan(RandomResizedCrop(size=(8, 8), scale=(1, 1), ratio=(1, 1)), 90, 90).moves[0] == Cut(0, 0, 90, 90)


@pytest.mark.parametrize("probability", [0.0, 0.25, 0.5, 1.0])
def test_flips_have_the_configured_probability(probability):
    """They are within four deviations for 10,000 samples; 0 is never and 1 is always."""
    step = RandomFlip(probability=probability)

    flipped = sum(plan(step, 4, 4, sample=sample).turn.horizontal for sample in range(10_000))

    assert abs(flipped - 10_000 * probability) <= 4 * math.sqrt(10_000 * probability * (1 - probability))


def test_a_flip_is_horizontal_by_default():
    """It is vertical by name, and two flips cancel each other."""
    always = RandomFlip(probability=1)
    vertical = RandomFlip(probability=1, direction="vertical")

    assert plan(always, 4, 4).turn == (False, False, True)
    assert plan(vertical, 4, 4).turn == (False, True, False)
    assert plan(always, 4, 4, orientation=2).turn == UPRIGHT


def test_a_center_crop_takes_the_middle():
    """The box is rounded to whole pixels."""
    assert plan(CenterCrop(size=(224, 200)), 256, 341).moves == [Cut(16, 70, 224, 200)]


def test_a_center_crop_may_be_at_another_place():
    """Three of them along the longer side cover an image."""
    places = [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (1.0, 0.25)]
    found = [plan(CenterCrop(size=(224, 200), place=place), 256, 341).moves for place in places]
    assert found == [[Cut(top, left, 224, 200)] for top, left in [(0, 0), (16, 70), (32, 141), (32, 35)]]


def test_a_center_crop_of_a_smaller_image_is_padded():
    """Each dimension is independent: a larger one is cut, a smaller one is padded."""
    geometry = plan(CenterCrop(size=(100, 100)), 50, 300)

    assert geometry.moves == [Cut(0, 100, 50, 100), Padding(25, 0, 100, 100)]
    assert (geometry.height, geometry.width) == (100, 100)


def test_shorter_side_keeps_proportions():
    """The longer side is rounded down in both orientations."""
    assert plan(Resize(shorter_side=256), 375, 500).moves == [Resampling(256, 341, "auto")]
    assert plan(Resize(shorter_side=256), 500, 375).moves == [Resampling(341, 256, "auto")]
    assert plan(Resize(shorter_side=256), 500, 375, orientation=6).moves == [Resampling(341, 256, "auto")]


def test_resizing_a_very_long_image_is_refused_and_does_not_fill_the_memory():
    """1 x 60,000 pixels to a shorter side of 2,000 would be 240 gigapixels."""
    with pytest.raises(SampleUndecodable, match="more than the 100000000 pixels of max_pixels"):
        plan(Resize(shorter_side=2_000), 1, 60_000)


@pytest.mark.parametrize(
    ("moves", "factor"),
    [
        ([], 1),
        ([Resampling(224, 224, "auto")], 2),
        ([Cut(0, 0, 447, 600), Resampling(224, 224, "auto")], 1),
        ([Cut(0, 0, 448, 448), Resampling(224, 224, "auto")], 2),
        ([Cut(0, 0, 600, 800), Resampling(100, 100, "auto")], 4),
        ([Cut(0, 0, 600, 800), Resampling(1, 1, "auto")], 8),
        ([Cut(0, 0, 50, 50), Resampling(1, 1, "auto")], 1),
        ([Cut(0, 0, 300, 300)], 1),
        ([Cut(0, 0, 300, 300), Padding(0, 0, 400, 400)], 1),
    ],
)
def test_decoding_shrinks_no_further_than_the_first_scaling_needs(moves, factor):
    """The decoded image has at least the size to which it is scaled."""
    assert decode_factor(moves, 600, 800) == factor


@pytest.mark.parametrize(
    ("moves", "is_scaled", "plan"),
    [
        ([], True, DecodePlan(1, Cut(0, 0, 600, 801), [])),
        ([HALF], True, DecodePlan(2, Cut(0, 0, 300, 401), [HALF])),
        ([HALF], False, DecodePlan(1, Cut(0, 0, 600, 801), [HALF])),
        ([Cut(10, 20, 500, 700), HALF], False, DecodePlan(1, Cut(10, 20, 500, 700), [HALF])),
        ([Cut(10, 20, 500, 700), HALF], True, DecodePlan(2, Cut(5, 10, 250, 350), [HALF])),
        ([Cut(0, 1, 600, 800), Cut(1, 1, 2, 2)], True, DecodePlan(1, Cut(0, 1, 600, 800), [Cut(1, 1, 2, 2)])),
        ([Cut(0, 801, 600, 0), PADDED], True, DecodePlan(1, Cut(0, 0, 600, 801), [Cut(0, 801, 600, 0), PADDED])),
    ],
)
def test_only_the_first_crop_is_decoded(moves, is_scaled, plan):
    """The remaining moves follow it.

    An empty crop stays a move, because no decoder makes an empty image.
    """
    assert plan_decoding(moves, 600, 801, is_scaled=is_scaled) == plan


def test_a_box_keeps_its_size_and_place_at_a_smaller_scale():
    """This holds for every box and factor.

    The box is inside the decoded image, within a pixel of its place, and never smaller than needed.
    """
    random = np.random.default_rng(0)
    for _ in range(2000):
        whole = tuple(int(side) for side in random.integers(64, 900, 2))
        height, width = (int(random.integers(64, side + 1)) for side in whole)
        top, left = int(random.integers(0, whole[0] - height + 1)), int(random.integers(0, whole[1] - width + 1))
        factor = int(random.choice([2, 4, 8]))
        decoded = (-(-whole[0] // factor), -(-whole[1] // factor))

        box = scaled_cut(Cut(top, left, height, width), whole, decoded)

        assert 0 <= box.top <= decoded[0] - box.height
        assert 0 <= box.left <= decoded[1] - box.width
        assert box.height >= height // factor
        assert box.width >= width // factor
        assert abs(box.top * whole[0] / decoded[0] - top) <= factor
        assert abs(box.left * whole[1] / decoded[1] - left) <= factor
