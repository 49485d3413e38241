"""Kinds of tables, identified by a key: sources by ``type``, steps by ``op``. Daemon, workers, CLI.

A kind is a dataclass in the module ``options`` of a folder of a package. ``Kinds`` finds all of
them, so no list names them.

``OneOf`` validates a table of any kind, in the daemon and the CLI: workers have no pydantic. For
validators of all kinds pydantic takes a tenth of a second, and two milliseconds for those of one,
so each is made when the first table of its kind is read. The meanings of keys, the strings under
them, take another tenth: ``IS_WHOLE`` is set before the tree is imported where the JSON Schema
needs all.

Invariant: a problem of a table has the type that pydantic's own tagged union would give it, and the
key in the table.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from batchd_wire.record import frozen

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


class Options(Protocol):
    """A dataclass, as every kind is."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=Options)

IS_WHOLE = False


class Kinds(Mapping[str, type[T]]):
    """The dataclasses below ``package`` that derive from ``base``, by their default of ``key``.

    In the order of the folders' names, the ``first`` one first, and of their definition. Folders
    are imported in this order until a kind is found: a process with the usual kinds does not load
    the others.
    """

    def __init__(self, package: str, base: type[T], key: str, first: str) -> None:
        (path,) = import_module(package).__path__
        folders = (file.parent.name for file in Path(path).glob("*/options.py"))
        self.base = base
        self._key = key
        self._known: dict[str, type[T]] = {}
        self._unread = [
            f"{package}.{folder}.options" for folder in sorted(folders, key=lambda name: (name != first, name))
        ]

    def __getitem__(self, name: str) -> type[T]:
        while name not in self._known and self._unread:
            self._read_next()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, type[T]]:
        while self._unread:
            self._read_next()
        return self._known

    def _read_next(self) -> None:
        module = import_module(self._unread[0])
        for kind in vars(module).values():
            if not isinstance(kind, type) or kind.__module__ != module.__name__ or not is_dataclass(kind):
                continue
            if issubclass(kind, self.base):
                name = {field.name: field.default for field in fields(kind)}[self._key]
                if isinstance(name, str):  # else it is a base of several kinds
                    self._known[name] = kind
        del self._unread[0]


@frozen
class OneOf:
    """Declares that a field is one of ``kinds``, which are dataclasses, by the value of ``key``."""

    kinds: Kinds[Any]
    key: str

    def __get_pydantic_core_schema__(self, _source: object, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Tell pydantic how such a field is validated."""
        from pydantic_core import core_schema  # noqa: PLC0415  workers have no pydantic

        if not IS_WHOLE:
            return core_schema.no_info_plain_validator_function(self._validated)
        choices = {name: handler.generate_schema(kind) for name, kind in self.kinds.items()}
        return core_schema.tagged_union_schema(choices, self.key)

    def _validated(self, value: object) -> object:
        """The table as an instance of its kind. Raises the errors that pydantic expects."""
        from pydantic_core import PydanticKnownError  # noqa: PLC0415  workers have no pydantic

        if isinstance(value, self.kinds.base):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("model_attributes_type")
        discriminator = repr(self.key)
        if self.key not in value:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": discriminator})
        tag = value[self.key]
        kind: type | None = self.kinds.get(tag) if isinstance(tag, str) else None
        if kind is None:
            expected = ", ".join(map(repr, self.kinds))
            raise PydanticKnownError(
                "union_tag_invalid", {"discriminator": discriminator, "tag": str(tag), "expected_tags": expected}
            )
        return _reader(kind)(json.dumps(value), strict=True)


def prepare_readers(kinds: Mapping[str, type]) -> None:
    """Make the validators of all kinds, for a process whose forks validate tables."""
    for kind in kinds.values():
        _reader(kind)


@cache
def _reader(kind: type) -> Callable[..., object]:
    """Parses a table of one kind from JSON: strict mode takes no other table for a dataclass."""
    from pydantic import TypeAdapter  # noqa: PLC0415  workers have no pydantic

    return TypeAdapter[object](kind).validate_json
