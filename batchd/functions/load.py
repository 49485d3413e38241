"""Imports users' functions. Workers, and the helper that asks for a length; never the daemon.

A module is imported only while its source is the one that the daemon saw at its start: another
source would change the bytes of a position. Modules that it imports in turn are not checked.

``sys.path`` and the modules belong to the process, so the expected digests do, too.

Invariant: a function that is returned is of a file with the expected digest.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import Signature
from pathlib import Path
from types import ModuleType
from typing import Any

from batchd.functions.calls import FunctionFailed, call
from batchd.functions.find import Module, ModuleNotFound, find_module, parse_function
from batchd.functions.signature import Given, call_problem

_expected: dict[str, str] = {}


class Here:
    """What users' functions may learn about this process."""

    worker = 0
    """The number of this worker, as in `batchd status`; 0 in other processes."""


class FunctionUnusable(Exception):  # noqa: N818  names what is wrong
    """A configured function cannot be used here, which is no sample's fault; the text says why."""


def expect(python_path: Sequence[str], digests: Mapping[str, str]) -> None:
    """Search these folders first for modules, and accept only those with these digests."""
    sys.path[:] = [*python_path, *(folder for folder in sys.path if folder not in python_path)]
    _expected.update(digests)


def load(text: str) -> Callable[..., Any]:
    """Import a function. Raises ``FunctionUnusable`` with the reason."""
    name = parse_function(text)
    try:
        module = _import(name.module)
        found: Any = module
        for part in name.path:
            found = call(getattr, found, part)
    except FunctionFailed as error:
        raise FunctionUnusable(f"importing {text} in a worker: {error}") from None
    if not callable(found):
        raise FunctionUnusable(f"{text} is {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


def load_for(text: str, given: Given) -> Callable[..., Any]:
    """Import a function to call it with ``given``.

    Raises ``FunctionUnusable``, also if it cannot be called so.
    """
    function = load(text)
    problem = call_problem(text, signature_of(function), given)
    if problem is not None:
        raise FunctionUnusable(problem)
    return function


def signature_of(function: Callable[..., Any]) -> Signature | None:
    """The signature of a function.

    None if it has none, or only one that its author wrote as text.
    """
    if hasattr(function, "__signature__"):
        return None
    try:
        return call(inspect.signature, function, follow_wrapped=False)
    except FunctionFailed:  # written in C
        return None


def _import(name: str) -> ModuleType:
    try:
        there = find_module(name, list(map(Path, sys.path)))
    except ModuleNotFound as error:
        raise FunctionUnusable(f"importing {name} in a worker: {error}") from None
    _check_digest(name, there)
    module = call(_imported, name)
    file = getattr(module, "__file__", None)
    if file is None or not _is_same(Path(file), there.file):
        raise FunctionUnusable(
            f"importing {name} in a worker gives {file or 'what is built into Python'} instead of {there.file}: "
            "batchd, or a module before it, has one of that name; give yours another name"
        )
    return module


def _imported(name: str) -> ModuleType:
    return import_module(name)


def _check_digest(name: str, there: Module) -> None:
    if _expected.get(name, there.digest) != there.digest:
        raise FunctionUnusable(
            f"{there.file} has changed since the daemon started, so its samples would be others; start the daemon anew"
        )


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one == other
