"""``batchd check --explain``: shows how workers will decode and process a few samples.

Runs in the user's shell. Steps on an image are one plan, made from the file's header; here it is
printed instead of executed. Then a worker makes one sample after each step, whose values are shown.

Invariant: no decoder runs here, and of the user's functions only those of a source.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import takewhile
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from batchd.cli import terminal
from batchd.cli.tables import fitted
from batchd.config.tree import BlockShuffle, DaemonConfig
from batchd.core.blocks import BlockOrder
from batchd.core.buckets import MILLION, BucketOrder, BucketSizes
from batchd.core.mixtures import Mixture
from batchd.core.packs import Cuts, Packs, PartPacks, packed_in
from batchd.core.plan import Plan
from batchd.data.functions.load import expect
from batchd.data.pipeline.cache_split import KINDS_OF_FACTS
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.geometry import Cut, Move, Padding, Resampling, Warp, kept_sizes
from batchd.data.pipeline.image.jpeg_box import found_points, probe_file
from batchd.data.pipeline.image.options import CropStep, Decode, ImageStep, SizedStep
from batchd.data.pipeline.image.recolor import recolor_for
from batchd.data.pipeline.image.stages import ImagePlan
from batchd.data.pipeline.join.options import JoinStep, samples_joined
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.sample_fields import columns_after
from batchd.data.pipeline.shapes.options import LAST_STEPS
from batchd.data.pipeline.views.options import Views
from batchd.data.pipeline.views.stages import PlannedView, ViewGroup
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.kept_files import KeptFiles, has_points
from batchd.data.samples.values import Value
from batchd.data.sources.cache.memory import CacheForm
from batchd.data.sources.cache.record import pack
from batchd.data.sources.interface import Reader, open_reader
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import SourceInvalid
from batchd.observe.diagnosis.verdicts import CACHE_MARGIN
from batchd.runtime.directories import default_cache_dir
from batchd.runtime.sizes import round_bytes
from batchd.stream.cache_memory import facts_budget
from batchd.stream.grouping import MeasureOptions, after_steps, grouping_of, unit_of
from batchd.stream.plan import StreamPlan, bucket_rate, epoch_plan, planned_index
from batchd.stream.rings import MEBIBYTE, bucket_layout, slot_layout
from batchd_wire.fields import place_fields
from batchd_wire.position import Position
from batchd_wire.wording import counted

SAMPLES = 4
EXPONENT_FROM = 10_000
"""From here on, four digits would be shown with an exponent."""
_TURNS = ("transposed", "flipped upside down", "flipped left to right")
"""Those of ``Orientation``; they are made last and together."""


def explained(plan: StreamPlan, daemon: DaemonConfig, storage: Storage) -> Iterator[str]:
    """Lines for one stream: its first samples and their plans. Raises ``BatchdError``."""
    stream, whole = plan.config, plan.pipeline.steps
    if stream.source.is_live:
        yield f"{plan.name}: its samples are not there yet"
        return
    if stream.cache == "auto":
        chosen = "keeps nothing" if stream.cache_kind == "off" else f'is "{stream.cache_kind}"'
        yield f'{plan.name}: cache = "auto" {chosen}: {stream.cache_reason}'
    steps = list(map(_without_calls, takewhile(lambda step: not isinstance(step, (Call, *LAST_STEPS)), whole)))
    cache = IndexCache(daemon.cache_dir or default_cache_dir())
    pass_ = MeasureOptions(daemon.worker_count(), daemon.sample_timeout_s, storage, lambda _found: None)
    grouping = grouping_of(plan, pass_)
    index = scan_source(stream.source, lambda _found: None, cache, storage, daemon.python_path or (), grouping)
    index = planned_index(plan, index)
    epochs = epoch_plan(plan, index)
    lists = {column.name for column in plan.columns if column.kind == "images"}
    decode = next((step for step in steps if isinstance(step, Decode) and step.field not in lists), None)
    yield from _batches(plan, index, epochs)
    if decode is not None or stream.cache_kind == "encoded":
        expect(plan.code.python_path, plan.code.digests)
        with closing(open_reader(stream.source, index, plan.pipeline.record_bytes_max, storage)) as reader:
            if decode is not None:
                yield from _decoding(plan, steps, decode, index, epochs, reader)
            elif kept := list(_values_bytes(reader, _first_samples(epochs, index))):
                yield f"{plan.name}: {_need(plan, index, kept, stream.cache_bytes)}"
    if grouping is None and not any(isinstance(step, Decode) for step in steps):
        own = any(isinstance(step, Call) for step in whole)
        yield f"{plan.name}: no image is decoded" + (" in front of your function" if own else "")
    yield from rows_after_steps(plan, index, epochs, pass_)


def rows_after_steps(plan: StreamPlan, index: SourceIndex, epochs: Plan, pass_: MeasureOptions) -> Iterator[str]:
    """The fields of the first good sample, in the source and after each step."""
    samples = _first_samples(epochs, index)
    try:
        sample, after = after_steps(plan, index, pass_, samples, epochs.draw_epoch(Position(0, 0)))
    except SourceInvalid as error:
        yield f"{plan.name}: no sample can be shown after each step: {error}"
        return
    yield f"{plan.name}: the fields of sample {sample} of epoch 0 after each step"
    columns, known, left = {column.name: column for column in plan.columns}, after[0], iter(after[1:])
    rows = [("step", "field", "type", "this sample")]
    rows += [("" if place else "source", *_field(column, known)) for place, column in enumerate(columns.values())]
    for step in plan.pipeline.steps:
        before, columns = columns, dict(columns_after(list(columns.values()), [step]))
        found = {} if isinstance(step, LAST_STEPS) else next(left)
        known = {**known, **found}
        changed = found.keys() | (columns.keys() if step.changes is None else step.changes)
        shown = [
            _field(column, known) for name, column in columns.items() if name in changed or column != before.get(name)
        ]
        shown += [(name, "gone", "") for name in before if name not in columns]
        rows += [("" if place else step.op, *one) for place, one in enumerate(shown or [("", "", "")])]
    yield from fitted(rows, terminal.columns())


def _field(column: Column, known: Mapping[str, str]) -> tuple[str, str, str]:
    return column.name, column.text + (f" {column.varying.kind}" if column.varying else ""), known.get(column.name, "")


def _without_calls(step: StepOptions) -> StepOptions:
    """A step without functions of the user's inside it, and without what is behind those."""
    if not isinstance(step, Views):
        return step
    cut = {
        name: tuple(takewhile(lambda one: not isinstance(one, Call), view.steps)) for name, view in step.into.items()
    }
    return replace(step, into={name: replace(view, steps=cut[name]) for name, view in step.into.items()})


def _batches(plan: StreamPlan, index: SourceIndex, epochs: Plan) -> Iterator[str]:
    """Which samples share a batch."""
    if plan.pack is not None:
        yield from _packed(plan, index, epochs)
    if isinstance(epochs.order, BucketOrder):
        yield _bucketed(plan, BucketSizes(index.arrays), epochs)
    if epochs.sizes > 1:
        yield _drawn_sizes(plan, epochs)
    if plan.pack is not None or isinstance(epochs.order, BucketOrder) or epochs.sizes > 1:
        yield _slot(plan, index, epochs)
    if isinstance(epochs.order, BlockOrder):
        yield _shuffled(plan, epochs.order, epochs.samples)
    if isinstance(epochs.order, Mixture):
        yield from _mixed(plan.name, epochs, epochs.order)
    if epochs.draws is not None:
        yield _drawn(plan.name, epochs)
    if epochs.repeats > 1:
        yield (
            f"{plan.name}: each row is in {epochs.repeats} batches of an epoch, which follow each other: batches 0 to "
            f"{epochs.repeats - 1} have the same samples, and other random numbers; {counted(epochs.steps, 'batch')} an epoch"
        )


def _decoding(  # noqa: PLR0917  each is one thing that is known of the stream
    plan: StreamPlan,
    steps: Sequence[StepOptions],
    decode: Decode,
    index: SourceIndex,
    epochs: Plan,
    reader: Reader,
) -> Iterator[str]:
    """The first samples of epoch 0, and what caches would keep of all."""
    name, stream, whole, cut = plan.name, plan.config, plan.pipeline.steps, plan.pipeline.cut
    samples = _first_samples(epochs, index)
    if stream.cache_kind == "pixels":
        yield f"{name}: the cache keeps whole images as decoded, and access points of those without room"
    if stream.cache == "decoded":
        yield f"{name}: the cache keeps what {_named(whole[:cut])} make; in each epoch {_named(whole[cut:])}"
        steps = steps[:cut]
    kept_files = KeptFiles(plan.pipeline.cropped)
    try:
        pipeline = Pipeline(plan.columns, steps, stream.seed, has_rows=False, kept=kept_files)
    except StepInvalid as error:
        yield f"{name}: without your function its steps cannot be planned: {error}"
        return
    epoch = epochs.draw_epoch(Position(0, 0))
    looks = [_look(plan, reader, pipeline, kept_files, decode, epoch, sample) for sample in samples]
    good = [one for one in looks if one.kept_bytes]
    points, kept = [one.points_bytes for one in good], [one.kept_bytes for one in good]
    if any(points):
        least = stream.cache_bytes or facts_budget("points", len(index), stream.cache_dir)
        budget = least if stream.cache_kind == "points" else None  # others leave room for them
        yield (
            f"{name}: access points are found in the first epoch, and from the second on crops begin to decode at the nearest "
            f"one ({sum(map(bool, points))} of these {len(good)} files); {_need(plan, index, points, budget)}"
        )
    if good and stream.cache == "auto" and stream.cache_bytes is None and not any(one.is_scaled for one in good):
        need = _need(plan, index, kept, None)
        yield f"{name}: with cache_memory each image is decoded once, and batches stay the same; {need}"
    yield from _whole_images(name, whole, decode)
    if joins := [step for step in whole if isinstance(step, JoinStep)]:
        if all(step.near for step in joins if step.others):
            text = "others in its row of nearby batches", "once in an epoch while workers keep it"
        else:
            text = (
                f"others of all {len(index):,}",
                "as often in an epoch; a cache keeps what the steps in front make of it",
            )
        yield (
            f"{name}: a row is made of up to {samples_joined(joins)} samples, itself and {text[0]} ({_named(joins)}), "
            f"so each is read {text[1]}"
        )
    yield f"{name}: the first {counted(len(samples), 'sample')} of epoch 0"
    columns = terminal.columns()
    yield from fitted([("sample", "name", "file", "decoded", "then"), *(one.row for one in looks)], columns)
    for sample, views in ((sample, one.views) for sample, one in zip(samples, looks, strict=True) if one.views):
        yield f"{name}: the views of sample {sample}"
        yield from fitted([("view", "decoded", "then"), *views], columns)
    if good and stream.cache_kind not in {"off", *KINDS_OF_FACTS}:
        yield f"{name}: {_need(plan, index, kept, stream.cache_bytes)}"


def _values_bytes(reader: Reader, samples: Sequence[int]) -> Iterator[int]:
    """The bytes that a cache takes for what a source gives of the good ones of some samples."""
    for sample in samples:
        with suppress(SampleUnreadable):
            yield _taken_bytes(reader.read(sample))


def _taken_bytes(values: Mapping[str, Value]) -> int:
    """The bytes of the record that a cache keeps of these values."""
    record = pack(values)
    return len(record.facts) + sum(memoryview(value).nbytes for value in record.values)


def _need(plan: StreamPlan, index: SourceIndex, kept: Sequence[int], budget_bytes: int | None) -> str:
    """What a cache of all samples takes, by the bytes ``kept`` of some; and which part has room."""
    stream, start = plan.config, CacheForm(len(index), 0).records_start
    all_bytes = ceil(CACHE_MARGIN * sum(kept) * len(index) / len(kept))
    text = f"all {len(index):,} samples need some {round_bytes(start + all_bytes, ceil)}, if they are like these"
    if budget_bytes is None:
        return text
    share = (budget_bytes - start) / all_bytes
    if share >= 1:
        return f"{text}; there is room for all of them"
    text += f"; there is room for about {max(0.0, share):.0%} of them"
    if stream.cache_kind == "points":
        return text
    others = "read" if stream.cache_kind == "encoded" else "decoded"
    key = "cache_memory" if stream.cache_dir is None else "cache_size"
    return (
        f'{text}: the others are {others} in each epoch; {key} = "{-(-(start + all_bytes) // MEBIBYTE)}MiB" keeps all'
    )


def _first_samples(epochs: Plan, index: SourceIndex) -> list[int]:
    """The first samples of epoch 0; of a packed stream those of its first row."""
    packs = packed_in(index.arrays)
    if packs is None:
        first = epochs.indices(Position(0, 0), 0, min(SAMPLES, epochs.rows(Position(0, 0))))
    else:
        row = np.zeros(1, np.int64)
        first = packs.contents(0, row, epochs.seed, shuffle=epochs.shuffle, order=epochs.order)[:SAMPLES, 1]
    samples: list[int] = first.tolist()
    return samples


def _bucketed(plan: StreamPlan, sizes: BucketSizes, epochs: Plan) -> str:
    """How alike the samples of a batch are, and the batches of a step."""
    bucket, ranks = plan.config.buckets, plan.config.balance
    if bucket is None:
        assert ranks is not None, "one of both orders the rows"
        least, most = (100 * (cost / sizes.mean - 1) for cost in (sizes.mean_largest, sizes.largest_of(ranks)))
        return (
            f"{plan.name}: in a step, attention over a row costs the most expensive of {ranks} ranks at most {least:.1f} % more "
            f"than their mean, on average; without balance some {most:.0f} % more"
        )
    ranks_text = (
        "batches of different buckets; balance = 8 has 8 ranks read those of one"
        if ranks is None
        else (f"batches of the same bucket, for up to {ranks} ranks")
    )
    if sizes.crops is not None:
        lost = (sizes.crops[:, 2] / sizes.counts / MILLION).tolist()
        each = [
            f"{height} x {width} ({images:,}, {part:.1%} cut off)"
            for (height, width), images, part in zip(
                sizes.crops[:, :2].tolist(), sizes.counts.tolist(), lost, strict=True
            )
        ]
        whole = sizes.crops[:, 2].sum() / sizes.counts.sum() / MILLION
        return (
            f"{plan.name}: {counted(epochs.steps, 'batch')} an epoch, each of images of one height x width: {', '.join(each)}; "
            f"{whole:.1%} of all pixels are cut off; the ranks of a step have {ranks_text}"
        )
    what = {"length": " elements", "aspect": " times as wide as high", "value": ""}.get(bucket.by, f" {bucket.by}")
    found = [size / unit_of(bucket) for size in (*sizes.smallest[:1], *sizes.largest)]
    shown = [f"{size:,.0f}" if size >= EXPONENT_FROM else f"{size:,.4g}" for size in found]
    text = (
        f"{plan.name}: {counted(epochs.steps, 'batch')} an epoch, each of one of {counted(len(sizes.counts), 'bucket')} of "
        f"{bucket.field!r}: {', '.join(f'to {end}' for end in shown[1:])}{what}, from {shown[0]}"
    )
    mean_rows = round(epochs.samples * epochs.repeats / epochs.steps)
    if bucket.by == "length":
        filling, without = (1 - sizes.mean / size for size in (sizes.mean_largest, sizes.largest_of(mean_rows)))
        text += f"; padded to the largest of its bucket, {filling:.0%} of a batch is filling, and without buckets {without:.0%}"
    text += f"; the ranks of a step have {ranks_text}"
    if sizes.rows is not None:
        text += (
            f"; a batch has up to {counted(int(sizes.rows.max()), 'sample')} of the smallest bucket and {sizes.rows.min():,} of "
            f"the largest, {mean_rows:,} on average, so that it has at most {bucket.budget:,} of the largest size in its bucket"
        )
    return text


def _drawn_sizes(plan: StreamPlan, epochs: Plan) -> str:
    """The sizes that batches draw from, and whether ranks of a step draw the same."""
    step = next(step for step in plan.pipeline.steps if isinstance(step, SizedStep) and step.drawn)
    sizes = [f"{one[0]} x {one[1]}" if isinstance(one, tuple) else str(one) for one in step.drawn]
    what = "height x width" if step.sizes else "shorter sides"
    ranks = (
        f"the same, for up to {epochs.alike} ranks"
        if epochs.alike > 1
        else "each its own; balance = 8 has 8 ranks draw one"
    )
    return (
        f"{plan.name}: each batch draws one of {len(sizes)} sizes for its images in {step.field!r}, {what}: {', '.join(sizes)}; "
        f"batch 0 of epoch 0 has {sizes[epochs.size_of(Position(0, 0))]}; the ranks of a step draw {ranks}"
    )


def _slot(plan: StreamPlan, index: SourceIndex, epochs: Plan) -> str:
    """The memory of a batch, against that of padded rows."""
    stream = plan.config
    layout = slot_layout(stream, plan.columns, has_checksums=stream.has_checksums)
    layout = bucket_layout(layout, index.arrays, bucket_rate(stream))
    text = f"{plan.name}: a slot takes {round_bytes(layout.slot_bytes)}, for {counted(layout.rows, 'row')}"
    if layout.buckets:
        if layout.rooms is not None and not layout.rooms.field:
            return f"{text} of the largest size"
        full = place_fields(layout.fields, layout.rows).slot_bytes
        return (
            f"{text} at most: as much as a batch of any bucket needs; rows with room for the largest sample would take "
            f"{round_bytes(full)}"
        )
    packs = Packs.from_arrays(index.arrays)
    if packs is not None:
        padded = layout.slot_bytes * packs.parts // len(packs)
        return f"{text}; with one document in each row, those of a batch would take {round_bytes(padded)}"
    rows = BucketSizes(index.arrays).rows if epochs.row_counts is not None else None
    if rows is not None and rows.max() < layout.rows:
        text += f" of the largest sample: batch_size = {rows.max()} is enough for this budget"
    elif rows is not None:
        text += f" of the largest sample; batches fill {epochs.epoch_rows / epochs.steps / layout.rows:.0%} of them on average"
    return text


def _packed(plan: StreamPlan, index: SourceIndex, epochs: Plan) -> Iterator[str]:
    """How the rows of a packed stream are filled."""
    packs = packed_in(index.arrays)
    assert packs is not None, "the index has them"
    if isinstance(packs, PartPacks):
        for number, of_part in enumerate(packs.packs):
            yield from _packed_rows(plan, of_part, epochs, f"{plan.name}, sources[{number}]")
    else:
        yield from _packed_rows(plan, packs, epochs, plan.name)


def _packed_rows(plan: StreamPlan, packs: Packs | Cuts, epochs: Plan, name: str) -> Iterator[str]:
    """As ``_packed``, of one part of a mix, or of all."""
    pack = plan.pack
    assert pack is not None, "it is packed"
    if isinstance(packs, Cuts):
        documents, _costs = packs.documents_and_costs()
        yield (
            f"{name}: {packs.elements:,} elements of {pack.field!r} as one sequence, cut into {counted(len(packs), 'row')} "
            f"of {pack.length:,} ({counted(epochs.steps, 'batch')} an epoch), with {documents.min():,} to "
            f"{documents.max():,} documents in each; no room is empty but in the last row"
        )
        return
    empty = 1 - packs.elements / (len(packs) * pack.length)
    padded = 1 - packs.elements / (packs.parts * pack.length)
    least, most = packs.documents_of_a_pack
    yield (
        f"{name}: {packs.elements:,} elements of {pack.field!r}, {counted(packs.parts, 'document')}, in "
        f"{counted(len(packs), 'row')} of {pack.length:,} ({counted(epochs.steps, 'batch')} an epoch), "
        f"{least:,} to {most:,} in each and some {packs.parts * epochs.batch_size // len(packs):,} in a batch"
    )
    yield (
        f"{name}: {empty:.2%} of the room is empty; with one document in each row it would be {padded:.1%}, and "
        f"{packs.parts / len(packs):.1f} times as many rows"
    )


def _shuffled(plan: StreamPlan, order: BlockOrder, samples: int) -> str:
    """How far a shuffle of blocks moves samples that are neighbours in storage."""
    shuffle, window = plan.config.shuffle, order.window_samples
    assert isinstance(shuffle, BlockShuffle), "it has made the order"
    part = min(1.0, plan.config.batch_size / window)
    size = "" if shuffle.block_bytes is None else f", some {round_bytes(shuffle.block_bytes * shuffle.blocks)}"
    return (
        f"{plan.name}: {counted(order.blocks, 'block')} of neighbours, {samples / order.blocks:,.1f} samples each; "
        f"{shuffle.blocks} are open at a time, so {window:,.0f} samples{size} are shuffled together: neighbours in one block "
        f"get {(window + 1) / 3:,.0f} places apart on average, and {(samples + 1) / 3:,.0f} with shuffle = true; a batch takes "
        f"{part:.0%} of the samples of the open blocks"
    )


def _mixed(name: str, epochs: Plan, mixture: Mixture) -> Iterator[str]:
    """The shares of a mix from each moment on, and how long a pass of each source takes."""
    noun = "sample" if epochs.documents is None else "row"
    yield f"{name}: an epoch has {counted(epochs.samples, noun)}, and each source goes on where it was"
    rows = [("from", "share of each source", "epochs for a pass of each source")]
    for first in mixture.changes:
        (epoch, row), shares = divmod(first, epochs.samples), mixture.share_at(first)
        passes = [
            f"{size / share / epochs.samples:,.3g}" if share else "-"
            for size, share in zip(mixture.sizes, shares, strict=True)
        ]
        moment = f"epoch {epoch}, batch {-(-row // epochs.batch_size) * epochs.repeats}"
        rows.append((moment, " ".join(f"{share:.1%}" for share in shares), " ".join(passes)))
    yield from fitted(rows, terminal.columns())


def _drawn(name: str, epochs: Plan) -> str:
    """How often samples are drawn."""
    assert epochs.draws is not None, "it has weights"
    expected = epochs.draws.expected
    never = int((expected == 0).sum())
    return (
        f"{name}: an epoch has {counted(epochs.samples, 'row')}, drawn by weight from "
        f"{counted(epochs.source_samples, 'sample')}; each is drawn {expected[expected > 0].min():.3g} to "
        f"{expected.max():.3g} times in an epoch on average"
        + (f", and {counted(never, 'sample')} never" if never else "")
    )


class _Look(NamedTuple):
    """One sample: its row of the table, and what caches keep of it. 0 bytes: it is bad.

    ``kept_bytes``: in the stream's cache, or in one of pixels if it keeps no samples. ``views``: a
    row for each, if there are any.
    """

    row: Sequence[str]
    points_bytes: int = 0
    kept_bytes: int = 0
    is_scaled: bool = False
    views: Sequence[Sequence[str]] = ()


def _look(  # noqa: PLR0917  each is one thing that is known of the stream
    plan: StreamPlan,
    reader: Reader,
    pipeline: Pipeline,
    kept_files: KeptFiles,
    decode: Decode,
    epoch: int,
    sample: int,
) -> _Look:
    points = None
    try:
        values = reader.read(sample)
        file = values[decode.field]
        assert isinstance(file, memoryview), "it is decoded"
        if decode.field in plan.pipeline.cropped:
            points = found_points(file, probe_file(file))
            kept_files.points.begin({decode.field: points}, is_kept=False)
        groups = pipeline.plan_views(values, epoch, sample)
        images = [one.plan for group in groups for one in group.views]
        image = images[0] if images else pipeline.plan(values, epoch, sample)
    except (SampleUnreadable, SampleUndecodable) as error:
        return _Look((str(sample), reader.name(sample), "a bad sample", "", str(error)))
    assert image is not None, "there is a decode step"
    size = image.header.height, image.header.width
    is_scaled = decode.scale == "auto" and image.header.format == "JPEG"
    kept = kept_sizes(image.decoding.moves, *size, is_scaled=is_scaled)
    if plan.config.cache == "decoded":
        kept = {1: (image.geometry.height, image.geometry.width)}
    named = str(sample), reader.name(sample), f"{round_bytes(len(file))}, {_stored(image)}"
    return _Look(
        (*named, *(_grouped(groups) if groups else (_decoded(image), _then(image)))),
        len(points) if points is not None and has_points(points) else 0,
        _taken_bytes(values)
        if plan.config.cache_kind == "encoded"
        else sum(map(prod, kept.values())) * (1 if decode.color == "gray" else 3),
        any(one.decoding.factor not in kept for one in images or [image]),
        [_view(group, view) for group in groups for view in group.views],
    )


def _grouped(groups: Sequence[ViewGroup]) -> tuple[str, str]:
    """How the views of each scale are decoded, and why."""
    how, why = [], []
    for group in groups:
        count, at = counted(len(group.views), "view"), _box(group.box, group.factor)
        how.append(f"once for {count}: {at}" if group.is_together else f"{count} alone{_at(group.factor)}")
        if len(group.views) > 1:
            why.append(f"some {group.together_ns / 1e6:.2g} ms at once, {group.alone_ns / 1e6:.2g} ms one by one")
    return "; ".join(how), "; ".join(why)


def _view(group: ViewGroup, one: PlannedView) -> Sequence[str]:
    decoded = _box(one.plan.decoding.box, group.factor) if group.is_together else _decoded(one.plan)
    return one.view.label, decoded, _then(one.plan)


def _whole_images(name: str, steps: Sequence[StepOptions], decode: Decode) -> Iterator[str]:
    """Why a crop decides nothing about decoding: a step in front of it changes all pixels."""
    on_image = [step for step in steps if isinstance(step, ImageStep | Views) and step.field == decode.field]
    crop = next((place for place, step in enumerate(on_image) if isinstance(step, CropStep | Views)), 0)
    early = next((step.op for step in on_image[:crop] if type(step) in recolor_for.registry), None)
    if early is not None:
        yield (
            f'{name}: "{early}" is before "{on_image[crop].op}" and so of the whole image, which is decoded whole; '
            "behind it, it would be of the part alone, in less time"
        )


def _named(steps: Sequence[StepOptions]) -> str:
    return ", ".join(step.op for step in steps) or "nothing"


def _stored(plan: ImagePlan) -> str:
    header = plan.header
    turned = f", EXIF {header.orientation}" if header.orientation > 1 else ""
    return f"{header.format} {header.width} x {header.height}{turned}"


def _decoded(plan: ImagePlan) -> str:
    factor, box = plan.decoding.factor, plan.decoding.box
    height, width = -(-plan.header.height // factor), -(-plan.header.width // factor)
    if box == Cut(0, 0, height, width):
        return f"all{_at(factor)}: {width} x {height}"
    if plan.tiles is not None:
        how = f"cut from {plan.tiles[0]} of {plan.tiles[1]} tiles"
    else:
        how = "alone" if plan.is_cut_by_decoder else f"cut from {width} x {height}"
    return f"{_box(box, factor)}, {how}"


def _box(box: Cut, factor: int) -> str:
    return f"{box.width} x {box.height}{_at(factor)} from {box.left}, {box.top}"


def _at(factor: int) -> str:
    return f" at 1/{factor}" if factor > 1 else ""


def _then(plan: ImagePlan) -> str:
    turns = zip(_TURNS, plan.geometry.turn, strict=True)
    done = [*map(_move, plan.decoding.moves), *(name for name, is_made in turns if is_made)]
    return ", ".join(done) or "unchanged"


def _move(move: Move) -> str:
    size = f"{move.width} x {move.height}"
    match move:
        case Resampling():
            return f"scaled to {size} ({move.interpolation})"
        case Cut():
            return f"cut to {size} from {move.left}, {move.top}"
        case Padding():
            return f"padded to {size}"
        case Warp():
            return f"rotated by {move.degrees:.1f} degrees"
