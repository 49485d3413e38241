"""What both sides of a TCP connection agree on: how soon a silent peer is given up. Every process; standard library only.

    PING every ``HEARTBEAT_INTERVAL_MS`` -> no sign of life for ``HEARTBEAT_TIMEOUT_MS`` -> the connection ends: within 15 s

ZeroMQ answers pings in a thread of its own, so a trainer that computes for hours is alive, and one
whose host has vanished is not. TCP's own keepalive guards the time before ZeroMQ's handshake.
"""

from struct import Struct

HEARTBEAT_INTERVAL_MS = 3_000
HEARTBEAT_TIMEOUT_MS = 9_000

CURVE_BYTES = 33
"""What encryption adds to a frame: the name of its command, a nonce, an authenticator and the frame's flags (RFC 26)."""

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
"""Of either side's ZeroMQ socket, by the names that ZeroMQ gives them; times of TCP in seconds."""

_MONITOR_EVENT = Struct("=Hi")


def unpack_monitor_event(frame: bytes) -> tuple[int, int]:
    """What the first frame of a ZeroMQ monitor's message says: (event, its value, often a descriptor)."""
    event, value = _MONITOR_EVENT.unpack(frame)
    return event, value
