"""Between daemon and the process that derives streams. Never reused numbers.

daemon                                        process
|  ----------------------------------------->  |   DeriveStream, DefineStream (+ fds): one at a time
|  <-----------------------------------------  |   StreamDerived (+ fds): its answer
"""

from dataclasses import field

from batchd.daemon.identity import Identity
from batchd_wire.codec import Message, Vocabulary, message
from batchd_wire.record import frozen


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


@message(119)
class DefineStream(Message):
    """Work out a stream that is defined. Travels with the request."""


@message(118)
class StreamDerived(Message):
    """The stream, as JSON of its facts in memory, and its index; or why there is none."""

    problem: str = ""


TO_DERIVING = Vocabulary(DeriveStream, DefineStream)
FROM_DERIVING = Vocabulary(StreamDerived)
