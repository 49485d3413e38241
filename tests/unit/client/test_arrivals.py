"""Batches that arrive as bytes, in parts, over several connections.

One side cuts a batch into parts, and the other joins them.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd_client.errors import ProtocolError
from batchd_client.memory import UNDER_WAY_MAX, Arrivals
from batchd_wire.fields import Field, place_fields
from batchd_wire.messages import Parcel
from batchd_wire.tcp import PARTS_MAX, PIECE_BYTES, part_of, pieces

ROWS = 8
LAYOUT = place_fields([Field("image", "uint8", (3, PIECE_BYTES // 2)), Field("label", "int64", ())], ROWS)


def parcel(sequence, part=0, parts=1, **changes):
    """A part of a batch whose position equals its sequence."""
    values = {"epoch": 0, "step": sequence, "generation": 7, "first": 0, "count": ROWS} | changes
    return Parcel(1, sequence, **values, part=part, parts=parts)


@given(st.integers(0, ROWS - 1), st.integers(1, ROWS), st.integers(1, PARTS_MAX))
def test_the_parts_of_a_batch_are_its_pieces_in_order_and_nearly_equal(first, count, parts):
    """Each piece is in one part; with fewer pieces than parts, some parts are empty."""
    count = min(count, ROWS - first)
    cut = [part_of(LAYOUT, first, count, part, parts) for part in range(parts)]

    assert [piece for part in cut for piece in part] == list(pieces(LAYOUT, first, count))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def arrive(arrivals, *parts):
    """Let parts arrive one after the other; return the sequences of the completed batches."""
    handed = []
    for one in parts:
        arrivals.buffer_for(one)
        handed += [whole.sequence for whole, _buffer in arrivals.note(one)]
    return handed


@given(st.permutations([(sequence, part) for sequence in range(4) for part in range(3)]))
def test_batches_are_handed_on_whole_and_in_order_for_every_order_of_parts(order):
    """No batch is handed on before its last part has arrived."""
    arrivals, come = Arrivals(LAYOUT.slot_bytes), []
    for one in order:
        handed = arrive(arrivals, parcel(*one, 3))
        come.append(one)
        whole = [sequence for sequence in range(4) if all((sequence, part) in come for part in range(3))]
        due = next((sequence for sequence in range(4) if sequence not in whole), 4)
        assert all(sequence < due for sequence in handed)
    assert arrive(arrivals, parcel(4)) == [4]


def test_parts_of_one_batch_go_into_one_buffer_and_those_of_another_elsewhere():
    """A buffer that was returned is used again."""
    arrivals = Arrivals(LAYOUT.slot_bytes)
    first = arrivals.buffer_for(parcel(0, 0, 2))
    assert list(arrivals.note(parcel(0, 0, 2))) == []
    assert arrivals.buffer_for(parcel(0, 1, 2)) is first
    assert arrivals.buffer_for(parcel(1)) is not first
    ((_, buffer),) = arrivals.note(parcel(0, 1, 2))
    arrivals.give_back(buffer)
    assert arrivals.buffer_for(parcel(2)) is first


@pytest.mark.parametrize(
    ("came", "comes"),
    [
        ([parcel(0, 1, 2)], parcel(0, 1, 2)),
        ([parcel(0, 1, 2)], parcel(0, 0, 3)),
        ([parcel(0, 1, 2)], parcel(0, 0, 2, step=9)),
        ([parcel(0, 1, 2)], parcel(0, 0, 2, generation=9)),
        ([parcel(0, 1, 2)], parcel(0, 0, 2, count=3)),
        ([parcel(0)], parcel(0)),
        ([], parcel(0, 2, 2)),
        ([], parcel(0, 0, 0)),
        ([], parcel(0, 0, PARTS_MAX + 1)),
        ([], parcel(UNDER_WAY_MAX)),
    ],
)
def test_unexpected_parts_are_refused(came, comes):
    """Parts that are repeated, of another batch, before or far beyond the due one, or too many."""
    arrivals = Arrivals(LAYOUT.slot_bytes)
    arrive(arrivals, *came)

    with pytest.raises(ProtocolError, match="part"):
        arrivals.buffer_for(comes)
