"""One gateway process: its channel, and its restart when it has ended. DAEMON process.

    start -> gateway -> it ends: ``ended`` -> pause, longer each time -> gateway

A gateway that hangs, or does not read, is killed. Others of the same daemon do not notice.

Invariant: ``ended`` is called after the last message of the process that has ended, and before any
of the next one.
"""

import os
import socket
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from time import monotonic, sleep
from typing import Protocol

import structlog

from batchd.core.actions import WithdrawOrder
from batchd.errors import BatchdError, why_no_process
from batchd.pool import messages
from batchd.pool.messages import Outbox, messages_in
from batchd.runtime.child_log import ChildLogged, write_line
from batchd.runtime.children import PAUSE_FIRST_S, PAUSE_MAX_S, Child, describe, start_linked
from batchd.runtime.poller import Poller
from batchd.worker.interface import SentBefore
from batchd_wire.channel import SEND_BUFFER_BYTES, ChannelClosed, receive_message, send_encoded
from batchd_wire.codec import MalformedMessage, Message

_log = structlog.get_logger()

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
"""So that the gateway's allocator keeps the memory of pieces of rows, and the kernel need not clear
new pages for each: mallopt(3)."""
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 1.0
STARTS_MAX = 10
START_PAUSE_S = 0.2
"""A gateway that is killed while the daemon starts is replaced after this time, so many times."""
HANGS_TICKS = 20
"""Half seconds that a gateway may be silent after a withdrawal: until it answers, no other worker
may fill the rows. In ticks of the loop, so time in which the daemon is stopped does not count."""
MESSAGES_AT_ONCE = 64
UNREAD_MAX = 100_000
"""Messages that may wait for the gateway; with more it hangs, and is killed."""


class GatewayEvents(Protocol):
    """The calls of ``GatewayChild``."""

    def heard(self, gateway: "GatewayChild", message: Message) -> None:
        """A message of a gateway."""

    def ended(self, gateway: "GatewayChild") -> None:
        """A gateway has ended, and with it its links."""


class GatewayChild:
    """Runs gateway ``number`` and speaks with it. ``arguments``: those of its program."""

    def __init__(
        self,
        number: int,
        poller: Poller,
        arguments: tuple[str, str, str],
        events: GatewayEvents,
    ) -> None:
        self.number = number
        self.port = 0
        self.listens = False
        """Whether worker hosts can register."""
        self.known = SentBefore()
        self._poller = poller
        self._arguments = arguments
        self._events = events
        self.child: Child | None = None
        self._channel: socket.socket
        self._fills = Outbox(self._send_data)
        """Orders of this round of the loop."""
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._started_s = 0.0
        self._pause_s = PAUSE_FIRST_S
        self._due_s: float | None = None
        self._silent_ticks: int | None = None
        """Since a withdrawal; None if the gateway has said anything after it."""

    @property
    def is_up(self) -> bool:
        """Whether there is a process."""
        return self.child is not None

    def spawn(self) -> None:
        """Start a gateway. Raises ``OSError``, and then there is none."""
        self._started_s = monotonic()
        child, channel = start_linked("batchd.pool.gateway", *self._arguments, environment=ALLOCATOR)
        with ExitStack() as where_it_fails:
            where_it_fails.enter_context(channel)
            where_it_fails.enter_context(child)
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._poller.watch(channel.fileno(), self._receive)
            where_it_fails.callback(self._poller.unwatch, channel.fileno())
            self._poller.watch(child.pidfd, self._on_exit)
            where_it_fails.pop_all()
        self.child, self._channel = child, channel
        channel.setblocking(False)

    def wait_listening(self) -> None:
        """Wait until it listens; start another one if it is killed. Paired with ``spawn``.

        Raises ``BatchdError`` if it cannot listen.
        """
        for _ in range(STARTS_MAX):
            self._channel.settimeout(START_TIMEOUT_S)
            try:
                while not self.listens:
                    message, _none = receive_message(self._channel, messages.TO_DAEMON_FROM_GATEWAY)
                    if isinstance(message, messages.GatewayFailed):
                        raise BatchdError(message.reason)
                    self._take(message)
            except TimeoutError:
                break
            except ChannelClosed:
                child = self.let_go()
                assert child is not None, "it was spawned"
                status = child.end(END_TIMEOUT_S)
                if status is None or status >= 0:
                    break
                self._events.ended(self)
                _log.warning(
                    "gateway ended", gateway=self.number, pid=child.pid, how=describe(status), again_in_s=START_PAUSE_S
                )
                sleep(START_PAUSE_S)
                self.spawn()
            else:
                self._channel.setblocking(False)
                return
        raise BatchdError(f"{self._arguments[1]}: the gateway for worker hosts did not start; see the log")

    def tick(self) -> None:
        """Start another process when it is due; end one that hangs."""
        if self._silent_ticks is not None:
            self._silent_ticks += 1
            if self._silent_ticks == HANGS_TICKS:
                self._kill("it answers no withdrawal")
        if self._due_s is None or monotonic() < self._due_s:
            return
        self._due_s = None
        try:
            self.spawn()
        except OSError as error:
            self._put_off("gateway not started", reason=why_no_process(error))

    def send(self, message: Message, *descriptors: int) -> None:
        """Send a message without waiting, after the orders of this round so far."""
        self.flush()
        self._send_data(message.encode(), *descriptors)

    def fill(self, order: messages.SlotOrder) -> None:
        """Send an order, together with the others of this round of the loop."""
        if self.child is not None:
            self._fills.add(order)

    def flush(self) -> None:
        """Send the orders of this round."""
        self._fills.flush()

    def _send_data(self, data: bytes, *descriptors: int) -> None:
        if self.child is None:
            return
        if not self._unsent:
            try:
                send_encoded(self._channel, data, descriptors)
            except ChannelClosed:
                return
            except BlockingIOError:
                self._poller.wait_to_write(self._channel.fileno(), wanted=True)
            else:
                return
        if len(self._unsent) >= UNREAD_MAX:
            self._kill("it does not read its orders")
            return
        self._unsent.append((data, [os.dup(descriptor) for descriptor in descriptors]))

    def withdraw(self, message: WithdrawOrder) -> None:
        """Send a withdrawal, which it has to answer."""
        self.send(message)
        self._silent_ticks = self._silent_ticks or 0

    def let_go(self) -> Child | None:
        """Close the channel, so that the process ends; it is the caller's now, None without one."""
        child, self.child = self.child, None
        if child is None:
            return None
        for descriptor in (child.pidfd, self._channel.fileno()):
            self._poller.unwatch(descriptor)
        self._channel.close()
        self._silent_ticks, self.listens, self.known = None, False, SentBefore()
        for _data, descriptors in self._unsent:
            _close(descriptors)
        self._unsent.clear()
        self._fills.clear()
        return child

    def _receive(self) -> None:
        """Read some messages, and send what waits."""
        self._send_unsent()
        read = 0
        while read < MESSAGES_AT_ONCE:
            try:
                received = self._read()
            except BlockingIOError:
                return
            except ChannelClosed:
                self._poller.unwatch(self._channel.fileno())
                self._kill("it has closed its channel")
                return
            except MalformedMessage as error:
                self._kill(f"it sends invalid messages: {error}")
                return
            read += len(received)
            for message in received:
                self._take(message)

    def _read(self) -> list[Message]:
        """Read one datagram: all its messages. Raises as ``receive_message``."""
        return messages_in(
            receive_message(self._channel, messages.TO_DAEMON_FROM_GATEWAY)[0], messages.TO_DAEMON_FROM_GATEWAY
        )

    def _send_unsent(self) -> None:
        while self._unsent:
            data, descriptors = self._unsent[0]
            try:
                send_encoded(self._channel, data, descriptors)
            except (BlockingIOError, ChannelClosed):
                return
            self._unsent.popleft()
            _close(descriptors)
            if not self._unsent:
                self._poller.wait_to_write(self._channel.fileno(), wanted=False)

    def _take(self, message: Message) -> None:
        self._silent_ticks = None
        match message:
            case messages.GatewayReady():
                self.port, self.listens = message.port, True
                _log.info("listening for worker hosts", gateway=self.number, port=message.port)
            case messages.GatewayFailed():
                _log.error("gateway cannot listen", gateway=self.number, reason=message.reason)
            case ChildLogged():
                write_line(message)
        self._events.heard(self, message)

    def _kill(self, reason: str) -> None:
        if self.child is not None and not self.child.has_ended():
            _log.warning("gateway killed", gateway=self.number, pid=self.child.pid, reason=reason)
            self.child.kill()

    def _on_exit(self) -> None:
        """The kernel reports that the gateway has ended. What it reported before still counts."""
        with suppress(BlockingIOError, ChannelClosed, MalformedMessage):
            while True:
                for message in self._read():
                    self._take(message)
        child = self.let_go()
        assert child is not None, "its descriptor was watched"
        self._events.ended(self)
        self._put_off("gateway ended", pid=child.pid, how=describe(child.reap()))

    def _put_off(self, event: str, **facts: object) -> None:
        """Retry later; soon after a gateway that lived for a while."""
        now = monotonic()
        if now - self._started_s > PAUSE_MAX_S:
            self._pause_s = PAUSE_FIRST_S
        self._due_s = now + self._pause_s
        _log.warning(event, gateway=self.number, **facts, again_in_s=self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
