"""numpy arrays over a slot. Workers, trainers, CLI; the only module here that needs numpy.

Invariant: no view reaches beyond its field, whatever sizes the slot holds. Another process owns the
memory, so sizes are first copied, then checked against the field's shape.
"""

from math import prod
from mmap import mmap
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from batchd_wire.fields import RAGGED, PlacedField, SlotLayout, Varying

Array: TypeAlias = npt.NDArray[Any]
Memory: TypeAlias = bytes | bytearray | memoryview | mmap


def field_array(buffer: Memory, field: PlacedField, rows: int) -> Array:
    """View ``rows`` rows of a field: ``[rows, *field.shape]``, read-only where the buffer is."""
    count = rows * field.row_bytes // np.dtype(field.dtype).itemsize
    flat = np.frombuffer(buffer, dtype=field.dtype, count=count, offset=field.offset)
    return flat.reshape(rows, *field.shape)


def slot_arrays(buffer: Memory, layout: SlotLayout) -> dict[str, Array]:
    """View every field of a sample, by name, each ``[layout.rows, *shape]``."""
    return {field.name: field_array(buffer, field, layout.rows) for field in layout.sample_fields}


def checked_sizes(sizes: Array, shape: tuple[int, ...], varying: Varying) -> Array:
    """Copy and check the sizes of a varying field whose rows are at most ``shape``.

    Returns int64 ``[rows, varying dimensions]``. Raises ``ValueError`` naming the first row with a
    size that is negative or larger than ``shape``, or with more elements than its room.
    """
    known = np.array(sizes, dtype=np.int64).reshape(len(sizes), len(varying.axes))
    room = [shape[axis] for axis in varying.axes]
    largest = list(varying.largest or room)
    wrong = ((known < 0) | (known > largest)).any(axis=1)
    if varying.largest:
        wrong |= known.prod(axis=1, dtype=np.float64) > prod(room)  # it cannot overflow
    if wrong.any():
        row = int(wrong.argmax())
        together = f", {prod(room)} together" if varying.largest else ""
        raise ValueError(f"row {row} has the sizes {known[row].tolist()}, and the largest may be {largest}{together}")
    return known


def cut_to_largest(array: Array, sizes: Array, varying: Varying) -> Array:
    """View a padded ``[rows, *shape]`` cut to its largest row. ``sizes``: of ``checked_sizes``."""
    return array[(slice(None), *_corner(array.ndim - 1, sizes.max(axis=0, initial=0), varying))]


def row_views(array: Array, sizes: Array, varying: Varying) -> list[Array]:
    """View each row of ``[rows, *shape]`` in its own shape. ``sizes``: of ``checked_sizes``."""
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
    """Slices of a row: ``size`` in the varying dimensions, and the whole length in the others."""
    lengths = dict(zip(varying.axes, size.tolist(), strict=True))
    return tuple(slice(lengths.get(axis)) for axis in range(dimensions))
