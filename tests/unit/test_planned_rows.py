"""Rows of a plan that are worked out ahead are those that the plan names."""

from hypothesis import given
from hypothesis import strategies as st

from batchd.core.plan import Plan
from batchd.worker.loop import ROWS_AHEAD, PlannedRows
from batchd_wire.position import Position

SAMPLES, BATCH = 2_000, 700
ORDERS = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, BATCH - 1), st.integers(1, BATCH))


@given(st.lists(ORDERS, max_size=20), st.booleans())
def test_orders_in_any_sequence_get_the_samples_of_the_plan(orders, shuffle):
    """Forth and back, over long chunks, and up to the end of a partial last batch."""
    plan = Plan(SAMPLES, BATCH, 7, shuffle, drop_last=False)
    rows = PlannedRows(plan)
    for epoch, step, row, wanted in orders:
        first = min(row, plan.rows(step) - 1)
        count = min(wanted, plan.rows(step) - first)
        position = Position(epoch, step)
        assert rows.samples(position, first, count).tolist() == plan.indices(position, first, count).tolist()


def test_chunks_of_one_batch_ask_the_plan_once(monkeypatch):
    """As long as no more than so many rows lie ahead."""
    asked = []
    indices = Plan.indices
    monkeypatch.setattr(Plan, "indices", lambda *facts: asked.append(facts) or indices(*facts))
    rows = PlannedRows(Plan(SAMPLES, BATCH, 7, shuffle=True, drop_last=False))
    for first in range(0, BATCH, 20):
        rows.samples(Position(0, 0), first, 20)
    assert len(asked) == -(-BATCH // ROWS_AHEAD)
