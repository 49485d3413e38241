"""The places of a slot's fields, byte by byte, and the layouts and headers that are refused."""

import copy
import mmap
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd_wire.fields import (
    DIMENSIONS_MAX,
    FIELDS_MAX,
    ITEM_BYTES,
    SLOT_BYTES_MAX,
    Field,
    PlacedField,
    Rooms,
    SlotLayout,
    Varying,
    layout_from_wire,
    length_texts,
    place_fields,
    sizes_field,
)
from batchd_wire.slot import (
    MAGIC,
    SLOT_HEADER_BYTES,
    UNFINISHED,
    SlotHeader,
    holds_generation,
    unpack_header,
)
from batchd_wire.views import field_array, slot_arrays

PHOTOS = (Field("image", "uint8", (3, 5, 3)), Field("label", "int64", ()), Field("valid", "bool", ()))
GOOD = [[["image", "uint8", [4, 4, 3], 4096, "", []], ["label", "int64", [], 4480, "", []]], 8, 8192]
"""A layout as it travels: 8 rows of 48 bytes, then 8 rows of 8 bytes."""
VARYING = (
    Field("image", "uint8", (5, 7, 3), Varying("padded", (0, 1))),
    Field("image_shape", "int32", (2,)),
    Field("tokens", "int64", (9,), Varying("ragged", (0,))),
    Field("tokens_length", "int32", ()),
)

field_lists = st.lists(
    st.builds(
        Field,
        name=st.text(max_size=5),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda field: field.name,
)
row_counts = st.integers(1, 40)
words = st.integers(0, (1 << 64) - 1)


def bytes_of(field: PlacedField, rows: int) -> range:
    return range(field.offset, field.offset + field.row_bytes * rows)


def test_offsets_are_as_drawn() -> None:
    """The first field follows the header page, others are at multiples of 64, the end at 4096."""
    layout = place_fields(PHOTOS, 7)

    assert [(field.name, field.offset) for field in layout.fields] == [
        ("image", 4096),
        ("label", 4416),
        ("valid", 4480),
    ]
    assert (layout.rows, layout.slot_bytes) == (7, 8192)
    assert [field.row_bytes for field in layout.fields] == [45, 8, 1]
    assert [field.row_bytes for field in PHOTOS] == [45, 8, 1]


def test_a_slot_that_ends_on_a_page_has_no_page_more() -> None:
    """Rounding up changes no round number."""
    assert place_fields([Field("image", "uint8", (64, 64))], 1).slot_bytes == 2 * 4096
    assert place_fields([Field("image", "uint8", (64, 64)), Field("label", "bool", ())], 1).slot_bytes == 3 * 4096


@given(fields=field_lists, rows=row_counts)
def test_fields_are_aligned_and_never_overlap(fields, rows) -> None:
    """Each field has its own bytes, outside of the header page, inside the slot."""
    layout = place_fields(fields, rows)

    end = 4096
    for field in layout.fields:
        assert field.offset % 64 == 0
        assert end <= field.offset < end + 64
        end = bytes_of(field, rows).stop
    assert layout.slot_bytes % 4096 == 0
    assert end <= layout.slot_bytes < end + 4096 + 64


@given(fields=field_lists, rows=row_counts)
def test_a_layout_survives_the_way_there_and_back(fields, rows) -> None:
    """The other side sees the same fields at the same places."""
    layout = place_fields(fields, rows)

    assert layout_from_wire(layout.to_wire()) == layout


def test_the_layout_as_it_travels_is_plain_data() -> None:
    """It has lists, texts and numbers only, which msgpack carries."""
    fields = [Field("image", "uint8", (4, 4, 3)), Field("label", "int64", ())]

    assert place_fields(fields, 8).to_wire() == GOOD
    assert layout_from_wire(GOOD) == SlotLayout(
        (PlacedField("image", "uint8", (4, 4, 3), offset=4096), PlacedField("label", "int64", (), offset=4480)), 8, 8192
    )


def changed(path: tuple[int, ...], value: object, good: object = GOOD) -> object:
    """The good layout with one place of it changed."""
    layout = copy.deepcopy(good)
    at = layout
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return layout


HOSTILE = {
    "beyond the end of the slot": ((0, 1, 3), 8192),
    "its last row beyond the end": ((0, 1, 3), 8192 - 56),
    "beyond the end by 2^62 bytes": ((0, 1, 3), 1 << 62),
    "in the header page": ((0, 0, 3), 0),
    "before the slot": ((0, 0, 3), -64),
    "not aligned": ((0, 1, 3), 4481),
    "an offset that is no number": ((0, 1, 3), 4480.0),
    "an offset that is true": ((0, 0, 3), True),
    "over the field before": ((0, 1, 3), 4096 + 64),
    "before the field before": ((0, 0, 3), 4096 + 1024),
    "unknown dtype": ((0, 0, 1), "object"),
    "big-endian dtype": ((0, 0, 1), ">i8"),
    "structured dtype": ((0, 0, 1), "i8,i8"),
    "dtype as bytes": ((0, 0, 1), b"uint8"),
    "no name": ((0, 0, 0), None),
    "name twice": ((0, 1, 0), "image"),
    "shape with a zero": ((0, 0, 2), [4, 0, 3]),
    "shape with a negative": ((0, 0, 2), [4, -4, -3]),
    "shape with a bool": ((0, 0, 2), [True]),
    "shape with a float": ((0, 0, 2), [4.0]),
    "shape whose product wraps round in 64 bits": ((0, 0, 2), [1 << 32, 1 << 32]),
    "shape with an enormous length": ((0, 0, 2), [1 << 63]),
    "too many dimensions": ((0, 0, 2), [1] * (DIMENSIONS_MAX + 1)),
    "shape that is no list": ((0, 0, 2), 3),
    "field that is no list": ((0, 0), "image"),
    "field with something behind it": ((0, 0), ["image", "uint8", [4, 4, 3], 4096, "", [], 0]),
    "field of the first version": ((0, 0), ["image", "uint8", [4, 4, 3], 4096]),
    "varying in no dimension": ((0, 0, 4), "padded"),
    "not varying in a dimension": ((0, 0, 5), [0]),
    "varying without a field of sizes": ((0, 0), ["image", "uint8", [4, 4, 3], 4096, "padded", [0]]),
    "no fields": ((0,), []),
    "too many fields": ((0,), [["image", "uint8", [1], 4096, "", []]] * (FIELDS_MAX + 1)),
    "no rows": ((1,), 0),
    "negative rows": ((1,), -8),
    "true rows": ((1,), True),
    "rows as a float": ((1,), 8.0),
    "more rows than fit": ((1,), 465),
    "2^62 rows": ((1,), 1 << 62),
    "slot without a header": ((2,), 4095),
    "slot shorter than its fields": ((2,), 4480),
    "negative slot": ((2,), -8192),
    "slot of 2^62 bytes": ((2,), 1 << 62),
    "slot as a text": ((2,), "8192"),
}


@pytest.mark.parametrize(("path", "value"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_layout_is_refused(path, value) -> None:
    """No reader can be made to look outside the slot, or at one field through another."""
    with pytest.raises(ValueError, match=r"layout|slot|field"):
        layout_from_wire(changed(path, value))


@pytest.mark.parametrize("value", [None, [], {}, 1, "layout", GOOD[0], [*GOOD, 0], GOOD[:2], [[[]]], [[None], 8, 8192]])
def test_what_is_no_layout_at_all_is_refused(value) -> None:
    """``Subscribed.layout`` may hold anything that msgpack carries."""
    with pytest.raises(ValueError, match=r"layout is|field is|field"):
        layout_from_wire(value)


VARYING_HOSTILE = {
    "an unknown way": ((0, 0, 4), "jagged"),
    "no text": ((0, 0, 4), None),
    "no dimensions": ((0, 0, 5), []),
    "one dimension fewer than there are sizes": ((0, 0, 5), [0]),
    "one dimension more than there are sizes": ((0, 0, 5), [0, 1, 2]),
    "a dimension that is not there": ((0, 0, 5), [0, 3]),
    "a negative dimension": ((0, 0, 5), [-1, 0]),
    "a dimension twice": ((0, 0, 5), [1, 1]),
    "dimensions downwards": ((0, 0, 5), [1, 0]),
    "a dimension that is true": ((0, 0, 5), [0, True]),
    "a dimension that is a float": ((0, 0, 5), [0, 1.0]),
    "dimensions that are no list": ((0, 0, 5), 1),
    "sizes of another name": ((0, 1, 0), "image_sizes"),
    "sizes of 64 bits": ((0, 3, 1), "int64"),
    "sizes without a sign": ((0, 1, 1), "uint32"),
    "too few sizes": ((0, 1, 2), [1]),
    "several sizes for one dimension": ((0, 3, 2), [1]),
    "sizes that vary themselves": ((0, 1), ["image_shape", "int32", [2], 4992, "ragged", [0]]),
    "a number that varies": ((0, 3), ["tokens_length", "int32", [], 5760, "padded", [0]]),
}


@pytest.mark.parametrize(("path", "value"), VARYING_HOSTILE.values(), ids=VARYING_HOSTILE)
def test_rows_that_vary_in_a_way_that_cannot_be_are_refused(path, value) -> None:
    """Sizes must be in the field where a reader looks for them, with the one type that it reads."""
    good = place_fields(VARYING, 8).to_wire()
    assert layout_from_wire(good) == place_fields(VARYING, 8)

    with pytest.raises(ValueError, match=r"cannot be|must be there|a field is"):
        layout_from_wire(changed(path, value, good))


RAGGED = (
    Field("image", "uint8", (5, 7, 3), Varying("ragged", (0, 1))),
    Field("image_shape", "int32", (2,)),
    Field("tokens", "int64", (9, 2), Varying("padded", (0,))),
    Field("tokens_length", "int32", ()),
)


@given(
    name=st.sampled_from(["image", "tokens"]),
    of_buckets=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 99)), min_size=1, max_size=5),
)
def test_each_bucket_is_laid_out_in_the_same_slot_with_its_rows_and_its_room(name, of_buckets) -> None:
    """The other side places the same fields, and the slot has the bytes of the largest bucket."""
    layout = place_fields(RAGGED, 8, Rooms(name, tuple(of_buckets)))

    assert layout_from_wire(layout.to_wire()) == layout
    assert layout.slot_bytes == max(one.slot_bytes for one in layout.buckets)
    whole = next(field for field in layout.fields if field.name == name)
    most = {"image": 35, "tokens": 9}[name]
    for number, (rows, size) in enumerate(of_buckets):
        bucket = layout.of(number)
        assert bucket == place_fields(bucket.fields, rows)
        for field in bucket.fields:
            if field.name == name:
                assert field.row_bytes == whole.row_bytes // most * min(size, most)
                assert length_texts(field.shape, field.varying) == length_texts(whole.shape, whole.varying)
            else:
                assert field.row_bytes == next(one.row_bytes for one in RAGGED if one.name == field.name)
        arrays = slot_arrays(bytearray(bucket.slot_bytes), bucket)
        assert all(len(array) == rows for array in arrays.values())


BUCKETED = (
    Field("image", "uint8", (9, 8, 3), Varying("bucketed", (0, 1))),
    Field("mask", "uint8", (9, 8), Varying("bucketed", (0, 1))),
    Field("planes", "float32", (3, 9, 8), Varying("bucketed", (1, 2))),
    Field("label", "int64", ()),
)


@given(of_buckets=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=5))
def test_images_have_the_size_of_their_bucket_in_every_field(of_buckets) -> None:
    """In a bucket each field has one shape, so arrays of a batch are dense."""
    layout = place_fields(BUCKETED, 8, Rooms("", tuple(of_buckets)))

    assert layout_from_wire(layout.to_wire()) == layout
    assert layout.slot_bytes == max(one.slot_bytes for one in layout.buckets)
    assert layout.field_texts[0] == "image uint8[8, <=9, <=8, 3] bucketed"
    for number, (rows, high, wide) in enumerate(of_buckets):
        bucket = layout.of(number)
        shapes = {name: array.shape for name, array in slot_arrays(bytearray(bucket.slot_bytes), bucket).items()}
        assert shapes == {
            "image": (rows, high, wide, 3),
            "mask": (rows, high, wide),
            "planes": (rows, 3, high, wide),
            "label": (rows,),
        }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((3,), ["", [[8, 9]]]),
        ((3,), ["", [[8, 10, 8]]]),
        ((3,), ["", [[8, 9, 9]]]),
        ((3,), ["", [[8, 0, 8]]]),
        ((3,), ["", [[9, 9, 8]]]),
        ((3,), ["", [[8, 9, True]]]),
        ((3,), ["", [[8, 9, 8, 1]]]),
        ((3,), ["image", [[8, 9, 8]]]),
        ((3,), ["image", [[8, 9]]]),
        ((0, 0, 5), [0]),
        ((0, 0, 5), [0, 3]),
    ],
)
def test_sizes_of_buckets_that_cannot_be_are_refused(path, value) -> None:
    """They are within the field's shape, and height and width are two of its dimensions."""
    good = place_fields(BUCKETED, 8, Rooms("", ((8, 9, 8),))).to_wire()

    with pytest.raises(ValueError, match=r"bucket"):
        layout_from_wire(changed(path, value, good))
    with pytest.raises(ValueError, match="need the rooms of these"):
        layout_from_wire(good[:3])


def test_a_layout_without_buckets_is_that_of_all_batches() -> None:
    layout = place_fields(RAGGED, 8)

    assert layout.of(0) is layout.of(7) is layout


HOSTILE_ROOMS = {
    "no list": (3, 0),
    "no field": ((3, 0), None),
    "a field that is not there": ((3, 0), "images"),
    "a field with one shape": ((3, 0), "image_shape"),
    "a field that is padded in two dimensions": ((3, 0), "boxes"),
    "no bucket": ((3, 1), []),
    "too many buckets": ((3, 1), [[1, 1]] * 1025),
    "a bucket that is no list": ((3, 1, 0), 3),
    "a bucket without a size": ((3, 1, 0), [3]),
    "no rows": ((3, 1, 0), [0, 9]),
    "more rows than the batch may have": ((3, 1, 0), [9, 9]),
    "rows that are true": ((3, 1, 0), [True, 9]),
    "a size of nothing": ((3, 1, 0), [3, 0]),
    "a negative size": ((3, 1, 0), [3, -1]),
    "a size that is a float": ((3, 1, 0), [3, 2.0]),
    "a size beyond everything": ((3, 1, 0), [3, SLOT_BYTES_MAX + 1]),
    "a slot that is larger than its buckets": ((2,), 1 << 20),
    "a slot that is smaller than its buckets": ((2,), 4096),
}


@pytest.mark.parametrize(("path", "value"), HOSTILE_ROOMS.values(), ids=HOSTILE_ROOMS)
def test_rooms_of_buckets_that_cannot_be_are_refused(path, value) -> None:
    boxes = (Field("boxes", "uint8", (64, 64), Varying("padded", (0, 1))), Field("boxes_shape", "int32", (2,)))
    good = place_fields((*RAGGED, *boxes), 8, Rooms("image", ((8, 12), (3, 20)))).to_wire()
    assert layout_from_wire(good).slot_bytes == good[2]
    path = path if isinstance(path, tuple) else (path,)

    with pytest.raises(ValueError, match="bucket"):
        layout_from_wire(changed(path, value, good))


def test_a_length_beyond_the_type_of_sizes_is_refused() -> None:
    """No size could say that a row is full."""
    fields = [Field("a", "uint8", (1 << 31,), Varying("ragged", (0,))), Field("a_length", "int32", ())]

    with pytest.raises(ValueError, match=r"'a' of shape \[2147483648\] cannot be 'ragged'"):
        layout_from_wire(place_fields(fields, 1).to_wire())


def test_a_varying_field_takes_room_for_its_largest_in_every_row() -> None:
    """Every row thus has a fixed place for any worker that fills it."""
    layout = place_fields(VARYING, 8)

    assert [field.row_bytes for field in layout.fields] == [105, 8, 72, 4]
    assert layout.slot_bytes == 8192
    assert place_fields(VARYING, 64).slot_bytes >= 4096 + 64 * (105 + 8 + 72 + 4)


def test_sizes_have_the_name_that_people_expect() -> None:
    """The name ends in length for one varying dimension, and in shape for several."""
    assert [sizes_field(field) for field in VARYING] == [VARYING[1], None, VARYING[3], None]
    assert length_texts((5, 7, 3), VARYING[0].varying) == ["<=5", "<=7", "3"]
    assert length_texts((5, 7), None) == ["5", "7"]


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(sorted(ITEM_BYTES))
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4), max_leaves=12)


@given(data=st.data())
def test_any_value_is_a_layout_inside_its_slot_or_refused(data) -> None:
    """A good layout with any value at any place is tried, too."""
    place = data.draw(
        st.sampled_from([(0,), (1,), (2,), (0, 0), (0, 1), *[(0, row, part) for row in (0, 1) for part in range(6)]])
    )
    value = changed(place, data.draw(values))
    try:
        layout = layout_from_wire(value)
    except ValueError:
        return
    ends = [bytes_of(field, layout.rows) for field in layout.fields]
    assert all(4096 <= taken.start < taken.stop <= layout.slot_bytes <= SLOT_BYTES_MAX for taken in ends)
    assert all(before.stop <= after.start for before, after in pairwise(ends))


def test_item_sizes_are_numpys() -> None:
    """The table is written by hand so that the wire needs no numpy."""
    assert {name: np.dtype(name).itemsize for name in ITEM_BYTES} == ITEM_BYTES


@given(fields=field_lists, rows=st.integers(1, 5))
def test_views_show_exactly_the_bytes_of_their_field(fields, rows) -> None:
    """Bytes written through one view are at the drawn offset, and in no other field."""
    layout = place_fields(fields, rows)
    for field in layout.fields:
        slot = bytearray(layout.slot_bytes)

        view = slot_arrays(slot, layout)[field.name]
        view.view(np.uint8).reshape(-1)[:] = 0xA5

        assert view.shape == (rows, *field.shape)
        assert view.dtype == field.dtype
        taken = bytes_of(field, rows)
        assert slot[taken.start : taken.stop] == b"\xa5" * len(taken)
        assert slot.count(0xA5) == len(taken)


def test_a_row_is_one_run_of_bytes() -> None:
    """One worker thus owns these bytes while it fills them."""
    layout = place_fields(PHOTOS, 4)
    slot = bytearray(layout.slot_bytes)

    slot_arrays(slot, layout)["image"][2] = 7

    assert slot[4096 + 2 * 45 : 4096 + 3 * 45] == b"\7" * 45
    assert slot.count(7) == 45


def test_numbers_are_little_endian() -> None:
    """The numbers of the header are little-endian, too."""
    layout = place_fields([Field("label", "int64", ())], 2)
    slot = bytearray(layout.slot_bytes)
    struct.pack_into("<qq", slot, 4096, 1, -2)

    assert field_array(slot, layout.fields[0], 2).tolist() == [1, -2]


def test_views_of_read_only_memory_are_read_only_and_keep_it_alive() -> None:
    """A trainer cannot write by accident, and a view never dangles."""
    memory = mmap.mmap(-1, 8192, prot=mmap.PROT_READ)
    view = slot_arrays(memory, place_fields(PHOTOS, 2))["image"]

    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(BufferError):
        memory.close()
    del view
    memory.close()


def test_a_view_beyond_the_buffer_is_refused() -> None:
    """This is the last check, should a layout and its memory ever differ."""
    layout = place_fields(PHOTOS, 2)

    with pytest.raises(ValueError, match="buffer is smaller"):
        slot_arrays(bytearray(4096 + 89), layout)


def test_the_header_lies_in_memory_as_drawn() -> None:
    """It has eight little-endian words in this order."""
    packed = SlotHeader(generation=0x0102030405060708, slot=2, epoch=3, step=4, samples=5, payload_bytes=6).pack()

    assert len(packed) == SLOT_HEADER_BYTES == 64
    assert packed[0:8] == b"BATCHD01" == MAGIC
    assert packed[8:16] == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert [struct.unpack_from("<Q", packed, offset)[0] for offset in range(16, 64, 8)] == [2, 3, 4, 5, 6, 0]


@given(st.builds(SlotHeader, words, words, words, words, words, words))
def test_a_header_survives_the_way_there_and_back(header) -> None:
    """A whole page and its first 64 bytes give the same header."""
    assert unpack_header(header.pack()) == header
    assert unpack_header(memoryview(header.pack().ljust(4096, b"\0"))) == header


@pytest.mark.parametrize("magic", [b"BATCHD02", b"BATCHD00", b"batchd01", bytes(8), b"\xff" * 8])
def test_a_page_of_another_version_is_refused_by_name(magic) -> None:
    """The error shows the magic of the page, and the expected one."""
    page = magic + SlotHeader(1, 2, 3, 4, 5, 6).pack()[8:]

    with pytest.raises(ValueError, match="instead of b'BATCHD01'"):
        unpack_header(page)
    assert not holds_generation(page, 1)


def test_only_the_generation_of_the_handle_opens_a_slot() -> None:
    """Former and later generations do not, and neither does a slot that is being filled."""
    page = SlotHeader(7, 2, 3, 4, 5, 6).pack()

    assert holds_generation(page, 7)
    assert not any(holds_generation(page, other) for other in (0, 6, 8, 1 << 63))
    assert not holds_generation(SlotHeader(UNFINISHED, 2, 0, 0, 0, 0).pack(), 7)
    assert not holds_generation(bytes(4096), 0)


@given(cut=st.integers(0, 64))
def test_a_torn_header_is_never_whole(cut) -> None:
    """With any part of the new header written, the generation read is one of the two."""
    before, after = SlotHeader(UNFINISHED, 2, 0, 0, 0, 0).pack(), SlotHeader(9, 2, 3, 4, 5, 6).pack()
    torn = after[:cut] + before[cut:]

    assert holds_generation(torn, 9) == (torn[:16] == after[:16])
    assert not holds_generation(torn, 10)
