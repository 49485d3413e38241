"""The header page of a slot, and checksums of its rows. Every process; standard library only.

All numbers are little-endian:

       0                8               16               24               32
       +----------------+---------------+----------------+----------------+
       | magic BATCHD01 | generation    | slot id        | epoch          |
       +----------------+---------------+----------------+----------------+
    32 | step           | sample count  | payload bytes  | 0              |
       +----------------+---------------+----------------+----------------+
    64 | zeros up to 4096, where the first field starts                   |
       +------------------------------------------------------------------+

Only the daemon writes the header, with ``pwrite``: it maps nothing. Only workers write the fields,
each worker the rows of its chunk.

A stream with ``verify = true`` has a further field with a checksum of each row. The worker writes
it, the trainer compares it:

    row i of   | image | label | index | valid |  ->  CRC-32 of these bytes, in this order
                                                  ->  row i of "#crc32"

The sum of several rows is the CRC-32 of their bytes, one row after the other.

So checksums travel as their rows do, and it makes no difference how many workers filled a batch, or
which ranks share it. The sum is zlib's CRC-32 (ISO 3309, ITU-T V.42).

Invariant: ``generation`` is 0 from the moment a slot is taken for filling until every chunk of it
is done; then it is the number that the handle names. So a reader that finds its handle's generation
has one whole batch. Generations of a slot only grow, and none is given twice.
"""

import zlib
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from batchd_wire.fields import CHECKSUM, SlotLayout

MAGIC = b"BATCHD01"
"""Format and version; a different layout gets a different magic."""

_HEADER = Struct("<8sQQQQQQQ")
_MAGIC_AND_GENERATION = Struct("<8sQ")
SLOT_HEADER_BYTES = _HEADER.size
assert SLOT_HEADER_BYTES == 64  # noqa: PLR2004  as drawn above

UNFINISHED = 0
"""The generation of a slot that is being filled."""
UNFINISHED_MARK = _MAGIC_AND_GENERATION.pack(MAGIC, UNFINISHED)
"""What makes a header unfinished, whatever is behind it."""


class SlotHeader(NamedTuple):
    """A slot's header. ``samples``: rows of the batch; ``payload_bytes``: behind this page."""

    generation: int
    slot: int
    epoch: int
    step: int
    samples: int
    payload_bytes: int

    def pack(self) -> bytes:
        """Encode the header for its place in memory."""
        return _HEADER.pack(MAGIC, *self, 0)


def unpack_header(page: bytes | memoryview) -> SlotHeader:
    """Decode a header. Raises ``ValueError`` if it does not start with this version's magic."""
    magic, *numbers, _zero = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise ValueError(f"not a slot of this version: it starts with {magic!r} instead of {MAGIC!r}")
    return SlotHeader(*numbers)


def holds_generation(page: bytes | memoryview, generation: int) -> bool:
    """True if the slot holds the whole batch that ``generation`` names; takes below 1 us."""
    return _MAGIC_AND_GENERATION.unpack_from(page) == (MAGIC, generation)


_CRC32 = Struct("<I")


class RowChecksums:
    """Writes and compares row checksums of slots; nothing if ``layout`` has no field for them."""

    __slots__ = ("_covered", "_sums")

    def __init__(self, layout: SlotLayout) -> None:
        self._covered = [(field.offset, field.row_bytes) for field in layout.sample_fields]
        self._sums = next((field.offset for field in layout.fields if field.name == CHECKSUM.name), None)

    def write(self, page: memoryview, *rows: int) -> None:
        """Write the checksums of complete rows of the slot mapped by ``page``."""
        if self._sums is not None:
            for row in rows:
                _CRC32.pack_into(page, self._sums + row * _CRC32.size, self._of(page, row))

    def wrong_rows(self, page: memoryview, first: int, count: int) -> list[int]:
        """List the rows of ``first`` to ``first + count`` that differ from their checksums."""
        if self._sums is None:
            return []
        noted = page[self._sums : self._sums + (first + count) * _CRC32.size]
        return [
            row
            for row in range(first, first + count)
            if _CRC32.unpack_from(noted, row * _CRC32.size)[0] != self._of(page, row)
        ]

    def _of(self, page: memoryview, row: int) -> int:
        return rows_crc32(page, self._covered, range(row, row + 1))


def rows_crc32(page: memoryview, covered: Sequence[tuple[int, int]], rows: range) -> int:
    """CRC-32 of ``rows`` of a slot. ``covered``: (first byte, bytes of a row) of each field."""
    crc = 0
    for row in rows:
        for offset, row_bytes in covered:
            start = offset + row * row_bytes
            crc = zlib.crc32(page[start : start + row_bytes], crc)
    return crc
