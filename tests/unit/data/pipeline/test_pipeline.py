"""The whole way of one sample through the pipeline.

The tests cover determinism, turns, formats of the result, and the traps of ``dst=``.
"""

import cv2
import numpy as np
import pytest

from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.image.decode import decoder_versions
from batchd.data.pipeline.image.opencv import KEPT_BYTES_MAX, Scratch, written
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.samples.columns import Column
from support.images import encode, jpeg, jpeg_with_exif, photo, png_with_exif, stored_as
from support.pipelines import image_pipeline, image_row, run, run_once

TRAIN = [op.Decode(), op.RandomResizedCrop(size=(32, 48)), op.RandomFlip()]
EVALUATE = [op.Decode(), op.Resize(shorter_side=40), op.CenterCrop(size=(32, 32))]
FLOATS = [op.Decode(), op.RandomResizedCrop(size=(32, 48)), op.RandomFlip(), op.Normalize(), op.Layout()]


def large_photo():
    """Make a JPEG large enough to be decoded at a smaller scale."""
    return jpeg(photo(300, 400, seed=5))


@pytest.mark.parametrize("steps", [TRAIN, EVALUATE, FLOATS], ids=["train", "evaluate", "floats"])
def test_the_same_position_has_the_same_bytes_whatever_came_before(steps):
    """A pipeline that has decoded odd and broken images gives the same bytes as a new one."""
    used = image_pipeline(steps, 11)
    others = [
        large_photo(),
        jpeg(photo(9, 5)),
        jpeg(photo()[..., 0]),
        jpeg_with_exif(jpeg(photo()), 6),
        encode(photo(), ".png"),
    ]
    data = jpeg(photo(90, 120, seed=1))
    expected = run_once(steps, data, epoch=2, sample=7, seed=11)

    for number, other in enumerate(others):
        run(used, other, epoch=number, sample=number)
        with pytest.raises(ValueError, match="truncated"):
            run(used, data[: len(data) // 2], epoch=2, sample=7)

        assert np.array_equal(run(used, data, epoch=2, sample=7), expected)


def test_epoch_sample_seed_and_attempt_each_give_another_image():
    """The same file gives four different images."""
    data = jpeg(photo(90, 120))
    pipeline = image_pipeline(TRAIN)

    images = [
        run(pipeline, data),
        run(pipeline, data, epoch=1),
        run(pipeline, data, sample=1),
        run(pipeline, data, attempt=1),
    ]
    images.append(run_once(TRAIN, data, seed=1))

    assert len({image.tobytes() for image in images}) == len(images)


def test_steps_without_chance_give_the_same_image_in_every_epoch():
    """The property ``is_random`` is right for these steps."""
    data = jpeg(photo(90, 120))

    assert not any(step.is_random for step in EVALUATE)
    assert np.array_equal(run_once(EVALUATE, data), run_once(EVALUATE, data, epoch=5, sample=6, seed=7))


def test_the_result_has_the_announced_type_and_shape():
    """For all layouts, types and channels, the output of the pipeline matches its fields."""
    grey = op.Normalize(mean=(0.5,), std=(0.5,))
    for steps in (
        TRAIN,
        EVALUATE,
        FLOATS,
        [op.Decode(color="gray"), *TRAIN[1:], grey],
        [op.Decode(color="gray"), *TRAIN[1:], op.Layout()],
    ):
        field = sample_fields([Column("image", "encoded")], steps, "substitute")[0]
        pipeline = image_pipeline(steps)

        assert image_row(pipeline).shape == field.shape
        assert str(image_row(pipeline).dtype) == field.dtype
        assert len(np.unique(run(pipeline, jpeg(photo())))) > 20


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("order", ["nhwc", "nchw"])
def test_normalize_rounds_each_number_once(dtype, order):
    """The result equals, to the last bit, the float64 formula rounded to the type."""
    image = photo(32, 48)
    normalize = op.Normalize(dtype=dtype)
    expected = ((image / 255 - np.array(normalize.mean)) / np.array(normalize.std)).astype(dtype)

    result = run_once([op.Decode(), op.Resize(size=(32, 48)), normalize, op.Layout(order=order)], encode(image, ".png"))

    assert np.array_equal(result, expected.transpose(2, 0, 1) if order == "nchw" else expected)


def test_channels_first_are_the_same_pixels():
    """The image is uint8, without normalize."""
    data = large_photo()

    assert np.array_equal(run_once([*TRAIN, op.Layout()], data), run_once(TRAIN, data).transpose(2, 0, 1))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    "steps",
    [
        [op.CenterCrop(size=(31, 50))],
        [op.CenterCrop(size=(90, 90))],
        [op.CenterCrop(size=(90, 31)), op.RandomFlip(probability=1)],
        [
            op.RandomFlip(probability=1, direction="vertical"),
            op.CenterCrop(size=(41, 37)),
            op.RandomFlip(probability=1),
        ],
        [op.CenterCrop(size=(51, 77)), op.CenterCrop(size=(60, 30)), op.Layout()],
    ],
    ids=["crop", "pad", "pad and flip", "flips around a crop", "crop and pad"],
)
def test_steps_see_the_upright_image_however_it_is_stored(steps, orientation):
    """Crops, padding and flips of a turned image are right to the pixel."""
    image = photo(60, 80)
    turned = png_with_exif(encode(stored_as(image, orientation), ".png"), orientation)

    assert np.array_equal(
        run_once([op.Decode(), *steps], turned), run_once([op.Decode(), *steps], encode(image, ".png"))
    )


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("steps", [TRAIN, EVALUATE, FLOATS], ids=["train", "evaluate", "floats"])
def test_resized_images_do_not_depend_on_how_they_are_stored(steps, orientation):
    """Random boxes are the same boxes.

    Resampling a turned image rounds differently, by at most 1 of 255.
    """
    image = photo(300, 400)
    turned = png_with_exif(encode(stored_as(image, orientation), ".png"), orientation)

    difference = np.abs(
        run_once(steps, turned, sample=3) - run_once(steps, encode(image, ".png"), sample=3).astype(float)
    )

    assert difference.max() <= (1 if steps is not FLOATS else 1.01 / 255 / 0.224)


def test_flips_move_every_pixel_to_its_mirror():
    """Flips in both directions, separately and together, are right."""
    image = photo(32, 48)
    base = [op.Decode(), op.Resize(size=(32, 48))]
    horizontal, vertical = op.RandomFlip(probability=1), op.RandomFlip(probability=1, direction="vertical")
    data = encode(image, ".png")

    assert np.array_equal(run_once([*base, horizontal], data), image[:, ::-1])
    assert np.array_equal(run_once([*base, vertical], data), image[::-1])
    assert np.array_equal(run_once([*base, horizontal, vertical], data), image[::-1, ::-1])


def test_a_small_image_stands_in_the_middle_of_black():
    """center_crop pads an image that is smaller than the crop."""
    image = photo(20, 30)

    result = run_once([op.Decode(), op.CenterCrop(size=(40, 40))], encode(image, ".png"))

    assert np.array_equal(result[10:30, 5:35], image)
    assert result.sum() == image.sum()


def test_scaled_decoding_shows_the_same_picture():
    """Boxes and turns are the same; smoothing differs, so pixels differ slightly."""
    data = large_photo()
    whole = [op.Decode(scale="off"), *TRAIN[1:]]

    for sample in range(12):
        difference = run_once(TRAIN, data, sample=sample).astype(int) - run_once(whole, data, sample=sample)
        assert np.abs(difference).mean() < 5


def test_scaled_decoding_is_not_used_where_it_would_blur():
    """An image that is hardly reduced is decoded whole, so ``scale`` makes no difference."""
    data = jpeg(photo(60, 90))
    steps = [op.RandomResizedCrop(size=(32, 48), scale=(0.9, 1.0))]

    assert np.array_equal(run_once([op.Decode(), *steps], data), run_once([op.Decode(scale="off"), *steps], data))


def test_rows_are_written_in_place_and_neighbours_are_left_alone():
    """Each row of a batch is written as one run of bytes, by every kind of pipeline."""
    for steps in (TRAIN, EVALUATE, FLOATS):
        pipeline = image_pipeline(steps)
        column = pipeline.columns["image"]
        batch = np.full((3, *column.fixed_shape), 5, column.dtype)

        pipeline.run({"image": memoryview(large_photo())}, 0, 0, 0, {"image": batch[1]})

        assert (batch[0] == 5).all()
        assert (batch[2] == 5).all()
        assert np.array_equal(batch[1], run_once(steps, large_photo()))


def test_a_row_of_the_wrong_shape_is_our_own_mistake():
    """The row is reported instead of being left unwritten."""
    pipeline = image_pipeline(TRAIN)

    with pytest.raises(AssertionError, match="a row of shape"):
        pipeline.run({"image": memoryview(large_photo())}, 0, 0, 0, {"image": np.empty((48, 32, 3), np.uint8)})


@pytest.mark.parametrize(
    "destination",
    [np.zeros((8, 9, 3), np.uint8), np.zeros((8, 8, 3), np.float32), np.zeros((8, 8, 4), np.uint8)],
    ids=["size", "type", "channels"],
)
def test_cv2_that_writes_elsewhere_is_noticed(destination):
    """Without an error, cv2 returns a new array instead of writing; the assertion detects that."""
    image = photo(16, 16)

    result = cv2.resize(image, (8, 8), dst=destination)

    assert not destination.any()
    assert result is not destination
    with pytest.raises(AssertionError, match="cv2 made a new array"):
        written(result, destination)


def test_cv2_writes_into_rows_of_a_batch_and_says_so():
    """For a view of one row, with one channel too, cv2 returns the array that it was given."""
    for channels in (1, 3):
        row = np.zeros((2, 8, 8, channels), np.uint8)[1]

        written(cv2.resize(photo(16, 16)[..., :channels], (8, 8), dst=row), row)

        assert row.any()


def test_scratch_memory_is_used_again_and_large_memory_is_not_kept():
    """The same place gives the same bytes, and one huge image does not enlarge a worker forever."""
    scratch = Scratch()
    small = scratch.image("place", (10, 10, 3))
    other = scratch.image("other", (10, 10, 3))

    assert scratch.image("place", (10, 10, 3)) is small
    assert np.shares_memory(scratch.image("place", (5, 10, 3)), small)
    assert not np.shares_memory(small, other)

    huge = (KEPT_BYTES_MAX // 1000 + 1, 1000, 1)
    assert not np.shares_memory(scratch.image("place", huge), scratch.image("place", huge))


def test_decoders_are_named_with_their_versions():
    """The status, and the report of a sample that kills workers, show these versions."""
    assert cv2.__version__ in decoder_versions()
    assert "simplejpeg" in decoder_versions()
