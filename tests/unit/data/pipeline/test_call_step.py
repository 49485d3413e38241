"""The step that calls a user's function: its arguments, its permissions and its results."""

import gc
from dataclasses import replace

import numpy as np
import pytest

from batchd.data.functions.load import FunctionUnusable
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.options import CenterCrop, Follow, RandomFlip
from batchd.data.pipeline.sample_fields import columns_after, sample_fields
from batchd.data.samples.columns import Column, parse_column
from batchd.data.samples.errors import SampleUndecodable
from batchd_wire.fields import Field
from support.steps import check_steps

pytestmark = pytest.mark.usefixtures("importable")

COLUMNS = (parse_column("image", "uint8[4,4,3]"), parse_column("label", "int64"))
IMAGE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def row_for(columns, steps):
    return {field.name: np.full(field.shape, 77, field.dtype) for field in sample_fields(columns, steps, "fail")}


def run(steps, values=None, columns=COLUMNS, **place):
    """Run the steps on a sample and return its row."""
    steps = steps if isinstance(steps, list) else [steps]
    pipeline, row = Pipeline(columns, steps, seed=5), row_for(columns, steps)
    pipeline.run(
        values or {"image": IMAGE.copy(), "label": 3}, **{"epoch": 0, "sample": 0, "attempt": 0, **place}, row=row
    )
    return row


def test_declared_outputs_become_fields(write):
    """New fields come after the existing ones; changed fields keep their places."""
    write(
        "mine.py",
        """
        import numpy as np
        def fn(sample, rng):
            return {"score": float(sample["image"].sum()), "image": sample["image"].astype(np.float32)[:2]}
        """,
    )
    step = Call(function="mine:fn", outputs={"score": "float32", "image": "float32[2,4,3]"})

    row = run(step)

    assert [field.name for field in sample_fields(COLUMNS, [step], "fail")] == ["image", "label", "score", "index"]
    assert row["score"] == np.float32(IMAGE.sum())
    assert np.array_equal(row["image"], IMAGE[:2])
    assert row["label"] == 3


def test_without_outputs_every_field_may_change_and_none_its_type(write):
    """A field that the function does not return stays unchanged."""
    write(
        "mine.py",
        "def fn(sample, rng): return {'image': sample['image'][::-1]}\ndef bad(sample, rng): return {'label': 1.5}",
    )

    row = run(Call(function="mine:fn"))

    assert np.array_equal(row["image"], IMAGE[::-1])
    assert row["label"] == 3
    with pytest.raises(SampleUndecodable, match="changes 'label' from int64 to float64; return int64"):
        run(Call(function="mine:bad"))


def test_the_sample_may_be_changed_and_returned(write):
    """This is the usual way to write it; fields that are returned unchanged count as unchanged."""
    write("mine.py", "def fn(sample, rng):\n    sample['image'][0] = 0\n    sample['score'] = 2\n    return sample")

    row = run(Call(function="mine:fn", outputs={"image": "uint8[4,4,3]", "score": "int64"}))

    assert not row["image"][0].any()
    assert np.array_equal(row["image"][1:], IMAGE[1:])
    assert (row["score"], row["label"]) == (2, 3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "mine:fn returned NoneType instead of a dict of fields"),
        ("return {}", "mine:fn did not return 'score', which its outputs declare"),
        (
            "return {'score': 1.0, 'more': 2, 'also': 3}",
            "mine:fn returned 'also', 'more', which its outputs do not declare",
        ),
        ("return {'score': 1.0, 'label': 4}", "mine:fn returned 'label', which its outputs do not declare"),
        ("return {'score': 'high'}", "mine:fn gives another type than is declared: 'score' is str instead of float32"),
        (
            "return {'score': __import__('numpy').float64(1)}",
            r"changes 'score' from float32 to float64; return float32, or declare outputs = { score = \"float64\" }",
        ),
        (
            "return {'score': [1.0, 2.0]}",
            r"from float32 to float32\[2\]; return float32, or declare outputs = { score = \"float32\[2\]\" }",
        ),
        ("sample['image'][0] = 0", "ValueError: assignment destination is read-only\n  at .*mine.py:2 in fn: "),
        ("return {'score': 1 / 0}", "mine:fn: ZeroDivisionError: division by zero\n  at .*mine.py:2 in fn: return "),
        ("exit()", "mine:fn: SystemExit"),
        ("raise KeyboardInterrupt", "mine:fn: KeyboardInterrupt"),
    ],
)
def test_a_result_that_does_not_match_its_declaration_is_a_bad_sample(write, body, message):
    """The reason says what is wrong, and where for an exception; other fields cannot change."""
    write("mine.py", f"def fn(sample, rng):\n    {body}")

    with pytest.raises(SampleUndecodable, match=message):
        run(Call(function="mine:fn", outputs={"score": "float32"}))


@pytest.mark.thorough
def test_what_a_function_keeps_is_not_overwritten(write):
    """A function that keeps arrays does not change the next sample or the source's arrays."""
    write(
        "mine.py",
        "kept = []\ndef fn(sample, rng):\n    kept.append(sample['image'])\n    sample['image'][:] = 9\n    return {}",
    )
    import mine  # noqa: PLC0415  it is there by now

    memory = IMAGE.copy()
    pipeline, row = Pipeline(COLUMNS, [Call(function="mine:fn")], 0), row_for(COLUMNS, [])
    pipeline.run({"image": memory, "label": 0}, 0, 0, 0, row)
    assert np.array_equal(memory, IMAGE)
    memory[:] = 1
    pipeline.run({"image": memory, "label": 0}, 0, 1, 0, row)

    assert [array.max() for array in mine.kept] == [9, 9]
    assert row["image"].max() == 1
    mine.kept.clear()
    gc.collect()


def test_memory_is_reused_only_if_no_function_keeps_it(write):
    """Memory with a live view, at any depth of views, is not reused."""
    write(
        "mine.py",
        """
        kept, places = [], []
        def fn(sample, rng):
            places.append(sample["image"].ctypes.data)
            if sample["label"]:
                kept.append(memoryview(sample["image"][1:][1:]))
            return {}
        """,
    )
    import mine  # noqa: PLC0415  it is there by now

    pipeline, row = Pipeline(COLUMNS, [Call(function="mine:fn")], 0), row_for(COLUMNS, [])
    for number, label in enumerate([0, 0, 0, 1, 1, 0]):
        pipeline.run({"image": IMAGE + number, "label": label}, 0, number, 0, row)

    assert len(set(mine.places[:4])) == 1
    assert len(set(mine.places)) == 3
    assert [np.array_equal(part, (IMAGE + 3 + number)[2:]) for number, part in enumerate(mine.kept)] == [True, True]
    mine.kept.clear()


def test_bytes_and_text_are_given_and_taken(write):
    """The function gets the bytes of an image file as bytes, even from a reader's buffer."""
    write(
        "mine.py",
        """
        import numpy as np
        def fn(sample, rng):
            assert type(sample["image"]) is bytes and type(sample["words"]) is str
            return {"image": np.frombuffer(sample["image"], np.uint8), "length": len(sample["words"])}
        def back(sample, rng):
            return {"image": bytes(sample["image"]), "words": sample["words"].upper()}
        """,
    )
    columns = (Column("image", "encoded"), Column("words", "text"))
    values = {"image": memoryview(bytearray(b"abc")), "words": "one two"}
    step = Call(function="mine:fn", outputs={"image": "uint8[3]", "length": "int64", "words": "uint8"})
    back = Call(function="mine:back", outputs={"image": "image", "words": "text"})

    with pytest.raises(SampleUndecodable, match="did not return 'words'"):
        run(step, values, columns)
    assert columns_after(columns, [step])["image"].text == "uint8[3]"
    made = Pipeline(columns, [back], 0, has_rows=False).make(values, 0, 0, 0)
    assert bytes(made["image"]) == b"abc"
    assert made["words"] == "ONE TWO"


def test_lengths_may_differ_where_a_step_behind_makes_them_one(write):
    """A dimension with a question mark is checked only as far as it is known."""
    write("mine.py", "def fn(sample, rng): return {'image': sample['image'][: sample['label']]}")
    steps = [Call(function="mine:fn", outputs={"image": "uint8[?,4,3]"})]

    assert "different sizes" in check_steps(COLUMNS, steps)[0]
    made = Pipeline(COLUMNS, steps, 0, has_rows=False).make({"image": IMAGE, "label": 2}, 0, 0, 0)
    assert made["image"].shape == (2, 4, 3)


def test_what_follows_an_image_follows_it_behind_a_call_too(write):
    """The declared type does not say whether a field is a mask."""
    write("mine.py", "def fn(sample, rng): return {'image': 255 - sample['image']}")
    columns = (COLUMNS[0], parse_column("mask", "uint8[4,4]"))
    mask = np.arange(16, dtype=np.uint8).reshape(4, 4)
    call = Call(function="mine:fn", outputs={"image": "uint8[4,4,3]"})

    row = run([Follow(mask="mask"), call, RandomFlip(probability=1.0)], {"image": IMAGE, "mask": mask}, columns)

    assert np.array_equal(row["image"], 255 - IMAGE[:, ::-1])
    assert np.array_equal(row["mask"], mask[:, ::-1])


def test_an_image_keeps_its_channels_in_front_where_its_axes_stay():
    """If the axes differ, the declared type defines the image."""
    columns = {"image": replace(parse_column("image", "uint8[3,?,?]"), channels_first=True)}
    for text, is_first in (("float32[3,8,8]", True), ("float32[8,8,3]", False), ("float32[3]", False)):
        step = Call(function="a:b", outputs={"image": text})
        assert columns_after(columns.values(), [step])["image"].channels_first is is_first


def test_random_numbers_are_those_of_the_sample(write):
    """Seed, epoch, sample and attempt alone decide the numbers, not earlier draws."""
    write(
        "mine.py",
        "def fn(sample, rng):\n    rng.normal(size=sample['label'])\n    return {'score': float(rng.random())}",
    )
    step = Call(function="mine:fn", outputs={"score": "float64"})
    pipeline = Pipeline(COLUMNS, [step], 5)
    scores = {}
    for epoch, sample, attempt in [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 0, 0), (0, 1, 0)]:
        row = row_for(COLUMNS, [step])
        pipeline.run({"image": IMAGE, "label": 3}, epoch, sample, attempt, row)
        assert scores.setdefault((epoch, sample, attempt), float(row["score"])) == float(row["score"])

    assert len(set(scores.values())) == 4
    assert run(step, epoch=1)["score"] == scores[1, 0, 0]


def test_random_steps_behind_a_call_are_not_affected(write):
    """A function that draws numbers does not change the numbers of another sample."""
    write("mine.py", "def fn(sample, rng):\n    rng.random(sample['label'])\n    return {}")
    steps = [Call(function="mine:fn"), RandomFlip()]

    flips = [run(steps, {"image": IMAGE, "label": 1}, sample=sample)["image"][0, 0, 0] != 0 for sample in range(40)]

    assert 5 < sum(flips) < 35


def test_a_function_that_promises_determinism_gets_no_random_numbers(write):
    """So the function cannot break the promise unnoticed."""
    write(
        "mine.py", "def fn(sample, rng): return {'score': 1 if rng is None else 0}\ndef bad(sample, rng): rng.random()"
    )
    step = Call(function="mine:fn", outputs={"score": "int64"}, random=False)

    assert run(step)["score"] == 1
    assert not step.is_random
    assert Call(function="mine:fn").is_random
    with pytest.raises(SampleUndecodable, match="'NoneType' object has no attribute 'random'"):
        run(Call(function="mine:bad", random=False))


def test_no_memory_is_no_bad_sample(write):
    """The process lacks the memory; the sample is not at fault."""
    write("mine.py", "def fn(sample, rng): raise MemoryError")

    with pytest.raises(MemoryError):
        run(Call(function="mine:fn"))


def test_a_function_that_cannot_be_imported_is_no_bad_sample():
    """The error would be the same for every sample."""
    with pytest.raises(FunctionUnusable):
        Pipeline(COLUMNS, [Call(function="mine:fn")], 0)


@pytest.mark.parametrize(
    "text", ["def fn(sample): ...", "def fn(): ...", "def fn(sample, rng, more): ...", "fn = lambda: 3"]
)
def test_a_function_that_cannot_be_called_so_is_no_bad_sample(write, text):
    """The message has the function's signature and the call."""
    write("mine.py", text)

    with pytest.raises(FunctionUnusable, match=r"mine:fn\(.*\) cannot be called as mine:fn\(sample, rng\): "):
        Pipeline(COLUMNS, [Call(function="mine:fn")], 0)


@pytest.mark.parametrize(
    "text",
    [
        "def fn(*arguments): return {}",
        "def fn(sample, rng, more=3): return {}",
        "class Fn:\n    def __call__(self, sample, rng): return {}\nfn = Fn()",
        "from functools import partial\ndef whole(more, sample, rng): return {}\nfn = partial(whole, 3)",
        "from functools import wraps\ndef inner(sample): return {}\n@wraps(inner)\ndef fn(sample, rng): return inner(sample)",
        "def fn(sample, rng): return {}\nfn.__signature__ = 'nonsense'",
    ],
)
def test_a_function_is_judged_by_the_signature_that_is_called(write, text):
    """A decorator's result counts, not the function that it wraps."""
    write("mine.py", text)

    assert run(Call(function="mine:fn"))["label"] == 3


def test_a_masked_sample_keeps_what_no_function_changes(write):
    """Without declared outputs, a masked sample keeps no field."""
    write("mine.py", "def fn(sample, rng): return {}")
    for step, label in (
        (Call(function="mine:fn", outputs={"image": "uint8[4,4,3]"}), 3),
        (Call(function="mine:fn"), 0),
    ):
        row = row_for(COLUMNS, [step])
        Pipeline(COLUMNS, [step], 0).keep({"label": 3}, row)
        assert row["label"] == label
        assert not row["image"].any()


def test_a_field_that_every_batch_has_cannot_be_made():
    """The error is raised before anything is imported."""
    for name in ("index", "valid"):
        (problem,) = check_steps(COLUMNS, [Call(function="a:b", outputs={name: "int64"})])
        assert f"cannot make a field '{name}'" in problem


def test_outputs_that_make_no_sense_are_refused():
    """Outputs use the grammar of all fields."""
    with pytest.raises(ValueError, match='score = "float31" is not a valid type'):
        Call(function="a:b", outputs={"score": "float31"})
    assert sample_fields(COLUMNS, [Call(function="a:b", outputs={"score": "float32[2]"})], "fail")[2] == Field(
        "score", "float32", (2,)
    )


def test_a_function_that_resizes_an_image_with_followers_is_refused(write):
    """The boxes would not follow: the declaration or the result shows it."""
    write("mine.py", "def half(sample, rng): return {'image': sample['image'][::2, ::2]}")
    fixed = (parse_column("image", "uint8[4,4,3]"), parse_column("boxes", "float32[1,4]"))
    free = (parse_column("image", "uint8[?,?,3]"), fixed[1])
    follow, crop = Follow(boxes="boxes"), CenterCrop(size=(2, 2))
    declared = Call(function="mine:half", outputs={"image": "uint8[2,2,3]"})
    unsaid = Call(function="mine:half")

    assert "it does not move 'boxes' with it" in check_steps(fixed, [follow, declared])[0]
    assert check_steps(free, [follow, unsaid, crop]) == []
    with pytest.raises(SampleUndecodable, match="changed the size of 'image', but the mask, boxes or points"):
        run([follow, unsaid, crop], {"image": IMAGE, "boxes": np.zeros((1, 4), np.float32)}, free)
