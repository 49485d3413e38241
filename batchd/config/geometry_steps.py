"""The steps that move the pixels of an image, beyond those of ``image_steps``, and what moves along. Plain data.

Daemon, workers and CLI; standard library only.

Angles and quarter turns are counter-clockwise, as the image is looked at. ``fill`` is what stands where no image is: one number
for all channels, or one for each, in their order.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from batchd.config.step import SIDE_PIXELS_MAX, Range, Size, StepOptions

Level: TypeAlias = Annotated[int, Range(0, 255)]
Fill: TypeAlias = tuple[Level, ...]
Margin: TypeAlias = Annotated[int, Range(0, SIDE_PIXELS_MAX)]
Degrees: TypeAlias = Annotated[float, Range(-180.0, 180.0)]
QuarterTurns: TypeAlias = Annotated[int, Range(0, 3)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCrop(StepOptions):
    """Cut ``size`` out of a random place, each as likely; with ``padding``, out of the image with this much ``fill`` around it.

    If that is still smaller than ``size``, it is centred on ``fill``. Drawn: the row, then the
    column.
    """

    op: Literal["random_crop"] = "random_crop"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    size: Size
    """Height and width afterwards, in pixels."""
    padding: Margin = 0
    """Pixels that are put around the image first, on each side."""
    fill: Fill = (0,)
    """The value outside of the image: one number from 0 to 255 for all channels, or one for
    each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad(StepOptions):
    """Put ``fill`` around the image: as much as makes it ``size``, or a ``border``. Needs one of the two."""

    op: Literal["pad"] = "pad"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    size: Size | None = None
    """Height and width afterwards, in pixels. An image that is larger is a bad sample; a "resize" in front makes it fit."""
    place: Literal["center", "top_left"] = "center"
    """Where in ``size`` the image stands; an odd pixel goes below and to the right."""
    border: tuple[Margin, Margin, Margin, Margin] | None = None
    """Pixels above, below, left and right of the image. A later step must then fix the size."""
    fill: Fill = (0,)
    """The value outside of the image: one number from 0 to 255 for all channels, or one for
    each."""

    def __post_init__(self) -> None:
        """One way to say how much, not two and not none."""
        if (self.size is None) == (self.border is None):
            raise ValueError("pad needs either size = [height, width] or border = [above, below, left, right]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate(StepOptions):
    """Rotate the image counter-clockwise: by ``quarter_turns``, or by an angle out of ``degrees``. Needs one of the two.

    An odd number of quarter turns swaps height and width. An angle turns the image about its middle on a canvas that stays:
    what leaves it is gone, and ``fill`` stands where nothing comes from; "linear" mixes with ``fill`` at the image's edge.
    """

    op: Literal["rotate"] = "rotate"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    quarter_turns: tuple[QuarterTurns, ...] | None = None
    """Numbers of quarter turns; one is drawn, each with the same probability: [1] always turns
    once, [0, 1, 2, 3] any way up."""
    degrees: tuple[Degrees, Degrees] | None = None
    """The smallest and the largest angle; each in between is as likely. [-10, 10] is up to 10 degrees either way."""
    interpolation: Literal["nearest", "linear"] = "linear"
    """How pixels are made from pixels, for an angle; a quarter turn only moves them."""
    fill: Fill = (0,)
    """The value outside of the image: one number from 0 to 255 for all channels, or one for
    each."""

    def __post_init__(self) -> None:
        """One way to say how far, with something to choose from, and upwards."""
        if (self.quarter_turns is None) == (self.degrees is None):
            raise ValueError("rotate needs either quarter_turns = [0, 1, 2, 3] or degrees = [smallest, largest]")
        if self.quarter_turns == ():
            raise ValueError("quarter_turns = [] leaves nothing to draw from; [0] is no turn")
        if self.degrees is not None and self.degrees[0] > self.degrees[1]:
            low, high = self.degrees
            raise ValueError(f"degrees = [{low}, {high}] goes downwards; write the smaller number first")


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow(StepOptions):
    """From here on, the ``mask``, ``boxes`` and ``points`` of an image follow what is done to its geometry.

    Needs one of them. Stands right behind ``decode``, or before all steps on the image. Coordinates
    are x to the right and y down, in pixels of the upright image, where the first pixel reaches
    from 0 to 1.
    """

    op: Literal["follow"] = "follow"
    """The step's name."""
    field: str = "image"
    """The image that is followed."""
    mask: str | None = None
    """A field with a number from 0 to 255 for each pixel of the image: a PNG of one channel or with a palette (whose indices
    count), or uint8[?,?]. Made uint8 [height, width]; never interpolated."""
    mask_fill: Level = 0
    """The value of the mask outside of the image; 255 is a common "ignore"."""
    boxes: str | None = None
    """A field of float32[?,4]: left, top, right, bottom. Cut off at the image's edge; an empty box
    becomes four zeros, in its place."""
    points: str | None = None
    """A field of float32[?,2]: x, y. A point outside of the image keeps its coordinates, which say so."""

    def __post_init__(self) -> None:
        """Somebody follows, and each is somebody else."""
        if not self.followers:
            raise ValueError('follow needs somebody who follows: mask = "…", boxes = "…" or points = "…"')
        if len(self.touches) != len(self.followers) + 1:
            raise ValueError("follow names one field twice; image, mask, boxes and points are different fields")

    @property
    def followers(self) -> tuple[tuple[str, str], ...]:
        """What follows, and the field that it is in."""
        named = (("mask", self.mask), ("boxes", self.boxes), ("points", self.points))
        return tuple((role, name) for role, name in named if name is not None)

    @property
    def touches(self) -> frozenset[str]:
        """The image and all that follows it."""
        return frozenset({self.field, *(name for _role, name in self.followers)})
