"""Benchmark: the shuffle's time and memory.

Sample indices of a batch of 256, for 10^3 and 10^9 samples.
"""

import statistics
import time
import tracemalloc
from functools import partial

from harness import Bench, Figure, spread

from batchd.core.plan import Plan
from batchd_wire.position import Position

BATCH_SIZE = 256
REPEATS = 200


def run(bench: Bench) -> None:
    """A new position each time, so nothing but the epoch's round keys is remembered."""
    plans = {"1e3": Plan(10**3, BATCH_SIZE, 0, True, False), "1e9": Plan(10**9, BATCH_SIZE, 0, True, False)}
    found: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(bench.rounds):
        for name, plan in plans.items():
            found[name].append(bench.measure(name, partial(_indices_us, plan)))
    tracemalloc.start()
    plans["1e9"].indices(Position(9, 1), 0, BATCH_SIZE)
    peak_kb = tracemalloc.get_traced_memory()[1] / 1e3
    tracemalloc.stop()
    for name, values in found.items():
        print(f"indices of a batch of {BATCH_SIZE} of {name} samples: {spread(values, 1)} us")
        bench.report(Figure(f"plan-{name}-us", statistics.median(values), "<=", 200, 1))
    bench.report(Figure("plan-1e9-peak-kb", peak_kb, "<=", 100, 1))


def _indices_us(plan: Plan) -> float:
    begun_s = time.perf_counter()
    for repeat in range(REPEATS):
        plan.indices(Position(repeat % 4, repeat % (plan.steps - 1)), 0, BATCH_SIZE)
    return (time.perf_counter() - begun_s) / REPEATS * 1e6
