"""A kind of source whose images come with a mask, boxes and points.

Installed by tests as a package of its own.

options = { samples = 24 }      each sample is made from its number alone
"""

from collections.abc import Mapping

import cv2
import numpy as np

from batchd.plugin import Column, PluginSource, SourceIndex, SourceKind, Survey, Value

HEIGHT, WIDTH = 48, 64


def columns(_source: PluginSource) -> tuple[Column, ...]:
    """An image with all kinds of followers."""
    return (
        Column("image", "encoded"),
        Column("mask", "encoded"),
        Column("boxes", dtype="float32", shape=(1, 4)),
        Column("points", dtype="float32", shape=(2, 2)),
    )


def scan(source: PluginSource, _survey: Survey) -> SourceIndex:
    """Return the index without a scan."""
    return SourceIndex.build(source.options["samples"], {}, {}, {})


class FollowedReader:
    """A bright rectangle on dark grey, its outline as a box, its corners as points.

    Every fifth mask has another size.
    """

    def __init__(self, _source: PluginSource, _index: SourceIndex, _max_bytes: int) -> None:
        pass

    def read(self, sample: int) -> Mapping[str, Value]:
        random = np.random.default_rng(sample)
        left, top = (int(number) for number in random.integers(4, 20, 2))
        right, bottom = left + int(random.integers(12, 40)), top + int(random.integers(8, 24))
        mask = np.zeros((HEIGHT, WIDTH), np.uint8)
        mask[top:bottom, left:right] = 1
        image = np.repeat(np.where(mask, 250, 20).astype(np.uint8)[..., np.newaxis], 3, axis=2)
        return {
            "image": png(image),
            "mask": png(mask[1:] if sample % 5 == 4 else mask),
            "boxes": np.array([[left, top, right, bottom]], np.float32),
            "points": np.array([[left, top], [right, bottom]], np.float32),
        }

    def known(self, _sample: int) -> Mapping[str, Value]:
        return {}

    def name(self, sample: int) -> str:
        return f"rectangle {sample}"

    def close(self) -> None:
        pass


def png(image: np.ndarray) -> memoryview:
    """The bytes of a file."""
    return memoryview(cv2.imencode(".png", image)[1].tobytes())


KIND = SourceKind(problems=lambda _source: [], columns=columns, scan=scan, open=FollowedReader)
