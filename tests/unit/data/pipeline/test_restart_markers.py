"""Crops of JPEGs with restart markers, and JPEGs of several scans that are written as one."""

from itertools import pairwise
from struct import pack

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.pipeline.image import jpeg_box
from batchd.data.pipeline.image.geometry import Cut
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.samples.errors import SampleUndecodable
from support.images import (
    JPEG_END,
    JPEG_START,
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
from support.jpeg_boxes import SUBSAMPLINGS, check_that_memory_stays, decoder, extension, where_it_is_built

pytestmark = where_it_is_built
if jpeg_box.IS_BUILT:
    from batchd.data.pipeline.image.jpeg_box import in_one_scan

WIDE = photo(150, 320)
UNDER_THE_MIDDLE = Cut(70, 140, 20, 40)
TILES_444 = jpeg_of(WIDE, "444", restart=8)
"""Tiles of 64 x 8: 5 across, 19 down."""


def one_scan(data):
    """The same file in one scan; None if it is already, or cannot be."""
    view = memoryview(data)
    return in_one_scan(view, probe_image(view))


def whole(data, factor=1, color="rgb"):
    view = memoryview(data)
    return decoder(color).decode_whole(view, probe_image(view), factor).copy()


def cropped(data, box, factor=1, color="rgb"):
    view = memoryview(data)
    return decoder(color).decode(view, probe_image(view), factor, box).copy()


def tiles(data, box, factor=1):
    view = memoryview(data)
    return decoder().tiles(view, probe_image(view), factor, box)


def intervals(data):
    """Begin and end of each restart interval of a file."""
    begin = data.index(b"\xff\xda")
    begin += 2 + int.from_bytes(data[begin + 2 : begin + 4], "big")
    ends = [
        at
        for at in range(begin, len(data) - 1)
        if data[at] == 0xFF and (0xD0 <= data[at + 1] <= 0xD7 or data[at + 1] == 0xD9)
    ]
    return list(pairwise([begin - 2, *ends]))


@st.composite
def jpegs(draw):
    """A JPEG of any subsampling and coding, with restart markers or none, and its size."""
    size = draw(st.integers(17, 150)), draw(st.integers(17, 150))
    image, subsampling = photo(*size, seed=size[0]), draw(st.sampled_from(SUBSAMPLINGS))
    pixels = image[..., 0] if subsampling == "grey" else image
    restart, is_progressive = draw(st.sampled_from([0, 1, 2, 3, 7, 20])), draw(st.booleans())
    return jpeg_of(pixels, subsampling, restart, is_progressive=is_progressive), size


@given(case=jpegs())
def test_one_scan_changes_no_pixel(case):
    """libjpeg-turbo agrees, through two libraries; the result has access points."""
    data, size = case
    is_progressive = b"\xff\xc2" in data

    made = one_scan(data)

    assert (made is not None) == is_progressive
    if made is not None:
        assert np.array_equal(simplejpeg.decode_jpeg(made), simplejpeg.decode_jpeg(data))
        assert np.array_equal(
            cv2.imdecode(np.frombuffer(made, np.uint8), 1), cv2.imdecode(np.frombuffer(data, np.uint8), 1)
        )
        assert one_scan(made) is None
        assert extension.access_points(made, size, 32) is not None


@given(
    case=jpegs(),
    factor=st.sampled_from([1, 1, 2, 4, 8]),
    color=st.sampled_from(["rgb", "bgr", "gray"]),
    data=st.data(),
)
def test_what_is_cut_has_the_pixels_of_the_whole(case, factor, color, data):
    """Crops are equal bit for bit at every scale and tile edge, with any writer's markers."""
    file, size = case
    height, width = (-(-side // factor) for side in size)
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    box = Cut(top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left)))

    expected = whole(file, factor, color)[top : top + box.height, left : left + box.width]

    assert np.array_equal(cropped(file, box, factor, color), expected)


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_every_box_that_begins_or_ends_at_a_tile_is_right(subsampling):
    """Boxes one pixel larger and smaller are right, too.

    Chroma is shared across tiles, so at an edge it must come from the next tile.
    """
    image = photo(70, 200)
    restart = 5 if subsampling in {"444", "440", "grey"} else 1  # rows of 25, 13 or 7 MCUs
    data = jpeg_of(image[..., 0] if subsampling == "grey" else image, subsampling, restart)
    pixels = whole(data)
    for left in (0, 1, 31, 32, 33, 63, 64, 65, 199):
        for right in {left + 1, left + 2, 32, 64, 96, 128, 200} & set(range(left + 1, 201)):
            for top, bottom in ((0, 1), (7, 9), (8, 16), (15, 17), (16, 32), (31, 33), (69, 70)):
                found = cropped(data, Cut(top, left, bottom - top, right - left))
                assert np.array_equal(found, pixels[top:bottom, left:right]), (left, right, top, bottom)


def test_the_tiles_under_the_crop_are_taken_and_no_others():
    """Tiles beside the crop are taken where chroma is shared; a whole picture is not cut."""
    luma_and_chroma = jpeg_of(WIDE, "420", restart=4)  # tiles of 64 x 16: 5 across, 10 down

    assert tiles(luma_and_chroma, UNDER_THE_MIDDLE) == (1 * 2, 50)
    assert tiles(luma_and_chroma, Cut(64, 128, 16, 64)) == (3 * 3, 50)
    assert tiles(TILES_444, Cut(64, 128, 16, 64)) == (1 * 2, 95)
    assert tiles(luma_and_chroma, Cut(35, 70, 10, 20), 2) == (1 * 4, 50)
    assert tiles(luma_and_chroma, Cut(0, 0, 150, 320)) is None
    assert tiles(jpeg_of(WIDE), UNDER_THE_MIDDLE) is None


def test_markers_that_do_not_divide_a_row_give_rows():
    """With 20 MCUs in a row and a marker after every 7 or 40, decoding begins at whole rows.

    It begins at the last row above the box that starts with a marker.
    """
    assert tiles(jpeg_of(WIDE, "420", restart=40), UNDER_THE_MIDDLE) == (1, 5)
    assert tiles(jpeg_of(WIDE, "420", restart=7), Cut(120, 0, 9, 9)) == (6, 29)
    assert tiles(jpeg_of(WIDE, "420", restart=7), UNDER_THE_MIDDLE) is None


def segment(marker, payload):
    return bytes([0xFF, marker]) + pack(">H", len(payload) + 2) + payload


def test_what_applications_wrote_is_kept():
    """EXIF, colour profile and comment stay in their order, and no JFIF marker is added."""
    plain = progressive_jpeg(photo(40, 50))
    profile, comment = segment(0xE2, b"ICC_PROFILE\0\1\1" + b"p" * 60_000), segment(0xFE, b"a comment")
    data = jpeg_with_exif(JPEG_START + profile + comment + plain[20:], 6)

    made = one_scan(data)

    kept = data[: data.index(comment) + len(comment)]
    assert made.startswith(kept)
    assert b"JFIF" not in made
    assert probe_image(memoryview(made))[:5] == probe_image(memoryview(data))[:5]
    assert b"JFIF" in one_scan(plain)


def test_components_that_are_colours_stay_such():
    """Adobe's marker says that the components are colours, without luma."""
    plain = jpeg_of(photo(40, 50), "444", is_progressive=True)
    data = JPEG_START + segment(0xEE, b"Adobe\0\x64\0\0\0\0\0") + plain[20:]

    made = one_scan(data)

    assert np.array_equal(whole(made), whole(data))
    assert not np.array_equal(whole(made), whole(plain))


def without_its_last_scan():
    data = progressive_jpeg(WIDE)
    return data[: data.rindex(b"\xff\xda")] + JPEG_END


@pytest.mark.parametrize(
    "data",
    [
        jpeg_of(WIDE),
        TILES_444,
        encode(WIDE, ".png"),
        cmyk_jpeg((200, 120, 140)),
        ycck_jpeg(np.dstack([WIDE, WIDE[..., 0]])),
        arithmetic_jpeg(),
        jpeg_of(WIDE, is_progressive=True).replace(b"\1\x22\0\2\x11\1\3\x11\1", b"\1\x22\0\2\x12\1\3\x12\1"),
    ],
    ids=["one scan", "restart markers", "PNG", "CMYK", "YCCK", "arithmetic", "tall chroma"],
)
def test_other_files_stay_as_they_are(data):
    """Of arithmetic coding, the extension cannot tell whether it is whole."""
    assert one_scan(data) is None


def test_an_unfinished_file_is_not_rewritten():
    """A decoder guesses missing parts, and would guess differently of the rewritten file."""
    assert extension.transcode(without_its_last_scan(), WIDE.shape[:2]) is None


def test_scans_of_components_become_one():
    """A scan for each component is rewritten as baseline."""
    data = jpeg_by_component(photo(20, 37)[..., 0])
    made = one_scan(data)

    assert made.count(b"\xff\xda") == 1
    assert np.array_equal(whole(made), whole(data))


def test_a_broken_file_stays_as_it_is():
    """The file has a hole, too many scans, or another size than the caller expects."""
    data = progressive_jpeg(WIDE)
    scan = data.rindex(b"\xff\xda") + 14
    hole = memoryview(data[: scan + 20] + JPEG_END)

    assert in_one_scan(hole, probe_image(hole)) is None
    with pytest.raises(extension.JpegError, match="premature end"):
        extension.transcode(hole, (150, 320))
    with pytest.raises(extension.JpegError, match="more than 200 scans"):
        extension.transcode(jpeg_by_component(photo(16, 16)[..., 0], 250), (16, 16))
    assert extension.transcode(data, (150, 319)) is None


def test_a_part_that_is_too_short_is_found_by_the_crops_that_need_it():
    """Crops that do not need the part do not read it, however short it is."""
    data = TILES_444
    begin, end = intervals(data)[8 * 5 + 2]  # row 8 of blocks, the tile in the middle
    for missing in range(1, end - begin - 2):
        broken = data[: end - missing] + data[end:]
        with pytest.raises(SampleUndecodable, match="broken JPEG"):
            cropped(broken, Cut(64, 128, 16, 64))
        assert np.array_equal(cropped(broken, Cut(80, 128, 16, 64)), whole(data)[80:96, 128:192])
        assert np.array_equal(cropped(broken, Cut(64, 64, 8, 64)), whole(data)[64:72, 64:128])


def test_markers_out_of_their_order_are_read_as_they_were_before():
    """Such a file is not cut, so it is as broken, or as whole, as without the check."""
    data = bytearray(TILES_444)
    below = intervals(bytes(data))[-2][1] + 1
    data[below] ^= 1
    assert np.array_equal(cropped(data, UNDER_THE_MIDDLE), whole(TILES_444)[70:90, 140:180])

    above = intervals(bytes(data))[3][1] + 1
    data[above] ^= 1

    assert tiles(data, UNDER_THE_MIDDLE) is None
    with pytest.raises(SampleUndecodable, match="broken JPEG"):
        cropped(data, UNDER_THE_MIDDLE)


def test_bytes_that_decoders_skip_are_skipped():
    """Fill bytes in front of markers are skipped.

    Other bytes there are left over, so what is in front of them was decoded wrongly.
    """
    data = TILES_444
    _begin, end = intervals(data)[40]
    expected = whole(data)[60:80, 0:100]
    for extra in (b"\xff\xff", b"\xff" * 20):
        assert np.array_equal(cropped(data[:end] + extra + data[end:], Cut(60, 0, 20, 100)), expected)
    for extra in (b"\0\0\0", b"\x12" * 20):
        with pytest.raises(SampleUndecodable, match="extraneous bytes before marker"):
            cropped(data[:end] + extra + data[end:], Cut(60, 0, 20, 100))


def test_zeros_in_front_of_a_restart_marker_are_damage_to_every_crop_that_reads_them():
    """Zeros are valid padding at the end of the file only, not at the end of a cut."""
    data = TILES_444
    box = Cut(64, 140, 16, 40)  # its last row is the last of its blocks
    taken, _all = tiles(data, box)
    refused = 0
    for _begin, end in intervals(data)[:-1]:
        try:
            cropped(data[:end] + bytes(20) + data[end:], box)
        except SampleUndecodable:
            refused += 1

    assert refused == taken


def test_a_restart_interval_of_any_length_does_no_harm():
    """Where header and markers disagree, a crop gives the right pixels or a reason."""
    data = TILES_444
    at = data.index(b"\xff\xdd\0\4") + 4
    outcomes = set()
    for interval in (0, 1, 2, 4, 5, 7, 10, 40, 41, 80, 65_535):
        lying = data[:at] + pack(">H", interval) + data[at + 2 :]
        try:
            outcomes.add(bool(cropped(lying, UNDER_THE_MIDDLE).any()))
        except SampleUndecodable:
            outcomes.add("reason")

    assert "reason" in outcomes


@pytest.mark.thorough
def test_flipped_bytes_give_pixels_or_a_reason():
    """Any byte of header or data may change, with any box: the process survives."""
    random = np.random.default_rng(3)
    files = jpeg_of(WIDE, restart=4), jpeg_of(WIDE, is_progressive=True)
    outcomes = set()
    for number in range(2000):
        broken = bytearray(files[number % 2])
        for _ in range(random.integers(1, 4)):
            broken[random.integers(2, len(broken) if random.integers(2) else 700)] = random.integers(256)
        top, left = int(random.integers(150)), int(random.integers(320))
        box = (top, left, int(random.integers(1, 151 - top)), int(random.integers(1, 321 - left)))
        for call in (
            lambda broken=broken, box=box: extension.decode(broken, bytearray(200_000), "rgb", 8, (150, 320), box),
            lambda broken=broken: extension.transcode(broken, (150, 320)),
        ):
            try:
                outcomes.add(call() is None)
            except extension.JpegError:
                outcomes.add("reason")

    assert outcomes == {True, False, "reason"}


def test_a_box_is_checked_before_anything_is_cut():
    """A wrong box is the caller's mistake, not the file's."""
    data = jpeg_of(WIDE, restart=4)

    with pytest.raises(ValueError, match="the box is empty, or reaches out"):
        extension.tiles(data, 8, (150, 320), (140, 0, 11, 5))
    with pytest.raises(ValueError, match="1, 2, 4 or 8 eighths, not 3"):
        extension.tiles(data, 3, (150, 320), (0, 0, 1, 1))
    with pytest.raises(ValueError, match="need more than the buffer's 100 bytes"):
        extension.decode(data, bytearray(100), "rgb", 8, (150, 320), UNDER_THE_MIDDLE)


@pytest.mark.slow
def test_many_calls_leave_no_memory_behind():
    """The calls cut files, meet files that are broken at the cut, and rewrite files."""
    size, memory = (32, 96), bytearray(20_000)
    data = jpeg_of(photo(*size), "444", restart=1)
    _begin, end = intervals(data)[14]
    broken = data[: end - 4] + data[end:]
    scans = progressive_jpeg(photo(*size))
    hole = scans[: scans.rindex(b"\xff\xda") + 20] + JPEG_END

    def many(calls):
        for _ in range(calls // 4):
            extension.decode(data, memory, "rgb", 8, size, (8, 8, 9, 9))
            extension.transcode(scans, size)
            with pytest.raises(extension.JpegError):
                extension.decode(broken, memory, "rgb", 8, size, (8, 16, 8, 8))
            with pytest.raises(extension.JpegError):
                extension.transcode(hole, size)

    check_that_memory_stays(many, 200_000)
