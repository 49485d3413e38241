"""Small files that announce large images.

The decoder refuses images larger than their bytes can hold; the others need little memory.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest

from batchd.data.pipeline.image.decode import Decoder
from batchd.data.pipeline.image.opencv import Scratch
from batchd.data.pipeline.image.options import Decode, Resize
from batchd.data.pipeline.image.probe import (
    PIXELS_PER_BYTE,
    ROW_PIXELS_PER_BYTE,
    SMALL_FILE_BYTES,
    jpeg_blocks,
    lzw_pixels_max,
    png_bytes,
    probe_image,
)
from batchd.data.samples.errors import SampleUndecodable
from support import bombs
from support.images import animation, encode, jpeg, jpeg_of, photo, png_chunk, ycck_jpeg
from support.pipelines import run_once

BOMBS = (
    bombs.empty_bmp,
    bombs.empty_gif,
    bombs.endless_jpeg,
    bombs.enveloped_webp,
    bombs.flat_bmp,
    bombs.flat_webp,
    bombs.starved_gif,
    bombs.starved_jpeg,
    bombs.starved_png,
    bombs.starved_webp,
)
"""For each name, the function that makes a file below 4 KiB that announces any size."""
MEMORY_BYTES_MAX = 64_000_000


def refusal(data, **limits):
    """Return the refusal of a file before it is decoded, or None if it is decoded."""
    data = memoryview(data)
    try:
        Decoder(Decode(**limits), Scratch()).check_limits(data, probe_image(data))
    except SampleUndecodable as error:
        return str(error)
    return None


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_that_announces_a_large_image_is_refused_by_its_header(bomb):
    """The refusal has the announced pixels, and the most that so few bytes may hold."""
    data = bomb(9_900, 10_000)

    assert len(data) <= SMALL_FILE_BYTES
    assert f"of {len(data)} bytes that announces 10000 x 9900 = 99000000 pixels; so few bytes are" in refusal(data)


@pytest.mark.parametrize(("bits", "colors"), [(1, 0), (1, 3), (2, 3), (4, 3), (8, 0), (8, 2), (16, 6)])
@pytest.mark.parametrize("interlaced", [False, True])
def test_a_png_holds_a_thousand_times_what_its_deflated_rows_have(bits, colors, interlaced):
    """The tightest 1000 x 1000 image of one colour is served; a larger announcement is refused."""
    data = bombs.flat_png(1000, 1000, bits, colors, interlaced=interlaced)
    start, end = data.index(b"IHDR") + 4, data.index(b"IHDR") + 17
    larger = data[: start - 8] + png_chunk(b"IHDR", (30_000).to_bytes(4) + data[start + 4 : end]) + data[end + 4 :]

    run_once([Decode(), Resize(size=(8, 8))], data)
    assert "so few bytes are believed" in refusal(larger)


def test_the_rows_of_an_interlaced_png_are_those_of_its_seven_images():
    """The expected value counts the pixels of odd sizes one by one."""
    for height, width in [(1, 1), (2, 5), (8, 8), (9, 17), (5, 1), (33, 20)]:
        passes = {}
        for top, down, left, across in bombs.ADAM7:
            rows = [len(range(left, width, across)) for _ in range(top, height, down)]
            passes[top, left, down] = sum(1 + -(-count * 3 // 8) for count in rows if count)
        assert png_bytes(height, width, 3, is_interlaced=True) == sum(passes.values())
        assert png_bytes(height, width, 3, is_interlaced=False) == height * (1 + -(-width * 3 // 8))


@pytest.mark.parametrize("side", [1, 2, 17, 300, 2040])
def test_one_colour_in_lzw_is_what_its_bytes_are_believed_to_hold(side):
    """The tightest valid file passes; for long files the bound leaves less than 5 % to spare."""
    data = bombs.flat_gif(side, side)
    header = probe_image(memoryview(data))

    assert (run_once([Decode(), Resize(size=(4, 4))], data) == 0).all()
    assert header.height * header.width <= header.pixels_max <= 1.1 * side * side + 300


@pytest.mark.parametrize("pixel_bits", [1, 2, 4, 8])
def test_an_empty_table_of_lzw_in_the_middle_never_helps(pixel_bits):
    """So the pixels of one run of codes are an upper bound for any number of runs.

    The length of a block takes one more byte.
    """
    held = [lzw_pixels_max(pixel_bits, count) for count in range(3001)]
    for first in range(0, 3000, 37):
        assert all(held[first] + held[other] <= held[first + other + 1] for other in range(3000 - first))
    assert all(one <= other for one, other in pairwise(held))


def test_every_block_of_a_jpeg_counts_in_each_of_its_components():
    """Half blocks count; a component with a quarter of the samples has a quarter of them."""
    assert jpeg_blocks(16, 16, [(1, 1)]) == 4
    assert jpeg_blocks(17, 16, [(2, 2), (1, 1), (1, 1)]) == 6 + 2 + 2
    assert jpeg_blocks(32, 32, [(4, 1), (1, 4)]) == 4 + 4
    assert jpeg_blocks(8, 8, [(0, 0)]) == 0


def flat_files() -> Iterable[tuple[str, bytes]]:
    """Images of one colour by OpenCV and libjpeg-turbo, in the sizes of cameras and screens."""
    for height, width in [(480, 640), (2000, 2100)]:
        grey = np.full((height, width), 119, np.uint8)
        image = np.dstack([grey] * 3)
        for name, pixels in [("grey", grey), ("colours", image)]:
            yield f"{name} png {width}", encode(pixels, ".png", cv2.IMWRITE_PNG_COMPRESSION, 9)
            yield (
                f"{name} jpeg {width}",
                encode(pixels, ".jpg", cv2.IMWRITE_JPEG_OPTIMIZE, 1, cv2.IMWRITE_JPEG_QUALITY, 1),
            )
            yield f"{name} progressive {width}", jpeg_of(pixels, quality=1, is_progressive=True)
            yield f"{name} bmp {width}", encode(pixels, ".bmp")
        yield f"bits {width}", encode(grey, ".png", cv2.IMWRITE_PNG_BILEVEL, 1, cv2.IMWRITE_PNG_COMPRESSION, 9)
        yield f"webp {width}", encode(image, ".webp", cv2.IMWRITE_WEBP_QUALITY, 1)
        yield f"lossless {width}", encode(image, ".webp", cv2.IMWRITE_WEBP_QUALITY, 101)
        yield f"gif {width}", encode(image, ".gif")
        yield f"tight gif {width}", bombs.flat_gif(height, width)
        yield f"tight webp {width}", bombs.flat_webp(height, width)
    for height, width in [(3000, 4000)]:
        image = np.full((height, width, 3), 119, np.uint8)
        for ending in (".png", ".jpg", ".gif"):
            yield f"{ending} {width}", encode(image, ending)
        yield f"webp {width}", encode(image, ".webp", cv2.IMWRITE_WEBP_QUALITY, 80)
    yield "page", bombs.flat_png(3508, 2480, 1, 0)


@pytest.mark.thorough
def test_real_images_of_one_colour_are_served():
    """No ordinary image that a library writes is refused as a bomb."""
    assert {name: why for name, data in flat_files() if (why := refusal(data))} == {}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("height", "width", "bits", "colors"),
    [(7016, 4961, 1, 0), (6000, 4000, 4, 3)],
)
@pytest.mark.parametrize("interlaced", [False, True])
def test_an_empty_page_at_600_dpi_and_a_flat_palette_of_24_megapixels_are_served(
    height, width, bits, colors, interlaced
):
    """Files above 4 KiB are limited only by the ratio of deflate and by memory."""
    data = bombs.flat_png(height, width, bits, colors, interlaced=interlaced)

    assert SMALL_FILE_BYTES < len(data) < 16_000
    assert np.ptp(run_once([Decode(), Resize(size=(4, 4))], data), axis=(0, 1)).max() == 0


def test_the_refusal_of_a_small_file_names_a_remedy():
    """The remedy works: the same image as a PNG of 8 bits per pixel is longer and passes."""
    small = bombs.flat_png(5000, 5000, 1, 0)

    assert len(small) < SMALL_FILE_BYTES
    assert refusal(small).endswith(
        "believed to hold 9011200 at most (a real image passes as a PNG of 8 bits per pixel)"
    )
    assert refusal(bombs.flat_png(5000, 5000, 8, 0)) is None


def test_a_first_frame_may_be_smaller_than_its_screen():
    """The background fills the rest, up to the number of pixels that any small file may have."""
    assert refusal(bombs.empty_gif(1080, 1920)) is None
    assert (run_once([Decode(), Resize(size=(4, 4))], bombs.empty_gif(1080, 1920)) == 0).all()


@pytest.mark.parametrize("bomb", [bombs.empty_bmp, bombs.empty_gif, bombs.endless_jpeg, bombs.flat_webp])
def test_the_limit_of_pixels_that_take_no_bits_is_exact(bomb):
    """One more row is refused; a longer file may have more pixels."""
    width = 2080
    height = PIXELS_PER_BYTE * SMALL_FILE_BYTES // width

    assert refusal(bomb(height, width)) is None
    assert "so few bytes" in refusal(bomb(height + 1, width))
    assert refusal(bomb(height + 1, width) + b"\0" * 2 * SMALL_FILE_BYTES + b"\xff\xd9") is None
    assert "so few bytes" in refusal(bombs.flat_png(ROW_PIXELS_PER_BYTE * SMALL_FILE_BYTES // 2000 + 1, 2000, 1, 0))


def test_decoding_takes_no_more_memory_than_the_limit_of_pixels_allows():
    """The limit includes coefficients of progressive JPEGs and the buffers of WebP and GIF.

    A crop of a baseline JPEG needs almost no memory.
    """
    image = photo(100, 100)
    whole = [Decode(max_pixels=10_000, scale="off"), Resize(size=(100, 100))]
    for data in (encode(image, ".gif"), encode(image, ".webp"), jpeg_of(image, "444", is_progressive=True)):
        with pytest.raises(
            SampleUndecodable, match=r"of 100 x 100 pixels that takes \d+ bytes of memory to decode, more"
        ):
            run_once(whole, data)
        run_once([Decode(max_pixels=13_000, scale="off"), Resize(size=(100, 100))], data)
    for data in (encode(image, ".png"), encode(image, ".bmp"), jpeg(image), jpeg_of(image, "420", is_progressive=True)):
        run_once(whole, data)


def measured(folder):
    """Decode all files of a folder in a separate process."""
    command = [sys.executable, "-m", "support.decoding_memory", folder]
    # memory kept by the allocator would hide the needs of the next file
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return json.loads(subprocess.check_output(command, cwd=Path(__file__).parents[3], env=environment))


def largest_files():
    """The largest images of every kind that are accepted in 4 KiB."""
    side = 2063
    yield from ((bomb.__name__, bomb(side, side)) for bomb in BOMBS)
    yield "jpeg", bombs.flat_jpeg(1000, 1000)
    yield "gif", bombs.flat_gif(side, side)
    for bits, colors in [(1, 0), (1, 3), (2, 3), (4, 3), (8, 0), (8, 3)]:
        yield f"png {bits} {colors} interlaced", bombs.flat_png(side - 40, side, bits, colors, interlaced=True)
        yield (
            f"png {bits} {colors}",
            bombs.flat_png(3000 if bits == 1 else side - 40, 3000 if bits == 1 else side, bits, colors),
        )
    animated = bytearray(animation(".webp", [photo(16, 16), photo(16, 16, 1)]))
    animated[24:30] = (side - 1).to_bytes(3, "little") * 2
    yield "animated webp", bytes(animated)


@pytest.mark.thorough
def test_no_file_of_4_kib_takes_more_than_64_mb(tmp_path):
    """The test decodes the largest accepted image of each format in its own process."""
    for name, data in largest_files():
        assert len(data) <= 1.05 * SMALL_FILE_BYTES
        (tmp_path / name).write_bytes(data)

    found = measured(tmp_path)

    assert {name: taken for name, (_, taken, _) in found.items() if taken > MEMORY_BYTES_MAX} == {}
    assert sum(outcome == "image" for outcome, _, _ in found.values()) >= 12


def mutated(random, data):
    """Break a file in some places, most of them in its header."""
    broken = bytearray(data)
    for _ in range(int(random.integers(1, 6))):
        end = len(broken) if random.integers(3) else min(len(broken), 64)
        place = int(random.integers(end))
        broken[place] = random.integers(256) if random.integers(2) else broken[place] ^ (1 << int(random.integers(8)))
    return bytes(broken)


def throw_bombs(folder, seed, count):
    """Write files of up to 4 KiB that announce all sizes and are broken in some places.

    Decode them and check the memory that they needed.
    """
    random = np.random.default_rng(seed)
    makers = [
        *BOMBS,
        bombs.flat_gif,
        lambda *size: bombs.flat_png(*size, 1, 0),
        lambda *size: bombs.flat_png(*size, 1, 3, interlaced=True),
    ]
    small = [ycck_jpeg(np.full((16, 16, 4), 9, np.uint8)), jpeg_of(photo(16, 16), is_progressive=True)]
    small += [animation(ending, [photo(16, 16), photo(16, 16, 1)]) for ending in (".gif", ".webp", ".png")]
    for number in range(count):
        height, width = (int(side) for side in 2 ** random.uniform(3, 13.9, 2))
        kind = int(random.integers(len(makers) + len(small)))
        data = makers[kind](height, width) if kind < len(makers) else small[kind - len(makers)]
        data = mutated(random, data) if random.integers(4) else data
        (folder / f"{number:05}").write_bytes(data[:SMALL_FILE_BYTES])
    found = measured(folder)
    assert {name: one for name, one in found.items() if one[1] > MEMORY_BYTES_MAX} == {}
    assert len(found) == count
    assert {outcome == "image" for outcome, _, _ in found.values()} == {True, False}


def test_broken_bombs_take_no_more_than_64_mb(tmp_path):
    """The test decodes several hundred files of all formats."""
    throw_bombs(tmp_path, 0, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_broken_bombs_take_no_more_than_64_mb(tmp_path, seed):
    """The test decodes twenty thousand files of all formats."""
    throw_bombs(tmp_path, seed, 2000)
