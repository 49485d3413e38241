"""The cut of a pipeline for a cache of decoded samples, and equal bytes with and without it."""

import re
from pathlib import Path

import numpy as np
import pytest

from batchd.data.pipeline.cache_split import crop_problem, cropped_files, cut_of, cut_problem, steps_of
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import OneHot, Pick, Rename
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.shapes.options import Pack
from batchd.data.pipeline.text.options import Chat, Tokenize
from batchd.data.samples.columns import Column
from batchd.data.sources.cache.record import pack, unpack
from support.images import encode, jpeg, jpeg_with_exif, photo

CROP = op.RandomResizedCrop(size=(48, 40))
FLIP = op.RandomFlip()
TOKENIZE = Tokenize(file=Path("/tokenizer.json"), max_length=9, padding="none")
NORMALIZE = op.Normalize(mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
COLUMNS = [Column("image", "encoded"), Column("label", dtype="int64"), Column("mask", "encoded")]
PIPELINES = {
    "crop": [op.Decode(), CROP, FLIP],
    "resized": [op.Decode(), op.Resize(shorter_side=80), op.RandomCrop(size=(64, 64)), FLIP, NORMALIZE],
    "whole": [op.Decode(), op.Resize(size=(48, 40)), FLIP, NORMALIZE, op.Layout()],
    "colours": [op.Decode(color="bgr"), op.CenterCrop(size=(90, 90)), op.Gray(), op.ColorJitter(brightness=0.3), CROP],
    "padded": [
        op.Decode(color="gray"),
        op.Pad(size=(640, 640)),
        op.Rotate(degrees=(-10.0, 10.0)),
        op.Cutout(size=(8, 8)),
        CROP,
    ],
    "follow": [op.Decode(), op.Follow(mask="mask"), op.Resize(shorter_side=70), CROP, FLIP],
    "still": [OneHot(field="label", classes=5), op.Decode(), op.Resize(size=(32, 32)), NORMALIZE],
}


def test_the_cut_is_before_random_steps_and_steps_that_make_numbers():
    """The first such step decides."""
    cuts = {name: [step.op for step in steps[: cut_of(steps)]] for name, steps in PIPELINES.items()}

    assert cuts == {
        "crop": ["decode"],
        "resized": ["decode", "resize"],
        "whole": ["decode", "resize"],
        "colours": ["decode", "center_crop", "gray"],
        "padded": ["decode", "pad"],
        "follow": ["decode", "follow", "resize"],
        "still": ["one_hot", "decode", "resize"],
    }


@pytest.mark.parametrize("step", [TOKENIZE, Chat(tokenizer=TOKENIZE.file, template="gemma", max_length=9)])
def test_tokens_are_kept_before_they_get_a_place_in_a_row(step):
    """Each text is tokenized once, and packed in each epoch."""
    steps = [step, Pack(field="tokens", length=9)]

    assert cut_problem(steps) is None
    assert steps[: cut_of(steps)] == [step]


def test_a_short_side_is_a_resize_after_decode():
    """It also comes after the step that declares followers, so that these are resized as well."""
    resize = op.Resize(shorter_side=256)

    assert steps_of((op.Decode(), CROP), 256) == (op.Decode(), resize, CROP)
    followed = (op.Decode(), op.Follow(mask="mask"), CROP)
    assert steps_of(followed, 256) == (op.Decode(), op.Follow(mask="mask"), resize, CROP)
    assert steps_of(followed, None) == followed
    assert steps_of((op.Decode(field="photo"), CROP), 9)[1] == op.Resize(field="photo", shorter_side=9)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([OneHot(field="label", classes=5)], "no step decodes"),
        ([FLIP, op.Decode()], r'"random_flip" \(pipeline\[0\]\) is random and is before "decode"'),
        ([Call(function="a:b", random=False), op.Decode()], r'"call" \(pipeline\[0\]\) runs in each epoch'),
        ([Pick(field="captions"), TOKENIZE], r'is random and is before "tokenize", so no tokens are the same'),
    ],
)
def test_a_pipeline_without_a_cut_gets_a_remedy(steps, text):
    """Every other pipeline can be cut."""
    problem = cut_problem(steps)

    assert problem is not None
    assert re.search(text, problem)
    assert 'cache = "encoded"' in problem
    assert [cut_problem(each) for each in PIPELINES.values()] == [None] * len(PIPELINES)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("kind", ["jpeg", "large", "exif", "png"])
def test_a_cache_does_not_change_any_bytes(name, kind):
    """Each epoch has the same bytes from new pixels and from cached ones."""
    steps = PIPELINES[name]
    image = photo(480, 600) if kind == "large" else photo(120, 150)
    data = {"png": lambda: encode(image, ".png"), "exif": lambda: jpeg_with_exif(jpeg(image), 6)}.get(
        kind, lambda: jpeg(image)
    )()
    grey = encode(np.ascontiguousarray(image[..., 0]), ".png")
    values = {"image": memoryview(data), "label": np.int64(3), "mask": memoryview(grey)}
    columns = COLUMNS if name == "follow" else COLUMNS[:2]
    values = {column.name: values[column.name] for column in columns}
    if kind == "exif" and name == "follow":
        pytest.skip("a mask has the orientation of its displayed image")
    cut = cut_of(steps)
    maker = Pipeline(columns, steps[:cut], 7, has_rows=False)
    rest = Pipeline(list(maker.columns.values()), steps[cut:], 7)
    kept = pack(maker.make(values, 0, 5, 0))

    for epoch in range(6):
        fresh, found = (
            {name: np.zeros(made.fixed_shape, made.dtype) for name, made in rest.columns.items()} for _ in "ab"
        )
        rest.run(maker.make(values, epoch, 5, 1), epoch, 5, 0, fresh)
        rest.run(unpack(memoryview(kept.facts), memoryview(b"".join(kept.values)))[0], epoch, 5, 0, found)
        for field in fresh:
            assert np.array_equal(fresh[field], found[field]), field
        assert fresh["image"].any()


def test_files_that_are_cropped_first_may_have_access_points():
    """This needs that no function and no earlier step reads their bytes."""
    limited = op.Decode(field="photo", max_bytes=5000)

    assert cropped_files([op.Decode(), CROP, FLIP]) == {"image": op.Decode().max_bytes}
    assert cropped_files([op.Decode(), op.Follow(mask="mask"), op.CenterCrop(size=(8, 8))]) == {
        "image": op.Decode().max_bytes
    }
    assert cropped_files([op.Decode(), limited, op.RandomCrop(field="photo", size=(8, 8)), FLIP]) == {"photo": 5000}
    for steps in (
        [op.Decode(), op.Resize(shorter_side=80), CROP],
        [op.Decode(), FLIP, CROP],
        [op.Decode()],
        [Call(function="a:b"), op.Decode(), CROP],
        [op.Decode(), Call(function="a:b"), CROP],
        [Rename(field="other", to="image"), op.Decode(), CROP],
    ):
        assert cropped_files(steps) == {}
        assert "and there is none" in crop_problem(steps)
    assert crop_problem([op.Decode(), CROP]) is None
