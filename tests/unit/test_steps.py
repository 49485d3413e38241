"""The steps as plain data, and what the daemon reads from them without seeing an image."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, Discriminator, ValidationError

from batchd.config.field_steps import Drop, Rename
from batchd.config.image_steps import CenterCrop, Decode, Layout, Normalize, RandomFlip, RandomResizedCrop, Resize
from batchd.config.number_steps import Cast, Clip, OneHot, Scale
from batchd.config.shape_steps import PadBatch, Ragged
from batchd.config.steps import STEP_KINDS, Step, step_from_plain, step_to_plain
from batchd.config.text_steps import Lookup, Lowercase, RemoveStopwords, TextBytes, Tokenize
from batchd.pipeline.fields import check_steps, columns_after, is_random, sample_fields
from batchd.sources.reader import image_columns
from batchd_wire.fields import Field

COLUMNS = image_columns(0)
CROP = RandomResizedCrop(size=(224, 160))
EVERY_STEP = [
    Decode(color="gray", exif="ignore", scale="off", max_pixels=10, max_bytes=20),
    Resize(shorter_side=256, interpolation="cubic"),
    Resize(size=(3, 4)),
    CenterCrop(size=(5, 6)),
    RandomResizedCrop(size=(7, 8), scale=(0.5, 0.75), ratio=(1, 1)),
    RandomFlip(probability=0.25, direction="vertical"),
    Normalize(mean=(0.5,), std=(0.25,), dtype="float16"),
    Layout(order="nchw"),
    OneHot(classes=10, dtype="uint8"),
    Cast(field="x", dtype="int16", truncate=True),
    Clip(min=-1.5, max=2),
    Scale(factor=2.5, offset=-1, dtype="float16"),
    Drop(fields=("a", "b")),
    Rename(field="a", to="b"),
    Tokenize(file=Path("/t/tokenizer.json"), max_length=8, padding="none", truncation=False, pad_id=3, to="ids"),
    Lowercase(field="caption"),
    RemoveStopwords(file=Path("/t/stop.txt"), case="exact"),
    Lookup(words=Path("/t/words"), table=Path("/t/table.npy"), max_words=4, unknown="zeros", truncation=False),
    TextBytes(length=100, truncation=False),
    PadBatch(max_shape=(512, 512, 3), fill=0.5, too_large="crop"),
    Ragged(field="tokens", max_shape=(128,), too_large="crop"),
]


class Document(BaseModel):
    """A file that holds steps, as the configuration does."""

    steps: list[Annotated[Step, Discriminator("op")]]


@pytest.mark.parametrize("step", EVERY_STEP, ids=lambda step: step.op)
def test_a_step_survives_the_way_to_a_worker(step):
    """Through plain data and JSON, every option stays as it is."""
    assert step_from_plain(json.loads(json.dumps(step_to_plain(step)))) == step


def test_every_step_is_known_by_its_op():
    """The table and the classes' own names agree."""
    assert {step.op: type(step) for step in EVERY_STEP} == STEP_KINDS


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, "the step None is not one of decode, resize"),
        ({"op": "rotate"}, "the step 'rotate' is not one of decode, resize"),
        ({"op": "layout"}, r"the step 'layout' has the options \['field', 'op', 'order'\], not \['op'\]"),
        ({"op": "layout", "field": "image", "order": "nchw", "more": 1}, "has the options"),
    ],
)
def test_plain_data_that_is_no_step_is_refused(plain, message):
    """Unknown names, missing options and options that do not exist."""
    with pytest.raises(ValueError, match=message):
        step_from_plain(plain)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"op": "decode", "colour": "rgb"}, ("decode", "colour")),
        ({"op": "decode", "max_pixels": 0}, ("decode", "max_pixels")),
        ({"op": "random_resized_crop", "size": [224, 0]}, ("random_resized_crop", "size", 1)),
        ({"op": "random_resized_crop", "size": [224]}, ("random_resized_crop", "size", 1)),
        ({"op": "random_resized_crop", "size": [2, 2], "scale": [0, 1]}, ("random_resized_crop", "scale", 0)),
        ({"op": "random_resized_crop", "size": [2, 2], "ratio": [2, 1]}, ("random_resized_crop",)),
        ({"op": "center_crop", "size": [99999, 1]}, ("center_crop", "size", 0)),
        ({"op": "random_flip", "probability": 1.5}, ("random_flip", "probability")),
        ({"op": "normalize", "std": [1, 0, 1]}, ("normalize", "std", 1)),
        ({"op": "normalize", "mean": [float("nan")]}, ("normalize", "mean", 0)),
        ({"op": "resize"}, ("resize",)),
        ({"op": "resize", "size": [2, 2], "shorter_side": 2}, ("resize",)),
        ({"op": "zoom"}, ()),
        ({"op": "one_hot"}, ("one_hot", "classes")),
        ({"op": "one_hot", "classes": 0}, ("one_hot", "classes")),
        ({"op": "cast", "dtype": "int128"}, ("cast", "dtype")),
        ({"op": "clip"}, ("clip",)),
        ({"op": "clip", "min": 2, "max": 1}, ("clip",)),
        ({"op": "clip", "min": 1e16}, ("clip", "min")),
        ({"op": "scale", "factor": float("inf")}, ("scale", "factor")),
        ({"op": "drop", "fields": []}, ("drop",)),
        ({"op": "rename", "field": "a", "to": "a"}, ("rename",)),
        ({"op": "rename", "field": "a", "to": "two words"}, ("rename",)),
        ({"op": "tokenize", "file": "", "max_length": 8}, ("tokenize",)),
        ({"op": "tokenize", "file": "t.json", "max_length": 8, "to": "t" * 60}, ("tokenize",)),
        ({"op": "lookup", "words": "w", "table": "t", "max_words": 0}, ("lookup", "max_words")),
        ({"op": "text_bytes", "length": 0}, ("text_bytes", "length")),
        ({"op": "pad_batch"}, ("pad_batch", "max_shape")),
        ({"op": "pad_batch", "max_shape": [4, 0]}, ("pad_batch", "max_shape", 1)),
        ({"op": "pad_batch", "max_shape": [4], "fill": float("nan")}, ("pad_batch", "fill")),
        ({"op": "pad_batch", "max_shape": [4], "too_large": "shrink"}, ("pad_batch", "too_large")),
        ({"op": "ragged", "max_shape": []}, ("ragged",)),
        ({"op": "ragged", "max_shape": [1] * 9}, ("ragged",)),
        ({"op": "ragged", "max_shape": [1 << 20, 1 << 20]}, ("ragged",)),
        ({"op": "ragged", "max_shape": [4], "fill": 1}, ("ragged", "fill")),
    ],
)
def test_the_configuration_names_the_option_that_is_wrong(options, place):
    """Ranges, unknown keys and contradictions are found where they stand."""
    with pytest.raises(ValidationError) as refused:
        Document.model_validate({"steps": [{"op": "decode"}, options]})

    assert [error["loc"] for error in refused.value.errors()] == [("steps", 1, *place)]


def test_every_option_is_described_in_the_schema():
    """The text under a field is what people read of it."""
    for name, definition in Document.model_json_schema()["$defs"].items():
        assert definition["description"], name
        assert all(option.get("description") for option in definition["properties"].values()), name


def test_steps_and_fields_load_without_pydantic_and_without_decoders():
    """A worker has no pydantic, the daemon has no cv2."""
    code = (
        "import sys, batchd.config.steps, batchd.pipeline.fields;"
        "print(*sorted({'pydantic', 'cv2', 'simplejpeg', 'numpy'} & sys.modules.keys()))"
    )

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert loaded.split() == []


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([], "the first step must be"),
        ([CROP], "the first step must be"),
        ([Decode(), Decode(), CROP], '"decode" cannot come after "decode"'),
        ([Decode()], "the images keep their different sizes"),
        ([Decode(), RandomFlip()], "the images keep their different sizes"),
        ([Decode(), Resize(shorter_side=256)], "the images keep their different sizes"),
        ([Decode(), CROP, Resize(shorter_side=256)], "the images keep their different sizes"),
        ([Decode(), CROP, Normalize(), RandomFlip()], '"random_flip" cannot come after "normalize"'),
        ([Decode(), CROP, Layout(), Normalize()], '"normalize" cannot come after "layout"'),
        ([Decode(), CROP, Normalize(), Normalize()], '"normalize" cannot come after "normalize"'),
        ([Decode(), CROP, Layout(), Layout()], '"layout" cannot come after "layout"'),
        ([Decode(color="gray"), CROP, Normalize()], '"normalize" has 3 numbers in mean, and the image has 1 channels'),
        ([Decode(), CROP, Normalize(std=(1,))], '"normalize" has 1 numbers in std, and the image has 3 channels'),
    ],
)
def test_steps_that_cannot_be_run_are_named(steps, problem):
    """Each mistake gives a sentence that says which step it is."""
    assert any(problem in found for found in check_steps(COLUMNS, steps)), check_steps(COLUMNS, steps)


@pytest.mark.parametrize(
    "steps",
    [
        [Decode(), CROP],
        [Decode(), CROP, RandomFlip(), Normalize(), Layout()],
        [Decode(), RandomFlip(), CROP],
        [Decode(), Resize(shorter_side=256), CenterCrop(size=(224, 224))],
        [Decode(color="gray"), CenterCrop(size=(9, 9)), Normalize(mean=(0.5,), std=(0.5,)), Layout(order="nhwc")],
    ],
)
def test_sensible_steps_have_no_problems(steps):
    """What the README shows, and what training and evaluation on ImageNet use."""
    assert check_steps(COLUMNS, steps) == []


def test_fields_follow_from_the_steps():
    """Type and shape of the image, and the numbers that are always there."""
    numbers = (Field("label", "int64", ()), Field("index", "int64", ()))
    floats = [Decode(), CROP, Normalize(dtype="float16"), Layout()]

    assert sample_fields(COLUMNS, [Decode(), CROP], "substitute") == (Field("image", "uint8", (224, 160, 3)), *numbers)
    assert sample_fields(COLUMNS, floats, "fail") == (Field("image", "float16", (3, 224, 160)), *numbers)
    assert sample_fields(COLUMNS, [Decode(), CROP], "mask")[-1] == Field("valid", "bool", ())


def test_the_last_size_counts():
    """Whatever came before it."""
    steps = [Decode(color="gray"), CROP, CenterCrop(size=(20, 30)), RandomFlip()]

    assert columns_after(COLUMNS, steps)["image"].shape == (20, 30, 1)


@pytest.mark.parametrize(
    ("steps", "random"),
    [
        ([Decode(), CROP], True),
        ([Decode(), Resize(size=(2, 2)), RandomFlip()], True),
        ([Decode(), Resize(size=(2, 2)), RandomFlip(probability=0)], False),
        ([Decode(), Resize(size=(2, 2)), RandomFlip(probability=1)], False),
        ([Decode(), Resize(shorter_side=9), CenterCrop(size=(2, 2)), Normalize()], False),
    ],
)
def test_steps_without_chance_are_recognised(steps, random):
    """So that a sample's bytes may be kept from one epoch to the next."""
    assert is_random(steps) is random
