"""Replays a recorded conversation to a daemon: the client's bytes in the same order."""

import socket
from contextlib import ExitStack
from typing import Any, Self

import msgpack
import zmq

from support.daemon_process import DaemonProcess
from support.waiting import PATIENCE_S

ON_THE_LIFELINE = {"Hello", "AskWritable", "Welcome", "SlotShared", "SlotsGone", "MailboxShared"}
GIVE_SECRET = {"Welcome", "Greeted"}
NAME_SECRET = {"Open", "Join"}


class Player:
    """Both sockets of a session, or the one over TCP."""

    def __init__(self, daemon: DaemonProcess, over: str) -> None:
        self._stack = ExitStack()
        context = zmq.Context()
        self._stack.callback(context.destroy, linger=0)
        self._dealer = context.socket(zmq.DEALER)
        self._lifeline = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        if over == "remote":
            self._dealer.connect(str(daemon.tcp_address))
        else:
            self._dealer.connect(f"ipc://{daemon.runtime_dir / 'batchd.sock'}")
            self._lifeline.settimeout(PATIENCE_S)
            self._lifeline.connect(str(daemon.runtime_dir / "lifeline.sock"))
        self._secret = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def play(self, said: list[list[str]]) -> None:
        """Send the trainer's messages; the daemon's messages must look as recorded."""
        for sender, name, recorded in said:
            message = msgpack.unpackb(bytes.fromhex(recorded))
            if sender == "trainer":
                self._say(name, [*message[:-1], self._secret] if name in NAME_SECRET else message)
            else:
                answer = self._hear(name)
                assert shape(answer) == shape(message), f"{name} was {message}, and is {answer}"
                self._secret = answer[-1] if name in GIVE_SECRET else self._secret

    def _say(self, name: str, message: list[Any]) -> None:
        data = msgpack.packb(message)
        if name in ON_THE_LIFELINE:
            self._lifeline.send(data)
        else:
            self._dealer.send(data)

    def _hear(self, name: str) -> list[Any]:
        if name in ON_THE_LIFELINE:
            data, descriptors, _flags, _address = socket.recv_fds(self._lifeline, 1 << 17, 4)
            for descriptor in descriptors:
                socket.close(descriptor)
        else:
            assert self._dealer.poll(PATIENCE_S * 1000), f"{name} does not arrive"
            data = self._dealer.recv_multipart()[0]
        message: list[Any] = msgpack.unpackb(data)
        return message


def shape(message: list[Any]) -> list[Any]:
    """Return the number of a message and the types of its fields, for a strict client."""
    return [message[0], *map(_type, message[1:])]


def _type(value: Any) -> Any:
    return list(map(_type, value)) if isinstance(value, list) else type(value).__name__
