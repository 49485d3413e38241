"""Hugging Face's accelerate and Trainer over a loader: recommended uses, and those to avoid."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")
pytest.importorskip("accelerate", reason="accelerate is not installed; `make test-frameworks` installs it")

from support.settings import folder_stream

TESTS = Path(__file__).parents[1]
EPOCH = 40
STEPS = 20
EPOCHS = 2
NEVER = 0
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve 20 batches in an epoch, which two ranks share evenly."""
    return start_shared_daemon({"photos": folder_stream(photos, batch_size=2)})


def run(daemon, name, *arguments, ranks=2):
    """Return the output of each rank of a program, by rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "support.accelerate_program", name, daemon.address, *map(str, arguments)]
    job = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert job.returncode == 0, job.stderr
    said = sorted(
        (json.loads(line) for line in job.stdout.splitlines() if line.startswith('{"rank"')),
        key=lambda one: one["rank"],
    )
    assert [one["rank"] for one in said] == list(range(ranks))
    return said


def test_a_loader_goes_through_prepare_as_it_is(daemon, tmp_path):
    """Two ranks read every sample once; accelerate's saved state continues with the next batch."""
    said = run(daemon, "loader_given_to_prepare", tmp_path / "state")
    assert all(one["same"] for one in said)
    assert sorted(number for one in said for number in one["seen"]) == list(range(EPOCH))
    assert all(one["after"] == one["rest"] for one in said)


def test_a_data_loader_that_is_not_prepared_is_read_once(daemon):
    """The loader already has its rank's share."""
    said = run(daemon, "data_loader_left_out")
    assert sorted(number for one in said for number in one["seen"]) == list(range(EPOCH))


@pytest.mark.parametrize("dispatch", ["unsaid", "false"])
def test_a_prepared_data_loader_takes_a_share_of_a_share(daemon, dispatch):
    """The docs advise against it: accelerate takes rank 0's batch for the whole, or fails."""
    said = run(daemon, "data_loader_prepared", dispatch)
    assert sorted(number for one in said for number in one.get("seen", ())) != list(range(EPOCH))


def test_the_trainer_of_transformers_goes_on_from_its_checkpoint(daemon, tmp_path):
    """A user's loader has its position beside each checkpoint."""
    pytest.importorskip("transformers", reason="transformers is not installed; `make test-frameworks` installs it")
    (whole,) = run(daemon, "train_with_trainer", tmp_path / "whole", NEVER, ranks=1)
    assert whole["steps"] == len(whole["seen"]) == EPOCHS * STEPS
    (before,) = run(daemon, "train_with_trainer", tmp_path / "cut", 7, ranks=1)
    (after,) = run(daemon, "train_with_trainer", tmp_path / "cut", NEVER, ranks=1)
    assert before["seen"] == whole["seen"][:7]
    assert after["seen"] == whole["seen"][6:]  # it saves after every third step
