"""The recipe for Slurm, without Slurm: what its script does for a job on one node."""

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path

import pytest

from support.daemon_process import clean_environment
from support.roots import TREE
from support.waiting import PATIENCE_S, wait_until

SCRIPT = TREE / "deploy/slurm/daemon.sh"
JOB = "17"


@pytest.fixture
def job(tmp_path, daemons_folder):
    """Return a job's environment, with ``batchd`` on its path and a directory of its own."""
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
    """Run the script to its end; return its output."""
    done = subprocess.run(
        [SCRIPT, *words], env=job, capture_output=True, text=True, timeout=PATIENCE_S * 3, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def config(tmp_path, photos) -> Path:
    """Write a small configuration."""
    file = tmp_path / "batchd.toml"
    file.write_text(
        f'[daemon]\nmemory = "64MiB"\nworkers = 1\n[streams.photos]\nsource = {{ type = "folder", path = "{photos}" }}\n'
        'batch_size = 4\npipeline = [{ op = "decode" }, { op = "resize", size = [8, 8] }]\n'
    )
    return file


def test_a_job_has_a_daemon_and_leaves_nothing(job, config, daemons_folder) -> None:
    """The daemon runs in a step, trainers get its address, its directory ends with the job."""
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
    """The reason is in the log of the step that waits for it."""
    with subprocess.Popen([SCRIPT, "run", tmp_path / "none.toml"], env=job) as step:
        assert step.wait(PATIENCE_S) != 0
    assert "none.toml" in daemon_script(job, "wait", status=1)
    daemon_script(job, "stop")
    assert not (daemons_folder / f"job-{JOB}").exists()


def test_a_requeued_job_takes_over_what_its_killed_daemon_left(job, config, daemons_folder) -> None:
    """The job has the same number, perhaps the same node; trainers do not use the old daemon."""
    directory = daemons_folder / f"job-{JOB}"
    with subprocess.Popen([SCRIPT, "run", config], env=job) as step:
        daemon_script(job, "wait")
        (directory / "old").touch()
        step.kill()
    with (
        subprocess.Popen([SCRIPT, "wait"], env=job) as waiting,
        subprocess.Popen([SCRIPT, "run", config], env=job) as step,
    ):
        assert waiting.wait(3 * PATIENCE_S) == 0
        assert not (directory / "old").exists()
        daemon_script(job, "run", str(config), status=1)
        assert step.poll() is None
        daemon_script(job, "stop")
        assert step.wait(PATIENCE_S) == 0


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of ours that must survive."""
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("word", ["run", "wait", "stop", "address"])
def test_a_link_in_the_place_of_the_directory_is_refused(job, daemons_folder, tmp_path, bystander, word) -> None:
    """The target does not matter; no file there is removed, and no process is killed."""
    (tmp_path / "pid").write_text(str(bystander.pid))
    link = daemons_folder / f"job-{JOB}"
    link.symlink_to(tmp_path)
    words = [word, "none.toml"] if word == "run" else [word]
    assert f"is a link of user {getuser()}" in daemon_script(job, *words, status=1)
    link.unlink()
    assert (tmp_path / "pid").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("word", ["run", "wait", "stop", "address"])
def test_a_directory_of_another_user_is_refused_with_the_users_name(job, daemons_folder, bystander, word) -> None:
    """That user could choose the trainers' data, and the process that is killed."""
    directory = daemons_folder / f"job-{JOB}"
    directory.mkdir()
    (directory / "pid").write_text(str(bystander.pid))
    os.chown(directory, pwd.getpwnam("nobody").pw_uid, -1)
    words = [word, "none.toml"] if word == "run" else [word]
    assert "is a directory of user nobody" in daemon_script(job, *words, status=1)
    assert (directory / "pid").exists()
    shutil.rmtree(directory)


def test_there_is_no_address_before_there_is_a_daemon(job) -> None:
    """Trainers would otherwise connect to any user who makes the directory in between."""
    assert "no daemon of job 17 was started here" in daemon_script(job, "address", status=1)


def test_a_directory_that_is_there_is_not_taken(job, daemons_folder, tmp_path) -> None:
    """A daemon may be starting in it."""
    (daemons_folder / f"job-{JOB}").mkdir()
    assert "File exists" in daemon_script(job, "run", str(tmp_path), status=1)
    daemon_script(job, "stop")


def test_outside_of_a_job_it_says_so(job) -> None:
    """The script would otherwise serve in a directory without an owner."""
    assert "this runs in a job" in daemon_script({**job, "SLURM_JOB_ID": ""}, "address", status=2)
