"""What a pipeline consists of in a worker: stages, each of which runs one or several steps. Worker process."""

from collections.abc import Mapping
from functools import singledispatch
from typing import Protocol, TypeAlias

from batchd.pipeline.effects import Columns
from batchd.pipeline.image.vision import Image
from batchd.pipeline.options import StepOptions
from batchd.pipeline.randomness import SampleRandom
from batchd.samples.values import Value

Row: TypeAlias = Mapping[str, Image]
"""One row of a batch: the memory of each field, by name."""


class Stage(Protocol):
    """Steps that run together. Belongs to one worker and one stream; not for several threads at once."""

    def run(self, values: dict[str, Value], random: SampleRandom, row: Row) -> None:
        """Replace the values that the steps are done to. One that is the field of ``row`` itself is in its place already.

        Values are valid until the next sample. Raises ``SampleUndecodable`` with the reason.
        """


@singledispatch
def make_stage(step: StepOptions, _before: Columns, _after: Columns) -> Stage:
    """Make the stage of a step from the columns before it and after it.

    Each family registers the stages of its steps in its module ``stages``. Steps on images are not
    among them: ``execute`` joins them to an ``ImageStage``.
    """
    raise NotImplementedError(f"the step {step.op} has no stage")
