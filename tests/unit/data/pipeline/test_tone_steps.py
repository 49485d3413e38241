"""The steps that change levels, beside references from their formulas, and beside Pillow."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchd.data.pipeline.augment import exact, tone
from batchd.data.pipeline.augment import options as augment
from batchd.data.pipeline.effects import StepInvalid, effect
from batchd.data.pipeline.image import resample
from batchd.data.pipeline.image.geometry import Cut
from batchd.data.pipeline.image.options import Decode, Resize
from batchd.data.samples.columns import Column
from support.images import encode, photo
from support.pipelines import image_pipeline, run, run_on_pixels, run_once

NOISE = np.random.default_rng(0).integers(0, 256, (31, 44, 3), np.uint8)
DULL = (photo(60, 80) // 3 + 40).astype(np.uint8)
PLAIN = np.full((5, 7, 3), 90, np.uint8)
PIXELS = [NOISE, DULL, PLAIN, NOISE[:1, :2], NOISE[..., :1], NOISE[..., [0, 1, 2, 2]], NOISE[..., :2]]
ROUNDED = 0.5
SHARPEN_TOLERANCE = ROUNDED + 0.02
BLUR_TOLERANCE = ROUNDED + 0.1
NEEDS_EXTENSION = pytest.mark.skipif(not resample.IS_BUILT, reason="the extension was not built")


def equalized(channel):
    """Equalize one channel as Pillow's source describes it."""
    counts = np.bincount(channel.ravel(), minlength=256).tolist()
    there = [count for count in counts if count]
    step = (sum(there) - there[-1]) // 255
    if len(there) <= 1 or not step:
        return channel
    table, sum_of_all = [], step // 2
    for count in counts:
        table.append(min(255, sum_of_all // step))
        sum_of_all += count
    return np.array(table)[channel]


def stretched(channel):
    """Stretch one channel as Pillow's source describes it."""
    low, high = int(channel.min()), int(channel.max())
    if low == high:
        return channel
    scale = 255.0 / (high - low)
    table = [min(255, max(0, int(level * scale + -low * scale))) for level in range(256)]
    return np.array(table)[channel]


def by_channel(image, change):
    """Change each channel by itself."""
    return np.stack([change(image[..., channel]) for channel in range(image.shape[2])], axis=-1)


LOOK_UPS = [
    (augment.Solarize(), lambda image: np.where(image < 128, image, 255 - image)),
    (augment.Solarize(threshold=256), lambda image: image),
    (augment.Solarize(threshold=0), lambda image: 255 - image),
    (augment.Posterize(), lambda image: image // 16 * 16),
    (augment.Posterize(bits=1), lambda image: image // 128 * 128),
    (augment.Posterize(bits=8), lambda image: image),
    (augment.Invert(), lambda image: 255 - image),
    (augment.Equalize(), lambda image: by_channel(image, equalized)),
    (augment.Autocontrast(), lambda image: by_channel(image, stretched)),
]


@pytest.mark.parametrize("image", PIXELS, ids=lambda image: str(image.shape))
@pytest.mark.parametrize(("step", "reference"), LOOK_UPS, ids=lambda value: str(getattr(value, "op", "")))
def test_a_look_up_is_exactly_its_formula(step, reference, image):
    """This holds for images of 1 to 4 channels, of one level, and of two pixels."""
    assert np.array_equal(run_on_pixels([step], image), reference(image))


@pytest.mark.parametrize("image", [NOISE, DULL, PLAIN, NOISE[:1, :2]], ids=lambda image: str(image.shape))
def test_look_ups_are_exactly_those_of_pillow(image):
    """Each level is equal, with every threshold and number of bits."""
    pytest.importorskip("PIL")
    from PIL import Image, ImageOps  # noqa: PLC0415  only if it is there

    theirs = Image.fromarray(image)
    for threshold in (0, 1, 99, 128, 255, 256):
        mine = run_on_pixels([augment.Solarize(threshold=threshold)], image)
        assert np.array_equal(mine, np.array(ImageOps.solarize(theirs, threshold)))
    for bits in range(1, 9):
        assert np.array_equal(
            run_on_pixels([augment.Posterize(bits=bits)], image), np.array(ImageOps.posterize(theirs, bits))
        )
    for step, change in (
        (augment.Invert, ImageOps.invert),
        (augment.Equalize, ImageOps.equalize),
        (augment.Autocontrast, ImageOps.autocontrast),
    ):
        assert np.array_equal(run_on_pixels([step()], image), np.array(change(theirs)))


def smooth(image):
    """Return the mean of nine pixels, where the middle one counts five times; edges stay."""
    made = image.astype(float)
    rows, columns = image.shape[0] - 2, image.shape[1] - 2
    if min(rows, columns) > 0:
        total = 4 * made[1:-1, 1:-1]
        for down in range(3):
            for right in range(3):
                total = total + image[down : down + rows, right : right + columns]
        made[1:-1, 1:-1] = total / 13
    return made


@pytest.mark.parametrize("image", PIXELS, ids=lambda image: str(image.shape))
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 1.7, 2.0, 10.0])
def test_sharpen_is_its_formula_rounded_once(factor, image):
    """Noise has the largest differences between neighbours."""
    exact = np.clip(factor * image + (1 - factor) * smooth(image), 0, 255)

    result = run_on_pixels([augment.Sharpen(factor=(factor, factor))], image)

    assert np.abs(result - exact).max() <= SHARPEN_TOLERANCE


def test_sharpen_is_within_one_of_pillow_up_to_twice_as_sharp():
    """Pillow rounds the mean before it mixes, so beyond that its error grows with the factor."""
    pytest.importorskip("PIL")
    from PIL import Image, ImageEnhance  # noqa: PLC0415  only if it is there

    for factor in (0.0, 0.1, 0.5, 1.0, 1.9, 2.0):
        mine = run_on_pixels([augment.Sharpen(factor=(factor, factor))], NOISE).astype(int)
        theirs = np.array(ImageEnhance.Sharpness(Image.fromarray(NOISE)).enhance(factor))
        assert np.abs(mine - theirs).max() <= 1


def blurred(image, sigma):
    """Blur in float64 with weights as far as four times sigma, edges reflected."""
    reach = max(1, math.ceil(4 * sigma))
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    made = image.astype(float)
    for axis in range(2):
        # np.pad reflects as often as it takes; one pixel has nothing to be reflected
        padding = [(reach, reach) if side == axis else (0, 0) for side in range(3)]
        wide = np.pad(made, padding, mode="reflect" if made.shape[axis] > 1 else "edge")
        made = sum(
            weight * np.take(wide, range(place, place + made.shape[axis]), axis) for place, weight in enumerate(weights)
        )
    return made


@pytest.mark.parametrize("image", PIXELS, ids=lambda image: str(image.shape))
@pytest.mark.parametrize("sigma", [0.01, 0.1, 0.6, 1.3, 2.0, 9.0])
def test_blur_is_a_gaussian(sigma, image):
    """Images are smaller than the Gaussian, too."""
    result = run_on_pixels([augment.Blur(sigma=(sigma, sigma))], image)

    assert np.abs(result - blurred(image, sigma)).max() <= BLUR_TOLERANCE


def test_weights_of_a_gaussian_need_no_library():
    """The exponential is within the last bits, and weights add up whatever sigma is."""
    for number in [*np.linspace(-40, 9, 997).tolist(), -1e-300, -700.0]:
        assert exact.exponential(number) == pytest.approx(math.exp(number), rel=1e-12)
    for sigma in np.geomspace(0.01, 64, 60).tolist():
        assert tone.gaussian(sigma, 14).sum(dtype=np.int64) == 1 << 14
        for side in (1, 2, 3, 50):
            first, weights, _shift = tone.blur_taps(side, sigma)
            assert (weights.sum(axis=1, dtype=np.int64) == 1 << 14).all()
            assert (first >= 0).all()
            assert (first + weights.shape[1] <= side).all()


def test_factors_and_deviations_are_drawn_evenly():
    """The drawn number is the fraction of the way through the range; it is noted for replays."""
    pipeline = image_pipeline(
        [Decode(), Resize(size=(20, 20)), augment.Sharpen(factor=(0.5, 2)), augment.Blur(sigma=(1, 3))]
    )
    draws, seen = pipeline.note_draws(), []
    for sample in range(200):
        run(pipeline, encode(NOISE, ".png"), sample=sample)
        seen.append([draws[0]["factor"], draws[1]["sigma"]])

    (low, least), (high, most) = np.min(seen, axis=0), np.max(seen, axis=0)
    assert 0.5 <= low < 0.53
    assert 1.97 < high < 2
    assert 1 <= least < 1.04
    assert 2.96 < most < 3


def erased(step, sample, image=PLAIN):
    """Return the places that a step covers: bool [height, width]."""
    return (run_on_pixels([step], image, sample=sample) != image).any(axis=2)


def test_erase_covers_a_rectangle_of_the_drawn_area_and_proportions():
    """It lies inside the image, anywhere, and rounding moves its area by less than a row."""
    image = np.full((60, 90, 3), 90, np.uint8)
    corners, areas, aspects = [], [], []
    for sample in range(300):
        where = erased(augment.Erase(area=(0.05, 0.3), aspect=(0.5, 2.0), fill=(0,)), sample, image)
        rows, columns = np.flatnonzero(where.any(axis=1)), np.flatnonzero(where.any(axis=0))
        height, width = int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1
        assert where.sum() == height * width
        corners.append((rows[0], columns[0]))
        areas.append(where.mean())
        aspects.append(math.log(width / height))
    assert 0.04 < min(areas) < 0.07
    assert 0.27 < max(areas) < 0.32
    assert abs(np.mean(aspects)) < 0.1
    assert np.abs(aspects).max() < math.log(2.15)
    assert np.std(corners, axis=0).min() > 8


def test_erase_leaves_an_image_in_which_no_rectangle_fits():
    """All ten attempts are higher than the image."""
    strip = np.full((1, 50, 3), 9, np.uint8)

    assert not erased(augment.Erase(area=(0.9, 1.0), aspect=(0.001, 0.002), fill=(0,)), 0, strip).any()


def test_erase_may_cover_several_rectangles():
    """They are drawn one after the other."""
    image = np.full((60, 90, 3), 90, np.uint8)
    one, many = (
        np.mean([erased(augment.Erase(count=count, area=(0.05, 0.05), fill=(0,)), n, image).mean() for n in range(30)])
        for count in (1, 4)
    )

    assert 0.045 < one < 0.055
    assert 0.15 < many < 0.2


def test_the_mean_that_erases_is_that_of_imagenet():
    """It follows the order of the channels; a grey image has its grey level."""
    black, step = np.zeros((20, 20, 3), np.uint8), augment.Erase(area=(0.2, 0.3))
    data = encode(black, ".png")

    colors = {
        color: run_once([Decode(color=color), Resize(size=(20, 20)), step], data)
        .reshape(-1, channels)
        .max(axis=0)
        .tolist()
        for color, channels in (("rgb", 3), ("bgr", 3), ("gray", 1))
    }

    assert colors == {"rgb": [124, 116, 104], "bgr": [104, 116, 124], "gray": [117]}
    with pytest.raises(StepInvalid, match='fill = "mean" is for images of 1 or 3 channels'):
        effect(augment.Erase(), {"image": Column("image", shape=(4, 4, 4))})
    with pytest.raises(StepInvalid, match="2 numbers in fill"):
        effect(augment.Erase(fill=(1, 2)), {"image": Column("image", shape=(4, 4, 3))})


def test_noise_depends_on_the_place_alone():
    """A part of it is the same part of a larger one, whatever is drawn before or after."""
    whole = tone.noise(12345, Cut(0, 0, 50, 60), 3)

    assert np.array_equal(tone.noise(12345, Cut(7, 11, 20, 30), 3), whole[7:27, 11:41])
    assert np.array_equal(tone.noise(12345, Cut(7, 11, 20, 30), 1), whole[7:27, 11:41, :1])
    assert (tone.noise(12346, Cut(0, 0, 50, 60), 3) != whole).mean() > 0.99
    assert tone.noise((1 << 53) - 1, Cut(0, 0, 1, 1), 4).shape == (1, 1, 4)


def test_noise_is_even_and_has_no_pattern():
    """All levels are as frequent; neighbours and channels have nothing to do with each other."""
    found = tone.noise(1, Cut(0, 0, 400, 400), 3).astype(float)

    counts = np.bincount(found.astype(int).ravel(), minlength=256)
    expected = found.size / 256
    # 255 degrees of freedom: beyond 5 sigma
    assert ((counts - expected) ** 2 / expected).sum() < 360
    centred = found - 127.5
    for other in (centred[1:], centred[:, 1:], centred[..., [1, 2, 0]]):
        cut = centred[: other.shape[0], : other.shape[1]]
        assert abs((cut * other).mean() / centred.var()) < 0.01


@NEEDS_EXTENSION
@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 90)),
    channels=st.integers(1, 4),
    factor=st.floats(0, 10),
    sigma=st.floats(0.01, 5),
    step=st.tuples(st.sampled_from([1, 2, -1]), st.sampled_from([1, -1])),
    is_black_and_white=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_the_extension_makes_the_pixels_of_numpy(size, channels, factor, sigma, step, is_black_and_white, seed):
    """Images are parts of a larger one, with rows and pixels in any order; nothing else changes."""
    random = np.random.default_rng(seed)
    height, width = size
    whole = random.integers(0, 256, (2 * height + 2, width + 3, channels), np.uint8)
    whole = (whole // 128 * 255).astype(np.uint8) if is_black_and_white else whole
    pixels = whole[1 : 2 * height + 1][:: step[0]][:height, 2 : 2 + width][:, :: step[1]]

    def make():
        around = np.full((height + 2, width + 2, channels), 7, np.uint8)
        made = [tone.level_counts(pixels)]
        for change, number in ((tone.sharpened, factor), (tone.blurred, sigma)):
            into = around[1:-1, 1:-1]
            made.append(change(pixels, number, into).copy())
            into[...] = 7
            assert (around == 7).all(), "it wrote beside the target"
        return made

    by_extension = make()
    try:
        resample.IS_BUILT = False
        by_numpy = make()
    finally:
        resample.IS_BUILT = True
    for one, other in zip(by_extension, by_numpy, strict=True):
        assert np.array_equal(one, other)


def test_ranges_that_go_downwards_are_refused():
    """Each range of these steps has its smaller number first."""
    for make in (
        lambda: augment.Sharpen(factor=(2, 1)),
        lambda: augment.Blur(sigma=(2, 1)),
        lambda: augment.Erase(area=(0.3, 0.1)),
        lambda: augment.Erase(aspect=(3, 1)),
    ):
        with pytest.raises(ValueError, match="goes downwards"):
            make()
