"""Which fields a batch has, and what is wrong with a list of steps. Daemon, workers and ``batchd check``.

Decides from the configuration alone, before any sample is seen; imports neither cv2 nor simplejpeg.

Invariant: for steps without problems, ``sample_fields`` is exactly what ``execute.Pipeline`` writes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from batchd.config.columns import Column
from batchd.config.steps import Step
from batchd.pipeline import call_effects, field_effects, image_effects, number_effects, shape_effects, text_effects
from batchd.pipeline.effects import INDEX, TAKEN, VALID, Columns, Effect, StepInvalid
from batchd.pipeline.file_checks import check_files
from batchd_wire.fields import FIELDS_MAX, Field

SAMPLE_FIELDS_MAX = FIELDS_MAX - 3
"""Of what a source and its steps make, besides ``index``, ``valid`` and the checksums."""
LARGEST_SIDE, LARGEST_LENGTH = 512, 128
"""What is proposed as the room of a sample, in pixels and in elements."""
_FAMILIES = (image_effects, number_effects, field_effects, text_effects, shape_effects, call_effects)
EFFECTS: Mapping[type[Step], Effect] = MappingProxyType(
    {kind: effect for family in _FAMILIES for kind, effect in family.EFFECTS.items()}
)


def sample_fields(columns: Sequence[Column], steps: Sequence[Step], on_error: str) -> tuple[Field, ...]:
    """Name the arrays of one sample: what the steps make of the source's columns, ``index``, and ``valid`` for "mask".

    For steps without problems only.
    """
    made = columns_after(columns, steps).values()
    fields = [Field(column.name, column.dtype, column.fixed_shape, column.varying) for column in made]
    fields.append(Field(INDEX, "int64", ()))
    if on_error == "mask":
        fields.append(Field(VALID, "bool", ()))
    return tuple(fields)


def columns_after(columns: Sequence[Column], steps: Sequence[Step]) -> Columns:
    """The columns that the steps make of those of a source. Raises ``StepInvalid``."""
    made: Columns = {column.name: column for column in columns}
    for step in steps:
        made = _after(step, made)
    return made


def is_random(steps: Sequence[Step]) -> bool:
    """Tell whether one sample can give different fields; False means that it always gives the same bytes."""
    return any(family.is_random(step) for step in steps for family in _FAMILIES)


def check_steps(columns: Sequence[Column], steps: Sequence[Step]) -> list[str]:
    """List everything that is wrong with ``steps`` for such columns, and with files that they read; empty where they can be run.

    Reads files, so it is for the start, once.
    """
    return list(_problems(columns, steps))


def _problems(columns: Sequence[Column], steps: Sequence[Step]) -> Iterator[str]:
    made: Columns = {column.name: column for column in columns}
    for name in made:
        if name in TAKEN:
            yield f"the source has a field {name!r}, which is what every batch calls something else; give it another name"
    broken: set[str] = set()
    files = [check_files(step) for step in steps]
    for step, problems in zip(steps, files, strict=True):
        yield from problems
        if problems or broken & (
            step.touches or made.keys()
        ):  # one mistake would be told once more for every step behind it
            broken |= step.touches or made.keys()
            continue
        try:
            made = _after(step, made)
        except StepInvalid as problem:
            broken |= step.touches or made.keys()
            yield str(problem)
    if len(made) > SAMPLE_FIELDS_MAX:
        yield f'a sample has {len(made)} fields by then, and a batch holds {SAMPLE_FIELDS_MAX} at most; "drop" leaves some out'
    for column in made.values():
        if not column.is_fixed and column.name not in broken:
            yield _not_fixed(column)


def _after(step: Step, columns: Columns) -> Columns:
    """The columns after a step. Raises ``StepInvalid`` also where an earlier step was to be the last on what this one touches."""
    for column in columns.values():
        if column.varying is None:
            continue
        done = {column.name, shape_effects.sizes_column(column).name}
        if step.touches is None or step.touches & done:
            raise StepInvalid(
                f'"{step.op}" cannot come after "{column.made_by}", which must be the last step on {column.name!r}; put it before'
            )
    return EFFECTS[type(step)](step, columns)


def _not_fixed(column: Column) -> str:
    if column.kind == "encoded":
        return f'{column.name!r} is the bytes of an image file; the first step must be {{ op = "decode" }}'
    if column.kind == "text":
        return (
            f"{column.name!r} is text, which no batch can hold as it is; add "
            '"tokenize", "lookup" or "text_bytes", or leave it out with "drop"'
        )
    is_image = len(column.shape) == image_effects.IMAGE_DIMENSIONS
    largest = [length or (LARGEST_SIDE if is_image else LARGEST_LENGTH) for length in column.shape]
    options = f"field = {json.dumps(column.name)}, max_shape = {largest}"
    differ = f'{{ op = "pad_batch", {options} }} (filled up) or {{ op = "ragged", {options} }} (a list of arrays)'
    if not is_image:
        return f"no batch can hold {column.name!r} as it is ({column.text}, of different lengths); add {differ}"
    return (
        f"the images keep their different sizes ({column.name!r} is {column.text}), so no batch can hold them; add "
        f'"random_resized_crop", "center_crop" or "resize" with size, or let them differ with {differ}'
    )
