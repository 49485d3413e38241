"""A stream in the trainer: epochs of batches, a position, a state for checkpoints.

Runs in the trainer. Invariant: after every method, the stream is at a position that the user can
name: that of the next batch.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from batchd_client import errors
from batchd_client.batch import Batch, BatchRows
from batchd_client.connection import Connection
from batchd_client.cut import CutReader
from batchd_client.extensions import Extension
from batchd_client.memory import BatchMemory
from batchd_client.reader import ENDLESS_STEPS, StreamReader
from batchd_client.subscription import (
    BEGINNING,
    Beginning,
    StreamState,
    SubscriptionRequest,
    checked_position,
    checked_sample,
    read_state,
)
from batchd_wire.fields import Overlay, Varying
from batchd_wire.messages import AskStatus, Status, Subscribed
from batchd_wire.position import Position
from batchd_wire.status import plain_card, read_status

T = TypeVar("T")
html_of_stream: "Extension[[Stream], str]" = Extension("batchd_client.notebook")

WORLD_SIZE_MAX = 1 << 20
"""Of ranks, as the daemon limits them."""


class FieldSchema(NamedTuple):
    """One field of a stream's batches.

    ``shape`` is that of one sample: arrays are ``[samples, *shape]``. If samples differ in shape,
    ``shape`` is the largest possible, and ``varying`` is set: its ``kind`` is "padded" or "ragged",
    or "bucketed" for those that differ between batches alone; its ``axes`` are the varying
    dimensions of ``shape``.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    varying: Varying | None


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """Totals of one stream in this program.

    ``wait_s``: seconds that the loop waited for batches. ``batches_held``: batches that are alive
    now, or have arrays that are. ``resubscribed``: number of new claims: after a daemon's restart,
    by ``seek``, after a mismatch, or because the stream's settings changed. ``mismatches``: batches
    whose checksums did not match, and which were requested again.
    """

    batches: int
    samples: int
    wait_s: float
    batches_held: int
    resubscribed: int
    mismatches: int


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far a loop is, and how fast; ``str`` of it is one line.

    ``step`` of ``steps``: batches of all ranks that are done in ``epoch``; after an epoch's last
    batch it is ``steps`` until the next epoch's first. ``samples_per_s`` of this rank, and
    ``wait_share``, the part of the time that the loop waited for batches, 0 to 1: both over the
    last ``seconds``. ``samples`` and ``wait_s``: totals, as in ``StreamStatistics``.
    """

    epoch: int
    step: int
    steps: int
    samples_per_s: float
    wait_share: float
    seconds: float
    samples: int
    wait_s: float
    measured_s: float
    """When this was measured, by ``time.monotonic``."""

    def __str__(self) -> str:
        return (
            f"{position_text(self.epoch, self.step, self.steps)}, {self.samples_per_s:,.0f} samples/s, "
            f"{self.wait_share:.0%} waiting"
        )


class Stream(errors.NotCopyable):
    """A claim on one stream of the daemon; ``Daemon.stream`` makes it.

    ``for batch in stream`` gives the rest of the current epoch, as a DataLoader does; the next
    ``for`` gives the next epoch, and prefetch crosses the boundary. After a ``break``, the next
    ``for`` continues where the loop stopped. ``len(stream)`` is the number of batches in a whole
    epoch for this rank.

    One thread at a time may take batches from a stream; any thread may read and release batches.
    """

    COPY_ADVICE = (
        "both would take the same batches; open a stream in each process: "
        "batchd_client.connect(address).stream(name, rank, world_size, state=stream.state_dict())"
    )

    def __init__(
        self,
        connection: Connection,
        claim: SubscriptionRequest,
        begin: Beginning = BEGINNING,
        batch_size: int | None = None,
    ) -> None:
        self._claim = claim
        self._reader: StreamReader | CutReader = (
            StreamReader(connection, claim, begin)
            if batch_size is None
            else CutReader(connection, claim, begin, batch_size)
        )
        self._closed = False

    # --- what it is -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The stream's name in the daemon's configuration; of a derived one, in its status."""
        return self._admitted.stream or self._claim.stream

    @property
    def rank(self) -> int:
        """The rank, from 0, that this stream is read as."""
        return self._claim.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share the stream."""
        return self._claim.world_size

    @property
    def window(self) -> int:
        """Number of batches that the daemon keeps ready for this trainer, memory permitting."""
        return self._reader.subscription.window

    @property
    def fingerprint(self) -> str:
        """Hex digest of source, settings and seed: if equal, so are the batches."""
        return self._admitted.fingerprint

    @property
    def samples(self) -> int:
        """Samples in the whole source."""
        return self._admitted.samples

    @property
    def repeats(self) -> int:
        """Rows of an epoch that each sample is in: so many consecutive batches have the same."""
        return self._admitted.repeats

    @property
    def batch_size(self) -> int:
        """Samples in a full batch."""
        return self._reader.batch_size

    @property
    def steps(self) -> int:
        """Batches in an epoch, of all ranks together."""
        return self._reader.steps

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, by label; empty if the source has none."""
        return tuple(self._admitted.classes)

    @property
    def overlays(self) -> tuple[Overlay, ...]:
        """The fields that belong to images, such as boxes and masks, as pictures show them."""
        return tuple(Overlay(*one) for one in self._admitted.overlays or ())

    @property
    def schema(self) -> Mapping[str, FieldSchema]:
        """The fields of every batch, by name."""
        fields = self._reader.subscription.layout.sample_fields
        return MappingProxyType({one.name: FieldSchema(np.dtype(one.dtype), one.shape, one.varying) for one in fields})

    def __len__(self) -> int:
        """Batches in a whole epoch for this rank."""
        return self._reader.rounds

    # --- where it is ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the next batch: after an epoch's last batch, the next epoch."""
        return self._reader.position.epoch

    @property
    def step(self) -> int:
        """Step from which all ranks continue: batches of all ranks, from 0 in each epoch."""
        return self._reader.position.step

    @property
    def position(self) -> Position:
        """(``epoch``, ``step``)."""
        return self._reader.position

    @property
    def left(self) -> int:
        """Batches of this rank in the rest of the current epoch: the length of the next ``for``."""
        return self._reader.left

    def state_dict(self, *, card: bool = False) -> StreamState:
        """Return the state for a checkpoint: the current batch counts as done.

        The state is JSON-able, below 200 bytes. Ranks that are equally far have equal states.
        Another number of ranks may resume from it. ``card``: ask the daemon for what the batches
        are made of, too, some kilobytes (``["card"]``), so that `batchd replay --card` can make
        each batch again whatever happens to the configuration.

        With ``card``, raises ``PermissionDenied`` if the daemon is another user's or on another
        host, ``StreamChanged`` if it serves other batches by now, and ``ReconnectTimeout``.
        """
        return self.state_at(self._reader.position, card=card)

    def state_at(self, position: Position, *, card: bool = False) -> StreamState:
        """As ``state_dict``, of a position where this stream has been; for loaders."""
        (epoch, step), sample = self._reader.in_stream(position)
        name = self._claim.stream
        state: StreamState = {"stream": name, "fingerprint": self.fingerprint, "epoch": epoch, "step": step}
        if self._admitted.parts:
            state["parts"] = self._admitted.parts
        if sample is not None:
            state["sample"] = sample
        if self._claim.settings:
            state["set"] = json.loads(self._claim.settings)
        if self._claim.defines:
            state["define"] = json.loads(self._claim.defines)
        if card:
            state["card"] = self._card()
        return state

    def _card(self) -> dict[str, object]:
        self._check_open()
        ask = partial(AskStatus, card_of=self.name)
        status = read_status(self._reader.connection.request(ask, Status).status)
        if status.card is None:
            raise errors.PermissionDenied(
                f"this daemon gives no card of stream {self.name!r}: it is on another host, or older; run `batchd card "
                f"{self.name} --running` beside it"
            )
        if status.card.fingerprint != self.fingerprint:
            raise errors.StreamChanged(
                f"the daemon serves other batches as stream {self.name!r} by now, so its card is of those"
            )
        versions = {"batchd": status.daemon.version, "decoders": status.daemon.decoders}
        try:
            return plain_card(status.card, versions, time.time())
        except ValueError as error:
            raise errors.ProtocolError(f"the daemon's card of stream {self.name!r} is no JSON: {error}") from None

    def load_state_dict(self, state: Mapping[str, object], *, convert: bool = False) -> None:
        """Continue where ``state_dict`` was taken. ``convert``: as of ``Daemon.stream``.

        Raises ``StateMismatch`` without any change, ``StreamClosed`` and ``StreamChanged``.
        """
        self._check_open()
        self._reader.move(read_state(state, self._claim.stream, converts=convert))

    def seek(self, epoch: int, step: int = 0, *, sample: int | None = None) -> None:
        """Continue at (``epoch``, ``step``); ``step`` counts the batches of all ranks.

        ``sample``: in place of a step, the number of samples of the epoch that come before, in its
        order and counted over all ranks. The first batch has what is left of the one that sample is
        in, and all later ones are as ever, so nothing is skipped or repeated.

        A running ``for`` continues there if it began in the same epoch, and ends otherwise.

        Raises ``PositionInvalid``, ``StreamClosed``, ``StreamChanged``.
        """
        self._check_open()
        position = checked_position(epoch, step)
        begin = self._reader.begin_at(position) if sample is None else checked_sample(epoch, sample)
        if step and sample is not None:
            raise errors.PositionInvalid(f"step {step} and sample {sample} are two positions; give one")
        if step > self.steps:
            raise errors.PositionInvalid(
                f"step {step}: an epoch of stream {self.name!r} has steps 0 to {self.steps - 1}"
            )
        self._move(begin)

    def return_to(self, position: Position) -> None:
        """Continue at a position where this stream has been; for loaders. Raises as ``seek``."""
        self._check_open()
        self._move(self._reader.begin_again(position))

    def _move(self, begin: Beginning) -> None:
        self._reader.move(begin._replace(fingerprint=self.fingerprint, parts=self._admitted.parts))

    def statistics(self) -> StreamStatistics:
        """Return the totals so far, as a frozen value."""
        reader = self._reader
        return StreamStatistics(
            reader.batches, reader.samples, reader.wait_s, reader.held, reader.moves, reader.mismatches
        )

    def progress(self, since: StreamProgress | None = None) -> StreamProgress:
        """Return the position and the rates, over the time since an earlier progress.

        Default: since this stream asked for its first batch.
        """
        reader, now_s = self._reader, time.monotonic()
        epoch, step = reader.position
        if step == 0 and reader.subscription.taken:
            epoch, step = epoch - 1, self.steps
        began_s = now_s if reader.first_take_s is None else reader.first_take_s
        samples, wait_s = reader.samples, reader.wait_s
        if since is not None:
            began_s, samples, wait_s = since.measured_s, samples - since.samples, wait_s - since.wait_s
        seconds = now_s - began_s
        rate, share = (samples / seconds, min(1.0, wait_s / seconds)) if seconds > 0 else (0.0, 0.0)
        return StreamProgress(epoch, step, self.steps, rate, share, seconds, reader.samples, reader.wait_s, now_s)

    # --- taking batches ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Iterate the rest of the current epoch; nothing once all ``epochs`` are over.

        The iterator raises ``BatchTimeout``, ``ReconnectTimeout``, ``RingExhausted``,
        ``StreamStopped``, ``StreamChanged``, ``StreamRemoved``, ``BatchCorrupt`` or
        ``ProtocolError`` if it cannot get the next batch; the stream keeps its position then.
        """
        self._check_open()
        return EpochIterator(partial(self.take, self.epoch))

    def take(self, epoch: int, *, wait: bool = True) -> Batch | None:
        """Return the next batch if it belongs to ``epoch``, else None: one step of a ``for``.

        With ``wait=False`` also None if it has not arrived yet. Raises what iterating raises.
        """
        self._check_open()
        return self._reader.take(epoch, wait=wait)

    def at(self, epoch: int, step: int) -> Batch:
        """Return a copy of the batch at (``epoch``, ``step``); this stream stays where it is.

        The daemon makes it for a spectator, for which no trainer waits. The copy is memory of this
        program: however long it lives, the ring has its slot back. A rank's part of a shared last
        round is in it as a whole batch.

        Raises ``PositionInvalid`` also for a live stream, whose batches come once, ``RingTooSmall``
        or ``RingBusy`` if the ring has no slots to spare, ``StreamChanged`` after a reload with
        other batches, and what iterating raises.
        """
        self._check_open()
        position = checked_position(epoch, step)
        if isinstance(self._reader, CutReader):
            raise errors.PositionInvalid(
                "a stream of another batch_size has no batch of its own by position; open one without it"
            )
        if self.steps >= ENDLESS_STEPS:
            raise errors.PositionInvalid(
                f"stream {self.name!r} is live: its samples come once, so no batch can be asked for by its position; `batchd "
                "peek` shows the present one"
            )
        if step >= self.steps:
            raise errors.PositionInvalid(
                f"step {step}: an epoch of stream {self.name!r} has steps 0 to {self.steps - 1}"
            )
        # Rank 0 of so many ranks reads this one batch of the epoch's rest, so no other is made.
        ranks = min(self.steps - step, WORLD_SIZE_MAX)
        claim = replace(self._claim, rank=0, world_size=ranks, window=1, end_epoch=epoch + 1, is_spectator=True)
        try:
            begin = Beginning(position, None, self.fingerprint, self._admitted.parts)
            reader = StreamReader(self._reader.connection, claim, begin)
        except errors.StateMismatch as error:
            raise errors.StreamChanged(str(error).partition("\n")[0]) from None
        try:
            batch = reader.take(epoch)
            assert batch is not None, "the course begins with it"
            with batch:
                return batch.detached()
        finally:
            reader.close()

    def report(self, values: object, at: "Batch | tuple[int, int] | None" = None) -> None:
        """Report one number for a batch, such as its loss, or one for each of its rows.

        ``values``: a number, or numbers ``[1]`` or ``[rows]`` as a list, a numpy array or a tensor.
        A tensor of a GPU, or a JAX array, is read later, so that the loop does not wait for the
        device. ``at``: the batch, or its (epoch, step); default: the last one received. A further
        report of the same rows replaces the earlier one. NaN and infinities count as bad.

        The daemon keeps the last ones (``report_memory``), for `batchd blame`, its page and its
        metrics. They go with the next request for a batch; ``close`` sends the rest.

        Raises ``ReportInvalid`` and ``StreamClosed``.
        """
        self._check_open()
        reports = self._reader.reports
        reports.add(values, reports.last if at is None else reports.rows_at(at))

    def report_of(self, values: object, rows: BatchRows | None) -> None:
        """As ``report``, of rows that a loader handed to its loop."""
        self._check_open()
        self._reader.reports.add(values, rows)

    @property
    def last_taken(self) -> BatchRows | None:
        """The rows of the batch that was taken last; None before the first."""
        return self._reader.reports.last

    def memories(self) -> list[BatchMemory]:
        """List the mapped memory of future batches; see ``Batch.memory``."""
        session = self._reader.connection.session
        slots = session.slots.values() if session is not None and session.is_usable else ()
        return [*slots, *self._reader.buffers]

    def when_lost(self, let_go: Callable[[], None]) -> None:
        """Have a method called when the daemon is gone, to drop references to ``memories``."""
        self._reader.connection.when_lost(let_go)

    # --- its end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the claim. Living batches stay readable, and the position can still be read."""
        if not self._closed:
            self._closed = True
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"<Stream {self.name} rank={self.rank}/{self.world_size}"
        return f"{where} [closed]>" if self._closed else f"{where} epoch={self.epoch} step={self.step}>"

    def _repr_html_(self) -> str | None:
        """HTML for notebooks: the position, and a table of the fields."""
        return None if self._closed else html_of_stream(self)

    @property
    def _admitted(self) -> Subscribed:
        return self._reader.subscription.admitted

    def _check_open(self) -> None:
        if self._closed:
            raise errors.StreamClosed(f"stream {self.name!r} has been closed")


def position_text(epoch: int, step: int, steps: int) -> str:
    """A position for people; ``steps``: those of an epoch."""
    return f"epoch {epoch}, step {step:,}" + (f" of {steps:,}" if steps < ENDLESS_STEPS else "")


class EpochIterator(Iterator[T]):
    """One ``for``: calls ``take`` until it gives None, the end of the epoch, and stays ended.

    Not ``iter(take, None)``: that compares every batch with None, which arrays do element by
    element.
    """

    __slots__ = ("_take",)

    def __init__(self, take: Callable[[], T | None]) -> None:
        self._take: Callable[[], T | None] | None = take

    def __next__(self) -> T:
        batch = self._take() if self._take is not None else None
        if batch is None:
            self._take = None
            raise StopIteration
        return batch
