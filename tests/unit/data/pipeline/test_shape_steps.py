"""The steps for samples of different shapes: their results, and where they are not allowed."""

import numpy as np
import pytest

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.options import Decode, Layout, Normalize, RandomFlip, Resize
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.pipeline.shapes import stages as shape_stage
from batchd.data.pipeline.shapes.options import PadBatch, Ragged
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd_wire.fields import Field, Varying
from support.images import encode, jpeg, jpeg_with_exif, photo
from support.steps import check_steps

IMAGE = Column("image", "encoded")
TOKENS = Column("tokens", dtype="int32", shape=(None,))
PAD_IMAGE, RAGGED_IMAGE = PadBatch(max_shape=(24, 32, 3)), Ragged(max_shape=(24, 32, 3))
PAD_TOKENS, RAGGED_TOKENS = (kind(field="tokens", max_shape=(8,)) for kind in (PadBatch, Ragged))


def run(columns, steps, values):
    """Run the steps into a row that was full of other values before."""
    row = {field.name: np.full(field.shape, 77, field.dtype) for field in sample_fields(columns, steps, "fail")[:-1]}
    Pipeline(columns, steps, 0).run(values, 0, 0, 0, row)
    return row


def test_a_padded_image_stands_in_the_corner_of_its_room() -> None:
    """Every pixel is as decoded, and the rest of the room has the fill value."""
    pixels = photo(20, 30)
    steps = [Decode(), PadBatch(max_shape=(24, 32, 3), fill=9)]

    row = run([IMAGE], steps, {"image": memoryview(encode(pixels, ".png"))})

    expected = np.full((24, 32, 3), 9, np.uint8)
    expected[:20, :30] = pixels
    assert np.array_equal(row["image"], expected)
    assert row["image_shape"].tolist() == [20, 30]


def test_a_ragged_image_has_no_gap() -> None:
    """Its rows follow each other without a gap, as one array of its shape; zeros follow."""
    pixels = photo(20, 30)

    row = run([IMAGE], [Decode(), RAGGED_IMAGE], {"image": memoryview(encode(pixels, ".png"))})

    flat = row["image"].reshape(-1)
    assert np.array_equal(flat[: pixels.size].reshape(pixels.shape), pixels)
    assert not flat[pixels.size :].any()
    assert row["image_shape"].tolist() == [20, 30]


def test_images_are_finished_before_they_get_room() -> None:
    """EXIF rotation, scaling, conversion to floats and channels first come before the padding."""
    steps = [Decode(), Resize(shorter_side=10), Normalize(mean=(0,) * 3, std=(1,) * 3), Layout()]
    data = jpeg_with_exif(jpeg(photo(20, 40)), 6)

    row = run([IMAGE], [*steps, PadBatch(max_shape=(3, 24, 16), fill=-1)], {"image": memoryview(data)})

    assert row["image"].dtype == np.float32
    assert row["image_shape"].tolist() == [20, 10]
    assert (row["image"][:, 20:] == -1).all()
    assert (row["image"][:, :, 10:] == -1).all()
    assert (row["image"][:, :20, :10] >= 0).all()


@pytest.mark.parametrize("step", [PAD_TOKENS, RAGGED_TOKENS], ids=lambda step: step.op)
@pytest.mark.parametrize("length", [0, 1, 8])
def test_lengths_are_one_number(step, length) -> None:
    """The size field holds the length of samples from empty to full."""
    row = run([TOKENS], [step], {"tokens": np.arange(1, length + 1, dtype=np.int32)})

    assert row["tokens"].tolist() == [*range(1, length + 1), *[0] * (8 - length)]
    assert row["tokens_length"].shape == ()
    assert row["tokens_length"] == length


@pytest.mark.parametrize("kind", [PadBatch, Ragged])
@pytest.mark.parametrize(
    ("column", "value", "largest"),
    [
        (IMAGE, memoryview(encode(photo(25, 10), ".png")), (24, 32, 3)),
        (TOKENS, np.zeros(9, np.int32), (8,)),
    ],
    ids=["image", "tokens"],
)
def test_a_larger_sample_is_bad_with_both_shapes(kind, column, value, largest) -> None:
    """The message has both shapes, so users know what to declare."""
    steps = [*([Decode()] if column is IMAGE else []), kind(field=column.name, max_shape=largest)]

    with pytest.raises(SampleUndecodable, match=r"(uint8\[25, 10, 3\].*\[24, 32, 3\])|(int32\[9\].*max_shape \[8\])"):
        run([column], steps, {column.name: value})


@pytest.mark.parametrize("kind", [PadBatch, Ragged])
def test_a_larger_sample_may_be_cut(kind) -> None:
    """The beginning of each dimension that is too long is kept."""
    pixels = photo(30, 20)

    row = run(
        [IMAGE],
        [Decode(), kind(max_shape=(24, 32, 3), too_large="crop")],
        {"image": memoryview(encode(pixels, ".png"))},
    )

    assert row["image_shape"].tolist() == [24, 20]
    kept = row["image"][:24, :20] if kind is PadBatch else row["image"].reshape(-1)[: 24 * 20 * 3].reshape(24, 20, 3)
    assert np.array_equal(kept, pixels[:24])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((2, 2), np.int32), r"'tokens' is int32\[2, 2\] instead of int32\[\?\]"),
        (np.zeros(3), r"'tokens' is float64\[3\] instead of int32\[\?\]"),
    ],
)
@pytest.mark.parametrize("step", [PAD_TOKENS, RAGGED_TOKENS], ids=lambda step: step.op)
def test_a_sample_that_is_something_else_is_bad(step, value, message) -> None:
    """No value is cast or flattened silently."""
    with pytest.raises(SampleUndecodable, match=message):
        run([TOKENS], [step], {"tokens": value})


def test_a_masked_sample_is_empty_and_filled() -> None:
    """Known values are not kept where a step would have changed them.

    All of its room is unused, so it gets the fill value.
    """
    columns = [IMAGE, TOKENS, Column("label", dtype="int64")]
    steps = [Decode(), RAGGED_IMAGE, PadBatch(field="tokens", max_shape=(8,), fill=-100)]
    fields = sample_fields(columns, steps, "mask")
    row = {field.name: np.full(field.shape, 77, field.dtype) for field in fields}

    Pipeline(columns, steps, 0).keep({"label": 5, "tokens": np.ones(3, np.int32)}, row)

    assert row["label"] == 5
    assert (row["tokens"] == -100).all()
    assert row["tokens_length"] == 0
    assert not row["image"].any()
    assert not row["image_shape"].any()


def blank_row(pipeline):
    """A row of fresh memory, which is all zeros."""
    return {name: np.zeros(column.fixed_shape, column.dtype) for name, column in pipeline.columns.items()}


@pytest.mark.parametrize("kind", [PadBatch, Ragged])
def test_what_was_in_a_row_before_leaves_nothing_behind(kind) -> None:
    """Larger, smaller, empty and masked samples follow each other in one row.

    Each leaves the same bytes as in a fresh row.
    """
    grids = Column("grid", dtype="uint8", shape=(None, None, 2))
    pipeline = Pipeline([grids], [kind(field="grid", max_shape=(5, 6, 2))], 0)
    row = blank_row(pipeline)
    sizes = [(3, 4), (5, 6), (1, 6), (5, 1), (0, 6), (2, 3), "masked", (4, 2), (4, 2), (5, 6), "masked", (1, 1), (0, 0)]

    for number, size in enumerate(sizes):
        fresh = blank_row(pipeline)
        for one in (row, fresh):
            if size == "masked":
                pipeline.keep({}, one)
            else:
                pipeline.run({"grid": np.full((*size, 2), number + 1, np.uint8)}, 0, 0, 0, one)
        assert all(np.array_equal(row[name], fresh[name]) for name in row), (number, size)


def test_a_worker_that_dies_while_it_writes_a_row_leaves_nothing_behind(monkeypatch) -> None:
    """The worker that writes the row next cannot know how far the dead one came."""
    pipeline = Pipeline([TOKENS], [RAGGED_TOKENS], 0)
    row = blank_row(pipeline)
    pipeline.run({"tokens": np.ones(2, np.int32)}, 0, 0, 0, row)

    def die(_array, out, _former):
        out[:7] = 99
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shape_stage, "_begin", die)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run({"tokens": np.ones(7, np.int32)}, 0, 0, 0, row)
    pipeline.run({"tokens": np.ones(3, np.int32)}, 0, 0, 0, row)

    assert row["tokens"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_zeros_are_not_written_over_zeros() -> None:
    """A row with much unused room costs only as much as its samples."""
    pipeline = Pipeline([TOKENS], [RAGGED_TOKENS], 0)
    row = blank_row(pipeline)
    pipeline.run({"tokens": np.ones(4, np.int32)}, 0, 0, 0, row)
    row["tokens"][6] = 55

    pipeline.run({"tokens": np.ones(2, np.int32)}, 0, 0, 0, row)

    assert row["tokens"].tolist() == [1, 1, 0, 0, 0, 0, 55, 0]


@pytest.mark.parametrize("noted", [-1, 9, -(1 << 31)])
def test_sizes_that_no_sample_has_say_nothing_of_a_row(noted) -> None:
    """With such sizes, the whole row is written."""
    pipeline = Pipeline([TOKENS], [RAGGED_TOKENS], 0)
    row = {"tokens": np.full(8, 77, np.int32), "tokens_length": np.array(noted, np.int32)}

    pipeline.run({"tokens": np.ones(2, np.int32)}, 0, 0, 0, row)

    assert row["tokens"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_fields_say_how_they_vary_and_sizes_stand_behind_them() -> None:
    """The fields are in the order of a batch's fields."""
    fields = sample_fields([IMAGE, TOKENS], [Decode(), PAD_IMAGE, RAGGED_TOKENS], "mask")

    assert fields == (
        Field("image", "uint8", (24, 32, 3), Varying("padded", (0, 1))),
        Field("image_shape", "int32", (2,)),
        Field("tokens", "int32", (8,), Varying("ragged", (0,))),
        Field("tokens_length", "int32", ()),
        Field("index", "int64", ()),
        Field("valid", "bool", ()),
    )
    assert not any(step.is_random for step in (Decode(), PAD_IMAGE, RAGGED_TOKENS))


LENGTHS = Column("tokens_length", dtype="int32")
FIXED = Column("digit", dtype="uint8", shape=(28, 28))


@pytest.mark.parametrize(
    ("columns", "steps", "problem"),
    [
        ([IMAGE], [PAD_IMAGE], '"pad_batch" needs pixels'),
        ([Column("words", "text")], [Ragged(field="words", max_shape=(4,))], '"ragged" needs numbers'),
        ([FIXED], [PadBatch(field="digit", max_shape=(28, 28))], "every 'digit' is uint8[28,28]; leave the step out"),
        ([IMAGE], [Decode(), PadBatch(max_shape=(24, 32))], "max_shape = [24, 32], and 'image' is uint8[?,?,3]"),
        ([IMAGE], [Decode(), Ragged(max_shape=(24, 32, 4))], "max_shape = [24, 32, 4], and 'image' is uint8[?,?,3]"),
        ([TOKENS, LENGTHS], [PAD_TOKENS], "makes a field 'tokens_length', and the sample already has one"),
        ([TOKENS], [PadBatch(field="tokens", max_shape=(8,), fill=0.5)], "fill = 0.5, which int32 cannot hold"),
        ([TOKENS], [PadBatch(field="tokens", max_shape=(8,), fill=1 << 31)], "which int32 cannot hold"),
        ([IMAGE], [Decode(), PadBatch(max_shape=(24, 32, 3), fill=-1)], "fill = -1, which uint8 cannot hold"),
        ([IMAGE], [Decode(), PadBatch(max_shape=(24, 32, 3), fill=256)], "fill = 256, which uint8 cannot hold"),
        (
            [IMAGE],
            [Decode(), Normalize(dtype="float16"), PadBatch(max_shape=(24, 32, 3), fill=70_000)],
            "float16 cannot hold",
        ),
        ([IMAGE], [Decode(), PAD_IMAGE, RandomFlip()], '"random_flip" cannot come after "pad_batch"'),
        ([IMAGE], [Decode(), RAGGED_IMAGE, PAD_IMAGE], '"pad_batch" cannot come after "ragged"'),
        (
            [TOKENS],
            [PAD_TOKENS, PadBatch(field="tokens_length", max_shape=(1,))],
            "must be the last step on 'tokens'; put it before",
        ),
    ],
)
def test_steps_that_cannot_stand_there_are_named(columns, steps, problem) -> None:
    """The one message says what the column is and what to do."""
    assert [text for text in check_steps(columns, steps) if problem in text], check_steps(columns, steps)
    assert len(check_steps(columns, steps)) == 1


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("int8", -128), ("uint16", 65_535), ("bool", 1), ("float32", 0.25), ("int64", -100), ("float16", -65_504)],
)
def test_a_filling_that_the_type_can_hold_is_written_exactly(dtype, fill) -> None:
    """The lowest and the highest number of each type are tried."""
    column = Column("x", dtype=dtype, shape=(None,))
    step = PadBatch(field="x", max_shape=(3,), fill=fill)
    assert check_steps([column], [step]) == []

    row = run([column], [step], {"x": np.zeros(1, dtype)})

    assert row["x"].tolist() == [0, fill, fill]


@pytest.mark.parametrize(("column", "proposed"), [(IMAGE, [512, 512, 3]), (TOKENS, [128])])
def test_what_is_proposed_for_samples_of_different_shapes_does_help(column, proposed) -> None:
    """The message has both steps written out, and each of them solves the problem."""
    decode = [Decode()] if column is IMAGE else []
    (problem,) = check_steps([column], decode)

    for kind in (PadBatch, Ragged):
        step = kind(field=column.name, max_shape=tuple(proposed))
        assert f'{{ op = "{step.op}", field = "{step.field}", max_shape = {proposed} }}' in problem
        assert check_steps([column], [*decode, step]) == []
