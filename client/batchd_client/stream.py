"""A stream as the trainer's loop sees it: epochs of batches, a position, a state for the checkpoint. Runs in the trainer.

Invariant: every method leaves the stream at a position that the user can name: the one of the next
batch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from batchd_client.batch import Batch
from batchd_client.connection import Connection
from batchd_client.errors import PositionInvalid, StateMismatch, StreamClosed, Unique
from batchd_client.memory import SlotMemory
from batchd_client.positions import StreamState, checked_position, read_state
from batchd_client.reader import BEGINNING, StreamReader
from batchd_client.remote import ReceiveBuffer
from batchd_client.subscription import SubscriptionRequest, Terms
from batchd_wire.fields import Varying
from batchd_wire.position import Position


class FieldSchema(NamedTuple):
    """One field of a stream's batches; ``shape`` is that of one sample, so the array is ``[samples, *shape]``.

    Where samples differ in shape, ``shape`` is the largest that there may be, and ``varying`` says
    how they do: its ``kind`` is "padded" or "ragged", its ``axes`` are the dimensions of ``shape``
    that vary.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    varying: Varying | None


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """What one stream did so far in this program.

    ``wait_s``: seconds that the loop waited for batches. ``batches_held``: batches that are alive
    now, by themselves or by arrays made from them. ``resubscribed``: how often the stream was
    claimed anew, after a daemon's restart, by ``seek`` or because of a mismatch, or because the
    stream has other settings now. ``mismatches``: how many batches came other than they were
    written, and were asked for again.
    """

    batches: int
    samples: int
    wait_s: float
    batches_held: int
    resubscribed: int
    mismatches: int


class Stream(Unique):
    """A claim on one stream of the daemon; ``Daemon.stream`` makes it.

    ``for batch in stream`` gives the rest of the current epoch, as a DataLoader would; the next
    ``for`` gives the next epoch, and prefetch runs across the boundary. A ``for`` that was left
    early goes on where it stopped. ``len(stream)`` is the number of batches in a whole epoch for
    this rank.

    One thread at a time may take batches from a stream; batches may be read and released in any
    thread.
    """

    INSTEAD = "both would take the same batches; open another with daemon.stream(..., state=stream.state_dict())"

    def __init__(
        self,
        connection: Connection,
        claim: SubscriptionRequest,
        state: Mapping[str, object] | None,
        begin: Position = BEGINNING,
    ) -> None:
        position, fingerprint = read_state(state, claim.stream) if state is not None else (begin, None)
        self._claim = claim
        self._reader = StreamReader(connection, claim, position, fingerprint)
        self._closed = False

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The stream's name in the daemon's configuration."""
        return self._claim.stream

    @property
    def rank(self) -> int:
        """Which share of the stream this is, from 0."""
        return self._claim.rank

    @property
    def world_size(self) -> int:
        """How many shares the stream is cut into."""
        return self._claim.world_size

    @property
    def window(self) -> int:
        """How many batches the daemon keeps ready ahead of this trainer, memory permitting."""
        return self._reader.subscription.window

    @property
    def fingerprint(self) -> str:
        """Hex digest of the source, the settings and the seed: where it is equal, equal positions hold equal batches."""
        return self._terms.fingerprint

    @property
    def samples(self) -> int:
        """Samples in the whole source."""
        return self._terms.samples

    @property
    def batch_size(self) -> int:
        """Samples in a full batch."""
        return self._terms.batch_size

    @property
    def steps(self) -> int:
        """Batches in an epoch, those of all ranks together."""
        return self._terms.steps

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels, if the source has names."""
        return self._terms.classes

    @property
    def schema(self) -> Mapping[str, FieldSchema]:
        """The fields of every batch, by name."""
        fields = self._terms.layout.sample_fields
        return MappingProxyType({one.name: FieldSchema(np.dtype(one.dtype), one.shape, one.varying) for one in fields})

    def __len__(self) -> int:
        """Batches in a whole epoch for this rank."""
        return self._terms.rounds

    # --- where it is --------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next batch. Once an epoch's last batch is handed out, that is the next epoch."""
        return self._reader.position.epoch

    @property
    def step(self) -> int:
        """The step, counted over all ranks from 0 in each epoch, from which all ranks go on."""
        return self._reader.position.step

    @property
    def left(self) -> int:
        """How many batches the rest of the current epoch has for this rank: what the next ``for`` gives."""
        subscription = self._reader.subscription
        return subscription.counter.left(subscription.taken)

    def state_dict(self) -> StreamState:
        """What a checkpoint needs to go on exactly here: the batch in hand counts as done. JSON-able, about a hundred bytes.

        Ranks that are equally far have equal states, and the state may be given to another number
        of ranks.
        """
        epoch, step = self._reader.position
        return {"stream": self.name, "fingerprint": self.fingerprint, "epoch": epoch, "step": step}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where ``state_dict`` was taken. Raises ``StateMismatch``, and then everything stays as it was."""
        position, fingerprint = read_state(state, self.name)
        if fingerprint != self.fingerprint:
            raise StateMismatch(
                f"the saved state is of a stream {self.name!r} with other files or other settings, or of a batchd that makes "
                f"other pixels (fingerprint {fingerprint[:16]}, now {self.fingerprint[:16]}), so the same position would be "
                "another batch"
            )
        self.seek(*position)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Go on at (``epoch``, ``step``), where ``step`` counts the batches of all ranks. Raises ``PositionInvalid``.

        A ``for`` that is under way goes on there if that is in the epoch it began with, and ends
        otherwise.
        """
        self._check_open()
        position = checked_position(epoch, step)
        if step > self.steps:
            raise PositionInvalid(f"step {step}: an epoch of stream {self.name!r} has steps 0 to {self.steps - 1}")
        self._reader.move(position)

    def statistics(self) -> StreamStatistics:
        """What happened so far, as a frozen value."""
        reader = self._reader
        return StreamStatistics(
            reader.batches, reader.samples, reader.wait_s, reader.subscription.held, reader.moves, reader.mismatches
        )

    # --- taking batches -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Iterate the rest of the current epoch; nothing where ``epochs`` are over.

        The iterator raises ``BatchTimeout``, ``ReconnectTimeout``, ``RingExhausted``,
        ``StreamStopped``, ``StreamChanged``, ``StreamRemoved``, ``BatchCorrupt`` or
        ``ProtocolError`` where the next batch cannot be had; the stream then still stands before
        that batch.
        """
        self._check_open()
        return _Epoch(self, self.epoch)

    def take(self, epoch: int, *, wait: bool = True) -> Batch | None:
        """Give the next batch if it belongs to ``epoch``, else None: one step of a ``for`` over the stream.

        With ``wait=False`` also None where it has not come yet. Raises what iterating raises.
        """
        self._check_open()
        return self._reader.take(epoch, wait=wait)

    def memories(self) -> list[SlotMemory | ReceiveBuffer]:
        """The memory that batches may lie in from now on, as far as it is mapped; see ``Batch.memory``."""
        return self._reader.memories()

    def when_lost(self, let_go: Callable[[], None]) -> None:
        """Have a method called when the daemon has gone; whoever keeps any of ``memories`` beyond batches lets go of it then."""
        self._reader.when_lost(let_go)

    # --- its end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up the claim. Batches that are alive stay readable, and the position can still be asked for."""
        if not self._closed:
            self._closed = True
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"<Stream {self.name} rank={self.rank}/{self.world_size}"
        return f"{where} [closed]>" if self._closed else f"{where} epoch={self.epoch} step={self.step}>"

    @property
    def _terms(self) -> Terms:
        return self._reader.subscription.terms

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed(f"stream {self.name!r} has been closed")


class _Epoch(Iterator[Batch]):
    """One ``for`` over a stream: ends with the epoch in which it began, and stays ended."""

    __slots__ = ("_epoch", "_stream")

    def __init__(self, stream: Stream, epoch: int) -> None:
        self._stream: Stream | None = stream
        self._epoch = epoch

    def __next__(self) -> Batch:
        batch = self._stream.take(self._epoch) if self._stream is not None else None
        if batch is None:
            self._stream = None
            raise StopIteration
        return batch
