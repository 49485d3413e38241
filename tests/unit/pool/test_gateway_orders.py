"""The table of orders at remote workers: which worker may write rows, and until when."""

from typing import cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchd.pool.gateway.orders import REPORT_BYTES, OrderTable, RemoteOrder
from batchd.pool.gateway.rows import places_of
from batchd.pool.gateway.streams import HostStream, IndexMemory
from batchd.pool.messages import ORDERS_MAX, FillRows
from support.gateways import LAYOUT, serve_message

LINKS, WORKERS = (11, 12), (0, 1)


STREAM = HostStream(1, "photos", LAYOUT, cast("IndexMemory", None), serve_message(), 1 << 20)


@pytest.fixture
def table() -> OrderTable:
    """A table with one link and one worker."""
    table = OrderTable()
    table.add_worker(11, 0)
    return table


def order(link=11, worker=0, number=1, memory=True) -> RemoteOrder:
    places = places_of(LAYOUT, [(0, 2)])
    message = FillRows(link, worker, number, STREAM.number, 0, 0, [(0, 2)])
    return RemoteOrder(
        link, worker, number, STREAM, range(2), places, message, memoryview(bytearray(8)) if memory else None
    )


def test_an_order_is_found_under_its_link_and_worker_only(table) -> None:
    """Another worker of the same link, and the same worker of another link, have none."""
    table.add_worker(11, 1)
    table.add_worker(12, 0)
    given = order()
    table.give(given)

    assert table.find(11, 0, 1) is given
    assert [table.find(*key) for key in ((11, 1, 1), (12, 0, 1), (11, 0, 2), (13, 0, 1), (11, 7, 1))] == [None] * 5


def test_a_withdrawn_order_has_no_writable_memory(table) -> None:
    """It stays in the table, because the worker host still works on it."""
    given = order()
    table.give(given)
    table.withdraw(given)

    assert table.find(11, 0, 1) is given
    assert (given.memory, given.reference, given.is_withdrawn) == (None, None, True)


def test_the_orders_of_a_worker_end_with_it(table) -> None:
    """The orders of the link's other workers stay."""
    table.add_worker(11, 1)
    table.give(order(number=1))
    other = order(worker=1, number=2)
    table.give(other)
    table.next_to_send(11, 0)
    table.next_to_send(11, 1)

    table.end_worker(11, 0)

    assert list(table) == [other]
    assert not table.is_up(11, 0)
    assert table.workers(11) == [1]
    assert table.due_bytes(11) == other.due_bytes


def test_an_order_is_given_once(table) -> None:
    """Otherwise its number would be ambiguous."""
    table.give(order())
    with pytest.raises(AssertionError, match="given before"):
        table.give(order())


def test_a_further_order_is_sent_when_another_has_ended(table) -> None:
    """Until then the worker host does not know it."""
    orders = [order(number=number) for number in range(1, ORDERS_MAX + 2)]
    for one in orders:
        table.give(one)

    assert [table.next_to_send(11, 0) for _ in orders] == [*orders[:-1], None]
    assert table.find(11, 0, ORDERS_MAX + 1) is orders[-1]
    assert table.find_sent(11, 0, ORDERS_MAX + 1) is None
    table.withdraw(orders[0])
    assert table.next_to_send(11, 0) is None, "the worker host still has it"
    table.end(orders[0])
    assert table.next_to_send(11, 0) is orders[-1]
    assert table.find_sent(11, 0, ORDERS_MAX + 1) is orders[-1]


def test_the_expected_bytes_are_those_of_the_rows_and_a_report(table) -> None:
    """They are the most bytes on the wire, for orders that were sent."""
    given = order()
    table.give(given)
    assert table.due_bytes(11) == 0
    table.next_to_send(11, 0)
    rows_bytes = 2 * LAYOUT.row_bytes

    assert rows_bytes + REPORT_BYTES < table.due_bytes(11) < rows_bytes + REPORT_BYTES + 1000
    table.end(given)
    assert table.due_bytes(11) == 0
    assert table.due_bytes(99) == 0


class TableModel(RuleBasedStateMachine):
    """The table, compared with a plain set of the orders that were given and have not ended."""

    @initialize()
    def begin(self) -> None:
        self.table = OrderTable()
        self.up: set[tuple[int, int]] = set()
        self.orders: dict[tuple[int, int, int], RemoteOrder] = {}
        self.numbers = 0

    @rule(link=st.sampled_from(LINKS), worker=st.sampled_from(WORKERS))
    def start(self, link, worker) -> None:
        if (link, worker) not in self.up:
            self.table.add_worker(link, worker)
            self.up.add((link, worker))

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def give(self, data) -> None:
        link, worker = data.draw(st.sampled_from(sorted(self.up)))
        self.numbers += 1
        given = order(link, worker, self.numbers)
        self.table.give(given)
        self.orders[link, worker, self.numbers] = given

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def send(self, data) -> None:
        link, worker = data.draw(st.sampled_from(sorted(self.up)))
        here = [one for key, one in self.orders.items() if key[:2] == (link, worker)]
        unsent = [one for one in here if not one.is_sent]
        has_room = len(here) - len(unsent) < ORDERS_MAX
        assert self.table.next_to_send(link, worker) is (unsent[0] if unsent and has_room else None)

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), is_withdrawn=st.booleans())
    def end(self, data, is_withdrawn) -> None:
        key = data.draw(st.sampled_from(sorted(self.orders)))
        if is_withdrawn:
            self.table.withdraw(self.orders[key])
        else:
            self.table.end(self.orders.pop(key))

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def end_worker(self, data) -> None:
        gone = data.draw(st.sampled_from(sorted(self.up)))
        self.table.end_worker(*gone)
        self.up.remove(gone)
        self.orders = {key: one for key, one in self.orders.items() if key[:2] != gone}

    @rule(link=st.sampled_from(LINKS))
    def end_link(self, link) -> None:
        self.table.end_link(link)
        self.up = {one for one in self.up if one[0] != link}
        self.orders = {key: one for key, one in self.orders.items() if key[0] != link}

    @invariant()
    def the_table_has_what_was_given(self) -> None:
        assert {(one.link, one.worker, one.number): one for one in self.table} == self.orders
        assert {(link, worker) for link in LINKS for worker in self.table.workers(link)} == self.up
        for link in LINKS:
            due = sum(one.due_bytes for key, one in self.orders.items() if key[0] == link and one.is_sent)
            assert self.table.due_bytes(link) == due
        assert all((one.memory is None) == one.is_withdrawn for one in self.table)


TestTable = TableModel.TestCase
