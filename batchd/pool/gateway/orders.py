"""The orders at remote workers, and the right to write their rows. GATEWAY process; pure.

    worker up -> give -> next_to_send -> its rows may be written
                   |        | withdraw -> no row of it will be written; the worker host still has it
                   |        | end ------> over
                   +- withdraw, end ----> over: it was never sent
    worker down, link down ---------> all its orders are over

The daemon gives a busy worker an additional order if its rows are to be compared. The gateway sends
it when another order has ended, so the worker host cannot recognise it by the number of orders.

Invariant, the fence: rows are written only for an order that is in this table under the link and
the worker that sent them. The messages after which others may fill these rows
(``OrderWithdrawn``, ``WorkerDown``, ``LinkClosed``) are sent after the order has left the table or
has lost its memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic

from batchd.core.rows import Rows
from batchd.pool.gateway.rows import Place, length
from batchd.pool.gateway.streams import HostStream
from batchd.pool.messages import ORDERS_MAX, FillRows
from batchd_wire.fields import SlotLayout
from batchd_wire.tcp import CURVE_BYTES

FRAME_HEAD_BYTES = 9 + CURVE_BYTES
"""Bytes that ZMTP and CURVE add to a frame."""
REPORT_BYTES = 128 << 10
"""Longest report of an order: a message that fits into the channel to the daemon."""


@dataclass(slots=True, eq=False)
class RemoteOrder:
    """Rows that a remote worker fills into ``memory``, the whole slot.

    ``reference``: the same rows by a local worker, if the rows are compared instead of written.
    ``given_s``: when it was sent. ``message``: the order for the worker host.
    """

    link: int
    worker: int
    number: int
    stream: HostStream
    rows: Rows
    places: list[Place]
    message: FillRows
    memory: memoryview | None
    reference: list[bytes] | None = None
    is_sent: bool = False
    given_s: float = 0.0
    is_withdrawn: bool = False

    @property
    def layout(self) -> SlotLayout:
        """The layout of its batch."""
        return self.stream.layout.of(self.message.bucket)

    @property
    def due_bytes(self) -> int:
        """Maximum number of bytes that its answer has on the wire."""
        return sum(map(length, self.places)) + len(self.places) * FRAME_HEAD_BYTES + REPORT_BYTES


@dataclass(slots=True)
class _Link:
    workers: dict[int, dict[int, RemoteOrder]] = field(default_factory=dict)
    """The orders of each worker that is up, by their numbers."""
    due_bytes: int = 0


class OrderTable:
    """All orders, by link, worker and number."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}

    def add_worker(self, link: int, worker: int) -> None:
        """Add a remote worker that takes orders."""
        self._links.setdefault(link, _Link()).workers[worker] = {}

    def workers(self, link: int) -> list[int]:
        """The workers of a link that are up."""
        return list(self._links[link].workers) if link in self._links else []

    def is_up(self, link: int, worker: int) -> bool:
        """True if orders can be given to the worker."""
        return link in self._links and worker in self._links[link].workers

    def give(self, order: RemoteOrder) -> None:
        """Enter an order of a worker that is up."""
        link = self._links[order.link]
        orders = link.workers[order.worker]
        assert order.number not in orders, f"order {order.number} was given before"
        orders[order.number] = order

    def next_to_send(self, link: int, worker: int) -> RemoteOrder | None:
        """The oldest order that was not sent, marked as sent; None while the worker has enough."""
        orders = self._links[link].workers[worker].values()
        order = next((one for one in orders if not one.is_sent), None)
        if order is None or sum(one.is_sent for one in orders) >= ORDERS_MAX:
            return None
        order.is_sent, order.given_s = True, monotonic()
        self._links[link].due_bytes += order.due_bytes
        return order

    def find(self, link: int, worker: int, number: int) -> RemoteOrder | None:
        """The order of this link and worker; None if it is over or never existed."""
        return self._links[link].workers[worker].get(number) if self.is_up(link, worker) else None

    def find_sent(self, link: int, worker: int, number: int) -> RemoteOrder | None:
        """The order, if it was sent to the worker host."""
        order = self.find(link, worker, number)
        return order if order is not None and order.is_sent else None

    def withdraw(self, order: RemoteOrder) -> None:
        """Take the right to write rows from an order."""
        order.is_withdrawn = True
        order.memory = order.reference = None

    def end(self, order: RemoteOrder) -> None:
        """Remove an order that the worker host has finished, or that was never sent."""
        link = self._links[order.link]
        del link.workers[order.worker][order.number]
        if order.is_sent:
            link.due_bytes -= order.due_bytes

    def end_worker(self, link: int, worker: int) -> None:
        """Remove a dead worker and all its orders."""
        for order in list(self._links[link].workers[worker].values()):
            self.end(order)
        del self._links[link].workers[worker]

    def end_link(self, link: int) -> None:
        """Remove all workers of a link that has ended."""
        self._links.pop(link, None)

    def due_bytes(self, link: int) -> int:
        """Maximum number of bytes that answer the orders of a link."""
        return self._links[link].due_bytes if link in self._links else 0

    def __iter__(self) -> Iterator[RemoteOrder]:
        for link in self._links.values():
            for orders in link.workers.values():
                yield from orders.values()
