"""Workers as the daemon's loop has them, wherever they run. DAEMON process, and those with workers.

    OrderChunk -> fill ... -> flush: at the worker, behind the stream and the slot, if it lacks them

``daemon.workers`` implements it for processes of this host, ``pool.remote`` for worker hosts.
Events arrive through the loop's queue, ``WorkerGone`` once it is certain that the worker writes no
more.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from batchd.core.actions import Action, OrderChunk
from batchd.core.fleet import WorkerKind
from batchd.core.state import DaemonState
from batchd_wire.status import PoolStatistics

Performers: TypeAlias = dict[type[Action], Callable[[Any], None]]


class Workers(Protocol):
    """Workers of one kind, by number. A call about one that is gone does nothing."""

    kind: WorkerKind
    performers: Performers
    """For the actions that are about this kind alone."""

    def fill(self, order: OrderChunk) -> None:
        """Have a worker fill rows: it gets the order with the next ``flush``."""

    def flush(self) -> None:
        """Send the orders of this round of the loop."""

    def kill(self, number: int, reason: str) -> None:
        """End a worker that hangs or breaks the protocol."""

    def quarantine(self, stream: int, samples: Sequence[int]) -> None:
        """Tell those that know the stream to treat samples as bad."""

    def forget_stream(self, stream: int) -> None:
        """Tell those that know the stream that no order will name it."""

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Tell those that know any of these slots that no order will name it."""

    def use_storage(self, storage: tuple[int, int, int]) -> None:
        """Use these limits for file servers from now on."""

    def tick(self, state: DaemonState) -> None:
        """Half a second has passed."""

    def statistics(self, state: DaemonState, now: float) -> PoolStatistics | None:
        """What the status says of worker hosts; None without any."""


@dataclass(slots=True)
class SentBefore:
    """The streams and slots that one receiver of orders knows. It gets each once."""

    streams: set[int] = field(default_factory=set)
    slots: set[int] = field(default_factory=set)

    def enter_stream(self, stream: int) -> bool:
        """Record that a stream is sent; False if it was before."""
        return _enter(self.streams, stream)

    def enter_slot(self, slot: int) -> bool:
        """Record that a slot is sent; False if it was before."""
        return _enter(self.slots, slot)

    def drop_stream(self, stream: int) -> bool:
        """Forget a stream that no order will name; False if it was not known."""
        is_known = stream in self.streams
        self.streams.discard(stream)
        return is_known

    def drop_slots(self, slots: Iterable[int]) -> list[int]:
        """Forget slots that no order will name; those that were known."""
        gone = self.slots.intersection(slots)
        self.slots -= gone
        return sorted(gone)


def _enter(known: set[int], number: int) -> bool:
    is_new = number not in known
    known.add(number)
    return is_new
