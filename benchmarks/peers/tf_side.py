"""tf.data in the trainer's process.

Chosen: ``decode_and_crop_jpeg``, which decodes the crop alone; shuffle, repeat, parallel map, batch
and prefetch as TensorFlow's performance guide has them, with AUTOTUNE; a private pool of as many
threads as there are workers; order left free. Batches are taken with ``as_numpy_iterator``, which
copies nothing.
"""

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import common
import tensorflow as tf

AUTOTUNE = tf.data.AUTOTUNE


def load(path: tf.Tensor) -> tf.Tensor:
    """[224, 224, 3] uint8."""
    data = tf.io.read_file(path)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(data),
        tf.zeros([1, 0, 4]),
        area_range=common.AREA,
        aspect_ratio_range=common.PROPORTIONS,
        max_attempts=common.ATTEMPTS,
        use_image_if_no_bounding_boxes=True,
    )
    image = tf.image.decode_and_crop_jpeg(data, tf.concat([begin[:2], size[:2]], 0), channels=3)
    image = tf.image.resize(image, [common.SIDE, common.SIDE])
    return tf.cast(tf.image.random_flip_left_right(image), tf.uint8)


def dataset(options: common.Options) -> tf.data.Dataset:
    """Batches without end."""
    paths = common.photographs(options.data)
    photographs = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths)).repeat().map(load, AUTOTUNE)
    settings = tf.data.Options()
    settings.threading.private_threadpool_size = options.workers
    settings.deterministic = False
    return photographs.batch(options.batch, drop_remainder=True).with_options(settings).prefetch(AUTOTUNE)


def batches(options: common.Options) -> Iterator[Any]:
    """Arrays [batch, 224, 224, 3] uint8."""
    return dataset(options).as_numpy_iterator()


if __name__ == "__main__":
    common.play(batches)
