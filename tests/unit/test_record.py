"""Value classes: they behave like dataclasses."""

from dataclasses import asdict, replace

import pytest

from batchd_wire.record import record


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


def test_values_are_dataclasses():
    """Functions for dataclasses accept these values."""
    assert asdict(Place(3)) == {"epoch": 3, "step": 0}
    assert replace(Place(3), step=4) == Place(3, 4)


def test_nothing_can_be_added_to_a_value():
    """The class has slots, so a wrong name is an error at once."""
    with pytest.raises(AttributeError):
        Place(1).stpe = 2  # type: ignore[attr-defined]
