"""The arrays of a batch, and their offsets in a slot. Every process; standard library only.

    0            4096                offset of field 2         slot_bytes
    +------------+-------------------+-------------------+-----+
    | header page| field 1, B rows   | field 2, B rows   | ... |
    +------------+-------------------+-------------------+-----+
                 every field starts at a multiple of 64 bytes; the slot ends at a multiple of 4096

Where samples differ in shape, each row has room for the largest possible sample, and a field of
sizes has the shape of each one: one int32 per row in ``NAME_length`` if one dimension varies, k of
them in ``NAME_shape`` if k do.

    padded    v v v f f     ragged    v v v v v v 0 0 0 0 ...    v: values of the row, sizes (2, 3)
              v v v f f                                          f: the stream's fill value
              f f f f f                                          0: zeros

On the wire a layout is [fields, rows, slot_bytes], and a field [name, dtype, shape, offset,
varying, axes]: ``shape`` is that of one row, ``varying`` is "", "padded" or "ragged", and ``axes``
are the varying dimensions of ``shape``, ascending.

Invariant: a field's rows are C-contiguous, so row ``i`` of a field is one run of bytes that one
worker owns while it fills it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
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


PADDED, RAGGED = "padded", "ragged"
"""Kinds of varying fields; see the drawing."""
SIZES_DTYPE = "int32"
"""Dtype of a field of sizes."""
SIZE_MAX = (1 << 31) - 1
"""Largest length of a varying dimension."""


@dataclass(frozen=True, slots=True)
class Varying:
    """How rows differ in shape, at most the field's. ``axes``: the varying ones, ascending."""

    kind: str
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of a sample. ``shape``: without the batch dimension, ``()`` for a number."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    varying: Varying | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample in this field."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)


CHECKSUM = Field("#crc32", "uint32", ())
"""Extra field of a stream with ``verify = true`` (see ``batchd_wire.slot``); users never see it."""


@dataclass(frozen=True, slots=True)
class PlacedField(Field):
    """A field with its place in the slot: ``offset`` in bytes from the start of the slot."""

    _: KW_ONLY
    offset: int

    def to_wire(self) -> list[object]:
        """Encode the field for msgpack."""
        kind, axes = (self.varying.kind, self.varying.axes) if self.varying else ("", ())
        return [self.name, self.dtype, list(self.shape), self.offset, kind, list(axes)]


def sizes_field(field: Field) -> Field | None:
    """Describe the field of sizes of a varying field; None if all rows have one shape."""
    if field.varying is None:
        return None
    axes = len(field.varying.axes)
    if axes == 1:
        return Field(f"{field.name}_length", SIZES_DTYPE, ())
    return Field(f"{field.name}_shape", SIZES_DTYPE, (axes,))


def length_texts(shape: Sequence[int], varying: Varying | None) -> list[str]:
    """Format the lengths of a row for messages: ``<=512`` for a varying dimension."""
    axes = varying.axes if varying else ()
    return [f"<={length}" if axis in axes else str(length) for axis, length in enumerate(shape)]


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The fields of a slot with room for ``rows`` samples, and the slot's size."""

    fields: tuple[PlacedField, ...]
    rows: int
    slot_bytes: int

    @property
    def sample_fields(self) -> tuple[PlacedField, ...]:
        """The fields of a sample: all but the checksums."""
        return tuple(field for field in self.fields if field.name != CHECKSUM.name)

    @property
    def field_texts(self) -> tuple[str, ...]:
        """The fields of a batch as people read them: ``image uint8[64, 224, 224, 3]``."""
        return tuple(
            f"{one.name} {one.dtype}[{', '.join([str(self.rows), *length_texts(one.shape, one.varying)])}]"
            + (f" {one.varying.kind}" if one.varying else "")
            for one in self.sample_fields
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all fields together."""
        return sum(field.row_bytes for field in self.fields)

    def to_wire(self) -> list[object]:
        """Encode the layout for msgpack. Paired with ``layout_from_wire``."""
        return [[field.to_wire() for field in self.fields], self.rows, self.slot_bytes]


def place_fields(fields: Iterable[Field], rows: int) -> SlotLayout:
    """Lay ``fields`` out for ``rows`` samples: in order, aligned."""
    offset = HEADER_BYTES
    placed = []
    for field in fields:
        placed.append(PlacedField(field.name, field.dtype, field.shape, field.varying, offset=offset))
        offset = round_up(offset + field.row_bytes * rows, FIELD_ALIGNMENT_BYTES)
    return SlotLayout(tuple(placed), rows, round_up(offset, PAGE_BYTES))


def layout_from_wire(value: object) -> SlotLayout:
    """Decode and check a layout from another process. Raises ``ValueError`` with the reason.

    A hostile or broken peer cannot make a reader look outside the slot: names, dtypes, shapes and
    offsets are checked against ``slot_bytes`` here, and ``slot_bytes`` against ``fstat`` where the
    slot is mapped.
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
    _check_sizes(placed)
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
        case [str(name), str(dtype), list(shape), int(offset), str(kind), list(axes)] if _is_shape(shape):
            pass
        case _:
            raise ValueError("a field is [name, dtype, shape, offset, varying, axes]")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"field {name!r} has the unknown dtype {dtype!r}")
    if offset < HEADER_BYTES or offset % FIELD_ALIGNMENT_BYTES:
        raise ValueError(f"field {name!r} cannot start at byte {offset}")
    return PlacedField(name, dtype, tuple(shape), _varying_from_wire(name, shape, kind, axes), offset=offset)


def _varying_from_wire(name: str, shape: Sequence[int], kind: str, axes: Sequence[object]) -> Varying | None:
    if (kind, axes) == ("", []):
        return None
    known = tuple(axis for axis in axes if type(axis) is int and 0 <= axis < len(shape) and shape[axis] <= SIZE_MAX)
    if kind not in (PADDED, RAGGED) or not axes or list(axes) != sorted(set(known)):
        raise ValueError(f"field {name!r} of shape {list(shape)} cannot be {kind!r} in the dimensions {axes}")
    return Varying(kind, known)


def _check_sizes(placed: Sequence[PlacedField]) -> None:
    there = {field.name: field for field in placed}
    for field in placed:
        wanted = sizes_field(field)
        if wanted is None:
            continue
        sizes = there.get(wanted.name)
        if sizes is None or (sizes.dtype, sizes.shape, sizes.varying) != (wanted.dtype, wanted.shape, None):
            raise ValueError(
                f"field {field.name!r} varies, so field {wanted.name!r} must be there, {wanted.dtype} {list(wanted.shape)}"
            )


def _is_shape(shape: Sequence[object]) -> bool:
    return len(shape) <= DIMENSIONS_MAX and all(
        type(length) is int and 0 < length <= SLOT_BYTES_MAX for length in shape
    )


def round_up(value: int, multiple: int) -> int:
    """Round up to the next multiple."""
    return -(-value // multiple) * multiple
