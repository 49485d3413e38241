"""Benchmark: decoding only the crop against decoding the whole photograph. In one process.

The same crops of the same photographs, each decoded, cut, scaled and flipped into the row of a
batch, by the same pipeline:

    whole      without the extension
    alone      with it
    points     with it, by their access points

Sides take turns photograph by photograph, and the time is the thread's own on a CPU, so that others
on the machine hardly count. A round is an epoch, so each has other crops.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import thread_time_ns

import numpy as np
from harness import Bench, Figure, spread

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image import jpeg_box
from batchd.data.pipeline.image.decode import decoder_versions
from batchd.data.pipeline.image.jpeg_box import found_points
from batchd.data.pipeline.image.options import CenterCrop, Decode, RandomFlip, RandomResizedCrop
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.options import StepOptions
from batchd.data.samples.columns import Column
from batchd.data.samples.kept_files import KeptFiles, has_points

SIZE = (224, 224)
STEPS: dict[str, list[StepOptions]] = {
    "random": [Decode(), RandomResizedCrop(size=SIZE), RandomFlip()],
    "random-unscaled": [Decode(scale="off"), RandomResizedCrop(size=SIZE), RandomFlip()],
    "center": [Decode(), CenterCrop(size=SIZE)],
}
TARGETS = {"random": 1.26, "random-unscaled": 1.26, "center": 1.26}
POINTS_TARGETS = {"random": 1.7, "random-unscaled": 1.7, "center": 2.2}
SIDES = ("whole", "alone", "points")


def run(bench: Bench) -> None:
    """Random crops, which most trainings have, and the middle."""
    print(decoder_versions())
    if not jpeg_box.IS_BUILT:
        print(
            "the extension is not built, so there is nothing to compare: apt install gcc libjpeg62-turbo-dev, make setup"
        )
        return
    files = [path.read_bytes() for path in sorted(bench.photos.rglob("*")) if path.suffix.lower() in {".jpg", ".jpeg"}]
    points = [found_points(view, probe_image(view)) for view in map(memoryview, files)]
    finding_us = [_finding_us(files) for _ in range(bench.rounds + 1)][1:]
    print(
        f"access points: {sum(map(has_points, points))} of {len(files)}, {statistics.mean(map(len, points)):.0f} bytes each; "
        f"{spread(finding_us, 0)} us to find them"
    )
    for name, steps in STEPS.items():
        # The first round warms up.
        epochs = range(bench.rounds + 1)
        rounds = [bench.measure(name, partial(_epoch_us, files, points, steps, epoch)) for epoch in epochs][1:]
        for side, spent_us in zip(SIDES, zip(*rounds, strict=True), strict=True):
            print(f"{name}: {side} {spread(list(spent_us), 0)} us for a photograph")
        _report(bench, f"crops-{name}", [whole / alone for whole, alone, *_ in rounds], TARGETS[name])
        _report(bench, f"crops-{name}-points", [one[0] / one[2] for one in rounds], POINTS_TARGETS[name])
        print(f"{name}: alone / points {spread([one[1] / one[2] for one in rounds])}")


def _finding_us(files: list[bytes]) -> float:
    """CPU for the access points of a photograph."""
    views = [memoryview(file) for file in files]
    headers = [probe_image(view) for view in views]
    begun_ns = thread_time_ns()
    for view, header in zip(views, headers, strict=True):
        found_points(view, header)
    return (thread_time_ns() - begun_ns) / len(files) / 1000


def _report(bench: Bench, name: str, ratios: list[float], target: float) -> None:
    print(f"{name}: {spread(ratios)} times as fast as whole")
    bench.report(Figure(name, statistics.median(ratios), ">=", target))


def _epoch_us(files: list[bytes], records: list[bytes], steps: list[StepOptions], epoch: int) -> tuple[float, ...]:
    """CPU for each photograph, by side."""
    kept = KeptFiles(["image"])
    columns = [Column("image", "encoded")]
    pipelines = [Pipeline(columns, steps, 0, kept=kept if side == "points" else None) for side in SIDES]
    rows = [np.full((len(files), *SIZE, 3), 1, np.uint8) for _ in SIDES]  # touched, as slots are
    spent_ns = [0] * len(SIDES)
    for sample, file in enumerate(files):
        values = {"image": memoryview(file)}
        kept.points.begin({"image": records[sample]}, is_kept=True)
        for turn in range(len(SIDES)):
            side = (turn + sample + epoch) % len(SIDES)
            with _extension(is_used=side > 0):
                begun_ns = thread_time_ns()
                pipelines[side].run(values, epoch, sample, 0, {"image": rows[side][sample]})
                spent_ns[side] += thread_time_ns() - begun_ns
    assert all(np.array_equal(rows[0], others) for others in rows[1:]), "the same pixels whichever way"
    return tuple(spent / len(files) / 1000 for spent in spent_ns)


@contextmanager
def _extension(*, is_used: bool) -> Iterator[None]:
    jpeg_box.IS_BUILT = is_used
    yield
    jpeg_box.IS_BUILT = True
