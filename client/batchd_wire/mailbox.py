"""Layout of the mailbox that producers push samples into. Every process; standard library only.

    0            place_bytes      2 * place_bytes          capacity * place_bytes
    +------------+----------------+------------------------+
    | place 0    | place 1        | ...                    |      each holds one sample:
    +------------+----------------+------------------------+

    0                        values_start                                        place_bytes
    +------------------------+----------+----------+-----------------------------+
    | lengths, 8 bytes each  | value 1  | value 2  | ...                         |
    +------------------------+----------+----------+-----------------------------+
                             each value starts at a multiple of 64 bytes

The values are those of the columns, in order. The lengths are the variable ones, in the same order:
the size of an image file or a text in bytes, and each ``?`` of a shape.

Every producer can write everywhere at any time, so a reader copies a place before it reads it.

Invariant: ``extents`` gives no byte outside the place, whatever the lengths are.
"""

from collections.abc import Sequence
from math import prod
from struct import pack, unpack_from
from typing import NamedTuple

from batchd_wire.fields import DIMENSIONS_MAX, FIELDS_MAX, ITEM_BYTES, round_up
from batchd_wire.record import frozen

VALUE_ALIGNMENT_BYTES = 64
PLACE_ALIGNMENT_BYTES = 4096
MAILBOX_BYTES_MAX = 1 << 40
LENGTH_BYTES = 8
BYTES_KINDS = ("image", "text")


class MailColumn(NamedTuple):
    """One value of a sample. ``kind`` is a dtype, "image" (the bytes of a file) or "text" (UTF-8).

    A None in ``shape`` is a length that differs from sample to sample.
    """

    name: str
    kind: str
    shape: tuple[int | None, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES.get(self.kind, 1)

    @property
    def text(self) -> str:
        """The column in the notation of the configuration."""
        if self.kind in BYTES_KINDS:
            return self.kind
        lengths = ",".join("?" if length is None else str(length) for length in self.shape)
        return f"{self.kind}[{lengths}]" if self.shape else self.kind


class ValueExtent(NamedTuple):
    """Offset and size of one value in its place, in bytes, and the value's shape."""

    start: int
    size: int
    shape: tuple[int, ...]


@frozen
class PlaceLayout:
    """Places for samples; ``sample_bytes_max``: most bytes of all values without a fixed size."""

    columns: tuple[MailColumn, ...]
    sample_bytes_max: int

    def to_wire(self) -> list[object]:
        """Encode the layout for msgpack. Paired with ``place_layout_from_wire``."""
        return [[[one.name, one.kind, list(one.shape)] for one in self.columns], self.sample_bytes_max]

    @property
    def open_lengths(self) -> int:
        """Number of variable lengths."""
        return sum(column.shape.count(None) for column in self.columns)

    @property
    def values_start(self) -> int:
        """Offset of the first value."""
        return round_up(LENGTH_BYTES * self.open_lengths, VALUE_ALIGNMENT_BYTES)

    @property
    def place_bytes(self) -> int:
        """Size of one place."""
        end = self.values_start
        for column in self.columns:
            fixed = 0 if None in column.shape else column.item_bytes * prod(filter(None, column.shape))
            end = round_up(end + fixed, VALUE_ALIGNMENT_BYTES)
        if self.open_lengths:
            end += self.sample_bytes_max + VALUE_ALIGNMENT_BYTES * len(self.columns)
        return round_up(end, PLACE_ALIGNMENT_BYTES)

    def pack_lengths(self, lengths: Sequence[int]) -> bytes:
        """Encode the start of a place, up to its first value."""
        return pack(f"<{self.open_lengths}Q", *lengths).ljust(self.values_start, b"\0")

    def unpack_lengths(self, place: bytes | bytearray | memoryview) -> list[int]:
        """Decode the lengths at the start of a place; they may have any value."""
        return list(unpack_from(f"<{self.open_lengths}Q", place))

    def extents(self, lengths: Sequence[int]) -> list[ValueExtent]:
        """Locate values of these lengths. Raises ``ValueError`` if they exceed a place."""
        left = list(lengths)
        end, open_bytes = self.values_start, 0
        found = []
        for column in self.columns:
            shape = tuple(left.pop(0) if length is None else length for length in column.shape)
            size = column.item_bytes * prod(shape)
            if None in column.shape:
                open_bytes += size
                if open_bytes > self.sample_bytes_max:
                    limit = f"sample_bytes_max = {self.sample_bytes_max}"
                    raise ValueError(f"with {column.name!r} {list(shape)} it has {open_bytes} bytes, more than {limit}")
            found.append(ValueExtent(end, size, shape))
            end = round_up(end + size, VALUE_ALIGNMENT_BYTES)
        return found


def place_layout_from_wire(value: object) -> PlaceLayout:
    """Decode and check a layout from another process. Raises ``ValueError`` with the reason."""
    match value:
        case [list(columns), int(sample_bytes_max)] if 0 < len(columns) <= FIELDS_MAX:
            pass
        case _:
            raise ValueError("a layout of places is [columns, sample_bytes_max]")
    layout = PlaceLayout(tuple(_column_from_wire(column) for column in columns), sample_bytes_max)
    if len({column.name for column in layout.columns}) != len(layout.columns):
        raise ValueError("two columns have the same name")
    if not 0 <= sample_bytes_max <= MAILBOX_BYTES_MAX or layout.place_bytes > MAILBOX_BYTES_MAX:
        raise ValueError(f"a place of {layout.place_bytes} bytes cannot be")
    return layout


def _column_from_wire(value: object) -> MailColumn:
    match value:
        case [str(name), str(kind), list(shape)] if len(shape) <= DIMENSIONS_MAX:
            pass
        case _:
            raise ValueError("a column is [name, kind, shape]")
    if not all(length is None or (type(length) is int and 0 < length <= MAILBOX_BYTES_MAX) for length in shape):
        raise ValueError(f"column {name!r} cannot have the shape {shape}")
    if (kind not in ITEM_BYTES and kind not in BYTES_KINDS) or (kind in BYTES_KINDS and shape != [None]):
        raise ValueError(f"column {name!r} cannot be {kind} {shape}")
    return MailColumn(name, kind, tuple(shape))
