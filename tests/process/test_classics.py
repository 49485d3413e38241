"""The examples of classic loaders: each runs, matches the old way, and leaves nothing behind."""

import importlib.util
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from support.programs import examples, finish
from support.waiting import PATIENCE_S, wait_until

CLASSICS = Path(__file__).parents[2] / "examples" / "classics"
QUICK = ("--rounds", "1", "--seconds", "0.1", "--warm-up", "1")
RUNS_EVERYWHERE = {
    "generator_enqueuer": ["pixels", "labels"],
    "glob_imread": ["pixels, read from the files named", "names of all files"],
    "process_pool": ["sizes", "pixels, by their mean difference"],
    "queue_runner": ["losses, step by step"],
    "file_list": ["samples in each of n epochs"],
    "tfrecords": ["labels as in the files"],
}
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
WITH_TENSORFLOW = {
    "file_list": ["pixels minus means", "labels, one-hot"],
    "tfrecords": ["pixels", "labels"],
}


@pytest.fixture
def start(tmp_path, daemons_folder):
    """Start an example whose temporary files go to ``tmp_path``."""
    with examples(tmp_path, TMPDIR=str(tmp_path), XDG_RUNTIME_DIR=str(daemons_folder)) as start:
        yield lambda name, *options: start(CLASSICS / f"{name}.py", *options)


@pytest.fixture(scope="module")
def common():
    """Import the module that the examples share."""
    spec = importlib.util.spec_from_file_location("classics_common", CLASSICS / "common.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compared(said):
    """Return the comparisons that an example found equal."""
    lines = [line.strip() for line in said.splitlines()]
    return [line.removeprefix("same ").rpartition(":")[0] for line in lines if line.startswith("same ")]


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS_EVERYWHERE)
def test_a_classic_way_gives_the_same_with_batchd(start, name, photos, tmp_path):
    """An example compares all it can, prints speeds, names what it omits, and leaves no file.

    The photographs have one sub-folder for each class, whose number is the label.
    """
    said = finish(start(name, "--data", photos, *QUICK))

    assert set(RUNS_EVERYWHERE[name]) <= set(compared(said))
    assert "\n  batchd" in said
    assert "medians of 1 rounds" in said
    assert list(tmp_path.iterdir()) == []
    without = "left out: the old way needs TensorFlow, which is not installed here (pip install tensorflow)" in said
    assert without == (name in WITH_TENSORFLOW and not HAS_TENSORFLOW)


@pytest.mark.slow  # TensorFlow takes long to import
@pytest.mark.skipif(not HAS_TENSORFLOW, reason="the old way needs TensorFlow: pip install tensorflow")
@pytest.mark.parametrize("name", WITH_TENSORFLOW)
def test_what_tensorflow_reads_is_the_same_with_batchd(start, name, photos):
    """Pixels match within the tolerance that each example states; labels match exactly."""
    said = finish(start(name, "--data", photos, *QUICK))

    assert set(WITH_TENSORFLOW[name]) <= set(compared(said))
    assert "\n  tf.data" in said


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (np.array([[1, 2], [3, 6]]), "pixels: differ by 2 at 1, which is more than 1"),
        (np.array([[1, 2, 0], [3, 4, 0]]), "is not int64"),
        (np.array([[1, 2], [3, 4]], np.uint8), "is not uint8"),
    ],
)
def test_an_example_ends_where_both_do_not_give_the_same(common, other, message, capsys):
    """A difference beyond the tolerance, or in shape or type, ends the example without a match."""
    with pytest.raises(SystemExit, match=message):
        common.same("pixels", np.array([[1, 2], [3, 4]]), other, tolerance=1)
    assert compared(capsys.readouterr().out) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "process_pool" else pytest.mark.slow) for name in RUNS_EVERYWHERE],
)
def test_ctrl_c_ends_a_classic_way_cleanly(start, name, tmp_path):
    """Ctrl-C in the middle of a round causes no traceback and leaves no files or processes."""
    example = start(name, "--photographs", "16", "--seconds", "60")
    if name == "process_pool":
        wait_until(lambda: list(tmp_path.glob("*/pool-0/*.jpg")), "the pool works")
    else:
        while not example.stdout.readline().startswith("  same "):
            assert example.poll() is None, example.stderr.read()

    os.killpg(example.pid, signal.SIGINT)

    _said, complained = example.communicate(timeout=PATIENCE_S)
    assert (example.returncode, complained) == (130, "")
    assert list(tmp_path.iterdir()) == []
