"""How a record lies in a TFRecord file. Daemon and workers.

    +--------------+------------------+---------------+----------------+
    | length       | its masked CRC   | data          | its masked CRC |    and so on to the end of the file
    | 8 bytes      | 4 bytes          | length bytes  | 4 bytes        |
    +--------------+------------------+---------------+----------------+

Numbers are little-endian, and the checksum is CRC-32C. It is masked, because a CRC of bytes that
hold their own CRC says little.
"""

from struct import Struct

import numpy as np
from google_crc32c import value as crc32c

LENGTH_BYTES = 8
HEADER = Struct("<QI")
FOOTER = Struct("<I")
_MASK = 0xA282EAD8
_CRC_BITS = 0xFFFFFFFF
CHECKSUM = np.dtype("<u4")


def masked_crc(data: bytes) -> int:
    """The checksum of ``data`` as it stands in a file."""
    crc: int = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & _CRC_BITS
