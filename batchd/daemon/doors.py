"""The ways in for trainers: one ``Door`` for each, and all of them together. DAEMON process.

    ``sessions``: sockets of the runtime directory; batches stay in shared memory
    ``remote``:   TCP, for other hosts; batches are sent as bytes

A door puts what its trainers say into the daemon's queue: events for the core, and each question
of a person as ``Asked``. It does not call the rest of the daemon, so doors are made before
everything that uses them.

Invariant: every session and every subscription has a number of its own, whichever door its trainer
came through.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, TypeAlias

import zmq

from batchd.core.actions import GrantLease
from batchd.core.events import Event
from batchd.daemon.descriptors import Watch
from batchd.daemon.limits import SessionLimits
from batchd.daemon.memory.mailboxes import MailboxMemory
from batchd.daemon.memory.slots import SlotPool
from batchd.daemon.session_log import Guest
from batchd_wire.codec import Message
from batchd_wire.fields import SlotLayout
from batchd_wire.messages import AskBad, AskReload, AskStatus
from batchd_wire.status import LocalCounts, TcpCounts, TrainerStatistics

_GONE = Guest("", None, "those who have gone")


@dataclass(frozen=True, slots=True)
class Asked:
    """A session asks what the core does not decide: for an answer for people, or for a reload."""

    session: int
    message: AskStatus | AskBad | AskReload


Queue: TypeAlias = deque[Event | Asked]
"""What has happened, in order. A daemon makes it first, and gives its ``append`` to everything else."""
Enqueue: TypeAlias = Callable[[Event | Asked], None]


@dataclass(frozen=True, slots=True)
class DaemonSide:
    """What every door is given of the daemon."""

    watch: Watch
    enqueue: Enqueue
    memory: SlotPool
    session_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    subscription_numbers: Iterator[int] = field(default_factory=lambda: count(1))


class Door(Protocol):
    """One way in for trainers. A message to a session that is gone is dropped."""

    name: str
    """The key of its counts in the status."""

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        """The ZeroMQ sockets that the loop polls; all other descriptors are in ``Watch``."""

    @property
    def patience_s(self) -> float:
        """Seconds in which the door has nothing to do unless something arrives."""

    def receive(self, ready: Container[object]) -> bool:
        """Read a bounded portion of what trainers say; true where there may be more.

        ``ready`` has those of ``sockets`` that can be read.
        """

    def tick(self) -> None:
        """Half a second has passed: close connections that must not stay."""

    def __contains__(self, session: int) -> bool:
        """Tell whether the session came in here and is not gone."""

    def guest(self, session: int) -> Guest:
        """Who the session's trainer is, for the log."""

    def may_read(self, session: int, stream: str) -> bool:
        """Tell whether a session that is here may read a stream, and see it in the status."""

    def statistics(self, now: float) -> Sequence[TrainerStatistics]:
        """All trainers, for people."""

    def counts(self) -> LocalCounts | TcpCounts:
        """Connections of all kinds, for people."""

    def send(self, session: int, message: Message) -> None:
        """Send a message of the core without waiting. A trainer that does not read is cut off."""

    def answer(self, session: int, message: Message) -> None:
        """Send the answer to a question."""

    def deliver(self, grant: GrantLease, layout: SlotLayout) -> None:
        """Send a batch to a session that is here: its handle, or its bytes.

        ``BatchSent`` follows where it is bytes.
        """

    def share_mailbox(self, session: int, stream: int, mailbox: MailboxMemory) -> None:
        """Hand a producer a stream's mailbox, once. Producers come through the local door alone."""

    def withdraw_slots(self, slots: Sequence[int]) -> None:
        """Have trainers unmap slots whose memory is given back."""

    def limit(self, limits: SessionLimits) -> None:
        """Admit new sessions within these limits; nobody is sent away."""


class Doors:
    """All doors of the daemon, in the order in which they are heard."""

    def __init__(self, doors: Iterable[Door]) -> None:
        self._doors = tuple(doors)

    def __iter__(self) -> Iterator[Door]:
        return iter(self._doors)

    def of(self, session: int) -> Door | None:
        """The door that a session came through; None where the session is gone."""
        return next((door for door in self._doors if session in door), None)

    def send(self, session: int, message: Message) -> None:
        """Send a message through the session's door."""
        door = self.of(session)
        if door is not None:
            door.send(session, message)

    def guest(self, session: int) -> Guest:
        """Who the session's trainer is, for the log; it may be gone already."""
        door = self.of(session)
        return door.guest(session) if door is not None else _GONE
