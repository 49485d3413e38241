"""A line for the daemon's log, from one of its processes. Numbers are never reused."""

from batchd_wire.codec import Message, message


@message(56)
class ChildLogged(Message):
    """A line for the daemon's log: structlog's ``level``, the ``event``, and ``facts`` by name."""

    level: str
    event: str
    facts: dict[str, object]
