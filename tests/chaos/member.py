"""One trainer of a chaos run, seen from the run: a process, its lines, and its faults."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos.jobs import Job
from support.daemon_process import clean_environment

TESTS = Path(__file__).parents[1]
PART_BYTES = 1 << 16
PAUSE_MAX_S = 0.12
"""A trainer computes for half of it on average: the processors are mostly for the faults."""


class Member:
    """Rank ``rank`` of a job. ``number`` is unique. ``table``: of the stream, if it defines it."""

    def __init__(
        self,
        number: int,
        job: Job,
        rank: int,
        connect: Mapping[str, Any],
        table: Mapping[str, Any] | None,
        *,
        batches: int | None,
    ) -> None:
        self.number, self.job, self.rank, self.batches = number, job, rank, batches
        self.is_remote = "key" in connect
        self.is_killed = self.is_ready = self.is_leaving = False
        self.again = 0
        self.last_at = 0.0
        self.left: list[str] | None = None
        self.error: tuple[str, str] | None = None
        options = {
            "connect": {**connect, "connect_timeout_s": 60.0},
            "stream": {
                "name": job.stream,
                "rank": rank,
                "world_size": job.world_size,
                "state": job.state_of(rank),
                "window": None,
            },
            "table": table,
            "seed": number,
            "batches": batches,
            "pause_max_s": PAUSE_MAX_S,
        }
        self._text = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.trainer", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**clean_environment(), "PYTHONPATH": str(TESTS)},
            bufsize=0,
        )
        self.pid = self._process.pid

    @property
    def output(self) -> int:
        """Return the descriptor of its lines."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def lines(self) -> tuple[list[dict[str, Any]], bool]:
        """Return its lines since the last call, and whether that was the end.

        Call it when the descriptor is readable.
        """
        part = os.read(self.output, PART_BYTES)
        *lines, self._text = (self._text + part).split(b"\n")
        return [json.loads(line) for line in lines], not part

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def leave(self) -> None:
        """Ask it to end after its current batch."""
        self.is_leaving = True
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its status, and the last lines of its standard error."""
        status = self._process.wait()
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        assert pipes[2] is not None
        said = pipes[2].read().decode(errors="replace")
        for pipe in pipes:
            assert pipe is not None
            pipe.close()
        return status, said
