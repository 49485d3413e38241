"""From the bytes of a mask to the number of each pixel, which is a class or an object and no colour. Worker process.

Taken is only what keeps numbers as they are: PNG files of one channel, up to 8 bits, and such with
a palette, whose indices count. (cv2 gives colours instead of indices. So the file is shown to it as
the grey one that it is without its palette: the bits of the pixels are the same.) What lies
between, as gamma, transparency and the EXIF tag, has no part in it.

Invariant: a number that comes out stood in the file. Grey of 1, 2 or 4 bits is stretched to 0 to
255, as every viewer does.
"""

import zlib
from struct import pack, unpack_from

import numpy as np

from batchd.pipeline.image.containers import SIGNATURE_BYTES, png_chunks
from batchd.pipeline.image.probe import probe_image
from batchd.pipeline.image.vision import Pixels, cv2
from batchd.samples.errors import SampleUndecodable

_KEPT = frozenset({b"IHDR", b"IDAT", b"IEND"})
_HEADER_START, _HEADER_END = SIGNATURE_BYTES + 4, SIGNATURE_BYTES + 21
"""The kind and the content of the first chunk, which its checksum is of."""
_BITS_AT, _COLORS_AT = SIGNATURE_BYTES + 16, SIGNATURE_BYTES + 17
_GREY, _PALETTE, _GREY_WITH_ALPHA = 0, 3, 4
_BITS_MAX = 8


def decode_mask(data: memoryview, size: tuple[int, int]) -> Pixels:
    """Decode the mask of an image of ``size``, height and width. Gives uint8 [height, width, 1]. Raises ``SampleUndecodable``."""
    header = probe_image(data)
    if header.format not in ("PNG", "APNG"):
        raise SampleUndecodable(f"a {header.format} file; a mask is a PNG, which keeps its numbers as they are")
    if (header.height, header.width) != size:
        raise SampleUndecodable(
            f"has {header.width} x {header.height} pixels, and the image {size[1]} x {size[0]}; see exif of decode"
        )
    bits, colors = unpack_from("BB", data, _BITS_AT)
    if colors not in (_GREY, _PALETTE, _GREY_WITH_ALPHA) or bits > _BITS_MAX:
        what = f"{bits} bits" if bits > _BITS_MAX else "colours"
        raise SampleUndecodable(f"a PNG of {what}; a mask has one channel of 8 bits, or a palette")
    try:
        pixels = cv2.imdecode(np.frombuffer(_plain(data, colors), np.uint8), cv2.IMREAD_GRAYSCALE)
    except cv2.error as error:
        raise SampleUndecodable(f"OpenCV cannot decode it: {error.err}") from None
    if pixels is None or pixels.shape[:2] != size:
        raise SampleUndecodable("OpenCV cannot decode it")
    mask: Pixels = np.asarray(pixels, np.uint8).reshape(*size, 1)
    if colors == _PALETTE and bits < _BITS_MAX:
        mask = mask // np.uint8(255 // ((1 << bits) - 1))
    return mask


def _plain(data: memoryview, colors: int) -> bytes:
    """The file without all that is not pixels; an index into its palette becomes a level of grey."""
    kept = bytearray(data[:SIGNATURE_BYTES])
    for chunk in png_chunks(data):
        if chunk.kind in _KEPT:
            kept += data[chunk.start : chunk.end]
    if colors == _PALETTE:
        kept[_COLORS_AT] = _GREY
        kept[_HEADER_END : _HEADER_END + 4] = pack(">I", zlib.crc32(kept[_HEADER_START:_HEADER_END]))
    return bytes(kept)
