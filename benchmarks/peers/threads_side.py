"""Threads in the trainer with batchd's decoder, which only makes the crop: no library between.

Chosen: as many threads as there are workers; each fills whole batches, so that none waits for
another; two batches ready. The decoder leaves Python's lock while it decodes.
"""

import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import common
import numpy as np

READY_BATCHES = 2


def fill(options: common.Options, paths: list[str], ready: "queue.Queue[Any]") -> None:
    """Put one batch after the other into a queue."""
    load = common.loader("region")
    while True:
        batch = np.empty((options.batch, common.SIDE, common.SIDE, 3), np.uint8)
        for row, path in zip(batch, random.sample(paths, len(batch)), strict=True):
            row[...] = load(path)
        ready.put(batch)


def batches(options: common.Options) -> Iterator[Any]:
    """Arrays [batch, 224, 224, 3] uint8."""
    ready: queue.Queue[Any] = queue.Queue(READY_BATCHES)
    paths = common.photographs(options.data)
    for _ in range(options.workers):
        threading.Thread(target=fill, args=(options, paths, ready), daemon=True).start()
    while True:
        yield ready.get()


if __name__ == "__main__":
    common.play(batches)
