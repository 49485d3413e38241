"""TensorFlow and Keras in programs' lives: exits, interrupts, strategies, backends. No hang."""

import json
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install tensorflow")
pytestmark = pytest.mark.filterwarnings("default")

import batchd_client  # noqa: E402
from batchd_client.keras import BatchdPyDataset, Progress  # noqa: E402
from batchd_client.tensorflow import dataset  # noqa: E402
from support.garbage import CYCLES, collected  # noqa: E402
from support.programs import end, gone, start  # noqa: E402
from support.settings import folder_stream  # noqa: E402

STILL_MAX_S = 10.0
"""On a busy machine TensorFlow's threads wait for a CPU as they end, and hold its main thread."""
EPOCH = 40
STEPS = 5


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve a stream of photographs, and one without pushed samples."""
    live = {"source": {"type": "push", "fields": {"label": "int64"}}, "batch_size": 8}
    return start_shared_daemon({"photos": folder_stream(photos), "live": live})


def bare_numbers(daemon, epochs, state=None):
    """Return the samples of each batch, from the bare client."""
    with batchd_client.connect(daemon.address) as connection:
        claim = connection.stream("photos", epochs=epochs, state=state)
        return [batch["index"].tolist() for _ in range(claim.epoch, epochs) for batch in claim]


EXITS = ["exit_half_read", "exit_while_it_waits", "exit_with_it_at_the_top", "exit_in_a_cycle", "exit_by_an_exception"]


@pytest.mark.parametrize("program", EXITS)
def test_a_script_ends_at_once_with_a_data_set_half_read(daemon, program):
    """Batches that tf.data reads ahead do not matter; the daemon has its slots back."""
    said, status, errors = end(start("tensorflow_program", program, daemon), STILL_MAX_S)
    assert said, errors
    assert status == (1 if program == "exit_by_an_exception" else 0), errors
    gone(daemon)


@pytest.mark.parametrize("kind", ["tf", "keras"])
def test_ctrl_c_leaves_a_state_from_which_nothing_is_skipped(daemon, kind):
    """The signal may hit any place in ``fit``: the current batch may be repeated."""
    program = start("tensorflow_program", "train_until_interrupted", daemon, kind)
    assert json.loads(program.stdout.readline()) == {"ready": True}
    program.send_signal(signal.SIGINT)
    (said,), status, errors = end(program, STILL_MAX_S)
    assert status == 130, errors
    epochs = said["state"]["epoch"] + 1
    done = len(bare_numbers(daemon, epochs)) - len(bare_numbers(daemon, epochs, said["state"]))
    assert len(said["trained"]) - done in (0, 1)
    assert said["trained"][:done] == bare_numbers(daemon, epochs)[:done]
    gone(daemon)


@pytest.mark.parametrize("tie", CYCLES.values(), ids=CYCLES)
def test_a_connection_in_a_cycle_with_a_data_set_of_keras_ends_with_it(daemon, tie):
    """The data set is half read."""

    def make():
        connection = batchd_client.connect(daemon.address)
        stream = connection.stream("photos")
        data = BatchdPyDataset(stream)
        return connection, stream, data, data[0], Progress(stream)

    collected(make, tie)
    gone(daemon)


@pytest.mark.parametrize("tie", CYCLES.values(), ids=CYCLES)
@pytest.mark.parametrize(
    "around", [lambda data: data, lambda data: data.repeat().prefetch(4)], ids=["plain", "prefetch"]
)
def test_a_connection_in_a_cycle_with_a_data_set_of_tensorflow_ends_with_it(daemon, around, tie):
    """An iterator is half read, and may read ahead while it ends."""

    def make():
        connection = batchd_client.connect(daemon.address)
        stream = connection.stream("photos")
        data = around(dataset(stream))
        batches = iter(data)
        return connection, stream, data, batches, next(batches)

    collected(make, tie)
    gone(daemon)


def test_replicas_of_a_strategy_get_batches_in_turn(daemon):
    """One process has two devices: each sample once, by hand and by ``fit``."""
    ((said,), status, errors) = end(start("tensorflow_program", "train_on_two_devices", daemon))
    assert status == 0, errors
    for epoch in said["epochs"]:
        assert sorted(number for batch in epoch for number in batch) == list(range(EPOCH))
    assert said["losses"] == 2
    gone(daemon)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras_needs_no_tensorflow(daemon, backend):
    """Another backend trains on the same data; the message of a missing one has the remedy."""
    if find_spec(backend) is None or not find_spec(backend).origin:
        pytest.skip(f"{backend} is not installed")
    ((said,), status, errors) = end(start("tensorflow_program", "train_without_tensorflow", daemon, backend))
    assert status == 0, errors
    assert said["backend"] == backend
    assert said["numbers"] == bare_numbers(daemon, 2)
    assert (said["state"]["epoch"], said["state"]["step"]) == (2, 0)
    assert "pip install tensorflow" in said["missing"]
    gone(daemon)


def test_without_keras_the_import_says_what_to_install():
    """The program lacks Keras."""
    program = "import sys; sys.modules['keras'] = None; import batchd_client.keras"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: batchd_client.keras needs Keras" in done.stderr
    assert "pip install keras" in done.stderr
