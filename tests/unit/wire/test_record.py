"""Value classes: they behave like dataclasses."""

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, field, replace
from typing import Any

import pytest

from batchd_wire.record import frozen, options, record


@record
class Place:
    """A value."""

    epoch: int
    step: int = 0


@record
class Other:
    """A value of another class with the same fields."""

    epoch: int
    step: int = 0


@frozen
class Fixed:
    """A value that refuses assignments."""

    epoch: int
    step: int = 0


@options
class Named:
    """The same with names and a list of its own; it notes its sum, as options check theirs."""

    step: int = 0
    epoch: int
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Note the sum."""
        self.seen.append(self.epoch + self.step)


def test_values_are_equal_where_class_and_fields_are():
    """A set keeps one of two equal values."""
    assert Place(1, 2) == Place(epoch=1, step=2)
    assert Place(1, 2) != Place(1, 3)
    assert Place(1, 2) != Other(1, 2)
    assert Place(1) != (1, 0)
    assert len({Place(1), Place(1, 0), Place(2), Other(1)}) == 3


def test_a_value_shows_its_fields():
    """The repr appears in logs and in failed tests."""
    assert repr(Place(1, 2)) == "Place(epoch=1, step=2)"


@pytest.mark.parametrize("kind", [Place, Fixed, Named])
def test_values_are_dataclasses(kind: Callable[..., Any]):
    """Functions for dataclasses accept these values, and copies are equal."""
    value = kind(epoch=3)
    assert {"epoch": 3, "step": 0}.items() <= asdict(value).items()
    assert replace(value, step=4).step == 4
    assert copy.copy(value) == copy.deepcopy(value) == value


def test_nothing_can_be_added_to_a_value():
    """The class has slots, so a wrong name is an error at once."""
    with pytest.raises(AttributeError):
        Place(1).stpe = 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [Fixed(1, 2), Named(epoch=1, step=2)])
def test_a_frozen_value_stays_as_it_is(value: Any):
    """A field can be neither assigned nor removed."""
    with pytest.raises(FrozenInstanceError, match="'step'"):
        value.step = 3
    with pytest.raises(FrozenInstanceError, match="'step'"):
        del value.step
    assert (value.epoch, value.step) == (1, 2)


def test_options_are_given_by_their_names():
    """So a field with a default may precede one without, as in a base of several kinds."""
    first, second = Named(epoch=1), Named(epoch=2, step=3)
    assert (first.seen, second.seen) == ([1], [5])
    with pytest.raises(TypeError, match="position"):
        Named(1)  # type: ignore[call-arg,misc]


@pytest.mark.parametrize("kind", [Place, Fixed])
def test_wrong_arguments_are_refused_by_name(kind: Callable[..., Any]):
    """The first call of a record compiles its ``__init__``; later calls refuse the same."""
    for _call in range(2):
        with pytest.raises(TypeError, match="epoch"):
            kind()
        with pytest.raises(TypeError, match="stpe"):
            kind(1, stpe=2)
        with pytest.raises(TypeError, match=r"position|multiple values"):
            kind(1, epoch=2)
        with pytest.raises(TypeError, match="position"):
            kind(1, 2, 3)


@pytest.mark.parametrize(("decorate", "when_made"), [(record, 1), (frozen, 0), (options, 0)])
def test_a_class_compiles_no_method_before_its_first_value(
    decorate: Callable[[type], type[Any]], when_made: int, monkeypatch: pytest.MonkeyPatch
):
    """A start defines some two hundred of these classes, and uses few."""
    compiled: list[str] = []
    real = exec
    monkeypatch.setattr("builtins.exec", lambda text, *places: (compiled.append(text), real(text, *places)))

    def inits() -> int:
        return sum("def __init__" in text for text in compiled)

    class Late:
        """A value."""

        epoch: int

    late = decorate(Late)
    assert inits() == 0
    assert late(epoch=1) == late(epoch=1)
    assert inits() == when_made
