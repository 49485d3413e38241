"""Several messages in one: daemon to gateway and back, gateway to worker host.

    add, add, ... -> flush: one ``Together``, or the message itself if it is the only one

A loop adds the orders, or the results, of one round, and flushes at the end of the round. Before it
sends any other message to the same side it flushes, too, so messages arrive in the order in which
they were added or sent. For example, a withdrawal never arrives before its order.
"""

from collections.abc import Callable

from batchd_wire.channel import DATAGRAM_BYTES_MAX
from batchd_wire.codec import Message, Vocabulary, message

TOGETHER_MAX = 64
"""Messages in one ``Together``."""
ITEM_BYTES = 5
"""Most bytes that ``Together`` adds to each of its messages,"""
HEAD_BYTES = 8
"""and to all of them."""


@message(104)
class Together(Message):
    """Encoded messages, of the vocabulary to which this one belongs."""

    messages: list[bytes]


def messages_in(received: Message, vocabulary: Vocabulary) -> list[Message]:
    """The messages in a ``Together``; any other message is the only one.

    Raises ``MalformedMessage``.
    """
    return [vocabulary.decode(one) for one in received.messages] if isinstance(received, Together) else [received]


class Outbox:
    """Messages that were not sent yet. ``send`` gets the encoded bytes of one message."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._unsent: list[bytes] = []
        self._bytes = HEAD_BYTES

    def add(self, message: Message) -> None:
        """Send a message with the next ``flush``, or earlier if there is no more room."""
        data = message.encode()
        if len(self._unsent) == TOGETHER_MAX or self._bytes + ITEM_BYTES + len(data) > DATAGRAM_BYTES_MAX:
            self.flush()
        self._unsent.append(data)
        self._bytes += ITEM_BYTES + len(data)

    def flush(self) -> None:
        """Send what was added."""
        unsent = self._unsent
        self.clear()
        if unsent:
            self._send(unsent[0] if len(unsent) == 1 else Together(unsent).encode())

    def clear(self) -> None:
        """Drop what was added: its receiver has ended."""
        self._unsent, self._bytes = [], HEAD_BYTES
