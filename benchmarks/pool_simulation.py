"""A pool of worker hosts, simulated around ``DaemonState`` itself: no process, no clock, no pixel.

    trainers --Pulled--> DaemonState --OrderChunk--> workers' queues --wire--> ChunkDone
                              ^--- LinkBegun, WorkerUp, WorkerDown, OrderWithdrawn -------'

What the core decides is real, and so is the CPU time that this takes. All else is a model: a worker
fills its orders one after the other, ``sample_s`` a sample; rows share one wire to the gateway;
trainers take what they can get. Times are of the simulation's own clock, so the same case and seed
give the same orders whatever the machine does.

Without pauses the decisions follow each other, and find the processor's caches as the one before
has left them. A daemon sleeps between them. A case with ``is_paced`` does so, too: each thing
happens no earlier than the real clock says, and its decisions take as long as a daemon's.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from random import Random
from typing import Any

from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.events import StreamSpec
from batchd.core.fleet import REMOTE_NUMBERS, WorkerKind, remote_number
from batchd.core.links import LinkRules
from batchd.core.plan import Plan
from batchd.core.state import TICK_S, DaemonState
from batchd.core.work import NO_WORK
from batchd.pool.remote import REMOTE
from batchd.worker.messages import CHUNK_ROWS_MAX
from batchd.worker.supervisor import WorkerProcesses

STREAM = 1
BATCH_ROWS = 256
SAMPLES = 1_281_167
IMAGE_BYTES = 224 * 224 * 3
LATENCY_S = 0.0005
"""From the daemon to a worker, and back: two processes and a network on the way."""
JITTER = 0.1
"""An order takes up to that part more or less time than its rows."""
HEARTBEAT_S = 12.0
"""After that time without a sign of life a link is closed."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated. Rates are per second, of the whole pool.

    ``window``: batches ahead of each trainer; 0: its share of the ring.
    ``worker_deaths``: workers that die; their hosts start others after ``worker_start_s``.
    ``host_deaths``: hosts that die with all their workers, and return after ``host_start_s``.
    ``slow_samples``: the part of all samples that takes ``slow_times`` as long.
    ``wire_bytes_s``: what the gateway can receive; 0: no limit. ``late_hosts``: the part of the
    hosts that start between the two ``start_s``, as nodes of a cloud do. ``half_open``: the part of
    the hosts that fall silent at the end of the settling, with their connections open. ``moves``:
    hosts that leave one of the ``daemons`` for the next one. ``useless_hosts``: further hosts that
    cannot fill the stream. ``cached``: the part of the ``samples`` for which each host's cache has
    room; one from it takes ``hit_s``. ``is_shared``: with ``pool_cache = "shared"``. ``is_paced``:
    it takes as long as what it simulates.
    """

    name: str
    hosts: int = 125
    host_workers: int = 8
    trainers: int = 100
    sample_s: float = 0.01
    slots: int = 1_200
    window: int = 0
    daemons: int = 1
    worker_deaths: float = 0.0
    worker_start_s: float = 0.2
    host_deaths: float = 0.0
    host_start_s: float = 2.5
    slow_samples: float = 0.0
    slow_times: float = 10.0
    wire_bytes_s: float = 0.0
    late_hosts: float = 0.0
    start_s: tuple[float, float] = (30.0, 120.0)
    half_open: float = 0.0
    moves: float = 0.0
    useless_hosts: int = 0
    samples: int = SAMPLES
    cached: float = 0.0
    hit_s: float = 0.005
    is_shared: bool = False
    is_paced: bool = False
    latency_s: float = LATENCY_S
    orders_max: int = REMOTE.orders_max
    settle_s: float = 15.0
    measured_s: float = 20.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case, of its measured time; ``decisions_s`` is CPU time and the only real one.

    ``up_worker_s``: time of all remote workers that were up. ``waits_s``: of trainers, each wait.
    """

    case: Case
    samples: int
    orders: int
    withdrawn: int
    decisions_s: float
    up_worker_s: float
    waits_s: list[float]
    hits: int
    misses: int
    """Samples of worker hosts that their caches had, or had not."""

    @property
    def hit_ratio(self) -> float:
        """The part of the samples of worker hosts that came from their caches."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def images_s(self) -> float:
        """Images delivered in a second."""
        return self.samples / self.case.measured_s

    @property
    def of_all(self) -> float:
        """Images delivered ÷ those that all workers of the case could decode."""
        workers = self.case.hosts * self.case.host_workers * self.case.measured_s
        return self.samples * _mean_sample_s(self.case) / workers

    @property
    def of_up(self) -> float:
        """Images delivered ÷ those that the workers could decode that were up."""
        return self.samples * _mean_sample_s(self.case) / self.up_worker_s

    @property
    def core(self) -> float:
        """Part of a core for the decisions, of all daemons."""
        return self.decisions_s / self.case.measured_s

    def core_at(self, images_s: float) -> float:
        """Part of a core for the decisions of so many images in a second."""
        return self.decisions_s / max(1, self.samples) * images_s

    @property
    def order_us(self) -> float:
        """CPU time of the decisions for each order, with all other events."""
        return 1e6 * self.decisions_s / max(1, self.orders)

    def wait_s(self, percent: float) -> float:
        """A percentile of the waits for a batch."""
        waits = sorted(self.waits_s)
        return waits[min(len(waits) - 1, int(len(waits) * percent / 100))] if waits else 0.0


PACED = "steady, in real time"
CHURN = "2 % of the workers die each second"
WIRE_BYTES_S = 1e9 / 8
"""Of one Gbit/s."""
EACH, SHARED = "2 hosts that cache half of the samples each", "the same, with shared caches"
SHARED_STEADY = "steady, with shared caches"
HALVES = Case(EACH, hosts=2, trainers=2, slots=40, samples=20_000, cached=0.5, settle_s=40.0)
CASES = (
    Case("steady", note="125 hosts of 8 workers, 100 trainers, ring of 1,200 slots"),
    Case(PACED, is_paced=True, note="each decision after a pause, as in a daemon"),
    Case("ring of 461 slots", slots=461),
    Case("ring of 250 slots", slots=250),
    Case("1,000 hosts of one worker", hosts=1_000, host_workers=1),
    Case("1,000 more workers that cannot fill the stream", useless_hosts=125),
    Case(CHURN, worker_deaths=20.0, note="each host starts another in 0.2 s"),
    Case(
        "2 % of the hosts die each second",
        hosts=1_000,
        host_workers=1,
        host_deaths=20.0,
        note="of one worker each; back after 2.5 s, so 95 % are up",
    ),
    Case("a host of 64 dies every 5 s", hosts=16, host_workers=64, host_deaths=0.2, note="back after 2.5 s"),
    Case("1 % of the samples 10 times slower", slow_samples=0.01),
    Case("10 Gbit/s", hosts=9, wire_bytes_s=10 * WIRE_BYTES_S, note="as many workers as the wire feeds"),
    Case("25 Gbit/s", hosts=23, wire_bytes_s=25 * WIRE_BYTES_S, note="the same"),
    Case("100 Gbit/s", hosts=93, wire_bytes_s=100 * WIRE_BYTES_S, note="the same"),
    Case("400 Gbit/s", wire_bytes_s=400 * WIRE_BYTES_S, note="1,000 workers need half of it"),
    Case("100 Gbit/s, all workers", wire_bytes_s=100 * WIRE_BYTES_S, settle_s=30.0, note="it feeds 830"),
    Case("25 Gbit/s, all workers", wire_bytes_s=25 * WIRE_BYTES_S, settle_s=60.0, note="it feeds 207"),
    Case("10 Gbit/s, all workers", wire_bytes_s=10 * WIRE_BYTES_S, settle_s=60.0, note="it feeds 83"),
    Case("nodes start after 30 to 120 s", late_hosts=0.9, settle_s=30.0, measured_s=90.0, note="all but a tenth"),
    Case("a tenth of the hosts half-open", half_open=0.1, note="for 14.5 of the 20 s; then back"),
    Case("4 daemons over one pool", daemons=4, moves=2.0, note="2 hosts a second go from one to the next"),
    HALVES,
    replace(HALVES, name=SHARED, is_shared=True),
    Case(SHARED_STEADY, is_shared=True, note="8 shares of 15 or 16 hosts"),
)
HEADER = (
    "| simulated | images/s | ÷ all workers | ÷ those up | orders/s | decisions, % of a core | us for an order "
    "| withdrawn/s | wait p50, p99, longest, s | cache hits |\n|---|---|---|---|---|---|---|---|---|---|"
)


def line(result: Result) -> str:
    """A row of the table below ``HEADER``."""
    case = result.case
    waits = ", ".join(f"{result.wait_s(percent):.2f}" for percent in (50, 99, 100))
    return (
        f"| {case.name}{f' ({case.note})' if case.note else ''} | {result.images_s:,.0f} | {result.of_all:.3f} "
        f"| {result.of_up:.3f} | {result.orders / case.measured_s:,.0f} | {100 * result.core:.1f} | {result.order_us:.0f} "
        f"| {result.withdrawn / case.measured_s:.1f} | {waits} | {f'{result.hit_ratio:.3f}' if case.cached else ''} |"
    )


def simulate(case: Case, seed: int = 0) -> Result:
    """Run a case from its start to the end of its measured time."""
    return _Pool(case, seed).run()


def _mean_sample_s(case: Case) -> float:
    return case.sample_s * (1 + case.slow_samples * (case.slow_times - 1))


@dataclass(slots=True, eq=False)
class _Worker:
    """``given``: orders that the daemon counts as its own; it works on the first of ``queue``."""

    number: int
    host: "_Host | None"
    given: set[int] = field(default_factory=set)
    queue: deque[act.OrderChunk | act.ProveChunk] = field(default_factory=deque)
    is_up: bool = True


@dataclass(slots=True, eq=False)
class _Host:
    """A worker host; ``link`` is 0 while it has none."""

    daemon: "_Daemon"
    name: str
    link: int = 0
    workers: list[_Worker] = field(default_factory=list)
    is_silent: bool = False
    is_useless: bool = False
    cache: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Trainer:
    """It is idle, and takes the next batch at once."""

    number: int
    leases: deque[tuple[int, int]] = field(default_factory=deque)
    held: tuple[int, int] | None = None
    consumed: int = 0
    waits_since_s: float | None = None


class _Clock:
    """What happens next. Things of one moment happen in the order in which they were planned."""

    def __init__(self, *, is_paced: bool) -> None:
        self.now_s = 0.0
        self._began_s = time.monotonic() if is_paced else -inf
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def after(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        """Do something in so many seconds."""
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), what, arguments))

    def run_until(self, end_s: float) -> None:
        """Do all that is due before ``end_s``."""
        while self._due and self._due[0][0] <= end_s:
            early_s = self._began_s + self._due[0][0] - time.monotonic()
            if early_s > 0:
                time.sleep(early_s)
            self.now_s, _number, what, arguments = heapq.heappop(self._due)
            what(*arguments)
        self.now_s = end_s


class _Daemon:
    """One ``DaemonState`` with its trainers, its local worker and the wire of its gateway."""

    def __init__(self, case: Case, clock: _Clock, random: Random) -> None:
        self._case, self._clock, self._random = case, clock, random
        trainers, slots = case.trainers // case.daemons, case.slots // case.daemons
        spec = StreamSpec(
            number=STREAM,
            name="photos",
            fingerprint="f" * 64,
            plan=Plan(case.samples, BATCH_ROWS, seed=0, shuffle=True, drop_last=True),
            equal_epochs=False,
            window=case.window or max(2, slots // trainers),
            remote_window_max=2,
            max_skew=None,
            slots_max=slots,
            on_error="substitute",
            bad_fraction_max=0.01,
            shares_caches=case.is_shared,
        )
        self.state = DaemonState(
            [spec],
            1,
            WorkerProcesses.kind,
            sample_timeout_s=30.0,
            chunk_rows_max=CHUNK_ROWS_MAX,
            rules=LinkRules(),
            remote_kind=WorkerKind(case.orders_max, 60.0, 0.0, is_remote=True),
        )
        self.plan = spec.plan
        self.decisions_s = 0.0
        self.samples = self.orders = self.withdrawn = self.hits = self.misses = 0
        self.waits_s: list[float] = []
        self._workers: dict[int, _Worker] = {}
        self._trainers: dict[int, _Trainer] = {}
        self._wire_free_s = 0.0
        self._perform: dict[type[act.Action], Callable[[Any], None]] = {
            act.SpawnWorker: lambda action: self._clock.after(0.01, self._local_up, action.worker),
            act.OrderChunk: self._order,
            act.ProveChunk: self._order,
            act.WithdrawOrder: lambda action: self._clock.after(0.0, self._withdraw, action),
            act.GrantLease: self._grant,
        }
        self._tick()
        for number in range(1, trainers + 1):
            self._subscribe(number, trainers)

    def do(self, event: ev.Event) -> None:
        """Let the core decide, and do what it says."""
        began_s = time.thread_time()
        actions = self.state.handle(event, self._clock.now_s)
        self.decisions_s += time.thread_time() - began_s
        for action in actions:
            assert not isinstance(action, act.EndLink | act.KillWorker | act.Refuse), f"unexpected: {action}"
            if perform := self._perform.get(type(action)):
                perform(action)

    def _tick(self) -> None:
        self.do(ev.Ticked())
        self._clock.after(TICK_S, self._tick)

    # --- workers ----------------------------------------------------------------------------------

    def joins(self, worker: _Worker, link: int) -> None:
        """A remote worker is up."""
        self._workers[worker.number] = worker
        self.do(ev.WorkerUp(link, worker.number % REMOTE_NUMBERS, ""))

    def gone(self, worker: _Worker, how: str) -> None:
        """A worker is dead: the gateway has dropped its orders."""
        worker.is_up = False
        worker.given.clear()
        del self._workers[worker.number]
        self.do(ev.WorkerDown(*_named(worker), how))

    def _local_up(self, number: int) -> None:
        self._workers[number] = _Worker(number, None)
        self.do(ev.WorkerReady(number))

    def _order(self, order: act.OrderChunk | act.ProveChunk) -> None:
        worker = self._workers[order.worker]
        self.orders += 1
        worker.given.add(order.order)
        latency_s = self._case.latency_s if worker.host else 0.0
        if isinstance(order, act.ProveChunk):
            self._clock.after(0.0, self._take_reference, worker, order)
        self._clock.after(latency_s, self._arrives, worker, order)

    def _arrives(self, worker: _Worker, order: act.OrderChunk | act.ProveChunk) -> None:
        worker.queue.append(order)
        if len(worker.queue) == 1:
            self._begin(worker)

    def _begin(self, worker: _Worker) -> None:
        case, rows = self._case, len(worker.queue[0].rows)
        slow = sum(self._random.random() < case.slow_samples for _ in range(rows)) if case.slow_samples else 0
        work_s = case.sample_s * (rows + slow * (case.slow_times - 1))
        if case.cached and worker.host is not None:
            hits = self._look_up(worker.host.cache, worker.queue[0])
            work_s -= hits * (case.sample_s - case.hit_s)
        busy_s = work_s * self._random.uniform(1 - JITTER, 1 + JITTER)
        self._clock.after(busy_s, self._filled, worker, busy_s)

    def _look_up(self, cache: set[int], order: act.OrderChunk | act.ProveChunk) -> int:
        """Return the number of an order's samples in a cache; keep the others while it has room."""
        samples = set(self.plan.indices_of(order.position, order.rows).tolist())
        missed = samples - cache
        room = int(self._case.cached * self._case.samples) - len(cache)
        cache |= set(sorted(missed)[: max(0, room)])
        self.hits += len(samples) - len(missed)
        self.misses += len(missed)
        return len(samples) - len(missed)

    def _filled(self, worker: _Worker, busy_s: float) -> None:
        if not worker.is_up or (worker.host and worker.host.is_silent):
            return
        order = worker.queue.popleft()
        if worker.queue:
            self._begin(worker)
        delay_s = 0.0
        if worker.host:
            delay_s = self._case.latency_s + self._wire_s(len(order.rows))
        self._clock.after(delay_s, self._done, worker, order, busy_s)

    def _wire_s(self, rows: int) -> float:
        """How long the rows take to the gateway, behind those before them."""
        if not self._case.wire_bytes_s:
            return 0.0
        took_s = rows * IMAGE_BYTES / self._case.wire_bytes_s
        self._wire_free_s = max(self._wire_free_s, self._clock.now_s) + took_s
        return self._wire_free_s - self._clock.now_s

    def _done(self, worker: _Worker, order: act.OrderChunk | act.ProveChunk, busy_s: float) -> None:
        if not worker.is_up:
            return
        if order.order not in worker.given:
            self._settle(worker, order.order)
            return
        worker.given.remove(order.order)
        if isinstance(order, act.ProveChunk):
            self.do(ev.OrderProved(*_named(worker), order.order, ""))
            return
        busy_us = round(1e6 * busy_s)
        work = NO_WORK._replace(
            busy_us=busy_us, cpu_us=busy_us, parts_us=[busy_us], usual_us=busy_us // len(order.rows)
        )
        if worker.host is None:
            self.do(ev.ChunkDone(worker.number, (order.order,), work, [], ""))
        else:
            self.do(ev.OrderFilled(*_named(worker), order.order, work, [], ""))

    def _take_reference(self, worker: _Worker, proof: act.ProveChunk) -> None:
        if proof.order in worker.given:
            self.do(ev.ReferenceCopied(*_named(worker), proof.order))

    def _withdraw(self, action: act.WithdrawOrder) -> None:
        worker = self._workers.get(remote_number(action.link, action.worker))
        if worker is None or action.order not in worker.given:
            return
        worker.given.remove(action.order)
        self.withdrawn += 1
        self.do(ev.OrderWithdrawn(*_named(worker), action.order))
        waits = [order for order in worker.queue if order.order == action.order][:1]
        if waits and waits[0] is not worker.queue[0] and not (worker.host and worker.host.is_silent):
            worker.queue.remove(waits[0])  # one that has not begun is never begun
            self._clock.after(self._case.latency_s, self._settle, worker, action.order)

    def _settle(self, worker: _Worker, order: int) -> None:
        if worker.is_up:
            self.do(ev.OrderFilled(*_named(worker), order, NO_WORK, [], ""))

    # --- trainers ---------------------------------------------------------------------------------

    def _subscribe(self, number: int, trainers: int) -> None:
        self._trainers[number] = _Trainer(number)
        asked = ev.SubscriptionAsked(number, number, 1, "photos", number - 1, trainers, 0, 0, 0, None, None, False)
        self.do(asked)
        self._clock.after(0.0, self._take, self._trainers[number])

    def _grant(self, grant: act.GrantLease) -> None:
        trainer = self._trainers[grant.subscription]
        self.samples += grant.count
        trainer.leases.append((grant.sequence, grant.generation))
        if trainer.waits_since_s is not None:
            self.waits_s.append(self._clock.now_s - trainer.waits_since_s)
            trainer.waits_since_s = None
            self._hold_next(trainer)

    def _hold_next(self, trainer: _Trainer) -> None:
        trainer.held = trainer.leases.popleft()
        trainer.consumed += 1
        self._clock.after(0.0, self._take, trainer)

    def _take(self, trainer: _Trainer) -> None:
        """Release the batch that it has, and take the next one or wait for it."""
        released = [trainer.held] if trainer.held else []
        trainer.held = None
        if trainer.leases:
            self._hold_next(trainer)
        else:
            trainer.waits_since_s = self._clock.now_s
        is_waiting = trainer.waits_since_s is not None
        self.do(ev.Pulled(trainer.number, trainer.number, trainer.consumed, is_waiting, 0, released))


def _named(worker: _Worker) -> tuple[int, int]:
    """The link of a remote worker, and its number there."""
    return divmod(worker.number, REMOTE_NUMBERS)


class _Pool:
    """All daemons of a case and their worker hosts, which come, die and move by its rates."""

    def __init__(self, case: Case, seed: int) -> None:
        self._case, self._random, self._clock = case, Random(seed), _Clock(is_paced=case.is_paced)
        self._daemons = [_Daemon(case, self._clock, self._random) for _ in range(case.daemons)]
        self._links, self._numbers = count(1), count()
        self._up = self._up_worker_s = self._counted_s = 0.0
        self._hosts = [_Host(self._daemons[number % case.daemons], f"pod-{number}") for number in range(case.hosts)]
        useless = [_Host(self._daemons[0], f"useless-{n}", is_useless=True) for n in range(case.useless_hosts)]
        for host in useless:
            self._clock.after(0.0, self._register, host)
        late = round(case.late_hosts * case.hosts)
        for number, host in enumerate(self._hosts):
            delay_s = self._random.uniform(*case.start_s) if number < late else self._random.uniform(0.1, 1.0)
            self._clock.after(delay_s, self._register, host)
        for rate, what in (
            (case.worker_deaths, self._worker_dies),
            (case.host_deaths, self._host_dies),
            (case.moves, self._host_moves),
        ):
            if rate:
                self._clock.after(case.settle_s / 2, self._again, 1 / rate, what)
        self._clock.after(case.settle_s, self._fall_silent)

    def run(self) -> Result:
        """Let it settle, then measure."""
        case, daemons = self._case, self._daemons
        self._clock.run_until(case.settle_s)
        self._count_up(0)
        self._up_worker_s = 0.0
        for one in daemons:
            one.decisions_s, one.samples, one.orders, one.withdrawn, one.hits, one.misses = 0.0, 0, 0, 0, 0, 0
            one.waits_s.clear()
        self._clock.run_until(case.settle_s + case.measured_s)
        self._count_up(0)
        return Result(
            case,
            sum(one.samples for one in daemons),
            sum(one.orders for one in daemons),
            sum(one.withdrawn for one in daemons),
            sum(one.decisions_s for one in daemons),
            self._up_worker_s,
            [wait_s for one in daemons for wait_s in one.waits_s],
            sum(one.hits for one in daemons),
            sum(one.misses for one in daemons),
        )

    def _again(self, interval_s: float, what: Callable[[], None]) -> None:
        what()
        self._clock.after(self._random.expovariate(1 / interval_s), self._again, interval_s, what)

    def _count_up(self, change: int) -> None:
        self._up_worker_s += self._up * (self._clock.now_s - self._counted_s)
        self._counted_s = self._clock.now_s
        self._up += change

    # --- hosts ------------------------------------------------------------------------------------

    def _register(self, host: _Host) -> None:
        host.link, host.is_silent = next(self._links), False
        host.daemon.do(ev.LinkBegun(host.link, host.name, "", "", 0, self._case.host_workers, "", ""))
        if not host.is_useless:
            host.daemon.do(ev.StreamOpened(host.link, STREAM))
        for _ in range(self._case.host_workers):
            self._add_worker(host, host.link)

    def _add_worker(self, host: _Host, link: int) -> None:
        if host.link != link:
            return  # the host has died meanwhile
        worker = _Worker(remote_number(link, next(self._numbers)), host)
        host.workers.append(worker)
        self._count_up(0 if host.is_useless else 1)
        host.daemon.joins(worker, link)

    def _end_worker(self, host: _Host, worker: _Worker, how: str) -> None:
        host.workers.remove(worker)
        self._count_up(-1)
        host.daemon.gone(worker, how)

    def _end_link(self, host: _Host, how: str) -> None:
        for worker in list(host.workers):
            self._end_worker(host, worker, how)
        link, host.link = host.link, 0
        host.daemon.do(ev.LinkClosed(link, how, is_final=False))

    def _any_host(self) -> _Host | None:
        up = [host for host in self._hosts if host.link and host.workers and not host.is_silent]
        return self._random.choice(up) if up else None

    def _worker_dies(self) -> None:
        if host := self._any_host():
            self._end_worker(host, self._random.choice(host.workers), "signal 9 (SIGKILL)")
            self._clock.after(self._case.worker_start_s, self._add_worker, host, host.link)

    def _host_dies(self) -> None:
        if host := self._any_host():
            self._end_link(host, "its connection ended")
            self._clock.after(self._case.host_start_s, self._register, host)

    def _fall_silent(self) -> None:
        for host in self._hosts[: round(self._case.half_open * len(self._hosts))]:
            host.is_silent = True
            self._clock.after(HEARTBEAT_S, self._close_silent, host)

    def _close_silent(self, host: _Host) -> None:
        self._end_link(host, "it is silent")
        self._clock.after(self._case.host_start_s, self._register, host)

    def _host_moves(self) -> None:
        """A host leaves its daemon, finishes what it has, and registers at the next one."""
        host = self._any_host()
        if host is not None:
            host.daemon.do(ev.HostLeaves(host.link))
            self._drain(host, host.link)

    def _drain(self, host: _Host, link: int) -> None:
        if host.link != link:
            return
        if any(worker.given or worker.queue for worker in host.workers):
            self._clock.after(0.05, self._drain, host, link)
            return
        self._end_link(host, "it left")
        host.daemon = self._daemons[(self._daemons.index(host.daemon) + 1) % len(self._daemons)]
        self._clock.after(self._case.host_start_s, self._register, host)
