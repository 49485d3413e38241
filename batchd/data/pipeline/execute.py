"""The steps of one stream: from the values of a source straight into one row of a batch.

Worker process.

    values  --stage-->  values  --stage-->  values  --store-->  row
                                    the last stage of an image writes into the row itself

Successive steps on one image are one stage, which decodes no more than they need and writes pixels
once; geometry after a step on pixels begins another, so each step sees what those before it made.
The steps of a view are stages like these; "views" and a "decode" directly before it are one.

A step that joins samples gets others, made by the stages before it, each with random numbers of its
own: those of a view of the sample, named by the way there ("/mosaic/2").

Invariant: the bytes written are a function of (steps, seed, epoch, sample, attempt, the source's
values) and the versions of what decodes them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import numpy as np

from batchd.data.pipeline.effects import IMAGE_DIMENSIONS, Columns, columns_behind, effect, items_before
from batchd.data.pipeline.image.decode import Decoder
from batchd.data.pipeline.image.geometry import SKIPPED, Cut, planner_for
from batchd.data.pipeline.image.jpeg_box import FileTask
from batchd.data.pipeline.image.opencv import Scratch
from batchd.data.pipeline.image.options import Decode, ImageStep, Resize
from batchd.data.pipeline.image.stages import ClipsStage, ImagePlan, ImageStage, can_join
from batchd.data.pipeline.join.options import JoinStep
from batchd.data.pipeline.media.clips import VideoStage, shrinks
from batchd.data.pipeline.media.options import DecodeVideo
from batchd.data.pipeline.media.stages import AudioStage
from batchd.data.pipeline.options import FieldStep, StepOptions, import_families
from batchd.data.pipeline.randomness import EPOCH_BITS, SampleRandom, view_number
from batchd.data.pipeline.sample_fields import columns_after
from batchd.data.pipeline.shapes.options import Interleave
from batchd.data.pipeline.stages import (
    EachStage,
    JoinStage,
    Row,
    RowsStage,
    Stage,
    Timings,
    make_rows_stage,
    make_stage,
)
from batchd.data.pipeline.views.effects import view_column
from batchd.data.pipeline.views.options import IMAGE, Views
from batchd.data.pipeline.views.stages import ViewGroup, ViewsStage, ViewSteps
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.image_header import ImageHeader
from batchd.data.samples.kept_files import FileHead, KeptFiles, KnownFile
from batchd.data.samples.values import Value, array_of
from batchd_wire.views import Array

import_families("effects")
import_families("stages")


_PICKS = 1 << 53
"""Numbers by which other samples are chosen."""


class OtherSamples(Protocol):
    """Gives a pipeline the samples that join one."""

    def others_of(self, epoch: int, whose: int, pick: int, near: int | None) -> Iterator[int]:
        """Say which sample a drawn ``pick`` is, and then those that stand in for it.

        ``whose``: the sample that it joins. ``near``: see ``JoinStep``.
        """

    def read_other(self, epoch: int, sample: int) -> Mapping[str, Value]:
        """Return what ``make`` takes. Raises ``SampleUndecodable`` and ``SampleUnreadable``."""

    def other_is_bad(self, sample: int, error: SampleUndecodable | SampleUnreadable) -> None:
        """Take note of a bad one."""

    def values_stay(self) -> bool:
        """Whether the values that were read last stay while others are read."""

    def others_end(self) -> None:
        """Go on with the sample that they join."""

    def shown_name(self, sample: int) -> str:
        """Return the name of a sample for users."""


class Pipeline:
    """The steps of one stream, ready to run on sample after sample, in one thread."""

    def __init__(  # noqa: PLR0913  each is one thing that all samples share
        self,
        columns: Sequence[Column],
        steps: Sequence[StepOptions],
        seed: int,
        *,
        has_rows: bool = True,
        timings: Timings | None = None,
        kept: KeptFiles | None = None,
        others: OtherSamples | None = None,
        measures: bool = False,
    ) -> None:
        """``timings`` measures each step; the caller of ``run`` starts it.

        ``kept``: what a cache keeps of the files of the sample that is made. ``others``: gives what
        joins a sample, if a step does that. ``measures``: only lengths count, so images whose sizes
        alone do are not decoded.
        """
        self.columns = columns_after(columns, steps)
        """The columns of a sample after the steps, by name."""
        self._scalars = {
            name: np.dtype(column.dtype).type if column.kind == "array" and not column.shape else None
            for name, column in self.columns.items()
        }
        """The type of the values that fit into the field as they are, where it is one number."""
        self._random = SampleRandom(seed)
        self._timings = timings or Timings()
        stages = list(_stages(columns, steps, self._timings, kept, has_rows=has_rows, measures=measures))
        self._stages = [(stage, part) for stage, _on_rows, part in stages]
        self.joins = _joins(steps, columns, self._stages)
        """The stages that join other samples to one."""
        self.videos = [] if self.joins else list(_announced(steps, self._stages))
        """The stages that are told which clips samples want that are made later."""
        for video in self.videos:
            video.share = len(self.videos)
        self._ahead = SampleRandom(seed)
        self._others = others
        for (stage, _part), (behind, _its) in pairwise(self._stages):
            if isinstance(stage, JoinStage):
                stage.passes_canvas = isinstance(behind, ImageStage) and behind.takes_canvas(stage.step.field)
                if others is not None and not stage.needed:
                    stage.values_stay = others.values_stay
        self._decoding = next(
            (stage for stage, _part in self._stages if isinstance(stage, ImageStage | ViewsStage)), None
        )
        self._storing = self._timings.part("store") if has_rows else None
        self._read = [column for column in columns if column.is_fixed]
        self._rows_stages = [on_rows for _stage, on_rows, _part in stages]
        self.runs_rows = has_rows and len(self._read) == len(columns) and None not in self._rows_stages
        """True if ``run_rows`` makes what ``run`` makes."""

    def note_draws(self) -> list[dict[str, object]]:
        """Have the random steps note what they draw; the list has those of the last sample."""
        self._random.draws = []
        return self._random.draws

    def run(self, values: Mapping[str, Value], epoch: int, sample: int, attempt: int, row: Row) -> None:
        """Make the fields of ``sample`` from the values of its source and write them into ``row``.

        ``attempt`` is 0, or counts the samples that were tried in this one's place. Raises
        ``SampleUndecodable``, and then leaves the fields in no particular state.
        """
        assert self._storing is not None, "a pipeline with rows"
        self._store(self.make(values, epoch, sample, attempt, row), row)
        self._timings.lap(self._storing)

    def _store(self, made: Mapping[str, Value], row: Row) -> None:
        for name, column in self.columns.items():
            value, out = made[name], row[name]
            if type(value) is self._scalars[name]:
                out[...] = value
            elif value is not out:
                array = array_of(column, value)
                if array.shape != out.shape:  # its bucket has another size
                    raise SampleUndecodable(
                        f"{name!r} is {array.dtype}{list(array.shape)}, and those of its batch are {list(out.shape)}"
                    )
                out[...] = array

    @property
    def of_files(self) -> ImageStage | None:
        """The stage that is all of it and makes rows of files, several in one call; else None."""
        stage = self._stages[0][0] if len(self._stages) == 1 and self._storing is not None else None
        return stage if isinstance(stage, ImageStage) and stage.makes_files else None

    def file_task(  # noqa: PLR0913, PLR0917  each is one thing that a row is made of
        self, stage: ImageStage, file: KnownFile, known: Mapping[str, Value], epoch: int, sample: int, row: Row
    ) -> FileTask | None:
        """Plan the image of a sample, and write its other fields, which are ``known``.

        ``stage`` is ``of_files``. None: ``run`` makes the sample. Raises ``SampleUndecodable``.
        """
        self._random.start(epoch, sample, 0)
        task = stage.file_task(file, self._random, row)
        if task is not None:
            self._store({**known, stage.field: row[stage.field]}, row)
        return task

    def run_rows(self, read: Callable[[Sequence[Row]], None], chunks: Sequence[Row], reading: int) -> None:
        """Make the samples of ``chunks`` at once, ``[samples, *shape]``. Only if ``runs_rows``.

        ``read`` writes the values of the source, which counts as the part ``reading``. Raises what
        it raises, and ``SampleUndecodable``.
        """
        assert self._storing is not None, "a pipeline with rows"
        made: list[dict[str, Array]] = [{} for _chunk in chunks]
        for values, rows in zip(made, chunks, strict=True):
            count = len(next(iter(rows.values())))
            for column in self._read:
                is_kept = self.columns.get(column.name) is column
                values[column.name] = (
                    rows[column.name] if is_kept else np.empty((count, *column.fixed_shape), column.dtype)
                )
        read(made)
        self._timings.lap(reading)
        for stage, (_stage, part) in zip(self._rows_stages, self._stages, strict=True):
            assert stage is not None, "it runs rows"
            for values, rows in zip(made, chunks, strict=True):
                stage(values, rows)
            self._timings.lap(part)
        for values, rows in zip(made, chunks, strict=True):
            for name in self.columns:
                if values[name] is not rows[name]:
                    rows[name][...] = values[name]
        self._timings.lap(self._storing)

    def make(
        self, values: Mapping[str, Value], epoch: int, sample: int, attempt: int, row: Row = MappingProxyType({})
    ) -> dict[str, Value]:
        """The values of ``sample`` after all steps; a pipeline without rows needs no ``row``."""
        made = dict(values)
        self._random.start(epoch, sample, attempt)
        if self.joins:
            self._run(made, self._stages, row, epoch, "")
            return made
        for stage, part in self._stages:
            assert not isinstance(stage, JoinStage)
            stage(made, self._random, row)
            self._timings.lap(part)
        return made

    def announce(self, values: Mapping[str, Value], epoch: int, sample: int) -> bool:
        """Take note of what a sample needs that is made later; paired with ``forget``.

        So that what several of them decode is decoded once. False if this is of no use.
        """
        self._ahead.start(epoch, sample, 0)
        # each draws its numbers
        told = [stage.announce(values, self._ahead) for stage in self.videos]
        return any(told)

    def forget(self, epoch: int, sample: int) -> None:
        """A sample was made, or will not be."""
        self._ahead.start(epoch, sample, 0)
        for stage in self.videos:
            stage.forget(self._ahead.place)

    @property
    def announces(self) -> bool:
        """True if ``announce`` may be of use."""
        return bool(self.videos)

    def _run(
        self,
        made: dict[str, Value],
        stages: Sequence[tuple[Stage | JoinStage, int]],
        row: Row,
        epoch: int,
        way: str,
    ) -> list[int]:
        """Run stages that may join other samples, and say which those were."""
        joined: list[int] = []
        for stage, part in stages:
            if isinstance(stage, JoinStage):
                joined += self._join(stage, made, row, epoch, f"{way}/{stage.name}")
            else:
                stage(made, self._random, row)
            self._timings.lap(part)
        return joined

    def _join(self, stage: JoinStage, made: dict[str, Value], row: Row, epoch: int, way: str) -> list[int]:
        """Join the samples that are drawn to one."""
        assert self._others is not None, "it has been told of them"
        random, joined = self._random, list[int]()
        notes, mark = random.draws, random.mark()
        drew = SKIPPED
        random.draws = None
        try:
            acts, picks, numbers = self._drawn(stage, epoch, way)
            if acts:
                own(made, stage.joined)
                drew = stage.join(made, self._others_of(stage, picks, row, epoch, way, joined), numbers)
                self._others.others_end()
                drew = {"with": [[sample, self._others.shown_name(sample)] for sample in joined], **drew}
            else:
                stage.alone(made)
        finally:
            random.draws = notes
            random.return_to(mark)
        if notes is not None and stage.step.is_random:
            notes.append(drew)
        return joined

    def _drawn(self, stage: JoinStage, epoch: int, way: str) -> tuple[bool, list[int], list[float]]:
        """What a stage draws: whether it acts, then its picks, and its other numbers."""
        step, random = stage.step, self._random.random
        self._random.start_view(view_number(way, 0))
        is_over = step.until_epoch is not None and epoch % (1 << EPOCH_BITS) >= step.until_epoch
        if not random() < step.probability or is_over:
            return False, [], []
        picks = [int(random() * _PICKS) for _ in range(step.others)]
        return True, picks, [random() for _ in range(stage.numbers)]

    def _others_of(  # noqa: PLR0913, PLR0917  each is one thing that others are made with
        self, stage: JoinStage, picks: Sequence[int], row: Row, epoch: int, way: str, joined: list[int]
    ) -> Iterator[dict[str, Value]]:
        """Make one sample after the other, but for ``picks`` without a good one."""
        assert self._others is not None, "it has been told of them"
        sized = {name: row[name] for name in stage.joined & row.keys()}  # nothing is written there
        whose, near = self._random.sample, stage.step.near
        for place, pick in enumerate(picks):
            for attempt, sample in enumerate(self._others.others_of(epoch, whose, pick, near)):
                try:
                    made = dict(self._others.read_other(epoch, sample))
                    self._random.start_view(view_number(f"{way}/{place}", attempt))
                    further = self._run(made, stage.needed, sized, epoch, f"{way}/{place}")
                except (SampleUndecodable, SampleUnreadable) as error:
                    self._others.other_is_bad(sample, error)
                    continue
                joined += [sample, *further]
                yield made
                break

    def picks(self, epoch: int, sample: int) -> list[tuple[int, int | None]]:
        """The picks of all that joins a sample, to be read ahead, each with its ``near``."""
        self._random.start(epoch, sample, 0)
        found: list[tuple[int, int | None]] = []
        ways: list[tuple[Sequence[tuple[Stage | JoinStage, int]], str]] = [(self._stages, "")]
        for stages, way in ways:
            for stage in (stage for stage, _part in stages if isinstance(stage, JoinStage)):
                _acts, picks, _numbers = self._drawn(stage, epoch, f"{way}/{stage.name}")
                found += [(pick, stage.step.near) for pick in picks]
                ways += [(stage.needed, f"{way}/{stage.name}/{place}") for place in range(len(picks))]
        return found

    def plan(self, values: Mapping[str, Value], epoch: int, sample: int) -> ImagePlan | None:
        """Plan the first stage on an image. Raises ``SampleUndecodable``; None if none decodes."""
        self._random.start(epoch, sample, 0)
        return self._decoding.plan(values, self._random) if isinstance(self._decoding, ImageStage) else None

    def plan_views(self, values: Mapping[str, Value], epoch: int, sample: int) -> list[ViewGroup]:
        """Plan the first stage on an image if it makes views. Raises ``SampleUndecodable``."""
        self._random.start(epoch, sample, 0)
        stage = self._decoding
        return stage.groups(values[stage.field], self._random) if isinstance(stage, ViewsStage) else []

    def part(
        self, epoch: int, sample: int, field: str, head: FileHead, points: memoryview | bytes
    ) -> tuple[int, int] | None:
        """(first, end) of the bytes of ``field``'s file that ``make`` reads; None: all of them."""
        stage = self._stages[0][0] if self._stages else None
        if not isinstance(stage, ImageStage | ViewsStage):
            return None
        self._random.start(epoch, sample, 0)
        return stage.part(field, head, points, self._random)

    def boxes(self, header: ImageHeader, epoch: int, sample: int) -> list[tuple[int, Cut]]:
        """1/scale and box of what ``make`` decodes at first, of a file with this header."""
        stage = self._stages[0][0]
        if not isinstance(stage, ImageStage | ViewsStage):
            return []
        self._random.start(epoch, sample, 0)
        try:
            return stage.boxes(header, self._random)
        except SampleUndecodable:
            return []

    def keep(self, values: Mapping[str, Value], row: Row) -> None:
        """Write the fields of a bad sample that no step changes, and its filling elsewhere."""
        for name, column in self.columns.items():
            row[name][...] = column.fill
            if name in values and not column.made_by:
                row[name][...] = array_of(column, values[name])


def _stages(  # noqa: PLR0913  each is one thing that all samples share
    columns: Sequence[Column],
    steps: Sequence[StepOptions],
    timings: Timings,
    kept: KeptFiles | None,
    *,
    has_rows: bool,
    decoder: Decoder | None = None,
    measures: bool = False,
) -> Iterator[tuple[Stage | JoinStage, RowsStage | None, int]]:
    """The stages, for one sample and for many, and the number of the part that the lap times.

    ``decoder``: see ``ImageStage``.
    """
    made: Columns = {column.name: column for column in columns}
    sized = next((column for column in columns_after(columns, steps).values() if column.size_axes), None)
    runs = _runs(steps)
    for place, run in enumerate(runs):
        before = made
        for step in run:
            made = columns_behind(step, made)
        on_image = [step for step in run if isinstance(step, ImageStep) and not isinstance(step, JoinStep)]
        rest = [step for later in runs[place + 1 :] for step in later]
        if isinstance(run[-1], Views):
            decode = run[0] if isinstance(run[0], Decode) else None
            writes = _untouched(run[-1].into, made, rest) if has_rows else frozenset[str]()
            views = _views_stage(run[-1], decode, before, writes, timings, kept)
            yield views, None, views.last_part
            continue
        items = items_before(run[0], before)
        only_sizes = measures and _only_sizes_count(run, rest)
        if items is not None:
            each, part = _each_stage(run, items, timings, only_sizes=only_sizes)
            yield each, None, part
            continue
        if not on_image:
            alone = make_stage(run[0], before, made)
            part = timings.part(run[0].op)
            if isinstance(alone, AudioStage | VideoStage):
                _prepare_media(alone, kept, partial(timings.lap, part), rest)
            yield alone, make_rows_stage(run[0]), part
            continue
        writes = _written_by(made[on_image[0].field], made, rest) if has_rows else frozenset[str]()
        clips = _clips_stage(on_image, before, made, writes, timings)
        if clips is not None:
            yield clips
            continue
        stage = ImageStage(on_image, before, made, writes, timings, kept, decoder, sized)
        if only_sizes:
            yield partial(_make_size, stage, made[stage.field]), None, stage.last_part
            continue
        yield stage, stage.on_rows, stage.last_part


def _prepare_media(
    stage: AudioStage | VideoStage, kept: KeptFiles | None, lap: Callable[[], None], rest: Sequence[StepOptions]
) -> None:
    """Tell a stage what is known of files, and of a video what is done to its frames behind it."""
    stage.facts = None if kept is None else kept.facts
    if isinstance(stage, VideoStage):
        stage.lap = lap
        for step in rest[:1]:
            stage.is_streaming = isinstance(step, ImageStep) and step.field == stage.into
            stage.resize = step if stage.is_streaming and isinstance(step, Resize) and shrinks(step) else None


def _only_sizes_count(run: Sequence[StepOptions], rest: Sequence[StepOptions]) -> bool:
    """True if ``interleave`` alone reads the images of these steps, so that headers suffice."""
    images = [step for step in run if isinstance(step, ImageStep)]
    field = images[0].field if images else ""
    readers = [step for step in rest if step.touches is None or field in step.touches]
    is_told = bool(images) and not any(step.may_resize for step in images)
    return is_told and bool(readers) and all(isinstance(step, Interleave) for step in readers)


def _make_size(stage: ImageStage, made: Column, values: dict[str, Value], random: SampleRandom, row: Row) -> None:
    """Replace an image by a black one of the size that its stage would give it."""
    geometry = stage.planned(stage.look(values[stage.field]), random, row).geometry
    channels = [length or 0 for length in made.shape[2:]]
    values[stage.field] = np.broadcast_to(np.zeros((), made.dtype), (geometry.height, geometry.width, *channels))


def _each_stage(
    run: Sequence[StepOptions], items: Columns, timings: Timings, *, only_sizes: bool
) -> tuple[EachStage, int]:
    """The stage that does the steps to each value of a list, and its part; ``items``: before it."""
    after = items
    for step in run:
        after = effect(step, after)
    made = [column for name, column in after.items() if column is not items.get(name)]
    ops = [step.op for step in run if step.is_random]
    images = [step for step in run if isinstance(step, ImageStep)]
    if not images:
        (step,) = run
        assert isinstance(step, FieldStep), "it is done to a field"
        stage = make_stage(step, items, after)
        assert not isinstance(stage, JoinStage), "what joins samples is not for each"
        return EachStage(step.field, stage, made, ops, in_place=False), timings.part(step.op)
    field = images[0].field
    in_place = after[field].is_fixed and not only_sizes
    on_image = ImageStage(images, items, after, frozenset({field} if in_place else ()), timings)
    each = partial(_make_size, on_image, after[field]) if only_sizes else on_image
    return EachStage(field, each, made, ops, in_place=in_place), on_image.last_part


def steps_before_joins(steps: Sequence[StepOptions]) -> int:
    """Count the steps that make the same of a sample for all that it joins near it; 0 if none do.

    They are whole stages, so what they make alone is what they make with those behind them.
    """
    count = 0
    for run in _runs(steps):
        if any(isinstance(step, JoinStep) for step in run):
            return count if any(isinstance(step, JoinStep) and step.near for step in steps) else 0
        if any(step.is_random or not step.is_cacheable for step in run):
            return 0
        count += len(run)
    return 0


def _joins(
    steps: Sequence[StepOptions], columns: Sequence[Column], stages: Sequence[tuple[Stage | JoinStage, int]]
) -> list[JoinStage]:
    """The stages that join samples; each is told its name, and the stages that it needs."""
    joins: list[JoinStage] = []
    runs = _runs(steps)
    for place, (stage, _part) in enumerate(stages):
        if not isinstance(stage, JoinStage):
            continue
        kind = sum(one.step.op == stage.step.op for one in joins)
        stage.name = f"{stage.step.op}{kind or ''}"
        before = columns_after(columns, [step for run in runs[:place] for step in run])
        stage.joined = frozenset({stage.step.field, *(name for _role, name in before[stage.step.field].followers)})
        needed, kept = set(stage.joined), []
        for number in reversed(range(place)):
            changes = [step.changes for step in runs[number]]
            if any(one is None or one & needed for one in changes):
                kept.append(stages[number])
                for step in runs[number]:
                    needed |= before.keys() if step.touches is None else step.touches
        stage.needed = kept[::-1]
        joins.append(stage)
    return joins


def _announced(steps: Sequence[StepOptions], stages: Sequence[tuple[Stage | JoinStage, int]]) -> Iterator[VideoStage]:
    """The stages of videos whose clips are known before the steps in front of them are done."""
    before: list[StepOptions] = []
    for run, (stage, _part) in zip(_runs(steps), stages, strict=True):
        if isinstance(stage, VideoStage):
            needs = {stage.step.field, stage.step.start_field}
            draws_first = all(isinstance(step, DecodeVideo) for step in before)
            if all(step.changes is not None and needs.isdisjoint(step.changes) for step in before) and (
                draws_first or not stage.step.is_random
            ):
                yield stage
        before += run


def own(values: dict[str, Value], joined: AbstractSet[str] = frozenset()) -> None:
    """Copy the values that are gone when another sample is read, but for those that it joins."""
    for name in values.keys() - joined:
        value = values[name]
        if isinstance(value, memoryview):
            values[name] = memoryview(bytes(value))
        elif isinstance(value, np.ndarray):
            values[name] = value.copy()
        elif isinstance(value, list):
            values[name] = [one.copy() if isinstance(one, np.ndarray) else one for one in value]


def _clips_stage(
    steps: Sequence[ImageStep], before: Columns, after: Columns, writes: frozenset[str], timings: Timings
) -> tuple[Stage, None, int] | None:
    """The stage of steps on a field of clips; None for one of images."""
    field = steps[0].field
    front = len(before[field].shape) - IMAGE_DIMENSIONS
    if before[field].kind != "array" or front < 1:
        return None
    old, new = (
        {**columns, field: replace(columns[field], shape=columns[field].shape[front:])} for columns in (before, after)
    )
    stage = ImageStage(steps, old, new, writes, timings)
    return ClipsStage(stage, after[field], writes=field in writes), None, stage.last_part


def _runs(steps: Sequence[StepOptions]) -> list[list[StepOptions]]:
    """Group the steps that run together: successive ones on the same image, in one stage each."""
    runs: list[list[StepOptions]] = []
    for step in steps:
        last = runs[-1][-1] if runs else None
        if isinstance(step, Views):
            is_one = isinstance(last, Decode) and last.field == step.field and len(runs[-1]) == 1
        else:
            is_one = isinstance(step, ImageStep) and isinstance(last, ImageStep) and can_join(last, step)
        if is_one:
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def _views_stage(  # noqa: PLR0913, PLR0917  each is one thing that all samples share
    step: Views,
    decode: Decode | None,
    before: Columns,
    writes: frozenset[str],
    timings: Timings,
    kept: KeptFiles | None,
) -> ViewsStage:
    """The stage of the views, each with the stages of its steps, and with the ``decode``."""
    decoder = None if decode is None else Decoder(decode, Scratch(), kept)
    first = [] if decode is None else [replace(decode, field=IMAGE)]
    source = before[step.field]
    fields = []
    with timings.shared():
        for name, view in step.into.items():
            steps = [*first, *view.steps]
            made = list(_stages([replace(source, name=IMAGE)], steps, timings, None, has_rows=True, decoder=decoder))
            stages = [
                (stage, run[0].op, part)
                for (stage, _rows, part), run in zip(made, _runs(steps), strict=True)
                if not isinstance(stage, JoinStage)
            ]
            random = [one for one in view.steps if one.is_random]
            draws_later = not all(map(planner_for, random))
            column = view_column(replace(source, name=IMAGE), name, replace(view, steps=tuple(steps)))
            ops = [one.op for one in random]
            fields.append(ViewSteps(name, view.count, column, stages, ops, draws_later, name in writes))
        return ViewsStage(step.field, fields, decoder, timings)


def _written_by(image: Column, after: Columns, rest: Sequence[StepOptions]) -> frozenset[str]:
    """The fields that an image's stage may write into the row: no later step changes them."""
    if image.name not in _unchanged([image.name], rest):
        return frozenset()
    masks = (name for role, name in image.followers if role == "mask" and name in after)
    return _untouched([image.name, *masks], after, rest)


def _untouched(names: Iterable[str], after: Columns, rest: Sequence[StepOptions]) -> frozenset[str]:
    """Those that are fields of a batch, and that no later step changes."""
    return frozenset(name for name in _unchanged(names, rest) if after[name].field is not None)


def _unchanged(names: Iterable[str], rest: Sequence[StepOptions]) -> frozenset[str]:
    """Those of the fields that no later step changes; what reads all fields may change them."""
    changed = [step.touches and step.changes for step in rest]
    return frozenset(name for name in names if not any(fields is None or name in fields for fields in changed))
