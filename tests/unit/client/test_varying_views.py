"""Rows of different shapes: trainers read what workers wrote, and no view leaves its field."""

from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.shapes.options import PadBatch, Ragged
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd_client.batch import ragged_view
from batchd_wire.fields import Field, Varying
from batchd_wire.views import checked_sizes, cut_to_largest, row_views

SENTINEL = 77


@dataclass
class Written:
    """Samples, and the memory that a worker's step wrote for them."""

    samples: list[np.ndarray]
    array: np.ndarray
    sizes: np.ndarray
    varying: Varying

    @property
    def checked(self) -> np.ndarray:
        return checked_sizes(self.sizes, self.array.shape[1:], self.varying)


@st.composite
def written(draw, kinds=("padded", "ragged")) -> Written:
    """Random samples of up to three dimensions, some varying, written by the worker's step.

    The room of a row may be that of a bucket, which its samples leave unused in part.
    """
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    axes = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    dtype = draw(st.sampled_from(["uint8", "int64", "float32", "bool"]))
    rows = draw(st.integers(1, 6))
    step = (PadBatch if draw(st.sampled_from(kinds)) == "padded" else Ragged)(field="x", max_shape=shape)
    column = Column("x", "array", dtype, tuple(None if axis in axes else length for axis, length in enumerate(shape)))
    pipeline = Pipeline([column], [step], 0)
    sizes_name = "x_length" if len(axes) == 1 else "x_shape"
    varying = pipeline.columns["x"].varying
    field = Field("x", dtype, shape, varying)
    if (varying.kind == "ragged" or axes == (0,)) and draw(st.booleans()):
        field = field.within(draw(st.integers(1, 70)))
    room = prod(field.shape[axis] for axis in axes)
    array = np.full((rows, *field.shape), SENTINEL, dtype)
    sizes = np.full((rows, *pipeline.columns[sizes_name].fixed_shape), SENTINEL, np.int32)
    samples = []
    for row in range(rows):
        size = tuple(draw(st.integers(0, length)) if axis in axes else length for axis, length in enumerate(shape))
        while prod(size[axis] for axis in axes) > room:
            size = tuple(length - (axis in axes and length > 0) for axis, length in enumerate(size))
        samples.append((np.arange(prod(size)).reshape(size) * 3 + row + 1).astype(dtype))
        pipeline.run({"x": samples[-1]}, 0, row, 0, {"x": array[row, ...], sizes_name: sizes[row, ...]})
    array.flags.writeable = False
    return Written(samples, array, sizes, field.varying)


@given(written())
def test_every_row_is_read_as_the_sample_that_was_written(memory) -> None:
    """Rows of any shape, and empty ones, are read-only views without a copy."""
    views = row_views(memory.array, memory.checked, memory.varying)

    for sample, view in zip(memory.samples, views, strict=True):
        assert view.shape == sample.shape
        assert np.array_equal(view, sample)
        assert not view.flags.writeable
        assert not view.size or np.shares_memory(view, memory.array)
        assert view.flags.c_contiguous or memory.varying.kind == "padded"


@given(written(kinds=("padded",)))
def test_a_padded_batch_is_cut_to_its_largest_and_filled_with_zeros(memory) -> None:
    """Each dimension that varies is cut separately."""
    cut = cut_to_largest(memory.array, memory.checked, memory.varying)

    assert cut.shape[1:] == tuple(np.max([sample.shape for sample in memory.samples], axis=0))
    expected = np.zeros(cut.shape, cut.dtype)
    for row, sample in zip(expected, memory.samples, strict=True):
        row[tuple(map(slice, sample.shape))] = sample
    assert np.array_equal(cut, expected)
    assert not np.any(memory.array.sum(dtype=np.float64) - cut.sum(dtype=np.float64))


@given(written(kinds=("ragged",)))
def test_a_ragged_batch_is_one_array_with_offsets_and_lengths(memory) -> None:
    """The views have Arrow's list-view form; compact ones the form of TensorFlow and torch."""
    ragged = ragged_view(memory.array, memory.checked, memory.varying)
    compact = ragged.compact()

    assert np.shares_memory(ragged.values, memory.array)
    assert ragged.offsets.dtype == ragged.lengths.dtype == compact.row_splits.dtype == np.int64
    inner = memory.array.shape[1:][memory.varying.axes[-1] + 1 :]
    for row, sample in enumerate(memory.samples):
        start, length = ragged.offsets[row], ragged.lengths[row]
        wanted = sample.reshape(length, *inner)
        assert np.array_equal(ragged.values[start : start + length], wanted)
        assert np.array_equal(compact.values[compact.row_splits[row] : compact.row_splits[row + 1]], wanted)
    assert len(compact.values) == ragged.lengths.sum() == compact.row_splits[-1]
    assert compact.row_splits[0] == 0
    assert compact.values.flags.owndata


@given(written(), st.data())
def test_no_sizes_lead_out_of_the_field(memory, data) -> None:
    """Any numbers give an error, or views within the row that they belong to."""
    flat = memory.sizes.reshape(-1)
    for place in data.draw(st.lists(st.integers(0, flat.size - 1), max_size=4)):
        flat[place] = data.draw(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-2, 7))
    shape = memory.array.shape[1:]
    room = [shape[axis] for axis in memory.varying.axes]
    known = memory.sizes.reshape(len(memory.sizes), -1).astype(object)
    is_wrong = (known < 0).any() or (known > list(memory.varying.largest or room)).any()
    if is_wrong or (known.prod(axis=1) > prod(room)).any():
        with pytest.raises(ValueError, match=r"row \d+ has the sizes .* the largest may be"):
            checked_sizes(memory.sizes, shape, memory.varying)
        return
    row_bytes = memory.array[0].nbytes
    begins = memory.array.__array_interface__["data"][0]
    for row, view in enumerate(row_views(memory.array, memory.checked, memory.varying)):
        first = view.__array_interface__["data"][0] - begins
        last = first + sum((length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True))
        assert not view.size or row * row_bytes <= first <= last + view.itemsize <= (row + 1) * row_bytes


def test_a_sample_that_is_larger_than_its_room_is_bad() -> None:
    """Its file has changed since the buckets were made; a smaller side does not help."""
    column = Column("x", dtype="uint8", shape=(None, None))
    pipeline = Pipeline([column], [Ragged(field="x", max_shape=(9, 9))], 0)
    field = Field("x", "uint8", (9, 9), pipeline.columns["x"].varying).within(20)
    row = {"x": np.zeros(field.shape, np.uint8), "x_shape": np.zeros(2, np.int32)}

    pipeline.run({"x": np.ones((9, 2), np.uint8)}, 0, 0, 0, row)
    assert row["x_shape"].tolist() == [9, 2]
    with pytest.raises(SampleUndecodable, match=r"'x' is uint8\[7, 3\], larger than the largest of its bucket"):
        pipeline.run({"x": np.ones((7, 3), np.uint8)}, 0, 0, 0, row)


def test_sizes_are_copied_before_they_are_checked() -> None:
    """Another process owns the memory of the sizes, and may change it at any moment."""
    sizes = np.array([1, 2], np.int32)
    checked = checked_sizes(sizes, (4,), Varying("ragged", (0,)))

    sizes[:] = 1 << 30

    assert checked.tolist() == [[1], [2]]
