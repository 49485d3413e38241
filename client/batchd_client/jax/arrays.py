"""What the fields of a batch are as arrays of JAX: types, shapes, room. Runs in the trainer.

    field in the slot             array that the loop gets
    float32 [B, 224, 224, 3]  ->  float32 [B, 224, 224, 3]
    int64 [B]                 ->  int32 [B], and a number that does not fit is an error; int64 where jax_enable_x64 is set
    int32 [B, <=128]          ->  int32 [B, 128], all the room, with NAME_length beside it

Invariant: an array has the same shape in every whole batch, so a function under ``jax.jit`` is
compiled once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from batchd_client.errors import TensorsInvalid
from batchd_client.stream import Stream

ALIGNMENT_BYTES = 64
"""Where JAX needs host memory to begin, to take it as it is."""


def specs_for(
    stream: Stream, fields: Sequence[str] | None, sharding: jax.sharding.Sharding | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a whole batch, by field, in the order that is wanted. Raises ``TensorsInvalid``."""
    schema = stream.schema
    names = tuple(schema) if fields is None else tuple(fields)
    for name in names:
        if name not in schema:
            raise TensorsInvalid(f"fields: the stream has no field {name!r}; it has {', '.join(schema)}")
    is_whole = sharding is None or sharding.is_fully_addressable
    rows = stream.batch_size if is_whole else stream.batch_size * stream.world_size
    specs = {
        name: jax.ShapeDtypeStruct((rows, *schema[name].shape), dtype_in_jax(schema[name].dtype), sharding=sharding)
        for name in names
    }
    if sharding is not None:
        _check_rows(stream, specs, sharding)
    return specs


def dtype_in_jax(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type that JAX has for this one: half as wide where it is one of 64 bits, unless ``jax_enable_x64`` is set."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def host_array(name: str, array: npt.NDArray[Any], *, own: bool) -> npt.NDArray[Any]:
    """A field as JAX takes it: as it lies there if its type may stay, unless it shall have memory of its ``own``.

    Raises ``TensorsInvalid`` where a number does not fit into JAX's type.
    """
    dtype = dtype_in_jax(array.dtype)
    if dtype == array.dtype and not own:
        return array
    copy = _empty(array.shape, dtype)
    np.copyto(copy, array, casting="unsafe")
    if dtype != array.dtype and dtype.kind in "iu" and (copy != array).any():
        raise TensorsInvalid(
            f"field {name!r} has the number {array[copy != array][0]}, which is no {dtype.name}: set jax_enable_x64, or leave "
            "the field out (fields=)"
        )
    return copy


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """New memory that begins where JAX likes it, so that it makes no copy of the copy."""
    size = dtype.itemsize * int(np.prod(shape))
    memory = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size].view(dtype).reshape(shape)


def _check_rows(stream: Stream, specs: Mapping[str, jax.ShapeDtypeStruct], sharding: jax.sharding.Sharding) -> None:
    """Does the sharding go with the rows of every batch, those of a smaller last one too? Raises ``TensorsInvalid``."""
    rest = stream.samples % stream.batch_size if stream.world_size == 1 else 0
    is_even = len(stream) * stream.world_size * stream.batch_size <= stream.samples
    if not is_even and not sharding.is_fully_addressable:
        raise TensorsInvalid(
            f"stream {stream.name!r} may end its epochs with a smaller batch, of which {stream.world_size} processes cannot make "
            "one array: set drop_last = true for it in batchd.toml"
        )
    for name, spec in specs.items():
        for rows in {spec.shape[0]} if is_even or not rest else {spec.shape[0], rest}:
            try:
                sharding.shard_shape((rows, *spec.shape[1:]))
            except ValueError as error:
                remedy = (
                    "" if rows == spec.shape[0] else " (the last batch of an epoch; drop_last = true leaves it out)"
                )
                raise TensorsInvalid(f"field {name!r}, {rows} rows{remedy}: {error}") from None
