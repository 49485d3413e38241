"""The OBSERVER process, which only the daemon starts: HTTP with limits, in threads.

python -m batchd.observe.http LISTENER_FD RUNTIME_DIRECTORY all|insiders ACCESS NAME... LIFELINE_FD

    accept --> room? --> head: HEAD_BYTES_MAX, REQUEST_S --> GET or HEAD --> response --> close
                +-- no: end the oldest connection without a request (of a peer that has its share)
                    +-- all have a request: 503, close

Invariant: there are at most ``CONNECTIONS_MAX`` threads, ``PEER_CONNECTIONS_MAX`` for one address,
each for at most ``REQUEST_S`` and ``HEAD_BYTES_MAX``; one connection is one request. A client that
sends its request at once is answered, however many others connect and send nothing.
"""

import io
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Thread
from time import monotonic

from batchd.errors import ExitCode
from batchd.observe.http.access import AccessRules, HostNames
from batchd.observe.http.contact_sheets import ContactSheets
from batchd.observe.http.routes import Response, Router, text_response
from batchd.observe.http.status_client import StatusClient, StatusRecorder
from batchd.runtime import failpoints
from batchd.runtime.sandbox import Access, enclose, version
from batchd_client.errors import BatchdClientError, ConnectTimeout
from batchd_client.lifeline import DaemonBusy
from batchd_wire.runtime import runtime_directory
from batchd_wire.threads import MORE_THREADS, TooFewThreads, check_threads

OWN_THREADS = 4
"""One that serves, one that asks the resolver, and some for connections."""
CONNECTIONS_MAX = 64
PEER_CONNECTIONS_MAX = 16
"""From one address; a browser opens six."""
EVICTION_S = 1.0
"""How long a new connection waits for the end of the one that it replaces."""
HEAD_BYTES_MAX = 16 * 1024
"""Request line and headers, with cookies for localhost that other programs may have set."""
REQUEST_S = 5.0
"""For a whole request and its response, however slowly the peer sends or receives."""
BACKLOG = 128
METHODS = ("GET", "HEAD")
DNS = 53
TABLES = ("/etc/passwd", "/etc/group")
"""Of users and groups. A tool that changes them puts other files in their place."""
UNREAD_BYTES_MAX = 1 << 20
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_Request = socket.socket | tuple[bytes, socket.socket]
"""The library's type; a pair is that of a datagram server."""
_FULL = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"


@dataclass(slots=True)
class _HttpConnection:
    """An open connection. ``has_asked``: its head is complete."""

    peer: str
    deadline_s: float
    has_asked: bool = False


class Server(ThreadingHTTPServer):
    """Serves on a listening socket. Run ``serve_forever`` in a thread of its own.

    ``tables``: files of which this process can read those that are there now, and no later ones.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, router: Router, tables: Iterable[str] = ()) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        listener.setblocking(True)
        self.router = router
        self._changed = Condition()
        self._open: dict[socket.socket, _HttpConnection] = {}
        """Oldest first."""
        self._tables = {file: os.stat(file).st_ino for file in tables}  # noqa: PTH116  cheap, as below

    def process_request(self, request: _Request, client_address: tuple[str, int]) -> None:
        """Start a thread for a connection if there is or can be room; else answer 503."""
        assert isinstance(request, socket.socket)
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
        """End the oldest of these without a request, and wait for that. False if it failed."""
        oldest = next((one for one in requests if not self._open[one].has_asked), None)
        if oldest is None:
            return False
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
        return self._changed.wait_for(lambda: oldest not in self._open, EVICTION_S)

    def note_asked(self, request: socket.socket) -> None:
        """The head of a connection's request is complete, so it is not ended for others."""
        with self._changed:
            if request in self._open:
                self._open[request].has_asked = True

    def service_actions(self) -> None:
        """End overdue connections; called twice a second, and after each new connection.

        Ends the process if a table of users is another file, which the next observer can read.
        """
        if any(os.stat(file).st_ino != inode for file, inode in self._tables.items()):  # noqa: PTH116  twice a second
            os._exit(ExitCode.FINE)
        now = monotonic()
        with self._changed:
            overdue = [request for request, connection in self._open.items() if connection.deadline_s < now]
            for request in overdue:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: _Request) -> None:
        """Close a connection. Its descriptor may be reused at once, so forget it first."""
        assert isinstance(request, socket.socket)
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def handle_error(self, request: _Request, client_address: tuple[str, int]) -> None:
        """Ignore peers that disconnect; print bugs on standard error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request. The whole head is read first, so the library's parser never waits."""

    server: Server
    timeout = REQUEST_S

    def handle(self) -> None:
        """Read the head and answer."""
        head = self._read_head()
        if head is None:
            self.requestline, self.request_version, self.command = "", "HTTP/1.0", "GET"
            self._send(text_response(431, f"a request has {HEAD_BYTES_MAX} bytes at most"))
            # Read the rest: a peer that is closed while it sends would lose the response.
            self.connection.shutdown(socket.SHUT_WR)
            left = UNREAD_BYTES_MAX
            while left > 0 and (part := self.connection.recv(HEAD_BYTES_MAX)):
                left -= len(part)
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
            self._send(text_response(405, "only GET and HEAD are answered here"))
            return
        self._send(self.server.router.answer(self.path, self.headers, self.connection))

    def end_headers(self) -> None:
        """Add the headers of every response, including those of the library's parser."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        """The ``Server`` header, without a version."""
        return "batchd"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
        """Log nothing: requests are no events of the daemon."""

    def _read_head(self) -> bytes | None:
        """Read up to the empty line; b"" if the peer disconnects, None if the head is too long."""
        head = bytearray()
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            if len(head) >= HEAD_BYTES_MAX:
                return None
            part = self.connection.recv(HEAD_BYTES_MAX - len(head))
            if not part:
                return b""
            head += part
        return bytes(head)

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        if response.status == 405:  # noqa: PLR2004  it has to name the others
            self.send_header("Allow", ", ".join(METHODS))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)


def enclose_observer(access: str) -> list[str]:
    """Give up all but what requests need: the resolver, who is in which group, and to draw sheets.

    ``access``: JSON of what may be read besides, for the texts of tokens; null: give up nothing.
    Returns the tables of users that it can read as long as they are the same files.
    """
    read = json.loads(access)
    if read is None or not version():
        return []
    enclose(Access([*read, *TABLES], [DNS], any_port=False, write=[]), runs_own=True)
    return [file for file in TABLES if Path(file).exists()]


def answer(server: Server) -> None:
    """Serve as long as the process lives. A failure ends it, so that the daemon restarts it."""
    try:
        server.serve_forever()
    finally:
        traceback.print_exc()
        os._exit(1)


def main(arguments: list[str]) -> int:
    """Answer HTTP until the daemon is gone."""
    try:
        check_threads(OWN_THREADS)
    except TooFewThreads as error:
        sys.stderr.write(f"batchd.observe.http {error}: {MORE_THREADS}\n")
        return ExitCode.FAILED
    listener, directory, details, access_text, *configured, lifeline = arguments
    tables = enclose_observer(access_text)
    failpoints.passing("observer.starting")
    runtime = runtime_directory(Path(directory))
    recorder = StatusRecorder()
    client = StatusClient(recorder.add)
    sheets = ContactSheets(runtime.address)
    names = HostNames(configured)
    names.start()
    access = AccessRules(runtime.path, details_for_all=details == "all")
    listening = socket.socket(fileno=int(listener))
    server = Server(listening, Router(client, recorder, sheets, names, access), tables)
    Thread(target=answer, args=(server,), name="http", daemon=True).start()
    try:
        client.run(runtime, socket.socket(fileno=int(lifeline)))
    except (ConnectTimeout, DaemonBusy):
        return ExitCode.NO_DAEMON  # the daemon is gone, or stuck, and then its own log says so
    except BatchdClientError as error:
        sys.stderr.write(f"batchd.observe.http: {error}\n")
        return ExitCode.FAILED
    finally:
        sheets.close()
        names.close()
    listening.close()  # at once: the next daemon may be about to bind the address
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
