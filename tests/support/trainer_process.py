"""Start ``trainer_program`` and talk to it, so that a trainer can be killed and stopped.

For tests of processes.
"""

import json
import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from support.daemon_process import clean_environment
from support.kernel import is_stopped
from support.launcher import start_program
from support.seen import Seen
from support.waiting import PATIENCE_S, wait_until

PROGRAM = Path(__file__).with_name("trainer_program.py")
LINE_BYTES_MAX = 1 << 20


class TrainerFailed(Exception):  # noqa: N818  it is what the trainer reports
    """The trainer ended with an exception; the text starts with its class."""


class TrainerProcess:
    """One trainer of one stream.

    ``begin`` starts a long command and ``finish`` ends it.
    """

    def __init__(
        self,
        address: str | None,
        stream: str = "photos",
        *,
        connect: dict[str, Any] | None = None,
        through: Sequence[str] = (),
        **claim: Any,
    ):
        """Start it. ``through``: words before the command, which run it on another host."""
        options = {
            "connect": {"address": address, **(connect or {})},
            "stream": {"name": stream, "epochs": 1, **claim},
        }
        environment = {**clean_environment(), "PYTHONPATH": str(PROGRAM.parents[1])}
        self._process = start_program(
            ["support.trainer_program", json.dumps(options)],
            environment=environment,
            folder=Path.cwd(),
            has_input=True,
            through=through,
        )
        self._left = b""

    def ready(self) -> Self:
        """Wait until it has its stream."""
        self.finish()
        return self

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    # --- commands ---------------------------------------------------------------------------------

    def take(self, batches: int | None = None) -> list[Seen]:
        """Take and release so many batches, or all that are left of its epochs."""
        return self._do(do="take", batches=batches)[0]

    def hold(self, batches: int) -> list[Seen]:
        """Take so many batches and keep them."""
        return self._do(do="hold", batches=batches)[0]

    def look(self) -> list[Seen]:
        """Read its held batches once more."""
        return self._do(do="look")[0]

    def release(self) -> None:
        """Release its held batches."""
        self._do(do="release")

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""
        state: dict[str, Any] = self._do(do="state")[1]
        return state

    def statistics(self) -> dict[str, Any]:
        """Return its own statistics."""
        counted: dict[str, Any] = self._do(do="statistics")[1]
        return counted

    def fork(self) -> int:
        """Let it fork a child that does nothing, and return the child's process id."""
        child: int = self._do(do="fork")[1]
        return child

    def begin(self, **order: Any) -> None:
        """Send a command and do not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    def finish(self) -> tuple[list[Seen], Any]:
        """Wait for the end of a command, and return the batches read and its answer."""
        seen = []
        while "done" not in (told := self._hear()):
            seen.append(_seen(told))
        return seen, told["done"]

    def next_seen(self) -> Seen:
        """Wait for the next batch of a command in progress."""
        return _seen(self._hear())

    # --- signals ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Send SIGSTOP and wait until it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(self.pid), "the trainer is stopped")

    def go_on(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._close()

    def quit(self) -> None:
        """Close its input, and check that it ends with status 0."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(PATIENCE_S) == 0
        self._close()

    def close(self) -> None:
        """End it in any state."""
        if self._process.poll() is None:
            self._process.kill()
        self._close()

    def _close(self) -> None:
        self._process.wait(PATIENCE_S)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    # --- inside -----------------------------------------------------------------------------------

    def _do(self, **order: Any) -> tuple[list[Seen], Any]:
        self.begin(**order)
        return self.finish()

    def _hear(self) -> dict[str, Any]:
        """Read one line. Raises ``TrainerFailed`` where it reports an exception or its end."""
        assert self._process.stdout is not None
        give_up = time.monotonic() + PATIENCE_S
        while b"\n" not in self._left:
            readable, _, _ = select.select([self._process.stdout], [], [], give_up - time.monotonic())
            assert readable, "the trainer sent no line"
            part = os.read(self._process.stdout.fileno(), LINE_BYTES_MAX)
            if not part:
                raise TrainerFailed(f"it ended with status {self._process.wait(PATIENCE_S)}")
            self._left += part
        line, _, self._left = self._left.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise TrainerFailed(f"{told['error']}: {told['text']}")
        return told


def _seen(told: dict[str, Any]) -> Seen:
    epoch, step, samples, digest = told["seen"]
    return Seen(epoch, step, tuple(samples), digest)
