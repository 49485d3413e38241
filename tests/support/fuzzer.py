"""A trainer that sends any message of a test, and records useful values of the answers.

For fuzzing a daemon.

Each way to a daemon has its own subclass, which defines ``tell`` and ``listen``.
"""

import itertools
from typing import Any

import msgpack

from batchd_wire import PROTOCOL_VERSION
from batchd_wire.codec import Message
from batchd_wire.messages import Handle, Handles, Parcel, Refused, Subscribed, Welcome
from support.hostile_messages import good_message
from support.waiting import wait_until

PLAIN: dict[str, Any] = {
    "settings": "",
    "defines": b"",
    "version": PROTOCOL_VERSION,
    "host": "",
    "rank": 0,
    "window": 2,
    "epoch": 0,
    "step": 0,
    "end_epoch": None,
    "fingerprint": None,
    "wait_us": 1,
}
"""Field values that make a message valid where the example of the type would not."""
_unused_numbers = itertools.count(1_000_000)


class Fuzzer:
    """A fuzzer as in the module docstring. ``known`` has the values for the next good message."""

    def __init__(self) -> None:
        self.known = dict(PLAIN)
        self.refusals: list[str] = []

    def tell(self, *frames: bytes) -> None:
        """Send any message over ZeroMQ, and read what has arrived.

        After a disconnect nothing is sent.
        """
        raise NotImplementedError

    def listen(self) -> None:
        """Read the daemon's messages so far; each is always valid."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until the daemon has read everything: it answers a message with an unused number."""
        number = next(_unused_numbers)
        answer = f"message number {number} is not expected here"
        wait_until(
            lambda: self.tell(msgpack.packb([number])) or answer in self.refusals,
            "the last message is answered",
        )

    def tell_and_learn(self, kind: type[Message], name: str) -> None:
        """Send a good message, and wait until its answer contains ``name``."""
        self.tell(good_message(kind, self.known))
        self.wait_to_learn(kind, name)

    def wait_to_learn(self, kind: type[Message], name: str) -> None:
        """Wait for the answer to a good message."""
        wait_until(lambda: self.listen() or name in self.known, f"a good {kind.__name__} is answered")

    def learn(self, message: Message) -> None:
        """Record the useful values of a message."""
        if isinstance(message, Refused):
            self.refusals.append(message.text)
        if isinstance(message, (Welcome, Subscribed, Handle, Parcel)) or "daemon" in message.field_names:
            self.known |= {name: getattr(message, name) for name in message.field_names}
        if isinstance(message, Handles):
            self.learn(Handle(*message.handles[-1]))
        if isinstance(message, (Handle, Parcel)):
            self.known |= {"released": [(message.sequence, message.generation)], "consumed": message.sequence + 1}
