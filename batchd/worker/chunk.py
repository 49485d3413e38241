"""One order: read, decode, transform, written once into the slot. WORKER process.

    plan: rows -> sample indices         policy for a bad sample
    for each row: read -> pipeline ----> substitute: another sample, chosen by the plan
                    straight into        mask: zeros or fill, valid = False
                    the slot's row       fail: zeros; the daemon stops the stream

                                         then its checksum, where the stream has them

    a file that a step reads is not what the daemon saw,
    or somebody's function cannot be had -------------------> zeros; the daemon stops the stream

Invariant: every field of every ordered row is written, whatever happens to a sample (but zeros that are there already), so
nothing of the slot's former content can reach a trainer. Anything that is not a bad sample (a bug, no memory) ends the process,
and the daemon bisects: a sample for which there is no memory even alone is a bad one then.
"""

from functools import partial

from batchd import failpoints
from batchd.config.columns import parse_column
from batchd.config.sources import source_from_plain
from batchd.config.steps import step_from_plain
from batchd.core.plan import Plan
from batchd.functions.load import FunctionUnusable, expect
from batchd.orders.worker import (
    HOPELESS_BYTES_MAX,
    KEEP_PART,
    LONG_REASON_BYTES_MAX,
    LONG_REASONS_MAX,
    NO_WORK,
    PATH_BYTES_MAX,
    REASON_BYTES_MAX,
    ChunkFilled,
    FillChunk,
    ServeStream,
)
from batchd.pipeline.cut import cropped_files, cut_of
from batchd.pipeline.effects import INDEX, VALID, StepInvalid
from batchd.pipeline.errors import SampleUndecodable
from batchd.pipeline.execute import Pipeline
from batchd.pipeline.record_length import record_bytes_max
from batchd.pipeline.seekable import made_seekable
from batchd.pipeline.stages import Row
from batchd.pipeline.step_files import changed_file
from batchd.samples.errors import SampleUnreadable
from batchd.sources.cached_reader import CachedReader, open_cache
from batchd.sources.disk_cache import DiskCache
from batchd.sources.kinds import Reader, ReadsAhead, kind_of, read_ahead
from batchd.sources.push import PushReader
from batchd.sources.sample_cache import SampleCache
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.values import StorageLimits
from batchd.worker.note import Note
from batchd.worker.planned_rows import PlannedRows
from batchd.worker.run_queue import RunQueue
from batchd.worker.slots import Arrays
from batchd.worker.stopwatch import Stopwatch
from batchd_wire.checksum import RowChecksums
from batchd_wire.fields import layout_from_wire
from batchd_wire.position import Position

SUBSTITUTES_MAX = 32
"""Tries for one row. With half of all samples bad, one row in four thousand million finds none."""


class ServedStream:
    """A stream as a worker sees it: plan, source and pipeline, made once from ``ServeStream`` and its descriptors.

    ``others``: the descriptors beside the index, of the mailbox or of the cache. ``storage`` is one for all streams of a worker.
    """

    def __init__(
        self, told: ServeStream, index_descriptor: int, others: list[int], note: Note, storage: Storage
    ) -> None:
        steps = [step_from_plain(step) for step in told.steps]
        storage.limits = StorageLimits.from_wire(told.storage)
        self._storage = storage
        source = source_from_plain(told.source)
        columns = [parse_column(name, text) for name, text in told.columns]
        index = SourceIndex.from_descriptor(index_descriptor)
        expect(told.python_path, {name: str(digest) for name, digest in told.modules.items()})
        self.layout = layout_from_wire(told.layout)
        self.quarantined: set[int] = set()
        self._checksums = RowChecksums(self.layout)
        self._plan = Plan(told.samples, told.batch_size, told.seed, told.shuffle, drop_last=False)
        self._rows = PlannedRows(self._plan)
        self._on_error = told.on_error
        self._is_live = source.is_live
        self._note = note
        self._run_queue = RunQueue()
        self._stopwatch = Stopwatch(self._run_queue.waited_ns)
        self._hopeless: str | None = None
        self._opened: list[Reader | SampleCache | DiskCache] = []
        self._cached: CachedReader | None = None
        self._maker: Pipeline | None = None
        """Makes what a cache of decoded samples keeps."""
        try:
            reader = kind_of(source).open(source, index, record_bytes_max(steps), storage)
            self._opened.append(reader)
            self._reads_ahead = isinstance(reader, ReadsAhead)
            self._mailbox = _attached(reader, others)
            laps = self._stopwatch.laps
            cut = cut_of(steps) if told.cache == "decoded" else 0
            if told.cache != "off":
                cache = open_cache(others)
                self._opened.append(cache)
                files = cropped_files(steps) if told.cache == "seekable" else {}
                rewriters = {name: partial(made_seekable, bytes_max=longest) for name, longest in files.items()}
                self._cached = CachedReader(reader, cache, keeps_made=cut > 0, rewriters=rewriters)
                self._keeping = laps.part(KEEP_PART)
            if cut:
                self._maker = Pipeline(columns, steps[:cut], told.seed, has_rows=False, laps=laps)
                columns = list(self._maker.columns.values())
            self._reader: Reader = self._cached or reader
            self._pipeline = Pipeline(columns, steps[cut:], told.seed, laps=laps)
        except FunctionUnusable as error:
            self._hopeless = str(error)
        except StepInvalid as error:
            self._hopeless = changed_file(told.files) or str(error)
        else:
            self._hopeless = changed_file(told.files)

    def close(self) -> None:
        """Give back what is open; no order comes any more."""
        self._run_queue.close()
        while self._opened:
            self._opened.pop().close()

    def fill(self, order: FillChunk, arrays: Arrays, page: memoryview) -> ChunkFilled:
        """Fill the ordered rows of a slot: its fields as ``arrays``, its whole memory as ``page``."""
        rows = slice(order.first, order.first + order.count)
        if self._hopeless is None:
            try:
                return self._fill(order, rows, arrays, page)
            except (StepInvalid, FunctionUnusable) as error:
                self._hopeless = str(error)
                self._note.clear()
        for array in arrays.values():
            array[rows] = 0
        return ChunkFilled(order.order, NO_WORK, [], _shorten(self._hopeless, HOPELESS_BYTES_MAX))

    @property
    def parts(self) -> list[str]:
        """What the time of its samples is divided among, by name."""
        return self._stopwatch.parts

    def _fill(self, order: FillChunk, rows: slice, arrays: Arrays, page: memoryview) -> ChunkFilled:
        self._stopwatch.begin()
        self._note.begin(order.order)
        samples = self._rows.samples(Position(order.epoch, order.step), order.first, order.count)
        if self._mailbox is not None:
            self._mailbox.expect(int(samples[0]), tuple(order.places))
        arrays[INDEX][rows] = samples
        if VALID in arrays:
            arrays[VALID][rows] = True
        self._read_ahead(samples.tolist())
        bad: list[tuple[int, str, str]] = []
        hopeless = ""
        for row, sample in zip(range(rows.start, rows.stop), samples.tolist(), strict=True):
            fields = {name: array[row, ...] for name, array in arrays.items()}
            reason = self._fill_row(order.epoch, row, sample, 0, fields)
            if reason is not None:
                bytes_max = LONG_REASON_BYTES_MAX if len(bad) < LONG_REASONS_MAX else REASON_BYTES_MAX
                bad.append((sample, self._shown_name(sample), _shorten(reason, bytes_max)))
                if not self._treat(order.epoch, row, sample, fields):
                    name = self._shown_name(sample)
                    hopeless = f"none of {SUBSTITUTES_MAX} samples could stand in for {name}: {reason}"
            self._checksums.write(page, row)
        self._note.clear()
        failpoints.passing("worker.chunk.written")
        return ChunkFilled(order.order, self._stopwatch.work(), bad, _shorten(hopeless, HOPELESS_BYTES_MAX))

    def _read_ahead(self, samples: list[int]) -> None:
        """Have the reader get what it can get at once. The longer the chunk, the less waiting that is for each sample."""
        if self._reads_ahead:
            self._storage.begin_reading_ahead()
            read_ahead(self._reader, [sample for sample in samples if sample not in self.quarantined])
            self._stopwatch.waited()

    def _fill_row(self, epoch: int, row: int, sample: int, attempt: int, fields: Row) -> str | None:
        """Make the ``fields`` of ``row`` of ``sample``; says why it is bad, if it is."""
        self._note.take(row, sample)
        if sample in self.quarantined:
            return "quarantined"
        failpoints.passing("worker.sample.begin", sample)
        self._stopwatch.begin_sample()
        self._storage.begin_sample()
        try:
            values = self._reader.read(sample)
            self._stopwatch.is_read(values, from_cache=self._cached.is_hit if self._cached is not None else None)
            failpoints.passing("worker.sample.read", sample)
            if self._maker is not None and self._cached is not None and not self._cached.is_hit:
                values = self._maker.make(values, epoch, sample, attempt)
                self._cached.offer(values)
            self._pipeline.run(values, epoch, sample, attempt, fields)
            if self._cached is not None:
                self._cached.keep()  # not before: who mends a bad file wants it to be read again
                self._stopwatch.laps.lap(self._keeping)
        except (SampleUnreadable, SampleUndecodable) as error:
            self._stopwatch.waste_sample()
            return str(error)
        taken_ns = self._stopwatch.end_sample()
        if taken_ns is not None:
            self._stopwatch.note_slow(sample, self._shown_name(sample), taken_ns)
        failpoints.passing("worker.sample.written", sample)
        return None

    def _treat(self, epoch: int, row: int, sample: int, fields: Row) -> bool:
        """Fill the row of a bad sample by the stream's policy; False where the policy finds nothing to fill it with."""
        if self._on_error == "substitute":
            for attempt in range(1, SUBSTITUTES_MAX + 1):
                other = sample if self._is_live else self._plan.substitute(epoch, sample, attempt)
                if self._fill_row(epoch, row, other, attempt, fields) is None:
                    fields[INDEX][...] = other
                    return True
        self._pipeline.keep(self._reader.known(sample), fields)
        if VALID in fields:
            fields[VALID][...] = False
        return self._on_error != "substitute"

    def _shown_name(self, sample: int) -> str:
        """Where a sample is, for people: its end where it is long, odd bytes written out."""
        shown = self._reader.name(sample).encode("utf-8", "backslashreplace")
        if len(shown) > PATH_BYTES_MAX:
            shown = b"..." + shown[3 - PATH_BYTES_MAX :]
        return shown.decode("utf-8", "ignore")


def _attached(reader: Reader, mailbox: list[int]) -> PushReader | None:
    """The reader of a mailbox, with the mailbox; None where the samples are not pushed."""
    if not isinstance(reader, PushReader):
        return None
    (descriptor,) = mailbox
    reader.attach(descriptor)
    return reader


def _shorten(text: str, bytes_max: int) -> str:
    return text.encode("utf-8", "backslashreplace")[:bytes_max].decode("utf-8", "ignore")
