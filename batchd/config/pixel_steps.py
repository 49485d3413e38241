"""The steps that change what the pixels of an image are, beyond those of ``image_steps``. Plain data.

Daemon, workers and CLI; standard library only.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from batchd.config.geometry_steps import Fill
from batchd.config.image_steps import Factors
from batchd.config.step import Range, Size, StepOptions

Strength: TypeAlias = Annotated[float, Range(0.0, 10.0)]

HOLES_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ColorJitter(StepOptions):
    """Change brightness, contrast, saturation and hue at random, in a random order, as torchvision's ColorJitter does.

    With f drawn from [1 - strength, 1 + strength], but not below 0, brightness makes ``f * pixel``, contrast ``f * pixel +
    (1 - f) * mean`` with the mean grey level of the image, saturation ``f * pixel + (1 - f) * grey`` with the pixel's own grey
    level. Each rounds to 8 bits; "gray" says what grey is. Drawn: the order, then what each of the four takes.
    """

    op: Literal["color_jitter"] = "color_jitter"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    brightness: Strength = 0.0
    """How far from 1 the factor of brightness may be; 0.4 is from 0.6 to 1.4, 0 leaves it alone."""
    contrast: Strength = 0.0
    """How far from 1 the factor of contrast may be."""
    saturation: Strength = 0.0
    """How far from 1 the factor of saturation may be. An image of one channel has none."""
    hue: Annotated[float, Range(0.0, 0.5)] = 0.0
    """How far the hue may go round the circle of colours, either way; 0.5 is to the opposite. Saturation and value (HSV) stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gray(StepOptions):
    """Make the image grey: ``0.299 red + 0.587 green + 0.114 blue`` (Rec. 601), rounded."""

    op: Literal["gray"] = "gray"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    channels: Literal[1, 3] = 3
    """Channels afterwards: 3 that are alike, or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutout(StepOptions):
    """Cover random rectangles of the image. Their middles are anywhere in it, so a part may lie outside.

    Drawn for each: the row, then the column of its middle. A mask that follows the image stays as it is.
    """

    op: Literal["cutout"] = "cutout"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    holes: Annotated[int, Range(1, HOLES_MAX)] = 1
    """How many."""
    size: Size
    """Height and width of each, in pixels."""
    fill: Fill = (0,)
    """The value of the rectangles: one number from 0 to 255 for all channels, or one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtractMean(StepOptions):
    """Make float32: ``(pixel - mean) * scale``, channel by channel, each rounded once. Only ``layout`` may follow."""

    op: Literal["subtract_mean"] = "subtract_mean"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    mean: Factors = (123.68, 116.779, 103.938)
    """The values to subtract, in the order of the channels, where white is 255. The default is
    ImageNet's, for "rgb"."""
    scale: Annotated[float, Range(-1e6, 1e6)] = 1.0
    """The factor of the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class To(StepOptions):
    """Set type and order of the numbers in one step, without subtracting a mean."""

    op: Literal["to"] = "to"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    dtype: Literal["uint8", "float32", "float16"] = "float32"
    """Type of the numbers; each is rounded once."""
    scale: bool = True
    """Whether floating-point numbers are divided by 255, so that white is 1. uint8 stays what it is."""
    layout: Literal["nhwc", "nchw"] = "nchw"
    """"nhwc": height, width, channels (as decoded). "nchw": channels first (as torch's convolutions name them)."""
