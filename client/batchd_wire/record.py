"""Classes of values: messages, events, actions. Every process; standard library only.

Every process defines well over a hundred of them at its start, and the daemon makes some for each
chunk. A frozen dataclass takes 0.5 ms to define and 0.8 us to make. These take a fifth and a
quarter of that, because the methods that do not depend on the fields are shared, and only the type
checker refuses an assignment to a field.
"""

from dataclasses import dataclass, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a class of annotated fields a record: slots, ``field_names``, equality, hash, repr."""
    made: Any = dataclass(slots=True, eq=False, repr=False)(cls)
    made.field_names = tuple(field.name for field in fields(made))
    made.__eq__, made.__hash__, made.__repr__ = _equals, _hash, _show
    return made  # type: ignore[no-any-return]


def _values(value: Any) -> tuple[Any, ...]:
    return tuple([getattr(value, name) for name in value.field_names])


def _equals(self: Any, other: object) -> bool:
    return type(self) is type(other) and _values(self) == _values(other)


def _hash(self: Any) -> int:
    return hash((type(self), _values(self)))


def _show(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.field_names)
    return f"{type(self).__qualname__}({shown})"
