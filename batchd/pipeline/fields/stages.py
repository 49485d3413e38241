"""Dropping and renaming, run. Worker process."""

from collections.abc import Mapping
from types import MappingProxyType

from batchd.pipeline.effects import Columns
from batchd.pipeline.fields.options import Drop, Rename
from batchd.pipeline.options import StepOptions
from batchd.pipeline.randomness import SampleRandom
from batchd.pipeline.stages import MakeStage, Row
from batchd.samples.values import Value


class DropStage:
    """Forgets values."""

    def __init__(self, step: Drop, _before: Columns, _after: Columns) -> None:
        self._fields = step.fields

    def run(self, values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        """See ``stages.Stage``."""
        for name in self._fields:
            values.pop(name, None)


class RenameStage:
    """Calls a value something else."""

    def __init__(self, step: Rename, _before: Columns, _after: Columns) -> None:
        self._field, self._to = step.field, step.to

    def run(self, values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        """See ``stages.Stage``."""
        values[self._to] = values.pop(self._field)


STAGES: Mapping[type[StepOptions], MakeStage] = MappingProxyType({Drop: DropStage, Rename: RenameStage})
