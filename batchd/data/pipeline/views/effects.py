"""The effect of a step that makes views: a field for each name. Daemon, workers and CLI.

    image: uint8 [?, ?, 3]  --views-->  image: uint8 [2, 224, 224, 3]   count = 2
                                        local: uint8 [96, 96, 3]        count = 1

Standard library only.
"""

from collections.abc import Sequence
from dataclasses import replace

from batchd.data.pipeline.effects import Columns, StepInvalid, effect, replaced
from batchd.data.pipeline.image.effects import pixels_of
from batchd.data.pipeline.image.options import CropStep
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.views.options import IMAGE, View, Views
from batchd.data.samples.columns import Column
from batchd.errors import KeyPath


@effect.register
def _views(step: Views, columns: Columns) -> Columns:
    source = pixels_of(step, columns)
    if source.followers:
        names = " and ".join(repr(name) for _role, name in source.followers)
        raise StepInvalid(
            f'"views" cannot be done to {source.name!r}, which "follow" binds to {names}: each view would need its own; '
            'leave "follow" out, or write a stream without "views"'
        )
    ends = {name: view_column(columns[step.field], name, view) for name, view in step.into.items()}
    made = {name: replace(column, name=name) for name, column in ends.items()}
    for name, view in step.into.items():
        if view.count > 1:
            made[name] = replace(made[name], shape=(view.count, *made[name].fixed_shape))
    after = replaced(step, columns, *made.values())
    single = {name: ends[name].made_by or step.op for name, view in step.into.items() if view.count == 1}
    return {**after, **{name: replace(after[name], made_by=made_by) for name, made_by in single.items()}}


def view_column(source: Column, name: str, view: View) -> Column:
    """The image of one view of a field, as its steps leave it. Raises ``StepInvalid``."""
    key: KeyPath = ("into", name, "steps")
    made: Columns = {IMAGE: replace(source, name=IMAGE)}
    for place, inner in enumerate(view.steps):
        try:
            made = effect(inner, made)
        except StepInvalid as problem:
            raise StepInvalid(str(problem), (*key, place, *problem.key)) from None
        if made.keys() != {IMAGE}:
            others = " and ".join(repr(one) for one in made if one != IMAGE)
            raise StepInvalid(f'"{inner.op}" makes {others}, and a view has its image alone', (*key, place))
    column = made[IMAGE]
    if view.count > 1 and not column.is_fixed:
        inside, advice = _missing(view.steps)
        raise StepInvalid(
            f"the {view.count} views of {name!r} share an array, so they need one shape, and theirs is {column.text}; {advice}",
            (*key, *inside),
        )
    return column


def _missing(steps: Sequence[StepOptions]) -> tuple[KeyPath, str]:
    """What fixes the shape of views that differ: the key of a step, and what to do."""
    for place, step in reversed(list(enumerate(steps))):
        if isinstance(step, CropStep) and step.probability < 1:
            return (
                place,
                "probability",
            ), f'set probability = 1 in "{step.op}", which leaves images as they are otherwise'
        if getattr(step, "size", ()) is None:
            return (place, "size"), f'set size = [height, width] in "{step.op}"'
    return (), 'add "random_resized_crop", "center_crop" or "resize" with size'
