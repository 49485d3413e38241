"""Benchmark: the cost of a report about each batch: in the loop, and of a batch altogether.

loop       the call of stream.report, a number and 256 of them (and a torch tensor, with PyTorch)
batch      how much longer a batch takes from a ring of ready ones with a report of its 256 rows
           than without one, in turns: loop, message and daemon together
share      that, as part of the time in which two workers decode a batch
"""

import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from harness import RESIZE, Bench, Figure, Player, endless, orders, served, spread

import batchd_client

ROWS = 256
BATCHES = 2_000
CALLS = 2_000
DECODED = 24


def run(bench: Bench) -> None:
    """The loop's part, then both sides in turns, then the time of a batch that is decoded."""
    with served(bench.config(pipeline=RESIZE, shuffle="false")) as address, Player(_trainer, address) as trainer:
        trainer.ask(("rate", BATCHES, False))
        for name in ("number", "rows", "tensor"):
            rounds = [
                bench.measure(name, lambda name=name: trainer.ask(("loop", CALLS, name))) for _ in range(bench.rounds)
            ]
            if None not in rounds:
                print(f"report of a {name}: {spread(rounds, 1)} us")
                bench.report(Figure(f"report-{name}-us", statistics.median(rounds), "<=", 20, 1))
        extras_us = []
        for _ in range(bench.rounds):
            with_us, without_us = (
                1e6 / bench.measure("batch", lambda told=told: trainer.ask(("rate", BATCHES, told)))
                for told in (True, False)
            )
            extras_us.append(with_us - without_us)
        print(f"a batch with a report takes longer by {spread(extras_us, 1)} us")
    with served(bench.config()) as address, Player(_trainer, address) as trainer:
        trainer.ask(("rate", DECODED, False))
        rates = [bench.measure("decoded", lambda: trainer.ask(("rate", DECODED, True))) for _ in range(bench.rounds)]
        share = statistics.median(extras_us) / (1e6 / statistics.median(rates))
        print(f"batches/s decoded by two workers: {spread(rates, 2)}")
        bench.report(Figure("report-share", share, "<=", 0.005, 5))


def _trainer(pipe: Connection, address: str) -> None:
    losses = np.linspace(0, 1, ROWS, dtype=np.float32)
    with batchd_client.connect(address) as daemon, daemon.stream("photos") as stream:
        batches = endless(stream)
        for what, count, how in orders(pipe):
            pipe.send(
                _rate(stream, batches, count, losses if how else None)
                if what == "rate"
                else _loop(stream, batches, count, how)
            )


def _rate(stream: batchd_client.Stream, batches: Iterator[batchd_client.Batch], count: int, losses: Any) -> float:
    begun_s = time.perf_counter()
    for _ in range(count):
        next(batches)
        if losses is not None:
            stream.report(losses)
    return count / (time.perf_counter() - begun_s)


def _loop(stream: batchd_client.Stream, batches: Iterator[batchd_client.Batch], count: int, name: str) -> float | None:
    """The median of the call alone, in microseconds."""
    values: Any = {"number": 0.5, "rows": np.linspace(0, 1, ROWS, dtype=np.float32)}.get(name)
    if values is None:
        try:
            import torch  # noqa: PLC0415  where it is installed
        except ImportError:
            return None
        values = torch.linspace(0, 1, ROWS, requires_grad=True)
    taken_s = []
    for _ in range(count):
        next(batches)
        begun_s = time.perf_counter()
        stream.report(values)
        taken_s.append(time.perf_counter() - begun_s)
    return 1e6 * statistics.median(taken_s)
