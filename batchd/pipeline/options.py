"""What all steps of a pipeline have in common. Daemon, workers and CLI; standard library only."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from batchd.samples.checks import Range
from batchd.samples.columns import COLUMN_NAME

SIDE_PIXELS_MAX = 16_384
PIXELS_MAX = 1 << 30
FILE_BYTES_MAX = 1 << 32

Interpolation: TypeAlias = Literal["auto", "nearest", "linear", "area", "cubic"]


Side: TypeAlias = Annotated[int, Range(1, SIDE_PIXELS_MAX)]
Size: TypeAlias = tuple[Side, Side]


class StepOptions:
    """Base of the steps: a key that is no option is refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    __dataclass_fields__: ClassVar[dict[str, Any]]
    """Every step is a dataclass."""

    op: str
    """The step's name, by which it is found."""

    is_cacheable: ClassVar[bool] = True
    """Whether a cache of decoded samples may keep what the step makes, unless ``is_random``."""

    @property
    def is_random(self) -> bool:
        """Whether the step can make different values of one sample."""
        return False

    @property
    def touches(self) -> frozenset[str] | None:
        """The fields of a sample that the step reads or makes; None for all of them."""
        field: str = getattr(self, "field")  # noqa: B009  most steps have one
        return frozenset({field})

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the step reads: every option that is a path. What is in them decides bytes, where they lie does not."""
        values = [getattr(self, option.name) for option in fields(self)]
        return tuple(value for value in values if isinstance(value, Path))


def check_names(*names: str) -> None:
    """Raise ``ValueError`` where a field that a step makes could not have its name."""
    for name in names:
        if not COLUMN_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is no name of a field: letters, digits, _, . and -, at most 64, and no digit in front"
            )
