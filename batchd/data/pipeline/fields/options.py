"""The steps on fields, labels and numbers, as plain data. Daemon, workers, CLI; standard library.

A step on numbers is done to every number of a field by itself, and says exactly which number
becomes which. A number that cannot become what it should is a bad sample, never a wrong number.
"""

import re
from dataclasses import field as option
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from batchd.data.pipeline.options import FieldStep, StepOptions
from batchd.data.samples.checks import Example, Range
from batchd.data.samples.columns import check_field_names
from batchd.data.samples.location import check_path
from batchd_wire.record import options


@options
class Drop(StepOptions):
    """Leave fields out of the batch. At least one must remain."""

    op: Literal["drop"] = "drop"
    fields: Annotated[tuple[str, ...], Example(["caption"])]
    """The fields that a batch shall not have."""

    def __post_init__(self) -> None:
        if not self.fields:
            raise ValueError("fields must not be empty")

    @property
    def touches(self) -> frozenset[str]:
        """The fields that go."""
        return frozenset(self.fields)


@options
class Rename(FieldStep):
    """Rename a field. It keeps its place among the others."""

    op: Literal["rename"] = "rename"
    field: Annotated[str, Example("fname")]
    """The present name of the field."""
    to: Annotated[str, Example("file")]
    """The new name of the field, in later steps and in the batch."""

    def __post_init__(self) -> None:
        check_field_names(self.to)
        if self.to == self.field:
            raise ValueError(f"to = {self.to!r} is what the field is called already")

    @property
    def touches(self) -> frozenset[str]:
        """The field by either name."""
        return frozenset({self.field, self.to})


@options
class Pick(FieldStep):
    """Choose one value of a list, such as one of the captions of an image, or all.

    The field becomes that value. An empty list is a bad sample.
    """

    op: Literal["pick"] = "pick"
    field: Annotated[str, Example("captions")]
    """The list: a field of type "text[<=8]" or "image[<=8]"."""
    which: Literal["random", "first", "all"] = "random"
    """The value: "random" draws one, each equally often; "first" is always the same; "all" leaves
    the list, and later steps on text are done to each text of it."""

    @property
    def is_random(self) -> bool:
        """Whether it draws."""
        return self.which == "random"


CLASSES_MAX = 1 << 24
BOUND_MAX = 1 << 53
"""Up to here a floating-point number of 64 bits is every whole number exactly."""
FACTOR_MAX = 1e300

NumberType: TypeAlias = Literal[
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "float16",
    "uint32",
    "int32",
    "float32",
    "uint64",
    "int64",
    "float64",
]
Bound: TypeAlias = Annotated[float, Range(-BOUND_MAX, BOUND_MAX)]
Factor: TypeAlias = Annotated[float, Range(-FACTOR_MAX, FACTOR_MAX)]


@options
class NumberStep(FieldStep):
    """Base of the steps on labels and numbers."""

    keeps_length: ClassVar[bool] = True
    op: str
    field: str = "label"


@options
class OneHot(NumberStep):
    """Turn a class number into zeros with a one in its place: shape s becomes s + [classes].

    A number outside 0 to classes - 1 is a bad sample.
    """

    op: Literal["one_hot"] = "one_hot"
    classes: Annotated[int, Range(1, CLASSES_MAX), Example(10)]
    """How many classes there are."""
    dtype: NumberType = "float32"
    """Type of the zeros and the one."""


@options
class Cast(NumberStep):
    """Change the type of numbers only: a number that the type cannot hold is a bad sample.

    Whole numbers and bool: NaN, infinities, fractional parts and what is out of range are bad.
    Floating point: a whole number has to be held exactly; other numbers are rounded to the nearest,
    of two equally near ones to the even one, and are bad where that makes them infinite.
    """

    op: Literal["cast"] = "cast"
    dtype: Annotated[NumberType, Example("float32")]
    """Type of the numbers afterwards."""
    truncate: bool = False
    """Whether fractional parts may be cut off, towards zero, and whole numbers may be rounded where
    they become floating point. NaN and numbers out of range are still bad; "clip" before it helps
    with the latter."""


@options
class Clip(NumberStep):
    """Replace numbers below ``min`` by ``min``, and those above ``max`` by ``max``.

    NaN stays NaN.
    """

    op: Literal["clip"] = "clip"
    min: Annotated[Bound | None, Example(0.0)] = None
    """The smallest result; a whole number for whole numbers, otherwise rounded to the type."""
    max: Annotated[Bound | None, Example(255.0)] = None
    """The largest result; a whole number for whole numbers, otherwise rounded to the type."""

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise ValueError("clip needs min, max, or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min = {self.min} is more than max = {self.max}")


@options
class Scale(NumberStep):
    """Make ``number * factor + offset``.

    The number becomes float64, the product and the sum are float64 too, each rounded to the
    nearest, and the sum is rounded once more to ``dtype``. NaN and infinities are computed with as
    IEEE 754 says; a number that becomes infinite is a bad sample.
    """

    op: Literal["scale"] = "scale"
    factor: Factor = 1.0
    """The factor of every number."""
    offset: Factor = 0.0
    """The number to add afterwards."""
    dtype: Literal["float16", "float32", "float64"] = "float32"
    """Type of the numbers afterwards."""


ID_MAX = (1 << 24) - 1
"""The largest number that three colours of 8 bits encode, as in panoptic masks."""
_ID = re.compile(r"0|[1-9][0-9]{0,7}")


@options
class MapIds(NumberStep):
    """Replace whole numbers by others: the ids of a data set by those for training.

    For class numbers and for masks, also those that follow an image. Needs ``table`` or ``file``.
    The type stays.
    """

    op: Literal["map_ids"] = "map_ids"
    table: Annotated[dict[str, int], Example({"7": 0, "8": 1, "11": 2})] = option(default_factory=dict)
    """The number for each id from 0 to 16,777,215: { 7 = 0, 8 = 1, 11 = 2 }."""
    file: Path | None = None
    """A .npy file of whole numbers [ids]: the number for each id from 0 on."""
    ignore: Annotated[int | None, Range(-(1 << 63), (1 << 63) - 1), Example(255)] = None
    """The number for all other ids. When not set, another id is a bad sample."""

    def __post_init__(self) -> None:
        if bool(self.table) == (self.file is not None):
            raise ValueError('map_ids needs either table = { 7 = 0, 8 = 1 } or file = "ids.npy"')
        if self.file is not None:
            check_path("file", self.file)
        for name in self.table:
            if not _ID.fullmatch(name) or int(name) > ID_MAX:
                raise ValueError(f"table has {name!r}, which is no id: a whole number from 0 to {ID_MAX}")
