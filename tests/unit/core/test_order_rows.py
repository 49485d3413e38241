"""Rows of orders, and their runs in messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.core.rows import are_runs, ascending, rows_of, runs_of


@given(st.sets(st.integers(0, 40), min_size=1))
def test_rows_come_back_from_their_runs(rows) -> None:
    """The runs are as few as possible."""
    ordered = tuple(sorted(rows))
    runs = runs_of(ordered)
    assert tuple(rows_of(runs)) == ordered
    assert len(runs) == sum(row - 1 not in rows for row in rows)
    assert are_runs(runs, ordered[-1] + 1)
    assert not are_runs(runs, ordered[-1])


def test_rows_without_a_gap_are_one_run_and_a_range() -> None:
    """Most orders are like this, so no object is created for each row."""
    assert runs_of(range(3, 9)) == runs_of((3, 4, 5, 6, 7, 8)) == [(3, 6)]
    assert rows_of([(3, 6)]) == range(3, 9)


def test_rows_in_any_order_ascend_in_an_order() -> None:
    """Consecutive ones become a range, as the rows of most orders are."""
    assert ascending((5, 3, 4)) == range(3, 6)
    assert ascending((5, 3, 7)) == (3, 5, 7)
    assert ascending(range(2, 4)) == range(2, 4)
    assert ascending(()) == ()


@pytest.mark.parametrize(
    "runs", [[], [(0, 0)], [(2, 2), (1, 1)], [(2, 2), (3, 1)], [(0, 9)], [(7, 1), (8, 1)], [(3, -1)]]
)
def test_runs_that_are_none_are_found(runs) -> None:
    """A run without rows, a repeated row, a wrong order and rows beyond the batch are rejected."""
    assert not are_runs(runs, 8)
