"""Dropping and renaming, run. Worker process."""

from batchd.pipeline.effects import Columns
from batchd.pipeline.fields.options import Drop, Rename
from batchd.pipeline.randomness import SampleRandom
from batchd.pipeline.stages import Numbers, Row, RowsStage, Stage, make_rows_stage, make_stage
from batchd.samples.values import Value


@make_stage.register
def _drop(step: Drop, _before: Columns, _after: Columns) -> Stage:
    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        for name in step.fields:
            values.pop(name, None)

    return run


@make_rows_stage.register
def _drop_rows(step: Drop) -> RowsStage:
    def run(rows: dict[str, Numbers]) -> None:
        for name in step.fields:
            rows.pop(name, None)

    return run


@make_rows_stage.register
def _rename_rows(step: Rename) -> RowsStage:
    def run(rows: dict[str, Numbers]) -> None:
        rows[step.to] = rows.pop(step.field)

    return run


@make_stage.register
def _rename(step: Rename, _before: Columns, _after: Columns) -> Stage:
    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        values[step.to] = values.pop(step.field)

    return run
