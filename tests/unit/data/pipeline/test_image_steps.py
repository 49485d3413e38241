"""The steps on images, checked against float64 references written from their descriptions."""

from hashlib import sha256
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.pipeline.effects import effect
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.image.stages import ImageStage
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.stages import Timings
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.images import encode, jpeg, photo, png_with_exif, stored_as
from support.pipelines import image_pipeline, run_on_pixels, run_once

NOISE = np.random.default_rng(0).integers(0, 256, (31, 44, 3), np.uint8)
REC_601 = np.array([0.299, 0.587, 0.114])
ROUNDED = 0.5
GREY_TOLERANCE = ROUNDED + 0.005
WARP_TOLERANCE = 0.13
"""Positions are rounded to 1/2048 of a pixel in each direction."""


def draws(count, sample=0):
    """Return the first random numbers that a sample draws."""
    random = SampleRandom(0)
    random.start(0, sample, 0)
    return [random.random() for _ in range(count)]


# --- geometry -------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 4, 40])
@pytest.mark.parametrize("size", [(20, 30), (31, 44), (36, 20), (60, 70)])
def test_a_random_crop_is_a_part_of_the_padded_image(size, padding):
    """A random crop equals padding, then a slice at the drawn row and column.

    An image that is smaller than the crop is centred in the fill.
    """
    height, width = NOISE.shape[:2]
    for sample in range(30):
        row, column = draws(2, sample=sample)
        padded = np.full((height + 2 * padding, width + 2 * padding, 3), (9, 8, 7), np.uint8)
        padded[padding : padding + height, padding : padding + width] = NOISE
        missing = [max(0, length - have) for length, have in zip(size, padded.shape[:2], strict=True)]
        whole = np.full((padded.shape[0] + missing[0], padded.shape[1] + missing[1], 3), (9, 8, 7), np.uint8)
        above, before = missing[0] // 2, missing[1] // 2
        whole[above : above + padded.shape[0], before : before + padded.shape[1]] = padded
        top = int((whole.shape[0] - size[0] + 1) * row)
        left = int((whole.shape[1] - size[1] + 1) * column)

        result = run_on_pixels([op.RandomCrop(size=size, padding=padding, fill=(9, 8, 7))], NOISE, sample=sample)

        assert np.array_equal(result, whole[top : top + size[0], left : left + size[1]])


def test_a_crop_beside_the_image_is_all_fill():
    """A crop that lies wholly in the padding shows only the fill and nothing of the image."""
    white = np.full((4, 4, 3), 255, np.uint8)

    crops = [run_on_pixels([op.RandomCrop(size=(5, 5), padding=30, fill=(1,))], white, sample=n) for n in range(60)]

    assert any((crop == 1).all() for crop in crops)
    assert any((crop == 255).any() for crop in crops)


@pytest.mark.parametrize(
    ("step", "above", "left", "size"),
    [
        (op.Pad(border=(1, 2, 3, 4), fill=(5,)), 1, 3, (34, 51)),
        (op.Pad(border=(0, 0, 0, 0), fill=(5,)), 0, 0, (31, 44)),
        (op.Pad(size=(40, 47), fill=(5,)), 4, 1, (40, 47)),
        (op.Pad(size=(31, 60), fill=(5,)), 0, 8, (31, 60)),
        (op.Pad(size=(40, 47), place="top_left", fill=(5,)), 0, 0, (40, 47)),
        (op.Pad(size=(31, 44)), 0, 0, (31, 44)),
    ],
)
def test_pad_puts_the_image_into_its_fill(step, above, left, size):
    """The image is at its exact place in the fill, and the result has the announced size."""
    expected = np.full((*size, 3), step.fill[0], np.uint8)
    expected[above : above + 31, left : left + 44] = NOISE

    assert np.array_equal(run_on_pixels([step], NOISE), expected)


def test_a_fill_may_have_a_number_for_each_channel():
    """A fill with several numbers gives one to each channel, in the order of the channels."""
    result = run_on_pixels([op.Pad(border=(1, 0, 0, 0), fill=(1, 2, 3))], NOISE)

    assert (result[0] == (1, 2, 3)).all()


def test_an_image_that_pad_cannot_hold_is_a_bad_sample():
    """An image too large for "pad", or a border too large for memory, fails with both sizes."""
    with pytest.raises(SampleUndecodable, match='44 x 31 pixels do not fit into the 50 x 30 of "pad"'):
        run_once([op.Decode(), op.Pad(size=(30, 50))], encode(NOISE, ".png"))
    with pytest.raises(SampleUndecodable, match="would be padded to 44 x 16415, more than the 5000 pixels"):
        run_once(
            [op.Decode(max_pixels=5000), op.Pad(border=(16384, 0, 0, 0)), op.CenterCrop(size=(2, 2))],
            encode(NOISE, ".png"),
        )


@pytest.mark.parametrize("count", range(4))
def test_quarter_turns_are_counter_clockwise(count):
    """Quarter turns are exact and turn in the same direction as numpy's rot90."""
    assert np.array_equal(run_on_pixels([op.Rotate(quarter_turns=(count,))], NOISE), np.rot90(NOISE, count))


def test_quarter_turns_are_drawn_from_the_list():
    """Each angle of the list is equally likely; a list of one angle draws no random number."""
    square = NOISE[:31, :31]
    turned = {count: np.rot90(square, count).tobytes() for count in range(4)}
    step = op.Rotate(quarter_turns=(0, 1, 3))

    seen = [run_on_pixels([step], square, sample=n).tobytes() for n in range(300)]

    counts = [seen.count(turned[count]) for count in (0, 1, 3)]
    assert sum(counts) == 300
    assert min(counts) > 70
    flip = op.RandomFlip()
    for sample in range(8):
        alone = run_on_pixels([flip], square, sample=sample)
        behind = run_on_pixels([op.Rotate(quarter_turns=(2,)), flip], square, sample=sample)
        assert np.array_equal(behind, np.rot90(alone, 2))


def rotated(image, degrees, method, fill):
    """Rotate about the middle, counter-clockwise, in float64.

    Each new pixel is taken from the place where its centre was.
    """
    height, width = image.shape[:2]
    cosine, sine = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    rows, columns = np.mgrid[:height, :width]
    down, across = rows - (height - 1) / 2, columns - (width - 1) / 2
    x = across * cosine - down * sine + (width - 1) / 2
    y = across * sine + down * cosine + (height - 1) / 2

    def pixel(row, column):
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        found = image[np.clip(row, 0, height - 1), np.clip(column, 0, width - 1)].astype(float)
        return np.where(inside[..., np.newaxis], found, np.array(fill, float))

    if method == "nearest":
        return pixel(np.floor(y + 0.5).astype(int), np.floor(x + 0.5).astype(int))
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    lower, right = (y - top)[..., np.newaxis], (x - left)[..., np.newaxis]
    upper_row = pixel(top, left) * (1 - right) + pixel(top, left + 1) * right
    lower_row = pixel(top + 1, left) * (1 - right) + pixel(top + 1, left + 1) * right
    return upper_row * (1 - lower) + lower_row * lower


@pytest.mark.parametrize("degrees", [-180.0, -33.0, -5.5, 0.0, 0.25, 7.3, 45.0, 179.0])
def test_a_small_angle_is_what_its_description_says(degrees):
    """On noise, "nearest" takes the same pixels and "linear" is within one of the reference."""
    linear = op.Rotate(degrees=(degrees, degrees), fill=(50, 100, 200))
    nearest = op.Rotate(degrees=(degrees, degrees), interpolation="nearest", fill=(50, 100, 200))

    difference = np.abs(run_on_pixels([linear], NOISE) - rotated(NOISE, degrees, "linear", linear.fill))
    assert difference.max() <= ROUNDED + WARP_TOLERANCE
    assert np.array_equal(run_on_pixels([nearest], NOISE), rotated(NOISE, degrees, "nearest", linear.fill))


def test_angles_are_drawn_evenly_from_their_range():
    """The drawn number is the fraction of the way from the smallest angle to the largest."""
    for sample in range(5):
        degrees = -20 + 50 * draws(1, sample=sample)[0]

        result = run_on_pixels([op.Rotate(degrees=(-20, 30))], NOISE, sample=sample)

        assert np.abs(result - rotated(NOISE, degrees, "linear", (0,))).max() <= ROUNDED + WARP_TOLERANCE


def test_an_image_too_wide_to_be_rotated_is_a_bad_sample():
    """An image that is too wide for cv2 is a bad sample, not an error inside cv2."""
    strip = np.zeros((1, 40_000, 3), np.uint8)

    with pytest.raises(SampleUndecodable, match="40000 x 1 pixels cannot be rotated"):
        run_on_pixels([op.Rotate(degrees=(1, 1))], strip)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    "steps",
    [
        [op.RandomCrop(size=(40, 50), padding=9, fill=(3, 4, 5))],
        [op.Rotate(quarter_turns=(1,)), op.RandomCrop(size=(50, 20))],
        [
            op.RandomFlip(direction="both"),
            op.Rotate(quarter_turns=(0, 3)),
            op.Pad(border=(1, 2, 3, 4)),
            op.CenterCrop(size=(30, 50)),
        ],
        [op.Pad(size=(90, 90), place="top_left", fill=(9,)), op.Rotate(quarter_turns=(0, 1, 2, 3))],
        [
            op.RandomFlip(),
            op.Cutout(size=(9, 9)),
            op.Pad(size=(90, 90), fill=(9,)),
            op.RandomFlip(direction="vertical"),
        ],
    ],
    ids=["random_crop", "turn", "many", "pad", "cutout between flips"],
)
def test_new_geometry_sees_the_upright_image_however_it_is_stored(steps, orientation):
    """For the turns of every sample, the pixels equal those of the image stored upright."""
    image = photo(60, 80)
    turned = png_with_exif(encode(stored_as(image, orientation), ".png"), orientation)
    for sample in range(4):
        one = run_once([op.Decode(), *steps], turned, sample=sample)
        other = run_once([op.Decode(), *steps], encode(image, ".png"), sample=sample)
        assert np.array_equal(one, other)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_small_angle_turns_the_upright_image(orientation):
    """The step turns the opposite way where the image is stored mirrored.

    The results agree up to the rounding of the interpolation.
    """
    image = photo(60, 80)
    turned = png_with_exif(encode(stored_as(image, orientation), ".png"), orientation)
    steps = [op.Decode(), op.RandomFlip(), op.Rotate(degrees=(20, 20)), op.Resize(size=(60, 80))]
    for sample in range(3):
        difference = run_once(steps, turned, sample=sample) - run_once(
            steps, encode(image, ".png"), sample=sample
        ).astype(float)
        assert np.abs(difference).max() <= 1


def test_flips_of_both_axes_draw_left_and_right_first():
    """Each axis is flipped independently, half of the time; left and right is drawn first."""
    for sample in range(16):
        horizontal, vertical = (number < 0.5 for number in draws(2, sample=sample))
        expected = NOISE[:: -1 if vertical else 1, :: -1 if horizontal else 1]

        assert np.array_equal(run_on_pixels([op.RandomFlip(direction="both")], NOISE, sample=sample), expected)


# --- pixels ---------------------------------------------------------------------------------------


def grey_of(image):
    """Return the grey value by the weights of Rec. 601."""
    return image.astype(float) @ REC_601


@pytest.mark.parametrize("channels", [1, 3])
def test_gray_is_the_weighted_sum(channels):
    """Grey is the rounded weighted sum, in one channel or in three equal ones."""
    result = run_on_pixels([op.Gray(channels=channels)], NOISE)

    assert np.abs(result - grey_of(NOISE)[..., np.newaxis]).max() <= GREY_TOLERANCE
    assert result.shape == (31, 44, channels)


def test_gray_knows_blue_green_red():
    """The weights belong to the colours, not to the places of the channels."""
    data = encode(NOISE, ".png")
    crop = op.CenterCrop(size=(31, 44))

    assert np.array_equal(
        run_once([op.Decode(color="bgr"), crop, op.Gray()], data),
        run_once([op.Decode(color="rgb"), crop, op.Gray()], data),
    )
    jitter = op.ColorJitter(saturation=0.9, hue=0.4)
    swapped = run_once([op.Decode(color="bgr"), crop, jitter], data)[..., ::-1].astype(int)
    assert np.abs(swapped - run_once([op.Decode(), crop, jitter], data)).max() <= 1


def test_gray_of_gray_changes_only_the_number_of_channels():
    """A grey image goes from one channel to three and back without other changes."""
    grey = NOISE[..., :1]

    assert np.array_equal(run_on_pixels([op.Gray(channels=1)], grey), grey)
    assert np.array_equal(run_on_pixels([op.Gray()], grey), np.repeat(grey, 3, axis=2))
    assert np.array_equal(run_on_pixels([op.Gray(), op.ColorJitter(), op.Gray(channels=1)], grey), grey)
    assert np.array_equal(
        run_on_pixels([op.Gray(channels=1), op.Gray(), op.Gray(channels=1), op.Gray()], grey)[..., :1], grey
    )


def jittered(image, step, numbers):
    """Change an image as ``color_jitter`` is described, in float64, rounding after each change."""
    strengths = [step.brightness, step.contrast, step.saturation, step.hue]
    taken = [place for place, strength in enumerate(strengths) if strength]
    orders = list(permutations(taken))
    order = orders[int(len(orders) * numbers[0])]
    result = image.astype(float)
    for place in order:
        strength, number = strengths[place], numbers[1 + taken.index(place)]
        low = -strength if place == 3 else max(0, 1 - strength)
        high = strength if place == 3 else 1 + strength
        factor = low + (high - low) * number
        result = np.clip(np.rint(CHANGES[place](result, factor)), 0, 255)
    return result


def shifted_hue(image, turns):
    """Shift the hue, by the formulas that define HSV."""
    red, green, blue = np.moveaxis(image, -1, 0)
    value, least = image.max(-1), image.min(-1)
    chroma = value - least
    safe = np.where(chroma == 0, 1, chroma)
    sector = np.select(
        [chroma == 0, value == red, value == green],
        [0, (green - blue) / safe, 2 + (blue - red) / safe],
        4 + (red - green) / safe,
    )
    hue = (sector + 6 * turns) % 6
    parts = [(number + hue) % 6 for number in (5, 3, 1)]
    return np.stack([value - chroma * np.clip(np.minimum(part, 4 - part), 0, 1) for part in parts], axis=-1)


def grey_levels(image):
    """Return the levels that the step "gray" gives; that step has a test of its own."""
    return run_on_pixels([op.Gray(channels=1)], image.astype(np.uint8)).astype(float)


CHANGES = [
    lambda image, factor: factor * image,
    lambda image, factor: factor * image + (1 - factor) * grey_levels(image).mean(),
    lambda image, factor: factor * image + (1 - factor) * grey_levels(image),
    shifted_hue,
]


@pytest.mark.parametrize(
    "step",
    [
        op.ColorJitter(brightness=0.4),
        op.ColorJitter(contrast=0.4),
        op.ColorJitter(saturation=0.9),
        op.ColorJitter(saturation=5),
        op.ColorJitter(hue=0.5),
        op.ColorJitter(brightness=3, contrast=3),
    ],
    ids=str,
)
def test_color_jitter_makes_each_change_as_described(step):
    """Results are within one of the reference, and at most half of all numbers differ from it."""
    for sample in range(12):
        expected = jittered(NOISE, step, draws(5, sample=sample))

        difference = np.abs(run_on_pixels([step], NOISE, sample=sample) - expected)

        assert difference.max() <= 1
        assert (difference > 0).mean() < 0.01


def test_color_jitter_changes_in_the_order_that_is_drawn():
    """All four changes run in the drawn order: each later factor multiplies a difference of one."""
    step = op.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    for sample in range(40):
        expected = jittered(NOISE, step, draws(5, sample=sample))

        difference = np.abs(run_on_pixels([step], NOISE, sample=sample) - expected)

        assert difference.max() <= 4
        assert (difference > 1).mean() < 0.01


def test_color_jitter_of_one_channel_has_brightness_and_contrast_alone():
    """For one channel the step changes only brightness and contrast, and draws as many numbers."""
    step = op.ColorJitter(brightness=0.5, saturation=0.5, hue=0.5)
    grey = NOISE[..., 0]
    for sample in range(6):
        numbers = draws(4, sample=sample)
        expected = np.rint((0.5 + numbers[1]) * grey).clip(0, 255)

        assert np.array_equal(run_on_pixels([step], grey, sample=sample)[..., 0], expected)


def test_cutout_covers_rectangles_around_the_drawn_middles():
    """Each rectangle draws its row, then its column; all other pixels stay unchanged."""
    step = op.Cutout(holes=3, size=(6, 9), fill=(1, 2, 3))
    for sample in range(20):
        expected = NOISE.copy()
        numbers = draws(6, sample=sample)
        for row, column in zip(numbers[::2], numbers[1::2], strict=True):
            top, left = int(31 * row) - 3, int(44 * column) - 4
            expected[max(top, 0) : top + 6, max(left, 0) : left + 9] = step.fill

        assert np.array_equal(run_on_pixels([step], NOISE, sample=sample), expected)


def test_subtract_mean_rounds_each_number_once():
    """The result equals the reference to the last bit."""
    step = op.SubtractMean(mean=(1.5, 100.25, 200), scale=1 / 58)
    expected = ((NOISE - np.array(step.mean)) * step.scale).astype(np.float32)

    assert np.array_equal(run_on_pixels([step], NOISE), expected)
    assert np.array_equal(run_on_pixels([step, op.Layout()], NOISE), expected.transpose(2, 0, 1))
    default = run_on_pixels([op.SubtractMean()], NOISE)
    assert np.array_equal(default, (NOISE - np.array([123.68, 116.779, 103.938])).astype(np.float32))


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_to_gives_type_and_order_at_once(dtype, scale, layout, channels):
    """Type and order are exact to the last bit; values of uint8 are never scaled."""
    image = np.concatenate([NOISE, NOISE[..., :1]], axis=2)[..., :channels]
    expected = (image / 255 if scale and dtype != "uint8" else image).astype(dtype)

    result = run_on_pixels([op.To(dtype=dtype, scale=scale, layout=layout)], image)

    assert result.dtype == dtype
    assert np.array_equal(result, expected.transpose(2, 0, 1) if layout == "nchw" else expected)


# --- all together ---------------------------------------------------------------------------------


def test_an_array_without_pixels_is_a_bad_sample():
    """A source may give arrays of any size, so an array with a side of 0 must be a bad sample."""
    columns = {"image": Column("image", shape=(None, None, 3))}
    stage = ImageStage([op.RandomFlip()], columns, columns, frozenset(), Timings())

    with pytest.raises(SampleUndecodable, match="an image without pixels: 5 x 0"):
        stage({"image": np.empty((0, 5, 3), np.uint8)}, SampleRandom(0), {})


def test_steps_happen_where_they_are_written():
    """Steps on colours run before or after a crop, as written.

    So pixels that are cropped or padded count for the mean or not, depending on the order.
    """
    dark_outside = np.zeros((30, 30, 3), np.uint8)
    dark_outside[10:20, 10:20] = NOISE[:10, :10]
    crop = op.CenterCrop(size=(10, 10))
    contrast = op.ColorJitter(contrast=0.9)
    numbers = draws(2)

    before = run_on_pixels([contrast, crop], dark_outside)
    after = run_on_pixels([crop, contrast], dark_outside)

    assert np.array_equal(before, jittered(dark_outside, contrast, numbers)[10:20, 10:20])
    assert np.array_equal(after, jittered(dark_outside[10:20, 10:20], contrast, numbers))
    assert not np.array_equal(before, after)


def test_holes_are_turned_with_the_image_that_they_were_cut_into():
    """A hole, a pad, a turn and another hole each apply in their place in the pipeline."""
    steps = [
        op.Cutout(size=(4, 4), fill=(255,)),
        op.RandomFlip(),
        op.Pad(border=(2, 3, 4, 5), fill=(9,)),
        op.Cutout(size=(3, 3)),
    ]
    numbers = draws(5, sample=4)
    expected = run_on_pixels([steps[0]], NOISE, sample=4)
    expected = expected[:, ::-1] if numbers[2] < 0.5 else expected
    expected = np.pad(expected, ((2, 3), (4, 5), (0, 0)), constant_values=9)
    top, left = int(36 * numbers[3]) - 1, int(53 * numbers[4]) - 1
    expected[max(top, 0) : top + 3, max(left, 0) : left + 3] = 0

    assert np.array_equal(run_on_pixels(steps, NOISE, sample=4), expected)


def test_max_pixels_counts_for_every_stage():
    """The limit also applies to geometry behind steps on pixels."""
    steps = [op.Decode(max_pixels=5000), op.Gray(), op.Resize(shorter_side=70), op.CenterCrop(size=(9, 9))]

    with pytest.raises(SampleUndecodable, match="would be resized to 99 x 70, more than the 5000 pixels"):
        run_once(steps, encode(NOISE, ".png"))


def test_the_scale_of_decoding_is_chosen_for_what_comes_next():
    """A step on pixels sees the full image even if a resize follows it."""
    data = jpeg(photo(300, 400))
    steps = [op.ColorJitter(contrast=0.5), op.Resize(size=(30, 40))]

    assert np.array_equal(run_once([op.Decode(), *steps], data), run_once([op.Decode(scale="off"), *steps], data))


EVERYTHING = [
    op.Decode(),
    op.RandomResizedCrop(size=(40, 44)),
    op.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    op.RandomCrop(size=(36, 36), padding=4, fill=(124, 116, 104)),
    op.RandomFlip(direction="both"),
    op.Rotate(quarter_turns=(0, 1, 2, 3)),
    op.Rotate(degrees=(-15, 15)),
    op.Cutout(holes=2, size=(6, 6), fill=(127,)),
    op.Pad(size=(40, 40), fill=(1, 2, 3)),
]
GOLDEN = "70c8f06dcc8278f1"
GOLDEN_WITH_SMALL_ANGLES = "47c5a360c518222e"


def test_the_numbers_of_a_sample_never_change():
    """The numbers (seed, epoch, sample) determine an image for ever.

    A change of this hash changes the data of every training that runs already.
    """
    without_angles = [step for step in EVERYTHING if step.op != "rotate" or step.degrees is None]

    assert hash_of(without_angles) == GOLDEN
    assert hash_of(EVERYTHING) == GOLDEN_WITH_SMALL_ANGLES


def hash_of(steps):
    """Return the hash of what the steps make of a file for four places, in each type."""
    data = encode(NOISE, ".png")
    seen = sha256()
    for seed, epoch, sample in [(0, 0, 0), (0, 0, 1), (0, 3, 0), (7, 0, 0)]:
        for end in (
            [],
            [op.Gray(), op.To(dtype="float16")],
            [op.SubtractMean(scale=0.5)],
            [op.Normalize(), op.Layout()],
        ):
            seen.update(run_once([*steps, *end], data, epoch, sample, seed).tobytes())
    return seen.hexdigest()[:16]


def test_a_pipeline_of_everything_gives_the_same_bytes_whatever_came_before():
    """Every step reuses its memory, and no bytes of the sample before remain in the result."""
    used = image_pipeline(EVERYTHING)
    row = {"image": np.empty((40, 40, 3), np.uint8)}
    files = [encode(photo(48, 56), ".png"), jpeg(photo(300, 200)), encode(photo(9, 7, seed=2), ".png")]
    for sample in range(9):
        data = files[sample % 3]
        used.run({"image": memoryview(data)}, 1, sample, 0, row)
        assert np.array_equal(row["image"], run_once(EVERYTHING, data, 1, sample))


def test_everything_ends_in_each_type_and_order():
    """The last stage writes or converts into the row; each type and order has the same pixels."""
    data = encode(photo(48, 56), ".png")
    pixels = run_once(EVERYTHING, data, sample=5)

    for dtype in ("uint8", "float32", "float16"):
        for layout in ("nhwc", "nchw"):
            made = run_once([*EVERYTHING, op.To(dtype=dtype, scale=False, layout=layout)], data, sample=5)
            assert np.array_equal(made.transpose(1, 2, 0) if layout == "nchw" else made, pixels)
    normal = run_once([*EVERYTHING, op.Normalize()], data, sample=5)
    assert np.array_equal(normal, run_on_pixels([op.Normalize()], pixels))


STEPS = [
    op.CenterCrop(size=(22, 18)),
    op.RandomCrop(size=(17, 23), padding=3, fill=(200,)),
    op.RandomFlip(direction="both"),
    op.Pad(border=(1, 2, 0, 3), fill=(7,)),
    op.Rotate(quarter_turns=(0, 1, 2, 3)),
    op.ColorJitter(brightness=0.5, contrast=0.5, saturation=0.5, hue=0.2),
    op.Cutout(size=(5, 4), fill=(100,)),
    op.Gray(),
]


@given(st.lists(st.sampled_from(STEPS), max_size=7), st.integers(0, 50))
def test_any_steps_give_what_each_gives_by_itself(steps, sample):
    """One pipeline of many steps equals a chain of stages with one step each, to the bit."""
    steps = [*steps, op.CenterCrop(size=(16, 16))]
    random = SampleRandom(0)
    random.start(0, sample, 0)
    before = {"image": Column("image", shape=(None, None, 3))}
    values = {"image": NOISE}
    for step in steps:
        stage = ImageStage([step], before, effect(step, before), frozenset(), Timings())
        stage(values, random, {})
        values["image"] = values["image"].copy()

    assert np.array_equal(run_on_pixels(steps, NOISE, sample=sample), values["image"])
