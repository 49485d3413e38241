"""Classes of values: messages, events, actions, options. Every process; standard library only.

Every process defines some two hundred of them at its start, and makes values of a few. A frozen
dataclass takes 0.45 ms to define, because each of its methods is compiled for itself. These take an
eighth of that: methods are shared, but for ``__init__`` of a ``record``, which is compiled when the
first value is made. The daemon makes some values for each chunk, so a record is as fast to make as
a plain class, and only the type checker refuses an assignment to its fields. A ``frozen`` value
refuses it, too, and takes 5 us to make: for what is made once for a stream, not for each batch.
"""

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


class _Value:
    """What the shared methods read of the classes that have them."""

    field_names: ClassVar[tuple[str, ...]]
    init_by_position: ClassVar[int]
    init_defaults: ClassVar[dict[str, object]]
    init_factories: ClassVar[dict[str, Callable[[], object]]]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a class of annotated fields a record: slots, ``field_names``, equality, hash, repr."""
    return _record(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a record that refuses assignments."""
    return _frozen(cls)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def options(cls: type[T]) -> type[T]:
    """Make a record that refuses assignments, and whose fields are given by their names."""
    return _frozen(cls, kw_only=True)


def _record(cls: type[T], *, kw_only: bool = False) -> type[T]:
    made: Any = dataclass(slots=True, init=False, eq=False, repr=False, kw_only=kw_only)(cls)
    assert all(one.init and one.compare and one.repr for one in fields(made)), "the shared methods use all fields"
    made.field_names = tuple(one.name for one in fields(made))
    made.__eq__, made.__hash__, made.__repr__ = _equals, _hash, _show

    def compile_init(self: object, *values: object, **named: object) -> None:
        parts: dict[str, object] = {one.name: one for one in fields(made)}
        parts["__annotations__"] = {one.name: one.type for one in fields(made)}
        parts |= {name: getattr(made, name) for name in ("__doc__", "__module__")}
        twin: Any = dataclass(eq=False, repr=False, match_args=False)(type(made.__name__, (), parts))
        made.__init__ = twin.__init__
        twin.__init__(self, *values, **named)

    made.__init__ = compile_init
    return made  # type: ignore[no-any-return]


def _frozen(cls: type[T], *, kw_only: bool = False) -> type[T]:
    made: Any = _record(cls, kw_only=kw_only)
    made.init_by_position = 0 if kw_only else len(made.field_names)
    made.init_defaults = {one.name: one.default for one in fields(made) if one.default is not MISSING}
    made.init_factories = {one.name: one.default_factory for one in fields(made) if one.default_factory is not MISSING}
    made.__init__, made.__setattr__, made.__delattr__ = _fill, _refuse, _refuse
    made.__getstate__, made.__setstate__ = _values, _restore
    return made  # type: ignore[no-any-return]


def _fill(self: _Value, *values: object, **named: object) -> None:
    kind = type(self)
    given = dict(zip(kind.field_names, values[: kind.init_by_position], strict=False))
    if len(values) > len(given) or given.keys() & named.keys():
        raise TypeError(f"{kind.__name__} takes {kind.init_by_position} values by position, and each once")
    given = {**kind.init_defaults, **given, **named}
    for name, make in kind.init_factories.items():
        if name not in given:
            given[name] = make()
    if len(given) != len(kind.field_names) or not given.keys() <= set(kind.field_names):
        wrong = ", ".join(sorted(given.keys() ^ set(kind.field_names)))
        raise TypeError(f"{kind.__name__} has no such field, or no value for it: {wrong}")
    for name, value in given.items():
        object.__setattr__(self, name, value)
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _values(value: _Value) -> tuple[object, ...]:
    return tuple([getattr(value, name) for name in value.field_names])


def _equals(self: _Value, other: object) -> bool:
    return type(self) is type(other) and _values(self) == _values(other)


def _hash(self: _Value) -> int:
    return hash((type(self), _values(self)))


def _show(self: _Value) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.field_names)
    return f"{type(self).__qualname__}({shown})"


def _refuse(_self: object, name: str, *_value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _restore(self: _Value, values: tuple[object, ...]) -> None:
    for name, value in zip(self.field_names, values, strict=True):
        object.__setattr__(self, name, value)
