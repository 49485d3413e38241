"""Benchmark: microseconds for each sample of a `call` step whose function does nothing.

In this process alone: the same samples through a pipeline with the step and one without take turns,
sample by sample, and the median of the differences counts, for either order.

With the step, pixels go through memory twice more: the function gets a copy that is its own, and
what it leaves is copied into the batch. Nothing is decoded here, which would take a hundred times
as long and vary by more than what is measured.
"""

import statistics
import sys
from collections.abc import Mapping
from functools import partial
from time import perf_counter_ns

import numpy as np
from harness import Bench, Figure

from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.options import RandomResizedCrop
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.samples.columns import Column, parse_column
from batchd.data.samples.values import Value

SAMPLES = 400
LABEL = parse_column("label", "int64")
STEPS = {
    "nothing returned": Call(function="batchd_bench_nothing:nothing"),
    "everything returned": Call(function="batchd_bench_nothing:everything"),
    "one number returned": Call(function="batchd_bench_nothing:number", outputs={"score": "float32"}),
}


def run(bench: Bench) -> None:
    """A small sample, and one of the size of a photograph."""
    (bench.scratch / "batchd_bench_nothing.py").write_text(
        "def nothing(sample, rng): return {}\n"
        "def everything(sample, rng): return sample\n"
        "def number(sample, rng): return {'score': 1.0}\n"
    )
    sys.path.insert(0, str(bench.scratch))
    numbers = np.random.default_rng(0)
    small, large = (list(numbers.integers(0, 256, (SAMPLES, *shape), np.uint8)) for shape in ((28, 28), (256, 256, 3)))
    crop = (RandomResizedCrop(size=(224, 224)),)
    for name, column, images, steps in (
        ("28x28", parse_column("image", "uint8[28,28]"), small, ()),
        ("224x224x3", parse_column("image", "uint8[256,256,3]"), large, crop),
    ):
        for what, call in STEPS.items():
            values = [{"image": image, "label": row} for row, image in enumerate(images)]
            difference_us = partial(_difference_us, (column, LABEL), steps, call, values)
            us = [bench.measure(name, difference_us) for _ in range(bench.rounds)]
            print(f"{name}, {what}: {statistics.median(us):.1f} us ({min(us):.1f} to {max(us):.1f}, {len(us)} rounds)")
            bench.report(Figure(f"call-{what.partition(' ')[0]}-{name}-us", statistics.median(us), "<=", 20.0, 1))
    sys.path.remove(str(bench.scratch))


def _difference_us(
    columns: tuple[Column, ...], steps: tuple[StepOptions, ...], call: Call, samples: list[Mapping[str, Value]]
) -> float:
    sides = []
    for pipeline in (steps, (*steps, call)):
        fields = sample_fields(columns, pipeline, "fail")
        # Rows of a batch, so that each write goes to memory that no cache holds, as in a slot.
        arrays = {field.name: np.full((len(samples), *field.shape), 1, field.dtype) for field in fields}
        sides.append((Pipeline(columns, pipeline, 0), arrays))
    differences: tuple[list[float], list[float]] = [], []
    for number, values in enumerate(samples):
        times = []
        for pipeline, arrays in sides if number % 2 else reversed(sides):
            row = {name: array[number, ...] for name, array in arrays.items()}
            begun_ns = perf_counter_ns()
            pipeline.run(values, 0, number, 0, row)
            times.append(perf_counter_ns() - begun_ns)
        without, with_call = times if number % 2 else reversed(times)
        differences[number % 2].append((with_call - without) / 1000)
    return statistics.mean(map(statistics.median, differences))
