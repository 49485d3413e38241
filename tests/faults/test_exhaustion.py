"""A small part of ``make exhaust``: no call that the kernel refuses ends a process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exhaust.exhaust import BAD, judge

SCRIPT = Path(__file__).parents[1] / "exhaust" / "exhaust.py"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed (apt install strace)")
@pytest.mark.parametrize("error", ["EMFILE", "ENOBUFS", "ENOMEM"])
def test_no_failing_accept_ends_the_daemon(error):
    """No socket or process is an exception; libzmq's own ipc listener would abort."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--roles", "server", "--calls", "accept4", "--errors", error],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "all: served" in ended.stdout


@pytest.mark.parametrize(("is_over_early", "outcome"), [(True, "ended"), (False, "refused")])
def test_a_daemon_that_ends_while_it_serves_is_counted_as_bad(is_over_early, outcome):
    """Any message counts then; a daemon may print one at a failed start or a requested end."""
    run = judge(1, "batchd: No space left on device", has_begun=True, is_over_early=is_over_early)

    assert run.outcome == outcome
    assert (outcome in BAD) == is_over_early
