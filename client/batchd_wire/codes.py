"""Error codes on the wire. Every process. A number is never reused.

1xx  the session: the peer, its version, its messages
2xx  subscribing: the stream, the rank, the position, the memory
3xx  delivery: errors of an admitted subscription
4xx  the daemon's own state
"""

from enum import IntEnum, unique


@unique
class ErrorCode(IntEnum):
    """Reason of a refusal; the text sent with it has the amounts and the remedy."""

    UNSUPPORTED_VERSION = 100
    NOT_ALLOWED = 101
    MALFORMED_MESSAGE = 102
    UNEXPECTED_MESSAGE = 103
    UNKNOWN_SESSION = 104
    KEY_REFUSED = 105
    TOO_OFTEN = 106
    TOO_MANY_SESSIONS = 107

    UNKNOWN_STREAM = 200
    RANK_OUT_OF_RANGE = 201
    POSITION_OUT_OF_RANGE = 202
    FINGERPRINT_MISMATCH = 203
    RING_TOO_SMALL = 204
    TOO_FEW_BATCHES = 205
    WINDOW_OUT_OF_RANGE = 206
    RING_BUSY = 207
    NOT_LIVE = 208
    SETTINGS_REFUSED = 209
    DEFINITION_REFUSED = 210

    RING_EXHAUSTED = 300
    STREAM_STOPPED = 301
    UNKNOWN_SUBSCRIPTION = 302
    PLACE_NOT_LENT = 303
    STREAM_REMOVED = 304
    STREAM_REPLACED = 305

    DRAINING = 400
