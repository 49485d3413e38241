"""Programs that train with TensorFlow or Keras, as processes of their own.

Started by the tests of ``tests/with_tensorflow``.

python -m support.tensorflow_program NAME ADDRESS [MORE...]        (the name of a function here)
"""

import gc
import os
import sys
import threading
import time

import batchd_client
from support.programs import say, say_last

WAITED_S = 1.0
FIELDS = ("index", "label")


def half_read(address):
    """Make a data set in mid-epoch: the loop has two batches, and more are in progress."""
    from batchd_client.tensorflow import dataset  # noqa: PLC0415  not every program here has it

    iterator = iter(dataset(batchd_client.connect(address).stream("photos")).repeat().prefetch(4))
    return iterator, [next(iterator), next(iterator)]


def exit_half_read(address):
    """End at the end of the script."""
    kept = half_read(address)
    say_last(batches=len(kept[1]))


def exit_with_it_at_the_top(address):
    """End with the iterator in a module's variable, as in plain scripts, without prefetching."""
    from batchd_client.tensorflow import dataset  # noqa: PLC0415

    globals()["iterator"] = iterator = iter(dataset(batchd_client.connect(address).stream("photos")))
    say_last(batches=len([next(iterator), next(iterator)]))


def exit_in_a_cycle(address):
    """End with the iterator in a cycle that the garbage collector has not found."""
    gc.disable()
    kept = [half_read(address)]
    kept.append(kept)
    say_last(batches=len(kept[0][1]))


def exit_by_an_exception(address):
    """Raise an exception in the body of the loop."""
    kept = half_read(address)
    say_last(batches=len(kept[1]))
    raise ValueError("the loss is nan")


def exit_while_it_waits(address):
    """End while tf.data waits for samples to prefetch: no producer pushes any."""
    from batchd_client.tensorflow import dataset  # noqa: PLC0415

    iterator = iter(dataset(batchd_client.connect(address).stream("live")).prefetch(4))
    waiting = threading.Thread(target=next, args=(iterator,), daemon=True)
    waiting.start()
    time.sleep(WAITED_S)
    say_last(waits=waiting.is_alive())


def train_until_interrupted(address, kind):
    """Train with Keras until Ctrl-C; then print the content of a checkpoint."""
    import keras  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    from batchd_client.keras import BatchdPyDataset, Progress  # noqa: PLC0415

    stream = batchd_client.connect(address).stream("photos")
    if kind == "tf":
        from batchd_client.tensorflow import dataset  # noqa: PLC0415

        data = dataset(stream, fields=FIELDS).prefetch(4)
    else:
        data = BatchdPyDataset(stream, fields=FIELDS)
    trained = []

    class Watching(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, numbers):
            return self.layer(keras.ops.cast(numbers, "float32")[:, None])

        def train_step(self, data):
            trained.append(np.asarray(data[0]).tolist())
            if len(trained) == 3:
                say(ready=True)
            return super().train_step(data)

    model = Watching()
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    progress = Progress(stream)
    try:
        model.fit(data, epochs=1_000_000, verbose=0, callbacks=[progress])
    except KeyboardInterrupt:
        say_last(trained=trained, state=progress.state_dict())
    raise SystemExit(130)


def train_without_tensorflow(address, backend):
    """Train with another backend of Keras, on a machine without TensorFlow."""
    sys.modules["tensorflow"] = None
    os.environ["KERAS_BACKEND"] = backend
    import keras  # noqa: PLC0415

    from batchd_client.keras import BatchdPyDataset, Progress  # noqa: PLC0415

    asked = []

    class Noting(BatchdPyDataset):
        def __getitem__(self, index):
            numbers, labels = super().__getitem__(index)
            asked.append(numbers.tolist())
            return numbers[:, None], labels

    stream = batchd_client.connect(address).stream("photos")
    data = Noting(stream, fields=FIELDS)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.build((None, 1))
    model.compile(optimizer="sgd", loss="mse")
    progress = Progress(stream)
    model.fit(data, epochs=2, verbose=0, callbacks=[progress])
    try:
        __import__("batchd_client.tensorflow")
    except ImportError as error:
        say(
            numbers=asked[-2 * len(data) :],
            state=progress.state_dict(),
            backend=keras.backend.backend(),
            missing=str(error),
        )


def train_on_two_devices(address):
    """Train with a strategy of two devices of one process, each of which gets whole batches.

    This is done by the strategy alone and by Keras.
    """
    import keras  # noqa: PLC0415
    import tensorflow as tf  # noqa: PLC0415

    from batchd_client.tensorflow import dataset, share  # noqa: PLC0415

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    daemon = batchd_client.connect(address)

    def distributed(*fields):
        return strategy.distribute_datasets_from_function(
            lambda context: dataset(daemon.stream("photos", *share(context)), fields=fields)
        )

    data = distributed("index", "label")
    epochs = [
        [one.numpy().tolist() for numbers, _ in data for one in strategy.experimental_local_results(numbers)]
        for _ in range(2)
    ]
    with strategy.scope():
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    history = model.fit(distributed("image", "label"), epochs=2, verbose=0)
    say(epochs=epochs, losses=len(history.history["loss"]))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
