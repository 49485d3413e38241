"""What the observer answers with. OBSERVER process."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PLAIN = "text/plain; charset=utf-8"
JSON = "application/json"

Query = Mapping[str, str]
"""What stands behind the question mark; of what is said twice the last."""


@dataclass(frozen=True, slots=True)
class Response:
    """What is sent. ``status`` is HTTP's."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Route:
    """What is at a path. ``is_private``: for those alone who may connect to the daemon.

    ``has_effect``: asking for it costs the daemon something, so other web pages may not have a
    visitor's browser do that.
    """

    answer: Callable[[Query], Response]
    meaning: str
    is_private: bool = False
    has_effect: bool = False


def say(status: int, text: str) -> Response:
    """One line for people."""
    return Response(status, PLAIN, f"{text}\n".encode())


def as_json(value: Any) -> Response:
    """Data for programs."""
    return Response(200, JSON, json.dumps(value, allow_nan=False).encode())
