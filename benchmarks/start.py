"""Benchmark: seconds to the first batch.

From the daemon's command line, and for a trainer that joins a warm stream.

The epoch boundary is looked at as well: prefetch runs across it, so the wait there should be like
any other.
"""

import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from harness import Bench, Figure, served, spread

import batchd_client

EPOCHS = 8


def run(bench: Bench) -> None:
    """Cold start, warm attach, epoch boundary."""
    _cold(bench)
    _warm_and_boundary(bench)


def _cold(bench: Bench) -> None:
    config = bench.config(repeats=1)
    seconds = [bench.measure("a start", lambda: _first_batch_s(config)) for _ in range(bench.rounds)]
    print(f"daemon command to first batch of 256: {spread(seconds, 3)} s")
    bench.report(Figure("start-first-batch-s", statistics.median(seconds), "<=", 1.0))


def _first_batch_s(config: Path) -> float:
    begun_s = time.perf_counter()
    with served(config) as address, batchd_client.connect(address) as daemon:
        batch = next(iter(daemon.stream("photos", epochs=1)))
        taken_s = time.perf_counter() - begun_s
        batch.release()
    return taken_s


def _warm_and_boundary(bench: Bench) -> None:
    config = bench.config(repeats=2, batch_size=64)
    with served(config) as address:
        attach_s = []
        with batchd_client.connect(address) as daemon:
            stream = daemon.stream("photos")
            next(iter(stream)).release()
            for _ in range(bench.rounds):
                begun_s = time.perf_counter()
                with batchd_client.connect(address) as other:
                    next(iter(other.stream("photos", state=stream.state_dict()))).release()
                attach_s.append((time.perf_counter() - begun_s) * 1e3)
        print(f"connect to first batch on a warm stream: {spread(attach_s, 1)} ms")
        bench.report(Figure("attach-first-batch-ms", statistics.median(attach_s), "<=", 100, 1))
        _boundary(bench, address)


def _boundary(bench: Bench, address: str) -> None:
    """The waits for the first batch of an epoch, against the 99th percentile of all others."""
    came_s, is_first = [], []
    with batchd_client.connect(address) as daemon:
        stream = daemon.stream("photos", epochs=EPOCHS)
        for _epoch in range(EPOCHS):
            for number, batch in enumerate(stream):
                came_s.append(time.perf_counter())
                is_first.append(number == 0)
                batch.release()
    gaps = np.array([later - earlier for earlier, later in pairwise(came_s)]) * 1e3
    first = np.array(is_first[1:])
    inside, across = gaps[~first][stream.window :], gaps[first]
    print(
        f"between batches: median {np.median(inside):.1f} ms, p99 {np.percentile(inside, 99):.1f} ms; "
        f"at epoch boundaries {spread(across.tolist(), 1)} ms"
    )
    bench.report(Figure("epoch-gap-over-p99", float(np.median(across) / np.percentile(inside, 99)), "<=", 1.0))
