"""The effects of dropping and renaming. Daemon, workers, CLI; standard library only."""

from dataclasses import replace

from batchd.data.pipeline.effects import Columns, NoSuchField, StepInvalid, column_of, effect, replaced
from batchd.data.pipeline.fields.options import Drop, Rename


@effect.register
def _drop(step: Drop, columns: Columns) -> Columns:
    missing = [name for name in step.fields if name not in columns]
    if missing:
        key = "fields", step.fields.index(missing[0])
        raise NoSuchField(f'"drop" leaves out {" and ".join(map(repr, missing))}', key, missing, columns)
    left = {name: column for name, column in columns.items() if name not in step.fields}
    if not left:
        raise StepInvalid(f'"drop" leaves out {", ".join(map(repr, columns))}, and then a batch has nothing in it')
    return left


@effect.register
def _rename(step: Rename, columns: Columns) -> Columns:
    return replaced(step, columns, replace(column_of(step, columns), name=step.to))
