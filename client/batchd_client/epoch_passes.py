"""A stream in passes, for frameworks that read ahead of the loop and begin anew without a word. Runs in the trainer.

    begin --take--> batch, batch, ... the epoch's last batch --begin--> the next epoch
      ^                |
      +----- begin ----+   left in between: the same batches again

Keras takes a batch to see its shape and begins anew; tf.data takes some that the loop never gets.
What reached the loop, the loop alone knows. So a pass whose last batch has not been taken counts
for nothing, and on how many batches of it the model was trained is said by whoever counts them. All
who read one stream share its passes.

Invariant: the first batch of a pass is the one behind the last of the former pass, or behind where
the program moved the stream.
"""

from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

from batchd_client.batch import Batch
from batchd_client.errors import PassOvertaken
from batchd_client.positions import StreamState
from batchd_client.stream import Stream
from batchd_wire.position import Position


class Pass(NamedTuple):
    """One pass: where it begins, and how many batches it has."""

    start: Position
    length: int


@dataclass(slots=True)
class _PassRecord:
    """What is known of a stream's passes. ``end``: where the last ``take`` left it; ``turn``: how many passes there were."""

    present: Pass
    end: Position
    taken: int = 0
    trained: int = 0
    turn: int = 0
    lock: Lock = field(default_factory=Lock)


_records: WeakKeyDictionary[Stream, _PassRecord] = WeakKeyDictionary()


class Passes:
    """See above. Any thread may use it; only ``begin``, ``take`` and ``rewind`` wait for each other."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        here = _position_of(stream)
        self._record = _records.setdefault(stream, _PassRecord(Pass(here, stream.left), here))

    @property
    def present(self) -> Pass:
        """The pass that is under way, or over; where the program has moved the stream since, the one that begins there."""
        record, here = self._record, _position_of(self.stream)
        return record.present if here == record.end else Pass(here, self.stream.left)

    @property
    def is_over(self) -> bool:
        """Has the last batch of the present pass been taken?"""
        return self._record.taken == self.present.length

    @property
    def taken(self) -> int:
        """How many batches of the present pass have been taken."""
        return self._record.taken

    @property
    def trained(self) -> int:
        """How many batches of the present pass the model has been trained on, as far as somebody counts them."""
        return self._record.trained

    def begin(self, *, same: bool = False) -> int:
        """Begin a pass, and give its turn: over the next epoch if the last one is over, and not the ``same`` is wanted."""
        record = self._record
        with record.lock:
            record.turn += 1
            here = _position_of(self.stream)
            if here == record.end and (same or not self.is_over):
                self._return_to(record.present.start)
            else:
                record.present = Pass(here, self.stream.left)
                record.end = here
            record.taken = record.trained = 0
            return record.turn

    def take(self, turn: int | None = None) -> Batch | None:
        """Give the next batch of the present pass, None behind its last. Raises what iterating a ``Stream`` raises.

        With a ``turn`` also ``PassOvertaken``, where another pass has begun meanwhile.
        """
        record = self._record
        with record.lock:
            if turn not in (None, record.turn):
                raise PassOvertaken
            try:
                batch = self.stream.take(record.present.start.epoch)
                record.taken, record.end = record.taken + (batch is not None), _position_of(self.stream)
            finally:
                self._return_to(record.end)  # where it fails; otherwise the stream stands there
            return batch

    def rewind(self, batches: int) -> None:
        """Let the next batch of the present pass be the one behind its first ``batches``, of which all have been taken before."""
        record = self._record
        with record.lock:
            self._return_to(self.position(batches))
            record.taken = batches

    def position(self, batches: int) -> Position:
        """The position behind so many batches of the present pass, of which all have been taken."""
        record = self._record
        if batches == record.taken:
            return record.end
        epoch, step = record.present.start
        return Position(epoch, step + batches * self.stream.world_size)

    def train(self, batches: int) -> None:
        """Count batches of the present pass that the model has been trained on."""
        self._record.trained += batches

    def state_dict(self, batches: int) -> StreamState:
        """As ``Stream.state_dict``, behind so many batches of the present pass."""
        state = self.stream.state_dict()
        state["epoch"], state["step"] = self.position(batches)
        return state

    def _return_to(self, position: Position) -> None:
        if _position_of(self.stream) != position:
            self.stream.seek(*position)
        self._record.end = position


def _position_of(stream: Stream) -> Position:
    return Position(stream.epoch, stream.step)
