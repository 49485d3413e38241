"""All kinds of sources, and sources in messages. Daemon, workers and CLI; standard library only.

Invariant: ``source_from_plain(source_to_plain(source)) == source``.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from batchd.data.samples.kinds import Kinds
from batchd.data.sources.options import SourceOptions

SOURCE_KINDS = Kinds("batchd.data.sources", SourceOptions, "type", first="files")
"""The options class of each kind, by its ``type``."""


def source_to_plain(source: SourceOptions) -> dict[str, object]:
    """The source as strings, numbers, booleans, lists, tables and None, for a message."""
    return {field.name: _to_plain(getattr(source, field.name)) for field in fields(SOURCE_KINDS[source.type])}


def source_from_plain(plain: Mapping[str, object]) -> SourceOptions:
    """Read what ``source_to_plain`` wrote. Raises ``ValueError`` or ``TypeError``."""
    kind = SOURCE_KINDS.get(str(plain.get("type")))
    if kind is None:
        raise ValueError(f"the source {plain.get('type')!r} is not one of {', '.join(SOURCE_KINDS)}")
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    if plain.keys() != names:
        raise ValueError(f"the source {plain['type']!r} has the options {sorted(names)}, not {sorted(plain)}")
    return kind(**{name: _from_plain(hints[name], value) for name, value in plain.items()})


def _to_plain(value: object) -> object:
    if isinstance(value, SourceOptions):
        return source_to_plain(value)
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _to_plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _from_plain(hint: object, value: object) -> Any:
    """``value`` as the type ``hint``. Raises ``TypeError``."""
    origin, choices = get_origin(hint), get_args(hint)
    if hint is SourceOptions and isinstance(value, Mapping):
        return source_from_plain(value)
    if origin is tuple and isinstance(value, list):
        return tuple(_from_plain(choices[0], item) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {_from_plain(choices[0], name): _from_plain(choices[1], item) for name, item in value.items()}
    if origin in (Union, UnionType):
        if type(value) in choices:
            return value
        for choice in choices:
            with suppress(TypeError):
                return _from_plain(choice, value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if hint is Any or type(value) is hint or (origin is Literal and value in choices):
        return value
    raise TypeError(f"{value!r} is not {hint}")
