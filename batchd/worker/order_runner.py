"""Rows of a process that replays: by the daemon's worker processes, without a daemon.

    worker.supervisor: workers, one for each CPU --RowMade, ChunkDone, WorkerGone--> here
                          |
                          +--rows--> one slot, mapped here

A worker that dies names its sample in its note, as in the daemon: the rows are ordered again, and a
sample that killed two workers counts as bad. Workers that make many rows at once name none, so
their rows are ordered one by one.

Invariant: no process writes to the slot when ``fill`` returns, and none is left after ``close``.
"""

import logging
import select
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import NamedTuple, Self

import structlog

from batchd.core.events import ChunkDone, Event, Note, WorkerGone, WorkerReady
from batchd.errors import BatchdError
from batchd.runtime.children import start_linked
from batchd.runtime.descriptors import Selector
from batchd.worker import messages as orders
from batchd.worker.supervisor import WorkerProcesses
from batchd_wire.position import Position

CHUNK_ROWS = 8
"""Rows of one order: few enough for all workers to end at about the same time."""
DEATHS_MAX = 2
"""Deaths of workers during one sample; then it is bad."""
DEATHS_WITHOUT_A_SAMPLE_MAX = 5
TICK_S = 0.2
SLOT = 0
_SILENT = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
"""Scripts replay, too: what they have to know is raised."""


class MadeRow(NamedTuple):
    """How a row was made; of a packed row, also its documents, in order."""

    row: orders.RowMade
    documents: list[orders.DocumentMade]


@dataclass(slots=True, eq=False)
class _Order:
    """What a worker works on."""

    rows: range
    made: list[MadeRow] = field(default_factory=list)
    documents: list[orders.DocumentMade] = field(default_factory=list)
    """Documents of the row that the worker reports next."""
    note: Note | None = None
    note_since_s: float = 0.0

    def busy_for_s(self, note: Note | None, now_s: float) -> float:
        """Seconds since the worker began the sample that its note names."""
        if note != self.note:
            self.note, self.note_since_s = note, now_s
        return now_s - self.note_since_s if note is not None else 0.0


class RowWorkers:
    """Workers that make rows of one stream. A context manager. Raises ``OSError``."""

    def __init__(self, workers: int, sample_timeout_s: float) -> None:
        """Start the fork server, which imports what workers need meanwhile."""
        self._limit = workers
        self._sample_timeout_s = sample_timeout_s
        self._selector = Selector()
        self._poll = select.poll()
        self._poll.register(self._selector, select.POLLIN)
        self._events: deque[Event] = deque()
        launched = start_linked("batchd.worker")
        self._processes = WorkerProcesses(self._selector, self._events.append, launched, on_row=self._told, log=_SILENT)
        self._numbers, self._orders = count(1), count(1)
        self._living: set[int] = set()
        self._idle: set[int] = set()
        self._busy: dict[int, _Order] = {}
        self._deaths: Counter[int] = Counter()
        self._deaths_without = 0
        self._quarantined: list[int] = []

    @property
    def decoders(self) -> str:
        """Names and versions of the decoders, once rows were made."""
        return self._processes.decoders

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._end_workers()
        self._selector.close()

    def _end_workers(self) -> None:
        self._processes.close(0.0)
        for group in (self._living, self._idle, self._busy, self._events):
            group.clear()

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
            while waiting or self._busy:
                while len(self._living) < min(self._limit, len(waiting) + len(self._busy)):
                    self._start()
                while self._idle and waiting:
                    self._order(self._idle.pop(), position, waiting.popleft())
                self._wait()
                while self._events:
                    match self._events.popleft():
                        case WorkerReady(worker):
                            self._idle.add(worker)
                        case ChunkDone() as done:
                            made += self._done(done)
                        case WorkerGone() as gone:
                            waiting.extend(self._gone(gone, samples))
            where_it_fails.pop_all()
        return sorted(made, key=lambda one: one.row.row)

    def _start(self) -> None:
        number = next(self._numbers)
        self._living.add(number)
        self._processes.start(number)
        index, slot = self._descriptors
        self._processes.send(number, self._message, index)
        self._processes.send(number, orders.UseSlot(SLOT, self._slot_bytes), slot)
        self._processes.send_quarantined(number, self._message.stream, self._quarantined)

    def _order(self, worker: int, position: Position, rows: range) -> None:
        self._busy[worker] = _Order(rows)
        chunk = orders.Chunk(next(self._orders), SLOT, *position, [(rows.start, len(rows))], [])
        self._processes.send(worker, orders.FillChunks(self._message.stream, [chunk], is_packed=False))

    def _wait(self) -> None:
        """Receive what the workers say, and kill one whose sample takes too long."""
        self._poll.poll(TICK_S * 1000)
        self._selector.dispatch()
        now_s = monotonic()
        for worker, order in self._busy.items():
            if order.busy_for_s(self._processes.note(worker), now_s) > self._sample_timeout_s:
                self._processes.kill(worker, "its sample takes too long")

    def _told(self, worker: int, message: orders.RowMade | orders.DocumentMade) -> None:
        order = self._busy[worker]
        if isinstance(message, orders.DocumentMade):
            order.documents.append(message)
        else:
            order.made.append(MadeRow(message, order.documents))
            order.documents = []

    def _done(self, done: ChunkDone) -> list[MadeRow]:
        if done.hopeless:
            raise BatchdError(f"stream {self._message.name!r} stopped at this batch: {done.hopeless}")
        self._idle.add(done.worker)
        return self._busy.pop(done.worker).made

    def _gone(self, gone: WorkerGone, samples: dict[int, int]) -> list[range]:
        """Count the death of a worker; the parts of its order that have to be made again."""
        self._living.remove(gone.worker)
        if gone.note is None:
            raise BatchdError(f"no worker can be started: {gone.how}")
        if gone.worker in self._idle:
            self._idle.remove(gone.worker)
            return []
        order = self._busy.pop(gone.worker, None)
        if order is None or not gone.note.order:
            self._deaths_without += 1
            if self._deaths_without >= DEATHS_WITHOUT_A_SAMPLE_MAX:
                raise BatchdError(f"the workers end before they make a sample ({gone.how}); their output is above")
            return [] if order is None else [order.rows]
        sample = gone.note.sample
        if gone.note.row >= orders.MANY_ROWS:
            if len(order.rows) > 1:
                return [range(row, row + 1) for row in order.rows]
            sample = samples[order.rows.start]
        self._deaths[sample] += 1
        if self._deaths[sample] == DEATHS_MAX:
            self._quarantined.append(sample)
            for other in self._living:
                self._processes.send_quarantined(other, self._message.stream, [sample])
        return [order.rows]
