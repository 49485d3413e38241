"""A hand-written feeder, as Keras' GeneratorEnqueuer was.

Worker processes put whole batches into a multiprocessing.Queue.

Chosen: as in ``examples/classics``: a queue of ten batches, a generator with a seed of its own in
each process; cv2 and uint8.
"""

import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import common
import numpy as np

QUEUE_BATCHES = 10


def feed(options: common.Options, filled: Any, seed: int) -> None:
    """Runs in a process: batches without end."""
    random.seed(seed)
    paths, load = common.photographs(options.data), common.loader("cv2")
    while True:
        filled.put(np.stack([load(random.choice(paths)) for _ in range(options.batch)]))


def batches(options: common.Options) -> Iterator[Any]:
    """Arrays [batch, 224, 224, 3] uint8."""
    context = multiprocessing.get_context("fork")
    filled = context.Queue(QUEUE_BATCHES)
    for seed in range(options.workers):
        context.Process(target=feed, args=(options, filled, seed), daemon=True).start()
    while True:
        yield filled.get()


if __name__ == "__main__":
    common.play(batches)
