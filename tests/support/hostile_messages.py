"""Nearly valid messages for fuzzing, of all registered types, so new ones are covered.

hostile_messages    strategies: a message with some fields replaced by invalid or harmful values
corpus, mutated     encoded messages, and their bytes flipped, cut, repeated and spliced

A field may be ``Known``: the sender puts in what its session really has under that name, so that
the message gets past the first checks.
"""

from dataclasses import dataclass
from random import Random
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
from hypothesis import strategies as st

from batchd_wire.codec import ITEMS_MAX, NUMBER_MAX, TEXT_CHARACTERS_MAX, Message, Vocabulary

FLIPS_MAX = 4
REPEATS_MAX = 50


@dataclass(frozen=True, slots=True)
class Known:
    """The session's value of this name; a plain value if the session has none."""

    name: str
    otherwise: Any


LIMITS = (0, 1, 2, 3, 63, 64, 65, (1 << 31) - 1, 1 << 32, NUMBER_MAX - 1, NUMBER_MAX, NUMBER_MAX + 1, (1 << 64) - 1)
numbers = st.sampled_from([*LIMITS, -1, -2, -(1 << 31), -(1 << 63)]) | st.integers(-(1 << 63), (1 << 64) - 1)
texts = st.sampled_from(
    ["", "photos", "photos\0", "../photos", "x" * TEXT_CHARACTERS_MAX, "\x1b[2J{}%s", "\udcff", "٣", "\U0010ffff" * 99]
) | st.text(max_size=20)
scalars = (
    st.none() | st.booleans() | numbers | st.floats() | texts | st.binary(max_size=40)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=9))
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts | numbers, inner, max_size=3),
    max_leaves=9,
) | st.sampled_from([[[]] * ITEMS_MAX, [0] * (ITEMS_MAX + 1), [[0, 0]] * ITEMS_MAX])


def kinds_of(*vocabularies: Vocabulary) -> list[type[Message]]:
    """All messages of some vocabularies."""
    return [kind for vocabulary in vocabularies for kind in vocabulary.kinds.values()]


def hostile_messages(*vocabularies: Vocabulary) -> st.SearchStrategy[list[Any]]:
    """One message as an array: fields of the right type at their limits, or arbitrary values."""
    return st.one_of([_hostile(kind) for kind in kinds_of(*vocabularies)])


def _hostile(kind: type[Message]) -> st.SearchStrategy[list[Any]]:
    hints = get_type_hints(kind)
    fitting = [st.just(Known(name, example(hints[name]))) | _fitting(hints[name]) for name in kind.field_names]
    odd = [st.one_of(known, known, anything) for known in fitting]
    code = st.just([kind.code])
    fields = st.tuples(*fitting) | st.tuples(*fitting) | st.tuples(*odd) | st.lists(anything, max_size=14)
    return st.builds(lambda start, rest: [*start, *rest], code, fields)


def _fitting(hint: Any) -> st.SearchStrategy[Any]:
    """Values that the codec accepts, large and small."""
    if get_origin(hint) is list:
        return st.lists(_fitting(get_args(hint)[0]), max_size=6)
    if parts := parts_of(hint):
        return st.tuples(*map(_fitting, parts)).map(list)
    if get_origin(hint) is dict:
        return st.dictionaries(texts, scalars, max_size=3)
    plain = {
        int: numbers.filter(lambda number: 0 <= number <= NUMBER_MAX),
        str: texts,
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
        float: st.floats(),
        object: anything,
    }
    return plain[hint] if hint in plain else st.none() | _fitting(without_none(hint))


def example(hint: Any) -> Any:
    """A value that a field with this annotation may have."""
    if get_origin(hint) is list:
        return [example(get_args(hint)[0])]
    if parts := parts_of(hint):
        return [example(part) for part in parts]
    if get_origin(hint) is dict:
        return {"key": 1}
    plain = {int: 1, str: "photos", bytes: b"0" * 16, bool: False, float: 1.0, object: [1, "two"]}
    return plain[hint] if hint in plain else example(without_none(hint))


def parts_of(hint: Any) -> tuple[Any, ...]:
    """The types of a tuple's parts; none for any other type."""
    if isinstance(hint, type) and issubclass(hint, tuple):
        return tuple(get_type_hints(hint).values())
    return get_args(hint) if get_origin(hint) is tuple else ()


def without_none(hint: Any) -> Any:
    """The type of a field that may be None, without None."""
    (alternative,) = set(get_args(hint)) - {NoneType}
    return alternative


def encode(parts: list[Any], known: dict[str, Any]) -> bytes:
    """The bytes of a message, with the session's values.

    Values that msgpack cannot carry are sent as their ``repr``.
    """
    plain = [known.get(part.name, part.otherwise) if isinstance(part, Known) else part for part in parts]
    packed: bytes = msgpack.packb(plain, default=repr, unicode_errors="surrogatepass")
    return packed


# --- bytes ----------------------------------------------------------------------------------------


def good_message(kind: type[Message], known: dict[str, Any]) -> bytes:
    """A valid message of a session with these values."""
    hints = get_type_hints(kind)
    return encode([kind.code, *[Known(name, example(hints[name])) for name in kind.field_names]], known)


def corpus(*vocabularies: Vocabulary, known: dict[str, Any]) -> list[bytes]:
    """One good message of each kind."""
    return [good_message(kind, known) for kind in kinds_of(*vocabularies)]


def mutated(corpus: list[bytes], chance: Random) -> bytes:
    """One of the messages, changed once or several times."""
    data = bytearray(chance.choice(corpus))
    for _ in range(chance.randrange(1, FLIPS_MAX)):
        chance.choice([_flip, _flip, _set, _cut, _repeat, _splice])(data, corpus, chance)
    return bytes(data)


def _flip(data: bytearray, _corpus: list[bytes], chance: Random) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(data: bytearray, _corpus: list[bytes], chance: Random) -> None:
    """One of msgpack's own marks: nil, containers and numbers of every length, extensions."""
    if data:
        data[chance.randrange(len(data))] = chance.choice([0x00, 0x7F, 0x80, 0x90, 0xFF, *range(0xC0, 0xE0)])


def _cut(data: bytearray, _corpus: list[bytes], chance: Random) -> None:
    start = chance.randrange(len(data) + 1)
    del data[start : chance.randrange(start, len(data) + 1)]


def _repeat(data: bytearray, _corpus: list[bytes], chance: Random) -> None:
    start = chance.randrange(len(data) + 1)
    stop = chance.randrange(start, len(data) + 1)
    data[stop:stop] = data[start:stop] * chance.randrange(1, REPEATS_MAX)


def _splice(data: bytearray, corpus: list[bytes], chance: Random) -> None:
    other = chance.choice(corpus)
    data[chance.randrange(len(data) + 1) :] = other[chance.randrange(len(other)) :]
