"""What is wrong with steps, as texts alone. For tests of steps."""

from collections.abc import Sequence

from batchd.pipeline.options import StepOptions
from batchd.pipeline.sample_fields import StepCheck, taken_names
from batchd.samples.columns import Column


def check_steps(columns: Sequence[Column], steps: Sequence[StepOptions]) -> list[str]:
    """Everything that is wrong with the names of ``columns`` and with ``steps``."""
    check = StepCheck(columns)
    for place, step in enumerate(steps):
        check.look_at(place, step)
    return [*taken_names(columns), *(problem.text for problem in check.finish())]
