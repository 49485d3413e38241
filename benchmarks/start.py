"""Benchmark: seconds to the first batch.

From the daemon's command line, by stages and processes, and for a trainer that joins a warm stream.

The epoch boundary is looked at as well: prefetch runs across it, so the wait there should be like
any other.
"""

import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import Bench, Figure, children, command_line, served, spread
from numpy.typing import NDArray
from peers.common import cpu_s, pss_bytes, tree

import batchd_client

EPOCHS = 8
ATTACHES = 50


def run(bench: Bench) -> None:
    """Cold start, warm attach, epoch boundary."""
    _cold(bench)
    _warm_and_boundary(bench)


def _cold(bench: Bench) -> None:
    config = bench.config(repeats=1)
    starts = [bench.measure("a start", lambda: _start(config)) for _ in range(bench.rounds)]
    for number, name in enumerate(Start._fields):
        print(f"{name.replace('_', ' ')}: {spread([start[number] for start in starts], 3)}")
    bench.report(
        Figure("start-first-batch-s", statistics.median(start.command_to_batch_s for start in starts), "<=", 1.0)
    )


class Start(NamedTuple):
    """Seconds of one start, CPU seconds that it took, and MB (PSS) once it has the first batch."""

    command_to_address_s: float
    command_to_batch_s: float
    daemon_cpu_s: float
    workers_and_fork_server_cpu_s: float
    daemon_mb: float
    workers_and_fork_server_mb: float


def _start(config: Path) -> Start:
    """Start a daemon and take a batch of 256."""
    begun_s = time.perf_counter()
    with served(config) as address:
        address_s = time.perf_counter() - begun_s
        with batchd_client.connect(address) as daemon:
            batch = next(iter(daemon.stream("photos", epochs=1)))
            batch_s = time.perf_counter() - begun_s
            server = next(
                pid for pid in children(os.getpid()) if b"batchd.cli.daemon" in command_line(pid).split(b"\0")
            )
            (daemon_s, daemon_mb), *rest = [(cpu_s(pid), pss_bytes(pid) / 1e6) for pid in tree(server)]
            batch.release()
    (rest_s, rest_mb) = map(sum, zip(*rest, strict=True))
    return Start(address_s, batch_s, daemon_s, rest_s, daemon_mb, rest_mb)


def _warm_and_boundary(bench: Bench) -> None:
    config = bench.config(repeats=2, batch_size=64)
    with served(config) as address:
        with batchd_client.connect(address) as daemon:
            stream = daemon.stream("photos")
            next(iter(stream)).release()
            attach = partial(_attach_ms, address, stream)
            attach_ms = [bench.measure("attaching", attach) for _ in range(bench.rounds)]
        print(f"connect to first batch on a warm stream: {spread(attach_ms, 1)} ms")
        bench.report(Figure("attach-first-batch-ms", statistics.median(attach_ms), "<=", 100, 1))
        _boundary(bench, address)


def _attach_ms(address: str, at: batchd_client.Stream) -> float:
    """Milliseconds from connecting to a batch that is ready; of many, as each takes too short."""
    taken_ms = []
    for _ in range(ATTACHES):
        begun_s = time.perf_counter()
        with batchd_client.connect(address) as daemon:
            next(iter(daemon.stream("photos", state=at.state_dict()))).release()
        taken_ms.append((time.perf_counter() - begun_s) * 1e3)
    return statistics.median(taken_ms)


def _boundary(bench: Bench, address: str) -> None:
    """The waits for the first batch of an epoch, against the 99th percentile of all others."""
    gaps, first, window = bench.measure("epochs", partial(_gaps_ms, address))
    inside, across = gaps[~first][window:], gaps[first]
    print(
        f"between batches: median {np.median(inside):.1f} ms, p99 {np.percentile(inside, 99):.1f} ms; "
        f"at epoch boundaries {spread(across.tolist(), 1)} ms"
    )
    bench.report(Figure("epoch-gap-over-p99", float(np.median(across) / np.percentile(inside, 99)), "<=", 1.0))


def _gaps_ms(address: str) -> tuple[NDArray[np.float64], NDArray[np.bool_], int]:
    """Milliseconds before each batch but the first; whether an epoch begins with it; the window."""
    came_s, is_first = [], []
    with batchd_client.connect(address) as daemon:
        stream = daemon.stream("photos", epochs=EPOCHS)
        for _epoch in range(EPOCHS):
            for number, batch in enumerate(stream):
                came_s.append(time.perf_counter())
                is_first.append(number == 0)
                batch.release()
    return np.diff(came_s) * 1e3, np.array(is_first[1:]), stream.window
