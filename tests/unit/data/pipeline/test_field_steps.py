"""Steps that remove fields and rename them."""

import re

import numpy as np
import pytest

from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import Drop, OneHot, Pick, Rename
from batchd.data.pipeline.image.options import Decode, RandomCrop, Resize
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.pipeline.shapes.options import Ragged
from batchd.data.pipeline.text.options import TextBytes
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
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


def picked(step, captions, *, epoch=0, sample=0):
    """The text that the step picks, and the next random number."""
    columns = [Column("captions", "texts", most=8), Column("image", dtype="uint8", shape=(99, 99, 1))]
    values = {"captions": captions, "image": np.arange(9801, dtype=np.uint8).reshape(99, 99, 1)}
    made = Pipeline(columns, [step, RandomCrop(size=(9, 9))], 5, has_rows=False).make(values, epoch, sample, 0)
    return made["captions"], made["image"].tolist()


def test_each_text_of_a_list_is_picked_equally_often():
    """Another one in each epoch, the same for the same sample of the same epoch."""
    captions = ["a", "b", "c"]
    found = [picked(Pick(field="captions"), captions, epoch=epoch)[0] for epoch in range(300)]

    assert all(80 <= found.count(caption) <= 120 for caption in captions)
    assert found[:9] == [picked(Pick(field="captions"), captions, epoch=epoch)[0] for epoch in range(9)]
    assert {picked(Pick(field="captions", which="first"), captions, epoch=epoch)[0] for epoch in range(9)} == {"a"}


def test_a_list_of_one_draws_a_number_as_well():
    """So the numbers of later steps do not depend on how many captions a sample has."""
    one, several = (picked(Pick(field="captions"), captions) for captions in (["a"], ["a", "b", "c"]))

    assert one[1] == several[1]


def test_an_empty_list_has_nothing_to_pick():
    """Only a missing list has a default."""
    with pytest.raises(SampleUndecodable, match="captions is an empty list, so there is nothing to pick"):
        picked(Pick(field="captions", which="first"), [])


@pytest.mark.parametrize(
    ("column", "steps", "problem"),
    [
        (
            Column("x", "texts", most=3),
            [],
            '\'x\' is a list of texts, .*; { op = "pick", field = "x" } draws one of them',
        ),
        (Column("x", "json"), [], '\'x\' is a value in JSON, .* "chat", .* "call"'),
        (Column("x", "bytes"), [], '\'x\' is bytes, .*; "call" makes numbers of them; or leave it out with "drop"'),
        (Column("x", "text"), [Pick(field="x")], '"pick" needs a list, such as "text.<=8.", and \'x\' is text'),
        (
            Column("x", "texts", most=3),
            [TextBytes(field="x", length=3)],
            "'x' is a list of texts; \"pick\" chooses one",
        ),
        (Column("x", "json"), [OneHot(field="x", classes=3)], "\"one_hot\" needs numbers, and 'x' is a value in JSON"),
        (Column("x", "bytes"), [Ragged(field="x", max_shape=(3,))], "\"ragged\" needs numbers, and 'x' is bytes"),
        (Column("x", "json"), [Decode(field="x")], "\"decode\" cannot be done to 'x', which is json"),
    ],
)
def test_check_says_what_makes_a_field_of_such_values(column, steps, problem):
    """A batch cannot hold them as they are."""
    problems = check_steps([column, Column("label", dtype="int64")], steps)

    assert len(problems) == 1
    assert re.search(problem, problems[0]), problems


@pytest.mark.usefixtures("importable")
def test_a_function_gets_copies_of_json_and_returns_it(write):
    """What it changes in place, and does not return, stays as it was."""
    write(
        "mine.py",
        """
        def fn(sample, rng):
            sample["defaults"].append("changed")
            return {"messages": sample["messages"] + [1], "size": len(sample["raw"])}
        """,
    )
    columns = [Column("messages", "json"), Column("defaults", "json"), Column("raw", "bytes")]
    step = Call(function="mine:fn", outputs={"messages": "json", "size": "int64"})
    values = {"messages": [0], "defaults": [], "raw": memoryview(b"abc")}

    made = Pipeline(columns, [step], 0, has_rows=False).make(values, 0, 0, 0)

    assert (made["messages"], made["defaults"], made["size"]) == ([0, 1], [], 3)


@pytest.mark.parametrize(
    ("returned", "why"), [("{1: 2}", "a key that is no text"), ("[set()]", "has set in it"), ("None", "nothing")]
)
@pytest.mark.usefixtures("importable")
def test_what_a_function_returns_has_to_be_json(returned, why, write):
    """Sets, keys that are numbers, and objects are not."""
    write("mine.py", f"def fn(sample, rng):\n    return {{'it': {returned}}}\n")
    step = Call(function="mine:fn", outputs={"it": "json"})

    with pytest.raises(SampleUndecodable, match=why):
        Pipeline([Column("x", dtype="int64")], [step], 0, has_rows=False).make({"x": 1}, 0, 0, 0)
