"""Which fields a batch has, and what is wrong with a list of steps. Daemon, workers and ``batchd check``.

Decides from the configuration alone, before any sample is seen; imports neither cv2 nor simplejpeg.

Invariant: for steps without problems, ``sample_fields`` is exactly what ``execute.Pipeline`` writes.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from batchd.config.columns import Column
from batchd.config.steps import Step
from batchd.pipeline import field_effects, image_effects, number_effects, text_effects
from batchd.pipeline.effects import INDEX, TAKEN, VALID, Columns, Effect, StepInvalid
from batchd.pipeline.file_checks import check_files
from batchd_wire.fields import Field

_FAMILIES = (image_effects, number_effects, field_effects, text_effects)
EFFECTS: Mapping[type[Step], Effect] = MappingProxyType(
    {kind: effect for family in _FAMILIES for kind, effect in family.EFFECTS.items()}
)


def sample_fields(columns: Sequence[Column], steps: Sequence[Step], on_error: str) -> tuple[Field, ...]:
    """Name the arrays of one sample: what the steps make of the source's columns, ``index``, and ``valid`` for "mask".

    For steps without problems only.
    """
    made = columns_after(columns, steps).values()
    fields = [Field(column.name, column.dtype, column.fixed_shape) for column in made]
    fields.append(Field(INDEX, "int64", ()))
    if on_error == "mask":
        fields.append(Field(VALID, "bool", ()))
    return tuple(fields)


def columns_after(columns: Sequence[Column], steps: Sequence[Step]) -> Columns:
    """The columns that the steps make of those of a source. Raises ``StepInvalid``."""
    made: Columns = {column.name: column for column in columns}
    for step in steps:
        made = EFFECTS[type(step)](step, made)
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
            made = EFFECTS[type(step)](step, made)
        except StepInvalid as problem:
            broken |= step.touches or made.keys()
            yield str(problem)
    for column in made.values():
        if not column.is_fixed and column.name not in broken:
            yield _not_fixed(column)


def _not_fixed(column: Column) -> str:
    if column.kind == "encoded":
        return f'{column.name!r} is the bytes of an image file; the first step must be {{ op = "decode" }}'
    if column.kind == "text":
        return (
            f"{column.name!r} is text, which no batch can hold as it is; add "
            '"tokenize", "lookup" or "text_bytes", or leave it out with "drop"'
        )
    if len(column.shape) != image_effects.IMAGE_DIMENSIONS:
        return (
            f"{column.name!r} is {column.text}, and a batch holds no field whose length differs from sample to sample"
        )
    return (
        f"the images keep their different sizes ({column.name!r} is {column.text}), so no batch can hold them; add "
        '"random_resized_crop", "center_crop" or "resize" with size'
    )
