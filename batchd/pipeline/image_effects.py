"""What the steps on images make of their column. Daemon, workers and ``batchd check``; standard library only.

    encoded  --decode-->  uint8 [?, ?, 3]  --geometry-->  uint8 [224, 224, 3]  --normalize-->  float32  --layout-->  [3, 224, 224]

Invariant: for steps without problems, the column at the end is exactly what ``image_stage`` makes.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from batchd.config.columns import Column
from batchd.config.image_steps import CenterCrop, Decode, Layout, Normalize, RandomFlip, RandomResizedCrop, Resize
from batchd.config.steps import Step
from batchd.pipeline.effects import Columns, Effect, StepInvalid, column_of

IMAGE_DIMENSIONS = 3
_CHANNELS = {"rgb": 3, "bgr": 3, "gray": 1}
ImageStep = Decode | Resize | CenterCrop | RandomResizedCrop | RandomFlip | Normalize | Layout


def _decode(step: Decode, columns: Columns) -> Columns:
    column = column_of(step, columns)
    if column.kind != "encoded":
        raise _misplaced(step, column)
    return _changed(step, columns, kind="array", dtype="uint8", shape=(None, None, _CHANNELS[step.color]))


def _resize(step: Resize, columns: Columns) -> Columns:
    channels = _pixels(step, columns).shape[2]
    return _changed(step, columns, shape=(*(step.size or (None, None)), channels))


def _crop(step: CenterCrop | RandomResizedCrop, columns: Columns) -> Columns:
    return _changed(step, columns, shape=(*step.size, _pixels(step, columns).shape[2]))


def _flip(step: RandomFlip, columns: Columns) -> Columns:
    _pixels(step, columns)
    return _changed(step, columns)


def _normalize(step: Normalize, columns: Columns) -> Columns:
    channels = _pixels(step, columns).shape[2]
    for name, values in (("mean", step.mean), ("std", step.std)):
        if len(values) != channels:
            raise StepInvalid(f'"normalize" has {len(values)} numbers in {name}, and the image has {channels} channels')
    return _changed(step, columns, dtype=step.dtype)


def _layout(step: Layout, columns: Columns) -> Columns:
    column = column_of(step, columns)
    if column.kind != "array" or len(column.shape) != IMAGE_DIMENSIONS or column.channels_first:
        raise _misplaced(step, column)
    height, width, channels = column.shape
    if step.order == "nhwc":
        return columns
    return _changed(step, columns, shape=(channels, height, width), channels_first=True)


EFFECTS: Mapping[type[Step], Effect] = MappingProxyType(
    {
        Decode: _decode,
        Resize: _resize,
        CenterCrop: _crop,
        RandomResizedCrop: _crop,
        RandomFlip: _flip,
        Normalize: _normalize,
        Layout: _layout,
    }
)


def is_random(step: Step) -> bool:
    """Can this step make different images of one sample?"""
    match step:
        case RandomResizedCrop():
            return True
        case RandomFlip(probability=probability):
            return 0 < probability < 1
        case _:
            return False


def _pixels(step: ImageStep, columns: Columns) -> Column:
    """The column of a step that needs pixels of 8 bits, channels last."""
    column = column_of(step, columns)
    is_image = column.kind == "array" and column.dtype == "uint8" and len(column.shape) == IMAGE_DIMENSIONS
    if not is_image or column.channels_first:
        raise _misplaced(step, column)
    return column


def _misplaced(step: ImageStep, column: Column) -> StepInvalid:
    if column.kind == "encoded":
        return StepInvalid(f'the first step must be {{ op = "decode" }}: {column.name!r} is the bytes of an image file')
    if column.made_by:
        return StepInvalid(
            f'"{step.op}" cannot come after "{column.made_by}": {column.name!r} is {column.text} by then'
        )
    return StepInvalid(f'"{step.op}" cannot be done to {column.name!r}, which is {column.text}')


def _changed(step: ImageStep, columns: Columns, **changes: object) -> Columns:
    return {**columns, step.field: replace(columns[step.field], made_by=step.op, **changes)}  # type: ignore[arg-type]
