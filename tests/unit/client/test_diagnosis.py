"""A trainer's hints about other programs that listen at the daemon's address.

Each kind has its own hint, and the trainer retries after each.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from batchd.runtime.keys import KeyDirectory
from batchd_client.opening import GREETING_BYTES, diagnose
from batchd_client.sockets import Sockets
from batchd_wire.runtime import TcpAddress
from support.waiting import PATIENCE_S

SECONDS = 0.3
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(24, b"\0") + bytes(31)
assert len(GREETING) == GREETING_BYTES


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """The context in which a connection opens its sockets."""
    sockets = Sockets(1)
    yield sockets
    sockets.destroy()


@contextmanager
def listening(behave: Callable[[socket.socket, int], None]) -> Iterator[TcpAddress]:
    """Listen, and call ``behave`` with each connection and its number.

    The connection is closed when ``behave`` returns.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            number = 0
            with suppress(OSError):
                while True:
                    connection, _address = server.accept()
                    with connection, suppress(OSError):
                        behave(connection, number)
                    number += 1

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield TcpAddress("127.0.0.1", server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def says(words: bytes) -> Callable[[socket.socket, int], None]:
    """Read a few bytes, send these, and close the connection."""

    def behave(connection: socket.socket, _number: int) -> None:
        connection.recv(1)
        connection.sendall(words)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass

    return behave


def stay_silent(connection: socket.socket, _number: int) -> None:
    """Read, and send nothing."""
    while connection.recv(1 << 16):
        pass


@pytest.mark.parametrize(
    ("behave", "hint"),
    [
        (stay_silent, "took the connection but says nothing: stopped, hung, or no batchd daemon"),
        (
            lambda _connection, _number: None,
            "hangs up at once: no batchd daemon, or one that keeps this host out",
        ),
        (says(b""), "hangs up at once"),
        (says(b"SSH-2.0-OpenSSH"), "something listens there, but it is no batchd daemon"),
        (says(b"\xff" * GREETING_BYTES), "something listens there, but it is no batchd daemon"),
        (says(GREETING[:1]), "the connection was cut while it was made"),
        (says(GREETING[:-1]), "the connection was cut while it was made"),
        (says(GREETING.replace(b"CURVE", b"NULL\0")), "the connection was cut while it was made"),
    ],
)
def test_programs_that_are_no_answering_daemon_are_named_and_retried(sockets, behave, hint) -> None:
    """The port of another program, a stopped daemon, and a broken cable."""
    with listening(behave) as address:
        reason = diagnose(sockets, address, None, SECONDS, timed_out=False)
    assert isinstance(reason, OSError)
    assert hint in str(reason)


def test_a_daemon_that_greets_and_does_not_answer_is_reported_as_hanging(sockets) -> None:
    """It has no keys, so no other cause is possible."""
    with listening(says(GREETING.replace(b"CURVE", b"NULL\0"))) as address:
        reason = diagnose(sockets, address, None, SECONDS, timed_out=True)
    assert isinstance(reason, OSError)
    assert "did not answer in time" in str(reason)


@pytest.mark.parametrize("cut_after", [0, 1, GREETING_BYTES - 1, GREETING_BYTES + 1, GREETING_BYTES + 100])
def test_a_disconnect_in_the_handshake_is_no_wrong_key(sockets, tmp_path, cut_after) -> None:
    """A disconnect right after the greeting means other keys; any other one means the network."""
    keys = KeyDirectory(tmp_path / "keys")
    keys.make_daemon_key()
    words = GREETING + b"\x04\xa8\x07WELCOME" + bytes(160)  # ZeroMQ waits for the rest of it

    def behave(connection: socket.socket, number: int) -> None:
        says(GREETING if number == 0 else words[:cut_after])(connection, number)

    with listening(behave) as address:
        reason = diagnose(sockets, address, keys.new("a"), PATIENCE_S, timed_out=False)
    assert isinstance(reason, OSError)
    assert "the connection was cut" in str(reason)
