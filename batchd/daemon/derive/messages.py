"""Between daemon, the process that derives streams, and its forks. Never reused numbers.

daemon                           process                         fork
|  --------------------------->  |                                |   DeriveStream, DefineStream
|                                |  <---------------------------  |   (+ fds): up to AT_ONCE_MAX
|  <---------------------------  |                                |   StreamDerived (+ fds)
"""

from dataclasses import field

from batchd.daemon.identity import Identity
from batchd_wire.codec import Message, Vocabulary, message
from batchd_wire.record import frozen

AT_ONCE_MAX = 4
"""Requests that are worked out beside one another."""
ANSWER_MAX_S = 30.0
"""A fork that takes longer for its stream is ended."""


@frozen
class DeriveRequest:
    """What a trainer asks for, and the stream that it is derived from. As JSON in memory.

    ``daemon``: the [daemon] in force. ``stream``: the name of the other one; ``configuration`` and
    ``modules`` (digests by name) are that one's. ``settings``: what the trainer sent. ``caches``:
    the keys of those that there are. ``identity``: who asks.
    """

    daemon: dict[str, object]
    stream: str
    configuration: dict[str, object]
    modules: dict[str, str]
    settings: str
    caches: list[str] = field(default_factory=list)
    identity: Identity = Identity()


@frozen
class DefineRequest:
    """The stream that a trainer defines: its name, and its table as JSON. As JSON in memory.

    ``daemon``: the [daemon] in force. ``modules``: digests, by name, of those that workers may have
    imported.
    """

    daemon: dict[str, object]
    stream: str
    table: str
    identity: Identity
    modules: dict[str, str]


@message(117)
class DeriveStream(Message):
    """Derive a stream. Travels with the request, and the index of the other one's source."""

    request: int


@message(119)
class DefineStream(Message):
    """Work out a stream that is defined. Travels with the request."""

    request: int


@message(118)
class StreamDerived(Message):
    """The stream, as JSON of its facts in memory, and its index; or why there is none.

    A fork answers for ``request`` 0. ``scan``: the key of its source's index, if that is to be kept
    for the same owner; it travels with it, and with its witnesses. ``roots``: those of
    [daemon.define] that its files are below.
    """

    request: int = 0
    problem: str = ""
    scan: str = ""
    roots: list[str] = field(default_factory=list)


TO_DERIVING = Vocabulary(DeriveStream, DefineStream)
FROM_DERIVING = Vocabulary(StreamDerived)
