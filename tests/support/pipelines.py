"""Run a pipeline on one file, and show whether it wrote every pixel of the result."""

import numpy as np

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image.options import Decode, Resize
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.images import animation, encode, jpeg

MARKER_COLORS = ((7, 177, 77), (200, 3, 250))

UPRIGHT_64_96 = (Decode(), Resize(size=(64, 96)))
"""Steps that leave an image of 64 x 96 pixels unchanged."""


def run_once(steps, data, epoch=0, sample=0, seed=0):
    """Run a new pipeline on ``data`` and return the image."""
    return run(image_pipeline(steps, seed), data, epoch, sample)


def run(pipeline, data, epoch=0, sample=0, attempt=0):
    """Run ``pipeline`` on ``data``, into a row that is full of sentinels."""
    out = image_row(pipeline)
    pipeline.run({"image": memoryview(data)}, epoch, sample, attempt, {"image": out})
    return out


def image_pipeline(steps, seed=0):
    """Make a pipeline whose samples are one image file each."""
    return Pipeline([Column("image", "encoded")], steps, seed)


def image_row(pipeline):
    """Make a row for one image, full of sentinels."""
    column = pipeline.columns["image"]
    return np.full(column.fixed_shape, 77, column.dtype)


class MarkedPipeline:
    """A pipeline that runs each file twice, after images of two colours filled its memory.

    A pixel that one of those left behind differs between the two runs. (A pixel of the colour
    itself proves nothing: broken bits make any colour.)
    """

    def __init__(self, steps, height=64, width=96):
        self._pipeline = image_pipeline(steps)
        self._markers = [_files_of_one_color(color, height, width) for color in MARKER_COLORS]

    def run(self, data):
        """Run on ``data``. Return the image, after checking that all of it is the sample's own."""
        first, second = (self._run_after(markers, data) for markers in self._markers)
        if isinstance(first, Exception):
            assert str(first) == str(second)
            raise first
        assert np.array_equal(first, second), "pixels of another sample"
        return first

    def _run_after(self, markers, data):
        for marker in markers:
            run(self._pipeline, marker)
        try:
            return run(self._pipeline, data, sample=1)
        except SampleUndecodable as bad:
            return bad


def _files_of_one_color(color, height, width):
    image = np.full((height, width, 3), color, np.uint8)
    still = [jpeg(image, quality=100), *(encode(image, extension) for extension in (".png", ".bmp", ".webp"))]
    return [*still, *(animation(extension, [image, image]) for extension in (".png", ".webp", ".gif"))]


def run_fields(columns, steps, values, sample=0):
    """Run a new pipeline on a sample's values. Return all its fields, in rows full of sentinels."""
    pipeline = Pipeline(columns, steps, 0)
    row = {name: np.full(column.fixed_shape, 77, column.dtype) for name, column in pipeline.columns.items()}
    pipeline.run(values, 0, sample, 0, row)
    return row


def run_on_pixels(steps, image, sample=0):
    """Run a new pipeline on a read-only array. Return its image."""
    given = image.copy()
    given.flags.writeable = False
    columns = [Column("image", shape=image.shape)]
    made = run_fields(columns, steps, {"image": given}, sample)["image"]
    assert np.array_equal(given, image), "the source's own pixels were changed"
    return made
