"""cv2, set up for a worker, and memory for its images. Worker process.

This is the one place that loads cv2: silent, in one thread, because the workers are the
parallelism, and with a limit on what it may decode. OpenCV reads its limit from the environment
while it loads, so the order in this file matters, and every other module imports cv2 from here.

A fresh megabyte costs about 0.2 ms in page faults, a fifth of decoding a photograph. So each
intermediate image has its ``Scratch`` place, which grows to the largest image seen there, up to a
limit: one huge photograph must not make a worker large for ever.

Invariant: an array of ``Scratch`` is valid until the same place is requested again; it has the
content of an earlier image, so the caller overwrites all of it.
"""

import os
from collections.abc import Hashable
from math import prod
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from batchd.data.samples.image_header import PIXELS_MAX

os.environ["OPENCV_IO_MAX_IMAGE_PIXELS"] = str(PIXELS_MAX)
# what is wrong with a sample is said once, as its reason
os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")

import cv2

from batchd_wire.views import Array

cv2.setNumThreads(0)

__all__ = ["Image", "LibraryOutput", "Pixels", "Scratch", "cv2", "decode_file", "written"]

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""8 bits per channel, [height, width, channels]."""
Image: TypeAlias = Array
"""One row of an image field: uint8, float32 or float16, channels last or first."""


def written(result: object, destination: object) -> None:
    """Assert that cv2 wrote into ``dst``: then it returns the same object.

    For a ``dst=`` of another shape or dtype it returns a new array, without a word.
    """
    assert result is destination, "cv2 made a new array instead of writing into the one it was given"


class LibraryOutput:
    """What libjpeg and libpng write to standard error while they decode; they say it nowhere else.

    libjpeg tells only there that it has invented pixels. In the log, such a line would name no
    file, and come again in each epoch.
    """

    BYTES_MAX = 2_000

    _place: tuple[int, int, int] | None = None

    @classmethod
    def use(cls, descriptor: int, begin: int) -> None:
        """Write to this place of a file from now on, which tells others if this process dies."""
        cls._place = descriptor, begin, os.dup(2)

    def __enter__(self) -> Self:
        self.text = ""
        place = self._place or (os.memfd_create("batchd-decoder", os.MFD_CLOEXEC), 0, os.dup(2))
        self._descriptor, self._begin, self._before = place
        os.lseek(self._descriptor, self._begin, os.SEEK_SET)
        os.dup2(self._descriptor, 2)
        return self

    def __exit__(self, *_error: object) -> None:
        os.dup2(self._before, 2)
        written = os.lseek(self._descriptor, 0, os.SEEK_CUR) - self._begin
        if written > self.BYTES_MAX:
            written = self.BYTES_MAX
            os.ftruncate(self._descriptor, self._begin + written)
        if written:
            lines = os.pread(self._descriptor, written, self._begin).decode(errors="replace").splitlines()
            # OpenCV's own begin with a level and a time
            self.text = " ".join(line.strip() for line in lines if not line.startswith("["))
            os.pwrite(self._descriptor, bytes(written), self._begin)
        if self._place is None:
            os.close(self._descriptor)
            os.close(self._before)


def decode_file(data: memoryview, flags: int) -> tuple[Pixels | None, str]:
    """Decode by cv2. Returns pixels, or None, and what its libraries said of the file.

    With ``IMREAD_ANYDEPTH`` pixels of 16 bits are uint16.
    """
    with LibraryOutput() as output:
        try:
            pixels: Any = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        except cv2.error as error:
            return None, str(error.err)
    return pixels, output.text


KEPT_BYTES_MAX = 8 * 1024 * 1024
"""Largest image whose memory is kept; larger ones get memory of their own."""


class Scratch:
    """Arrays by place; a place is any name that one use of the memory has for itself."""

    def __init__(self) -> None:
        self._arrays: dict[Hashable, Pixels] = {}
        self._buffers: dict[Hashable, Pixels] = {}

    def image(self, place: Hashable, shape: tuple[int, int, int]) -> Pixels:
        """Give memory for one image, [height, width, channels]."""
        array = self._arrays.get(place)
        if array is None or array.shape != shape:
            array = self.bytes(place, prod(shape))[: prod(shape)].reshape(shape)
            if array.nbytes <= KEPT_BYTES_MAX:
                self._arrays[place] = array
        return array

    def bytes(self, place: Hashable, needed: int) -> Pixels:
        """Memory of at least ``needed`` bytes: uint8 ``[bytes]``, uninitialised."""
        if needed > KEPT_BYTES_MAX:
            return np.empty(needed, np.uint8)
        buffer = self._buffers.get(place)
        if buffer is None or buffer.size < needed:
            buffer = self._buffers[place] = np.empty(needed, np.uint8)
        return buffer
