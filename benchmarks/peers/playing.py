"""A side as a child process: started for one round, told to measure, ended with its descendants."""

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import common
from environments import ROOT, command
from foreign import Foreign, Window, quiet
from sides import Side
from tables import Measurement

FIRST_BATCH_TIMEOUT_S = 120
ROUND_TIMEOUT_S = 60
END_S = 3.0
HERE = Path(__file__).parent


class SideFailed(Exception):  # noqa: N818  it says what happened
    """A side ended, or said nothing in time; its log has what it said."""


class Stage(NamedTuple):
    """Shared by all rounds: a folder for temporary files of the sides, times, images in a batch.

    ``patience``: how many times as long as usual a side may take.
    """

    scratch: Path
    warm_up_s: float
    seconds: float
    batch: int = 256
    patience: int = 1


def measure(side: Side, data: Path, log: Path, stage: Stage) -> Measurement:
    """One round of a side, repeated if others use the CPUs meanwhile. Raises ``SideFailed``."""
    return quiet(side.name, lambda: _measure_once(side, data, log, stage)).found


def _measure_once(side: Side, data: Path, log: Path, stage: Stage) -> Window[Measurement]:
    """A round, with what others used in it."""
    options = ["--data", str(data), "--variant", side.variant, "--trainers", str(side.trainers)]
    words = [*command(side.environment), str(HERE / side.script), *options, "--batch", str(stage.batch)]
    path = f"{ROOT}:{ROOT / 'client'}" if side.variant in {"region", "mixed"} else ""
    environment = dict(os.environ, TMPDIR=str(stage.scratch), PYTHONPATH=path)
    with (
        log.open("ab") as said,
        subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
        ) as process,
    ):
        try:
            first = _hear(process, FIRST_BATCH_TIMEOUT_S * stage.patience)
            foreign = Foreign(process.pid)
            _tell(process, f"{stage.warm_up_s} {stage.seconds}\n")
            heard = _hear(process, ROUND_TIMEOUT_S * stage.patience)
            beside = foreign.beside()
        finally:
            _end(process)
    return Window(Measurement(**heard, **first), beside)


def _tell(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode())
    process.stdin.flush()


def _hear(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout_s)
    line = process.stdout.readline() if readable else b""
    if not line:
        raise SideFailed("it ended" if readable else f"it said nothing for {timeout_s} s")
    return json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close its standard input, and kill whatever is left of it after a while."""
    assert process.stdin is not None
    family = {pid: common.started(pid) for pid in common.tree(process.pid)}
    process.stdin.close()
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline and any(common.started(pid) == when for pid, when in family.items()):
        process.poll()
        time.sleep(0.05)
    for pid, when in family.items():
        if when and common.started(pid) == when:
            _kill(pid)
        for left in Path("/dev/shm").glob(f"torch_{pid}_*"):  # PyTorch gives it a name for a moment
            left.unlink(missing_ok=True)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it ended by itself meanwhile
        os.kill(pid, signal.SIGKILL)
