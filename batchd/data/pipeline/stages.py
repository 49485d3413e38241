"""The stages of a pipeline: each runs one or several steps. Worker process."""

from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import Any, TypeAlias

from numpy.typing import NDArray

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.image.opencv import Image
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.samples.values import Value

Numbers: TypeAlias = NDArray[Any]
Row: TypeAlias = Mapping[str, Image]
"""One row of a batch: the memory of each field, by name."""
Stage: TypeAlias = Callable[[dict[str, Value], SampleRandom, Row], None]
"""Replaces the values that its steps are done to; one that is the field of the row is in place.

Values are valid until the next sample. Raises ``SampleUndecodable`` with the reason. A stage
belongs to one worker and one stream, and not to several threads at once."""


@singledispatch
def make_stage(step: StepOptions, _before: Columns, _after: Columns) -> Stage:
    """Make the stage of a step from the columns before it and after it: families register theirs.

    Steps on images have none: ``execute`` joins them to an ``ImageStage``.
    """
    raise NotImplementedError(f"the step {step.op} has no stage")


RowsStage: TypeAlias = Callable[[dict[str, Numbers], Row], None]
"""Does to the numbers of several samples, ``[samples, *shape]``, what a stage does to one's.

Raises ``SampleUndecodable`` if one of them is bad: the stage says which, and why."""


@singledispatch
def make_rows_stage(_step: StepOptions) -> RowsStage | None:
    """Make the stage of a step for several samples; None if it is done sample by sample."""
    return None
