"""Encode and decode messages; the one place where received bytes are checked. Every process.

Needs the standard library and msgpack. A message is a record with a number. On the wire it is one
msgpack array: the number, then the fields in order:

    [code, field 1, field 2, ...]

A message grows at its end, by fields with a default, because the other side may be older. A missing
field has its default, and elements after the last known field are skipped. Sides of versions before
``OPEN_ENDED_SINCE`` get only the fields without a default.

Only msgpack's own types are read (no extensions, no timestamps, no objects); every container and
string has a limit. A vocabulary is the set of messages that one side may receive: anything else is
``MalformedMessage``.
"""

from collections.abc import Callable
from dataclasses import MISSING, fields
from operator import attrgetter, call
from reprlib import repr as brief_repr
from typing import Any, ClassVar, NoReturn, Self, dataclass_transform, get_args, get_origin, get_type_hints

import msgpack

from batchd_wire import OPEN_ENDED_SINCE, PROTOCOL_VERSION
from batchd_wire.record import record

MESSAGE_BYTES_MAX = 1 << 20
"""Longest message. Only the daemon's answers to commands are nearly as long."""
TEXT_CHARACTERS_MAX = 16 * 1024
ITEMS_MAX = 4096
DEFINITION_BYTES_MAX = 60 << 10
"""Of the table of a stream that a trainer defines, as JSON: the daemon reads messages of 64 KiB."""
NUMBER_MAX = (1 << 63) - 1


def _refuse_extension(number: int, _data: bytes) -> NoReturn:
    """Refuse every extension: an empty one passes ``max_ext_len``."""
    raise ValueError(f"extension {number}")


_unpack_options: dict[str, Any] = {
    "raw": False,
    "strict_map_key": True,
    "use_list": True,
    "max_str_len": TEXT_CHARACTERS_MAX,
    "max_bin_len": MESSAGE_BYTES_MAX,
    "max_array_len": ITEMS_MAX,
    "max_map_len": ITEMS_MAX,
    "max_ext_len": 0,
    "ext_hook": _refuse_extension,
}

_pack = msgpack.Packer(autoreset=True, use_bin_type=True).pack


def packed_bytes(value: object) -> int:
    """Return how many bytes of a message a value takes."""
    return len(_pack(value))


class MalformedMessage(ValueError):  # noqa: N818  named by what is wrong, as all errors here
    """Bytes that are not a message of the expected vocabulary."""


class Message:
    """Base of every message: a record with a ``code`` that is unique in its vocabulary."""

    __slots__ = ()
    code: ClassVar[int]
    field_names: ClassVar[tuple[str, ...]]
    checks: ClassVar[tuple[Callable[[object], bool], ...] | None] = None
    """Of each field; made when the first message of its kind arrives."""
    values_of: ClassVar[Callable[[object], tuple[Any, ...]]]
    """Returns the attributes of an object that are named as the fields."""
    required: ClassVar[int]
    """Number of fields without a default; they come first."""

    @classmethod
    def filled_from(cls, source: object, **others: object) -> Self:
        """Make a message of the attributes of ``source`` named as its fields, and of ``others``."""
        if not others:
            return cls(*cls.values_of(source))
        values = {name: getattr(source, name) for name in cls.field_names if name not in others}
        return cls(**values, **others)

    def encode(self, version: int = PROTOCOL_VERSION) -> bytes:
        """Encode the message as one msgpack array, for a side that speaks ``version``."""
        values = type(self).values_of(self)
        packed: bytes = _pack((self.code, *(values if version >= OPEN_ENDED_SINCE else values[: self.required])))
        return packed


@dataclass_transform(frozen_default=True)
def message(code: int) -> Callable[[type], type[Any]]:
    """Make a class of annotated fields a message with this number."""

    def decorate(cls: type) -> type[Any]:
        made: Any = record(cls)
        made.code = code
        made.values_of = staticmethod(_values_of(made.field_names))
        made.required = sum(one.default is MISSING and one.default_factory is MISSING for one in fields(made))
        return made  # type: ignore[no-any-return]

    return decorate


def _values_of(names: tuple[str, ...]) -> Callable[[object], tuple[object, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


class Vocabulary:
    """The messages one side may receive, by number."""

    def __init__(self, *kinds: type[Message]) -> None:
        self.kinds = {kind.code: kind for kind in kinds}
        """By number."""
        assert len(self.kinds) == len(kinds), "two messages of one vocabulary share a number"

    def decode(self, data: bytes | memoryview) -> Message:
        """Decode one message. Raises ``MalformedMessage`` with the reason."""
        if len(data) > MESSAGE_BYTES_MAX:
            raise MalformedMessage(f"{len(data)} bytes, more than the {MESSAGE_BYTES_MAX} of the longest message")
        try:
            parts = msgpack.unpackb(data, **_unpack_options)
        except (ValueError, TypeError, RecursionError) as error:
            raise MalformedMessage(f"not msgpack: {type(error).__name__} {error}") from None
        if type(parts) is not list or not parts or type(parts[0]) is not int:
            raise MalformedMessage("a message is an array that starts with its number")
        kind = self.kinds.get(parts[0])
        if kind is None:
            raise MalformedMessage(f"message number {parts[0]} is not expected here")
        values = parts[1 : len(kind.field_names) + 1]
        if len(values) < kind.required:
            raise MalformedMessage(f"{kind.__name__} has {kind.required} fields, not {len(values)}")
        checks = kind.checks
        if checks is None:
            hints = get_type_hints(kind)
            checks = kind.checks = tuple(_check_for(hints[name]) for name in kind.field_names)
        for name, check, value in zip(kind.field_names, checks, values, strict=False):
            if not check(value):
                raise MalformedMessage(f"{kind.__name__}.{name} cannot be {_shorten(value)}")
        return kind(*values)


def tuple_parts(hint: object) -> tuple[object, ...] | None:
    """Item types of a tuple type, named or not; None for others. Tuples are received as lists."""
    if get_origin(hint) is tuple:
        return get_args(hint)
    is_named = isinstance(hint, type) and issubclass(hint, tuple)
    return tuple(get_type_hints(hint).values()) if is_named else None


def _check_for(hint: object) -> Callable[[object], bool]:
    """Choose the check of a field by its annotation; an int must not be negative."""
    if hint is int:
        return lambda value: type(value) is int and 0 <= value <= NUMBER_MAX
    if hint in (str, bytes, bool, float):
        return lambda value: type(value) is hint
    if hint is object:
        return lambda _value: True
    if hint == list[int]:  # few calls: each handle of a batch is one
        return lambda value: type(value) is list and all([type(one) is int and 0 <= one <= NUMBER_MAX for one in value])  # noqa: C419  faster
    if get_origin(hint) is list:
        check_item = _check_for(get_args(hint)[0])
        return lambda value: type(value) is list and all(map(check_item, value))
    if get_origin(hint) is dict:
        return lambda value: type(value) is dict and all(type(key) is str for key in value)
    parts = tuple_parts(hint)
    if parts is not None:
        checks = tuple(map(_check_for, parts))
        return lambda value: type(value) is list and len(value) == len(checks) and all(map(call, checks, value))
    alternatives = [part for part in get_args(hint) if part is not type(None)]
    assert len(alternatives) == 1, f"no check for {hint}"
    check = _check_for(alternatives[0])
    return lambda value: value is None or check(value)


def _shorten(value: object) -> str:
    """Show a value briefly. Not ``repr``: a deeply nested value would raise RecursionError."""
    text = brief_repr(value)
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004  a line of an error message
