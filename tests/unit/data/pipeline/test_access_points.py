"""Crops decoded by access points equal those of the whole image; other files decode as before."""

import random

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.pipeline.image.decode import Decoder
from batchd.data.pipeline.image.geometry import Cut
from batchd.data.pipeline.image.opencv import Scratch
from batchd.data.pipeline.image.options import Decode
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.kept_files import AccessPoints, KeptFiles, has_points
from support.images import (
    JPEG_END,
    arithmetic_jpeg,
    cmyk_jpeg,
    encode,
    jpeg_by_component,
    jpeg_of,
    jpeg_with_exif,
    photo,
    progressive_jpeg,
    ycck_jpeg,
)
from support.jpeg_boxes import SUBSAMPLINGS, check_that_memory_stays, extension, where_it_is_built

pytestmark = where_it_is_built
STEPS = (1, 16, 32, 64, 10_000)
WIDE = photo(300, 500)
CORNER = Cut(200, 300, 60, 90)


def size_of(data):
    header = probe_image(memoryview(data))
    return header.height, header.width


def record_of(data, step=32):
    return extension.access_points(data, size_of(data), step)


def checksum(data):
    """The checksum of ``data`` from the xxhash library."""
    return xxhash.xxh64_intdigest(data).to_bytes(8, "little")


def cropped(data, box, record=None, eighths=8, color="rgb"):
    """Return the pixels of a box, and whether the record belongs to this file."""
    height, width = (-(-side * eighths // 8) for side in size_of(data))
    channels = 1 if color == "gray" else 3
    memory = bytearray(box.height * min(width, box.width + extension.COLUMNS_BESIDE_MAX) * channels)
    assert (box.top + box.height, box.left + box.width) <= (height, width)
    columns, before, fits, _ns = extension.decode(data, memory, color, eighths, size_of(data), box, record)
    strides = (columns * channels, channels, 1)
    return np.ndarray((box.height, box.width, channels), np.uint8, memory, before * channels, strides).copy(), fits


def any_box(draw, height, width):
    top, left = draw(0, height - 1), draw(0, width - 1)
    return Cut(top, left, draw(1, height - top), draw(1, width - left))


@st.composite
def jpegs(draw):
    """A baseline JPEG of any subsampling and quality, with optimised or standard Huffman tables."""
    size = draw(st.integers(1, 200)), draw(st.integers(1, 200))
    kind = draw(st.sampled_from(["photo", "noise", "flat", "steps"]))
    image = {
        "photo": lambda: photo(*size, seed=size[0]),
        "noise": lambda: np.random.default_rng(size[1]).integers(0, 256, (*size, 3), dtype=np.uint8),
        "flat": lambda: np.full((*size, 3), 200, np.uint8),
        "steps": lambda: np.repeat((np.indices(size).sum(0) // 16 % 2 * 255).astype(np.uint8)[..., None], 3, 2),
    }[kind]()
    subsampling = draw(st.sampled_from(SUBSAMPLINGS))
    pixels = image[..., 0] if subsampling == "grey" else image
    return jpeg_of(pixels, subsampling, quality=draw(st.sampled_from([5, 50, 90, 100])))


@given(
    data=jpegs(),
    step=st.sampled_from(STEPS),
    eighths=st.sampled_from([8, 8, 4, 2, 1]),
    color=st.sampled_from(["rgb", "bgr", "gray"]),
    more=st.data(),
)
def test_a_crop_by_access_points_has_the_pixels_of_the_whole(data, step, eighths, color, more):
    """The crop is equal bit for bit, at every scale and for every box."""
    height, width = (-(-side * eighths // 8) for side in size_of(data))
    box = any_box(lambda low, high: more.draw(st.integers(low, high)), height, width)

    found, fits = cropped(data, box, record_of(data, step), eighths, color)

    assert fits
    assert np.array_equal(found, cropped(data, box, None, eighths, color)[0])


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_every_box_around_a_point_is_right(subsampling):
    """Boxes one pixel larger or smaller are right, too: blocks share chroma across their edges."""
    image = photo(70, 200)
    data = jpeg_of(image[..., 0] if subsampling == "grey" else image, subsampling)
    record = record_of(data, 32)
    pixels = cropped(data, Cut(0, 0, 70, 200))[0]
    for left in (0, 1, 31, 32, 33, 63, 64, 65, 199):
        for right in {left + 1, left + 2, 32, 64, 96, 128, 200} & set(range(left + 1, 201)):
            for top, bottom in ((0, 1), (7, 9), (8, 16), (15, 17), (16, 32), (31, 33), (69, 70)):
                found, _fits = cropped(data, Cut(top, left, bottom - top, right - left), record)
                assert np.array_equal(found, pixels[top:bottom, left:right]), (left, right, top, bottom)


def first_bit(record, group):
    """The position in the file at which the points of a group begin."""
    at = int.from_bytes(record[28 + 12 * group + 8 :][:4], "little")
    length = next(count for count, byte in enumerate(record[at : at + 5], 1) if byte < 128)
    return sum((byte & 127) << 7 * place for place, byte in enumerate(record[at : at + length]))


def test_less_of_the_file_is_decoded():
    """The file is damaged above the crop, and a record made for it still gives the right crop."""
    data = jpeg_of(WIDE)
    record = record_of(data)
    header = data[: data.index(b"\xff\xda") + 14]
    end_of_group = -(-first_bit(record, 1) // 8)
    damaged = data[: len(header) + 40] + bytes(100) + data[len(header) + 140 :]
    assert record[20:28] == checksum(header)
    assert record[28:36] == checksum(data[len(header) : end_of_group])
    assert record[-8:] == checksum(record[:-8])

    made = record[:28] + checksum(damaged[len(header) : end_of_group]) + record[36:-8]
    found, fits = cropped(damaged, CORNER, made + checksum(made))

    assert fits
    assert np.array_equal(found, cropped(data, CORNER)[0])


def same_as_without(data, box, record):
    """Assert that a record changes nothing; return whether it belongs to this file."""
    try:
        expected = cropped(data, box)[0]
    except extension.JpegError:
        with pytest.raises(extension.JpegError):
            cropped(data, box, record)
        return False
    found, fits = cropped(data, box, record)
    assert np.array_equal(found, expected)
    return fits


def test_a_bit_that_has_changed_above_the_crop_is_found():
    """Without points, such a bit moves the pixels below it or breaks the file."""
    data = jpeg_of(WIDE)
    record = record_of(data)
    begin = data.index(b"\xff\xda") + 14
    chance = random.Random(5)
    for _ in range(200):
        place = chance.randrange(begin, len(data) // 2)
        changed = data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
        assert not same_as_without(changed, CORNER, record)


def test_points_of_other_bytes_are_not_used():
    """A second encoding, one changed bit in the crop, one more byte, and another header."""
    data = jpeg_of(WIDE)
    record = record_of(data)
    again = jpeg_of(WIDE, quality=89)
    in_crop = len(data) * 4 // 5
    changed = data[:in_crop] + bytes([data[in_crop] ^ 2]) + data[in_crop + 1 :]

    assert cropped(data, CORNER, record)[1]
    for other in (again, data + b"\0", changed):
        assert not same_as_without(other, CORNER, record)


@pytest.mark.thorough
def test_a_damaged_record_is_not_used_or_does_no_harm():
    """The checksum shows damage; under a right one, no content makes a read out of bounds."""
    data = jpeg_of(WIDE)
    record, expected = record_of(data), cropped(data, CORNER)[0]
    chance = random.Random(7)
    for _ in range(3000):
        made = bytearray(record)
        for _ in range(chance.randint(1, 4)):
            made[chance.choice([chance.randrange(32), chance.randrange(len(made))])] = chance.randrange(256)
        made = bytes(made[: chance.choice([len(made), len(made), chance.randrange(len(made))])])
        if made == record:
            continue
        found, fits = cropped(data, CORNER, made)
        assert not fits
        assert np.array_equal(found, expected)
        cropped(data, CORNER, made[:-8] + checksum(made[:-8]))


@pytest.mark.parametrize(
    "data",
    [
        progressive_jpeg(WIDE),
        jpeg_of(WIDE, restart=3),
        arithmetic_jpeg(),
        cmyk_jpeg((10, 20, 30, 40)),
        ycck_jpeg(np.dstack([WIDE, WIDE[..., 0]])),
        jpeg_by_component(WIDE[..., 0], 2),
        jpeg_of(WIDE)[:-300] + JPEG_END,
        jpeg_of(WIDE)[:-2] + b"\0\0" + JPEG_END,
    ],
    ids=["progressive", "restart", "arithmetic", "inks", "more-inks", "two-scans", "cut-off", "padded"],
)
def test_what_is_unusual_or_broken_has_no_points(data):
    """The decoder decodes or refuses such a file exactly as it does without points."""
    assert record_of(data) is None


def test_a_file_that_is_broken_anywhere_has_no_points_or_other_pixels_nowhere():
    """The walk refuses files with a libjpeg warning; files that both accept have equal pixels."""
    data = jpeg_of(photo(120, 160))
    begin = data.index(b"\xff\xda") + 14
    chance = random.Random(3)
    taken = 0
    for _ in range(1500):
        place = chance.randrange(begin, len(data) - 2)
        changed = data[:place] + bytes([chance.randrange(255)]) + data[place + 1 :]
        try:
            expected = cropped(changed, Cut(0, 0, 120, 160))[0]
        except extension.JpegError:
            expected = None
        record = record_of(changed)
        if record is None:
            continue
        assert expected is not None, place
        taken += 1
        box = any_box(chance.randint, 120, 160)
        found, fits = cropped(changed, box, record)
        assert fits
        assert np.array_equal(found, expected[box.top : box.top + box.height, box.left : box.left + box.width])
    assert taken > 300


def test_profiles_and_exif_are_left_out_of_what_is_decoded_and_change_nothing():
    """Large segments in front of the image do not slow a crop down."""
    plain = jpeg_of(WIDE)
    data = jpeg_with_exif(plain, 6)

    assert np.array_equal(cropped(data, CORNER, record_of(data))[0], cropped(plain, CORNER)[0])


def decoder(points):
    kept = KeptFiles()
    kept.points = points
    return Decoder(Decode(), Scratch(), kept)


def decoded(data, points, box=CORNER):
    view = memoryview(data)
    return decoder(points).decode(view, probe_image(view), 1, box).copy()


def test_the_first_decode_finds_the_points_and_a_later_one_uses_them():
    data = jpeg_of(WIDE)
    points = AccessPoints(["image"])
    points.begin(is_kept=True)
    first = decoded(data, points)
    record = points.found["image"]

    points.begin({"image": record}, is_kept=True)
    second = decoded(data, points)

    assert record == record_of(data)
    assert points.found == {}
    assert np.array_equal(first, second)


def test_no_file_is_walked_whose_points_are_not_kept():
    """There is no room, the field differs, or the crop leaves little out."""
    small = jpeg_of(photo(100, 100))
    for data, fields, is_kept in (
        (jpeg_of(WIDE), ["image"], False),
        (jpeg_of(WIDE), [], True),
        (small, ["image"], True),
    ):
        points = AccessPoints(fields)
        points.begin(is_kept=is_kept)
        decoded(data, points, Cut(3, 4, 50, 60))
        assert not any(map(has_points, points.found.values()))


def test_a_file_that_has_changed_is_walked_again():
    old, new = jpeg_of(WIDE), jpeg_of(WIDE, quality=70)
    points = AccessPoints(["image"])
    points.begin({"image": record_of(old)}, is_kept=True)

    found = decoded(new, points)

    assert points.found == {"image": record_of(new)}
    assert np.array_equal(found, cropped(new, CORNER)[0])


def test_a_file_without_points_is_not_walked_twice():
    """The decoder walks again only after another file has replaced it."""
    data = progressive_jpeg(WIDE)
    points = AccessPoints(["image"])
    points.begin(is_kept=True)
    decoded(data, points)
    refusal = points.found["image"]
    assert not has_points(refusal)

    points.begin({"image": refusal}, is_kept=True)
    decoded(data, points)
    assert points.found == {}
    decoded(jpeg_of(WIDE), points)
    assert points.found == {"image": record_of(jpeg_of(WIDE))}


def test_without_memory_for_the_walk_the_file_is_decoded(monkeypatch):
    def no_memory(*_arguments):
        raise MemoryError

    monkeypatch.setattr(extension, "access_points", no_memory)
    points = AccessPoints(["image"])
    points.begin(is_kept=True)
    data = jpeg_of(WIDE)

    assert np.array_equal(decoded(data, points), cropped(data, CORNER)[0])
    assert points.found == {}


def test_sides_that_libjpeg_refuses_have_no_points():
    """A crop of such an image would decode with points, and be a bad sample without them."""
    data = bytearray(jpeg_of(photo(64, 2000)[..., 0]))
    frame = data.index(b"\xff\xc0")
    data[frame + 7 : frame + 9] = (65_520).to_bytes(2, "big")
    assert record_of(bytes(data)) is None


def grey_with_table(symbols, differences):
    """A grey JPEG: two rows of blocks of one brightness each, whose DC codes all have 9 bits."""
    dc_table = b"\0" + bytes([*[0] * 8, len(symbols), *[0] * 7]) + bytes(symbols)
    ac_table = b"\x10" + bytes([*[1] * 8, *[0] * 8]) + b"\0\x01\xf0\x11\x01\x21\x31\x41"
    codes = {0: f"{symbols.index(0):09b}", 1: f"{symbols.index(1):09b}1"}
    bits = "".join(codes[difference] + "0" for difference in differences)
    bits += "1" * (-len(bits) % 8)
    scan = bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)).replace(b"\xff", b"\xff\0")
    width = (len(differences) // 2 * 8).to_bytes(2, "big")
    segments = [
        (0xDB, b"\0" + b"\x10" * 64),
        (0xC0, b"\x08\0\x10" + width + b"\x01\x01\x11\0"),
        (0xC4, dc_table),
        (0xC4, ac_table),
        (0xDA, b"\x01\x01\0\0\x3f\0"),
    ]
    header = b"".join(b"\xff" + bytes([kind]) + (len(one) + 2).to_bytes(2, "big") + one for kind, one in segments)
    return b"\xff\xd8" + header + scan + JPEG_END


def test_a_table_gets_no_more_codes_of_a_length_than_a_byte_counts():
    """Repeated codes would need a count of 256, which reads as 0; their symbols would be tables."""
    tables = [0, 1, 1, *[0] * 16, 1, *[15] * 14, 10]
    symbols = tables + [0] * (247 - len(tables))
    assert len(set(range(12)) - set(symbols)) == 256 - len(symbols)
    data = grey_with_table(symbols, [1] * 16 + [0] * 184)
    record = record_of(data)

    assert has_points(record)
    assert same_as_without(data, Cut(0, 400, 4, 200), record)


def test_a_broken_file_stays_a_bad_sample():
    """The sample is bad down to the last row of the crop, with and without points."""
    data = jpeg_of(WIDE)
    points = AccessPoints(["image"])
    points.begin({"image": record_of(data)}, is_kept=True)
    with pytest.raises(SampleUndecodable, match="a broken JPEG"):
        decoded(data[: len(data) // 3] + JPEG_END, points)


def test_arguments_are_checked():
    data = encode(WIDE, ".jpg")
    with pytest.raises(ValueError, match="not 0"):
        extension.access_points(data, size_of(data), 0)
    assert extension.access_points(data, (1, 1), 32) is None
    assert extension.access_points(b"", (1, 1), 32) is None
    with pytest.raises(ValueError, match="reaches out"):
        extension.decode(data, bytearray(100), "rgb", 8, size_of(data), (299, 0, 2, 1), record_of(data))
    with pytest.raises(ValueError, match="need more than"):
        extension.decode(data, bytearray(100), "rgb", 8, size_of(data), CORNER, record_of(data))


@pytest.mark.thorough
def test_many_calls_leave_no_memory_behind():
    data, broken = jpeg_of(WIDE), jpeg_of(WIDE)[:-300] + JPEG_END
    record, other = record_of(data), record_of(jpeg_of(WIDE, quality=70))

    def many(calls):
        for _ in range(calls // 3):
            cropped(data, CORNER, record)
            cropped(data, CORNER, other)
            record_of(broken)

    check_that_memory_stays(many, 6_000)
