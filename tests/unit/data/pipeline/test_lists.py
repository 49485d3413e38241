"""Steps on lists: they do to each image and text what they do to one."""

import re
from typing import Any

import numpy as np
import pytest

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.fields.options import Cast, Pick
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.pipeline.shapes.options import PadBatch, Patches, Ragged
from batchd.data.pipeline.text.options import Lowercase, TextBytes
from batchd.data.samples.columns import parse_column
from batchd.data.samples.errors import SampleUndecodable
from batchd.worker.members import MemberEncoder
from support.images import jpeg, photo
from support.steps import check_steps

COLUMNS = [parse_column("pictures", "image[<=3]"), parse_column("captions", "text[<=3]")]
ONE = [parse_column("pictures", "image")]
FILES = [memoryview(jpeg(photo(height, width))) for height, width in ((40, 30), (30, 50), (64, 64))]
IMAGE = "pictures"


def made(steps: list[StepOptions], pictures: list[Any], *, epoch: int = 0) -> Any:
    values: dict[str, Any] = {"pictures": pictures, "captions": ["A", "Dog", "ran"]}
    return Pipeline(COLUMNS, steps, 5, has_rows=False).make(values, epoch, 0, 0)


@pytest.mark.parametrize(
    "steps",
    [
        [op.Decode(field=IMAGE)],
        [op.Decode(field=IMAGE), op.Resize(field=IMAGE, shorter_side=20)],
        [op.Decode(field=IMAGE), op.Resize(field=IMAGE, size=(20, 24))],
        [
            op.Decode(field=IMAGE),
            op.Resize(field=IMAGE, size=(20, 24)),
            op.Normalize(field=IMAGE),
            op.Layout(field=IMAGE),
        ],
    ],
)
def test_images_of_a_list_are_what_each_would_be_alone(steps: list[StepOptions]) -> None:
    """In any number, also none; those of one shape are one array."""
    alone = [Pipeline(ONE, steps, 5, has_rows=False).make({IMAGE: file}, 0, 0, 0)[IMAGE].copy() for file in FILES]  # type: ignore[union-attr]  # an array

    for count in range(4):
        found = made(steps, FILES[:count])[IMAGE]
        assert len(found) == count
        assert all(map(np.array_equal, found, alone[:count]))


def test_each_image_draws_numbers_of_its_own() -> None:
    """Equal files are cropped differently; the same ones in the same epoch are the same."""
    steps: list[StepOptions] = [op.Decode(field=IMAGE), op.RandomResizedCrop(field=IMAGE, size=(16, 16))]
    first, second, third = made(steps, FILES[:1] * 3)[IMAGE]

    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)
    assert np.array_equal(made(steps, FILES[:1] * 3)[IMAGE], [first, second, third])
    assert not np.array_equal(made(steps, FILES[:1], epoch=1)[IMAGE][0], first)


def test_what_is_drawn_for_each_image_is_noted() -> None:
    """For each random step one note, by the place in the list."""
    steps: list[StepOptions] = [op.Decode(field=IMAGE), op.RandomFlip(field=IMAGE), Pick(field="captions")]
    pipeline = Pipeline(COLUMNS, steps, 5, has_rows=False)
    draws = pipeline.note_draws()

    pipeline.make({"pictures": FILES[:2], "captions": ["a"]}, 0, 0, 0)
    flips, picked = draws.copy()
    pipeline.make({"pictures": [], "captions": ["a"]}, 0, 0, 0)

    assert list(flips) == ["0", "1"]
    assert all(one[0]["op"] == "random_flip" for one in flips.values())  # type: ignore[index]  # a list
    assert picked == {"of": 1, "place": 0}
    assert draws[0] == {}


@pytest.mark.parametrize("count", [0, 2, 3])
@pytest.mark.parametrize("room", [PadBatch, Ragged])
def test_lists_get_room_in_a_batch(room: type[PadBatch] | type[Ragged], count: int) -> None:
    """Images of one shape, and texts as bytes, with the length of the list beside them."""
    steps = [
        op.Decode(field=IMAGE),
        op.Resize(field=IMAGE, size=(20, 24)),
        room(field=IMAGE, max_shape=(3, 20, 24, 3)),
        Pick(field="captions", which="all"),
        Lowercase(field="captions"),
        TextBytes(field="captions", length=4),
        room(field="captions", max_shape=(3, 4)),
    ]
    assert check_steps(COLUMNS, steps) == []
    row = {field.name: np.full(field.shape, 7, field.dtype) for field in sample_fields(COLUMNS, steps, "fail")}
    # as if all of the room had been used
    row["pictures_length"][...] = row["captions_length"][...] = 3

    texts = ["A", "Dog", "ran"][:count] or ["X"]
    Pipeline(COLUMNS, steps, 5).run({"pictures": FILES[:count], "captions": texts}, 0, 0, 0, row)

    assert row["pictures_length"] == count
    assert np.array_equal(row["pictures"][:count], made(steps[:2], FILES[:count])[IMAGE])
    assert not row["pictures"][count:].any()
    assert [bytes(one).rstrip(b"\0").decode() for one in row["captions"][: len(texts)]] == [
        text.lower() for text in texts
    ]


@pytest.mark.parametrize("is_decoded", [False, True])
def test_one_image_of_a_list_is_picked(*, is_decoded: bool) -> None:
    """Before it is decoded, so that the others are not, or afterwards."""
    first = [op.Decode(field=IMAGE), op.Resize(field=IMAGE, size=(20, 24))]
    steps: list[StepOptions] = [*first, Pick(field=IMAGE)] if is_decoded else [Pick(field=IMAGE), *first]
    every = made([*first], FILES)[IMAGE]

    found = [made(steps, FILES, epoch=epoch)[IMAGE] for epoch in range(20)]

    places = [next(place for place in range(3) if np.array_equal(every[place], one)) for one in found]
    assert set(places) == {0, 1, 2}
    assert np.array_equal(made([*first, Pick(field=IMAGE, which="first")], FILES)[IMAGE], every[0])


@pytest.mark.parametrize("which", ["random", "first", "all"])
def test_an_empty_list_has_nothing_to_pick_of(which: Any) -> None:
    """So that each sample of a batch has one."""
    with pytest.raises(SampleUndecodable, match="pictures is an empty list"):
        made([op.Decode(field=IMAGE), op.Resize(field=IMAGE, size=(2, 2)), Pick(field=IMAGE, which=which)], [])


def test_a_damaged_image_of_a_list_makes_a_bad_sample() -> None:
    """Its place is in the reason."""
    with pytest.raises(SampleUndecodable, match=r"^pictures\[1\]: "):
        made([op.Decode(field=IMAGE)], [FILES[0], FILES[1][:600], FILES[2]])


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([], r"'pictures' is a list of image files, .*\"decode\", field = \"pictures\" } decodes each"),
        ([op.Decode(field=IMAGE)], r"uint8\[\?,\?,3\]\[<=3\], which a batch cannot hold; .* \"pick\""),
        (
            [op.Decode(field=IMAGE), Ragged(field=IMAGE, max_shape=(3, 9, 9, 3))],
            r'"ragged" needs values of one shape in each list.*"resize" or a crop',
        ),
        ([Ragged(field=IMAGE, max_shape=(3, 9, 9, 3))], "\"ragged\" needs numbers, and 'pictures' is a list of image"),
        ([op.Decode(field=IMAGE), op.Follow(field=IMAGE, boxes="captions")], '"follow" cannot come after "decode"'),
        (
            [op.Decode(field=IMAGE), op.CropToBucket(field=IMAGE, pixels=65536)],
            '"crop_to_bucket" cannot come after "decode"',
        ),
        ([op.Decode(field=IMAGE), Patches(field=IMAGE, size=4)], '"patches" needs an image'),
        ([Cast(field=IMAGE, dtype="int8")], "\"cast\" needs numbers, and 'pictures' is a list of image files"),
        (
            [TextBytes(field="captions", length=4)],
            "'captions' is a list of texts; \"pick\" chooses one of them, or all",
        ),
    ],
)
def test_a_step_that_is_for_no_list_is_refused(steps: list[StepOptions], problem: str) -> None:
    """The text says what to do."""
    texts = check_steps(COLUMNS, [*steps, Pick(field="captions"), TextBytes(field="captions", length=4)])

    assert any(re.search(problem, text) for text in texts), texts


def test_lists_of_images_are_members_of_a_shard() -> None:
    """With a number in their names, as the source ``webdataset`` looks for them."""
    columns = {column.name: column for column in COLUMNS}
    members = MemberEncoder(columns, "png", 90, is_bgr=False).members({"pictures": FILES[:2], "captions": ["a"]})

    assert [(name, content[:3]) for name, content in members if not name.endswith("points")] == [
        ("pictures.0.jpg", b"\xff\xd8\xff"),
        ("pictures.1.jpg", b"\xff\xd8\xff"),
        ("captions.json", b'["a'),
    ]
