"""Checksums of a stream with ``verify = true``: one for each row, by the worker, for the trainer. Standard library only.

    row i of   | image | label | index | valid |  ->  CRC-32 over these bytes, in this order  ->  row i of "#crc32"

They lie in the slot as a field of their own, so they travel the same way as the rows that they
vouch for, and it makes no difference how many workers filled a batch, and which of its rows went to
whom. The sum is the CRC-32 of zlib (ISO 3309, ITU-T V.42), little-endian.
"""

import zlib
from struct import Struct

from batchd_wire.fields import CHECKSUM, SlotLayout

_CRC32 = Struct("<I")


class RowChecksums:
    """Writes and compares the checksums of slots with this layout; one without checksums has nothing to compare."""

    __slots__ = ("_covered", "_sums")

    def __init__(self, layout: SlotLayout) -> None:
        self._covered = [(field.offset, field.row_bytes) for field in layout.sample_fields]
        self._sums = next((field.offset for field in layout.fields if field.name == CHECKSUM.name), None)

    def write(self, page: memoryview, row: int) -> None:
        """Note the checksum of a row that is complete."""
        if self._sums is not None:
            _CRC32.pack_into(page, self._sums + row * _CRC32.size, self._of(page, row))

    def wrong_rows(self, page: memoryview, first: int, count: int) -> list[int]:
        """Which of the rows from ``first`` on are not what the worker wrote."""
        if self._sums is None:
            return []
        noted = page[self._sums : self._sums + (first + count) * _CRC32.size]
        return [
            row
            for row in range(first, first + count)
            if _CRC32.unpack_from(noted, row * _CRC32.size)[0] != self._of(page, row)
        ]

    def _of(self, page: memoryview, row: int) -> int:
        crc = 0
        for offset, row_bytes in self._covered:
            start = offset + row * row_bytes
            crc = zlib.crc32(page[start : start + row_bytes], crc)
        return crc
