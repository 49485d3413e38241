"""Facts of a stream that need no scan. Daemon, ``check`` and ``prepare``.

    StreamConfig ------------------------> pipeline: steps, cut, longest record
    source ------------------------------> columns
    files of steps ----------------------> digests
    modules of the user's functions -----> code

Invariant: a stream has one plan, made when it is opened and passed to all code that needs its
facts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchd.config.functions import StreamCode, code_of, runs_own_code
from batchd.config.tree import StreamConfig
from batchd.core.plan import Plan
from batchd.errors import SourceInvalid
from batchd.orders.worker import SampleRecipe
from batchd.pipeline.cache_split import PipelinePlan, plan_pipeline
from batchd.pipeline.kinds import step_to_plain
from batchd.pipeline.step_files import Digests, StepFileInvalid, digests_of
from batchd.samples.columns import Column
from batchd.sources.kinds import source_to_plain
from batchd.sources.push.options import PushSource
from batchd_wire.wording import counted

LIVE_STEPS = 1 << 40
"""Batches in an epoch of a live stream, which never ends: at a million per second it lasts twelve
days."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The plan of one stream.

    ``columns``: of the source. ``digests``: SHA-256 of each file that a step reads. ``code``: the
    user's modules. ``runs_own_code``: the source, or a part of it, is the user's own code.
    """

    name: str
    config: StreamConfig
    columns: tuple[Column, ...]
    pipeline: PipelinePlan
    digests: Digests
    code: StreamCode
    runs_own_code: bool

    def recipe(self) -> SampleRecipe:
        """How samples are made, for the processes that make them."""
        return SampleRecipe(
            seed=self.config.seed,
            source=source_to_plain(self.config.source),
            columns=[(column.name, column.text) for column in self.columns],
            steps=[step_to_plain(step) for step in self.pipeline.steps],
            cut=self.pipeline.cut,
            record_bytes_max=self.pipeline.record_bytes_max,
            rewritten=list(self.pipeline.rewritten.items()),
            files=[(str(path), digest) for path, digest in self.digests.items()],
            python_path=list(self.code.python_path),
            modules=list(self.code.digests.items()),
        )


def plan_stream(
    name: str, config: StreamConfig, columns: tuple[Column, ...], python_path: Sequence[Path]
) -> StreamPlan:
    """Plan a stream, whose steps fit the ``columns`` of its source.

    Raises ``SourceInvalid`` with the key and the reason.
    """
    pipeline = plan_pipeline(config.pipeline, config.cache, config.cache_short_side)
    try:
        code = code_of(config, python_path)
    except SourceInvalid as error:
        raise SourceInvalid(f"streams.{name}.source: {error}") from None
    try:
        digests = digests_of(pipeline.steps)
    except StepFileInvalid as error:
        raise SourceInvalid(f"streams.{name}.pipeline: {error}") from None
    return StreamPlan(name, config, columns, pipeline, digests, code, runs_own_code(config.source))


def epoch_plan(name: str, config: StreamConfig, samples: int) -> Plan:
    """Plan the epochs of a stream: which sample is in which batch.

    Raises ``SourceInvalid``, naming the stream, if it has no batch.
    """
    if isinstance(config.source, PushSource):
        samples = config.batch_size * LIVE_STEPS
    plan = Plan(samples, config.batch_size, config.seed, config.is_shuffled, config.drop_last)
    if plan.steps == 0:
        raise SourceInvalid(
            f"streams.{name}: a source of {counted(samples, 'sample')} makes no batch of {config.batch_size}, and drop_last "
            "= true drops the rest; set a smaller batch_size, or drop_last = false"
        )
    return plan
