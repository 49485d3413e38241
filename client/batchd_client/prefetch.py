"""Batches on their way out of the ring into a framework's own memory, a few ahead of the loop. Runs in the trainer.

    Stream --take--> Batch --Placement.begin--> Transfer, Transfer, ... --finish--> what the user's loop gets
                                                  (``prefetch`` of them)

What is ahead is taken only if it has come already, so nobody waits for a batch that the loop does
not want yet. It is taken across the end of an epoch, as the daemon does.

Invariant: ``state_dict`` is about what the loop has got. What is under way counts as not taken, so
a checkpoint neither skips nor repeats it; where an interrupt has cut off a step in between, the
stream is moved back to where the queue ends.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from batchd_client.batch import Batch
from batchd_client.positions import StreamState
from batchd_client.stream import Stream
from batchd_wire.position import Position

HELD_MAX = 1
"""So many batches may be held while the next one is waited for: any ring has two slots for each of its trainers."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Transfer(Protocol[T_co]):
    """A batch on its way, begun by a ``Placement``."""

    def finish(self) -> T_co:
        """What the loop gets; called once."""


class Placement(Protocol[T_co]):
    """Where batches go."""

    def begin(self, batch: Batch) -> Transfer[T_co]:
        """Begin to bring a batch there. It belongs to the placement from now on, which gives it back once it has been read."""

    def sweep(self, *, wait: bool = False) -> None:
        """Give back the batches that have been read by now; with ``wait`` all of them, as soon as they have been.

        With ``wait`` nothing is kept either of memory that no batch will lie in any more.
        """

    def close(self) -> None:
        """Wait until nothing is read any more, and give everything back. Closing twice does nothing."""


class _Queued(NamedTuple, Generic[T]):
    """A transfer, and where the stream stands behind its batch."""

    transfer: Transfer[T]
    after: Position


class Feed(Generic[T]):
    """See above. ``prefetch``: how many batches may be under way ahead of the loop. One thread at a time may use it."""

    def __init__(
        self, stream: Stream, placement: Placement[T], prefetch: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.stream = stream
        self.next_s = 0.0
        """Seconds within ``take``, for what the loop has got; waiting for the stream is part of them."""
        self._placement = placement
        self._prefetch = prefetch
        self._clock = clock
        self._queue: deque[_Queued[T]] = deque()
        """The first one may be what the loop has got already: then the feed stands behind it."""
        self._position = _position_of(stream)
        stream.when_lost(self._let_go)

    @property
    def position(self) -> Position:
        """The position of the next batch that the loop gets."""
        return self._position

    def take(self, epoch: int) -> T | None:
        """Give the next batch if it belongs to ``epoch``, else None. Raises what iterating the stream raises."""
        if self._position.epoch != epoch:
            return None
        started_s = self._clock()
        self._placement.sweep()
        if self._queue and self._queue[0].after == self._position:
            self._queue.popleft()
        self._mend()
        if not self._queue and not self._begin(wait=False):
            if self.stream.statistics().batches_held > HELD_MAX:
                self._placement.sweep(wait=True)  # in a small ring, what comes next needs their memory
            if not self._begin(wait=True):
                return None
        self._look_ahead()
        head = self._queue[0]
        try:
            result = head.transfer.finish()
            self.next_s += self._clock() - started_s
            # From here on nothing is called, so neither a signal handler nor another thread can
            # come in between.
            self._position = head.after
        finally:
            if self._position is not head.after:
                self._queue.clear()  # the user's own part in it may have changed it: the batch is fetched again
        return result

    def seek(self, epoch: int, step: int = 0) -> None:
        """Go on at another position; what is under way is dropped. Raises ``PositionInvalid``, and then everything stays."""
        self._placement.sweep(wait=True)  # a small ring has no slots for another claim beside those that are still held
        self.stream.seek(epoch, step)
        self._drop()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where ``state_dict`` was taken. Raises ``StateMismatch``, and then everything stays as it was."""
        self._placement.sweep(wait=True)
        self.stream.load_state_dict(state)
        self._drop()

    def state_dict(self) -> StreamState:
        """As ``Stream.state_dict``, for what the loop has got."""
        state = self.stream.state_dict()
        state["epoch"], state["step"] = self._position
        return state

    def close(self) -> None:
        """Give up the claim and what is under way. Closing twice does nothing."""
        self._queue.clear()
        try:
            self._placement.close()
        finally:
            self.stream.close()

    def _let_go(self) -> None:
        """The daemon has gone, and the next one needs the memory of its slots."""
        self._placement.sweep(wait=True)

    def _drop(self) -> None:
        self._queue.clear()
        self._position = _position_of(self.stream)

    def _mend(self) -> None:
        """Move the stream back to the end of the queue, where it stands elsewhere: a batch was taken and has been lost."""
        end = self._queue[-1].after if self._queue else self._position
        if _position_of(self.stream) != end:
            self._placement.sweep(wait=True)
            self.stream.seek(*end)

    def _begin(self, *, wait: bool) -> bool:
        """Begin to bring one batch more; False where there is none."""
        batch = self.stream.take(self.stream.epoch, wait=wait)
        if batch is None:
            return False
        self._queue.append(_Queued(self._placement.begin(batch), _position_of(self.stream)))
        return True

    def _look_ahead(self) -> None:
        """Begin to bring those that have come, up to ``prefetch`` beyond the one that the loop gets now."""
        try:
            while len(self._queue) <= self._prefetch and self._begin(wait=False):
                pass
        except Exception:  # noqa: BLE001  of a device, a stream, or the user's code: this batch is not to blame
            return  # and it is raised again, where it still is so, when the loop wants that one


def _position_of(stream: Stream) -> Position:
    return Position(stream.epoch, stream.step)
