"""Objects of an image: box, class, mask and keypoints of each stay together, through any steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.pipeline.augment.options import Affine, Elastic, Perspective
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import Drop, Rename
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.sample_fields import StepCheck, drawing_step, overlays_of
from batchd.data.pipeline.shapes.options import PadBatch
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.images import encode, png_with_exif, stored_as
from support.pipelines import run_fields

HEIGHT, WIDTH = 48, 64
FINAL = op.Resize(size=(40, 44))
FLIPS = (0, 2, 1, 3, 5, 4)
COLUMNS = (
    Column("image", "encoded"),
    Column("boxes", dtype="float32", shape=(None, 4)),
    Column("classes", dtype="int64", shape=(None,)),
    Column("masks", shape=(None, None, None)),
    Column("keypoints", dtype="float32", shape=(None, 6, 3)),
    Column("mask", shape=(None, None)),
    Column("points", dtype="float32", shape=(None, 2)),
)
ROWS = ("boxes", "classes", "masks", "keypoints")
OBJECTS = {"boxes": "boxes", "labels": ("classes",), "masks": "masks", "keypoints": "keypoints"}
LINEAR = [
    op.Resize(shorter_side=52),
    op.Letterbox(size=(50, 46)),
    op.CenterCrop(size=(36, 54)),
    op.RandomCrop(size=(40, 40), padding=6),
    op.RandomResizedCrop(size=(44, 40), scale=(0.3, 1.0)),
    op.RandomFlip(direction="both"),
    op.Pad(border=(1, 5, 9, 2)),
    op.Rotate(quarter_turns=(0, 1, 2, 3)),
    op.Rotate(degrees=(-30, 30)),
    Affine(degrees=(-20, 20), translate=(0.2, 0.2), scale=(0.7, 1.3), shear_x=(-9, 9)),
    Perspective(distortion=0.3),
]
"""Steps that leave lines straight, so the corners of a box say where all of it is."""


def objects_of(boxes):
    """All that belongs to boxes: the class of box n is n, and the number in its mask is n + 1.

    Its keypoints are the middle, left, right, low, and two corners.
    """
    boxes = np.asarray(boxes, np.float32).reshape(-1, 4)
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    left, top, right, bottom = (side[:, np.newaxis, np.newaxis] for side in boxes.T)
    inside = (x >= left) & (x < right) & (y >= top) & (y < bottom)
    numbers = np.arange(len(boxes))
    masks = (inside * (numbers + 1)[:, np.newaxis, np.newaxis]).astype(np.uint8)
    shares = np.array([[0.5, 0.5], [0.1, 0.5], [0.9, 0.5], [0.5, 0.9], [0, 0], [1, 1]])
    places = boxes[:, np.newaxis, :2] + shares * (boxes[:, np.newaxis, 2:] - boxes[:, np.newaxis, :2])
    seen = np.where(places.min(axis=-1) >= 0, 2, 0)[..., np.newaxis]
    return {
        "image": memoryview(encode(np.zeros((HEIGHT, WIDTH, 3), np.uint8), ".png")),
        "boxes": boxes,
        "classes": numbers,
        "masks": masks,
        "keypoints": np.concatenate([places, seen], axis=-1).astype(np.float32),
        "mask": masks.max(axis=0, initial=0),
        "points": boxes[:, :2],
    }


def run(follow, steps, values, sample=0):
    """The values of a sample after ``follow`` and some steps, in their own shapes."""
    made = Pipeline(COLUMNS, [op.Decode(), follow, *steps], 0, has_rows=False).make(values, 0, sample, 0)
    return {name: np.array(value) for name, value in made.items()}


SIDES = st.tuples(*[st.floats(-20, 80, width=32)] * 2).map(sorted)
BOXES = st.lists(st.tuples(SIDES, SIDES).map(lambda box: (box[0][0], box[1][0], box[0][1], box[1][1])), max_size=8)


@given(
    BOXES,
    st.lists(st.sampled_from(LINEAR), max_size=4),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 4.0, 40.0]),
    st.integers(0, 99),
)
def test_no_row_is_empty_and_none_is_without_what_belongs_to_it(boxes, steps, min_visible, min_area, sample):
    """Each object is what it would be alone, or has left with all that it has."""
    follow = op.Follow(**OBJECTS, flip_indices=FLIPS, min_visible=min_visible, min_area=min_area)
    values = objects_of(boxes)

    together = run(follow, [*steps, FINAL], values, sample)

    check_rows(together, min_area, tolerance_pixels=1 + len(steps))
    for number in range(len(boxes)):
        one = {name: values[name][number : number + 1] for name in ROWS}
        alone = run(follow, [*steps, FINAL], {**values, **one}, sample)
        is_it = together["classes"] == number
        assert all(np.array_equal(together[name][is_it], alone[name]) for name in ROWS)


def check_rows(made, min_area, tolerance_pixels):
    """Assert that each row has an area, its own mask, and keypoints in its box and in the image."""
    assert len({len(made[name]) for name in ROWS}) == 1
    boxes = made["boxes"].astype(float)
    wide, high = (boxes[:, 2:] - boxes[:, :2]).T
    assert ((wide > 0) & (high > 0) & (wide * high >= min_area)).all()
    assert ((boxes >= 0) & (boxes <= (44, 40, 44, 40))).all()
    for box, number, mask, points in zip(boxes, *(made[name] for name in ROWS[1:]), strict=True):
        assert set(np.unique(mask)) <= {0, number + 1}
        rows, columns = np.nonzero(mask)
        if len(rows):
            edges = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            assert ((edges - box) * (1, 1, -1, -1) >= -tolerance_pixels).all()
        seen = points[points[:, 2] > 0, :2]
        assert ((seen >= box[:2] - 0.01) & (seen <= box[2:] + 0.01)).all()
        assert not points[points[:, 2] == 0].any()


@pytest.mark.parametrize("step", [*LINEAR, Elastic()], ids=lambda step: step.op)
def test_the_masks_of_objects_move_as_one_mask_does(step):
    """Some are moved together, and of some only the part around the object."""
    random = np.random.default_rng(3)
    masks = np.zeros((6, HEIGHT, WIDTH), np.uint8)
    for mask, (top, left) in zip(masks[:5], random.integers(0, 30, (5, 2)), strict=True):
        mask[top : top + 15, left : left + 20] = random.integers(0, 256, (15, 20))
    steps = [op.RandomFlip(direction="both"), step, op.Rotate(quarter_turns=(0, 1)), FINAL]
    for sample in range(3):
        values = {**objects_of([]), "masks": masks}
        made = run(op.Follow(masks="masks", keep_empty=True), steps, values, sample)["masks"]

        for mask, moved in zip(masks, made, strict=True):
            alone = run(op.Follow(mask="mask"), steps, {**values, "mask": mask}, sample)["mask"]
            assert np.array_equal(alone, moved)


@pytest.mark.parametrize("step", [*LINEAR, Elastic()], ids=lambda step: step.op)
def test_wide_numbers_of_a_mask_move_as_narrow_ones(step):
    """Ids of 24 bits are as exact as levels of 8."""
    ids = np.random.default_rng(4).integers(0, 1 << 24, 256).astype(np.int32)
    levels = np.random.default_rng(5).integers(0, 255, (HEIGHT, WIDTH), np.uint8)
    ids[255] = fill = 70_000
    columns = [COLUMNS[0], COLUMNS[5], Column("ids", dtype="int32", shape=(None, None))]
    values = {"image": objects_of([])["image"], "mask": levels, "ids": ids[levels]}
    steps = [step, op.RandomFlip(direction="both"), FINAL]
    for sample in range(3):
        narrow = run_fields(columns[:2], [op.Decode(), op.Follow(mask="mask", mask_fill=255), *steps], values, sample)
        follow = op.Follow(mask="ids", mask_fill=fill, mask_type="int32")
        wide = run_fields(columns[::2], [op.Decode(), follow, *steps], values, sample)

        assert np.array_equal(wide["ids"], ids[narrow["mask"]])


def test_without_boxes_an_object_vanishes_with_its_last_pixel():
    """Its class and its keypoints leave with it; with keep_empty = true there are zeros."""
    values = objects_of([[0, 0, 9, 9], [20, 20, 40, 30], [0, 0, 0, 0]])
    crop = [op.CenterCrop(size=(20, 30))]

    drops = run(op.Follow(masks="masks", labels=("classes",), keypoints="keypoints"), crop, values)
    keeps = run(op.Follow(masks="masks", keypoints="keypoints", keep_empty=True), crop, values)

    assert drops["classes"].tolist() == [1]
    assert drops["masks"].shape == (1, 20, 30)
    assert drops["keypoints"][0, 0].tolist() == [13, 11, 2]
    assert (
        keeps["masks"].any(axis=(1, 2)).tolist() == keeps["keypoints"].any(axis=(1, 2)).tolist() == [False, True, False]
    )


@pytest.mark.parametrize(("flip", "is_mirrored"), [("horizontal", True), ("vertical", True), ("both", False)])
def test_left_and_right_are_swapped_in_a_mirror(flip, is_mirrored):
    """Two flips are half a turn, in which a left hand stays one."""
    values = objects_of([[8, 8, 40, 40]])
    plain = run(op.Follow(keypoints="keypoints"), [op.RandomFlip(direction=flip, probability=1)], values)["keypoints"]
    follow = op.Follow(keypoints="keypoints", flip_indices=FLIPS)

    swapped = run(follow, [op.RandomFlip(direction=flip, probability=1)], values)["keypoints"]

    assert np.array_equal(swapped, plain[:, FLIPS] if is_mirrored else plain)


def test_a_keypoint_that_leaves_the_image_becomes_zeros_and_does_not_come_back():
    """As COCO writes one that is not labelled; hidden ones are moved as visible ones."""
    points = np.array([[[40, 24, 2], [10, 24, 1], [33, 24, 1], [0, 0, 0], [48, 24, 2], [50, 30, 0]]], np.float32)
    values = {**objects_of([[8, 8, 60, 40]]), "keypoints": points}

    made = run(op.Follow(**OBJECTS), [op.CenterCrop(size=(24, 32)), op.Pad(border=(4, 4, 30, 0))], values)["keypoints"]

    assert made[0].tolist() == [[54, 16, 2], [0, 0, 0], [47, 16, 1], [0, 0, 0], [62, 16, 2], [0, 0, 0]]


def test_keypoints_of_two_numbers_keep_their_coordinates_outside():
    """They have no visibility that could say it, as points."""
    columns = [COLUMNS[0], Column("keypoints", dtype="float32", shape=(None, None, 2))]
    values = {**objects_of([]), "keypoints": np.array([[[0, 0], [30, 20]]], np.float32)}
    steps = [op.Decode(), op.Follow(keypoints="keypoints"), op.CenterCrop(size=(24, 32))]

    made = Pipeline(columns, steps, 0, has_rows=False).make(values, 0, 0, 0)["keypoints"]

    assert made.tolist() == [[[-16, -12], [14, 8]]]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("form", ["xyxy", "xywh", "cxcywh"])
def test_boxes_may_have_any_form_before_and_after(form, relative):
    """What a source calls them, they are again at the end, in the picture as it is by then."""
    boxes = np.array([[8, 4, 40, 36], [-4, 20, 20, 60]])
    middle, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    forms = {"xyxy": boxes, "xywh": np.c_[boxes[:, :2], size], "cxcywh": np.c_[middle, size]}
    sides = (WIDTH, HEIGHT) * 2 if relative else (1, 1, 1, 1)
    values = {**objects_of([]), "boxes": (forms[form] / sides).astype(np.float32)}
    follow = op.Follow(boxes="boxes", form=form, relative=relative)
    last = [op.BoxForm(form=form, relative=relative)] if form != "xyxy" or relative else []

    inside = run(follow, [], values)["boxes"]
    back = run(follow, [op.Resize(size=(2 * HEIGHT, 3 * WIDTH)), op.To(), *last], values)["boxes"]

    assert np.allclose(inside, [[8, 4, 40, 36], [0, 20, 20, 48]], atol=1e-5)
    grown = forms[form][0] / sides * (1 if relative else (3, 2, 3, 2))
    assert np.allclose(back[0], grown, atol=1e-5)


def test_relative_points_and_keypoints_are_fractions_of_the_picture():
    """Visibility is no coordinate."""
    values = objects_of([[8, 4, 40, 36]])
    relative = {"points": values["points"] / (WIDTH, HEIGHT), "keypoints": values["keypoints"] / (WIDTH, HEIGHT, 1)}
    relative = {name: value.astype(np.float32) for name, value in relative.items()}

    made = run(op.Follow(points="points", keypoints="keypoints", relative=True), [], {**values, **relative})

    assert all(np.allclose(made[name], values[name], atol=1e-4) for name in ("points", "keypoints"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_what_belongs_to_the_stored_picture_is_turned_upright_with_it(orientation):
    """Boxes, masks and points of a tool that ignores EXIF, for each way to store a photograph."""
    upright = objects_of([[8, 4, 40, 36], [50, 30, 60, 46]])
    stored_masks = np.stack([stored_as(mask, orientation) for mask in upright["masks"]])
    edges = [np.nonzero(mask) for mask in stored_masks]
    boxes = np.array([[x.min(), y.min(), x.max() + 1, y.max() + 1] for y, x in edges], np.float32)
    image = encode(stored_as(np.zeros((HEIGHT, WIDTH, 3), np.uint8), orientation), ".png")
    values = {
        **upright,
        "image": memoryview(png_with_exif(image, orientation)),
        "boxes": boxes,
        "masks": stored_masks,
        "mask": stored_as(upright["mask"], orientation),
        "points": (boxes[:, :2] + boxes[:, 2:]) / 2,
    }
    follow = op.Follow(boxes="boxes", masks="masks", mask="mask", points="points", annotated="stored")
    steps = [op.RandomResizedCrop(size=(44, 40), scale=(0.3, 1.0)), op.ColorJitter(brightness=0.1), op.RandomFlip()]

    made = run(follow, [], values)
    moved = run(follow, steps, values, 3)
    expected = run(
        op.Follow(boxes="boxes", masks="masks", mask="mask", points="points"),
        steps,
        {**values, **upright, "image": values["image"], "points": upright["keypoints"][:, 0, :2]},
        3,
    )

    assert all(np.array_equal(made[name], upright[name]) for name in ("boxes", "masks", "mask"))
    assert np.allclose(made["points"], upright["keypoints"][:, 0, :2])
    assert all(np.allclose(moved[name], expected[name], atol=1e-4) for name in ("boxes", "masks", "mask", "points"))


def test_a_picture_that_is_not_turned_is_the_stored_one():
    """With exif = "ignore" both are the same, whatever the tag says."""
    values = objects_of([[8, 4, 40, 36]])
    values["image"] = memoryview(png_with_exif(bytes(values["image"]), 6))
    steps = [op.Decode(exif="ignore"), op.Follow(**OBJECTS, annotated="stored")]

    made = Pipeline(COLUMNS, steps, 0, has_rows=False).make(values, 0, 0, 0)

    assert np.array_equal(made["boxes"], values["boxes"])


def test_an_image_without_objects_stays():
    """All its rows are none, and its masks have the size of the image."""
    values = {**objects_of([]), "masks": np.zeros((0, 0, 0), np.uint8)}

    made = run(op.Follow(**OBJECTS, min_area=4), [op.RandomFlip(), FINAL], values)

    assert [made[name].shape for name in ROWS] == [(0, 4), (0,), (0, 40, 44), (0, 6, 3)]
    assert made["image"].shape == (40, 44, 3)


def test_a_box_that_has_no_area_after_rounding_has_vanished():
    """Between two neighbours among the numbers of 32 bits there is no box."""
    boxes = np.array([[30, 8, np.nextafter(np.float32(30), np.float32(31)), 40]], np.float32)

    made = run(op.Follow(**OBJECTS), [op.Resize(size=(48, 5000)), op.CenterCrop(size=(40, 5))], objects_of(boxes))

    assert len(made["boxes"]) == len(made["classes"]) == 0


def test_a_box_that_ends_before_it_begins_has_vanished_and_a_negative_width_is_refused():
    """Of four ends nothing is left between them; a width that is negative cannot be meant."""
    boxes = [[0, 0, 9, 9], [30, 2, 20, 4]]

    assert len(run(op.Follow(**OBJECTS), [], objects_of(boxes))["boxes"]) == 1
    boxes[1] = [30, 2, -10, 2]
    with pytest.raises(
        SampleUndecodable, match=r"its 'boxes' has a box of negative width or height: row 1 is \[30, 2, -10"
    ):
        run(op.Follow(**OBJECTS, form="xywh"), [], objects_of(boxes))


BROKEN = {
    "no number": ("boxes", [[0, 0, 9, 9], [1, 2, np.nan, 4]], "its 'boxes' has a coordinate .*: row 1 is \\[1, 2, nan, 4\\]"),
    "another shape": ("boxes", [[0, 0, 9], [1, 2, 3]], "'boxes' is float32\\[2, 3\\] instead of float32\\[\\?,4\\]"),
    "more classes": ("classes", [1, 2, 3], "its 'classes' has 3 rows, and its 'boxes' 2"),
    "fewer masks": ("masks", np.zeros((1, HEIGHT, WIDTH)), "its 'masks' has 1 rows, and its 'boxes' 2"),
    "masks of another size": ("masks", np.zeros((2, WIDTH, HEIGHT)), "its 'masks' has 48 x 64 pixels, and the image 64 x 48"),
    "fewer keypoints": ("keypoints", np.zeros((1, 6, 3)), "its 'keypoints' has 1 rows, and its 'boxes' 2"),
    "no keypoint": ("keypoints", np.full((2, 6, 3), np.inf), "its 'keypoints' has a .*: row 0 is \\[inf, .* \\.\\.\\]"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_wrong_object_makes_a_bad_sample_that_names_its_row(name, value, problem):
    """A number that cannot be meant is never served, nor one sample's row with another's."""
    values = objects_of([[0, 0, 9, 9], [9, 9, 20, 20]])
    values[name] = np.asarray(value, values[name].dtype)

    with pytest.raises(SampleUndecodable, match=problem):
        run(op.Follow(**OBJECTS), [FINAL], values)


def test_coordinates_in_pixels_are_no_fractions():
    """Where relative = true is wrong, all boxes would be as large as the image."""
    with pytest.raises(SampleUndecodable, match="no fraction of the picture, as relative = true says: row 0 is"):
        run(op.Follow(**OBJECTS, relative=True), [], objects_of([[8, 4, 40, 36]]))


DETR = [
    op.Decode(),
    op.Follow(**OBJECTS, form="xywh", min_area=4, flip_indices=FLIPS),
    op.RandomFlip(),
    op.RandomResizedCrop(size=(40, 44)),
    op.BoxForm(form="cxcywh", relative=True),
    PadBatch(field="boxes", max_shape=(9, 4)),
    PadBatch(field="classes", max_shape=(9,), fill=-1),
    PadBatch(field="masks", max_shape=(9, 40, 44)),
    PadBatch(field="keypoints", max_shape=(9, 6, 3)),
]


def test_all_that_belongs_to_objects_is_padded_to_one_number_of_rows():
    """What a trainer of DETR or Mask R-CNN gets."""
    values = objects_of([[2, 2, 40, 40], [10, 4, 60, 44]])
    values["boxes"] = np.array([[2, 2, 38, 38], [10, 4, 50, 40]], np.float32)

    for sample in range(4):
        row = run_fields(COLUMNS[:5], DETR, values, sample)
        count = int(row["boxes_length"])
        assert int(row["classes_length"]) == int(row["masks_length"]) == int(row["keypoints_length"]) == count > 0
        assert (row["boxes"][:count] > 0).all()
        assert (row["boxes"][:count] <= 1).all()
        assert not row["boxes"][count:].any()
        assert (row["classes"][count:] == -1).all()
        assert set(np.unique(row["masks"][0])) <= {0, row["classes"][0] + 1}


def problems_of(steps, columns=COLUMNS):
    """What `batchd check` says of steps."""
    check = StepCheck(columns)
    for place, step in enumerate(steps):
        check.check_step(place, step)
    return [problem.text for problem in check.finish() if problem.key]


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([op.Follow(masks="mask")], "masks = 'mask', which is uint8[?,?]; masks are uint8[?,?,?]"),
        ([op.Follow(keypoints="points")], "keypoints = 'points', which is float32[?,2]; keypoints are"),
        ([op.Follow(keypoints="keypoints", flip_indices=(0, 2, 1))], "3 numbers in flip_indices, and 'keypoints' is"),
        ([op.Follow(mask="mask", mask_type="int32", mask_fill=256)], "mask_fill = 256, and 'mask' is uint8[?,?], which ends"),
        ([op.Follow(**OBJECTS), op.BoxForm(form="xyxy", relative=True), op.RandomFlip()],
         '"random_flip" is done to \'boxes\' as well'),
        ([op.BoxForm(form="xyxy", relative=True)], "\"box_form\" needs boxes that follow 'image', and 'boxes' does not"),
        ([op.Resize(size=(9, 9)), op.Follow(boxes="boxes", annotated="stored")],
         '"follow" with annotated = "stored" comes directly'),
    ],
    ids=["masks", "keypoints", "flips", "fill", "moved later", "not followed", "stored"],
)  # fmt: skip
def test_what_cannot_follow_is_refused(steps, problem):
    """The text names the key, and what it takes."""
    assert problem in problems_of([op.Decode(), *steps])[0]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "follow needs a field that follows"),
        ({"mask": "mask", "min_area": 4.0}, "min_area needs boxes"),
        ({"masks": "masks", "form": "xywh", "min_visible": 0.1}, "min_visible and form needs boxes"),
        ({"points": "points", "labels": ("classes",)}, "labels and keep_empty are of boxes or masks"),
        ({"mask": "mask", "relative": True}, "relative is of boxes, points and keypoints"),
        ({"mask": "mask", "mask_fill": 256}, "mask_fill = 256 is more than uint8 holds"),
        ({"boxes": "boxes", "flip_indices": (1, 0)}, "flip_indices are of keypoints"),
        ({"keypoints": "keypoints", "flip_indices": (1, 2, 0)}, "in pairs that point at each other"),
        ({"keypoints": "keypoints", "flip_indices": (1, 0, 3)}, "each number from 0 on once"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, problem):
    """Before any sample is seen."""
    with pytest.raises(ValueError, match=problem):
        op.Follow(**options)


def test_rows_of_masks_and_keypoints_have_no_length_to_measure_behind_a_crop():
    """As those of boxes: buckets and packs ask which step draws a length."""
    steps = [op.Decode(), op.Follow(masks="masks", keypoints="keypoints"), op.RandomCrop(size=(30, 40))]

    assert [drawing_step(steps, name) for name in ("masks", "keypoints")] == ["random_crop"] * 2


def test_what_belongs_to_an_image_is_told_to_those_who_draw_it():
    """By the names and the form that fields have in a batch, without those that were dropped."""
    steps = [op.Decode(), op.Follow(**OBJECTS, mask="mask"), Rename(field="image", to="photo")]
    steps += [Drop(fields=("mask",)), op.BoxForm(image="photo", form="cxcywh", relative=True)]

    told = [("photo", "masks", "masks", "xyxy", False), ("photo", "boxes", "boxes", "cxcywh", True)]
    told += [("photo", role, name, "xyxy", False) for role, name in (("keypoints", "keypoints"), ("label", "classes"))]
    assert list(overlays_of(COLUMNS, steps, {})) == told
