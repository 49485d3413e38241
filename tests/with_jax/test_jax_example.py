"""The example that trains in JAX: it learns, and an interrupted run ends where a whole one does."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

from batchd.data.pipeline.image.synthetic_images import make_photos
from support.programs import examples, finish
from support.waiting import PATIENCE_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_train.py"
PHOTOGRAPHS = 64
EPOCHS = 8


@pytest.fixture(scope="module")
def start(tmp_path_factory, daemons_folder):
    """Start the example over generated photographs."""
    photos = tmp_path_factory.mktemp("made") / "photos"
    make_photos(photos, PHOTOGRAPHS, 0, lambda _made: None)
    with examples(photos.parent, XDG_RUNTIME_DIR=str(daemons_folder)) as start:
        yield lambda folder, epochs=EPOCHS: start(EXAMPLE, "--data", photos, "--epochs", epochs, "--folder", folder)


def saved(folder):
    """Return the content of its checkpoint."""
    with np.load(folder / "checkpoint.npz") as checkpoint:
        return {name: checkpoint[name] for name in checkpoint}


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """Make one run without interruption; return its folder and its output."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, finish(start(folder))


def test_the_model_learns(whole):
    """A model that learns nothing would not show which data it got."""
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", whole[1])]
    assert len(losses) == EPOCHS
    assert losses[-1] < losses[0] - 0.1


def test_an_interrupted_run_ends_where_a_whole_one_does(start, whole, tmp_path):
    """No batch is skipped, and none is repeated."""
    example = start(tmp_path)
    while not example.stdout.readline().startswith("epoch 2:"):
        assert example.poll() is None, example.stderr.read()
    os.killpg(example.pid, signal.SIGINT)
    said, complained = example.communicate(timeout=PATIENCE_S)
    assert (example.returncode, complained) == (130, "")
    assert "the same command goes on" in said
    assert finish(start(tmp_path)).startswith("going on at epoch")
    expected, there = saved(whole[0]), saved(tmp_path)
    assert there.pop("state") == expected.pop("state")
    assert there.keys() == expected.keys()
    for name, values in expected.items():
        assert np.allclose(there[name], values, rtol=1e-3, atol=1e-5)


def test_a_finished_run_has_nothing_to_do(start, whole):
    """The run's checkpoint stays."""
    folder, _ = whole
    before = saved(folder)
    assert len(finish(start(folder)).splitlines()) == 2
    after = saved(folder)
    assert all(np.array_equal(after[name], values) for name, values in before.items())


def test_a_checkpoint_of_other_data_is_not_trained_on(start, whole, tmp_path):
    """The error has the reason, without a traceback."""
    other = saved(whole[0])
    other["state"] = re.sub(r'"fingerprint": "\w+"', f'"fingerprint": "{"0" * 32}"', str(other["state"]))
    np.savez(tmp_path / "checkpoint.npz", **other)
    example = start(tmp_path)
    _, complained = example.communicate(timeout=PATIENCE_S)
    assert example.returncode == 1
    assert complained.startswith("jax_train: the daemon says: stream 'photos' is not the one of the trainer's state: ")
    assert "Traceback" not in complained
