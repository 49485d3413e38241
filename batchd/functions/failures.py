"""People's own functions, called; and what went wrong in them, in a few lines for people. Workers and helpers.

    ValueError: no digits in 'x'
      at /home/me/augment.py:31 in digits: return int(text)
      from /home/me/augment.py:12 in augment: count = digits(sample["text"])

What matters most stands first, since a reason may be cut: the message, then the innermost place.

Invariant: nothing that a function raises ends the process, but for what is this process's own fault
(no memory, no descriptors).
"""

import errno
import importlib
from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import Any, TypeVar

MESSAGE_CHARACTERS_MAX = 400
LINE_CHARACTERS_MAX = 120
FRAMES_MAX = 6
OUR_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_NOT_THEIRS = ("<frozen importlib", str(Path(importlib.__file__).parent), str(Path(__file__).parent))
"""Frames of what imports and calls their functions."""

Result = TypeVar("Result")


class FunctionFailed(Exception):  # noqa: N818  names what is wrong
    """Somebody's function raised; the text is the reason with the places, innermost first."""


def call(function: Callable[..., Result], /, *arguments: Any, **options: Any) -> Result:
    """Call somebody's function. Raises ``FunctionFailed``, whatever it raises, also where it asks for the process to end."""
    try:
        return function(*arguments, **options)
    except MemoryError:
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in OUR_OWN_FAULTS:
            raise
        raise FunctionFailed(told(error)) from None


def told(error: BaseException) -> str:
    """What was raised, and where; called from where."""
    lines = [_shown(error)]
    if error.__cause__ is not None:
        lines.append(f"  because of {_shown(error.__cause__)}")
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THEIRS)]
    for frame, word in zip(reversed(frames[-FRAMES_MAX:]), ["at", *["from"] * FRAMES_MAX], strict=False):
        lines.append(f"  {word} {_place(frame)}")
    return "\n".join(lines)


def _shown(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception as other:  # noqa: BLE001  somebody's class may do anything
        message = f"(its text cannot be had: {type(other).__name__})"
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = message[: MESSAGE_CHARACTERS_MAX - 3] + "..."
    return _printable(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def _place(frame: FrameSummary) -> str:
    line = f": {frame.line[:LINE_CHARACTERS_MAX]}" if frame.line else ""
    return _printable(f"{frame.filename}:{frame.lineno} in {frame.name}{line}")


def _printable(text: str) -> str:
    """On one line, and without what a terminal would act upon."""
    text = " ".join(text.split())
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
