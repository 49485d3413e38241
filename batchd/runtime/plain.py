"""Records as JSON and msgpack carry them, and the way back. Several processes; standard library.

A dataclass is a map of its fields, a tuple of any kind a list, a path a text. The annotations of
the fields are the way back.

Invariant: ``from_plain(type(value), to_plain(value)) == value``, also if JSON lies between them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Readers = Mapping[object, Callable[[Mapping[str, object]], object]]
_UNIONS, _ANYTHING = (Union, UnionType), (Any, object)
_NONE: Readers = MappingProxyType({})


def to_plain(value: object) -> object:
    """Write a value as texts, numbers, booleans, lists, maps and None."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def from_plain(hint: object, value: object, readers: Readers = _NONE) -> Any:
    """``value`` as the type ``hint``, maps for a type in ``readers`` by these.

    Raises ``TypeError`` or ``ValueError``.
    """
    if isinstance(value, Mapping):
        return _from_map(hint, value, readers)
    if isinstance(value, list) and hint is not object:
        return _from_list(hint, value, readers)
    origin, choices = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return value if type(value) in choices else _first_fit(choices, value, readers)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if hint in _ANYTHING or type(value) is hint or (origin is Literal and value in choices):
        return value
    raise TypeError(f"{value!r} is not {hint}")


def _from_map(hint: object, value: Mapping[str, object], readers: Readers) -> object:
    if hint in readers:
        return readers[hint](value)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: from_plain(hints.get(name), item, readers) for name, item in value.items()})
    if get_origin(hint) is dict:
        key, item = get_args(hint)
        return {from_plain(key, name): from_plain(item, one, readers) for name, one in value.items()}
    if get_origin(hint) in _UNIONS:
        return _first_fit(get_args(hint), value, readers)
    if hint in _ANYTHING:
        return value
    raise TypeError(f"{value!r} is not {hint}")


def _from_list(hint: object, value: Sequence[object], readers: Readers) -> object:
    origin, choices = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return _first_fit(choices, value, readers)
    if isinstance(hint, type) and issubclass(hint, tuple) and origin is None:  # a named one
        hints = get_type_hints(hint).values()
        return hint(*[from_plain(part, item, readers) for part, item in zip(hints, value, strict=True)])
    if origin is list or choices[1:] == (...,):
        made = [from_plain(choices[0], item, readers) for item in value]
        return made if origin is list else tuple(made)
    if origin is tuple:
        return tuple([from_plain(part, item, readers) for part, item in zip(choices, value, strict=True)])
    if hint in _ANYTHING:
        return value
    raise TypeError(f"{value!r} is not {hint}")


def _first_fit(choices: Sequence[object], value: object, readers: Readers) -> object:
    for choice in choices:
        with suppress(TypeError):
            return from_plain(choice, value, readers)
    raise TypeError(f"{value!r} is none of {choices}")
