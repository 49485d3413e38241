"""Benchmark: memory nodes. Bytes that cross between nodes, simulated on a described machine.

2 nodes of 96 CPUs with a worker each, 8 trainers with a stream each, four of them on each node,
which take batches as fast as workers make them. The core gives the orders as in a daemon; workers
take a drawn time for a sample. A row that a worker writes, and a batch that a trainer reads, cross
if the slot is on the other node. Without placement, slots are on the node of the daemon, and the
kernel spreads workers over both. No clock and no process: foreign load changes nothing.
"""

import heapq
import random
from collections import deque

from harness import Bench, Figure

from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.events import StreamSpec
from batchd.core.fleet import WorkerKind
from batchd.core.plan import Plan
from batchd.core.state import DaemonState
from batchd.core.work import NO_WORK

NODES, CPUS, TRAINERS = 2, 96, 8
BATCH, SAMPLE_US, BATCHES = 256, (500, 6000), 3_000
PLACES = tuple(range(NODES)) * CPUS


def run(bench: Bench) -> None:
    """Bytes across nodes with placement and without it; and how evenly trainers are served."""
    placed, spread = Simulation(is_placed=True), Simulation(is_placed=False)
    for name, one in (("placed by node", placed), ("not placed", spread)):
        one.run()
        least, most = min(one.got.values()), max(one.got.values())
        print(
            f"{name}: {one.far_written / one.written:.1%} of the written and {one.far_read / one.read:.1%} of the read "
            f"bytes cross; trainers got {least} to {most} batches"
        )
    bench.report(Figure("numa-crossing-bytes", placed.crossing, "<=", 0.1, 3))
    bench.report(Figure("numa-crossing-of-not-placed", placed.crossing / spread.crossing, "<=", 0.2, 3))
    evenness = min(placed.got.values()) / max(placed.got.values())
    bench.report(Figure("numa-least-of-most-batches", evenness, ">=", 0.95))


class Simulation:
    """See the module. Samples count for their bytes: all have as many."""

    def __init__(self, *, is_placed: bool) -> None:
        specs = [_spec(number) for number in range(1, TRAINERS + 1)]
        kind = WorkerKind(orders_max=2, start_timeout_s=60.0, note_delay_s=0.0, small_orders_max=32)
        nodes = PLACES if is_placed else ()
        self.state = DaemonState(specs, len(PLACES), kind, sample_timeout_s=30.0, chunk_rows_max=256, nodes=nodes)
        self.written = self.far_written = self.read = self.far_read = 0
        self.got = dict.fromkeys(range(1, TRAINERS + 1), 0)
        self._is_placed = is_placed
        self._draws = random.Random(0)
        self._now_s = 0.0
        self._node_of_slot: dict[int, int] = {}
        self._orders: dict[int, deque[act.OrderChunk]] = {}
        self._due: list[tuple[float, int]] = []
        """When each worker is done with its first order."""
        self._actions: deque[act.Action] = deque()

    @property
    def crossing(self) -> float:
        """The part of all bytes that crossed."""
        return (self.far_written + self.far_read) / (self.written + self.read)

    def run(self) -> None:
        """Until trainers have so many batches together."""
        self._handle(ev.Ticked())
        for number in self.got:
            place = f"stream{number}", 0, 1, 0, 0, 0, None, None
            node = number % NODES if self._is_placed else None
            self._handle(ev.SubscriptionAsked(number, number, 0, *place, is_spectator=False, node=node))
            self._handle(ev.Pulled(number, number, 0, True, 0, []))
        while sum(self.got.values()) < BATCHES:
            while self._actions:
                self._perform(self._actions.popleft())
            self._now_s, worker = heapq.heappop(self._due)
            self._finish(worker)

    def _handle(self, event: ev.Event) -> None:
        self._actions += self.state.handle(event, self._now_s)

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.SpawnWorker():
                self._orders[action.worker] = deque()
                self._handle(ev.WorkerReady(action.worker))
            case act.CreateSlot():
                self._node_of_slot[action.slot] = action.node or 0
            case act.OrderChunk():
                self._orders[action.worker].append(action)
                if len(self._orders[action.worker]) == 1:
                    self._begin(action.worker)
            case act.GrantLease():
                number = action.subscription
                self.got[number] += 1
                self.read += action.count
                self.far_read += action.count * (self._node_of_slot[action.slot] != number % NODES)
                released = [(action.sequence, action.generation)]
                self._handle(ev.Pulled(number, number, self.got[number], True, 0, released))

    def _begin(self, worker: int) -> None:
        rows = len(self._orders[worker][0].rows)
        heapq.heappush(self._due, (self._now_s + rows * self._draws.randint(*SAMPLE_US) / 1e6, worker))

    def _finish(self, worker: int) -> None:
        order = self._orders[worker].popleft()
        rows = len(order.rows)
        self.written += rows
        self.far_written += rows * (self._node_of_slot[order.slot] != PLACES[self.state.fleet.workers[worker].place])
        busy_us = rows * sum(SAMPLE_US) // 2
        work = NO_WORK._replace(busy_us=busy_us, cpu_us=busy_us)
        self._handle(ev.ChunkDone(worker, (order.order,), work, [], ""))
        if self._orders[worker]:
            self._begin(worker)


def _spec(number: int) -> StreamSpec:
    return StreamSpec(
        number=number,
        name=f"stream{number}",
        fingerprint=str(number),
        plan=Plan(samples=1_000_000, batch_size=BATCH, seed=number, shuffle=True, drop_last=True),
        equal_epochs=False,
        window=4,
        remote_window_max=4,
        max_skew=None,
        slots_max=24,
        on_error="substitute",
        bad_fraction_max=1.0,
    )
