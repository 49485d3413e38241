"""A real HTTP server over files in memory, with range requests and all failures of servers.

For tests of sources.

server.files["a.tar"] = b"..."          its files
server.faults["a.tar"] = [Status(500)]  faults of the next requests for it, in order
server.asked                            the requests, in order
server.connections                      the number of connections
server.signers                          the names of the keys that signed requests, as S3 has them
server.admitted = {"a-key"}             the keys that may read; None for everyone
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Status:
    """Answers with a status and a body that no message may repeat."""

    code: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Sends nothing until the server is closed.

    With ``after``, it first sends this many bytes of the body.
    """

    after: int | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """Closes the connection after this many bytes of the body."""

    after: int


@dataclass(frozen=True, slots=True)
class IgnoreRange:
    """Sends everything, for any requested range."""


Fault = Status | Stall | Cut | IgnoreRange
SECRET = "internal-secret-7"


class Asked(NamedTuple):
    """A request."""

    method: str
    name: str
    span: str | None
    """The header Range."""


class FileServer:
    """Serves ``files`` at ``url``."""

    def __init__(self, files: dict[str, bytes] | None = None, port: int = 0) -> None:
        self.files: dict[str, bytes] = dict(files or {})
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.asked: list[Asked] = []
        self.connections = 0
        self.signers: set[str] = set()
        self.admitted: set[str] | None = None
        self.headers: dict[str, str] = {}
        """Headers of each answer."""
        self.delay_s = 0.0
        self.has_etags = True
        self.honours_if_match = True
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", port), self)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="file server")
        self._thread.start()

    def find(self, name: str) -> bytes | None:
        """The file of a name."""
        return self.files.get(name)

    def next_fault(self, name: str) -> Fault | None:
        """The fault for this request."""
        waiting = self.faults[name] or self.faults["*"]
        return waiting.pop(0) if waiting else None

    def dawdle(self) -> None:
        """Delay the answer by ``delay_s``, unless the server ends."""
        self._closing.wait(self.delay_s)

    def stall(self) -> None:
        """Send nothing until the end."""
        self._closing.wait()

    def close(self) -> None:
        """End the server, with all connections."""
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.end_connections()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], files: FileServer) -> None:
        self.files = files
        self._connections: set[Any] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        self.files.connections += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        """Wake the threads that wait for another request."""
        for connection in list(self._connections):
            try:
                connection.shutdown(2)
            except OSError:
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that disconnect are not reported."""


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "_Server"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_arguments: Any) -> None:
        """The log is not used."""

    def _answer(self) -> None:
        files = self.server.files
        name, span = unquote(self.path.lstrip("/")), self.headers.get("Range")
        files.asked.append(Asked(self.command, name, span))
        files.dawdle()
        fault, content = files.next_fault(name), files.find(name)
        signer = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        files.signers.add(signer)
        if fault == Stall():
            files.stall()
            self.close_connection = True
        elif files.admitted is not None and signer not in files.admitted:
            self._send(403, {}, SECRET.encode())
        elif isinstance(fault, Status) or content is None:
            self._send(fault.code if isinstance(fault, Status) else 404, {}, SECRET.encode())
        else:
            self._answer_with(content, None if fault == IgnoreRange() else span, fault)

    def _answer_with(self, content: bytes, span: str | None, fault: Fault | None) -> None:
        files = self.server.files
        etag = f'"{hash(content):x}"'  # equal for equal bytes, and computed once
        headers = {"ETag": etag} if files.has_etags else {}
        if files.honours_if_match and self.headers.get("If-Match") not in (None, etag):
            self._send(412, headers, b"")
            return
        after = fault.after if isinstance(fault, (Stall, Cut)) else None
        if span is None:
            self._send(200, headers, content, after)
        else:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(content)), len(content) - 1)
            if start >= len(content):
                self._send(416, headers | {"Content-Range": f"bytes */{len(content)}"}, b"")
                return
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            self._send(206, headers, content[start : end + 1], after)
        if isinstance(fault, Stall):
            files.stall()

    def _send(self, status: int, headers: dict[str, str], content: bytes, after: int | None = None) -> None:
        """Send an answer.

        With a number in ``after``, send only this many bytes of its body, and close this
        connection.
        """
        self.send_response(status)
        for key, value in {**headers, **self.server.files.headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:after])
        self.close_connection = self.close_connection or after is not None


@contextmanager
def serving(
    files: dict[str, bytes] | None = None, port: int = 0, kind: type[FileServer] = FileServer
) -> Iterator[FileServer]:
    """A server that ends with the block."""
    server = kind(files, port)
    try:
        yield server
    finally:
        server.close()
