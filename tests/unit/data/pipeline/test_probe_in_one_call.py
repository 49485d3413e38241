"""The extension's answer about a file is that of ``probe_image``, or none."""

from struct import pack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.pipeline.image import jpeg_box
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.samples.errors import SampleUndecodable
from support.images import (
    JPEG_END,
    arithmetic_jpeg,
    encode,
    jpeg,
    jpeg_announcing,
    jpeg_by_component,
    jpeg_of,
    jpeg_with_exif,
    photo,
    progressive_jpeg,
    ycck_jpeg,
)
from support.jpeg_boxes import SUBSAMPLINGS, extension, where_it_is_built

pytestmark = where_it_is_built
IMAGE = photo(40, 56)
PLAIN = jpeg(IMAGE)


def exif(order: str, entries: list[tuple[int, int, int]], directory: int = 8) -> bytes:
    """A block of EXIF with these (tag, kind, value), in the byte order "<" or ">"."""
    block = (b"II" if order == "<" else b"MM") + pack(f"{order}HI", 42, directory) + bytes(directory - 8)
    block += pack(f"{order}H", len(entries))
    return block + b"".join(pack(f"{order}HHIHH", tag, kind, 1, value, 0) for tag, kind, value in entries)


def with_segment(kind: int, content: bytes, data: bytes = PLAIN) -> bytes:
    """The file with a segment more at its start."""
    return data[:2] + bytes([0xFF, kind]) + pack(">H", len(content) + 2) + content + data[2:]


def with_block(block: bytes) -> bytes:
    return with_segment(0xE1, b"Exif\0\0" + block)


USUAL = {
    **{sampling: jpeg_of(IMAGE[..., 0] if sampling == "grey" else IMAGE, sampling) for sampling in SUBSAMPLINGS},
    "restart markers": jpeg_of(IMAGE, restart=2),
    "inks": ycck_jpeg(np.dstack([IMAGE, IMAGE[..., 0]])),
    **{f"orientation {number}": jpeg_with_exif(PLAIN, number) for number in range(1, 9)},
    "other tags": with_block(exif("<", [(1, 3, 5), (0x0112, 3, 6), (0x0112, 3, 2)])),
    "big-endian": with_block(exif(">", [(0x0112, 3, 7)], 30)),
    "two blocks": with_segment(0xE1, b"Exif\0\0" + exif("<", []), jpeg_with_exif(PLAIN, 5)),
    "no orientation": with_block(exif(">", [(1, 3, 5)])),
    "a wrong kind": with_block(exif("<", [(0x0112, 4, 5)])),
    "an unknown turn": with_block(exif("<", [(0x0112, 3, 9)])),
    "a block that is cut": with_block(exif("<", [(1, 3, 5), (0x0112, 3, 6)])[:-4]),
    "entries that are missing": with_block(exif("<", [(1, 3, 5)])[:8] + b"\x09\x00"),
    "a directory outside": with_block(exif("<", [(0x0112, 3, 6)])[:4] + b"\xff" * 6),
    "a short block": with_block(b"II*\0"),
    "no byte order": with_block(b"IM*\0\x08\0\0\0\0\0"),
    "another APP1": with_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"),
    "a comment": with_segment(0xFE, b"\xff\xd9\xff\xc0"),
}
UNUSUAL = {
    "progressive": progressive_jpeg(IMAGE),
    "arithmetic": arithmetic_jpeg(),
    "several scans": jpeg_by_component(photo(16, 16)[..., 0], 3),
    "a padded end": PLAIN + b"\0",
    "no end": PLAIN[:-2],
    "fill bytes": PLAIN[:2] + b"\xff\xff" + PLAIN[2:],
    "bytes between segments": PLAIN[:2] + b"\0\0" + PLAIN[2:],
    "two frames": with_segment(0xC0, b"\x08\0\x10\0\x10\x01\x01\x11\0"),
    "no size": jpeg_announcing(PLAIN, 0, 56),
    "too many segments": PLAIN[:2] + b"\xff\xfe\0\x03." * 101 + PLAIN[2:],
    "a header alone": PLAIN[: PLAIN.index(b"\xff\xda")] + JPEG_END,
    "nothing": b"",
    "a PNG": encode(IMAGE, ".png"),
    "two bytes": b"\xff\xd8",
}


def by_python(data):
    """The header, or None for a file that is refused."""
    try:
        return tuple(probe_image(memoryview(data)))
    except SampleUndecodable:
        return None


@pytest.mark.parametrize("data", USUAL.values(), ids=USUAL)
def test_a_usual_file_has_the_same_header(data):
    assert extension.probe(data) == by_python(data)
    assert extension.probe(data) is not None


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_file_is_left_to_python(data):
    assert extension.probe(data) is None


@given(data=st.sampled_from([*USUAL.values(), *UNUSUAL.values()]), random=st.randoms(use_true_random=False))
def test_a_broken_file_has_the_same_header_or_none(data, random):
    """Bytes of the header are changed, left out or repeated; Python gives the same answer."""
    broken = bytearray(data)
    for _ in range(random.randint(1, 4)):
        place, kind = random.randrange(min(len(broken), 700) + 1), random.randrange(4)
        if kind == 0:
            broken[place : place + 1] = bytes(
                [random.choice([0, 1, 2, 0xC0, 0xC1, 0xDA, 0xE1, 0xFF, random.randrange(256)])]
            )
        elif kind == 1:
            del broken[place : place + random.randint(1, 20)]
        elif kind == 2:
            broken[place:place] = broken[place : place + random.randint(1, 20)]
        else:
            del broken[random.randrange(len(broken) + 1) :]
    assert extension.probe(broken) in {None, by_python(broken)}


def test_both_ways_are_one_for_the_pipeline(monkeypatch):
    """Without the extension the header is the same, and a bad file has the same reason."""
    for is_built in (True, False):
        monkeypatch.setattr(jpeg_box, "IS_BUILT", is_built)
        for data in (*USUAL.values(), UNUSUAL["progressive"], UNUSUAL["a PNG"]):
            assert jpeg_box.probe_file(memoryview(data)) == probe_image(memoryview(data))
        with pytest.raises(SampleUndecodable, match=f"truncated: a JPEG of {len(PLAIN) - 2} bytes without an end mark"):
            jpeg_box.probe_file(memoryview(PLAIN[:-2]))
