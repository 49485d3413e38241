"""Passes over epochs, for frameworks that read ahead and restart silently. Runs in the trainer.

    begin --take--> batch, batch, ... the epoch's last batch --begin--> the next epoch
      ^                |
      +----- begin ----+   abandoned: the same batches again

Keras takes a batch to see its shape and then restarts; tf.data takes batches that the loop never
gets. Only the loop knows what it received. So a pass counts only once its last batch was taken, and
a callback reports how many of its batches the model was trained on. All readers of one stream share
its passes.

Invariant: a pass begins after the last batch of the previous pass, or where the program moved the
stream.
"""

from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

from batchd_client.batch import Batch, BatchRows
from batchd_client.errors import PassOvertaken, ReportInvalid
from batchd_client.reports import BATCHES_KNOWN
from batchd_client.stream import Stream
from batchd_client.subscription import StreamState
from batchd_wire.position import Position


class EpochPass(NamedTuple):
    """One pass: its first position, and its number of batches."""

    start: Position
    length: int


@dataclass(slots=True)
class _PassRecord:
    """``end``: position after the last ``take``; ``turn``: number of passes so far."""

    present: EpochPass
    end: Position
    taken: int = 0
    trained: int = 0
    turn: int = 0
    rows: dict[int, BatchRows] = field(default_factory=dict)
    """The last ``BATCHES_KNOWN`` batches that were taken, by their number from 1."""
    lock: Lock = field(default_factory=Lock)


_records: WeakKeyDictionary[Stream, _PassRecord] = WeakKeyDictionary()


class EpochPasses:
    """See the module. For any thread: ``begin``, ``take`` and ``rewind`` exclude each other."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        here = stream.position
        self._record = _records.setdefault(stream, _PassRecord(EpochPass(here, stream.left), here))

    @property
    def present(self) -> EpochPass:
        """The current or last pass, or the one that begins where the program moved the stream."""
        record, here = self._record, self.stream.position
        return record.present if here == record.end else EpochPass(here, self.stream.left)

    @property
    def is_over(self) -> bool:
        """True if the last batch of the present pass has been taken."""
        return self._record.taken == self.present.length

    @property
    def taken(self) -> int:
        """Number of batches taken of the present pass."""
        return self._record.taken

    @property
    def trained(self) -> int:
        """Number of batches of the present pass that ``train`` has counted."""
        return self._record.trained

    def begin(self, *, same: bool = False) -> int:
        """Begin a pass: over the next epoch if this is over, unless ``same``. Returns its turn."""
        record = self._record
        with record.lock:
            record.turn += 1
            here = self.stream.position
            if here == record.end and (same or not self.is_over):
                self._return_to(record.present.start)
            else:
                record.present = EpochPass(here, self.stream.left)
                record.end = here
            record.taken = record.trained = 0
            record.rows = {}
            return record.turn

    def take(self, turn: int | None = None) -> Batch | None:
        """Return the next batch of the present pass, None after its last.

        Raises what iterating a ``Stream`` raises and, with a ``turn``, ``PassOvertaken`` if another
        pass has begun since.
        """
        record = self._record
        with record.lock:
            if turn not in (None, record.turn):
                raise PassOvertaken
            try:
                batch = self.stream.take(record.present.start.epoch)
                record.taken, record.end = record.taken + (batch is not None), self.stream.position
                if batch is not None:
                    record.rows[record.taken] = batch.span
                    record.rows.pop(record.taken - BATCHES_KNOWN, None)
            finally:
                self._return_to(record.end)  # after a failure; otherwise the stream is there
            return batch

    def rewind(self, batches: int) -> None:
        """Continue the present pass after its first ``batches`` batches, all taken before."""
        record = self._record
        with record.lock:
            self._return_to(self.position(batches))
            record.taken = batches

    def position(self, batches: int) -> Position:
        """Position after ``batches`` batches of the present pass, all of them taken."""
        record = self._record
        if batches == record.taken:
            return record.end
        epoch, step = record.present.start
        return Position(epoch, step + batches * self.stream.world_size)

    def train(self, batches: int) -> None:
        """Count ``batches`` more batches of the present pass as trained on, up to all of them.

        Keras counts each execution as whole, also the last one, which may have fewer batches.
        """
        record = self._record
        record.trained = min(record.trained + batches, record.present.length)

    def rows(self, batches: int) -> BatchRows:
        """The rows of batch number ``batches``, from 1, of the present pass.

        Raises ``ReportInvalid`` if it is not among the last ``BATCHES_KNOWN`` that were taken.
        """
        known = self._record.rows
        if batches not in known:
            raise ReportInvalid(
                f"batch {batches} is not among the last {len(known)} of the present iteration of stream {self.stream.name!r}; "
                f"{self.taken} were taken, and the first one is 1"
            )
        return known[batches]

    def state_dict(self, batches: int) -> StreamState:
        """As ``Stream.state_dict``, after ``batches`` batches of the present pass."""
        return self.stream.state_at(self.position(batches))

    def _return_to(self, position: Position) -> None:
        if self.stream.position != position:
            self.stream.return_to(position)
        self._record.end = position
