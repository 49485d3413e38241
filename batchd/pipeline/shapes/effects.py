"""The effects of the steps for samples of different shapes.

Daemon, workers and ``batchd check``; standard library only. With ``pad_batch`` and ``ragged``:

    image: uint8 [?, ?, 3]  --> image: uint8 [<=512, <=512, 3]   image_shape: int32 [2]
    tokens: int32 [?]       --> tokens: int32 [<=128]            tokens_length: int32

Invariant: the column with the sizes directly follows each column that varies.
"""

from dataclasses import replace

from batchd.pipeline.effects import FLOAT_MAX, WHOLE, Columns, StepInvalid, column_of, effect, sizes_column
from batchd.pipeline.shapes.options import PadBatch, Ragged, RoomStep
from batchd_wire.fields import PADDED, RAGGED, Varying


@effect.register
def _pad_batch(step: PadBatch, columns: Columns) -> Columns:
    made = _with_room(step, columns, PADDED)
    column = made[step.field]
    if not _holds(column.dtype, step.fill):
        raise StepInvalid(f'"pad_batch" has fill = {step.fill:g}, which {column.dtype} cannot hold ({step.field!r})')
    return {**made, step.field: replace(column, fill=step.fill)}


@effect.register
def _ragged(step: Ragged, columns: Columns) -> Columns:
    return _with_room(step, columns, RAGGED)


def _with_room(step: RoomStep, columns: Columns, kind: str) -> Columns:
    column = column_of(step, columns)
    if column.kind == "encoded":
        raise StepInvalid(
            f'"{step.op}" needs pixels, and {column.name!r} is an image file; put {{ op = "decode" }} before'
        )
    if column.kind == "text":
        raise StepInvalid(f'"{step.op}" needs numbers, and {column.name!r} is text')
    axes = tuple(axis for axis, length in enumerate(column.shape) if length is None)
    if not axes:
        raise StepInvalid(f'"{step.op}" has nothing to do: every {column.name!r} is {column.text}; leave the step out')
    if not column.takes(step.max_shape):
        raise StepInvalid(
            f'"{step.op}" has max_shape = {list(step.max_shape)}, and {column.name!r} is {column.text}: give one length for each '
            "dimension, a largest one where there is ?, and the others as they are"
        )
    made = replace(column, shape=step.max_shape, varying=Varying(kind, axes), made_by=step.op)
    sizes = sizes_column(made)
    if sizes.name in columns:
        raise StepInvalid(f'"{step.op}" makes a field {sizes.name!r}, and the sample already has one of this name')
    return {one.name: one for old in columns.values() for one in ((made, sizes) if old.name == column.name else (old,))}


def _holds(dtype: str, value: float) -> bool:
    if dtype in FLOAT_MAX:
        return abs(value) <= FLOAT_MAX[dtype]
    low, high = WHOLE[dtype]
    return value == int(value) and low <= value <= high
