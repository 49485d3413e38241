"""One address over TCP: its ROUTER, its connections and their ends. DAEMON and GATEWAY processes.

    ACCEPTED -> guard -> a first message -> a session of the subclass -> DISCONNECTED -> ``_ended``

A door for trainers and the gateway's front for worker hosts read and answer in their own ways; both
have the same connections.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Container, Sequence
from contextlib import suppress

import structlog
import zmq

from batchd.errors import BatchdError
from batchd.runtime.keys import AcceptedKey, RoleKeys
from batchd.runtime.limits import OncePerMinute, peer_network, peer_site
from batchd.runtime.poller import Poller
from batchd.runtime.tcp.connection_guard import AUDIT_INTERVAL_S, ConnectionGuard, GuardLimits
from batchd.runtime.tcp.connections import Connection, descriptor_of, host_of, wire_bytes
from batchd.runtime.tcp.router import RouterLimits, TcpRouter

_log = structlog.get_logger()


class TcpFront:
    """Owns the TCP socket. ``keys`` None: without encryption, which is for loopback alone.

    ``sessions``: descriptors of the connections that are sessions.
    """

    def __init__(
        self, poller: Poller, keys: RoleKeys | None, router: RouterLimits, sessions: Container[int], guard: GuardLimits
    ) -> None:
        self._keys = keys
        self._zeromq = TcpRouter(keys, router)
        self.router = self._zeromq.socket
        self._heard_of: set[int] = set()
        """Descriptors that a message arrived over: an end without one is a failed handshake."""
        self.guard = ConnectionGuard(sessions, guard)
        poller.every(AUDIT_INTERVAL_S, self.guard.audit, only_if=self.guard.__len__)
        self._once_per_minute = OncePerMinute()
        self.failed_handshakes = 0

    @property
    def sockets(self) -> "Sequence[zmq.Socket[bytes]]":
        """Peers, the ends of their connections, and questions of ZeroMQ about keys."""
        return self._zeromq.sockets

    def listen(self, endpoint: str, key_path: str) -> int:
        """Listen, and return the port; see ``TcpRouter.bind``. Raises ``BatchdError``."""
        port = self._zeromq.bind(endpoint, key_path)
        self.guard.open(port)
        return port

    def close(self) -> None:
        """End every connection."""
        self.note_ends()
        self._zeromq.close()
        self.guard.close()

    def receive(self, ready: Container[object], is_over: Callable[[], bool] = lambda: False) -> bool:
        """Read what peers say, a portion at a time; true where there may be more. See ``Door``."""
        self._zeromq.answer_questions(ready)
        if self.router in ready or self._zeromq.monitor in ready:
            self.note_ends()
        return self.router in ready and self._read(is_over)

    def note_ends(self) -> None:
        """Take note of the connections that have begun and ended."""
        events = list(self._zeromq.events())
        last_of = {descriptor: number for number, (_event, descriptor) in enumerate(events)}
        for number, (event, descriptor) in enumerate(events):
            if event == zmq.EVENT_ACCEPTED:
                self._heard_of.discard(descriptor)
                if last_of[descriptor] == number:
                    self.guard.add(descriptor)
                else:  # it has ended; of a storm of connections, most have
                    self.guard.remove(descriptor)
                continue
            self._ended(descriptor)
            if descriptor not in self._heard_of:
                self.failed_handshakes += 1
                host, advice = self.guard.host_of(descriptor), "it may have a key for another daemon, or none"
                where = {"host": host} if host else {"reason": "it ended before its host could be read"}
                if self._once_per_minute.allows("failed handshakes", peer_site(host)):
                    _log.warning("remote handshake failed", **where, advice=advice, failed=self.failed_handshakes)
            self._heard_of.discard(descriptor)
            self.guard.remove(descriptor)
        self.guard.limit_pending()

    @abstractmethod
    def _read(self, is_over: Callable[[], bool]) -> bool:
        """Read a portion of what peers say; true where there may be more."""

    @abstractmethod
    def _ended(self, descriptor: int) -> None:
        """A connection has ended; end its session, if it is one."""

    def _descriptor_of(self, frame: zmq.Frame, received_bytes: int, frames: int) -> int | None:
        """Count a message that was read, and return its connection's descriptor; None: drop it.

        ``received_bytes``: of all its frames, see ``_wire_bytes``. ``frames`` count against the
        limit of a connection.
        """
        descriptor = descriptor_of(frame)
        if descriptor is None:
            if self._once_per_minute.allows("old"):
                _log.warning("remote peer not understood", reason="it speaks ZeroMQ's protocol of before version 3")
            return None
        if not self.guard.count_message(descriptor, peer_network(host_of(frame)), received_bytes, frames):
            return None
        self._heard_of.add(descriptor)
        return descriptor

    def _wire_bytes(self, frame: zmq.Frame) -> int:
        """Bytes of a frame on the wire."""
        return wire_bytes(len(frame.buffer), encrypted=self._keys is not None)

    def _end_former(self, frame: zmq.Frame) -> None:
        """End the former session of this descriptor now, not when its end is reported later."""
        self.note_ends()
        self._ended(frame.get(zmq.SRCFD))

    def _connection(self, routing: bytes, frame: zmq.Frame) -> Connection:
        """Describe the connection of a message."""
        descriptor = frame.get(zmq.SRCFD)
        inode = None
        with suppress(OSError):  # closed already; its end is reported
            inode = os.fstat(descriptor).st_ino
        self._heard_of.add(descriptor)
        return Connection(routing, descriptor, inode)

    def _is_there(self, connection: Connection) -> bool:
        """False if the end of a connection was reported before it became a session.

        ZeroMQ reports an end before it hands over messages that arrived earlier: a session that
        begins after that has a descriptor which may be another connection's. Ask in two ticks,
        since a beginning may be reported late as well.
        """
        return self.guard.inode_of(connection.descriptor) == connection.inode is not None

    def _is_valid(self, key: AcceptedKey | None) -> bool:
        """True if a session's key is still accepted, or none is needed."""
        return self._keys is None or (key is not None and self._keys.holds(key.name, key.public))

    def _key_of(self, frame: zmq.Frame) -> AcceptedKey | None:
        """The key with which the connection was let in, if it is still accepted."""
        try:
            return self._keys.find(str(frame.get("User-Id"))) if self._keys is not None else None
        except BatchdError as error:
            if self._once_per_minute.allows("keys"):
                _log.error("keys cannot be read", reason=str(error))
            return None

    def _reply_without_session(self, routing: bytes, data: bytes) -> None:
        """Answer a connection that is no session, unless it is gone or does not read."""
        try:
            self.router.send_multipart([routing, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
