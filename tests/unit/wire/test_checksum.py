"""Checksums of rows: their place, the bytes that they cover, and the changes that they show."""

import zlib
from struct import unpack_from

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.config.tree import StreamConfig
from batchd.data.pipeline.image.options import Decode, Resize
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.sources.files.index import image_columns
from batchd_wire.fields import CHECKSUM, Field, layout_from_wire, place_fields
from batchd_wire.slot import RowChecksums, rows_crc32
from batchd_wire.views import slot_arrays

FIELDS = (Field("image", "uint8", (5, 3)), Field("label", "int64", ()), Field("valid", "bool", ()))
ROWS = 4
LAYOUT = place_fields((*FIELDS, CHECKSUM), ROWS)


def filled_page(layout=LAYOUT) -> bytearray:
    """A slot with different bytes everywhere, and the checksums of its rows."""
    page = bytearray(byte % 251 for byte in range(layout.slot_bytes))
    for row in range(layout.rows):
        RowChecksums(layout).write(memoryview(page), row)
    return page


def test_a_checksum_is_the_crc_of_the_rows_bytes_field_after_field() -> None:
    """The zlib library computes the same value from the joined bytes."""
    page = filled_page()
    places = {field.name: field for field in LAYOUT.fields}

    for row in range(ROWS):
        parts = [page[places[field.name].offset + row * field.row_bytes :][: field.row_bytes] for field in FIELDS]
        assert unpack_from("<I", page, places[CHECKSUM.name].offset + 4 * row)[0] == zlib.crc32(b"".join(parts))


def test_the_checksum_of_several_rows_is_that_of_their_bytes_one_row_after_the_other() -> None:
    """A trainer's batch may be some of the rows of a slot."""
    page = filled_page()
    fields = [field for field in LAYOUT.fields if field.name != CHECKSUM.name]
    covered = [(field.offset, field.row_bytes) for field in fields]
    rows = [
        b"".join(page[field.offset + row * field.row_bytes :][: field.row_bytes] for field in fields)
        for row in range(ROWS)
    ]

    assert rows_crc32(memoryview(page), covered, range(1, 3)) == zlib.crc32(rows[1] + rows[2])


def test_untouched_rows_match() -> None:
    """All rows match, and so does each range of rows."""
    page = memoryview(filled_page())

    for first in range(ROWS):
        for count in range(ROWS - first + 1):
            assert RowChecksums(LAYOUT).wrong_rows(page, first, count) == []


@given(st.sampled_from(LAYOUT.fields), st.integers(0, ROWS - 1), st.integers(0, 1 << 30), st.integers(1, 255))
def test_one_changed_byte_is_found_in_its_row_and_in_no_other(field, row, byte, change) -> None:
    """This holds for each field, the checksums among them."""
    page = filled_page()
    page[field.offset + row * field.row_bytes + byte % field.row_bytes] ^= change

    assert RowChecksums(LAYOUT).wrong_rows(memoryview(page), 0, ROWS) == [row]
    assert RowChecksums(LAYOUT).wrong_rows(memoryview(page), row + 1, ROWS - row - 1) == []


def test_a_slot_without_checksums_has_nothing_to_compare() -> None:
    """Nothing is written, and no row is wrong."""
    layout = place_fields(FIELDS, ROWS)
    page = bytearray(layout.slot_bytes)
    RowChecksums(layout).write(memoryview(page), 1)

    assert not any(page)
    assert RowChecksums(layout).wrong_rows(memoryview(page), 0, ROWS) == []


def test_users_see_no_checksums() -> None:
    """The fields of a layout and the arrays of a slot do not include them."""
    assert [field.name for field in LAYOUT.sample_fields] == ["image", "label", "valid"]
    assert list(slot_arrays(filled_page(), LAYOUT)) == ["image", "label", "valid"]


def test_no_field_of_a_sample_has_the_name_of_the_checksums() -> None:
    """This holds for each policy for bad samples."""
    for policy in StreamConfig.model_fields["on_error"].annotation.__args__:
        assert CHECKSUM.name not in {
            field.name for field in sample_fields(image_columns(0), [Decode(), Resize(size=(2, 2))], policy)
        }


@pytest.mark.parametrize("change", [["#crc32", "int64", []], ["#crc32", "uint32", [2]]])
def test_checksums_of_another_kind_are_refused(change) -> None:
    """Otherwise a peer could make the reader read beyond the checksums."""
    wire = [[["a", "uint8", [1], 4096, "", []], [*change, 4160, "", []]], 2, 8192]

    with pytest.raises(ValueError, match="one uint32 for each row"):
        layout_from_wire(wire)
