"""How the rows of a batch are cut into the frames that follow a ``Parcel``. Every process; standard library only.

    slot      | header | field a: rows 0 .. first .. first + count .. | field b: ... |
    frames                            [piece][piece][pc]                   [piece][p]

Field by field, each from its row ``first`` on, in pieces of ``PIECE_BYTES``. Both sides count them
out of the layout, so a frame carries bytes and nothing else, and a reader knows how long each one
has to be before it comes.

Where a session has several connections, a batch comes in several parts: runs of pieces of nearly
equal number, one on each.

Why not one frame: what ZeroMQ receives in one piece of tens of megabytes is fresh memory each time,
and touching that costs more than the transfer; pieces of a megabyte come back from the allocator.
"""

from collections.abc import Iterator
from typing import NamedTuple

from batchd_wire.fields import SlotLayout

PIECE_BYTES = 1 << 20


PARTS_MAX = 16
"""Connections of one session, and so parts of one batch."""


class Piece(NamedTuple):
    """Bytes ``start`` to ``end`` of the slot."""

    start: int
    end: int


def pieces(layout: SlotLayout, first: int, count: int) -> Iterator[Piece]:
    """Cut rows ``first`` to ``first + count`` of every field, in the order of the frames."""
    for field in layout.fields:
        start = field.offset + first * field.row_bytes
        end = start + count * field.row_bytes
        for piece in range(start, end, PIECE_BYTES):
            yield Piece(piece, min(piece + PIECE_BYTES, end))


def part_of(layout: SlotLayout, first: int, count: int, part: int, parts: int) -> list[Piece]:
    """The pieces that part number ``part`` of ``parts`` brings; perhaps none, where there are fewer pieces than parts."""
    everything = list(pieces(layout, first, count))
    return everything[len(everything) * part // parts : len(everything) * (part + 1) // parts]
