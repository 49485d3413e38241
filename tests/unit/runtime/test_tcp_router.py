"""A router with limits and a connection guard, as the gateway of worker hosts has them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from batchd.errors import BatchdError
from batchd.runtime.keys import KeyDirectory
from batchd.runtime.tcp.connection_guard import ConnectionGuard, GuardLimits
from batchd.runtime.tcp.connections import descriptor_of, wire_bytes
from batchd.runtime.tcp.router import RouterLimits, TcpRouter
from batchd_wire.keys import ConnectionKey, Role
from batchd_wire.tcp import CURVE_BYTES, PIECE_BYTES
from support.waiting import wait_until

PIECES = 4
LIMITS = RouterLimits(PIECE_BYTES + CURVE_BYTES, unread_max=3)
SLACK_BYTES = 64 << 10
"""Unread bytes that a connection may have; the count stays as exact for many large frames."""
ADDRESS_KEY = "daemon.worker_address"


class Gateway:
    """A router that admits worker hosts, and its guard."""

    def __init__(self, keys: KeyDirectory) -> None:
        keys.make_daemon_key()
        self.zeromq = TcpRouter(keys.workers, LIMITS)
        self.sessions: set[int] = set()
        self.guard = ConnectionGuard(self.sessions, GuardLimits(2, unread_bytes_max=SLACK_BYTES))
        self.port = self.zeromq.bind("tcp://127.0.0.1:*", ADDRESS_KEY)
        self.guard.open(self.port)
        self.ends = 0

    def until(self, condition: Callable[[], object]) -> None:
        """Run the loop of a gateway, which reads no messages, until the condition holds."""
        wait_until(lambda: (self.turn(), condition())[1], "what the test waits for")

    def turn(self) -> None:
        self.zeromq.answer_questions({socket for socket in self.zeromq.sockets if socket.poll(0)})
        for event, descriptor in self.zeromq.events():
            if event == zmq.EVENT_ACCEPTED:
                self.guard.add(descriptor)
                self.sessions.add(descriptor)
            else:
                self.ends += 1
                self.guard.remove(descriptor)

    def receive(self) -> list[zmq.Frame]:
        self.until(lambda: self.zeromq.socket.poll(0))
        return self.zeromq.socket.recv_multipart(copy=False)

    def close(self) -> None:
        self.turn()
        self.zeromq.close()
        self.guard.close()


@pytest.fixture
def keys(tmp_path) -> KeyDirectory:
    return KeyDirectory(tmp_path / "keys")


@pytest.fixture
def gateway(keys) -> Iterator[Gateway]:
    gateway = Gateway(keys)
    yield gateway
    gateway.close()


@contextmanager
def host(port: int, key: ConnectionKey) -> Iterator[zmq.Socket[bytes]]:
    """A worker host that connects."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvhwm = 0, 1
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = (
            text.encode() for text in (key.daemon, key.public, key.secret)
        )
        dealer.connect(f"tcp://127.0.0.1:{port}")
        yield dealer


def test_rows_that_were_ordered_may_come_faster_than_they_are_read(gateway, keys) -> None:
    """Encrypted frames of a whole piece come, far more than a peer may send without an order."""
    rows = [bytes(PIECE_BYTES)] * PIECES
    ordered = PIECES * wire_bytes(PIECE_BYTES, encrypted=True)
    with host(gateway.port, keys.new("pool", role=Role.WORKER)) as dealer:
        dealer.send(b"hello")
        descriptor = descriptor_of(gateway.receive()[-1])
        for _ in range(10):
            gateway.guard.expect(descriptor, ordered)
            dealer.send_multipart(rows)
            gateway.until(lambda: gateway.zeromq.socket.poll(0))
            gateway.guard.audit()
            frames = gateway.receive()[1:]
            assert [len(frame.buffer) for frame in frames] == [PIECE_BYTES] * PIECES
            assert gateway.guard.count_message(descriptor, "127.0.0.1", ordered, PIECES)
            gateway.guard.expect(descriptor, 0)
            gateway.guard.audit()
        assert gateway.guard.closed == 0

        dealer.send_multipart(rows)
        gateway.until(lambda: gateway.zeromq.socket.poll(0))
        gateway.guard.audit()
        assert gateway.guard.closed == 1


def test_a_frame_beyond_the_limit_ends_the_connection(gateway, keys) -> None:
    """One byte too many is enough, and no part of the frame arrives."""
    with host(gateway.port, keys.new("pool", role=Role.WORKER)) as dealer:
        dealer.send(bytes(PIECE_BYTES))
        assert len(gateway.receive()[-1].buffer) == PIECE_BYTES
        dealer.send(bytes(PIECE_BYTES + 1))
        gateway.until(lambda: gateway.ends)
        assert gateway.zeromq.socket.poll(0) == 0


def test_a_peer_that_reads_nothing_fills_the_limit_of_its_user(gateway, keys) -> None:
    """The limit comes after the buffers of the kernel at both ends are full."""
    piece = bytes(PIECE_BYTES)
    with host(gateway.port, keys.new("pool", role=Role.WORKER)) as dealer:
        dealer.send(b"hello")
        routing = gateway.receive()[0].bytes

        def send_many() -> None:
            for _ in range(300):
                gateway.zeromq.socket.send_multipart([routing, piece], zmq.NOBLOCK)

        with pytest.raises(zmq.Again):
            send_many()


def test_the_key_of_a_trainer_does_not_enter(gateway, keys) -> None:
    """The key is valid at the other address of the same daemon."""
    key = keys.new("gpu-7")
    assert keys.trainers.holds("gpu-7", key.public)
    with host(gateway.port, key) as dealer:
        dealer.send(b"hello")
        gateway.until(lambda: gateway.ends)
        assert gateway.zeromq.socket.poll(0) == 0


def test_an_address_that_is_taken_is_named_with_its_key(gateway) -> None:
    """The router's user passes the name of the key."""
    other = TcpRouter(None, LIMITS)
    with pytest.raises(BatchdError, match=f"^{ADDRESS_KEY}: .*:{gateway.port} cannot be listened on"):
        other.bind(f"tcp://127.0.0.1:{gateway.port}", ADDRESS_KEY)
    other.close()
