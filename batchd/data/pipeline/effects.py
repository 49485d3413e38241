"""The effect of a step on the columns of a sample, on paper.

Daemon, workers and ``batchd check``; standard library only. Each family of steps has a module of
effects, which the daemon uses, too, and a module of stages, which only workers load.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from math import inf
from typing import TypeAlias

from batchd.data.pipeline.options import FieldStep, StepOptions, import_family
from batchd.data.samples.columns import LISTS, Column
from batchd.errors import KeyPath
from batchd.runtime.suggestions import nearest
from batchd_wire.fields import Field, sizes_field

Columns: TypeAlias = Mapping[str, Column]
"""By name, in the order in which they become fields."""
INDEX, VALID = "index", "valid"
"""The fields that every batch has, and every batch of a stream that masks: the sample's number in
its source, and whether the sample is what it should be."""
RESERVED = frozenset({INDEX, VALID})
IMAGE_DIMENSIONS = 3
WHOLE = {
    "bool": (0, 1),
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
    **{f"int{bits}": (-1 << bits - 1, (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
}
"""The smallest and the largest number of each type of whole numbers."""
FLOAT_MAX = {"float16": 65504.0, "float32": (2 - 2.0**-23) * 2.0**127, "float64": inf}
"""The largest number of each type of floating point; users can name none beyond float64."""


class StepInvalid(ValueError):  # noqa: N818  names what is wrong
    """The text says why a step cannot be done, and what to do.

    ``key``: the wrong option, or the path to a part of it; empty for the step as a whole.
    """

    def __init__(self, text: str, key: KeyPath = ()) -> None:
        super().__init__(text)
        self.key = key


class NoSuchField(StepInvalid):
    """A step names fields that the sample does not have; ``reason`` is the text without advice."""

    def __init__(self, reason: str, key: KeyPath, names: Sequence[str], columns: Columns) -> None:
        meant = [repr(found) for name in names if (found := nearest(name, columns)) is not None]
        advice = f"; did you mean {' and '.join(meant)}?" if meant else ""
        self.reason = f"{reason}, and a sample has {', '.join(map(repr, columns))}"
        self.names = tuple(names)
        super().__init__(self.reason + advice, key)


@singledispatch
def effect(step: StepOptions, columns: Columns) -> Columns:
    """Return the columns after a step. Raises ``StepInvalid``.

    Each family registers its own steps. A family is imported for the first of its steps: a daemon
    has those of its configuration.
    """
    import_family(type(step), "effects")
    registered = effect.dispatch(type(step))
    if registered is effect.dispatch(object):
        raise NotImplementedError(f"the step {step.op} has no effect")
    return registered(step, columns)


def columns_behind(step: StepOptions, columns: Columns) -> Columns:
    """Return the columns after a step that is done to each value of a list, too.

    Raises ``StepInvalid``.
    """
    items = items_before(step, columns)
    if items is None:
        return effect(step, columns)
    made, most = effect(step, items), columns[step.field].most  # type: ignore[attr-defined]  # it has a field
    return {name: column if column is columns.get(name) else column.in_list(most) for name, column in made.items()}


def items_before(step: StepOptions, columns: Columns) -> Columns | None:
    """The columns of one value of the list that ``step`` is done to; None without a list."""
    column = columns.get(step.field) if isinstance(step, FieldStep) and step.is_for_each else None
    if column is None or column.kind not in LISTS or (column.kind == "texts" and not column.made_by):
        return None
    return {**columns, column.name: column.item}


def described(column: Column) -> str:
    """What a column is, for messages."""
    return _DESCRIBED.get(column.kind, column.text)


_DESCRIBED = {
    "encoded": "the bytes of an image file",
    "video": "a video file",
    "audio": "a sound file",
    "text": "text",
    "json": "a value in JSON",
    "bytes": "bytes",
    "texts": "a list of texts",
    "images": "a list of image files",
}


def first_step_on(column: Column) -> str:
    """The problem text for a file that no step decodes."""
    op = "decode" if column.kind == "encoded" else f"decode_{column.kind}"
    if column.name == column.text:
        return f'the first step must be {{ op = "{op}" }}'
    return f'the first step on it must be {{ op = "{op}", field = {json.dumps(column.name)} }}'


def column_of(step: FieldStep, columns: Columns) -> Column:
    """The column that a step is done to. Raises ``NoSuchField``."""
    column = columns.get(step.field)
    if column is None:
        raise NoSuchField(f'"{step.op}" is done to {step.field!r}', ("field",), [step.field], columns)
    return column


def changed(step: FieldStep, columns: Columns, **changes: object) -> Columns:
    """The columns with changes of the step's own: arguments of ``Column``."""
    return {**columns, step.field: replace(columns[step.field], made_by=step.op, **changes)}  # type: ignore[arg-type]


def replaced(step: FieldStep, columns: Columns, *made: Column) -> Columns:
    """The columns with others in place of the step's. Raises ``StepInvalid`` for a used name."""
    for column in made:
        if column.name in columns.keys() - {step.field} or column.name in RESERVED:
            whose = "every batch has of itself" if column.name in RESERVED else "the sample has already"
            raise StepInvalid(f'"{step.op}" would make a field {column.name!r}, which {whose}; give it another name')
    after: dict[str, Column] = {}
    for name, column in columns.items():
        after |= {one.name: replace(one, made_by=step.op) for one in made} if name == step.field else {name: column}
    return after


def sizes_column(column: Column) -> Column:
    """The column that has the size of each sample of a column that varies."""
    sizes = sizes_field(Field(column.name, column.dtype, column.fixed_shape, column.varying))
    assert sizes is not None, f"{column.name} does not vary"
    return Column(sizes.name, dtype=sizes.dtype, shape=sizes.shape, made_by=column.made_by)
