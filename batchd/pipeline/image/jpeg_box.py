"""A box of a JPEG, by the extension ``_jpeg``, where that was built. Worker process.

Rows below the box are not read, and of what lies around it nothing is made but entropy decoding: a
photograph of which half is cut away takes some two thirds of the time. Of a file with restart
markers (``seekable`` makes such), what lies above and beside the box is not even that.

Invariant: at each of the scales the pixels are those that decoding the whole image and cutting
would give, bit for bit.
"""

import numpy as np

from batchd.pipeline.image.geometry import Cut
from batchd.pipeline.image.probe import ImageHeader
from batchd.pipeline.image.scratch import Scratch
from batchd.pipeline.image.vision import Pixels
from batchd.samples.errors import SampleUndecodable

try:
    from batchd.pipeline import _jpeg
except ImportError:  # not built, or without its libjpeg; `decoder_versions` tells people
    IS_BUILT, VERSION = False, ""
else:
    IS_BUILT, VERSION = True, _jpeg.LIBJPEG_TURBO_VERSION

_EIGHTHS = 8


class BoxDecoder:
    """Decodes boxes of JPEGs in one ``color``: rgb, bgr or gray."""

    def __init__(self, color: str, scratch: Scratch) -> None:
        self._color = color
        self._channels = 1 if color == "gray" else 3
        self._scratch = scratch

    def decode(self, data: memoryview, header: ImageHeader, factor: int, box: Cut) -> Pixels | None:
        """Decode ``box`` of the image at 1/``factor``, in whose pixels it is given; it has some, and all are the image's.

        Returns [box.height, box.width, channels], valid until the next call, or None: this file is
        for another decoder. Raises ``SampleUndecodable`` where the file is broken above the box's
        last row.
        """
        columns_max = min(-(-header.width // factor), box.width + _jpeg.COLUMNS_BESIDE_MAX)
        memory = self._scratch.bytes("decode", box.height * columns_max * self._channels)
        size = header.height, header.width
        try:
            made = _jpeg.decode(data, memory.data, self._color, _EIGHTHS // factor, size, box)
        except _jpeg.JpegError as error:
            raise SampleUndecodable(f"a broken JPEG: {error}") from None
        if made is None:
            return None
        columns, before = made
        shape, strides = (box.height, box.width, self._channels), (columns * self._channels, self._channels, 1)
        return np.ndarray(shape, np.uint8, memory, offset=before * self._channels, strides=strides)

    def tiles(self, data: memoryview, header: ImageHeader, factor: int, box: Cut) -> tuple[int, int] | None:
        """How many of the parts between restart markers ``decode`` reads, and how many there are; None where it cuts none out."""
        try:
            return _jpeg.tiles(data, _EIGHTHS // factor, (header.height, header.width), box)
        except _jpeg.JpegError:
            return None  # decoding says what is wrong
