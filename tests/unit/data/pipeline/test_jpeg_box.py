"""A box decoded alone equals that part of the whole image, and hostile files do no harm."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.pipeline.image import jpeg_box
from batchd.data.pipeline.image.geometry import Cut
from batchd.data.pipeline.image.options import Decode, RandomResizedCrop
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.samples.errors import SampleUndecodable
from support.images import (
    JPEG_END,
    arithmetic_jpeg,
    cmyk_jpeg,
    jpeg,
    jpeg_announcing,
    jpeg_by_component,
    jpeg_of,
    jpeg_with_exif,
    jpeg_with_scans,
    photo,
    progressive_jpeg,
    stored_as,
    ycck_jpeg,
)
from support.jpeg_boxes import SUBSAMPLINGS, check_that_memory_stays, decoder, extension, where_it_is_built
from support.pipelines import image_pipeline, run, run_once

pytestmark = where_it_is_built
RANDOM_CROPS = [Decode(), RandomResizedCrop(size=(32, 32), scale=(0.05, 0.6))]
TALL = photo(256, 64)


def both_ways(data, factor, box, color="rgb"):
    """Return the box decoded alone, and the box cut from the whole image of simplejpeg."""
    view = memoryview(data)
    header = probe_image(view)
    alone = decoder(color)._boxes.decode(view, header, factor, box)
    whole = decoder(color).decode_whole(view, header, factor)
    return alone, whole[box.top : box.top + box.height, box.left : box.left + box.width]


@st.composite
def cases(draw):
    """Draw a JPEG of any subsampling and coding, and its size."""
    size = draw(st.integers(17, 90)), draw(st.integers(17, 90))
    image, subsampling = photo(*size, seed=size[0]), draw(st.sampled_from(SUBSAMPLINGS))
    pixels = image[..., 0] if subsampling == "grey" else image
    restart, is_progressive = draw(st.sampled_from([0, 1, 3])), draw(st.booleans())
    return jpeg_of(pixels, subsampling, restart, is_progressive=is_progressive), size


@st.composite
def boxes(draw, height, width):
    """Draw any box, often at an edge or of a single row or column."""
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    return Cut(top, left, draw(st.integers(1, height - top)), draw(st.integers(1, width - left)))


@given(
    case=cases(), factor=st.sampled_from([1, 1, 2, 4, 8]), color=st.sampled_from(["rgb", "bgr", "gray"]), data=st.data()
)
def test_a_box_has_the_pixels_of_the_whole_image(case, factor, color, data):
    """The pixels are equal to the bit at every scale, across blocks, shared chroma and edges."""
    file, (height, width) = case
    box = data.draw(boxes(-(-height // factor), -(-width // factor)))

    alone, cut = both_ways(file, factor, box, color)

    assert np.array_equal(alone, cut)


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (2, 3), (5, 5), (16, 16), (17, 33)])
def test_every_box_of_a_small_image_is_right(size, subsampling):
    """All edges are right: each first and last column, with all rows and with one row."""
    image = photo(*size)
    file = jpeg_of(image[..., 0] if subsampling == "grey" else image, subsampling)
    height, width = size
    for top, rows in ((0, height), (height // 2, 1), (height - 1, 1)):
        for left in range(width):
            for columns in {1, 2, width - left} & set(range(1, width - left + 1)):
                alone, cut = both_ways(file, 1, Cut(top, left, rows, columns))
                assert np.array_equal(alone, cut), (top, left, rows, columns)


def grey_with_factors(sampling):
    """Make a grey file with sampling factors, which have no meaning for a single component."""
    data = jpeg(photo(20, 37)[..., 0])
    at = data.index(b"\xff\xc0") + 11
    return data[:at] + bytes([sampling]) + data[at + 1 :]


def rgb_jpeg():
    """Make a file whose components are red, green and blue, by their names."""
    data = jpeg(photo(20, 37), subsampling="444")
    frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    named = bytearray(data[:2] + data[20:])  # without JFIF, which would mean YCbCr
    for number, name in enumerate(b"RGB"):
        named[frame - 18 + 10 + 3 * number] = name
        named[scan - 18 + 5 + 2 * number] = name
    return bytes(named)


UNUSUAL = {
    "by component": jpeg_by_component(photo(20, 37)[..., 0]),
    "grey 2x2": grey_with_factors(0x22),
    "grey 4x1": grey_with_factors(0x41),
    "grey 3x3": grey_with_factors(0x33),
    "red, green and blue": rgb_jpeg(),
}


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_unusual_codings_are_decoded_by_box_too(data, factor):
    """One scan for each component, odd factors and RGB are decoded by box."""
    height, width = -(-20 // factor), -(-37 // factor)
    for box in (Cut(0, 0, height, width), Cut(height // 2, width // 3, 2, 3), Cut(height - 1, width - 1, 1, 1)):
        alone, cut = both_ways(data, factor, box)
        assert np.array_equal(alone, cut)


def incomplete_progressive_jpeg():
    """Make a progressive file without its last scans, but with an end marker.

    A decoder smooths the coefficients that are missing.
    """
    data = progressive_jpeg(TALL)
    return data[: data.rindex(b"\xff\xda")] + JPEG_END


@pytest.mark.parametrize(
    "data",
    [
        cmyk_jpeg((200, 120, 140)),
        ycck_jpeg(np.dstack([TALL, TALL[..., 0]])),
        incomplete_progressive_jpeg(),
        arithmetic_jpeg(),
        jpeg(TALL).replace(b"\xff\xc0", b"\xff\xc3"),
        jpeg_of(TALL).replace(b"\1\x22\0\2\x11\1\3\x11\1", b"\1\x22\0\2\x12\1\3\x12\1"),
        b"\xff\xd8\xff\xd9",
    ],
    ids=["CMYK", "YCCK", "progressive without its end", "arithmetic", "lossless", "4:2:0 with tall chroma", "no image"],
)
def test_what_is_unusual_is_for_another_decoder(data):
    """The box decoder leaves these files to another decoder, which reports its own errors."""
    assert extension.decode(data, bytearray(100_000), "rgb", 8, (256, 64), (0, 0, 1, 1)) is None


def test_inks_and_arithmetic_images_are_cut_like_others(monkeypatch):
    """CMYK and arithmetic coding give the same batch with and without the extension."""
    files = [ycck_jpeg(np.dstack([TALL, TALL[..., 0]])), arithmetic_jpeg(), cmyk_jpeg((20, 120, 240))]
    by_box = [run_once(RANDOM_CROPS, data) for data in files]

    monkeypatch.setattr(jpeg_box, "IS_BUILT", False)

    assert np.array_equal(by_box, [run_once(RANDOM_CROPS, data) for data in files])


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("steps", [RANDOM_CROPS, [Decode(scale="off"), *RANDOM_CROPS[1:]]], ids=["scaled", "unscaled"])
def test_batches_are_the_same_with_and_without_the_extension(orientation, steps, monkeypatch):
    """Random crops at all scales and orientations are equal on a machine without the extension."""
    data = jpeg_with_exif(jpeg(stored_as(photo(500, 700), orientation)), orientation)
    by_box = [run(image_pipeline(steps), data, sample=sample) for sample in range(12)]

    monkeypatch.setattr(jpeg_box, "IS_BUILT", False)

    assert np.array_equal(by_box, [run(image_pipeline(steps), data, sample=sample) for sample in range(12)])


def test_what_lies_below_the_box_is_not_read():
    """Rows below the box are not read, so only a crop that reaches a hole there finds it.

    A hole above the box is always found.
    """
    data = jpeg_of(TALL)
    half = data[: len(data) // 2] + JPEG_END
    header = probe_image(memoryview(half))

    top = decoder().decode(memoryview(half), header, 1, Cut(0, 0, 64, 64))

    assert np.array_equal(top, decoder().decode(memoryview(data), header, 1, Cut(0, 0, 64, 64)))
    for box in (Cut(0, 0, 256, 64), Cut(248, 0, 8, 8)):
        with pytest.raises(SampleUndecodable, match=r"a broken JPEG: .* premature end"):
            decoder().decode(memoryview(half), header, 1, box)


def test_a_progressive_file_with_a_hole_is_found_by_every_crop():
    """Every crop of a progressive file reads all scans, so it finds the hole."""
    data = progressive_jpeg(TALL)
    half = memoryview(data[: (data.rindex(b"\xff\xda") + len(data)) // 2] + JPEG_END)

    with pytest.raises(SampleUndecodable, match="premature end"):
        decoder().decode(half, probe_image(half), 1, Cut(0, 0, 8, 8))


def test_a_file_without_its_end_is_bad_whatever_is_cropped():
    """No crop of a truncated file is served, even if its first rows could be decoded."""
    data = jpeg_of(TALL)
    pipeline = image_pipeline(RANDOM_CROPS)
    for end in range(100, len(data), 97):
        for sample in range(5):
            with pytest.raises(SampleUndecodable, match="truncated"):
                run(pipeline, data[:end], sample=sample)


def test_a_bomb_of_scans_is_stopped():
    """The decoder stops at a valid file that has too many scans."""
    grey = photo(16, 16)[..., 0]

    assert extension.decode(jpeg_by_component(grey, 190), bytearray(768), "rgb", 8, (16, 16), (0, 0, 16, 16))[:2] == (
        16,
        0,
    )
    with pytest.raises(extension.JpegError, match="more than 200 scans"):
        extension.decode(jpeg_by_component(grey, 250), bytearray(768), "rgb", 8, (16, 16), (0, 0, 16, 16))
    with pytest.raises(extension.JpegError, match="Inconsistent progression"):
        extension.decode(jpeg_with_scans(photo(16, 16), 3), bytearray(768), "rgb", 8, (16, 16), (0, 0, 16, 16))


def test_a_header_that_announces_more_than_the_caller_knows_is_not_decoded():
    """The decoder rejects a header with another size than the one that the caller checked."""
    lying = jpeg_announcing(jpeg(TALL), 65_500, 65_500)

    assert extension.decode(lying, bytearray(1000), "rgb", 8, (256, 64), (0, 0, 8, 8)) is None
    with pytest.raises(ValueError, match="premature end"):
        extension.decode(lying, bytearray(600_000), "rgb", 8, (65_500, 65_500), (65_000, 65_000, 1, 1))


@pytest.mark.parametrize(
    "box",
    [
        (0, 0, 0, 1),
        (0, 0, 1, 0),
        (0, 0, 257, 64),
        (0, 0, 256, 65),
        (256, 0, 1, 1),
        (255, 63, 2, 1),
        (-1, 0, 2, 2),
        (0, -1, 2, 2),
        (1, 1, 2**31 - 1, 2**31 - 1),
        (2**31 - 1, 0, 1, 1),
    ],
)
def test_a_box_that_is_not_in_the_image_is_refused(box):
    """A box outside the image is an error of the caller, not of the file."""
    with pytest.raises(ValueError, match="the box is empty, or reaches out"):
        extension.decode(jpeg(TALL), bytearray(100_000), "rgb", 8, (256, 64), box)


def test_nothing_is_written_behind_the_buffer():
    """A buffer that is one byte too small is rejected, and bytes behind the needed ones stay."""
    data, size, box = jpeg_of(TALL), (256, 64), (3, 20, 100, 9)
    enough = bytearray(b"\x55" * 20_000)
    columns, before, *_ = extension.decode(data, enough, "rgb", 8, size, box)
    needed = 100 * columns * 3

    assert 9 <= columns <= 9 + extension.COLUMNS_BESIDE_MAX
    assert 0 <= before <= columns - 9
    assert enough[needed:] == b"\x55" * (20_000 - needed)
    assert extension.decode(data, bytearray(needed), "rgb", 8, size, box) == (columns, before, True, 0)
    with pytest.raises(
        ValueError, match=f"100 rows of {columns} columns need more than the buffer's {needed - 1} bytes"
    ):
        extension.decode(data, bytearray(needed - 1), "rgb", 8, size, box)


def test_wrong_arguments_are_refused():
    """Read-only memory, unknown colours and scales, and too large integers are rejected."""
    data, memory, rest = jpeg(TALL), bytearray(100_000), ((256, 64), (0, 0, 8, 8))

    with pytest.raises(ValueError, match="rgb, bgr or gray, not cmyk"):
        extension.decode(data, memory, "cmyk", 8, *rest)
    for eighths in (0, 3, 16, -8):
        with pytest.raises(ValueError, match=f"1, 2, 4 or 8 eighths, not {eighths}"):
            extension.decode(data, memory, "rgb", eighths, *rest)
    with pytest.raises(TypeError):
        extension.decode(data, bytes(memory), "rgb", 8, *rest)
    with pytest.raises(OverflowError):
        extension.decode(data, memory, "rgb", 8, (256, 64), (0, 0, 2**40, 8))


def test_threads_decode_side_by_side():
    """Threads decode at the same time: the GIL is released, and no state is shared."""
    files = [jpeg_of(photo(120, 160, seed=seed), subsampling="420") for seed in range(8)]

    def crop(file):
        return decoder().decode(memoryview(file), probe_image(memoryview(file)), 1, Cut(10, 20, 100, 90)).copy()

    one_by_one = [crop(file) for file in files]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(crop, files * 20))

    assert np.array_equal(together, one_by_one * 20)


def test_flipped_bits_give_pixels_or_a_reason():
    """Any flipped byte with any box gives pixels or an error; the process survives."""
    random = np.random.default_rng(3)
    files = [bytes(jpeg_of(TALL, is_progressive=is_progressive, restart=2)) for is_progressive in (False, True)]
    outcomes = set()
    for _ in range(1500):
        broken = bytearray(files[random.integers(2)])
        for _ in range(random.integers(1, 4)):
            broken[random.integers(2, len(broken) if random.integers(2) else 700)] = random.integers(256)
        top, left = int(random.integers(256)), int(random.integers(64))
        box = Cut(top, left, int(random.integers(1, 257 - top)), int(random.integers(1, 65 - left)))
        try:
            outcomes.add(extension.decode(broken, bytearray(100_000), "rgb", 8, (256, 64), box) is None)
        except extension.JpegError:
            outcomes.add("reason")

    assert outcomes == {True, False, "reason"}


@pytest.mark.slow
def test_a_million_calls_leave_no_memory_behind():
    """Repeated calls with pixels, errors and files of other decoders leak no memory."""
    whole, size, memory = jpeg_of(photo(16, 16)), (16, 16), bytearray(1000)
    broken = whole[: whole.index(b"\xff\xda") + 20] + JPEG_END
    foreign = ycck_jpeg(np.full((16, 16, 4), 9, np.uint8))

    def many(calls):
        for _ in range(calls // 4):
            extension.decode(whole, memory, "rgb", 8, size, (0, 0, 16, 16))
            extension.decode(whole, memory, "rgb", 4, size, (1, 2, 3, 4))
            assert extension.decode(foreign, memory, "rgb", 8, size, (0, 0, 1, 1)) is None
            with pytest.raises(extension.JpegError):
                extension.decode(broken, memory, "rgb", 8, size, (0, 0, 16, 16))

    check_that_memory_stays(many, 1_000_000)
