"""What a step makes of the columns of a sample, on paper. Daemon, workers and ``batchd check``; standard library only.

Each family of steps has a module of effects, which the daemon uses too, and a module of stages, which only workers load.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from batchd.config.columns import Column

Columns: TypeAlias = Mapping[str, Column]
"""By name, in the order in which they become fields."""
Effect: TypeAlias = Callable[[Any, Columns], Columns]
"""Gives the columns after a step. Raises ``StepInvalid``."""
INDEX, VALID = "index", "valid"
"""The fields that every batch has, and every batch of a stream that masks: the sample's number in its source, and whether the
sample is what it should be."""
TAKEN = frozenset({INDEX, VALID})


class StepInvalid(ValueError):  # noqa: N818  names what is wrong
    """A step that cannot be done to what is there; the text says which, and what to do."""


def column_of(step: Any, columns: Columns) -> Column:
    """The column that a step is done to. Raises ``StepInvalid`` where the sample has none of this name."""
    column = columns.get(step.field)
    if column is None:
        raise StepInvalid(f'"{step.op}" is done to {step.field!r}, and a sample has {", ".join(map(repr, columns))}')
    return column


def replaced(op: str, columns: Columns, field: str, *made: Column) -> Columns:
    """The columns with others in the place of ``field``. Raises ``StepInvalid`` where one would have a name that is taken."""
    others = {name: column for name, column in columns.items() if name != field}
    for column in made:
        if column.name in others or column.name in TAKEN:
            whose = "every batch has of itself" if column.name in TAKEN else "the sample has already"
            raise StepInvalid(f'"{op}" would make a field {column.name!r}, which {whose}; give it another name')
    after: dict[str, Column] = {}
    for name, column in columns.items():
        after |= {one.name: one for one in made} if name == field else {name: column}
    return after
