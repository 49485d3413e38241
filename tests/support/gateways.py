"""The real gateway process, driven as by the daemon, and worker hosts that send a test's messages.

For tests of processes.

    with GatewayProcess() as gateway:        listens on gateway.port, without keys
        host = gateway.host()                a worker host: a DEALER; ``register`` makes it a link
        gateway.fill(...), host.answer(...)  an order, and rows for it
"""

import os
import select
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import zmq

from batchd.core.events import LinkBegun, OrderFilled, WorkerUp
from batchd.core.work import NO_WORK
from batchd.data.pipeline.options import CONTENT_VERSION
from batchd.pool import messages
from batchd.runtime.child_log import ChildLogged
from batchd.runtime.children import start_linked
from batchd.runtime.failpoints import VARIABLE
from batchd.worker.messages import SampleRecipe, ServeStream, UseSlot
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import Message
from batchd_wire.fields import CHECKSUM, Field, SlotLayout, Varying, place_fields, sizes_field
from batchd_wire.keys import ConnectionKey
from batchd_wire.tcp import pieces
from support.waiting import PATIENCE_S

IMAGE = Field("image", "uint8", (300, 400, 3))
TEXT = Field("text", "uint8", (40,), Varying("ragged", (0,)))
SIZES = sizes_field(TEXT)
assert SIZES is not None
LAYOUT = place_fields((IMAGE, Field("label", "int64", ()), TEXT, SIZES, CHECKSUM), 16)
"""A row of 360 kB: three of them take more than one frame."""
RULES = messages.PoolRules(sample_timeout_s=30.0, links_max=8, links_per_key=4)
RECIPE = SampleRecipe(7, {"kind": "files"}, [("image", "bytes")], [], 0, 1 << 20, [], [], [], [], [])

M = TypeVar("M", bound=Message)


def serve_message(stream: int = 1, name: str = "photos", layout: SlotLayout = LAYOUT) -> ServeStream:
    """A stream, as the daemon announces it to a gateway."""
    return ServeStream(stream, name, RECIPE, 1000, 16, True, "substitute", (1, 2, 3), layout.to_wire(), "off", {})


def slot_order(fill: messages.FillRows, slot: int = 5, *, is_proof: bool = False) -> messages.SlotOrder:
    """An order, as the daemon gives it to a gateway."""
    return messages.SlotOrder(fill.encode(), slot, is_proof)


def index_descriptor(content: bytes) -> int:
    """Memory with an index, which the caller closes."""
    descriptor = os.memfd_create("test-index", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    return descriptor


def random_rows(count: int, seed: int = 0, layout: SlotLayout = LAYOUT) -> bytearray:
    """A whole slot whose rows 0 to ``count`` are random, with valid sizes."""
    page = bytearray(np.random.default_rng(seed).bytes(layout.slot_bytes))
    sizes = next(field for field in layout.fields if field.name == "text_length")
    np.frombuffer(page, np.int32, count, sizes.offset)[:] = np.arange(count) % 41
    return page


def frames_of(page: bytearray, first: int, count: int, layout: SlotLayout = LAYOUT) -> list[bytes]:
    """Rows of a slot as frames of a message."""
    return [bytes(page[start:end]) for start, end in pieces(layout, first, count, messages.ROW_FRAME_BYTES)]


class Slot:
    """Shared memory of one slot."""

    def __init__(self, layout: SlotLayout = LAYOUT) -> None:
        self.layout = layout
        self.descriptor = os.memfd_create("test-slot", os.MFD_CLOEXEC)
        os.posix_fallocate(self.descriptor, 0, layout.slot_bytes)

    def read(self) -> bytes:
        """All bytes of the slot."""
        return os.pread(self.descriptor, self.layout.slot_bytes, 0)

    def rows(self, first: int, count: int) -> list[bytes]:
        """Some rows, cut into frames."""
        return frames_of(bytearray(self.read()), first, count, self.layout)

    def put(self, page: bytes) -> None:
        """Replace all bytes of the slot."""
        os.pwrite(self.descriptor, page, 0)


class WorkerHost:
    """A DEALER that sends the messages of a test."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", port: int, key: ConnectionKey | None, source: str
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        if key is not None:
            self.socket.curve_serverkey = key.daemon.encode()
            self.socket.curve_publickey, self.socket.curve_secretkey = key.public.encode(), key.secret.encode()
        self.socket.connect(f"tcp://{source}:0;127.0.0.1:{port}")
        self.link = 0
        self.together: list[int] = []
        """The number of messages in each ``Together`` so far."""
        self._heard: deque[tuple[Message, list[bytes]]] = deque()
        self._ordered: set[tuple[int, int]] = set()
        """Worker and number of each order so far."""

    def send(self, message: Message, *frames: bytes) -> None:
        """Send a message."""
        self.socket.send_multipart([message.encode(), *frames])

    def hear_all(self) -> tuple[Message, list[bytes]]:
        """Wait for the next message, with its frames."""
        if not self._heard:
            self._receive()
        return self._heard.popleft()

    def _receive(self) -> None:
        assert self.socket.poll(PATIENCE_S * 1000), "the gateway sends nothing"
        head, *frames = self.socket.recv_multipart()
        received = messages.TO_HOST.decode(head)
        if isinstance(received, messages.Together):
            self.together.append(len(received.messages))
        for message in messages.messages_in(received, messages.TO_HOST):
            self._heard.append((message, frames))
            if isinstance(message, messages.FillRows):
                self._ordered.add((message.worker, message.order))

    def hear(self, kind: type[M]) -> M:
        """Wait for the next message, which is of this kind."""
        message, _frames = self.hear_all()
        assert isinstance(message, kind), message
        return message

    def asks_to_register(self, **differently: Any) -> Self:
        """Send a registration."""
        registered = {
            "version": messages.LINK_VERSION,
            "batchd": "1.2.3",
            "content_version": CONTENT_VERSION,
            "name": "pod-1",
            "host": "node-1",
            "pid": 77,
            "workers": 4,
            "machine": "x86_64",
        }
        self.send(messages.Register(**{**registered, **differently}))
        return self

    def register(self, **differently: Any) -> Message:
        """Register, and return the answer."""
        self.asks_to_register(**differently)
        answer, _frames = self.hear_all()
        if isinstance(answer, messages.Admitted):
            self.link = answer.link
        return answer

    def answer(self, order: int, *frames: bytes, worker: int = 0, **differently: Any) -> None:
        """Wait for an order, and report that it is finished."""
        while (worker, order) not in self._ordered:
            self._receive()
        self.claim(order, *frames, worker=worker, **differently)

    def claim(self, order: int, *frames: bytes, worker: int = 0, **differently: Any) -> None:
        """Report that an order is finished, even if the host has no such order."""
        said = {"work": NO_WORK, "bad": [], "hopeless": "", **differently}
        self.send(OrderFilled(self.link, worker, order, **said), *frames)

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


class GatewayProcess:
    """See the module docstring. It has one stream, number 1, and one slot, number 5."""

    def __init__(
        self, keys_dir: Path | None = None, rules: messages.PoolRules | None = RULES, faults: str = ""
    ) -> None:
        self._keys_dir = keys_dir
        self._environment = {VARIABLE: faults or None}
        self._rules = rules
        self._stack = ExitStack()
        self.logged: list[ChildLogged] = []
        self.traffic: list[messages.LinkTraffic] = []
        self.together: list[int] = []
        """The number of messages in each ``Together`` so far."""
        self._heard: deque[Message] = deque()

    def __enter__(self) -> Self:
        where = "tcp://127.0.0.1:0", "daemon.worker_address", str(self._keys_dir) if self._keys_dir else ""
        self.child, self.channel = start_linked("batchd.pool.gateway", *where, environment=self._environment)
        self._stack.callback(self.child.end)
        self._stack.enter_context(self.channel)
        self.channel.settimeout(PATIENCE_S)
        self.port = self.hear(messages.GatewayReady).port
        if self._rules is not None:
            self.send(self._rules)
        self._context = self._stack.enter_context(zmq.Context())
        self._stack.callback(self._context.destroy, linger=0)
        self._context.socket(zmq.DEALER).close()  # the first socket starts the context's threads
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def send(self, message: Message, *descriptors: int) -> None:
        """Send a message to the gateway, as the daemon does."""
        send_message(self.channel, message, descriptors)

    def hear_any(self) -> Message:
        """Wait for the next message that is no log line and no traffic."""
        while True:
            message = self._next()
            if isinstance(message, ChildLogged):
                self.logged.append(message)
            elif isinstance(message, messages.LinkTraffic):
                self.traffic.append(message)
            else:
                return message

    def _next(self) -> Message:
        if not self._heard:
            received, _descriptors = receive_message(self.channel, messages.TO_DAEMON_FROM_GATEWAY)
            if isinstance(received, messages.Together):
                self.together.append(len(received.messages))
            self._heard += messages.messages_in(received, messages.TO_DAEMON_FROM_GATEWAY)
        return self._heard.popleft()

    def hear(self, kind: type[M]) -> M:
        """Wait for the next message, which is of this kind."""
        message = self.hear_any()
        assert isinstance(message, kind), message
        return message

    def hear_what_there_is(self) -> None:
        """Drop its messages so far: it waits for a daemon that does not read."""
        while select.select([self.channel], [], [], 0)[0]:
            self._next()
        self._heard.clear()

    def hear_of(self, link: int, kind: type[M]) -> M:
        """Wait for a message of this kind about a link; drop earlier messages."""
        while not isinstance(message := self.hear_any(), kind) or getattr(message, "link", 0) != link:
            pass
        return message

    def hear_log(self, event: str) -> ChildLogged:
        """Wait for a line of the log; no other message may precede it."""
        while not (found := [line for line in self.logged if line.event == event]):
            message = self._next()
            assert isinstance(message, ChildLogged | messages.LinkTraffic), message
            if isinstance(message, ChildLogged):
                self.logged.append(message)
        return found[0]

    def hear_traffic(self) -> messages.LinkTraffic:
        """Wait for traffic that was not reported yet."""
        while not self.traffic:
            message = self._next()
            assert isinstance(message, messages.LinkTraffic | ChildLogged), message
            if isinstance(message, messages.LinkTraffic):
                self.traffic.append(message)
        return self.traffic.pop(0)

    def serve(self, message: ServeStream, index: bytes = b"an index") -> None:
        """Announce a stream."""
        descriptor = index_descriptor(index)
        self.send(message, descriptor)
        os.close(descriptor)

    def use(self, slot: int, memory: Slot) -> None:
        """Send a slot."""
        self.send(UseSlot(slot, memory.layout.slot_bytes), memory.descriptor)

    def host(self, key: ConnectionKey | None = None, source: str = "127.0.0.1") -> WorkerHost:
        """Create a worker host at the address ``source`` that has sent nothing."""
        host = WorkerHost(self._context, self.port, key, source)
        self._stack.callback(host.close)
        return host

    def linked(self, key: ConnectionKey | None = None, workers: int = 1, source: str = "127.0.0.1") -> WorkerHost:
        """Create a worker host that has registered, with workers 0 and so on."""
        host = self.host(key, source)
        answer = host.register()
        assert isinstance(answer, messages.Admitted), answer
        self.hear_of(host.link, LinkBegun)
        for worker in range(workers):
            host.send(WorkerUp(host.link, worker, "libjpeg 3"))
            assert self.hear_of(host.link, WorkerUp) == WorkerUp(host.link, worker, "libjpeg 3")
        return host

    def fill(self, host: WorkerHost, order: int, first: int, count: int, slot: int = 5, worker: int = 0) -> None:
        """Send an order."""
        self.send(slot_order(messages.FillRows(host.link, worker, order, 1, 0, 3, [(first, count)]), slot))

    def fill_together(self, *fills: messages.FillRows) -> None:
        """Send orders as the daemon sends those of one round of its loop."""
        self.send(messages.Together([slot_order(fill).encode() for fill in fills]))

    def prove(self, host: WorkerHost, order: int, first: int, count: int, slot: int = 5) -> None:
        """Send an order whose rows are compared."""
        self.send(slot_order(messages.FillRows(host.link, 0, order, 1, 0, 3, [(first, count)]), slot, is_proof=True))

    def has_ended(self) -> bool:
        """Whether the channel ends with the next read."""
        try:
            while True:
                self._next()
        except ChannelClosed:
            return self.child.has_ended(PATIENCE_S)


def filled_slot() -> Iterator[Slot]:
    """Make slot 5, filled with other content; for a fixture."""
    slot = Slot()
    slot.put(random_rows(16, seed=99))
    yield slot
    os.close(slot.descriptor)


def serving_gateway(slot: Slot) -> Iterator[GatewayProcess]:
    """Start a gateway without keys that has stream 1 and slot 5; for a fixture."""
    with GatewayProcess() as gateway:
        gateway.serve(serve_message())
        gateway.use(5, slot)
        yield gateway
