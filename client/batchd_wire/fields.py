"""Which arrays a batch holds, and where they lie in a slot. Every process; standard library only.

    0            4096                offset of field 2         slot_bytes
    +------------+-------------------+-------------------+-----+
    | header page| field 1, B rows   | field 2, B rows   | ... |
    +------------+-------------------+-------------------+-----+
                 every field starts at a multiple of 64 bytes; the slot ends at a multiple of 4096

Invariant: a field's rows are C-contiguous, so row ``i`` of a field is one run of bytes that one worker owns while it fills it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

HEADER_BYTES = 4096
FIELD_ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
FIELDS_MAX = 64
DIMENSIONS_MAX = 8
SLOT_BYTES_MAX = 1 << 40

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}
"""The dtypes a field may have, by numpy's name, little-endian, with their item size in bytes."""


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of a sample: ``shape`` is without the batch dimension, ``()`` for a number."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample in this field."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)


CHECKSUM = Field("#crc32", "uint32", ())
"""What a row of a stream with ``verify = true`` has besides its sample; see ``batchd_wire.checksum``. Users never see it."""


@dataclass(frozen=True, slots=True)
class PlacedField:
    """A field with its place in the slot: ``offset`` in bytes from the start of the slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample in this field."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)

    def to_wire(self) -> list[object]:
        """The field as msgpack carries it."""
        return [self.name, self.dtype, list(self.shape), self.offset]


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The fields of a slot with room for ``rows`` samples, and the slot's size."""

    fields: tuple[PlacedField, ...]
    rows: int
    slot_bytes: int

    @property
    def sample_fields(self) -> tuple[PlacedField, ...]:
        """What a sample consists of: all but the checksums."""
        return tuple(field for field in self.fields if field.name != CHECKSUM.name)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all fields together."""
        return sum(field.row_bytes for field in self.fields)

    def to_wire(self) -> list[object]:
        """The layout as msgpack carries it; ``layout_from_wire`` is the way back."""
        return [[field.to_wire() for field in self.fields], self.rows, self.slot_bytes]


def place_fields(fields: Iterable[Field], rows: int) -> SlotLayout:
    """Lay ``fields`` out for ``rows`` samples: each behind the one before, aligned."""
    offset = HEADER_BYTES
    placed = []
    for field in fields:
        placed.append(PlacedField(field.name, field.dtype, field.shape, offset))
        offset = _round_up(offset + field.row_bytes * rows, FIELD_ALIGNMENT_BYTES)
    return SlotLayout(tuple(placed), rows, _round_up(offset, PAGE_BYTES))


def layout_from_wire(value: object) -> SlotLayout:
    """Check a layout that arrived from another process. Raises ``ValueError`` naming what is wrong with it.

    A hostile or broken peer cannot make a reader look outside the slot: names, dtypes, shapes and
    offsets are checked against ``slot_bytes`` here, and ``slot_bytes`` against ``fstat`` where the slot is mapped.
    """
    match value:
        case [list(fields), int(rows), int(slot_bytes)] if type(rows) is int:  # not a bool
            pass
        case _:
            raise ValueError("a slot layout is [fields, rows, slot_bytes]")
    if not 0 < rows <= SLOT_BYTES_MAX or not HEADER_BYTES <= slot_bytes <= SLOT_BYTES_MAX:
        raise ValueError(f"a slot of {rows} rows and {slot_bytes} bytes cannot be")
    if not 0 < len(fields) <= FIELDS_MAX:
        raise ValueError(f"a slot has 1 to {FIELDS_MAX} fields, not {len(fields)}")
    placed = tuple(_field_from_wire(field) for field in fields)
    checksum = next((field for field in placed if field.name == CHECKSUM.name), None)
    if checksum is not None and (checksum.dtype, checksum.shape) != (CHECKSUM.dtype, CHECKSUM.shape):
        raise ValueError(f"checksums are one {CHECKSUM.dtype} for each row")
    if len({field.name for field in placed}) != len(placed):
        raise ValueError("two fields of a slot have the same name")
    end = HEADER_BYTES
    for field in placed:
        if field.offset < end:
            raise ValueError(
                f"field {field.name!r} starts at byte {field.offset}, before byte {end} where the one before it ends"
            )
        end = field.offset + field.row_bytes * rows
        if end > slot_bytes:
            raise ValueError(f"field {field.name!r} does not fit into a slot of {slot_bytes} bytes")
    return SlotLayout(placed, rows, slot_bytes)


def _field_from_wire(value: object) -> PlacedField:
    match value:
        case [str(name), str(dtype), list(shape), int(offset)] if _is_shape(shape):
            pass
        case _:
            raise ValueError("a field is [name, dtype, shape, offset]")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"field {name!r} has the unknown dtype {dtype!r}")
    if offset < HEADER_BYTES or offset % FIELD_ALIGNMENT_BYTES:
        raise ValueError(f"field {name!r} cannot start at byte {offset}")
    return PlacedField(name, dtype, tuple(shape), offset)


def _is_shape(shape: Sequence[object]) -> bool:
    return len(shape) <= DIMENSIONS_MAX and all(
        type(length) is int and 0 < length <= SLOT_BYTES_MAX for length in shape
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
