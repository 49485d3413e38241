"""The keys ``bucket`` and ``balance``: what they need, and what they cannot be combined with."""

import json
from dataclasses import replace

import pytest

from batchd.config.tree import StreamConfig
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.fields.options import Cast, Rename
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.shapes.options import PadBatch, Ragged
from batchd.data.samples.columns import Column
from batchd.errors import SourceInvalid
from batchd.stream.plan import budgeted_field, check_bucket

TOKENS, IMAGE = Column("tokens", dtype="int32", shape=(None,)), Column("image", "encoded")
PIXELS = Column("pixels", dtype="uint8", shape=(None, None, 3))
BOXES = Column("boxes", dtype="float32", shape=(None, 4))
COST = Column("cost", dtype="float32", shape=())
PACK = [{"op": "pack", "field": "tokens", "length": 8}]
LIVE = {"type": "generator", "function": "a:b", "fields": {"tokens": "int32[?]"}}
BUCKET = {"field": "tokens"}
CROPS = [{"op": "decode"}, {"op": "crop_to_bucket", "pixels": 1 << 20}]
SIZES = {"sizes": [[8, 8], [16, 8]]}
DRAWN = {"op": "letterbox", **SIZES}
LIVE_IMAGES = {"type": "push", "fields": {"image": "image"}, "capacity": 9, "sample_bytes_max": "1MiB"}
ARRAYS = {"type": "npz", "path": "/a.npz"}
CHANGING = {"type": "mix", "sources": [ARRAYS, ARRAYS], "weights": {"0": [1, 0], "8": [1, 1]}}


def stream_of(**keys):
    table = {"source": {"type": "npz", "path": "/a.npz"}, "batch_size": 4, **keys}
    return StreamConfig.model_validate_json(json.dumps(table), strict=True)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"balance": 8}, 'set bucket, or end the pipeline with "pack"; or give "resize" or "letterbox" several sizes'),
        ({"bucket": BUCKET, "pipeline": PACK}, 'rows of "pack" are full whatever the lengths in them are'),
        (
            {"bucket": BUCKET, "shuffle": {"blocks": 2, "block_samples": 4}},
            "bucket puts samples together by their sizes",
        ),
        (
            {"bucket": BUCKET, "weights": {"file": "/w.npy"}},
            r"bucket needs each sample once, so none .* leave weights out \(a mix of sources can have fixed weights\)",
        ),
        ({"pipeline": PACK, "weights": {"file": "/w.npy"}}, r"leave weights out \(a mix of sources can"),
        ({"bucket": BUCKET, "source": CHANGING}, "give the mix fixed weights, and each stage of the training a stream"),
        ({"pipeline": PACK, "source": CHANGING, "balance": 2}, "leave balance out, or give the mix fixed weights"),
        ({"bucket": BUCKET, "source": LIVE}, 'samples of type "generator" are not there yet when the batches'),
        ({"bucket": BUCKET, "balance": 1}, "greater than or equal to 2"),
        ({"bucket": {**BUCKET, "bounds": [3], "count": 4}}, "name count, the number of buckets, or their bounds"),
        ({"bucket": {**BUCKET, "bounds": [3, 3]}}, r"bounds = \[3.0, 3.0\] must ascend"),
        ({"bucket": {**BUCKET, "bounds": [0, 3]}}, "greater than 0"),
        ({"bucket": {**BUCKET, "by": "class"}}, "'length', 'aspect', 'pixels', 'bytes', 'value' or 'seconds'"),
        ({"bucket": {**BUCKET, "by": "aspect", "budget": 8}}, 'a budget needs sizes that add up: by = "length"'),
        ({"bucket": {**BUCKET, "budget": 0}}, "greater than or equal to 1"),
        (
            {"bucket": {"field": "image", "by": "aspect"}, "pipeline": CROPS},
            '"crop_to_bucket" puts images of alike proportions together, so leave bucket out',
        ),
        ({"pipeline": CROPS, "source": LIVE_IMAGES}, 'samples of type "push" are not there yet'),
        ({"pipeline": CROPS, "weights": {"file": "/w.npy"}}, '"crop_to_bucket" needs each sample once'),
        ({"pipeline": CROPS, "shuffle": {"blocks": 2, "block_samples": 4}}, "are in no order; use shuffle = true"),
        ({"pipeline": [*CROPS, {**CROPS[1], "field": "b", "pixels": 99999}]}, "give both steps the same sizes"),
        (
            {"pipeline": [{**CROPS[1], "pixels": 4096}]},
            "for 2 to 1024 sizes, and these are 1; set a smaller multiple_of",
        ),
        (
            {"pipeline": [{**CROPS[1], "multiple_of": 1}]},
            "set a larger multiple_of or a narrower ratio",
        ),
        ({"pipeline": [{**CROPS[1], "sizes": [[4, 4], [8, 4]]}]}, "needs either pixels = height"),
        ({"pipeline": [{"op": "crop_to_bucket", "sizes": [[4, 4], [8, 8]]}]}, r"\[4, 4\] and \[8, 8\] have the same"),
        ({"pipeline": [{"op": "crop_to_bucket", "sizes": [[4, 4], [8, 4]], "multiple_of": 8}]}, "count with pixels"),
        ({"pipeline": [{**CROPS[1], "ratio": [2, 1]}]}, "write the smaller number first"),
        ({"pipeline": [{"op": "letterbox", "sizes": [[8, 8]]}]}, "one of 2 to 64 sizes, and these are 1"),
        ({"pipeline": [{"op": "resize", "shorter_sides": [8] * 65}]}, "one of 2 to 64 shorter_sides, and these are 65"),
        ({"pipeline": [{"op": "letterbox"}]}, r"letterbox needs either size = \[height, width\], or sizes"),
        ({"pipeline": [{"op": "letterbox", "size": [8, 8], **SIZES}]}, "letterbox needs either size"),
        ({"pipeline": [{"op": "resize", "shorter_side": 8, **SIZES}]}, "for each batch to draw, sizes = "),
        (
            {"pipeline": [{"op": "resize", "shorter_sides": [8, 16], "max_longer_side": 12}]},
            "max_longer_side is less than shorter_side",
        ),
        ({"pipeline": [{"op": "resize", "multiple_of": 8, **SIZES}]}, "multiple_of is for one side or max_pixels"),
        (
            {"pipeline": [DRAWN, {"op": "resize", "field": "b", "shorter_sides": [8, 9, 10]}]},
            '"letterbox" draws one of 2 sizes, and another step one of others; a batch draws once: give both the same',
        ),
        (
            {"pipeline": [DRAWN, {**DRAWN, "field": "b", "sizes": [[8, 8], [8, 9]]}]},
            "another step one of others; a batch draws once",
        ),
        ({"pipeline": [*CROPS, DRAWN]}, '"crop_to_bucket" decides the size of a batch, so "letterbox" can draw none'),
        (
            {"pipeline": [DRAWN], "bucket": {**BUCKET, "budget": 8}},
            '"letterbox" draws the size of the images of a batch, and a budget the room of its rows; leave budget out',
        ),
        (
            {"pipeline": [{"op": "choose", "of": [DRAWN]}]},
            'choose cannot have "letterbox" with several sizes in of',
        ),
        (
            {"pipeline": [{"op": "views", "into": {"a": {"steps": [DRAWN]}}}]},
            '"letterbox" with several sizes cannot be inside of "views"',
        ),
    ],
)
def test_keys_that_cannot_be_combined_are_refused(keys, problem):
    with pytest.raises(ValueError, match=problem):
        stream_of(**keys)


TOKENS_OUT = {"tokens": "int32[?]"}


@pytest.mark.parametrize(
    ("bucket", "steps", "problem"),
    [
        ({"field": "words"}, [], "a sample has no 'words' after the steps; it has tokens, image, pixels, cost"),
        ({"field": "image"}, [], "'image' is an image file after the steps: only numbers"),
        ({"field": "words", "by": "aspect"}, [], "a sample has no 'words' in the source"),
        ({"field": "tokens", "by": "pixels"}, [], "'tokens' is int32[?] in the source: only image files"),
        (BUCKET, [Call(function="a:b", random=True)], '"call" draws random numbers for it'),
        (BUCKET, [Call(function="a:b", outputs={"tokens": "int32[?]"})], '"call" draws random numbers for it'),
        (
            BUCKET,
            [Call(function="a:b", outputs={"cost": "float32"}), Call(function="a:c", outputs=TOKENS_OUT, random=False)],
            '"call" draws random numbers for it',
        ),
        (
            {"field": "tokens", "by": "value"},
            [],
            "'tokens' is int32[?] after the steps: by = \"value\" needs one number",
        ),
        (
            {"field": "cost", "by": "value"},
            [Call(function="a:b", random=True)],
            '"call" draws random numbers for it, if it does not say random = false',
        ),
        ({"field": "words", "by": "bytes"}, [], "a sample has no 'words' in the source"),
    ],
)
def test_a_field_without_a_size_is_refused(bucket, steps, problem):
    config = stream_of(bucket=bucket).model_copy(update={"pipeline": tuple(steps)})

    with pytest.raises(SourceInvalid) as caught:
        check_bucket("s", config, [TOKENS, IMAGE, PIXELS, COST])

    assert str(caught.value).startswith("streams.s.bucket.field: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("bucket", "steps"),
    [
        (BUCKET, [Cast(field="tokens", dtype="int64"), Ragged(field="tokens", max_shape=(8,))]),
        ({"field": "pixels"}, []),
        ({"field": "pixels", "by": "pixels"}, []),
        ({"field": "image", "by": "aspect"}, []),
        ({"field": "image", "by": "bytes", "budget": 9}, []),
        ({"field": "tokens", "by": "bytes"}, []),
        ({"field": "cost", "by": "value"}, [Call(function="a:b", random=False)]),
    ],
)
def test_a_field_with_a_size_is_accepted(bucket, steps):
    check_bucket(
        "s", stream_of(bucket=bucket).model_copy(update={"pipeline": tuple(steps)}), [TOKENS, IMAGE, PIXELS, COST]
    )


CROP = op.CropToBucket(pixels=1 << 18)


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([op.Decode(), op.Resize(size=(8, 8)), CROP], '"resize" in front of it may change these; put it behind'),
        ([op.Decode(), op.Rotate(quarter_turns=(1,)), CROP], '"rotate" in front of it may change these'),
        ([op.Decode(exif="ignore"), CROP], 'exif = "ignore" leaves it as stored'),
        ([op.Decode(), Call(function="a:b"), CROP], '"call" in front of it may change these'),
        (
            [Rename(field="image", to="a"), op.Decode(field="a"), replace(CROP, field="a")],
            "a sample has no 'a' in the source",
        ),
    ],
)
def test_a_crop_to_the_bucket_goes_by_the_files(steps, problem):
    """Its sizes are chosen from the headers, for the upright image."""
    config = stream_of().model_copy(update={"pipeline": tuple(steps)})

    with pytest.raises(SourceInvalid) as caught:
        check_bucket("s", config, [TOKENS, IMAGE, PIXELS, COST])

    assert str(caught.value).startswith("streams.s.")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "steps",
    [
        [op.Decode(), CROP],
        [op.Decode(), op.Follow(boxes="boxes"), op.RandomFlip(), op.Gray(), CROP, op.Normalize(), op.Layout()],
        [Call(function="a:b", outputs={"score": "float32"}), op.Decode(), CROP],
        [replace(CROP, field="pixels")],
    ],
)
def test_what_keeps_the_proportions_may_come_before_a_crop_to_the_bucket(steps):
    check_bucket("s", stream_of().model_copy(update={"pipeline": tuple(steps)}), [TOKENS, IMAGE, PIXELS, COST, BOXES])


RAGGED_IMAGE, LENGTH = Ragged(max_shape=(8, 8, 3)), {"field": "tokens", "budget": 64}
FLAT, OF_PIXELS = Column("flat", dtype="int32", shape=(None, 3)), {"field": "image", "by": "pixels", "budget": 64}


@pytest.mark.parametrize(
    ("bucket", "steps", "field"),
    [
        (LENGTH, [PadBatch(field="tokens", max_shape=(8,))], "tokens"),
        (LENGTH, [Cast(field="tokens", dtype="int64"), Ragged(field="tokens", max_shape=(8,))], "tokens"),
        ({**LENGTH, "field": "flat"}, [Ragged(field="flat", max_shape=(8, 3))], "flat"),
        (OF_PIXELS, [op.Decode(), op.RandomFlip(), op.Normalize(), RAGGED_IMAGE], "image"),
        (OF_PIXELS, [op.Decode(), op.Layout(), Ragged(max_shape=(3, 8, 8))], "image"),
        (OF_PIXELS, [op.Decode(color="gray"), Ragged(max_shape=(8, 8, 1))], "image"),
        ({**OF_PIXELS, "field": "pixels"}, [Ragged(field="pixels", max_shape=(8, 8, 3))], "pixels"),
        ({"field": "tokens"}, [PadBatch(field="tokens", max_shape=(8,))], None),
        ({**LENGTH, "by": "bytes"}, [PadBatch(field="tokens", max_shape=(8,))], None),
        ({**LENGTH, "field": "pixels"}, [Ragged(field="pixels", max_shape=(8, 8, 3))], None),
        ({"field": "cost", "by": "value", "budget": 9}, [PadBatch(field="tokens", max_shape=(8,))], None),
        (OF_PIXELS, [op.Decode(), PadBatch(max_shape=(8, 8, 3))], None),
        (OF_PIXELS, [op.Decode(), op.Resize(shorter_side=8), RAGGED_IMAGE], None),
        (OF_PIXELS, [op.Decode(), op.Pad(border=(1, 1, 1, 1)), RAGGED_IMAGE], None),
        (OF_PIXELS, [op.Decode(), op.Rotate(quarter_turns=(0, 1)), RAGGED_IMAGE], None),
        (OF_PIXELS, [op.Decode(), Call(function="a:b", random=False), RAGGED_IMAGE], None),
    ],
)
def test_a_budget_decides_the_room_where_sizes_bound_it(bucket, steps, field):
    """Any other field keeps the room of the largest sample in all rows."""
    config = stream_of(bucket=bucket).model_copy(update={"pipeline": tuple(steps)})
    needed = {step.field for step in steps if hasattr(step, "field")} | {bucket["field"]}
    columns = [one for one in (TOKENS, IMAGE, PIXELS, COST, FLAT) if one.name in needed]

    assert budgeted_field(config, columns) == field


@pytest.mark.parametrize("bucket", [BUCKET, {"field": "cost", "by": "value"}, {"field": "image", "by": "aspect"}])
def test_what_a_random_function_does_not_name_keeps_its_size(bucket):
    """Its outputs are what it may change, so a bucket may go by any other field."""
    steps = (Call(function="a:b", outputs={"mel": "float32[80,?]"}), Call(function="a:c", outputs={"score": "float32"}))
    config = stream_of(bucket=bucket).model_copy(update={"pipeline": steps})

    check_bucket("s", config, [TOKENS, IMAGE, PIXELS, COST])
