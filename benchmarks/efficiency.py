"""Benchmark: the cost of the hand-over.

Images/s delivered by the daemon, divided by images/s of the same pipeline in bare processes.

Both sides: two processes that decode, random_resized_crop 224, batch 256, uint8, without a cache:
access points would spare the daemon's workers what the bare ones decode. The bare ones write into
private memory that they use again, and deliver nothing. The daemon's trainer touches every page of
every batch. The sides take turns, each when the other is idle; a round's first batches, which were
ready before it began, are not counted.
"""

import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import CROP, Bench, Figure, Player, endless, family_cpu_s, orders, served, spread, wait_for_rest

import batchd_client
from batchd.config.load import load_config
from batchd.core.plan import Plan
from batchd.data.pipeline.cache_split import plan_pipeline
from batchd.data.pipeline.execute import Pipeline
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd_wire.position import Position

WORKERS = 2
BATCHES = 12
PAGE_BYTES = 4096


def run(bench: Bench) -> None:
    """Compare, and print how the rounds went."""
    config = bench.config(pipeline=CROP, workers=WORKERS, cache='"off"')
    delivered, bare = [], []
    with (
        served(config) as address,
        Player(_trainer, address) as trainer,
        Player(_bare, config, 0) as one,
        Player(_bare, config, 1) as two,
    ):
        trainer.ask(1)
        for _ in range(bench.rounds):
            delivered.append(bench.measure("delivered", lambda: trainer.ask(BATCHES)))
            bare.append(bench.measure("bare", lambda: _both(one, two)))
    ratios = [mine.rate / theirs.rate for mine, theirs in zip(delivered, bare, strict=True)]
    for name, turns in (("delivered", delivered), ("bare", bare)):
        rates, cpu_s = [turn.rate for turn in turns], [turn.cpu_s for turn in turns]
        print(f"{name} {spread(rates, 0)} images/s, {spread(cpu_s)} CPU s for 1,000")
    print(f"ratio {spread(ratios, 3)}")
    bench.report(Figure("efficiency", statistics.median(ratios), ">=", 0.95))


class Turn(NamedTuple):
    """Images/s, and CPU seconds of all processes of the side for 1,000 of them."""

    rate: float
    cpu_s: float


def _both(one: Player, two: Player) -> Turn:
    for player in (one, two):
        player.tell(BATCHES // WORKERS)
    turns = [one.hear(), two.hear()]
    return Turn(sum(turn.rate for turn in turns), statistics.mean(turn.cpu_s for turn in turns))


def _trainer(pipe: Connection, address: str) -> None:
    """A turn of the ordered number of batches, after those that were ready before.

    Afterwards the window is filled; the other side must not pay for that.
    """
    with batchd_client.connect(address) as daemon:
        pid = daemon.status()["daemon"]["pid"]
        stream = daemon.stream("photos")
        batches = endless(stream)
        for count in orders(pipe):
            for _ in range(stream.window + 1):
                _touch(next(batches))
            begun_s, cpu_s = time.perf_counter(), family_cpu_s(pid) + time.process_time()
            images = sum(_touch(next(batches)) for _ in range(count))
            taken_s = time.perf_counter() - begun_s
            used_s = family_cpu_s(pid) + time.process_time() - cpu_s
            wait_for_rest(pid)
            pipe.send(Turn(images / taken_s, 1000 * used_s / images))


def _touch(batch: batchd_client.Batch) -> int:
    batch["image"].reshape(-1)[::PAGE_BYTES].max()
    return batch.samples


def _bare(pipe: Connection, config_file: Path, which: int) -> None:
    """The same pipeline on the same samples in the same order, into a reused private batch."""
    config = load_config(config_file).streams["photos"]
    index = scan_source(config.source, lambda _found: None, IndexCache(None), Storage())
    plan = Plan(len(index), config.batch_size, config.seed, config.shuffle, config.drop_last)
    columns = kind_of(config.source).columns(config.source, Storage())
    reader = open_reader(config.source, index, plan_pipeline(config.pipeline).record_bytes_max, Storage())
    pipeline = Pipeline(columns, config.pipeline, config.seed)
    batch = {
        name: np.zeros((config.batch_size, *column.fixed_shape), column.dtype)
        for name, column in pipeline.columns.items()
    }
    step = which
    for count in orders(pipe):
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            samples = plan.indices(Position(0, step % plan.steps), 0, config.batch_size)
            step += WORKERS
            for row, sample in enumerate(samples.tolist()):
                fields = {name: array[row, ...] for name, array in batch.items()}
                pipeline.run(reader.read(sample), 0, sample, 0, fields)
        images, taken_s = count * config.batch_size, time.perf_counter() - begun_s
        pipe.send(Turn(images / taken_s, 1000 * (time.process_time() - cpu_s) / images))
