"""The batches that trainers should get. For tests of processes.

``Expected`` computes every batch of a stream in this process, from the configuration and the files
alone: no daemon, no worker, no shared memory, one sample after the other.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from batchd.config.load import load_config
from batchd.data.pipeline.cache_split import cut_of, steps_of
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.stream.grouping import MeasureOptions, grouping_of
from batchd.stream.plan import epoch_plan, plan_stream, planned_index
from batchd.stream.rings import bucket_layout, slot_layout
from batchd_wire.fields import PADDED, sizes_field
from batchd_wire.position import Position
from support.seen import Seen, digest_of, rows_of

SUBSTITUTES_MAX = 32
ROWS_KNOWN_MAX = 4096


class Expected:
    """The batches of one stream of a configuration file, computed without a daemon."""

    def __init__(self, config_file: Path, stream: str = "photos", python_path: Sequence[Path] = ()) -> None:
        whole = load_config(config_file, {}, {})
        config, daemon = whole.streams[stream], whole.daemon.model_copy(update={"python_path": tuple(python_path)})
        self._config = config
        self._columns = kind_of(config.source).columns(config.source, Storage())
        plan, grouping = plan_stream(stream, config, self._columns, daemon), None
        if config.buckets is not None:
            grouping = grouping_of(plan, MeasureOptions(1, 30.0, Storage(), lambda _found: None))
        index = scan_source(config.source, lambda _found: None, IndexCache(None), Storage(), python_path, grouping)
        self._reader = open_reader(config.source, index, 1 << 26, Storage())
        self.close = weakref.finalize(self, self._reader.close)
        """Close everything that the source has open; otherwise it is closed with this object."""
        self._pipeline = Pipeline(self._columns, config.pipeline, config.seed)
        self._maker: Pipeline | None = None
        if config.cache == "decoded":
            steps = steps_of(config.pipeline, config.cache_short_side)
            self._maker = Pipeline(self._columns, steps[: cut_of(steps)], config.seed, has_rows=False)
            self._pipeline = Pipeline(list(self._maker.columns.values()), steps[cut_of(steps) :], config.seed)
        self.plan = epoch_plan(plan, planned_index(plan, index))
        self._layout = bucket_layout(slot_layout(config, self._columns, has_checksums=False), index.arrays)
        self._known: dict[tuple[int, int], Seen] = {}
        self._known_rows: dict[tuple[int, int], list[tuple[int, str]]] = {}

    def batch(self, epoch: int, step: int) -> Seen:
        """One complete batch."""
        known = self._known.get((epoch, step))
        if known is None:
            known = self._known[epoch, step] = self._make(epoch, step)
        return known

    def rows(self, epoch: int, step: int) -> list[tuple[int, str]]:
        """The rows of one batch, each computed alone. The last few thousand batches are cached."""
        known = self._known_rows.get((epoch, step))
        if known is None:
            if len(self._known_rows) >= ROWS_KNOWN_MAX:
                del self._known_rows[next(iter(self._known_rows))]
            known = self._known_rows[epoch, step] = rows_of(self.arrays(epoch, step).items())
        return known

    def all_rows(self, epoch: int) -> list[tuple[int, str]]:
        """Return what ``rows`` does for all batches of an epoch, in order."""
        return [row for step in range(self.plan.steps) for row in self.rows(epoch, step)]

    def epoch(self, epoch: int, steps: Iterable[int] | None = None) -> list[Seen]:
        """All batches of an epoch, or those of some steps."""
        return [self.batch(epoch, step) for step in (range(self.plan.steps) if steps is None else steps)]

    def path(self, sample: int) -> str:
        """The path of a sample as text."""
        return self._reader.name(sample)

    def _make(self, epoch: int, step: int) -> Seen:
        arrays = self.arrays(epoch, step)
        return Seen(epoch, step, tuple(arrays["index"].tolist()), digest_of(arrays.items()))

    def arrays(self, epoch: int, step: int) -> dict[str, np.ndarray]:
        """The fields of a batch, ``[rows, *shape]`` each."""
        rows = self.plan.rows(Position(epoch, step))
        if self._config.bucket is None:  # a size for all images of the batch
            fields_of_all = self._layout.of(self.plan.bucket_of(Position(epoch, step))).sample_fields
        else:
            fields_of_all = sample_fields(self._columns, self._config.pipeline, self._config.on_error)
        arrays = {field.name: np.zeros((rows, *field.shape), field.dtype) for field in fields_of_all}
        arrays["index"][:] = self.plan.indices(Position(epoch, step), 0, rows)
        for row, sample in enumerate(arrays["index"].tolist()):
            fields = {name: array[row, ...] for name, array in arrays.items()}
            good = self._fill(fields, Position(epoch, step), sample)
            if good is not None:
                arrays["index"][row] = good
            else:
                self._pipeline.keep(self._reader.known(sample), fields)
            if "valid" in arrays:
                arrays["valid"][row] = good is not None
        for field in fields_of_all:
            if field.varying is not None and field.varying.kind == PADDED:  # trainers get it cut
                sizes = arrays[sizes_field(field).name].reshape(rows, -1).max(axis=0).tolist()
                largest = dict(zip(field.varying.axes, sizes, strict=True))
                cut = tuple(slice(largest.get(axis)) for axis in range(len(field.shape)))
                arrays[field.name] = arrays[field.name][:, *cut]
        return arrays

    def _fill(self, fields: dict[str, np.ndarray], position: Position, sample: int) -> int | None:
        """Fill a row with a sample or its first usable substitute; return its number."""
        drawn = self.plan.size_of(position) << 56 | position.step % self.plan.repeats << 48 | position.epoch
        for attempt, candidate in enumerate(self._candidates(position.epoch, sample)):
            try:
                values = self._reader.read(candidate)
                if self._maker is not None:
                    values = self._maker.make(values, drawn, candidate, attempt)
                self._pipeline.run(values, drawn, candidate, attempt, fields)
            except (SampleUnreadable, SampleUndecodable):
                continue
            return candidate
        return None

    def _candidates(self, epoch: int, sample: int) -> Iterator[int]:
        yield sample
        if self._config.on_error == "substitute":
            for attempt in range(1, SUBSTITUTES_MAX + 1):
                yield self.plan.substitute(epoch, sample, attempt)
