"""Every message of every vocabulary survives encoding, and everything else is refused."""

import inspect
import tracemalloc
from collections import Counter
from dataclasses import field
from functools import cache
from itertools import chain, product
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.core.work import NO_WORK
from batchd.daemon.reload import messages as rescan
from batchd.pool import messages as pool
from batchd.worker import messages as worker
from batchd.worker.messages import ChunksFilled, FillChunks, Quarantine
from batchd_wire import OPEN_ENDED_SINCE, messages
from batchd_wire.codec import (
    ITEMS_MAX,
    MESSAGE_BYTES_MAX,
    NUMBER_MAX,
    TEXT_CHARACTERS_MAX,
    MalformedMessage,
    Message,
    Vocabulary,
    message,
    tuple_parts,
)
from batchd_wire.codes import ErrorCode
from batchd_wire.messages import TO_DAEMON, TO_TRAINER, Hello, Open, Pull, Refused, Status, Subscribed

MODULES = (messages, worker, rescan, pool)
VOCABULARIES = {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, Vocabulary)
}
KINDS = list(
    dict.fromkeys(  # some messages to gateways are those to workers
        kind
        for module in MODULES
        for _name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Message) and kind is not Message
    )
)
EVERYTHING = Vocabulary(*KINDS)
every_vocabulary = pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)

texts = st.text(max_size=20)
numbers = st.integers(0, NUMBER_MAX)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | texts | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
"""Values that msgpack carries and that an ``object`` may be."""
extensions = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)) | st.builds(
    msgpack.Timestamp, st.integers(0, (1 << 34) - 1)
)
msgpack_values = st.recursive(
    plain_values | extensions,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(texts | st.binary(max_size=4) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=8,
)
"""All values that msgpack carries."""


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field with this annotation may have, as they arrive: tuples as lists."""
    if get_origin(hint) is list:
        return st.lists(values_of(get_args(hint)[0]), max_size=4)
    parts = tuple_parts(hint)
    if parts is not None:
        return st.tuples(*map(values_of, parts)).map(list)
    if get_origin(hint) is dict:
        return st.dictionaries(texts, plain_values, max_size=4)
    plain = {
        int: numbers,
        float: st.floats(),
        str: texts,
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
        object: plain_values,
    }
    return plain[hint] if hint in plain else st.none() | values_of(_without_none(hint))


def _without_none(hint: Any) -> Any:
    (alternative,) = set(get_args(hint)) - {NoneType}
    return alternative


def messages_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: values_of(hints[name]) for name in kind.field_names})


@cache
def any_message_of(vocabulary: Vocabulary) -> st.SearchStrategy[Message]:
    return st.one_of(*map(messages_of, vocabulary.kinds.values()))


def whole_message(kind: type[Message]) -> Message:
    """One message of this kind in which every list and dictionary has something in it."""
    hints = get_type_hints(kind)
    return kind(*[_whole_value(hints[name]) for name in kind.field_names])


def _whole_value(hint: Any) -> Any:
    if get_origin(hint) is list:
        return [_whole_value(get_args(hint)[0])]
    parts = tuple_parts(hint)
    if parts is not None:
        return [_whole_value(part) for part in parts]
    if get_origin(hint) is dict:
        return {"key": 1}
    plain = {int: 7, float: 0.5, str: "text", bytes: b"bytes", bool: True, object: [1, "two"]}
    return plain[hint] if hint in plain else _whole_value(_without_none(hint))


NUMBERS = [0, -1, 1 << 63, (1 << 64) - 1, 0.0, 1.5, float("nan"), float("inf")]
OTHERS = [None, True, False, "", "1", b"", b"1", [], [1], {}, {"key": 1}, {b"key": 1}, [[[]]]]
FITTING = {int: lambda value: value == 0 and type(value) is int, object: lambda _value: True}
"""The right values among those above; for other types, all values of that type are right."""


def wrong_values(hint: Any) -> list[Any]:
    """Values that a field with this annotation must not have."""
    candidates = NUMBERS + OTHERS
    if get_origin(hint) is list:
        items = [[wrong] for wrong in wrong_values(get_args(hint)[0])]
        return [value for value in candidates if type(value) is not list] + items
    parts = tuple_parts(hint)
    if parts is not None:
        whole = [_whole_value(part) for part in parts]
        swapped = [
            [*whole[:place], wrong, *whole[place + 1 :]]
            for place, part in enumerate(parts)
            for wrong in wrong_values(part)
        ]
        return [value for value in candidates if type(value) is not list] + [[], whole[:-1], [*whole, 1], *swapped]
    if get_origin(hint) is dict:
        return [value for value in candidates if type(value) is not dict or b"key" in value]
    if hint in (int, float, str, bytes, bool, object):
        fits = FITTING.get(hint, lambda value: type(value) is hint)
        return [value for value in candidates if not fits(value)]
    return [value for value in wrong_values(_without_none(hint)) if value is not None]


def decode_or_refuse(vocabulary: Vocabulary, data: bytes) -> None:
    """Decode; an accepted message must stay the same when it is encoded and decoded again."""
    try:
        decoded = vocabulary.decode(data)
    except MalformedMessage:
        return
    assert vocabulary.decode(decoded.encode()).encode() == decoded.encode()


@pytest.mark.thorough(after_first=True)
@every_vocabulary
@given(data=st.data())
def test_every_message_survives_the_way_there_and_back(vocabulary, data) -> None:
    """Messages are built from the annotations alone, so a new message is tested at once."""
    said = data.draw(any_message_of(vocabulary))

    decoded = vocabulary.decode(said.encode())

    assert type(decoded) is type(said)
    assert repr(decoded) == repr(said)  # NaN is unequal to itself, but its repr is the same
    assert decoded.encode() == said.encode()


def test_what_may_be_a_tuple_arrives_as_a_list() -> None:
    """There are only arrays in msgpack, so the sender may use lists or tuples."""
    sent = Pull(subscription=1, consumed=2, waiting=False, wait_us=0, released=[(3, 4)])

    assert TO_DAEMON.decode(sent.encode()) == Pull(1, 2, False, 0, [[3, 4]])


def test_an_error_code_travels_as_its_number() -> None:
    """An older receiver may not know the code."""
    sent = Refused(request=1, subscription=0, error=ErrorCode.DRAINING, text="")

    assert TO_TRAINER.decode(sent.encode()).error == 400


def test_message_numbers_are_unique_over_all_vocabularies() -> None:
    """A number is used once, for any receiver, and never by an imported copy."""
    assert [code for code, count in Counter(kind.code for kind in KINDS).items() if count > 1] == []
    assert {1, 10, 20, 30} <= {kind.code for kind in KINDS}


def test_every_message_is_documented_and_expected_by_a_receiver() -> None:
    """Each message has a meaning of its own, and at least one vocabulary has it."""
    meanings = [inspect.cleandoc(kind.__doc__ or "") for kind in KINDS]
    received = set(chain.from_iterable(vocabulary.kinds.values() for vocabulary in VOCABULARIES.values()))

    assert all(
        meaning and not meaning.startswith(f"{kind.__name__}(") for kind, meaning in zip(KINDS, meanings, strict=True)
    )
    assert len(set(meanings)) == len(KINDS)
    assert received == set(KINDS)


def test_error_codes_stay_within_the_hundreds_that_are_documented() -> None:
    """Codes are 1xx to 4xx and unique, and published codes stay the same."""
    assert {code // 100 for code in ErrorCode} == {1, 2, 3, 4}
    assert (ErrorCode.UNSUPPORTED_VERSION, ErrorCode.UNKNOWN_STREAM, ErrorCode.RING_EXHAUSTED) == (100, 200, 300)


def test_a_vocabulary_refuses_what_is_for_others() -> None:
    """The daemon does not accept its own answers."""
    with pytest.raises(MalformedMessage, match="number 1 is not expected here"):
        TO_DAEMON.decode(Hello(1, "train.py", 2).encode())


def test_two_messages_with_one_number_make_no_vocabulary() -> None:
    """The error comes at the import of the module, so the author of the second message sees it."""
    with pytest.raises(AssertionError, match="share a number"):
        Vocabulary(Hello, Hello)


@every_vocabulary
def test_every_wrong_value_of_every_field_is_refused_by_name(vocabulary) -> None:
    """Values are negative, too large, a bool for a number, a text for bytes, or a longer tuple.

    They are tried at every place.
    """
    for whole in map(whole_message, vocabulary.kinds.values()):
        assert vocabulary.decode(whole.encode()) == whole
        kind, hints = type(whole), get_type_hints(type(whole))
        for place, name in enumerate(kind.field_names):
            values = [getattr(whole, other) for other in kind.field_names]
            for wrong in wrong_values(hints[name]):
                values[place] = wrong
                refused = rf"^{kind.__name__}\.{name} cannot be |^not msgpack: "
                with pytest.raises(MalformedMessage, match=refused):
                    vocabulary.decode(msgpack.packb([kind.code, *values]))


@every_vocabulary
def test_a_message_with_too_few_fields_is_refused(vocabulary) -> None:
    """One required field is missing, a message is in a message, or there is no array at all."""
    for kind in vocabulary.kinds.values():
        code, *values = msgpack.unpackb(whole_message(kind).encode())
        values = values[: kind.required]
        fewer = [[code, *values[:-1]], [code, [code, *values]] if len(values) > 1 else [code]] if values else []
        for parts in fewer:
            with pytest.raises(MalformedMessage, match=rf"{kind.__name__} has {len(values)} fields, not"):
                vocabulary.decode(msgpack.packb(parts))
        for parts in ([], [[code, *values]], {"code": code}, {code: values}, code, None, [float(code), *values]):
            with pytest.raises(MalformedMessage):
                vocabulary.decode(msgpack.packb(parts))


@every_vocabulary
def test_fields_that_a_newer_side_added_are_skipped(vocabulary) -> None:
    """Any values may follow the last known field."""
    for whole in map(whole_message, vocabulary.kinds.values()):
        parts = msgpack.unpackb(whole.encode())
        assert vocabulary.decode(msgpack.packb([*parts, {"new": [1, None]}, -1])) == whole


@message(99)
class Grown(Message):
    """A message of two fields to which a third was added."""

    number: int
    name: str
    added: list[int] = field(default_factory=list)
    later: int | None = None


def test_a_field_with_a_default_may_be_absent_and_is_checked_where_it_is_there() -> None:
    """A side that knows the field thus works with a side that does not."""
    grown = Vocabulary(Grown)
    assert grown.decode(msgpack.packb([99, 1, "a"])) == Grown(1, "a")
    assert grown.decode(msgpack.packb([99, 1, "a", [7]])) == Grown(1, "a", [7])
    with pytest.raises(MalformedMessage, match=r"Grown\.added cannot be 7"):
        grown.decode(msgpack.packb([99, 1, "a", 7]))
    with pytest.raises(MalformedMessage, match="Grown has 2 fields, not 1"):
        grown.decode(msgpack.packb([99, 1]))


def test_a_side_that_skips_nothing_is_sent_what_it_knows() -> None:
    """Versions before the one that skips unknown fields get the fields without a default."""
    grown = Grown(1, "a", [7], 8)
    assert msgpack.unpackb(grown.encode(OPEN_ENDED_SINCE - 1)) == [99, 1, "a"]
    assert msgpack.unpackb(grown.encode(OPEN_ENDED_SINCE)) == [99, 1, "a", [7], 8]
    assert msgpack.unpackb(grown.encode()) == [99, 1, "a", [7], 8]


def test_a_number_that_is_no_messages_is_refused() -> None:
    """True is not message 1."""
    for code in (True, False, -1, 0, 9, 99, 1 << 63, (1 << 64) - 1, 1.0, None, "1", b"\x01", [1]):
        with pytest.raises(MalformedMessage):
            EVERYTHING.decode(msgpack.packb([code, 1, "train.py", 2]))


@every_vocabulary
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_malformed(vocabulary, data) -> None:
    """A decoder has no other outcome, whatever arrives."""
    decode_or_refuse(vocabulary, data)
    decode_or_refuse(vocabulary, b"\x93" + bytes([next(iter(vocabulary.kinds))]) + data)


@pytest.mark.thorough(after_first=True)
@every_vocabulary
@given(value=msgpack_values)
def test_arbitrary_msgpack_is_a_message_or_malformed(vocabulary, value) -> None:
    """Extensions, NaN and odd keys are tried as the whole message and as each field of one."""
    decode_or_refuse(vocabulary, msgpack.packb(value))
    for kind in vocabulary.kinds.values():
        decode_or_refuse(vocabulary, msgpack.packb([kind.code, *[value] * len(kind.field_names)]))


@pytest.mark.thorough(after_first=True)
@every_vocabulary
@given(data=st.data())
def test_a_mutated_message_is_a_message_or_malformed(vocabulary, data) -> None:
    """Bytes of a right message are changed, left out, doubled, or cut off at the end."""
    sent = bytearray(data.draw(any_message_of(vocabulary)).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(sent) - 1))
        length = data.draw(st.integers(0, 3))
        sent[place : place + length] = data.draw(
            st.binary(max_size=3) | st.just(bytes(sent[place : place + 2 * length]))
        )
        if not sent:
            break

    decode_or_refuse(vocabulary, bytes(sent))


@every_vocabulary
def test_a_message_cut_off_anywhere_or_with_something_behind_it_is_refused(vocabulary) -> None:
    """A message has no rest, and no beginning of the next one."""
    for kind in vocabulary.kinds.values():
        sent = whole_message(kind).encode()
        for wrong in [sent[:length] for length in range(len(sent))] + [sent + b"\xc0", sent + sent]:
            with pytest.raises(MalformedMessage):
                vocabulary.decode(wrong)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["array", "map"])
def test_deep_nesting_is_refused_at_every_depth(opening) -> None:
    """Neither deep nesting nor the error that shows it may exhaust a stack."""
    for depth in (5, 100, 500, 511, 512, *range(900, 1030, 5), 1022, 1023, 1024, 5000, 200_000):
        nested = opening * depth + b"\xc0"
        for data in (nested, b"\x93\x0a" + nested + b"\xc4\x00", b"\x93\x0a\x01" + nested):
            with pytest.raises(MalformedMessage):
                TO_DAEMON.decode(data)


@pytest.mark.parametrize("depth", [100, 400, 1010, 1100])
def test_deep_nesting_where_anything_may_stand_is_a_message_or_malformed(depth) -> None:
    """An accepted message can be encoded again."""
    decode_or_refuse(TO_TRAINER, b"\x93\x18\x01\x81\xa1a" + b"\x91" * depth + b"\xc0")


@pytest.mark.parametrize(
    "value",
    [b"\xc7\x00\x05", b"\xd4\x05\x00", b"\xc7\x01\x05\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x00\xff"],
    ids=["empty", "fixed", "of one byte", "timestamp", "empty timestamp"],
)
def test_extensions_are_refused_even_where_anything_may_stand(value) -> None:
    """``Status.status`` and ``Subscribed.layout`` hold plain data, never msgpack's own objects."""
    layout_place = whole_message(Subscribed).encode().replace(msgpack.packb([1, "two"]), value)

    for data in (b"\x93\x18\x01\x81\xa1a" + value, layout_place, value):
        with pytest.raises(MalformedMessage, match="not msgpack"):
            TO_TRAINER.decode(data)


@pytest.mark.parametrize("key", [1, -1, None, 1.5, True, (1,)])
def test_keys_that_are_no_text_are_refused(key) -> None:
    """Integer keys allow hash collisions, and JSON cannot have the other kinds of keys."""
    with pytest.raises(MalformedMessage):
        TO_TRAINER.decode(msgpack.packb([Status.code, 1, {key: 1}]))
    with pytest.raises(MalformedMessage):
        TO_TRAINER.decode(msgpack.packb([Status.code, 1, {"a": [{key: 1}]}]))


@pytest.mark.parametrize("prefix", [b"", b"\x93\x0a\x01", b"\x93\x18\x01\x81\xa1a"], ids=["alone", "field", "object"])
def test_a_huge_announced_length_costs_no_memory(prefix) -> None:
    """Array, string, binary, map and extension announce 2^32 - 1 or 2^16 - 1 items."""
    long = [bytes([start]) + b"\xff" * 4 for start in (0xDD, 0xDB, 0xC6, 0xDF, 0xC9)]
    short = [bytes([start]) + b"\xff" * 2 for start in (0xDC, 0xDA, 0xC5, 0xDE, 0xC8)]
    tracemalloc.start()
    try:
        for announced, vocabulary in product(long + short, (TO_DAEMON, TO_TRAINER)):
            with pytest.raises(MalformedMessage):
                vocabulary.decode(prefix + announced + b"\x05")
        assert tracemalloc.get_traced_memory()[1] < 256 * 1024
    finally:
        tracemalloc.stop()


LIMITS = {
    "number": (FillChunks, "stream", NUMBER_MAX, NUMBER_MAX + 1),
    "text": (ChunksFilled, "hopeless", "x" * TEXT_CHARACTERS_MAX, "x" * (TEXT_CHARACTERS_MAX + 1)),
    "items": (Quarantine, "samples", [1] * ITEMS_MAX, [1] * (ITEMS_MAX + 1)),
    "pairs": (Pull, "released", [[1, 2]] * ITEMS_MAX, [[1, 2]] * (ITEMS_MAX + 1)),
    "keys": (
        Status,
        "status",
        dict.fromkeys(map(str, range(ITEMS_MAX)), 0),
        dict.fromkeys(map(str, range(ITEMS_MAX + 1)), 0),
    ),
    "bytes": (Open, "secret", b"x" * (MESSAGE_BYTES_MAX - 8), b"x" * (MESSAGE_BYTES_MAX + 1)),
}


@pytest.mark.parametrize(("kind", "name", "longest", "longer"), LIMITS.values(), ids=LIMITS)
def test_limits_hold_to_the_item(kind, name, longest, longer) -> None:
    """The largest allowed value arrives, and one item more does not."""
    values = {other: getattr(whole_message(kind), other) for other in kind.field_names}

    assert getattr(EVERYTHING.decode(kind(**values | {name: longest}).encode()), name) == longest
    with pytest.raises(MalformedMessage):
        EVERYTHING.decode(kind(**values | {name: longer}).encode())


def test_a_message_over_the_limit_is_refused_before_it_is_read() -> None:
    """The parts of the message may be harmless."""
    with pytest.raises(MalformedMessage, match=rf"{MESSAGE_BYTES_MAX + 1} bytes, more than the {MESSAGE_BYTES_MAX} of"):
        EVERYTHING.decode(b"\x93" * (MESSAGE_BYTES_MAX + 1))


def test_a_message_that_cannot_be_encoded_leaves_nothing_in_the_next_one() -> None:
    """The packer is shared, so a half-packed message must not stay in it."""
    with pytest.raises(UnicodeEncodeError):
        ChunksFilled(orders=[1], work=NO_WORK, bad=[(3, "\udcff", "reason")], hopeless="").encode()

    assert Hello(1, "train.py", 2).encode() == msgpack.packb([1, 1, "train.py", 2])


def test_a_refusal_shows_little_of_what_it_refuses() -> None:
    """The text goes into a log, and a hostile peer chooses the value."""
    with pytest.raises(MalformedMessage, match=r"Open\.version cannot be .{1,60}$"):
        TO_DAEMON.decode(msgpack.packb([Open.code, ["x" * 1000] * 1000, b""]))
