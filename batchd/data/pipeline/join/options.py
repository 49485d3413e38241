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
ALPHA_MAX = 64
NEAR_MAX = 1024
SAMPLES_MAX = 32
"""Of which one may be made, by all steps together."""


@options
class JoinStep(ChanceStep):
    """Base of the steps that make one sample of it and of others."""

    is_cacheable: ClassVar[bool] = False
    is_for_each: ClassVar[bool] = False
    keeps_pixels: ClassVar[bool] = False
    loses_edges: ClassVar[bool] = True
    later: ClassVar[frozenset[str]] = ChanceStep.later | {"near"}
    until_epoch: Annotated[Annotated[int, Range(0, EPOCHS_MAX)] | None, Example(90)] = None
    """The first epoch, counted from 0, in which the step does not act any more. When not set, it
    acts in all."""
    near: Annotated[Annotated[int, Range(2, NEAR_MAX)] | None, Example(16)] = None
    """Draw the others from the samples in the same row of this many batches: its own, and those
    before it. A worker then decodes each image once, and keeps it for the rows to come. When not
    set, they are any of the source, each of which is decoded for each row that it is in."""

    @property
    def others(self) -> int:
        """How many samples join one."""
        return 1


@options
class Mosaic(JoinStep):
    """Put four samples on one canvas, around a point that is drawn: YOLO's mosaic.

    The sample is at the upper left of the point, three others at the upper right, the lower left
    and the lower right; each is cut off at the edge of the canvas. The point is anywhere in the
    middle quarter. Where the step does not act, the sample is alone in the middle of the canvas.
    The same as ultralytics' Mosaic.
    """

    op: Literal["mosaic"] = "mosaic"
    size: Annotated[Size, Example([640, 640])]
    """Half the height and half the width of the canvas, in pixels: what "affine" with this size
    keeps. A "resize" in front makes images fit."""
    fill: Fill = (114,)
    """The value outside of the images: one number from 0 to 255 for all channels, or one for
    each."""

    @property
    def others(self) -> int:
        """One at each other side of the point."""
        return 3


@options
class MixUp(JoinStep):
    """Blend the image with another one, and keep the objects of both: mixup of detection.

    A level becomes ``share * own + (1 - share) * other``, rounded down, with a share in steps of
    1/256. A mask that follows the image is that of the larger share. The same as ultralytics'
    MixUp. Images have one size here, so it comes behind a crop.
    """

    op: Literal["mixup"] = "mixup"
    alpha: Annotated[int, Range(1, ALPHA_MAX)] = 32
    """The share is drawn from Beta(alpha, alpha): 1 is any share as likely, 32 is near a half."""


@options
class CopyPaste(JoinStep):
    """Paste objects of another sample, or of the mirrored image, by their masks.

    Those whose boxes cover little of each box that is there, least first, as in ultralytics'
    CopyPaste. What they cover leaves the masks and boxes of the objects below, as in Simple
    Copy-Paste (Ghiasi and others, CVPR 2021): one with nothing left vanishes.
    """

    op: Literal["copy_paste"] = "copy_paste"
    paste: Literal["other", "mirrored"] = "other"
    """Whose objects: those of an "other" sample, or of the image "mirrored" left to right.
    Ultralytics' modes "mixup" and "flip". For "other", images have one size, so it comes behind a
    crop."""
    fraction: Annotated[float, Range(0.0, 1.0)] = 0.5
    """How many of the objects that may be pasted are."""
    max_overlap: Annotated[float, Range(0.0, 1.0)] = 0.3
    """An object may be pasted if its box covers less than this fraction of each box."""

    def __post_init__(self) -> None:
        if self.near is not None and not self.others:
            raise ValueError('copy_paste of the "mirrored" image joins no other sample; leave near out')

    @property
    def others(self) -> int:
        """None for the mirrored image."""
        return int(self.paste == "other")


def samples_joined(steps: Sequence[JoinStep]) -> int:
    """Of how many samples these steps make one."""
    return prod(1 + step.others for step in steps)
