"""The stages of a pipeline, each of one or several steps, and their time. Worker process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import singledispatch
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.image.opencv import Image
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value
from batchd_wire.views import Array

if TYPE_CHECKING:
    from batchd.data.pipeline.join.options import JoinStep

Row: TypeAlias = Mapping[str, Image]
"""One row of a batch: the memory of each field, by name."""
Stage: TypeAlias = Callable[[dict[str, Value], SampleRandom, Row], None]
"""Replaces the values that its steps are done to; one that is the field of the row is in place.

Values are valid until the next sample. Raises ``SampleUndecodable`` with the reason. A stage
belongs to one worker and one stream, and not to several threads at once."""


class JoinStage(ABC):
    """Makes one sample of it and others, as its step says; ``execute`` gets the others.

    ``numbers``: how many it draws. ``name``: of the step among those of its kind. ``joined``: the
    image and what follows it. ``needed``: the stages before it that make these, with their parts of
    the timings. ``passes_canvas``: the stage behind it takes an image in parts. ``values_stay``:
    whether the values that were made last stay until the row is made.
    """

    def __init__(self, step: "JoinStep", numbers: int) -> None:
        self.step = step
        self.numbers = numbers
        self.name = ""
        self.joined = frozenset[str]()
        self.needed: Sequence[tuple[Stage | JoinStage, int]] = ()
        self.passes_canvas = False
        self.values_stay: Callable[[], bool] = lambda: False

    @abstractmethod
    def join(
        self, values: dict[str, Value], others: Iterable[dict[str, Value]], numbers: Sequence[float]
    ) -> dict[str, object]:
        """Replace ``values``, and say what was drawn, for ``batchd replay``.

        What is joined of ``values`` is gone when the first of the ``others`` is taken, and of each
        when the next one is. ``numbers``: from [0, 1).
        """

    def alone(self, values: dict[str, Value]) -> None:  # noqa: B027  most leave it as it is
        """Change the values of a sample that no other one joins."""


@singledispatch
def make_stage(step: StepOptions, _before: Columns, _after: Columns) -> Stage | JoinStage:
    """Make the stage of a step from the columns before it and after it: families register theirs.

    Steps on images have none: ``execute`` joins them to an ``ImageStage``.
    """
    raise NotImplementedError(f"the step {step.op} has no stage")


RowsStage: TypeAlias = Callable[[dict[str, Array], Row], None]
"""Does to the numbers of several samples, ``[samples, *shape]``, what a stage does to one's.

Raises ``SampleUndecodable`` if one of them is bad: the stage says which, and why."""


class EachStage:
    """Does to each value of a list what a stage does to one.

    ``made``: the columns that it makes of one value. ``random_ops``: its steps that draw.
    ``in_place``: the stage writes images of one shape into a row that it is given.
    """

    def __init__(
        self, field: str, stage: Stage, made: Sequence[Column], random_ops: Sequence[str], *, in_place: bool
    ) -> None:
        self._field, self._stage, self._made, self._random_ops = field, stage, made, random_ops
        self._in_place = in_place

    def __call__(self, values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        """Replace the list by those that are made of it. Raises ``SampleUndecodable``."""
        items = values.pop(self._field)
        assert isinstance(items, list | np.ndarray), "a list, or its arrays as one"
        outer = random.draws
        drawn: list[dict[str, object]] = [{} for _op in self._random_ops]
        made = [self._room(column, len(items)) for column in self._made]
        place = 0
        try:
            for place, item in enumerate(items):
                random.draws = None if outer is None else []
                self._make(place, item, random, made)
                for op, noted, drew in zip(self._random_ops, drawn, random.draws or (), strict=False):
                    noted[str(place)] = [{"op": op, **drew}]
        except SampleUndecodable as error:
            raise SampleUndecodable(f"{self._field}[{place}]: {error}") from None
        finally:
            random.draws = outer
        if outer is not None:
            outer += drawn
        values |= {column.name: one for column, one in zip(self._made, made, strict=True)}

    def _room(self, column: Column, count: int) -> "list[object] | Array":
        return np.empty((count, *column.fixed_shape), column.dtype) if self._in_place else []

    def _make(self, place: int, item: object, random: SampleRandom, made: "Sequence[list[object] | Array]") -> None:
        one: dict[str, Value] = {self._field: item}  # type: ignore[dict-item]  # a value of a list
        rows = {column.name: room[place] for column, room in zip(self._made, made, strict=True) if self._in_place}
        self._stage(one, random, rows)  # type: ignore[arg-type]  # memory of the images
        for column, several in zip(self._made, made, strict=True):
            value = one[column.name]
            if isinstance(several, list):  # its memory is used again for the next one
                several.append(value.copy() if isinstance(value, np.ndarray) else value)


@singledispatch
def make_rows_stage(_step: StepOptions) -> RowsStage | None:
    """Make the stage of a step for several samples; None if it is done sample by sample."""
    return None


class Timings:
    """The time of one sample after the other, by named parts: reading, decoding, each of the steps.

        start --read--> lap --decode--> lap --resize--> lap ...

    Each moment belongs to the part whose lap ends it. A lap is one look at the clock, some 0.1 us,
    so all samples are measured.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._spent_ns: list[int] = []
        self._before_ns: list[int] = []
        self._begun_ns = self._last_ns = 0
        self._shared: dict[str, int] | None = None

    def part(self, name: str) -> int:
        """Add a part, and return its number; a step that is there twice has two of one name."""
        if self._shared is not None and self._shared.setdefault(name, len(self.names)) < len(self.names):
            return self._shared[name]
        self.names.append(name)
        self._spent_ns.append(0)
        return len(self.names) - 1

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within, parts of one name are one: the same step of several views."""
        self._shared = {}
        try:
            yield
        finally:
            self._shared = None

    def start(self) -> None:
        """Begin here; what was before belongs to nothing."""
        self._begun_ns = self._last_ns = perf_counter_ns()
        self._before_ns = self._spent_ns.copy()

    def lap(self, part: int, now_ns: int | None = None) -> None:
        """Count all time since the last lap, or the start, for this part; ``now_ns``: its end."""
        now_ns = now_ns or perf_counter_ns()
        self._spent_ns[part] += now_ns - self._last_ns
        self._last_ns = now_ns

    def add(self, part: int, spent_ns: int) -> None:
        """Count time for this part that was measured elsewhere."""
        self._spent_ns[part] += spent_ns

    def since_start_ns(self, part: int) -> int:
        """Time spent on one part since the start."""
        return self._spent_ns[part] - self._before_ns[part]

    def take_back_ns(self) -> int:
        """All since the start belongs to no part after all; says how much that is."""
        self._spent_ns = self._before_ns
        return perf_counter_ns() - self._begun_ns

    def take_us(self) -> list[int]:
        """Time spent on each part, in us, in the order of their names. Counting restarts."""
        taken = [spent // 1000 for spent in self._spent_ns]
        self._spent_ns = [0] * len(self._spent_ns)
        return taken
