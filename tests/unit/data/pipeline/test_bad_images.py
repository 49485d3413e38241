"""Bytes that are not a complete image.

Each gives one typed outcome with a reason, and never a pixel of another sample.
"""

import re

import cv2
import numpy as np
import pytest

from batchd.data.pipeline.image.options import Decode, Resize
from batchd.data.pipeline.image.probe import JPEG_SCANS_MAX, probe_image
from batchd.data.samples.errors import SampleUndecodable
from support.images import (
    PNG_MAGIC,
    animation,
    encode,
    huge_jpeg_header,
    huge_png_header,
    jpeg,
    jpeg_announcing,
    jpeg_with_exif,
    jpeg_with_scans,
    palette_png,
    photo,
    png16,
    progressive_jpeg,
    with_right_checksums,
    ycck_jpeg,
)
from support.pipelines import MarkedPipeline, image_pipeline, run, run_once

IMAGE = photo(64, 96)
WHOLE_STEPS = [Decode(scale="off"), Resize(size=(64, 96), interpolation="nearest")]
FILES = {
    "jpeg": jpeg(IMAGE),
    "progressive jpeg": progressive_jpeg(IMAGE),
    "ycck jpeg": ycck_jpeg(np.dstack([IMAGE, IMAGE[..., 0]])),
    "png": encode(IMAGE, ".png"),
    "16-bit png": png16(IMAGE),
    "palette png": palette_png(np.arange(64 * 96).reshape(64, 96) % 5, IMAGE[0, :5], range(5)),
    "animated png": animation(".png", [IMAGE, IMAGE[::-1].copy()]),
    "webp": encode(IMAGE, ".webp", cv2.IMWRITE_WEBP_QUALITY, 90),
    "lossless webp": encode(IMAGE, ".webp"),
    "animated webp": animation(".webp", [IMAGE, IMAGE[::-1].copy()]),
    "bmp": encode(IMAGE, ".bmp"),
    "gif": encode(IMAGE, ".gif"),
    "animated gif": animation(".gif", [IMAGE, IMAGE[::-1].copy()]),
}


@pytest.fixture(scope="module")
def marked():
    """A pipeline that detects pixels of other samples."""
    return MarkedPipeline(WHOLE_STEPS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"\xff", "not a JPEG, PNG, WebP, BMP or GIF file: it starts with ff"),
        (b"\xff\xd8", "not a JPEG"),
        (b"\xff\xd8\xff", "truncated"),
        (b"B", "not a JPEG"),
        (b"BM", "truncated"),
        (b"hello, this is text", "it starts with 68 65 6c 6c 6f 2c 20 74"),
        (b"\0" * 1000, "not a JPEG"),
        (b"\xff" * 1000, "not a JPEG"),
        (b"\xff\xd8" + b"\xff" * 10_000, "segments break off"),
        (b"\xff\xd8\xff\xd9", "without image data"),
        (b"\xff\xd8" + b"\xff\xfe\0\2" * 5_000, "more than 2000 segments"),
        (b"\xff\xd8\xff\xfe\0\0" + b"\0" * 9_000, "segments break off"),
        (b"\xff\xd8\xff\xda\0\2\xff\xd9", "image data comes before its dimensions"),
        (encode(IMAGE, ".tiff"), "not a JPEG"),
        (encode(IMAGE, ".avif"), "GIF file: it is AVIF or HEIF; convert it"),
        (b"\0\0\0\x20ftypheic\0\0\0\0mif1heic", "GIF file: it is AVIF or HEIF; convert it"),
        (b"\0\0\0\x20ftypisom\0\0\2\0isommp41", "it starts with 00 00 00 20 66 74 79 70"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a JPEG"),
        (PNG_MAGIC, "truncated"),
        (PNG_MAGIC + b"\0\0\0\x0dJUNK" + b"\0" * 30, "does not start with its dimensions"),
        (b"GIF89a" + b"\1\0\1\0\0\0\0" + b"\x99" * 10, "unknown block 0x99"),
        (b"GIF89a" + b"\1\0\1\0\0\0\0;", "OpenCV cannot decode it"),
        (b"GIF89a\1\0\1\0\0\0\0,\0\0\0\0\x09\0\x09\0\0\2\0;", "a frame larger than its screen"),
        (b"RIFF\x0c\0\0\0WEBPJUNK" + b"\0" * 20, "a WebP whose first chunk is b'JUNK'"),
        (huge_jpeg_header(), "a JPEG of 65500 x 65500 = 4290250000 pixels, more than max_pixels = 100000000"),
        (huge_png_header(), "a PNG of 65500 x 65500 = 4290250000 pixels, more than max_pixels = 100000000"),
        (jpeg_announcing(jpeg(IMAGE), 64, 96, bits=12), "a JPEG with 12 bits per channel; 8 are supported"),
        (jpeg_announcing(jpeg(IMAGE), 0, 96), "announces 96 x 0 pixels"),
        (jpeg_announcing(jpeg(IMAGE), 64, 0), "announces 0 x 64 pixels"),
        (jpeg_announcing(jpeg(IMAGE), 200, 96), "a broken JPEG: "),
        (jpeg_with_scans(IMAGE, JPEG_SCANS_MAX), f"{JPEG_SCANS_MAX + 10} scans; {JPEG_SCANS_MAX} are allowed"),
        (jpeg_with_scans(IMAGE, 3), "a broken JPEG: Inconsistent progression"),
        (jpeg(IMAGE)[:700] + jpeg(IMAGE)[-2:], "a broken JPEG: Corrupt JPEG data: premature end"),
        (jpeg(IMAGE).replace(b"\xff\xc0", b"\xff\xc3"), "a broken JPEG"),
        (jpeg(IMAGE)[:-2] + b"stray bytes" + jpeg(IMAGE)[-2:], "extraneous bytes before marker 0xd9"),
        (FILES["ycck jpeg"][:2000] + b"\xff\xd9", "a broken JPEG: Corrupt JPEG data: premature end"),
    ],
)
def test_each_bad_file_has_its_reason(data, reason, marked):
    """The reason is one line: what is wrong and by how much, short enough for a list."""
    with pytest.raises(SampleUndecodable, match=re.escape(reason)) as bad:
        marked.run(data)

    assert len(str(bad.value)) < 300
    assert "\n" not in str(bad.value)


def test_scans_are_counted_up_to_the_end_of_the_image_alone():
    """A video or further pictures after the image have bytes that look like scans.

    A comment between two scans does not hide either of them.
    """
    data = progressive_jpeg(IMAGE)
    hidden = jpeg_with_scans(IMAGE, JPEG_SCANS_MAX)
    second = hidden.index(b"\xff\xda", hidden.index(b"\xff\xda") + 2)
    comment = b"\xff\xfe\0\x04" + hidden[-2:]

    for trailer in (b"\xff\xda" * 1000, b"\xff\xda\0\x08\1\1\0\0\x3f\0" * 1000, data * 40):
        assert np.array_equal(run_once(WHOLE_STEPS, data + trailer), run_once(WHOLE_STEPS, data))
    with pytest.raises(SampleUndecodable, match=f"{JPEG_SCANS_MAX} are allowed"):
        run_once(WHOLE_STEPS, hidden[:second] + comment + hidden[second:])
    with pytest.raises(SampleUndecodable, match="more than 2000 segments in its image data"):
        run_once(WHOLE_STEPS, data[:-2] + comment * 2000 + data[-2:])


def test_a_hundred_bytes_cannot_make_a_decoder_allocate_gigabytes():
    """The files at the limits have the stated sizes; the decoder refuses them by their headers."""
    for data in (huge_jpeg_header(), huge_png_header()):
        assert len(data) == 100
        assert probe_image(memoryview(data))[1:3] == (65_500, 65_500)


@pytest.mark.parametrize("name", FILES)
def test_truncation_anywhere_is_a_bad_sample(name):
    """Files cut at every 64th byte and just before the end never give grey or half images."""
    data = FILES[name]
    pipeline = image_pipeline(WHOLE_STEPS)
    for end in (*range(0, len(data), 64), len(data) - 1):
        with pytest.raises(SampleUndecodable):
            run(pipeline, data[:end])


@pytest.mark.parametrize("name", FILES)
def test_the_rest_of_a_cut_file_is_not_taken_for_an_image(name, marked):
    """This file lacks its first half."""
    with pytest.raises(SampleUndecodable):
        marked.run(FILES[name][len(FILES[name]) // 2 :])


@pytest.mark.parametrize("name", FILES)
def test_trailing_garbage_changes_nothing(name, marked):
    """Downloads and cameras append bytes to images."""
    assert np.array_equal(marked.run(FILES[name] + b"\0garbage\xff" * 50), marked.run(FILES[name]))


def outcome(marked, data):
    """Return the outcome of a file: an image with no foreign pixels, or a reason."""
    try:
        marked.run(bytes(data))
    except SampleUndecodable:
        return "reason"
    return "image"


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_give_an_image_of_its_own_or_a_reason(name, marked):
    """Flips in the header and after it give a typed outcome, without pixels of other samples."""
    random = np.random.default_rng(0)
    data = FILES[name]
    outcomes = set()
    for place in (*random.integers(0, min(200, len(data)), 25), *random.integers(0, len(data), 35)):
        broken = bytearray(data)
        broken[place] ^= 1 << int(random.integers(8))
        outcomes.add(outcome(marked, broken))

    assert "reason" in outcomes


@pytest.mark.parametrize("name", FILES)
def test_missing_bytes_in_the_middle_give_an_image_of_its_own_or_a_reason(name, marked):
    """Bad disks and broken downloads leave such holes of 1 to 200 bytes."""
    random = np.random.default_rng(1)
    data = FILES[name]
    outcomes = set()
    for start in random.integers(2, len(data) - 2, 20):
        hole_bytes = min(int(random.integers(1, 200)), len(data) - 2 - start)
        outcomes.add(outcome(marked, data[:start] + data[start + hole_bytes :]))

    assert "reason" in outcomes


@pytest.mark.parametrize("name", ["png", "16-bit png", "palette png", "animated png"])
def test_damage_under_a_right_checksum_gives_an_image_of_its_own_or_a_reason(name, marked):
    """Wrong pixels with right checksums are served, but never those of another sample."""
    random = np.random.default_rng(2)
    data = FILES[name]
    outcomes = set()
    for place in random.integers(8, len(data), 25):
        broken = bytearray(data)
        broken[place] ^= 1 << int(random.integers(8))
        outcomes.add(outcome(marked, with_right_checksums(bytes(broken))))

    assert "reason" in outcomes


def test_the_format_is_known_by_the_first_bytes_whatever_the_name_was():
    """A pipeline does not see file names, so a PNG with the name .jpg is decoded as a PNG."""
    assert [
        probe_image(memoryview(FILES[name])).format for name in ("jpeg", "png", "animated png", "webp", "bmp", "gif")
    ] == [
        "JPEG",
        "PNG",
        "APNG",
        "WebP",
        "BMP",
        "GIF",
    ]


@pytest.mark.parametrize("name", FILES)
def test_header_dimensions_are_those_of_the_image(name):
    """The header alone gives height and width in every format."""
    header = probe_image(memoryview(FILES[name]))

    assert (header.height, header.width, header.orientation) == (64, 96, 1)


def test_limits_are_exact():
    """An image at the limit is served; one with one more pixel or byte is refused."""
    data = jpeg(IMAGE)
    size = Resize(size=(64, 96))

    run_once([Decode(max_pixels=64 * 96, max_bytes=len(data)), size], data)

    with pytest.raises(SampleUndecodable, match="6144 pixels, more than max_pixels = 6143"):
        run_once([Decode(max_pixels=64 * 96 - 1), size], data)
    with pytest.raises(SampleUndecodable, match=f"a file of {len(data)} bytes, more than max_bytes = {len(data) - 1}"):
        run_once([Decode(max_bytes=len(data) - 1), size], data)


def test_a_photo_with_a_large_preview_in_its_header_is_served():
    """Hundreds of segments of 64 KiB precede the image, some with the end mark of a preview."""
    segment = b"\xff\xe2" + (65_535).to_bytes(2, "big") + b"\xff\xd9\xff\xda" * 16_383 + b"\0"
    data = jpeg_with_exif(jpeg(IMAGE), 1)
    whole = data[:2] + segment * 300 + data[2:]

    assert np.array_equal(run_once(WHOLE_STEPS, whole), run_once(WHOLE_STEPS, data))
    with pytest.raises(SampleUndecodable, match="truncated"):
        run_once(WHOLE_STEPS, whole[: len(whole) - 100])


def test_a_bitmap_that_leaves_pixels_out_shows_none_of_another_sample(marked):
    """Run-length coded bitmaps and small first frames may skip pixels.

    Skipped pixels have the format's own background.
    """
    palette = b"".join(bytes((shade, 0, 255 - shade, 0)) for shade in range(256))
    header = (96).to_bytes(4, "little") + (64).to_bytes(4, "little") + b"\1\0\x08\0\1\0\0\0" + b"\0" * 12
    start = b"BM" + b"\0" * 8 + (54 + 1024).to_bytes(4, "little") + (40).to_bytes(4, "little")
    for body in (b"\0\1", b"\5\x09\0\1", b"\5\x09\0\2\x32\x1e\5\x09\0\1", b"\0\0" * 64):
        image = marked.run(start + header + (256).to_bytes(4, "little") + b"\0" * 4 + palette + body)
        assert (image[0, 90] == (255, 0, 0)).all()
