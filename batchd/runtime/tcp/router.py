"""ZeroMQ's side of an address over TCP: the ROUTER, and admission by keys. DAEMON process.

ZeroMQ asks at ``inproc://zeromq.zap.01`` before a connection may carry one byte, by RFC 27 (ZAP
1.0):

    request   routing id | "" | "1.0" | request id | domain | address | identity | mechanism | key
    answer    routing id | "" | "1.0" | request id | "200" or other | text | user id | metadata

Invariant: "200" is sent only for a key of this address's role that the directory holds at this
moment; any failure is a refusal. The user id is the public key itself, since a name may be given to
another key later. Sockets set ``ZAP_DOMAIN`` to the daemon's and ``ZAP_ENFORCE_DOMAIN``, so without
an authenticator no peer is admitted.

A host that connects too often is answered with "500", before any key is looked up; the client sees
that number and retries later. ("300", which RFC 27 has for this, is not passed on: the connection
just ends, without a reason for the client.)
"""

from collections.abc import Container, Iterator, Sequence
from time import monotonic
from typing import NamedTuple

import structlog
import zmq
from zmq.utils import z85

from batchd.errors import BatchdError
from batchd.runtime.cpus import available_cpus
from batchd.runtime.keys import RoleKeys
from batchd.runtime.limits import HandshakeRate, OncePerMinute, peer_network, peer_site, printable
from batchd_wire.tcp import SOCKET_OPTIONS, unpack_monitor_event
from batchd_wire.threads import MORE_THREADS, TooFewThreads, check_threads

HANDSHAKE_TIMEOUT_MS = 5_000
IO_THREADS_MAX = 4
"""Threads of ZeroMQ that send, and encrypt what they send; a connection belongs to one of them."""
CONTEXT_THREADS = 2
"""Other threads of a ZeroMQ context: its reaper, and the one of pyzmq that frees messages."""
EVENTS_AT_ONCE = 4_096
"""More than ZeroMQ queues in its monitor, so one pass reads every earlier event."""
ZAP_DOMAIN = b"batchd"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ANSWERS_MAX = 64
"""Requests that one call answers at most; the loop has other things to do."""
KEY_BYTES = 32
_VERSION = b"1.0"
_MECHANISM = b"CURVE"
_ENVELOPE_FRAMES = 2
_REQUEST_FRAMES_MIN = 6
_REFUSED = b"400"
_FAILED = b"500"

_log = structlog.get_logger()


def cannot_listen(endpoint: str, error: zmq.ZMQError) -> str:
    """Error text for an address that the daemon cannot listen on."""
    return f"{endpoint} cannot be listened on: {error.strerror}; choose another address or port"


def check_context_threads() -> None:
    """Check that a context of ZeroMQ can start its threads. Raises ``BatchdError``."""
    try:
        check_threads(IO_THREADS_MAX + CONTEXT_THREADS)
    except TooFewThreads as error:
        raise BatchdError(f"ZeroMQ {error}: {MORE_THREADS}") from None


class RouterLimits(NamedTuple):
    """ZeroMQ's limits for each peer."""

    frame_bytes_max: int
    """Longest frame that is read, on the wire: encryption adds ``CURVE_BYTES``."""
    unread_max: int
    """Messages that a peer may leave unread; sending another fails with EAGAIN."""


class TcpRouter:
    """The ROUTER, its monitor, and, if there are keys, an authenticator, in one context."""

    def __init__(self, keys: RoleKeys | None, limits: RouterLimits) -> None:
        self._keys = keys
        self._limits = limits
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(min(IO_THREADS_MAX, available_cpus()))
        self.socket = self._context.socket(zmq.ROUTER)
        # No event for failed handshakes: when libzmq 4.3.5 reports a message that fails to decrypt,
        # it does not disconnect, and aborts later.
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._authenticators = [] if keys is None else [Authenticator(self._context, keys)]

    @property
    def sockets(self) -> "Sequence[zmq.Socket[bytes]]":
        """Peers, the ends of their connections, and questions of ZeroMQ about keys."""
        return [self.socket, self.monitor, *(one.socket for one in self._authenticators)]

    def bind(self, endpoint: str, key_path: str) -> int:
        """Listen, and return the port. Raises ``BatchdError`` saying why that cannot be.

        ``key_path`` names the key of the configuration with the address.
        """
        for name, value in SOCKET_OPTIONS.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, self._limits.frame_bytes_max),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS),
            (zmq.SNDHWM, self._limits.unread_max),
            (zmq.RCVHWM, 0),  # libzmq may abort at a limit: use a ``ConnectionGuard``
        ):
            self.socket.setsockopt(option, value)
        if self._keys is not None:
            pair = self._keys.directory.daemon_key()
            assert pair is not None, "checked at the start"
            self.socket.curve_server = True
            self.socket.curve_secretkey = pair[1].encode()
            self.socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise BatchdError(f"{key_path}: {cannot_listen(endpoint, error)}") from None
        return int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def answer_questions(self, ready: Container[object]) -> None:
        """Answer ZeroMQ's questions about keys."""
        for authenticator in self._authenticators:
            if authenticator.socket in ready:
                authenticator.answer()

    def events(self) -> Iterator[tuple[int, int]]:
        """Begun and ended connections: the event of ZeroMQ's monitor, and the descriptor."""
        for _ in range(EVENTS_AT_ONCE):
            try:
                yield unpack_monitor_event(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return

    def close(self) -> None:
        """Close all, after ``events``: a full monitor would block ZeroMQ's thread, and that us."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        for authenticator in self._authenticators:
            authenticator.close()
        self._context.destroy(linger=0)


class _Verdict(NamedTuple):
    """An answer. ``reason`` is for the daemon's log; ``fault``: an error of the daemon itself."""

    status: bytes
    text: bytes
    user: bytes = b""
    reason: str = ""
    fault: bool = False


class Authenticator:
    """Answers ZeroMQ's requests: call ``answer`` when ``socket`` is readable."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: RoleKeys) -> None:
        self.refused = 0
        self._keys = keys
        self._rate = HandshakeRate()
        self._once_per_minute = OncePerMinute()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        try:
            self.socket.bind(ZAP_ENDPOINT)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def answer(self) -> None:
        """Answer what has been asked, up to ``ANSWERS_MAX`` questions."""
        for _ in range(ANSWERS_MAX):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(frames)

    def close(self) -> None:
        """Stop answering; from now on no peer is admitted."""
        self.socket.close()

    def _answer(self, frames: list[bytes]) -> None:
        envelope, request = frames[:_ENVELOPE_FRAMES], frames[_ENVELOPE_FRAMES:]
        verdict = self._judge(request)
        if verdict.reason:
            self._refuse(request, verdict)
        number = request[1] if len(request) > 1 else b""
        self.socket.send_multipart([*envelope, _VERSION, number, verdict.status, verdict.text, verdict.user, b""])

    def _judge(self, request: list[bytes]) -> _Verdict:
        if len(request) < _REQUEST_FRAMES_MIN or request[0] != _VERSION:
            return _Verdict(_REFUSED, b"malformed request", reason="the request is malformed")
        _version, _number, domain, address, _identity, mechanism, *credentials = request
        if domain != ZAP_DOMAIN:
            return _Verdict(_REFUSED, b"wrong domain", reason=f"the domain is {_shown(domain)}")
        if mechanism != _MECHANISM:
            return _Verdict(_REFUSED, b"wrong mechanism", reason=f"the mechanism is {_shown(mechanism)}")
        if [len(part) for part in credentials] != [KEY_BYTES]:
            return _Verdict(_REFUSED, b"malformed request", reason="there is no key of 32 bytes")
        host = peer_network(_shown(address))
        if not self._rate.admit(host, monotonic()):
            return _Verdict(_FAILED, b"too many handshakes", reason=self._rate.complaint(host))
        public = z85.encode(credentials[0]).decode()
        try:
            if self._keys.find(public) is not None:
                return _Verdict(b"200", b"OK", public.encode())
            other_role = self._keys.other_role(public)
        except (BatchdError, OSError) as error:
            return _Verdict(_FAILED, b"the daemon cannot read its keys", reason=str(error), fault=True)
        if other_role:
            return _Verdict(_REFUSED, b"key of another role", reason=other_role)
        return _Verdict(_REFUSED, b"unknown key", reason=f"no {self._keys.role.holder} has the key {public}")

    def _refuse(self, request: list[bytes], verdict: _Verdict) -> None:
        self.refused += 1
        address = _shown(request[3]) if len(request) > 3 else "?"  # noqa: PLR2004  its place in the drawing
        if self._once_per_minute.allows(f"peers refused: {verdict.text.decode()}", peer_site(address)):
            if verdict.fault:
                _log.error("cannot check a peer's key", address=address, reason=verdict.reason)
            else:
                _log.warning("peer refused", address=address, reason=verdict.reason)


def _shown(frame: bytes) -> str:
    return printable(frame.decode("ascii", "replace"))
