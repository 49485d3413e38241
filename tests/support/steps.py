"""Steps by their names, and their problems as texts alone. For tests of steps."""

from collections.abc import Sequence

from batchd.data.pipeline.options import STEP_KINDS, StepOptions
from batchd.data.pipeline.sample_fields import StepCheck, reserved_names
from batchd.data.samples.columns import Column


def op(name: str, **options: object) -> StepOptions:
    """Make a step, as a configuration names it."""
    return STEP_KINDS[name](**options)


def check_steps(columns: Sequence[Column], steps: Sequence[StepOptions]) -> list[str]:
    """Return all problems of the names of ``columns`` and of ``steps``."""
    check = StepCheck(columns)
    for place, step in enumerate(steps):
        check.check_step(place, step)
    return [*reserved_names(columns), *(problem.text for problem in check.finish())]
