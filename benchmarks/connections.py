"""Benchmark: one trainer over one TCP connection and over four.

On loopback, and with a limit on the rate of each connection.

A cap stands for what a long way, one core's encryption or a cloud does to a connection: a relay
that passes so many bytes on each of them in a second. The stream does not change from epoch to
epoch, so that all that is left is sending.
"""

import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection

from harness import RESIZE, Bench, Figure, Player, endless, orders, spread
from remote import served_over_tcp

import batchd_client

SEVERAL = 4
WINDOW = 3
BATCHES = 80
CAPPED_BATCHES = 8
CAP_BYTES_PER_S = 100e6


def run(bench: Bench) -> None:
    """Bytes/s over four connections, divided by those over one."""
    with ExitStack() as stack:
        address, _, _ = stack.enter_context(
            served_over_tcp(bench, "connections", pipeline=RESIZE, shuffle="false", repeats=1)
        )
        relay = stack.enter_context(Player(_relay, int(address.rpartition(":")[2])))
        capped = f"tcp://127.0.0.1:{relay.hear()}"
        for name, place, batches, target in (
            ("loopback", address, BATCHES, 0.0),
            ("capped", capped, CAPPED_BATCHES, 3.0),
        ):
            with Player(_trainer, place, 1) as one, Player(_trainer, place, SEVERAL) as several:
                sides: dict[int, Callable[[], float]] = {
                    1: lambda one=one, batches=batches: one.ask(batches),
                    SEVERAL: lambda several=several, batches=batches: several.ask(batches),
                }
                for side in sides.values():
                    side()
                rates = [
                    {number: bench.measure(f"{name}, {number}", side) for number, side in sides.items()}
                    for _ in range(bench.rounds)
                ]
            print(f"{name}: one {spread([rate[1] / 1e9 for rate in rates])} GB/s")
            ratios = [rate[SEVERAL] / rate[1] for rate in rates]
            print(f"{name}: {SEVERAL} connections / one {spread(ratios)}")
            bench.report(Figure(f"connections-{name}", statistics.median(ratios), ">=", target))


def _trainer(pipe: Connection, address: str, connections: int) -> None:
    """Take and release batches: bytes/s, without arrivals during the other side's turn."""
    with batchd_client.connect(address, connections=connections) as daemon:
        stream = daemon.stream("photos", window=WINDOW)
        batches = endless(stream)
        for count in orders(pipe):
            for _ in range(stream.window + 1):
                next(batches).release()
            started_s, taken = time.perf_counter(), 0
            for _ in range(count):
                with next(batches) as batch:
                    taken += batch["image"].nbytes
            pipe.send(taken / (time.perf_counter() - started_s))


def _relay(pipe: Connection, port: int) -> None:
    """Pass on what comes, no connection faster than the cap."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        accepting = threading.Thread(target=_accept, args=(server, port), daemon=True)
        accepting.start()
        for _ in orders(pipe):
            pass


def _accept(server: socket.socket, port: int) -> None:
    while True:
        trainer, _ = server.accept()
        daemon = socket.create_connection(("127.0.0.1", port))
        for source, target in ((trainer, daemon), (daemon, trainer)):
            threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    buffer = memoryview(bytearray(1 << 18))
    due_s = time.monotonic()
    with suppress(OSError):  # the other side has gone
        while count := source.recv_into(buffer):
            due_s = max(due_s, time.monotonic()) + count / CAP_BYTES_PER_S
            target.sendall(buffer[:count])
            time.sleep(max(0.0, due_s - time.monotonic()))
