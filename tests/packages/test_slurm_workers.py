"""The recipe for worker hosts, on a real Slurm of one node: munge, slurmctld and slurmd.

They and the jobs run in a process namespace of their own, which ends with the test.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import batchd
from support.daemon_process import clean_environment
from support.network import free_port
from support.roots import TREE
from support.waiting import PATIENCE_S, wait_until

SCRIPT = TREE / "deploy/slurm/workers.sbatch"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CPUS = 4
LONG_S = PATIENCE_S
CONFIGURATION = """ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=30
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=16000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
START = """munged --foreground --force --key-file={folder}/munge.key --socket={folder}/munge.socket \
    --pid-file={folder}/munge.pid --log-file={folder}/munge.log --seed-file={folder}/munge.seed &
while ! [ -S {folder}/munge.socket ]; do sleep 0.1; done
slurmctld -D -L {folder}/slurmctld.log &
slurmd -D -L {folder}/slurmd.log &
wait
"""


class Slurm:
    """A Slurm cluster of this machine. ``environment`` is that of its commands."""

    def __init__(self, folder: Path) -> None:
        names = {
            "folder": folder,
            "node": socket.gethostname().partition(".")[0],
            "controller": free_port(),
            "port": free_port(),
            "cpus": CPUS,
        }
        for name in ("state", "spool", "bin"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**names))
        program = folder / "bin" / "batchd"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m batchd "$@"\n')
        program.chmod(0o755)
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.environment = clean_environment() | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        namespace = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
        with (folder / "log").open("wb") as log:
            self._processes = subprocess.Popen(
                [*namespace, "sh", "-ec", START.format(**names)], env=self.environment, stdout=log, stderr=log
            )
        wait_until(lambda: "idle" in self.run("sinfo", "--noheader", check=False), "the node is up", LONG_S)

    def run(self, *command: str | Path, check: bool = True, **environment: str) -> str:
        """Run a command of Slurm; return its output."""
        done = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def state(self, job: str) -> str:
        """Return the state of a job, such as PENDING, RUNNING or COMPLETED."""
        facts = self.run("scontrol", "--oneliner", "show", "job", job)
        return facts.partition("JobState=")[2].split()[0]

    def close(self) -> None:
        """End the cluster with all jobs."""
        self._processes.kill()
        self._processes.wait()


@pytest.fixture
def slurm(tmp_path) -> Iterator[Slurm]:
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"this needs root and {', '.join(missing)} (apt install slurmctld slurmd slurm-client munge)")
    folder = tmp_path / "slurm"
    folder.mkdir()
    slurm = Slurm(folder)
    yield slurm
    slurm.close()


def test_worker_hosts_of_slurm_serve_drain_and_come_again(slurm, start_daemon, tmp_path) -> None:
    """Two of an array: one ends at its time limit with status 0, one is requeued and cancelled."""
    keys, key, port = tmp_path / "keys", tmp_path / "pool.key", free_port()
    batchd("keys", "new", "--role", "worker", "--name", "pool", "--keys-dir", keys, "-o", key)
    daemon = start_daemon(worker_address=f"127.0.0.1:{port}", keys_dir=str(keys), workers=1)
    script = tmp_path / "workers.sbatch"
    script.write_text(SCRIPT.read_text().replace(":7072", f":{port}"))
    options = ("--parsable", "--array=1-2", "--cpus-per-task=2", "--mem=1G", f"--output={tmp_path}/job-%a.log")

    def links() -> set[int]:
        """Return the worker hosts whose workers have started."""
        return {link["link"] for link in daemon.status()["pool"]["links"] if link["workers"] == 2}

    job = slurm.run("sbatch", *options, "--time=1", script, GPU_NODE="127.0.0.1", KEY=str(key)).strip()
    wait_until(lambda: len(links()) == 2, "both worker hosts are connected", LONG_S)
    first = links()
    slurm.run("scontrol", "requeue", f"{job}_2")
    wait_until(lambda: slurm.state(f"{job}_2") == "PENDING", "the second one is in the queue again", LONG_S)
    slurm.run("scontrol", "update", f"JobId={job}_2", "StartTime=now", "TimeLimit=60")
    wait_until(lambda: links() - first, "the second one is connected again", LONG_S)
    wait_until(lambda: slurm.state(f"{job}_1") == "COMPLETED", "the first one has drained", LONG_S)
    slurm.run("scancel", f"{job}_2")
    wait_until(lambda: not links(), "no worker host is left", LONG_S)

    assert "worker host stopped" in (tmp_path / "job-1.log").read_text()
    wait_until(lambda: slurm.state(f"{job}_2") == "CANCELLED", "the second one is cancelled", LONG_S)
    assert (tmp_path / "job-2.log").read_text().count("worker host stopped") >= 1


def test_the_recipe_names_what_is_missing() -> None:
    """The error comes before the script requests a node."""
    done = subprocess.run(["bash", SCRIPT], env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "GPU_NODE: is not set: the node of the daemon" in done.stderr
