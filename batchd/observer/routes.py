"""The table of all paths, and what stands at them. OBSERVER process; threads of the server.

Invariant: what is at a path that is not ``is_private`` has numbers in it, and names of streams and trainers, and nothing else.
"""

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from batchd.observer.exposition import CONTENT_TYPE, SCRAPE_S, Exposition
from batchd.observer.inquiry import Inquiry
from batchd.observer.visitors import Visitors

PLAIN = "text/plain; charset=utf-8"
NOT_PRIVATE = "/metrics, /healthz and /readyz are for everybody"


@dataclass(frozen=True, slots=True)
class Response:
    """What is sent. ``status`` is HTTP's."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Route:
    """What is at a path. ``is_private``: for those alone who may connect to the daemon."""

    answer: Callable[[], Response]
    meaning: str
    is_private: bool = False


class Observatory:
    """Answers requests. Use from any thread."""

    def __init__(self, inquiry: Inquiry, visitors: Visitors) -> None:
        self._inquiry = inquiry
        self._visitors = visitors
        self._exposition = Exposition(inquiry)
        self.routes: Mapping[str, Route] = {
            "/": Route(self._index, "this list"),
            "/metrics": Route(self._metrics, "numbers for Prometheus"),
            "/healthz": Route(self._health, "200 as long as the daemon's loop answers"),
            "/readyz": Route(self._readiness, "200 when trainers get batches"),
            "/status.json": Route(self._status, "what `batchd status --json` prints", is_private=True),
        }

    def answer(self, path: str, host: str | None, connection: socket.socket) -> Response:
        """Answer a request for ``path`` to who is at the other end; ``host`` is the header of that name."""
        if host is None or not self._visitors.knows_host(host):
            text = f"the Host header names {host or 'nobody'}, and this is not known as that; use an address, or name it in http"
            return _say(400 if host is None else 421, text)
        route = self.routes.get(path.partition("?")[0])
        if route is None:
            return _say(404, f"there is nothing here; there are {', '.join(self.routes)}")
        if route.is_private and not self._visitors.may_see_details(connection):
            return _say(403, self._refusal(connection))
        return route.answer()

    def _refusal(self, connection: socket.socket) -> str:
        port = connection.getsockname()[1]
        return (
            "this names processes, users and paths, so it is for users of the daemon's machine who may connect to the daemon, "
            f"over loopback: ssh -L {port}:localhost:{port} SERVER (with an account in the runtime directory's group), then "
            f"http://localhost:{port}; or http_details = true in [daemon] shows it to everybody. {NOT_PRIVATE}"
        )

    def _index(self) -> Response:
        return _say(200, "\n".join(f"{path:<14}{route.meaning}" for path, route in self.routes.items()))

    def _metrics(self) -> Response:
        return Response(200, CONTENT_TYPE, self._exposition.text())

    def _health(self) -> Response:
        if self._inquiry.is_answered:
            return _say(200, "ok")
        return _say(503, f"the daemon's loop has not answered for {self._inquiry.silent_s():.0f} s")

    def _readiness(self) -> Response:
        answer = self._inquiry.latest()
        if not self._inquiry.is_answered:
            return self._health()
        reason = "the daemon has not answered yet" if answer is None else why_not_ready(answer.status)
        return _say(200, "ready") if reason is None else _say(503, reason)

    def _status(self) -> Response:
        answer = self._inquiry.fresh(SCRAPE_S)
        if answer is None:
            return _say(503, "the daemon has not answered yet")
        observer = {"age_s": monotonic() - answer.came_s, "up": self._inquiry.is_answered}
        return Response(200, "application/json", json.dumps({**answer.status, "observer": observer}).encode())


def why_not_ready(status: Any) -> str | None:
    """Say why trainers would get no batches; None where they get them."""
    if status["daemon"]["draining"]:
        return "the daemon is draining"
    if not any(worker["state"] == "ready" for worker in status["workers"]):
        return "no worker is ready"
    if all(stream["stopped"] is not None for stream in status["streams"]):
        return "all streams have stopped; `batchd status` says why"
    return None


def _say(status: int, text: str) -> Response:
    return Response(status, PLAIN, f"{text}\n".encode())
