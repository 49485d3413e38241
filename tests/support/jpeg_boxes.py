"""Shared parts of the tests that decode boxes of JPEGs, with and without restart markers."""

import pytest

from batchd.pipeline.image import jpeg_box
from batchd.pipeline.image.decode import Decoder
from batchd.pipeline.image.opencv import Scratch
from batchd.pipeline.image.options import Decode

SUBSAMPLINGS = ("444", "422", "420", "440", "411", "grey")
PRIVATE_GROWTH_BYTES_MAX = 1 << 20

where_it_is_built = pytest.mark.skipif(
    not jpeg_box.IS_BUILT,
    reason="the extension is not built: apt install gcc libjpeg62-turbo-dev, and install batchd again",
)


def decoder(color: str = "rgb") -> Decoder:
    """Make a decoder with memory of its own."""
    return Decoder(Decode(color=color), Scratch())  # type: ignore[arg-type]  tests try all colours
