"""Dropping and renaming, run. Worker process."""

from typing import TypeVar

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.fields.options import Drop, Rename
from batchd.data.pipeline.stages import RowsStage, Stage, make_rows_stage, make_stage

V = TypeVar("V")


@make_stage.register
def _drop(step: Drop, _before: Columns, _after: Columns) -> Stage:
    return lambda values, _random, _row: _remove(step, values)


@make_rows_stage.register
def _drop_rows(step: Drop) -> RowsStage:
    return lambda made, _rows: _remove(step, made)


def _remove(step: Drop, values: dict[str, V]) -> None:
    for name in step.fields:
        values.pop(name, None)


@make_stage.register
def _rename(step: Rename, _before: Columns, _after: Columns) -> Stage:
    return lambda values, _random, _row: _move(step, values)


@make_rows_stage.register
def _rename_rows(step: Rename) -> RowsStage:
    return lambda made, _rows: _move(step, made)


def _move(step: Rename, values: dict[str, V]) -> None:
    values[step.to] = values.pop(step.field)
