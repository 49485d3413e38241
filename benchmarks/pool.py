"""Benchmark: workers of other machines: bytes into the slot, decoding, deaths, starts, simulation.

All of it runs on this machine, over loopback: what a network adds is not in it. Where the gateway
and the link are measured, workers sleep instead of decoding, and rows are zeros; beside them, two
bare processes send frames of the same sizes over ZeroMQ and copy each once, and do nothing else.
Where decoding is compared, both sides have the same two cores, and the daemon's own worker beside
remote ones only sleeps, so that exactly two processes decode on either side; only rows of remote
workers count.

A busy machine changes times; CPU time and ratios of sides in turn change less. So the load is
printed beside each part. The last part simulates a pool that no machine here could hold: see
``pool_simulation``.

``GATEWAYS=2`` receives the bytes into the slot by two gateways, one worker host each. The targets
are those of one.
"""

import mmap
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pool_simulation
import sleeping_hosts
import zmq
from harness import Bench, Figure, Player, children, cpu_s, endless, family_cpu_s, orders, spread
from pool_daemon import Daemon, run_daemon, run_host, wait_until
from pool_simulation import CASES, PACED, simulate
from scaling_daemon import DECISIONS

import batchd_client
from batchd.pool.gateway_child import ALLOCATOR
from batchd.pool.messages import ROW_FRAME_BYTES
from batchd.pool.worker_host.workers import SCRATCH_MAX
from batchd_wire.wording import counted

ROW_BYTES = 224 * 224 * 3
TURN_S = 4.0
"""Of one side, after the time in which it comes up to speed."""
WARM_S = 1.0
LOCAL_US = 1_200
"""An image of a local worker that sleeps, beside remote workers that decode."""
LOCAL_FAST_US = 300
"""The same beside workers that cost nothing: short, as its batches are waited for, too."""
AHEAD = 8
"""Batches ahead of the trainer: with three, remote rows wait for the local worker's 64 of 19 ms."""
FREE_ROWS = 64
"""Of an order where rows cost nothing: 10 MB."""
ORDER_BYTES = FREE_ROWS * ROW_BYTES
BARE_ORDERS = 2 * SCRATCH_MAX
"""In flight over the bare link: as many as two workers have memory for."""
BARE_MEMORY = 16
"""Orders in the memory that the bare receiver writes: four slots."""
KILLS_A_ROUND = 5
AFTER_KILL_S = 4.0
SAMPLES = 1_000_000
LINKS = 200
LINK_TRAINERS = 8
LINK_IMAGE_S = 0.05
LINK_SETTLE_S = 15.0
LINK_ROUND_S = 10.0
GATEWAYS = int(os.environ.get("GATEWAYS", "1"))


def run(bench: Bench) -> None:
    """Everything, each part with daemons of its own."""
    for part in (_into_the_slot, _decoding, _deaths, _registration, _links, _simulated):
        bench.begin()
        part(bench)
        print(f"  (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs)", flush=True)


def _reader(pipe: Connection, address: str, rank: int = 0, world_size: int = 1) -> None:
    """A trainer: takes batches from "go" to "stop", and answers when each of them came."""
    with batchd_client.connect(address) as daemon:
        batches = endless(daemon.stream("photos", rank=rank, world_size=world_size))
        for _go in orders(pipe):
            arrivals_s = [time.monotonic()]
            while not pipe.poll():
                next(batches).release()
                arrivals_s.append(time.monotonic())
            pipe.recv()
            pipe.send(arrivals_s)


# --- bytes and decoding ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one side did in its turn. ``cpu_s``: CPU time of its processes, by their names."""

    samples: int
    seconds: float
    cpu_s: dict[str, float]

    @property
    def rate(self) -> float:
        """Samples in a second."""
        return self.samples / self.seconds

    @property
    def sample_s(self) -> float:
        """CPU time of a sample, in all processes that were counted."""
        return sum(self.cpu_s.values()) / self.samples


Cpu = dict[str, Callable[[], float]]
"""What reads the CPU time of the processes that count, by their names."""


def _turn(trainer: Player, samples: Callable[[], int], cpu: Cpu) -> _Turn:
    """Let a trainer read for a turn; afterwards wait until its ring is full again."""
    trainer.tell("go")
    time.sleep(WARM_S)
    began_s, before_s, before = time.monotonic(), {name: read() for name, read in cpu.items()}, samples()
    time.sleep(TURN_S)
    used_s = {name: read() - before_s[name] for name, read in cpu.items()}
    turn = _Turn(samples() - before, time.monotonic() - began_s, used_s)
    trainer.ask("stop")
    last = -1
    while (now := samples()) != last:
        last = now
        time.sleep(WARM_S / 2)
    return turn


def _rounds(bench: Bench, sides: dict[str, Callable[[], _Turn]]) -> dict[str, list[_Turn]]:
    """One turn of every side to come up to speed, then a round for each of ``bench.rounds``."""
    for side in sides.values():
        side()
    turns: dict[str, list[_Turn]] = {name: [] for name in sides}
    for number in range(bench.rounds):
        for name in list(sides) if number % 2 else reversed(sides):
            turns[name].append(bench.measure(name, sides[name]))
    return turns


def _bare_receiver(pipe: Connection, counter: Any, pair: tuple[bytes, bytes] | None) -> None:
    """Ask for orders from "go" to "stop", and copy each frame once into shared memory.

    Counts samples in ``counter``. ``pair``: public and secret key, or None for plain frames.
    """
    memory = memoryview(mmap.mmap(-1, BARE_MEMORY * ORDER_BYTES))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set_hwm(0)
        if pair is not None:
            router.curve_server, (router.curve_publickey, router.curve_secretkey) = True, pair
        pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
        sender, _hello = router.recv_multipart()

        def take() -> None:
            at = (counter.value // FREE_ROWS) % BARE_MEMORY * ORDER_BYTES
            last = router.recv(copy=False)
            while last.more:
                last = router.recv(copy=False)
                memory[at : at + len(last.buffer)] = last.buffer
                at += len(last.buffer)
            counter.value += FREE_ROWS

        for _go in orders(pipe):
            for _ in range(BARE_ORDERS):
                router.send_multipart([sender, b""])
            while not pipe.poll():
                take()
                router.send_multipart([sender, b""])
            for _ in range(BARE_ORDERS):
                take()
            pipe.send(pipe.recv())


def _bare_sender(pipe: Connection, port: int, pair: tuple[bytes, bytes] | None) -> None:
    """Send the rows of an order for each request, without copying them, until ``pipe`` ends."""
    memory = memoryview(mmap.mmap(-1, BARE_ORDERS * ORDER_BYTES))
    memory[:] = bytes(len(memory))  # touch its pages
    rows = [memory[at : at + ORDER_BYTES] for at in range(0, len(memory), ORDER_BYTES)]
    frames = [[one[at : at + ROW_FRAME_BYTES] for at in range(0, ORDER_BYTES, ROW_FRAME_BYTES)] for one in rows]
    poller = zmq.Poller()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set_hwm(0)
        if pair is not None:
            dealer.curve_serverkey, (dealer.curve_publickey, dealer.curve_secretkey) = pair[0], pair
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"")
        poller.register(dealer, zmq.POLLIN)
        poller.register(pipe.fileno(), zmq.POLLIN)
        for number in count():
            if pipe.fileno() in dict(poller.poll()):
                return
            dealer.recv()
            dealer.send_multipart(frames[number % BARE_ORDERS], copy=False)


def _bare_link(stack: ExitStack, *, with_key: bool) -> Callable[[], _Turn]:
    """Start the two bare processes; return what measures a turn of them."""
    pair = zmq.curve_keypair() if with_key else None
    counter = get_context("spawn").Value("Q", lock=False)
    with patch.dict(os.environ, ALLOCATOR):
        receiver = stack.enter_context(Player(_bare_receiver, counter, pair))
        sender = stack.enter_context(Player(_bare_sender, receiver.hear(), pair))
    cpu = {name: partial(cpu_s, side.process.pid) for name, side in (("receiver", receiver), ("sender", sender))}
    return lambda: _turn(receiver, lambda: counter.value, cpu)


def _into_the_slot(bench: Bench) -> None:
    """GB/s of rows that cost nothing, by one link a gateway, and both ends' CPU for each GB.

    In turn with the least that ZeroMQ needs here for the same bytes.
    """
    file = bench.scratch / "rows.npy"
    np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=(8_192, 224, 224, 3))  # sparse
    stream = f'[streams.photos]\nsource = {{ type = "npy", path = "{file}" }}\nbatch_size = 256\nwindow = {AHEAD}\n'
    with ExitStack() as stack:
        sides: dict[str, Callable[[], _Turn]] = {}
        for name, with_key in (("plain", False), ("curve", True)):
            daemon = stack.enter_context(
                run_daemon(
                    bench.scratch / name,
                    stream,
                    with_key=with_key,
                    image_us=LOCAL_FAST_US,
                    gateways=GATEWAYS,
                    more=f"chunk_rows = {FREE_ROWS}\n",
                )
            )
            trainer = stack.enter_context(Player(_reader, daemon.address))
            ends = [stack.enter_context(run_host(daemon, image_us=1.0)) for _ in range(GATEWAYS)]
            trainer.tell("go")
            daemon.wait_serving(GATEWAYS)
            trainer.ask("stop")
            cpu: Cpu = {
                "receiver": lambda gateways=daemon.gateways: sum(map(cpu_s, gateways)),
                "sender": lambda ends=ends: sum(map(cpu_s, ends)),
            }
            sides[name] = partial(_turn, trainer, lambda daemon=daemon: daemon.remote_samples, cpu)
            sides[f"bare {name}"] = _bare_link(stack, with_key=with_key)
        turns = _rounds(bench, sides)
    links = counted(GATEWAYS, "link")
    for name, at_least, cpu_at_most in (("plain", 3.0, 0.25), ("curve", 1.3, 0.70)):
        ours, bare = turns[name], turns[f"bare {name}"]
        for title, side in ((f"{links}, {name}", ours), (f"bare link, {name}", bare)):
            gateway, host = (spread([_gb_s(turn, end) for turn in side]) for end in ("receiver", "sender"))
            rates = spread([turn.rate * ROW_BYTES / 1e9 for turn in side])
            print(f"{title}: {rates} GB/s; CPU for each GB {gateway} s to receive, {host} s to send")
        pairs = list(zip(ours, bare, strict=True))
        rate = statistics.median(turn.rate * ROW_BYTES / 1e9 for turn in ours)
        bench.report(Figure(f"pool-{name}-gb-s", rate, ">=", at_least))
        each = statistics.median(_gb_s(turn, "receiver") for turn in ours)
        bench.report(Figure(f"pool-{name}-gateway-cpu-s-gb", each, "<=", cpu_at_most))
        ratio = statistics.median(one.rate / other.rate for one, other in pairs)
        bench.report(Figure(f"pool-{name}-to-bare", ratio, ">=", 0.8))
        for end, process in (("receiver", "gateway"), ("sender", "host")):
            more = statistics.median(_gb_s(one, end) / _gb_s(other, end) for one, other in pairs)
            bench.report(Figure(f"pool-{name}-{process}-cpu-to-bare", more, "<=", 1.15))


def _gb_s(turn: _Turn, end: str) -> float:
    """CPU seconds of one end of a link for each GB of rows."""
    return turn.cpu_s[end] / turn.samples / ROW_BYTES * 1e9


def _decoding(bench: Bench) -> None:
    """Photographs by two remote workers ÷ by two local ones, on the same two cores."""
    stream = bench.stream("photos", repeats=8)
    with ExitStack() as stack:
        local = stack.enter_context(run_daemon(bench.scratch / "local", stream, workers=2, gateways=0))
        trainer = stack.enter_context(Player(_reader, local.address))
        cpu = {"trainer": partial(cpu_s, trainer.process.pid), "daemon": partial(cpu_s, local.pid)}
        sides = {"local": partial(_turn, trainer, lambda: local.samples, cpu | {"workers": partial(_below, local.pid)})}
        for name, with_key in (("plain", False), ("curve", True)):
            daemon = stack.enter_context(
                run_daemon(
                    bench.scratch / f"decoding-{name}",
                    stream,
                    with_key=with_key,
                    image_us=LOCAL_US,
                    more='pool_accept = "any"\npool_audit = 0\n',
                )
            )
            trainer = stack.enter_context(Player(_reader, daemon.address))
            host = stack.enter_context(run_host(daemon))
            daemon.wait_serving(1)
            (gateway,) = daemon.gateways
            pids = {"trainer": trainer.process.pid, "daemon": daemon.pid, "gateway": gateway, "host": host}
            cpu = {process: partial(cpu_s, pid) for process, pid in pids.items()}
            cpu["workers"] = partial(_below, host)
            cpu["sleeping worker"] = lambda pid=daemon.pid, other=gateway: _below(pid) - cpu_s(other)
            sides[name] = partial(_turn, trainer, lambda daemon=daemon: daemon.remote_samples, cpu)
        turns = _rounds(bench, sides)
        _memory(bench, host)
    for name, values in turns.items():
        print(
            f"{name}: {spread([turn.rate for turn in values], 0)} images/s, "
            f"{spread([1e6 * turn.sample_s for turn in values], 0)} us of CPU for each, all processes"
        )
        each = {
            one: statistics.median(1e6 * turn.cpu_s[one] / turn.samples for turn in values) for one in values[0].cpu_s
        }
        print("  of it " + ", ".join(f"{process} {us:.0f}" for process, us in each.items()))
    for name, target in (("plain", 0.88), ("curve", 0.80)):
        pairs = list(zip(turns[name], turns["local"], strict=True))
        ratios = [remote.rate / here.rate for remote, here in pairs]
        cpu_ratios = [here.sample_s / remote.sample_s for remote, here in pairs]
        print(f"two remote workers, {name} / two local ones: {spread(ratios)}; by CPU time {spread(cpu_ratios)}")
        bench.report(Figure(f"pool-{name}-to-local", statistics.median(ratios), ">=", target))
        bench.report(Figure(f"pool-{name}-to-local-by-cpu", statistics.median(cpu_ratios), ">=", target))


def _below(pid: int) -> float:
    """CPU time of everything that lives below a process, in seconds."""
    return family_cpu_s(pid) - cpu_s(pid)


def _memory(bench: Bench, host: int) -> None:
    """PSS of a worker host and of its fork server, without its workers and their scratch memory."""
    (server,) = children(host)
    each_mb = {name: _pss_bytes(pid) / 1e6 for name, pid in (("worker host", host), ("fork server", server))}
    workers_mb = [_pss_bytes(pid) / 1e6 for pid in children(server)]
    print(f"PSS without memory of rows: {each_mb}, workers {', '.join(f'{one:.0f}' for one in workers_mb)} MB")
    bench.report(Figure("pool-host-mb", sum(each_mb.values()), "<=", 60, 1))


def _pss_bytes(pid: int) -> int:
    """The part of a process's memory that is its own, where shared pages count by their sharers."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            counts = "memfd:" not in line
        elif counts and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total


# --- deaths and starts ----------------------------------------------------------------------------


def _deaths(bench: Bench) -> None:
    """The longest wait of a trainer after its worker host was killed, or stopped without a word."""
    stream = bench.stream("photos", batch_size=32, repeats=1)
    gaps: dict[str, list[float]] = {"killed": [], "half-open": []}
    with ExitStack() as stack:
        daemon = stack.enter_context(run_daemon(bench.scratch / "deaths", stream))
        trainer = stack.enter_context(Player(_reader, daemon.address))
        for _ in range(KILLS_A_ROUND * bench.rounds):
            for name, number in (("killed", signal.SIGKILL), ("half-open", signal.SIGSTOP)):
                trainer.tell("go")
                with run_host(daemon) as host:
                    daemon.wait_serving(1)
                    before = daemon.remote_samples
                    wait_until(lambda before=before: daemon.remote_samples > before + 64, "rows of the worker host")
                    died_s = time.monotonic()
                    os.kill(host, number)
                    time.sleep(AFTER_KILL_S)
                    gaps[name].append(_longest_gap(trainer.ask("stop"), died_s))
                    with suppress(ProcessLookupError):
                        os.kill(host, signal.SIGKILL)
                wait_until(lambda: not daemon.links, "end of the link")
    for name, target in (("killed", 0.5), ("half-open", 2.0)):
        p50, p99 = np.percentile(gaps[name], [50, 99])
        print(
            f"worker host {name}, longest wait for a batch: p50 {p50:.3f} s, p99 {p99:.3f} s, {len(gaps[name])} times"
        )
        bench.report(Figure(f"pool-{name}-p99-s", float(p99), "<=", target, 3))


def _longest_gap(arrivals_s: list[float], died_s: float) -> float:
    """The longest time between two batches, the later one after ``died_s``."""
    pairs = pairwise(arrivals_s)
    return max((later - max(sooner, died_s) for sooner, later in pairs if later > died_s), default=AFTER_KILL_S)


def _registration(bench: Bench) -> None:
    """From a link's beginning to its first rows; an index of 10^6 paths, cached there or not."""
    photos = sorted(path for path in bench.photos.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png"})
    listing = bench.scratch / "million.txt"
    listing.write_text("".join(f"{photos[number % len(photos)]} {number % 1000}\n" for number in range(SAMPLES)))
    stream = (
        f'[streams.photos]\nsource = {{ type = "list", path = "{listing}", allow_outside_root = true }}\n'
        'batch_size = 32\npipeline = [{ op = "decode" }, { op = "resize", size = [224, 224] }]\n'
    )
    found: dict[str, list[float]] = {"cached": [], "sent": []}
    starts_s: list[float] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(run_daemon(bench.scratch / "registration", stream))
        trainer = stack.enter_context(Player(_reader, daemon.address))
        trainer.tell("go")
        for _ in range(bench.rounds):
            for name in ("sent", "cached"):
                start_s, rows_s = bench.measure(name, partial(_start, daemon, bench.scratch / "indexes", name))
                starts_s.append(start_s)
                found[name].append(rows_s)
        trainer.ask("stop")
    print(f"`batchd worker` to its registration: {spread(starts_s)} s")
    for name, target in (("cached", 1.0), ("sent", 3.0)):
        print(f"registration to the first rows, index of {SAMPLES} samples {name}: {spread(found[name])} s")
        bench.report(Figure(f"pool-first-rows-{name}-s", statistics.median(found[name]), "<=", target))


def _start(daemon: Daemon, folder: Path, name: str) -> tuple[float, float]:
    """Seconds from `batchd worker` to its registration, and from there to its first rows."""
    if name == "sent":
        shutil.rmtree(folder, ignore_errors=True)
    began_s = time.monotonic()
    with run_host(daemon, index_dir=folder):
        wait_until(lambda: bool(daemon.links), "worker host")
        registered_s = time.monotonic()
        wait_until(lambda: daemon.remote_samples > 0, "rows of the worker host")
        rows_s = time.monotonic() - registered_s
    wait_until(lambda: not daemon.links, "end of the link")
    return registered_s - began_s, rows_s


# --- many links, and the simulation ---------------------------------------------------------------


def _links(bench: Bench) -> None:
    """Orders/s and CPU of the decisions with 200 real links, ÷ those of the simulation."""
    small = '[{ op = "decode" }, { op = "resize", size = [8, 8] }]'
    stream = bench.stream("photos", pipeline=small, repeats=100, window="8")
    file = bench.scratch / "decisions"
    with ExitStack() as stack:
        daemon = stack.enter_context(
            run_daemon(
                bench.scratch / "links", stream, image_us=1e6 * LINK_IMAGE_S, more="chunk_rows = 256\n", decisions=file
            )
        )
        endpoint = f"tcp://{daemon.status()['pool']['address'].removeprefix('tcp://')}"
        stack.enter_context(Player(sleeping_hosts.play, endpoint, LINKS, LINK_IMAGE_S))
        trainers = [
            stack.enter_context(Player(_reader, daemon.address, rank, LINK_TRAINERS)) for rank in range(LINK_TRAINERS)
        ]
        for trainer in trainers:
            trainer.tell("go")
        daemon.wait_serving(LINKS)
        time.sleep(LINK_SETTLE_S)
        window = bench.measure("links", partial(_links_window, daemon, file))
        slots = daemon.status()["streams"][0]["slots_max"]
        for trainer in trainers:
            trainer.process.kill()
    case = pool_simulation.Case(
        "links",
        LINKS,
        1,
        LINK_TRAINERS,
        LINK_IMAGE_S,
        slots,
        window=8,
        is_paced=True,
        settle_s=LINK_SETTLE_S,
        measured_s=LINK_ROUND_S,
    )
    like = simulate(case)
    real, said = (
        (window["given"], window["images"], 1e6 * window["decided_s"] / window["given"]),
        (
            like.orders / case.measured_s,
            like.images_s,
            like.order_us,
        ),
    )
    print(
        f"{LINKS} links: {real[0]:,.0f} orders/s, {real[1]:,.0f} images/s, {real[2]:.0f} us of decisions for an order; "
        f"simulated {said[0]:,.0f}, {said[1]:,.0f}, {said[2]:.0f}; "
        f"daemon {100 * window['daemon_s']:.0f} % of a core, gateway {100 * window['gateway_s']:.0f} %"
    )
    bench.report(Figure("pool-links-orders-to-simulation", real[0] / said[0], ">=", 0.75))
    bench.report(Figure("pool-links-decisions-to-simulation", real[2] / said[2], "<=", 1.25))


def _links_window(daemon: Daemon, decisions: Path) -> dict[str, float]:
    """Orders, images, and CPU seconds of decisions, daemon and gateway, each in a second."""
    (gateway,) = daemon.gateways

    def counted_so_far() -> dict[str, float]:
        decided_s, given = DECISIONS.unpack(decisions.read_bytes())
        cpu = {"daemon_s": cpu_s(daemon.pid), "gateway_s": cpu_s(gateway)}
        return {"decided_s": decided_s, "given": given, "images": daemon.samples, **cpu}

    began_s, before = time.monotonic(), counted_so_far()
    time.sleep(LINK_ROUND_S)
    after, seconds = counted_so_far(), time.monotonic() - began_s
    return {name: (after[name] - before[name]) / seconds for name in before}


def _simulated(bench: Bench) -> None:
    """The table of cases past this machine. Only the time of the decisions is not simulated."""
    print(pool_simulation.HEADER)
    results = {}
    for case in CASES:
        results[case.name] = simulate(case)
        print(pool_simulation.line(results[case.name]), flush=True)
    bench.report(Figure("pool-simulated-decisions-percent", 100 * results[PACED].core_at(100_000), "<=", 35, 1))
    bench.report(Figure("pool-simulated-shared-hits", results[pool_simulation.SHARED].hit_ratio, ">=", 0.95, 3))
    bench.report(Figure("pool-simulated-churn", results[pool_simulation.CHURN].of_all, ">=", 0.95, 3))
