"""The common base of all steps of a pipeline. Daemon, workers and CLI; standard library only."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from batchd.data.samples.checks import Range

SIDE_PIXELS_MAX = 16_384
PIXELS_MAX = 1 << 30
FILE_BYTES_MAX = 1 << 32

Interpolation: TypeAlias = Literal["auto", "nearest", "linear", "area", "cubic"]


Side: TypeAlias = Annotated[int, Range(1, SIDE_PIXELS_MAX)]
Size: TypeAlias = tuple[Side, Side]


class StepOptions:
    """Base of the steps: a key that is no option is refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}
    __dataclass_fields__: ClassVar[dict[str, Any]]
    """Every step is a dataclass."""

    op: str
    """The step's name."""

    is_cacheable: ClassVar[bool] = True
    """Whether a cache of decoded samples may keep what the step makes, unless ``is_random``."""

    later: ClassVar[frozenset[str]] = frozenset()
    """Options that an older version did not have: at its default, one is in no fingerprint."""

    @property
    def unsaid(self) -> frozenset[str]:
        """The ``later`` options that change no bytes as they are."""
        options = (option for option in fields(self) if option.name in self.later)
        return frozenset(option.name for option in options if getattr(self, option.name) == option.default)

    keeps_length: ClassVar[bool] = False
    """Whether the first dimension of its field stays as long as it is."""

    keeps_pixels: ClassVar[bool] = False
    """Whether no image in its field gets more pixels."""

    @property
    def is_random(self) -> bool:
        """Whether the step can make different values of one sample."""
        return False

    @property
    def touches(self) -> frozenset[str] | None:
        """The fields of a sample that the step reads or makes; None for all of them."""
        return None

    @property
    def changes(self) -> frozenset[str] | None:
        """The fields that the step may change or make; None for all of them."""
        return self.touches

    @property
    def files(self) -> dict[str, Path]:
        """The files that the step reads, by option; their content decides bytes, no path."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Path)}


class FieldStep(StepOptions):
    """Base of the steps on one field."""

    __slots__ = ()

    field: str
    """Name of the field that the step changes."""

    @property
    def touches(self) -> frozenset[str]:
        """The field, and those that the step makes."""
        return frozenset({self.field})
