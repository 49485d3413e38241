"""Benchmark: the shuffle's time and memory, and the randomness of a shuffle of blocks.

Sample indices of a batch of 256: for 10^3 and 10^9 samples, and of 10^7 in blocks. The rows of one
sample out of 10^9 in 100 epochs, as `batchd seen` finds them. Then, for a source that is sorted by
class, how far neighbours get apart and how many classes a batch has.
"""

import statistics
import time
import tracemalloc
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from harness import Bench, Figure, spread

from batchd.commands.history.seen import Leg, SampleLookup
from batchd.config.load import load_config
from batchd.core.blocks import BlockOrder
from batchd.core.plan import Plan
from batchd_wire.position import Position

BATCH_SIZE = 256
REPEATS = 200
SEEN_SAMPLES = 10**9
CLASSES, CLASS_SAMPLES = 1000, 1280
MIXES = ((1, 80), (16, 80), (64, 80), (256, 80), (1024, 80), (64, 8), (64, 1280))
"""Open blocks, and samples in each: 80 pictures of 105 kB are 8 MiB."""
BATCHES_LOOKED_AT = 400


def run(bench: Bench) -> None:
    """A new position each time, so nothing but the epoch's round keys is remembered."""
    plans = {"1e3": Plan(10**3, BATCH_SIZE, 0, True, False), "1e9": Plan(10**9, BATCH_SIZE, 0, True, False)}
    blocks = BlockOrder(np.arange(0, 10**7 + 1, 80), 64, 0)
    plans["1e7-blocks"] = Plan(10**7, BATCH_SIZE, 0, True, False, order=blocks)
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
    _measure_seen(bench)
    begun_s = time.perf_counter()
    blocks.samples_at(99, np.arange(1))
    print(f"table of {blocks.blocks:,} blocks, once per epoch: {(time.perf_counter() - begun_s) * 1e3:.0f} ms")
    _print_mixes()


def _measure_seen(bench: Bench) -> None:
    """Find a record by its name, and its 100 rows among 8 ranks: beyond reading the index."""
    with TemporaryDirectory() as folder:
        data, config = Path(folder, "records.bin"), Path(folder, "batchd.toml")
        with data.open("wb") as file:
            file.truncate(SEEN_SAMPLES)  # without a block on the disk
        source = f'{{ type = "raw", path = "{data}", record = {{ x = "uint8" }} }}'
        config.write_text(f"[streams.records]\nbatch_size = {BATCH_SIZE}\nsource = {source}\n")
        lookup = SampleLookup(load_config(config), "records")
        values = [bench.measure("seen-1e9", partial(_seen_ms, lookup, data)) for _ in range(bench.rounds)]
    print(f"100 rows of one of {SEEN_SAMPLES:,} samples: {spread(values, 2)} ms")
    bench.report(Figure("seen-1e9-ms", statistics.median(values), "<=", 10, 2))


def _seen_ms(lookup: SampleLookup, data: Path) -> float:
    begun_s = time.perf_counter()
    samples = lookup.of_file(f"{data}: sample 123456789")
    seen = lookup.seen(samples, Position(100, 0), [Leg(Position(0, 0), 8)])
    assert len(list(seen.places())) == seen.times == 100
    return (time.perf_counter() - begun_s) * 1e3


def _print_mixes() -> None:
    samples = CLASSES * CLASS_SAMPLES
    print(f"{samples:,} samples sorted into {CLASSES} classes, batches of {BATCH_SIZE}:")
    print("| shuffle | samples mixed together | mean distance of neighbours | classes in a batch | largest class |")
    print("|---|---|---|---|---|")
    orders = [(f"{k} blocks of {size}", BlockOrder(np.arange(0, samples + 1, size), k, 0)) for k, size in MIXES]
    for name, order in [*orders, ("`true`", None)]:
        plan = Plan(samples, BATCH_SIZE, 0, True, False, order=order)
        some = np.arange(0, samples - 1, 97)
        apart = np.abs(plan.places(0, some) - plan.places(0, some + 1)).mean()
        steps = np.linspace(0, plan.steps - 2, BATCHES_LOOKED_AT).astype(int)
        counts = [np.bincount(plan.indices(Position(0, step), 0, BATCH_SIZE) // CLASS_SAMPLES) for step in steps]
        classes, largest = np.mean([(one > 0).sum() for one in counts]), np.mean([one.max() for one in counts])
        mixed = order.window_samples if order is not None else samples
        print(f"| {name} | {mixed:,.0f} | {apart:,.0f} | {classes:.0f} | {largest:.1f} |")


def _indices_us(plan: Plan) -> float:
    begun_s = time.perf_counter()
    for repeat in range(REPEATS):
        plan.indices(Position(repeat % 4, repeat % (plan.steps - 1)), 0, BATCH_SIZE)
    return (time.perf_counter() - begun_s) / REPEATS * 1e6
