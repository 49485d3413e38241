"""Keras on a stream, as ``PyDataset`` and through tf.data: exact epochs, and a training state."""

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed: pip install keras tensorflow")
pytestmark = pytest.mark.filterwarnings("default")  # TensorFlow and Keras have some of their own

import keras  # noqa: E402

import batchd_client  # noqa: E402
from batchd.commands.history.losses import from_pages  # noqa: E402
from batchd_client import errors  # noqa: E402
from batchd_client.asking import ask_reports, asking  # noqa: E402
from batchd_client.keras import BatchdPyDataset, Progress  # noqa: E402
from support.reference import run_programs  # noqa: E402
from support.settings import folder_stream  # noqa: E402

EPOCH = 40
STEPS = 5


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve streams of photographs, also ragged ones."""
    room = {"max_shape": [80, 100, 3]}
    return start_shared_daemon(
        {
            "photos": folder_stream(photos),
            "alone": folder_stream(photos, memory="512KiB"),
            "ragged": folder_stream(photos, pipeline=[{"op": "decode"}, {"op": "ragged", **room}]),
        }
    )


@pytest.fixture
def connection(daemon):
    """Connect to the daemon; the connection is closed with the test."""
    with batchd_client.connect(daemon.address) as connection:
        yield connection


class Seen(keras.layers.Layer):
    """A layer that records the samples it gets: its input is numbers, and it learns nothing."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.seen = []

    def call(self, numbers):
        return keras.ops.cast(numbers, "float32")[:, None] * self.scale


class Watching(keras.Model):
    """A model that trains eagerly on numbers, and records them in order."""

    def __init__(self):
        super().__init__()
        self.layer = Seen()
        self.trained = []
        self.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse", run_eagerly=True)

    def call(self, numbers):
        return self.layer(numbers)

    def train_step(self, data):
        numbers, _ = data
        self.trained.append(np.asarray(numbers).tolist())
        return super().train_step(data)


def bare_numbers(connection, epochs):
    """Return the samples of each batch, from the bare client."""
    claim = connection.stream("photos", epochs=epochs)
    return [batch["index"].tolist() for _ in range(epochs) for batch in claim]


FIELDS = ("index", "label")


def py_dataset(stream):
    """Return the numbers of samples to train on, as Keras's own kind of data set."""
    return BatchdPyDataset(stream, fields=FIELDS)


def tf_dataset(stream):
    """Return the same numbers through tf.data, with batches read ahead."""
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install tensorflow")
    from batchd_client.tensorflow import dataset  # noqa: PLC0415  Keras is enough for the others

    return dataset(stream, fields=FIELDS).prefetch(8)


BOTH = pytest.mark.parametrize("make", [py_dataset, tf_dataset])


@BOTH
@pytest.mark.parametrize("options", [{}, {"shuffle": False}], ids=["as it is", "unshuffled"])
def test_fit_trains_on_each_epoch_in_the_order_of_the_stream(connection, make, options):
    """Batches that Keras inspects first are not lost, and its own shuffling has no effect."""
    model = Watching()
    stream = connection.stream("photos")
    model.fit(make(stream), epochs=3, verbose=0, **options)
    assert model.trained == bare_numbers(connection, 3)
    assert stream.statistics().resubscribed <= 2


@BOTH
def test_fit_again_goes_on_with_the_next_epoch(connection, make):
    """The data set is the same one."""
    model = Watching()
    data = make(connection.stream("photos"))
    model.fit(data, epochs=1, verbose=0)
    model.fit(data, epochs=2, initial_epoch=1, verbose=0)
    assert model.trained == bare_numbers(connection, 2)


@BOTH
def test_validation_is_on_a_stream_of_its_own(connection, make):
    """Each validation reads a whole epoch of it."""
    model = Watching()
    history = model.fit(
        make(connection.stream("photos")),
        validation_data=make(connection.stream("photos")),
        epochs=2,
        verbose=0,
    )
    assert len(history.history["val_loss"]) == 2
    assert model.trained == bare_numbers(connection, 2)


@BOTH
def test_epochs_of_keras_may_be_shorter_than_the_streams(connection, make):
    """The next one continues where the last one ended."""
    model = Watching()
    stream = connection.stream("photos")
    progress = Progress(stream)
    model.fit(make(stream), epochs=2, steps_per_epoch=2, verbose=0, callbacks=[progress])
    assert model.trained == bare_numbers(connection, 1)[:4]
    assert (progress.state_dict()["epoch"], progress.state_dict()["step"]) == (0, 4)


class Stop(keras.callbacks.Callback):
    """A callback that interrupts the training after so many batches."""

    def __init__(self, batches):
        super().__init__()
        self._batches = batches

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002  as Keras calls it
        self._batches -= 1
        if self._batches == 0:
            raise KeyboardInterrupt


@BOTH
@pytest.mark.parametrize("done", [1, 3, 5, 7])
def test_an_interrupted_training_goes_on_with_the_next_batch(connection, make, done):
    """Batches read ahead do not matter; the rest of the epoch is a fit, then the others."""
    model = Watching()
    stream = connection.stream("photos")
    progress = Progress(stream)
    with pytest.raises(KeyboardInterrupt):
        model.fit(make(stream), epochs=3, verbose=0, callbacks=[progress, Stop(done)])
    again = connection.stream("photos", state=progress.state_dict())
    data = make(again)
    progress = Progress(again)
    model.fit(data, initial_epoch=progress.epoch, epochs=progress.epoch + 1, verbose=0, callbacks=[progress])
    model.fit(data, initial_epoch=progress.epoch, epochs=3, verbose=0, callbacks=[progress])
    assert model.trained == bare_numbers(connection, 3)
    assert progress.state_dict() == again.state_dict()


@BOTH
@pytest.mark.parametrize("at_once", [1, 3])
def test_progress_reports_the_loss_of_each_batch(connection, daemon, make, at_once):
    """Keras tells the mean of the epoch so far, and that of several batches with one execution."""
    model, stream = Watching(), connection.stream("photos")
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse", run_eagerly=True, steps_per_execution=at_once)
    model.fit(make(stream), epochs=2, verbose=0, callbacks=[Progress(stream, report="loss")])
    stream.close()
    with asking(daemon.address) as session:
        (losses,) = from_pages(ask_reports(session, "photos")).values()
    claim = connection.stream("photos", epochs=2)
    means = [np.mean((batch["index"].astype(float) - batch["label"]) ** 2) for _ in range(2) for batch in claim]
    groups = (
        [range(3), range(3, 5), range(5, 8), range(8, 10)]
        if at_once == 3
        else [range(one, one + 1) for one in range(10)]
    )
    expected = [np.mean([means[one] for one in group]) for group in groups for _ in group]
    assert [losses.position(one) for one in range(10)] == [(epoch, step) for epoch in range(2) for step in range(STEPS)]
    assert [float(losses.of(one)[0]) for one in range(10)] == pytest.approx(expected, rel=1e-5)


def test_a_metric_that_is_not_there_is_an_error(connection):
    """The error names those that are."""
    model, stream = Watching(), connection.stream("photos")
    with pytest.raises(errors.ReportInvalid, match="fit has no metric 'accuracy' to report: it has loss"):
        model.fit(py_dataset(stream), verbose=0, callbacks=[Progress(stream, report="accuracy")])


def test_a_resumed_epoch_and_the_others_in_one_fit(connection):
    """Through tf.data, Keras accepts a data set that is shorter than it says."""
    stream = connection.stream("photos")
    stream.seek(0, 2)
    model = Watching()
    model.fit(tf_dataset(stream), epochs=3, verbose=0)
    assert model.trained == bare_numbers(connection, 3)[2:]


def test_a_resumed_epoch_and_the_others_are_not_one_fit_of_a_py_dataset(connection):
    """Keras would cut the others to the length of the first: an error says so; no batch is lost."""
    stream = connection.stream("photos")
    stream.seek(0, 2)
    data = py_dataset(stream)
    assert len(data) == 3
    model = Watching()
    with pytest.raises(
        errors.EpochsUneven, match=r"3 batches in each epoch.*and epoch 1 has 5\n.*initial_epoch=data.epoch"
    ):
        model.fit(data, epochs=3, verbose=0)
    model.fit(data, initial_epoch=data.epoch, epochs=3, verbose=0)
    assert model.trained == bare_numbers(connection, 3)[2:]


def test_its_state_goes_into_another_one(connection):
    """The program gives the number of batches, or of the completed epochs."""
    data = py_dataset(connection.stream("photos"))
    expected = bare_numbers(connection, 2)
    data.on_epoch_begin()
    assert [numbers.tolist() for numbers, _ in data] == expected[:STEPS]
    assert (data.state_dict()["epoch"], data.state_dict()["step"], data.state_dict(2)["step"]) == (0, 0, 2)
    data.on_epoch_end()
    assert data.state_dict()["epoch"] == data.epoch == 1
    other = py_dataset(connection.stream("photos"))
    other.load_state_dict(data.state_dict())
    assert [other[number][0].tolist() for number in range(STEPS)] == expected[STEPS:]


def test_an_index_is_the_same_batch_until_the_epoch_ends(connection):
    """Requests come in any order; a repeated request moves the position back."""
    data = py_dataset(connection.stream("photos"))
    expected = bare_numbers(connection, 1)
    assert [data[index][0].tolist() for index in (4, 0, 4, 2, 0, 1, 3)] == [
        expected[number] for number in (0, 1, 0, 2, 1, 3, 4)
    ]
    with pytest.raises(IndexError, match="batch 5 of 5"):
        data[5]


def test_arrays_never_change(connection, daemon):
    """Arrays are kept while the ring is filled and emptied many times."""
    data = BatchdPyDataset(connection.stream("alone"), as_dict=True)
    claim = connection.stream("alone", epochs=20)
    kept = []
    for _ in range(20):
        data.on_epoch_begin()
        kept += list(data)
        data.on_epoch_end()
    for epoch in range(20):
        for given, batch in zip(kept[epoch * STEPS :], claim, strict=False):
            assert all(np.array_equal(given[name], batch[name]) for name in ("image", "label", "index"))
    assert len({batch["image"].ctypes.data for batch in kept}) == len(kept) == 20 * STEPS
    assert daemon.stream_status("alone")["slots"] < len(kept) / 4


@pytest.mark.parametrize("options", [{"workers": 2}, {"use_multiprocessing": True}])
def test_workers_of_keras_are_refused(connection, options):
    """The data set refuses them when it is made, and later."""
    with pytest.raises(errors.WorkersInvalid, match=r"daemon's workers do that work already"):
        BatchdPyDataset(connection.stream("photos"), **options)
    data = BatchdPyDataset(connection.stream("photos"), workers=1, use_multiprocessing=False)
    with pytest.raises(errors.WorkersInvalid):
        setattr(data, *next(iter(options.items())))
    assert (data.workers, data.use_multiprocessing) == (1, False)


def test_what_cannot_be_is_said(connection):
    """Examples are ragged fields, missing fields, and impossible epochs."""
    with pytest.raises(errors.TensorsInvalid, match="'image' is ragged, and Keras takes arrays"):
        BatchdPyDataset(connection.stream("ragged"))
    with pytest.raises(errors.TensorsInvalid, match="no field 'picture'"):
        BatchdPyDataset(connection.stream("photos"), fields=["picture"])
    with pytest.raises(errors.PositionInvalid, match="epoch 0 of stream 'photos' is beyond the epochs"):
        BatchdPyDataset(connection.stream("photos", epochs=0))[0]


def test_the_program_of_the_reference_runs(daemon, monkeypatch):
    """It finds the daemon by its address in the environment."""
    monkeypatch.setenv("BATCHD_ADDRESS", daemon.address)

    run_programs("Keras")
