"""Classes of values: messages, events, actions, options. Every process; standard library only.

Every process defines some two hundred of them at its start, and makes values of a few. A frozen
dataclass takes 0.5 ms to define, because each of its methods is compiled for itself. A record takes
a tenth of that: the methods that do not depend on the fields are shared, and ``__init__`` is
compiled when the first value is made. The daemon makes some values for each chunk, so only the type
checker refuses an assignment to a field of a ``record``; a ``frozen`` one refuses it too, and takes
three times as long to make.
"""

from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import Any, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a class of annotated fields a record: slots, ``field_names``, equality, hash, repr."""
    return _record(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a record that refuses assignments."""
    return _record(cls, is_frozen=True)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def options(cls: type[T]) -> type[T]:
    """Make a record that refuses assignments, and whose fields are given by their names."""
    return _record(cls, is_frozen=True, kw_only=True)


def _record(cls: type[T], *, is_frozen: bool = False, kw_only: bool = False) -> type[T]:
    made: Any = dataclass(slots=True, init=False, eq=False, repr=False, kw_only=kw_only)(cls)
    assert all(one.compare and one.repr for one in fields(made)), "the shared methods use all fields"
    made.field_names = tuple(one.name for one in fields(made))
    made.__eq__, made.__hash__, made.__repr__ = _equals, _hash, _show

    def compile_init(self: Any, *values: Any, **named: Any) -> None:
        parts: dict[str, Any] = {one.name: one for one in fields(made)}
        parts["__annotations__"] = {one.name: one.type for one in fields(made)}
        parts |= {
            name: getattr(made, name) for name in ("__doc__", "__module__", "__post_init__") if hasattr(made, name)
        }
        twin: Any = dataclass(eq=False, repr=False, match_args=False, frozen=is_frozen)(type(made.__name__, (), parts))
        made.__init__ = twin.__init__
        twin.__init__(self, *values, **named)

    made.__init__ = compile_init
    if is_frozen:
        made.__setattr__, made.__delattr__ = _refuse, _refuse
        made.__getstate__, made.__setstate__ = _values, _restore
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


def _refuse(_self: Any, name: str, *_value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _restore(self: Any, values: tuple[Any, ...]) -> None:
    for name, value in zip(self.field_names, values, strict=True):
        object.__setattr__(self, name, value)
