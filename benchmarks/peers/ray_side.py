"""Ray Data: tasks that read and decode, a batch in each block.

Chosen: paths as items, and ``map_batches`` that reads and decodes with cv2. ``read_images`` decodes
with PIL, and ``read_binary_files`` in front of ``map_batches`` takes half as much CPU again, as
bytes go through the object store. A block is a batch, so that ``iter_batches`` puts nothing
together.
"""

import logging
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")

import common
import numpy as np
import ray

IMAGES = 76_800
"""In an epoch: so many that none ends in a round."""
TOGETHER = 64
READY_BATCHES = 2


def load(rows: dict[str, Any]) -> dict[str, Any]:
    """Runs in a task: paths to images, [some, 224, 224, 3] uint8."""
    load_one = common.loader("cv2")
    return {"image": np.stack([load_one(path) for path in rows["path"]])}


def batches(options: common.Options) -> Iterator[Any]:
    """Arrays [batch, 224, 224, 3] uint8."""
    ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    paths = common.photographs(options.data)
    items = [{"path": paths[number % len(paths)]} for number in range(IMAGES)]
    photographs = ray.data.from_items(items, override_num_blocks=IMAGES // options.batch).randomize_block_order()
    loaded = photographs.map_batches(load, batch_size=TOGETHER)
    for batch in loaded.iter_batches(
        batch_size=options.batch, batch_format="numpy", prefetch_batches=READY_BATCHES, drop_last=True
    ):
        yield batch["image"]


if __name__ == "__main__":
    common.play(batches)
