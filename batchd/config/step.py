"""What all steps of a pipeline have in common. Daemon, workers and CLI; standard library only.

``Range`` is the one statement of what a number may be; the config checks it (it becomes ``ge`` and ``le`` of the pydantic
schema, so nothing here needs pydantic).
"""

from collections.abc import Callable
from dataclasses import dataclass
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


class StepOptions:
    """Base of the steps: a key that is no option is refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    @property
    def touches(self) -> frozenset[str] | None:
        """The fields of a sample that the step reads or makes; None for all of them."""
        field: str = getattr(self, "field")  # noqa: B009  most steps have one
        return frozenset({field})
