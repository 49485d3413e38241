"""Between daemon and the process that derives streams. Never reused numbers.

daemon                                        process
|  ----------------------------------------->  |   DeriveStream (+ fds): one at a time
|  <-----------------------------------------  |   StreamDerived (+ fds): its answer
"""

from dataclasses import field

from batchd_wire.codec import Message, Vocabulary, message
from batchd_wire.record import frozen


@frozen
class DeriveRequest:
    """What a trainer asks for, and the stream that it is derived from. As JSON in memory.

    ``daemon``: the [daemon] in force. ``stream``: the name of the other one; ``configuration`` and
    ``modules`` (digests by name) are that one's. ``settings``: what the trainer sent. ``caches``:
    the keys of those that there are.
    """

    daemon: dict[str, object]
    stream: str
    configuration: dict[str, object]
    modules: dict[str, str]
    settings: str
    caches: list[str] = field(default_factory=list)


@message(117)
class DeriveStream(Message):
    """Derive a stream. Travels with the request, and the index of the other one's source."""


@message(118)
class StreamDerived(Message):
    """The stream, as JSON of its facts in memory, and its index; or why there is none."""

    problem: str = ""


TO_DERIVING = Vocabulary(DeriveStream)
FROM_DERIVING = Vocabulary(StreamDerived)
