"""The log of the daemon's child processes: its lines are the daemon's. These processes, and DAEMON.

Invariant: a child writes no line itself, since only the daemon knows the log's form and level.
"""

from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import structlog

from batchd.orders.log import ChildLogged
from batchd_wire.channel import ChannelClosed

LEVELS = ("debug", "info", "warning", "error", "critical")
FACT_CHARACTERS_MAX = 4_000
"""As the log has it."""

_log = structlog.get_logger()


def log_over(send: Callable[[ChildLogged], None]) -> None:
    """Send the lines of this process to the daemon."""
    structlog.configure(processors=[partial(_send, send)])


def write_line(line: ChildLogged) -> None:
    """Write a line of a child into the daemon's log."""
    if line.level in LEVELS:
        getattr(_log, line.level)(**{**line.facts, "event": line.event})


def _send(
    send: Callable[[ChildLogged], None], _logger: object, level: str, event: MutableMapping[str, Any]
) -> NoReturn:
    facts: dict[str, object] = {name: _printable(fact) for name, fact in event.items() if name != "event"}
    with suppress(ChannelClosed):
        send(ChildLogged(level, _printable(event["event"]), facts))
    raise structlog.DropEvent


def _printable(fact: object) -> str:
    """Text for a message, which the name of a file need not be."""
    return str(fact)[:FACT_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()
