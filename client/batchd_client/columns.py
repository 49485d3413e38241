"""Fields of a batch as arrays of one's own, for frameworks that take arrays. Runs in the trainer.

Invariant: an array that is given out has memory of its own, which no other batch is ever written
to.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from batchd_client.errors import TensorsInvalid
from batchd_client.stream import FieldSchema

INDEX = "index"
"""The field that every stream has: the numbers of the samples in their source."""
ALIGNMENT_BYTES = 64
"""Where TensorFlow and JAX want arrays to begin: others they copy once more."""


def wanted(schema: Mapping[str, FieldSchema], fields: Sequence[str] | None, *, as_dict: bool) -> tuple[str, ...]:
    """Tell which fields a loop gets, in their order; default: all, in tuples without ``index``. Raises ``TensorsInvalid``."""
    if fields is None:
        return tuple(name for name in schema if as_dict or name != INDEX)
    for name in fields:
        if name not in schema:
            raise TensorsInvalid(f"fields: the stream has no field {name!r}; it has {', '.join(schema)}")
    return tuple(fields)


def own(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Copy an array to memory of its own that begins at a multiple of ``ALIGNMENT_BYTES``."""
    memory = np.empty(array.nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
