"""Photographs with damage inside of their image data.

A file with a libjpeg warning is a bad sample with every decoder.
"""

import re

import numpy as np
import pytest
import simplejpeg

from batchd.data.pipeline.image import decode, jpeg_box
from batchd.data.pipeline.image.geometry import Cut
from batchd.data.pipeline.image.jpeg_box import in_one_scan
from batchd.data.pipeline.image.opencv import Scratch
from batchd.data.pipeline.image.options import CenterCrop, Decode, Resize
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.samples.errors import SampleUndecodable
from support.arithmetic_jpegs import ARITHMETIC_JPEGS
from support.images import JPEG_END, jpeg, jpeg_of, jpeg_of_sampling, photo, ycck_jpeg
from support.jpeg_boxes import SUBSAMPLINGS
from support.pipelines import run_once

HEIGHT, WIDTH = 120, 160
WHOLE = [Decode(scale="off"), Resize(size=(HEIGHT, WIDTH), interpolation="nearest")]
PHOTOS = 60
needs_extension = pytest.mark.skipif(not jpeg_box.IS_BUILT, reason="the extension was not built")


KINDS = {
    "baseline": jpeg,
    "restart markers": lambda image: jpeg_of(image, restart=4),
    "progressive": lambda image: jpeg_of(image, is_progressive=True),
    "tiles": lambda image: jpeg_of(image, restart=5),
}


def damaged(data, random):
    """Flip a bit, remove bytes, or insert some, at a random place in the image data."""
    scan = data.rindex(b"\xff\xda") + 14
    place = int(random.integers(scan, len(data) - 60))
    kind = random.integers(3)
    if kind == 0:
        return data[:place] + bytes([data[place] ^ 1 << int(random.integers(8))]) + data[place + 1 :]
    if kind == 1:
        return data[:place] + data[place + int(random.integers(1, 50)) :]
    return data[:place] + bytes(random.integers(0, 255, 20, dtype=np.uint8)) + data[place:]


def warning(data):
    """Return libjpeg's warning about a file."""
    try:
        simplejpeg.decode_jpeg(data, "RGB")
    except ValueError as error:
        return str(error)
    return None


def outcome(data):
    """Return the image as bytes, or None for a bad sample."""
    try:
        return run_once(WHOLE, data).tobytes()
    except SampleUndecodable:
        return None


@pytest.mark.thorough(after_first=True)
@needs_extension
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_a_libjpeg_warning_is_a_bad_sample_on_every_path(kind, monkeypatch):
    """Sixty photographs: served ones use all bytes of their scans, and both decoders agree."""
    random = np.random.default_rng(4)
    files = [damaged(KINDS[kind](photo(HEIGHT, WIDTH, number)), random) for number in range(PHOTOS)]
    warned = [warning(data) for data in files]
    by_boxes = [outcome(data) for data in files]
    monkeypatch.setattr(jpeg_box, "IS_BUILT", False)
    by_simplejpeg = [outcome(data) for data in files]

    assert [why for why, image in zip(warned, by_boxes, strict=True) if why and image] == []
    assert [why for why, image in zip(warned, by_simplejpeg, strict=True) if why and image] == []
    assert by_boxes == by_simplejpeg
    assert sum("extraneous bytes" in (why or "") for why in warned) >= 5


PATHS = {"boxes": (), "simplejpeg": ("IS_BUILT",), "cv2": ("IS_BUILT", "simplejpeg")}
"""For each decoder, the modules that must be missing for its use."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_belong_to_no_scan_are_harmless(path, kind, monkeypatch):
    """The bytes are after the end, fill bytes before markers, or between the header's segments."""
    data = KINDS[kind](photo(HEIGHT, WIDTH))
    for name in PATHS[path]:
        monkeypatch.setattr(jpeg_box if name == "IS_BUILT" else decode, name, None)
    whole = outcome(data)
    table = data.index(b"\xff\xdb")
    filled = data.replace(b"\xff\xd0", b"\xff\xff\xff\xff\xd0")

    assert whole is not None
    assert outcome(data + b"\0garbage\xff" * 20) == whole
    assert outcome(data[:-2] + b"\xff" * 9 + JPEG_END) == whole
    assert outcome(filled) == whole
    assert outcome(data[:table] + b"\0junk" + data[table:]) == whole


PADDED = KINDS | {
    "grey": lambda image: jpeg(image[..., 0]),
    "inks": lambda image: ycck_jpeg(np.dstack([image, image[..., :1]])),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", PADDED)
def test_padding_after_the_last_block_is_harmless(path, kind, monkeypatch):
    """Webcams and cameras write zeros or fill bytes before the end.

    Trailers and previews have no effect.
    """
    data = PADDED[kind](photo(HEIGHT, WIDTH))
    for name in PATHS[path]:
        monkeypatch.setattr(jpeg_box if name == "IS_BUILT" else decode, name, None)
    preview = b"\xff\xe1\0\x0e" + bytes(8) + b"\xff\0" + JPEG_END
    whole = outcome(data)

    assert whole is not None
    for padding in (b"\0", b"\0\0", b"\0" * 7, b"\0" * 100, b"\xff" * 3 + b"\0" * 9, b"\0" * 9 + b"\xff" * 3):
        padded = data[:-2] + padding + JPEG_END
        assert outcome(padded) == whole
        assert outcome(padded + data[:-2] + b"junk" * 9 + JPEG_END) == whole
        assert outcome(padded[:2] + preview + padded[2:]) == whole


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_other_bytes_after_the_last_block_are_damage(path, kind, monkeypatch):
    """This holds with zeros around them, and if the last blocks were decoded from zeros."""
    data = KINDS[kind](photo(HEIGHT, WIDTH))
    for name in PATHS[path]:
        monkeypatch.setattr(jpeg_box if name == "IS_BUILT" else decode, name, None)

    for left in (b"\x11" * 20 + bytes(20), bytes(20) + b"\x11", bytes(20) + b"\x11" + bytes(20), b"\x11" * 20):
        assert outcome(data[:-2] + left + JPEG_END) is None
    assert outcome(data[:-60] + bytes(5000) + JPEG_END) is None


UNUSUAL = {
    "4:1:0": jpeg_of_sampling(photo(HEIGHT, WIDTH), 4, 2),
    "4:1:1": jpeg_of_sampling(photo(HEIGHT, WIDTH), 4, 1),
    "4:4:0": jpeg_of_sampling(photo(HEIGHT, WIDTH), 1, 2),
    "a fourth of the rows": jpeg_of_sampling(photo(HEIGHT, WIDTH), 1, 4),
    "a third of the columns": jpeg_of_sampling(photo(HEIGHT, WIDTH), 3, 1),
    "inks": ycck_jpeg(np.dstack([photo(HEIGHT, WIDTH), photo(HEIGHT, WIDTH)[..., :1]])),
    "progressive 4:1:1": jpeg_of(photo(HEIGHT, WIDTH), "411", is_progressive=True),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_damaged_file_of_an_unusual_kind_is_a_bad_sample_on_every_path(path, kind, monkeypatch, capfd):
    """Libjpeg invents what is missing, and tells so by a line on standard error alone.

    None of its lines reaches the log.
    """
    data = UNUSUAL[kind]
    for name in PATHS[path]:
        monkeypatch.setattr(jpeg_box if name == "IS_BUILT" else decode, name, None)
    scan = data.rindex(b"\xff\xda")
    middle = scan + (len(data) - scan) // 2

    assert outcome(data) is not None
    assert outcome(data[:middle] + JPEG_END) is None
    assert outcome(data[:middle] + data[middle + (len(data) - middle) // 2 :]) is None
    if data.count(b"\xff\xda") == 3:
        assert outcome(data[:scan] + JPEG_END) is None, "a component has no scan"
    assert capfd.readouterr().err == ""


SMALL = photo(40, 56)
CUT = {
    **{
        f"{sampling}{' progressive' * is_progressive}{' restart' * bool(restart)}": jpeg_of(
            SMALL[..., 0] if sampling == "grey" else SMALL, sampling, restart, is_progressive=is_progressive
        )
        for sampling in SUBSAMPLINGS
        for is_progressive in (False, True)
        for restart in (0, 2)
    },
    "4:1:0 by component": jpeg_of_sampling(SMALL, 4, 2),
    "inks": ycck_jpeg(np.dstack([SMALL, SMALL[..., :1]])),
    **{f"arithmetic {kind}": data for kind, data in ARITHMETIC_JPEGS.items()},
}
ARITHMETIC_BYTES_UNKNOWN = 40
"""What may be missing in front of an end mark: 24 bytes that are read behind the end, and some."""


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", CUT)
def test_a_file_that_breaks_off_is_a_bad_sample_on_every_path(path, kind, monkeypatch):
    """Also between two scans or segments, and with an end mark put behind what is left."""
    data = CUT[kind]
    for name in PATHS[path]:
        monkeypatch.setattr(jpeg_box if name == "IS_BUILT" else decode, name, None)
    whole, scan = outcome(data), data.index(b"\xff\xda")
    boundaries = [scan + mark.start() for mark in re.finditer(rb"\xff[^\0]", data[scan:])]
    unknown = ARITHMETIC_BYTES_UNKNOWN if "arithmetic" in kind else 0

    assert whole is not None
    for end in sorted({*boundaries, *(boundary - 1 for boundary in boundaries), *range(scan, len(data) - 2, 23)}):
        assert outcome(data[:end]) is None
        with_end = outcome(data[:end] + JPEG_END)
        assert with_end is None or with_end == whole or end >= len(data) - 2 - unknown, f"cut at {end} of {len(data)}"


def with_odd_numbers(data):
    """Announce fewer coefficients than a sequential scan has, and an unknown transform of colours.

    libjpeg mentions the first of both, and nothing that comes later.
    """
    odd = bytearray(data)
    for mark in re.finditer(rb"\xff\xda", data):
        odd[mark.start() + 5 + 2 * data[mark.start() + 4] + 1] = 0
    if (adobe := data.find(b"Adobe")) >= 0:
        odd[adobe + 11] = 9
    return bytes(odd)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["420", "4:1:0 by component", "inks", "arithmetic 444 restart"])
def test_odd_numbers_in_a_file_hide_no_damage(path, kind, monkeypatch):
    """A file with them has the pixels that it has without, and is a bad sample if it breaks off."""
    data = with_odd_numbers(CUT[kind])
    for name in PATHS[path]:
        monkeypatch.setattr(jpeg_box if name == "IS_BUILT" else decode, name, None)

    assert data != CUT[kind]
    assert outcome(data) == outcome(CUT[kind])
    assert outcome(data[:-60] + JPEG_END) is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["420", "420 progressive", "inks", "arithmetic 444 restart"])
@pytest.mark.parametrize(
    "segment",
    [
        b"\xff\xda",
        b"\xff\xda\x00\x02",
        b"\xff\xda\xff\xff\xff",
        b"\xff\xee\x00\x0cAdobe",
        b"\xff\xee\x00\x0eAdobe\x00d",
    ],
)
def test_a_segment_that_breaks_off_in_a_damaged_file_makes_a_bad_sample(path, kind, segment, monkeypatch):
    """No number is looked for behind the end of the file."""
    for name in PATHS[path]:
        monkeypatch.setattr(jpeg_box if name == "IS_BUILT" else decode, name, None)

    for cut in (60, 200):
        assert outcome(CUT[kind][:-cut] + segment + JPEG_END) is None


@needs_extension
@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_harmless_to_every_crop_and_to_transcoding(kind):
    """A sample that is good in one epoch is good in the next."""
    data = KINDS[kind](photo(HEIGHT, WIDTH))
    padded = data[:-2] + bytes(100) + JPEG_END
    header = probe_image(memoryview(padded))
    decoder = decode.Decoder(Decode(scale="off"), Scratch())
    for box in [
        Cut(0, 0, HEIGHT - 1, WIDTH),
        Cut(0, 0, HEIGHT, WIDTH),
        Cut(90, 100, 30, 60),
        Cut(90, 0, 30, 20),
        Cut(0, 0, 9, 9),
    ]:
        expected = decoder.decode(memoryview(data), header, 1, box).copy()
        assert np.array_equal(decoder.decode(memoryview(padded), header, 1, box), expected)
    assert outcome(in_one_scan(memoryview(padded), header) or padded) == outcome(data)


@needs_extension
def test_a_crop_is_refused_if_its_tile_has_leftover_bytes():
    """The whole file is refused as well; a crop beside the damage is served."""
    data = jpeg_of(photo(HEIGHT, 640), restart=4)
    parts = data[data.rindex(b"\xff\xda") :].split(b"\xff")
    middle = len(parts) // 2
    place = data.rindex(b"\xff\xda") + len(b"\xff".join(parts[:middle]))
    broken = data[:place] + b"\x11" * 20 + data[place:]

    assert warning(broken) is not None
    with pytest.raises(SampleUndecodable, match="a broken JPEG"):
        run_once([Decode(scale="off"), CenterCrop(size=(HEIGHT, 640))], broken)
