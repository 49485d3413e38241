"""The steps that make one sample of several, as plain data. Standard library only.

    sample       --steps before--+
    other sample --steps before--+--mosaic--> one sample --steps behind-->

The others are of the same stream, drawn by (seed, epoch, sample): so a row is the same on every
worker. All that follows the image is joined; other fields are the sample's own.
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated, ClassVar, Literal

from batchd.data.pipeline.image.options import ChanceStep, Fill
from batchd.data.pipeline.options import Size
from batchd.data.samples.checks import Example, Range
from batchd_wire.record import options

EPOCHS_MAX = 1_000_000_000
SAMPLES_MAX = 32
"""Of which one may be made, by all steps together."""


@options
class JoinStep(ChanceStep):
    """Base of the steps that make one sample of it and of others."""

    is_cacheable: ClassVar[bool] = False
    is_for_each: ClassVar[bool] = False
    keeps_pixels: ClassVar[bool] = False
    loses_edges: ClassVar[bool] = True
    others: ClassVar[int] = 1
    """How many samples join one."""
    until_epoch: Annotated[Annotated[int, Range(0, EPOCHS_MAX)] | None, Example(90)] = None
    """The first epoch, counted from 0, in which the step does not act any more. When not set, it
    acts in all."""


@options
class Mosaic(JoinStep):
    """Put four samples on one canvas, around a point that is drawn: YOLO's mosaic.

    The sample is at the upper left of the point, three others at the upper right, the lower left
    and the lower right; each is cut off at the edge of the canvas. The point is anywhere in the
    middle quarter. Where the step does not act, the sample is alone in the middle of the canvas.
    The same as ultralytics' Mosaic.
    """

    others: ClassVar[int] = 3
    op: Literal["mosaic"] = "mosaic"
    size: Annotated[Size, Example([640, 640])]
    """Half the height and half the width of the canvas, in pixels: what "affine" with this size
    keeps. A "resize" in front makes images fit."""
    fill: Fill = (114,)
    """The value outside of the images: one number from 0 to 255 for all channels, or one for
    each."""


def samples_joined(steps: Sequence[JoinStep]) -> int:
    """Of how many samples these steps make one."""
    return prod(1 + step.others for step in steps)
