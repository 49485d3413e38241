"""A session over TCP: the life of its connections, and receive buffers. Runs in the trainer.

    frames of a Parcel --(copied once)--> ReceiveBuffer --> Lease, Batch, arrays
    (its parts may come over several           ^                        |
    connections, in any order)                 +------ reused ----------+ (lease ends)

Invariants: a buffer holds one batch at a time, and is reused only after that batch's lease has
ended. A batch is handed on once every part of it, and every batch before it, has arrived.
"""

import mmap
from collections.abc import Iterator
from dataclasses import replace

import zmq

from batchd_client.errors import ProtocolError
from batchd_client.lifeline import SessionLost
from batchd_client.memory import Mailbox, SlotMemory, address_of
from batchd_client.sockets import Socket, Sockets
from batchd_wire.codec import MESSAGE_BYTES_MAX
from batchd_wire.keys import ConnectionKey
from batchd_wire.messages import Parcel
from batchd_wire.runtime import TcpAddress
from batchd_wire.tcp import CURVE_BYTES, PARTS_MAX, PIECE_BYTES, SOCKET_OPTIONS, unpack_monitor_event

BATCHES_HELD_MAX = 32
"""Batches of one stream that may be alive: no ring limits a remote trainer's memory."""
PUT_OFF_STATUS = 500
"""Status of the daemon's authenticator if a retry may help (RFC 27)."""

UNDER_WAY_MAX = 1024
"""Limit on batches in transit to one subscription, above what any daemon sends."""

_ENDINGS: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "the connection to the daemon was lost",
    zmq.EVENT_CLOSED: "no connection could be made",
    zmq.EVENT_CONNECT_RETRIED: "no connection could be made",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the daemon does not accept the key",
}


class ReceiveBuffer:
    """Page-aligned memory with the layout of a slot, so that its fields are read the same way.

    Shared, so a fork does not copy it: a registered device would keep reading the old pages.
    """

    __slots__ = ("address", "page", "slot_bytes")

    def __init__(self, slot_bytes: int) -> None:
        self.page = memoryview(mmap.mmap(-1, slot_bytes, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
        self.slot_bytes = slot_bytes
        self.address = address_of(self.page)


class ReceiveBuffers:
    """The buffers of one subscription: made on demand, reused after their batches end."""

    def __init__(self, slot_bytes: int) -> None:
        self.made: list[ReceiveBuffer] = []
        """All buffers, free or not."""
        self._slot_bytes = slot_bytes
        self._free: list[ReceiveBuffer] = []

    def take(self) -> ReceiveBuffer:
        """A buffer for one batch, until ``give_back``. Raises ``ProtocolError`` without memory."""
        try:
            if not self._free:
                self.made.append(ReceiveBuffer(self._slot_bytes))
                return self.made[-1]
            return self._free.pop()
        except OSError as error:
            text = f"a batch of {self._slot_bytes} bytes, for which there is no memory here: {error.strerror}"
            raise ProtocolError(text) from None

    def give_back(self, buffer: ReceiveBuffer) -> None:
        """Note that the buffer is not read any more."""
        self._free.append(buffer)


class _Arrival:
    __slots__ = ("buffer", "missing", "parcel")

    def __init__(self, parcel: Parcel, buffer: ReceiveBuffer) -> None:
        self.parcel = parcel
        self.buffer = buffer
        self.missing = set(range(parcel.parts))

    def has(self, parcel: Parcel) -> bool:
        """True if this is one of the missing parts."""
        return parcel.part in self.missing and replace(parcel, part=self.parcel.part) == self.parcel


class Arrivals:
    """Puts parts of one subscription's batches together, and hands batches on in order."""

    def __init__(self, slot_bytes: int) -> None:
        self.buffers = ReceiveBuffers(slot_bytes)
        self._arrivals: dict[int, _Arrival] = {}
        self._next = 0

    def buffer_for(self, parcel: Parcel) -> ReceiveBuffer:
        """Return the buffer for a part. Raises ``ProtocolError`` for an unexpected one."""
        arrival = self._arrivals.get(parcel.sequence)
        if arrival is None:
            if not (
                self._next <= parcel.sequence < self._next + UNDER_WAY_MAX and parcel.part < parcel.parts <= PARTS_MAX
            ):
                raise ProtocolError(f"part {parcel.part} of {parcel.parts} of batch {parcel.sequence} came out of turn")
            arrival = self._arrivals[parcel.sequence] = _Arrival(parcel, self.buffers.take())
        if not arrival.has(parcel):
            raise ProtocolError(
                f"part {parcel.part} of batch {parcel.sequence} came twice, or belongs to another batch"
            )
        return arrival.buffer

    def note(self, parcel: Parcel) -> Iterator[tuple[Parcel, ReceiveBuffer]]:
        """A part has come as a whole: give the batches that can be handed on now."""
        self._arrivals[parcel.sequence].missing.discard(parcel.part)
        while (arrival := self._arrivals.get(self._next)) is not None and not arrival.missing:
            del self._arrivals[self._next]
            self._next += 1
            yield arrival.parcel, arrival.buffer


class RemoteLink:
    """Life of one TCP connection, from ZeroMQ's monitor; in place of the lifeline."""

    def __init__(self, sockets: Sockets, socket: Socket, address: TcpAddress) -> None:
        self._socket = socket
        self._monitor = sockets.monitor(socket, sum(_ENDINGS))
        self.path = address.endpoint
        self.descriptor = int(self._monitor.getsockopt(zmq.FD))
        self.is_key_refused = False
        self.is_put_off = False
        """True if the daemon refuses the connection for reasons that may pass."""

    def receive_shared(self, _slots: dict[int, SlotMemory], _mailboxes: dict[int, Mailbox]) -> None:
        """Receives no memory. Raises ``SessionLost`` if the connection has ended."""
        try:
            event, value = unpack_monitor_event(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            return
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.is_put_off = value == PUT_OFF_STATUS
            self.is_key_refused = not self.is_put_off
        raise SessionLost(_ENDINGS.get(event, "the connection ended"))

    def close(self) -> None:
        """Close the monitor, before the connection's own socket. Closing twice does nothing."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)


def remote_socket(sockets: Sockets, key: ConnectionKey | None) -> Socket:
    """Make a socket that connects once: ``Connection`` decides about retries."""
    socket = sockets.open(zmq.DEALER)
    for name, value in SOCKET_OPTIONS.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.MAXMSGSIZE, max(MESSAGE_BYTES_MAX, PIECE_BYTES) + CURVE_BYTES)
    socket.setsockopt(zmq.RCVHWM, 0)  # what may come is bounded by the window
    if key is not None:
        socket.curve_serverkey = key.daemon.encode()
        socket.curve_publickey = key.public.encode()
        socket.curve_secretkey = key.secret.encode()
    return socket
