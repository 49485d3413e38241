"""One more handshake by CURVE, in which it is counted what comes from the daemon. Runs in the trainer.

    DEALER --(unix socket)--> here, where it is counted --(TCP)--> daemon
    greeting -> HELLO -> WELCOME: it is the daemon that the key names -> INITIATE -> its verdict on the key

ZeroMQ does not tell how far a handshake went before the connection ended, and nothing else here
speaks CURVE. A daemon with other keys than ours hangs up in place of its WELCOME (RFC 26); one that
nobody can ask about ours says nothing after it.
"""

import select
import socket
import time
from secrets import token_hex
from typing import NamedTuple

from batchd_client.remote import remote_socket
from batchd_client.sockets import Sockets
from batchd_wire.keys import ConnectionKey
from batchd_wire.runtime import TcpAddress

GREETING_BYTES = 64
WELCOME_BYTES = 170
"""With the two bytes that frame it."""
_PART_BYTES = 4096


class Rehearsal(NamedTuple):
    """How it went: bytes that came from the daemon, and did it hang up? Else it gave its verdict, or the time was over."""

    heard_bytes: int
    hung_up: bool

    @property
    def has_welcome(self) -> bool:
        """Did the WELCOME come?"""
        return self.heard_bytes >= GREETING_BYTES + WELCOME_BYTES

    @property
    def has_verdict(self) -> bool:
        """Did any of what follows the WELCOME come?"""
        return self.heard_bytes > GREETING_BYTES + WELCOME_BYTES


def rehearse(sockets: Sockets, address: TcpAddress, key: ConnectionKey, deadline: float) -> Rehearsal:
    """Shake hands until the daemon has said whether it lets us in, or hangs up. Raises ``OSError`` where nothing connects."""
    name = f"batchd-{token_hex(16)}"
    dealer = remote_socket(sockets, key)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(f"\0{name}")
            server.listen(1)
            dealer.connect(f"ipc://@{name}")
            server.settimeout(_left_s(deadline))
            ours, _ = server.accept()
        with ours, socket.create_connection((address.host, address.port), _left_s(deadline)) as daemon:
            return _pass_on(ours, daemon, deadline)
    finally:
        dealer.close()


def _pass_on(ours: socket.socket, daemon: socket.socket, deadline: float) -> Rehearsal:
    heard_bytes = 0
    poll = select.poll()
    for end in (ours, daemon):
        poll.register(end, select.POLLIN)
    while not Rehearsal(heard_bytes, hung_up=False).has_verdict and time.monotonic() < deadline:
        ready = {descriptor for descriptor, _ in poll.poll(_left_s(deadline) * 1000)}
        try:
            if daemon.fileno() in ready:
                data = daemon.recv(_PART_BYTES)
                if not data:
                    return Rehearsal(heard_bytes, hung_up=True)
                heard_bytes += len(data)
                ours.sendall(data)
            if ours.fileno() in ready:
                data = ours.recv(_PART_BYTES)
                if not data:
                    break
                daemon.sendall(data)
        except ConnectionError:
            return Rehearsal(heard_bytes, hung_up=True)
    return Rehearsal(heard_bytes, hung_up=False)


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
