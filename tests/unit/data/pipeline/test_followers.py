"""Masks, boxes and points that follow an image, compared with the image itself.

The image's colours show where each pixel comes from.
"""

from dataclasses import replace
from struct import pack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import Cast, Rename
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.sample_fields import drawing_step
from batchd.data.pipeline.shapes.options import PadBatch
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.images import (
    encode,
    jpeg,
    jpeg_with_exif,
    palette_png,
    photo,
    png16,
    png_with,
    png_with_exif,
    stored_as,
    with_right_checksums,
)
from support.pipelines import run_fields

HEIGHT, WIDTH = 60, 80
FOLLOW = op.Follow(mask="mask", boxes="boxes", points="points", mask_fill=0)
GRID = np.stack(np.meshgrid(np.arange(2, WIDTH, 4), np.arange(2, HEIGHT, 4)), -1).reshape(-1, 2).astype(np.float32)
BOXES = np.array([[8, 8, 30, 28], [40, 5, 75, 20], [20, 30, 60, 55], [70, 50, 80, 60]], np.float32)
FINAL = op.Resize(size=(48, 52))

GEOMETRY = [
    op.Resize(size=(50, 70)),
    op.Resize(shorter_side=70),
    op.CenterCrop(size=(45, 66)),
    op.CenterCrop(size=(66, 45)),
    op.RandomCrop(size=(50, 50)),
    op.RandomCrop(size=(64, 64), padding=8),
    op.RandomResizedCrop(size=(48, 56), scale=(0.4, 1.0)),
    op.RandomFlip(probability=1),
    op.RandomFlip(direction="both"),
    op.Pad(border=(1, 5, 9, 2)),
    op.Rotate(quarter_turns=(1,)),
    op.Rotate(quarter_turns=(0, 1, 2, 3)),
    op.Rotate(degrees=(-30, 30)),
]


def where(height=HEIGHT, width=WIDTH):
    """An image whose pixels encode their places.

    Red is x, green is y, in proportion, and blue marks the image.
    """
    y, x = np.mgrid[:height, :width] + 0.5
    return np.rint(np.stack([x / width * 255, y / height * 255, np.full_like(x, 255)], axis=-1)).astype(np.uint8)


def columns_of(count, mask=True):
    """The columns of an image with all kinds of followers."""
    return [
        Column("image", "encoded"),
        Column("mask", "encoded") if mask else Column("mask", shape=(None, None)),
        Column("boxes", dtype="float32", shape=(len(BOXES), 4)),
        Column("points", dtype="float32", shape=(count, 2)),
    ]


def run_all(steps, image, mask, sample=0, **others):
    """Run steps on an image file, a mask (a file, or an array), boxes and points."""
    values = {"image": memoryview(image), "boxes": BOXES, "points": GRID, **others}
    is_file = isinstance(mask, bytes)
    values["mask"] = memoryview(mask) if is_file else mask
    return run_fields(columns_of(len(GRID), is_file), [op.Decode(), FOLLOW, *steps], values, sample)


def at(image, point):
    """Interpolate an image between its pixels.

    Returns None at its edge, and next to pixels outside of the image.
    """
    x, y = point - 0.5
    left, top = int(np.floor(x)), int(np.floor(y))
    if not (1 <= left < image.shape[1] - 2 and 1 <= top < image.shape[0] - 2):
        return None
    if image[top - 1 : top + 3, left - 1 : left + 3, 2].min() < 255:
        return None
    right, lower = x - left, y - top
    four = image[top : top + 2, left : left + 2].astype(float)
    return np.array([1 - lower, lower]) @ (np.array([1 - right, right]) @ four)


def check_points(fields, tolerance_pixels):
    """Assert that each visible point is at its place in the image; return their number."""
    levels = tolerance_pixels * np.array([255 / WIDTH, 255 / HEIGHT])
    seen = 0
    for before, after in zip(GRID, fields["points"], strict=True):
        found = at(fields["image"], after)
        if found is not None:
            seen += 1
            assert (np.abs(found[:2] - before / (WIDTH, HEIGHT) * 255) <= levels).all(), (before, after, found)
    return seen


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("step", GEOMETRY, ids=lambda step: "-".join(map(str, vars_of(step))))
def test_points_stay_on_what_they_point_at(step, orientation):
    """This holds for every step on geometry and every way to store the image.

    The error is within half a pixel of the source.
    """
    file = png_with_exif(encode(stored_as(where(), orientation), ".png"), orientation)
    mask = encode(where()[..., 2], ".png")
    for sample in range(3):
        fields = run_all([step, FINAL], file, mask, sample)

        assert check_points(fields, 0.6) > 40


def vars_of(step):
    """The options of a step, for the name of a test."""
    plain = {name: getattr(step, name) for name in step.__dataclass_fields__}
    return [plain.pop("op"), *(value for name, value in plain.items() if name in ("size", "padding", "direction"))]


SEQUENCES = st.lists(st.sampled_from(GEOMETRY), max_size=4)


@given(SEQUENCES, st.integers(1, 8), st.integers(0, 99))
def test_points_stay_at_their_places_through_any_steps(steps, orientation, sample):
    """Each resampling may round by a level of 255."""
    file = png_with_exif(encode(stored_as(where(), orientation), ".png"), orientation)

    fields = run_all([*steps, FINAL], file, where()[..., 2], sample)

    check_points(fields, 0.6 + 0.4 * len(steps))


@given(SEQUENCES, st.integers(1, 8), st.integers(0, 99), st.sampled_from([0, 1]))
def test_a_mask_shows_the_same_places_as_its_image(steps, orientation, sample, axis):
    """The mask is x or y, and is compared with the image's red or green.

    Each pixel differs by at most a few pixels of the source.
    """
    file = png_with_exif(encode(stored_as(where(), orientation), ".png"), orientation)
    coordinate = np.ascontiguousarray(np.indices((HEIGHT, WIDTH))[1 - axis], np.uint8)

    fields = run_all([*steps, FINAL], file, encode(coordinate, ".png"), sample)

    is_image = fields["image"][..., 2] == 255
    shown = fields["image"][..., axis] / 255 * (WIDTH, HEIGHT)[axis] - 0.5
    difference = np.abs(shown - fields["mask"])[is_image]
    assert np.quantile(difference, 0.99, method="lower") <= 1.5 + 0.5 * len(steps) if difference.size else True


@given(SEQUENCES, st.integers(0, 99), st.booleans())
def test_a_box_ends_at_its_object(steps, sample, is_turned):
    """A filled rectangle, changed like a mask, ends within two pixels of the box.

    A rotated box may reach further.
    """
    file = png_with_exif(encode(stored_as(where(), 6), ".png"), 6) if is_turned else encode(where(), ".png")
    for box in BOXES:
        left, top, right, bottom = box.astype(int)
        mask = np.zeros((HEIGHT, WIDTH), np.uint8)
        mask[top:bottom, left:right] = 1

        fields = run_all([*steps, FINAL], file, mask, sample, boxes=np.repeat(box[np.newaxis], len(BOXES), axis=0))

        made = fields["boxes"][0]
        rows, columns = np.nonzero(fields["mask"])
        if not len(rows):
            assert min(made[2] - made[0], made[3] - made[1]) <= 2 or any_angle(steps)
            continue
        object_edges = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        further = (object_edges - made) * (1, 1, -1, -1)
        assert (further >= -2).all()
        assert (further <= 2).all() or any_angle(steps)


def any_angle(steps):
    """Whether a step rotates by an angle."""
    return any(step.op == "rotate" and step.degrees for step in steps)


def test_the_geometry_is_drawn_once_for_an_image_and_its_followers():
    """With followers the image is equal to that without them."""
    steps = [
        op.RandomResizedCrop(size=(30, 30)),
        op.RandomFlip(direction="both"),
        op.Rotate(degrees=(-9, 9)),
        op.Normalize(),
    ]
    file = jpeg_with_exif(jpeg(photo(HEIGHT, WIDTH)), 3)
    columns, values = [Column("image", "encoded")], {"image": memoryview(file)}

    for sample in range(5):
        alone = run_fields(columns, [op.Decode(), *steps], values, sample)["image"]
        assert np.array_equal(run_all(steps, file, np.zeros((HEIGHT, WIDTH), np.uint8), sample)["image"], alone)


def test_followers_follow_through_every_stage():
    """Steps on pixels in between and another type at the end change nothing for them."""
    file = encode(where(), ".png")
    mask = np.random.default_rng(1).integers(0, 20, (HEIGHT, WIDTH), np.uint8)
    geometry = [
        op.CenterCrop(size=(50, 70)),
        op.RandomFlip(probability=1),
        op.Rotate(degrees=(9, 9)),
        op.Rotate(quarter_turns=(1,)),
    ]
    jitter = op.ColorJitter(brightness=0.5)

    one = run_all(geometry, file, mask)
    other = run_all(
        [jitter, geometry[0], op.Cutout(size=(9, 9)), *geometry[1:3], jitter, geometry[3], op.Layout()], file, mask
    )

    assert np.array_equal(one["mask"], other["mask"])
    assert all(np.allclose(one[name], other[name], rtol=0, atol=1e-4) for name in ("boxes", "points"))
    assert check_points(one, 0.6) > 20
    assert other["image"].shape == (3, 70, 50)


def test_an_image_that_is_renamed_still_has_its_followers():
    """Followers may be padded to one number for all, or get another type, at the end."""
    mask = np.random.default_rng(1).integers(0, 20, (HEIGHT, WIDTH), np.uint8)
    columns = [
        Column("image", "encoded"),
        Column("mask", shape=(None, None)),
        Column("boxes", dtype="float32", shape=(None, 4)),
        Column("points", dtype="float32", shape=(len(GRID), 2)),
    ]
    values = {"image": memoryview(encode(where(), ".png")), "mask": mask, "boxes": BOXES, "points": GRID}
    geometry = [op.CenterCrop(size=(50, 70)), op.RandomFlip(probability=1)]
    one = run_all(geometry, encode(where(), ".png"), mask)

    photo_geometry = [replace(step, field="photo") for step in geometry]
    renamed = [op.Decode(), FOLLOW, Rename(field="image", to="photo"), *photo_geometry]
    ends = [Cast(field="mask", dtype="int64"), PadBatch(field="boxes", max_shape=(9, 4))]
    other = run_fields(columns, [*renamed, *ends], values)

    assert np.array_equal(other["photo"], one["image"])
    assert np.array_equal(other["mask"], one["mask"])
    assert np.array_equal(other["points"], one["points"])
    assert np.array_equal(other["boxes"][: len(BOXES)], one["boxes"])
    assert other["boxes_length"] == len(BOXES)


def test_the_mask_of_a_bad_sample_is_all_fill():
    """A training that ignores the value 255 ignores the whole mask."""
    steps = [op.Decode(), op.Follow(mask="mask", mask_fill=255), op.Resize(size=(4, 5))]
    pipeline = Pipeline([Column("image", "encoded"), Column("mask", "encoded")], steps, 0)
    row = {"image": np.full((4, 5, 3), 7, np.uint8), "mask": np.full((4, 5), 7, np.uint8)}

    pipeline.keep({}, row)

    assert (row["mask"] == 255).all()
    assert not row["image"].any()


def test_scaled_decoding_moves_no_follower():
    """Boxes, points and mask are bit-equal for a JPEG decoded at an eighth or whole."""
    file = jpeg(photo(640, 480))
    mask = np.random.default_rng(1).integers(0, 20, (640, 480), np.uint8)
    columns = columns_of(len(GRID), mask=False)
    values = {"image": memoryview(file), "mask": mask, "boxes": BOXES * 5, "points": GRID * 5}
    steps = [FOLLOW, op.RandomResizedCrop(size=(32, 32), scale=(0.5, 1)), op.RandomFlip()]

    for sample in range(4):
        scaled = run_fields(columns, [op.Decode(), *steps], values, sample)
        whole = run_fields(columns, [op.Decode(scale="off"), *steps], values, sample)
        assert not np.array_equal(scaled["image"], whole["image"])
        assert all(np.array_equal(scaled[name], whole[name]) for name in ("mask", "boxes", "points"))


def test_values_of_a_mask_are_kept_and_it_has_its_own_fill():
    """Each value occurs in the input, or is the mask's fill, which differs from the image's."""
    mask = np.random.default_rng(2).choice([3, 90, 200], (HEIGHT, WIDTH)).astype(np.uint8)
    steps = [
        op.Follow(mask="mask", mask_fill=255),
        op.Rotate(degrees=(20, 20), fill=(9,)),
        op.Resize(size=(33, 90)),
        op.Pad(size=(90, 99)),
    ]

    made = run_fields(
        columns_of(len(GRID))[:2],
        [op.Decode(), *steps],
        {"image": memoryview(encode(where(), ".png")), "mask": memoryview(encode(mask, ".png"))},
    )

    assert set(np.unique(made["mask"])) == {3, 90, 200, 255}
    assert (made["mask"][0] == 255).all()
    assert made["mask"].shape == (90, 99)


@pytest.mark.parametrize("factor", [2, 3, 4, 5])
def test_a_mask_is_resampled_at_the_middle_of_its_new_pixels(factor):
    """The value is that of the old pixel in which the new pixel's centre is.

    No pixel is shifted when the mask shrinks or grows.
    """
    mask = np.random.default_rng(3).integers(0, 256, (60, 60), np.uint8)
    columns = [Column("image", shape=(None, None, 3)), Column("mask", shape=(None, None))]
    for size in (60 // factor, 60 * factor, 47):
        centres = np.floor((np.arange(size) + 0.5) * 60 / size).astype(int)

        made = run_fields(
            columns, [op.Follow(mask="mask"), op.Resize(size=(size, size))], {"image": where(60, 60), "mask": mask}
        )

        assert np.array_equal(made["mask"], mask[centres][:, centres])


def test_boxes_are_clipped_and_lost_ones_become_zeros():
    """The number and the order of boxes stay.

    A clipped part does not return when the image is padded.
    """
    boxes = np.array(
        [[0, 0, 10, 10], [10, 10, 70, 50], [70, 20, 80, 30], [30, 30, 30, 40], [40, 9, 40, 20]], np.float32
    )
    columns = [
        Column("image", "encoded"),
        Column("boxes", dtype="float32", shape=(None, 4)),
        Column("n", dtype="int64"),
    ]
    columns[1] = Column("boxes", dtype="float32", shape=(5, 4))
    values = {"image": memoryview(encode(where(), ".png")), "boxes": boxes, "n": 1}
    steps = [
        op.Decode(),
        op.Follow(boxes="boxes"),
        op.CenterCrop(size=(30, 40)),
        op.Pad(size=(60, 80)),
        op.Rotate(degrees=(0, 0)),
    ]

    made = run_fields(columns, steps, values)["boxes"]

    expected = np.zeros((5, 4))
    expected[1] = [20, 15, 60, 45]
    assert np.array_equal(made, expected)
    assert np.array_equal(boxes[0], [0, 0, 10, 10]), "the source's own boxes were changed"


LABELLED = [
    Column("image", "encoded"),
    Column("boxes", dtype="float32", shape=(None, 4)),
    Column("classes", dtype="int64", shape=(None,)),
    Column("scores", dtype="float16", shape=(None, 2)),
]
CROPPED = np.array(
    [[0, 0, 10, 10], [10, 10, 70, 50], [70, 20, 80, 30], [30, 30, 30, 40], [40, 9, 40, 20], [10, 15, 30, 25]],
    np.float32,
)
"""Of these boxes the crop of 30 x 40 in the middle leaves the second, and half of the last one."""


def run_labelled(steps, boxes=CROPPED):
    """Return boxes, classes and scores of an image whose boxes have the classes 0, 1, 2, ..."""
    numbers = np.arange(len(CROPPED))
    values = {"image": memoryview(encode(where(), ".png")), "boxes": boxes, "classes": numbers}
    columns = [*LABELLED, Column("n", dtype="int64")]
    made = Pipeline(columns, steps, 0, has_rows=False).make(
        {**values, "scores": np.stack([numbers, -numbers], 1).astype(np.float16), "n": 1}, 0, 0, 0
    )
    return made["boxes"], made["classes"], made["scores"]


@pytest.mark.parametrize("between", [[], [op.ColorJitter(brightness=0.5)], [Rename(field="n", to="m")]])
@pytest.mark.parametrize("turn", [op.Rotate(degrees=(0, 0)), op.RandomFlip(probability=0)])
def test_labels_of_boxes_that_vanish_go_with_them(between, turn):
    """This holds in one stage and in several; the rows that stay keep their order."""
    follow = op.Follow(boxes="boxes", labels=("classes", "scores"))
    steps = [op.Decode(), follow, op.CenterCrop(size=(30, 40)), *between, op.Pad(size=(60, 80)), turn]

    boxes, classes, scores = run_labelled(steps)

    assert np.array_equal(boxes, [[20, 15, 60, 45], [20, 15, 30, 25]])
    assert classes.tolist() == [1, 5]
    assert scores.tolist() == [[1, -1], [5, -5]]
    assert classes.dtype == np.int64
    assert scores.dtype == np.float16


@pytest.mark.parametrize("between", [[], [op.ColorJitter(brightness=0.5)]])
@pytest.mark.parametrize(
    ("min_visible", "left"), [(0.0, [1, 5]), (0.49, [1, 5]), (0.5, [1, 5]), (0.51, [1]), (1.0, [])]
)
def test_a_box_of_which_too_little_is_visible_vanishes(between, min_visible, left):
    """It is what a step leaves of what it found; scaling, padding and turning leave all."""
    follow = op.Follow(boxes="boxes", labels=("classes",), min_visible=min_visible)
    boxes = CROPPED.copy()
    boxes[1] = [21, 16, 59, 44.5]
    boxes[1, 2] = 61
    steps = [
        op.Decode(),
        follow,
        op.CenterCrop(size=(30, 40)),
        *between,
        op.Resize(size=(60, 80)),
        op.Rotate(quarter_turns=(1,)),
    ]

    assert run_labelled(steps, boxes)[1].tolist() == left


def test_boxes_alone_may_vanish_or_keep_their_places():
    """Without labels they stay as zeros, and with keep_empty = true, too.

    The labels are untouched.
    """
    crop = op.CenterCrop(size=(30, 40))

    for follow in (op.Follow(boxes="boxes"), op.Follow(boxes="boxes", keep_empty=True)):
        boxes, classes, _scores = run_labelled([op.Decode(), follow, crop])
        assert boxes.any(axis=1).tolist() == [False, True, False, False, False, True]
        assert len(classes) == len(CROPPED)
    assert len(run_labelled([op.Decode(), op.Follow(boxes="boxes", keep_empty=False), crop])[0]) == 2
    assert not run_labelled([op.Decode(), op.Follow(boxes="boxes", min_visible=0.6), crop])[0].any()


def test_rows_that_leave_at_random_have_no_length_to_measure():
    """Buckets and packs ask which step draws the length of a field."""
    crop, flip = op.RandomCrop(size=(30, 40)), op.RandomFlip()
    drops, keeps = op.Follow(boxes="boxes", labels=("classes",)), op.Follow(boxes="boxes")

    assert [drawing_step([op.Decode(), drops, crop], name) for name in ("boxes", "classes")] == ["random_crop"] * 2
    assert drawing_step([op.Decode(), keeps, crop], "boxes") is None
    assert drawing_step([op.Decode(), drops, flip], "classes") is None


def test_labels_of_another_number_than_boxes_are_a_bad_sample():
    """The reason has both numbers."""
    with pytest.raises(SampleUndecodable, match="its 'classes' has 6 rows, and its 'boxes' 5"):
        run_labelled([op.Decode(), op.Follow(boxes="boxes", labels=("classes",)), FINAL], CROPPED[:5])


def test_a_rotated_box_encloses_its_corners():
    """The rotation is 45 degrees about the middle of the image.

    A square becomes larger by the square root of 2.
    """
    columns = [Column("image", "encoded"), Column("boxes", dtype="float32", shape=(1, 4))]
    values = {"image": memoryview(encode(where(), ".png")), "boxes": np.array([[30, 20, 50, 40]], np.float32)}

    made = run_fields(
        columns,
        [op.Decode(), op.Follow(boxes="boxes"), op.Rotate(degrees=(45, 45)), op.CenterCrop(size=(60, 80))],
        values,
    )

    half = 10 * np.sqrt(2)
    assert np.allclose(made["boxes"], [[40 - half, 30 - half, 40 + half, 30 + half]], atol=1e-5)


def test_points_outside_keep_their_coordinates():
    """The coordinates show how far outside they are."""
    columns = [Column("image", "encoded"), Column("points", dtype="float32", shape=(2, 2))]
    values = {"image": memoryview(encode(where(), ".png")), "points": np.array([[0, 0], [79, 59]], np.float32)}

    made = run_fields(
        columns,
        [op.Decode(), op.Follow(points="points"), op.CenterCrop(size=(20, 20)), op.RandomFlip(probability=1)],
        values,
    )

    assert np.array_equal(made["points"], [[50, -20], [-29, 39]])


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_indices_of_a_palette_are_the_mask(bits):
    """Colours and alphas do not matter; many data sets store their classes this way."""
    indices = np.random.default_rng(4).integers(0, 1 << min(bits, 5), (8, 16)).astype(np.uint8)
    colors = np.random.default_rng(5).integers(0, 256, (1 << min(bits, 5), 3), np.uint8)
    mask = packed_palette_png(indices, colors, bits) if bits < 8 else palette_png(indices, colors, [0, 255])

    columns = [Column("image", shape=(8, 16, 3)), Column("mask", "encoded")]
    made = run_fields(
        columns, [op.Follow(mask="mask"), op.Resize(size=(8, 16))], {"image": where(8, 16), "mask": memoryview(mask)}
    )

    assert np.array_equal(made["mask"], indices)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_grey_numbers_of_a_png_are_the_mask(bits):
    """A file of 2 bits has the numbers 0 to 3, whatever black and white are to a viewer."""
    numbers = np.random.default_rng(4).integers(0, 1 << bits, (8, 16)).astype(np.uint8)
    per_byte = 8 // bits
    packed = sum((numbers[:, place::per_byte] << (8 - bits * (place + 1)) for place in range(per_byte)), start=0)
    narrow = encode(packed.astype(np.uint8), ".png")
    mask = with_right_checksums(narrow[:16] + pack(">II", 16, 8) + bytes([bits]) + narrow[25:])

    columns = [Column("image", shape=(8, 16, 3)), Column("mask", "encoded")]
    for data in (mask, png_with(mask, b"gAMA", pack(">I", 100_000)), png_with(mask, b"tRNS", b"\0\1")):
        values = {"image": where(8, 16), "mask": memoryview(data)}
        made = run_fields(columns, [op.Follow(mask="mask"), op.Resize(size=(8, 16))], values)

        assert np.array_equal(made["mask"], numbers)


def packed_palette_png(indices, palette, bits):
    """A PNG of palette indices, several in a byte."""
    whole = palette_png(indices, palette, [255])
    per_byte = 8 // bits
    packed = np.zeros((indices.shape[0], indices.shape[1] // per_byte), np.uint8)
    for place in range(per_byte):
        packed |= indices[:, place::per_byte] << (8 - bits * (place + 1))
    narrow = palette_png(packed, palette, [255])
    header = whole[16:24] + bytes([bits]) + whole[25:29]
    rebuilt = narrow[:16] + header + narrow[29:]
    return with_right_checksums(rebuilt)


def grey_with_alpha(grey):
    """A PNG of two channels, which OpenCV does not write."""
    narrow = encode(np.repeat(grey, 2, axis=1), ".png")  # its rows have as many bytes
    return with_right_checksums(narrow[:16] + pack(">II", *grey.shape[::-1]) + bytes([8, 4]) + narrow[26:])


IDS = np.random.default_rng(4).integers(0, 1 << 24, (8, 16)).astype(np.int32)
WIDE = {
    "16 bits": (encode((IDS & 0xFFFF).astype(np.uint16), ".png"), IDS & 0xFFFF),
    "8 bits": (encode((IDS & 0xFF).astype(np.uint8), ".png"), IDS & 0xFF),
    "three colours": (encode(np.dstack([IDS & 0xFF, IDS >> 8 & 0xFF, IDS >> 16]).astype(np.uint8), ".png"), IDS),
    "a palette": (palette_png((IDS & 7).astype(np.uint8), np.eye(8, 3) * 255, [0, 255]), IDS & 7),
}


@pytest.mark.parametrize(("data", "ids"), WIDE.values(), ids=WIDE)
def test_a_wide_mask_has_the_numbers_of_its_file(data, ids):
    """16 bits, or red + 256 green + 65536 blue as in COCO's panoptic files; all are exact."""
    columns = [Column("image", shape=(8, 16, 3)), Column("mask", "encoded")]
    steps = [op.Follow(mask="mask", mask_type="int32"), op.Resize(size=(8, 16))]
    for file in (data, png_with(data, b"gAMA", pack(">I", 100_000)), png_with_exif(data, 6)):
        made = run_fields(columns, steps, {"image": where(8, 16), "mask": memoryview(file)})["mask"]

        assert made.dtype == np.int32
        assert np.array_equal(made, ids)


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (png16(where(8, 16)), "its 'mask': a PNG of 16 bits; a mask has one channel, a palette, or three colours of 8"),
        (encode(np.dstack([where(8, 16)] * 2)[..., :4], ".png"), "its 'mask': a PNG of colours and alpha"),
    ],
    ids=["colours of 16 bits", "alpha"],
)
def test_a_file_whose_numbers_are_no_ids_is_a_bad_sample(mask, problem):
    """Nothing says what they would mean."""
    columns = [Column("image", shape=(8, 16, 3)), Column("mask", "encoded")]
    values = {"image": where(8, 16), "mask": memoryview(mask)}

    with pytest.raises(SampleUndecodable, match=problem):
        run_fields(columns, [op.Follow(mask="mask", mask_type="int32"), op.Resize(size=(8, 16))], values)


def test_the_exif_tag_of_a_mask_does_not_count():
    """Its pixels match those of the upright image."""
    indices = np.random.default_rng(4).integers(0, 9, (8, 16)).astype(np.uint8)
    columns = [Column("image", shape=(8, 16, 3)), Column("mask", "encoded")]
    values = {"image": where(8, 16), "mask": memoryview(png_with_exif(encode(indices, ".png"), 3))}

    assert np.array_equal(run_fields(columns, [op.Follow(mask="mask"), op.Layout()], values)["mask"], indices)


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (
            encode(where(), ".png"),
            "its 'mask': a PNG of colours; a mask has one channel .* mask_type = \"int32\" reads it",
        ),
        (encode(np.dstack([where(), where()[..., 0]]), ".png"), "its 'mask': a PNG of colours and alpha"),
        (grey_with_alpha(where()[..., 0]), "its 'mask': a PNG of grey and alpha"),
        (encode(where()[:50, :, 0], ".png"), "its 'mask': has 80 x 50 pixels, and the image 80 x 60"),
        (jpeg(where()), "its 'mask': a JPEG file; a mask is a PNG"),
        (png16(where()[..., 0]), "its 'mask': a PNG of 16 bits"),
        (b"nothing", "its 'mask': not a JPEG, PNG"),
        (encode(where()[..., 0], ".png")[:-20], "its 'mask': truncated"),
        (np.zeros((HEIGHT, WIDTH + 1), np.uint8), "its 'mask' has 81 x 60 pixels, and the image 80 x 60"),
    ],
    ids=["colours", "colours and alpha", "grey and alpha", "size", "jpeg", "16 bits", "nothing", "truncated", "array"],
)
def test_an_invalid_mask_is_a_bad_sample(mask, problem):
    """The reason says why, with both sizes if they differ."""
    with pytest.raises(SampleUndecodable, match=problem):
        run_all([FINAL], encode(where(), ".png"), mask)


@pytest.mark.parametrize("name", ["boxes", "points"])
def test_a_coordinate_that_is_no_number_is_a_bad_sample(name):
    """The reason names its field."""
    broken = {"boxes": BOXES.copy(), "points": GRID.copy()}
    broken[name][1, 1] = np.nan

    with pytest.raises(SampleUndecodable, match=f"its '{name}' has a coordinate that is no finite number"):
        run_all([FINAL], encode(where(), ".png"), np.zeros((HEIGHT, WIDTH), np.uint8), **broken)


@pytest.mark.thorough
def test_damaged_masks_show_no_pixels_of_other_samples():
    """A changed byte makes a bad sample, or a mask that does not depend on earlier samples."""
    data = bytearray(encode(np.random.default_rng(6).integers(0, 9, (HEIGHT, WIDTH)).astype(np.uint8), ".png"))
    for place in range(8, len(data), 7):
        damaged = bytes(data[:place]) + bytes([data[place] ^ 0x55]) + bytes(data[place + 1 :])
        outcomes = []
        for marker in (1, 200):
            other = encode(np.full((HEIGHT, WIDTH), marker, np.uint8), ".png")
            run_all([FINAL], encode(where(), ".png"), other)
            try:
                outcomes.append(run_all([FINAL], encode(where(), ".png"), damaged)["mask"].tobytes())
            except SampleUndecodable as bad:
                outcomes.append(str(bad))
        assert outcomes[0] == outcomes[1]
