"""Workers, their orders, their restarts. In no process.

    spawn -> starting --Ready--> ready --(gone)--> its place waits `back-off` -> spawn, new number
                 |                 |
                 +----(too slow)---+--(stuck)--> ending, until the kernel reports the death
                 |                 |
                 +--(surplus)-> leaving --(no orders)--> dismissed --(gone)--> no successor

A remote worker, of a worker host, joins when it is ready, and has no place and no successor here.

Only the kernel reports a death: a worker that is being killed may still write, so its orders count
as under way until then. A worker that has filled a chunk is replaced at once. One that dies
repeatedly before that is replaced with growing back-off.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from math import ceil

from batchd.core.actions import Action, DismissWorker, KillWorker, SpawnWorker
from batchd.core.events import Note
from batchd.core.measure import Moment
from batchd.core.ring import Slot
from batchd.core.rows import Rows
from batchd.core.tenants import Account
from batchd.core.windows import Window, Windows
from batchd_wire.position import Position
from batchd_wire.record import frozen, record
from batchd_wire.status import WorkerStatistics
from batchd_wire.wording import counted

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
LEAVE_TIMEOUT_S = 10.0
"""How long a worker that was dismissed has to end."""
REMOTE_NUMBERS = 1 << 32
"""Local workers, and those of one link, have numbers below this."""
NO_PLACE = -1
SMOOTHING = 0.2
"""Weight of the newest order in a remote worker's usual time and pace."""
SMALL_ORDERS_S = 0.02
"""A worker has ``small_orders_max`` orders while it expects less work than this."""


def remote_number(link: int, worker: int) -> int:
    """The number of a remote worker among all; ``divmod`` by ``REMOTE_NUMBERS`` undoes it."""
    return link * REMOTE_NUMBERS + worker


@frozen
class WorkerKind:
    """Limits of one kind of workers, which is a way to reach them, such as local processes."""

    orders_max: int
    """Orders in flight: one in progress, and enough others that the worker never waits."""
    start_timeout_s: float
    note_delay_s: float
    """Delay of a note on its way: a sample may take so much longer than ``sample_timeout_s``."""
    is_remote: bool = False
    """Its workers are on other machines: worker hosts watch them, and orders can be withdrawn."""
    small_orders_max: int = 0
    """Orders in flight if they are small: many travel in one message, and are reported in one."""


class WorkerState(Enum):
    """State of a worker."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    ENDING = "ending"


@record
class Order:
    """A worker's chunk: rows ``first`` to ``first + rows`` of ``position``, into ``slot``."""

    number: int
    stream: int
    slot: Slot
    position: Position
    rows: Rows
    account: Account
    """Whose expense it is."""
    given_s: float = 0.0
    expected_s: float = SMALL_ORDERS_S
    """How long it will take; as long as small orders together, where no time was measured."""
    disputed_link: int = 0
    """The link that reported these rows bad; 0 for any other order."""
    is_proof: bool = False
    """The rows are filled already, and only compared."""


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process. ``noted_s``: when its note last changed, or it carried out an order."""

    number: int
    place: int
    kind: WorkerKind
    started_s: float
    state: WorkerState = WorkerState.STARTING
    orders: dict[int, Order] = field(default_factory=dict)
    expected_s: float = 0.0
    """How long its orders will take together."""
    taker_of: int = NO_PLACE
    """The number of orders under which it is filed as a taker."""
    chunks: int = 0
    samples: int = 0
    busy_us: int = 0
    note: Note | None = None
    noted_s: float = 0.0
    reported_s: float = 0.0
    """When it reported an order, or got the first one that it has."""
    is_surplus: bool = False
    """It has no place any more, and gets no successor."""
    dismissed_s: float | None = None
    link: int = 0
    """The worker host of a remote worker; 0 for a local one."""
    streams: frozenset[int] = frozenset()
    """The streams that a remote worker may fill; a local one may fill all."""
    usual_s: float = 0.0
    """How long its orders take, with their way; of a remote worker."""
    done_s: float = 0.0
    """When it was done with its last order, by what it says of its work; of a remote worker."""
    window: Window | None = None
    """The window of its link; None for a local worker."""
    counted: int = 0
    """Its part of the orders that ``window`` counts."""
    slowness: float = 1.0
    """Time of a sample, compared with the mean of all workers; of a remote worker."""
    withdrawing: set[int] = field(default_factory=set)
    """Orders that are being withdrawn."""
    unsettled: set[int] = field(default_factory=set)
    """Orders that were withdrawn, and that it may still work on."""
    node: int | None = None
    """The memory node of its CPUs."""
    is_late: bool = False
    """Set when an order is withdrawn; cleared by the worker's next result."""

    @property
    def load(self) -> int:
        """Its orders, and those that were withdrawn and that it may still work on."""
        return len(self.orders) + len(self.unsettled)

    @property
    def takes_one(self) -> bool:
        """True if it takes another order."""
        if self.state is not WorkerState.READY or self.is_late:
            return False
        if self.window is not None and self.window.is_full:
            return False
        is_small = self.expected_s < SMALL_ORDERS_S
        return self.load < max(self.kind.orders_max, self.kind.small_orders_max if is_small else 0)

    def not_reportable(self, numbers: Iterable[int]) -> str | None:
        """Return why the worker cannot have filled these orders; None where it can."""
        streams = set()
        for number in numbers:
            if number not in self.orders:
                return f"it reports order {number}, which it does not have"
            streams.add(self.orders[number].stream)
        return None if len(streams) == 1 else f"it reports orders of {counted(len(streams), 'stream')} in one message"

    def give(self, order: Order, now_s: float) -> None:
        """Add an order. ``Fleet.sort`` follows."""
        if not self.orders:
            self.note, self.noted_s, self.reported_s = None, now_s, now_s
        self.orders[order.number] = order
        self.expected_s += order.expected_s

    def pop(self, number: int) -> Order | None:
        """Take an order away, if it has it."""
        order = self.orders.pop(number, None)
        if order is not None:
            self.expected_s = self.expected_s - order.expected_s if self.orders else 0.0
        return order


@dataclass(slots=True)
class _Place:
    """One of the ``workers`` of the configuration; it outlives the processes that fill it."""

    failures: int = 0
    respawn_s: float | None = None
    """When the next worker is due; None while there is one."""


@dataclass(slots=True)
class _Takers:
    """Workers with the same number of orders that take another, the oldest change first.

    ``remote``: by the streams that they may fill. There are few such sets, but perhaps a thousand
    workers, and possibly none for a given stream.
    """

    local: dict[int, Worker] = field(default_factory=dict)
    remote: dict[frozenset[int], dict[int, Worker]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.local or self.remote)

    def add(self, worker: Worker) -> None:
        """The worker takes another order. Paired with ``discard``."""
        group = self.remote.setdefault(worker.streams, {}) if worker.kind.is_remote else self.local
        group[worker.number] = worker

    def discard(self, worker: Worker) -> None:
        """Remove the worker, if it is here."""
        if not worker.kind.is_remote:
            self.local.pop(worker.number, None)
        elif (group := self.remote.get(worker.streams)) is not None:
            group.pop(worker.number, None)
            if not group:
                del self.remote[worker.streams]


class Fleet:
    """All workers of the daemon. Those that fill its ``places`` are of one ``kind``, and local.

    ``nodes``: the memory node of each place, in turn; () on a machine with one.
    """

    def __init__(
        self,
        places: int,
        kind: WorkerKind,
        sample_timeout_s: float,
        moment: Moment,
        nodes: Sequence[int] = (),
    ) -> None:
        assert places > 0
        self._nodes = nodes
        self._moment = moment
        self.workers: dict[int, Worker] = {}
        self.deaths = 0
        self.is_ending = False
        self._places = [_Place(respawn_s=0.0) for _ in range(places)]
        self._kind = kind
        self.sample_timeout_s = sample_timeout_s
        self.windows = Windows()
        self._surplus: set[int] = set()
        """Workers that have no place and were not dismissed yet."""
        self.ready_places: set[int] = set()
        """The places of local workers that have started and take orders."""
        self._takers: list[_Takers] = []
        """By their number of orders."""
        self._fewest = 0
        """There are no takers with fewer orders than these."""
        self._last_number = 0

    def spawn_due(self, actions: list[Action]) -> None:
        """Start the workers that are due."""
        if self.is_ending:
            return
        now = self._moment.now_s
        for index, place in enumerate(self._places):
            if place.respawn_s is not None and place.respawn_s <= now:
                place.respawn_s = None
                self._last_number += 1
                node = self._nodes[index % len(self._nodes)] if self._nodes else None
                self.workers[self._last_number] = Worker(self._last_number, index, self._kind, now, node=node)
                actions.append(SpawnWorker(self._last_number, node))

    def resize(self, places: int, *, renews: bool) -> None:
        """Set the number of places. Surplus workers (all, with ``renews``) finish their orders."""
        assert places > 0
        for worker in self.workers.values():
            if not worker.is_surplus and not worker.link and (renews or worker.place >= places):
                worker.is_surplus = True
                self._surplus.add(worker.number)
                if worker.state is WorkerState.READY:
                    worker.state = WorkerState.LEAVING
                    self._find_ready()
                    self.sort(worker)
        if renews:
            self._places = []
        del self._places[places:]
        self._places += [_Place(respawn_s=self._moment.now_s) for _ in range(places - len(self._places))]

    def dismiss_idle(self, actions: list[Action]) -> None:
        """Dismiss the surplus workers that are idle."""
        for number in sorted(self._surplus):
            worker = self.workers[number]
            if worker.orders:
                continue
            self._surplus.discard(number)
            if worker.state is not WorkerState.ENDING:
                worker.state, worker.dismissed_s = WorkerState.LEAVING, self._moment.now_s
                self.sort(worker)
                actions.append(DismissWorker(number))

    @property
    def next_spawn_s(self) -> float | None:
        """When ``spawn_due`` has something to do."""
        if self.is_ending:
            return None
        return min((place.respawn_s for place in self._places if place.respawn_s is not None), default=None)

    @property
    def ready(self) -> int:
        """Local workers that have started and take orders."""
        return sum(worker.state is WorkerState.READY and not worker.link for worker in self.workers.values())

    def idle(self, stream: int) -> int:
        """Workers that have no order, and take one of ``stream``."""
        if not self._takers:
            return 0
        takers = self._takers[0]
        remote = sum(len(group) for streams, group in takers.remote.items() if stream in streams)
        return len(takers.local) + min(remote, self.windows.left)

    @property
    def at_work(self) -> int:
        """How many workers can have an order at a time."""
        remote = self.windows.workers
        return len(self.workers) - remote + min(remote, ceil(self.windows.limit))

    @property
    def has_orders(self) -> bool:
        """True if any worker has an order, except to compare rows."""
        return any(not order.is_proof for worker in self.workers.values() for order in worker.orders.values())

    def free(self, stream: int) -> Worker | None:
        """The worker that will be done first, if any takes an order of ``stream``.

        Local ones come first.
        """
        has_left = self.windows.left > 0
        for takers in self._by_orders():
            if takers.local:
                return next(iter(takers.local.values()))
            for streams, workers in takers.remote.items() if has_left else ():
                if stream in streams:
                    return next(iter(workers.values()))
        return None

    @property
    def has_nodes(self) -> bool:
        """Whether the machine has several memory nodes."""
        return bool(self._nodes)

    def nearest(self, worker: Worker, node: int | None) -> Worker:
        """A local worker of a memory node with as few orders as ``worker``; else ``worker``."""
        if node in {None, worker.node} or worker.link:
            return worker
        same = self._takers[worker.load].local.values()
        return next((other for other in same if other.node == node), worker)

    def free_local(self) -> Worker | None:
        """The local worker that will be done first, if any takes an order."""
        return next((next(iter(takers.local.values())) for takers in self._by_orders() if takers.local), None)

    def takers(self) -> dict[int, Worker]:
        """The local workers that take an order, by their places."""
        return {worker.place: worker for takers in self._by_orders() for worker in takers.local.values()}

    def _find_ready(self) -> None:
        """Find the ready places, whenever the state of a worker has changed."""
        states = [(one.place, one.state) for one in self.workers.values() if not one.link]
        self.ready_places = {place for place, state in states if state is WorkerState.READY}

    @property
    def places(self) -> int:
        """How many local workers there shall be."""
        return len(self._places)

    def free_remote(self, stream: int) -> Iterator[Worker]:
        """The remote workers that take an order of ``stream``, by the time when they are done."""
        for takers in self._by_orders():
            for streams, workers in takers.remote.items():
                if stream in streams:
                    yield from workers.values()

    def _by_orders(self) -> Iterator[_Takers]:
        """Yield the takers, those with the fewest orders first."""
        while self._fewest < len(self._takers) and not self._takers[self._fewest]:
            self._fewest += 1
        return islice(self._takers, self._fewest, None)

    def least_busy(self, numbers: Iterable[int]) -> Worker | None:
        """The worker of these with the fewest orders, even if it takes no more; no late one."""
        workers = map(self.workers.__getitem__, numbers)
        ready = (worker for worker in workers if worker.state is WorkerState.READY and not worker.is_late)
        return min(ready, key=lambda worker: worker.load, default=None)

    def join(self, number: int, link: int, kind: WorkerKind, streams: Iterable[int]) -> None:
        """A remote worker is ready, and may fill these streams."""
        assert number >= REMOTE_NUMBERS, f"worker {number} has the number of a local one"
        worker = Worker(number, NO_PLACE, kind, self._moment.now_s, WorkerState.READY, link=link)
        worker.streams = frozenset(streams)
        worker.window = self.windows.join(link, number, kind.orders_max)
        self.workers[number] = worker
        self.sort(worker)

    def may_fill(self, numbers: Iterable[int], streams: Iterable[int]) -> None:
        """Let these remote workers fill these streams, and no others."""
        allowed = frozenset(streams)
        for worker in map(self.workers.__getitem__, numbers):
            self._remove(worker)
            worker.streams = allowed
            self.sort(worker)

    def is_up(self, number: int) -> None:
        """A worker has started, and takes orders if it is wanted still."""
        worker = self.workers[number]
        if worker.state is WorkerState.STARTING:
            worker.state = WorkerState.READY
            self._find_ready()
            self.sort(worker)

    def give(self, worker: Worker, order: Order) -> None:
        """The worker gets an order. Paired with ``done``, ``recall`` or ``gone``."""
        worker.give(order, self._moment.now_s)
        self.sort(worker)

    def arrived(self, worker: Worker, order: Order, work_s: float) -> None:
        """Note that a remote worker's rows, ``work_s`` of work, arrived. ``done`` follows."""
        assert worker.window is not None, f"worker {worker.number} is a local one"
        now_s = self._moment.now_s
        worker.done_s = min(now_s, max(order.given_s, worker.done_s) + work_s)
        self.windows.arrived(worker.window, len(order.rows), now_s - worker.done_s, order.given_s, now_s)

    def done(self, worker: Worker, numbers: Iterable[int], busy_us: int) -> list[Order]:
        """The worker has carried out some of its orders."""
        orders = [order for number in numbers if (order := worker.pop(number)) is not None]
        worker.withdrawing.difference_update(order.number for order in orders)
        worker.is_late = False
        worker.noted_s = worker.reported_s = self._moment.now_s
        worker.chunks += len(orders)
        worker.samples += sum(len(order.rows) for order in orders)
        worker.busy_us += busy_us
        for order in orders if worker.link else ():
            taken_s = self._moment.now_s - order.given_s
            worker.usual_s += (taken_s - worker.usual_s) * (SMOOTHING if worker.usual_s else 1.0)
            if order.is_proof:
                worker.done_s = self._moment.now_s
        self.sort(worker)
        return orders

    def usual_s(self, worker: Worker) -> float:
        """Seconds that an order of a remote worker takes, by earlier ones; at least the way now."""
        assert worker.window is not None, f"worker {worker.number} is a local one"
        return max(worker.usual_s, worker.window.way_s)

    def withdrawn(self, worker: Worker, number: int) -> Order:
        """Nothing more is written for an order; the worker may be busy with it still."""
        order = worker.pop(number)
        assert order is not None, f"worker {worker.number} does not have order {number}"
        worker.withdrawing.discard(number)
        worker.unsettled.add(number)
        worker.is_late = True
        assert worker.window is not None, f"worker {worker.number} is a local one"
        self.windows.late(worker.window, order.given_s, self._moment.now_s)
        self.sort(worker)
        return order

    def settled(self, worker: Worker, number: int) -> None:
        """A remote worker is done with an order that was withdrawn."""
        worker.unsettled.discard(number)
        worker.done_s = self._moment.now_s
        worker.is_late = bool(worker.orders or worker.unsettled)
        self.sort(worker)

    def leave(self, numbers: Iterable[int]) -> None:
        """Give these remote workers no more orders."""
        for number in numbers:
            worker = self.workers[number]
            worker.state = WorkerState.LEAVING
            self.sort(worker)

    def recall(self, number: int) -> None:
        """Drop an order that was never sent to its worker."""
        for worker in self.workers.values():
            if worker.pop(number) is not None:
                self.sort(worker)

    def sort(self, worker: Worker) -> None:
        """Update the takers after a change of a worker's state or orders, or its link's window."""
        window = worker.window
        if window is None:
            self._file(worker)
            return
        was_full = window.was_full
        self.windows.count(window, worker.load - worker.counted)
        worker.counted = worker.load
        window.was_full = window.is_full
        if was_full == window.was_full:
            self._file(worker)
        else:
            for number in window.workers:
                self._file(self.workers[number])

    def _file(self, worker: Worker) -> None:
        """Put a worker where it belongs among the takers, if it is one."""
        self._remove(worker)
        if worker.takes_one:
            load = worker.taker_of = worker.load
            while load >= len(self._takers):
                self._takers.append(_Takers())
            self._takers[load].add(worker)
            self._fewest = min(self._fewest, load)

    def _remove(self, worker: Worker) -> None:
        if worker.taker_of != NO_PLACE:
            self._takers[worker.taker_of].discard(worker)
            worker.taker_of = NO_PLACE

    def gone(self, number: int) -> Worker:
        """The kernel says that the worker is dead; its place is filled again after the back-off."""
        worker = self.workers.pop(number)
        self._find_ready()
        self._surplus.discard(number)
        self._remove(worker)
        if worker.window is not None:
            self.windows.leave(worker.link, number, worker.kind.orders_max, worker.counted)
            for other in worker.window.workers:
                self._file(self.workers[other])
            worker.window.was_full = worker.window.is_full
        if self.is_ending or worker.link:
            return worker
        if worker.dismissed_s is not None and worker.state is WorkerState.LEAVING:
            return worker
        self.deaths += 1
        if worker.is_surplus:
            return worker
        place = self._places[worker.place]
        place.failures = 0 if worker.chunks else place.failures + 1
        delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (place.failures - 1)) if place.failures else 0.0
        place.respawn_s = self._moment.now_s + delay_s
        return worker

    def observe(self, number: int, note: Note | None, actions: list[Action]) -> None:
        """Look at a worker's note: one that says the same for too long is stuck, and killed."""
        worker = self.workers.get(number)
        if worker is None or worker.link or worker.state is WorkerState.ENDING:
            return
        now = self._moment.now_s
        if note != worker.note or not worker.orders:
            worker.note, worker.noted_s = note, now
            return
        if now - worker.noted_s >= self.sample_timeout_s + worker.kind.note_delay_s:
            what = "worked on one sample" if note is not None else "imported, or did something else before a sample,"
            self.end(worker, f"it {what} for {self.sample_timeout_s:g} s", actions)

    def kill_late(self, actions: list[Action]) -> None:
        """Kill workers that do not start, or were dismissed and do not end, in time."""
        now = self._moment.now_s
        for worker in self.workers.values():
            timeout_s = worker.kind.start_timeout_s
            if worker.state is WorkerState.STARTING and now - worker.started_s > timeout_s:
                self.end(worker, f"it did not start within {timeout_s:g} s", actions)
            if worker.dismissed_s is not None and now - worker.dismissed_s > LEAVE_TIMEOUT_S:
                self.end(worker, f"it did not end within {LEAVE_TIMEOUT_S:g} s", actions)

    def end(self, worker: Worker, reason: str, actions: list[Action]) -> None:
        """Have a worker killed and give it no more orders. ``gone`` follows."""
        if worker.state is not WorkerState.ENDING:
            worker.state = WorkerState.ENDING
            self._find_ready()
            self.sort(worker)
            actions.append(KillWorker(worker.number, reason))

    def forgive(self, gap_s: float) -> None:
        """The machine was paused for ``gap_s``: take that off everything that is being timed."""
        now = self._moment.now_s
        for worker in self.workers.values():
            for number, order in worker.orders.items() if worker.link else ():
                worker.orders[number] = replace(order, given_s=min(now, order.given_s + gap_s))
            worker.noted_s = min(now, worker.noted_s + gap_s)
            worker.reported_s = min(now, worker.reported_s + gap_s)
            worker.started_s = min(now, worker.started_s + gap_s)
            if worker.dismissed_s is not None:
                worker.dismissed_s = min(now, worker.dismissed_s + gap_s)

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Every local worker that lives, in order of its number."""
        return tuple(
            WorkerStatistics(
                number=worker.number,
                place=worker.place,
                state=worker.state.value,
                orders=len(worker.orders),
                chunks=worker.chunks,
                samples=worker.samples,
                busy_s=worker.busy_us / 1e6,
                unreported_s=self._moment.now_s - worker.reported_s if worker.orders else 0.0,
            )
            for worker in self.workers.values()
            if not worker.link
        )
