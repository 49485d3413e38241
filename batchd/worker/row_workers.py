"""Worker processes of a process that replays: the daemon's own, without a daemon.

    fork server --fork--> workers, one for each CPU --RowMade, ChunksFilled--> here
                                    |
                                    +--rows--> one slot, mapped here

A worker that dies names its sample in its note, as in the daemon: the rows are ordered again, and a
sample that killed two workers counts as bad. Workers that make many rows at once name none, so
their rows are ordered one by one.

Invariant: no process writes to the slot when ``fill`` returns, and none is left after ``close``.
"""

import mmap
import os
import select
import socket
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import NamedTuple, Self

from batchd.errors import BatchdError
from batchd.runtime.children import Grandchild, Linked, describe, start_linked
from batchd.worker import messages as orders
from batchd_wire.channel import SEND_BUFFER_BYTES, ChannelClosed, receive_message, send_message
from batchd_wire.position import Position

CHUNK_ROWS = 8
"""Rows of one order: few enough for all workers to end at about the same time."""
DEATHS_MAX = 2
"""Deaths of workers during one sample; then it is bad."""
DEATHS_WITHOUT_A_SAMPLE_MAX = 5
TICK_S = 0.2
SLOT = 0


class MadeRow(NamedTuple):
    """How a row was made; of a packed row, also its documents, in order."""

    row: orders.RowMade
    documents: list[orders.DocumentMade]


@dataclass(slots=True, eq=False)
class _Worker:
    process: Grandchild
    channel: socket.socket
    note: mmap.mmap
    order: int | None = None
    rows: range = range(0)
    told: list[MadeRow] = field(default_factory=list)
    """Rows of the present order."""
    documents: list[orders.DocumentMade] = field(default_factory=list)
    """Documents of the row that the worker reports next."""
    note_since: tuple[bytes, float] = (b"", 0.0)

    def in_hand(self) -> tuple[int, int] | None:
        """The row and the sample that it works on; None between samples."""
        _order, row_after, sample = orders.NOTE.unpack_from(self.note)
        return (row_after - 1, sample) if row_after else None

    def busy_for_s(self, now: float) -> float:
        """Seconds since it began its present sample."""
        noted = bytes(self.note[: orders.NOTE.size])
        if noted != self.note_since[0]:
            self.note_since = noted, now
        return now - self.note_since[1] if self.in_hand() is not None else 0.0


class RowWorkers:
    """Workers that make rows of one stream. A context manager. Raises ``OSError``."""

    def __init__(self, workers: int, sample_timeout_s: float) -> None:
        """Start the fork server, which imports what workers need meanwhile."""
        self.decoders = ""
        """Names and versions of the decoders, once rows were made."""
        self._limit = workers
        self._sample_timeout_s = sample_timeout_s
        self._forks: Linked = start_linked("batchd.worker")
        self._forks.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._workers: list[_Worker] = []
        self._numbers, self._orders = count(1), count(1)
        self._deaths: Counter[int] = Counter()
        self._deaths_without = 0
        self._quarantined: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._end_workers()
        self._forks.channel.close()
        self._forks.child.end()

    def _end_workers(self) -> None:
        while self._workers:
            self._end(self._workers.pop())

    def _end(self, worker: _Worker) -> int | None:
        """Kill a worker, unless it is dead, and forget it; its status, or None if it is unknown."""
        worker.channel.close()
        worker.process.kill()
        worker.process.has_ended(None)
        status = worker.process.status()
        with suppress(ChannelClosed):
            send_message(self._forks.channel, orders.Reap(worker.process.pid))
        worker.process.close()
        worker.note.close()
        return status

    def serve(self, message: orders.ServeStream, index_descriptor: int, slot_descriptor: int, slot_bytes: int) -> None:
        """Name the stream and the slot; the descriptors stay the caller's."""
        self._message = message
        self._descriptors = index_descriptor, slot_descriptor
        self._slot_bytes = slot_bytes

    def fill(self, position: Position, rows: range, planned: Sequence[int]) -> list[MadeRow]:
        """Make these rows; ``planned``: the samples of all of them.

        Raises ``BatchdError`` with the workers' reason if a row cannot be made.
        """
        samples = dict(zip(rows, planned, strict=True))
        waiting = deque(rows[at : at + CHUNK_ROWS] for at in range(0, len(rows), CHUNK_ROWS))
        made: list[MadeRow] = []
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self._end_workers)  # no order of a failed batch is left
            while waiting or any(worker.order is not None for worker in self._workers):
                while len(self._workers) < min(self._limit, len(waiting) + len(self._workers)):
                    self._workers.append(self._fork())
                for worker in self._workers:
                    if worker.order is None and waiting:
                        self._order(worker, position, waiting.popleft())
                for worker in self._ready():
                    try:
                        made += self._receive(worker)
                    except ChannelClosed:
                        waiting.extend(self._bury(worker, samples))
                now = monotonic()
                for worker in self._workers:
                    if worker.busy_for_s(now) > self._sample_timeout_s:
                        worker.process.kill()
            where_it_fails.pop_all()
        return sorted(made, key=lambda one: one.row.row)

    def _fork(self) -> _Worker:
        with ExitStack() as until_done, ExitStack() as where_it_fails:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            where_it_fails.callback(ours.close)
            until_done.callback(theirs.close)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            note = os.memfd_create("batchd-note", os.MFD_CLOEXEC)
            until_done.callback(os.close, note)
            os.posix_fallocate(note, 0, orders.NOTE_BYTES)
            memory = mmap.mmap(note, orders.NOTE_BYTES)
            where_it_fails.callback(memory.close)
            try:
                send_message(self._forks.channel, orders.Fork(next(self._numbers)), [theirs.fileno(), note])
                answer, descriptors = receive_message(self._forks.channel, orders.TO_DAEMON_FROM_FORKSERVER)
            except ChannelClosed:
                raise BatchdError("the process that starts workers has ended; its output is above") from None
            if isinstance(answer, orders.NotForked):
                raise BatchdError(f"no worker can be started: {answer.reason}")
            assert isinstance(answer, orders.Forked)
            worker = _Worker(Grandchild(answer.pid, descriptors[0]), ours, memory)
            with suppress(ChannelClosed):  # its death is seen where it is read
                send_message(ours, self._message, [self._descriptors[0]])
                send_message(ours, orders.UseSlot(SLOT, self._slot_bytes), [self._descriptors[1]])
                if self._quarantined:
                    send_message(ours, orders.Quarantine(self._message.stream, self._quarantined))
            where_it_fails.pop_all()
        return worker

    def _order(self, worker: _Worker, position: Position, rows: range) -> None:
        worker.order, worker.rows, worker.told, worker.documents = next(self._orders), rows, [], []
        chunk = orders.Chunk(worker.order, SLOT, *position, [(rows.start, len(rows))], [])
        with suppress(ChannelClosed):  # its death is seen where it is read
            send_message(worker.channel, orders.FillChunks(self._message.stream, [chunk], is_packed=False))

    def _ready(self) -> list[_Worker]:
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.channel, select.POLLIN)
        ready = {descriptor for descriptor, _event in poll.poll(TICK_S * 1000)}
        return [worker for worker in self._workers if worker.channel.fileno() in ready]

    def _receive(self, worker: _Worker) -> list[MadeRow]:
        """Read a message; the rows of an order that is done. Raises ``ChannelClosed``."""
        message, _descriptors = receive_message(worker.channel, orders.TO_REPLAY_FROM_WORKER)
        if isinstance(message, orders.Ready):
            self.decoders = message.decoders
        elif isinstance(message, orders.DocumentMade):
            worker.documents.append(message)
        elif isinstance(message, orders.RowMade):
            worker.told.append(MadeRow(message, worker.documents))
            worker.documents = []
        elif isinstance(message, orders.ChunksFilled) and message.hopeless:
            raise BatchdError(f"stream {self._message.name!r} stopped at this batch: {message.hopeless}")
        elif isinstance(message, orders.ChunksFilled) and worker.order in message.orders:
            worker.order = None
            return worker.told
        return []

    def _bury(self, worker: _Worker, samples: dict[int, int]) -> list[range]:
        """Count the death of a worker; the parts of its order that have to be made again."""
        self._workers.remove(worker)
        blamed, rows = worker.in_hand(), worker.rows
        status = self._end(worker)
        if worker.order is None:
            return []
        if blamed is None:
            self._deaths_without += 1
            if self._deaths_without >= DEATHS_WITHOUT_A_SAMPLE_MAX:
                how = describe(status) if status is not None else "an unknown status"
                raise BatchdError(f"the workers end before they make a sample ({how}); their output is above")
            return [rows]
        row, sample = blamed
        if row >= orders.MANY_ROWS:
            if len(rows) > 1:
                return [range(one, one + 1) for one in rows]
            sample = samples[rows.start]
        self._deaths[sample] += 1
        if self._deaths[sample] == DEATHS_MAX:
            self._quarantined.append(sample)
            for other in self._workers:
                with suppress(ChannelClosed):
                    send_message(other.channel, orders.Quarantine(self._message.stream, [sample]))
        return [rows]
