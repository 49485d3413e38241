"""The effects of the steps that augment images. Daemon, workers and check; standard library only.

They keep the size and the channels of an image.
"""

from batchd.data.pipeline.augment import options
from batchd.data.pipeline.effects import Columns, StepInvalid, changed, effect
from batchd.data.pipeline.image.effects import COLOR_CHANNELS, check_fill, pixels_of, placed
from batchd.data.pipeline.image.options import ChanceStep


@effect.register(options.CertainStep)
@effect.register(options.Sharpen)
@effect.register(options.Blur)
def _same(step: ChanceStep, columns: Columns) -> Columns:
    return changed(step, columns, shape=pixels_of(step, columns).shape)


@effect.register
def _erase(step: options.Erase, columns: Columns) -> Columns:
    column = pixels_of(step, columns)
    if not isinstance(step.fill, str):
        check_fill(step, step.fill, columns)
    elif step.fill == "mean" and column.shape[2] not in (1, COLOR_CHANNELS):
        raise StepInvalid(
            f'"erase" with fill = "mean" is for images of 1 or 3 channels, and {column.name!r} is {column.text}',
            ("fill",),
        )
    return _same(step, columns)


@effect.register
def _moved(step: options.WarpStep, columns: Columns) -> Columns:
    check_fill(step, step.fill, columns)
    height, width, _channels = pixels_of(step, columns).shape
    return placed(step, columns, (height, width))
