"""The effects of steps on fields, labels and numbers. Daemon, workers, CLI; standard library."""

from dataclasses import replace
from math import prod

from batchd.data.pipeline.effects import (
    FLOAT_MAX,
    WHOLE,
    Columns,
    NoSuchField,
    StepInvalid,
    changed,
    column_of,
    described,
    effect,
    replaced,
)
from batchd.data.pipeline.fields.options import Cast, Clip, Drop, MapIds, NumberStep, OneHot, Pick, Rename, Scale
from batchd.data.samples.columns import LENGTH_MAX, LISTS, Column
from batchd_wire.fields import DIMENSIONS_MAX


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


@effect.register
def _pick(step: Pick, columns: Columns) -> Columns:
    column = column_of(step, columns)
    if column.kind not in LISTS:
        raise StepInvalid(f'"pick" needs a list, such as "text[<=8]", and {column.name!r} is {described(column)}')
    made = column if step.which == "all" else column.item
    return changed(step, columns, kind=made.kind, most=made.most)


@effect.register
def _one_hot(step: OneHot, columns: Columns) -> Columns:
    column = _numbers(step, columns)
    if column.dtype not in WHOLE or column.dtype == "bool":
        raise StepInvalid(
            f'"one_hot" needs whole numbers, and {column.name!r} is {column.text}; {{ op = "cast" }} can make them'
        )
    shape = (*column.shape, step.classes)
    if len(shape) > DIMENSIONS_MAX or prod(length or 1 for length in shape) > LENGTH_MAX:
        raise StepInvalid(
            f'"one_hot" would make {replace(column, shape=shape).text} of {column.name!r}, which is too large'
        )
    return changed(step, columns, shape=shape, dtype=step.dtype)


@effect.register
def _typed(step: Cast | Scale, columns: Columns) -> Columns:
    _numbers(step, columns)
    return changed(step, columns, dtype=step.dtype)


@effect.register
def _clip(step: Clip, columns: Columns) -> Columns:
    column = _numbers(step, columns)
    if column.dtype == "bool":
        raise StepInvalid(f'"clip" needs numbers, and {column.name!r} is {column.text}')
    low, high = WHOLE.get(column.dtype) or (-FLOAT_MAX[column.dtype], FLOAT_MAX[column.dtype])
    for name, bound, is_beyond in (
        ("min", step.min, step.min is not None and step.min > high),
        ("max", step.max, step.max is not None and step.max < low),
    ):
        if column.dtype in WHOLE and bound is not None and bound != int(bound):
            raise StepInvalid(f'"clip" has {name} = {bound}, and {column.name!r} is {column.text}: whole numbers')
        if is_beyond:
            raise StepInvalid(f'"clip" has {name} = {bound}, and {column.name!r} is {column.text}: {low} to {high}')
    return changed(step, columns)


@effect.register
def _map_ids(step: MapIds, columns: Columns) -> Columns:
    """Read the file, as its numbers have to fit the type of the field."""
    from batchd.data.pipeline.fields.tables import id_table  # noqa: PLC0415  needs numpy

    column = _numbers(step, columns)
    if column.dtype not in WHOLE or column.dtype == "bool":
        raise StepInvalid(f'"map_ids" needs whole numbers, and {column.name!r} is {column.text}')
    id_table(step, column.dtype)
    return changed(step, columns)


def _numbers(step: NumberStep, columns: Columns) -> Column:
    column = column_of(step, columns)
    if column.is_file:
        op = "decode" if column.kind == "encoded" else f"decode_{column.kind}"
        raise StepInvalid(f'"{step.op}" needs numbers, and {column.name!r} is {described(column)}; "{op}" it first')
    if column.kind != "array":
        raise StepInvalid(f'"{step.op}" needs numbers, and {column.name!r} is {described(column)}')
    return column
