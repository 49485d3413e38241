"""Steps that remove fields and rename them."""

import numpy as np
import pytest

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import Drop, OneHot, Rename
from batchd.data.pipeline.image.options import Decode, Resize
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.samples.columns import Column
from support.images import jpeg, photo
from support.steps import check_steps

COLUMNS = (Column("jpg", "encoded"), Column("caption", "text"), Column("cls", dtype="int64"))


def fields_after(steps, columns=COLUMNS):
    return [field.name for field in sample_fields(columns, steps, "fail")]


def test_fields_get_the_names_that_other_steps_expect():
    """The image is decoded at its place, and the caption is removed."""
    steps = [
        Rename(field="jpg", to="image"),
        Drop(fields=("caption",)),
        Decode(),
        Resize(size=(2, 3)),
        Rename(field="cls", to="label"),
        OneHot(classes=3),
    ]
    row = {"image": np.zeros((2, 3, 3), np.uint8), "label": np.zeros(3, np.float32)}
    values = {"jpg": memoryview(jpeg(photo(2, 3))), "caption": "a photo", "cls": 2}

    Pipeline(COLUMNS, steps, 0).run(values, 0, 0, 0, row)

    alone = {"image": np.zeros((2, 3, 3), np.uint8)}
    Pipeline([Column("image", "encoded")], steps[2:4], 0).run({"image": values["jpg"]}, 0, 0, 0, alone)
    assert check_steps(COLUMNS, steps) == []
    assert fields_after(steps) == ["image", "label", "index"]
    assert np.array_equal(row["image"], alone["image"])
    assert row["label"].tolist() == [0, 0, 1]


def test_an_image_may_be_renamed_after_its_steps():
    """It is the same image under another name."""
    columns = [Column("image", "encoded")]
    steps = [Decode(), Resize(size=(2, 3)), Rename(field="image", to="photo")]
    row, alone = ({name: np.zeros((2, 3, 3), np.uint8)} for name in ("photo", "image"))
    values = {"image": memoryview(jpeg(photo(2, 3)))}

    Pipeline(columns, steps, 0).run(values, 0, 0, 0, row)
    Pipeline(columns, steps[:2], 0).run(values, 0, 0, 0, alone)

    assert np.array_equal(row["photo"], alone["image"])


def test_two_fields_can_change_places():
    """A third name makes this possible; each field keeps its place."""
    columns = [Column("a", dtype="int8"), Column("b", dtype="int16")]
    steps = [Rename(field="a", to="c"), Rename(field="b", to="a"), Rename(field="c", to="b")]
    row = {"b": np.zeros((), np.int8), "a": np.zeros((), np.int16)}

    Pipeline(columns, steps, 0).run({"a": np.int8(1), "b": np.int16(2)}, 0, 0, 0, row)

    assert fields_after(steps, columns) == ["b", "a", "index"]
    assert (row["b"], row["a"]) == (1, 2)


def test_a_masked_sample_has_no_value_under_a_name_of_another_field():
    """The known value of "label" does not belong to the field with that name at the end."""
    columns = [Column("label", dtype="int64"), Column("kind", dtype="int64")]
    steps = [Drop(fields=("label",)), Rename(field="kind", to="label")]
    row = {"label": np.full((), 77)}

    Pipeline(columns, steps, 0).keep({"label": 5}, row)

    assert row["label"] == 0


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([Drop(fields=("more",))], "\"drop\" leaves out 'more', and a sample has 'jpg', 'caption', 'cls'"),
        ([Drop(fields=("jpg", "caption", "cls"))], "and then a batch has nothing in it"),
        ([Rename(field="name", to="x")], "\"rename\" is done to 'name'"),
        ([Rename(field="cls", to="jpg")], "would make a field 'jpg', which the sample has already"),
        ([Rename(field="cls", to="index")], "would make a field 'index', which every batch has of itself"),
        ([Rename(field="cls", to="valid")], "would make a field 'valid'"),
    ],
)
def test_invalid_names_are_reported(steps, problem):
    """The error lists the valid names."""
    assert [text for text in check_steps(COLUMNS, steps) if problem in text]
