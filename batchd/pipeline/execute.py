"""The steps of one stream in a worker: from the values of a source straight into one row of a batch. Worker process.

    values  --stage-->  values  --stage-->  values  --store-->  row
                                    the last stage of an image writes into the row itself

Steps on the same image that follow each other are one stage, which decodes no more than they need and writes pixels once.

Invariant: the bytes written are a function of (steps, seed, epoch, sample, attempt, the source's values) and the versions of
what decodes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from batchd.config.columns import Column
from batchd.config.image_steps import Decode
from batchd.config.steps import Step
from batchd.config.values import Value
from batchd.pipeline import field_stage, image_effects, number_stage, shape_stage, text_stage
from batchd.pipeline.arrays import array_of
from batchd.pipeline.effects import Columns
from batchd.pipeline.fields import EFFECTS, columns_after
from batchd.pipeline.image_stage import ImageStage
from batchd.pipeline.randomness import SampleRandom
from batchd.pipeline.stages import MakeStage, Row, Stage
from batchd.pipeline.vision import Image

STAGES: Mapping[type[Step], MakeStage] = MappingProxyType(
    {**number_stage.STAGES, **field_stage.STAGES, **text_stage.STAGES, **shape_stage.STAGES}
)
"""All steps but those on images, of which a run is one stage."""
RECORD_BYTES_MAX = 64 << 20
"""Length of a record, in bytes, above which a sample is bad, where no ``decode`` step says."""


class Pipeline:
    """The steps of one stream, ready to run on one sample after the other. Not for several threads at once."""

    def __init__(self, columns: Sequence[Column], steps: Sequence[Step], seed: int, *, has_rows: bool = True) -> None:
        self.columns = columns_after(columns, steps)
        """What a sample consists of afterwards, by name."""
        self._random = SampleRandom(seed)
        self._stages = list(_stages(columns, steps, has_rows=has_rows))

    def run(self, values: Mapping[str, Value], epoch: int, sample: int, attempt: int, row: Row) -> None:
        """Make the fields of ``sample`` from the values of its source and write them into ``row``.

        ``attempt`` is 0, or counts the samples that were tried in this one's place. Raises ``SampleUndecodable``, and then
        leaves the fields in no particular state.
        """
        made = self.make(values, epoch, sample, attempt, row)
        for name, column in self.columns.items():
            value, out = made[name], row[name]
            if value is not out:
                _store(column, value, out)

    def make(
        self, values: Mapping[str, Value], epoch: int, sample: int, attempt: int, row: Row = MappingProxyType({})
    ) -> dict[str, Value]:
        """The values of ``sample`` after all steps, of whatever shape. A pipeline without rows needs no ``row``."""
        made = dict(values)
        self._random.start(epoch, sample, attempt)
        for stage in self._stages:
            stage.run(made, self._random, row)
        return made

    def keep(self, values: Mapping[str, Value], row: Row) -> None:
        """Write what is known of a bad sample into ``row``, where no step changes it, and zeros everywhere else.

        In a padded field, whose size is zero then, that is what stands behind every sample: its filling.
        """
        for name, column in self.columns.items():
            row[name][...] = column.fill
            if name in values and not column.made_by:
                _store(column, values[name], row[name])


def record_bytes_max(steps: Sequence[Step]) -> int:
    """How long a record of the source may be, in bytes."""
    return max((step.max_bytes for step in steps if isinstance(step, Decode)), default=RECORD_BYTES_MAX)


def _stages(columns: Sequence[Column], steps: Sequence[Step], *, has_rows: bool) -> Iterator[Stage]:
    made: Columns = {column.name: column for column in columns}
    runs: list[list[Step]] = []
    for step in steps:
        if runs and _is_on_image(step) and _is_on_image(runs[-1][0]) and step.touches == runs[-1][0].touches:
            runs[-1].append(step)
        else:
            runs.append([step])
    for place, run in enumerate(runs):
        before = made
        for step in run:
            made = EFFECTS[type(step)](step, made)
        rest = [step.touches for later in runs[place + 1 :] for step in later]
        yield _stage(run, before, made, rest if has_rows else [None])


def _stage(run: list[Step], before: Columns, after: Columns, rest: Sequence[frozenset[str] | None]) -> Stage:
    """Make the stage of one run. ``rest``: what the steps behind it touch."""
    step = run[0]
    if type(step) in STAGES:
        return STAGES[type(step)](step, before, after)
    assert isinstance(step, image_effects.ImageStep), f"{step.op} has no stage"
    column = after[step.field]
    is_last = not any(touched is None or step.field in touched for touched in rest)
    return ImageStage(run, before[step.field], column, writes_row=is_last and column.is_fixed)


def _is_on_image(step: Step) -> bool:
    return type(step) in image_effects.EFFECTS


def _store(column: Column, value: Value, out: Image) -> None:
    """Write a value that no stage has written. Raises ``SampleUndecodable`` where it is not what its column says."""
    out[...] = array_of(column, value)
