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

Where a budget limits batches, each bucket has a layout of its own: as many rows as its batches, and
in each the room that its largest sample needs. Such a layout is [fields, rows, slot_bytes, [field,
[[rows, size], ...]]]: ``slot_bytes`` are those of the largest bucket, and every process places the
fields of each bucket itself, by ``rows`` and ``size``. A bucket's number is its place in this list.

    padded, size 4     v v f f    ragged, size 7     v v v v v v 0    at most 7 elements, in any
                                                                       shape within the field's

Images may have a size of their own in each bucket: then ``varying`` is "bucketed" for each of their
fields, ``axes`` are height and width, ``field`` is "", and a room is [rows, height, width]. In the
layout of a bucket such a field has one shape, and no field of sizes.

Invariant: a field's rows are C-contiguous, so row ``i`` of a field is one run of bytes that one
worker owns while it fills it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, replace
from math import prod
from typing import NamedTuple

from batchd_wire.record import frozen

HEADER_BYTES = 4096
FIELD_ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
FIELDS_MAX = 64
BUCKETS_MAX = 1024
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


PADDED, RAGGED, BUCKETED = "padded", "ragged", "bucketed"
"""Kinds of varying fields; see the drawing. Rows of a bucketed field differ between buckets."""
IMAGE_AXES = 2
"""The dimensions of a bucketed field that differ: height and width."""
SIZES_DTYPE = "int32"
"""Dtype of a field of sizes."""
SIZE_MAX = (1 << 31) - 1
"""Largest length of a varying dimension."""


class Overlay(NamedTuple):
    """A field that belongs to the images of another one, to be drawn over them.

    ``role``: "mask", "masks", "boxes", "points", "keypoints", or "label" of the boxes. ``form`` and
    ``relative``: of boxes, as the step ``box_form`` makes them. With "tokens", ``image`` has tokens
    and ``field`` is their loss mask, or ""; ``form``: the SHA-256 of the tokenizer, and its path.
    With "waveform" and "spectrogram", ``image`` is sound, and ``field`` ""; ``form``: samples or
    frames per second, 0 if that is unknown; of a spectrogram also its ends in Hz, 0 0 if it has no
    frequencies, and "power" if it has no logarithms.
    """

    image: str
    role: str
    field: str
    form: str = "xyxy"
    relative: bool = False


@frozen
class Varying:
    """How rows differ in shape, at most the field's. ``axes``: the varying ones, ascending.

    ``largest``: the largest length in each, where the field's shape is that of ``Field.within``.
    """

    kind: str
    axes: tuple[int, ...]
    largest: tuple[int, ...] = ()


@frozen
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

    def within(self, size: int) -> "Field":
        """The field with room for ``size``: the product of the lengths that vary in a sample.

        The last of these is ``size``, the others are 1: a padded field has one, and the values of a
        ragged row are contiguous.
        """
        assert self.varying is not None, "it varies"
        shape, axes = list(self.shape), self.varying.axes
        largest = tuple(shape[axis] for axis in axes)
        for axis in axes:
            shape[axis] = 1
        shape[axes[-1]] = min(size, prod(largest))
        return replace(self, shape=tuple(shape), varying=replace(self.varying, largest=largest))

    def of_room(self, name: str, lengths: Sequence[int]) -> "Field":
        """The field in a bucket, if ``lengths`` are the room for the field called ``name``."""
        if self.varying is None or (self.name != name and self.varying.kind != BUCKETED):
            return self
        if self.varying.kind != BUCKETED:
            return self.within(*lengths)
        of_axes = dict(zip(self.varying.axes, lengths, strict=True))
        shape = tuple(of_axes.get(axis, length) for axis, length in enumerate(self.shape))
        return replace(self, shape=shape, varying=None)


CHECKSUM = Field("#crc32", "uint32", ())
"""Extra field of a stream with ``verify = true`` (see ``batchd_wire.slot``); users never see it."""


@frozen
class PlacedField(Field):
    """A field with its place in the slot: ``offset`` in bytes from the start of the slot."""

    _: KW_ONLY
    offset: int

    def to_wire(self) -> list[object]:
        """Encode the field for msgpack."""
        kind, axes = (self.varying.kind, self.varying.axes) if self.varying else ("", ())
        return [self.name, self.dtype, list(self.shape), self.offset, kind, list(axes)]


def sizes_field(field: Field) -> Field | None:
    """Describe the field of sizes of a varying field; None if rows of a batch have one shape."""
    if field.varying is None or field.varying.kind == BUCKETED:
        return None
    axes = len(field.varying.axes)
    if axes == 1:
        return Field(f"{field.name}_length", SIZES_DTYPE, ())
    return Field(f"{field.name}_shape", SIZES_DTYPE, (axes,))


def largest_shape(shape: Sequence[int], varying: Varying | None) -> tuple[int, ...]:
    """Return the largest lengths of a sample in rows of this ``shape``: see ``Field.within``."""
    largest = dict(zip(varying.axes, varying.largest, strict=False)) if varying else {}
    return tuple(largest.get(axis, length) for axis, length in enumerate(shape))


def length_texts(shape: Sequence[int], varying: Varying | None) -> list[str]:
    """Format the lengths of a row for messages: ``<=512`` for a varying dimension."""
    axes = varying.axes if varying else ()
    return [f"<={length}" if axis in axes else str(length) for axis, length in enumerate(largest_shape(shape, varying))]


@frozen
class Rooms:
    """The room for a batch of each bucket: (rows, largest size of ``field`` in a row).

    Of bucketed fields: (rows, height, width), and ``field`` is "".
    """

    field: str
    of_buckets: tuple[tuple[int, ...], ...]


@frozen
class SlotLayout:
    """The fields of a slot with room for ``rows`` samples, and the slot's size.

    ``buckets``: the layout of each bucket, if ``rooms`` says that they differ. Then ``rows`` and
    ``fields`` have the most of all, for people, and no batch is laid out so.
    """

    fields: tuple[PlacedField, ...]
    rows: int
    slot_bytes: int
    rooms: Rooms | None = None
    buckets: tuple["SlotLayout", ...] = ()

    def of(self, bucket: int) -> "SlotLayout":
        """The layout of the batches of a bucket."""
        return self.buckets[bucket] if self.buckets else self

    @property
    def sample_fields(self) -> tuple[PlacedField, ...]:
        """The fields of a sample: all but the checksums."""
        return tuple(field for field in self.fields if field.name != CHECKSUM.name)

    @property
    def field_texts(self) -> tuple[str, ...]:
        """The fields of a batch as people read them: ``image uint8[64, 224, 224, 3]``."""
        return tuple(
            f"{field.name} {field.dtype}[{', '.join([str(self.rows), *length_texts(field.shape, field.varying)])}]"
            + (f" {field.varying.kind}" if field.varying else "")
            for field in self.sample_fields
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all fields together; with buckets, the mean of a batch of each."""
        if self.buckets:
            return sum(bucket.rows * bucket.row_bytes for bucket in self.buckets) // sum(
                bucket.rows for bucket in self.buckets
            )
        return sum(field.row_bytes for field in self.fields)

    def to_wire(self) -> list[object]:
        """Encode the layout for msgpack. Paired with ``layout_from_wire``."""
        whole: list[object] = [[field.to_wire() for field in self.fields], self.rows, self.slot_bytes]
        return whole if self.rooms is None else [*whole, [self.rooms.field, list(map(list, self.rooms.of_buckets))]]


def place_fields(fields: Iterable[Field], rows: int, rooms: Rooms | None = None) -> SlotLayout:
    """Lay ``fields`` out for ``rows`` samples: in order, aligned. ``rooms``: of each bucket."""
    offset = HEADER_BYTES
    placed = []
    for field in fields:
        placed.append(PlacedField(field.name, field.dtype, field.shape, field.varying, offset=offset))
        offset = round_up(offset + field.row_bytes * rows, FIELD_ALIGNMENT_BYTES)
    if rooms is None:
        return SlotLayout(tuple(placed), rows, round_up(offset, PAGE_BYTES))
    buckets = tuple(
        place_fields([field.of_room(rooms.field, lengths) for field in placed], rows_of_bucket)
        for rows_of_bucket, *lengths in rooms.of_buckets
    )
    return SlotLayout(tuple(placed), rows, max(bucket.slot_bytes for bucket in buckets), rooms, buckets)


def layout_from_wire(value: object) -> SlotLayout:
    """Decode and check a layout from another process. Raises ``ValueError`` with the reason.

    A hostile or broken peer cannot make a reader look outside the slot: names, dtypes, shapes and
    offsets are checked against ``slot_bytes`` here, and ``slot_bytes`` against ``fstat`` where the
    slot is mapped.
    """
    match value:
        case [list(fields), int(rows), int(slot_bytes), *rooms] if bool is not type(rows) and len(rooms) <= 1:
            pass
        case _:
            raise ValueError("a slot layout is [fields, rows, slot_bytes] or [fields, rows, slot_bytes, rooms]")
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
    if rooms:
        layout = place_fields(placed, rows, _rooms_from_wire(placed, rows, rooms[0]))
        if layout.slot_bytes != slot_bytes:
            raise ValueError(f"buckets that need {layout.slot_bytes} bytes have a slot of {slot_bytes} bytes")
        return layout
    if any(field.varying is not None and field.varying.kind == BUCKETED for field in placed):
        raise ValueError("fields of another size in each bucket need the rooms of these")
    _check_places(placed, rows, slot_bytes)
    return SlotLayout(placed, rows, slot_bytes)


def _check_places(placed: Sequence[PlacedField], rows: int, slot_bytes: int) -> None:
    end = HEADER_BYTES
    for field in placed:
        if field.offset < end:
            raise ValueError(
                f"field {field.name!r} starts at byte {field.offset}, before byte {end} where the one before it ends"
            )
        end = field.offset + field.row_bytes * rows
        if end > slot_bytes:
            raise ValueError(f"field {field.name!r} does not fit into a slot of {slot_bytes} bytes")


def _rooms_from_wire(placed: Sequence[PlacedField], rows: int, value: object) -> Rooms:
    match value:
        case [str(name), list(rooms)] if 0 < len(rooms) <= BUCKETS_MAX:
            pass
        case _:
            raise ValueError(f"the rooms of 1 to {BUCKETS_MAX} buckets are [field, [[rows, size], ...]]")
    varying = [
        (field.shape, field.varying)
        for field in placed
        if field.varying is not None and (field.name == name or (not name and field.varying.kind == BUCKETED))
    ]
    if not varying or any(
        kind.kind == (BUCKETED if name else PADDED) and len(kind.axes) > 1 for _shape, kind in varying
    ):
        raise ValueError(f"field {name!r} cannot have another room in each bucket")
    most = (
        [SLOT_BYTES_MAX]
        if name
        else [min(shape[kind.axes[side]] for shape, kind in varying) for side in range(IMAGE_AXES)]
    )
    of_buckets = []
    for room in rooms:
        match room:
            case [int(batch), *lengths] if (
                bool not in map(type, room) and 0 < batch <= rows and _are_lengths(lengths, most)
            ):
                of_buckets.append((batch, *lengths))
            case _:
                raise ValueError(
                    f"the room of a bucket cannot be {room!r:.60}: it is [rows, size], {rows} rows at most"
                )
    return Rooms(name, tuple(of_buckets))


def _are_lengths(lengths: Sequence[object], most: Sequence[int]) -> bool:
    return len(lengths) == len(most) and all(
        type(length) is int and 0 < length <= limit for length, limit in zip(lengths, most, strict=True)
    )


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
    if kind not in (PADDED, RAGGED, BUCKETED) or not axes or list(axes) != sorted(set(known)):
        raise ValueError(f"field {name!r} of shape {list(shape)} cannot be {kind!r} in the dimensions {axes}")
    if kind == BUCKETED and len(axes) != IMAGE_AXES:
        raise ValueError(
            f"field {name!r} has {len(axes)} dimensions with another length in each bucket, not {IMAGE_AXES}"
        )
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
