"""The steps that augment images, as plain data. Daemon, workers and CLI; standard library only.

They come between ``decode`` and what makes numbers of pixels, and work on the image as the steps
before them leave it. Each takes uint8 pixels; what is not said of channels holds for 1 to 4.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, TypeAlias

from batchd.data.pipeline.image.options import (
    ChanceStep,
    CropToBucket,
    Decode,
    Degrees,
    Fill,
    Follow,
    ImageStep,
    Layout,
    Normalize,
    SizedStep,
    SubtractMean,
    To,
)
from batchd.data.pipeline.join.options import JoinStep
from batchd.data.pipeline.options import STEP_KINDS, Size, StepOptions
from batchd.data.samples.checks import Example, Range
from batchd.data.samples.kinds import OneOf
from batchd_wire.record import options

SIGMA_MAX = 64.0
FACTOR_MAX = 10.0
ERASED_MAX = 100
SHEAR_MAX = 80.0
DISTORTION_MAX = 0.65
"""Up to 2/3 of the way to the middle, four corners always are a convex shape."""
ALPHA_MAX = 10_000.0


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


@options
class WarpStep(ChanceStep):
    """Base of the steps that move pixels anywhere, on a canvas that stays."""

    loses_edges: ClassVar[bool] = True
    interpolation: Literal["nearest", "linear"] = "linear"
    """How pixels are made from pixels; "linear" mixes with ``fill`` at the image's edge."""
    fill: Fill = (0,)
    """The value outside of the image: one number from 0 to 255 for all channels, or one for
    each."""


Shear: TypeAlias = Annotated[float, Range(-SHEAR_MAX, SHEAR_MAX)]
Zoom: TypeAlias = Annotated[float, Range(0.1, 10.0)]
Share: TypeAlias = Annotated[float, Range(0.0, 1.0)]


@options
class Affine(WarpStep):
    """Shear, scale, rotate and move the image about its middle: torchvision's RandomAffine.

    Drawn: the angle, the distances across and down, the scale, both shears; each that has a choice.
    """

    takes_canvas: ClassVar[bool] = True
    later: ClassVar[frozenset[str]] = frozenset({"probability", "size"})
    op: Literal["affine"] = "affine"
    degrees: tuple[Degrees, Degrees] = (0.0, 0.0)
    """The smallest and the largest angle, counter-clockwise."""
    translate: tuple[Share, Share] = (0.0, 0.0)
    """The longest way across and down, as a fraction of width and height, in either direction. It
    is rounded to pixels."""
    scale: tuple[Zoom, Zoom] = (1.0, 1.0)
    """The smallest and the largest factor; 2 shows the image twice as large."""
    shear_x: tuple[Shear, Shear] = (0.0, 0.0)
    """The smallest and the largest angle by which columns are slanted, in degrees."""
    shear_y: tuple[Shear, Shear] = (0.0, 0.0)
    """The smallest and the largest angle by which rows are slanted, in degrees."""
    size: Annotated[Size | None, Example([640, 640])] = None
    """Height and width afterwards, in pixels: the middle is kept, as by a "center_crop" behind, and
    nothing else is made. When not set, the canvas stays."""

    def __post_init__(self) -> None:
        for name in ("degrees", "scale", "shear_x", "shear_y"):
            check_range(name, getattr(self, name))
        if self.size is not None and self.probability < 1:
            raise ValueError('affine with size acts on every image; leave probability out, or use "center_crop"')

    @property
    def keeps_pixels(self) -> bool:
        """Unless it makes another size."""
        return self.size is None

    @property
    def may_resize(self) -> bool:
        """True if it makes another size."""
        return self.size is not None

    @property
    def fixes_shape(self) -> bool:
        """True if it makes another size."""
        return self.size is not None

    @property
    def varies(self) -> bool:
        """True if there is any choice."""
        ranges = (self.degrees, self.scale, self.shear_x, self.shear_y)
        return any(self.translate) or any(low < high for low, high in ranges)


@options
class Perspective(WarpStep):
    """Look at the image from aside: each corner is moved inwards. torchvision's RandomPerspective.

    Drawn: how far each corner is moved, across and down, from the top left clockwise.
    """

    op: Literal["perspective"] = "perspective"
    distortion: Annotated[float, Range(0.0, DISTORTION_MAX)] = 0.5
    """The longest way of a corner, as a fraction of that to the middle of the image."""

    @property
    def varies(self) -> bool:
        """True unless corners stay."""
        return self.distortion > 0


@options
class Elastic(WarpStep):
    """Move each pixel by smooth noise: elastic distortion (Simard et al. 2003).

    The distance is ``alpha`` times even noise from -1 to 1, smoothed by a Gaussian. torchvision's
    ElasticTransform with twice this alpha, for images as wide as high. An image of more than
    16,777,216 pixels is a bad sample.
    """

    op: Literal["elastic"] = "elastic"
    alpha: Annotated[float, Range(0.0, ALPHA_MAX)] = 25.0
    """How strong, in pixels before smoothing."""
    sigma: Annotated[float, Range(0.5, SIGMA_MAX)] = 5.0
    """How smooth: the standard deviation of the Gaussian, in pixels."""


@options
class PolicyStep(WarpStep):
    """Base of the steps that draw other changes and how strong they are.

    Shears are about the top left corner, rotations about the middle. Those that mix the image with
    another make what ``color_jitter`` makes of a factor.
    """

    fill: Fill = (128,)
    """The value outside of the image: one number from 0 to 255 for all channels, or one for
    each."""


@options
class RandAugment(PolicyStep):
    """Make ``count`` changes, drawn from 15, of about the same strength: timm's RandAugment.

    ``count = 2, magnitude = 9, deviation = 0.5`` is timm's "rand-m9-mstd0.5-inc1": two of
    autocontrast, equalize, invert, rotate, posterize, solarize, solarize_add, color, contrast,
    brightness, sharpness, shear_x, shear_y, translate_x and translate_y, which may be the same.
    Drawn for each: which, whether it acts, two numbers for a normal magnitude, and its direction.
    """

    op: Literal["rand_augment"] = "rand_augment"
    count: Annotated[int, Range(1, 10)] = 2
    """How many changes."""
    magnitude: Annotated[float, Range(0.0, 10.0)] = 9.0
    """The mean strength. 10 is a rotation by 30 degrees, a shear by 0.3, 0.45 of a side, a factor
    of 0.1 or 1.9, no bits, all levels inverted, 110 added to the dark ones."""
    deviation: Annotated[float, Range(0.0, 10.0)] = 0.5
    """The standard deviation of the strength, which stays between 0 and 10."""
    operation_probability: Annotated[float, Range(0.0, 1.0)] = 0.5
    """How often each of the changes acts."""


@options
class TrivialAugment(PolicyStep):
    """Make one change of any strength, drawn from 14: torchvision's TrivialAugmentWide.

    identity, shear_x, shear_y (to 0.99), translate_x, translate_y (to 32 pixels), rotate (to 135
    degrees), brightness, color, contrast, sharpness (to 0.01 or 1.99), posterize (8 to 2 bits),
    solarize (from 255 to 0), autocontrast, equalize. Drawn: which, one of 31 strengths, and its
    direction.
    """

    op: Literal["trivial_augment"] = "trivial_augment"


@options
class AutoAugment(PolicyStep):
    """Make two changes, as one of 25 learned policies says: torchvision's AutoAugment.

    Drawn: the policy, then for each of its changes whether it acts and its direction.
    """

    op: Literal["auto_augment"] = "auto_augment"
    policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """The data for which the policies were learned."""


@options
class AugMix(PolicyStep):
    """Mix the image with chains of changes of it: torchvision's AugMix, with alpha = 1.

    Fields that follow the image stay, as it stays in the mixture. Drawn: the weight of the chains,
    the bounds between theirs, then for each its length and three changes, as ``trivial_augment``.
    """

    loses_edges: ClassVar[bool] = False
    op: Literal["augmix"] = "augmix"
    severity: Annotated[int, Range(1, 10)] = 3
    """How strong the changes are: of ten strengths, the first so many are drawn."""
    width: Annotated[int, Range(1, 10)] = 3
    """How many chains."""
    depth: Annotated[int, Range(0, 3)] = 0
    """How many changes a chain has; 0 draws 1 to 3 for each."""


NOT_CHOSEN = (Decode, Follow, CropToBucket, JoinStep, Normalize, SubtractMean, To, Layout)
CHOICES_MAX = 100


@options
class Choose(ChanceStep):
    """Do one of several steps on the image, drawn by their weights.

    Drawn: which, then the numbers of all of them, so that no later draw moves.
    """

    keeps_pixels: ClassVar[bool] = False
    loses_edges: ClassVar[bool] = True
    may_resize: ClassVar[bool] = True
    op: Literal["choose"] = "choose"
    of: Annotated[
        tuple[Annotated[StepOptions, OneOf(STEP_KINDS, "op")], ...], Example([{"op": "blur"}, {"op": "solarize"}])
    ]
    """The steps, any on images but "decode", "follow", "crop_to_bucket", those that join samples
    and those that make numbers. Their field is that of this step."""
    weights: tuple[Annotated[float, Range(0.0, 1e6)], ...] | None = None
    """How often each is drawn, relative to the others; equally often when not set."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.of) <= CHOICES_MAX:
            raise ValueError(f"choose needs 1 to {CHOICES_MAX} steps in of = [...]")
        for step in self.of:
            if isinstance(step, SizedStep) and step.drawn:
                raise ValueError(f'choose cannot have "{step.op}" with several sizes in of = [...]: batches draw those')
            if not isinstance(step, ImageStep) or isinstance(step, NOT_CHOSEN):
                raise ValueError(  # noqa: TRY004  a value of the configuration
                    f'choose cannot have "{step.op}" in of = [...]: it is for steps that change an image'
                )
            if step.field not in {"image", self.field}:
                raise ValueError(f'choose has field = "{self.field}", and "{step.op}" in it another one')
        if self.weights is not None and (len(self.weights) != len(self.of) or not sum(self.weights)):
            raise ValueError("choose needs a weight for each step in of = [...], and one above 0")

    @property
    def steps(self) -> tuple[ImageStep, ...]:
        """The steps, on the field of this one."""
        return tuple(replace(step, field=self.field) for step in self.of if isinstance(step, ImageStep))

    @property
    def varies(self) -> bool:
        """True if there is a choice, or chance in one of them."""
        return len(self.of) > 1 or any(step.is_random for step in self.of)

    @property
    def draws_shape(self) -> bool:
        """True if one of the steps may leave the image in another size than without it."""
        is_certain = self.probability == 1 and len(self.of) == 1
        return any(step.draws_shape or (not is_certain and not step.keeps_pixels) for step in self.steps)
