"""The parts of a PNG and of a JPEG file. Worker process; standard library only.

    PNG    signature (8 bytes) | length | kind | length bytes | checksum | length | kind | ...
    JPEG   scan, segments, scan, ... | padding | end mark | trailers: a video, previews

An animated PNG is a still one with three more kinds of chunks. cv2 knows them, but from a damaged
file of this kind it returns memory that it never wrote, which has the pixels of other samples. So
cv2 never sees these chunks: without them it reads the same picture, and notices damage.

Invariant: the bytes behind the end mark of a JPEG are never read.
"""

import re
from collections.abc import Iterator
from struct import unpack_from
from typing import NamedTuple

from batchd.samples.errors import SampleUndecodable

SIGNATURE_BYTES = 8
CHUNKS_MAX = 1_000_000
"""Chunks of one file. Writers cut the image data into pieces of a few KiB at least."""

_AROUND_BYTES = 12
ANIMATION = frozenset({b"acTL", b"fcTL", b"fdAT"})
"""The kinds of chunks that belong to an animation."""


class PngChunk(NamedTuple):
    """One chunk: its kind, and its extent in the file, from its length to its checksum."""

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


def without_animation(data: memoryview) -> memoryview:
    """Copy an animated PNG as the still one that it is without its animation."""
    parts = [data[chunk.start : chunk.end] for chunk in png_chunks(data) if chunk.kind not in ANIMATION]
    return memoryview(b"".join([data[:SIGNATURE_BYTES], *parts]))


JPEG_SEGMENTS_MAX = 2_000
"""In front of the image data, and in it; EXIF with a preview has a few dozen of 64 KiB."""

_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_WITH_LENGTH = 0xC0
ZEROS_MAX = 9
"""Zeros before those that libjpeg counts: it forgets 7 that it read; a scan may end in 2."""
_BEFORE_MAX = 64
"""Bytes of the image data themselves that look like padding, and those that libjpeg forgets."""


def scan_markers(data: memoryview, scan: int) -> Iterator[tuple[int, int]]:
    """(offset, marker) of each from the first scan to the end. Raises ``SampleUndecodable``."""
    position = scan
    for _ in range(JPEG_SEGMENTS_MAX):
        found = _MARKER.search(data, position)
        if found is None:
            return
        position = found.start()
        marker = data[position + 1]
        yield position, marker
        if marker == _END_OF_IMAGE:
            return
        position += 2
        if marker >= _WITH_LENGTH:
            position += int.from_bytes(data[position : position + 2])
    raise SampleUndecodable(f"a JPEG with more than {JPEG_SEGMENTS_MAX} segments in its image data")


def without_padding(data: memoryview, scan: int, discarded: int) -> bytes | None:
    """Remove the ``discarded`` zeros and fill bytes that libjpeg counted before the end mark.

    None if other bytes are among them, or blocks were decoded from zeros, so pixels are lost.
    ``is_padding`` in ``_jpeg.c`` has the same rule: libjpeg counts fill bytes only in front of a
    zero, and then one of them.
    """
    end = next((place for place, marker in scan_markers(data, scan) if marker == _END_OF_IMAGE), scan)
    file = bytes(data[:end])
    begin = len(file.rstrip(b"\0\xff"))
    before = file.count(b"\0", begin) + file.count(b"\xff\0", begin) - discarded
    if not 0 <= before <= _BEFORE_MAX:
        return None
    while before > 0:
        pair = file[begin : begin + 2]
        before -= 2 if pair == b"\xff\0" else 1 if pair[:1] == b"\0" else 0
        begin += 2 if pair == b"\xff\0" else 1
    return None if file[:begin].endswith(bytes(ZEROS_MAX + 1)) else file[:begin] + bytes(data[end:])
