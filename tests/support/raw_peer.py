"""A peer of the daemon that sends any bytes, also invalid ones. For tests of processes.

with RawPeer(directory) as peer: ...         connected, nothing sent
peer.open()                                  Hello, Welcome, Open, Opened: a session like any other
"""

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import zmq

from batchd_wire import PROTOCOL_VERSION
from batchd_wire.channel import receive_message, send_message
from batchd_wire.codec import Message
from batchd_wire.messages import TO_TRAINER, TO_TRAINER_LIFELINE, Hello, Open, Opened, Welcome
from support.waiting import PATIENCE_S


class RawPeer:
    """Both sockets of a trainer, without any checks."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._stack = ExitStack()
        self.lifeline = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self.lifeline.settimeout(PATIENCE_S)
        self.lifeline.connect(str(runtime_dir / "lifeline.sock"))
        context = zmq.Context()
        self._stack.callback(context.destroy, linger=0)
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.connect(f"ipc://{runtime_dir / 'batchd.sock'}")
        self.secret = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End both connections."""
        self._stack.close()

    def greet(self) -> bytes:
        """Send Hello and return the secret."""
        send_message(self.lifeline, Hello(PROTOCOL_VERSION, "raw", 1))
        welcome, _ = receive_message(self.lifeline, TO_TRAINER_LIFELINE)
        assert isinstance(welcome, Welcome)
        self.secret = welcome.secret
        return welcome.secret

    def open(self) -> Self:
        """Become a session like any other."""
        assert isinstance(self.ask(Open(PROTOCOL_VERSION, self.greet())), Opened)
        return self

    def ask(self, message: Message) -> Message:
        """Send a message over ZeroMQ and wait for the answer."""
        return self.ask_raw(message.encode())

    def ask_raw(self, words: bytes) -> Message:
        """Send any bytes and wait for the answer."""
        self.dealer.send(words)
        return self.hear()

    def hear(self) -> Message:
        """Wait for the next message over ZeroMQ."""
        assert self.dealer.poll(PATIENCE_S * 1000), "no answer"
        return TO_TRAINER.decode(self.dealer.recv())

    def is_hung_up(self) -> bool:
        """Wait for the lifeline's next event, and return whether it is the end of file."""
        try:
            return self.lifeline.recv(1 << 16) == b""
        except ConnectionResetError:
            return True
