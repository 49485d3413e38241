"""A small scripted daemon on a TCP port: a thread of the test with a ROUTER.

Tests the client's validation.

It serves one ``FakeStream`` like a good daemon, except for this setting of a test:

    fake.alter = function     message and its frames -> the frames to send instead

Invariant: the record of trainers belongs to the thread; a test changes only ``alter``.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import zmq

from batchd_wire import messages as wire
from batchd_wire.codec import MalformedMessage, Message
from batchd_wire.tcp import pieces
from support.fake_stream import FakeStream

TURN_MS = 20

Alter = Callable[[Message, list[bytes]], list[bytes]]


def honest(_message: Message, frames: list[bytes]) -> list[bytes]:
    """For ``alter``: send what a good daemon sends."""
    return frames


@dataclass
class _Claim:
    """One subscription: its position, and the number of sent batches."""

    positions: Iterator[tuple[int, int]]
    window: int
    sent: int = 0


class FakeRemoteDaemon:
    """See the module docstring. ``with FakeRemoteDaemon() as fake`` starts it."""

    def __init__(self, stream: FakeStream | None = None) -> None:
        self.stream = stream or FakeStream()
        self.alter: Alter = honest
        self._claims: dict[tuple[bytes, int], _Claim] = {}
        self._numbers = 0
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self.address = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._serve, name="fake remote daemon")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._router.poll(TURN_MS):
                routing, *frames = self._router.recv_multipart()
                with suppress(MalformedMessage):
                    self._obey(routing, wire.TO_DAEMON_REMOTE.decode(frames[0]))

    def _obey(self, routing: bytes, message: Message) -> None:
        match message:
            case wire.Greet():
                self._send(routing, wire.Greeted("fake", "", bytes(16)))
            case wire.Subscribe():
                self._numbers += 1
                window = message.window or self.stream.window
                self._claims[routing, self._numbers] = _Claim(self.stream.positions(message), window)
                self._send(routing, self.stream.admit(message, self._numbers))
            case wire.Unsubscribe(subscription=number):
                self._claims.pop((routing, number), None)
            case wire.AskStatus(request=request):
                self._send(routing, wire.Status(request, {"version": "fake"}))
            case wire.AskBad(request=request):
                self._send(routing, wire.BadSamples(request, 1, [(7, "cat/7.jpg", "empty file", 2)]))
        if isinstance(message, wire.Subscribe):
            self._deliver(routing, self._numbers, 0)
        elif isinstance(message, wire.Pull):
            self._deliver(routing, message.subscription, message.consumed)

    def _deliver(self, routing: bytes, number: int, consumed: int) -> None:
        claim = self._claims.get((routing, number))
        while claim is not None and claim.sent < consumed + claim.window:
            position = next(claim.positions, None)
            if position is None:
                return
            page = bytes(self.stream.page(*position))
            parcel = wire.Parcel(number, claim.sent, *position, 1, 0, self.stream.rows, 0, 1)
            claim.sent += 1
            self._send(
                routing, parcel, *(page[start:end] for start, end in pieces(self.stream.layout, 0, self.stream.rows))
            )

    def _send(self, routing: bytes, message: Message, *frames: bytes) -> None:
        altered = self.alter(message, [message.encode(), *frames])
        if altered:
            self._router.send_multipart([routing, *altered])
