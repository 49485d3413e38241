"""Benchmark: CPU of several views of a photograph against that of one. In one process.

Two views against one (SimCLR: a crop of 8 % to 100 %, and a flip), and two global and eight local
views against one global one (DINO), each decoded, cut, scaled and flipped into the row of a batch:

    first epoch    no access points are known
    later          from the access points that a cache has by then

Sides take turns photograph by photograph, and the time is the thread's own on a CPU, so that others
on the machine hardly count. A round is an epoch, so each has other crops.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from time import thread_time_ns

import numpy as np
from harness import Bench, Figure, spread

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.jpeg_box import found_points
from batchd.data.pipeline.image.options import Decode, RandomFlip, RandomResizedCrop
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.views.options import View, Views
from batchd.data.samples.columns import Column
from batchd.data.samples.kept_files import KeptFiles

ANY = (RandomResizedCrop(size=(224, 224)), RandomFlip())
GLOBAL = (RandomResizedCrop(size=(224, 224), scale=(0.4, 1.0)), RandomFlip())
LOCAL = (RandomResizedCrop(size=(96, 96), scale=(0.05, 0.4)), RandomFlip())
RECIPES: Mapping[str, tuple[Sequence[StepOptions], Views, float]] = {
    "two": (ANY, Views(into={"image": View(count=2, steps=ANY)}), 1.7),
    "dino": (GLOBAL, Views(into={"image": View(count=2, steps=GLOBAL), "local": View(count=8, steps=LOCAL)}), 2.6),
}
"""The steps of one view, all views, and the most that these may take of it."""


def run(bench: Bench) -> None:
    """Each recipe, without access points and with them."""
    files = [path.read_bytes() for path in sorted(bench.photos.rglob("*")) if path.suffix.lower() in {".jpg", ".jpeg"}]
    points = [found_points(view, probe_image(view)) for view in map(memoryview, files)]
    for name, (one, views, target) in RECIPES.items():
        for records, when in ((None, "first"), (points, "later")):
            sides = ([Decode(), *one], [Decode(), views])
            epochs = range(bench.rounds + 1)
            # The first round warms up.
            rounds = [bench.measure(name, partial(_epoch_us, files, records, sides, epoch)) for epoch in epochs][1:]
            ratios = [several / single for single, several in rounds]
            spent = " and ".join(spread(list(us), 0) for us in zip(*rounds, strict=True))
            print(f"{name}, {when}: {spent} us for a photograph; {spread(ratios)}")
            bench.report(Figure(f"recipes-{name}-{when}", statistics.median(ratios), "<=", target))


def _epoch_us(
    files: Sequence[bytes], records: Sequence[bytes] | None, sides: Sequence[Sequence[StepOptions]], epoch: int
) -> tuple[float, ...]:
    """CPU for each photograph, by side."""
    kept = KeptFiles(["image"])
    pipelines = [Pipeline([Column("image", "encoded")], steps, 0, kept=kept) for steps in sides]
    rows = [
        {name: np.full((len(files), *field.fixed_shape), 1, np.uint8) for name, field in one.columns.items()}
        for one in pipelines
    ]  # touched, as slots are
    spent_ns = [0] * len(sides)
    for sample, file in enumerate(files):
        values = {"image": memoryview(file)}
        kept.points.begin({"image": records[sample]} if records else {}, is_kept=False)
        for turn in range(len(sides)):
            side = (turn + sample + epoch) % len(sides)
            row = {name: array[sample] for name, array in rows[side].items()}
            begun_ns = thread_time_ns()
            pipelines[side].run(values, epoch, sample, 0, row)
            spent_ns[side] += thread_time_ns() - begun_ns
    return tuple(spent / len(files) / 1000 for spent in spent_ns)
