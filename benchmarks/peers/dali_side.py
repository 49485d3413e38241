"""DALI on the CPU.

Chosen: the file reader with its own shuffling, ``decoders.image_random_crop``, which decodes the
crop alone, resize without smoothing, as all sides do that resize by hand, and a flip by a coin:
DALI's ResNet example without its normalisation. As many threads as workers.
"""

from collections.abc import Iterator
from typing import Any

import common
import numpy as np
from nvidia.dali import fn, pipeline_def, types


@pipeline_def
def photographs(paths: list[str]) -> Any:
    """[224, 224, 3] uint8."""
    jpegs, _labels = fn.readers.file(files=paths, random_shuffle=True, initial_fill=len(paths), name="photographs")
    images = fn.decoders.image_random_crop(
        jpegs,
        device="cpu",
        random_area=common.AREA,
        random_aspect_ratio=common.PROPORTIONS,
        num_attempts=common.ATTEMPTS,
    )
    images = fn.resize(images, size=(common.SIDE, common.SIDE), interp_type=types.INTERP_LINEAR, antialias=False)
    return fn.flip(images, horizontal=fn.random.coin_flip())


def batches(options: common.Options) -> Iterator[Any]:
    """Arrays [batch, 224, 224, 3] uint8."""
    paths = common.photographs(options.data)
    pipeline = photographs(paths, batch_size=options.batch, num_threads=options.workers, device_id=None)
    pipeline.build()
    while True:
        (images,) = pipeline.run()
        yield np.asarray(images.as_tensor())


if __name__ == "__main__":
    common.play(batches)
