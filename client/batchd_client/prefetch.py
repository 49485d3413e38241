"""Copy batches from the ring into a framework's memory, ahead of the loop. Runs in the trainer.

    Stream --take--> Batch --Placement.begin--> Transfer, Transfer, ... --finish--> the loop's item
                                                  (``prefetch`` of them)

Only batches that have already arrived are taken ahead of the loop, so ``next`` never waits for a
batch that the loop does not want yet. They are taken across the end of an epoch, as in the daemon.

Invariant: ``state_dict`` counts what the loop has received. Batches in transit count as not taken,
so a checkpoint neither skips nor repeats them. If an interrupt loses a batch between two steps, the
stream moves back to the end of the queue.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from batchd_client.batch import Batch, BatchRows
from batchd_client.stream import Stream
from batchd_client.subscription import StreamState
from batchd_wire.position import Position

HELD_MAX = 1
"""Batches held during a wait for the next: every ring has two slots for each trainer."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Transfer(Protocol[T_co]):
    """A batch in transit, begun by a ``Placement``."""

    def finish(self) -> T_co:
        """Return what the loop gets. Called once."""


class Placement(Protocol[T_co]):
    """A destination of batches: copies each into memory that the framework owns."""

    def begin(self, batch: Batch) -> Transfer[T_co]:
        """Begin the copy of a batch, which the placement owns now and releases once it is read."""

    def sweep(self, *, wait: bool = False) -> None:
        """Release the batches that have been read; with ``wait``, wait for all of them first.

        With ``wait``, also drop references to memory that will hold no further batch.
        """

    def close(self) -> None:
        """Wait for all copies and release everything. Closing twice does nothing."""


class _Queued(NamedTuple, Generic[T]):
    """A transfer, the position of the stream after its batch, and the rows of the batch."""

    transfer: Transfer[T]
    after: Position
    rows: BatchRows | None


class Prefetcher(Generic[T]):
    """See the module. ``prefetch``: most batches in transit ahead of the loop. For one thread."""

    def __init__(
        self, stream: Stream, placement: Placement[T], prefetch: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.stream = stream
        self.next_s = 0.0
        """Seconds within ``take`` for the batches that the loop has received, including waits."""
        self._placement = placement
        self._prefetch = prefetch
        self._clock = clock
        self._queue: deque[_Queued[T]] = deque()
        """The first may be what the loop has already: then ``position`` is the one after it."""
        self.position = stream.position
        """Position of the next batch that the loop gets."""
        self.rows: BatchRows | None = None
        """The rows of the batch that the loop received last."""
        stream.when_lost(self._let_go)

    def take(self, epoch: int) -> T | None:
        """Return the next item if it is of ``epoch``, else None. Raises as the stream does."""
        if self.position.epoch != epoch:
            return None
        started_s = self._clock()
        self._placement.sweep()
        if self._queue and self._queue[0].after == self.position:
            self._queue.popleft()
        self._mend()
        if not self._queue and not self._begin(wait=False):
            if self.stream.statistics().batches_held > HELD_MAX:
                # In a small ring, the next batch needs their memory.
                self._placement.sweep(wait=True)
            if not self._begin(wait=True):
                return None
        self._look_ahead()
        head = self._queue[0]
        try:
            result = head.transfer.finish()
            self.next_s += self._clock() - started_s
            # No calls from here on, so neither a signal handler nor another thread can interrupt.
            self.position = head.after
            self.rows = head.rows
        finally:
            if self.position is not head.after:
                self._queue.clear()  # user code in it may have changed it: fetch the batch again
        return result

    def seek(self, epoch: int, step: int = 0, *, sample: int | None = None) -> None:
        """Continue elsewhere, and drop what is in transit. ``PositionInvalid`` changes nothing."""
        # A small ring has no slots for a new claim beside held ones.
        self._placement.sweep(wait=True)
        self.stream.seek(epoch, step, sample=sample)
        self._drop()

    def load_state_dict(self, state: Mapping[str, object], *, convert: bool = False) -> None:
        """Continue where ``state_dict`` was taken. ``StateMismatch`` changes nothing."""
        self._placement.sweep(wait=True)
        self.stream.load_state_dict(state, convert=convert)
        self._drop()

    def state_dict(self, *, card: bool = False) -> StreamState:
        """As ``Stream.state_dict``, after the last batch that the loop has received."""
        return self.stream.state_at(self.position, card=card)

    def close(self) -> None:
        """End the claim, and drop what is in transit. Closing twice does nothing."""
        self._queue.clear()
        try:
            self._placement.close()
        finally:
            self.stream.close()

    def _let_go(self) -> None:
        """Release slots of a daemon that is gone: the next one needs their memory."""
        self._placement.sweep(wait=True)

    def _drop(self) -> None:
        self._queue.clear()
        self.position = self.stream.position

    def _mend(self) -> None:
        """Move the stream back to the end of the queue, if an interrupt lost a batch."""
        end = self._queue[-1].after if self._queue else self.position
        if self.stream.position != end:
            self._placement.sweep(wait=True)
            self.stream.return_to(end)

    def _begin(self, *, wait: bool) -> bool:
        """Take another batch and begin its copy; False if there is none."""
        batch = self.stream.take(self.stream.epoch, wait=wait)
        if batch is None:
            return False
        self._queue.append(_Queued(self._placement.begin(batch), self.stream.position, self.stream.last_taken))
        return True

    def _look_ahead(self) -> None:
        """Begin the copies of arrived batches, up to ``prefetch`` beyond the current one."""
        try:
            while len(self._queue) <= self._prefetch and self._begin(wait=False):
                pass
        except Exception:  # noqa: BLE001  an error of a later batch must not fail this one
            return  # if it persists, it is raised again when the loop wants that batch
