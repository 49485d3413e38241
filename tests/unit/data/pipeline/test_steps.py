"""The steps as plain data, and what the daemon reads from them without seeing an image."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from batchd.config.schema import json_schema
from batchd.data.pipeline.effects import Columns, effect
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.options import STEP_KINDS, StepOptions, step_from_plain, step_to_plain
from batchd.data.pipeline.sample_fields import columns_after, sample_fields
from batchd.data.pipeline.stages import Stage, make_stage
from batchd.data.pipeline.views.options import View
from batchd.data.samples.columns import Column, parse_column
from batchd.data.samples.kinds import OneOf
from batchd.data.sources.files.index import image_columns
from batchd_wire.fields import Field
from support.steps import check_steps, op

COLUMNS = image_columns(0)
CROP = op("random_resized_crop", size=(224, 160))
EVERY_STEP = [
    op("decode_video", frames=4, fps=8.0, start=2.5, codecs=("ffv1", "h264"), times="seconds"),
    op("decode_video", frames=4, stride=2, start="at", clips=3),
    op("decode", color="gray", exif="ignore", scale="off", max_pixels=10, max_bytes=20),
    op("resize", shorter_side=256, interpolation="cubic"),
    op("resize", size=(3, 4)),
    op("center_crop", size=(5, 6)),
    op("random_resized_crop", size=(7, 8), scale=(0.5, 0.75), ratio=(1, 1)),
    op("crop_to_bucket", pixels=4096, multiple_of=16, ratio=(0.5, 2), random=True, interpolation="cubic"),
    op("crop_to_bucket", sizes=((64, 64), (48, 80))),
    op("random_flip", probability=0.25, direction="vertical"),
    op("normalize", mean=(0.5,), std=(0.25,), dtype="float16"),
    op("layout", order="nchw"),
    op("one_hot", classes=10, dtype="uint8"),
    op("cast", field="x", dtype="int16", truncate=True),
    op("clip", min=-1.5, max=2),
    op("scale", factor=2.5, offset=-1, dtype="float16"),
    op("drop", fields=("a", "b")),
    op("rename", field="a", to="b"),
    op("tokenize", file=Path("/t/tokenizer.json"), max_length=8, padding="none", truncation=False, pad_id=3, to="ids"),
    op("lowercase", field="caption"),
    op("remove_stopwords", file=Path("/t/stop.txt"), case="exact"),
    op("lookup", words=Path("/t/words"), table=Path("/t/table.npy"), max_words=4, unknown="zeros", truncation=False),
    op("text_bytes", length=100, truncation=False),
    op("pad_batch", max_shape=(512, 512, 3), fill=0.5, too_large="crop"),
    op("ragged", field="tokens", max_shape=(128,), too_large="crop"),
    op("patches", field="photo", size=14),
    op("interleave", field="words", images="photos", image_token=3, size=14, also=("mask",), merge=2),
    op("pack", field="tokens", length=128, too_long="drop", patches=99),
    op("resize", max_pixels=9999, min_pixels=99, multiple_of=7),
    op("pack", field="tokens", length=128, too_long="drop", documents=9, window=77, fill=-1),
    op("random_crop", size=(9, 10), padding=4, fill=(1, 2, 3)),
    op("pad", size=(11, 12), place="top_left", fill=(7,)),
    op("pad", border=(1, 2, 3, 4)),
    op("rotate", quarter_turns=(0, 3)),
    op("rotate", degrees=(-10.0, 10.5), interpolation="nearest", fill=(255,)),
    op("color_jitter", brightness=0.5, contrast=0.25, saturation=2.0, hue=0.125),
    op("gray", channels=1),
    op("cutout", holes=2, size=(13, 14), fill=(1, 2, 3)),
    op("subtract_mean", mean=(1.5,), scale=0.5),
    op("to", dtype="float16", scale=False, layout="nhwc"),
    op("follow", mask="mask", mask_fill=255, boxes="boxes", points="points"),
    op("box_form", form="cxcywh", relative=True),
    op("map_ids", field="label", table={"7": 3}),
    op("spectrogram", n_fft=512, window_length=300, hop=100, window="hamming", edges="cut", power=1, log="db", top=80),
    op("log_mel", rate=8000, bands=40, low_hz=20, high_hz=3800, scale="slaney", norm=True, log="log10", floor=1e-8),
    op("mfcc", window="povey", edges="zeros", drop_last=True, remove_mean=True, preemphasis=0.97, coefficients=13),
    op("normalize_loudness", level_db=-3, of="peak"),
    op("gain", db=(-1, 2), probability=0.5),
    op("speed", factors=(0.5, 1.25)),
    op("trim", top_db=30, frame=400, hop=160),
    op("add_noise", root=Path("/t/noise"), patterns=("*.ogg",), rate=8000, formats=("ogg",), snr_db=(-5, 5)),
    op("room", root=Path("/t/rooms"), normalize="energy", max_seconds=1, probability=0.5),
    op("spec_augment", time_masks=1, time_width=9, time_share=0.5, frequency_masks=3, frequency_width=4, fill=-1),
    op("solarize", threshold=100, probability=0.5),
    op("posterize", bits=3),
    op("equalize"),
    op("autocontrast"),
    op("invert"),
    op("sharpen", factor=(0.5, 1.5)),
    op("blur", sigma=(1, 3)),
    op("affine", degrees=(-5, 5), translate=(0.1, 0), scale=(0.5, 2), shear_x=(1, 2), shear_y=(-1, 1), fill=(1,)),
    op("perspective", distortion=0.25, interpolation="nearest"),
    op("rand_augment", count=3, magnitude=7, deviation=0, operation_probability=1, fill=(1,)),
    op("trivial_augment", interpolation="nearest"),
    op("auto_augment", policy="svhn"),
    op("augmix", severity=4, width=2, depth=3),
    op(
        "choose",
        of=(op("blur", sigma=(1, 2)), op("choose", of=(op("gray"), op("random_crop", size=(4, 5))), probability=0.5)),
        weights=(1, 2.5),
    ),
    op("elastic", alpha=3, sigma=2),
    op("resize", shorter_side=20, max_longer_side=99, multiple_of=8, interpolation="lanczos"),
    op("resize", longer_side=20),
    op("letterbox", size=(9, 8), enlarge=False, place="top_left", fill=(1, 2, 3)),
    op("erase", area=(0.1, 0.2), aspect=(1, 2), count=3, fill=(1, 2, 3)),
    op("affine", size=(5, 6)),
    op("mosaic", size=(5, 6), fill=(1, 2, 3), until_epoch=90, probability=0.5),
    op("mixup", alpha=8),
    op("copy_paste", paste="mirrored", fraction=0.25, max_overlap=0.5),
    op("call", function="package.module:name", outputs={"score": "float32", "image": "uint8[2,2,3]"}, random=False),
    op("pick", field="captions", which="first"),
    op("chat", tokenizer=Path("/data/tokenizer.json"), template="llama3", max_length=9, loss=("user", "tool")),
    op("decode_audio", rate=16000, seconds=1.5, start="begin", formats=("flac", "wav")),
    op("views", into={"a": View(count=2, steps=(CROP, op("rotate", quarter_turns=(0, 3)))), "b": View(steps=())}),
]


class Document(BaseModel):
    """A file that has steps, as the configuration does."""

    steps: list[Annotated[StepOptions, OneOf(STEP_KINDS, "op")]]


@pytest.mark.parametrize("step", EVERY_STEP, ids=lambda step: step.op)
def test_a_step_survives_the_way_to_a_worker(step):
    """Every option survives plain data and JSON."""
    assert step_from_plain(json.loads(json.dumps(step_to_plain(step)))) == step


def test_every_step_is_known_by_its_op():
    """The table of steps and the classes' own names agree."""
    assert {step.op: type(step) for step in EVERY_STEP} == STEP_KINDS


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, "the step None is not one of decode, resize, center_crop"),
        ({"op": "zoom"}, "the step 'zoom' is not one of decode, resize, center_crop"),
        ({"op": "layout"}, r"the step 'layout' has the options \['field', 'op', 'order'\], not \['op'\]"),
        ({"op": "layout", "field": "image", "order": "nchw", "more": 1}, "has the options"),
    ],
)
def test_plain_data_that_is_no_step_is_refused(plain, message):
    """Unknown names, missing options and unknown options are refused."""
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
        ({"op": "random_flip", "direction": "diagonal"}, ("random_flip", "direction")),
        ({"op": "random_crop"}, ("random_crop", "size")),
        ({"op": "random_crop", "size": [2, 2], "fill": [256]}, ("random_crop", "fill", 0)),
        ({"op": "pad"}, ("pad",)),
        ({"op": "pad", "size": [2, 2], "border": [1, 1, 1, 1]}, ("pad",)),
        ({"op": "pad", "border": [1, 1, -1, 1]}, ("pad", "border", 2)),
        ({"op": "rotate"}, ("rotate",)),
        ({"op": "rotate", "quarter_turns": [1], "degrees": [0, 1]}, ("rotate",)),
        ({"op": "rotate", "quarter_turns": []}, ("rotate",)),
        ({"op": "rotate", "quarter_turns": [4]}, ("rotate", "quarter_turns", 0)),
        ({"op": "rotate", "degrees": [10, -10]}, ("rotate",)),
        ({"op": "rotate", "degrees": [0, 181]}, ("rotate", "degrees", 1)),
        ({"op": "color_jitter", "hue": 0.6}, ("color_jitter", "hue")),
        ({"op": "gray", "channels": 2}, ("gray", "channels")),
        ({"op": "cutout", "size": [2, 2], "holes": 0}, ("cutout", "holes")),
        ({"op": "to", "dtype": "float64"}, ("to", "dtype")),
        ({"op": "follow"}, ("follow",)),
        ({"op": "follow", "mask": "image"}, ("follow",)),
        ({"op": "follow", "mask": "m", "mask_fill": 1 << 24}, ("follow", "mask_fill")),
        ({"op": "follow", "mask": "m", "labels": ["a"]}, ("follow",)),
        ({"op": "follow", "mask": "m", "min_visible": 0.5}, ("follow",)),
        ({"op": "follow", "boxes": "b", "labels": ["a"], "keep_empty": True}, ("follow",)),
        ({"op": "follow", "boxes": "b", "labels": ["a", "a"]}, ("follow",)),
        ({"op": "follow", "boxes": "b", "min_visible": 1.5}, ("follow", "min_visible")),
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
    """Values out of range, unknown keys and contradictions are reported at their place."""
    with pytest.raises(ValidationError) as refused:
        Document.model_validate({"steps": [{"op": "decode"}, options]})

    assert [error["loc"] for error in refused.value.errors()] == [("steps", 1, *place[1:])]


def test_every_option_is_described_in_the_schema():
    """Users read these descriptions in the generated reference and in editors."""
    for name, definition in json_schema()["$defs"].items():
        assert definition["description"], name
        assert all(option.get("description") for option in definition["properties"].values()), name


def test_steps_and_fields_load_without_pydantic_and_without_decoders():
    """A worker has no pydantic, and the daemon has no cv2."""
    code = (
        "import sys, batchd.data.pipeline.options, batchd.data.pipeline.sample_fields;"
        "print(*sorted({'pydantic', 'cv2', 'simplejpeg', 'numpy'} & sys.modules.keys()))"
    )

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert loaded.split() == []


def test_a_daemon_loads_only_the_families_of_its_steps():
    """A step of another family is found when it is used first."""
    code = (
        "import sys\nfrom batchd.data.pipeline.effects import effect\n"
        "from batchd.data.pipeline.options import STEP_KINDS\n"
        "import batchd.data.pipeline.sample_fields\n"
        "families = lambda: [name for name in ('image', 'text') if f'batchd.data.pipeline.{name}.effects' in sys.modules]\n"
        "print(families())\n"
        "for op in ('decode', 'lowercase'):\n"
        "    try:\n        effect(STEP_KINDS[op](), {})\n"
        "    except Exception as error:\n        print(type(error).__name__, families())\n"
    )

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert loaded.splitlines() == ["[]", "NoSuchField ['image']", "NoSuchField ['image', 'text']"]


def test_a_step_without_an_effect_is_an_error_of_the_program():
    """Its family has registered none."""

    @dataclass(frozen=True)
    class Unknown(StepOptions):
        op: str = "unknown"

    Unknown.__module__ = "batchd.data.pipeline.call.options"
    with pytest.raises(NotImplementedError, match="unknown has no effect"):
        effect(Unknown(), {})


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([], "the first step must be"),
        ([CROP], "the first step must be"),
        ([op("decode"), op("decode"), CROP], '"decode" cannot come after "decode"'),
        ([op("decode")], "the images keep their different sizes"),
        ([op("decode"), op("random_flip")], "the images keep their different sizes"),
        ([op("decode"), op("resize", shorter_side=256)], "the images keep their different sizes"),
        ([op("decode"), CROP, op("resize", shorter_side=256)], "the images keep their different sizes"),
        ([op("decode"), CROP, op("normalize"), op("random_flip")], '"random_flip" cannot come after "normalize"'),
        ([op("decode"), CROP, op("layout"), op("normalize")], '"normalize" cannot come after "layout"'),
        ([op("decode"), CROP, op("normalize"), op("normalize")], '"normalize" cannot come after "normalize"'),
        ([op("decode"), CROP, op("layout"), op("layout")], '"layout" cannot come after "layout"'),
        (
            [op("decode", color="gray"), CROP, op("normalize")],
            '"normalize" has 3 numbers in mean, and the image has 1 channel',
        ),
        (
            [op("decode"), CROP, op("normalize", std=(1,))],
            '"normalize" has 1 number in std, and the image has 3 channels',
        ),
        (
            [op("decode"), CROP, op("subtract_mean", mean=(1,))],
            '"subtract_mean" has 1 number in mean, and the image has 3 channels',
        ),
        ([op("decode"), CROP, op("subtract_mean"), op("gray")], '"gray" cannot come after "subtract_mean"'),
        ([op("decode"), CROP, op("to"), op("random_flip")], '"random_flip" cannot come after "to"'),
        ([op("decode"), CROP, op("to"), op("layout")], '"layout" cannot come after "to"'),
        ([op("decode"), op("pad", border=(1, 1, 1, 1))], "the images keep their different sizes"),
        ([op("decode"), CROP, op("pad", size=(223, 300))], '"pad" cannot make 224 x 160 pixels 223 x 300'),
        ([op("decode"), CROP, op("rotate", quarter_turns=(0, 1))], "the images keep their different sizes"),
        (
            [op("decode"), CROP, op("cutout", size=(2, 2), fill=(1, 2))],
            '"cutout" has 2 numbers in fill, and the image has 3',
        ),
        (
            [op("decode", color="gray"), op("pad", size=(9, 9), fill=(1, 2, 3))],
            '"pad" has 3 numbers in fill, and the image has 1',
        ),
    ],
)
def test_steps_that_cannot_be_run_are_named(steps, problem):
    """Each mistake gives a sentence that names the step."""
    assert any(problem in found for found in check_steps(COLUMNS, steps)), check_steps(COLUMNS, steps)


@pytest.mark.parametrize(
    "steps",
    [
        [op("decode"), CROP],
        [op("decode"), CROP, op("random_flip"), op("normalize"), op("layout")],
        [op("decode"), op("random_flip"), CROP],
        [op("decode"), op("resize", shorter_side=256), op("center_crop", size=(224, 224))],
        [
            op("decode", color="gray"),
            op("center_crop", size=(9, 9)),
            op("normalize", mean=(0.5,), std=(0.5,)),
            op("layout", order="nhwc"),
        ],
    ],
)
def test_sensible_steps_have_no_problems(steps):
    """These are the steps of the README, and of training and evaluation on ImageNet."""
    assert check_steps(COLUMNS, steps) == []


FOLLOWED = [
    *COLUMNS,
    Column("mask", "encoded"),
    Column("boxes", dtype="float32", shape=(5, 4)),
    Column("one", shape=(4, 5, 3)),
]
FOLLOW = op("follow", mask="mask", boxes="boxes")


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([op("decode"), CROP, FOLLOW], '"follow" comes right behind "decode"'),
        ([op("decode"), FOLLOW, FOLLOW, CROP], "and once"),
        ([FOLLOW, op("decode"), CROP], "the first step must be"),
        (
            [op("decode"), op("follow", mask="label"), CROP],
            "mask = 'label', which is int64; a mask is the bytes of a PNG",
        ),
        ([op("decode"), op("follow", boxes="mask"), CROP], "boxes = 'mask', which is image; boxes are float32[?,4]"),
        (
            [op("decode"), op("follow", points="boxes"), CROP],
            "points = 'boxes', which is float32[5,4]; points are float32[?,2]",
        ),
        (
            [op("decode"), op("follow", boxes="boxes", labels=("label",)), CROP],
            "labels = 'label', which is int64; labels have a row for each box",
        ),
        (
            [op("decode"), op("follow", boxes="boxes", labels=("nothing",)), CROP],
            "labels = 'nothing', and a sample has 'image'",
        ),
        ([op("decode"), op("follow", points="nothing"), CROP], "points = 'nothing', and a sample has 'image', 'label'"),
        (
            [op("decode"), FOLLOW, CROP, op("rename", field="image", to="a"), op("follow", field="one", mask="mask")],
            "mask = 'mask', which follows another image already",
        ),
        (
            [op("decode"), FOLLOW, CROP, op("to", field="mask"), op("random_flip")],
            "\"random_flip\" is done to 'mask' as well, which follows 'image', and is float32[1,224,160] by then",
        ),
    ],
)
def test_followers_that_cannot_follow_are_named(steps, problem):
    """The field is no mask or no boxes, or "follow" is too late, or the field changes midway."""
    assert any(problem in found for found in check_steps(FOLLOWED, steps)), check_steps(FOLLOWED, steps)


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (
            [op("rename", field="mask", to="classes")],
            "is done to 'mask' as well, which follows 'image', and is not there any more",
        ),
        (
            [op("drop", fields=("boxes",))],
            "is done to 'boxes' as well, which follows 'image', and is not there any more",
        ),
        (
            [op("cast", field="mask", dtype="int64")],
            "is done to 'mask' as well, which follows 'image', and is int64[224,160]",
        ),
    ],
)
def test_a_field_that_stops_following_is_reported(steps, problem):
    """A dropped, renamed or changed field cannot follow a flip; after the last geometry it may."""
    assert check_steps(FOLLOWED, [op("decode"), FOLLOW, CROP, *steps, op("normalize")]) == []
    assert any(
        problem in found for found in check_steps(FOLLOWED, [op("decode"), FOLLOW, CROP, *steps, op("random_flip")])
    )


def test_a_mask_has_the_size_of_its_image():
    """This holds after each step, without a channel axis, whatever the type of the image."""
    steps = [op("decode"), FOLLOW, CROP, op("rotate", quarter_turns=(1,)), op("color_jitter", brightness=0.5), op("to")]

    assert [column.text for column in columns_after(FOLLOWED, steps).values()] == [
        "float32[3,160,224]",
        "int64",
        "uint8[160,224]",
        "float32[5,4]",
        "uint8[4,5,3]",
    ]


@pytest.mark.parametrize(
    ("source", "steps", "made"),
    [
        ("uint8[28,28]", [op("random_crop", size=(28, 28), padding=4)], "uint8[28,28,1]"),
        ("uint8[28,28]", [op("layout")], "uint8[1,28,28]"),
        ("uint8[28,28]", [op("normalize", mean=(0.5,), std=(0.5,))], "float32[28,28,1]"),
        ("uint8[?,?]", [op("resize", size=(4, 5)), op("gray")], "uint8[4,5,3]"),
        (
            "uint8[?,30,3]",
            [op("pad", border=(1, 2, 3, 4)), op("pad", size=(40, 40)), op("gray", channels=1)],
            "uint8[40,40,1]",
        ),
        ("uint8[20,30,3]", [op("rotate", quarter_turns=(1, 3)), op("pad", border=(1, 2, 3, 4))], "uint8[33,27,3]"),
        ("uint8[20,20,3]", [op("rotate", quarter_turns=(0, 1))], "uint8[20,20,3]"),
        ("uint8[20,30,3]", [op("rotate", quarter_turns=(0, 2))], "uint8[20,30,3]"),
        ("uint8[20,30,3]", [op("rotate", degrees=(0, 90))], "uint8[20,30,3]"),
        ("uint8[20,30,3]", [op("subtract_mean")], "float32[20,30,3]"),
        ("uint8[20,30,4]", [op("cutout", size=(2, 2)), op("to", dtype="uint8")], "uint8[4,20,30]"),
    ],
)
def test_pixels_of_a_source_need_no_decode(source, steps, made):
    """Grey pixels without a channel axis get one in the first step."""
    column = parse_column("image", source)

    assert check_steps([column], steps) == []
    assert columns_after([column], steps)["image"].text == made


@pytest.mark.parametrize(
    ("source", "step", "problem"),
    [
        (
            "uint8[4,5,?]",
            op("random_flip"),
            "whose number of channels is known and at most 4, and 'image' is uint8[4,5,?]",
        ),
        ("uint8[4,5,5]", op("random_flip"), "and at most 4, and 'image' is uint8[4,5,5]"),
        ("uint8[4,5,4]", op("gray"), '"gray" is for images of 1 or 3 channels'),
        ("uint8[4,5,2]", op("color_jitter", hue=0.1), '"color_jitter" is for images of 1 or 3 channels'),
        ("float32[4,5]", op("random_flip"), "\"random_flip\" cannot be done to 'image', which is float32[4,5]"),
        ("float32[4,5]", op("layout"), "\"layout\" cannot be done to 'image', which is float32[4,5]"),
    ],
)
def test_pixels_that_a_step_cannot_take_are_named(source, step, problem):
    """The message has the declared type."""
    assert any(problem in found for found in check_steps([parse_column("image", source)], [step]))


def test_fields_follow_from_the_steps():
    """They have the image's type and shape, and the numbers that every batch has."""
    numbers = (Field("label", "int64", ()), Field("index", "int64", ()))
    floats = [op("decode"), CROP, op("normalize", dtype="float16"), op("layout")]

    assert sample_fields(COLUMNS, [op("decode"), CROP], "substitute") == (
        Field("image", "uint8", (224, 160, 3)),
        *numbers,
    )
    assert sample_fields(COLUMNS, floats, "fail") == (Field("image", "float16", (3, 224, 160)), *numbers)
    assert sample_fields(COLUMNS, [op("decode"), CROP], "mask")[-1] == Field("valid", "bool", ())


def test_the_last_size_counts():
    """Earlier sizes have no effect on the result."""
    steps = [op("decode", color="gray"), CROP, op("center_crop", size=(20, 30)), op("random_flip")]

    assert columns_after(COLUMNS, steps)["image"].shape == (20, 30, 1)


@pytest.mark.parametrize(
    ("steps", "random"),
    [
        ([op("decode"), CROP], True),
        ([op("decode"), op("resize", size=(2, 2)), op("random_flip")], True),
        ([op("decode"), op("resize", size=(2, 2)), op("random_flip", probability=0)], False),
        ([op("decode"), op("resize", size=(2, 2)), op("random_flip", probability=1)], False),
        ([op("decode"), op("resize", shorter_side=9), op("center_crop", size=(2, 2)), op("normalize")], False),
        ([op("decode"), op("random_crop", size=(2, 2))], True),
        ([op("decode"), op("resize", size=(2, 2)), op("cutout", size=(1, 1))], True),
        (
            [op("decode"), op("resize", size=(2, 2)), op("rotate", quarter_turns=(2, 2)), op("rotate", degrees=(5, 5))],
            False,
        ),
        ([op("decode"), op("resize", size=(2, 2)), op("rotate", quarter_turns=(0, 2))], True),
        ([op("decode"), op("resize", size=(2, 2)), op("rotate", degrees=(0, 5))], True),
        ([op("decode"), op("resize", size=(2, 2)), op("color_jitter")], False),
        ([op("decode"), op("resize", size=(2, 2)), op("color_jitter", hue=0.1)], True),
        (
            [
                op("decode"),
                op("follow", mask="mask"),
                op("pad", size=(2, 2)),
                op("gray"),
                op("subtract_mean"),
                op("to"),
            ],
            False,
        ),
    ],
)
def test_steps_without_chance_are_recognised(steps, random):
    """Without randomness, a sample's bytes can be kept for the next epoch."""
    assert any(step.is_random for step in steps) is random


@dataclass(frozen=True, slots=True, kw_only=True)
class Negate(StepOptions):
    """A step of these tests: its options class, the first of three places."""

    op: str = "negate"
    field: str = "score"


@effect.register
def _negated_column(step: Negate, columns: Columns) -> Columns:
    return {**columns, step.field: replace(columns[step.field], made_by=step.op)}


@make_stage.register
def _negate(step: Negate, _before: Columns, _after: Columns) -> Stage:
    def run(values, _random, _row):
        values[step.field] = -values[step.field]

    return run


def test_a_step_has_three_places_its_options_its_effect_and_its_stage():
    """No list or table names the step: the code above this test is all that a pipeline needs."""
    row = {"score": np.zeros((), np.float32)}

    pipeline = Pipeline([Column("score", dtype="float32")], [Negate()], seed=0)
    pipeline.run({"score": np.float32(3)}, 0, 0, 0, row)

    assert row["score"] == -3
    assert pipeline.columns["score"].made_by == "negate"
