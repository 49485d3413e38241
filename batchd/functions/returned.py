"""What people's functions give, as values of columns: checked exactly, and never cast in silence. Workers.

    declared          taken
    "image"           bytes, bytearray, memoryview
    "text"            str
    "uint8[?,?,3]"    a numpy array of this dtype and shape; what numpy() makes one of (torch, TensorFlow); what has an array
                      interface (PIL); numbers of Python and lists of them, which have no dtype of their own, where they fit

torch and PIL are not imported for it: their objects know how to become arrays.

Invariant: an array that is returned has the dtype and the shape that its column says, and is
C-contiguous.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from batchd.functions.failures import call
from batchd.samples.columns import Column
from batchd.samples.values import Value

_PYTHON_KINDS = {"b": "b", "i": "iuf", "u": "iuf", "f": "f"}
"""Which kinds of dtype take numbers of Python, by the kind that numpy gives these."""


class NotAsDeclared(ValueError):  # noqa: N818  names what is wrong
    """A value is not what its column says; the text says what it is."""


def taken(column: Column, value: Any) -> Value:
    """The value as a column holds it. Raises ``NotAsDeclared``, or ``FunctionFailed`` where it cannot become an array."""
    if column.kind == "encoded":
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise NotAsDeclared(f"{column.name!r} is {_kind(value)} instead of the bytes of an image")
        return memoryview(value)
    if column.kind == "text":
        if not isinstance(value, str):
            raise NotAsDeclared(f"{column.name!r} is {_kind(value)} instead of text")
        return value
    array = _array(column, value)
    if array.dtype != column.dtype or not _fits(column, array.shape):
        shown = f"{array.dtype.name if array.dtype.isnative else array.dtype.str}{list(array.shape) or ''}"
        raise NotAsDeclared(f"{column.name!r} is {shown.replace(' ', '')} instead of {column.text}")
    return array if array.flags.c_contiguous else array.copy()


def _array(column: Column, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if isinstance(value, (bool, int, float, list, tuple)):
        return _of_python(column, value)
    if callable(getattr(value, "numpy", None)):
        value = call(value.numpy)
    elif not hasattr(value, "__array__") and not hasattr(value, "__array_interface__"):
        raise NotAsDeclared(f"{column.name!r} is {_kind(value)} instead of {column.text}")
    return call(np.asarray, value)


def _of_python(column: Column, value: Any) -> npt.NDArray[Any]:
    """Numbers that have no dtype get the column's, where it has room for them."""
    array: npt.NDArray[Any] = call(np.asarray, value)
    target = np.dtype(column.dtype)
    if target.kind not in _PYTHON_KINDS.get(array.dtype.kind, "") or (isinstance(value, (list, tuple)) and not value):
        return array
    if target.kind in "iu" and array.size and not _in_range(array, target):
        raise NotAsDeclared(f"{column.name!r} is {_brief(value)}, which is no {column.dtype}")
    return array.astype(target)


def _in_range(array: npt.NDArray[Any], target: "np.dtype[Any]") -> bool:
    limits = np.iinfo(target)
    return int(limits.min) <= int(array.min()) and int(array.max()) <= int(limits.max)


def _fits(column: Column, shape: tuple[int, ...]) -> bool:
    return len(shape) == len(column.shape) and all(
        declared in (None, length) for declared, length in zip(column.shape, shape, strict=True)
    )


def _kind(value: object) -> str:
    kind = type(value)
    return "nothing (None)" if value is None else f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004  a part of a line
