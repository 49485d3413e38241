"""The header page of a slot. Every process; standard library only. All numbers little-endian.

       0                8               16               24               32
       +----------------+---------------+----------------+----------------+
       | magic BATCHD01 | generation    | slot id        | epoch          |
       +----------------+---------------+----------------+----------------+
    32 | step           | sample count  | payload bytes  | 0              |
       +----------------+---------------+----------------+----------------+
    64 | zeros up to 4096, where the first field starts                   |
       +------------------------------------------------------------------+

The daemon is the only writer of the header, and no worker ever touches it; workers are the only
writers of the fields, each of the rows in its chunk. The daemon writes with ``pwrite`` and maps
nothing.

Invariant: ``generation`` is 0 from the moment a slot is taken for filling until every chunk of it
is done, and is then the number that the handle names. So a reader that finds its handle's
generation has one whole batch in front of it. The generation never goes down, and is never given
twice for one slot.
"""

from dataclasses import dataclass
from struct import Struct

MAGIC = b"BATCHD01"
"""Names the format and its version; another layout gets another magic."""

_HEADER = Struct("<8sQQQQQQQ")
_MAGIC_AND_GENERATION = Struct("<8sQ")
SLOT_HEADER_BYTES = _HEADER.size
assert SLOT_HEADER_BYTES == 64  # noqa: PLR2004  as drawn above

UNFINISHED = 0
"""The generation of a slot that is being filled."""


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What the header page says of the batch in the slot."""

    generation: int
    slot: int
    epoch: int
    step: int
    samples: int
    payload_bytes: int

    def pack(self) -> bytes:
        """The header as it lies in memory."""
        return _HEADER.pack(
            MAGIC,
            self.generation,
            self.slot,
            self.epoch,
            self.step,
            self.samples,
            self.payload_bytes,
            0,
        )


def unpack_header(page: bytes | memoryview) -> SlotHeader:
    """Read a header. Raises ``ValueError`` where the page does not start with this version's magic."""
    magic, *numbers, _zero = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise ValueError(f"not a slot of this version: it starts with {magic!r} instead of {MAGIC!r}")
    return SlotHeader(*numbers)


def holds_generation(page: bytes | memoryview, generation: int) -> bool:
    """Tell whether the slot is whole and is the one that a handle with ``generation`` names. Costs less than a microsecond."""
    return _MAGIC_AND_GENERATION.unpack_from(page) == (MAGIC, generation)
