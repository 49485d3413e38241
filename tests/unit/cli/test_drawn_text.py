"""What random steps have drawn, as `batchd replay` says it."""

import pytest

from batchd.cli.replay import drawn_text
from batchd.commands.history.batches import Draw
from batchd.data.pipeline.augment import options as augment
from batchd.data.pipeline.image.options import Cutout, Decode, Gray, RandomCrop, Resize, Rotate
from support.images import encode, photo
from support.pipelines import image_pipeline, run

FILE = encode(photo(40, 60), ".png")


@pytest.mark.parametrize(
    ("step", "starts"),
    [
        (Gray(probability=0.5), {"done", "not done"}),
        (Rotate(degrees=(5, 9), probability=0.5), {"degrees", "not done"}),
        (RandomCrop(size=(30, 30)), {"from"}),
        (Cutout(size=(3, 3)), {"from"}),
        (augment.Erase(), {"from"}),
        (augment.Sharpen(factor=(1, 2)), {"factor"}),
        (augment.Blur(), {"sigma"}),
        (augment.Affine(degrees=(-9, 9)), {"degrees"}),
        (augment.Perspective(), {"corners at"}),
        (augment.Elastic(), {"alpha"}),
        (augment.RandAugment(operation_probability=0.3), {"nothing", "equalize", "rotate "}),
        (augment.AugMix(), {"chains of"}),
        (
            augment.Choose(of=(augment.Invert(), augment.Blur(), RandomCrop(size=(30, 30)))),
            {"chosen invert", "chosen blur", "chosen random_crop"},
        ),
    ],
    ids=lambda value: getattr(value, "op", ""),
)
def test_each_step_says_what_it_drew(step, starts):
    """In words and short numbers; nothing of Python's own notation."""
    pipeline = image_pipeline([Decode(), step, Resize(size=(8, 8))])
    draws, texts = pipeline.note_draws(), []
    for sample in range(60):
        run(pipeline, FILE, sample=sample)
        texts.append(drawn_text(Draw(step.op, step.field, draws[0])))

    assert all(text.startswith(f"{step.op}: ") for text in texts)
    assert all(any(start in text for text in texts) for start in starts), texts
    assert not any(mark in text for text in texts for mark in "[]{}()'")
