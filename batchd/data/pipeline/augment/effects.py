"""The effects of the steps that augment images. Daemon, workers and check; standard library only.

They keep the channels of an image, and but for "affine" its size.
"""

from dataclasses import replace

from batchd.data.pipeline.augment import options
from batchd.data.pipeline.effects import Columns, StepInvalid, effect
from batchd.data.pipeline.image.effects import COLOR_CHANNELS, changed_image, check_fill, pixels_of, placed, unresized
from batchd.data.pipeline.image.options import ChanceStep


@effect.register(options.CertainStep)
@effect.register(options.Sharpen)
@effect.register(options.Blur)
def _same(step: ChanceStep, columns: Columns) -> Columns:
    return changed_image(step, columns, shape=pixels_of(step, columns).shape)


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
    if isinstance(step, options.Affine) and step.size is not None:
        return placed(step, columns, step.size)
    return unresized(step, columns)


@effect.register
def _policy(step: options.PolicyStep, columns: Columns) -> Columns:
    column = pixels_of(step, columns)
    if column.shape[2] not in (1, COLOR_CHANNELS):
        raise StepInvalid(f'"{step.op}" is for images of 1 or 3 channels, and {column.name!r} is {column.text}')
    if isinstance(step, options.AugMix):
        check_fill(step, step.fill, columns)
        return _same(step, columns)
    return _moved(step, columns)


@effect.register
def _choose(step: options.Choose, columns: Columns) -> Columns:
    made = [columns] if step.probability < 1 else []
    for place, choice in enumerate(step.steps):
        try:
            made.append(effect(choice, columns))
        except StepInvalid as problem:
            raise StepInvalid(str(problem), ("of", place, *problem.key)) from None
    after = dict(made[-1])
    for name, column in after.items():
        shapes = [one[name].shape for one in made]
        if len({shape[-1:] for shape in shapes}) > 1:
            ops = ", ".join(choice.op for choice in step.steps)
            raise StepInvalid(f'"choose" would make images of different channels by one of {ops}', ("of",))
        lengths = [set(along) for along in zip(*shapes, strict=True)]
        shape = tuple(along.pop() if len(along) == 1 else None for along in lengths)
        is_changed = any(one[name] != columns.get(name) for one in made)
        sizes = column.sizes if len({one[name].sizes for one in made}) == 1 else ()
        after[name] = replace(column, shape=shape, sizes=sizes, made_by=step.op) if is_changed else column
    return after
