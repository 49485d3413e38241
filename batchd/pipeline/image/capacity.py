"""How many pixels a file's bytes can hold, by the rules of its format. Worker process; standard library only.

A decoder takes time and memory for every pixel that a header announces, so a header is believed no
further than the bytes behind it go:

    JPEG   Huffman codes have a bit at least. Each block of 64 samples has two of them, and one in the scans of a progressive file
    PNG    deflate (RFC 1951) copies at most 258 bytes with two codes: 1,032 bytes for one
    GIF    LZW (GIF89a, appendix F): the code number k since the table was empty stands for at most k pixels
    BMP    as many bits for each pixel as the header says

Some pixels take no bits, or next to none: WebP without loss gives a code of one symbol no bits,
arithmetic coding goes on behind its end, run-length coded bitmaps and frames of a GIF leave pixels
out. For these there is a budget: what decodes in about 50 ms and 64 MB, for a file of up to
``SMALL_FILE_BYTES``; in proportion for a longer one. A byte of a PNG may be eight pixels, so up to
``SMALL_FILE_BYTES`` the budget holds for a PNG of less than 8 bits per pixel, too.

Invariant: the budget refuses no JPEG with Huffman codes, no PNG of 8 bits or of more than
``SMALL_FILE_BYTES``, no GIF whose first frame fills its screen.
"""

from collections.abc import Iterable

SMALL_FILE_BYTES = 4096
PIXELS_PER_BYTE = 1_040
"""Of pixels that take no bits: 4.3 million in a small file."""
ROW_PIXELS_PER_BYTE = 2_200
"""Of pixels of less than 8 bits in the rows of a PNG, which cost least: 9 million in a small file, an empty page at 300 dpi."""
DEFLATED_MAX = 1_032
JPEG_BLOCK_SIDE = 8
COEFFICIENT_BLOCK_BYTES = 128

_LZW_CODE_BITS_MAX = 12
_ADAM7 = ((0, 8, 0, 8), (0, 8, 4, 8), (4, 8, 0, 4), (0, 4, 2, 4), (2, 4, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1))
"""Of each pass of an interlaced PNG: the first row and the step to the next, the first column and the step."""
_ROWS = ((0, 1, 0, 1),)


def pixels_for_nothing(file_bytes: int, per_byte: int = PIXELS_PER_BYTE) -> int:
    """How many pixels are allowed that may take no bits."""
    return per_byte * max(SMALL_FILE_BYTES, file_bytes)


def lzw_pixels_max(pixel_bits: int, data_bytes: int) -> int:
    """How many pixels a GIF's codes can stand for, of which the shortest has a bit more than ``pixel_bits``.

    ``data_bytes`` counts what blocks say of their lengths, too. Each code enters a run into the
    table that is one pixel longer than a run that is there. A table that is full stays as it is; to
    start again with an empty one is never better.
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
    """How many blocks a JPEG has, in all components; ``samplings``: of each of these, horizontally and vertically."""
    factors = list(samplings)
    across, down = (max((factor[axis] for factor in factors), default=0) or 1 for axis in (0, 1))
    return sum(
        -(-height * vertical // (down * JPEG_BLOCK_SIDE)) * -(-width * horizontal // (across * JPEG_BLOCK_SIDE))
        for horizontal, vertical in factors
    )
