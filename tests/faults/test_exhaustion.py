"""``make exhaust``, a small part of it: what the kernel refuses ends nobody."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "exhaust" / "exhaust.py"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed (apt install strace)")
@pytest.mark.parametrize("error", ["EMFILE", "ENOBUFS", "ENOMEM"])
def test_no_failing_accept_ends_the_daemon(error):
    """Of any of its sockets and processes; libzmq's listener for ipc would abort."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--roles", "server", "--calls", "accept4", "--errors", error],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "all: served" in ended.stdout
