"""The orientation in an EXIF block, and what it means. Worker process; standard library only.

A block that is broken, or says nothing, or says something that is no orientation, means 1
(upright): viewers do the same, and a bad tag does not make a bad image.
"""

from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from struct import unpack_from

EXIF_PREFIX = b"Exif\0\0"
ENTRIES_MAX = 512
"""Entries of the first directory that are looked at. Cameras write about a dozen."""

_ORIENTATION_TAG, _SHORT, _ENTRY_BYTES = 0x0112, 3, 12
_ORIENTATIONS = range(1, 9)


def exif_payload_orientation(payload: memoryview) -> int:
    """Read the orientation (1 to 8) of an APP1 segment's payload, or 0 where it is no EXIF block."""
    return exif_orientation(payload[len(EXIF_PREFIX) :]) if payload[: len(EXIF_PREFIX)] == EXIF_PREFIX else 0


def exif_orientation(block: memoryview) -> int:
    """Read the orientation (1 to 8) of an EXIF block, which is laid out as a TIFF file; 1 where it has none."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(block[:2]))
    if order is None:
        return 1
    try:
        directory = int(unpack_from(f"{order}I", block, 4)[0])
        entries = int(unpack_from(f"{order}H", block, directory)[0])
        for index in range(min(entries, ENTRIES_MAX)):
            tag, kind, _count, value = unpack_from(f"{order}HHIH", block, directory + 2 + index * _ENTRY_BYTES)
            if tag == _ORIENTATION_TAG:
                return value if kind == _SHORT and value in _ORIENTATIONS else 1
    except StructError:
        return 1
    return 1
