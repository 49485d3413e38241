"""SPDL in threads of the trainer, with cv2, or with batchd's decoder of crops ("region").

Chosen: a pipeline whose threads take 16 photographs at a time, as SPDL advises for short tasks (one
at a time takes a quarter more CPU). SPDL's own decoder, FFmpeg's with a filter for crop and scale,
takes twice the CPU of cv2 here, and a pipeline in a process of its own takes more than one in the
trainer.
"""

import random
from collections.abc import Iterator
from typing import Any

import common
import numpy as np
from spdl.pipeline import PipelineBuilder

TOGETHER = 16
READY_BATCHES = 2


def endless(paths: list[str]) -> Iterator[list[str]]:
    """Paths in random order, some at a time, without end."""
    while True:
        order = random.sample(paths, len(paths))
        for first in range(0, len(order) - TOGETHER + 1, TOGETHER):
            yield order[first : first + TOGETHER]


def batches(options: common.Options) -> Iterator[Any]:
    """Arrays [batch, 224, 224, 3] uint8."""
    load = common.loader(options.variant)
    pipeline = (
        PipelineBuilder()
        .add_source(endless(common.photographs(options.data)))
        .pipe(lambda paths: [load(path) for path in paths], concurrency=options.workers)
        .aggregate(options.batch // TOGETHER, drop_last=True)
        .pipe(lambda parts: np.stack([image for part in parts for image in part]))
        .add_sink(READY_BATCHES)
        .build(num_threads=options.workers)
    )
    pipeline.start()
    return iter(pipeline)


if __name__ == "__main__":
    common.play(batches)
