"""An image that is its own mask.

Each step that moves pixels moves image and mask alike, where no pixels are mixed.
"""

import numpy as np
import pytest

from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.image import resample
from batchd.data.pipeline.image.geometry import planner_for
from batchd.data.samples.columns import Column
from support.images import encode, png_with_exif, stored_as
from support.pipelines import run_fields

LEVELS = np.random.default_rng(5).integers(0, 256, (60, 84), np.uint8)
FILL = 201
STEPS = {
    "resize, smaller": [op.Resize(size=(37, 23), interpolation="nearest")],
    "resize by a half": [op.Resize(size=(30, 42), interpolation="nearest")],
    "resize by three quarters": [op.Resize(size=(45, 63), interpolation="nearest")],
    "resize, larger": [op.Resize(size=(131, 99), interpolation="nearest")],
    "resize the shorter side": [op.Resize(shorter_side=41, interpolation="nearest"), op.CenterCrop(size=(40, 40))],
    "random_resized_crop": [op.RandomResizedCrop(size=(32, 32), interpolation="nearest")],
    "center_crop": [op.CenterCrop(size=(31, 31))],
    "random_crop": [op.RandomCrop(size=(33, 47), padding=5, fill=(FILL,))],
    "random_flip": [op.RandomFlip(direction="both")],
    "pad": [op.Pad(border=(1, 2, 3, 4), fill=(FILL,))],
    "quarter turns": [op.Rotate(quarter_turns=(0, 1, 2, 3)), op.CenterCrop(size=(50, 50))],
    "any angle": [op.Rotate(degrees=(-180, 180), interpolation="nearest", fill=(FILL,))],
    "a right angle, whose centres lie between pixels": [
        op.CenterCrop(size=(59, 84)),
        op.Rotate(degrees=(90, 90), interpolation="nearest", fill=(FILL,)),
    ],
    "many": [
        op.RandomCrop(size=(50, 60), padding=8, fill=(FILL,)),
        op.Rotate(degrees=(-30, 30), interpolation="nearest", fill=(FILL,)),
        op.RandomResizedCrop(size=(32, 48), interpolation="nearest"),
        op.Pad(size=(50, 50), fill=(FILL,)),
        op.Resize(size=(25, 25), interpolation="nearest"),
    ],
}


def test_every_step_that_moves_pixels_is_here() -> None:
    """A new step must be added to the table above."""
    moving = {step.op for steps in STEPS.values() for step in steps}

    assert all(planner_for(step) for steps in STEPS.values() for step in steps)
    assert moving == {"resize", "random_resized_crop", "center_crop", "random_crop", "random_flip", "pad", "rotate"}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("is_built", [True, False], ids=["extension", "numpy"])
@pytest.mark.parametrize("orientation", [1, 4, 6, 7])
@pytest.mark.parametrize("name", STEPS)
def test_an_image_stays_its_own_mask(monkeypatch, name, orientation, is_built) -> None:
    """The result is equal for every storage orientation, and behind a flip.

    "nearest" takes the pixel that contains a centre, as the mask does.
    """
    if is_built and not resample.IS_BUILT:
        pytest.skip("the extension was not built")
    monkeypatch.setattr(resample, "IS_BUILT", is_built)
    stored = png_with_exif(
        encode(stored_as(np.repeat(LEVELS[..., np.newaxis], 3, axis=2), orientation), ".png"), orientation
    )
    columns = [Column("image", "encoded"), Column("mask", shape=LEVELS.shape)]
    follow = op.Follow(mask="mask", mask_fill=FILL)
    for sample in range(5):
        steps = [op.Decode(), follow, op.RandomFlip(direction="both"), *STEPS[name], op.CenterCrop(size=(20, 20))]
        made = run_fields(columns, steps, {"image": memoryview(stored), "mask": LEVELS}, sample)

        assert np.array_equal(made["image"], np.repeat(made["mask"][..., np.newaxis], 3, axis=2))
