"""3.

TFRecord files, several read at a time (parallel_interleave), parsed and batched in parallel
(map_and_batch).

Both names are gone from TensorFlow: interleave, map with num_parallel_calls and batch are what they
have become. The old way needs TensorFlow; where it is missing, the example says so and shows batchd
alone.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import BATCH_SIZE, Example, Photograph, Unavailable, endless, main, same, tensorflow

try:
    from batchd.data.sources.tfrecord.frames import FOOTER, HEADER, masked_crc
    from batchd.data.sources.tfrecord.reader import Example as Record
except ImportError:
    Record = None

SIDE = 224
SHARDS = 4
TOLERANCE = 1.0
"""Of 255: TensorFlow resizes to floating point, batchd to whole numbers."""


def write_shards(folder: Path, photographs: Sequence[Photograph]) -> list[str]:
    """Write the photographs unchanged, each with its label and number, for both ways."""
    folder.mkdir()
    files = [folder / f"train-{shard:05}-of-{SHARDS:05}" for shard in range(SHARDS)]
    for shard, file in enumerate(files):
        with file.open("wb") as stream:
            for number in range(shard, len(photographs), SHARDS):
                record = Record()
                record.features.feature["image"].bytes_list.value.append(photographs[number].path.read_bytes())
                record.features.feature["label"].int64_list.value.append(photographs[number].label)
                record.features.feature["number"].int64_list.value.append(number)
                data = record.SerializeToString()
                length = HEADER.pack(len(data), masked_crc(len(data).to_bytes(8, "little")))
                stream.write(length + data + FOOTER.pack(masked_crc(data)))
    return [str(file) for file in files]


# --- the old way ----------------------------------------------------------------------------------


def dataset(tf: Any, files: Sequence[str], epochs: int | None) -> Any:
    """Batches of images, labels and numbers, from all files at once, shuffled within a buffer."""
    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
        "number": tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(data: Any) -> Any:
        record = tf.io.parse_single_example(data, features)
        image = tf.image.decode_jpeg(record["image"], channels=3, dct_method="INTEGER_ACCURATE")
        return tf.image.resize(image, [SIDE, SIDE]), record["label"], record["number"]

    parallel = tf.data.AUTOTUNE
    records = tf.data.Dataset.from_tensor_slices(files).interleave(
        tf.data.TFRecordDataset, cycle_length=SHARDS, num_parallel_calls=parallel
    )
    shuffled = records.shuffle(256).repeat(epochs)
    return shuffled.map(parse, num_parallel_calls=parallel).batch(BATCH_SIZE).prefetch(parallel)


@contextmanager
def with_tensorflow(tf: Any, files: Sequence[str]) -> Iterator[Iterator[Any]]:
    """The dataset, as numpy arrays."""
    yield dataset(tf, files, None).as_numpy_iterator()


# --- with batchd ----------------------------------------------------------------------------------

CONFIG = """
[streams.photos]
source.type = "tfrecord"
source.root = $shards
source.shards = ["train-*"]
source.fields = { image = "image", label = "int64", number = "int64" }
batch_size = $batch_size
pipeline = [
    { op = "decode", scale = "off" }, { op = "resize", size = [224, 224], interpolation = "linear" },
    { op = "to", scale = false, layout = "nhwc" },
]
"""


def run(example: Example) -> None:
    """Compare what comes out, then how fast."""
    if Record is None:
        raise Unavailable(
            "batchd reads TFRecord files where it is installed with them (pip install 'batchd[tfrecord]')"
        )
    tf = tensorflow()
    folder = example.folder / "shards"
    files = write_shards(folder, example.photographs)
    with example.serve(CONFIG, shards=str(folder)) as daemon:
        stream = daemon.stream("photos")
        batch = next(iter(stream))
        same("labels as in the files", [example.photographs[i].label for i in batch["number"]], batch["label"])
        ways = {}
        if tf:
            old = {}
            for images, labels, numbers in dataset(tf, files, 1).as_numpy_iterator():
                old |= dict(zip(numbers.tolist(), zip(images, labels, strict=True), strict=True))
            same("pixels", [old[number][0] for number in batch["number"].tolist()], batch["image"], tolerance=TOLERANCE)
            same("labels", [old[number][1] for number in batch["number"].tolist()], batch["label"])
            ways["tf.data with interleave and map"] = example.steady(lambda: with_tensorflow(tf, files))
        ways["batchd"] = example.steady(lambda: endless(stream))
        example.compare(ways)


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
