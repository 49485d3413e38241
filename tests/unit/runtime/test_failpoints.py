"""Faults at named steps, each in a separate process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.kernel import is_alive, is_stopped
from support.waiting import PATIENCE_S, wait_until

PASS = """
import sys
from batchd.runtime import failpoints
for step in sys.argv[1:]:
    name, _, sample = step.partition("#")
    failpoints.passing(name, int(sample)) if sample else failpoints.passing(name)
    print(step, flush=True)
"""
"""Passes the given steps, and prints each one afterwards.

``name#7`` passes the step with sample 7.
"""


@contextmanager
def passing(faults: str, *steps: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    clean = {name: value for name, value in os.environ.items() if name not in {"NOTIFY_SOCKET", "INVOCATION_ID"}}
    with subprocess.Popen(
        [sys.executable, "-c", PASS, *steps],
        env=clean | {"BATCHD_FAILPOINTS": faults} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def passed(faults: str, *steps: str, **environment: str) -> tuple[int, list[str], str]:
    """Pass the steps.

    Returns the exit status, the steps that were passed, and the error output.
    """
    with passing(faults, *steps, **environment) as process:
        said, complaint = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said.split(), complaint


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("segv", signal.SIGSEGV)])
def test_a_process_ends_at_the_named_step(action, number) -> None:
    """A signal ends it, so that nothing is cleaned up; other steps are passed."""
    assert passed(f"worker.b={action}", "worker.a", "worker.bb", "worker.b", "worker.c") == (
        -number,
        ["worker.a", "worker.bb"],
        "",
    )


def test_the_third_time_counts_each_step_by_itself() -> None:
    """The last fault can be the last step before the end, if the process survives it."""
    assert passed("a=kill@3;b=kill@2", "a", "b", "a", "c", "a", "b")[1] == ["a", "b", "a", "c"]


def test_a_fault_can_belong_to_one_sample() -> None:
    """Only a process that works on that sample is affected."""
    assert passed("read:7=kill", "read#6", "read#77", "read", "read#7", "read#8")[1] == ["read#6", "read#77", "read"]
    assert passed("read:7=kill@2", "read#7", "read#6", "read#7")[1] == ["read#7", "read#6"]
    assert passed("read=kill@2", "read#7", "read#6")[1] == ["read#7"]


def test_a_hanging_process_hangs_and_can_be_killed() -> None:
    """It uses no processor time, like a decoder that waits for ever."""
    with passing("b=hang", "a", "b", "c") as process:
        assert process.stdout.readline() == "a\n"
        wait_until(lambda: _is_asleep(process.pid), "the process hangs")
        assert is_alive(process.pid)
        process.kill()
        assert process.stdout.read() == ""


def _is_asleep(pid: int) -> bool:
    """Whether the process waits only for a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_a_stopped_process_resumes_on_continue() -> None:
    """It does not stop again at the same step."""
    with passing("b=stop", "a", "b", "b") as process:
        assert process.stdout.readline() == "a\n"
        wait_until(lambda: is_stopped(process.pid), "the process is stopped")
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=PATIENCE_S)[0] == "b\nb\n"
        assert process.returncode == 0


def test_with_a_ledger_each_fault_happens_once_in_all_processes(tmp_path) -> None:
    """The first process records its pid; the others pass."""
    ledger = {"BATCHD_FAILPOINTS_LEDGER": str(tmp_path)}
    faults = "a=kill;read:7=kill"
    with passing(faults, "a", **ledger) as first:
        assert first.wait(PATIENCE_S) == -signal.SIGKILL

    assert passed(faults, "a", "read#7", **ledger)[:2] == (-signal.SIGKILL, ["a"])
    assert passed(faults, "a", "read#7", **ledger)[:2] == (0, ["a", "read#7"])
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", "read:7"}
    assert (tmp_path / "a").read_text() == str(first.pid)


@pytest.mark.parametrize("faults", ["", ";", ";;a=kill@2;"])
def test_without_faults_nothing_happens(faults) -> None:
    """An empty variable equals a missing one."""
    assert passed(faults, "a", "b#1") == (0, ["a", "b#1"], "")


def test_invalid_faults_are_refused_at_the_start() -> None:
    """A test with a mistake in it must not pass because no fault happened.

    All mistakes are tried in one process.
    """
    slips = [
        "a",
        "a=",
        "a=die",
        "a=kill@x",
        "a=kill@-1",
        "a=kill@1.5",
        "a=kill@0",
        "a=kill@",
        "a:kill",
        "b=kill;a=Kill",
    ]
    program = (
        "import sys\nfrom batchd.runtime import failpoints\n"
        "for slip in sys.argv[1:]:\n"
        "    try:\n        failpoints._parse(slip)\n        print(slip, 'accepted')\n"
        "    except SystemExit as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *slips], capture_output=True, text=True, check=True)

    lines = done.stdout.splitlines()
    assert len(lines) == len(slips)
    assert all("is not NAME[:SAMPLE]=ACTION[@N] with one of kill, segv, stop, hang" in line for line in lines)
    status, said, complaint = passed("a=die", "a")
    assert (status, said) == (1, [])
    assert complaint.startswith("BATCHD_FAILPOINTS: 'a=die' is not NAME")


@pytest.mark.parametrize("variable", ["NOTIFY_SOCKET", "INVOCATION_ID"])
def test_a_service_refuses_faults(variable) -> None:
    """A service must not have faults; without them it starts."""
    status, said, complaint = passed("a=kill", "a", **{variable: "x"})

    assert (status, said) == (1, [])
    assert complaint == "BATCHD_FAILPOINTS is set, and this is a service: faults are for tests. Unset it in the unit\n"
    assert passed("", "a", **{variable: "x"}) == (0, ["a"], "")
