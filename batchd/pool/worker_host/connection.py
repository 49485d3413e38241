"""The connection to a gateway, and the pauses between connections. WORKER HOST process.

    pause -> connecting --handshake--> Register --Admitted--> a link --(its end)--> pause
      ^           |                        |                                          |
      +-----------+--- no answer ----------+--- Rejected, for now --------------------+
                  ^                        |
                  +--- another gateway ----+--- Moved

Each registration begins at the address that the user gave. The gateway there may send this host to
another one of the same daemon; if that one does not admit it, it returns to the first one.

Each connection has its own socket, so nothing that was sent for one link reaches the next. ZeroMQ's
monitor reports handshakes and ends; heartbeats end a connection to a silent host.

Invariant: pauses grow until a link lasts. If there is no link for ``give_up_s``,
``DaemonUnreachable`` is raised; every error here ends the program.
"""

import socket
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from time import monotonic
from typing import NamedTuple

import structlog
import zmq

from batchd.core.events import LinkClosed
from batchd.errors import BatchdError, DaemonUnreachable, KeysInvalid
from batchd.pool.messages import INDEX_PART_BYTES, TO_HOST, Admitted, Moved, Register, Rejected, messages_in
from batchd.runtime.poller import Poller
from batchd_wire.codec import MESSAGE_BYTES_MAX, MalformedMessage, Message
from batchd_wire.codes import ErrorCode
from batchd_wire.keys import ConnectionKey
from batchd_wire.runtime import TcpAddress
from batchd_wire.tcp import CONNECTING_OPTIONS, CURVE_BYTES, unpack_monitor_event

PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0
FIRST = 0
"""The gateway at the address that the user gave."""
PORT_MAX = 65_535
ANSWER_TIMEOUT_S = 15.0
"""Timeout of a handshake and of the answer to ``Register``: a host that is down sends nothing."""
MESSAGES_AT_ONCE = 64
"""Messages read in one round of the loop."""
PUT_OFF_STATUS = 500
"""Status of the gateway's authenticator if a retry may help (RFC 27)."""
KEY_REFUSALS = 2
"""Number of consecutive handshakes that refuse the key after which the program ends."""
LAST_WORDS_MS = 1_000
"""Time for the last messages after the last row was sent."""

_log = structlog.get_logger()

NOBODY_THERE = "nothing listens there, or it cannot be reached: the daemon needs worker_address = in [daemon]"
SILENCE = "no answer: the host is down, or a firewall drops the packets"
LOST = "the connection was lost"
FAILED_WITH_KEY = "the handshake failed: the key is for another daemon, or that daemon has no keys"
FAILED_WITHOUT_KEY = "the handshake failed: the daemon probably requires a key (--key FILE)"
_UNREACHABLE = {zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED}
_ENDINGS = _UNREACHABLE | {
    zmq.EVENT_DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
}


class GatewayAddress(NamedTuple):
    """The address of the gateway. Without a ``key``, connections are not encrypted."""

    address: TcpAddress
    key: ConnectionKey | None
    give_up_s: float


class GatewayConnection:
    """One DEALER at a time. ``received`` gets each message of the present link with its frames."""

    def __init__(
        self,
        gateway: GatewayAddress,
        poller: Poller,
        received: Callable[[Message, Sequence[memoryview]], None],
        ended: Callable[[str], None],
    ) -> None:
        """``ended`` is called with the reason when a link has ended."""
        self.link = 0
        """Number of the present link; 0 without one."""
        self._address, self._key, self._give_up_s = gateway
        self._poller = poller
        self._received = received
        self._ended = ended
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes]
        self._register: Register
        self._gateway = FIRST
        """The gateway of the present connection, or of the next one."""
        self._not_at: list[int] = []
        """Gateways that have rejected this host since its last link."""
        self._changed_s = monotonic()
        """When the present link began, or the last one ended."""
        self._pause_s = PAUSE_FIRST_S
        self._due_s = self._changed_s
        """Without a socket: when to connect. With a socket but no link: when to stop waiting."""
        self._is_through = False
        """The handshake of the present connection has succeeded."""
        self._key_refusals = 0
        self._reason = ""
        poller.at(self._next_s, self._on_time)

    def introduce(self, register: Register) -> None:
        """Set the first message of each connection."""
        self._register = register

    @property
    def address(self) -> str:
        """The address of the gateway of the present connection, or of the next one."""
        return replace(self._address, port=self._address.port + self._gateway).address

    def send(self, message: Message, frames: Sequence[memoryview] = ()) -> None:
        """Send a message, then ``frames`` of rows without copying them. No-op without a link."""
        if self._socket is None or not self.link:
            return
        with suppress(zmq.Again):  # the connection has ended: the monitor will report it
            if frames:
                self._socket.send_multipart([message.encode(), *frames], zmq.NOBLOCK, copy=False)
            else:
                self._socket.send(message.encode(), zmq.NOBLOCK)

    def receive(self, ready: Container[object]) -> None:
        """Read a bounded portion of the messages that have arrived.

        Raises ``BatchdError`` if a gateway refuses this host for good.
        """
        if self._socket is not None and self._socket in ready:
            self._read()
        if self._socket is not None and self._monitor in ready:
            self._read_events()

    def close(self, reason: str, linger_ms: int = 0) -> None:
        """End the connection and its link; the next connection follows after a pause."""
        was_connected = self._disconnect(linger_ms)
        was_link, self.link = self.link, 0
        now = monotonic()
        if self._gateway != FIRST and not was_link:
            advice = "this host returns to the first gateway; if the port is closed, open it in the firewall"
            _log.warning("another gateway does not admit this host", gateway=self.address, reason=reason, advice=advice)
            self._not_at.append(self._gateway)
            self._gateway, self._due_s = FIRST, now
            return
        self._gateway, self._not_at = FIRST, []
        if was_link:
            if now - self._changed_s > PAUSE_MAX_S:
                self._pause_s = PAUSE_FIRST_S
            self._changed_s = now
        elif reason != self._reason and was_connected:
            _log.warning("gateway does not admit this host", reason=reason, tries_for_s=self._give_up_s)
        self._reason = reason
        self._due_s = now + self._pause_s
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)
        if was_link:
            self._ended(reason)

    def end(self, *, sends_rest: bool) -> None:
        """Close everything; ``sends_rest``: first send the remaining messages, if possible."""
        self._reason, self._gateway = "this host ends", FIRST
        self.close(self._reason, LAST_WORDS_MS if sends_rest else 0)
        self._context.term()

    def _next_s(self) -> float:
        """When to connect, to stop waiting for an answer, or to give up."""
        return inf if self.link else min(self._due_s, self._changed_s + self._give_up_s)

    def _on_time(self) -> None:
        """Connect, or give up a connection that does not answer. Raises ``DaemonUnreachable``."""
        if monotonic() >= self._changed_s + self._give_up_s:
            reason = _unknown_host(self._address.host) or self._reason or SILENCE
            waited = f"no gateway at {self._address.address} has admitted this host for {self._give_up_s:g} s"
            raise DaemonUnreachable(f"{waited}: {reason}; --give-up waits longer")
        if self._socket is not None:
            self.close(SILENCE)
        else:
            self._connect()

    @property
    def _is_connected(self) -> bool:
        return self._socket is not None

    def _disconnect(self, linger_ms: int = 0) -> bool:
        """Close the connection; false if there is none."""
        dealer, self._socket = self._socket, None
        if dealer is None:
            return False
        self._poller.unwatch_socket(dealer)
        self._poller.unwatch_socket(self._monitor)
        dealer.disable_monitor()
        self._monitor.close(linger=0)
        dealer.close(linger=linger_ms)
        return True

    def _connect(self) -> None:
        dealer = self._context.socket(zmq.DEALER)
        for name, value in CONNECTING_OPTIONS.items():
            dealer.setsockopt(getattr(zmq, name), value)
        dealer.setsockopt(zmq.MAXMSGSIZE, max(MESSAGE_BYTES_MAX, INDEX_PART_BYTES) + CURVE_BYTES)
        dealer.setsockopt(zmq.SNDHWM, 0)  # the scratch memory limits the rows in flight
        dealer.setsockopt(zmq.RCVHWM, 0)  # orders in flight and requested parts have limits
        if self._key is not None:
            dealer.curve_serverkey = self._key.daemon.encode()
            dealer.curve_publickey = self._key.public.encode()
            dealer.curve_secretkey = self._key.secret.encode()
        self._monitor = dealer.get_monitor_socket(sum(_ENDINGS) | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._poller.watch_socket(dealer)
        self._poller.watch_socket(self._monitor)
        self._socket, self._is_through = dealer, False
        self._due_s = monotonic() + ANSWER_TIMEOUT_S
        dealer.connect(self.address)

    def _read_events(self) -> None:
        """Act on the monitor's reports, which may end the connection."""
        while self._socket is not None:
            try:
                event, value = unpack_monitor_event(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_through, self._key_refusals = True, 0
                with suppress(zmq.Again):  # it has ended: the next event says so
                    self._socket.send(replace(self._register, not_at=self._not_at).encode(), zmq.NOBLOCK)
                continue
            while self._read():  # what arrived before the end: it may say why
                pass
            if not self._is_connected:
                return
            if event in _UNREACHABLE:
                self.close(_unknown_host(self._address.host) or NOBODY_THERE)
            elif self._is_through:
                self.close(LOST)
            else:  # a failed handshake has any of several events, by chance
                self.close(FAILED_WITHOUT_KEY if self._key is None else FAILED_WITH_KEY)
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value != PUT_OFF_STATUS:
                self._key_refused()

    def _key_refused(self) -> None:
        self._key_refusals += 1
        if self._key is not None and self._key_refusals >= KEY_REFUSALS:
            raise KeysInvalid(
                f"the gateway at {self.address} does not know the key {self._key.name!r}: it was revoked, or made "
                "for another daemon"
            )

    def _read(self) -> bool:
        for _ in range(MESSAGES_AT_ONCE):
            if self._socket is None:
                return False
            try:
                first, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            try:
                for message in messages_in(TO_HOST.decode(first.buffer), TO_HOST):
                    self._take(message, [frame.buffer for frame in frames])
            except MalformedMessage as error:
                self.close(f"the gateway sent an invalid message: {error}")
        return True

    def _take(self, message: Message, frames: Sequence[memoryview]) -> None:
        if isinstance(message, Rejected):
            if message.is_final:
                kind = KeysInvalid if message.error == ErrorCode.KEY_REFUSED else BatchdError
                raise kind(f"the gateway at {self.address} refuses this host: {message.text}")
            self.close(message.text)
        elif isinstance(message, LinkClosed):
            if message.link == self.link:
                if message.is_final:
                    raise BatchdError(f"the gateway at {self.address} closed the link: {message.reason}")
                self.close(message.reason)
        elif isinstance(message, Moved) and not self.link:
            self._move(message.gateway)
        elif isinstance(message, Admitted) and not self.link:
            self.link, self._changed_s = message.link, monotonic()
            self._received(message, frames)
        elif self.link and getattr(message, "link", 0) == self.link:
            self._received(message, frames)

    def _move(self, gateway: int) -> None:
        """Register with another gateway of the same daemon."""
        is_known = self._gateway == FIRST and gateway not in (FIRST, *self._not_at)
        if not is_known or self._address.port + gateway > PORT_MAX:
            self.close(f"the gateway sent this host to gateway {gateway}, which is not a valid one")
            return
        self._disconnect()
        self._gateway, self._due_s = gateway, monotonic()


def _unknown_host(host: str) -> str:
    """Text that a host name has no address here; "" if it has one. ZeroMQ does not report it."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        return f"the host {host!r} is not known here ({error.strerror})"
    return ""
