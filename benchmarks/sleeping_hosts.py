"""Worker hosts that sleep instead of decoding, many in one process: real links, rows of zeros.

Each has a connection of its own and one worker, which fills its orders one after the other. It
answers an order when a worker of its speed would have, counted from when it had the one before.
Orders take as unequal times as in ``pool_simulation``: their number of rows follows from that.
"""

import heapq
import platform
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import Random

import zmq
from pool_simulation import JITTER

from batchd import __version__
from batchd.core.actions import WithdrawOrder
from batchd.core.events import OrderFilled, StreamOpened, WorkerUp
from batchd.core.rows import rows_of
from batchd.core.work import NO_WORK
from batchd.data.pipeline.options import CONTENT_VERSION
from batchd.pool.messages import (
    LINK_VERSION,
    ROW_FRAME_BYTES,
    TO_HOST,
    Admitted,
    FillRows,
    HostServe,
    Register,
    messages_in,
)
from batchd.worker.messages import CHUNK_ROWS_MAX, ServeStream
from batchd_wire.codec import Message, Vocabulary
from batchd_wire.fields import SlotLayout, layout_from_wire, place_fields
from batchd_wire.tcp import SOCKET_OPTIONS, pieces

WORKER = 1
SERVED = Vocabulary(ServeStream)
AT_ONCE = 8
"""Hosts that connect together: the gateway's guard lets only so many handshakes wait."""
CONNECT_PAUSE_S = 0.05


@dataclass(slots=True, eq=False)
class _Host:
    """One link. ``orders`` wait for its worker; ``done_s``: when the worker had the last one."""

    dealer: "zmq.Socket[bytes]"
    link: int = 0
    layouts: dict[int, SlotLayout] = field(default_factory=dict)
    orders: deque[FillRows] = field(default_factory=deque)
    withdrawn: set[int] = field(default_factory=set)
    done_s: float = 0.0
    busy_s: float = 0.0
    """Of its present order."""

    def send(self, message: Message, *frames: bytes) -> None:
        """Send to the gateway."""
        self.dealer.send_multipart([message.encode(), *frames])


class SleepingHosts:
    """See the module. ``image_s``: how long an image takes."""

    def __init__(self, endpoint: str, hosts: int, image_s: float) -> None:
        self._image_s = image_s
        self._random = Random(0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._hosts: dict[zmq.Socket[bytes], _Host] = {}
        self._due: list[tuple[float, int, _Host]] = []
        self._numbers = 0
        for number in range(hosts):
            dealer = self._context.socket(zmq.DEALER)
            for name, value in SOCKET_OPTIONS.items():
                dealer.setsockopt(getattr(zmq, name), value)
            dealer.sndhwm = dealer.rcvhwm = 0
            dealer.connect(endpoint)
            self._poller.register(dealer, zmq.POLLIN)
            self._hosts[dealer] = _Host(dealer)
            about = f"host-{number}", platform.node(), 1, 1, platform.machine()
            self._hosts[dealer].send(Register(LINK_VERSION, __version__, CONTENT_VERSION, *about))
            if number % AT_ONCE == AT_ONCE - 1:
                time.sleep(CONNECT_PAUSE_S)

    def run_for(self, seconds: float) -> None:
        """Answer orders for so long."""
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            wake_s = min(end_s, self._due[0][0]) if self._due else end_s
            for dealer, _event in self._poller.poll(max(0.0, wake_s - now_s) * 1e3):
                self._read(self._hosts[dealer])
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                self._answer(heapq.heappop(self._due)[2])

    def close(self) -> None:
        """End all links."""
        self._context.destroy(linger=0)

    def _read(self, host: _Host) -> None:
        while host.dealer.poll(0):
            for message in messages_in(TO_HOST.decode(host.dealer.recv_multipart()[0]), TO_HOST):
                self._take(host, message)

    def _take(self, host: _Host, message: Message) -> None:
        match message:
            case Admitted():
                host.link = message.link
                host.send(WorkerUp(host.link, WORKER, "none"))
            case HostServe():
                served = SERVED.decode(message.serve)
                assert isinstance(served, ServeStream)
                layout = layout_from_wire(served.layout)
                host.layouts[served.stream] = place_fields(layout.fields, min(served.batch_size, CHUNK_ROWS_MAX))
                host.send(StreamOpened(host.link, served.stream))
            case FillRows():
                host.orders.append(message)
                if len(host.orders) == 1:
                    self._begin(host)
            case WithdrawOrder():
                host.withdrawn.add(message.order)

    def _begin(self, host: _Host) -> None:
        image_s = self._image_s * self._random.uniform(1 - JITTER, 1 + JITTER)
        host.busy_s = len(rows_of(host.orders[0].runs)) * image_s
        host.done_s = max(host.done_s, time.monotonic() - self._image_s) + host.busy_s
        self._numbers += 1
        heapq.heappush(self._due, (host.done_s, self._numbers, host))

    def _answer(self, host: _Host) -> None:
        order = host.orders.popleft()
        count = len(rows_of(order.runs))
        busy_us = round(1e6 * host.busy_s)
        work = NO_WORK._replace(busy_us=busy_us, cpu_us=busy_us, parts_us=[busy_us], usual_us=busy_us // count)
        rows: list[bytes] = []
        if order.order not in host.withdrawn:
            rows = [bytes(end - start) for start, end in pieces(host.layouts[order.stream], 0, count, ROW_FRAME_BYTES)]
        host.withdrawn.discard(order.order)
        host.send(OrderFilled(host.link, WORKER, order.order, work, [], ""), *rows)
        if host.orders:
            self._begin(host)


def play(pipe: Connection, endpoint: str, hosts: int, image_s: float) -> None:
    """A player: worker hosts until the other side is gone."""
    sleeping = SleepingHosts(endpoint, hosts, image_s)
    while not pipe.poll():
        sleeping.run_for(0.5)
    sleeping.close()
