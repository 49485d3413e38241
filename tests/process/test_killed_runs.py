"""Test runs themselves: they name a failure at once, and a killed run leaves nothing behind."""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from support.keeper import cleared_by
from support.kernel import RUN_VARIABLE, is_alive, started_at
from support.network import two_hosts
from support.waiting import PATIENCE_S, wait_until

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
CONFIGURATION = ["-c", str(ROOT / "pyproject.toml"), "-p", "conftest", "-p", "no:cacheprovider"]
needs_lanes = pytest.mark.skipif(not importlib.util.find_spec("xdist"), reason="needs pytest-xdist")
LANES = {"in one process": [], "in a lane": ["-n", "1", "--dist", "loadfile"]}


def pytest_with(*options):
    """Return the command of a test run with these options."""
    return lambda arguments: [sys.executable, "-m", "pytest", *options, *arguments]


def make_test(arguments):
    """Return the command of a run in a lane, as people and CI start it."""
    arguments = shlex.join([*LANES["in a lane"], *arguments])
    return ["make", "-o", "bytecode", "test", f"VENV={sys.prefix}", f"ARGS={arguments}"]


HOLDS_MUCH = """
import json, os, signal
from pathlib import Path
from support.mounts import small_file_system
from support.network import two_hosts
from support.trainer_process import TrainerProcess


def test_a_daemon_serves_until_the_run_is_killed(start_daemon, tmp_path):
    daemon = start_daemon()
    trainer = TrainerProcess(daemon.address).ready()
    trainer.hold(2)
    processes = [daemon.pid, daemon.fork_server_pid(), *daemon.worker_pids(), trainer.pid]
    with two_hosts() as hosts, small_file_system(tmp_path / "small", size="64k"):
        found = {"runner": os.getpid(), "processes": processes, "folder": str(daemon.folder),
                 "namespace": hosts.removal[-1], "mount": str(tmp_path / "small")}
        file = Path(os.environ["FOUND"])
        file.with_suffix(".part").write_text(json.dumps(found))
        file.with_suffix(".part").rename(file)
        while True:
            signal.pause()
"""
FAILS_AND_WAITS = """
import os
from pathlib import Path
from support.waiting import wait_until


def test_one_that_fails():
    assert "this" == "that"


def test_one_that_waits():
    wait_until(Path(os.environ["FOUND"]).exists, "the failure was seen")
"""


@pytest.fixture
def begin(tmp_path):
    """Start a test run of one file; it ends with the test at the latest."""
    runs = []

    def begin(text, command_for):
        file = tmp_path / "test_tiny.py"
        file.write_text(text)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", RUN_VARIABLE))}
        environment = {**kept, "PYTHONPATH": str(TESTS), "FOUND": str(tmp_path / "found"), "COLUMNS": "200"}
        environment["PYTEST_ADDOPTS"] = f"--basetemp={tmp_path / 'base'}"
        with (tmp_path / "said").open("wb") as said:
            runs.append(
                subprocess.Popen(
                    command_for([*CONFIGURATION, f"--rootdir={tmp_path}", str(file)]),
                    cwd=ROOT,
                    env=environment,
                    stdout=said,
                    stderr=said,
                    process_group=0,
                )
            )
        return runs[-1]

    yield begin
    for run in runs:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # make alone would leave its pytest
        run.wait(PATIENCE_S)


def found_by(run, tmp_path):
    """Wait for what the run's test has found out about itself."""
    wait_until(lambda: (tmp_path / "found").exists() or run.poll() is not None, "the run's test has begun")
    assert run.poll() is None, (tmp_path / "said").read_text()
    return json.loads((tmp_path / "found").read_text())


def left_of(found):
    """Return what is left of everything that the run had."""
    left = [f"process {pid}" for pid in found["processes"] if is_alive(pid)]
    left += [found["folder"]] if Path(found["folder"]).exists() else []
    namespaces = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    left += [found["namespace"]] if found["namespace"] in namespaces else []
    return left + ([found["mount"]] if found["mount"] in Path("/proc/self/mounts").read_text() else [])


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="makes hosts and mounts, as root")
class TestKilled:
    """Each killed run leaves nothing behind."""

    @pytest.mark.parametrize(
        ("lanes", "number"),
        [
            ("in one process", signal.SIGKILL),
            ("in one process", signal.SIGTERM),
            pytest.param("in a lane", signal.SIGKILL, marks=needs_lanes),
            pytest.param("in a lane", signal.SIGTERM, marks=needs_lanes),
        ],
    )
    @pytest.mark.slow  # two tests below show most of it
    def test_a_run_that_is_killed_leaves_nothing(self, begin, tmp_path, lanes, number):
        """No daemon, worker, trainer, folder, mount or network remains."""
        run = begin(HOLDS_MUCH, pytest_with(*LANES[lanes]))
        found = found_by(run, tmp_path)

        run.send_signal(number)

        assert run.wait(PATIENCE_S) == -number
        wait_until(lambda: not left_of(found), "nothing is left of the run")
        wait_until(lambda: not is_alive(found["runner"]), "its lanes have ended as well")

    @pytest.mark.thorough
    @needs_lanes
    def test_a_lane_that_is_killed_leaves_nothing(self, begin, tmp_path):
        """The run continues without it, and reports that."""
        run = begin(HOLDS_MUCH, pytest_with("-n", "1", "--max-worker-restart", "0"))
        found = found_by(run, tmp_path)

        os.kill(found["runner"], signal.SIGKILL)

        wait_until(lambda: not left_of(found), "nothing is left of the lane")
        assert run.wait(PATIENCE_S) == pytest.ExitCode.TESTS_FAILED

    @pytest.mark.thorough
    @needs_lanes
    @pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
    def test_a_sigterm_of_make_test_leaves_nothing(self, begin, tmp_path):
        """Make forwards the signal, and pytest gets no other notice."""
        run = begin(HOLDS_MUCH, make_test)
        found = found_by(run, tmp_path)

        run.terminate()

        run.wait(PATIENCE_S)
        wait_until(lambda: not left_of(found), "nothing is left of the run")
        wait_until(lambda: not is_alive(found["runner"]), "its lanes have ended as well")

    @pytest.mark.thorough
    def test_the_network_of_a_run_that_is_gone_is_cleared_by_the_next(self):
        """The next run clears it even if its keeper died; a network of a living run stays."""
        gone = subprocess.Popen(["true"])
        left = f"batchd-test-{gone.pid}-{started_at(gone.pid)}"
        gone.wait()
        kept = f"batchd-test-{os.getppid()}-{started_at(os.getppid())}"
        with ExitStack() as stack:
            for name in (left, kept):
                remove = ["ip", "netns", "del", name]
                stack.enter_context(cleared_by(*remove))
                stack.callback(subprocess.run, remove, check=False, capture_output=True)
                subprocess.run(["ip", "netns", "add", name], check=True)
            with two_hosts():
                said = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
        names = {line.split()[0] for line in said.splitlines()}
        assert left not in names
        assert kept in names


@pytest.mark.thorough
@pytest.mark.parametrize(
    "lanes", [pytest.param("in one process", marks=pytest.mark.slow), pytest.param("in a lane", marks=needs_lanes)]
)
def test_a_failure_is_named_when_it_happens(begin, tmp_path, lanes):
    """The failure is printed while other tests still run, which may take minutes."""
    run = begin(FAILS_AND_WAITS, pytest_with(*LANES[lanes]))

    def is_named():
        return (
            "test_tiny.py::test_one_that_fails - AssertionError: assert 'this' == 'that'"
            in (tmp_path / "said").read_text()
        )

    wait_until(lambda: is_named() or run.poll() is not None, "the failure is named")
    assert run.poll() is None
    (tmp_path / "found").touch()
    assert run.wait(PATIENCE_S) == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed" in (tmp_path / "said").read_text()
