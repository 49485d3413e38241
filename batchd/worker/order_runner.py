"""Worker processes that carry out orders until all are done, without the daemon's loop.

    orders --> worker.supervisor: a worker for each CPU --what it reports of its order--> the caller

Runs in commands, and where the samples of a stream are measured. A worker that dies names its
sample in its note, as in the daemon: another one gets the order. A sample that killed several
counts as bad, which all workers are told. Workers that make many rows at once name none, so the
rows of such an order are ordered one by one.

Invariant: no worker has an order when ``run`` ends, and no process is left after the context.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import NamedTuple, Self

import structlog

from batchd.core.events import Event, Note, WorkerGone, WorkerReady
from batchd.errors import BatchdError
from batchd.runtime.children import Linked
from batchd.runtime.poller import Poller
from batchd.worker.messages import MANY_ROWS, OPENING, ORDER_DONE, StreamMeasured
from batchd.worker.supervisor import WorkerProcesses
from batchd_wire.codec import Message

TICK_S = 0.2
STREAM = 0
"""The number of the only stream."""
_SILENT = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
"""Scripts run orders, too: what they have to know is raised."""


class DeathLimits(NamedTuple):
    """Deaths of workers: during one sample, then it is bad; and without a sample, to give up."""

    of_a_sample: int = 2
    without_a_sample: int = 5


class WorkersEnd(Exception):  # noqa: N818  what happens; each caller has its own words
    """Workers end and no sample is to blame; the text says how one did."""


@dataclass(frozen=True, slots=True)
class OrderToRun:
    """What one worker does in one go. ``number``: at least 1, as the worker's note has it.

    ``sample``: of the only row; ``rows``: an order for each row, if there are several.
    """

    number: int
    message: Message
    sample: int = 0
    rows: Sequence["OrderToRun"] = ()


@dataclass(slots=True, eq=False)
class OrderProgress:
    """An order that a worker has, and what it has reported of it, the newest last."""

    order: OrderToRun
    reports: list[Message] = field(default_factory=list)
    samples_done: int = 0
    note: Note | None = None
    note_since_s: float = 0.0

    def busy_for_s(self, note: Note | None, now_s: float) -> float:
        """Seconds since the worker began the sample that its note names."""
        if note != self.note:
            self.note, self.note_since_s = note, now_s
            self.samples_done = self.samples_done if note is None else note.row
        return now_s - self.note_since_s if note is not None else 0.0


class OrderRunner:
    """Workers that carry out orders of one stream. A context manager. Raises ``OSError``."""

    def __init__(
        self,
        workers: int,
        sample_timeout_s: float,
        launched: Linked | None = None,
        deaths: DeathLimits = DeathLimits(),  # noqa: B008  it is constant
    ) -> None:
        """Own the fork server that was ``launched`` already, if any."""
        self._limit = workers
        self._sample_timeout_s = sample_timeout_s
        self._deaths_max = deaths
        self._poller = Poller()
        self._events: deque[Event | tuple[int, Message]] = deque()
        self._processes = WorkerProcesses(
            self._poller,
            self._events.append,
            launched,
            on_report=lambda *report: self._events.append(report),
            log=_SILENT,
        )
        self._numbers = count(1)
        self._living: set[int] = set()
        self._idle: set[int] = set()
        self._busy: dict[int, OrderProgress] = {}
        self._deaths: Counter[int] = Counter()
        self._deaths_without = 0
        self.killers: dict[int, str] = {}
        """The samples that killed too many workers, and how the last one of each ended."""

    @property
    def decoders(self) -> str:
        """Names and versions of the decoders, once a worker has started."""
        return self._processes.decoders

    @property
    def works(self) -> list[OrderProgress]:
        """The orders that workers have now."""
        return list(self._busy.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._end_workers()
        self._poller.close()

    def _end_workers(self) -> None:
        self._processes.close(0.0)
        for group in (self._living, self._idle, self._busy, self._events):
            group.clear()

    def serve(self, *messages: tuple[Message, Sequence[int]]) -> None:
        """What each worker gets before its first order; the descriptors stay the caller's."""
        self._served = messages
        for message, _descriptors in messages:
            if isinstance(message, OPENING):
                self._processes.enclose(message.recipe.needed)

    def run(
        self,
        orders: Iterable[OrderToRun],
        heard: Callable[[OrderProgress], None],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Carry out ``orders``. ``heard`` is called for each report, ``tick`` a few times a second.

        Raises ``BatchdError`` if no worker can be started, ``WorkersEnd``, and what these two
        raise: then no worker is left.
        """
        waiting = deque(orders)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self._end_workers)
            while waiting or self._busy:
                while len(self._living) < min(self._limit, len(waiting) + len(self._busy)):
                    self._start()
                while self._idle and waiting:
                    self._give(self._idle.pop(), waiting.popleft())
                self._wait()
                tick()
                while self._events:
                    match self._events.popleft():
                        case WorkerReady(worker):
                            self._idle.add(worker)
                        case WorkerGone() as gone:
                            waiting.extendleft(self._gone(gone))
                        case (int(worker), Message() as report) if not isinstance(report, StreamMeasured):
                            heard(self._reported(worker, report))
            where_it_fails.pop_all()

    def _start(self) -> None:
        number = next(self._numbers)
        self._living.add(number)
        self._processes.start(number)
        for message, descriptors in self._served:
            self._processes.send(number, message, *descriptors)
        self._processes.send_quarantined(number, STREAM, list(self.killers))

    def _give(self, worker: int, order: OrderToRun) -> None:
        self._busy[worker] = OrderProgress(order)
        self._processes.send(worker, order.message)

    def _wait(self) -> None:
        """Receive what the workers say, and kill one whose sample takes too long."""
        self._poller.dispatch(TICK_S)
        now_s = monotonic()
        for worker, work in self._busy.items():
            if work.busy_for_s(self._processes.note(worker), now_s) > self._sample_timeout_s:
                self._processes.kill(worker, "its sample takes too long")

    def _reported(self, worker: int, report: Message) -> OrderProgress:
        work = self._busy[worker]
        work.reports.append(report)
        if isinstance(report, ORDER_DONE):
            del self._busy[worker]
            self._idle.add(worker)
        return work

    def _gone(self, gone: WorkerGone) -> Sequence[OrderToRun]:
        """Count the death of a worker; the orders that have to be given again."""
        self._living.remove(gone.worker)
        if gone.note is None:
            raise BatchdError(f"no worker can be started: {gone.how}")
        if gone.worker in self._idle:
            self._idle.remove(gone.worker)
            return []
        work = self._busy.pop(gone.worker, None)
        if work is None or not gone.note.order:
            self._deaths_without += 1
            if self._deaths_without >= self._deaths_max.without_a_sample:
                raise WorkersEnd(gone.how)
            return [] if work is None else [work.order]
        sample = gone.note.sample
        if gone.note.row >= MANY_ROWS:
            if work.order.rows:
                return work.order.rows
            sample = work.order.sample
        self._deaths[sample] += 1
        if self._deaths[sample] == self._deaths_max.of_a_sample:
            self.killers[sample] = gone.how
            for other in self._living:
                self._processes.send_quarantined(other, STREAM, [sample])
        return [work.order]
