"""Columns of a sample: their notation, and their way through a pipeline."""

import re
from dataclasses import replace

import numpy as np
import pytest

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import Drop
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.sample_fields import SAMPLE_FIELDS_MAX, sample_fields
from batchd.data.samples.columns import Column, parse_column
from batchd.data.samples.errors import SampleUndecodable
from batchd_wire.fields import CHECKSUM, Field, layout_from_wire, place_fields
from support.images import encode, jpeg, photo
from support.steps import check_steps


@pytest.mark.parametrize(
    "column",
    [
        Column("image", "encoded"),
        Column("caption", "text"),
        Column("captions", "texts", most=8),
        Column("messages", "json"),
        Column("sound", "bytes"),
        Column("label", dtype="int64"),
        Column("digit", dtype="uint8", shape=(28, 28)),
        Column("tokens", dtype="int32", shape=(None,)),
        Column("picture", dtype="uint8", shape=(None, None, 3)),
    ],
)
def test_a_column_is_described_by_its_text(column):
    """Users write this text, and messages carry it."""
    assert parse_column(column.name, column.text) == column


def test_spaces_in_a_shape_do_not_matter():
    """Users write them."""
    assert parse_column("x", "float32[3, 4]").shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x", "float", "is not a valid type"),
        ("x", "int64[]", "a length is a number"),
        ("x", "int64[3", "is not a valid type"),
        ("x", "int64[0]", "lengths are 1 and more"),
        ("x", "int64[3,,4]", "a length is a number"),
        ("x", "uint8[99999999999]", "elements together at most"),
        ("x", "uint8[1,1,1,1,1,1,1,1,1]", "8 dimensions at most"),
        ("x", "complex64", "is not a valid type"),
        ("", "int64", "is not a valid field name"),
        ("#crc32", "int64", "is not a valid field name"),
        ("x" * 65, "int64", "is not a valid field name"),
    ],
)
def test_text_that_is_no_column_is_refused(name, text, message):
    """The error has the valid forms."""
    with pytest.raises(ValueError, match=message):
        parse_column(name, text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("int46", "int64"),
        ("flaot32", "float32"),
        ("Int64[?]", "int64[?]"),
        ("float32(4)", "float32[4]"),
        ("unit8 [28,28]", "uint8[28,28]"),
        ("img", "image"),
        ("txt", "text"),
        ("image[3]", "image[<=3]"),
        ("int", None),
        ("float", None),
        ("int64[3", None),
        ("complex", None),
        ("", None),
    ],
)
def test_the_nearest_type_is_proposed(text, meant):
    """No type is proposed if several are equally near."""
    with pytest.raises(ValueError, match="is not a valid type") as refused:
        parse_column("x", text)

    assert re.findall(r'did you mean "(.*?)"\?', str(refused.value)) == ([] if meant is None else [meant])


COLUMNS = (
    Column("left", "encoded"),
    Column("right", "encoded"),
    Column("pixels", dtype="uint8", shape=(8, 6, 3)),
    Column("weight", dtype="float32"),
    Column("vector", dtype="int16", shape=(4,)),
)
STEPS = [
    op.Decode(field="left"),
    op.Resize(field="left", size=(4, 6)),
    op.Decode(field="right", color="gray"),
    op.Resize(field="right", size=(2, 2)),
    op.RandomFlip(field="pixels", probability=1),
    op.Normalize(field="left"),
    op.Layout(field="left"),
]


def row_for(columns, steps):
    return {field.name: np.full(field.shape, 77, field.dtype) for field in sample_fields(columns, steps, "fail")[:-1]}


def sample(**changes):
    pixels = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)
    return {
        "left": memoryview(encode(photo(4, 6), ".png")),
        "right": memoryview(jpeg(photo(2, 2))),
        "pixels": pixels,
        "weight": 0.5,
        "vector": np.arange(4, dtype=np.int16),
        **changes,
    }


def test_each_field_has_its_own_steps():
    """The sample has two decoded images, raw pixels and plain numbers; steps may be mixed."""
    row = row_for(COLUMNS, STEPS)
    pipeline = Pipeline(COLUMNS, STEPS, 0)

    pipeline.run(sample(), 0, 0, 0, row)

    normalize = op.Normalize()
    expected = (photo(4, 6) / 255 - np.array(normalize.mean)) / np.array(normalize.std)
    assert np.array_equal(row["left"], expected.astype(np.float32).transpose(2, 0, 1))
    assert row["right"].shape == (2, 2, 1)
    assert np.array_equal(row["pixels"], sample()["pixels"][:, ::-1])
    assert row["weight"] == 0.5
    assert row["vector"].tolist() == [0, 1, 2, 3]
    assert [field.name for field in sample_fields(COLUMNS, STEPS, "mask")] == [*row, "index", "valid"]


@pytest.mark.parametrize(
    "step",
    [
        op.Resize(size=(5, 7)),
        op.CenterCrop(size=(3, 3)),
        op.RandomCrop(size=(6, 6), padding=2),
        op.RandomResizedCrop(size=(4, 4)),
        op.RandomFlip(),
        op.Pad(size=(12, 12)),
        op.Rotate(quarter_turns=(0, 2)),
        op.ColorJitter(brightness=0.3),
        op.Gray(),
        op.Cutout(size=(2, 2)),
        op.Normalize(),
        op.SubtractMean(mean=(1, 2, 3)),
        op.To(dtype="float32"),
        op.Layout(),
        op.Follow(mask="mask"),
    ],
    ids=lambda step: step.op,
)
def test_a_step_has_the_same_effect_on_a_second_image_as_on_an_only_one(step):
    """Its field selects it; the first image stays unchanged, and advice for the second names it."""
    made = {}
    for name in ("right", "image"):
        columns = (Column("left", "encoded"), Column(name, "encoded"), Column("mask", "encoded"))
        on_it = [op.Resize(field=name, size=(8, 10)), replace(step, field=name), Drop(fields=("mask",))]
        if step.op == "follow":
            on_it = [on_it[1], on_it[0]]
        steps = [op.Decode(field="left"), op.Decode(field=name), *on_it, op.Resize(field="left", size=(4, 6))]
        row = row_for(columns, steps)
        values = {"left": photo(4, 6), name: photo(8, 10), "mask": photo(8, 10)[..., 0]}
        encoded = {key: memoryview(encode(pixels, ".png")) for key, pixels in values.items()}
        for sample_number in range(4):
            Pipeline(columns, steps, 3).run(encoded, 0, sample_number, 0, row)
            made.setdefault(name, []).append(
                {key.replace("right", "image"): value.copy() for key, value in row.items()}
            )

    for second, only in zip(made["right"], made["image"], strict=True):
        assert second.keys() == only.keys()
        assert all(np.array_equal(second[key], only[key]) for key in only)
        assert np.array_equal(second["left"], photo(4, 6))


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([op.Decode()], "and a sample has 'left', 'right', 'label'; write field = \"left\" or field = \"right\""),
        ([op.Decode(field="left"), op.Resize(field="left", size=(2, 2))],
         "'right' is the bytes of an image file; the first step on it must be { op = \"decode\", field = \"right\" }"),
        ([op.Decode(field="left"), op.Resize(field="left", size=(2, 2)), op.Resize(field="right", size=(2, 2))],
         "the first step on it must be { op = \"decode\", field = \"right\" }: 'right' is the bytes of an image file"),
        ([op.Decode(field="left"), op.Decode(field="right"), op.Resize(size=(2, 2))], 'write field = "left" or field = "right"'),
    ],
)  # fmt: skip
def test_advice_for_one_of_two_images_names_it(steps, text):
    """The advice can be copied without a change."""
    columns = [Column("left", "encoded"), Column("right", "encoded"), Column("label", dtype="int64")]

    (told,) = check_steps(columns, steps)

    assert told.endswith(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vector": np.arange(5, dtype=np.int16)}, r"'vector' is int16\[5\] instead of int16\[4\]"),
        ({"vector": np.zeros(4)}, r"'vector' is float64\[4\] instead of int16\[4\]"),
        ({"weight": "heavy"}, "'weight' is <U5"),
    ],
)
def test_a_value_that_does_not_match_its_column_is_a_bad_sample(changes, message):
    """No value is silently stretched, cut or cast."""
    with pytest.raises(SampleUndecodable, match=message):
        Pipeline(COLUMNS, STEPS, 0).run(sample(**changes), 0, 0, 0, row_for(COLUMNS, STEPS))


def test_a_masked_sample_keeps_known_values_that_no_step_changes():
    """All other values are zero."""
    row = row_for(COLUMNS, STEPS)

    Pipeline(COLUMNS, STEPS, 0).keep({"weight": 2.5, "pixels": sample()["pixels"]}, row)

    assert row["weight"] == 2.5
    assert not any(row[name].any() for name in ("left", "right", "pixels", "vector"))


@pytest.mark.parametrize(
    ("columns", "steps", "problem"),
    [
        ([Column("index", dtype="int64")], [], "a field 'index'"),
        ([Column("image", "encoded")], [op.Decode(field="photo")], "is done to 'photo', and a sample has 'image'"),
        ([Column("words", "text")], [], "'words' is text"),
        (
            [Column("words", "text")],
            [op.Resize(field="words", size=(2, 2))],
            "cannot be done to 'words', which is text",
        ),
        ([Column("label", dtype="int64")], [op.Layout(field="label")], "cannot be done to 'label', which is int64"),
        ([Column("floats", dtype="float32", shape=(2, 2, 3))], [op.RandomFlip(field="floats")], "which is float32"),
    ],
)
def test_steps_that_do_not_fit_the_columns_are_named(columns, steps, problem):
    """The error has the field and its type."""
    assert [text for text in check_steps(columns, steps) if problem in text]


def test_one_mistake_is_reported_once():
    """Later steps on the same field would only repeat the message."""
    columns = [Column("image", "encoded"), Column("other", "encoded")]
    steps = [
        op.Resize(size=(2, 2)),
        op.RandomFlip(),
        op.Layout(),
        op.Decode(field="other"),
        op.Resize(field="other", size=(2, 2)),
    ]

    assert len(check_steps(columns, steps)) == 1


def test_a_field_that_needs_no_step_is_no_problem():
    """Numbers need no step at all."""
    columns = [Column("label", dtype="int64"), Column("digit", dtype="uint8", shape=(28, 28))]

    assert check_steps(columns, []) == []
    assert sample_fields(columns, [], "fail")[:2] == (Field("label", "int64", ()), Field("digit", "uint8", (28, 28)))


def test_more_fields_than_a_batch_can_hold_are_refused():
    """A wide table may have too many; the error comes before a worker starts."""
    columns = [Column(f"x{number}", dtype="int64") for number in range(SAMPLE_FIELDS_MAX + 1)]

    assert check_steps(columns[1:], []) == []
    layout = place_fields([*sample_fields(columns[1:], [], "mask"), CHECKSUM], 1)
    assert layout_from_wire(layout.to_wire()) == layout
    assert "a sample has 62 fields by then, and a batch holds 61 at most" in check_steps(columns, [])[0]
    assert check_steps(columns, [Drop(fields=("x3",))]) == []
