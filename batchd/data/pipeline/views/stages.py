"""Several views of one image, each by steps of its own. Worker process.

    directly behind "decode"                         elsewhere
    probe header -> all views on paper               pixels -> the steps of one view after the other
      -> for each scale: decode the box around all crops once, or each crop alone
      -> the other steps of one view after the other -> its place in the field

A view has the bytes that "decode" and its steps make with its numbers, whatever other views there
are: its scale follows from its own crop, and a crop of decoded pixels is what decoding it alone
gives. So ``plan_groups`` may go by time alone, and by the access points that a cache happens to
have.

Invariant: the bytes of a view are a function of (its steps, seed, epoch, sample, attempt, field,
its place in the field, the file) and the decoders' versions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from batchd.data.pipeline.image.decode import Decoder
from batchd.data.pipeline.image.geometry import HALF, Cut, Resampling, box_around
from batchd.data.pipeline.image.jpeg_box import decoding_ns, part_of
from batchd.data.pipeline.image.resample import cut_out
from batchd.data.pipeline.image.stages import ImagePlan, ImageStage
from batchd.data.pipeline.randomness import Mark, SampleRandom, view_number
from batchd.data.pipeline.stages import Row, Stage, Timings
from batchd.data.pipeline.views.options import IMAGE
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.image_header import ImageHeader
from batchd.data.samples.kept_files import DecodedFile, FileHead, FilePart
from batchd.data.samples.values import Value, array_of
from batchd_wire.views import Array

Draws = list[dict[str, object]]


class ViewSteps(NamedTuple):
    """The steps of one field's views.

    ``total``: how many views. ``column``: of one of them, as its steps leave it. ``stages``: each
    with the name of its step and its part of ``Timings``. ``random_steps``: the names of those that
    draw. ``draws_later``: some draw behind the first stage's moves. ``is_written``: no later step
    changes the field, so views go into the row.
    """

    name: str
    total: int
    column: Column
    stages: Sequence[tuple[Stage, str, int]]
    random_steps: Sequence[str]
    draws_later: bool
    is_written: bool


class OneView(NamedTuple):
    """One view. ``place``: which of its field's; ``number``: of its random numbers."""

    steps: ViewSteps
    place: int
    number: int

    @property
    def label(self) -> str:
        """The view as users know it: "local[3]", or the field alone."""
        return f"{self.steps.name}[{self.place}]" if self.steps.total > 1 else self.steps.name

    @property
    def decoding(self) -> ImageStage:
        """The stage that decodes it."""
        stage = self.steps.stages[0][0]
        assert isinstance(stage, ImageStage), "the first step is decode"
        return stage

    def failed(self, step: str, error: SampleUndecodable) -> SampleUndecodable:
        """The reason with the view and its step; unchanged if it is about the file."""
        return SampleUndecodable(f'"{step}" of view {self.label}: {error}') if step else error


class PlannedView(NamedTuple):
    """A view whose crop is known. ``mark``: before the numbers of its other steps, if any draws."""

    view: OneView
    plan: ImagePlan
    mark: Mark | None
    draws: Draws | None


class ViewGroup(NamedTuple):
    """Views of one scale. ``box``: around all of their crops, at this scale.

    ``together_ns``, ``alone_ns``: estimates of decoding that box, or each crop.
    """

    views: Sequence[PlannedView]
    factor: int
    box: Cut
    together_ns: float
    alone_ns: float

    @property
    def is_together(self) -> bool:
        """True if the box is decoded once."""
        return len(self.views) > 1 and self.together_ns <= self.alone_ns


class ViewsStage:
    """A step that makes views of ``field``, directly behind the "decode" of ``decoder`` or not."""

    def __init__(self, field: str, views: Sequence[ViewSteps], decoder: Decoder | None, timings: Timings) -> None:
        self.field = field
        self._fields = views
        self._views = [
            OneView(steps, place, view_number(steps.name, place)) for steps in views for place in range(steps.total)
        ]
        self._is_random = any(steps.random_steps for steps in views)
        self._decoder = decoder
        self._timings = timings
        self._storing = timings.part("views")
        self._memory: dict[str, Array] = {}
        """Of fields that later steps change."""

    @property
    def last_part(self) -> int:
        """The last part of a call."""
        return self._storing

    def __call__(self, values: dict[str, Value], random: SampleRandom, row: Row) -> None:
        """Replace the image by its views. Raises ``SampleUndecodable`` with the view and step."""
        value, outer, mark = values.pop(self.field), random.draws, random.mark()
        made: dict[str, Value | None] = {steps.name: self._room(steps, row) for steps in self._fields}
        drawn: dict[str, Draws] = {}
        try:
            for view, plan, pixels in self._begun(value, random):
                made[view.steps.name] = self._make(view, value, random, made[view.steps.name], plan, pixels)
                drawn[view.label] = random.draws or []
        finally:
            random.draws = outer
        random.return_to(mark)
        for name, one in made.items():
            assert one is not None, f"{name} has a view"
            values[name] = one
        if outer is not None and self._is_random:
            outer.append({view.label: self._named(view, drawn[view.label]) for view in self._views})

    def groups(self, value: Value, random: SampleRandom) -> list[ViewGroup]:
        """Plan a call. Raises ``SampleUndecodable``; empty if it decodes nothing."""
        return self._grouped(list(self._plan(value, random)), value) if self._decoder is not None else []

    def boxes(self, header: ImageHeader, random: SampleRandom) -> list[tuple[int, Cut]]:
        """1/scale and box of what a call would decode of a file. Raises ``SampleUndecodable``."""
        planned = self._plan(FilePart(header, memoryview(b""), 0), random)
        return [(one.plan.decoding.factor, one.plan.decoding.box) for one in planned]

    def part(
        self, field: str, head: FileHead, points: memoryview | bytes, random: SampleRandom
    ) -> tuple[int, int] | None:
        """The bytes of a file with these points that a call would read, as ``part_of``."""
        if self._decoder is None or field != self.field:
            return None
        try:
            planned = list(self._plan(FilePart(head.header, memoryview(b""), 0), random))
        except SampleUndecodable:
            return None
        groups = plan_groups(planned, cuts=True, has_points=True)
        parts = [part_of(head, points, group.factor, group.box) for group in groups]
        known = [part for part in parts if part is not None]
        return (min(known)[0], max(end for _first, end in known)) if len(known) == len(parts) else None

    def _begun(self, value: Value, random: SampleRandom) -> Iterator[tuple[OneView, ImagePlan | None, Array | None]]:
        """Each view with its plan and the pixels of its crop, if known; its numbers are next."""
        notes = random.draws is not None
        if self._decoder is None:
            for view in self._views:
                random.start_view(view.number)
                random.draws = [] if notes else None
                yield view, None, None
            return
        groups = self._grouped(list(self._plan(value, random)), value)
        keeps_half = any(group.factor == HALF for group in groups)
        for group in groups:
            pixels = self._decode(group, value, keeps_half=keeps_half) if group.is_together else None
            for planned in group.views:
                if planned.mark is not None:
                    random.return_to(planned.mark)
                random.draws = planned.draws
                inside = None if pixels is None else cut_out(pixels, planned.plan.decoding.box.within(group.box))
                yield planned.view, planned.plan, inside

    def _plan(self, value: Value, random: SampleRandom) -> Iterator[PlannedView]:
        """Draw the numbers of each view's moves. Raises ``SampleUndecodable``."""
        notes, header = random.draws is not None, self._views[0].decoding.look(value)
        for view in self._views:
            random.start_view(view.number)
            random.draws = [] if notes else None
            try:
                plan = view.decoding.planned(header, random)
            except SampleUndecodable as error:
                raise view.failed(view.decoding.step, error) from None
            yield PlannedView(view, plan, random.mark() if view.steps.draws_later else None, random.draws)

    def _grouped(self, planned: Sequence[PlannedView], value: Value) -> list[ViewGroup]:
        assert self._decoder is not None, "it decodes"
        keeps_whole = self._decoder.keeps_pixels and not isinstance(value, DecodedFile)
        cuts = planned[0].plan.is_cut_by_decoder and not keeps_whole
        return plan_groups(planned, cuts=cuts, has_points=self._decoder.has_points)

    def _decode(self, group: ViewGroup, value: Value, *, keeps_half: bool) -> Array:
        """Decode the box of a group; read-only, as its views may overlap.

        ``keeps_half``: a cache of pixels keeps the image at 1/2, too.
        """
        assert self._decoder is not None, "it decodes"
        assert isinstance(value, memoryview | DecodedFile | FilePart)
        first = group.views[0]
        header = first.plan.header
        moves = [Resampling(header.height // HALF, header.width // HALF, "auto")] if keeps_half else []
        pixels = self._decoder.decode(value, header, group.factor, group.box, moves).view()
        pixels.flags.writeable = False
        self._timings.lap(first.view.decoding.decoding_part)
        return pixels

    def _make(  # noqa: PLR0913, PLR0917  each is one thing that a view is made of
        self,
        view: OneView,
        value: Value,
        random: SampleRandom,
        room: Value | None,
        plan: ImagePlan | None,
        pixels: Array | None,
    ) -> Value:
        """Run the steps of a view. Returns the field, so far as it is made."""
        steps = view.steps
        assert room is None or isinstance(room, np.ndarray), "memory of the field"
        target = room if room is None or steps.total == 1 else room[view.place]
        row: Row = {} if target is None else {IMAGE: target}
        given = {IMAGE: value}
        for stage, name, part in steps.stages:
            try:
                if plan is None:
                    stage(given, random, row)
                else:
                    view.decoding.make(given, random, row, plan, pixels)
            except SampleUndecodable as error:
                raise view.failed(stage.step if isinstance(stage, ImageStage) else name, error) from None
            self._timings.lap(part)
            plan = None
        made = given[IMAGE]
        if target is None:
            made = np.array(made)  # its memory may be that of the next view
        elif made is not target:
            target[...] = array_of(steps.column, made)
        self._timings.lap(self._storing)
        return made if room is None else room

    def _room(self, steps: ViewSteps, row: Row) -> Array | None:
        """Memory for all views of a field; None if they have no known shape."""
        if steps.is_written:
            return row[steps.name]
        if not steps.column.is_fixed:
            return None
        if steps.name not in self._memory:
            axis = (steps.total,) if steps.total > 1 else ()
            self._memory[steps.name] = np.empty((*axis, *steps.column.fixed_shape), steps.column.dtype)
        return self._memory[steps.name]

    @staticmethod
    def _named(view: OneView, draws: Draws) -> list[Mapping[str, object]]:
        return [{"op": op, **drew} for op, drew in zip(view.steps.random_steps, draws, strict=True)]


def plan_groups(planned: Sequence[PlannedView], *, cuts: bool, has_points: bool) -> list[ViewGroup]:
    """Group views by their scale, and estimate what decoding them takes.

    ``cuts``: a box of the file can be decoded alone. ``has_points``: decoding can begin near it.
    """
    header = planned[0].plan.header

    def cost_ns(box: Cut, factor: int) -> float:
        return decoding_ns(header, factor, box, cuts=cuts, has_points=has_points)

    groups = []
    for factor in dict.fromkeys(one.plan.decoding.factor for one in planned):
        views = [one for one in planned if one.plan.decoding.factor == factor]
        boxes = [one.plan.decoding.box for one in views]
        around = box_around(boxes)
        groups.append(
            ViewGroup(views, factor, around, cost_ns(around, factor), sum(cost_ns(box, factor) for box in boxes))
        )
    return groups
