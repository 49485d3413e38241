"""The effects of the steps that make one sample of several.

Daemon, workers and ``batchd check``; standard library only.
"""

from dataclasses import replace

from batchd.data.pipeline.effects import Columns, StepInvalid, effect
from batchd.data.pipeline.image.effects import check_fill, placed
from batchd.data.pipeline.join import options

_FILES = frozenset({"encoded", "video", "images"})
"""Kinds of columns that a later step would read."""


@effect.register
def _mosaic(step: options.Mosaic, columns: Columns) -> Columns:
    check_fill(step, step.fill, columns)
    height, width = step.size
    return _joined(step, placed(step, columns, (2 * height, 2 * width)))


def _joined(step: options.JoinStep, columns: Columns) -> Columns:
    """The columns with the objects of several samples, as many as they have."""
    file = next((column.name for column in columns.values() if column.kind in _FILES), None)
    if file is not None:
        raise StepInvalid(
            f'"{step.op}" reads other samples, and then the file of {file!r} is gone: put its "decode" in front, or "drop" it'
        )
    lead = columns[step.field]
    made = dict(columns)
    for role, name in lead.followers:
        if role != "mask":
            made[name] = replace(made[name], shape=(None, *made[name].shape[1:]))
    return made
