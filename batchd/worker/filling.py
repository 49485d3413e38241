"""How the rows of a chunk are filled: each stream has one strategy. WORKER process.

    OneByOne    for each row: read -> pipeline ----> bad: a substitute, another sample that the plan
                         straight into                    chooses; or zeros, valid = False (mask);
                         the slot's row                   or zeros, the daemon stops the stream
                then its checksum, if the stream has them

    ManyRows    rows of numbers in arrays, and of samples that are all in a cache and need no random
                step: many at once, straight into the slot; each by itself if one is wrong

    ManyFiles   rows of photographs whose headers and access points are in a cache: planned one
                after the other, then read, decoded and resampled by one call; each by itself if its
                file is another one

    PackedRows  rows of several documents each: ``worker.packs``

Invariant: ``fill`` writes every field of every row of its chunk, whatever happens to a sample
(except zeros that are there already), so no former content of the slot can reach a trainer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Plan
from batchd.core.rows import Rows
from batchd.data.pipeline.effects import INDEX, VALID
from batchd.data.pipeline.stages import Row
from batchd.runtime import failpoints
from batchd.runtime.plain import from_plain
from batchd.worker import messages as orders
from batchd.worker.others import SUBSTITUTES_MAX
from batchd.worker.process import NoteMemory
from batchd.worker.sample_maker import SampleMaker, WantedRow, shortened
from batchd.worker.stopwatch import Stopwatch
from batchd_wire.fields import SlotLayout, sizes_field
from batchd_wire.position import Position

if TYPE_CHECKING:
    from batchd.core.erasing import RowErasing
    from batchd.core.mixing import RowMixing

ROWS_AT_ONCE = 256
"""Rows that may be made at once: after each portion, the daemon sees the worker's progress."""
FILES_AT_ONCE = 32
"""Files that may be made by one call: planning them costs little more for each if they are more."""
TOGETHER_BYTES_MAX = 8 << 20
"""Rows of several chunks that may be read together, in some 1 ms where they are in memory."""

Arrays = dict[str, np.ndarray]
"""The writable fields of a slot, each ``[rows, *shape]``."""
Bad = list[tuple[int, str, str]]
"""Bad samples: (index, path, reason)."""
RowReport = orders.RowMade | orders.DocumentMade


class ChunkRows(NamedTuple):
    """Rows of a chunk: numbers of rows in the slot with ``arrays``, and the sample of each.

    ``order`` and ``places``: as in ``messages.Chunk``. ``draw_epoch``: that of the batch's random
    numbers, as of ``Plan``. ``samples``: int64 ``[rows]``; of a packed stream, its documents.
    ``write_checksums`` writes those of the complete rows it is called with, if the stream has
    checksums. ``numbers``: of the rows in their batch; a worker host's memory has no others, so
    there ``rows`` begin at 0. ``first_place``: of the batch among all rows of all epochs, if
    ``shares`` workers divide these among them, for siblings.
    """

    order: int
    position: Position
    draw_epoch: int
    places: list[int]
    rows: Rows
    samples: NDArray[np.int64]
    arrays: Arrays
    write_checksums: Callable[..., None]
    numbers: Rows
    first_place: int = 0
    shares: int = 0

    @property
    def epoch(self) -> int:
        """The epoch of the batch."""
        return self.position.epoch

    @property
    def selector(self) -> slice | NDArray[np.int64]:
        """The index that selects these rows of an array."""
        return selector_of(self.rows)

    def with_samples(self) -> Iterable[tuple[int, int]]:
        """Each row with its sample."""
        return zip(self.rows, self.samples.tolist(), strict=True)


def selector_of(rows: Rows) -> slice | NDArray[np.int64]:
    """The index that selects ``rows`` of an array."""
    if isinstance(rows, range):
        return slice(rows.start, rows.stop)
    is_consecutive = len(rows) == rows[-1] + 1 - rows[0]
    return slice(rows[0], rows[-1] + 1) if is_consecutive else np.asarray(rows, np.int64)


@dataclass(frozen=True, slots=True)
class StreamContext:
    """What a strategy works with: the stream's, and the worker's ``note``.

    ``quarantined``: samples that are bad without a try. ``made``: gets a report of each row; None
    if no one asks how. ``draws``: what random steps drew for the last sample, if someone asks.
    """

    message: orders.ServeStream
    layout: SlotLayout
    plan: Plan
    maker: SampleMaker
    note: NoteMemory
    stopwatch: Stopwatch
    quarantined: set[int]
    made: list[RowReport] | None
    draws: list[dict[str, object]]


class Strategy(ABC):
    """Fills the rows of chunks, in the order of the chunks.

    ``before_sample`` is called before each sample that is made by itself.
    """

    def __init__(self, context: StreamContext) -> None:
        self._maker = context.maker
        self._note = context.note
        self._quarantined = context.quarantined
        self._draws = context.draws
        self._made = context.made
        self.before_sample: Callable[[], None] | None = None

    def fill_ahead(self, _chunks: Iterable[ChunkRows]) -> int:
        """Fill rows of the first chunk, and of short ones behind it, in fewer steps than by turns.

        Returns the number of these chunks. ``fill`` follows for each, and fills what is left.
        """
        return 0

    @abstractmethod
    def fill(self, chunk: ChunkRows) -> tuple[Bad, str]:
        """Fill the rows of a chunk; return its bad samples, and why a row is without a sample.

        Raises ``StepInvalid`` and ``FunctionUnusable`` if no sample can be made.
        """

    def _begin(self, row: int, sample: int) -> bool:
        """Begin a sample of a row; False if it is bad without a try."""
        if self.before_sample is not None:
            self.before_sample()
        self._note.take(row, sample)
        if sample in self._quarantined:
            return False
        failpoints.passing("worker.sample.begin", sample)
        return True

    def _tell(self, bad: Bad, sample: int, reason: str) -> None:
        """Add a bad sample to those that are reported."""
        bytes_max = orders.LONG_REASON_BYTES_MAX if len(bad) < orders.LONG_REASONS_MAX else orders.REASON_BYTES_MAX
        bad.append((sample, self._maker.shown_name(sample), shortened(reason, bytes_max)))


class OneByOne(Strategy):
    """Makes each row by itself, and treats bad samples by the stream's policy."""

    def __init__(self, context: StreamContext) -> None:
        super().__init__(context)
        self._plan = context.plan
        self._on_error = context.message.on_error
        self._drawn: list[RowMixing | RowErasing] = []
        if context.message.mixing is not None:
            from batchd.core import mixing  # noqa: PLC0415  few streams need it

            self._drawn.append(from_plain(mixing.RowMixing, context.message.mixing))
        if context.message.erasing is not None:
            from batchd.core import erasing  # noqa: PLC0415  few streams need it

            self._drawn.append(from_plain(erasing.RowErasing, context.message.erasing))
        sizes = [sizes_field(field) for field in context.layout.fields if context.layout.buckets]
        self._sizes = [field.name for field in sizes if field is not None]
        """Fields of sizes in slots whose former batch may have had another layout."""
        self._tried: Bad = []
        """Bad samples of the current row."""
        self._bad_others: list[tuple[int, str]] = []
        """Bad samples that would have joined those of the current row, and why."""

    def fill(self, chunk: ChunkRows) -> tuple[Bad, str]:
        """See ``Strategy``."""
        self._note.begin(chunk.order)
        if self._maker.mailbox is not None:
            self._maker.mailbox.expect(int(chunk.samples[0]), tuple(chunk.places))
        for name in self._sizes:
            chunk.arrays[name][chunk.selector] = -1
        self._write_index(chunk)
        bad: Bad = []
        hopeless = ""
        left = self._not_made_together(chunk)
        if self._made is not None:
            alone = {row for row, _sample in left}
            together = [pair for pair in chunk.with_samples() if pair[0] not in alone]
            self._made += [self._row_made(chunk, row, sample, sample) for row, sample in together]
        for row, sample in left:
            hopeless = self._make_alone(chunk, row, sample, bad) or hopeless
        self._note.clear()
        failpoints.passing("worker.chunk.written")
        return bad, hopeless

    def _not_made_together(self, chunk: ChunkRows) -> Sequence[tuple[int, int]]:
        """Make as many rows at once as can be; return the others with their samples."""
        return list(chunk.with_samples())

    def _write_index(self, chunk: ChunkRows) -> None:
        """Write the fields that no source has, as of good samples."""
        chunk.arrays[INDEX][chunk.selector] = chunk.samples
        if VALID in chunk.arrays:
            chunk.arrays[VALID][chunk.selector] = True
        for drawn in self._drawn:
            numbers = drawn.numbers(self._plan.seed, chunk.position, self._plan.rows(chunk.position))
            for name, values in numbers._asdict().items():
                if name in chunk.arrays:
                    chunk.arrays[name][chunk.selector] = values[selector_of(chunk.numbers)]

    def _make_alone(self, chunk: ChunkRows, row: int, sample: int, bad: Bad) -> str:
        """Make a row of a sample, or by the stream's policy; says why the policy has failed."""
        fields = {name: array[row, ...] for name, array in chunk.arrays.items()}
        hopeless = ""
        self._maker.joining.begins = partial(self._begin, row)
        reason = self._make(chunk, row, sample, 0, fields)
        if reason is not None:
            self._tell(bad, sample, reason)
            if not self._treat(chunk, row, sample, fields):
                name = self._maker.shown_name(sample)
                hopeless = f"none of {SUBSTITUTES_MAX} samples could stand in for {name}: {reason}"
        for other, why in self._bad_others:
            self._tell(bad, other, why)
        self._bad_others.clear()
        chunk.write_checksums(row)
        if self._made is not None:
            is_good = reason is None or (self._on_error == "substitute" and not hopeless)
            self._made.append(self._row_made(chunk, row, sample, int(fields[INDEX]), is_good=is_good))
            self._tried.clear()
        return hopeless

    def _make(self, chunk: ChunkRows, row: int, sample: int, attempt: int, fields: Row) -> str | None:
        """Make the ``fields`` of ``row`` of ``sample``; says why it is bad, if it is."""
        if self._maker.sibling is not None:
            if chunk.shares and not attempt:
                self._maker.sibling.begin(chunk.first_place + row, chunk.draw_epoch, sample, chunk.shares)
            else:
                self._maker.sibling.end()
        if not self._begin(row, sample):
            reason: str | None = "quarantined"
        else:
            reason = self._maker.make_row(chunk.draw_epoch, sample, attempt, fields)
            self._bad_others += self._maker.joining.bad
        if reason is None:
            failpoints.passing("worker.sample.written", sample)
        elif self._made is not None:
            short = shortened(reason, orders.REASON_BYTES_MAX)
            self._tried.append((sample, self._maker.shown_name(sample), short))
        return reason

    def _treat(self, chunk: ChunkRows, row: int, sample: int, fields: Row) -> bool:
        """Fill a bad sample's row by the stream's policy; False if no sample is left."""
        if self._on_error == "substitute":
            for attempt in range(1, SUBSTITUTES_MAX + 1):
                other = sample if self._maker.is_live else self._plan.substitute(chunk.epoch, sample, attempt)
                if self._make(chunk, row, other, attempt, fields) is None:
                    fields[INDEX][...] = other
                    return True
        self._maker.keep_known(sample, fields)
        if VALID in fields:
            fields[VALID][...] = False
        return self._on_error != "substitute"

    def _row_made(
        self, chunk: ChunkRows, row: int, planned: int, sample: int, *, is_good: bool = True
    ) -> orders.RowMade:
        return orders.RowMade(
            order=chunk.order,
            row=row,
            planned=planned,
            sample=sample,
            name=self._maker.shown_name(sample),
            is_good=is_good,
            tried=list(self._tried),
            modified_ns=self._maker.modified_ns(sample),
            draws=list(self._draws) if is_good else [],
        )


class ManyRows(OneByOne):
    """Makes rows of numbers at once, also those of several short chunks."""

    def __init__(self, context: StreamContext) -> None:
        super().__init__(context)
        self._row_bytes = context.layout.row_bytes
        self._filled: set[int] = set()
        """Orders whose rows are all made ahead of their turn."""

    def fill_ahead(self, chunks: Iterable[ChunkRows]) -> int:
        """See ``Strategy``."""
        if self._made is not None:
            return 0
        short: list[ChunkRows] = []
        rows_left = TOGETHER_BYTES_MAX // self._row_bytes
        for chunk in chunks:
            rows_left -= len(chunk.rows)
            if rows_left < 0 or len(chunk.rows) > ROWS_AT_ONCE:
                break
            short.append(chunk)
        if len(short) > 1 and self._make_rows(short):
            for chunk in short:
                self._write_index(chunk)
                chunk.write_checksums(*chunk.rows)
                self._filled.add(chunk.order)
                failpoints.passing("worker.chunk.written")
            self._note.clear()
        return len(short)

    def fill(self, chunk: ChunkRows) -> tuple[Bad, str]:
        """See ``Strategy``."""
        if chunk.order in self._filled:
            self._filled.remove(chunk.order)
            return [], ""
        return super().fill(chunk)

    def _not_made_together(self, chunk: ChunkRows) -> Sequence[tuple[int, int]]:
        left: list[tuple[int, int]] = []
        for start in range(0, len(chunk.rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            portion = chunk._replace(rows=chunk.rows[part], samples=chunk.samples[part])
            if self._make_rows([portion]):
                chunk.write_checksums(*portion.rows)
            else:
                left += portion.with_samples()
        return left

    def _make_rows(self, parts: Sequence[ChunkRows]) -> bool:
        """Make the rows of all parts at once; False if they must be made one by one."""
        current = begun = -1

        def begin(number: int) -> None:
            nonlocal current, begun
            if number != current:
                current = number
                self._note.begin(parts[number].order)
                self._note.take_many(parts[number].rows[0])
            if number > begun:
                begun = number
                failpoints.passing("worker.rows.begin", int(parts[number].samples[0]))

        samples = parts[0].samples if len(parts) == 1 else np.concatenate([part.samples for part in parts])
        if self._quarantined and not self._quarantined.isdisjoint(samples.tolist()):
            return False
        targets = []
        for part in parts:
            selector = part.selector
            if not isinstance(selector, slice):
                return False
            targets.append({name: array[selector] for name, array in part.arrays.items()})
        return self._maker.make_rows(samples, targets, begin)


class ManyFiles(OneByOne):
    """Makes rows of files that a cache knows in few calls, for several chunks until a report."""

    def __init__(self, context: StreamContext) -> None:
        super().__init__(context)
        self._stopwatch = context.stopwatch
        self._done: set[tuple[int, int]] = set()
        """(order, row) that are made ahead of their turn."""

    def fill_ahead(self, chunks: Iterable[ChunkRows]) -> int:
        """See ``Strategy``."""
        wanted: list[WantedRow] = []
        count = rows = 0
        for chunk in chunks:
            if chunk.shares:
                break  # decoded once for several streams, which is less than by one call for each
            rows += len(chunk.rows)
            if count and (rows > FILES_AT_ONCE or self._stopwatch.left_s(rows) < 0):
                break
            count += 1
            good = [one for one in chunk.with_samples() if one[1] not in self._quarantined]
            wanted += [WantedRow(chunk.order, chunk.draw_epoch, row, sample, chunk.arrays) for row, sample in good]
        for start in range(0, len(wanted), FILES_AT_ONCE):
            self._done |= self._maker.make_files(wanted[start : start + FILES_AT_ONCE], self._note)
        return count

    def _not_made_together(self, chunk: ChunkRows) -> Sequence[tuple[int, int]]:
        left: list[tuple[int, int]] = []
        for row, sample in chunk.with_samples():
            if (chunk.order, row) not in self._done:
                left.append((row, sample))
                continue
            self._done.remove((chunk.order, row))
            self._note.take(row, sample)
            failpoints.passing("worker.sample.written", sample)
            chunk.write_checksums(row)
        return left
