"""The recipe for Slurm, without Slurm: what its script does for a job on one node."""

import os
import subprocess
import sys

import pytest

from support.daemon_process import clean_environment
from support.roots import TREE
from support.waiting import PATIENCE_S, wait_until

SCRIPT = TREE / "deploy/slurm/daemon.sh"
JOB = "17"


@pytest.fixture
def job(tmp_path, daemons_folder):
    """The environment of a job, with ``batchd`` on its path and a directory of its own."""
    program = tmp_path / "bin" / "batchd"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m batchd "$@"\n')
    program.chmod(0o755)
    return clean_environment() | {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": JOB,
        "BATCHD_JOB_DIRECTORY": str(daemons_folder / f"job-{JOB}"),
        "BATCHD_READY_S": "60",
    }


def daemon_script(job, *words, status=0) -> str:
    """Run the script to its end; what it wrote."""
    done = subprocess.run(
        [SCRIPT, *words], env=job, capture_output=True, text=True, timeout=PATIENCE_S * 3, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_a_job_has_a_daemon_and_leaves_nothing(job, photos, tmp_path, daemons_folder) -> None:
    """It runs in a step, trainers get its address, and the end of the job takes its directory away."""
    config = tmp_path / "batchd.toml"
    config.write_text(
        f'[daemon]\nmemory = "64MiB"\nworkers = 1\n[streams.photos]\nsource = {{ type = "folder", path = "{photos}" }}\n'
        'batch_size = 4\npipeline = [{ op = "decode" }, { op = "resize", size = [8, 8] }]\n'
    )
    with subprocess.Popen([SCRIPT, "run", config], env=job) as step:
        wait_until((daemons_folder / f"job-{JOB}" / "pid").exists, "the step has begun")
        daemon_script(job, "wait")
        address = daemon_script(job, "address").strip()
        status = subprocess.run(
            ["batchd", "status", "--address", address], env=job, capture_output=True, text=True, check=True
        )
        assert "photos" in status.stdout
        daemon_script(job, "stop")
        assert step.wait(PATIENCE_S) == 0
    assert not (daemons_folder / f"job-{JOB}").exists()


def test_a_daemon_that_does_not_start_says_why(job, tmp_path, daemons_folder) -> None:
    """In the log of the step that waits for it."""
    with subprocess.Popen([SCRIPT, "run", tmp_path / "none.toml"], env=job) as step:
        assert step.wait(PATIENCE_S) != 0
    assert "none.toml" in daemon_script(job, "wait", status=1)
    daemon_script(job, "stop")
    assert not (daemons_folder / f"job-{JOB}").exists()


def test_a_directory_that_is_there_is_not_taken(job, daemons_folder, tmp_path) -> None:
    """Anybody may make one in /tmp."""
    (daemons_folder / f"job-{JOB}").mkdir()
    assert "File exists" in daemon_script(job, "run", str(tmp_path), status=1)
    daemon_script(job, "stop")


def test_outside_of_a_job_it_says_so(job) -> None:
    """Rather than serve in a directory that is nobody's."""
    assert "this runs in a job" in daemon_script({**job, "SLURM_JOB_ID": ""}, "address", status=2)
