"""The steps of a pipeline as plain data. Read by the config, the daemon and every worker; standard library only.

Each step is one frozen dataclass, and what stands under a field is its documentation wherever the field is shown: in
``batchd config``, in the JSON Schema and in an error message. ``Range`` is the one statement of what a number may be;
the config checks it (it becomes ``ge`` and ``le`` of the pydantic schema, so nothing here needs pydantic).

Invariant: ``step_from_plain(step_to_plain(step)) == step``, and the plain form is what msgpack and JSON can carry.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

SIDE_PIXELS_MAX = 16_384
PIXELS_MAX = 1 << 30
FILE_BYTES_MAX = 1 << 32

Interpolation: TypeAlias = Literal["auto", "nearest", "linear", "area", "cubic"]


@dataclass(frozen=True, slots=True)
class Range:
    """The smallest and the largest value of a number, both allowed."""

    minimum: float
    maximum: float

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Tell pydantic, where it is there, in its own plain words."""
        return {**handler(source), "ge": self.minimum, "le": self.maximum}


Side: TypeAlias = Annotated[int, Range(1, SIDE_PIXELS_MAX)]
Size: TypeAlias = tuple[Side, Side]


class _Refusing:
    """Base of the steps: a key that is no option is refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(_Refusing):
    """Turn the bytes of a JPEG, PNG, WebP, BMP or GIF file into an image of 8 bits per channel. Always the first step.

    Alpha is dropped, 16 bits become 8, of an animation the first frame counts.
    """

    op: Literal["decode"] = "decode"
    """The step's name."""
    color: Literal["rgb", "bgr", "gray"] = "rgb"
    """Order of the channels: "rgb" and "bgr" give three, "gray" gives one."""
    exif: Literal["apply", "ignore"] = "apply"
    """Whether the camera's orientation tag turns the image upright ("apply") or is left alone ("ignore")."""
    scale: Literal["auto", "off"] = "auto"
    """"auto" decodes a JPEG at 1/2, 1/4 or 1/8 of its size where the part that is used is still no smaller than what it
    is resized to; "off" always decodes at full size."""
    max_pixels: Annotated[int, Range(1, PIXELS_MAX)] = 100_000_000
    """Width times height, in pixels, above which an image is a bad sample; read from its header before decoding."""
    max_bytes: Annotated[int, Range(1, FILE_BYTES_MAX)] = 64 * 1024 * 1024
    """Length of a file, in bytes, above which it is a bad sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(_Refusing):
    """Scale the image: to ``size`` exactly, or to ``shorter_side`` with its proportions kept. Needs one of the two."""

    op: Literal["resize"] = "resize"
    """The step's name."""
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
class CenterCrop(_Refusing):
    """Cut ``size`` out of the middle. Where the image is smaller, it is put into the middle of black."""

    op: Literal["center_crop"] = "center_crop"
    """The step's name."""
    size: Size
    """Height and width afterwards, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomResizedCrop(_Refusing):
    """Cut out a part of random area and proportions and scale it to ``size``, as torchvision's RandomResizedCrop does.

    Ten attempts to fit a random box into the image; then the largest box in the middle with proportions in range.
    """

    op: Literal["random_resized_crop"] = "random_resized_crop"
    """The step's name."""
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
class RandomFlip(_Refusing):
    """Mirror the image, or not, at random."""

    op: Literal["random_flip"] = "random_flip"
    """The step's name."""
    probability: Annotated[float, Range(0.0, 1.0)] = 0.5
    """How often, from 0 (never) to 1 (always)."""
    direction: Literal["horizontal", "vertical"] = "horizontal"
    """"horizontal" swaps left and right, "vertical" swaps top and bottom."""


Factors: TypeAlias = tuple[Annotated[float, Range(-1e6, 1e6)], ...]
Divisors: TypeAlias = tuple[Annotated[float, Range(1e-6, 1e6)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize(_Refusing):
    """Make floating-point numbers: ``(pixel / 255 - mean) / std``, channel by channel. Only ``layout`` may follow."""

    op: Literal["normalize"] = "normalize"
    """The step's name."""
    mean: Factors = (0.485, 0.456, 0.406)
    """What is subtracted, in the order of the channels, where white is 1. The default is ImageNet's, for "rgb"."""
    std: Divisors = (0.229, 0.224, 0.225)
    """What is divided by, in the order of the channels. The default is ImageNet's, for "rgb"."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the numbers; each is rounded once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(_Refusing):
    """Say in which order the numbers lie in memory. Without this step it is "nhwc". Always the last step."""

    op: Literal["layout"] = "layout"
    """The step's name."""
    order: Literal["nhwc", "nchw"] = "nchw"
    """"nhwc": height, width, channels (as decoded). "nchw": channels first (as torch's convolutions name them)."""


Step: TypeAlias = Decode | Resize | CenterCrop | RandomResizedCrop | RandomFlip | Normalize | Layout

STEP_KINDS: dict[str, type[Step]] = {
    "decode": Decode,
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_resized_crop": RandomResizedCrop,
    "random_flip": RandomFlip,
    "normalize": Normalize,
    "layout": Layout,
}
"""Every step by its ``op``."""


def step_to_plain(step: Step) -> dict[str, object]:
    """Write a step as msgpack and JSON can carry it; ``step_from_plain`` is the way back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(step).items()}


def step_from_plain(plain: Mapping[str, object]) -> Step:
    """Read what ``step_to_plain`` wrote: every option, nothing else. Raises ``ValueError`` naming what is wrong."""
    kind = STEP_KINDS.get(str(plain.get("op")))
    if kind is None:
        raise ValueError(f"the step {plain.get('op')!r} is not one of {', '.join(STEP_KINDS)}")
    names = {field.name for field in fields(kind)}
    if plain.keys() != names:
        raise ValueError(f"the step {plain['op']!r} has the options {sorted(names)}, not {sorted(plain)}")
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    return kind(**options)
