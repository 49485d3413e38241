"""Patches of images between the tokens of their text: places, sizes, rows, and planning."""

import re
from typing import Any

import numpy as np
import pytest

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.image.decode import Decoder
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.pipeline.shapes.options import Interleave, Pack, Ragged
from batchd.data.samples.columns import Column, parse_column
from batchd.data.samples.errors import SampleUndecodable
from batchd.worker.packs import PackWriter
from batchd_wire.fields import Field
from support.images import encode, photo
from support.steps import check_steps

PLACE = 9
TOKENS, MASK = (Column(name, dtype="int32", shape=(None,), made_by="chat") for name in ("tokens", "mask"))
FILES = parse_column("images", "image[<=4]")
PIXELS = Column("images", "arrays", shape=(None, None, 3), most=4)
STEP = Interleave(image_token=PLACE, size=2, merge=2, also=("mask",))
PACK = Pack(field="tokens", length=16, documents=4, too_long="drop")


def made(step: Interleave, tokens: list[int], images: Any, images_column: Column = PIXELS) -> Any:
    pipeline = Pipeline([TOKENS, MASK, images_column], [step], 0, has_rows=False)
    numbers = np.array(tokens, np.int32)
    return pipeline.make({"tokens": numbers, "mask": numbers * 10, "images": images}, 0, 0, 0)


def test_each_place_becomes_the_tokens_of_its_image() -> None:
    """As many as patches make, in the order of the list, which are masked; images are patches."""
    # 2 and 2 tokens; what is left of the second is cut off
    first, second = photo(4, 8), photo(9, 6)

    values = made(STEP, [1, PLACE, 2, PLACE], [first, second])

    assert values["tokens"].tolist() == [1, PLACE, PLACE, 2, PLACE, PLACE]
    assert values["mask"].tolist() == [10, 0, 0, 20, 0, 0]
    assert values["images_segments"].tolist() == [1] * 8 + [2] * 8
    assert values["images_positions"][:8].tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3],
    ]  # fmt: skip
    for image, some in ((first, slice(8)), (second, slice(8, 16))):
        for patch, (row, column) in zip(values["images"][some], values["images_positions"][some], strict=True):
            assert np.array_equal(patch, image[2 * row :, 2 * column :][:2, :2].ravel())


def test_patches_without_merging_go_row_by_row() -> None:
    """One token for each: 576 of an image of 336 x 336 in patches of 14, as LLaVA has them."""
    image = photo(336, 336)

    values = made(Interleave(image_token=PLACE, size=14, also=("mask",)), [PLACE, 3], [image])

    assert values["tokens"].tolist() == [PLACE] * 576 + [3]
    assert values["images_positions"].tolist() == [[row, column] for row in range(24) for column in range(24)]
    patches = values["images"].reshape(24, 24, 14, 14, 3).swapaxes(1, 2).reshape(336, 336, 3)
    assert np.array_equal(patches, image)


@pytest.mark.parametrize(
    ("images", "column"),
    [
        (photo(4, 4), Column("images", shape=(4, 4, 3))),
        (np.stack([photo(4, 4)]), Column("images", "arrays", shape=(4, 4, 3), most=2)),
        ([photo(4, 4)], Column("images", "arrays", shape=(4, 4, 3), most=2)),
    ],
)
def test_one_image_and_images_of_one_shape_are_taken(images: Any, column: Column) -> None:
    """A list may be one array, and a single image needs none."""
    assert np.array_equal(made(STEP, [PLACE], images, column)["images"], made(STEP, [PLACE], [photo(4, 4)])["images"])


def test_a_text_without_images_has_no_patches() -> None:
    """Text alone stays as it is."""
    values = made(STEP, [1, 2], [])

    assert values["tokens"].tolist() == [1, 2]
    assert (values["images"].shape, values["images_positions"].shape) == ((0, 12), (0, 2))


@pytest.mark.parametrize(
    ("tokens", "images", "why"),
    [
        ([1], [photo(4, 4)], r"'tokens' has 0 places for images \(number 9\), and there is 1 image in 'images'"),
        ([PLACE, PLACE], [photo(4, 4)], "has 2 places .* there is 1 image"),
        ([PLACE, PLACE], [photo(4, 4), photo(4, 3)], r"images\[1\] has 3 x 4 pixels, less than 4 x 4"),
    ],
)
def test_images_and_places_that_do_not_match_make_a_bad_sample(tokens: list[int], images: Any, why: str) -> None:
    """The reason has both numbers, or names the image."""
    with pytest.raises(SampleUndecodable, match=why.replace("is 1", "(is|are) 1")):
        made(STEP, tokens, images)


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [  # of Qwen2-VL's smart_resize, in transformers 5.24
        ((1000, 700), {}, (1008, 700)),
        ((10, 20), {}, (56, 84)),
        ((3000, 4000), {}, (840, 1148)),
        ((1, 150), {}, (28, 700)),
        ((42, 70), {}, (56, 56)),
        ((30, 4000), {}, (28, 4004)),
        ((600, 800), {"max_pixels": 784, "min_pixels": 784}, (28, 28)),
        ((768, 1024), {"max_pixels": 1280 * 784, "min_pixels": 256 * 784}, (756, 1036)),
        ((3, 4), {"multiple_of": None, "max_pixels": 100, "min_pixels": None}, (3, 4)),
    ],
)
def test_sizes_within_pixels_are_those_of_smart_resize(
    size: tuple[int, int], options: dict[str, Any], expected: tuple[int, int]
) -> None:
    """Rounded to the nearest multiples, down in a large image, and up in a small one."""
    step = op.Resize(**{"max_pixels": 1003520, "min_pixels": 3136, "multiple_of": 28, **options})
    image = Column("image", shape=(None, None, 3))

    found: Any = Pipeline([image], [step], 0, has_rows=False).make({"image": np.zeros((*size, 3), np.uint8)}, 0, 0, 0)

    assert found["image"].shape[:2] == expected


def test_rows_have_the_patches_of_their_documents() -> None:
    """Images are numbered through the row; the rest of it has no patch."""
    columns = [TOKENS, MASK, PIXELS]
    after = {column.name: column for column in Pipeline(columns, [STEP], 0, has_rows=False).columns.values()}
    fields = sample_fields(columns, [STEP, PACK], "fail")
    row: Any = {field.name: np.full(field.shape, 77, field.dtype) for field in fields}
    documents = [
        made(STEP, [1, PLACE, PLACE], [photo(4, 4), photo(4, 8)]),
        made(STEP, [2], []),
        made(STEP, [PLACE], [photo(8, 4)]),
    ]

    writer = PackWriter(PACK, after, row)
    for sample, values in enumerate(documents):
        writer.add(sample, 0, values)
    writer.finish()

    assert fields[:5] == (
        Field("tokens", "int32", (16,)),
        Field("mask", "int32", (16,)),
        Field("images", "uint8", (64, 12)),
        Field("images_positions", "int32", (64, 2)),
        Field("images_segments", "int32", (64,)),
    )
    assert row["tokens"].tolist() == [1, *[PLACE] * 3, 2, *[PLACE] * 2, *[0] * 9]
    assert row["segment_ids"].tolist() == [1] * 4 + [2] + [3] * 2 + [0] * 9
    assert row["images_segments"].tolist() == [1] * 4 + [2] * 8 + [3] * 8 + [0] * 44
    assert np.array_equal(row["images"][:20], np.concatenate([values["images"] for values in documents]))
    assert not row["images"][20:].any()
    assert not row["images_positions"][20:].any()


def test_patches_that_a_row_has_no_room_for_make_a_bad_sample() -> None:
    """As when an image has grown since the rows were planned."""
    pack = Pack(field="tokens", length=16, too_long="drop", patches=6)
    after = Pipeline([TOKENS, MASK, PIXELS], [STEP], 0, has_rows=False).columns
    row: Any = {
        field.name: np.zeros(field.shape, field.dtype)
        for field in sample_fields([TOKENS, MASK, PIXELS], [STEP, pack], "fail")
    }

    assert row["images"].shape == (6, 12)
    with pytest.raises(SampleUndecodable, match="its images have 8 patches, more than the row has room for"):
        PackWriter(pack, after, row).add(0, 0, made(STEP, [PLACE], [photo(8, 4)]))


@pytest.mark.parametrize("column", [FILES, parse_column("images", "image")])
def test_lengths_are_measured_by_the_headers_of_images(column: Column, monkeypatch: pytest.MonkeyPatch) -> None:
    """No image is decoded, and the lengths are those of whole samples."""
    steps: list[StepOptions] = [
        op.Decode(field="images"),
        op.Resize(field="images", max_pixels=900, multiple_of=4),
        STEP,
    ]
    files = [memoryview(encode(photo(height, width), ".png")) for height, width in ((40, 24), (13, 29))]
    images: Any = files if column is FILES else files[0]
    tokens = np.array([1, *[PLACE] * (2 if column is FILES else 1)], np.int32)
    values: Any = {"tokens": tokens, "mask": tokens, "images": images}
    whole: Any = Pipeline([TOKENS, MASK, column], steps, 0, has_rows=False).make(values, 0, 0, 0)
    decoded: list[object] = []
    monkeypatch.setattr(Decoder, "decode", lambda _self, *_what: decoded.append(1))

    measured: Any = Pipeline([TOKENS, MASK, column], steps, 0, has_rows=False, measures=True).make(values, 0, 0, 0)

    assert not decoded
    assert np.array_equal(measured["tokens"], whole["tokens"])
    assert measured["images"].shape == whole["images"].shape


@pytest.mark.parametrize(
    "steps",
    [
        [
            op.RandomFlip(field="images"),
            op.ColorJitter(field="images", brightness=0.4),
            op.Rotate(field="images", degrees=(-9, 9)),
        ],
        [op.RandomResizedCrop(field="images", size=(8, 12))],
        [op.RandomResizedCrop(field="images", size=(9, 9), probability=0.5), op.Resize(field="images", size=(8, 8))],
        [op.Rotate(field="images", quarter_turns=(0, 1, 2, 3)), op.CenterCrop(field="images", size=(6, 6))],
    ],
)
def test_samples_with_augmented_images_are_packed(steps: list[StepOptions]) -> None:
    """Where chance decides no shape: a sample has as many tokens in every epoch."""
    run = [op.Decode(field="images"), *steps, STEP]
    files = [memoryview(encode(photo(20, 30), ".png")), memoryview(encode(photo(13, 9), ".jpg"))]
    values = {"tokens": np.array([1, PLACE, PLACE], np.int32), "mask": np.ones(3, np.int32), "images": files}

    made = [Pipeline([TOKENS, MASK, FILES], run, 0, has_rows=False).make(values, epoch, 0, 0) for epoch in range(8)]

    columns = [TOKENS, MASK, FILES]
    measured = Pipeline(columns, run, 0, has_rows=False, measures=True).make(values, 5, 0, 0)

    assert check_steps(columns, [*run, PACK]) == []
    assert len(measured["tokens"]) == len(made[0]["tokens"])
    assert len({len(one["tokens"]) for one in made}) == len({one["images"].shape for one in made}) == 1
    assert len({one["images"].tobytes() for one in made}) > 1


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([Interleave(image_token=1, size=2, images="pictures")], "\"interleave\" needs 'pictures'"),
        ([Interleave(image_token=1, size=2)], "would leave 'mask' shorter than 'tokens'; write also = \\[\"mask\"\\]"),
        (
            [Interleave(image_token=1, size=2, field="images", also=("mask",))],
            "needs tokens of any length, and 'images' is image",
        ),
        ([STEP], '"interleave" needs images .*; the first step on it must be { op = "decode", field = "images" }'),
        (
            [op.Decode(field="images"), STEP, Pack(field="tokens", length=16)],
            'has too_long = "split", which would cut the patches',
        ),
        (
            [op.Decode(field="images"), op.RandomResizedCrop(field="images", size=(4, 4), probability=0.5), STEP, PACK],
            '"random_resized_crop" draws another length of \'tokens\' each time; a "resize" with size',
        ),
        (
            [op.Decode(field="images"), op.Resize(field="images", sizes=((4, 4), (8, 8))), STEP, PACK],
            "\"resize\" draws another length of 'tokens' each time; give it one size for all batches",
        ),
        (
            [op.Decode(field="images"), STEP, Pack(field="images", length=16, too_long="drop")],
            "\"pack\" needs numbers whose first dimension alone varies, and 'images'",
        ),
        ([Pack(field="tokens", length=16, patches=8)], '"pack" has patches, and no "interleave" makes some'),
    ],
)
def test_an_interleaving_that_cannot_be_is_refused(steps: list[StepOptions], problem: str) -> None:
    """The text says what to write."""
    texts = check_steps([TOKENS, MASK, FILES], steps)

    assert any(re.search(problem, text) for text in texts), texts


def test_pixels_of_patches_may_be_ragged_without_packing() -> None:
    """Each sample has a row of its own then."""
    steps = [
        op.Decode(field="images"),
        STEP,
        *(
            Ragged(field=name, max_shape=shape)
            for name, shape in (
                ("tokens", (64,)),
                ("mask", (64,)),
                ("images", (256, 12)),
                ("images_positions", (256, 2)),
                ("images_segments", (256,)),
            )
        ),
    ]

    assert check_steps([TOKENS, MASK, FILES], steps) == []
