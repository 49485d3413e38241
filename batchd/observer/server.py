"""HTTP with limits: the standard library's server, one thread for each connection, a bounded number of them. OBSERVER process.

    accept --> room? --> head, within HEAD_BYTES_MAX and REQUEST_S --> GET or HEAD --> one response --> close
                +-- no: the oldest that has not asked for anything yet is ended, of the same peer if that has its share
                    +-- all have asked: 503, close

Invariant: whatever peers do, there are ``CONNECTIONS_MAX`` threads at most,
``PEER_CONNECTIONS_MAX`` for one address, each for ``REQUEST_S`` and with ``HEAD_BYTES_MAX`` at
most; one connection is one request. Who asks at once is answered however many connect and say
nothing.
"""

import io
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition
from time import monotonic
from typing import Any

from batchd import failpoints
from batchd.observer.responses import PLAIN, Response
from batchd.observer.routes import Observatory

CONNECTIONS_MAX = 64
PEER_CONNECTIONS_MAX = 16
"""Of one address; a browser opens six."""
EVICTION_S = 1.0
"""How long a newcomer waits for the end of a connection that has to go for it."""
HEAD_BYTES_MAX = 16 * 1024
"""Request line and headers; a browser's cookies for localhost are among them, whoever set them."""
REQUEST_S = 5.0
"""For all of a request and its response, however slowly its bytes come or are taken."""
BACKLOG = 128
METHODS = ("GET", "HEAD")
UNREAD_BYTES_MAX = 1 << 20
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_FULL = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"


@dataclass(slots=True)
class _HttpConnection:
    """One that is open. ``has_asked``: its head is whole."""

    peer: str
    deadline_s: float
    has_asked: bool = False


class Server(ThreadingHTTPServer):
    """Serves on a socket that listens already. ``serve_forever`` in a thread of its own."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, observatory: Observatory) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        listener.setblocking(True)
        self.observatory = observatory
        self._changed = Condition()
        self._open: dict[socket.socket, _HttpConnection] = {}
        """The oldest first."""

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin with a connection where there is room, or can be made, else say that there is none."""
        peer = client_address[0]
        with self._changed:
            of_peer = [one for one, connection in self._open.items() if connection.peer == peer]
            has_room = (len(of_peer) < PEER_CONNECTIONS_MAX or self._end_oldest(of_peer)) and (
                len(self._open) < CONNECTIONS_MAX or self._end_oldest(self._open)
            )
            if has_room:
                self._open[request] = _HttpConnection(peer, monotonic() + REQUEST_S)
        if has_room:
            with suppress(RuntimeError):  # there is no thread for it
                super().process_request(request, client_address)
                return
        with suppress(OSError):
            request.send(_FULL, socket.MSG_DONTWAIT)
        self.shutdown_request(request)

    def _end_oldest(self, requests: Iterable[socket.socket]) -> bool:
        """End the oldest of these that has not asked for anything yet, and wait until it is gone; False where that cannot be."""
        oldest = next((one for one in requests if not self._open[one].has_asked), None)
        if oldest is None:
            return False
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
        return self._changed.wait_for(lambda: oldest not in self._open, EVICTION_S)

    def note_asked(self, request: socket.socket) -> None:
        """A connection's head is whole: from now on it is not ended for others."""
        with self._changed:
            if request in self._open:
                self._open[request].has_asked = True

    def service_actions(self) -> None:
        """End what takes too long; twice a second, and after each connection that comes."""
        now = monotonic()
        with self._changed:
            overdue = [request for request, connection in self._open.items() if connection.deadline_s < now]
            for request in overdue:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection. Its number may be another's at once, so it is forgotten before."""
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away is no error; a bug of ours is told on standard error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _HeadTooLong(Exception):  # noqa: N818  it is what the peer did
    """More than ``HEAD_BYTES_MAX`` without an end."""


class _Handler(BaseHTTPRequestHandler):
    """One request. The whole head is read first, so the library's parser never waits, and never reads more."""

    server: Server
    timeout = REQUEST_S

    def handle(self) -> None:
        """Read the head, and answer."""
        try:
            head = self._read_head()
        except _HeadTooLong:
            self.requestline, self.request_version, self.command = "", "HTTP/1.0", "GET"
            self._send(Response(431, PLAIN, f"a request has {HEAD_BYTES_MAX} bytes at most\n".encode()))
            self._read_away()
            return
        if not head:
            return
        self.server.note_asked(self.connection)
        self.rfile = io.BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        if not self.parse_request():
            return
        failpoints.passing("observer.request")
        if self.command not in METHODS:
            self._send(Response(405, PLAIN, b"only GET and HEAD are answered here\n"))
            return
        self._send(self.server.observatory.answer(self.path, self.headers, self.connection))

    def end_headers(self) -> None:
        """What every response says, those of the library's parser too."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        """What we are; which version is nobody's business."""
        return "batchd"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the library's name
        """Nothing: who asks how often is no event in the daemon's life."""

    def _read_head(self) -> bytes:
        """Everything up to the empty line; nothing where the peer goes before that. The server ends what takes too long."""
        head = bytearray()
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            if len(head) >= HEAD_BYTES_MAX:
                raise _HeadTooLong
            part = self.connection.recv(HEAD_BYTES_MAX - len(head))
            if not part:
                return b""
            head += part
        return bytes(head)

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        if response.status == 405:  # noqa: PLR2004  it has to say what else
            self.send_header("Allow", ", ".join(METHODS))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def _read_away(self) -> None:
        """Read some of what is still coming: who is closed on in mid-sentence never hears why."""
        self.connection.shutdown(socket.SHUT_WR)
        left = UNREAD_BYTES_MAX
        while left > 0 and (part := self.connection.recv(HEAD_BYTES_MAX)):
            left -= len(part)
