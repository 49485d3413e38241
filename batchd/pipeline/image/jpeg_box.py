"""The extension ``_jpeg``, where it was built: decode a box of a JPEG, make files for that.

Workers, and writers of ``batchd prepare``. A box: rows below it are not read, and pixels around it
are entropy-decoded only. Half of a photograph takes some two thirds of the time.

A seekable file: a baseline JPEG can only be read from its start, or from a restart marker, where
nothing depends on what was before. So the same coefficients are written again with a marker every
few blocks: a plain JPEG for any reader, some 1 % larger, and what is above and beside a box is not
even entropy-decoded. The decoder finds the markers by searching, which takes 1 to 2 % of the time
of decoding the crop, so nothing is written beside the file.

Invariant: at each of the scales the pixels are those of decoding the whole image and cutting it,
bit for bit.
"""

import numpy as np

from batchd.pipeline.image.geometry import Cut
from batchd.pipeline.image.opencv import Pixels, Scratch
from batchd.pipeline.image.probe import ImageHeader, probe_image
from batchd.samples.errors import SampleUndecodable

try:
    from batchd.pipeline import _jpeg
except ImportError:  # not built, or without its libjpeg; `decoder_versions` tells users
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
        """Decode ``box``, in pixels of the image at 1/``factor``; not empty, and inside of it.

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
        """Parts between restart markers that ``decode`` reads, and all; None without markers."""
        try:
            return _jpeg.tiles(data, _EIGHTHS // factor, (header.height, header.width), box)
        except _jpeg.JpegError:
            return None  # decoding says what is wrong


TILE_WIDTH_PIXELS = 64
"""Between two markers. Half of it saves 2 % of the time of decoding, and costs 1.4 % more bytes."""


def made_seekable(data: memoryview, bytes_max: int) -> bytes | None:
    """A decoded file as a cache keeps it; None where it stays as it is.

    It is no usual JPEG, can be cut already, is broken where no crop looked, or gets too long.
    """
    try:
        header = probe_image(data)
        if header.format != "JPEG":
            return None
        last_pixel = header.height - 1, header.width - 1, 1, 1
        if _jpeg.tiles(data, _EIGHTHS, (header.height, header.width), last_pixel) is not None:
            return None
        made = seekable(data, header)
    except (_jpeg.JpegError, SampleUndecodable):
        return None
    return made if made is not None and len(made) <= bytes_max else None


def seekable(data: memoryview, header: ImageHeader) -> bytes | None:
    """Add restart markers to a file: same coefficients, so same pixels, same EXIF and colours.

    None: it is not a JPEG of a usual kind (inks, unusual subsampling, missing scans), and stays as
    it is. Needs the extension. Raises ``SampleUndecodable`` where it is broken anywhere.
    """
    if header.format != "JPEG":
        return None
    try:
        return _jpeg.transcode(data, (header.height, header.width), TILE_WIDTH_PIXELS)
    except _jpeg.JpegError as error:
        raise SampleUndecodable(f"a broken JPEG: {error}") from None
