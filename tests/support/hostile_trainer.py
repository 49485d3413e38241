"""A trainer that does its worst, in a process of its own. For a test of how long others wait.

python -m support.hostile_trainer RUNTIME_DIRECTORY TCP_ADDRESS KEY_FILE STREAMS FILLERS

It takes as many subscriptions of STREAMS as FILLERS sessions may have, and their batches, until the
rings are full; says "ready"; and then does what each line of its standard input names, and says
"done". A message is sent ``BURST`` times over each session of this host, and as often over TCP,
with lists as long as a message may be, or as a client's are. Half of them name the first stream,
which should be the most expensive one. The daemon's messages are enumerated by
``batchd_wire.messages``, so a new one has a burst of its own.
"""

import json
import os
import socket
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, Self, get_args, get_origin, get_type_hints

import msgpack
import zmq

import batchd_client
from batchd.core.admission import SUBSCRIPTIONS_MAX
from batchd.runtime.limits import MESSAGE_BYTES_MAX
from batchd_wire import PROTOCOL_VERSION
from batchd_wire import messages as wire
from batchd_wire.channel import send_message
from batchd_wire.codec import ITEMS_MAX, Message, Vocabulary
from batchd_wire.keys import read_connection_key
from batchd_wire.reports import PULL_REPORTS
from support.hostile_messages import kinds_of, parts_of, without_none
from support.producers import frame
from support.raw_peer import RawPeer
from support.waiting import PATIENCE_S, wait_until

BURST = 64
VARIANTS = 4
"""Lists of each field: Python makes them slowly."""
SESSIONS = 2
"""Of this host, that send the bursts."""
UNREAD_BYTES = 128 << 10
"""Over TCP: half of what a peer may send before it is read."""
LINGER_S = 10
CROWD = 200
TCP_CROWD = 50
STORM = 1_000
HALF, FEW = 0.5, 0.1
NUMBERS = (0, 1, 2, 5, 17, 4_000)
"""Of small ones, since most large numbers are refused at once."""
NOWHERE = 1 << 30
"""Request numbers from here on are of streams that do not exist: their refusals are awaited."""


class Session(ABC):
    """A session that knows what it was granted, and has read the answers so far."""

    def __init__(self) -> None:
        self.granted: dict[int, int] = {}
        """By subscription: batches until now."""
        self.producing: list[int] = []
        self.refused: set[int] = set()
        """Numbers of the requests."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message, and read what has arrived."""

    @abstractmethod
    def read(self) -> None:
        """Read what has arrived, or it would be disconnected."""

    def wait_for_answers(self, count: int) -> None:
        """Wait until so many subscriptions are there or refused."""
        wait_until(lambda: self.read() or len(self.granted) + len(self.refused) >= count, "it subscribes")

    def learn(self, data: bytes) -> None:
        """Note what a message of the daemon says."""
        code, *fields = msgpack.unpackb(data)
        if code == wire.Subscribed.code:
            self.granted[fields[1]] = 0
        elif code == wire.Producing.code:
            self.producing.append(fields[1])
        elif code == wire.Refused.code:
            self.refused.add(fields[0])
            self.granted.pop(fields[1], None)
        elif code in {wire.Handle.code, wire.Parcel.code, wire.Handles.code}:
            for subscription, sequence, *_rest in fields[0] if code == wire.Handles.code else [fields]:
                if subscription in self.granted:
                    self.granted[subscription] = sequence + 1


class LocalSession(RawPeer, Session):
    """A session of this host."""

    def __init__(self, directory: Path) -> None:
        RawPeer.__init__(self, directory)
        Session.__init__(self)
        self.open()
        self.lifeline.setblocking(False)

    def send(self, message: Message) -> None:
        """See ``Session``."""
        with suppress(zmq.Again):
            self.dealer.send(message.encode(), zmq.NOBLOCK)
        self.read()

    def read(self) -> None:
        """See ``Session``."""
        with suppress(zmq.Again):
            while True:
                self.learn(self.dealer.recv(zmq.NOBLOCK))
        with suppress(BlockingIOError, ConnectionError):
            while (received := socket.recv_fds(self.lifeline, 1 << 16, 4))[0]:
                for descriptor in received[1]:
                    os.close(descriptor)


class RemoteSession(Session):
    """A session over TCP, which sends no more than it may."""

    def __init__(self, address: str, key_file: Path) -> None:
        super().__init__()
        self._context = zmq.Context()
        self._dealer = connected(self._context, address, key_file)
        self._unread_bytes, self._requests = 0, NOWHERE
        self._dealer.send(wire.Greet(PROTOCOL_VERSION, "hostile", 1, "").encode())
        assert self._dealer.poll(PATIENCE_S * 1000), "no answer to a greeting"
        assert msgpack.unpackb(self._dealer.recv())[0] == wire.Greeted.code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._context.destroy(linger=0)

    def send(self, message: Message) -> None:
        """See ``Session``."""
        data = message.encode()
        if self._unread_bytes + len(data) > UNREAD_BYTES:
            self._settle()
        self._unread_bytes += len(data)
        self._dealer.send(data)
        self.read()

    def read(self) -> None:
        """See ``Session``."""
        with suppress(zmq.Again):
            while True:
                self.learn(self._dealer.recv_multipart(zmq.NOBLOCK)[0])

    def _settle(self) -> None:
        """Wait until the daemon has read everything."""
        self._requests += 1
        self._dealer.send(subscribe("nowhere", self._requests, 0).encode())
        wait_until(lambda: self.read() or self._requests in self.refused, "the daemon reads a session over TCP")
        self._unread_bytes = 0


def connected(context: "zmq.Context[Any]", address: str, key_file: Path) -> "zmq.Socket[Any]":
    """A socket with a trainer's key."""
    key = read_connection_key(key_file)
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.curve_serverkey, dealer.curve_publickey = key.daemon.encode(), key.public.encode()
    dealer.curve_secretkey = key.secret.encode()
    dealer.connect(address)
    return dealer


def subscribe(stream: str, request: int, epoch: int) -> wire.Subscribe:
    """A subscription with the longest window."""
    return wire.Subscribe(request, stream, 0, 1, 64, epoch, 0, None, None, False, True, True)


class Hostile:
    """All that one program can do to a daemon."""

    def __init__(self, directory: Path, tcp_address: str, key_file: Path, streams: list[str], stack: ExitStack) -> None:
        self._directory, self._streams, self._stack = directory, streams, stack
        self._tcp = tcp_address, key_file
        self._chance = Random(1)
        self._lists: dict[tuple[type[Message], str], list[list[Any]]] = {}
        self._local = [self._opened() for _ in range(SESSIONS)]
        self._remote = [stack.enter_context(RemoteSession(*self._tcp))]
        self._fillers: list[LocalSession] = []
        self._begin([*self._local, *self._remote])
        self.deeds: dict[str, Callable[[], None]] = {
            **{name(kind, "tcp"): self._burst(kind, self._remote) for kind in kinds_of(wire.TO_DAEMON_REMOTE)},
            **{name(kind): self._burst(kind, self._local) for kind in kinds_of(wire.TO_DAEMON)},
            **{name(kind): self._lifeline_burst(kind) for kind in kinds_of(wire.TO_DAEMON_LIFELINE)},
            "descriptors": self.pass_descriptors,
            "crowd": self.crowd,
            "crowd/tcp": self.crowd_over_tcp,
            "storm/tcp": self.storm,
            "departure": self.depart,
        }

    def _opened(self) -> LocalSession:
        return self._stack.enter_context(LocalSession(self._directory))

    def _begin(self, sessions: list[Session]) -> None:
        """Subscribe to each stream, so that messages may name what is there."""
        for session in sessions:
            for number, stream in enumerate(self._streams):
                session.send(subscribe(stream, number + 1, self._chance.randrange(1 << 20)))
            if session in self._local:
                session.send(wire.Produce(len(self._streams) + 1, "live"))
            session.wait_for_answers(len(self._streams))

    # --- the rings --------------------------------------------------------------------------------

    def fill_rings(self, sessions: int) -> int:
        """Subscribe as often as the sessions may, and take batches until the rings are full."""
        self._fillers = [self._opened() for _ in range(sessions)]
        for filler in self._fillers:
            for number in range(SUBSCRIPTIONS_MAX):
                stream = self._streams[(number + len(self._fillers)) % len(self._streams)]
                filler.send(subscribe(stream, number + 1, self._chance.randrange(1 << 20)))
        for filler in self._fillers:
            filler.wait_for_answers(SUBSCRIPTIONS_MAX)
        with (
            batchd_client.push("live", f"ipc://{self._directory}") as producer,
            batchd_client.connect(f"ipc://{self._directory}") as connection,
        ):
            wait_until(
                lambda: self._take_more(producer) or self._is_full(connection), "the rings are full", every_s=0.05
            )
        return sum(len(filler.granted) for filler in self._fillers)

    def _take_more(self, producer: batchd_client.Producer) -> None:
        """Take all batches that were granted, and give none back."""
        for number in range(8):
            producer.put(frame(number))
        for filler in self._fillers:
            for subscription, granted in list(filler.granted.items()):
                filler.send(wire.Pull(subscription, granted, True, 0, []))

    def _is_full(self, connection: batchd_client.Daemon) -> bool:
        """True if each slot of the stored streams is taken."""
        status = connection.status()["streams"]
        stored = [stream for stream in status if stream["name"] in self._streams and not stream.get("live")]
        return all(stream["slots"] == stream["slots_max"] for stream in stored)

    # --- messages ---------------------------------------------------------------------------------

    def _burst(self, kind: type[Message], sessions: list[Any]) -> Callable[[], None]:
        def send() -> None:
            for number in range(BURST):
                for session in sessions:
                    session.send(kind(*self._values(kind, session, number % VARIANTS)))

        return send

    def _lifeline_burst(self, kind: type[Message]) -> Callable[[], None]:
        def send() -> None:
            for number in range(BURST):
                for session in self._local:
                    with suppress(OSError):
                        send_message(session.lifeline, kind(*self._values(kind, session, number % VARIANTS)))
            self._local = [self._opened() for _ in self._local]  # they were disconnected

        return send

    def _values(self, kind: type[Message], session: Session, variant: int) -> list[Any]:
        hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.field_names}
        lists = {name: inner for name, hint in hints.items() if get_origin(inner := _inner(hint)) is list}
        for name, hint in lists.items():
            if (kind, name) not in self._lists:
                self._lists[kind, name] = self._make_lists(name, hint, MESSAGE_BYTES_MAX // len(lists) // 2)
        return [
            self._lists[kind, name][variant] if name in lists else self._value(name, hint, session)
            for name, hint in hints.items()
        ]

    def _make_lists(self, name: str, hint: Any, room: int) -> list[list[Any]]:
        """As long as there is room for, and as long as a client's, in turn."""
        (item,) = get_args(hint)
        size = len(msgpack.packb([self._value(name, item) for _ in range(50)])) // 50 + 1
        longest = min(room // size, ITEMS_MAX)
        return [
            [self._value(name, item) for _ in range(longest if variant % 2 else min(longest, PULL_REPORTS))]
            for variant in range(VARIANTS)
        ]

    def _value(self, name: str, hint: Any, session: Session | None = None) -> Any:
        if type(None) in get_args(hint):
            return None if self._chance.random() < HALF else self._value(name, _inner(hint), session)
        if parts := parts_of(hint):
            return [self._value(name, part) for part in parts]
        if session is not None and hint is int and name in {"subscription", "stream"}:
            numbers = (session.producing if name == "stream" else list(session.granted)) or [1]
            return self._chance.choice([numbers[0], self._chance.choice(numbers)])
        if name == "settings":
            return json.dumps({"seed": self._chance.choice(NUMBERS)}) if self._chance.random() < HALF else ""
        if name == "defines":
            return (
                json.dumps({"batch_size": self._chance.choice(NUMBERS)}).encode()
                if self._chance.random() < FEW
                else b""
            )
        plain = {
            int: self._chance.choice([*NUMBERS, self._chance.randrange(1 << 39)]),
            str: self._chance.choice(self._streams),
            bytes: bytes(4),
            bool: self._chance.random() < HALF,
        }
        return PROTOCOL_VERSION if name == "version" else plain[hint]

    # --- resources --------------------------------------------------------------------------------

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
        lingering = (socket.SOL_SOCKET, socket.SO_LINGER)
        slow.setsockopt(*lingering, struct.pack("ii", 1, LINGER_S))
        is_passed = False
        for kind, name in ((socket.SOCK_SEQPACKET, "lifeline.sock"), (socket.SOCK_STREAM, "batchd.sock")):
            with socket.socket(socket.AF_UNIX, kind) as peer:
                peer.connect(str(self._directory / name))
                with suppress(PermissionError):
                    socket.send_fds(peer, [wire.Hello(PROTOCOL_VERSION, "x", 1).encode()], [slow.fileno()])
                    is_passed = True
        if not is_passed:
            slow.setsockopt(*lingering, struct.pack("ii", 0, 0))  # or this process waits for it
        slow.close()

    def crowd(self) -> None:
        """Connect, greet and leave, very many together."""
        with ExitStack() as stack:
            for _ in range(CROWD):
                lifeline = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                lifeline.connect(str(self._directory / "lifeline.sock"))
                send_message(lifeline, wire.Hello(PROTOCOL_VERSION, "crowd", 1))

    def crowd_over_tcp(self) -> None:
        """Connect with a key, greet and leave."""
        with zmq.Context() as context, ExitStack() as stack:
            crowd = [stack.enter_context(connected(context, *self._tcp)) for _ in range(TCP_CROWD)]
            for dealer in crowd:
                dealer.send(wire.Greet(PROTOCOL_VERSION, "crowd", 1, "").encode())
            for dealer in crowd:
                dealer.poll(1000)  # some are refused as too many

    def storm(self) -> None:
        """Connect and leave, as fast as a peer without a key can."""
        host, port = self._tcp[0].removeprefix("tcp://").split(":")
        for _ in range(STORM):
            with socket.socket() as peer:
                peer.setblocking(False)
                peer.connect_ex((host, int(port)))

    def depart(self) -> None:
        """End all sessions with all their subscriptions at once."""
        for filler in self._fillers:
            filler.lifeline.close()


def name(kind: type[Message], door: str = "") -> str:
    """The name of a message's burst."""
    return f"{kind.__name__}/{door}" if door else kind.__name__


def bursts() -> set[str]:
    """The names of all bursts that there must be."""
    every: tuple[tuple[Vocabulary, str], ...] = (
        (wire.TO_DAEMON, ""),
        (wire.TO_DAEMON_LIFELINE, ""),
        (wire.TO_DAEMON_REMOTE, "tcp"),
    )
    return {name(kind, door) for vocabulary, door in every for kind in kinds_of(vocabulary)}


def _inner(hint: Any) -> Any:
    """The type of a field that may be None, without None."""
    return without_none(hint) if type(None) in get_args(hint) else hint


def say(*words: object) -> None:
    """Write a line to the test."""
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
    sys.stdout.flush()


def main() -> None:
    """See the module."""
    directory, tcp_address, key_file, streams, fillers = sys.argv[1:]
    with ExitStack() as stack:
        hostile = Hostile(Path(directory), tcp_address, Path(key_file), streams.split(","), stack)
        say("ready", hostile.fill_rings(int(fillers)), *hostile.deeds)
        for line in sys.stdin:
            hostile.deeds[line.strip()]()
            say("done")


if __name__ == "__main__":
    main()
