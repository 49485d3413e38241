"""Measures the size of each sample of a stream, by which samples share a batch. Daemon.

    index of the source --> helper processes (worker.tasks) make each sample once --> sizes
          |                                                                               ^
          +-- a length that the index tells, and that no step changes --------------------+

Invariant: the helper processes are gone when ``measured`` returns or raises.
"""

import json
import mmap
import os
from contextlib import ExitStack, suppress
from math import prod
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.shapes.options import LAST_STEPS
from batchd.data.sources.interface import kind_of
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.survey import ReportProgress
from batchd.errors import SourceInvalid
from batchd.runtime import children
from batchd.runtime.children import PIPE, STDOUT, Child, describe
from batchd.stream.plan import StreamPlan
from batchd.worker.messages import AFTER_STEPS, BLOCK_SAMPLES, IN_WORK, UNKNOWN, LengthsQuestion
from batchd_wire.fields import ITEM_BYTES

LOOK_EVERY_S = 0.25
DEATHS_MAX = 8
"""Deaths of helper processes in one pass; then something else than a sample is wrong."""
SAID_BYTES_MAX = 2000


class Size(NamedTuple):
    """What the size of a sample is: see ``config.tree.Bucket``."""

    field: str
    by: str


class MeasureOptions(NamedTuple):
    """How all samples are measured: by so many ``workers``, each sample in so many seconds.

    ``progress`` is called with the number of samples that have been measured.
    """

    workers: int
    sample_timeout_s: float
    storage: Storage
    progress: ReportProgress


def lengths_in_index(plan: StreamPlan, index: SourceIndex, field: str) -> NDArray[np.int64] | None:
    """The elements of a field in each sample, int64 ``[samples]``; 0 for a record that is too long.

    None if the index of the source does not tell, or if a step may change the lengths.
    """
    steps = [step for step in plan.pipeline.steps if not isinstance(step, LAST_STEPS)]
    if not all(step.keeps_length or field not in (step.changes or {field}) for step in steps):
        return None
    lengths = kind_of(plan.config.source).lengths(plan.config.source, index, field)
    if lengths is not None:
        lengths[lengths > plan.pipeline.record_bytes_max // _element_bytes(plan, field)] = 0
    return lengths


def _element_bytes(plan: StreamPlan, field: str) -> int:
    """The bytes of an element of a field of the source."""
    column = next(column for column in plan.columns if column.name == field)
    return ITEM_BYTES[column.dtype] * prod(length or 1 for length in column.shape)


class _Helper:
    """A process that measures the samples of one part."""

    def __init__(self, part: int, child: Child) -> None:
        self.part = part
        self.child = child
        self.said = b""
        self._sample, self._since_s = -1, monotonic()
        os.set_blocking(child.output.fileno(), False)

    def listen(self) -> None:
        """Keep the end of its output."""
        with suppress(BlockingIOError):
            while data := os.read(self.child.output.fileno(), SAID_BYTES_MAX):
                self.said = (self.said + data)[-SAID_BYTES_MAX:]

    def busy_for_s(self, sample: int) -> float:
        """Seconds since it began ``sample``, in which it is now; -1 for none."""
        if sample != self._sample or sample < 0:
            self._sample, self._since_s = sample, monotonic()
        return monotonic() - self._since_s

    @property
    def last_line(self) -> str:
        """The last line of its output, printable; "" without one."""
        lines = self.said.decode("utf-8", "backslashreplace").strip().splitlines()
        return readable(lines[-1].encode()) if lines else ""


class _Measuring:
    """One pass over all samples."""

    def __init__(
        self, plan: StreamPlan, size: Size, index: SourceIndex, pass_: MeasureOptions, only: tuple[int, ...] = ()
    ) -> None:
        recipe = plan.recipe()
        last = {step.op for step in plan.pipeline.steps if isinstance(step, LAST_STEPS)}
        made = [step for step in recipe.steps if step["op"] not in last] if size.by in AFTER_STEPS else []
        count = len(only) or len(index)
        self._question = LengthsQuestion(
            list(recipe._replace(steps=recipe.steps if only else made, cut=0)),
            pass_.storage.limits.to_wire(),
            size.field,
            size.by,
            part=0,
            parts=max(1, min(pass_.workers, -(-count // BLOCK_SAMPLES))),
            only=only,
            as_of_ns=pass_.storage.as_of_ns,
        )
        self._timeout_s = pass_.sample_timeout_s
        self._deaths = 0
        self.example = ""
        """One bad sample, and why it is bad."""
        self._opened = ExitStack()
        with self._opened:
            memory = os.memfd_create("batchd-lengths", os.MFD_CLOEXEC)
            self._opened.callback(os.close, memory)
            os.posix_fallocate(memory, 0, 8 * count)
            self.lengths: NDArray[np.int64] = np.frombuffer(mmap.mmap(memory, 8 * count), np.int64)
            self.lengths[:] = UNKNOWN
            descriptor = index.to_memfd()
            self._opened.callback(os.close, descriptor)
            self._descriptors = [memory, descriptor]
            self._opened = self._opened.pop_all()

    def run(self, progress: ReportProgress) -> None:
        """Measure. Raises ``SourceInvalid``."""
        with self._opened:
            helpers = [self._start(part) for part in range(self._question.parts)]
            while helpers:
                progress(int((self.lengths >= 0).sum()))
                in_work = np.flatnonzero(self.lengths == IN_WORK).tolist()
                of_part = {sample // BLOCK_SAMPLES % self._question.parts: sample for sample in in_work}
                helpers[0].child.has_ended(LOOK_EVERY_S)
                for helper in list(helpers):
                    helper.listen()
                    sample = of_part.get(helper.part, -1)
                    if helper.busy_for_s(sample) > self._timeout_s:
                        helper.child.kill()
                        helper.child.has_ended(None)
                    if helper.child.has_ended():
                        helpers.remove(helper)
                        helpers += self._bury(helper)

    def _start(self, part: int) -> _Helper:
        child = children.start(
            "batchd.worker.tasks",
            *map(str, self._descriptors),
            descriptors=self._descriptors,
            given=json.dumps(self._question._replace(part=part)._asdict()).encode(),
            stdout=PIPE,
            stderr=STDOUT,
        )
        return _Helper(part, self._opened.enter_context(child))

    def _bury(self, helper: _Helper) -> list[_Helper]:
        """Take the result of an ended process; if a sample has ended it, start it again."""
        helper.listen()
        status = helper.child.reap()
        if status == 0:
            self.example = self.example or helper.last_line
            return []
        mine = np.arange(len(self.lengths)) // BLOCK_SAMPLES % self._question.parts == helper.part
        killers = np.flatnonzero(mine & (self.lengths == IN_WORK)).tolist()
        self._deaths += 1
        if not killers or self._deaths > DEATHS_MAX:
            why = helper.last_line or f"its process ended with {describe(status)}"
            raise SourceInvalid(why if self._question.only else f"the sizes of samples cannot be measured: {why}")
        self.lengths[killers] = 0
        sample = self._question.only[killers[0]] if self._question.only else killers[0]
        self.example = f"sample {sample}: it ended its process by {describe(status)}"
        return [self._start(helper.part)]


def measured(plan: StreamPlan, size: Size, index: SourceIndex, pass_: MeasureOptions) -> tuple[NDArray[np.int64], str]:
    """The size of each sample, int64 ``[samples]``, 0 for a bad one; one bad one, and its reason.

    Raises ``SourceInvalid``.
    """
    if size.by == "length":
        known = lengths_in_index(plan, index, size.field)
        if known is not None:
            return known, ""
    if size.by == "bytes":
        known = kind_of(plan.config.source).lengths(plan.config.source, index, size.field)
        if known is not None:
            return known * _element_bytes(plan, size.field), ""
    measuring = _Measuring(plan, size, index, pass_)
    measuring.run(pass_.progress)
    return measuring.lengths, measuring.example


def bad_ones(plan: StreamPlan, index: SourceIndex, pass_: MeasureOptions, samples: tuple[int, ...]) -> tuple[int, str]:
    """Make a few samples in a process of their own: how many are bad, and the reason of one.

    Raises ``SourceInvalid`` if no sample of the stream can be made, as the user's function or a
    step's file cannot be used.
    """
    trying = _Measuring(plan, Size("", ""), index, pass_, samples)
    trying.run(pass_.progress)
    return int((trying.lengths <= 0).sum()), trying.example
