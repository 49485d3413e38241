"""Where the image data of a JPEG end, and what an encoder padded them with. Worker process; standard library only.

    scan, segments, scan, ... | padding | end mark | trailers: a video, further pictures, previews

Invariant: the bytes behind the end mark are never looked at.
"""

import re
from collections.abc import Iterator

from batchd.samples.errors import SampleUndecodable

JPEG_SEGMENTS_MAX = 2_000
"""Segments in front of the image data, and in these. An EXIF block with a preview, cut into 64 KiB segments, has a few dozen."""

_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_WITH_LENGTH = 0xC0
ZEROS_MAX = 9
"""Zeros in front of those that libjpeg counts: it reads 7 bytes ahead and forgets them, and an intact scan may end in 2."""
_BEFORE_MAX = 64
"""Bytes of the image data themselves that look like padding, and those that libjpeg forgets."""


def scan_markers(data: memoryview, scan: int) -> Iterator[tuple[int, int]]:
    """Give the markers from the first start of scan up to and with the end mark, as libjpeg finds them: where, and which.

    Raises ``SampleUndecodable`` where there are too many.
    """
    position = scan
    for _ in range(JPEG_SEGMENTS_MAX):
        found = _MARKER.search(data, position)
        if found is None:
            return
        position = found.start()
        marker = data[position + 1]
        yield position, marker
        if marker == _END_OF_IMAGE:
            return
        position += 2
        if marker >= _WITH_LENGTH:
            position += int.from_bytes(data[position : position + 2])
    raise SampleUndecodable(f"a JPEG with more than {JPEG_SEGMENTS_MAX} segments in its image data")


def without_padding(data: memoryview, scan: int, discarded: int) -> bytes | None:
    """Take out the zeros and fill bytes in front of the end mark of which libjpeg says that it ``discarded`` so many.

    None: other bytes are among them, or blocks were decoded from zeros, which stand for what is
    lost. ``is_padding`` in ``_jpeg.c`` has the same rule: libjpeg counts fill bytes only in front
    of a zero, and then one of them.
    """
    end = next((place for place, marker in scan_markers(data, scan) if marker == _END_OF_IMAGE), scan)
    file = bytes(data[:end])
    begin = len(file.rstrip(b"\0\xff"))
    before = file.count(b"\0", begin) + file.count(b"\xff\0", begin) - discarded
    if not 0 <= before <= _BEFORE_MAX:
        return None
    while before > 0:
        pair = file[begin : begin + 2]
        before -= 2 if pair == b"\xff\0" else 1 if pair[:1] == b"\0" else 0
        begin += 2 if pair == b"\xff\0" else 1
    return None if file[:begin].endswith(bytes(ZEROS_MAX + 1)) else file[:begin] + bytes(data[end:])
