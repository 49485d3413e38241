"""The steps on images, as plain data. Daemon, workers and CLI; standard library only.

Each step is one frozen dataclass, and what stands under a field is its documentation wherever the field is shown: in
``batchd config``, in the JSON Schema and in an error message.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from batchd.config.step import FILE_BYTES_MAX, PIXELS_MAX, Interpolation, Range, Side, Size, StepOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(StepOptions):
    """Turn the bytes of a JPEG, PNG, WebP, BMP or GIF file into an image of 8 bits per channel.

    Always the first step. Alpha is dropped, 16 bits become 8, of an animation the first frame is
    used.
    """

    op: Literal["decode"] = "decode"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    color: Literal["rgb", "bgr", "gray"] = "rgb"
    """Order of the channels: "rgb" and "bgr" give three, "gray" gives one."""
    exif: Literal["apply", "ignore"] = "apply"
    """Whether the camera's orientation tag turns the image upright ("apply") or is left alone ("ignore")."""
    scale: Literal["auto", "off"] = "auto"
    """"auto" decodes a JPEG at 1/2, 1/4 or 1/8 of its size where the part that is used is still no smaller than what it
    is resized to; "off" always decodes at full size."""
    max_pixels: Annotated[int, Range(1, PIXELS_MAX)] = 100_000_000
    """Width times height, in pixels, above which an image is a bad sample; read from its header before decoding. So is an image
    that needs more memory to decode than 8 bytes for each of these pixels, or that announces more pixels than its bytes are
    believed to hold. For JPEG, PNG and GIF that is what the format allows. WebP, run-length coded BMP, arithmetic coded JPEG, and
    GIF whose first frame is smaller than its screen may have 1040 pixels for each byte, and 4.2 million in a file of up to 4 KiB.
    A PNG of up to 4 KiB with less than 8 bits per pixel may have 9 million, and 4.2 million if it is interlaced. A larger image
    that is nearly empty passes as a PNG of 8 bits per pixel."""
    max_bytes: Annotated[int, Range(1, FILE_BYTES_MAX)] = 64 * 1024 * 1024
    """Length of a file, in bytes, above which it is a bad sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(StepOptions):
    """Scale the image: to ``size`` exactly, or to ``shorter_side`` with its proportions kept. Needs one of the two."""

    op: Literal["resize"] = "resize"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    size: Size | None = None
    """Height and width afterwards, in pixels; proportions are not kept."""
    shorter_side: Side | None = None
    """Length of the shorter side afterwards, in pixels; the longer follows. A later step must then fix the size."""
    interpolation: Interpolation = "auto"
    """How pixels are made from pixels; "auto" is "linear" below a reduction of 2 and "area" from there on."""

    def __post_init__(self) -> None:
        """One way to say the size, not two and not none."""
        if (self.size is None) == (self.shorter_side is None):
            raise ValueError("resize needs either size = [height, width] or shorter_side = pixels")


@dataclass(frozen=True, slots=True, kw_only=True)
class CenterCrop(StepOptions):
    """Cut ``size`` out of the middle. A smaller image is centred on black."""

    op: Literal["center_crop"] = "center_crop"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    size: Size
    """Height and width afterwards, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomResizedCrop(StepOptions):
    """Crop a part of random area and proportions and scale it to ``size``, as torchvision's RandomResizedCrop does.

    Ten attempts to fit a random box into the image; then the largest box in the middle with
    proportions in range.
    """

    op: Literal["random_resized_crop"] = "random_resized_crop"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    size: Size
    """Height and width afterwards, in pixels."""
    scale: tuple[Annotated[float, Range(1e-6, 1.0)], Annotated[float, Range(1e-6, 1.0)]] = (0.08, 1.0)
    """Smallest and largest area of the part, as a fraction of the image's."""
    ratio: tuple[Annotated[float, Range(1e-3, 1e3)], Annotated[float, Range(1e-3, 1e3)]] = (3 / 4, 4 / 3)
    """Smallest and largest width of the part divided by its height."""
    interpolation: Interpolation = "auto"
    """How pixels are made from pixels; "auto" is "linear" below a reduction of 2 and "area" from there on."""

    def __post_init__(self) -> None:
        """A range goes upwards."""
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if low > high:
                raise ValueError(f"{name} = [{low}, {high}] goes downwards; write the smaller number first")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomFlip(StepOptions):
    """Mirror the image, or not, at random. Drawn: once; for "both" once for left and right, then once for top and bottom."""

    op: Literal["random_flip"] = "random_flip"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    probability: Annotated[float, Range(0.0, 1.0)] = 0.5
    """How often, from 0 (never) to 1 (always)."""
    direction: Literal["horizontal", "vertical", "both"] = "horizontal"
    """"horizontal" swaps left and right, "vertical" swaps top and bottom, "both" either of them, each by itself."""


Factors: TypeAlias = tuple[Annotated[float, Range(-1e6, 1e6)], ...]
Divisors: TypeAlias = tuple[Annotated[float, Range(1e-6, 1e6)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize(StepOptions):
    """Make floating-point numbers: ``(pixel / 255 - mean) / std``, channel by channel. Only ``layout`` may follow."""

    op: Literal["normalize"] = "normalize"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    mean: Factors = (0.485, 0.456, 0.406)
    """The values to subtract, in the order of the channels, where white is 1. The default is
    ImageNet's, for "rgb"."""
    std: Divisors = (0.229, 0.224, 0.225)
    """The divisors, in the order of the channels. The default is ImageNet's, for "rgb"."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the numbers; each is rounded once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(StepOptions):
    """Set the order of the numbers in memory.

    Without this step it is "nhwc". Always the last step.
    """

    op: Literal["layout"] = "layout"
    """The step's name."""
    field: str = "image"
    """Which field of the sample it is done to."""
    order: Literal["nhwc", "nchw"] = "nchw"
    """"nhwc": height, width, channels (as decoded). "nchw": channels first (as torch's convolutions name them)."""
