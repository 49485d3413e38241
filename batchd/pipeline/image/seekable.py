"""JPEGs of which a crop can be decoded without reading what lies around it. Writers of ``batchd prepare``, and workers.

A baseline JPEG can only be read from its start, but at a restart marker, where nothing depends on
what was before. So the same coefficients are written again with a marker every few blocks: a plain
JPEG to everybody, some 1 % larger, out of which ``jpeg_box`` cuts what a crop needs. Where the
markers stand is found by looking for them, which takes 1 to 2 % of the time of decoding the crop,
so nothing is written beside the file.
"""

from batchd.pipeline.image import jpeg_box
from batchd.pipeline.image.probe import ImageHeader, probe_image
from batchd.samples.errors import SampleUndecodable

if jpeg_box.IS_BUILT:
    from batchd.pipeline import _jpeg

TILE_WIDTH_PIXELS = 64
"""About how wide a part between two markers is. Half of it saves 2 % of the time of decoding, and costs 1.4 % more bytes."""


_WHOLE_SIZE = 8


def made_seekable(data: memoryview, bytes_max: int) -> bytes | None:
    """A file that was decoded already, as a cache keeps it; None where it stays as it is.

    Because it can be cut as it is, is no JPEG of a usual kind, is broken where no crop has looked,
    or would be too long.
    """
    try:
        header = probe_image(data)
        if header.format != "JPEG":
            return None
        last_pixel = header.height - 1, header.width - 1, 1, 1
        if _jpeg.tiles(data, _WHOLE_SIZE, (header.height, header.width), last_pixel) is not None:
            return None
        made = seekable(data, header)
    except (_jpeg.JpegError, SampleUndecodable):
        return None
    return made if made is not None and len(made) <= bytes_max else None


def seekable(data: memoryview, header: ImageHeader) -> bytes | None:
    """The file with restart markers: the same coefficients, so the same pixels, and the same EXIF and colours.

    None: it is not a JPEG of a usual kind (inks, unusual subsampling, missing scans), and stays as
    it is. Needs the extension. Raises ``SampleUndecodable`` where it is broken anywhere.
    """
    if header.format != "JPEG":
        return None
    try:
        return _jpeg.transcode(data, (header.height, header.width), TILE_WIDTH_PIXELS)
    except _jpeg.JpegError as error:
        raise SampleUndecodable(f"a broken JPEG: {error}") from None
