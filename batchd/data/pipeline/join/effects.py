"""The effects of the steps that make one sample of several.

Daemon, workers and ``batchd check``; standard library only.
"""

from dataclasses import replace

from batchd.data.pipeline.effects import Columns, StepInvalid, effect
from batchd.data.pipeline.image.effects import alone, check_fill, pixels_of, placed, unresized
from batchd.data.pipeline.join import options

_FILES = frozenset({"encoded", "video", "images"})
"""Kinds of columns that a later step would read."""


@effect.register
def _mosaic(step: options.Mosaic, columns: Columns) -> Columns:
    check_fill(step, step.fill, columns)
    height, width = step.size
    return _joined(step, placed(step, columns, (2 * height, 2 * width)))


@effect.register
def _mixup(step: options.MixUp, columns: Columns) -> Columns:
    return _joined(step, _of_one_size(step, columns))


@effect.register
def _copy_paste(step: options.CopyPaste, columns: Columns) -> Columns:
    lead = pixels_of(step, columns)
    if "masks" not in dict(lead.followers):
        raise StepInvalid(
            f'"copy_paste" pastes objects by their masks, and none follow {lead.name!r}: '
            '{ op = "follow", masks = "masks", boxes = "boxes" } says which'
        )
    return _joined(step, _of_one_size(step, columns) if step.paste == "other" else unresized(step, columns))


def _of_one_size(step: options.JoinStep, columns: Columns) -> Columns:
    """The columns of images that can be laid on each other."""
    column = pixels_of(step, columns)
    if None in column.shape[:2]:
        raise StepInvalid(
            f'"{step.op}" lays images on each other, and {column.name!r} is {column.text}: put it behind the step '
            "that makes all one size"
        )
    return unresized(step, columns)


def _joined(step: options.JoinStep, columns: Columns) -> Columns:
    """The columns with the objects of several samples, as many as they have."""
    lead = alone(step, columns)
    file = next((column.name for column in columns.values() if column.kind in _FILES), None)
    if file is not None:
        raise StepInvalid(
            f'"{step.op}" reads other samples, and then the file of {file!r} is gone: put its "decode" in front, or "drop" it'
        )
    made = dict(columns)
    for role, name in lead.followers:
        if role != "mask":
            made[name] = replace(made[name], shape=(None, *made[name].shape[1:]))
    return made
