"""Rows of a plan that are computed ahead equal those of the plan."""

from hypothesis import given
from hypothesis import strategies as st

from batchd.core.plan import Plan
from batchd.worker.loop import ROWS_AHEAD, PlannedRows
from batchd_wire.position import Position

SAMPLES, BATCH = 2_000, 700
ORDERS = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, BATCH - 1), st.integers(1, BATCH))


@given(st.lists(ORDERS, max_size=20), st.booleans())
def test_orders_in_any_sequence_get_the_samples_of_the_plan(orders, shuffle):
    """Orders run forwards and backwards, over long chunks, and up to a partial last batch."""
    plan = Plan(SAMPLES, BATCH, 7, shuffle, drop_last=False)
    rows = PlannedRows(plan)
    for epoch, step, row, wanted in orders:
        first = min(row, plan.rows(Position(epoch, step)) - 1)
        count = min(wanted, plan.rows(Position(epoch, step)) - first)
        position = Position(epoch, step)
        assert (
            rows.samples(position, range(first, first + count)).tolist()
            == plan.indices(position, first, count).tolist()
        )


@given(st.lists(st.sets(st.integers(0, BATCH - 1), min_size=1), max_size=10), st.booleans())
def test_rows_with_gaps_get_the_samples_of_the_plan(orders, shuffle):
    """Each order covers one batch and any of its rows."""
    plan = Plan(SAMPLES, BATCH, 7, shuffle, drop_last=False)
    planned = PlannedRows(plan)
    for order in orders:
        rows = tuple(sorted(order))
        expected = [int(plan.indices(Position(1, 0), row, 1)[0]) for row in rows]
        assert planned.samples(Position(1, 0), rows).tolist() == expected
        assert plan.indices_of(Position(1, 0), rows).tolist() == expected


def test_chunks_of_one_batch_ask_the_plan_once(monkeypatch):
    """This holds while the number of rows ahead stays within the limit."""
    asked = []
    indices = Plan.indices
    monkeypatch.setattr(Plan, "indices", lambda *facts: asked.append(facts) or indices(*facts))
    rows = PlannedRows(Plan(SAMPLES, BATCH, 7, shuffle=True, drop_last=False))
    for first in range(0, BATCH, 20):
        rows.samples(Position(0, 0), range(first, first + 20))
    assert len(asked) == -(-BATCH // ROWS_AHEAD)
