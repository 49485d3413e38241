"""One order: read, decode, transform, written once into the slot. WORKER process.

    plan: rows -> sample indices         policy for a bad sample
    for each row: read -> pipeline ----> substitute: another sample, chosen by the plan
                    straight into        mask: zeros, valid = False
                    the slot's row       fail: zeros; the daemon stops the stream

                                         then its checksum, where the stream has them

Invariant: every field of every ordered row is written, whatever happens to a sample, so nothing of the slot's former
content can reach a trainer. Anything that is not a bad sample (a bug, no memory) ends the process, and the daemon bisects.
"""

from time import perf_counter_ns

import numpy as np

from batchd import failpoints
from batchd.config.steps import Decode, step_from_plain
from batchd.core.plan import Plan, Position
from batchd.pipeline.errors import SampleUndecodable
from batchd.pipeline.execute import Pipeline
from batchd.sources.index import SourceIndex
from batchd.sources.reader import SampleReader, SampleUnreadable
from batchd.worker.note import Note
from batchd.worker.slots import Arrays
from batchd_wire.checksum import RowChecksums
from batchd_wire.fields import layout_from_wire
from batchd_wire.orders import PATH_BYTES_MAX, REASON_BYTES_MAX, ChunkFilled, FillChunk, ServeStream

SUBSTITUTES_MAX = 32
"""Tries for one row. With half of all samples bad, one row in four thousand million finds none."""


class ServedStream:
    """A stream as a worker sees it: plan, source and pipeline, made once from ``ServeStream`` and its descriptor."""

    def __init__(self, told: ServeStream, index_descriptor: int, note: Note) -> None:
        steps = [step_from_plain(step) for step in told.steps]
        decode = steps[0]
        assert isinstance(decode, Decode), "the configuration lets only pipelines pass that start with decode"
        self.layout = layout_from_wire(told.layout)
        self.quarantined: set[int] = set()
        self._checksums = RowChecksums(self.layout)
        self._plan = Plan(told.samples, told.batch_size, told.seed, told.shuffle, drop_last=False)
        self._on_error = told.on_error
        self._index = SourceIndex.from_descriptor(index_descriptor)
        self._reader = SampleReader(self._index, decode.max_bytes)
        self._pipeline = Pipeline(steps, told.seed)
        self._note = note

    def fill(self, order: FillChunk, arrays: Arrays, page: memoryview) -> ChunkFilled:
        """Fill the ordered rows of a slot: its fields as ``arrays``, its whole memory as ``page``."""
        begun_ns = perf_counter_ns()
        self._note.begin(order.order)
        rows = slice(order.first, order.first + order.count)
        samples = self._plan.indices(Position(order.epoch, order.step), order.first, order.count)
        arrays["index"][rows] = samples
        arrays["label"][rows] = self._index.labels[samples]
        if "valid" in arrays:
            arrays["valid"][rows] = True
        bad: list[tuple[int, str, str]] = []
        hopeless = ""
        for row, sample in zip(range(rows.start, rows.stop), samples.tolist(), strict=True):
            reason = self._fill_row(order.epoch, row, sample, 0, arrays)
            if reason is not None:
                bad.append((sample, self._shown_path(sample), _shorten(reason, REASON_BYTES_MAX)))
                if not self._treat(order.epoch, row, sample, arrays):
                    path = self._shown_path(sample)
                    hopeless = f"none of {SUBSTITUTES_MAX} samples could stand in for {path}: {reason}"
            if "path" in arrays:
                self._write_path(arrays["path"][row], int(arrays["index"][row]))
            self._checksums.write(page, row)
        self._note.clear()
        failpoints.passing("worker.chunk.written")
        return ChunkFilled(order.order, (perf_counter_ns() - begun_ns) // 1000, bad, _shorten(hopeless, 1000))

    def _fill_row(self, epoch: int, row: int, sample: int, attempt: int, arrays: Arrays) -> str | None:
        """Decode ``sample`` into ``row``; says why it is bad, if it is."""
        self._note.take(row, sample)
        if sample in self.quarantined:
            return "quarantined"
        failpoints.passing("worker.sample.begin", sample)
        try:
            data = self._reader.read(sample)
            failpoints.passing("worker.sample.read", sample)
            self._pipeline.run(data, epoch, sample, attempt, arrays["image"][row])
        except (SampleUnreadable, SampleUndecodable) as error:
            return str(error)
        failpoints.passing("worker.sample.written", sample)
        return None

    def _treat(self, epoch: int, row: int, sample: int, arrays: Arrays) -> bool:
        """Fill the row of a bad sample by the stream's policy; False where the policy finds nothing to fill it with."""
        if self._on_error == "substitute":
            for attempt in range(1, SUBSTITUTES_MAX + 1):
                other = self._plan.substitute(epoch, sample, attempt)
                if self._fill_row(epoch, row, other, attempt, arrays) is None:
                    arrays["index"][row] = other
                    arrays["label"][row] = self._index.labels[other]
                    return True
        arrays["image"][row] = 0
        if "valid" in arrays:
            arrays["valid"][row] = False
        return self._on_error != "substitute"

    def _write_path(self, out: np.ndarray, sample: int) -> None:
        """The path of the sample that the row holds, and zeros behind it; the daemon has seen that each fits."""
        name = np.frombuffer(self._index.name(sample), np.uint8)
        out[: len(name)] = name
        out[len(name) :] = 0

    def _shown_path(self, sample: int) -> str:
        """The path for people: its end where it is long, odd bytes written out."""
        shown = self._index.path(sample).encode("utf-8", "backslashreplace")
        if len(shown) > PATH_BYTES_MAX:
            shown = b"..." + shown[3 - PATH_BYTES_MAX :]
        return shown.decode("utf-8", "ignore")


def _shorten(text: str, bytes_max: int) -> str:
    return text.encode("utf-8", "backslashreplace")[:bytes_max].decode("utf-8", "ignore")
