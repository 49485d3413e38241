"""The parts of an image file. Worker process; standard library only.

    PNG    signature (8 bytes) | length | kind | length bytes | checksum | length | kind | ...
    JPEG   segments | scan, segments, scan, ... | padding | end mark | trailers: a video, previews
    WebP   "RIFF" | length | "WEBP" | kind | length | length bytes, made even | kind | ...
    GIF    header, colors | extensions | frame | ... | trailer
    BMP    header | masks | colors | pixels

An animated PNG is a still one with three more kinds of chunks. cv2 knows them, but from a damaged
file of this kind it returns memory that it never wrote, which has the pixels of other samples. So
cv2 never sees these chunks: without them it reads the same picture, and notices damage.

Invariant: the bytes behind the end mark of a JPEG are never read.
"""

import re
from collections.abc import Iterator
from struct import pack, unpack_from
from typing import NamedTuple

from batchd.data.samples.errors import SampleUndecodable

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
_MARKER_BYTES = 2
ARITHMETIC = frozenset(range(0xC9, 0xD0)) - {0xCC}
"""The frames of arithmetic coding."""
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


def end_of_image(data: memoryview, scan: int) -> int:
    """Where the end mark is, behind the first ``scan``; ``scan`` if there is none."""
    return next((place for place, marker in scan_markers(data, scan) if marker == _END_OF_IMAGE), scan)


def is_arithmetic(data: memoryview, scan: int) -> bool:
    """Whether the frame in front of the first ``scan`` announces arithmetic coding."""
    return any(marker in ARITHMETIC for _, marker in scan_markers(data[:scan], _MARKER_BYTES))


def without_padding(data: memoryview, scan: int, discarded: int) -> bytes | None:
    """Remove the ``discarded`` zeros and fill bytes that libjpeg counted before the end mark.

    None if other bytes are among them, or blocks were decoded from zeros, so pixels are lost.
    ``is_padding`` in ``_jpeg.c`` has the same rule: libjpeg counts fill bytes only in front of a
    zero, and then one of them.
    """
    end = end_of_image(data, scan)
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


def without_bytes_between(data: memoryview, scan: int) -> bytes | None:
    """Remove the bytes between segments in front of the first ``scan``, which libjpeg skips.

    None if there are none. The probe has followed the same segments up to there.
    """
    kept, position = bytearray(data[:_MARKER_BYTES]), _MARKER_BYTES
    while position < scan:
        found = _MARKER.search(data, position)
        if found is None:
            return None
        end = found.start() + _MARKER_BYTES
        if data[end - 1] >= _WITH_LENGTH:
            end += int.from_bytes(data[end : end + 2])
        if found.start() < scan:
            kept += data[found.start() : end]
        position = end
    return bytes(kept + data[scan:]) if len(kept) < scan else None


_ADOBE_SEGMENT, _ADOBE_NAME, _ADOBE_TRANSFORM_AT = 0xEE, b"Adobe", 15
_TRANSFORMS = {3: (1, 0), 4: (2, 0)}
"""Of each number of components, those that are known, first the one that libjpeg assumes."""
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_ALL_COEFFICIENTS = b"\0\x3f\0"


def with_usual_numbers(data: memoryview, channels: int) -> bytes | None:
    """Write the numbers that libjpeg assumes in the place of those that it mentions as odd.

    They are the coefficients of a sequential scan, which has all, and Adobe's transform of colours.
    None if there are no odd ones.
    """
    file, is_sequential = bytearray(data), True
    transforms = _TRANSFORMS.get(channels, range(256))
    for place, marker in scan_markers(data, _MARKER_BYTES):
        content = place + 2 * _MARKER_BYTES
        if marker in _PROGRESSIVE:
            is_sequential = False
        elif marker == _START_OF_SCAN and is_sequential and content < len(data):
            numbers = content + 1 + 2 * data[content]
            file[numbers : numbers + 3] = _ALL_COEFFICIENTS[: max(0, len(data) - numbers)]
        elif marker == _ADOBE_SEGMENT and data[content : content + 5] == _ADOBE_NAME:
            at = place + _ADOBE_TRANSFORM_AT
            if at < len(data) and file[at] not in transforms:
                file[at] = transforms[0]
    return bytes(file) if file != data else None


def gif_color_bytes(flags: int) -> int:
    """Length of the color table that these flags of a GIF announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


GIF_EXTENSION = 0x21
_GIF_CONTROL, _GIF_HEADER_BYTES, _GIF_FLAGS_AT = 0xF9, 13, 10


def without_transparency(data: memoryview) -> memoryview:
    """Clear the mark of a transparent color in front of the first frame of a GIF, if it is there.

    cv2 shows the background color in its place. The probe has followed the same blocks.
    """
    position = _GIF_HEADER_BYTES + gif_color_bytes(data[_GIF_FLAGS_AT])
    cleared: bytearray | None = None
    while data[position] == GIF_EXTENSION:
        if data[position + 1] == _GIF_CONTROL and data[position + 2] and data[position + 3] & 1:
            cleared = bytearray(data) if cleared is None else cleared
            cleared[position + 3] &= ~1
        position += 2
        while length := data[position]:
            position += 1 + length
        position += 1
    return data if cleared is None else memoryview(cleared)


def webp_chunks(data: memoryview, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, first byte, byte behind the last) of the content of each chunk of a WebP."""
    for _ in range(CHUNKS_MAX):
        if start + 8 > end:
            return
        kind, length = unpack_from("<4sI", data, start)
        yield kind, start + 8, min(end, start + 8 + length)
        start += 8 + length + length % 2


class WebpFrame(NamedTuple):
    """Where a frame is in its canvas, in pixels, and its image as a file of its own."""

    left: int
    top: int
    file: bytes


_WEBP_START, _WEBP_FRAME_BYTES = 12, 16


def first_webp_frame(data: memoryview) -> WebpFrame | None:
    """The first frame of an animated WebP, without its alpha; None of a still one."""
    whole = 8 + int(unpack_from("<I", data, 4)[0])
    for kind, start, end in webp_chunks(data, _WEBP_START, whole):
        if kind != b"ANMF":
            if kind in (b"VP8 ", b"VP8L"):
                return None
            continue
        left, top = (2 * int.from_bytes(data[place : place + 3], "little") for place in (start, start + 3))
        for part, first, behind in webp_chunks(data, start + _WEBP_FRAME_BYTES, end):
            if part in (b"VP8 ", b"VP8L"):
                image = part + pack("<I", behind - first) + data[first:behind] + bytes((behind - first) % 2)
                return WebpFrame(left, top, b"RIFF" + pack("<I", 4 + len(image)) + b"WEBP" + image)
        raise SampleUndecodable("an animated WebP whose first frame has no image")
    return None


class BitmapLayout(NamedTuple):
    """Where the pixels of a BMP begin, and of how many bits they are; masks: red, green, blue."""

    pixels_at: int
    bits: int
    is_top_down: bool
    masks: tuple[int, int, int]


_BMP_FILE_HEADER_BYTES, _BMP_CORE_HEADER_BYTES, _BMP_MASKS_AT = 14, 12, 54
_BMP_MASKED = (3, 6)
_MASKS = {16: (0x7C00, 0x3E0, 0x1F), 32: (0xFF0000, 0xFF00, 0xFF)}
_OS2_HEADER_BYTES = 64


def bitmap_layout(data: memoryview) -> BitmapLayout | None:
    """How the pixels of a BMP of 16 or 32 bits are stored; None of another one.

    Raises ``SampleUndecodable`` for masks that make no numbers, and for pixels inside the header.
    """
    pixels_at, header_bytes = unpack_from("<II", data, 10)
    height, bits, compression = 0, 0, 0
    if header_bytes != _BMP_CORE_HEADER_BYTES:
        height, bits, compression = unpack_from("<i2xHI", data, 22)
    is_masked = compression in _BMP_MASKED and bits in _MASKS
    header_end = max(_BMP_FILE_HEADER_BYTES + header_bytes, _BMP_MASKS_AT + 12 if is_masked else 0)
    if pixels_at < header_end:
        raise SampleUndecodable(
            f"a BMP whose pixels begin at byte {pixels_at}, inside of its header of {header_end} bytes"
        )
    if bits not in _MASKS or (compression and not is_masked):
        return None
    masks = unpack_from("<III", data, _BMP_MASKS_AT) if is_masked else _MASKS[bits]
    if header_bytes == _OS2_HEADER_BYTES or not any(masks) or not all(_is_field(mask, bits) for mask in masks):
        raise SampleUndecodable(f"a BMP of {bits} bits with the masks {', '.join(f'{mask:08x}' for mask in masks)}")
    return BitmapLayout(pixels_at, bits, height < 0, masks)


def _is_field(mask: int, bits: int) -> bool:
    """Whether the bits of a mask are next to each other, and in a pixel; it may be empty."""
    lowest = mask & -mask
    return mask < 1 << bits and (mask + lowest) & mask == 0
