"""Orders of a round on their way to worker hosts, and results on their way back.

The daemon's side of a gateway and the gateway's loop are real, with a socket pair between them. The
test is the core and the worker hosts.

    core --fill, withdraw--> GatewayChild == socket pair ==> Gateway --orders--> worker hosts
         <----- messages ---              <=================         <--rows----
"""

import gc
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from batchd.core import events as ev
from batchd.core.actions import WithdrawOrder
from batchd.core.events import OrderFilled, WorkerDown, WorkerUp
from batchd.core.work import NO_WORK
from batchd.data.pipeline.options import CONTENT_VERSION
from batchd.pool import gateway_child
from batchd.pool.gateway.links import Link
from batchd.pool.gateway.loop import Gateway
from batchd.pool.gateway_child import GatewayChild
from batchd.pool.messages import (
    LINK_VERSION,
    ROW_FRAME_BYTES,
    TO_GATEWAY,
    TO_HOST,
    FillRows,
    LinkTraffic,
    Register,
    Together,
    messages_in,
)
from batchd.runtime.poller import Poller
from batchd.runtime.tcp.connections import Connection
from batchd.worker.messages import UseSlot
from batchd_wire.channel import SEND_BUFFER_BYTES, receive_message
from batchd_wire.codec import Message
from batchd_wire.fields import Field, SlotLayout, place_fields
from support.gateways import index_descriptor, serve_message, slot_order
from support.stand_in_child import StandInChild

ROWS = 512
LAYOUT = place_fields((Field("label", "int64", ()),), ROWS)
(LABEL,) = LAYOUT.fields
REGISTER = Register(LINK_VERSION, "1.2.3", CONTENT_VERSION, "pod-1", "node-1", 7, 4, "x86_64")
WORKERS = (0, 1)
OF_OTHERS = 1 << 40
"""What the row of an order has after another worker has filled it."""

Key = tuple[int, int, int]
"""Link, worker, order. Each order has one row, the one with its number."""


class Sides:
    """A daemon's side, and a gateway that serves stream 1 into slot 5."""

    def __init__(self) -> None:
        self.heard_all: list[Message] = []
        self.at_hosts: defaultdict[int, list[Message]] = defaultdict(list)
        self._stack = ExitStack()
        self._poller = Poller()
        self._stack.callback(self._poller.close)
        self._slot = os.memfd_create("test-slot", os.MFD_CLOEXEC)
        self._stack.callback(os.close, self._slot)
        os.posix_fallocate(self._slot, 0, LAYOUT.slot_bytes)
        self.daemon = GatewayChild(0, self._poller, ("tcp://127.0.0.1:0", "daemon.worker_address", ""), self)
        self.start_gateway()

    def start_gateway(self) -> None:
        """Start a gateway, with stream and slot, as the daemon's child."""
        ours, self.channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, self.channel):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._child = StandInChild()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gateway_child, "start_linked", lambda *_arguments, **_options: (self._child, ours))
            self.daemon.spawn()
        self.gateway = Gateway(self.channel, None)
        self._router = self.gateway.hosts.router
        self.gateway.hosts.router = cast("zmq.Socket[bytes]", self)
        self.use(1, LAYOUT, 5, self._slot)
        self.gateway_reads()

    def use(self, stream: int, layout: SlotLayout, slot: int, memory: int) -> None:
        """Tell the gateway of a stream and a slot of it."""
        index = index_descriptor(b"an index")
        self.daemon.send(serve_message(stream, f"stream {stream}", layout), index)
        self.daemon.send(UseSlot(slot, layout.slot_bytes), memory)
        os.close(index)

    def end_gateway(self) -> None:
        """Kill the gateway: its messages so far count, and what it has collected is lost."""
        self.gateway.hosts.router = self._router
        self.channel.close()
        self.gateway.close()
        for messages in self.at_hosts.values():
            messages.clear()
        self._child.end_now()
        with capture_logs():
            self.core_hears()
        assert not self.daemon.is_up

    def close(self) -> None:
        """End both. Gateways are in cycles, and hold mappings until they are collected."""
        self.end_gateway()
        self._stack.close()
        del self.gateway
        gc.collect()

    def connect(self, number: int, workers: int) -> None:
        """Connect a worker host, and let its workers take orders."""
        link = Link(number, Connection(bytes([number]), -number, None), "127.0.0.1", None, REGISTER)
        self.gateway.hosts.links.add(link)
        self.gateway.begun(link)
        for worker in range(workers):
            self.gateway.heard(link, WorkerUp(number, worker, "libjpeg 3"), [])

    def send_multipart(self, frames: list[bytes], *_flags: int, **_options: bool) -> None:
        """Give a message to a worker host, as the gateway's router does."""
        (number,), data, *_index = frames
        if number in self.gateway.hosts.links.by_number:
            self.at_hosts[number] += messages_in(TO_HOST.decode(data), TO_HOST)

    def core_hears(self) -> None:
        """Read what has arrived at the daemon."""
        self._poller.dispatch()

    def gateway_reads(self) -> None:
        """Read what has arrived at the gateway, as its loop does."""
        self.gateway.read_daemon()

    def give(self, *key: int) -> None:
        """Give an order."""
        link, worker, number = key
        self.daemon.fill(slot_order(FillRows(link, worker, number, 1, 0, 3, [(number, 1)])))

    def answer(self, *key: int, has_rows: bool = True) -> None:
        """Let a worker host report an order; its row has the number of the order."""
        link = self.gateway.hosts.links.by_number[key[0]]
        rows = [memoryview(key[2].to_bytes(8, "little"))] if has_rows else []
        self.gateway.heard(link, OrderFilled(*key, NO_WORK, [], ""), rows)

    def row(self, number: int) -> int:
        """What the slot has in a row."""
        return int.from_bytes(os.pread(self._slot, 8, LABEL.offset + 8 * number), "little")

    def fill_elsewhere(self, number: int) -> None:
        """Fill a row as another worker does."""
        os.pwrite(self._slot, OF_OTHERS.to_bytes(8, "little"), LABEL.offset + 8 * number)

    def end_round_of_gateway(self) -> None:
        """Send what the gateway has collected, as its loop does."""
        self.gateway.hosts.flush()
        self.gateway.results.flush()

    def heard(self, _gateway: GatewayChild, message: Message) -> None:
        """See ``GatewayEvents``."""
        self.heard_all.append(message)

    def ended(self, _gateway: GatewayChild) -> None:
        """See ``GatewayEvents``."""


@pytest.fixture
def sides() -> Iterator[Sides]:
    """Connect one worker host with two workers."""
    sides = Sides()
    sides.connect(11, workers=2)
    sides.core_hears()
    sides.heard_all.clear()
    yield sides
    sides.close()


def test_orders_and_results_of_a_round_are_one_message_each(sides) -> None:
    """Neither side sends anything before its round is over."""
    for number in range(3):
        sides.give(11, 0, number)
    with pytest.raises(BlockingIOError):
        receive_message(sides.channel, TO_GATEWAY)
    sides.daemon.flush()
    assert isinstance(TO_GATEWAY.decode(sides.channel.recv(1 << 16, socket.MSG_PEEK)), Together)
    sides.gateway_reads()
    assert sides.at_hosts[11] == []
    sides.gateway.hosts.flush()
    assert [type(message) for message in sides.at_hosts[11]] == [FillRows] * 3

    for number in range(3):
        sides.answer(11, 0, number)
    sides.core_hears()
    assert sides.heard_all == []
    sides.end_round_of_gateway()
    sides.core_hears()
    assert [(type(message), message.order) for message in sides.heard_all] == [
        (ev.OrderFilled, number) for number in range(3)
    ]


def test_a_withdrawal_overtakes_no_order(sides) -> None:
    """The order is in a message that was not sent yet, of the daemon and then of the gateway."""
    for number in range(2):
        sides.give(11, 0, number)
    sides.daemon.withdraw(WithdrawOrder(11, 0, 1))
    sides.gateway_reads()
    assert [type(message) for message in sides.at_hosts[11]] == [FillRows, FillRows, WithdrawOrder]
    sides.answer(11, 0, 1)
    sides.end_round_of_gateway()
    sides.core_hears()
    assert [type(message) for message in sides.heard_all] == [ev.OrderWithdrawn, ev.OrderFilled]
    assert sides.row(1) == 0


def test_results_come_before_the_end_of_their_worker_and_of_their_link(sides) -> None:
    """Else the daemon would give orders to others that are filled already."""
    for number in range(4):
        sides.give(11, number % 2, number)
    sides.daemon.flush()
    sides.gateway_reads()
    link = sides.gateway.hosts.links.by_number[11]
    sides.answer(11, 0, 0)
    sides.gateway.heard(link, WorkerDown(11, 0, "signal 9 (SIGKILL)"), [])
    sides.answer(11, 1, 1)
    sides.gateway.hosts.end(link, "its connection ended")
    sides.end_round_of_gateway()
    sides.core_hears()
    ends = [message for message in sides.heard_all if not isinstance(message, LinkTraffic)]
    assert [type(message) for message in ends] == [
        ev.OrderFilled,
        ev.WorkerDown,
        ev.OrderFilled,
        ev.LinkClosed,
    ]


def test_large_rows_are_reported_before_the_next_ones_are_copied() -> None:
    """Copying the rows of a whole round takes a while, in which a trainer may wait."""
    sides = Sides()
    large = place_fields((Field("image", "uint8", (ROW_FRAME_BYTES,)),), 2)
    slot = os.memfd_create("test-slot", os.MFD_CLOEXEC)
    os.posix_fallocate(slot, 0, large.slot_bytes)
    sides.use(2, large, 6, slot)
    os.close(slot)
    sides.connect(11, workers=1)
    sides.core_hears()
    sides.heard_all.clear()
    sides.daemon.fill(slot_order(FillRows(11, 0, 0, 2, 0, 3, [(0, 1)]), 6))
    sides.daemon.flush()
    sides.gateway_reads()
    link = sides.gateway.hosts.links.by_number[11]
    sides.gateway.heard(link, OrderFilled(11, 0, 0, NO_WORK, [], ""), [memoryview(bytes(ROW_FRAME_BYTES))])
    sides.core_hears()
    assert [type(message) for message in sides.heard_all] == [ev.OrderFilled]
    sides.close()


def test_the_next_gateway_gets_no_order_of_the_last_one(sides) -> None:
    """The orders were collected for a gateway that has ended meanwhile."""
    sides.give(11, 0, 0)
    sides.end_gateway()
    sides.start_gateway()
    sides.daemon.flush()
    with pytest.raises(BlockingIOError):
        receive_message(sides.channel, TO_GATEWAY)


RARELY = st.sampled_from([False, False, False, True])


class Rounds(RuleBasedStateMachine):
    """Orders are given, withdrawn and filled while workers, links and the gateway die.

    ``open``: orders that are not over for the core. When one is, without its rows, another worker
    fills its row at once.
    """

    @initialize()
    def begin(self) -> None:
        self.sides = Sides()
        self.open: set[Key] = set()
        self.elsewhere: set[int] = set()
        self.filled: set[int] = set()
        self.settling: set[Key] = set()
        self.numbers = self.links = 0
        self.workers: set[tuple[int, int]] = set()
        self.dead: set[tuple[int, int]] = set()
        """Workers that their host knows to be dead: it drops orders for them."""
        self.in_hand: dict[Key, bool] = {}
        """Orders of worker hosts; whether they are withdrawn."""
        self.withdrawing: set[Key] = set()
        self.withdrawn: set[Key] = set()
        """Orders whose withdrawal the gateway has read."""
        self._connect()

    @precondition(lambda self: self.workers and self.numbers < ROWS - 8)
    @rule(data=st.data(), count=st.integers(1, 6))
    def give(self, data, count) -> None:
        link, worker = data.draw(st.sampled_from(sorted(self.workers)))
        for _ in range(count):
            self.numbers += 1
            self.open.add((link, worker, self.numbers))
            self.sides.give(link, worker, self.numbers)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def withdraw(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        self.withdrawing.add(key)
        self.sides.daemon.withdraw(WithdrawOrder(*key))

    @rule()
    def daemon_ends_its_round(self) -> None:
        self.sides.daemon.flush()

    @rule()
    def gateway_reads(self) -> None:
        self.sides.gateway_reads()
        self.withdrawn |= self.withdrawing
        self.withdrawing.clear()

    @rule()
    def gateway_ends_its_round(self) -> None:
        self.sides.end_round_of_gateway()

    @rule()
    def core_hears(self) -> None:
        self.sides.core_hears()
        self._take_heard()

    @rule(data=st.data(), drops=st.booleans())
    def host_answers(self, data, drops) -> None:
        """A withdrawn order may be dropped, or its rows may be on their way already."""
        self._hosts_read()
        if self.in_hand:
            key = data.draw(st.sampled_from(sorted(self.in_hand)))
            self.sides.answer(*key, has_rows=not (self.in_hand.pop(key) and drops))

    @rule(which=st.integers(0, 1), worker=st.sampled_from(WORKERS), dies=RARELY)
    def worker_dies(self, which, worker, dies) -> None:
        self._hosts_read()
        link = self.links - which
        known = self.sides.gateway.hosts.links.by_number.get(link)
        if known is not None and dies:
            self.sides.gateway.heard(known, WorkerDown(link, worker, "signal 9 (SIGKILL)"), [])
            self.dead.add((link, worker))
            self.in_hand = {key: late for key, late in self.in_hand.items() if key[:2] != (link, worker)}

    @rule(which=st.integers(0, 1), dies=RARELY)
    def link_ends(self, which, dies) -> None:
        link = self.links - which
        known = self.sides.gateway.hosts.links.by_number.get(link)
        if known is not None and dies:
            self.sides.gateway.hosts.end(known, "its connection ended")
            self._hosts_read()
            self.in_hand = {key: late for key, late in self.in_hand.items() if key[0] != link}

    @rule(dies=RARELY)
    def gateway_dies(self, dies) -> None:
        """The daemon starts another one, to which the same hosts connect under new numbers."""
        if not dies:
            return
        self.sides.end_gateway()
        self._take_heard()
        self._give_to_others(set(self.open))
        self.settling.clear()
        self.workers.clear()
        self.in_hand.clear()
        self.sides.start_gateway()
        self._connect()

    @invariant()
    def rows_are_those_of_the_worker_that_may_write_them(self) -> None:
        if hasattr(self, "sides"):
            assert all(self.sides.row(number) == OF_OTHERS for number in self.elsewhere)
            assert all(self.sides.row(number) == number for number in self.filled)

    @invariant()
    def no_order_comes_after_its_withdrawal(self) -> None:
        for key in getattr(self, "withdrawn", ()):
            order = self.sides.gateway.orders.find(*key)
            assert order is None or order.is_withdrawn

    def teardown(self) -> None:
        """Let everything arrive: no order is lost, and each withdrawn one is settled."""
        if not hasattr(self, "sides"):
            return
        while self.open or self.settling:
            left = len(self.open) + len(self.settling) + len(self.in_hand)
            self.sides.daemon.flush()
            self.sides.gateway_reads()
            self.sides.end_round_of_gateway()
            self._hosts_read()
            for key in sorted(self.in_hand):
                self.sides.answer(*key)
            self.in_hand.clear()
            self.sides.end_round_of_gateway()
            self.core_hears()
            self._hosts_read()
            assert len(self.open) + len(self.settling) + len(self.in_hand) < left or self.in_hand, "orders are lost"
        self.rows_are_those_of_the_worker_that_may_write_them()
        self.sides.close()

    def _connect(self) -> None:
        """Connect two worker hosts."""
        for _ in range(2):
            self.links += 1
            self.sides.connect(self.links, len(WORKERS))
        self.core_hears()

    def _hosts_read(self) -> None:
        """Let the hosts take their messages: a withdrawal comes after its order."""
        for messages in self.sides.at_hosts.values():
            for message in messages:
                if (message.link, message.worker) in self.dead:
                    continue
                if isinstance(message, FillRows):
                    self.in_hand[message.link, message.worker, message.order] = False
                elif isinstance(message, WithdrawOrder):
                    key = message.link, message.worker, message.order
                    assert key in self.in_hand, "no order came before its withdrawal"
                    self.in_hand[key] = True
            messages.clear()

    def _take_heard(self) -> None:
        """Take what the core hears: each order ends once."""
        for message in self.sides.heard_all:
            key = getattr(message, "link", 0), getattr(message, "worker", 0), getattr(message, "order", 0)
            match message:
                case ev.WorkerUp():
                    self.workers.add(key[:2])
                case ev.OrderFilled() if key in self.settling:
                    self.settling.remove(key)
                case ev.OrderFilled():
                    self.open.remove(key)
                    self.filled.add(key[2])
                case ev.OrderWithdrawn():
                    self._give_to_others({key} & self.open or {(-1, -1, -1)})
                    self.settling.add(key)
                case ev.WorkerDown() | ev.LinkClosed():
                    gone = {one for one in self.workers if one[0] == key[0]}
                    gone &= {key[:2]} if isinstance(message, ev.WorkerDown) else gone
                    self.workers -= gone
                    self.settling = {one for one in self.settling if one[:2] not in gone}
                    self._give_to_others({one for one in self.open if one[:2] in gone})
        self.sides.heard_all.clear()

    def _give_to_others(self, orders: set[Key]) -> None:
        """Have other workers fill the rows of orders that are over, at once."""
        assert orders <= self.open, "an order ended twice"
        self.open -= orders
        for _link, _worker, number in orders:
            self.elsewhere.add(number)
            self.sides.fill_elsewhere(number)


TestRounds = Rounds.TestCase


@pytest.mark.thorough
class TestRoundsLong(TestRounds):
    """The same with more examples."""

    settings = settings(max_examples=max(35, settings.default.max_examples))
