"""A feature of an example becomes the value of a column, or the reason why it cannot. Workers only.

    bytes_list  of one     -> "image", "text", uint8 [n] or [?]: the bytes as numbers
    int64_list             -> any whole number, bool
    float_list             -> float16, float32, float64
    feature list of steps  -> [?] or [?, k]: a row for each step

A length that differs is worked out from how many values there are: 12 of them are a [?, 4] of three rows.

Invariant: a value is what its column says, in dtype and shape; nothing is stretched, cut or wrapped round.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from batchd.config.columns import Column
from batchd.config.values import Value

_FLOATS = frozenset({"float16", "float32", "float64"})


class FeatureMisfits(ValueError):  # noqa: N818  names what is wrong
    """A feature is not what its field was declared as; the text says what it is."""


def value_of(column: Column, feature: Any) -> Value:
    """The value of a column that is one ``Feature``. Raises ``FeatureMisfits``."""
    if column.kind == "array":
        return _shaped(_flat(column.dtype, feature), column.shape)
    data = _only_bytes(feature)
    if column.kind == "encoded":
        if not data:
            raise FeatureMisfits("is empty")
        return memoryview(data)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FeatureMisfits(f"is not UTF-8 at its byte {error.start}") from None


def value_of_steps(column: Column, steps: Sequence[Any]) -> Value:
    """The value of a column that is a ``FeatureList``: a row for each step, all of them alike. Raises ``FeatureMisfits``."""
    if column.kind != "array" or column.shape[:1] not in ((None,), (len(steps),)):
        raise FeatureMisfits(f"is a feature list of {len(steps)}")
    rows = []
    for number, step in enumerate(steps):
        try:
            rows.append(_shaped(_flat(column.dtype, step), column.shape[1:]))
        except FeatureMisfits as misfit:
            raise FeatureMisfits(f"in step {number} {misfit}") from None
        if rows[-1].shape != rows[0].shape:
            raise FeatureMisfits(f"in step {number} has {rows[-1].size} values, and {rows[0].size} in step 0")
    if not rows:
        return np.zeros([length or 0 for length in column.shape], column.dtype)
    return np.stack(rows)


def _flat(dtype: str, feature: Any) -> npt.NDArray[Any]:
    """The values of a feature in one row."""
    kind = feature.WhichOneof("kind")
    if kind == "int64_list" and dtype not in _FLOATS:
        return _whole_numbers(dtype, np.asarray(feature.int64_list.value, np.int64))
    if kind == "float_list" and dtype in _FLOATS:
        return _floats(dtype, np.asarray(feature.float_list.value, np.float32))
    if kind == "bytes_list" and dtype == "uint8":
        return np.frombuffer(_only_bytes(feature), np.uint8)
    raise FeatureMisfits(_described(feature))


def _whole_numbers(dtype: str, values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    if dtype != "int64" and values.size:
        low, high = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        for value in (int(values.min()), int(values.max())):
            if not low <= value <= high:
                raise FeatureMisfits(f"has {value} in it")
    return values.astype(dtype, copy=False)


def _floats(dtype: str, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        converted = values.astype(dtype, copy=False)
    if dtype == "float16":
        lost = np.isinf(converted) & ~np.isinf(values)
        if lost.any():
            raise FeatureMisfits(f"has {values[lost][0]:g} in it")
    return converted


def _shaped(values: npt.NDArray[Any], shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
    """Values in a shape with at most one length to be found out. Raises ``FeatureMisfits`` where they are too few or too many."""
    known = prod(length for length in shape if length is not None)
    rest = values.size % known if None in shape else values.size - known
    if rest:
        raise FeatureMisfits(f"has {values.size} values")
    return values.reshape([values.size // known if length is None else length for length in shape])


def _only_bytes(feature: Any) -> bytes:
    if feature.WhichOneof("kind") != "bytes_list" or len(feature.bytes_list.value) != 1:
        raise FeatureMisfits(_described(feature))
    data: bytes = feature.bytes_list.value[0]
    return data


def _described(feature: Any) -> str:
    kind = feature.WhichOneof("kind")
    return f"is of kind {kind}, {len(getattr(feature, kind).value)} long" if kind else "is of no kind"
