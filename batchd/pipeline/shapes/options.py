"""The steps that give samples of different shapes a place in a batch, as plain data.

Daemon, workers and CLI; standard library only.
"""

from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar, Literal, TypeAlias

from batchd.pipeline.options import FieldStep
from batchd.samples.checks import Range
from batchd.samples.columns import LENGTH_MAX
from batchd_wire.fields import DIMENSIONS_MAX, SIZE_MAX, Field, Varying, sizes_field

FILL_MAX = 1 << 53

MaxShape: TypeAlias = tuple[Annotated[int, Range(1, SIZE_MAX)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomStep(FieldStep):
    """Base of the steps that give each sample of a field room for the largest."""

    is_cacheable: ClassVar[bool] = False
    op: str
    field: str = "image"
    max_shape: MaxShape
    """The largest shape of a sample, one length for each dimension; those that do not vary stay as
    they are. A batch takes memory for batch_size of these."""
    too_large: Literal["bad", "crop"] = "bad"
    """The treatment of a larger sample: a bad sample, or cut at its ends in the dimensions that are
    too long."""

    def __post_init__(self) -> None:
        shape = self.max_shape
        if not 0 < len(shape) <= DIMENSIONS_MAX or prod(shape) > LENGTH_MAX:
            raise ValueError(
                f"max_shape = {list(shape)}: it has 1 to {DIMENSIONS_MAX} lengths, {LENGTH_MAX} elements together at most"
            )

    @property
    def touches(self) -> frozenset[str]:
        """Its field, and those that have the sizes, of one dimension that varies or of several."""
        made = [sizes_field(Field(self.field, "uint8", (1, 1), Varying("padded", axes))) for axes in ((0,), (0, 1))]
        return frozenset({self.field, *(sizes.name for sizes in made if sizes)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PadBatch(RoomStep):
    """Give samples of different shapes room for the largest; ``fill`` is after a smaller sample.

    Trainers get the batch cut to its largest sample, and how large each is in a field FIELD_length,
    or FIELD_shape where several dimensions vary. The last step on its field.
    """

    op: Literal["pad_batch"] = "pad_batch"
    fill: Annotated[float, Range(-FILL_MAX, FILL_MAX)] = 0.0
    """The value in the room after a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged(RoomStep):
    """Give samples of different shapes room for the largest, with contiguous values.

    Trainers get a list of arrays, each in its own shape, or all values with the row offsets, and
    how large each sample is in a field FIELD_length, or FIELD_shape where several dimensions vary.
    The last step on its field.
    """

    op: Literal["ragged"] = "ragged"
