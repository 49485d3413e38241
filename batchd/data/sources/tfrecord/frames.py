"""The layout of a record in a TFRecord file, and its features that are fields. Daemon and workers.

    +--------------+------------------+---------------+----------------+
    | length       | its masked CRC   | data          | its masked CRC |    and so on to the end
    | 8 bytes      | 4 bytes          | length bytes  | 4 bytes        |
    +--------------+------------------+---------------+----------------+

Numbers are little-endian, and the checksum is CRC-32C. It is masked, because a CRC of bytes that
hold their own CRC says little.
"""

from struct import Struct
from typing import NamedTuple

import numpy as np
from google_crc32c import value as crc32c

from batchd.data.samples.columns import Column
from batchd.data.samples.values import Value, default_value
from batchd.data.sources.tfrecord.options import TFRecordSource

LENGTH_BYTES = 8
HEADER = Struct("<QI")
FOOTER = Struct("<I")
_MASK = 0xA282EAD8
_CRC_BITS = 0xFFFFFFFF


def masked_crc(data: bytes) -> int:
    """The checksum of ``data`` as a file holds it."""
    crc: int = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & _CRC_BITS


class FeatureField(NamedTuple):
    """A field of a sample: its column, its feature, and the value if the feature is missing."""

    column: Column
    feature: str
    default: Value | None

    @property
    def fact(self) -> list[str | None]:
        """The facts that decide bytes, in a normal form."""
        default = self.default.tobytes().hex() if isinstance(self.default, np.ndarray) else self.default
        assert default is None or isinstance(default, str)
        return [self.column.text, self.feature, default]


def parts_of(source: TFRecordSource) -> tuple[FeatureField, ...]:
    """The fields of a source, in their order."""
    return tuple(
        FeatureField(
            column,
            source.name_of(column.name),
            default_value(column, source.defaults[column.name]) if column.name in source.defaults else None,
        )
        for column in source.columns
    )
