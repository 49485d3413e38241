"""One session with one daemon: lifeline, ZeroMQ sockets, mapped slots. Runs in the trainer.

    opened (see ``opening``) -> requests, pulls, handles -> close, or SessionLost

A session is never repaired. If it is lost, or an interrupt may have lost half of a message
(``is_interrupted``), the connection opens a new session, and each stream subscribes again at its
position. Leases of the old session keep its lifeline, and so their right to the memory, until they
end.

Invariant: a received message is processed completely, or the session is interrupted.
"""

import itertools
import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, TypeVar

import zmq

from batchd_client.errors import ConnectTimeout, ProtocolError, error_for_code
from batchd_client.lifeline import LOOK_S, DaemonBusy, Lifeline, RemoteLink, SessionLost
from batchd_client.memory import Mailbox, SlotMemory
from batchd_wire import PROTOCOL_VERSION, messages
from batchd_wire.codec import MalformedMessage, Message
from batchd_wire.codes import ErrorCode
from batchd_wire.runtime import host_id
from batchd_wire.tcp import part_of

if TYPE_CHECKING:  # they load numpy, and a session that only asks has no subscriptions
    from batchd_client.subscription import OwnerToken, Subscription

SLOT_WAIT_S = 10.0
"""Most delay of a slot's memory after the handle that names it."""
CLOSE_LINGER_MS = 100
"""Wait of ``close`` for the last messages, if leases outlive the connection."""
HANDLES_AT_ONCE = 64
"""Handles that are received together, as many as the longest window has."""
WAIT_MAX_S = 3600.0
"""Longest single wait of a request without a deadline."""
OPENING = 0
"""Stands for a request's number: ``Open`` has none."""


M = TypeVar("M", bound=Message)
V = TypeVar("V")


class Session:
    """See the module. For one thread at a time; only ``wait`` may run beside other methods."""

    def __init__(self, socket: zmq.Socket[bytes], link: Lifeline | RemoteLink, endpoint: str) -> None:
        self._socket = socket
        self._extra_connections: list[tuple[zmq.Socket[bytes], RemoteLink]] = []
        """Further TCP connections, which carry only batches."""
        self._sources = [socket]
        self.descriptors = [int(socket.getsockopt(zmq.FD)), link.descriptor]
        """They become readable when there may be something to receive."""
        self._numbers = itertools.count(OPENING + 1)
        self._awaited = OPENING
        self._answers: list[Message] = []
        self._lost: str | None = None
        self._subscriptions: dict[int, Subscription] = {}
        self._retired: list[Subscription] = []
        self._unadopted: list[int] = []
        """Numbers of admitted subscriptions whose owner gave up or was interrupted."""
        self.forgotten: deque[OwnerToken] = deque()
        """Subscriptions whose owner is gone; appended to in any thread, at any time."""
        self.link = link
        self._vocabulary = messages.TO_TRAINER if isinstance(link, Lifeline) else messages.TO_TRAINER_REMOTE
        self.endpoint = endpoint
        self.daemon_version = ""
        self.slots: dict[int, SlotMemory] = {}
        """The slots shared so far, by number."""
        self._mailboxes: dict[int, Mailbox] = {}
        self.is_interrupted = False
        self.last_message_s = time.monotonic()

    @property
    def is_usable(self) -> bool:
        """True if the session may still be used."""
        return self._lost is None and not self.is_interrupted

    @property
    def address(self) -> str:
        """The daemon's address, for `connect`."""
        return f"ipc://{self.link.path.parent}" if isinstance(self.link, Lifeline) else self.endpoint

    @property
    def has_left_overs(self) -> bool:
        """True if ``settle`` has something to do, now or later."""
        return bool(self.forgotten or self._retired or self._unadopted)

    @property
    def holds_leases(self) -> bool:
        """True if any batch of this session is alive."""
        return any(one.held for one in (*self._subscriptions.values(), *self._retired))

    @property
    def remote_links(self) -> list[RemoteLink]:
        """The TCP connections, the oldest first."""
        links = (self.link, *(link for _socket, link in self._extra_connections))
        return [link for link in links if isinstance(link, RemoteLink)]

    def leave(self) -> None:
        """Close; if leases keep the lifeline open, tell the daemon first that all claims end.

        The same if a stream that was not closed has reports left.
        """
        linger_ms = 0
        has_reports = any(one.reports is not None and one.reports.has_news for one in self._subscriptions.values())
        if self._lost is None and (self.holds_leases or has_reports):
            linger_ms = CLOSE_LINGER_MS
            with suppress(SessionLost):
                self.settle()
                for number in list(self._subscriptions):
                    self.unsubscribe(number)
        self.close(linger_ms)

    def close(self, linger_ms: int = 0) -> None:
        """Close the sockets. Living batches keep their memory, and the lifeline."""
        self._lost = self._lost or "the session has been closed"
        self.slots.clear()
        for subscription in (*self._subscriptions.values(), *self._retired):
            subscription.let_go()
        if isinstance(self.link, RemoteLink):
            self.link.close()
        for mailbox in self._mailboxes.values():
            mailbox.close()
        self._socket.close(linger=linger_ms)
        for socket, link in self._extra_connections:
            link.close()
            socket.close(linger=0)
        if isinstance(self.link, Lifeline) and not self.holds_leases:
            self.link.close()

    # --- subscriptions ----------------------------------------------------------------------------

    def adopt(self, subscription: "Subscription", owner: object) -> None:
        """Deliver to this subscription while ``owner`` is alive. Paired with ``unsubscribe``."""
        subscription.watch(owner, self.forgotten)
        self._subscriptions[subscription.number] = subscription
        self._unadopted = [number for number in self._unadopted if number != subscription.number]

    def has(self, subscription: "Subscription") -> bool:
        """True if the subscription belongs to this session and has not ended."""
        return self._subscriptions.get(subscription.number) is subscription

    def unsubscribe(self, number: int) -> None:
        """End a subscription; its leases are reported as they end. Raises ``SessionLost``."""
        if all(over.number != number for over in self._retired):
            subscription = self._subscriptions.get(number)
            if subscription is not None and subscription.reports is not None and subscription.reports.has_news:
                self.give_back(subscription)
            if not self.send(messages.Unsubscribe(number, subscription.leased if subscription is not None else 0)):
                self._lose("ZeroMQ takes no message, though the lifeline is open")
            if subscription is not None:
                subscription.reports = None
                self._retired.append(subscription)
        self._subscriptions.pop(number, None)

    def settle(self) -> None:
        """End subscriptions without an owner, and report leases of ended subscriptions."""
        while self.forgotten:
            self.unsubscribe(self.forgotten[0].number)
            self.forgotten.popleft()
        while self._unadopted:
            self.unsubscribe(self._unadopted[-1])
            self._unadopted.pop()
        for over in self._retired:
            if over.ended:
                self.give_back(over)
        self._retired = [over for over in self._retired if over.outstanding]

    # --- sending ----------------------------------------------------------------------------------

    def send(self, message: Message, over: zmq.Socket[bytes] | None = None) -> bool:
        """Send without waiting, ``over`` the first connection; False if ZeroMQ's queue is full.

        Raises ``SessionLost``.
        """
        if self._lost is not None:
            raise SessionLost(self._lost)
        try:
            (over or self._socket).send(message.encode(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def give_back(self, subscription: "Subscription", waited_us: int = 0, *, waiting: bool = False) -> bool:
        """Send a ``Pull`` with the position and the ended leases; False if it could not be sent.

        Reports that exceed one message go in further ones.
        """
        reports = subscription.reports
        while True:
            part = reports.next_part(self) if reports is not None else None
            pull = subscription.pull(waited_us, waiting=waiting, reports=part)
            if not self.send(pull):
                return False
            subscription.reported, subscription.wait_reported_us = pull.consumed, pull.wait_us
            subscription.reported_s = time.monotonic()
            if pull.released:
                subscription.forget_released(pull)
            if reports is None or part is None:
                return True
            reports.sent(part)
            if not reports.has_unsent:
                return True

    def request(self, make: Callable[[int], Message], answer: type[M], deadline: float) -> M:
        """Return the answer. Raises a refusal, ``SessionLost``, or ``ConnectTimeout``."""
        self.settle()
        number = next(self._numbers)
        return self._exchange(number, make(number), answer, deadline)

    def begin(self, make: Callable[[int], Message]) -> None:
        """Send a request without waiting, for ``answer`` to return. Drops the previous request."""
        self._awaited = next(self._numbers)
        self._answers.clear()
        if not self.send(make(self._awaited)):
            self._lose("ZeroMQ takes no message, though the lifeline is open")

    def answer(self) -> Message | None:
        """Return the answer to ``begin``'s request; None if it has not arrived.

        Call it before each wait for ``descriptors``. Raises a refusal, ``SessionLost`` and
        ``ProtocolError``.
        """
        while not self._answers:
            if not self.receive():
                self.check_link()
                return None
        return _accepted(self._answers.pop())

    # --- receiving --------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Process one message, if any. Raises ``SessionLost``, ``ProtocolError``, refusals."""
        if self._lost is not None:
            raise SessionLost(self._lost)
        # until the message is where it belongs: an interrupt in between would lose it
        self.is_interrupted = True
        for source in self._sources:
            try:
                data = source.recv(zmq.NOBLOCK)
            except zmq.Again:
                continue
            self._sort(source, data)
            self.is_interrupted = False
            return True
        self.is_interrupted = False
        return False

    def receive_handles(self, subscription: "Subscription") -> None:
        """Process messages until there is a handle or no message; raises as ``receive``.

        On one host, where that copies nothing, as many as a daemon writes together.
        """
        at_least = 1 if isinstance(self.link, RemoteLink) else HANDLES_AT_ONCE
        while len(subscription.handles) < at_least and self.receive():
            pass

    def _sort(self, source: zmq.Socket[bytes], data: bytes) -> None:
        try:
            message = self._vocabulary.decode(data)
        except MalformedMessage as error:
            raise ProtocolError(f"on {self.endpoint}: {error}") from None
        self.last_message_s = time.monotonic()
        if type(message) is messages.Handles:
            for values in message.handles:
                if len(values) < messages.Handle.required:
                    raise ProtocolError(f"on {self.endpoint}: a handle of {len(values)} fields")
                self._sort_handle(messages.Handle(*values[: len(messages.Handle.field_names)]))
        elif type(message) is messages.Handle:
            self._sort_handle(message)
        elif type(message) is messages.Parcel:
            self._receive_parcel(source, message)
        else:
            self._take(message)

    def _sort_handle(self, handle: messages.Handle) -> None:
        subscription = self._subscriptions.get(handle.subscription)
        if subscription is not None:
            subscription.add_handle(handle)

    def wait(self, seconds: float) -> None:
        """Wait until there may be something to receive.

        ``receive`` must have said that there is nothing. The only method that may run while another
        thread uses the session.
        """
        poll = select.poll()
        for descriptor in self.descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)

    def check_link(self) -> None:
        """Map the memory shared so far. Raises ``SessionLost`` if the daemon is gone."""
        # a search for a slot must not lose its handle
        was_interrupted, self.is_interrupted = self.is_interrupted, True
        try:
            self.link.receive_shared(self.slots, self._mailboxes)
            for _socket, link in self._extra_connections:
                link.receive_shared(self.slots, self._mailboxes)
        except SessionLost as lost:
            self._lost = str(lost)
            raise
        self.is_interrupted = was_interrupted

    def slot(self, number: int) -> SlotMemory:
        """Return the slot that a handle names; waits for it, as the two sockets are not in step."""
        return self._shared(self.slots, number, f"a handle names slot {number}")

    def mailbox(self, stream: int) -> Mailbox:
        """Return the mailbox of a stream that this session produces for; waits for it."""
        return self._shared(self._mailboxes, stream, f"there is a mailbox of stream number {stream}")

    def forget_mailbox(self, stream: int) -> None:
        """Close a mailbox that is not read any more."""
        mailbox = self._mailboxes.pop(stream, None)
        if mailbox is not None:
            mailbox.close()

    def _shared(self, memories: dict[int, V], number: int, named: str) -> V:
        memory = memories.get(number)
        if memory is None:
            deadline = time.monotonic() + SLOT_WAIT_S
            while (memory := memories.get(number)) is None:
                if not isinstance(self.link, Lifeline) or not self.link.wait(deadline):
                    raise ProtocolError(f"{named}, whose memory never came on the lifeline")
                self.check_link()
        return memory

    def open(self, secret: bytes, deadline: float, look: Callable[[], None] | None = None) -> None:
        """Tie the ZeroMQ connection to the lifeline: first exchange of a local session."""
        tie = messages.Open(PROTOCOL_VERSION, secret)
        self.daemon_version = self._exchange(OPENING, tie, messages.Opened, deadline, look=look).daemon

    def greet(self, name: str, deadline: float, look: Callable[[], None] | None = None) -> messages.Greeted:
        """Begin a session over TCP, of the run called ``name``: its first exchange."""
        greet = messages.Greet(PROTOCOL_VERSION, name, os.getpid(), host_id())
        greeted = self._exchange(OPENING, greet, messages.Greeted, deadline, look=look)
        self.daemon_version = greeted.daemon
        return greeted

    def join(self, socket: zmq.Socket[bytes], link: RemoteLink, secret: bytes, deadline: float) -> None:
        """Add a further connection for batches; the session owns it from now on."""
        self._extra_connections.append((socket, link))
        self._sources.append(socket)
        self.descriptors += [int(socket.getsockopt(zmq.FD)), link.descriptor]
        socket.connect(self.endpoint)
        self._exchange(OPENING, messages.Join(secret), messages.Joined, deadline, socket)

    # --- inside -----------------------------------------------------------------------------------

    def _exchange(  # noqa: PLR0913  the facts of one exchange
        self,
        number: int,
        message: Message,
        answer: type[M],
        deadline: float,
        over: zmq.Socket[bytes] | None = None,
        *,
        look: Callable[[], None] | None = None,
    ) -> M:
        """Send, and wait for the answer; ``look`` is called each half second meanwhile."""
        self._awaited = number
        self._answers.clear()
        sent = False
        while not self._answers:
            if self.receive():
                continue
            if not sent and self.send(message, over):
                sent = True
                # sending may have used up the wake-up of a received message: receive before waiting
                continue
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise ConnectTimeout(
                    f"{type(message).__name__} was not answered on {self.endpoint}"
                    if sent
                    else f"{self.endpoint} does not take the connection that {self.link.path} began"
                )
            # before waiting, too: ZeroMQ's descriptors tell only what came after the last look
            self.check_link()
            self.wait(min(seconds, WAIT_MAX_S if look is None else LOOK_S))
            if look is not None:
                look()
            self.check_link()
        reply = _accepted(self._answers.pop())
        if not isinstance(reply, answer):
            raise ProtocolError(f"{type(reply).__name__} came in answer to {type(message).__name__}")
        return reply

    def _receive_parcel(self, source: zmq.Socket[bytes], parcel: messages.Parcel) -> None:
        """Copy the frames of a parcel into their buffer, checking every length."""
        subscription = self._subscriptions.get(parcel.subscription)
        if subscription is None:
            while source.getsockopt(zmq.RCVMORE):
                source.recv_into(bytearray(), flags=zmq.NOBLOCK)
            return
        layout = subscription.view(parcel).layout
        buffer = subscription.arrivals.buffer_for(parcel)
        for start, end in part_of(layout, parcel.first, parcel.count, parcel.part, parcel.parts):
            if not source.getsockopt(zmq.RCVMORE):
                raise ProtocolError(f"a batch of stream number {parcel.subscription} came in part")
            received = source.recv_into(buffer.page[start:end], flags=zmq.NOBLOCK)
            if received != end - start:
                raise ProtocolError(f"{received} bytes came where {end - start} were due")
        if source.getsockopt(zmq.RCVMORE):
            raise ProtocolError("more came than the rows of a batch")
        subscription.add_part(parcel)

    def _take(self, message: Message) -> None:
        if type(message) is messages.Subscribed:
            self._unadopted.append(message.subscription)
        if type(message) is messages.Refused and message.request == 0:
            self._take_refusal(message)
        elif type(message) in {messages.Opened, messages.Greeted}:
            if self._awaited != OPENING or self.daemon_version:
                raise ProtocolError("the session was opened twice")
            self._answers.append(message)
        elif type(message) is messages.Joined:
            if self._awaited != OPENING or not self._extra_connections:
                raise ProtocolError("a connection joined that was there already")
            self._answers.append(message)
        elif getattr(message, "request", OPENING) == self._awaited:
            if type(message) is messages.Refused and message.error in _MEANS_LOST:
                self._lose(f"the daemon says: {message.text}")
            self._answers.append(message)

    def _take_refusal(self, refused: messages.Refused) -> None:
        subscription = self._subscriptions.get(refused.subscription)
        if refused.error in _MEANS_LOST or (subscription and refused.error == ErrorCode.UNKNOWN_SUBSCRIPTION):
            self._lose(f"the daemon says: {refused.text}")
        if subscription is not None:
            subscription.refusal = refused
        elif refused.subscription:
            return  # the subscription was given up before: its refusal changes nothing here
        elif refused.error == ErrorCode.TOO_OFTEN:
            raise DaemonBusy(f"the daemon says: {refused.text}")
        else:
            raise error_for_code(refused.error, refused.text)

    def _lose(self, text: str) -> NoReturn:
        self._lost = text
        raise SessionLost(text)


def _accepted(reply: Message) -> Message:
    if type(reply) is messages.Refused:
        raise error_for_code(reply.error, reply.text)
    return reply


_MEANS_LOST = (ErrorCode.UNKNOWN_SESSION, ErrorCode.DRAINING)
