"""numpy arrays over a slot. Workers and trainers; the only module of the wire that needs numpy."""

from typing import Any

import numpy as np

from batchd_wire.fields import PlacedField, SlotLayout


def field_array(buffer: Any, field: PlacedField, rows: int) -> np.ndarray[Any, Any]:
    """View ``rows`` rows of one field: shape ``[rows, *field.shape]``, read-only where the buffer is."""
    count = rows * field.row_bytes // np.dtype(field.dtype).itemsize
    flat = np.frombuffer(buffer, dtype=field.dtype, count=count, offset=field.offset)
    return flat.reshape(rows, *field.shape)


def slot_arrays(buffer: Any, layout: SlotLayout) -> dict[str, np.ndarray[Any, Any]]:
    """View every field of a sample, by name, each ``[layout.rows, *shape]``."""
    return {field.name: field_array(buffer, field, layout.rows) for field in layout.sample_fields}
