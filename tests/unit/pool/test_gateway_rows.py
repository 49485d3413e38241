"""Rows of worker hosts: checked before a byte is written, copied to their place, compared."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.core.events import OrderFilled
from batchd.core.rows import rows_of, runs_of
from batchd.core.work import NO_WORK, Work
from batchd.pool.gateway.rows import (
    SLACK_US,
    TRIES_MAX,
    RowsInvalid,
    begin,
    check_report,
    check_rows,
    copy,
    difference,
    places_of,
    write,
)
from batchd.pool.messages import ROW_FRAME_BYTES
from batchd_wire.fields import HEADER_BYTES, PADDED, Field, Varying, place_fields, sizes_field
from batchd_wire.tcp import Piece
from batchd_wire.views import field_array
from support.gateways import LAYOUT, frames_of, random_rows

FIRST, COUNT = 2, 7
ROWS = range(FIRST, FIRST + COUNT)
PLACES = places_of(LAYOUT, [(FIRST, COUNT)])


@pytest.fixture
def page() -> bytearray:
    """A slot as a worker host filled it."""
    return random_rows(LAYOUT.rows)


@pytest.fixture
def frames(page) -> list[bytes]:
    """The frames of its rows 2 to 9."""
    return frames_of(page, FIRST, COUNT)


def check(frames) -> None:
    check_rows(LAYOUT, COUNT, PLACES, frames)


def changed(frames, number, data) -> list[bytes]:
    return [*frames[:number], data, *frames[number + 1 :]]


# --- writes ---------------------------------------------------------------------------------------


def test_rows_are_written_at_their_place_and_nowhere_else(frames) -> None:
    """The rows before and after them, and the header, stay unchanged."""
    former = random_rows(LAYOUT.rows, seed=1)
    slot = bytearray(former)

    check(frames)
    write(memoryview(slot), PLACES, frames)

    assert frames_of(slot, FIRST, COUNT) == frames
    for first, count in ((0, FIRST), (FIRST + COUNT, LAYOUT.rows - FIRST - COUNT)):
        assert frames_of(slot, first, count) == frames_of(former, first, count)
    assert slot[:HEADER_BYTES] == former[:HEADER_BYTES]
    assert len(frames) > len(LAYOUT.fields), "some fields take several frames"


@given(st.integers(0, 15), st.integers(1, 16))
def test_rows_survive_the_copy_unchanged(first, count) -> None:
    """A slot gets exactly the bytes that were copied out of another."""
    count = min(count, LAYOUT.rows - first)
    places = places_of(LAYOUT, [(first, count)])
    frames = frames_of(random_rows(LAYOUT.rows), first, count)
    slot = memoryview(bytearray(LAYOUT.slot_bytes))

    write(slot, places, frames)

    assert copy(slot, places) == frames
    assert difference(LAYOUT, range(first, first + count), copy(slot, places), frames) == ""


RUNS = st.sets(st.integers(0, LAYOUT.rows - 1), min_size=1).map(lambda rows: runs_of(sorted(rows)))


@given(RUNS)
def test_rows_with_gaps_are_written_at_their_places_and_nowhere_else(runs) -> None:
    """The frames are those of a contiguous order; the gaps stay unchanged."""
    rows = list(rows_of(runs))
    made, former = random_rows(LAYOUT.rows), random_rows(LAYOUT.rows, seed=1)
    packed = bytearray(LAYOUT.slot_bytes)
    for field in LAYOUT.fields:
        one, all_rows = (field_array(memoryview(page), field, LAYOUT.rows) for page in (packed, made))
        one[: len(rows)] = all_rows[rows]
    frames = frames_of(packed, 0, len(rows))
    places = places_of(LAYOUT, runs)
    slot = bytearray(former)

    check_rows(LAYOUT, len(rows), places, frames)
    write(memoryview(slot), places, frames)

    for field in LAYOUT.fields:
        written, ours, theirs = (field_array(memoryview(page), field, LAYOUT.rows) for page in (slot, former, made))
        assert all(
            written[row].tobytes() == (theirs if row in rows else ours)[row].tobytes() for row in range(LAYOUT.rows)
        )
    assert slot[:HEADER_BYTES] == former[:HEADER_BYTES]
    assert copy(memoryview(slot), places) == frames


def test_the_sizes_of_rows_are_invalid_before_the_first_frame_is_written(page) -> None:
    """Nothing else changes: a worker that fills a ragged row next clears all of its room."""
    slot = bytearray(page)
    sizes = next(field for field in LAYOUT.fields if field.name == "text_length")
    expected = bytearray(page)
    field_array(memoryview(expected), sizes, LAYOUT.rows)[FIRST : FIRST + COUNT] = -1
    assert slot != expected

    begin(memoryview(slot), LAYOUT, COUNT, PLACES)

    assert slot == expected


def test_frames_that_would_fill_the_gaps_are_refused(page) -> None:
    """A host that also sends the rows in the gaps sends too many bytes."""
    places = places_of(LAYOUT, [(2, 2), (7, 2)])

    with pytest.raises(RowsInvalid):
        check_rows(LAYOUT, 4, places, frames_of(page, 2, 7))


def test_a_difference_in_rows_with_gaps_names_the_row_of_the_batch(page) -> None:
    """The third row of the order is row 7 of the batch."""
    ours = frames_of(page, 0, 4)
    theirs = bytearray(page)
    field_array(memoryview(theirs), LAYOUT.fields[0], LAYOUT.rows)[2] += 1

    assert "in row 7 first" in difference(LAYOUT, rows_of([(2, 2), (7, 2)]), ours, frames_of(theirs, 0, 4))


def test_the_header_page_is_never_written() -> None:
    """Only the daemon writes it."""
    with pytest.raises(AssertionError, match="header"):
        write(memoryview(bytearray(LAYOUT.slot_bytes)), [(Piece(HEADER_BYTES - 1, HEADER_BYTES),)], [b""])


# --- refusals -------------------------------------------------------------------------------------


def test_too_few_and_too_many_frames_are_refused(frames) -> None:
    """The error has both numbers."""
    for wrong in ([], frames[:-1], [*frames, b""]):
        with pytest.raises(RowsInvalid, match=rf"^{len(wrong)} frames of rows came instead of {len(frames)}$"):
            check(wrong)


@pytest.mark.parametrize("delta", [-1, 1])
def test_a_frame_of_another_length_is_refused_at_every_place(frames, delta) -> None:
    """The error has its number and both lengths; swapped frames are found, too."""
    for number, frame in enumerate(frames):
        wrong = changed(frames, number, frame[:-1] if delta < 0 else frame + b"!")
        with pytest.raises(
            RowsInvalid, match=rf"^frame {number} .* {len(frame) + delta} bytes instead of {len(frame)}$"
        ):
            check(wrong)
    with pytest.raises(RowsInvalid, match="frame 0 "):
        check([frames[-1], *frames[1:-1], frames[0]])


@pytest.mark.parametrize("size", [-1, 41, 1 << 30, -(1 << 31)])
def test_a_size_beyond_its_room_is_refused_before_anything_is_written(page, size) -> None:
    """A reader would read the memory after the room."""
    sizes = next(field for field in LAYOUT.fields if field.name == "text_length")
    field_array(memoryview(page), sizes, LAYOUT.rows)[FIRST + 3] = size

    with pytest.raises(RowsInvalid, match=rf"field 'text': row 3 has the sizes \[{size}\]"):
        check(frames_of(page, FIRST, COUNT))


def test_each_size_of_several_dimensions_is_checked() -> None:
    """NAME_shape has one size for each."""
    image = Field("image", "uint8", (4, 6, 3), Varying(PADDED, (0, 1)))
    sizes = sizes_field(image)
    assert sizes is not None
    layout = place_fields((image, sizes), 2)
    slot = bytearray(layout.slot_bytes)
    shapes = field_array(memoryview(slot), layout.fields[1], 2)
    shapes[:] = (4, 6)
    places = places_of(layout, [(0, 2)])

    check_rows(layout, 2, places, frames_of(slot, 0, 2, layout))
    shapes[1] = (4, 7)
    with pytest.raises(
        RowsInvalid, match=r"field 'image': row 1 has the sizes \[4, 7\], and the largest may be \[4, 6\]"
    ):
        check_rows(layout, 2, places, frames_of(slot, 0, 2, layout))


# --- reports --------------------------------------------------------------------------------------


def report(bad=(), **work: Any) -> OrderFilled:
    return OrderFilled(1, 0, 9, NO_WORK._replace(**work), list(bad), "")


def test_a_valid_report_is_accepted() -> None:
    """All samples of a chunk may be bad, slow and read twice."""
    work = {"busy_us": 10_000_000, "parts_us": [9_000_000, 1_000_000], "read_bytes": 7 * 1000, "slow_rows": 7}
    check_report(report([(1, "a.jpg", "bad")] * 7, **work, slow=[(1, "a.jpg", 5)], cache_misses=14), 7, 1000, 10.0)


@pytest.mark.parametrize(
    "work",
    [
        *({name: SLACK_US + 2_000_001} for name in Work._fields if name.endswith("_us") and name != "parts_us"),
        {"parts_us": [0, 1 << 62]},
        {"slow": [(1, "a.jpg", 1 << 62)]},
        {"slow": [(1, "a.jpg", 1)] * (COUNT * TRIES_MAX + 1)},
        {"read_bytes": COUNT * TRIES_MAX * 1000 + 1},
        {"slow_rows": 1 << 60},
        {"cache_hits": 1 << 60},
        {"cache_misses": 1 << 60},
    ],
    ids=str,
)
def test_a_report_of_impossible_numbers_is_refused(work) -> None:
    """Otherwise the daemon's sums would soon exceed the numbers that a message can carry."""
    with pytest.raises(RowsInvalid, match=r"^a worker (says|reports)"):
        check_report(report(**work), COUNT, 1000, 1.0)


def test_more_bad_samples_than_rows_can_have_is_refused() -> None:
    """A worker tries a limited number of substitutes for each row."""
    with pytest.raises(RowsInvalid, match="more samples than 1 rows can have"):
        check_report(report([(1, "", "")] * (TRIES_MAX + 1)), 1, 1000, 1.0)


# --- comparison -----------------------------------------------------------------------------------


def frame_of(name: str) -> int:
    """The first frame of a field."""
    before = LAYOUT.fields[: [field.name for field in LAYOUT.fields].index(name)]
    return sum(-(-COUNT * field.row_bytes // ROW_FRAME_BYTES) for field in before)


def differing(frames, name, row, values, dtype) -> list[bytes]:
    """The frames with other first values of one row, in the first frame of a field."""
    number = frame_of(name)
    data = bytearray(frames[number])
    field = next(field for field in LAYOUT.fields if field.name == name)
    np.frombuffer(data, dtype, len(values), row * field.row_bytes)[:] = values
    return changed(frames, number, bytes(data))


def test_equal_rows_have_no_difference(frames) -> None:
    """The type of the buffers does not matter."""
    assert difference(LAYOUT, ROWS, frames, [memoryview(frame) for frame in frames]) == ""


def test_a_changed_pixel_is_reported_with_its_field_number_size_and_row(frames) -> None:
    """One difference is 3 and one is 200, in the second and third of the rows."""
    ours = differing(frames, "image", 1, [10, 11, 12], np.uint8)
    theirs = differing(ours, "image", 1, [10, 14, 12], np.uint8)
    ours = differing(ours, "image", 2, [250], np.uint8)
    theirs = differing(theirs, "image", 2, [50], np.uint8)

    assert difference(LAYOUT, ROWS, ours, theirs) == (
        "field 'image': 2 of 2,520,000 values differ, by 200 at most, in row 3 first"
    )


def test_every_byte_of_every_frame_counts(frames) -> None:
    """This includes checksums, sizes, and the room after a ragged sample."""
    for number, frame in enumerate(frames):
        theirs = changed(frames, number, frame[:-1] + bytes([frame[-1] ^ 1]))
        assert "1 of " in difference(LAYOUT, ROWS, frames, theirs)


def test_numbers_of_every_type_are_compared_bit_for_bit() -> None:
    """NaN equals itself, zero differs from minus zero, and large numbers do not overflow."""
    for dtype, ours, theirs, largest in (
        ("float32", np.nan, np.nan, None),
        ("float32", 0.0, -0.0, "0"),
        ("float64", 1.0, np.nan, "nan"),
        ("float16", 1.0, 1.5, "0.5"),
        ("int64", -(1 << 63), (1 << 63) - 1, "1.84467e+19"),
        ("uint64", 0, (1 << 64) - 1, "1.84467e+19"),
        ("bool", True, False, "1"),
    ):
        layout = place_fields((Field("x", dtype, (2,)),), 3)
        rows = [np.zeros((3, 2), dtype), np.zeros((3, 2), dtype)]
        rows[0][2, 1], rows[1][2, 1] = ours, theirs
        expected = f"field 'x': 1 of 6 values differ, by {largest} at most, in row 12 first" if largest else ""
        assert difference(layout, range(10, 13), [rows[0].tobytes()], [rows[1].tobytes()]) == expected, dtype


def test_a_layout_without_varying_fields_needs_no_sizes() -> None:
    """Most streams have no varying fields."""
    layout = replace(place_fields((Field("x", "uint8", (5,)),), 4))
    check_rows(layout, 2, places_of(layout, [(1, 2)]), [bytes(10)])
