"""Benchmark: the hand-over of ready batches of 38.5 MB from the ring, to one subscription.

The stream does not change from epoch to epoch, so after the first epoch no worker has anything to
do: what is left is a pull, a handle, and the arrays. ``next()`` is timed alone in a loop that works
300 µs between batches, so that each is ready.
"""

import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from harness import RESIZE, Bench, Figure, Player, anonymous_bytes, endless, orders, served, spread

import batchd_client

BATCHES = 10_000
PACED = 2_000
WORK_S = 300e-6
FLAT_BATCHES = 100_000
TRACED = ("mmap", "munmap", "open", "openat", "madvise", "mremap")


def run(bench: Bench) -> None:
    """Throughput, latency, memory over many hand-overs, and the system calls of the trainer."""
    config = bench.config(pipeline=RESIZE, shuffle="false")
    with served(config) as address, Player(_trainer, address) as trainer:
        trainer.ask(("rate", BATCHES // 10))
        rates, medians, tails = [], [], []
        for _ in range(bench.rounds):
            rates.append(bench.measure("rate", lambda: trainer.ask(("rate", BATCHES))))
            median_s, tail_s = bench.measure("paced", lambda: trainer.ask(("paced", PACED)))
            medians.append(median_s * 1e6)
            tails.append(tail_s * 1e3)
        print(f"{spread(rates, 0)} batches/s; next() p50 {spread(medians, 1)} us, p99 {spread(tails, 3)} ms")
        bench.report(Figure("handover-batches-per-s", statistics.median(rates), ">=", 6000, 0))
        bench.report(Figure("handover-next-p50-us", statistics.median(medians), "<=", 50, 1))
        bench.report(Figure("handover-next-p99-ms", statistics.median(tails), "<=", 1, 3))
        _flat_memory(bench, address, trainer)
        _system_calls(bench, address)


def _flat_memory(bench: Bench, address: str, trainer: Player) -> None:
    with batchd_client.connect(address) as daemon:
        pid = daemon.status()["daemon"]["pid"]
    before = anonymous_bytes(pid)
    trainer.ask(("rate", FLAT_BATCHES))
    grown = (anonymous_bytes(pid) - before) / 1e6
    print(f"the daemon's anonymous memory: {before / 1e6:.1f} MB, {grown:+.2f} MB after {FLAT_BATCHES:,} hand-overs")
    bench.report(Figure("daemon-growth-mb", grown, "<=", 1))


def _system_calls(bench: Bench, address: str) -> None:
    """Memory and file calls of two trainers that differ in their number of batches alone."""
    if shutil.which("strace") is None:
        print("strace is not installed, so the trainer's system calls are not counted (apt install strace)")
        return
    few, many = 500, 1_500
    counts = [_traced(bench.scratch, address, batches) for batches in (few, many)]
    more = {name: counts[1][name] - counts[0][name] for name in TRACED if counts[1][name] != counts[0][name]}
    print(f"system calls of a trainer with {few} batches: {dict(counts[0])}; with {many}: {more or 'not one more'}")
    bench.report(Figure("handover-maps-per-batch", max(0, sum(more.values())) / (many - few), "<=", 0, 4))


def _traced(scratch: Path, address: str, batches: int) -> Counter[str]:
    log = scratch / "strace.txt"
    program = [sys.executable, __file__, address, str(batches)]
    subprocess.run(["strace", "-f", "-q", "-o", log, "-e", f"trace={','.join(TRACED)}", *program], check=True)
    lines = log.read_text().splitlines()
    return Counter(line.split()[1].partition("(")[0] for line in lines if "(" in line and "resumed" not in line)


def _trainer(pipe: Connection, address: str) -> None:
    with batchd_client.connect(address) as daemon:
        batches = endless(daemon.stream("photos"))
        for what, count in orders(pipe):
            pipe.send(_rate(batches, count) if what == "rate" else _paced(batches, count))


def _rate(batches: Iterator[batchd_client.Batch], count: int) -> float:
    begun_s = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count / (time.perf_counter() - begun_s)


def _paced(batches: Iterator[batchd_client.Batch], count: int) -> tuple[float, float]:
    """Median and 99th percentile of the time inside ``next()``, in seconds."""
    inside_s = np.empty(count)
    for index in range(count):
        begun_s = time.perf_counter()
        batch = next(batches)
        inside_s[index] = time.perf_counter() - begun_s
        until_s = time.perf_counter() + WORK_S
        while time.perf_counter() < until_s:
            pass
        del batch
    return float(np.percentile(inside_s, 50)), float(np.percentile(inside_s, 99))


def _read(address: str, batches: int) -> None:
    """The traced program: take so many batches, look at each, end."""
    with batchd_client.connect(address) as daemon:
        source = endless(daemon.stream("photos"))
        for _ in range(batches):
            next(source)["image"][0, 0, 0, 0].item()


if __name__ == "__main__":
    _read(sys.argv[1], int(sys.argv[2]))
