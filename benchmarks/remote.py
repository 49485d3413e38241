"""What does the network cost? 38.5 MB batches over loopback TCP against a bare pair of processes, and what others notice.

The stream does not change from epoch to epoch, so after the first one nothing is decoded: all that is left is sending.
"""

import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import RESIZE, Bench, Figure, Player, endless, orders, spread

import batchd
import batchd_client
from batchd.daemon.keys import KeyDirectory
from batchd_wire.keys import connection_file_text

BATCHES = 160
BATCH_BYTES = 256 * 224 * 224 * 3
CLIENTS = 200
LONG = 40
"""Batches that have to be decoded, so many that those which were ready before count for little."""


def run(bench: Bench) -> None:
    """One and two subscriptions, with keys, beside a stopped trainer, and two hundred at once."""
    _throughput(bench)
    _beside_a_stopped_one(bench)
    _many_clients(bench)


def _throughput(bench: Bench) -> None:
    with ExitStack() as stack:
        address, _, _ = stack.enter_context(_served(bench, "plain", pipeline=RESIZE, shuffle="false", repeats=1))
        curve, _, key = stack.enter_context(
            _served(bench, "curve", with_key=True, pipeline=RESIZE, shuffle="false", repeats=1)
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
                rates[name].append(side() / 1e9)
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
    """Decoded images/s of a local trainer, alone and beside a remote one that was stopped in mid-stream."""
    with ExitStack() as stack:
        address, near, _ = stack.enter_context(_served(bench, "beside"))
        local = stack.enter_context(Player(_trainer, near, None))
        ratios = []
        local.ask(4)
        for _ in range(min(3, bench.rounds)):
            alone = local.ask(LONG)
            with Player(_trainer, address, None) as stopped:
                stopped.ask(2)
                assert stopped.process.pid is not None
                os.kill(stopped.process.pid, signal.SIGSTOP)
                ratios.append(local.ask(LONG) / alone)
                os.kill(stopped.process.pid, signal.SIGCONT)
    print(f"a local trainer beside a stopped remote one / alone: {spread(ratios, 3)}")
    bench.report(Figure("remote-stopped-cost", statistics.median(ratios), ">=", 0.95))


def _many_clients(bench: Bench) -> None:
    """So many connect within 100 ms to a warm stream of small batches; when has the last one its first batch?"""
    config = {"batch_size": 8, "pipeline": SMALL, "memory": '"1GiB"'}
    with ExitStack() as stack:
        address, _, _ = stack.enter_context(_served(bench, "many", **config))
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
def _served(bench: Bench, name: str, *, with_key: bool = False, **keys: Any) -> Iterator[tuple[str, str, Path | None]]:
    """A daemon with a port: its address in the network and on this host, and a connection file where it has keys."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = bench.config(**keys)
    folder = bench.scratch / name
    lines = f'[daemon]\ntcp = "127.0.0.1:{port}"\nkeys_dir = "{folder}"\n'
    file = bench.scratch / f"{name}.toml"
    file.write_text(config.read_text().replace("[daemon]\n", lines))
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
    """Connect many times at once, each in a thread; seconds until the last one has its first batch."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  in the player alone

    def first_batch(_number: int) -> float:
        started_s = time.perf_counter()
        with batchd_client.connect(address, connect_timeout_s=30.0) as daemon:
            next(iter(daemon.stream("photos", window=1))).release()
        return time.perf_counter() - started_s

    with ThreadPoolExecutor(clients) as pool:
        for _ in orders(pipe):
            pipe.send(max(pool.map(first_batch, range(clients))))
