"""The limit: batchd's pipeline in processes that fill reused private memory, with no delivery."""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import common
import numpy as np
from batchd_side import configuration

from batchd.config.load import load_config
from batchd.core.plan import Plan
from batchd.data.pipeline.cache_split import plan_pipeline
from batchd.data.pipeline.execute import Pipeline
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd_wire.position import Position


def work(pipe: Connection, options: common.Options, which: int) -> None:
    """Fill batches for the given seconds, in a process of its own; tell the images and seconds."""
    with tempfile.TemporaryDirectory(prefix="batchd-peers-") as scratch:
        config = load_config(configuration(options, Path(scratch))).streams["photos"]
    index = scan_source(config.source, lambda _found: None, IndexCache(None), Storage())
    plan = Plan(len(index), config.batch_size, config.seed, config.shuffle, config.drop_last)
    reader = open_reader(config.source, index, plan_pipeline(config.pipeline).record_bytes_max, Storage())
    pipeline = Pipeline(kind_of(config.source).columns(config.source, Storage()), config.pipeline, config.seed)
    batch = {
        name: np.zeros((config.batch_size, *column.fixed_shape), column.dtype)
        for name, column in pipeline.columns.items()
    }
    rows = [{name: array[row, ...] for name, array in batch.items()} for row in range(config.batch_size)]
    step = which
    while True:
        images, seconds, begun_s = 0, pipe.recv(), time.perf_counter()
        while not images or time.perf_counter() - begun_s < seconds:
            epoch, step_in_epoch = divmod(step, plan.steps)
            for fields, sample in zip(
                rows, plan.indices(Position(epoch, step_in_epoch), 0, options.batch).tolist(), strict=True
            ):
                pipeline.run(reader.read(sample), epoch, sample, 0, fields)
            step += options.workers
            images += options.batch
        pipe.send((images, time.perf_counter() - begun_s))


@contextmanager
def start(options: common.Options) -> Iterator[common.Measure]:
    """Start the processes; images/s are added up."""
    context = multiprocessing.get_context("fork")
    pipes = []
    for which in range(options.workers):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(theirs, options, which), daemon=True).start()
        pipes.append(ours)

    def measure(seconds: float) -> tuple[int, float]:
        for pipe in pipes:
            pipe.send(seconds)
        counted = [pipe.recv() for pipe in pipes]
        images = sum(images for images, _ in counted)
        return images, images / sum(images / took_s for images, took_s in counted)

    measure(0.0)
    yield measure


if __name__ == "__main__":
    common.play_measured(start)
