"""4.

A glob of a folder, read by cv2.imread: BGR to RGB, float32, every image in its own size, with the
names of the files.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
from common import Example, endless, look, main, same

import batchd_client

BATCH_SIZE = 8

# --- the old way ----------------------------------------------------------------------------------


def read(file: Path) -> np.ndarray:
    """Read one photograph."""
    return cv2.cvtColor(cv2.imread(str(file)), cv2.COLOR_BGR2RGB).astype(np.float32)


@contextmanager
def with_imread(folder: Path) -> Iterator[Iterator[tuple[Sequence[np.ndarray], Sequence[str]]]]:
    """Lists of images and of names, shuffled in each epoch."""
    files = sorted(folder.glob("**/*.[jJ][pP]*[gG]"))
    rng = np.random.default_rng(0)
    shuffled = (files[i] for _ in itertools.count() for i in rng.permutation(len(files)))
    batches = (itertools.islice(shuffled, BATCH_SIZE) for _ in itertools.count())
    yield (([read(file) for file in names], [str(file) for file in names]) for names in map(list, batches))


# --- with batchd ----------------------------------------------------------------------------------

CONFIG = """
[streams.photos]
source = { type = "glob", root = $data, patterns = ["**/*.[jJ][pP]*[gG]"], path_bytes = 200 }
batch_size = $batch_size
pipeline = [ { op = "decode" }, { op = "to", scale = false, layout = "nhwc" }, { op = "ragged", max_shape = $largest } ]

[streams.in_bytes]
source = { type = "glob", root = $data, patterns = ["**/*.[jJ][pP]*[gG]"], path_bytes = 200 }
batch_size = $batch_size
pipeline = [ { op = "decode" }, { op = "ragged", max_shape = $largest } ]
"""


def largest(example: Example) -> list[int]:
    """A batch needs room for the largest image: the largest height and width of all."""
    shapes = [cv2.imread(str(one.path)).shape for one in example.photographs]
    return [int(length) for length in np.max(shapes, axis=0)]


def convert(batch: batchd_client.Batch) -> int:
    """Convert to float32 at the point of use, so a quarter of the memory is written and read."""
    return look(([image.astype(np.float32) for image in batch["image"]],))


def run(example: Example) -> None:
    """Compare what comes out, then how fast."""
    with example.serve(CONFIG, batch_size=BATCH_SIZE, largest=largest(example)) as daemon:
        stream, in_bytes = daemon.stream("photos"), daemon.stream("in_bytes")
        batch = next(iter(stream))
        names = batchd_client.text(batch["path"])
        same("pixels, read from the files named", [read(example.data / name) for name in names], batch["image"])
        epoch = daemon.stream("in_bytes", epochs=1)
        listed = [str(one.path.relative_to(example.data)) for one in example.photographs]
        same(
            "names of all files",
            sorted(listed),
            sorted(name for one in epoch for name in batchd_client.text(one["path"])),
        )
        example.compare(
            {
                "glob and cv2.imread": example.steady(lambda: with_imread(example.data)),
                "batchd": example.steady(lambda: endless(stream)),
                "batchd, uint8, float32 in the trainer": example.steady(lambda: endless(in_bytes), convert),
            }
        )


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
