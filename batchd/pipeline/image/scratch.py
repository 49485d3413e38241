"""Memory for what lies between the file and the slot, kept from one sample to the next. Worker process.

A fresh megabyte costs about 0.2 ms in page faults, a fifth of decoding a photograph. So every
intermediate image has its place, which grows to the largest image seen there, up to a limit: one
huge photograph must not make a worker large for ever, and for such an image the faults do not
matter.

Invariant: an array is valid until the same place is asked for again; its content is whatever was
there before, so who asks writes all of it.
"""

from collections.abc import Hashable
from math import prod

import numpy as np

from batchd.pipeline.image.vision import Pixels

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
        """Give ``needed`` bytes or more, one-dimensional."""
        if needed > KEPT_BYTES_MAX:
            return np.empty(needed, np.uint8)
        buffer = self._buffers.get(place)
        if buffer is None or buffer.size < needed:
            buffer = self._buffers[place] = np.empty(needed, np.uint8)
        return buffer
