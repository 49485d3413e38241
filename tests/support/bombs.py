"""Small files that announce large images, in every format.

Most have the largest size of their format, and a decoder makes all pixels.

Each function takes height and width, and gives the bytes of a file.
"""

import zlib
from struct import pack

import cv2
import numpy as np

from support.images import PNG_MAGIC, arithmetic_jpeg, encode, jpeg, jpeg_announcing, png_chunk

GIF_CODE_BITS = 12
"""The length of the longest codes."""


def empty_gif(height, width):
    """A GIF of 35 bytes, with a frame of one pixel."""
    return _gif(height, width, (1, 1), b"\x02\x02\x44\x01\0")


def starved_gif(height, width):
    """A GIF with one frame of the whole screen, and the data of one pixel."""
    return _gif(height, width, (height, width), b"\x02\x02\x44\x01\0")


def flat_gif(height, width):
    """Write one colour as compactly as LZW can: each code is one pixel longer than the previous."""
    bits = _BitsFromBelow()
    bits.write(4, 3)
    left, length, size = height * width, 1, 3
    while left > 0:
        run = min(length, left, 4096 - 5)
        bits.write(0 if run == 1 else 4 + run, size)
        left -= run
        if 5 + length < 1 << GIF_CODE_BITS:
            length += 1
        if 4 + length >= 1 << size and size < GIF_CODE_BITS:
            size += 1
    bits.write(5, size)
    data = bits.bytes()
    blocks = b"".join(bytes([len(data[at : at + 255])]) + data[at : at + 255] for at in range(0, len(data), 255))
    return _gif(height, width, (height, width), b"\x02" + blocks + b"\0")


def _gif(height, width, frame, body):
    screen = b"GIF89a" + pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return screen + b"," + pack("<HHHHB", 0, 0, frame[1], frame[0], 0) + body + b";"


class _BitsFromBelow:
    """Numbers of any number of bits, the lowest bit first."""

    def __init__(self):
        self._number, self._bits, self._parts = 0, 0, bytearray()

    def write(self, number, bits):
        self._number |= number << self._bits
        self._bits += bits
        while self._bits >= 8:
            self._parts.append(self._number & 0xFF)
            self._number >>= 8
            self._bits -= 8

    def bytes(self):
        return bytes(self._parts) + (bytes([self._number]) if self._bits else b"")


def empty_bmp(height, width, compression=1):
    """Write 1,080 bytes of empty run lengths: all pixels are the background."""
    header = pack("<IiiHHIIiiII", 40, width, height, 1, 8 if compression == 1 else 4, compression, 0, 0, 0, 256, 0)
    return b"BM" + pack("<IHHI", 1080, 0, 0, 1078) + header + bytes(1024) + b"\0\1"


def flat_bmp(height, width):
    """Write runs of 255 pixels up to 4 KiB, and nothing after them."""
    return empty_bmp(height, width)[:1078] + b"\xff\7" * 1500 + b"\0\1"


def flat_png(height, width, bits=8, colors=0, *, interlaced=False):
    """Write one colour, as tightly as deflate can."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colors]
    raw = 0
    for top, down, left, across in ADAM7 if interlaced else ((0, 1, 0, 1),):
        columns = len(range(left, width, across))
        raw += len(range(top, height, down)) * (1 + -(-columns * bits * channels // 8)) if columns else 0
    deflate = zlib.compressobj(9)
    body = b"".join(deflate.compress(bytes(min(1 << 20, raw - at))) for at in range(0, raw, 1 << 20)) + deflate.flush()
    header = pack(">IIBBBBB", width, height, bits, colors, 0, 0, interlaced)
    palette = png_chunk(b"PLTE", b"\1\2\3" * 2) if colors == 3 else b""
    return PNG_MAGIC + png_chunk(b"IHDR", header) + palette + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


ADAM7 = ((0, 8, 0, 8), (0, 8, 4, 8), (4, 8, 0, 4), (0, 4, 2, 4), (2, 4, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1))
"""Top, step down, left, step across of each pass of an interlaced PNG."""


def starved_png(height, width):
    """Announce any size with the data of one pixel."""
    header = pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(4))
    return PNG_MAGIC + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


def flat_webp(height, width, *, alpha=True):
    """Write one colour without loss: each code has one symbol, so no pixel needs a bit."""
    bits = _BitsFromBelow()
    for number, size in ((0x2F, 8), (width - 1, 14), (height - 1, 14), (int(alpha), 1), (0, 3), (0, 1), (0, 1), (0, 1)):
        bits.write(number, size)
    for symbol in (10, 20, 30, 128, 0):
        bits.write(0b101, 3)
        bits.write(symbol, 8)
    return _riff(b"VP8L", bits.bytes())


def flat_lossy_webp(height, width):
    """Write one colour with the standard library for WebP."""
    return encode(np.full((height, width, 3), 99, np.uint8), ".webp", cv2.IMWRITE_WEBP_QUALITY, 1)


def starved_webp(height, width):
    """Announce any size with the data of a few pixels."""
    data = bytearray(flat_lossy_webp(16, 16))
    data[26:30] = pack("<HH", width, height)
    return bytes(data)


def enveloped_webp(height, width):
    """Announce any size only in the extended header."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    inner = flat_webp(8, 8)[12:]
    return _riff(b"VP8X", b"\0\0\0\0" + size, inner)


def _riff(kind, body, behind=b""):
    chunk = kind + pack("<I", len(body)) + body + b"\0" * (len(body) % 2) + behind
    return b"RIFF" + pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def starved_jpeg(height, width):
    """Announce any size with the data of a few blocks."""
    return jpeg_announcing(jpeg(np.full((16, 16, 3), 99, np.uint8)), height, width)


def flat_jpeg(height, width):
    """Write one colour, in scans: one bit for each block."""
    flat = np.full((height, width), 128, np.uint8)
    return encode(flat, ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_OPTIMIZE, 1)


def endless_jpeg(height, width):
    """Announce any size: arithmetic coding reads zeros after its data, without a limit."""
    data = arithmetic_jpeg()
    start = data.index(b"\xff\xc9")
    return data[: start + 5] + pack(">HH", height, width) + data[start + 9 :]
