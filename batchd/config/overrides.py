"""Sets values of a configuration by their paths. Daemon and CLI.

``pipeline[1].size`` and ``pipeline.1.size`` are the same path.
"""

import re
import tomllib
from collections.abc import Callable
from typing import Any

from batchd.errors import KeyPath, path_text
from batchd_wire.wording import counted

_BRACKETS = re.compile(r"""("[^"]*"|'[^']*')|\[([0-9]+)\]""")


def dotted_path(dotted: str) -> KeyPath | None:
    """Split a path like TOML, with quotes; ``[1]`` is the same as ``.1``. None if it is no path."""
    try:
        data: object = tomllib.loads(_BRACKETS.sub(lambda match: match[1] or f".{match[2]}", dotted) + " = 0")
    except ValueError:
        return None
    path: KeyPath = ()
    while isinstance(data, dict) and len(data) == 1:
        name, data = next(iter(data.items()))
        path += (name,)
    return path if data == 0 and "\n" not in dotted else None


def apply(data: object, path: KeyPath, value_at: Callable[[KeyPath], object]) -> tuple[KeyPath, object]:
    """Set the value at ``path``, and create missing tables around it. Raises ``LookupError``.

    ``value_at`` gets the path with the indices of lists as numbers. Returns that and the value.
    """
    here: Any = data
    found: KeyPath = ()
    for name in path[:-1]:
        key = _key_in(here, name, found)
        found += (key,)
        if isinstance(here, dict):
            here.setdefault(key, {})
        here = here[key]
    key = _key_in(here, path[-1], found)
    found += (key,)
    here[key] = value_at(found)
    return found, here[key]


def _key_in(here: object, name: str | int, path: KeyPath) -> str | int:
    """``name`` as a key of the table, or index of the list, at ``path``. Raises ``LookupError``."""
    if isinstance(here, dict):
        return name
    if isinstance(here, list):
        if re.fullmatch(r"[0-9]{1,9}", str(name)) and int(name) < len(here):
            return int(name)
        numbers = {0: "", 1: ", number 0"}.get(len(here), f", numbers 0 to {len(here) - 1}")
        raise LookupError(f"{path_text(path)} has {counted(len(here), 'item')}{numbers}, and there is no {name}")
    raise LookupError(f"{path_text(path)} is neither a table nor a list")
