"""The stages of the steps on fields, labels and numbers, as ``options`` says. Worker process.

Invariant: a number of the result is the number that the step's rules give, or the sample is bad;
none wraps around, and no rule is left to what the machine does with numbers that a type cannot
hold.
"""

from functools import singledispatch
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.effects import FLOAT_MAX, WHOLE, Columns
from batchd.data.pipeline.fields.options import Cast, Clip, Drop, MapIds, NumberStep, OneHot, Pick, Rename, Scale
from batchd.data.pipeline.fields.tables import IdTable, id_table
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.stages import Row, RowsStage, Stage, make_rows_stage, make_stage
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value, array_of
from batchd_wire.views import Array

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


@make_stage.register
def _pick(step: Pick, _before: Columns, _after: Columns) -> Stage:
    def run(values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        found = values[step.field]
        assert isinstance(found, list | np.ndarray), "a list, or its arrays as one"
        place = int(len(found) * random.random()) if step.is_random else 0
        if not len(found):
            raise SampleUndecodable(f"{step.field} is an empty list, so there is nothing to pick")
        if step.is_random and random.draws is not None:
            random.draws.append({"of": len(found), "place": place})
        if step.which != "all":
            values[step.field] = found[place]  # type: ignore[assignment]  # a value of a list

    return run


@make_stage.register
def _on_numbers(step: NumberStep, before: Columns, _after: Columns) -> Stage:
    column, change = before[step.field], changed.dispatch(type(step))

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        values[column.name] = change(step, array_of(column, values[column.name]))

    return run


@make_rows_stage.register
def _on_rows(step: NumberStep) -> RowsStage:
    change = changed.dispatch(type(step))

    def run(made: dict[str, Array], _rows: Row) -> None:
        made[step.field] = change(step, made[step.field])

    return run


@make_stage.register
def _map_ids(step: MapIds, before: Columns, _after: Columns) -> Stage:
    column = before[step.field]
    table = id_table(step, column.dtype)

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        values[column.name] = _mapped(array_of(column, values[column.name]), table)

    return run


@make_rows_stage.register
def _map_ids_of_rows(step: MapIds) -> RowsStage:
    tables: dict[str, IdTable] = {}

    def run(made: dict[str, Array], _rows: Row) -> None:
        ids = made[step.field]
        if ids.dtype.name not in tables:
            tables[ids.dtype.name] = id_table(step, ids.dtype.name)
        made[step.field] = _mapped(ids, tables[ids.dtype.name])

    return run


def _mapped(ids: Array, table: IdTable) -> Array:
    """The number of each id, of the same shape and dtype. Raises ``SampleUndecodable``."""
    other = len(table.numbers) - 1
    places = ids if ids.dtype == np.uint8 else np.where((ids >= 0) & (ids < other), ids, other).astype(np.intp)
    if not table.is_known[other]:
        _refuse(ids, ~table.is_known[places], 'is not in the table of "map_ids"; ignore is for the others')
    return np.take(table.numbers, places)


@singledispatch
def changed(step: NumberStep, _numbers: Array) -> Array:
    """Return the numbers, of any shape, after a step.

    Raises ``SampleUndecodable``, which names the first bad number.
    """
    raise NotImplementedError(f"the step {step.op} is not registered")


@changed.register
def one_hot(step: OneHot, labels: Array) -> Array:
    """Zeros with a one in the place of each label, ``[..., classes]`` of ``step.dtype``.

    Raises ``SampleUndecodable`` for a label that is not a class.
    """
    _refuse(
        labels, (labels < 0) | (labels >= step.classes), f'is not a class from 0 to {step.classes - 1} of "one_hot"'
    )
    made = np.zeros((*labels.shape, step.classes), step.dtype)
    np.put_along_axis(made, labels[..., np.newaxis].astype(np.int64), 1, axis=-1)
    return made


@changed.register
def cast(step: Cast, numbers: Array) -> Array:
    """The numbers as ``step.dtype``, in the same shape.

    Raises ``SampleUndecodable`` for a number that the type cannot hold.
    """
    if step.dtype in WHOLE:
        low, high = WHOLE[step.dtype]
        if numbers.dtype.kind == "f":
            numbers = numbers.astype(np.float64)  # holds each number of the narrower types exactly
            _refuse(numbers, ~np.isfinite(numbers), f"is not a number of {step.dtype}")
            cut: Array = np.trunc(numbers)
            if not step.truncate:
                why = f"has a fractional part, which {step.dtype} has not; truncate = true cuts it off"
                _refuse(numbers, cut != numbers, why)
            numbers = cut
        _refuse(numbers, _outside(numbers, low, high), f"is not from {low} to {high}, as {step.dtype} is")
        return numbers.astype(step.dtype)
    with np.errstate(over="ignore"):
        made: Array = numbers.astype(step.dtype)
    _refuse(numbers, np.isinf(made) & np.isfinite(numbers), f"is too large for {step.dtype}")
    if numbers.dtype.kind in "iu" and not step.truncate:
        _refuse(numbers, ~_same(numbers, made), f"is a whole number that {step.dtype} cannot hold exactly")
    return made


@changed.register
def clip(step: Clip, numbers: Array) -> Array:
    """The numbers limited to the bounds, of the same shape and dtype; NaN is unchanged."""
    for bound, beyond in ((step.min, np.less), (step.max, np.greater)):
        if bound is None:
            continue
        limit = _bound(bound, numbers.dtype.name)
        if limit is not None:
            numbers = np.where(beyond(numbers, limit), limit, numbers)
    return numbers


@changed.register
def scale(step: Scale, numbers: Array) -> Array:
    """``number * factor + offset`` in float64, then rounded. Raises ``SampleUndecodable``."""
    with np.errstate(over="ignore", invalid="ignore"):
        made: Array = (numbers.astype(np.float64) * step.factor + step.offset).astype(step.dtype)
    _refuse(numbers, ~np.isfinite(made) & np.isfinite(numbers), f'becomes too large for {step.dtype} by "scale"')
    return made


def _outside(numbers: Array, low: int, high: int) -> NDArray[np.bool_]:
    """Mask of the numbers out of range; ``high`` + 1 is a power of two, so exact in float64."""
    if numbers.dtype.kind == "f":
        return np.asarray((numbers < float(low)) | (numbers >= float(high + 1)))
    if numbers.dtype.kind == "b":
        return np.zeros(numbers.shape, np.bool_)
    least, most = WHOLE[numbers.dtype.name]
    below = numbers < numbers.dtype.type(low) if low > least else np.False_
    above = numbers > numbers.dtype.type(high) if high < most else np.False_
    return np.broadcast_to(below | above, numbers.shape)


def _same(numbers: Array, made: Array) -> NDArray[np.bool_]:
    """Mask of the whole numbers that are exact in floating point."""
    low, high = WHOLE[numbers.dtype.name]
    wide = made.astype(np.float64)
    inside = ~_outside(wide, low, high)
    return np.asarray(inside & (np.where(inside, wide, 0.0).astype(numbers.dtype) == numbers))


def _bound(bound: float, dtype: str) -> Any:
    """The bound in the type of the numbers; None where all of them are within it anyway."""
    if dtype in WHOLE:
        low, high = WHOLE[dtype]
        return np.dtype(dtype).type(int(bound)) if low <= bound <= high else None
    return np.dtype(dtype).type(bound) if abs(bound) <= FLOAT_MAX[dtype] else None


def _refuse(numbers: Array, bad: NDArray[np.bool_], why: str) -> None:
    """Raise ``SampleUndecodable`` with the first bad number and its place."""
    if not bad.any():
        return
    place = tuple(map(int, np.argwhere(bad)[0]))
    where = f" at {list(place)}" if place else ""
    raise SampleUndecodable(f"{numbers[place].item()}{where} {why}")
