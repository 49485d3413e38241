"""The tf.data set against a real daemon: the bare client's batches, as unchanging tensors."""

import gc

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install tensorflow")
pytestmark = pytest.mark.filterwarnings("default")  # TensorFlow and Keras have some of their own

import tensorflow as tf  # noqa: E402

import batchd_client  # noqa: E402
import batchd_client.tensorflow as adapter  # noqa: E402
from batchd.commands.history.losses import from_pages  # noqa: E402
from batchd_client.asking import ask_reports, asking  # noqa: E402
from batchd_client.errors import ReportInvalid, TensorsInvalid  # noqa: E402
from batchd_client.tensorflow import dataset, report, share, state_after  # noqa: E402
from support.reference import run_programs  # noqa: E402
from support.settings import folder_stream  # noqa: E402

EPOCH = 40
STEPS = 5
LINES = 30


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos, tmp_path_factory):
    """Serve streams of equal photographs, of padded ones, and of ragged ones and numbers."""
    table = tmp_path_factory.mktemp("numbers") / "numbers.csv"
    lines = [f"{' '.join(str(one) for one in range(number % 7 + 1))},{number}" for number in range(LINES)]
    table.write_text("\n".join(["values,label", *lines]) + "\n")
    numbers = {"type": "csv", "path": str(table), "fields": {"values": "float32[?]", "label": "int64"}}
    room = {"max_shape": [80, 100, 3]}
    return start_shared_daemon(
        {
            "photos": folder_stream(photos),
            "short": folder_stream(photos, batch_size=16),
            "padded": folder_stream(photos, pipeline=[{"op": "decode"}, {"op": "pad_batch", **room}]),
            "ragged": folder_stream(photos, pipeline=[{"op": "decode"}, {"op": "ragged", **room}]),
            "numbers": {
                "source": numbers,
                "batch_size": 8,
                "pipeline": [{"op": "ragged", "field": "values", "max_shape": [8]}],
            },
        }
    )


@pytest.fixture
def connection(daemon):
    """Connect to the daemon; the connection is closed with the test."""
    with batchd_client.connect(daemon.address) as connection:
        yield connection


def numbers(data):
    """Return the samples of an iteration, batch by batch."""
    return [batch["index"].numpy().tolist() for batch in data]


def bare(connection, stream="photos", epochs=1):
    """Return copies of all batches, from the bare client."""
    claim = connection.stream(stream, epochs=epochs)
    return [{name: array.copy() for name, array in batch.items()} for _ in range(epochs) for batch in claim]


def bare_numbers(connection, epochs):
    """Return the samples of each batch, from the bare client."""
    return [batch["index"].tolist() for batch in bare(connection, epochs=epochs)]


def test_images_and_labels_are_those_of_the_stream(connection):
    """Batches are tuples without the samples' numbers; the last batch is short."""
    given = list(dataset(connection.stream("short")))
    expected = bare(connection, "short")
    assert [len(labels) for _, labels in given] == [16, 16, 8]
    for (images, labels), batch in zip(given, expected, strict=True):
        assert (images.dtype, labels.dtype) == (tf.uint8, tf.int64)
        assert np.array_equal(images.numpy(), batch["image"])
        assert np.array_equal(labels.numpy(), batch["label"])


def test_the_signature_is_the_schema_of_the_stream(connection):
    """The signature leaves the number of samples and variable dimensions open."""
    assert dataset(connection.stream("photos")).element_spec == (
        tf.TensorSpec([None, 32, 32, 3], tf.uint8),
        tf.TensorSpec([None], tf.int64),
    )
    image = dataset(connection.stream("padded"), as_dict=True).element_spec["image"]
    assert image == tf.TensorSpec([None, None, None, 3], tf.uint8)


def test_fields_come_as_asked_for(connection):
    """Fields have any order, as a tuple or a dict; a dict has the samples' numbers too."""
    labels, images = next(iter(dataset(connection.stream("photos"), fields=("label", "image"))))
    batch = next(iter(dataset(connection.stream("photos"), as_dict=True)))
    assert set(batch) == {"image", "label", "index"}
    assert np.array_equal(batch["image"], images)
    assert np.array_equal(batch["label"], labels)
    (only,) = next(iter(dataset(connection.stream("photos"), fields=["label"])))
    assert np.array_equal(only, labels)


def test_padded_images_are_cut_to_the_largest_of_their_batch(connection):
    """The bare client does the same."""
    given = dataset(connection.stream("padded"), fields=["image"])
    for (images,), batch in zip(given, bare(connection, "padded"), strict=True):
        assert images.shape == (8, 72, 96, 3)
        assert np.array_equal(images, batch["image"])


def test_ragged_rows_are_a_ragged_tensor(connection):
    """Each row is equal; the short last batch is covered too."""
    given = list(dataset(connection.stream("numbers"), fields=["values", "label"]))
    assert sum(len(labels) for _, labels in given) == LINES
    for values, labels in given:
        assert isinstance(values, tf.RaggedTensor)
        assert values.to_list() == [[float(one) for one in range(label % 7 + 1)] for label in labels.numpy()]


def test_what_cannot_be_a_tensor_is_said_at_once(connection):
    """The error has the field and the remedy."""
    with pytest.raises(TensorsInvalid, match="no field 'picture'; it has image, label, index"):
        dataset(connection.stream("photos"), fields=["picture"])
    with pytest.raises(TensorsInvalid, match=r"'image' is ragged in dimensions 0, 1 .*\n?.*pad_batch"):
        dataset(connection.stream("ragged"))
    assert dataset(connection.stream("ragged"), fields=["label"]) is not None


@pytest.mark.parametrize("around", ["plain", "prefetch", "map", "repeat"])
def test_each_iteration_is_the_next_epoch(connection, around):
    """Steps after the data set do not matter."""
    data = dataset(connection.stream("photos"), as_dict=True)
    if around == "repeat":
        given = numbers(data.repeat(3))
    else:
        data = {"plain": data, "prefetch": data.prefetch(8), "map": data.map(lambda batch: batch)}[around]
        given = [batch for _ in range(3) for batch in numbers(data)]
    assert given == bare_numbers(connection, 3)


def test_it_ends_with_the_epochs_of_the_stream(connection):
    """A further iteration is empty."""
    data = dataset(connection.stream("photos", epochs=2), as_dict=True)
    assert [len(numbers(data)) for _ in range(4)] == [5, 5, 0, 0]


def test_an_iteration_that_is_left_begins_again(connection):
    """Keras does so, which first inspects a batch; another data set of the same stream does too."""
    expected = bare_numbers(connection, 2)
    stream = connection.stream("photos")
    data = dataset(stream, as_dict=True)
    assert numbers(data.prefetch(2).take(1)) == expected[:1]
    assert numbers(data) == expected[:STEPS]
    assert numbers(data.take(3)) == expected[STEPS : STEPS + 3]
    assert numbers(dataset(stream, as_dict=True)) == expected[STEPS:]


def test_it_says_how_long_it_is_and_may_be_shorter(connection):
    """Keras uses the length, also after other steps; a resumed epoch may lack batches."""
    stream = connection.stream("photos")
    data = dataset(stream, as_dict=True)
    assert len(data) == len(data.map(lambda batch: batch).prefetch(2)) == STEPS
    stream.seek(0, 2)
    assert [len(numbers(data)) for _ in range(2)] == [3, 5]


@pytest.mark.parametrize("done", [0, 1, 3, 5])
def test_the_state_behind_what_the_loop_has_counted_is_exact(connection, done):
    """Batches read ahead do not matter."""
    expected = bare_numbers(connection, 2)
    stream = connection.stream("photos")
    data = dataset(stream, as_dict=True).prefetch(8)
    iterator = iter(data)
    seen = [next(iterator)["index"].numpy().tolist() for _ in range(done)]
    state = state_after(stream, done) if done else stream.state_dict()
    del iterator
    again = connection.stream("photos", state=state)
    resumed = dataset(again, as_dict=True)
    rest = numbers(resumed) if again.epoch == 0 else []
    assert seen + rest + numbers(resumed) == expected


def test_a_loop_reports_the_batches_that_it_has_counted(connection, daemon):
    """Batches read ahead do not matter; a tensor of a graph has no value to report."""
    stream = connection.stream("photos")
    for done, batch in enumerate(dataset(stream, as_dict=True).prefetch(8), 1):
        report(stream, done, batch["label"] + 100 * done)
    with pytest.raises(Exception, match="ReportInvalid: SymbolicTensor is not a number"):
        tf.function(lambda values: report(stream, STEPS, values))(tf.zeros(8))
    with pytest.raises(ReportInvalid, match="batch 6 is not among the last 5"):
        report(stream, STEPS + 1, 0.0)
    stream.close()
    with asking(daemon.address) as session:
        (losses,) = from_pages(ask_reports(session, "photos")).values()
    assert [losses.position(one) for one in range(len(losses))] == [(0, step) for step in range(STEPS)]
    assert all((losses.of(step) // 100 == step + 1).all() for step in range(STEPS))


def test_a_data_set_may_be_made_within_a_function_of_tensorflow(connection):
    """No object of the program keeps such a data set."""
    made = tf.data.Dataset.range(1).flat_map(lambda _: dataset(connection.stream("photos"), as_dict=True))
    gc.collect()
    assert numbers(made) == bare_numbers(connection, 1)


def test_two_iterations_at_once_are_refused(connection):
    """Each would have half of the batches."""
    data = dataset(connection.stream("photos"), as_dict=True)
    with pytest.raises(tf.errors.OpError, match=r"PassOvertaken(.|\n)*its own stream"):
        list(tf.data.Dataset.zip((data, data)))


def hold_all(connection, epochs):
    """Keep every batch while the ring is reused; return how many, and how many have changed."""
    expected = bare(connection, epochs=epochs)
    data = dataset(connection.stream("photos", window=1, epochs=epochs), as_dict=True)
    kept = [batch for _ in range(epochs) for batch in data]
    changed = [
        not np.array_equal(batch["image"].numpy(), was["image"]) for batch, was in zip(kept, expected, strict=True)
    ]
    return len(changed), sum(changed)


def test_a_tensor_never_changes(connection, daemon):
    """Tensors are kept while the ring is filled and emptied many times, and do not change."""
    held, changed = hold_all(connection, 20)
    assert changed == 0
    assert daemon.stream_status()["slots"] < held / 4


def test_without_the_copy_tensors_would_change(connection, monkeypatch):
    """TensorFlow reads the memory that it is given: so the test above can fail."""
    monkeypatch.setattr(adapter, "own", np.asarray)
    _, changed = hold_all(connection, 20)
    assert changed > 0


def test_a_batch_is_copied_once(connection, monkeypatch):
    """The tensor uses the copy's memory, as the copy is aligned for TensorFlow."""
    made = []
    own = adapter.own
    monkeypatch.setattr(adapter, "own", lambda array: made.append(own(array)) or made[-1])
    images, _ = next(iter(dataset(connection.stream("photos"))))
    assert np.shares_memory(np.asarray(memoryview(images)), made[0])


@pytest.mark.parametrize("pipelines", [1, 2, 3])
def test_input_pipelines_share_an_epoch(connection, pipelines):
    """Each sample goes to one of them; all have the same number; no second sharding takes place."""
    shares = []
    for number in range(pipelines):
        context = tf.distribute.InputContext(num_input_pipelines=pipelines, input_pipeline_id=number)
        data = dataset(connection.stream("photos", *share(context)), as_dict=True)
        policy = data.options().experimental_distribute.auto_shard_policy
        assert policy == tf.data.experimental.AutoShardPolicy.OFF
        shares.append(numbers(data))
    assert len({len(one) for one in shares}) == 1
    assert {number for one in shares for batch in one for number in batch} == set(range(EPOCH))


def test_the_program_of_the_reference_runs(daemon, monkeypatch):
    """It finds the daemon by its address in the environment."""
    monkeypatch.setenv("BATCHD_ADDRESS", daemon.address)

    run_programs("TensorFlow")
