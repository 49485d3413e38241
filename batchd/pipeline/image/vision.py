"""The one place that loads cv2, set up for a worker: one thread, silent, with a limit on what it may decode. Worker process.

OpenCV reads its limit from the environment while it loads and never again, so the order in this
file matters, and every other module says ``from batchd.pipeline.image.vision import cv2``. Its own
threads are off because the workers are the parallelism: a pool in each of them would only fight
over the same processors.
"""

import os
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from batchd.pipeline.options import PIXELS_MAX

os.environ["OPENCV_IO_MAX_IMAGE_PIXELS"] = str(PIXELS_MAX)
os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")  # what is wrong with a sample is said once, as its reason

import cv2

cv2.setNumThreads(0)

__all__ = ["Image", "Pixels", "cv2", "written"]

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""8 bits per channel, [height, width, channels]."""
Image: TypeAlias = npt.NDArray[Any]
"""One row of an image field: uint8, float32 or float16, channels last or first."""


def written(result: object, destination: object) -> None:
    """Assert that cv2 wrote where it was told to.

    Where shape or dtype of ``dst=`` are not what the operation makes, cv2 returns a new array and
    leaves the given one untouched, without a word. When it did write there, it returns the very
    same object.
    """
    assert result is destination, "cv2 made a new array instead of writing into the one it was given"
