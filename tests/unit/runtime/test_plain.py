"""Records between processes, as plain values."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from batchd.runtime.plain import from_plain, to_plain


class Span(NamedTuple):
    first: int
    end: float = 1.0


@dataclass(frozen=True)
class Whole:
    """A field of each kind that records have."""

    name: str
    path: Path | None
    kind: Literal["a", "b"]
    spans: tuple[Span, ...]
    pair: tuple[int, str]
    table: dict[str, list[float]]
    either: int | str | None
    inner: "Whole | None" = None
    anything: object = None
    whatever: Any = None


LEAF = Whole("x", None, "a", (), (0, ""), {}, None)
FULL = Whole(
    "y", Path("/data"), "b", (Span(1), Span(2, 0.5)), (3, "c"), {"k": [1.0, 2.5]}, "7", LEAF, [1, {"a": 2}], {"b": []}
)


@pytest.mark.parametrize(
    "value", [LEAF, FULL, Whole("z", Path("r"), "a", (), (1, "d"), {}, 8, FULL)], ids=lambda value: value.name
)
def test_what_was_written_is_read_through_json_as_it_was(value) -> None:
    assert from_plain(Whole, json.loads(json.dumps(to_plain(value)))) == value


def test_a_whole_number_is_read_as_a_float_where_one_belongs() -> None:
    """JSON of other writers has 1 for 1.0."""
    span = from_plain(Span, [1, 2])
    assert span == Span(1, 2.0)
    assert type(span.end) is float


@pytest.mark.parametrize(
    ("hint", "plain"),
    [
        (int, "1"),
        (int, True),
        (str, 1),
        (str, None),
        (Path, 3),
        (Span, [1]),
        (Span, [1, 2.0, 3]),
        (Span, {"first": 1}),
        (tuple[int, str], [1]),
        (tuple[int, ...], ["a"]),
        (dict[str, int], {"a": "b"}),
        (dict[str, int], [1]),
        (Literal["a", "b"], "c"),
        (int | None, "x"),
        (Whole, {"name": "x"}),
        (Whole, {**to_plain(LEAF), "more": 1}),
        (Whole, {**to_plain(LEAF), "name": 3}),
        (Whole, [1, 2]),
    ],
    ids=str,
)
def test_a_value_of_another_form_is_refused(hint, plain) -> None:
    """A field is never what its annotation does not say."""
    with pytest.raises((TypeError, ValueError)):
        from_plain(hint, plain)
