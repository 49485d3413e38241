"""2.

A tf.data pipeline over a list of files: decode, subtract the channel means, one-hot, shuffle,
batch, repeat.

The old way needs TensorFlow; where it is missing, the example says so and shows batchd alone.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import BATCH_SIZE, CLASSES, Example, Photograph, endless, main, same, tensorflow

SIDE = 224
MEANS = np.array([123.68, 116.779, 103.938], np.float32)
EPOCHS = 2
TOLERANCE = 1.0
"""Of 255: TensorFlow resizes to floating point, batchd to whole numbers."""

# --- the old way ----------------------------------------------------------------------------------


def dataset(tf: Any, photographs: Sequence[Photograph], epochs: int | None) -> Any:
    """Batches of images, one-hot labels and the numbers of the photographs, shuffled.

    Without end where epochs is None.
    """

    def load(path: Any, label: Any, number: Any) -> Any:
        # Exact as libjpeg can: what TensorFlow takes by default is a quicker approximation.
        image = tf.image.decode_jpeg(tf.io.read_file(path), channels=3, dct_method="INTEGER_ACCURATE")
        image = tf.image.resize(image, [SIDE, SIDE])
        return image - MEANS, tf.one_hot(label, CLASSES), number

    paths, labels = [str(one.path) for one in photographs], [one.label for one in photographs]
    files = tf.data.Dataset.from_tensor_slices((paths, labels, range(len(paths))))
    shuffled = files.shuffle(len(paths)).repeat(epochs)
    return shuffled.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)


@contextmanager
def with_tensorflow(tf: Any, photographs: Sequence[Photograph]) -> Iterator[Iterator[Any]]:
    """The dataset, as numpy arrays."""
    yield dataset(tf, photographs, None).as_numpy_iterator()


# --- with batchd ----------------------------------------------------------------------------------

CONFIG = """
[streams.photos]
source = { type = "list", path = $listed, root = $data }
batch_size = $batch_size
pipeline = [
    { op = "decode", scale = "off" }, { op = "resize", size = [224, 224], interpolation = "linear" },
    { op = "subtract_mean" }, { op = "one_hot", classes = $classes },
]
"""


def list_file(example: Example) -> str:
    """Write the list: a path and a label in each line."""
    file: Path = example.folder / "train.txt"
    lines = (f"{one.path.relative_to(example.data)} {one.label}\n" for one in example.photographs)
    file.write_text("".join(lines))
    return str(file)


def run(example: Example) -> None:
    """Compare what comes out of a few epochs, then how fast it does."""
    tf = tensorflow()
    with example.serve(CONFIG, listed=list_file(example)) as daemon:
        stream = daemon.stream("photos", epochs=EPOCHS)
        samples = [sample for _ in range(EPOCHS) for batch in stream for sample in batch["index"].tolist()]
        same("samples in each of n epochs", sorted(samples), sorted([*range(len(example.photographs))] * EPOCHS))
        ways = {}
        stream = daemon.stream("photos")
        if tf:
            compare_values(tf, example, next(iter(stream)))
            ways["tf.data"] = example.steady(lambda: with_tensorflow(tf, example.photographs))
        ways["batchd"] = example.steady(lambda: endless(stream))
        example.compare(ways)


def compare_values(tf: Any, example: Example, batch: Any) -> None:
    """Let the old way have the photographs of one batch; it gives them in an order of its own."""
    chosen = [example.photographs[sample] for sample in batch["index"]]
    images, labels, numbers = next(dataset(tf, chosen, 1).as_numpy_iterator())
    same("pixels minus means", images, batch["image"][numbers], tolerance=TOLERANCE)
    same("labels, one-hot", labels, batch["label"][numbers])


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
