"""The chunks of a PNG file. Worker process; standard library only.

    signature (8 bytes) | length | kind | length bytes | checksum | length | kind | ...

An animated PNG is a still one with three more kinds of chunks, which a decoder that does not know
them skips. cv2 knows them, but where such a file is damaged it returns memory that it never wrote,
which holds the pixels of other samples. So cv2 never sees them: without them it reads the same
picture the way it reads any PNG, and notices what is damaged.
"""

from collections.abc import Iterator
from struct import unpack_from
from typing import NamedTuple

from batchd.samples.errors import SampleUndecodable

SIGNATURE_BYTES = 8
CHUNKS_MAX = 1_000_000
"""Chunks of one file. Writers cut the image data into pieces of a few KiB at least."""

_AROUND_BYTES = 12
_ANIMATION = frozenset({b"acTL", b"fcTL", b"fdAT"})


class PngChunk(NamedTuple):
    """One chunk: its kind, and where it lies in the file, from its length to its checksum."""

    kind: bytes
    start: int
    end: int

    @property
    def content_bytes(self) -> int:
        """Bytes of what it says."""
        return self.end - self.start - _AROUND_BYTES


def png_chunks(data: memoryview) -> Iterator[PngChunk]:
    """Give the chunks up to and with the last one, ``IEND``.

    Raises ``SampleUndecodable`` where the file ends before it, and ``struct.error`` where it ends
    inside a chunk's head.
    """
    start = SIGNATURE_BYTES
    for _ in range(CHUNKS_MAX):
        length, kind = unpack_from(">I4s", data, start)
        end = start + length + _AROUND_BYTES
        if end > len(data):
            raise SampleUndecodable(f"truncated: a PNG of {len(data)} bytes whose next chunk ends at byte {end}")
        yield PngChunk(kind, start, end)
        if kind == b"IEND":
            return
        start = end
    raise SampleUndecodable(f"a PNG with more than {CHUNKS_MAX} chunks")


def is_animation(chunk: PngChunk) -> bool:
    """Tell whether the chunk belongs to an animation."""
    return chunk.kind in _ANIMATION


def without_animation(data: memoryview) -> memoryview:
    """Copy an animated PNG as the still one that it is without its animation."""
    parts = [data[chunk.start : chunk.end] for chunk in png_chunks(data) if not is_animation(chunk)]
    return memoryview(b"".join([data[:SIGNATURE_BYTES], *parts]))
