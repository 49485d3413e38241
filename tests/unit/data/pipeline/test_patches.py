"""Images of any size as patches, and budgets of them: how they are cut, packed and measured."""

from fractions import Fraction

import numpy as np
import pytest

from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import Cast
from batchd.data.pipeline.image.options import Decode, Layout, Normalize, Resize
from batchd.data.pipeline.sample_fields import columns_after, sample_fields
from batchd.data.pipeline.shapes.options import Pack, Patches
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.worker.tasks import patches_of
from batchd_wire.fields import ITEM_BYTES, Field
from support.images import encode, photo
from support.steps import check_steps

IMAGE = Column("image", "encoded")
PATCHES = Patches(size=4)
PACK = Pack(field="image", length=100, documents=6, too_long="drop")


def made(steps, pixels):
    pipeline = Pipeline([IMAGE], steps, 0, has_rows=False)
    return pipeline.make({"image": memoryview(encode(pixels, ".png"))}, 0, 0, 0)


def test_patches_go_row_by_row_through_the_image():
    """Each has its pixels row by row. The rest at the right and at the bottom is cut off."""
    pixels = photo(10, 15)

    values = made([Decode(), PATCHES], pixels)

    assert values["image_grid"].tolist() == [2, 3]
    expected = [
        pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].ravel() for row in range(2) for column in range(3)
    ]
    assert np.array_equal(values["image"], expected)


def test_patches_of_one_pixel_are_the_pixels():
    """The grid is the shape of the image."""
    pixels = photo(5, 7)

    values = made([Decode(), Patches(size=1)], pixels)

    assert np.array_equal(values["image"].reshape(*values["image_grid"], 3), pixels)


def test_images_are_finished_before_they_are_cut():
    """Numbers may be floats, and an image of one size has so many patches in each sample."""
    steps = [Decode(), Resize(size=(8, 12)), Normalize(), PATCHES]

    columns = columns_after([IMAGE], steps)

    assert columns["image"].text == "float32[6,48]"
    assert made(steps, photo(30, 20))["image"].shape == (6, 48)


def test_the_fields_of_a_batch_with_a_budget():
    """One row is the budget; each image has its grid, its length and its number."""
    fields = sample_fields([IMAGE, Column("label", dtype="int64")], [Decode(), PATCHES, PACK], "fail")
    without = sample_fields([IMAGE], [Decode(), PATCHES, Pack(**_options(PACK), ids=False)], "fail")

    assert fields == (
        Field("image", "uint8", (100, 48)),
        Field("image_grid", "int32", (6, 2)),
        Field("label", "int64", (6,)),
        Field("segment_ids", "int32", (100,)),
        Field("position_ids", "int32", (100,)),
        Field("lengths", "int32", (6,)),
        Field("index", "int64", (6,)),
    )
    assert [field.name for field in without] == ["image", "image_grid", "lengths", "index"]


@pytest.mark.parametrize(("size", "ids"), [(14, True), (16, False), (1, False)])
def test_a_slot_takes_little_more_than_its_samples(size, ids):
    """With images of 256 to 1,024 patches in a budget of 16,384, it is below a hundredth."""
    pack = Pack(field="image", length=16_384, documents=64, too_long="drop", ids=ids)
    fields = sample_fields([IMAGE], [Decode(), Patches(size=size), pack], "fail")

    row_bytes = sum(int(np.prod(field.shape)) * ITEM_BYTES[field.dtype] for field in fields)
    assert Fraction(row_bytes, 16_384 * size * size * 3) < (1.05 if size == 1 else 1.02)


def _options(step):
    return {name: getattr(step, name) for name in ("field", "length", "documents", "too_long")}


def test_an_image_smaller_than_a_patch_is_bad():
    with pytest.raises(SampleUndecodable, match=r"'image' is uint8\[3, 9, 3\], smaller than a patch of 4 x 4"):
        made([Decode(), PATCHES], photo(3, 9))


@pytest.mark.parametrize(
    ("columns", "steps", "problem"),
    [
        ([IMAGE], [PATCHES], "'image' is image; the first step must be { op = \"decode\" }"),
        ([IMAGE], [Decode(), Layout(), PATCHES], '"patches" needs an image [height, width, channels]'),
        ([IMAGE], [Decode(), Resize(size=(3, 9)), PATCHES], "size = 4, and 'image' is uint8[3,9,3], which has none"),
        ([IMAGE, Column("image_grid")], [Decode(), PATCHES], "would make a field 'image_grid', which the sample has"),
        (
            [IMAGE],
            [Decode(), PATCHES, Pack(field="image", length=9)],
            'too_long = "split", which would cut the patches of an image; "drop" leaves',
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(columns, steps, problem):
    found = check_steps(columns, steps)

    assert problem in found[0]


def test_a_row_without_ids_needs_fewer_documents_than_elements():
    with pytest.raises(ValueError, match="ids = false needs documents below length = 4"):
        Pack(field="image", length=4, documents=4, ids=False)


@pytest.mark.parametrize(
    ("steps", "is_planned"),
    [
        ([Decode(), PATCHES], True),
        ([Decode(), Resize(shorter_side=20), Normalize(), PATCHES], True),
        ([Decode(), Cast(dtype="int32"), PATCHES], True),
        ([Decode(), Cast(dtype="int32"), Resize(shorter_side=20), PATCHES], False),
        ([Decode(), Normalize(), Call(function="a:b"), PATCHES], False),
        ([PATCHES], False),
        ([Decode()], False),
        ([], False),
    ],
)
def test_a_header_is_enough_where_steps_are_planned_from_it(steps, is_planned):
    """Otherwise each sample is made once, to find its length."""
    assert (patches_of(steps, "image") is not None) == is_planned
