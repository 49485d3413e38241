"""Imports and calls users' functions, and checks what they return. Workers and helpers.

The daemon never imports this. A module is imported only while its source is the one that the daemon
saw at its start: another source would change the bytes of a position. Modules that it imports in
turn are not checked. ``sys.path`` and the modules are the process's, and so are the digests.

A failure has its message first and the innermost place next, since a reason may be cut:

    ValueError: no digits in 'x'
      at /home/me/augment.py:31 in digits: return int(text)
      from /home/me/augment.py:12 in augment: count = digits(sample["text"])

A value that is returned is never cast in silence:

    declared          returned
    "image"           bytes, bytearray, memoryview
    "text"            str
    "text[<=8]"       a list of str
    "image[<=8]"      a list of bytes, those of image files
    "bytes"           bytes, bytearray, memoryview
    "json"            dict, list, str, int, float, bool, and None in them
    "uint8[?,?,3]"    a numpy array of this dtype and shape; what numpy() makes one of (torch,
                      TensorFlow); what has an array interface (PIL); Python numbers and lists of
                      them, which have no dtype of their own, where they fit

torch and PIL are not imported for it: their objects can convert themselves to arrays.

Invariants: a function that is returned is of a file with the expected digest. Nothing that it
raises ends the process, except what is this process's own fault (no memory, no descriptors). An
array that it returns has the dtype and the shape of its column, and is C-contiguous.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TypeVar

import numpy as np

from batchd.data.functions.find import CallArguments, ModuleNotFound, call_problem, find_module, parse_function
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import OUR_OWN_FAULTS, SampleUnreadable
from batchd.data.samples.values import Value, nested
from batchd.runtime.suggestions import pip_command
from batchd_wire.views import Array

_expected: dict[str, str] = {}


class Here:
    """Facts about this process for users' functions."""

    worker = 0
    """The number of this worker, as in `batchd status`; 0 in other processes."""


class FunctionUnusable(Exception):  # noqa: N818  names what is wrong
    """A configured function cannot be used here, which is no sample's fault; the text says why."""


def expect(python_path: Sequence[str], digests: Mapping[str, str]) -> None:
    """Search these folders first for modules, and accept only those with these digests."""
    sys.path[:] = [*python_path, *(folder for folder in sys.path if folder not in python_path)]
    _expected.update(digests)


def load(text: str) -> Callable[..., object]:
    """Import a function. Raises ``FunctionUnusable`` with the reason."""
    name = parse_function(text)
    try:
        module = _import(name.module)
        found: object = module
        for part in name.path:
            found = call(getattr, found, part)
    except FunctionFailed as error:
        raise FunctionUnusable(f"importing {text} in a worker: {error}") from None
    if not callable(found):
        raise FunctionUnusable(f"{text} is {type(found).__name__}, which cannot be called")
    return found


def load_for(text: str, arguments: CallArguments) -> Callable[..., object]:
    """Import a function to call it with ``arguments``. Raises ``FunctionUnusable``."""
    function = load(text)
    if hasattr(function, "__signature__"):  # its author wrote it
        return function
    try:
        signature = call(inspect.signature, function, follow_wrapped=False)
    except FunctionFailed:  # written in C
        return function
    problem = call_problem(text, signature, arguments)
    if problem is not None:
        raise FunctionUnusable(problem)
    return function


def _import(name: str) -> ModuleType:
    try:
        there = find_module(name, list(map(Path, sys.path)))
    except ModuleNotFound as error:
        raise FunctionUnusable(f"importing {name} in a worker: {error}") from None
    if _expected.get(name, there.digest) != there.digest:
        raise FunctionUnusable(
            f"{there.file} has changed since the daemon started, so its samples would be others; restart the daemon"
        )
    module = call(importlib.import_module, name)
    file = getattr(module, "__file__", None)
    if file is None or not _is_same(Path(file), there.file):
        raise FunctionUnusable(
            f"importing {name} in a worker gives {file or 'what is built into Python'} instead of {there.file}: "
            "batchd, or a module before it, has one of that name; give yours another name"
        )
    return module


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one == other


MESSAGE_CHARACTERS_MAX = 400
LINE_CHARACTERS_MAX = 120
FRAMES_MAX = 6
_NOT_THEIRS = ("<frozen importlib", str(Path(importlib.__file__).parent), str(Path(__file__).parent))
"""Frames of the code that imports and calls users' functions."""

Result = TypeVar("Result")


class FunctionFailed(Exception):  # noqa: N818  names what is wrong
    """A user's function raised; the text is the reason with the places, innermost first."""


def call(function: Callable[..., Result], /, *arguments: object, **options: object) -> Result:
    """Call a user's function. Raises ``FunctionFailed`` for all that it raises, exits included."""
    try:
        return function(*arguments, **options)
    except MemoryError:
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in OUR_OWN_FAULTS:
            raise
        raise FunctionFailed(failure_text(error)) from None


def failure_text(error: BaseException) -> str:
    """The exception, and where it was raised; the callers are last."""
    lines = [_shown(error)]
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        lines.append(f"  to install it where batchd runs: {pip_command(_printable(error.name))}")
    if error.__cause__ is not None:
        lines.append(f"  because of {_shown(error.__cause__)}")
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THEIRS)]
    for frame, word in zip(reversed(frames[-FRAMES_MAX:]), ["at", *["from"] * FRAMES_MAX], strict=False):
        line = f": {frame.line[:LINE_CHARACTERS_MAX]}" if frame.line else ""
        place = _printable(f"{frame.filename}:{frame.lineno} in {frame.name}{line}")
        lines.append(f"  {word} {place}")
    return "\n".join(lines)


def _shown(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception as other:  # noqa: BLE001  a user's class may raise anything
        message = f"(its message cannot be read: {type(other).__name__})"
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = message[: MESSAGE_CHARACTERS_MAX - 3] + "..."
    return _printable(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def _printable(text: str) -> str:
    """The text on one line, without characters that a terminal would act upon."""
    text = " ".join(text.split())
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


_PYTHON_KINDS = {"b": "b", "i": "iuf", "u": "iuf", "f": "f"}
"""The kinds of dtype that accept Python's numbers, by the kind that numpy gives these."""


class NotAsDeclared(ValueError):  # noqa: N818  names what is wrong
    """A value does not fit its column; the text says what it is.

    ``column`` and ``found``, the type of the value such as "float32[64,64,3]": of arrays alone.
    """

    def __init__(self, text: str, column: Column | None = None, found: str = "") -> None:
        super().__init__(text)
        self.column, self.found = column, found


_FILES = {"encoded": "the bytes of an image", "video": "the bytes of a video", "audio": "the bytes of a sound file"}


def checked_value(column: Column, value: object) -> Value:
    """The value as its column's kind. Raises ``NotAsDeclared`` or ``FunctionFailed``."""
    if column.is_file or column.kind == "bytes":
        if not isinstance(value, (bytes, bytearray, memoryview)):
            wanted = _FILES.get(column.kind, "bytes")
            raise NotAsDeclared(f"{column.name!r} is {_kind(value)} instead of {wanted}")
        return memoryview(value)
    if column.kind in ("json", "texts", "images"):
        if value is None:
            raise NotAsDeclared(f"{column.name!r} is {_kind(value)} instead of {column.text}")
        try:
            return nested(column, value)
        except SampleUnreadable as error:
            raise NotAsDeclared(str(error)) from None
    if column.kind == "text":
        if not isinstance(value, str):
            raise NotAsDeclared(f"{column.name!r} is {_kind(value)} instead of text")
        return value
    array = _array(column, value)
    if array.dtype != column.dtype or not column.takes(array.shape):
        shown = f"{array.dtype.name if array.dtype.isnative else array.dtype.str}{list(array.shape) or ''}"
        found = shown.replace(" ", "")
        raise NotAsDeclared(f"{column.name!r} is {found} instead of {column.text}", column, found)
    return array if array.flags.c_contiguous else array.copy()


def _array(column: Column, value: object) -> Array:
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if isinstance(value, (bool, int, float, list, tuple)):
        return _of_python(column, value)
    to_numpy = getattr(value, "numpy", None)
    if callable(to_numpy):
        value = call(to_numpy)
    elif not hasattr(value, "__array__") and not hasattr(value, "__array_interface__"):
        raise NotAsDeclared(f"{column.name!r} is {_kind(value)} instead of {column.text}")
    return call(np.asarray, value)


def _of_python(column: Column, value: object) -> Array:
    """Numbers that have no dtype get the column's, where it has room for them."""
    array: Array = call(np.asarray, value)
    target = np.dtype(column.dtype)
    if target.kind not in _PYTHON_KINDS.get(array.dtype.kind, "") or (isinstance(value, (list, tuple)) and not value):
        return array
    if target.kind in "iu" and array.size:
        limits = np.iinfo(target)
        if not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
            text = repr(value)
            shown = text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004  a part of a line
            raise NotAsDeclared(f"{column.name!r} is {shown}, which is not {column.dtype}")
    return array.astype(target)


def _kind(value: object) -> str:
    kind = type(value)
    return "nothing (None)" if value is None else f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
