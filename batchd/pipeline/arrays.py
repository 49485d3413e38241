"""Values of a sample as arrays of the type and shape that their columns say. Worker process."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchd.config.columns import Column
from batchd.config.values import Value
from batchd.pipeline.errors import SampleUndecodable


def array_of(column: Column, value: Value) -> NDArray[Any]:
    """The value as an array of its column's type. Raises ``SampleUndecodable`` where it is not what the column says."""
    array = np.asarray(value)
    fits = len(array.shape) == len(column.shape) and all(
        wanted in (None, length) for wanted, length in zip(column.shape, array.shape, strict=True)
    )
    if not fits or not np.can_cast(array.dtype, column.dtype, "same_kind"):
        raise SampleUndecodable(f"{column.name!r} is {array.dtype}{list(array.shape)} instead of {column.text}")
    return array.astype(column.dtype, copy=False)
