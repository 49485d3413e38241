"""Which samples share a batch, if their sizes decide it, for the index of a stream. Daemon.

    index --> stream.measuring --> sizes --> core.packs    --> index with packs.*    "pack"
                                         --> core.packs    --> index with cuts.*     concat-split
                                         --> core.buckets  --> index with buckets.*  bucket, balance

The result is kept by the index cache, like a scan, while no file of the source has changed. The
digest of an index covers its arrays, so a stream's fingerprint covers its packs and buckets.
"""

import json
from functools import partial

import numpy as np
import structlog
from numpy.typing import NDArray

from batchd.config.tree import Bucket, StreamConfig
from batchd.core.buckets import OverBudget, buckets_of
from batchd.core.packs import Cuts, PackLimits, Packs
from batchd.data.pipeline.shapes.options import Pack
from batchd.data.pipeline.step_files import named_by_content
from batchd.data.sources.scan import IndexExtension
from batchd.data.storage.index import SourceIndex
from batchd.errors import SourceInvalid
from batchd.stream.measuring import MeasureOptions, Size, measured
from batchd.stream.plan import StreamPlan
from batchd.worker.messages import ASPECT_UNIT
from batchd_wire.wording import counted

_log = structlog.get_logger()
BALANCE_BUCKETS = 64
"""Buckets of packed rows by their cost: in each step, the most of 8 ranks is 3 % above the mean."""


def grouping_of(plan: StreamPlan, pass_: MeasureOptions) -> IndexExtension | None:
    """How the index of a stream is extended; None if no size of a sample counts."""
    config = plan.config
    if plan.pack is not None:
        extend = partial(_packed, plan, plan.pack, pass_)
    elif config.bucket is not None:
        extend = partial(_bucketed, plan, config.bucket, pass_)
    else:
        return None
    made_of: list[object] = [
        [named_by_content(step, plan.digests) for step in plan.pipeline.steps],
        [(column.name, column.text) for column in plan.columns],
        plan.code.digests,
    ]
    if config.bucket is not None or config.balance is not None:
        made_of += [config.bucket and config.bucket.model_dump(mode="json"), _block(config)]
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
    dropped = int((lengths > pack.length).sum()) if pack.too_long == "drop" else 0
    if empty or dropped:
        _log.warning("samples in no row", stream=plan.name, bad_or_empty=empty, too_long=dropped, example=example)
    _check_bad(plan, pack.field, empty, len(lengths), example)
    config = plan.config
    try:
        packs: Packs | Cuts
        if pack.method == "best-fit":
            packs = Packs.plan(lengths, PackLimits(pack.length, pack.documents_max, pack.window, pack.too_long))
            costs = packs.attention(lengths, pack.length)
        else:
            packs = Cuts.plan(lengths, pack.length, config.seed, shuffle=config.is_shuffled)
            documents, costs = packs.documents_and_costs()
            if (most := int(documents.max())) > pack.documents_max:
                raise SourceInvalid(f'a row has up to {most} documents: set documents = {most} in "pack", or more')
    except ValueError as error:
        raise SourceInvalid(f"{error}: no batch can be packed") from None
    arrays = packs.to_arrays()
    if config.balance is not None:
        arrays |= buckets_of(costs, BALANCE_BUCKETS, config.batch_size, config.balance)
    return _with(index, arrays)


def _bucketed(plan: StreamPlan, bucket: Bucket, pass_: MeasureOptions, index: SourceIndex) -> SourceIndex:
    """Plan batches of samples of one bucket. Raises ``SourceInvalid``."""
    sizes, example = measured(plan, Size(bucket.field, bucket.by), index, pass_)
    bad = int((sizes <= 0).sum())
    if bad:
        _log.warning("samples without a size", stream=plan.name, bad_or_empty=bad, example=example)
    _check_bad(plan, bucket.field, bad, len(sizes), example)
    unit, config = unit_of(bucket), plan.config
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
    return ASPECT_UNIT if bucket.by in {"aspect", "value"} else 1


def _check_bad(plan: StreamPlan, field: str, bad: int, samples: int, example: str) -> None:
    """Raise ``SourceInvalid`` for more bad samples than the stream may have."""
    if bad > plan.config.max_bad_fraction * samples:
        raise SourceInvalid(
            f"{bad:,} of {counted(samples, 'sample')} are bad or have no element of {field!r}, more than "
            f"max_bad_fraction = {plan.config.max_bad_fraction:g}" + (f"; for example {example}" if example else "")
        )


def _with(index: SourceIndex, arrays: dict[str, NDArray[np.generic]]) -> SourceIndex:
    return SourceIndex.build(len(index), index.facts, {**index.arrays, **arrays}, index.place)
