"""Runs ``batchd`` commands as a person would. For tests of processes."""

import subprocess
import sys
from pathlib import Path

from support.daemon_process import clean_environment
from support.waiting import PATIENCE_S


def batchd(
    *arguments: str | Path, address: str | None = None, folder: Path | None = None, status: int = 0
) -> "subprocess.CompletedProcess[str]":
    """Run ``batchd`` with these arguments, expect an exit status, and give what it wrote."""
    environment = clean_environment() | ({"BATCHD_ADDRESS": address} if address else {})
    done = subprocess.run(
        [sys.executable, "-m", "batchd", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
        cwd=folder or "/",
        check=False,
    )
    assert done.returncode == status, f"batchd {arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr
    return done
