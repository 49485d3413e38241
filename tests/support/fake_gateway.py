"""A small gateway in the test, and worker hosts that connect to it. For tests of processes.

    gateway.admit() -> gateway.serve(stream) -> gateway.opened() -> gateway.fill(...) -> Rows

A test calls the gateway for each message; it can also send invalid ones.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import zmq

from batchd.config.load import load_config
from batchd.core.events import LinkClosed, OrderFilled, StreamOpened, StreamRefused, WorkerDown, WorkerUp
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.pool import messages
from batchd.runtime.keys import KeyDirectory
from batchd.runtime.tcp.router import RouterLimits, TcpRouter
from batchd.stream.rings import plan_rings
from batchd.stream.served import ServedStream, open_stream
from batchd.worker.messages import CHUNK_ROWS_MAX
from batchd_wire.codec import Message
from batchd_wire.fields import SlotLayout, place_fields
from batchd_wire.slot import RowChecksums
from batchd_wire.tcp import pieces
from support.daemon_process import clean_environment
from support.kernel import children_of, is_alive, workers_of
from support.launcher import start_program
from support.network import free_port
from support.waiting import PATIENCE_S, wait_until

M = TypeVar("M", bound=Message)
SAMPLE_TIMEOUT_S = 60.0
LIMITS = RouterLimits(1 << 21, 1024)


def served(config_file: Path, name: str = "photos", number: int = 1) -> ServedStream:
    """Open a stream as the daemon does; the caller closes it."""
    config = load_config(config_file, {}, {})
    storage = Storage()
    rings = plan_rings(config, storage)
    return open_stream(number, name, config, rings[name], storage, IndexCache(None), lambda _found: None)


def index_of(stream: ServedStream) -> bytes:
    """All bytes of a stream's index."""
    return os.pread(stream.index_descriptor, os.fstat(stream.index_descriptor).st_size, 0)


@dataclass
class Rows:
    """The rows of an order: its fields by name, each ``[count, *shape]``; None without frames.

    ``wrong``: rows that differ from their checksums.
    """

    answer: OrderFilled
    arrays: dict[str, np.ndarray] | None
    wrong: list[int]


class FakeGateway:
    """A gateway for one worker host at a time. ``restart`` makes it look like a new daemon."""

    def __init__(self, keys: KeyDirectory | None = None, port: int = 0) -> None:
        self._keys = keys
        self.port = port or free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.link = 0
        self.routing = b""
        self.workers: set[int] = set()
        self.frames: list[bytes] = []
        """The frames after the last message."""
        self._orders = 0
        self._layouts: dict[int, SlotLayout] = {}
        self._indexes: dict[str, bytes] = {}
        self._queue: list[tuple[Message, list[bytes]]] = []
        self._zeromq: TcpRouter | None = None
        self.open()

    def open(self) -> None:
        """Listen."""
        self._zeromq = TcpRouter(self._keys.workers if self._keys is not None else None, LIMITS)
        self._zeromq.bind(self.address, "daemon.worker_address")

    def close(self) -> None:
        """End every connection."""
        if self._zeromq is not None:
            list(self._zeromq.events())
            self._zeromq.close()
            self._zeromq = None
        self.workers.clear()
        self._queue.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # --- messages ---------------------------------------------------------------------------------

    def send(self, message: Message, *frames: bytes) -> None:
        """Send to the worker host that sent the last message."""
        assert self._zeromq is not None
        self._zeromq.socket.send_multipart([self.routing, message.encode(), *frames])

    def expect(self, kind: type[M], timeout_s: float = PATIENCE_S) -> M:
        """Return the next message of a kind; others stay queued, and workers are recorded."""
        deadline = time.monotonic() + timeout_s
        passed = 0
        while True:
            for place in range(passed, len(self._queue)):
                message, frames = self._queue[place]
                if isinstance(message, kind):
                    del self._queue[place]
                    self.frames = frames
                    return message
            passed = len(self._queue)
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {kind.__name__} within {timeout_s:g} s, but {[one for one, _ in self._queue]}"
            self._pump(left_s)

    def hears(self, kind: type[Message], seconds: float) -> bool:
        """Whether a message of this kind arrives within this time. It stays in the queue."""
        deadline = time.monotonic() + seconds
        while not any(isinstance(one, kind) for one, _ in self._queue) and time.monotonic() < deadline:
            self._pump(deadline - time.monotonic())
        return any(isinstance(one, kind) for one, _ in self._queue)

    def pump(self, seconds: float) -> None:
        """Read what arrives, and answer questions about keys."""
        self._pump(seconds)

    def _pump(self, seconds: float) -> None:
        assert self._zeromq is not None
        poller = zmq.Poller()
        for one in self._zeromq.sockets:
            poller.register(one, zmq.POLLIN)
        ready = dict(poller.poll(max(0.0, min(seconds, 0.1)) * 1000))
        list(self._zeromq.events())
        self._zeromq.answer_questions(ready)
        while self._zeromq.socket.poll(0):
            routing, first, *frames = self._zeromq.socket.recv_multipart()
            self.routing = routing
            message = messages.TO_GATEWAY_FROM_HOST.decode(first)
            if isinstance(message, WorkerUp):
                self.workers.add(message.worker)
            elif isinstance(message, WorkerDown):
                self.workers.discard(message.worker)
            self._queue.append((message, frames))

    # --- a gateway's actions ----------------------------------------------------------------------

    def admit(self, sample_timeout_s: float = SAMPLE_TIMEOUT_S) -> messages.Register:
        """Admit the next worker host."""
        register = self.expect(messages.Register)
        self.link += 1
        self.workers.clear()
        self._queue.clear()
        self.send(messages.Admitted(self.link, sample_timeout_s))
        return register

    def serve(self, stream: ServedStream, quarantined: tuple[int, ...] = ()) -> None:
        """Announce a stream."""
        index = index_of(stream)
        digest = sha256(index).hexdigest()
        self._indexes[digest] = index
        rows = min(stream.message.batch_size, CHUNK_ROWS_MAX)
        self._layouts[stream.number] = place_fields(stream.layout.fields, rows)
        self.send(messages.HostServe(self.link, stream.message.encode(), digest, len(index), list(quarantined)))

    def send_parts(self, most: int = 1 << 30) -> int:
        """Send at most this many requested parts of an index, until one index is opened."""
        deadline = time.monotonic() + PATIENCE_S
        for sent in range(most):
            while not self.hears(messages.AskIndex, 0.1):
                assert time.monotonic() < deadline, "the worker host neither asks for a part nor opens the index"
                if any(isinstance(one, StreamOpened | StreamRefused) for one, _ in self._queue):
                    return sent
            asked = self.expect(messages.AskIndex)
            part = self._indexes[asked.digest][asked.offset : asked.offset + messages.INDEX_PART_BYTES]
            self.send(messages.IndexPart(self.link, asked.digest, asked.offset), part)
        return most

    def opened(self, stream: ServedStream) -> None:
        """Announce a stream, send its index on request, and wait until it is open."""
        self.serve(stream)
        self.send_parts()
        assert self.expect(StreamOpened).stream == stream.number

    def a_worker(self) -> int:
        """A worker that takes orders."""
        while not self.workers:
            self._pump(0.1)
        return min(self.workers)

    def order(
        self, stream: ServedStream, epoch: int, step: int, first: int, count: int, worker: int = 0
    ) -> messages.FillRows:
        """Order rows from this worker, or from any worker."""
        return self.order_runs(stream, epoch, step, [(first, count)], worker)

    def order_runs(
        self, stream: ServedStream, epoch: int, step: int, runs: list[tuple[int, int]], worker: int = 0
    ) -> messages.FillRows:
        """Order rows with gaps."""
        self._orders += 1
        fill = messages.FillRows(self.link, worker or self.a_worker(), self._orders, stream.number, epoch, step, runs)
        self.send(fill)
        return fill

    def rows(self, fill: messages.FillRows) -> Rows:
        """Return the answer to an order; no other answer may precede it."""
        answer = self.expect(OrderFilled)
        assert (answer.link, answer.worker, answer.order) == (self.link, fill.worker, fill.order)
        if not self.frames:
            return Rows(answer, None, [])
        return self._rows(answer, self._layouts[fill.stream], sum(count for _first, count in fill.runs))

    def fill(self, *order: Any, **more: Any) -> Rows:
        """Order rows, and wait for them; from another worker if that one ends before."""
        while True:
            fill = self.order(*order, **more)
            while fill.worker in self.workers and not self.hears(OrderFilled, 0.1):
                pass
            if self.hears(OrderFilled, 0.0):
                return self.rows(fill)

    def end_link(self, reason: str = "the test ends it", *, is_final: bool = False) -> None:
        """Close the link."""
        self.send(LinkClosed(self.link, reason, is_final))

    def _rows(self, answer: OrderFilled, layout: SlotLayout, count: int) -> Rows:
        spans = list(pieces(layout, 0, count, messages.ROW_FRAME_BYTES))
        assert [len(frame) for frame in self.frames] == [end - start for start, end in spans]
        page = bytearray(layout.slot_bytes)
        for (start, end), frame in zip(spans, self.frames, strict=True):
            page[start:end] = frame
        arrays = {
            field.name: np.frombuffer(page, field.dtype, count * prod(field.shape), field.offset).reshape(
                count, *field.shape
            )
            for field in layout.sample_fields
        }
        return Rows(answer, arrays, RowChecksums(layout).wrong_rows(memoryview(page), 0, count))


class WorkerHostProcess:
    """A ``batchd worker`` that connects to a gateway. ``close`` ends it and checks its log."""

    def __init__(
        self,
        folder: Path,
        address: str,
        *options: str,
        environment: dict[str, str] | None = None,
        through: Sequence[str] = (),
        is_new: bool = False,
    ) -> None:
        """``through``: a command that runs it elsewhere; ``is_new``: see ``start_program``."""
        self.log_file = folder / f"host-{time.monotonic_ns()}.log"
        self.index_folder = folder / "indexes"
        with self.log_file.open("ab") as log:
            self.process = start_program(
                ["batchd", "worker", address, "--index-dir", str(self.index_folder), *options, "--log-level", "debug"],
                environment={**clean_environment(), **(environment or {})},
                folder=Path("/"),
                stderr=log.fileno(),
                through=through,
                is_new=is_new or bool(environment),
            )

    @property
    def pid(self) -> int:
        """The process id of the worker host."""
        return self.process.pid

    @property
    def log(self) -> str:
        """Its whole output on standard error."""
        return self.log_file.read_text()

    def worker_pids(self) -> set[int]:
        """The processes of its workers."""
        return workers_of(self.pid)

    def line(self) -> str:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, gateway: FakeGateway | None = None) -> int:
        """Wait for its end while the gateway reads its messages; return its exit status."""
        while gateway is not None and self.process.poll() is None:
            gateway.pump(0.05)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it, and check that no process of it is left."""
        offspring = children_of(self.pid) | self.worker_pids()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        wait_until(lambda: not any(map(is_alive, offspring)), "the workers have ended")
        print(self.log)  # noqa: T201  pytest shows it where the test fails
        assert "Traceback" not in self.log, "a worker host or a worker raised an unexpected error; see its log"
