"""What a pipeline consists of in a worker: stages, each of which runs one or several steps. Worker process."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from batchd.pipeline.effects import Columns
from batchd.pipeline.image.vision import Image
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


MakeStage: TypeAlias = Callable[[Any, Columns, Columns], Stage]
"""Makes the stage of a step. Takes the step, the columns before it and those after it."""
