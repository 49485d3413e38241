"""Dropping and renaming, run. Worker process."""

from batchd.pipeline.effects import Columns
from batchd.pipeline.fields.options import Drop, Rename
from batchd.pipeline.randomness import SampleRandom
from batchd.pipeline.stages import Row, make_stage
from batchd.samples.values import Value


@make_stage.register(Drop)
class DropStage:
    """Forgets values."""

    def __init__(self, step: Drop, _before: Columns, _after: Columns) -> None:
        self._fields = step.fields

    def run(self, values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        """See ``stages.Stage``."""
        for name in self._fields:
            values.pop(name, None)


@make_stage.register(Rename)
class RenameStage:
    """Calls a value something else."""

    def __init__(self, step: Rename, _before: Columns, _after: Columns) -> None:
        self._field, self._to = step.field, step.to

    def run(self, values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        """See ``stages.Stage``."""
        values[self._to] = values.pop(self._field)
