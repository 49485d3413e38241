"""The step that makes several views of one image, as plain data. Daemon, workers and CLI.

Standard library only.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from batchd.data.pipeline.image.options import SizedStep
from batchd.data.pipeline.options import STEP_KINDS, FieldStep, StepOptions
from batchd.data.samples.checks import Checks, Example, Range
from batchd.data.samples.columns import check_field_names
from batchd.data.samples.kinds import OneOf
from batchd_wire.record import options

VIEWS_MAX = 64
"""Of one field."""
FIELDS_MAX = 16
VIEW_STEPS_MAX = 128
IMAGE = "image"
"""The name of the image inside a view."""
_ALONE = "a view has its image alone"
_LATER = f'put it behind "views", with the name of a field of "into": {_ALONE}'
_JOINS = 'put it in front of "views": it joins samples, and a view is a part of one'
_REFUSED: Mapping[str, str] = {
    "views": "a view has no views of its own; name all of them in one step",
    "decode": 'put it in front of "views", which decodes once for all views',
    "follow": f"{_ALONE}, so no mask, boxes or points can follow it",
    "crop_to_bucket": 'put it in front of "views": batches are made of the images, not of their views',
    "mosaic": _JOINS,
    "mixup": _JOINS,
    "copy_paste": _JOINS,
    "rename": f"{_ALONE}; its field has the name that it has in into",
    "drop": f"{_ALONE}; leave its field out of into",
    "pack": _LATER,
    "pad_batch": _LATER,
    "patches": _LATER,
    "ragged": _LATER,
}
"""Why these steps cannot be inside a view."""


@options
class View:
    """The views of one field: how many, and the steps that make each."""

    __pydantic_config__: ClassVar[dict[str, object]] = StepOptions.__pydantic_config__

    count: Annotated[int, Range(1, VIEWS_MAX)] = 1
    """How many views. More than one have an axis of their own, the first one of the field, and must
    have one shape."""
    steps: Annotated[
        tuple[Annotated[StepOptions, OneOf(STEP_KINDS, "op")], ...],
        Example([{"op": "random_resized_crop", "size": [96, 96]}]),
    ]
    """The steps of each view, in order. The image is called "image" in them, whatever its field is,
    and there is no other field. "decode" is in front of "views"."""


@options
class Views(FieldStep):
    """Make several views of one image, which become fields in its place.

    Each view draws numbers of its own, by (seed, epoch, sample, field, number of the view). So a
    change of one view leaves the others, and all other steps, as they are. Directly behind "decode"
    no more of the image is decoded than the views need.
    """

    op: Literal["views"] = "views"
    field: str = "image"
    """The image that they are views of. It is gone afterwards, unless "into" names it."""
    into: Annotated[
        dict[str, View],
        Example({"image": {"count": 2, "steps": [{"op": "random_resized_crop", "size": [224, 224]}]}}),
    ]
    """The fields that the views become, by name: { image = { count = 2, steps = [...] }, local = {
    count = 8, steps = [...] } }."""

    def __post_init__(self) -> None:
        checks = Checks()
        if not 0 < len(self.into) <= FIELDS_MAX:
            checks.say(f"has {len(self.into)} fields; name 1 to {FIELDS_MAX}", "into")
        for name, view in self.into.items():
            with checks.at("into", name):
                check_field_names(name)
            if len(view.steps) > VIEW_STEPS_MAX:
                checks.say(f"must have {VIEW_STEPS_MAX} or fewer items, not {len(view.steps)}", "into", name, "steps")
            for place, step in enumerate(view.steps):
                if isinstance(step, SizedStep) and step.drawn:
                    text = (
                        f'"{step.op}" with several sizes cannot be inside of "views": a batch draws one for its images'
                    )
                    checks.say(text, "into", name, "steps", place)
                if step.op in _REFUSED:
                    text = f'"{step.op}" cannot be inside of "views": {_REFUSED[step.op]}'
                    checks.say(text, "into", name, "steps", place)
        checks.done()

    @property
    def is_random(self) -> bool:
        """True if a step of any view is."""
        return any(step.is_random for step in self.inner_steps.values())

    @property
    def draws_shape(self) -> bool:
        """True if a step of any view does."""
        return any(step.draws_shape for step in self.inner_steps.values())

    @property
    def is_cacheable(self) -> bool:
        """True if all steps of all views are."""
        return all(step.is_cacheable for step in self.inner_steps.values())

    @property
    def touches(self) -> frozenset[str]:
        """The image, and the fields that are made."""
        return frozenset({self.field, *self.into})

    @property
    def inner_steps(self) -> dict[tuple[str | int, ...], StepOptions]:
        """The steps of all views, by their keys."""
        return {
            ("into", name, "steps", place): step
            for name, view in self.into.items()
            for place, step in enumerate(view.steps)
        }
