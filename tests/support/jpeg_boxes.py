"""Shared parts of the tests that decode boxes of JPEGs, with and without restart markers."""

import os
from collections.abc import Callable

import pytest

from batchd.data.pipeline.image import jpeg_box
from batchd.data.pipeline.image.decode import Decoder
from batchd.data.pipeline.image.opencv import Scratch
from batchd.data.pipeline.image.options import Decode
from support.good_trainers import private_bytes

SUBSAMPLINGS = ("444", "422", "420", "440", "411", "grey")
PRIVATE_GROWTH_BYTES_MAX = 1 << 20
ROUNDS = 4

if jpeg_box.IS_BUILT:
    from batchd.data.pipeline import _jpeg as extension
else:
    extension = None
    """The compiled decoder of boxes."""

where_it_is_built = pytest.mark.skipif(
    not jpeg_box.IS_BUILT,
    reason="the extension is not built: apt install gcc libjpeg62-turbo-dev, and install batchd again",
)


def check_that_memory_stays(many: Callable[[int], None], calls: int) -> None:
    """Assert that so many calls in all take no memory: each round would, and the first one may.

    The heap of a process that ran other tests grows now and then by itself.
    """
    grown = []
    for _ in range(ROUNDS):
        before = private_bytes(os.getpid())
        many(calls // ROUNDS)
        grown.append(private_bytes(os.getpid()) - before)
    assert min(grown) < PRIVATE_GROWTH_BYTES_MAX // ROUNDS, grown


def decoder(color: str = "rgb") -> Decoder:
    """Make a decoder with memory of its own."""
    return Decoder(Decode(color=color), Scratch())  # type: ignore[arg-type]  tests try all colours
