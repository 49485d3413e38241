"""A trainer that does its worst, in a process of its own. For a test of how long others wait.

python -m support.hostile_trainer RUNTIME_DIRECTORY STREAMS

It takes as many subscriptions of STREAMS as it gets, says "ready", and then does what each line of
its standard input names, and says "done". A message is sent ``BURST`` times over each of its
sessions, with all lists as long as a message may be; the daemon's messages are enumerated by
``batchd_wire.messages``, so a new one has a burst of its own.
"""

import os
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
import zmq

from batchd.core.admission import SUBSCRIPTIONS_MAX
from batchd.daemon.limits import MESSAGE_BYTES_MAX
from batchd_wire import PROTOCOL_VERSION
from batchd_wire.channel import send_message
from batchd_wire.codec import ITEMS_MAX, Message
from batchd_wire.messages import TO_DAEMON, TO_DAEMON_LIFELINE, Handle, Handles, Hello, Refused, Subscribe, Subscribed
from support.hostile_messages import kinds_of, parts_of, without_none
from support.raw_peer import RawPeer

BURST = 64
SESSIONS = 2
"""That send the bursts."""
LINGER_S = 10
CROWD = 200
NUMBERS = (0, 1, 2, 5, 17, 4_000)
"""Of small ones, since most large numbers are refused at once."""


class Session(RawPeer):
    """A session that knows its subscriptions, and has read the answers so far."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.known: list[int] = []
        self.handles: list[list[int]] = []
        self.open()
        self.lifeline.setblocking(False)

    def read(self) -> None:
        """Read what has arrived, or it would be disconnected."""
        with suppress(zmq.Again):
            while True:
                self._learn(self.dealer.recv(zmq.NOBLOCK))
        with suppress(BlockingIOError, ConnectionError):
            while (received := socket.recv_fds(self.lifeline, 1 << 16, 4))[0]:
                for descriptor in received[1]:
                    os.close(descriptor)

    def _learn(self, data: bytes) -> None:
        code, *fields = msgpack.unpackb(data)
        if code == Subscribed.code:
            self.known.append(fields[1])
        elif code == Handle.code:
            self.handles.append(fields)
        elif code == Handles.code:
            self.handles += fields[0]

    def send(self, message: Message, *, waits: bool = False) -> None:
        """Send a message; ``waits`` for an answer, as one of many could be dropped by ZeroMQ."""
        with suppress(zmq.Again):
            self.dealer.send(message.encode(), 0 if waits else zmq.NOBLOCK)
        self.read()


class Hostile:
    """All that one program can do to a daemon of its host."""

    def __init__(self, directory: Path, streams: list[str], stack: ExitStack) -> None:
        self._directory, self._streams, self._stack = directory, streams, stack
        self._chance = Random(1)
        self.sessions = [self._opened() for _ in range(SESSIONS)]
        kinds = kinds_of(TO_DAEMON, TO_DAEMON_LIFELINE)
        self.deeds: dict[str, Callable[[], None]] = {
            **{kind.__name__: lambda kind=kind: self.flood(kind) for kind in kinds},  # type: ignore[misc]
            "descriptors": self.pass_descriptors,
            "crowd": self.crowd,
            "departure": self.depart,
        }

    def _opened(self) -> Session:
        return self._stack.enter_context(Session(self._directory))

    def fill_rings(self, sessions: int) -> int:
        """Subscribe until the streams refuse, or each session has all that it may have."""
        self._fillers = [self._opened() for _ in range(sessions)]
        count = 0
        for filler in self._fillers:
            for number in range(SUBSCRIPTIONS_MAX):
                stream = self._streams[count % len(self._streams)]
                answer = filler.ask(self._subscribe(stream, number + 1))
                while not isinstance(answer, Subscribed | Refused):
                    answer = filler.hear()
                filler.read()
                count += isinstance(answer, Subscribed)
        return count

    def _subscribe(self, stream: str, request: int) -> Subscribe:
        return Subscribe(request, stream, 0, 1, 64, self._chance.randrange(1 << 20), 0, None, None, False)

    def flood(self, kind: type[Message]) -> None:
        """Send a burst of one kind over each session."""
        over_lifeline = kind in kinds_of(TO_DAEMON_LIFELINE)
        for session in self.sessions:
            for _ in range(BURST):
                message = kind(*self._values(kind, session))
                if over_lifeline:
                    with suppress(OSError):
                        send_message(session.lifeline, message)
                else:
                    session.send(message)
        for place, session in enumerate(self.sessions):
            if over_lifeline:  # it was disconnected
                self.sessions[place] = self._opened()
            session.read()

    def _values(self, kind: type[Message], session: Session) -> list[Any]:
        hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.field_names}
        values: list[Any] = []
        lists = max(1, sum(get_origin(hint) is list for hint in map(_inner, hints.values())))
        for name, hint in hints.items():
            values.append(self._value(name, _inner(hint), session, MESSAGE_BYTES_MAX // lists // 2))
        return values

    def _value(self, name: str, hint: Any, session: Session, room: int) -> Any:
        if get_origin(hint) is list:
            (item,) = get_args(hint)
            size = len(msgpack.packb([self._value(name, item, session, 64) for _ in range(50)])) // 50 + 1
            return [self._value(name, item, session, 64) for _ in range(min(room // size, ITEMS_MAX))]
        if parts := parts_of(hint):
            return [self._value(name, part, session, 4) for part in parts]
        if name in {"subscription", "stream"} and hint is int:
            return self._chance.choice(session.known or [1])
        plain = {
            int: self._chance.choice([*NUMBERS, self._chance.randrange(1 << 39)]),
            str: self._chance.choice(self._streams),
            bytes: bytes(4),
            bool: self._chance.random() < 0.5,
        }
        return PROTOCOL_VERSION if name == "version" else plain[hint]

    def pass_descriptors(self) -> None:
        """Pass sockets that are slow to close, with and without a greeting."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            slow = socket.create_connection(server.getsockname())
            other, _address = server.accept()
            self._stack.enter_context(other)
            slow.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    slow.send(bytes(1 << 16))
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
            for kind, name in ((socket.SOCK_SEQPACKET, "lifeline.sock"), (socket.SOCK_STREAM, "batchd.sock")):
                with socket.socket(socket.AF_UNIX, kind) as peer:
                    peer.connect(str(self._directory / name))
                    with suppress(PermissionError):
                        socket.send_fds(peer, [Hello(PROTOCOL_VERSION, "x", 1).encode()], [slow.fileno()])
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))

    def crowd(self) -> None:
        """Connect, greet and leave, very many together."""
        with ExitStack() as stack:
            for _ in range(CROWD):
                lifeline = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                lifeline.connect(str(self._directory / "lifeline.sock"))
                send_message(lifeline, Hello(PROTOCOL_VERSION, "crowd", 1))

    def depart(self) -> None:
        """End all sessions with all their subscriptions at once."""
        for filler in self._fillers:
            filler.lifeline.close()


def _inner(hint: Any) -> Any:
    """The type of a field that may be None, without None."""
    return without_none(hint) if type(None) in get_args(hint) else hint


def say(*words: object) -> None:
    """Write a line to the test."""
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
    sys.stdout.flush()


def main() -> None:
    """See the module."""
    directory, streams, fillers = sys.argv[1:]
    with ExitStack() as stack:
        hostile = Hostile(Path(directory), streams.split(","), stack)
        say("ready", hostile.fill_rings(int(fillers)), *hostile.deeds)
        for line in sys.stdin:
            hostile.deeds[line.strip()]()
            say("done")


if __name__ == "__main__":
    main()
