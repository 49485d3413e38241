"""The table of all paths, and what stands at them. OBSERVER process; threads of the server.

Invariant: what is at a path that is not ``is_private`` has numbers in it, and names of streams and
trainers, and nothing else.
"""

import socket
from collections.abc import Mapping
from email.message import Message
from time import monotonic
from urllib.parse import parse_qsl

from batchd.observer.exposition import CONTENT_TYPE, SCRAPE_S, Exposition
from batchd.observer.inquiry import Inquiry
from batchd.observer.pages import Pages
from batchd.observer.responses import Query, Response, Route, as_json, say
from batchd.observer.visitors import Visitors, is_passed_on
from batchd_wire.status import DaemonStatus

_OWN_SITES = {"same-origin", "none"}
"""What a browser says of requests by our page, and of addresses that a person typed."""
NOT_PRIVATE = "/metrics, /healthz and /readyz are for everybody"


class Observatory:
    """Answers requests. Use from any thread."""

    def __init__(self, inquiry: Inquiry, visitors: Visitors, pages: Pages) -> None:
        self._inquiry = inquiry
        self._visitors = visitors
        self._exposition = Exposition(inquiry)
        self.routes: Mapping[str, Route] = {
            "/metrics": Route(self._metrics, "numbers for Prometheus"),
            "/healthz": Route(self._health, "200 as long as the daemon's loop answers"),
            "/readyz": Route(self._readiness, "200 when trainers get batches"),
            "/status.json": Route(self._status, "what `batchd status --json` prints", is_private=True),
            **pages.routes,
        }

    def answer(self, target: str, headers: "Message[str, str]", connection: socket.socket) -> Response:
        """Answer a request for ``target`` to who is at the other end."""
        host, *further = headers.get_all("Host", [None])
        if further:
            return say(400, "a request has one Host header")  # RFC 9112, 3.2
        if host is None or not self._visitors.knows_host(host):
            text = f"the Host header names {host or 'none'}, which this is not known as: use an address, or add it to http_names"
            return say(400 if host is None else 421, text)
        path, _mark, query = target.partition("?")
        route = self.routes.get(path)
        if route is None:
            known = "\n".join(f"{path:<16}{route.meaning}" for path, route in self.routes.items())
            return say(404, f"there is nothing here; there are\n{known}")
        if route.is_private and not self._visitors.may_see_details(connection, headers):
            return say(403, self._refusal(connection, headers))
        if route.has_effect and headers.get("Sec-Fetch-Site", "none") not in _OWN_SITES:
            return say(403, "this is for our own page, not for others")
        return route.answer(dict(parse_qsl(query)))

    def _refusal(self, connection: socket.socket, headers: "Message[str, str]") -> str:
        port = connection.getsockname()[1]
        passed_on = "it was passed on by a proxy, and nobody here knows for whom; " if is_passed_on(headers) else ""
        return passed_on + (
            "this names processes, users and paths, so it is for users of the daemon's machine who may connect to the daemon, "
            f"over loopback: ssh -L {port}:localhost:{port} SERVER (with an account in the runtime directory's group), then "
            f"http://localhost:{port}; or http_details = true in [daemon] shows it to everybody. {NOT_PRIVATE}"
        )

    def _metrics(self, _query: Query) -> Response:
        return Response(200, CONTENT_TYPE, self._exposition.text())

    def _health(self, _query: Query) -> Response:
        if self._inquiry.is_answered:
            return say(200, "ok")
        return say(503, f"the daemon's loop has not answered for {self._inquiry.silent_s():.0f} s")

    def _readiness(self, _query: Query) -> Response:
        answer = self._inquiry.latest()
        if not self._inquiry.is_answered:
            return self._health({})
        reason = "the daemon has not answered yet" if answer is None else why_not_ready(answer.status)
        return say(200, "ready") if reason is None else say(503, reason)

    def _status(self, _query: Query) -> Response:
        answer = self._inquiry.fresh(SCRAPE_S)
        if answer is None:
            return say(503, "the daemon has not answered yet")
        observer = {"age_s": monotonic() - answer.came_s, "up": self._inquiry.is_answered}
        return as_json({**answer.plain, "observer": observer})


def why_not_ready(status: DaemonStatus) -> str | None:
    """Say why trainers would get no batches; None where they get them."""
    if status.daemon.draining:
        return "the daemon is draining"
    if not any(worker.state == "ready" for worker in status.workers):
        return "no worker is ready"
    if all(stream.stopped is not None for stream in status.streams):
        return "all streams have stopped; `batchd status` says why"
    return None
