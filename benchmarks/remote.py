"""Benchmark: the cost of the network.

38.5 MB batches over loopback TCP against a bare pair of processes, and the effect on others.

Where sending is measured, the stream does not change from epoch to epoch, so after the first one
nothing is decoded.

Where it is measured what others cost a trainer, that trainer's own work is the same on both sides:
fresh batches, decoded for it alone. What the slow one reads is decoded already, and is only sent.
What the hostile one says is never admitted as a claim, which would have its fair share. One worker
decodes, so that two cores have room for everybody: a loss is then the daemon's, and not the want of
a core. The sides take turns every few batches, as the noise of a shared machine lasts for seconds.
"""

import os
import random
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
from harness import RESIZE, Bench, Figure, Player, endless, orders, spread

import batchd
import batchd_client
from batchd.runtime.keys import KeyDirectory
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.keys import connection_file_text
from batchd_wire.messages import AskStatus, Greet, Pull, Subscribe

BATCHES = 160
BATCH_BYTES = 256 * 224 * 224 * 3
CLIENTS = 200
LONG = 40
"""Batches that have to be decoded, so many that those which were ready before count for little."""
TURN = 8
"""So many batches a turn; with one worker a second or two."""
SLOW_SHARE = 0.05
"""What a slow trainer reads, in images, of what the one beside it does."""
SLOW_BATCH = 32
IMAGE_BYTES = BATCH_BYTES // 256
HOSTILE_PER_S = 200.0
CONNECTION_EVERY = 4
"""Of so many hostile acts one is a connection, below ZeroMQ; the others are messages."""


def run(bench: Bench) -> None:
    """One and two subscriptions, with keys.

    Beside a stopped, a slow and a hostile trainer, and two hundred at once.
    """
    _throughput(bench)
    _beside_a_stopped_one(bench)
    _beside_a_slow_one(bench)
    _beside_a_hostile_one(bench)
    _many_clients(bench)


def _throughput(bench: Bench) -> None:
    with ExitStack() as stack:
        address, _, _ = stack.enter_context(
            served_over_tcp(bench, "plain", pipeline=RESIZE, shuffle="false", repeats=1)
        )
        curve, _, key = stack.enter_context(
            served_over_tcp(bench, "curve", with_key=True, pipeline=RESIZE, shuffle="false", repeats=1)
        )
        first, second = (stack.enter_context(Player(_trainer, address, None)) for _ in range(2))
        secret = stack.enter_context(Player(_trainer, curve, key))
        sender = stack.enter_context(Player(_sender))
        receiver = stack.enter_context(Player(_receiver))
        sides: dict[str, Callable[[], float]] = {
            "bare": lambda: _bare(sender, receiver),
            "one": lambda: first.ask(BATCHES),
            "two": lambda: _both(first, second),
            "curve": lambda: secret.ask(BATCHES),
        }
        for side in sides.values():
            side()
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(bench.rounds):
            for name, side in sides.items():
                rates[name].append(bench.measure(name, side) / 1e9)
    print(", ".join(f"{name} {spread(values, 2)} GB/s" for name, values in rates.items()))
    ratios = {
        name: [one / bare for one, bare in zip(values, rates["bare"], strict=True)] for name, values in rates.items()
    }
    print(", ".join(f"{name} / bare {spread(ratios[name], 2)}" for name in ("one", "two", "curve")))
    bench.report(Figure("remote-one-to-bare", statistics.median(ratios["one"]), ">=", 0.8))
    both = [two / one for one, two in zip(rates["one"], rates["two"], strict=True)]
    bench.report(Figure("remote-two-to-one", statistics.median(both), ">=", 1.0))
    keyed = [one / plain for one, plain in zip(rates["curve"], rates["one"], strict=True)]
    bench.report(Figure("remote-curve-to-plain", statistics.median(keyed), ">=", 0.0))


def _beside_a_stopped_one(bench: Bench) -> None:
    """Decoded images/s of a local trainer, alone and beside a remote one that was stopped."""
    with ExitStack() as stack:
        address, near, _ = stack.enter_context(served_over_tcp(bench, "beside"))
        local = stack.enter_context(Player(_trainer, near, None))
        ratios = []
        local.ask(4)
        for number in range(bench.rounds + 1):
            rates = {}
            for is_beside in (False, True) if number % 2 else (True, False):
                side = partial(_while_stopped, address, local) if is_beside else partial(local.ask, LONG)
                rates[is_beside] = bench.measure("beside a stopped one" if is_beside else "alone", side)
            ratios.append(rates[True] / rates[False])
    print(f"a local trainer beside a stopped remote one / alone: {spread(ratios, 3)}")
    bench.report(Figure("remote-stopped-cost", statistics.median(ratios), ">=", 0.95))


def _while_stopped(address: str, local: Player) -> float:
    """The local trainer's rate while a remote one is stopped in mid-stream."""
    with Player(_trainer, address, None) as stopped:
        stopped.ask(2)
        assert stopped.process.pid is not None
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            local.ask(LONG // 4)  # meanwhile what it had claimed is decoded
            return float(local.ask(LONG))
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)


def _beside_a_slow_one(bench: Bench) -> None:
    """Decoded images/s of a local trainer, alone and beside a remote one at 5 % of its rate."""
    still = bench.stream("still", pipeline=RESIZE, batch_size=SLOW_BATCH, repeats=1, shuffle="false")
    with ExitStack() as stack:
        address, near, _ = stack.enter_context(served_over_tcp(bench, "slow", workers=1, more=still))
        local = stack.enter_context(Player(_trainer, near, None))
        slow = stack.enter_context(Player(_slow, address))
        slow.tell(20.0)
        local.ask(TURN)
        slow.ask("enough")
        per_s = SLOW_SHARE * local.ask(TURN) / IMAGE_BYTES / SLOW_BATCH
        ratios = _ratios(bench, local, slow, per_s)
    print(f"a local trainer beside a slow remote one / alone: {spread(ratios, 3)}")
    bench.report(Figure("remote-slow-cost", statistics.median(ratios), ">=", 0.95))


def _beside_a_hostile_one(bench: Bench) -> None:
    """Decoded images/s of a local or remote trainer, alone and during a flood of messages."""
    with ExitStack() as stack:
        address, near, _ = stack.enter_context(served_over_tcp(bench, "hostile", workers=1))
        hostile = stack.enter_context(Player(_hostile, address))
        for side, place in (("local", near), ("remote", address)):
            with Player(_trainer, place, None) as trainer:
                trainer.ask(TURN)
                ratios = _ratios(bench, trainer, hostile, HOSTILE_PER_S)
            print(f"a {side} trainer while the port is attacked / alone: {spread(ratios, 3)}")
            bench.report(Figure(f"remote-attacked-{side}", statistics.median(ratios), ">=", 0.95))


def _ratios(bench: Bench, good: Player, other: Player, per_s: float) -> list[float]:
    """The good one's rate beside the other, who acts so often a second, to its rate alone.

    Each side is first in turn.
    """
    ratios = []
    for number in range(2 * bench.rounds):
        rates = {}
        for is_beside in (False, True) if number % 2 else (True, False):
            if is_beside:
                other.tell(per_s)
            rates[is_beside] = bench.measure("beside another" if is_beside else "alone", partial(good.ask, TURN))
            if is_beside:
                assert other.ask("enough"), "it did nothing"
        ratios.append(rates[True] / rates[False])
    return ratios


def _many_clients(bench: Bench) -> None:
    """So many connect within 100 ms to a warm stream of small batches.

    When has the last one its first batch?
    """
    config = {"batch_size": 8, "pipeline": SMALL, "memory": '"1GiB"'}
    with ExitStack() as stack:
        address, _, _ = stack.enter_context(served_over_tcp(bench, "many", **config))
        crowds = [stack.enter_context(Player(_crowd, address, CLIENTS // 4)) for _ in range(4)]
        worst = []
        for _ in range(min(3, bench.rounds)):
            for crowd in crowds:
                crowd.tell("connect")
            worst.append(max(crowd.hear() for crowd in crowds))
    print(f"{CLIENTS} clients at once, the last one's first batch: {spread(worst, 2)} s")
    bench.report(Figure("remote-200-clients-s", statistics.median(worst), "<=", 3.0))


SMALL = '[ { op = "decode" }, { op = "resize", size = [32, 32] } ]'


@contextmanager
def served_over_tcp(
    bench: Bench, name: str, *, with_key: bool = False, more: str = "", **keys: Any
) -> Iterator[tuple[str, str, Path | None]]:
    """A daemon with a port: its addresses, and a connection file if it has keys.

    ``more`` is added to its configuration.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = bench.config(**keys)
    folder = bench.scratch / name
    lines = f'[daemon]\ntcp = "127.0.0.1:{port}"\nkeys_dir = "{folder}"\n'
    file = bench.scratch / f"{name}.toml"
    file.write_text(config.read_text().replace("[daemon]\n", lines) + more)
    key = None
    if with_key:
        key = bench.scratch / f"{name}.key"
        key.touch(0o600)
        key.write_text(connection_file_text(KeyDirectory(folder).new("bench", None)))
    with batchd.serve(file) as near:
        yield f"tcp://127.0.0.1:{port}", near, key


def _both(first: Player, second: Player) -> float:
    for player in (first, second):
        player.tell(BATCHES)
    return float(first.hear()) + float(second.hear())


def _bare(sender: Player, receiver: Player) -> float:
    receiver.tell(("listen", BATCHES))
    sender.ask((receiver.hear(), BATCHES))
    return float(receiver.hear())


def _trainer(pipe: Connection, address: str, key: Path | None) -> None:
    """Take batches and give each back: bytes/s."""
    with batchd_client.connect(address, key=str(key) if key else None) as daemon:
        batches = endless(daemon.stream("photos"))
        for count in orders(pipe):
            started_s, taken = time.perf_counter(), 0
            for _ in range(count):
                with next(batches) as batch:
                    taken += batch["image"].nbytes
            pipe.send(taken / (time.perf_counter() - started_s))


def _paced(pipe: Connection, act: Callable[[], object]) -> None:
    """For each order do something so often a second, until the next word.

    Answer how often it was done.
    """
    for per_s in orders(pipe):
        started_s, done = time.perf_counter(), 0
        while not pipe.poll(max(0.0, started_s + done / per_s - time.perf_counter())):
            act()
            done += 1
        pipe.recv()
        pipe.send(done)


def _slow(pipe: Connection, address: str) -> None:
    """Take a batch now and then."""
    with batchd_client.connect(address) as daemon:
        batches = endless(daemon.stream("still"))
        _paced(pipe, lambda: next(batches).release())


def _hostile(pipe: Connection, address: str) -> None:
    """Say what is nearly a message, in a session and over connections that never become one."""
    host, _, port = address.removeprefix("tcp://").partition(":")
    chance = random.Random(1)
    good = [
        Greet(PROTOCOL_VERSION, "hostile", 1, ""),
        Subscribe(1, "no such stream", 0, 1, 2, 0, 0, None, None, is_spectator=False),
        Pull(1, 1, True, 1, [(0, 1)]),
        AskStatus(1),
    ]
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(address)

    def act() -> None:
        words = bytearray(chance.choice(good).encode())
        words[chance.randrange(len(words))] ^= 1 << chance.randrange(8)
        if chance.randrange(CONNECTION_EVERY):
            with suppress(zmq.Again):
                dealer.send(bytes(words), zmq.NOBLOCK)
            while dealer.poll(0):
                dealer.recv_multipart()
        else:
            with suppress(OSError), socket.create_connection((host, int(port))) as connection:
                connection.sendall(words * 9)

    with closing(dealer):
        _paced(pipe, act)


def _sender(pipe: Connection) -> None:
    data = memoryview(bytearray(os.urandom(1 << 20) * (BATCH_BYTES // (1 << 20) + 1)))[:BATCH_BYTES]
    for port, count in orders(pipe):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for _ in range(count):
                connection.sendall(data)
        pipe.send(None)


def _receiver(pipe: Connection) -> None:
    buffer = memoryview(bytearray(BATCH_BYTES))
    for _, count in orders(pipe):
        with socket.create_server(("127.0.0.1", 0)) as server:
            pipe.send(server.getsockname()[1])
            connection, _ = server.accept()
            with connection:
                started_s = time.perf_counter()
                for _ in range(count):
                    received = 0
                    while received < BATCH_BYTES:
                        received += connection.recv_into(buffer[received:])
                pipe.send(count * BATCH_BYTES / (time.perf_counter() - started_s))


def _crowd(pipe: Connection, address: str, clients: int) -> None:
    """Connect many times at once, each in a thread.

    Seconds until the last one has its first batch.
    """
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  in the player alone

    def first_batch(_number: int) -> float:
        started_s = time.perf_counter()
        with batchd_client.connect(address, connect_timeout_s=30.0) as daemon:
            next(iter(daemon.stream("photos", window=1))).release()
        return time.perf_counter() - started_s

    with ThreadPoolExecutor(clients) as pool:
        for _ in orders(pipe):
            pipe.send(max(pool.map(first_batch, range(clients))))
