"""Images cut to the size of their bucket: which part, which size, and what follows them."""

import numpy as np
import pytest

from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.sample_fields import StepCheck, columns_after, sample_fields
from batchd.data.pipeline.shapes.options import PadBatch
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd_wire.position import SIZE_BIT
from support.images import encode, jpeg, jpeg_with_exif, photo

FILE = [Column("image", "encoded")]
SIZES = ((48, 24), (32, 32), (24, 48))
CROP = op.CropToBucket(sizes=SIZES)


def made(steps, data, size, sample=0, draws=None, columns=FILE, **values):
    """Run a pipeline on one file into the row of a batch of images of this size."""
    pipeline = Pipeline(columns, steps, 0)
    if draws is not None:
        draws.append(pipeline.note_draws())
    row = {}
    for field in sample_fields(columns, steps, "substitute"):
        shape = field.shape if field.varying is None else field.of_room("", size).shape
        row[field.name] = np.full(shape, 77, field.dtype)
    pipeline.run({"image": memoryview(data), **values}, 0, sample, 0, row)
    return row


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("height", "width"), [(90, 130), (130, 90), (100, 100), (40, 200)])
def test_the_middle_is_scaled_until_it_covers_the_size(height, width, size, orientation):
    """The part has the proportions of the size to the pixel, whatever those of the image are."""
    image = photo(height, width, seed=3)
    high, wide = size
    if width * high >= height * wide:
        part_height, part_width = height, int(height * wide / high + 0.5)
    else:
        part_height, part_width = int(width * high / wide + 0.5), width
    top, left = (height - part_height) // 2, (width - part_width) // 2
    part = encode(np.ascontiguousarray(image[top : top + part_height, left : left + part_width]), ".png")
    if orientation == 1:
        whole, want = encode(image, ".png"), made([op.Decode(), op.Resize(size=size)], part, size)["image"]
        assert np.array_equal(made([op.Decode(), CROP], whole, size)["image"], want)
    turns = {1: 0, 3: 2, 6: 1, 8: 3}[orientation]
    turned = jpeg_with_exif(jpeg(np.ascontiguousarray(np.rot90(image, turns))), orientation)
    steps = [op.Decode(scale="off"), CROP]
    upright = made(steps, jpeg(image), size)["image"].astype(int)
    assert np.abs(made(steps, turned, size)["image"] - upright).mean() < 2


def test_a_random_part_lies_anywhere_and_leaves_the_size() -> None:
    """Over many samples the free axis has both ends; a step behind draws the same numbers."""
    steps = [op.Decode(), op.CropToBucket(sizes=SIZES, random=True), op.RandomFlip()]
    data, lefts, flips = encode(photo(60, 100), ".png"), set(), []
    for sample in range(200):
        draws: list[list[dict[str, object]]] = []
        made(steps, data, (32, 32), sample, draws)
        crop = draws[0][0]["crop"]
        assert (crop["top"], crop["height"], crop["width"]) == (0, 60, 60)
        lefts.add(crop["left"])
        flips.append(draws[0][1])

    assert {0, 40} <= lefts <= set(range(41))
    assert len(lefts) > 30
    others = [made([op.Decode(), CROP, op.RandomFlip()], data, (32, 32), sample, [])["image"] for sample in range(3)]
    assert len({other.tobytes() for other in others}) > 1


@pytest.mark.parametrize(
    ("height", "width", "nearest"), [(90, 50, 0), (90, 80, 1), (80, 90, 1), (50, 90, 2), (68, 95, 1), (67, 95, 2)]
)
def test_without_a_batch_the_nearest_size_is_taken(height, width, nearest):
    """So `batchd prepare` and plans have one; between 1 and 2 the bound is the root of 2."""
    pipeline = Pipeline(FILE, [op.Decode(), CROP], 0, has_rows=False)

    image = pipeline.make({"image": memoryview(encode(photo(height, width), ".png"))}, 0, 0, 0)["image"]

    assert image.shape == (*SIZES[nearest], 3)


def test_masks_boxes_and_points_follow():
    """They are cut and scaled as the image is; the mask has the size of the bucket, too."""
    columns = [
        *FILE,
        Column("mask", dtype="uint8", shape=(None, None)),
        Column("boxes", dtype="float32", shape=(None, 4)),
        Column("points", dtype="float32", shape=(None, 2)),
    ]
    steps = [
        op.Decode(),
        op.Follow(mask="mask", boxes="boxes", points="points"),
        CROP,
        op.To(),
        PadBatch(field="boxes", max_shape=(1, 4)),
        PadBatch(field="points", max_shape=(1, 2)),
    ]
    mask = np.zeros((60, 100), np.uint8)
    mask[:, 50:] = 9
    values = {"mask": mask, "boxes": np.array([[10, 0, 50, 30]], "f4"), "points": np.array([[50, 30]], "f4")}

    row = made(steps, encode(photo(60, 100), ".png"), (32, 32), columns=columns, **values)

    assert row["image"].shape == (3, 32, 32)
    assert (row["mask"] == np.where(np.arange(32) < 16, 0, 9)).all()
    assert row["boxes"].tolist() == [[0, 0, 16, 16]]
    assert row["points"].tolist() == [[16, 16]]


@pytest.mark.parametrize(
    ("steps", "shape"),
    [
        ([op.RandomFlip(), op.Gray(channels=1), op.Rotate(degrees=(-5, 5))], (48, 48, 1)),
        ([op.Normalize()], (48, 48, 3)),
        ([op.To()], (3, 48, 48)),
        ([op.Rotate(quarter_turns=(0, 2))], (48, 48, 3)),
        ([op.Resize(size=(7, 9))], (7, 9, 3)),
    ],
)
def test_later_steps_keep_the_size_or_fix_another(steps: list[StepOptions], shape):
    """On paper, images of a bucket have one size until a step gives all images one."""
    (field, _index) = sample_fields(FILE, [op.Decode(), CROP, *steps], "substitute")

    assert field.shape == shape
    assert (field.varying is None) == (shape == (7, 9, 3))


@pytest.mark.parametrize(
    "step", [op.Resize(shorter_side=8), op.Rotate(quarter_turns=(0, 1)), op.Rotate(quarter_turns=(1,))]
)
def test_a_step_that_makes_sizes_differ_again_needs_another_one(step):
    check = StepCheck(FILE)
    for place, one in enumerate([op.Decode(), CROP, step]):
        check.check_step(place, one)

    (problem,) = check.finish()
    assert "the images keep their different sizes" in problem.text


def test_nothing_is_left_to_pad():
    """Images of a batch have one size already."""
    with pytest.raises(StepInvalid, match="all images of a batch have one size"):
        columns_after(FILE, [op.Decode(), CROP, PadBatch(max_shape=(48, 48, 3))])


def test_a_function_that_changes_the_size_makes_a_bad_sample():
    """Here the size of the row's bucket is not that of the image, as behind such a function."""
    columns = [Column("image", dtype="uint8", shape=(None, None, 3), sizes=SIZES)]
    pipeline = Pipeline(columns, [], 0)

    with pytest.raises(
        SampleUndecodable, match=r"'image' is uint8\[9, 9, 3\], and those of its batch are \[32, 32, 3\]"
    ):
        pipeline.run({"image": np.zeros((9, 9, 3), np.uint8)}, 0, 0, 0, {"image": np.zeros((32, 32, 3), np.uint8)})


@pytest.mark.parametrize(
    ("drawn", "fixed"),
    [
        (op.Letterbox(sizes=SIZES), [op.Letterbox(size=size) for size in SIZES]),
        (op.Resize(sizes=SIZES), [op.Resize(size=size) for size in SIZES]),
        (
            op.Resize(shorter_sides=(20, 28, 40), max_longer_side=48),
            [op.Resize(shorter_side=side, max_longer_side=48) for side in (20, 28, 40)],
        ),
    ],
    ids=["letterbox", "sizes", "shorter_sides"],
)
def test_a_drawn_size_makes_what_that_size_alone_makes(drawn, fixed):
    """The image, its mask, boxes and points; and it draws no number, so later steps stay."""
    columns = [
        *FILE,
        Column("mask", "encoded"),
        *(Column(name, dtype="float32", shape=(None, 4)) for name in ("boxes",)),
    ]
    columns.append(Column("points", dtype="float32", shape=(None, 2)))
    values = {
        "mask": memoryview(encode(photo(90, 130, seed=4)[..., 0], ".png")),
        "boxes": np.array([[10, 20, 60, 50], [0, 0, 9, 9]], np.float32),
        "points": np.array([[10, 20]], np.float32),
    }
    file = memoryview(jpeg_with_exif(jpeg(photo(90, 130, seed=3)), 6))
    follow = op.Follow(mask="mask", boxes="boxes", points="points", annotated="upright")

    def run(step, epoch, draws=None):
        steps = [op.Decode(), follow, op.RandomFlip(), step, op.Gray(probability=0.5)]
        values["mask"] = memoryview(encode(photo(130, 90, seed=4)[..., 0], ".png"))
        pipeline = Pipeline(columns, steps, 5, has_rows=False)
        noted = pipeline.note_draws()
        made = pipeline.make({"image": file, **values}, epoch, 9, 0)
        if draws is not None:
            draws += [dict(one) for one in noted if "size" in one]
        return made

    for number, step in enumerate(fixed):
        draws = []
        made, expected = run(drawn, number << SIZE_BIT | 3, draws), run(step, 3)
        assert made.keys() == expected.keys()
        assert all(np.array_equal(made[name], expected[name]) for name in expected)
        assert draws == [{"size": [*expected["image"].shape[:2]]}]
