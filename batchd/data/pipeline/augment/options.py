"""The steps that augment images, as plain data. Daemon, workers and CLI; standard library only.

They come between ``decode`` and what makes numbers of pixels, and work on the image as the steps
before them leave it. Each takes uint8 pixels; what is not said of channels holds for 1 to 4.
"""

from typing import Annotated, ClassVar, Literal, TypeAlias

from batchd.data.pipeline.image.options import ChanceStep, Fill
from batchd.data.samples.checks import Range
from batchd_wire.record import options

SIGMA_MAX = 64.0
FACTOR_MAX = 10.0
ERASED_MAX = 100


def check_range(name: str, ends: tuple[float, float]) -> None:
    """Raise ``ValueError`` for a range that goes downwards."""
    low, high = ends
    if low > high:
        raise ValueError(f"{name} = [{low:g}, {high:g}] goes downwards; write the smaller number first")


@options
class CertainStep(ChanceStep):
    """Base of the steps that draw nothing but whether they act."""

    varies: ClassVar[bool] = False


@options
class Solarize(CertainStep):
    """Invert the levels from ``threshold`` on: ``255 - pixel``. Pillow's ImageOps.solarize."""

    op: Literal["solarize"] = "solarize"
    threshold: Annotated[int, Range(0, 256)] = 128
    """The smallest level that is inverted; 0 inverts all, 256 none."""


@options
class Posterize(CertainStep):
    """Keep the upper ``bits`` of each level, zeros below them. Pillow's ImageOps.posterize."""

    op: Literal["posterize"] = "posterize"
    bits: Annotated[int, Range(1, 8)] = 4
    """How many of the 8 bits are kept."""


@options
class Equalize(CertainStep):
    """Spread the levels of each channel so that all are about as frequent.

    Pillow's ImageOps.equalize, of the image after the earlier steps.
    """

    op: Literal["equalize"] = "equalize"


@options
class Autocontrast(CertainStep):
    """Stretch each channel: its smallest level becomes 0 and its largest 255.

    Pillow's ImageOps.autocontrast, of the image after the earlier steps.
    """

    op: Literal["autocontrast"] = "autocontrast"


@options
class Invert(CertainStep):
    """Invert all levels: ``255 - pixel``. Pillow's ImageOps.invert."""

    op: Literal["invert"] = "invert"


@options
class Sharpen(ChanceStep):
    """Make ``f * pixel + (1 - f) * smooth`` with f drawn from ``factor``, rounded once.

    ``smooth`` is the mean of the nine pixels around, where the pixel itself counts five times;
    pixels at the edge stay. Pillow's ImageEnhance.Sharpness, torchvision's adjust_sharpness.
    """

    op: Literal["sharpen"] = "sharpen"
    factor: tuple[Annotated[float, Range(0.0, FACTOR_MAX)], Annotated[float, Range(0.0, FACTOR_MAX)]] = (2.0, 2.0)
    """The smallest and the largest factor: 0 is smooth, 1 changes nothing, 2 is twice as sharp."""

    def __post_init__(self) -> None:
        check_range("factor", self.factor)

    @property
    def varies(self) -> bool:
        """True if there is a choice of factors."""
        return self.factor[0] < self.factor[1]


@options
class Blur(ChanceStep):
    """Blur with a Gaussian whose standard deviation is drawn from ``sigma``.

    Weights are ``exp(-distance**2 / (2 * sigma**2))`` up to four times sigma, rounded to whole
    numbers; at the edges the image is reflected, without its last pixel. torchvision's GaussianBlur
    with a kernel of that size.
    """

    op: Literal["blur"] = "blur"
    sigma: tuple[Annotated[float, Range(0.01, SIGMA_MAX)], Annotated[float, Range(0.01, SIGMA_MAX)]] = (0.1, 2.0)
    """The smallest and the largest standard deviation, in pixels."""

    def __post_init__(self) -> None:
        check_range("sigma", self.sigma)

    @property
    def varies(self) -> bool:
        """True if there is a choice of deviations."""
        return self.sigma[0] < self.sigma[1]


Area: TypeAlias = Annotated[float, Range(1e-6, 1.0)]
Aspect: TypeAlias = Annotated[float, Range(1e-3, 1e3)]


@options
class Erase(ChanceStep):
    """Cover a random rectangle that lies inside the image: torchvision's RandomErasing.

    Ten attempts to draw area, proportions, row and column of a rectangle that fits; if none does,
    the image stays. A mask that follows the image is unchanged.
    """

    op: Literal["erase"] = "erase"
    area: tuple[Area, Area] = (0.02, 0.33)
    """Smallest and largest area of the rectangle, as a fraction of the image's."""
    aspect: tuple[Aspect, Aspect] = (0.3, 3.3)
    """Smallest and largest width of the rectangle divided by its height; drawn evenly from the
    logarithm."""
    count: Annotated[int, Range(1, ERASED_MAX)] = 1
    """How many rectangles. They may overlap."""
    fill: Literal["mean", "noise"] | Fill = "mean"
    """"mean" is the mean of ImageNet: 124, 116 and 104 in red, green and blue. "noise" is an even
    random level for each channel of each pixel. A colour is one number from 0 to 255 for all
    channels, or one for each."""

    def __post_init__(self) -> None:
        check_range("area", self.area)
        check_range("aspect", self.aspect)
