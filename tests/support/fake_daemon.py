"""A small scripted daemon for testing the client: real sockets, real memfds, no decoding.

Runs as a thread of the test.

It serves one stream, whose batches contain their position, and behaves like a good daemon except
for these settings of a test:

    fake.alter = function        message -> its replacement (a message, bytes, or None)
    fake.alter_page = function   (epoch, step, page) -> the bytes for the slot instead
    fake.alter_slot = function   (slot, slot_bytes, descriptor) -> the same, for the lifeline (the
                                 daemon closes both descriptors)
    fake.answer = function       (session, message) -> True if it has answered itself
    fake.writable_slots = True   slots are shared writable on request
    fake.do(function)            run something inside the daemon's thread, and wait for it

Invariant: all state belongs to the thread; tests read it through ``do`` or ``wait_until``.
"""

import fcntl
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import zmq

from batchd_wire import PROTOCOL_VERSION
from batchd_wire import messages as wire
from batchd_wire.channel import ChannelClosed, receive_message, send_message
from batchd_wire.codec import Message
from batchd_wire.codes import ErrorCode
from batchd_wire.fields import HEADER_BYTES
from batchd_wire.runtime import RuntimeDirectory, runtime_directory
from batchd_wire.slot import SlotHeader
from support.fake_stream import FakeSession, FakeSlot, FakeStream, FakeSubscription
from support.waiting import PATIENCE_S

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class FakeDaemon:
    """See the module docstring.

    ``with FakeDaemon(directory) as fake`` starts it; ``kill`` and ``start`` restart it.
    """

    def __init__(self, directory: Path, stream: FakeStream | None = None) -> None:
        self.runtime: RuntimeDirectory = runtime_directory(directory)
        self.stream = stream or FakeStream()
        self.alter: Callable[[Message], Message | bytes | None] = lambda message: message
        self.alter_page: Callable[[int, int, bytearray], bytearray] = lambda _epoch, _step, page: page
        self.alter_slot: Callable[[int, int, int], tuple[int, int, int]] = lambda *shared: shared
        self.answer: Callable[[FakeSession, Message], bool] = lambda _session, _message: False
        self.writable_slots = False
        self.grants_at_most = 1 << 60
        self.heard: list[Message] = []
        self.sessions: list[FakeSession] = []
        self.ended_sessions = 0
        self.slots: list[FakeSlot] = []
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        return self.runtime.address

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # --- what tests call --------------------------------------------------------------------------

    def start(self) -> None:
        """Open the sockets and serve."""
        self.runtime.path.mkdir(parents=True, exist_ok=True)
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._bell, self._bell_end = socket.socketpair()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for path in (self.runtime.lifeline_path, self.runtime.zmq_path):
            path.unlink(missing_ok=True)
        self._router.bind(self.runtime.zmq_endpoint)
        self._listener.bind(os.fspath(self.runtime.lifeline_path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="fake daemon")
        self._thread.start()

    def kill(self) -> None:
        """End abruptly like SIGKILL: socket files stay, lifelines end."""
        if self._thread is not None:
            self._orders.put(None)
            self._bell.send(b"!")
            self._thread.join()
            self._thread = None

    def do(self, function: Callable[[], object]) -> None:
        """Run ``function`` in the daemon's thread and wait for it."""
        done = threading.Event()
        self._orders.put(lambda: (function(), done.set())[0])
        self._bell.send(b"!")
        assert done.wait(PATIENCE_S), "the fake daemon is stuck"

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true in the daemon."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), f"never: {condition}"

    @property
    def plain_status(self) -> dict[str, object]:
        """The status that the daemon reports."""
        bgr_fields = list(self.stream.bgr_fields)
        return {"version": "fake"} | (
            {"streams": [{"name": self.stream.name, "bgr_fields": bgr_fields}]} if bgr_fields else {}
        )

    def heard_of(self, kind: type) -> list:
        """The messages of one kind that have arrived so far."""
        return [message for message in list(self.heard) if type(message) is kind]

    def held_sequences(self) -> list[int]:
        """The sequences of all leases that have not ended."""
        return sorted(
            sequence for one in self.sessions for each in one.subscriptions.values() for sequence in each.leases
        )

    def send(self, session: FakeSession, message: Message | bytes) -> None:
        """Send over ZeroMQ; inside the daemon's thread only."""
        altered = self.alter(message) if isinstance(message, Message) else message
        if altered is not None and session.routing is not None:
            data = altered.encode() if isinstance(altered, Message) else altered
            self._router.send_multipart([session.routing, data])

    def refuses(self, session: FakeSession, message: Message, error: ErrorCode, text: str) -> bool:
        """For ``answer``: refuse a waiting trainer with this reason.

        Inside the daemon's thread only.
        """
        if not isinstance(message, wire.Pull) or not message.waiting:
            return False
        self._pull(session, message)
        self.send(session, wire.Refused(0, message.subscription, error, text))
        return True

    def grant_up_to(self, total: int) -> None:
        """Grant at most ``total`` batches to each subscription."""

        def grant() -> None:
            self.grants_at_most = total
            self.grant_all()

        self.do(grant)

    # --- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._poller = zmq.Poller()
        for one in (self._router, self._listener, self._bell_end):
            self._poller.register(one, zmq.POLLIN)
        try:
            while self._turn():
                with self._changed:
                    self._changed.notify_all()
        finally:
            self._close()

    def _turn(self) -> bool:
        ready = dict(self._poller.poll())
        if self._bell_end.fileno() in ready:
            self._bell_end.recv(1)
            order = self._orders.get()
            if order is None:
                return False
            order()
        if self._listener.fileno() in ready:
            self._accept()
        for session in [one for one in self.sessions if one.lifeline.fileno() in ready]:
            self._hear(session)
        if self._router in ready:
            routing, data = self._router.recv_multipart()
            self._take(routing, wire.TO_DAEMON.decode(data))
        return True

    def _close(self) -> None:
        for session in self.sessions:
            session.lifeline.close()
        self.sessions.clear()
        for slot in self.slots:
            os.close(slot.descriptor)
        self.slots.clear()
        for one in (self._listener, self._bell, self._bell_end):
            one.close()
        self._context.destroy(linger=0)

    def _accept(self) -> None:
        lifeline, _ = self._listener.accept()
        self.sessions.append(FakeSession(lifeline))
        self._poller.register(lifeline, zmq.POLLIN)

    def _hear(self, session: FakeSession) -> None:
        try:
            message, _ = receive_message(session.lifeline, wire.TO_DAEMON_LIFELINE)
        except ChannelClosed:
            self._poller.unregister(session.lifeline)
            session.lifeline.close()
            self.sessions.remove(session)
            for subscription in session.subscriptions.values():
                for slot, _ in subscription.leases.values():
                    slot.is_leased = False
            self.ended_sessions += 1
            self.grant_all()
            return
        self.heard.append(message)
        if isinstance(message, wire.AskWritable):
            session.wants_writable = True
        elif not self._is_answered(session, message):
            assert isinstance(message, wire.Hello)
            session.secret = secrets.token_bytes(16)
            with suppress(ChannelClosed):
                send_message(session.lifeline, wire.Welcome(PROTOCOL_VERSION, session.secret))

    def _is_answered(self, session: FakeSession, message: Message) -> bool:
        """Let the test answer; its client may have disconnected meanwhile."""
        try:
            return self.answer(session, message)
        except ChannelClosed:
            return True

    def _take(self, routing: bytes, message: Message) -> None:
        if isinstance(message, wire.Open):
            for one in self.sessions:
                one.routing = routing if one.secret == message.secret else one.routing
        session = next((one for one in self.sessions if one.routing == routing), None)
        self.heard.append(message)
        if session is None:  # its lifeline ended while the message was in transit
            return
        if self._is_answered(session, message):
            return
        self._obey(session, message)
        self.grant_all()

    def _obey(self, session: FakeSession, message: Message) -> None:
        match message:
            case wire.Open():
                self.send(session, wire.Opened("fake"))
            case wire.Subscribe():
                self._subscribe(session, message)
            case wire.Pull():
                self._pull(session, message)
            case wire.Unsubscribe(subscription=number, consumed=consumed):
                subscription = session.subscriptions[number]
                subscription.ended = True
                for sequence in [one for one in subscription.leases if one >= consumed]:
                    self._end_lease(subscription, sequence)
            case wire.AskStatus(request=request):
                self.send(session, wire.Status(request, self.plain_status))
            case wire.AskBad(request=request):
                self.send(session, wire.BadSamples(request, 1, [(7, "cat/7.jpg", "empty file", 2)]))

    def _subscribe(self, session: FakeSession, asked: wire.Subscribe) -> None:
        stream, refusal = self.stream, None
        if asked.stream != stream.name:
            refusal = ErrorCode.UNKNOWN_STREAM, f"there is no stream {asked.stream!r}; there are {stream.name!r}"
        elif asked.fingerprint not in (None, stream.fingerprint):
            refusal = ErrorCode.FINGERPRINT_MISMATCH, f"fingerprint {asked.fingerprint}, now {stream.fingerprint}"
        elif asked.step > stream.steps:
            refusal = ErrorCode.POSITION_OUT_OF_RANGE, f"step {asked.step} of {stream.steps}"
        if refusal is not None:
            self.send(session, wire.Refused(asked.request, 0, *refusal))
            return
        number = next(self._numbers)
        subscription = FakeSubscription(number, asked, stream.positions(asked), asked.window or stream.window)
        session.subscriptions[number] = subscription
        self.send(session, stream.admit(asked, number))

    def _pull(self, session: FakeSession, pull: wire.Pull) -> None:
        subscription = session.subscriptions[pull.subscription]
        for sequence, generation in pull.released:
            lease = subscription.leases.get(sequence)
            if lease is not None and lease[1] == generation:
                self._end_lease(subscription, sequence)
        if not subscription.ended:
            subscription.consumed = max(subscription.consumed, min(pull.consumed, subscription.granted))
            subscription.waiting = pull.waiting and pull.consumed == subscription.granted

    def _end_lease(self, subscription: FakeSubscription, sequence: int) -> None:
        slot, _ = subscription.leases.pop(sequence)
        slot.is_leased = False

    def grant_all(self) -> None:
        for session in self.sessions:
            for subscription in session.subscriptions.values():
                while not subscription.ended and self._grant(session, subscription):
                    pass

    def _grant(self, session: FakeSession, subscription: FakeSubscription) -> bool:
        if subscription.granted >= min(subscription.consumed + subscription.window, self.grants_at_most):
            return False
        slot = self._free_slot()
        if slot is None:
            return False
        position = next(subscription.positions, None)
        if position is None:
            return False
        self._fill(slot, *position)
        sequence = subscription.granted
        subscription.granted += 1
        subscription.leases[sequence] = (slot, slot.generation)
        if subscription.waiting:
            subscription.waiting = False
            subscription.consumed = subscription.granted
        self._share(session, slot)
        handle = wire.Handle(
            subscription.number, sequence, *position, slot.number, slot.generation, 0, self.stream.rows
        )
        self.send(session, handle)
        return True

    def _free_slot(self) -> FakeSlot | None:
        free = next((slot for slot in self.slots if not slot.is_leased), None)
        if free is None and len(self.slots) < self.stream.slots:
            free = FakeSlot(len(self.slots) + 1, make_slot(self.stream.layout.slot_bytes))
            self.slots.append(free)
        return free

    def _fill(self, slot: FakeSlot, epoch: int, step: int) -> None:
        slot.is_leased = True
        slot.generation += 1
        header = SlotHeader(slot.generation, slot.number, epoch, step, self.stream.rows, 0)
        if self.stream.writes_pixels:
            os.pwrite(slot.descriptor, self.alter_page(epoch, step, self.stream.page(epoch, step)), 0)
        os.pwrite(slot.descriptor, header.pack(), 0)

    def _share(self, session: FakeSession, slot: FakeSlot) -> None:
        if slot.number in session.shared:
            return
        session.shared.add(slot.number)
        mode = os.O_RDWR if self.writable_slots and session.wants_writable else os.O_RDONLY
        shared = os.open(f"/proc/self/fd/{slot.descriptor}", mode | os.O_CLOEXEC)
        number, slot_bytes, descriptor = self.alter_slot(slot.number, self.stream.layout.slot_bytes, shared)
        with suppress(ChannelClosed):  # its end of file is read next
            send_message(session.lifeline, wire.SlotShared(number, slot_bytes), (descriptor,))
        for each in {shared, descriptor}:
            os.close(each)


def make_slot(slot_bytes: int, seals: int = SEALS) -> int:
    """Create the memory of a slot, and return its writable descriptor."""
    descriptor = os.memfd_create("batchd-fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, slot_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def spoilt(page: bytearray) -> bytearray:
    """For ``alter_page``: change one bit of the first row."""
    page[HEADER_BYTES] ^= 1
    return page


def altered_handle(**changes: int) -> Callable[[Message], Message]:
    """For ``alter``: change fields of every handle."""
    return lambda message: replace(message, **changes) if isinstance(message, wire.Handle) else message
