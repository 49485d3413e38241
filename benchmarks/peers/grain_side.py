"""Grain: variants "cv2" and "region".

Chosen: the Dataset API with ``mp_prefetch``, one process for each worker. A process reads with one
thread and keeps 16 samples ahead: with the 16 threads and 500 samples that are Grain's default it
takes half as much CPU again, as they wait for one interpreter.
"""

from collections.abc import Iterator
from typing import Any

import common
import grain

READING = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)


class Load(grain.transforms.Map):
    """A photograph from its path to an array; the loader is made in the worker."""

    def __init__(self, variant: str) -> None:
        self._variant = variant
        self._load: Any = None

    def map(self, path: str) -> Any:
        """[224, 224, 3] uint8."""
        if self._load is None:
            self._load = common.loader(self._variant)
        return self._load(path)


def batches(options: common.Options) -> Iterator[Any]:
    """Arrays [batch, 224, 224, 3] uint8."""
    photographs = grain.MapDataset.source(common.photographs(options.data)).shuffle(seed=0).repeat()
    loaded = photographs.map(Load(options.variant)).to_iter_dataset(READING).batch(options.batch, drop_remainder=True)
    return iter(loaded.mp_prefetch(grain.MultiprocessingOptions(num_workers=options.workers)))


if __name__ == "__main__":
    common.play(batches)
