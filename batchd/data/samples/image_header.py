"""What the header of an image file says, as its decoder has read it. Every process."""

from typing import NamedTuple

PIXELS_MAX = 1 << 30
"""Of an image that is decoded, if nothing says less."""


class ImageHeader(NamedTuple):
    """``height`` and ``width`` are as stored, in pixels, before ``orientation`` (1 to 8)."""

    format: str
    """JPEG, PNG, APNG (an animated PNG), WebP, BMP or GIF."""
    height: int
    width: int
    orientation: int
    channels: int
    """Components of a JPEG: 1 grey, 3 colour, 4 CMYK or YCCK; 1 for a grey PNG, 0 for others."""
    pixels_max: int = PIXELS_MAX
    """How many pixels are believed of a file of so many bytes."""
    held_bytes: int = 0
    """Memory that a decoder takes beside the image that it makes."""
    scan: int = 0
    """The offset of the first start of scan of a JPEG."""
