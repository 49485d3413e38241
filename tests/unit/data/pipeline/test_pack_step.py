"""The step that fills a row with several documents: fields, rows, and where it cannot be."""

import json

import numpy as np
import pytest

from batchd.config.tree import StreamConfig
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.fields.options import Cast, Drop
from batchd.data.pipeline.sample_fields import columns_after, sample_fields
from batchd.data.pipeline.shapes.options import Pack, PadBatch
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.worker.packs import PackWriter
from batchd_wire.fields import Field
from support.steps import check_steps

TOKENS = Column("tokens", dtype="int32", shape=(None,))
VECTORS = Column("vectors", dtype="float32", shape=(None, 2))
LABEL = Column("label", dtype="int64")
BOX = Column("box", dtype="float32", shape=(4,))
PACK = Pack(field="tokens", length=8, documents=3, fill=-1)
COLUMNS = [TOKENS, VECTORS, LABEL, BOX]


def new_row():
    """A row that was full of other values before."""
    return {field.name: np.full(field.shape, 77, field.dtype) for field in sample_fields(COLUMNS, [PACK], "fail")}


def writer_of(row):
    return PackWriter(PACK, {column.name: column for column in COLUMNS}, row)


def document(first, length):
    return {
        "tokens": np.arange(first, first + length, dtype=np.int32),
        "vectors": np.full((length, 2), first, np.float32),
        "label": np.int64(first),
        "box": np.full(4, first, np.float32),
    }


def test_the_fields_are_those_of_a_row():
    """Values that vary have its length, and others one value for each document."""
    assert sample_fields(COLUMNS, [PACK], "fail") == (
        Field("tokens", "int32", (8,)),
        Field("vectors", "float32", (8, 2)),
        Field("label", "int64", (3,)),
        Field("box", "float32", (3, 4)),
        Field("segment_ids", "int32", (8,)),
        Field("position_ids", "int32", (8,)),
        Field("lengths", "int32", (3,)),
        Field("index", "int64", (3,)),
    )


def test_a_row_may_have_a_document_for_each_sixteen_elements():
    assert Pack(field="tokens", length=4096).documents_max == 256
    assert Pack(field="tokens", length=5).documents_max == 1
    assert Pack(field="tokens", length=5, documents=9).documents_max == 5


def test_documents_follow_each_other_and_the_rest_is_filled():
    row = new_row()
    writer = writer_of(row)

    writer.add(41, 0, document(10, 3))
    writer.add(7, 2, document(100, 5))
    writer.finish()

    assert row["tokens"].tolist() == [10, 11, 12, 102, 103, 104, -1, -1]
    assert row["vectors"][:, 1].tolist() == [10, 10, 10, 100, 100, 100, 0, 0]
    assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2, 2, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert row["lengths"].tolist() == [3, 3, 0]
    assert row["index"].tolist() == [41, 7, -1]
    assert row["label"].tolist() == [10, 100, 0]
    assert row["box"][:, 3].tolist() == [10, 100, 0]


def test_a_row_without_a_document_is_empty():
    row = new_row()

    writer_of(row).finish()

    assert row["tokens"].tolist() == [-1] * 8
    assert row["index"].tolist() == [-1] * 3
    assert not any(row[name].any() for name in ("vectors", "label", "box", "segment_ids", "position_ids", "lengths"))


@pytest.mark.parametrize(
    ("first", "values", "reason"),
    [
        (0, document(0, 6), "'tokens' has 6 elements, another number than when its rows were planned"),
        (4, document(0, 4), "'tokens' has 4 elements, another number"),
        (0, {**document(0, 3), "vectors": np.zeros((2, 2), np.float32)}, "'vectors' has 2 elements, and 'tokens' 3"),
    ],
    ids=["longer than its room", "shorter than its part", "fields of different length"],
)
def test_a_document_that_does_not_fit_is_bad_and_leaves_nothing(first, values, reason):
    row = new_row()
    writer = writer_of(row)
    writer.add(1, 0, document(10, 3))

    with pytest.raises(SampleUndecodable, match=reason):
        writer.add(2, first, values)
    writer.add(3, 0, document(20, 5))
    writer.finish()

    assert row["tokens"].tolist() == [10, 11, 12, 20, 21, 22, 23, 24]
    assert row["index"].tolist() == [1, 3, -1]


def test_steps_that_give_a_sample_other_values_come_before():
    made = columns_after(COLUMNS, [Cast(field="tokens", dtype="int64"), Drop(fields=("box",)), PACK])

    assert made["tokens"].text == "int64[8]"
    assert "box" not in made


@pytest.mark.parametrize(
    ("columns", "steps", "problem"),
    [
        ([LABEL], [PACK], "\"pack\" is done to 'tokens', and a sample has 'label'"),
        ([LABEL], [Pack(field="label", length=8)], "whose first dimension alone varies, and 'label' is int64"),
        ([Column("tokens", "text")], [PACK], "'tokens' is text; \"tokenize\" makes numbers of a text"),
        (
            [Column("tokens", dtype="int32", shape=(8,), made_by="tokenize")],
            [PACK],
            'is int32[8]; padding = "none" of "tokenize" leaves each text its length',
        ),
        ([Column("tokens", "encoded")], [PACK], 'the first step on it must be { op = "decode"'),
        ([TOKENS, Column("name", "text")], [PACK], "and 'name' is text; \"drop\" leaves it out"),
        ([TOKENS, Column("deep", shape=(1,) * 8)], [PACK], "\"pack\" adds a dimension to 'deep', which has 8"),
        ([TOKENS], [Pack(field="tokens", length=8, fill=0.5)], "fill = 0.5, which int32 cannot hold"),
        ([TOKENS, Column("lengths", dtype="int32")], [PACK], "makes a field 'lengths', and the sample already has one"),
        ([TOKENS], [PACK, Cast(field="tokens", dtype="int64")], '"cast" cannot come after "pack"'),
        ([TOKENS], [Call(function="a:b", random=True), PACK], "\"call\" draws another length of 'tokens' each time"),
        ([TOKENS], [Call(function="a:b", outputs={"tokens": "int32[?]"}), PACK], "so do outputs that have one shape"),
        ([TOKENS], [PACK, PACK], '"pack" cannot come after "pack"'),
        ([TOKENS], [PadBatch(field="tokens", max_shape=(8,)), PACK], '"pack" cannot come after "pad_batch"'),
    ],
)
def test_what_cannot_be_packed_is_refused(columns, steps, problem):
    (found,) = check_steps(columns, steps)

    assert problem in found


def stream_of(**keys):
    table = {"source": {"type": "npz", "path": "/a.npz"}, "batch_size": 4}
    return StreamConfig.model_validate_json(
        json.dumps({**table, "pipeline": [{"op": "pack", "field": "tokens", "length": 8}], **keys}),
        strict=True,
    )


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"on_error": "mask"}, 'on_error = "mask" cannot be done with "pack"'),
        ({"shuffle": {"blocks": 2, "block_samples": 4}}, '"pack" puts samples together by their lengths'),
        (
            {"source": {"type": "generator", "function": "a:b", "fields": {"tokens": "int32[?]"}}, "shuffle": False},
            "are not there yet when the rows of an epoch are planned",
        ),
    ],
    ids=["mask", "blocks", "live"],
)
def test_options_that_do_not_go_with_it_are_refused(keys, problem):
    with pytest.raises(ValueError, match=problem):
        stream_of(**keys)
