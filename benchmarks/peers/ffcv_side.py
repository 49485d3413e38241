"""FFCV, from its own file format.

``python ffcv_side.py write --data FOLDER --variant jpg`` writes the file beside the pictures.

Chosen: ``RandomResizedCropRGBImageDecoder`` and a flip, random order, ``os_cache`` as the file fits
into memory, as many threads as workers. Its file has JPEGs of quality 90 at the pictures' own size,
since all sides decode JPEGs; variant "half-raw" stores half of the pictures as raw pixels of
several times the bytes, as FFCV's ImageNet recipe does.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np

BATCHES = 4000
"""In an epoch: enough that none ends within a round, as FFCV restarts its threads with each."""
QUALITY = 90
RAW = 1 / 2


def file_of(options: common.Options) -> Path:
    """Where FFCV's file is."""
    return options.data.with_name(f"{options.data.name}-{options.variant}.beton")


class Photographs:
    """What FFCV's writer takes: tuples of one image."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any]:
        import cv2  # noqa: PLC0415  only to write

        return (cv2.imread(self._paths[index], cv2.IMREAD_COLOR_RGB),)


def write(options: common.Options) -> None:
    """Write FFCV's file of one variant."""
    from ffcv.fields import RGBImageField  # noqa: PLC0415  its environment alone has it
    from ffcv.writer import DatasetWriter  # noqa: PLC0415

    raw = {"write_mode": "proportion", "compress_probability": 1 - RAW} if options.variant == "half-raw" else {}
    field = RGBImageField(**({"write_mode": "jpg"} | raw), jpeg_quality=QUALITY)
    writer = DatasetWriter(str(file_of(options)), {"image": field}, num_workers=options.workers)
    writer.from_indexed_dataset(Photographs(common.photographs(options.data)))


def batches(options: common.Options) -> Iterator[Any]:
    """Tensors [batch, 224, 224, 3] uint8."""
    from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder  # noqa: PLC0415
    from ffcv.loader import Loader, OrderOption  # noqa: PLC0415
    from ffcv.transforms import RandomHorizontalFlip, ToTensor  # noqa: PLC0415

    count = len(common.photographs(options.data))
    loader = Loader(
        str(file_of(options)),
        batch_size=options.batch,
        num_workers=options.workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        indices=np.arange(BATCHES * options.batch) % count,
        drop_last=True,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder((common.SIDE, common.SIDE), common.AREA, common.PROPORTIONS),
                RandomHorizontalFlip(),
                ToTensor(),
            ]
        },
    )
    return (images for (images,) in loader)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        del sys.argv[1]
        write(common.told())
    else:
        common.play(batches)
