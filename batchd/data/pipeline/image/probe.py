"""The format and size of an image file, and whether it is complete, before a decoder sees it.

Worker process; standard library only. Decoders are generous: they allocate what a header announces,
and fill what is missing with grey, or with the pixels of the image before. So this module reads the
container itself: magic bytes (never the file's name), dimensions, orientation, the end mark, and
how many pixels the bytes can hold. It decodes and allocates nothing, reads every byte at most once,
and every loop has a limit.

A decoder takes time and memory for every pixel that a header announces, so it is believed only as
far as the bytes behind it can hold pixels by the rules of their format:

    JPEG   a Huffman code has at least one bit; each block of 64 samples has two codes, and one in
           the scans of a progressive file
    PNG    deflate (RFC 1951) copies at most 258 bytes with two codes: 1,032 bytes for one
    GIF    LZW (GIF89a, appendix F): code number k since the table was empty has at most k pixels
    BMP    as many bits for each pixel as the header says

Some pixels take nearly no bits: WebP without loss gives a code of one symbol none, arithmetic
coding continues behind its end, run-length coded bitmaps and frames of a GIF leave pixels out.
These have a budget: what decodes in about 50 ms and 64 MB, for a file of up to
``SMALL_FILE_BYTES``; in proportion for a longer one. A byte of a PNG may be eight pixels, so the
budget holds for a small PNG of less than 8 bits per pixel, too.

Invariants: what ``probe_image`` returns is a file that reaches from its first byte to its end mark;
everything else is ``SampleUndecodable``. The budget refuses no JPEG with Huffman codes, no PNG of 8
bits or of more than ``SMALL_FILE_BYTES``, no GIF whose first frame fills its screen.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from struct import unpack_from
from typing import NamedTuple

from batchd.data.pipeline.image import containers
from batchd.data.samples.columns import MAGIC_BYTES, image_format
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.image_header import PIXELS_MAX, ImageHeader

JPEG_FILL_BYTES_MAX = 4_096
"""Bytes between segments that belong to nothing; libjpeg skips them, and so do we."""
SIZES_KEPT = 1024
JPEG_SCANS_MAX = 200
"""An ordinary progressive file has 10; thousands of empty ones would keep a processor busy."""

_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_ARITHMETIC = frozenset(range(0xC9, 0xD0))
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_START_OF_SCAN, _END_OF_IMAGE, _APP1 = 0xDA, 0xD9, 0xE1
_MARKER = 0xFF
_STUFFED = 0x00
_JPEG_BITS = 8
_COEFFICIENTS, _LOW_BITS, _NOT_THERE = 64, 0xF, 0xFF
_BMP_CORE_HEADER_BYTES = 12
_BMP_UNCOMPRESSED = frozenset({0, 3, 6})
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PNG_GREY = (0, 4)
_PNG_BITS_AT, _PNG_INTERLACED_AT = 24, 28
_WEBP_FLAGS_AT, _WEBP_IS_ANIMATED = 20, 2
_AVIF_AND_HEIF = (b"ftypavif", b"ftypavis", b"ftypheic", b"ftypheix", b"ftypmif1")
_HELD_BYTES, _GIF_HELD_BYTES, _WEBP_HELD_BYTES, _WEBP_ANIMATION_HELD_BYTES = 3, 6, 7, 9
"""For each pixel, measured: what OpenCV holds beside the image; of PNG and BMP a second one."""
_WHOLE_BYTE_BITS = 8
_GIF_FRAME, _GIF_TRAILER = 0x2C, 0x3B


def probe_image(data: memoryview) -> ImageHeader:
    """Read the header of an image file, and find its end; ``data`` has the format "B".

    Raises ``SampleUndecodable``: not a known image, truncated, or malformed.
    """
    if not data:
        raise SampleUndecodable("the file is empty")
    name = image_format(bytes(data[:MAGIC_BYTES]))
    if name is None:
        is_avif = bytes(data[4:12]) in _AVIF_AND_HEIF
        why = "it is AVIF or HEIF; convert it" if is_avif else f"it starts with {bytes(data[:8]).hex(' ')}"
        raise SampleUndecodable(f"not a JPEG, PNG, WebP, BMP or GIF file: {why}")
    try:
        header = _PROBES[name](data)
    except (IndexError, StructError):
        raise SampleUndecodable(f"truncated: it ends inside its header, after {len(data)} bytes") from None
    if header.height <= 0 or header.width <= 0:
        raise SampleUndecodable(f"its {header.format} header announces {header.width} x {header.height} pixels")
    return header


def _probe_jpeg(data: memoryview) -> ImageHeader:
    """Read the segments up to the image data; a photograph has about ten."""
    position, orientation, frame = 2, 0, Frame(0, 0, 0, 0, 0)
    for _ in range(containers.JPEG_SEGMENTS_MAX):
        if data[position] != _MARKER or data[position + 1] == _MARKER:
            position = _next_marker(data, position)
        marker = data[position + 1]
        if marker in _WITHOUT_LENGTH:
            position += 2
            continue
        if marker == _END_OF_IMAGE:
            break
        length = data[position + 2] << 8 | data[position + 3]
        if marker == _START_OF_SCAN:
            return _finish_jpeg(data, position, frame, orientation or 1)
        if marker in _START_OF_FRAME:
            if frame.marker:
                raise SampleUndecodable("a JPEG with two frames")
            frame = _read_frame(data, position)
        elif marker == _APP1 and not orientation:
            orientation = exif_payload_orientation(data[position + 4 : position + 2 + length])
        position += 2 + length
    else:
        raise SampleUndecodable(f"a JPEG with more than {containers.JPEG_SEGMENTS_MAX} segments before its image data")
    raise SampleUndecodable("a JPEG without image data")


def _next_marker(data: memoryview, position: int) -> int:
    """Skip what libjpeg skips between two segments: any bytes up to 0xFF, and repeated 0xFF."""
    for candidate in range(position, position + JPEG_FILL_BYTES_MAX):
        if data[candidate] == _MARKER and data[candidate + 1] not in (_STUFFED, _MARKER):
            return candidate
    raise SampleUndecodable(f"a JPEG whose segments break off at byte {position}")


class Frame(NamedTuple):
    """A JPEG's frame: ``marker`` is 0 before it is read; ``blocks`` are those of all components."""

    marker: int
    height: int
    width: int
    channels: int
    blocks: int


def _read_frame(data: memoryview, position: int) -> Frame:
    bits, height, width, channels = unpack_from(">BHHB", data, position + 4)
    if bits != _JPEG_BITS:
        raise SampleUndecodable(f"a JPEG with {bits} bits per channel; {_JPEG_BITS} are supported")
    factors = bytes(data[position + 11 : position + 11 + 3 * channels : 3])
    if len(factors) < channels:
        raise IndexError
    return Frame(data[position + 1], height, width, channels, _blocks(height, width, factors))


@lru_cache(maxsize=SIZES_KEPT)
def _blocks(height: int, width: int, factors: bytes) -> int:
    """See ``jpeg_blocks``; most photographs of a data set have one of some hundred sizes."""
    return jpeg_blocks(height, width, [(factor >> 4, factor & 0xF) for factor in factors])


def _finish_jpeg(data: memoryview, scan: int, frame: Frame, orientation: int) -> ImageHeader:
    """Check the data after the first start of scan: an end mark, and a sane number of scans."""
    if not frame.marker:
        raise SampleUndecodable("a JPEG whose image data comes before its dimensions")
    if bytes(data[-2:]) != b"\xff\xd9" and bytes(data[scan:]).rfind(b"\xff\xd9") < 0:
        raise SampleUndecodable(f"truncated: a JPEG of {len(data)} bytes without an end mark")
    has_scans = frame.marker in _PROGRESSIVE or data[scan + 4] < frame.channels
    if has_scans:
        _check_scans(data, scan, frame)
    pixels_max = free_pixels(len(data))
    if frame.marker not in _ARITHMETIC and frame.blocks:
        blocks = 8 * (len(data) - scan) // (1 if frame.marker in _PROGRESSIVE else 2)
        pixels_max = frame.height * frame.width * blocks // frame.blocks
    held_bytes = frame.blocks * COEFFICIENT_BLOCK_BYTES if has_scans else 0
    return ImageHeader("JPEG", frame.height, frame.width, orientation, frame.channels, pixels_max, held_bytes, scan)


def _check_scans(data: memoryview, scan: int, frame: Frame) -> None:
    """Refuse too many scans, and what none of them has.

    libjpeg makes a missing component grey, and guesses coefficients that are not there to their
    last bit, as of a download that broke off.
    """
    marks = list(containers.scan_markers(data, scan))
    scans = [place for place, marker in marks if marker == _START_OF_SCAN]
    if len(scans) > JPEG_SCANS_MAX:
        raise SampleUndecodable(f"a JPEG with {len(scans)} scans; {JPEG_SCANS_MAX} are allowed")
    if marks[-1][1] != _END_OF_IMAGE:
        raise SampleUndecodable(f"truncated: a JPEG of {len(data)} bytes without an end mark")
    lacking: dict[int, bytearray] = {}  # component -> the lowest missing bit of each coefficient
    for place in scans:
        numbers = place + 5 + 2 * data[place + 4]
        first, last, bits = 0, _COEFFICIENTS - 1, 0
        if frame.marker in _PROGRESSIVE:
            first, last, bits = data[numbers], min(data[numbers + 1], last), data[numbers + 2] & _LOW_BITS
        for component in data[place + 5 : numbers : 2]:
            known = lacking.setdefault(component, bytearray([_NOT_THERE]) * _COEFFICIENTS)
            known[first : last + 1] = bytes([bits]) * len(known[first : last + 1])
    whole = [bits.count(0) for bits in lacking.values() if bits[0] != _NOT_THERE]
    if len(whole) < frame.channels:
        raise SampleUndecodable(f"truncated: a JPEG with scans of {len(whole)} of its {frame.channels} components")
    if sum(whole) < _COEFFICIENTS * frame.channels:
        raise SampleUndecodable(
            f"truncated: a progressive JPEG whose {len(scans)} scans have {sum(whole)} of "
            f"{_COEFFICIENTS * frame.channels} coefficients to their last bit; decoders guess the others "
            "(jpegtran makes them zeros)"
        )


def _probe_png(data: memoryview) -> ImageHeader:
    length, kind, width, height = unpack_from(">I4sII", data, 8)
    if (length, kind) != (13, b"IHDR"):
        raise SampleUndecodable("a PNG that does not start with its dimensions")
    tagged, profile, name, deflated = 0, 0, "PNG", 0
    for chunk in containers.png_chunks(data):
        if chunk.kind == b"IDAT":
            deflated += chunk.content_bytes
        elif chunk.kind == b"eXIf":
            tagged = tagged or block_orientation(data[chunk.start + 8 : chunk.end - 4])
        elif chunk.kind in TEXTS:
            profile = profile or raw_profile_orientation(chunk.kind, data[chunk.start + 8 : chunk.end - 4])
        elif chunk.kind in containers.ANIMATION:
            name = "APNG"
    bits, colors = unpack_from("BB", data, _PNG_BITS_AT)
    pixel_bits, is_interlaced = bits * _PNG_CHANNELS.get(colors, 1), data[_PNG_INTERLACED_AT] != 0
    whole = png_bytes(height, width, pixel_bits, is_interlaced=is_interlaced)
    pixels_max = height * width * DEFLATED_MAX * deflated // whole if whole else 0
    if pixel_bits < _WHOLE_BYTE_BITS and len(data) <= SMALL_FILE_BYTES:
        free = free_pixels(len(data), PIXELS_PER_BYTE if is_interlaced else ROW_PIXELS_PER_BYTE)
        pixels_max = min(pixels_max, free)
    channels = 1 if colors in _PNG_GREY else 0
    return ImageHeader(name, height, width, tagged or profile or 1, channels, pixels_max, _HELD_BYTES * height * width)


def _probe_webp(data: memoryview) -> ImageHeader:
    end = 8 + int(unpack_from("<I", data, 4)[0])
    if end > len(data):
        raise SampleUndecodable(f"truncated: a WebP of {len(data)} bytes that announces {end}")
    kind, orientation, held = bytes(data[12:16]), 1, _WEBP_HELD_BYTES
    if kind == b"VP8X":
        width, height = 1 + _number24(data, 24), 1 + _number24(data, 27)
        orientation = _webp_orientation(data, end)
        held = _WEBP_ANIMATION_HELD_BYTES if data[_WEBP_FLAGS_AT] & _WEBP_IS_ANIMATED else held
    elif kind == b"VP8L":
        bits = int(unpack_from("<I", data, 21)[0])
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in unpack_from("<HH", data, 26))
    else:
        raise SampleUndecodable(f"a WebP whose first chunk is {kind!r}")
    return ImageHeader("WebP", height, width, orientation, 0, free_pixels(len(data)), held * height * width)


def _webp_orientation(data: memoryview, end: int) -> int:
    blocks = (data[start:stop] for kind, start, stop in containers.webp_chunks(data, 12, end) if kind == b"EXIF")
    return next((block_orientation(block) for block in blocks), 1)


def _number24(data: memoryview, position: int) -> int:
    return data[position] | data[position + 1] << 8 | data[position + 2] << 16


def _probe_bmp(data: memoryview) -> ImageHeader:
    pixels_at, header_bytes = unpack_from("<II", data, 10)
    compression = 0
    if header_bytes == _BMP_CORE_HEADER_BYTES:
        width, height, bits = unpack_from("<HH2xH", data, 18)
    else:
        width, height, bits, compression = unpack_from("<ii2xHI", data, 18)
    containers.bitmap_layout(data)
    height = abs(height)
    has_all = compression in _BMP_UNCOMPRESSED and bits > 0
    needed = pixels_at + (width * bits + 31) // 32 * 4 * height if has_all else pixels_at
    if len(data) < needed:
        raise SampleUndecodable(f"truncated: a BMP of {len(data)} bytes that needs {needed}")
    pixels_max = PIXELS_MAX if has_all else free_pixels(len(data))
    return ImageHeader("BMP", height, width, 1, 0, pixels_max, _HELD_BYTES * height * width)


def _probe_gif(data: memoryview) -> ImageHeader:
    """The first frame's own size may not exceed the screen's, or decoders disagree."""
    width, height, flags = unpack_from("<HHB", data, 6)
    position, pixels_max = 13 + containers.gif_color_bytes(flags), None
    for _ in range(containers.CHUNKS_MAX):
        introducer, frame_pixels = data[position], 0
        if introducer == _GIF_TRAILER:
            pixels_max = free_pixels(len(data)) if pixels_max is None else pixels_max
            return ImageHeader("GIF", height, width, 1, 0, pixels_max, _GIF_HELD_BYTES * height * width)
        if introducer == containers.GIF_EXTENSION:  # its label, then data
            position += 2
        elif introducer == _GIF_FRAME:  # its place, a color table, the size of a code, then data
            left, top, frame_width, frame_height, flags = unpack_from("<HHHHB", data, position + 1)
            if left + frame_width > width or top + frame_height > height:
                raise SampleUndecodable("a GIF with a frame larger than its screen")
            position += 11 + containers.gif_color_bytes(flags)
            frame_pixels = frame_width * frame_height
        else:
            raise SampleUndecodable(f"a GIF with the unknown block 0x{introducer:02x} at byte {position}")
        start = position
        while length := data[position]:
            position += 1 + length
        position += 1
        if frame_pixels and pixels_max is None:
            pixels_max = lzw_pixels_max(data[start - 1], position - start)
            if frame_pixels < min(height * width, pixels_max + 1):  # around it there is the screen
                pixels_max = free_pixels(len(data))
    raise SampleUndecodable(f"a GIF with more than {containers.CHUNKS_MAX} blocks")


_PROBES: Mapping[str, Callable[[memoryview], ImageHeader]] = {
    "JPEG": _probe_jpeg,
    "PNG": _probe_png,
    "WebP": _probe_webp,
    "BMP": _probe_bmp,
    "GIF": _probe_gif,
}

SMALL_FILE_BYTES = 4096
PIXELS_PER_BYTE = 1_040
"""Of pixels that take no bits: 4.3 million in a small file."""
ROW_PIXELS_PER_BYTE = 2_200
"""Of pixels of less than 8 bits in a PNG: 9 million in a small file, an empty page at 300 dpi."""
DEFLATED_MAX = 1_032
JPEG_BLOCK_SIDE = 8
COEFFICIENT_BLOCK_BYTES = 128

_LZW_CODE_BITS_MAX = 12
_ADAM7 = ((0, 8, 0, 8), (0, 8, 4, 8), (4, 8, 0, 4), (0, 4, 2, 4), (2, 4, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1))
"""Of each pass of an interlaced PNG: first row, step of rows, first column, step of columns."""
_ROWS = ((0, 1, 0, 1),)


def free_pixels(file_bytes: int, per_byte: int = PIXELS_PER_BYTE) -> int:
    """Return how many pixels may take no bits in a file of ``file_bytes``."""
    return per_byte * max(SMALL_FILE_BYTES, file_bytes)


def lzw_pixels_max(pixel_bits: int, data_bytes: int) -> int:
    """Return how many pixels a GIF's codes can have; the shortest code has ``pixel_bits`` + 1.

    ``data_bytes`` counts what blocks say of their lengths, too. Each code enters a run into the
    table that is one pixel longer than a run that is there. A full table does not change;
    an empty one would never be better.
    """
    colors = 1 << pixel_bits
    longest = max(1, (1 << _LZW_CODE_BITS_MAX) - colors - 1)
    bits, codes = 8 * data_bytes, 0
    for code_bits in range(pixel_bits + 1, _LZW_CODE_BITS_MAX + 1):
        further = bits // code_bits
        if code_bits < _LZW_CODE_BITS_MAX:
            further = min(further, (1 << code_bits) - colors + 1 - codes)
        bits -= further * code_bits
        codes += further
    short = min(codes, longest)
    return short * (short + 1) // 2 + (codes - short) * longest


def png_bytes(height: int, width: int, pixel_bits: int, *, is_interlaced: bool) -> int:
    """How many bytes the rows of a PNG have before they are deflated, each with its filter."""
    passes = _ADAM7 if is_interlaced else _ROWS
    sizes = ((-(-(height - top) // down), -(-(width - left) // across)) for top, down, left, across in passes)
    return sum(rows * (1 + -(-columns * pixel_bits // 8)) for rows, columns in sizes if rows > 0 and columns > 0)


def jpeg_blocks(height: int, width: int, samplings: Iterable[tuple[int, int]]) -> int:
    """Count a JPEG's blocks; ``samplings``: (horizontal, vertical) of each component."""
    factors = list(samplings)
    across, down = (max((factor[axis] for factor in factors), default=0) or 1 for axis in (0, 1))
    return sum(
        -(-height * vertical // (down * JPEG_BLOCK_SIDE)) * -(-width * horizontal // (across * JPEG_BLOCK_SIDE))
        for horizontal, vertical in factors
    )


EXIF_PREFIX = b"Exif\0\0"
ENTRIES_MAX = 512
"""Number of entries of the first directory that are read. Cameras write about a dozen."""

_ORIENTATION_TAG, _SHORT, _ENTRY_BYTES = 0x0112, 3, 12
_ORIENTATIONS = range(1, 9)


def exif_payload_orientation(payload: memoryview) -> int:
    """Read the orientation (1 to 8) of an APP1 segment's payload; 0 if it is no EXIF block."""
    return exif_orientation(payload[len(EXIF_PREFIX) :]) if payload[: len(EXIF_PREFIX)] == EXIF_PREFIX else 0


def block_orientation(block: memoryview) -> int:
    """Read the orientation (1 to 8) of an EXIF block with or without the prefix of JPEG."""
    return exif_payload_orientation(block) or exif_orientation(block)


def exif_orientation(block: memoryview) -> int:
    """Read the orientation (1 to 8) of an EXIF block, which has the layout of a TIFF file.

    1 (upright) for a block that is broken, has no orientation or an invalid one: viewers do the
    same, and a bad tag does not make a bad image.
    """
    order = {b"II": "<", b"MM": ">"}.get(bytes(block[:2]))
    if order is None:
        return 1
    try:
        directory = int(unpack_from(f"{order}I", block, 4)[0])
        entries = int(unpack_from(f"{order}H", block, directory)[0])
        for index in range(min(entries, ENTRIES_MAX)):
            tag, kind, _count, value = unpack_from(f"{order}HHIH", block, directory + 2 + index * _ENTRY_BYTES)
            if tag == _ORIENTATION_TAG:
                return value if kind == _SHORT and value in _ORIENTATIONS else 1
    except StructError:
        return 1
    return 1


TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
_RAW_PROFILES = (b"Raw profile type exif", b"Raw profile type APP1")
_PROFILE_BYTES_MAX = 1 << 20
"""Of the text of a profile: the first directory is near its beginning."""


def raw_profile_orientation(kind: bytes, content: memoryview) -> int:
    """Read the orientation (1 to 8) of an EXIF block that a PNG has as text; 0 if it is other text.

    ImageMagick writes one as its name, its length and hexadecimal digits, in several lines.
    """
    keyword, _, rest = bytes(content[:_PROFILE_BYTES_MAX]).partition(b"\0")
    if keyword not in _RAW_PROFILES:
        return 0
    is_packed = kind == b"zTXt"
    if kind == b"iTXt":  # whether it is compressed, how, the language, the keyword once more
        is_packed, rest = rest[:1] == b"\1", rest[2:].split(b"\0", 2)[-1]
    elif is_packed:
        rest = rest[1:]
    try:
        text = zlib.decompressobj().decompress(rest, _PROFILE_BYTES_MAX) if is_packed else rest
        digits = b"".join(text.split()[2:])
        return block_orientation(memoryview(bytes.fromhex(digits[: len(digits) // 2 * 2].decode("ascii"))))
    except (zlib.error, ValueError):
        return 1
