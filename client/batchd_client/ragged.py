"""Rows of different lengths as one array: what Arrow, TensorFlow and torch take. Runs in the trainer.

    values    a a a . . . b . . . . . c c . . . .     all rows' room, one behind the other; "." is room that a row did not need
    offsets   0           6           12              where each row begins
    lengths   3           1           2               how long each is

    values    a a a b c c                             compacted: a copy
    row_splits  0     3 4   6                         row i is values[row_splits[i] : row_splits[i + 1]]

The upper form is Arrow's LargeListView. Of the lower one, TensorFlow
(``RaggedTensor.from_row_splits``) and torch (``nested.nested_tensor_from_jagged``, where it is
called offsets) make theirs.
"""

from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchd_wire.fields import Varying


class CompactRagged(NamedTuple):
    """A copy without gaps. ``values``: ``[elements, ...]``. ``row_splits``: int64 ``[rows + 1]``, see the drawing."""

    values: npt.NDArray[Any]
    row_splits: npt.NDArray[np.int64]


class Ragged(NamedTuple):
    """A ragged field over shared memory, not a copy; see the drawing.

    ``values``: ``[elements, ...]``, read-only; what stands behind the last dimension that varies
    stays as it is, so of ``float32[<=128, 768]`` it is ``[rows * 128, 768]``. ``offsets`` and
    ``lengths``: int64 ``[rows]``, in elements of ``values``.
    """

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def compact(self) -> CompactRagged:
        """Copy the values without the gaps between the rows; the copy does not hold the batch."""
        row_splits = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=row_splits[1:])
        values = np.empty((int(row_splits[-1]), *self.values.shape[1:]), self.values.dtype)
        for start, end, offset in zip(row_splits[:-1], row_splits[1:], self.offsets, strict=True):
            values[start:end] = self.values[offset : offset + end - start]
        return CompactRagged(values, row_splits)


def ragged_view(array: npt.NDArray[Any], sizes: npt.NDArray[np.int64], varying: Varying) -> Ragged:
    """View a ragged field ``[rows, *shape]``, contiguous, whose rows have these checked ``sizes``."""
    shape = array.shape[1:]
    last = varying.axes[-1] + 1
    room = prod(shape[:last])
    fixed = prod(length for axis, length in enumerate(shape[:last]) if axis not in varying.axes)
    values = array.reshape(len(array) * room, *shape[last:])
    offsets = np.arange(len(array), dtype=np.int64) * room
    return Ragged(values, offsets, sizes.prod(axis=1, dtype=np.int64) * fixed)
