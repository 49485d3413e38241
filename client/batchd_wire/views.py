"""numpy arrays over a slot. Workers, trainers and CLI; the only module of the wire that needs numpy.

Invariant: no view reaches beyond its field, whatever the slot's sizes say: they are copied before
they are looked at, since the memory belongs to another process, and checked against the largest
that there may be.
"""

from math import prod
from typing import Any

import numpy as np

from batchd_wire.fields import RAGGED, PlacedField, SlotLayout, Varying

Array = np.ndarray[Any, Any]


def field_array(buffer: Any, field: PlacedField, rows: int) -> Array:
    """View ``rows`` rows of one field: shape ``[rows, *field.shape]``, read-only where the buffer is."""
    count = rows * field.row_bytes // np.dtype(field.dtype).itemsize
    flat = np.frombuffer(buffer, dtype=field.dtype, count=count, offset=field.offset)
    return flat.reshape(rows, *field.shape)


def slot_arrays(buffer: Any, layout: SlotLayout) -> dict[str, Array]:
    """View every field of a sample, by name, each ``[layout.rows, *shape]``."""
    return {field.name: field_array(buffer, field, layout.rows) for field in layout.sample_fields}


def checked_sizes(sizes: Array, shape: tuple[int, ...], varying: Varying) -> Array:
    """Copy the field of sizes that goes with a field whose rows are ``shape`` at most: int64 ``[rows, varying dimensions]``.

    Raises ``ValueError`` naming the first row that would be larger than its room, or smaller than
    nothing.
    """
    known = np.array(sizes, dtype=np.int64).reshape(len(sizes), len(varying.axes))
    largest = [shape[axis] for axis in varying.axes]
    wrong = ((known < 0) | (known > largest)).any(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"row {row} has the sizes {known[row].tolist()}, and the largest may be {largest}")
    return known


def cut_to_largest(array: Array, sizes: Array, varying: Varying) -> Array:
    """View a padded field ``[rows, *shape]`` up to its largest row in each dimension that varies. ``sizes`` as checked."""
    return array[(slice(None), *_corner(array.ndim - 1, sizes.max(axis=0, initial=0), varying))]


def row_views(array: Array, sizes: Array, varying: Varying) -> list[Array]:
    """View each row of a varying field ``[rows, *shape]`` in the shape that it has. ``sizes`` as checked."""
    if varying.kind != RAGGED:
        return [row[_corner(row.ndim, size, varying)] for row, size in zip(array, sizes, strict=True)]
    flat = array.reshape(len(array), prod(array.shape[1:]))
    shape = list(array.shape[1:])
    views = []
    for row, size in zip(flat, sizes.tolist(), strict=True):
        for axis, length in zip(varying.axes, size, strict=True):
            shape[axis] = length
        views.append(row[: prod(shape)].reshape(shape))
    return views


def _corner(dimensions: int, size: Array, varying: Varying) -> tuple[slice, ...]:
    """The beginning corner of a row that is ``size`` large in the dimensions that vary, and whole in the others."""
    lengths = dict(zip(varying.axes, size.tolist(), strict=True))
    return tuple(slice(lengths.get(axis)) for axis in range(dimensions))
