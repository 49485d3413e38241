"""A trainer's own batch size: the samples of a stream in its order, cut otherwise. In the trainer.

    the stream's batches    |   0   |   1   |   2   |   3   |   4   |
    own batches, larger     |     0     |     1     |     2     |  3 |    rows of several: copied
    own batches, smaller    |  0 |  1 |  2 |  3 |  4 |  5 | ...           of one: views of its slot

The own batches of an epoch are dealt to ranks in rounds, as the daemon deals a stream's; what is no
whole round is split among them by samples. Each rank reads all batches of the stream, as it may
have rows in each: on one host they are decoded once for all.

Invariant: ``_epoch`` and ``_step``, the position, change after all that can fail. If an interrupt
loses a batch between two steps, the stream is moved back to it.
"""

from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from batchd_client.batch import Batch, Lease, LeaseToken, RowsMemory, SharedLease, Shown
from batchd_client.connection import Connection
from batchd_client.errors import BatchSizeInvalid, RingExhausted, TooFewBatches, VersionMismatch
from batchd_client.memory import ReceiveBuffer
from batchd_client.reader import ENDLESS_STEPS, StreamReader
from batchd_client.reports import OwnRows
from batchd_client.subscription import BatchView, Beginning, Subscription, SubscriptionRequest
from batchd_wire.fields import place_fields
from batchd_wire.messages import Handle
from batchd_wire.position import EpochRows, Position
from batchd_wire.views import slot_arrays

BUFFERS_MAX = 32
"""Batches of rows of several slots that may be alive."""


class _Part(NamedTuple):
    """A batch of the stream that is at hand: its rows are ``first`` to ``end`` of the epoch.

    Row ``first`` is ``row`` of its memory.
    """

    batch: Batch
    lease: SharedLease
    first: int
    end: int
    row: int


class CutReader:
    """See the module. The same as a ``StreamReader`` for a ``Stream``."""

    def __init__(self, connection: Connection, claim: SubscriptionRequest, begin: Beginning, batch_size: int) -> None:
        """Subscribe. Raises the daemon's refusal, ``BatchSizeInvalid`` and ``TooFewBatches``."""
        self.claim = claim
        self.batch_size = batch_size
        self.connection = connection
        self._whole = StreamReader(connection, replace(claim, rank=0, world_size=1), begin, notes_rows=False)
        self.reports = self._whole.reports
        self.batches = self.samples = 0
        self._epoch = self._step = 0
        self._within: tuple[Position, int] | None = None
        self._parts: deque[_Part] = deque()
        self._filled: tuple[ReceiveBuffer, int, int] | None = None
        """A batch of several of the stream's, the row up to which it is copied, and its bucket."""
        self._free: list[ReceiveBuffer] = []
        self._lent: dict[int, ReceiveBuffer] = {}
        self._ended: deque[LeaseToken] = deque()
        self._made = 0
        self._at_hand = -1
        """The batches that the stream had given when the last one was kept."""
        admitted = self.subscription.admitted  # the stream stays the same, or ends
        self._cut = EpochRows(admitted.samples, admitted.batch_size, admitted.repeats)
        """How the stream cuts the rows of an epoch."""
        self._cuts = batch_size, self._cut
        self._drops_last = admitted.drop_last
        self._rows = self._cut.before(admitted.steps)
        self.steps = self._whole_or_part(self._rows, batch_size)
        """Own batches in an epoch, of all ranks together."""
        with ExitStack() as on_failure:
            on_failure.callback(self._whole.close)
            self._check()
            on_failure.pop_all()
        layout = self.subscription.layout
        self._views = [BatchView(place_fields(one.fields, batch_size)) for one in layout.buckets or (layout,)]
        """Of batches that are copied, by the number of a bucket."""
        self._stand()

    def _check(self) -> None:
        admitted, stream = self.subscription.admitted, self.claim.stream
        if not admitted.parts:
            raise VersionMismatch(f"the daemon of stream {stream!r} is too old for batch_size=; upgrade it")
        if admitted.steps >= ENDLESS_STEPS:
            raise BatchSizeInvalid(f"stream {stream!r} is live: its batches are bound to samples as these come")
        rooms = self.subscription.layout.rooms
        # an older daemon has rooms alone
        if admitted.has_budget or (rooms is not None and rooms.field):
            raise BatchSizeInvalid(f"a budget decides the rows of each batch of stream {stream!r}")
        if rooms is not None and admitted.batch_size % self.batch_size:
            raise BatchSizeInvalid(
                f"each batch of stream {stream!r} has images of a size of its own, so rows of two batches make none: batch_size "
                f"has to divide {admitted.batch_size}, and {self.batch_size} does not"
            )
        if self.rounds < 1:
            raise TooFewBatches(
                f"an epoch of stream {stream!r} has {self._rows} samples, which make no batch of {self.batch_size} for each of "
                f"{self.claim.world_size} ranks, and drop_last = true leaves them out"
            )

    # --- what it is, and where --------------------------------------------------------------------

    @property
    def subscription(self) -> Subscription:
        """That of the stream's batches."""
        return self._whole.subscription

    @property
    def rounds(self) -> int:
        """Batches of each rank in a whole epoch."""
        return self._rounds_from(0)

    @property
    def left(self) -> int:
        """Batches of this rank in the rest of the epoch."""
        return self._rounds_from(self._step)

    def _rounds_from(self, step: int) -> int:
        return self._whole_or_part(self.steps - step, self.claim.world_size)

    def _whole_or_part(self, count: int, size: int) -> int:
        """How many times ``size`` goes into ``count``; a rest counts, unless it is dropped."""
        return count // size if self._drops_last else -(-count // size)

    @property
    def position(self) -> Position:
        """Of the next batch, in own steps."""
        return Position(self._epoch, self._step)

    @property
    def wait_s(self) -> float:
        """Seconds that the loop waited."""
        return self._whole.wait_s

    @property
    def first_take_s(self) -> float | None:
        """When the first batch was asked for."""
        return self._whole.first_take_s

    @property
    def moves(self) -> int:
        """How often it subscribed again."""
        return self._whole.moves

    @property
    def mismatches(self) -> int:
        """Batches that did not match their checksums."""
        return self._whole.mismatches

    @property
    def held(self) -> int:
        """Batches that are alive, of the stream and of own memory."""
        self._give_back()
        return self._whole.held + len(self._lent)

    @property
    def buffers(self) -> list[ReceiveBuffer]:
        """Memory of batches that are copied."""
        return [*self._whole.buffers, *self._free, *self._lent.values()]

    def sample_of(self, position: Position) -> int:
        """The samples of the epoch before a position where this stream was."""
        if self._within is not None and self._within[0] == position:
            return self._within[1]
        return min(position.step * self.batch_size, self._rows)

    def in_stream(self, position: Position) -> tuple[Position, int | None]:
        """A position where this stream was in the stream's own steps, for a state."""
        step, row = self._cut.find(sample := self.sample_of(position))
        return Position(position.epoch, step), sample if row else None

    def begin_at(self, position: Position) -> Beginning:
        """Where to begin for a position in own steps."""
        return Beginning(Position(position.epoch, 0), min(position.step * self.batch_size, self._rows))

    def begin_again(self, position: Position) -> Beginning:
        """Where to begin for a position where this stream was."""
        return Beginning(Position(position.epoch, 0), self.sample_of(position))

    def move(self, begin: Beginning) -> None:
        """Continue elsewhere. A refusal changes nothing."""
        self._whole.move(begin)
        self._stand()

    def close(self) -> None:
        """End the claim, once its reports are sent."""
        self._let_go()
        self._whole.close()

    def _stand(self) -> None:
        """Stand where the subscription begins."""
        self._let_go()
        epoch, sample = self._cursor()
        self._epoch, (self._step, row) = epoch, divmod(sample, self.batch_size)
        self._within = (self.position, sample) if row else None
        self._end_epoch_if_over()

    def _end_epoch_if_over(self) -> None:
        if self.left < 1:
            self._epoch, self._step = self._epoch + 1, 0

    def _cursor(self) -> tuple[int, int]:
        """The epoch of the stream's next batch, and the samples before it."""
        (epoch, step), sample = (begin := self.subscription.begin).position, begin.sample
        return epoch, self._cut.before(step) if sample is None else sample

    # --- taking batches ---------------------------------------------------------------------------

    def take(self, epoch: int, *, wait: bool = True) -> Batch | None:
        """As ``StreamReader.take``."""
        end_epoch = self.claim.end_epoch
        if self._epoch != epoch or (end_epoch is not None and epoch >= end_epoch):
            self._whole.report_end()
            return None
        waited_s = self._whole.wait_s
        rows, first, end = self._share()
        batch = self._ready(rows, first, end, wait=wait)
        if batch is None:
            return None
        batch.wait_s = self._whole.wait_s - waited_s
        self.reports.note(rows)
        step = self._step + self.claim.world_size
        following = (epoch, step) if self._rounds_from(step) > 0 else (epoch + 1, 0)
        # From here on nothing is called, so neither a signal handler nor another thread can come in
        # between.
        if self._filled is not None:
            self._lent[self._made] = self._filled[0]
        self._filled = None
        self.batches += 1
        self.samples += end - first
        self._epoch, self._step = following
        return batch

    def _share(self) -> tuple[OwnRows, int, int]:
        """This rank's next batch: its rows, and where they begin and end in the epoch.

        See ``core.course`` of the daemon.
        """
        rank, ranks, left = self.claim.rank, self.claim.world_size, self.steps - self._step
        step = self._step + (rank if left >= ranks else rank * left // ranks)
        whole = step * self.batch_size
        first = whole if self._within is None else self.sample_of(Position(self._epoch, step))
        end = min(whole + self.batch_size, self._rows)
        if left < ranks:
            begin, behind = (-(-batch * ranks // left) for batch in (step - self._step, step - self._step + 1))
            rows, member, members = end - first, rank - begin, behind - begin
            end = first + max(rows * member // members + 1, rows * (member + 1) // members)
            first += rows * member // members
        share = OwnRows(self._epoch, step, first - whole, end - first)
        share.cuts = self._cuts
        return share, first, end

    def _ready(self, rows: OwnRows, first: int, end: int, *, wait: bool) -> Batch | None:
        """Make the batch of a share of what is at hand and comes; None if it has not arrived."""
        parts, epoch = self._parts, self._epoch
        while True:
            at = first if self._filled is None else self._filled[1]
            if at == end:
                return self._copied(rows)
            while parts and (parts[0].end <= at or parts[0].batch.epoch != epoch):
                parts.popleft().lease.let_go()  # it has no further rows of this rank
            if self._whole.batches != self._at_hand and self._has_lost(at):
                self._go_back(first)
            elif not parts:
                if not self._fetch(at, wait=wait):
                    return None
            elif parts[0].end >= end and self._filled is None:
                batch, lease, begin, _end, row = parts[0]
                return batch.part(row + first - begin, rows, lease.part())
            else:
                self._copy(first, at, end, parts[0])

    def _has_lost(self, at: int) -> bool:
        """Whether the stream is beyond row ``at``: see the invariant."""
        epoch, cursor = self._cursor()
        if self._parts:
            part = self._parts[0]
            return part.first > at or (epoch == self._epoch and cursor != part.end)
        return epoch > self._epoch or (epoch == self._epoch and cursor > at)

    def _go_back(self, sample: int) -> None:
        """Have the stream begin again with the batch that has a sample of this epoch."""
        self._let_go()
        admitted = self.subscription.admitted
        begin = Beginning(Position(self._epoch, self._cut.find(sample)[0]))
        self._whole.move(begin._replace(fingerprint=admitted.fingerprint, parts=admitted.parts))

    def _fetch(self, at: int, *, wait: bool) -> bool:
        """Take the stream's next batch; keep it if it has row ``at``. False if it is not here."""
        batch = self._whole.take(self._cursor()[0], wait=wait)
        if batch is None:
            return False
        span = batch.span
        first = self._cut.before(span.step) + span.first
        if span.epoch == self._epoch and first <= at < first + span.rows:
            self._parts.append(_Part(batch, batch.shared(), first, first + span.rows, span.first))
            self._at_hand = self._whole.batches
        else:
            batch.release()
        return True

    def _copy(self, first: int, at: int, end: int, part: _Part) -> None:
        """Copy the rows of a part from row ``at`` on into a batch from ``first`` to ``end``."""
        buffer = self._buffer() if self._filled is None else self._filled[0]
        end = min(part.end, end)
        into = slot_arrays(buffer.page, self._views[part.batch.bucket].layout)
        row = part.row + at - part.first
        for name, field in part.batch.fields.items():
            into[name][at - first : end - first] = np.asarray(RowsMemory(part.batch.memory, field, row, end - at))
        self._filled = buffer, end, part.batch.bucket

    def _copied(self, rows: OwnRows) -> Batch:
        """The batch of a share that is copied."""
        assert self._filled is not None, "it is complete"
        self._made += 1
        buffer, _end, bucket = self._filled
        handle = Handle(0, self._made, rows.epoch, rows.step, 0, 0, first=0, count=rows.rows, bucket=bucket)
        lease = Lease(buffer, None, self._ended, handle)
        return Batch(
            self.claim.stream, self._views[bucket].fields, lease, handle, Shown.of(self.subscription.admitted), rows
        )

    def _buffer(self) -> ReceiveBuffer:
        self._give_back()
        if self._free:
            return self._free.pop()
        if len(self._lent) >= BUFFERS_MAX:
            raise RingExhausted(f"this trainer holds {len(self._lent)} batches of stream {self.claim.stream!r}")
        return ReceiveBuffer(max(view.layout.slot_bytes for view in self._views))

    def _give_back(self) -> None:
        while self._ended:
            buffer = self._lent.pop(self._ended.popleft().sequence, None)
            if buffer is not None:
                self._free.append(buffer)

    def _let_go(self) -> None:
        self._at_hand = -1
        while self._parts:
            self._parts.popleft().lease.let_go()
        if self._filled is not None:
            self._free.append(self._filled[0])
            self._filled = None
