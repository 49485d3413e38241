"""Steps that act with a probability: on which images, and that no later draw moves."""

import numpy as np
import pytest

from batchd.data.pipeline.augment import options as augment
from batchd.data.pipeline.effects import StepInvalid, effect
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.join.options import JoinStep
from batchd.data.pipeline.options import STEP_KINDS
from batchd.data.pipeline.sample_fields import columns_after
from batchd.data.pipeline.step_files import named_by_content
from batchd.data.samples.columns import Column
from support.images import encode
from support.pipelines import image_pipeline, run, run_fields

IMAGE = np.random.default_rng(1).integers(0, 256, (20, 20, 3), np.uint8)
FILE = encode(IMAGE, ".png")
SAME = (20, 20)
STEPS = [
    (op.CenterCrop, {"size": SAME}),
    (op.RandomCrop, {"size": SAME, "padding": 6}),
    (op.RandomResizedCrop, {"size": SAME}),
    (op.Rotate, {"quarter_turns": (1, 2, 3)}),
    (op.Rotate, {"degrees": (-40, -10)}),
    (op.ColorJitter, {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.3}),
    (op.Gray, {}),
    (op.Cutout, {"size": (9, 9), "holes": 3}),
    (augment.Solarize, {}),
    (augment.Posterize, {}),
    (augment.Equalize, {}),
    (augment.Autocontrast, {}),
    (augment.Invert, {}),
    (augment.Sharpen, {"factor": (0.1, 5.0)}),
    (augment.Blur, {}),
    (augment.Erase, {"fill": "noise", "count": 3}),
    (
        augment.Affine,
        {"degrees": (-40, -10), "translate": (0.1, 0.2), "scale": (0.8, 1.2), "shear_x": (3, 9), "shear_y": (-9, 9)},
    ),
    (augment.Perspective, {}),
    (augment.RandAugment, {"operation_probability": 1.0}),
    (augment.TrivialAugment, {}),
    (augment.AutoAugment, {}),
    (augment.AugMix, {}),
    (
        augment.Choose,
        {
            "of": (
                augment.Invert(),
                augment.Blur(),
                op.RandomCrop(size=SAME, padding=4),
                augment.RandAugment(),
                op.RandomFlip(),
            )
        },
    ),
    (augment.Elastic, {}),
]


def made(steps, sample):
    """Run steps on the image and cover one pixel. Return the image, and the notes of the steps."""
    pipeline = image_pipeline([op.Decode(), op.Resize(size=SAME), *steps, op.Cutout(size=(1, 1))])
    draws = pipeline.note_draws()
    return run(pipeline, FILE, sample=sample), list(draws)


@pytest.mark.parametrize(("kind", "options"), STEPS)
def test_no_later_draw_moves_whether_a_step_acts_or_not(kind, options):
    """A step that acts does so with the numbers behind the one that decided it."""
    never, sometimes, always = (kind(**options, probability=chance) for chance in (0.0, 0.5, 1.0))
    acted = []
    for sample in range(32):
        # a flip that never happens draws one number, too
        done, notes = made([op.RandomFlip(probability=0.0), always], sample)
        untouched, untouched_notes = made([never], sample)
        image, image_notes = made([sometimes], sample)

        assert image_notes[-1] == notes[-1] == untouched_notes[-1]
        is_done = image_notes[0] != {"acts": False}
        assert np.array_equal(image, done if is_done else untouched)
        acted.append(is_done)
    assert 6 < sum(acted) < 26


def test_every_step_with_a_probability_is_tried_here():
    """A new step without an example fails this test; what joins samples draws from elsewhere."""
    kinds = {kind for kind in STEP_KINDS.values() if issubclass(kind, op.ChanceStep) and not issubclass(kind, JoinStep)}

    assert {kind for kind, _options in STEPS} == kinds


@pytest.mark.parametrize(("kind", "options"), STEPS)
def test_a_probability_of_one_is_in_no_fingerprint(kind, options):
    """A stream that was saved before there was a probability goes on."""
    always, sometimes = (named_by_content(kind(**options, probability=chance), {}) for chance in (1.0, 0.5))

    assert "probability" not in always
    assert sometimes == {**always, "probability": 0.5}


@pytest.mark.parametrize("chance", [0.5, 1.0])
@pytest.mark.parametrize(("kind", "options"), STEPS)
def test_a_step_says_whether_chance_decides_the_shape(kind, options, chance):
    """Rows of ``pack`` and buckets are planned by shapes before any number is drawn."""
    step = kind(**options, probability=chance)
    pipeline = Pipeline([Column("image", "encoded")], [op.Decode(), step], 0, has_rows=False)
    files = [memoryview(encode(np.resize(IMAGE, (height, width, 3)), ".png")) for height, width in ((24, 30), (16, 22))]
    shapes = [{pipeline.make({"image": file}, epoch, 0, 0)["image"].shape for epoch in range(40)} for file in files]

    assert step.draws_shape == (max(map(len, shapes)) > 1)
    assert step.fixes_shape == (len(set.union(*shapes)) == 1)


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (op.RandomCrop(size=(20, 20), padding=4, probability=0.5), (20, 20, 3)),
        (op.RandomCrop(size=(20, 10), probability=0.5), (20, None, 3)),
        (op.RandomResizedCrop(size=(10, 10), probability=0.5), (None, None, 3)),
        (op.CenterCrop(size=(10, 10), probability=0.5), (None, None, 3)),
        (op.Rotate(degrees=(-10, 10), probability=0.5), (20, 20, 3)),
        (op.Gray(probability=0.2), (20, 20, 3)),
    ],
)
def test_an_image_that_is_not_cropped_keeps_its_size(step, shape):
    """So its size is known only where it is that of the crop already."""
    assert columns_after([Column("image", shape=(20, 20, 3))], [step])["image"].shape == shape


def test_quarter_turns_at_random_leave_two_shapes():
    """An image that is not square is turned, or not."""
    step = op.Rotate(quarter_turns=(1,), probability=0.5)

    assert columns_after([Column("image", shape=(20, 30, 3))], [step])["image"].shape == (None, None, 3)


def test_gray_at_random_keeps_the_channels():
    """Some images would have one channel and others three."""
    with pytest.raises(StepInvalid, match=r"keeps the number of channels.*set channels = 3"):
        effect(op.Gray(channels=1, probability=0.2), {"image": Column("image", shape=(20, 20, 3))})
    grey = effect(op.Gray(channels=1, probability=0.2), {"image": Column("image", shape=(20, 20, 1))})
    assert grey["image"].shape == (20, 20, 1)


@pytest.mark.parametrize(("kind", "options"), STEPS)
def test_a_step_that_never_acts_is_not_random(kind, options):
    """A cache of decoded samples may keep what it makes; one that acts at times is random."""
    assert not kind(**options, probability=0.0).is_random
    assert kind(**options, probability=0.5).is_random


def test_boxes_stay_where_a_crop_does_not_act():
    """What follows the image is moved with it, or not at all."""
    boxes = np.array([[0, 0, 20, 20]], np.float32)
    columns = [Column("image", shape=(20, 20, 3)), Column("boxes", dtype="float32", shape=(1, 4))]
    steps = [op.Follow(boxes="boxes"), op.RandomCrop(size=SAME, padding=8, probability=0.5)]
    moved = []
    for sample in range(20):
        fields = run_fields(columns, steps, {"image": IMAGE, "boxes": boxes}, sample)
        moved.append(not np.array_equal(fields["image"], IMAGE))
        assert moved[-1] == (not np.array_equal(fields["boxes"], boxes))
    assert set(moved) == {True, False}
