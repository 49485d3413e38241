"""TCP sessions: heartbeats, and the frames of a batch. Every process; standard library only.

    PING every HEARTBEAT_INTERVAL_MS -> silence for HEARTBEAT_TIMEOUT_MS -> the connection ends

A vanished host is detected within 15 s. ZeroMQ answers pings in a thread of its own, so a trainer
that computes for hours stays connected. TCP's own keepalive guards the time before ZeroMQ's
handshake.

    slot      | header | field a: rows 0 .. first .. first + count .. | field b: ... |
    frames                            [piece][piece][pc]                   [piece][p]

The frames behind a ``Parcel`` carry its rows field by field, in pieces of ``PIECE_BYTES``. Both
sides derive the pieces from the layout, so a frame carries bytes only, and the receiver knows the
length of each frame beforehand. With several connections, a batch is sent in parts: runs of nearly
equally many pieces, one on each connection.

Pieces, because ZeroMQ receives a frame of tens of megabytes into fresh memory each time, and
touching fresh memory costs more than the transfer. Pieces of a megabyte reuse the allocator's
memory.
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from batchd_wire.fields import SlotLayout

HEARTBEAT_INTERVAL_MS = 3_000
HEARTBEAT_TIMEOUT_MS = 9_000

CURVE_BYTES = 33
"""Bytes that encryption adds to a frame (RFC 26): command name, nonce, authenticator, flags."""

SOCKET_OPTIONS = {
    "LINGER": 0,
    "IPV6": 1,
    "HEARTBEAT_IVL": HEARTBEAT_INTERVAL_MS,
    "HEARTBEAT_TIMEOUT": HEARTBEAT_TIMEOUT_MS,
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPALIVE_IDLE": 5,
    "TCP_KEEPALIVE_INTVL": 3,
    "TCP_KEEPALIVE_CNT": 3,
}
"""Options of both sides' ZeroMQ sockets, by ZeroMQ's names; TCP times are in seconds."""

CONNECTING_OPTIONS = {**SOCKET_OPTIONS, "RECONNECT_IVL": 24 * 3600 * 1000}
"""Options of a socket that connects once: it is closed after the end of its connection, long before
ZeroMQ connects again. Without IMMEDIATE: with it, ZeroMQ drops what has arrived when the connection
ends, and aborts the process if a part of that message has been read (libzmq 4.3.5, fq.cpp).
"""

_MONITOR_EVENT = Struct("=Hi")


def unpack_monitor_event(frame: bytes) -> tuple[int, int]:
    """Decode the first frame of a ZeroMQ monitor message: (event, value), often a descriptor."""
    event, value = _MONITOR_EVENT.unpack(frame)
    return event, value


PIECE_BYTES = 1 << 20
PARTS_MAX = 16
"""Most connections of one session, and so most parts of one batch."""


class Piece(NamedTuple):
    """Bytes ``start`` to ``end`` of the slot."""

    start: int
    end: int


def pieces(layout: SlotLayout, first: int, count: int, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut rows ``first`` to ``first + count`` of every field, in the order of the frames."""
    for field in layout.fields:
        start = field.offset + first * field.row_bytes
        end = start + count * field.row_bytes
        for piece in range(start, end, piece_bytes):
            yield Piece(piece, min(piece + piece_bytes, end))


def part_of(layout: SlotLayout, first: int, count: int, part: int, parts: int) -> list[Piece]:
    """List the pieces of part ``part`` of ``parts``; none where pieces are fewer than parts."""
    everything = list(pieces(layout, first, count))
    return everything[len(everything) * part // parts : len(everything) * (part + 1) // parts]
