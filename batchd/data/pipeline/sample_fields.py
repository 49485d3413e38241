"""The fields of a batch, and the problems of a list of steps. Daemon, workers and ``batchd check``.

Decides from the configuration alone, before any sample is seen; imports neither cv2 nor simplejpeg.

Invariant: for steps without problems, ``sample_fields`` is exactly what ``execute.Pipeline``
writes.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from batchd.data.pipeline import effects
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.fields.options import Pick
from batchd.data.pipeline.image.options import (
    BoxForm,
    ChanceStep,
    CropToBucket,
    Decode,
    Follow,
    ImageStep,
    SizedStep,
)
from batchd.data.pipeline.join.options import SAMPLES_MAX, JoinStep, samples_joined
from batchd.data.pipeline.media.options import DecodeAudio, DecodeVideo
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.shapes.options import Pack
from batchd.data.pipeline.sound.options import MelStep, Mfcc, SpectrumStep
from batchd.data.pipeline.step_files import Digests, check_files
from batchd.data.pipeline.text.options import Chat, Tokenize
from batchd.data.pipeline.views.options import Views
from batchd.data.samples.columns import Column, Following
from batchd.errors import KeyPath
from batchd.runtime.suggestions import nearest
from batchd_wire.fields import FIELDS_MAX, Field, Overlay
from batchd_wire.record import frozen

SAMPLE_FIELDS_MAX = FIELDS_MAX - 3
"""Of what a source and its steps make, besides ``index``, ``valid`` and the checksums."""
LARGEST_SIDE, LARGEST_LENGTH = 512, 128
"""Proposed room of a sample, in pixels and in elements."""
OTHERS_MAX = 4
"""Fields that are proposed in the place of one that is not there."""


def sample_fields(
    columns: Sequence[Column], steps: Sequence[StepOptions], on_error: str, drawn: Sequence[Field] = ()
) -> tuple[Field, ...]:
    """The fields of one sample: those of valid steps, ``index``, and ``valid`` for "mask".

    ``drawn``: of the numbers by which a trainer changes a row, which end the fields.
    """
    fields = [field for column in columns_after(columns, steps).values() if (field := column.field)]
    pack = pack_of(steps)
    fields.append(Field(effects.INDEX, "int64", () if pack is None else (pack.documents_max,)))
    if on_error == "mask":
        fields.append(Field(effects.VALID, "bool", ()))
    return (*fields, *drawn)


def pack_of(steps: Sequence[StepOptions]) -> Pack | None:
    """The step that fills a row with several samples; None if each sample has a row."""
    return next((step for step in steps if isinstance(step, Pack)), None)


def bucket_crop_of(steps: Sequence[StepOptions]) -> CropToBucket | None:
    """The step by whose sizes the images of a batch are chosen; None if none does."""
    return next((step for step in steps if isinstance(step, CropToBucket)), None)


def drawn_sizes(steps: Sequence[StepOptions]) -> int:
    """How many sizes a batch draws from: as many as any step has, or 1."""
    return max((len(step.drawn) for step in steps if isinstance(step, SizedStep)), default=0) or 1


def columns_after(columns: Sequence[Column], steps: Sequence[StepOptions]) -> effects.Columns:
    """The columns that the steps make of those of a source. Raises ``StepInvalid``."""
    made: effects.Columns = {column.name: column for column in columns}
    for step in steps:
        made = _after(step, made)
    return made


def overlays_of(columns: Sequence[Column], steps: Sequence[StepOptions], digests: Digests) -> tuple[Overlay, ...]:
    """What follows the images of a batch, to be drawn over them, whose tokens are in it, and sound.

    ``digests``: of the tokenizers.
    """
    made = columns_after(columns, steps)
    forms = {step.field: (step.form, step.relative) for step in steps if isinstance(step, BoxForm)}
    drawn = [
        Overlay(image.name, role, name, *forms.get(name, ("xyxy", False)))
        for image in made.values()
        for role, name in image.followers
        if name in made
    ]
    for step in steps:
        if isinstance(step, Chat | Tokenize) and step.to in made:
            file, mask = (step.tokenizer, step.mask) if isinstance(step, Chat) else (step.file, "")
            drawn.append(Overlay(step.to, "tokens", mask if mask in made else "", f"{digests[file]} {file}"))
    return (*drawn, *(sound for sound in _sounds_of(steps) if sound.image in made))


def _sounds_of(steps: Sequence[StepOptions]) -> list[Overlay]:
    """The fields that are sound in the end: see ``Overlay``."""
    rates: dict[str, int] = {}
    found: dict[str, Overlay] = {}
    for step in steps:
        match step:
            case DecodeAudio(field=field, rate=rate) | DecodeVideo(audio=field, audio_rate=rate) if field:
                rates[field], found[field] = rate, Overlay(field, "waveform", "", f"{rate}")
            case SpectrumStep(field=field):
                rate = step.rate if isinstance(step, MelStep) else rates.get(field, 0)
                low, high = (step.low_hz, step.end_hz) if isinstance(step, MelStep) else (0.0, rate / 2)
                bounds = "0 0" if isinstance(step, Mfcc) else f"{low:g} {high:g}"
                power = " power" if step.log == "none" else ""
                found[field] = Overlay(field, "spectrogram", "", f"{rate / step.hop:g} {bounds}{power}")
    return list(found.values())


def reserved_names(columns: Sequence[Column]) -> list[str]:
    """Report the columns of a source that have reserved names."""
    return [
        f"the source has a field {column.name!r}, which is what every batch calls something else; give it another name"
        for column in columns
        if column.name in effects.RESERVED
    ]


@frozen
class StepProblem:
    """For users; ``key``: the step's number, and its option; empty for the whole pipeline."""

    text: str
    key: KeyPath = ()


class StepCheck:
    """Checks the steps of one pipeline in order; only their files if the ``columns`` are unknown.

    Reports no problem that follows from an earlier one. Reads files, so run it once.
    """

    def __init__(self, columns: Sequence[Column] | None) -> None:
        self._problems: list[StepProblem] = []
        self._columns: effects.Columns = {column.name: column for column in columns or ()}
        self._is_unknown = columns is None
        """Whether the columns of a sample are unknown by now."""
        self._wrong: set[str] = set()
        """Fields with a reported problem: each later step on them would report it again."""
        self._removed_by: dict[str, str] = {}
        """The step that removed each removed field."""
        self._earlier: list[StepOptions] = []

    def check_step(self, place: int, step: StepOptions) -> None:
        """Check the next step, ``pipeline[place]``."""
        files = check_files(step)
        self._problems += [StepProblem(text, (place, *key)) for key, text in files]
        if files or self._is_wrong(step.touches):
            self._mark_wrong(step.changes)
            return
        before = self._columns
        try:
            if isinstance(step, Pack):
                _check_lengths(step, self._earlier)
            if isinstance(step, Follow):
                _check_stored(step, self._earlier)
            _check_joined(step, self._earlier)
            self._columns = _after(step, before)
        except effects.StepInvalid as problem:
            self._report(place, problem, step)
            self._mark_wrong(step.changes)
            if isinstance(problem, effects.NoSuchField):
                self._mark_wrong(self._likely_fields(step, problem))
        self._earlier.append(step)
        self._removed_by |= dict.fromkeys(before.keys() - self._columns.keys(), f'pipeline[{place}], "{step.op}",')

    def skip_step(self, place: int, op: str, field: str | None, touches: frozenset[str] | None) -> None:
        """Check only the field of the next step, whose options have errors already."""
        if field is not None and not self._is_wrong(frozenset({field})) and field not in self._columns:
            self._report(place, effects.NoSuchField(f'"{op}" is done to {field!r}', ("field",), [field], self._columns))
        self._mark_wrong(touches)
        for name in (touches or frozenset()) - self._columns.keys():
            meant = nearest(name, self._columns)
            self._mark_wrong(frozenset() if meant is None else frozenset({meant}))

    def finish(self) -> list[StepProblem]:
        """Return all problems, after the last step: the remaining columns must fit a batch."""
        if self._is_unknown:
            return self._problems
        count = len(self._columns)
        if count > SAMPLE_FIELDS_MAX and not self._wrong:
            text = f'a sample has {count} fields by then, and a batch holds {SAMPLE_FIELDS_MAX} at most; "drop" leaves some out'
            self._problems.append(StepProblem(text))
        return self._problems + [
            StepProblem(_not_fixed(column))
            for column in self._columns.values()
            if column.field is None and column.name not in self._wrong
        ]

    def _report(self, place: int, problem: effects.StepInvalid, step: StepOptions | None = None) -> None:
        text = str(problem)
        if isinstance(problem, effects.NoSuchField):
            taken = [
                f"{self._removed_by[name]} took {name!r} away" for name in problem.names if name in self._removed_by
            ]
            others = self._alternatives(step, problem) if step is not None else []
            if taken:
                text = f"{problem.reason}; {' and '.join(taken)}"
            elif others:
                text = f"{problem.reason}; write field = {' or field = '.join(map(json.dumps, others))}"
        self._problems.append(StepProblem(text, (place, *problem.key)))

    def _alternatives(self, step: StepOptions, problem: effects.NoSuchField) -> list[str]:
        """Return the few fields that accept a step whose ``field`` is not similar to any."""
        if problem.key != ("field",) or nearest(problem.names[0], self._columns) is not None:
            return []
        others = [name for name in self._columns if self._accepts(step, name)]
        return others if len(others) <= OTHERS_MAX else []

    def _likely_fields(self, step: StepOptions, problem: effects.NoSuchField) -> frozenset[str]:
        """Return the fields that unknown names may mean: do not report later steps on these."""
        near = {nearest(name, self._columns) for name in problem.names}
        if None not in near:
            return frozenset(filter(None, near))
        if problem.key != ("field",):
            return frozenset(self._columns)
        return frozenset(name for name in self._columns if self._accepts(step, name))

    def _accepts(self, step: Any, name: str) -> bool:
        try:
            _after(replace(step, field=name), self._columns)
        except ValueError:  # StepInvalid is one, and so is what a step says of its own options
            return False
        return True

    def _is_wrong(self, touches: frozenset[str] | None) -> bool:
        return self._is_unknown or bool(self._wrong if touches is None else self._wrong & touches)

    def _mark_wrong(self, touches: frozenset[str] | None) -> None:
        if touches is None:
            self._is_unknown = True
        else:
            self._wrong |= touches


def _check_lengths(pack: Pack, steps: Sequence[StepOptions]) -> None:
    """Raise ``StepInvalid`` if a sample may have another length in each epoch."""
    if (op := drawing_step(steps, pack.field)) is not None:
        drawing = next(step for step in reversed(steps) if step.op == op)
        raise effects.StepInvalid(
            f'"pack" plans the rows of all epochs by one length of each sample, and "{op}" draws another length of '
            f"{pack.field!r} each time; {_other_way(drawing)}"
        )


def _other_way(drawing: StepOptions) -> str:
    """How a step draws no shape, for people."""
    if isinstance(drawing, SizedStep):
        return "give it one size for all batches"
    if isinstance(drawing, ImageStep):
        return 'a "resize" with size behind it gives all images one shape'
    if isinstance(drawing, Pick):
        return 'which = "first" takes the same one each time'
    if isinstance(drawing, Call):
        return "random = false promises the same each time, and so do outputs that have one shape"
    return "leave it out"


def _check_stored(follow: Follow, steps: Sequence[StepOptions]) -> None:
    """Raise ``StepInvalid`` if the orientation of a file is not known any more at ``follow``."""
    decode = steps[-1] if steps else None
    if follow.annotated == "stored" and not (isinstance(decode, Decode) and decode.field == follow.field):
        raise effects.StepInvalid(
            '"follow" with annotated = "stored" comes directly after "decode", which turns the image upright',
            ("annotated",),
        )


def _check_joined(step: StepOptions, steps: Sequence[StepOptions]) -> None:
    """Raise ``StepInvalid`` for a row that many samples join, or that is a pack of such samples."""
    joins = [one for one in (*steps, step) if isinstance(one, JoinStep)]
    if joins and isinstance(step, Pack):
        raise effects.StepInvalid(
            f'"pack" puts samples into rows by themselves, and "{joins[-1].op}" joins several to one'
        )
    if isinstance(step, JoinStep) and any(isinstance(one, Views) for one in steps):
        raise effects.StepInvalid(
            f'"{step.op}" joins samples, and "views" makes parts of one: put it in front of "views"'
        )
    if isinstance(step, JoinStep) and (count := samples_joined(joins)) > SAMPLES_MAX:
        raise effects.StepInvalid(
            f"a row would be made of {count} samples by then, and {SAMPLES_MAX} are the most: each step takes "
            "samples that the steps before it have joined already"
        )


def drawing_step(steps: Iterable[StepOptions], field: str, *, by_value: bool = False) -> str | None:
    """The name of the step that makes the shape of a field differ between epochs; None for none.

    What reads a field that differs makes fields that differ, unless it gives them one shape. A
    function reads all fields, but its promise (``random = false``) covers what other steps have
    drawn. What cuts boxes off at random, or makes them smaller than their ``min_area``, makes the
    rows differ that follow their image, and so does what joins samples.

    ``by_value``: the numbers count, and not the shape alone.
    """
    drawn: dict[str, str] = {}
    followed: dict[str, frozenset[str]] = {}
    joined: dict[str, frozenset[str]] = {}
    is_called = False
    for step in steps:
        if isinstance(step, Follow):
            joined[step.field] = frozenset(name for _role, name in step.followers)
            followed[step.field] = frozenset(Following(step.followers).of_objects if step.drops_rows else ())
        elif step.is_random and isinstance(step, ChanceStep | SizedStep):
            has_edges = isinstance(step, SizedStep) or step.loses_edges
            rows = joined if isinstance(step, JoinStep) else followed if has_edges else {}
            drawn |= dict.fromkeys(rows.get(step.field, ()), step.op)
        if step.touches is None:
            is_called = is_called or step.is_random
            op = step.op if is_called else None
        elif step.is_random if by_value else step.draws_shape:
            op = step.op
        else:
            op = next((drawn[name] for name in sorted(step.touches & drawn.keys())), None)
        if step.fixes_shape and not by_value:
            drawn = {name: op for name, op in drawn.items() if name not in (step.changes or ())}
        elif op is not None and step.changes is None:
            return op
        elif op is not None:
            drawn |= dict.fromkeys(step.changes or (), op)
    return drawn.get(field)


def _after(step: StepOptions, columns: effects.Columns) -> effects.Columns:
    """The columns after a step. Raises ``StepInvalid``, also after a step that must be the last."""
    for column in columns.values():
        if column.made_by == "pack":
            raise effects.StepInvalid(
                f'"{step.op}" cannot come after "pack", which must be the last step; put it before'
            )
        if column.varying is None:
            continue
        done = {column.name, effects.sizes_column(column).name}
        if step.touches is None or step.touches & done:
            raise effects.StepInvalid(
                f'"{step.op}" cannot come after "{column.made_by}", which must be the last step on {column.name!r}; put it before'
            )
    return effects.columns_behind(step, columns)


def _not_fixed(column: Column) -> str:
    if column.is_file:
        return f"{column.name!r} is {effects.described(column)}; {effects.first_step_on(column)}"
    if column.kind == "text":
        return (
            f"{column.name!r} is text, which a batch cannot hold; add "
            '"tokenize", "lookup" or "text_bytes", or leave it out with "drop"'
        )
    if column.kind != "array":
        field = json.dumps(column.name)
        advice = {
            "texts": f'{{ op = "pick", field = {field} }} draws one of them',
            "images": f'{{ op = "decode", field = {field} }} decodes each',
            "arrays": f'{{ op = "pick", field = {field} }} draws one of them, and if each has the same shape, "pad_batch" '
            'or "ragged" takes all',
            "json": f'{{ op = "chat", field = {field} }} makes tokens of messages, and "call" anything of it',
            "bytes": '"call" makes numbers of them',
        }[column.kind]
        return (
            f"{column.name!r} is {effects.described(column)}, which a batch cannot hold; {advice}; or leave it out "
            'with "drop"'
        )
    is_image = len(column.shape) == effects.IMAGE_DIMENSIONS
    largest = [length or (LARGEST_SIDE if is_image else LARGEST_LENGTH) for length in column.shape]
    options = f"field = {json.dumps(column.name)}, max_shape = {largest}"
    differ = f'{{ op = "pad_batch", {options} }} (filled up) or {{ op = "ragged", {options} }} (a list of arrays)'
    if not is_image:
        return f"a batch cannot hold {column.name!r} ({column.text}, of different lengths); add {differ}"
    return (
        f"the images keep their different sizes ({column.name!r} is {column.text}), so no batch can hold them; add "
        f'"random_resized_crop", "center_crop" or "resize" with size, or let them differ with {differ}'
    )
