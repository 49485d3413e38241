"""Which samples share a batch, if their sizes decide it: measured, then grouped. Daemon.

    index of the source --> worker processes (worker.tasks) make each sample once --> sizes
          |                                                                             ^
          +-- a length that the index tells, and that no step changes ------------------+

    sizes --> core.packs    --> index with packs.*    "pack"
          --> core.packs    --> index with cuts.*     concat-split
          --> core.buckets  --> index with buckets.*  bucket, balance

The result is kept by the index cache, like a scan, while no file of the source has changed. The
digest of an index covers its arrays, so a stream's fingerprint covers its packs and buckets.

Invariant: the processes are gone when ``measured`` returns or raises.
"""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from batchd.config.tree import Bucket, StreamConfig
from batchd.core.buckets import OverBudget, buckets_of, crop_buckets
from batchd.core.packs import Cuts, PackLimits, Packs, PartPacks, part_seed
from batchd.core.rows import runs_of
from batchd.data.pipeline.sample_fields import bucket_crop_of, columns_after
from batchd.data.pipeline.shapes.options import LAST_STEPS, Pack
from batchd.data.pipeline.step_files import named_by_content
from batchd.data.pipeline.text.options import TextStep
from batchd.data.sources.composed.options import MixSource
from batchd.data.sources.interface import kind_of
from batchd.data.sources.scan import IndexExtension
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.survey import ReportProgress
from batchd.errors import SourceInvalid
from batchd.runtime.available import available_bytes
from batchd.runtime.children import PIPE, STDOUT, start_linked
from batchd.stream.cache_memory import CacheMemory, CacheSpec, allow_caches, cache_spec
from batchd.stream.plan import StreamPlan
from batchd.worker import messages as orders
from batchd.worker.messages import ASPECT_UNIT
from batchd.worker.order_runner import DeathLimits, OrderProgress, OrderRunner, OrderToRun, WorkersEnd
from batchd_wire.fields import ITEM_BYTES
from batchd_wire.wording import counted

_log = structlog.get_logger()

BALANCE_BUCKETS = 64
"""Buckets of packed rows by their cost: in each step, the most of 8 ranks is 3 % above the mean."""
DEATHS_MAX = 8
"""Deaths of processes in one pass; then something else than a sample is wrong."""
PRINTED_BYTES_MAX = 2000


class Size(NamedTuple):
    """What the size of a sample is: see ``config.tree.Bucket``."""

    field: str
    by: str


class MeasureOptions(NamedTuple):
    """How all samples are measured: by so many ``workers``, each sample in so many seconds.

    ``progress`` is called with the number of samples that have been measured. ``kept``: keeps what
    is made, where ``lengths`` of samples are measured.
    """

    workers: int
    sample_timeout_s: float
    storage: Storage
    progress: ReportProgress
    kept: "KeptSamples | None" = None


class KeptSamples:
    """The cache in memory that the measuring of a stream fills: the first epoch finds it.

    ``rings_bytes``: memory that is free, and promised to rings.
    """

    def __init__(self, rings_bytes: int) -> None:
        self.cache: CacheMemory | None = None
        self._rings_bytes = rings_bytes

    def open(self, plan: StreamPlan, index: SourceIndex) -> CacheMemory | None:
        """The cache of a stream; None if what is measured is not what it keeps."""
        if self.cache is None and keeps_measured(plan):
            with suppress(SourceInvalid):  # said when the stream is worked out
                spec = cache_spec(plan, index)
                self.cache = None if spec is None else CacheMemory(spec)
        return self.cache

    def allow(self) -> None:
        """Let it fill, as the daemon does when it serves."""
        if self.cache is not None:
            with suppress(OSError):
                allow_caches([self.cache], available_bytes() - self._rings_bytes)

    def take(self, spec: CacheSpec) -> CacheMemory | None:
        """The cache, which is the caller's then; None if there is none for ``spec``."""
        if self.cache is None or not self.cache.may_serve(spec):
            return None
        cache, self.cache = self.cache, None
        return cache

    def close(self) -> None:
        """Close the cache, if there is one."""
        if self.cache is not None:
            self.cache.close()
            self.cache = None


def keeps_measured(plan: StreamPlan) -> bool:
    """True if a cache in memory keeps what measuring finds: tokens (no decoded file), or facts."""
    config, kept = plan.config, plan.pipeline.steps[: plan.pipeline.cut]
    if config.cache_dir is not None or config.cache_kind != "decoded":
        return config.cache_dir is None and config.cache_kind == "media"
    return bool(kept) and all(isinstance(step, TextStep) for step in kept)


def lengths_in_index(plan: StreamPlan, index: SourceIndex, field: str) -> NDArray[np.int64] | None:
    """The elements of a field in each sample, int64 ``[samples]``; 0 for a record that is too long.

    None if the index of the source does not tell, or if a step may change the lengths.
    """
    steps = [step for step in plan.pipeline.steps if not isinstance(step, LAST_STEPS)]
    if not all(step.keeps_length or field not in (step.changes or {field}) for step in steps):
        return None
    lengths = kind_of(plan.config.source).lengths(plan.config.source, index, field)
    if lengths is not None:
        lengths[lengths > plan.pipeline.record_bytes_max // _element_bytes(plan, field)] = 0
    return lengths


def _element_bytes(plan: StreamPlan, field: str) -> int:
    """The bytes of an element of a field of the source."""
    column = next(column for column in plan.columns if column.name == field)
    return ITEM_BYTES[column.dtype] * prod(length or 1 for length in column.shape)


class _Measuring:
    """One pass over ``samples``."""

    def __init__(  # noqa: PLR0913, PLR0917  each is one thing that a pass is of
        self,
        plan: StreamPlan,
        size: Size,
        index: SourceIndex,
        pass_: MeasureOptions,
        samples: Sequence[int],
        epoch: int = 0,
    ) -> None:
        recipe, storage = plan.recipe(), pass_.storage
        is_kept = size.by in {"length", "seconds"} and pass_.kept is not None
        self._kept = pass_.kept.open(plan, index) if is_kept and pass_.kept is not None else None
        if self._kept is None:
            recipe = recipe._replace(cut=0)
        if size.by:
            last = {step.op for step in plan.pipeline.steps if isinstance(step, LAST_STEPS)}
            is_after = size.by in orders.AFTER_STEPS or size.by == "steps"
            made = [step for step in recipe.steps if step["op"] not in last] if is_after else []
            recipe = recipe._replace(steps=made)
        limits = storage.limits.to_wire()
        cache = "off" if self._kept is None else self._kept.spec.kind
        self._message = orders.MeasureStream(recipe, limits, storage.as_of_ns, size.field, size.by, epoch, cache)
        self._index = index
        self._pass = pass_
        self._samples = samples
        self._done = self._told = 0
        self._printed = b""
        self._bad = ""
        self.sizes = np.zeros(len(samples), np.int64)
        self.after: list[dict[str, str]] = []
        """See ``messages.SamplesMeasured``."""

    @property
    def example(self) -> str:
        """One bad sample, and why it is bad."""
        killed = list(self._workers.killers.items())[-1:]
        return "".join(f"sample {sample}: it ended its process by {how}" for sample, how in killed) or self._bad

    def run(self) -> None:
        """Measure. Raises ``SourceInvalid``."""
        parts = range(0, len(self._samples), orders.SAMPLES_AT_ONCE)
        runs = [runs_of(self._samples[first : first + orders.SAMPLES_AT_ONCE]) for first in parts]
        ordered = [OrderToRun(number, orders.MeasureSamples(number, part)) for number, part in enumerate(runs, 1)]
        with ExitStack() as opened:
            descriptor = self._index.to_memfd()
            opened.callback(os.close, descriptor)
            launched = start_linked("batchd.worker", stdout=PIPE, stderr=STDOUT)
            self._output = launched.child.output.fileno()
            os.set_blocking(self._output, False)
            limits = self._pass.workers, self._pass.sample_timeout_s
            self._workers = opened.enter_context(OrderRunner(*limits, launched, DeathLimits(1, 1)))
            if self._pass.kept is not None:
                self._pass.kept.allow()
            cache = [] if self._kept is None else self._kept.descriptors
            self._workers.serve((self._message, [descriptor, *cache]))
            try:
                self._workers.run(ordered, self._heard, self._tick)
            except WorkersEnd as how:
                raise self._unmeasurable(self._last_line or f"its process ended with {how}") from None

    def _heard(self, work: OrderProgress) -> None:
        report = work.reports[-1]
        if isinstance(report, orders.SampleBad):
            self._bad = readable(f"{report.path}: {' '.join(report.reason.split())}".encode())
            return
        assert isinstance(report, orders.SamplesMeasured)
        if report.hopeless:
            raise self._unmeasurable(readable(" ".join(report.hopeless.split()).encode()))
        first = (work.order.number - 1) * orders.SAMPLES_AT_ONCE
        self.sizes[first : first + len(report.sizes)] = report.sizes
        self.after += report.after
        self._done += len(report.sizes)

    def _tick(self) -> None:
        """Keep the end of what the processes print, and tell how many samples are measured."""
        with suppress(BlockingIOError):
            while data := os.read(self._output, PRINTED_BYTES_MAX):
                self._printed = (self._printed + data)[-PRINTED_BYTES_MAX:]
        if len(self._workers.killers) > DEATHS_MAX:
            how = list(self._workers.killers.values())[-1]
            raise self._unmeasurable(self._last_line or f"its process ended with {how}")
        done = self._done + sum(work.samples_done for work in self._workers.works)
        if self._pass.kept is not None and done > self._told:
            self._pass.kept.allow()
        self._told = max(self._told, done)  # an order that has killed a worker begins again
        self._pass.progress(self._told)

    @property
    def _last_line(self) -> str:
        """The last line that was printed; "" without one."""
        lines = self._printed.decode("utf-8", "backslashreplace").strip().splitlines()
        return readable(lines[-1].encode()) if lines else ""

    def _unmeasurable(self, why: str) -> SourceInvalid:
        return SourceInvalid(f"the sizes of samples cannot be measured: {why}" if self._message.by else why)


def measured(plan: StreamPlan, size: Size, index: SourceIndex, pass_: MeasureOptions) -> tuple[NDArray[np.int64], str]:
    """The size of each sample, int64 ``[samples]``, 0 for a bad one; one bad one, and its reason.

    Raises ``SourceInvalid``.
    """
    if size.by == "length":
        known = lengths_in_index(plan, index, size.field)
        if known is not None:
            return known, ""
    if size.by == "bytes":
        known = kind_of(plan.config.source).lengths(plan.config.source, index, size.field)
        if known is not None:
            return known * _element_bytes(plan, size.field), ""
    measuring = _Measuring(plan, size, index, pass_, range(len(index)))
    measuring.run()
    return measuring.sizes, measuring.example


def bad_ones(plan: StreamPlan, index: SourceIndex, pass_: MeasureOptions, samples: tuple[int, ...]) -> tuple[int, str]:
    """Make a few samples in processes of their own: how many are bad, and the reason of one.

    Raises ``SourceInvalid`` if no sample of the stream can be made, as the user's function or a
    step's file cannot be used.
    """
    trying = _Measuring(plan, Size("", ""), index, pass_, samples)
    trying.run()
    return int((trying.sizes <= 0).sum()), trying.example


def after_steps(
    plan: StreamPlan, index: SourceIndex, pass_: MeasureOptions, samples: Sequence[int], epoch: int
) -> tuple[int, list[dict[str, str]]]:
    """Make the first good one of a few samples, in a process of its own, after each step.

    ``epoch``: that of the random numbers. Returns its number, and its values that changed: in the
    source, then after each step but those that give it a place in a batch, which make none. Raises
    ``SourceInvalid`` if none can be made.
    """
    making = _Measuring(plan, Size("", "steps"), index, pass_, samples, epoch)
    making.run()
    if not making.after:
        raise SourceInvalid(f"none of the first can be made, for example {making.example}")
    return int(samples[np.flatnonzero(making.sizes)[0]]), making.after


def grouping_of(plan: StreamPlan, pass_: MeasureOptions) -> IndexExtension | None:
    """How the index of a stream is extended; None if no size of a sample counts."""
    config = plan.config
    if plan.pack is not None:
        extend = partial(_packed, plan, plan.pack, pass_)
    elif config.buckets is not None:
        extend = partial(_bucketed, plan, config.buckets, pass_)
    else:
        return None
    made_of: list[object] = [
        [named_by_content(step, plan.digests) for step in plan.pipeline.steps],
        [(column.name, column.text) for column in plan.columns],
        plan.code.digests,
    ]
    if config.buckets is not None or config.balance is not None:
        made_of += [config.buckets and config.buckets.model_dump(mode="json"), _block(config)]
    if plan.pack is not None and plan.pack.method == "concat-split":
        made_of += [config.seed, config.is_shuffled]
    return IndexExtension(json.dumps(made_of, sort_keys=True), extend)


def _block(config: StreamConfig) -> int:
    """Rows of a batch, or of the batches that so many ranks read in one step."""
    return config.batch_size * (config.balance or 1)


def _packed(plan: StreamPlan, pack: Pack, pass_: MeasureOptions, index: SourceIndex) -> SourceIndex:
    """Plan rows of several samples. Raises ``SourceInvalid``."""
    lengths, example = measured(plan, Size(pack.field, "length"), index, pass_)
    empty = int((lengths <= 0).sum())
    is_too_long = (lengths > pack.length) if pack.too_long == "drop" else np.zeros(len(lengths), bool)
    patches = None
    if pack.patches is not None:
        made = columns_after(plan.columns, [step for step in plan.pipeline.steps if not isinstance(step, Pack)])
        images = next(column.beside.field for column in made.values() if column.beside is not None)
        patches, _example = measured(plan, Size(images, "length"), index, pass_)
        is_too_long |= patches > pack.patches
    dropped = int(is_too_long.sum())
    if empty or dropped:
        _log.warning("samples in no row", stream=plan.name, bad_or_empty=empty, too_long=dropped, example=example)
    _check_bad(plan, pack.field, empty, len(lengths), example)
    config = plan.config
    if isinstance(config.source, MixSource) and config.source.changes:
        firsts = np.cumsum([0, *(samples for samples, _facts in index.facts["parts"])])
        packs = []
        for part, (low, high) in enumerate(pairwise(firsts.tolist())):
            try:
                own = None if patches is None else patches[low:high]
                packs.append(_rows(pack, lengths[low:high], own, part_seed(config.seed, part), config)[0])
            except SourceInvalid as error:
                raise SourceInvalid(f"sources[{part}]: {error}") from None
        return _with(index, PartPacks(packs, firsts).to_arrays())
    rows, costs = _rows(pack, lengths, patches, config.seed, config)
    arrays = rows.to_arrays()
    if config.balance is not None:
        arrays |= buckets_of(costs, BALANCE_BUCKETS, config.batch_size, config.balance)
    return _with(index, arrays)


def _rows(
    pack: Pack, lengths: NDArray[np.int64], patches: NDArray[np.int64] | None, seed: int, config: StreamConfig
) -> tuple[Packs | Cuts, NDArray[np.int64]]:
    """Plan the rows of documents with these lengths, and their costs. Raises ``SourceInvalid``."""
    try:
        if pack.method == "best-fit":
            limits = PackLimits(pack.length, pack.documents_max, pack.window, pack.too_long, pack.patches or 0)
            packs = Packs.plan(lengths, limits, patches)
            return packs, packs.attention(lengths, pack.length)
        cuts = Cuts.plan(lengths, pack.length, seed, shuffle=config.is_shuffled)
    except ValueError as error:
        raise SourceInvalid(f"{error}: no batch can be packed") from None
    documents, costs = cuts.documents_and_costs()
    if (most := int(documents.max())) > pack.documents_max:
        raise SourceInvalid(f'a row has up to {most} documents: set documents = {most} in "pack", or more')
    return cuts, costs


def _bucketed(plan: StreamPlan, bucket: Bucket, pass_: MeasureOptions, index: SourceIndex) -> SourceIndex:
    """Plan batches of samples of one bucket. Raises ``SourceInvalid``."""
    sizes, example = measured(plan, Size(bucket.field, bucket.by), index, pass_)
    bad = int((sizes <= 0).sum())
    if bad:
        _log.warning("samples without a size", stream=plan.name, bad_or_empty=bad, example=example)
    _check_bad(plan, bucket.field, bad, len(sizes), example)
    unit, config, crop = unit_of(bucket), plan.config, bucket_crop_of(plan.pipeline.steps)
    if crop is not None:
        # of bad samples, whose substitutes are of a usual bucket
        sizes[sizes <= 0] = np.sort(sizes)[(bad + len(sizes)) // 2]
        return _with(index, crop_buckets(sizes, crop.bucket_sizes, config.batch_size, config.balance or 1, unit))
    bounds = bucket.count if bucket.bounds is None else tuple(int(bound * unit) for bound in bucket.bounds)
    budget = None if bucket.budget is None else bucket.budget * unit
    try:
        return _with(index, buckets_of(sizes, bounds, config.batch_size, config.balance or 1, budget))
    except OverBudget as over:
        raise SourceInvalid(
            f"sample {over.item} has {over.size / unit:,.12g} by {bucket.by!r} of {bucket.field!r}, more than the whole budget = "
            f"{bucket.budget} of a batch: raise the budget, or leave such samples out or make them smaller"
        ) from None


def unit_of(bucket: Bucket) -> int:
    """The size of 1 in the unit that users write."""
    return ASPECT_UNIT if bucket.by in {"aspect", "value", "seconds"} else 1


def _check_bad(plan: StreamPlan, field: str, bad: int, samples: int, example: str) -> None:
    """Raise ``SourceInvalid`` for more bad samples than the stream may have."""
    if bad > plan.config.max_bad_fraction * samples:
        raise SourceInvalid(
            f"{bad:,} of {counted(samples, 'sample')} are bad or have no element of {field!r}, more than "
            f"max_bad_fraction = {plan.config.max_bad_fraction:g}" + (f"; for example {example}" if example else "")
        )


def _with(index: SourceIndex, arrays: dict[str, NDArray[np.generic]]) -> SourceIndex:
    return SourceIndex.build(len(index), index.facts, {**index.arrays, **arrays}, index.place)
