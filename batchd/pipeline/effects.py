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


class StepInvalid(ValueError):  # noqa: N818  names what is wrong
    """A step that cannot be done to what is there; the text says which, and what to do."""


def column_of(step: Any, columns: Columns) -> Column:
    """The column that a step is done to. Raises ``StepInvalid`` where the sample has none of this name."""
    column = columns.get(step.field)
    if column is None:
        raise StepInvalid(f'"{step.op}" is done to {step.field!r}, and a sample has {", ".join(map(repr, columns))}')
    return column
