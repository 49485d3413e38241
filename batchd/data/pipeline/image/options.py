"""The steps on images, as plain data. Daemon, workers and CLI; standard library only.

Each step is one class under ``options``. The text under a field is its documentation wherever the
field is shown: in ``batchd config``, in the JSON Schema and in an error message.

Angles and quarter turns are counter-clockwise for the viewer. ``fill`` is the value
outside of the image: one number for all channels, or one for each, in their order.
"""

from fractions import Fraction
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, TypeAlias

from batchd.data.pipeline.options import FILE_BYTES_MAX, SIDE_PIXELS_MAX, FieldStep, Interpolation, Side, Size
from batchd.data.samples.checks import Example, Range
from batchd.data.samples.image_header import PIXELS_MAX
from batchd_wire.record import options


@options
class ImageStep(FieldStep):
    """Base of the steps on images and on what follows them."""

    is_for_each: ClassVar[bool] = True
    takes_canvas: ClassVar[bool] = False
    """Whether it makes another image of one in parts, see ``Canvas``."""
    op: str
    field: str = "image"

    @property
    def keeps_pixels(self) -> bool:
        """Whether no image gets more pixels."""
        return True

    @property
    def may_resize(self) -> bool:
        """Whether a step on pixels can change their number, which is otherwise known before."""
        return False

    @property
    def draws_shape(self) -> bool:
        """Chance decides pixels alone, unless a step says otherwise."""
        return False


@options
class ChanceStep(ImageStep):
    """Base of the steps that act on some of the images.

    A step draws the same numbers whether it acts or not, so those of later steps are the same.
    """

    later: ClassVar[frozenset[str]] = frozenset({"probability"})
    loses_edges: ClassVar[bool] = False
    """Whether parts of the image may leave it, and boxes with them."""
    probability: Annotated[float, Range(0.0, 1.0)] = 1.0
    """How often the step acts, from 0 (never) to 1 (always)."""

    @property
    def varies(self) -> bool:
        """Whether the step draws numbers of its own."""
        return True

    @property
    def is_random(self) -> bool:
        """True unless the result is certain."""
        return self.probability > 0 and (self.probability < 1 or self.varies)


DRAWN_SIZES_MAX = 64


@options
class SizedStep(ImageStep):
    """Base of the steps that scale an image to a size, which may be one that each batch draws."""

    keeps_pixels: ClassVar[bool] = False
    later: ClassVar[frozenset[str]] = frozenset({"sizes"})
    size: Annotated[Size | None, Example([640, 640])] = None
    """Height and width afterwards, in pixels."""
    sizes: Annotated[tuple[Size, ...], Example([[480, 480], [512, 512]])] = ()
    """Instead of ``size``, 2 to 64 of them: each batch draws one for all of its images, each as
    likely. ``balance`` of the stream has ranks draw the same one."""

    def __post_init__(self) -> None:
        if self.drawn and not 1 < len(self.drawn) <= DRAWN_SIZES_MAX:
            name = "sizes" if self.sizes else "shorter_sides"
            raise ValueError(f"each batch draws one of 2 to {DRAWN_SIZES_MAX} {name}, and these are {len(self.drawn)}")

    @property
    def drawn(self) -> tuple[Size | Side, ...]:
        """What each batch draws one of; empty if it draws none."""
        return self.sizes

    @property
    def is_random(self) -> bool:
        """True if a batch draws a size."""
        return bool(self.drawn)

    @property
    def draws_shape(self) -> bool:
        """True if a batch draws a size."""
        return bool(self.drawn)

    @property
    def fixes_shape(self) -> bool:
        """True for one size, not for a side."""
        return self.size is not None


@options
class CropStep(ChanceStep):
    """Base of the steps that keep a box of the image, which may be padded before."""

    keeps_pixels: ClassVar[bool] = False
    loses_edges: ClassVar[bool] = True
    size: Annotated[Size, Example([224, 224])]
    """Height and width afterwards, in pixels."""

    @property
    def draws_shape(self) -> bool:
        """True if it leaves some images as they are."""
        return 0 < self.probability < 1

    @property
    def fixes_shape(self) -> bool:
        """True if it crops all."""
        return self.probability == 1


@options
class Decode(ImageStep):
    """Turn the bytes of a JPEG, PNG, WebP, BMP or GIF file into an image of 8 bits per channel.

    Always the first step. Alpha is dropped: a pixel has the colour that the file stores. 16 bits
    become 8, of an animation the first frame is used.
    """

    op: Literal["decode"] = "decode"
    color: Literal["rgb", "bgr", "gray"] = "rgb"
    """Order of the channels: "rgb" and "bgr" give three, "gray" gives one: the luma of a JPEG, and
    of other formats what the "gray" step makes of the colours."""
    exif: Literal["apply", "ignore"] = "apply"
    """Whether the camera's orientation tag turns the image upright ("apply") or is left alone
    ("ignore")."""
    scale: Literal["auto", "off"] = "auto"
    """"auto" decodes a JPEG at 1/2, 1/4 or 1/8 of its size where the part that is used is still no
    smaller than what it is resized to; "off" always decodes at full size."""
    max_pixels: Annotated[int, Range(1, PIXELS_MAX)] = 100_000_000
    """Width times height, in pixels, above which an image is a bad sample; read from its header
    before decoding. So is an image that needs more memory to decode than 8 bytes for each of these
    pixels, or that announces more pixels than its bytes are believed to hold. For JPEG, PNG and GIF
    that is what the format allows. WebP, run-length coded BMP, arithmetic coded JPEG, and GIF whose
    first frame is smaller than its screen may have 1040 pixels for each byte, and 4.2 million in a
    file of up to 4 KiB. A PNG of up to 4 KiB with less than 8 bits per pixel may have 9 million,
    and 4.2 million if it is interlaced. A larger image that is nearly empty passes as a PNG of 8
    bits per pixel."""
    max_bytes: Annotated[int, Range(1, FILE_BYTES_MAX)] = 64 * 1024 * 1024
    """Length of a file, in bytes, above which it is a bad sample."""


@options
class Resize(SizedStep):
    """Scale the image: to ``size``, or with its proportions to a side or a number of pixels.

    Needs one of ``size``, ``sizes``, ``shorter_side``, ``shorter_sides``, ``longer_side`` and
    ``max_pixels``.
    """

    later: ClassVar[frozenset[str]] = frozenset(
        {"longer_side", "max_longer_side", "multiple_of", "sizes", "shorter_sides", "max_pixels", "min_pixels"}
    )
    op: Literal["resize"] = "resize"
    size: Annotated[Size | None, Example([224, 224])] = None
    """Height and width afterwards, in pixels; proportions are not kept."""
    shorter_side: Side | None = None
    """Length of the shorter side afterwards, in pixels; the longer follows. A later step must then
    fix the size."""
    shorter_sides: Annotated[tuple[Side, ...], Example([480, 512, 544])] = ()
    """Instead of ``shorter_side``, 2 to 64 of them: each batch draws one, as of ``sizes``."""
    longer_side: Side | None = None
    """Length of the longer side afterwards, in pixels; the shorter follows, at least 1 pixel."""
    max_longer_side: Side | None = None
    """With ``shorter_side`` or ``shorter_sides``: the longest that the longer side may be; the
    shorter one follows."""
    multiple_of: Side | None = None
    """Round both sides to the nearest multiple of this, at least one and at most
    ``max_longer_side``; not with ``size`` or ``sizes``."""
    max_pixels: Annotated[int, Range(1, PIXELS_MAX)] | None = None
    """The most pixels afterwards, height times width: a larger image shrinks until both sides,
    rounded down to multiples of ``multiple_of``, fit. Others keep their size, rounded to the
    nearest multiples, as Qwen2-VL's smart_resize does."""
    min_pixels: Annotated[int, Range(1, PIXELS_MAX)] | None = None
    """With ``max_pixels``: the least pixels afterwards; a smaller image grows, its sides are
    rounded up."""
    interpolation: Interpolation = "auto"
    """How pixels are made from pixels; "auto" is "linear" below a reduction of 2 and "area" from
    there on."""

    def __post_init__(self) -> None:
        ways = self.size, self.sizes, self.shorter_side, self.shorter_sides, self.longer_side, self.max_pixels
        if sum(map(bool, ways)) != 1:
            raise ValueError(
                "resize needs either size = [height, width], shorter_side = pixels, longer_side = pixels or max_pixels = height "
                "* width; or, for each batch to draw, sizes = [[height, width], ...] or shorter_sides = [pixels, ...]"
            )
        SizedStep.__post_init__(self)
        unit = self.multiple_of or 1
        if self.min_pixels is not None and not self.min_pixels <= (self.max_pixels or 0):
            raise ValueError("min_pixels is for max_pixels, and no more than it")
        if self.max_pixels is not None and self.max_pixels < unit * unit:
            raise ValueError(f"max_pixels is less than one square of multiple_of = {unit}")
        shorter = self.shorter_side or max(self.shorter_sides, default=0)
        if self.max_longer_side is not None and not shorter:
            raise ValueError("max_longer_side limits what shorter_side leads to; longer_side alone is a length")
        if self.multiple_of is not None and (self.size or self.sizes):
            raise ValueError("multiple_of is for one side or max_pixels: write multiples into size")
        if self.max_longer_side is not None and max(shorter, self.multiple_of or 1) > self.max_longer_side:
            raise ValueError("max_longer_side is less than shorter_side or multiple_of")

    @property
    def drawn(self) -> tuple[Size | Side, ...]:
        """See ``SizedStep``."""
        return self.sizes or self.shorter_sides


@options
class CenterCrop(CropStep):
    """Cut ``size`` out of the middle, or another place. A smaller image is centred on black."""

    later: ClassVar[frozenset[str]] = CropStep.later | {"place"}
    op: Literal["center_crop"] = "center_crop"
    varies: ClassVar[bool] = False
    place: tuple[Annotated[float, Range(0.0, 1.0)], Annotated[float, Range(0.0, 1.0)]] = (0.5, 0.5)
    """Where the box is, from [0, 0], at the top and left, to [1, 1], at the bottom and right; the
    default is the middle. Three views at [0, 0], [0.5, 0.5] and [1, 1] of an image whose shorter
    side fits cover its longer one."""


@options
class RandomResizedCrop(CropStep):
    """Crop a random area and proportions, scaled to ``size``: torchvision's RandomResizedCrop.

    Ten attempts to fit a random box into the image; then the largest box in the middle with
    proportions in range.
    """

    op: Literal["random_resized_crop"] = "random_resized_crop"
    scale: tuple[Annotated[float, Range(1e-6, 1.0)], Annotated[float, Range(1e-6, 1.0)]] = (0.08, 1.0)
    """Smallest and largest area of the part, as a fraction of the image's."""
    ratio: tuple[Annotated[float, Range(1e-3, 1e3)], Annotated[float, Range(1e-3, 1e3)]] = (3 / 4, 4 / 3)
    """Smallest and largest width of the part divided by its height."""
    interpolation: Interpolation = "auto"
    """How pixels are made from pixels; "auto" is "linear" below a reduction of 2 and "area" from
    there on."""

    def __post_init__(self) -> None:
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if low > high:
                raise ValueError(f"{name} = [{low}, {high}] goes downwards; write the smaller number first")


SIZES_MAX = 1024


@options
class CropToBucket(ImageStep):
    """Make all images of a batch one size, near their own proportions, for training on many sizes.

    Batches have images of one bucket: those whose proportions are nearest to those of its size, on
    a logarithmic scale. Each is scaled until it covers this size, and what is beyond is cut off.
    Needs ``pixels`` or ``sizes``. The proportions of all images are found before the first batch.
    """

    is_for_each: ClassVar[bool] = False
    keeps_pixels: ClassVar[bool] = False
    is_cacheable: ClassVar[bool] = False
    op: Literal["crop_to_bucket"] = "crop_to_bucket"
    pixels: Annotated[Annotated[int, Range(1, PIXELS_MAX)] | None, Example(262144)] = None
    """The most pixels of a size, height times width: 262144 is 512 x 512. Each height of the
    multiples has the largest width that this allows, and each width the largest height."""
    multiple_of: Side = 64
    """Height and width are multiples of this, in pixels; counts with ``pixels``."""
    ratio: tuple[Annotated[float, Range(1e-3, 1e3)], Annotated[float, Range(1e-3, 1e3)]] = (0.25, 4.0)
    """Smallest and largest width of a size divided by its height; counts with ``pixels``."""
    sizes: tuple[Size, ...] | None = None
    """Instead of ``pixels``, the sizes themselves, height and width in pixels: [[512, 512], [448,
    576], [576, 448]]."""
    random: bool = False
    """Whether the part that is kept is drawn, any as likely, or the middle."""
    interpolation: Interpolation = "auto"
    """How pixels are made from pixels; "auto" is "linear" below a reduction of 2 and "area" from
    there on."""

    def __post_init__(self) -> None:
        if (self.pixels is None) == (self.sizes is None):
            raise ValueError("crop_to_bucket needs either pixels = height * width, or sizes = [[height, width], ...]")
        if self.sizes is not None and (self.multiple_of, self.ratio) != (64, (0.25, 4.0)):
            raise ValueError("multiple_of and ratio count with pixels; of sizes, write those that you want")
        if self.ratio[0] > self.ratio[1]:
            raise ValueError(f"ratio = {list(self.ratio)} goes downwards; write the smaller number first")
        found = self.bucket_sizes
        same = next((pair for pair in pairwise(found) if _ratio(pair[0]) == _ratio(pair[1])), None)
        if same is not None:
            raise ValueError(f"sizes {list(same[0])} and {list(same[1])} have the same proportions; keep one of them")
        if not 1 < len(found) <= SIZES_MAX:
            change = "smaller multiple_of or a wider" if len(found) < SIZES_MAX else "larger multiple_of or a narrower"
            advice = "" if self.pixels is None else f"; set a {change} ratio"
            raise ValueError(f"crop_to_bucket is for 2 to {SIZES_MAX} sizes, and these are {len(found)}{advice}")

    @property
    def is_random(self) -> bool:
        """True if the part that is kept is drawn."""
        return self.random

    @property
    def bucket_sizes(self) -> tuple[Size, ...]:
        """The sizes, from the narrowest on."""
        if self.sizes is not None:
            return tuple(sorted(self.sizes, key=_ratio))
        assert self.pixels is not None, "one of both is given"
        unit, (low, high) = self.multiple_of, self.ratio
        largest: dict[Fraction, Size] = {}
        for side in range(unit, min(self.pixels // unit, SIDE_PIXELS_MAX) + 1, unit):
            other = min(self.pixels // side // unit * unit, SIDE_PIXELS_MAX // unit * unit)
            for size in ((side, other), (other, side)):
                if low <= size[1] / size[0] <= high:
                    largest[_ratio(size)] = max(size, largest.get(_ratio(size), size))
        return tuple(size for _ratio, size in sorted(largest.items()))


def _ratio(size: Size) -> Fraction:
    """Width / height."""
    return Fraction(size[1], size[0])


@options
class RandomFlip(ImageStep):
    """Mirror the image, or not, at random.

    Drawn: once; for "both" once for left and right, then once for top and bottom.
    """

    op: Literal["random_flip"] = "random_flip"
    probability: Annotated[float, Range(0.0, 1.0)] = 0.5
    """How often, from 0 (never) to 1 (always)."""
    direction: Literal["horizontal", "vertical", "both"] = "horizontal"
    """"horizontal" swaps left and right, "vertical" swaps top and bottom, "both" either of them,
    each by itself."""

    @property
    def is_random(self) -> bool:
        """True unless the result is certain."""
        return 0 < self.probability < 1


Factors: TypeAlias = tuple[Annotated[float, Range(-1e6, 1e6)], ...]
Divisors: TypeAlias = tuple[Annotated[float, Range(1e-6, 1e6)], ...]


@options
class Normalize(ImageStep):
    """Make floating-point numbers: ``(pixel / 255 - mean) / std``, channel by channel.

    Only ``layout`` may follow.
    """

    op: Literal["normalize"] = "normalize"
    is_cacheable: ClassVar[bool] = False
    mean: Factors = (0.485, 0.456, 0.406)
    """The values to subtract, in the order of the channels, where white is 1. The default is
    ImageNet's, for "rgb"."""
    std: Divisors = (0.229, 0.224, 0.225)
    """The divisors, in the order of the channels. The default is ImageNet's, for "rgb"."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the numbers; each is rounded once."""


@options
class Layout(ImageStep):
    """Set the order of the numbers in memory.

    Without this step it is "nhwc". Always the last step.
    """

    op: Literal["layout"] = "layout"
    is_cacheable: ClassVar[bool] = False
    order: Literal["nhwc", "nchw"] = "nchw"
    """"nhwc": height, width, channels (as decoded). "nchw": channels first (as torch's convolutions
    name them)."""


Level: TypeAlias = Annotated[int, Range(0, 255)]
Fill: TypeAlias = tuple[Level, ...]
Margin: TypeAlias = Annotated[int, Range(0, SIDE_PIXELS_MAX)]
Degrees: TypeAlias = Annotated[float, Range(-180.0, 180.0)]
QuarterTurns: TypeAlias = Annotated[int, Range(0, 3)]


@options
class RandomCrop(CropStep):
    """Cut ``size`` out at a random place, all equally likely.

    ``padding`` puts this much ``fill`` around the image first. If that is still smaller than
    ``size``, it is centred on ``fill``. Drawn: the row, then the column.
    """

    op: Literal["random_crop"] = "random_crop"
    padding: Margin = 0
    """Pixels that are put around the image first, on each side."""
    fill: Fill = (0,)
    """The value outside of the image: one number from 0 to 255 for all channels, or one for
    each."""


@options
class Pad(ImageStep):
    """Put ``fill`` around the image: as much as makes it ``size``, or a ``border``.

    Needs one of the two.
    """

    keeps_pixels: ClassVar[bool] = False
    op: Literal["pad"] = "pad"
    size: Annotated[Size | None, Example([224, 224])] = None
    """Height and width afterwards, in pixels. An image that is larger is a bad sample; a "resize"
    in front makes it fit."""
    place: Literal["center", "top_left"] = "center"
    """The place of the image in ``size``; an odd pixel is added below and to the right."""
    border: tuple[Margin, Margin, Margin, Margin] | None = None
    """Pixels above, below, left and right of the image. A later step must then fix the size."""
    fill: Fill = (0,)
    """The value outside of the image: one number from 0 to 255 for all channels, or one for
    each."""

    def __post_init__(self) -> None:
        if (self.size is None) == (self.border is None):
            raise ValueError("pad needs either size = [height, width] or border = [above, below, left, right]")

    @property
    def fixes_shape(self) -> bool:
        """True for one size, not for a border."""
        return self.size is not None


@options
class Letterbox(SizedStep):
    """Scale the image with its proportions until it just fits into ``size``; ``fill`` around it.

    The shorter side is rounded to the nearest pixel. Needs ``size`` or ``sizes``.
    """

    op: Literal["letterbox"] = "letterbox"
    enlarge: bool = True
    """Whether an image that is smaller than ``size`` is scaled, too, and not only put into it."""
    place: Literal["center", "top_left"] = "center"
    """The place of the image in ``size``; an odd pixel is added below and to the right."""
    interpolation: Interpolation = "auto"
    """How pixels are made from pixels; "auto" is "linear" below a reduction of 2 and "area" from
    there on."""
    fill: Fill = (114,)
    """The value outside of the image: one number from 0 to 255 for all channels, or one for
    each."""

    def __post_init__(self) -> None:
        if bool(self.size) == bool(self.sizes):
            raise ValueError(
                "letterbox needs either size = [height, width], or sizes = [[height, width], ...] for each batch to draw"
            )
        SizedStep.__post_init__(self)


@options
class Rotate(ChanceStep):
    """Rotate the image counter-clockwise: by ``quarter_turns``, or by an angle out of ``degrees``.

    Needs one of the two. An odd number of quarter turns swaps height and width. An angle turns the
    image about its middle on a canvas that stays: what leaves it is lost, and ``fill`` is used for
    pixels from outside; "linear" mixes with ``fill`` at the image's edge.
    """

    keeps_pixels: ClassVar[bool] = False
    loses_edges: ClassVar[bool] = True
    op: Literal["rotate"] = "rotate"
    quarter_turns: Annotated[tuple[QuarterTurns, ...] | None, Example([0, 1, 2, 3])] = None
    """Numbers of quarter turns; one is drawn, each with the same probability: [1] always turns
    once, [0, 1, 2, 3] any way up."""
    degrees: tuple[Degrees, Degrees] | None = None
    """The smallest and the largest angle; each in between is as likely. [-10, 10] is up to 10
    degrees either way."""
    interpolation: Literal["nearest", "linear"] = "linear"
    """How pixels are made from pixels, for an angle; a quarter turn only moves them."""
    fill: Fill = (0,)
    """The value outside of the image: one number from 0 to 255 for all channels, or one for
    each."""

    def __post_init__(self) -> None:
        if (self.quarter_turns is None) == (self.degrees is None):
            raise ValueError("rotate needs either quarter_turns = [0, 1, 2, 3] or degrees = [smallest, largest]")
        if self.quarter_turns == ():
            raise ValueError("quarter_turns = [] leaves nothing to draw from; [0] is no turn")
        if self.degrees is not None and self.degrees[0] > self.degrees[1]:
            low, high = self.degrees
            raise ValueError(f"degrees = [{low}, {high}] goes downwards; write the smaller number first")

    @property
    def varies(self) -> bool:
        """True if there is a choice of turns."""
        return len(set(self.quarter_turns or self.degrees or ())) > 1

    @property
    def draws_shape(self) -> bool:
        """True if height and width are swapped at times."""
        swaps = {turns % 2 for turns in self.quarter_turns or ()}
        return swaps == {0, 1} or (swaps == {1} and 0 < self.probability < 1)


MASK_NUMBER_MAX = (1 << 24) - 1
"""The largest number that three colours of 8 bits encode."""
MASK_LEVEL_MAX = 255
KEYPOINTS_MAX = 1024
BoxNumbers: TypeAlias = Literal["xyxy", "xywh", "cxcywh"]


@options
class Follow(ImageStep):
    """Make masks, boxes and points of an image follow its geometry in later steps.

    Needs one of ``mask``, ``masks``, ``boxes``, ``points`` and ``keypoints``. Put it directly after
    ``decode``, or before all steps on the image. Results are in pixels of the image as it is after
    the last step, x to the right and y down, and the first pixel reaches from 0 to 1.
    """

    keeps_pixels: ClassVar[bool] = False
    later: ClassVar[frozenset[str]] = frozenset(
        {
            "labels",
            "keep_empty",
            "min_visible",
            "mask_type",
            "masks",
            "form",
            "relative",
            "annotated",
            "min_area",
            "keypoints",
            "flip_indices",
        }
    )
    is_for_each: ClassVar[bool] = False
    op: Literal["follow"] = "follow"
    field: str = "image"
    """The image that is followed."""
    mask: Annotated[str | None, Example("mask")] = None
    """A field with a number for each pixel of the image: a PNG, or uint8[?,?] or int32[?,?]. Made
    [height, width] of the same type; never interpolated."""
    mask_type: Literal["uint8", "int32"] = "uint8"
    """The type that a PNG becomes. "uint8": one channel of up to 8 bits, or a palette, whose
    indices count. "int32": also 16 bits, and three colours of 8, which are the number red + 256
    green + 65536 blue, as in COCO's panoptic files."""
    mask_fill: Annotated[int, Range(0, MASK_NUMBER_MAX)] = 0
    """The value of the mask outside of the image; 255 is a common "ignore"."""
    masks: Annotated[str | None, Example("masks")] = None
    """A field of uint8[?,?,?] with a mask of the image for each object, 0 outside of it: [objects,
    height, width]. Never interpolated. Without ``boxes``, an object vanishes with its last
    pixel."""
    boxes: str | None = None
    """A field of float32[?,4], made left, top, right, bottom. Cut off at the image's edge. A box of
    which nothing is left vanishes: see "labels"."""
    form: BoxNumbers = "xyxy"
    """What the four numbers of a box of the source are: "xyxy" left, top, right, bottom (Pascal
    VOC), "xywh" left, top, width, height (COCO), "cxcywh" the middle, width and height (YOLO)."""
    relative: bool = False
    """Whether boxes, points and keypoints of the source are fractions of the width and the height,
    from 0 to 1."""
    annotated: Literal["upright", "stored"] = "upright"
    """The picture that masks, boxes and points of the source belong to: turned "upright" by its
    EXIF tag, or as it is "stored", which is what many tools show. Makes a difference only for files
    with such a tag."""
    labels: Annotated[tuple[str, ...], Example(["classes"])] = ()
    """Fields with a row for each box, such as its class: when a box vanishes, its row leaves them,
    "boxes", "masks" and "keypoints" together."""
    keep_empty: bool | None = None
    """Whether a box that vanishes becomes four zeros in its place, and keeps its rows; its mask and
    its keypoints are zeros then, too. When not set: true for boxes alone, else false."""
    min_visible: Annotated[float, Range(0.0, 1.0)] = 0.0
    """A box also vanishes when a step cuts off so much that less than this fraction of its area is
    left."""
    min_area: Annotated[float, Range(0.0, float(PIXELS_MAX))] = 0.0
    """A box also vanishes when it has fewer square pixels than this: in the source, or after a
    step."""
    points: str | None = None
    """A field of float32[?,2]: x, y. A point outside of the image keeps its coordinates, which say
    so."""
    keypoints: str | None = None
    """A field with the points of each object: float32[?,?,2] of x, y, or float32[?,?,3] of x, y,
    visibility, as COCO writes it: 0 not labelled, 1 hidden, 2 visible. A point that leaves the
    image becomes three zeros."""
    flip_indices: Annotated[tuple[Annotated[int, Range(0, KEYPOINTS_MAX - 1)], ...], Example([0, 2, 1])] = ()
    """The number of the keypoint that each one becomes in a mirror, so that left and right stay
    what they say: MMPose's ``flip_indices``, ultralytics' ``flip_idx``. When not set, all keep
    their numbers."""

    def __post_init__(self) -> None:
        if not self.followers:
            names = " or ".join(f'{role} = "…"' for role in ("mask", "masks", "boxes", "points", "keypoints"))
            raise ValueError(f"follow needs a field that follows: {names}")
        if len(self.touches) != len(self.followers) + 1:
            raise ValueError(
                "follow names one field twice; image, mask, masks, boxes, labels, points and keypoints are different fields"
            )
        if self.boxes is None:
            self._check_without_boxes()
        if self.labels and self.keep_empty:
            raise ValueError("keep_empty = true keeps all rows of labels = […]; leave one of the two out")
        if self.mask_fill > MASK_LEVEL_MAX and self.mask_type == "uint8":
            raise ValueError(f'mask_fill = {self.mask_fill} is more than uint8 holds; set mask_type = "int32"')
        if self.relative and not (self.boxes or self.points or self.keypoints):
            raise ValueError("relative is of boxes, points and keypoints, and there are none")
        mirrored = self.flip_indices
        if mirrored and self.keypoints is None:
            raise ValueError("flip_indices are of keypoints: name their field")
        if sorted(mirrored) != list(range(len(mirrored))) or any(
            mirrored[other] != number for number, other in enumerate(mirrored)
        ):
            raise ValueError(
                "flip_indices have each number from 0 on once, in pairs that point at each other, as in [0, 2, 1]"
            )

    def _check_without_boxes(self) -> None:
        of_boxes = {"min_visible": self.min_visible, "min_area": self.min_area, "form": self.form != "xyxy"}
        if said := [name for name, is_set in of_boxes.items() if is_set]:
            raise ValueError(f'{" and ".join(said)} needs boxes: name their field, as in boxes = "boxes"')
        if self.masks is None and (self.labels or self.keep_empty is not None):
            raise ValueError(
                'labels and keep_empty are of boxes or masks: name their field, as in boxes = "boxes" or masks = "masks"'
            )

    @property
    def drops_rows(self) -> bool:
        """Whether the rows of objects that vanish leave the sample."""
        if self.boxes is None and self.masks is None:
            return False
        return self._drops_usually if self.keep_empty is None else not self.keep_empty

    @property
    def _drops_usually(self) -> bool:
        return bool(self.labels or self.masks or (self.boxes and self.keypoints))

    @property
    def unsaid(self) -> frozenset[str]:
        """``keep_empty`` changes nothing where it says what holds without it."""
        is_usual = self.drops_rows == self._drops_usually
        usual = super(Follow, self).unsaid  # noqa: UP008  slots make the class anew
        return usual | ({"keep_empty"} if is_usual else set())

    @property
    def followers(self) -> tuple[tuple[str, str], ...]:
        """The kinds of fields that follow the image, and their names."""
        roles = ("mask", "masks", "boxes", "points", "keypoints")
        named = ((role, getattr(self, role)) for role in roles)
        labels = (("label", name) for name in self.labels)
        return (*((role, name) for role, name in named if name is not None), *labels)

    @property
    def touches(self) -> frozenset[str]:
        """The image and all that follows it."""
        return frozenset({self.field, *(name for _role, name in self.followers)})


@options
class BoxForm(FieldStep):
    """Write boxes that have followed an image in another form, such as DETR's: relative "cxcywh".

    Behind all steps on the image but "normalize", "to" and "layout", and in front of "pad_batch".
    """

    keeps_length: ClassVar[bool] = True
    op: Literal["box_form"] = "box_form"
    field: str = "boxes"
    """The boxes, float32[?,4] of left, top, right, bottom in pixels."""
    image: str = "image"
    """The image that they have followed."""
    form: Annotated[BoxNumbers, Example("cxcywh")]
    """What the four numbers become: "xyxy" left, top, right, bottom, "xywh" left, top, width,
    height, "cxcywh" the middle, width and height."""
    relative: bool = False
    """Whether they become fractions of the image's width and height."""

    def __post_init__(self) -> None:
        if self.form == "xyxy" and not self.relative:
            raise ValueError("boxes are xyxy in pixels already; set form, or relative = true")

    @property
    def touches(self) -> frozenset[str]:
        """The boxes, and the image, whose size counts."""
        return frozenset({self.field, self.image})

    @property
    def changes(self) -> frozenset[str]:
        """The boxes."""
        return frozenset({self.field})


Strength: TypeAlias = Annotated[float, Range(0.0, 10.0)]

HOLES_MAX = 1_000


@options
class ColorJitter(ChanceStep):
    """Change brightness, contrast, saturation and hue at random, as torchvision's ColorJitter.

    With f drawn from [1 - strength, 1 + strength], but not below 0, brightness makes ``f * pixel``,
    contrast ``f * pixel + (1 - f) * mean`` with the mean grey level of the image, saturation ``f *
    pixel + (1 - f) * grey`` with the pixel's own grey level. Each rounds to 8 bits; "gray" says
    what grey is. Drawn: the order, then what each of the four takes.
    """

    op: Literal["color_jitter"] = "color_jitter"
    brightness: Strength = 0.0
    """How far from 1 the factor of brightness may be; 0.4 is from 0.6 to 1.4, 0 leaves it alone."""
    contrast: Strength = 0.0
    """How far from 1 the factor of contrast may be."""
    saturation: Strength = 0.0
    """How far from 1 the factor of saturation may be. An image of one channel has none."""
    hue: Annotated[float, Range(0.0, 0.5)] = 0.0
    """How far the hue may go round the circle of colours, either way; 0.5 is to the opposite.
    Saturation and value (HSV) stay."""

    @property
    def varies(self) -> bool:
        """True if any factor varies."""
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0


@options
class Gray(ChanceStep):
    """Make the image grey: ``0.299 red + 0.587 green + 0.114 blue`` (Rec. 601), rounded."""

    op: Literal["gray"] = "gray"
    varies: ClassVar[bool] = False
    channels: Literal[1, 3] = 3
    """Channels afterwards: 3 that are alike, or 1."""


@options
class Cutout(ChanceStep):
    """Cover random rectangles of the image.

    Their middles are anywhere in it, so a part may lie outside. Drawn for each: the row, then the
    column of its middle. A mask that follows the image is unchanged.
    """

    op: Literal["cutout"] = "cutout"
    holes: Annotated[int, Range(1, HOLES_MAX)] = 1
    """How many."""
    size: Annotated[Size, Example([224, 224])]
    """Height and width of each, in pixels."""
    fill: Fill = (0,)
    """The value of the rectangles: one number from 0 to 255 for all channels, or one for each."""


@options
class SubtractMean(ImageStep):
    """Make float32: ``(pixel - mean) * scale``, channel by channel, each rounded once.

    Only ``layout`` may follow.
    """

    op: Literal["subtract_mean"] = "subtract_mean"
    is_cacheable: ClassVar[bool] = False
    mean: Factors = (123.68, 116.779, 103.938)
    """The values to subtract, in the order of the channels, where white is 255. The default is
    ImageNet's, for "rgb"."""
    scale: Annotated[float, Range(-1e6, 1e6)] = 1.0
    """The factor of the difference."""


@options
class To(ImageStep):
    """Set type and order of the numbers in one step, without subtracting a mean."""

    op: Literal["to"] = "to"
    is_cacheable: ClassVar[bool] = False
    dtype: Literal["uint8", "float32", "float16"] = "float32"
    """Type of the numbers; each is rounded once."""
    scale: bool = True
    """Whether floating-point numbers are divided by 255, so that white is 1. uint8 stays what it
    is."""
    layout: Literal["nhwc", "nchw"] = "nchw"
    """"nhwc": height, width, channels (as decoded). "nchw": channels first (as torch's convolutions
    name them)."""
