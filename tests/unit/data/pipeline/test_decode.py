"""Every whole variant decodes to the right pixels, by both decoders, with one EXIF policy."""

import os
import subprocess
import sys
from struct import pack as packed

import cv2
import numpy as np
import pytest

from batchd.data.pipeline.image import decode, jpeg_box
from batchd.data.pipeline.image.decode import Decoder
from batchd.data.pipeline.image.geometry import Cut, Padding, Resampling
from batchd.data.pipeline.image.opencv import Scratch
from batchd.data.pipeline.image.options import Decode, Gray, Resize
from batchd.data.pipeline.image.probe import exif_orientation, probe_image
from batchd.data.samples.kept_files import KeptFiles
from batchd.data.sources.cache.record import pack, unpack
from support.images import (
    animation,
    bitmap,
    cmyk_jpeg,
    corners,
    encode,
    exif_block,
    gif,
    jpeg,
    jpeg_with_exif,
    palette_png,
    photo,
    png16,
    png_with,
    png_with_exif,
    png_with_raw_profile,
    progressive_jpeg,
    still_in_animated_webp,
    stored_as,
    webp_with_alpha,
    webp_with_exif,
    ycck_jpeg,
)
from support.pipelines import UPRIGHT_64_96, run_once


@pytest.fixture
def without_simplejpeg(monkeypatch):
    """Run with cv2 alone: simplejpeg is not installed, and the extension is not built."""
    monkeypatch.setattr(jpeg_box, "IS_BUILT", False)
    monkeypatch.setattr(decode, "simplejpeg", None)


def decoded(data, factor=1, box=None, **options):
    """Decode without other steps, in the stored orientation: the box, or the whole image."""
    view = memoryview(data)
    header = probe_image(view)
    whole = Cut(0, 0, -(-header.height // factor), -(-header.width // factor))
    return Decoder(Decode(**options), Scratch()).decode(view, header, factor, box or whole).copy()


def close(result, image, tolerance=3):
    """Compare with a tolerance for compression, in flat colours away from their edges."""
    return all(np.abs(result[y, x].astype(int) - image[y, x]).max() <= tolerance for y in (10, 50) for x in (10, 80))


WHOLE = {
    "jpeg 4:2:0": jpeg(corners()),
    "jpeg 4:4:4": jpeg(corners(), subsampling="444"),
    "jpeg 4:2:2": jpeg(corners(), subsampling="422"),
    "jpeg 4:4:0": jpeg(corners(), subsampling="440"),
    "jpeg 4:1:1": jpeg(corners(), subsampling="411"),
    "progressive jpeg": progressive_jpeg(corners()),
    "jpeg and garbage": jpeg(corners()) + b"trailing garbage" * 100,
    "jpeg with fill bytes before its end": jpeg(corners())[:-2] + b"\xff" * 11 + jpeg(corners())[-2:],
    "jpeg with fill bytes between segments": jpeg(corners())[:20] + b"\xff\xff\xff" + jpeg(corners())[20:],
    "png": encode(corners(), ".png"),
    "16-bit png": png16(corners()),
    "png with alpha": encode(np.dstack([corners(), np.full((64, 96), 7, np.uint8)]), ".png"),
    "animated png": animation(".png", [corners(), corners()[::-1].copy()]),
    "webp": encode(corners(), ".webp", cv2.IMWRITE_WEBP_QUALITY, 95),
    "lossless webp": encode(corners(), ".webp"),
    "webp with alpha": encode(np.dstack([corners(), np.full((64, 96), 200, np.uint8)]), ".webp"),
    "animated webp": animation(".webp", [corners(), corners()[::-1].copy()]),
    "bmp": encode(corners(), ".bmp"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_whole_image_shows_its_colours(name):
    """Alpha is dropped, 16 bits become 8, the first frame counts, and trailing bytes do not."""
    assert close(run_once(UPRIGHT_64_96, WHOLE[name]), corners())


@pytest.mark.parametrize("data", [encode(corners(), ".gif"), animation(".gif", [corners(), corners()[::-1].copy()])])
def test_a_gif_shows_its_first_frame(data):
    """The tolerance is that of the palette of the file's encoder."""
    assert close(run_once(UPRIGHT_64_96, data), corners(), tolerance=60)


PALETTE = np.array([(220, 30, 30), (30, 200, 30), (30, 30, 220), (240, 240, 240)], np.uint8)
INDICES = np.repeat(np.repeat([[0, 1], [2, 3]], 32, axis=0), 48, axis=1)
ALPHAS = np.array([0, 1, 128, 255], np.uint8)[INDICES]
WITH_ALPHA = np.dstack([PALETTE[INDICES], ALPHAS])
LOSSY_WEBP = encode(PALETTE[INDICES], ".webp", cv2.IMWRITE_WEBP_QUALITY, 95)
TRANSPARENT = {
    "a palette": palette_png(INDICES, PALETTE, [0, 1, 128, 255]),
    "a gif": gif(INDICES, PALETTE, transparent=1),
    "a gif's background": gif(INDICES, PALETTE, transparent=0),
    "png": encode(WITH_ALPHA, ".png"),
    "16-bit png": encode(WITH_ALPHA.astype(np.uint16) * 257, ".png"),
    "a transparent colour of a png": png_with(encode(PALETTE[INDICES], ".png"), b"tRNS", bytes([0, 30, 0, 200, 0, 30])),
    "webp": webp_with_alpha(LOSSY_WEBP, ALPHAS),
    "animated webp": still_in_animated_webp(LOSSY_WEBP, alphas=ALPHAS),
    "bmp": encode(WITH_ALPHA, ".bmp"),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparent_pixels_have_the_colours_that_the_file_stores(name):
    """It is one rule for all formats: alpha is dropped."""
    assert close(run_once(UPRIGHT_64_96, TRANSPARENT[name]), PALETTE[INDICES])


def test_what_the_first_frame_of_a_webp_leaves_out_is_black():
    """The frame is in its place, whatever the background is."""
    still = encode(corners(32, 48), ".webp")
    made = run_once(UPRIGHT_64_96, still_in_animated_webp(still, 10, 20, canvas=(96, 64)))

    expected = np.zeros((64, 96, 3), np.uint8)
    expected[20:52, 10:58] = corners(32, 48)
    assert np.array_equal(made, expected)


def test_a_frame_larger_than_its_canvas_is_refused():
    """The size of the canvas is what the limits were compared with."""
    with pytest.raises(ValueError, match="a WebP with a frame larger than its canvas"):
        run_once(UPRIGHT_64_96, still_in_animated_webp(encode(corners(), ".webp"), canvas=(8, 8)))


MASKS = {
    "5 bits": ((0x7C00, 0x3E0, 0x1F), 16),
    "5, 6 and 5 bits": ((0xF800, 0x7E0, 0x1F), 16),
    "4 bits": ((0xF00, 0xF0, 0xF), 16),
    "no blue": ((0xFF00, 0xFF, 0), 16),
    "usual": ((0xFF0000, 0xFF00, 0xFF), 32),
    "reversed": ((0xFF, 0xFF00, 0xFF0000), 32),
    "shifted": ((0xFF00000, 0xFF000, 0xFF0), 32),
    "11, 11 and 10 bits": ((0xFFE00000, 0x1FFC00, 0x3FF), 32),
    "20 bits": ((0xFFFFF000, 0xFC0, 0x3F), 32),
}


@pytest.mark.parametrize("is_top_down", [False, True])
@pytest.mark.parametrize("header_bytes", [40, 56, 124])
@pytest.mark.parametrize("name", MASKS)
def test_a_bitmap_has_the_colours_under_its_masks(name, header_bytes, is_top_down):
    """The largest number is 255, in any colour order, wherever the pixels begin."""
    masks, bits = MASKS[name]
    colors = photo(31, 37).astype(np.int64)
    colors[0, 0] = 255
    pixels, expected = np.zeros((31, 37), np.int64), np.zeros((31, 37, 3), np.int64)
    for channel, mask in enumerate(masks):
        most, shift = mask // max(1, mask & -mask), (mask & -mask).bit_length() - 1
        number = (colors[..., channel] * most + 127) // 255
        pixels |= number << max(0, shift)
        expected[..., channel] = np.rint(number * 255 / max(1, most))

    data = bitmap(pixels, masks, bits, is_top_down=is_top_down, header_bytes=header_bytes, gap=6)

    made = decoded(data)
    assert np.abs(made - expected).max() <= (1 if name == "20 bits" else 0)
    assert np.array_equal(decoded(data, color="bgr"), made[..., ::-1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((0x36, b"\x05"), "with the masks 00ff0005"),
        ((0x36, bytes(12)), "with the masks 00000000, 00000000, 00000000"),
        ((10, b"\x20\0\0\0"), "pixels begin at byte 32, inside of its header of 66 bytes"),
        ((14, b"\x40"), "with the masks"),
    ],
)
def test_a_bitmap_whose_masks_or_offset_make_no_sense_is_refused(change, reason):
    """The masks have a gap, or no bits, or are another header's; pixels would be the header."""
    data = bytearray(bitmap(np.zeros((40, 40)), (0xFF0000, 0xFF00, 0xFF), 32, gap=12))
    data[change[0] : change[0] + len(change[1])] = change[1]

    with pytest.raises(ValueError, match=reason):
        decoded(bytes(data))


def test_the_shortest_webp_is_decoded():
    """Lossless, of one colour: 28 bytes, of which OpenCV alone would not look at the first."""
    fields = [(0x2F, 8), (3 - 1, 14), (2 - 1, 14), (0, 1 + 3)]  # mark, sides, no alpha, version
    fields += [(0, 3)]  # nothing in front of the codes
    # each of five codes has one symbol, of one bit: green 0, red 1, blue 1, alpha 0, distance 0
    fields += [(0b0001 | symbol << 3, 4) for symbol in (0, 1, 1, 0, 0)]
    bits, place = 0, 0
    for value, length in fields:
        bits |= value << place
        place += length
    image = bits.to_bytes(8, "little")
    data = b"RIFF" + packed("<I", 20) + b"WEBPVP8L" + packed("<I", 8) + image

    assert len(data) == 28
    assert np.array_equal(decoded(data), np.full((2, 3, 3), (1, 0, 1)))


def test_grey_images_become_grey_colours():
    """A JPEG, a PNG and a 16-bit PNG of one channel give three equal channels."""
    grey = corners()[..., 0]
    for data in (jpeg(grey), encode(grey, ".png"), png16(grey)):
        assert close(run_once(UPRIGHT_64_96, data), np.dstack([grey] * 3))


def test_inks_become_colours():
    """CMYK and YCCK have Adobe's inverted inks.

    The result is the colour times the light that black lets through.
    """
    colors = corners()
    light = colors.max(axis=2, keepdims=True)
    inks = np.concatenate([(colors.astype(int) * 255 // light).astype(np.uint8), light], axis=2)

    assert close(run_once(UPRIGHT_64_96, ycck_jpeg(inks)), colors)
    assert close(run_once(UPRIGHT_64_96, cmyk_jpeg((200, 120, 140))), np.full((64, 96, 3), (200, 120, 140)))


def test_the_colour_order_is_the_configured_one():
    """Both decoders give the same pixels in another order, and luma for grey."""
    for data in (jpeg(photo()), encode(photo(), ".png")):
        color = decoded(data)

        assert np.array_equal(decoded(data, color="bgr"), color[..., ::-1])
        assert decoded(data, color="gray").shape == (75, 100, 1)
        luma = color @ np.array([0.299, 0.587, 0.114])
        assert np.abs(decoded(data, color="gray")[..., 0] - luma).mean() < 1.5


GREY_FILES = {
    "gAMA": png_with(encode(photo(), ".png"), b"gAMA", packed(">I", 45_455)),
    "linear": png_with(encode(photo(), ".png"), b"gAMA", packed(">I", 100_000)),
    "sRGB": png_with(encode(photo(), ".png"), b"sRGB", b"\0"),
    "cHRM": png_with(
        encode(photo(), ".png"), b"cHRM", packed(">8I", 31_270, 32_900, 64_000, 33_000, 21_000, 71_000, 15_000, 6_000)
    ),
    "png": encode(photo(), ".png"),
    "16-bit png": png16(photo()),
    "grey png": encode(photo()[..., 0], ".png"),
    "grey with gAMA": png_with(encode(photo()[..., 0], ".png"), b"gAMA", packed(">I", 100_000)),
    "palette": palette_png(INDICES, PALETTE, [255]),
    "bmp": encode(photo(), ".bmp"),
    "webp": encode(photo(), ".webp"),
    "gif": gif(INDICES, PALETTE),
}


@pytest.mark.parametrize("name", GREY_FILES)
def test_grey_by_decode_is_grey_by_the_step(name):
    """This holds for each format that stores no luma, whatever the file says of its colours."""
    size = run_once([Decode(), Resize(size=(75, 100))], GREY_FILES[name]).shape[:2]
    resize = Resize(size=size, interpolation="nearest")

    by_step = run_once([Decode(), Gray(channels=1), resize], GREY_FILES[name])

    assert np.array_equal(run_once([Decode(color="gray"), resize], GREY_FILES[name]), by_step)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_becomes_upright_in_every_format(orientation):
    """The formats are JPEG, PNG and WebP, with tags in either byte order.

    A PNG has EXIF as a chunk, with or without JPEG's prefix, or as text. Others have no EXIF.
    """
    stored = stored_as(corners(), orientation)
    for data in (
        jpeg_with_exif(jpeg(stored), orientation),
        jpeg_with_exif(jpeg(stored), orientation, order=">"),
        png_with_exif(encode(stored, ".png"), orientation),
        png_with_raw_profile(png_with_exif(encode(stored, ".png"), orientation), 1),
        png_with_raw_profile(encode(stored, ".png"), orientation),
        png_with_raw_profile(encode(stored, ".png"), orientation, name=b"APP1"),
        png_with_raw_profile(encode(stored, ".png"), orientation, b"zTXt"),
        png_with_raw_profile(encode(stored, ".png"), orientation, b"iTXt"),
        webp_with_exif(encode(stored, ".webp"), orientation),
    ):
        assert close(run_once(UPRIGHT_64_96, data), corners())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_ignored_on_request(orientation):
    """With exif = "ignore", each decoder gives the stored orientation for every tag."""
    ignoring = [Decode(exif="ignore"), Resize(size=(64, 96))]
    for data, tagged in (
        (jpeg(corners()), jpeg_with_exif(jpeg(corners()), orientation)),
        (encode(corners(), ".png"), png_with_exif(encode(corners(), ".png"), orientation)),
        (encode(corners(), ".webp"), webp_with_exif(encode(corners(), ".webp"), orientation)),
    ):
        assert np.array_equal(run_once(ignoring, tagged), run_once(ignoring, data))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("color", ["rgb", "bgr", "gray"])
def test_all_jpeg_decoders_give_the_same_bytes(orientation, color, monkeypatch):
    """This holds at every scale, in every colour order, for every orientation.

    A machine with only one of the decoders makes the same batches.
    """
    data = jpeg_with_exif(jpeg(stored_as(photo(203, 305), orientation)), orientation)
    sizes = [(203, 305), (100, 150), (50, 70), (20, 30)]
    pipelines = [[Decode(color=color), Resize(size=size)] for size in sizes]
    expected = [run_once(steps, data) for steps in pipelines]

    for module, name in ((jpeg_box, "IS_BUILT"), (decode, "simplejpeg")):
        monkeypatch.setattr(module, name, None)
        made = [run_once(steps, data) for steps in pipelines]
        assert all(np.array_equal(image, other) for image, other in zip(made, expected, strict=True))


@pytest.mark.usefixtures("without_simplejpeg")
def test_without_simplejpeg_truncated_jpegs_are_still_detected():
    """The fallback serves the same images, refuses the same truncated ones, and logs that."""
    data = jpeg(corners())

    assert close(run_once(UPRIGHT_64_96, data), corners())
    with pytest.raises(ValueError, match="truncated"):
        run_once(UPRIGHT_64_96, data[:-2])
    assert decode.decoder_versions() == f"OpenCV {cv2.__version__}"


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_a_smaller_scale_is_the_mean_of_the_pixels_that_it_replaces(factor):
    """Sizes are 1/2, 1/4 and 1/8, rounded up, and pixels are near the mean of each block."""
    image = photo(160, 240)

    small = decoded(jpeg(image, quality=100, subsampling="444"), factor=factor)

    means = image.reshape(160 // factor, factor, 240 // factor, factor, 3).mean(axis=(1, 3))
    assert small.shape == means.shape
    assert np.abs(small - means).mean() < 1.5
    assert decoded(jpeg(photo(161, 243)), factor=factor).shape == (-(-161 // factor), -(-243 // factor), 3)


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (2, 3), (7, 9)])
def test_the_smallest_images_are_decoded_exactly(size):
    """Simplejpeg picks the smallest sufficient scale, and tiny sizes round up."""
    data = jpeg(photo(*size), subsampling="444")
    reference = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)

    assert np.array_equal(decoded(data), reference)


def test_an_unusual_tag_means_upright():
    """The tag is missing, of another type, no orientation, or in a directory that ends early.

    None of these raises an error.
    """
    blocks = [
        b"",
        b"II",
        b"XX*\0\x08\0\0\0",
        exif_block(0),
        exif_block(9),
        exif_block(6)[:12],
        exif_block(6).replace(b"\x12\x01\x03\0", b"\x12\x01\x04\0"),
        exif_block(6).replace(b"\x12\x01", b"\x13\x01"),
        b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff" + b"\0" * 40,
    ]

    assert [exif_orientation(memoryview(block)) for block in blocks] == [1] * len(blocks)
    assert exif_orientation(memoryview(exif_block(6))) == 6


def test_the_first_exif_block_counts():
    """Some editors leave a second one behind, which does not turn the image again."""
    data = jpeg_with_exif(jpeg_with_exif(jpeg(corners()), 6), 1)

    assert close(run_once(UPRIGHT_64_96, data), corners())


def test_cv2_is_configured_independently_of_the_environment():
    """Cv2 has one thread, no messages, and the configured limit instead of its own variable."""
    code = (
        "from batchd.data.pipeline.image.opencv import cv2; import numpy as np;"
        "png = cv2.imencode('.png', np.full((64, 96, 3), 9, np.uint8))[1];"
        "print(cv2.getNumThreads(), cv2.imdecode(png, cv2.IMREAD_COLOR_BGR).shape, cv2.imdecode(png[:99], 1))"
    )
    environment = {**os.environ, "OPENCV_IO_MAX_IMAGE_PIXELS": "10"}
    environment.pop("OPENCV_LOG_LEVEL", None)

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.split(maxsplit=1) == ["1", "(64, 96, 3) None\n"]
    assert "ERROR" not in done.stderr


LARGE = jpeg(photo(480, 640))
SCALES = [
    (LARGE, Resampling(250, 260, "auto"), {}, [1]),
    (LARGE, Resampling(220, 230, "auto"), {}, [1, 2]),
    (LARGE, Resampling(220, 230, "auto"), {"scale": "off"}, [1]),
    (LARGE, Resampling(120, 160, "auto"), {}, [1]),
    (LARGE, Padding(0, 0, 700, 700), {}, [1]),
    (encode(photo(480, 640), ".png"), Resampling(220, 230, "auto"), {}, [1]),
]


@pytest.mark.parametrize(("data", "move", "options", "factors"), SCALES)
def test_an_image_is_kept_at_the_scales_at_which_its_crops_are_decoded(data, move, options, factors):
    """Scales are 1 and, if no crop is decoded smaller, 1/2; the file is not read again for them."""
    kept = KeptFiles(decoded=["image"])
    decoder = Decoder(Decode(**options), Scratch(), kept)
    header = probe_image(memoryview(data))
    box = Cut(11, 20, 201, 170)
    for factor in factors:
        kept.decoded.begin(lambda _size: True)
        first = decoder.decode(memoryview(data), header, factor, box, [move]).copy()
        file = kept.decoded.found["image"]
        record = pack({"image": file})
        values, _points = unpack(memoryview(record.facts), memoryview(b"".join(record.values)).toreadonly(), stopped)

        assert list(file.pixels) == factors
        assert np.array_equal(first, decoded(data, factor, box, **options))
        assert np.array_equal(first, decoder.decode(values["image"], header, factor, box, [move]))


def stopped(name):
    raise AssertionError(f"{name} is read again")


def test_an_image_is_kept_only_with_room_for_all_of_its_scales():
    """Without the room, only its crop is decoded."""
    kept = KeptFiles(decoded=["image"])
    decoder = Decoder(Decode(), Scratch(), kept)
    asked = []
    kept.decoded.begin(asked.append)

    decoder.decode(
        memoryview(LARGE), probe_image(memoryview(LARGE)), 2, Cut(0, 0, 9, 9), [Resampling(220, 230, "auto")]
    )

    assert asked == [(480 * 640 + 240 * 320) * 3]
    assert kept.decoded.found == {}
