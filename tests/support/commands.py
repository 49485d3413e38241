"""Runs ``batchd`` commands like a user. For tests of processes."""

import io
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from batchd.cli.main import main
from support.daemon_process import clean_environment
from support.waiting import PATIENCE_S

PROCESSES = {"serve", "doctor", "top"}
"""Commands that serve, inspect their own process, or need a terminal."""


class FakeTerminal(io.TextIOWrapper):
    """Keeps what is written, as a terminal that says so."""

    def isatty(self) -> bool:
        return True


def batchd(
    *arguments: str | Path, address: str | None = None, folder: Path | None = None, status: int = 0
) -> "subprocess.CompletedProcess[str]":
    """Run ``batchd`` with these arguments, expect an exit status, and return the output.

    Most commands run in this process: the imports of a separate one take longer than its work.
    """
    words = [*map(str, arguments)]
    environment = clean_environment() | ({"BATCHD_ADDRESS": address} if address else {})
    run = in_a_process if PROCESSES.intersection(words) else _in_this_process
    done = run(words, environment, folder or Path("/"))
    assert done.returncode == status, f"batchd {arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def in_a_process(words: list[str], environment: dict[str, str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run ``batchd`` as a process of its own, whatever its exit status."""
    return subprocess.run(
        [sys.executable, "-m", "batchd", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
        cwd=folder,
        check=False,
    )


def in_a_terminal(
    words: list[str], columns: int, environment: dict[str, str], folder: Path, encoding: str = "utf-8"
) -> "subprocess.CompletedProcess[str]":
    """Run ``batchd`` in this process, in a terminal of so many columns without colours."""
    seen = {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    return _in_this_process(words, environment | seen, folder, FakeTerminal, encoding)


def _in_this_process(
    words: list[str],
    environment: dict[str, str],
    folder: Path,
    kind: type[io.TextIOWrapper] = io.TextIOWrapper,
    encoding: str = "utf-8",
) -> "subprocess.CompletedProcess[str]":
    output, errors = (kind(io.BytesIO(), encoding, write_through=True) for _ in range(2))
    status, at_sigterm = 0, signal.getsignal(signal.SIGTERM)
    with (
        patch.dict("os.environ", environment, clear=True),
        # so messages call the program batchd, however pytest began
        patch.object(sys, "argv", ["pytest", *words]),
        chdir(folder),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        try:
            main(words)
        except SystemExit as end:
            status = end.code
        finally:
            signal.signal(signal.SIGTERM, at_sigterm)
    said = (stream.detach().getvalue().decode(encoding) for stream in (output, errors))
    return subprocess.CompletedProcess(words, status, *said)


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run like the console script; return the exit code and the text of standard error."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    assert captured.out == ""
    return int(caught.value.code or 0), captured.err
