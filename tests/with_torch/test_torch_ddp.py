"""Jobs of several ranks under torchrun: each sample once, and a killed job resumes exactly."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

from support.settings import folder_stream

TESTS = Path(__file__).parents[1]
EPOCH = 40
EPOCHS = 3
NEVER = 0
DEADLINE_S = 120.0


@pytest.fixture(
    scope="module", params=[pytest.param(8, marks=pytest.mark.jobs), 3], ids=["batches of 8", "batches of 3"]
)
def daemon(request, start_shared_daemon, photos):
    """Serve 5 or 14 steps in an epoch: neither is a multiple of the ranks."""
    return start_shared_daemon({"photos": folder_stream(photos, batch_size=request.param)})


def run_job(daemon, ranks, checkpoint, die_at=NEVER):
    """Run a job; return all output of its ranks, by rank, in order, and how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [
        "-m",
        "support.torch_program",
        "train_as_a_rank",
        daemon.address,
        str(checkpoint),
        str(EPOCHS),
        str(die_at),
    ]
    job = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    said = defaultdict(list)
    for line in job.stdout.splitlines():
        if line.startswith("{"):
            step = json.loads(line)
            said[step["rank"]].append(step)
    return dict(said), job


def run_job_of_a_mesh(daemon):
    """Run a job of four ranks; return what each rank says, by rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += ["-m", "support.torch_program", "read_as_a_mesh", daemon.address]
    job = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert job.returncode == 0, job.stderr
    said = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    return sorted(said, key=lambda one: one["rank"])


def numbers(steps):
    """Return the samples of these steps, in their order."""
    return [number for step in steps for number in step["numbers"]]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.jobs)])
def test_the_ranks_of_a_job_read_every_sample_once_in_an_epoch(daemon, tmp_path, ranks):
    """All ranks take the same number of steps, also at the end, so no rank waits for another."""
    said, job = run_job(daemon, ranks, tmp_path / "state.json")
    assert job.returncode == 0, job.stderr
    assert sorted(said) == list(range(ranks))
    assert len({len(steps) for steps in said.values()}) == 1
    for epoch in range(EPOCHS):
        read = [number for steps in said.values() for number in numbers(one for one in steps if one["epoch"] == epoch)]
        assert set(read) == set(range(EPOCH))
        assert len(read) - EPOCH < ranks  # a last batch with few rows has several readers


@pytest.mark.jobs
def test_ranks_that_compute_one_model_read_the_same_rows(daemon):
    """Data-parallel ranks may be next to each other or apart, in several dimensions of a mesh."""
    said = run_job_of_a_mesh(daemon)

    shares = [one["shares"] for one in said]
    assert [one["outer"] for one in shares] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert [one["inner"] for one in shares] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    assert [one["whole"] for one in shares] == [[0, 4], [1, 4], [2, 4], [3, 4]]
    assert [one["two"] for one in shares] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert all(one["three"].startswith("data_parallel=3 does not divide the 4 ranks of this job") for one in shares)
    read = [one["numbers"] for one in said]
    assert read[0] == read[1] != read[2] == read[3]
    assert set(read[0] + read[2]) == set(range(EPOCH))


@pytest.mark.jobs
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_job_that_loses_a_rank_goes_on_where_its_checkpoint_is(daemon, tmp_path, ranks):
    """Samples up to the checkpoint and after it are those of an uninterrupted job."""
    whole, job = run_job(daemon, ranks, tmp_path / "whole.json")
    assert job.returncode == 0, job.stderr
    checkpoint = tmp_path / "cut.json"
    before, job = run_job(daemon, ranks, checkpoint, die_at=4)
    assert job.returncode != 0
    state = json.loads(checkpoint.read_text())
    after, job = run_job(daemon, ranks, checkpoint)
    assert job.returncode == 0, job.stderr
    for rank in range(ranks):
        done = [step["state"] for step in whole[rank]].index(state) + 1
        assert before[rank][:done] == whole[rank][:done]
        assert after[rank] == whole[rank][done:]


@pytest.mark.jobs
def test_a_job_goes_on_with_another_number_of_ranks(daemon, tmp_path):
    """Four read the rest of the epoch that two began: every sample of it, once."""
    checkpoint = tmp_path / "state.json"
    before, _ = run_job(daemon, 2, checkpoint, die_at=1)
    state = json.loads(checkpoint.read_text())
    assert (state["epoch"], state["step"]) == (0, 2)
    after, job = run_job(daemon, 4, checkpoint)
    assert job.returncode == 0, job.stderr
    first = [number for rank in (0, 1) for number in numbers(before[rank][:1])]
    rest = [number for steps in after.values() for number in numbers(one for one in steps if one["epoch"] == 0)]
    assert not set(first) & set(rest)
    assert set(first) | set(rest) == set(range(EPOCH))
