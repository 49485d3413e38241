"""A process that cleans up after a killed test run. Standard library only.

    pytest, or one of its lanes --- pidfd ---> keeper       readable: the run has ended
                                --- a pipe --> keeper       commands that remove leftovers

The keeper then kills every process with the run's mark in its environment, and runs the remaining
commands, the last one first. A test removes its command from the list when it cleans up itself.
The keeper has its own session and no mark, so a kill of the run does not kill the keeper.

Invariant: processes, mounts and kernel objects of a test are removed soon after the test's
process, also after SIGKILL.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from pathlib import Path

from support.kernel import RUN_VARIABLE, carriers

QUIET_LOOKS = 3
"""A process between fork and exec still has its parent's environment, so look twice."""
PAUSE_S = 0.05
LOOKS_MAX = 600
COMMAND_TIMEOUT_S = 20.0
PART_BYTES = 1 << 16


class Keeper:
    """The test process's handle on its keeper."""

    def __init__(self, mark: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
        us = os.pidfd_open(os.getpid())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-m", "support.keeper", f"{RUN_VARIABLE}={mark}", str(us)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, "PYTHONPATH": str(Path(__file__).parents[1])},
                cwd="/",
                pass_fds=(us,),
                start_new_session=True,
            )
        finally:
            os.close(us)
        self._numbers = count()

    @contextmanager
    def sees_to(self, *command: str) -> Iterator[None]:
        """Run ``command`` if this process is killed during the context.

        The command removes something that is made in the context.
        """
        number = next(self._numbers)
        self._tell({"number": number, "command": command})
        try:
            yield
        finally:
            self._tell({"number": number})

    def _tell(self, what: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()


_ours: list[Keeper] = []


def keep(mark: str) -> None:
    """Start a keeper for the processes that are started with ``mark``.

    Call it once in each process of pytest.
    """
    _ours.append(Keeper(mark))


def cleared_by(*command: str) -> AbstractContextManager[None]:
    """Run ``command`` if this process is killed before it leaves the context."""
    return _ours[0].sees_to(*command)


# --- in the keeper --------------------------------------------------------------------------------


def main() -> None:
    """Wait for the end of the process with the given pidfd, and clean up."""
    mark, owner = sys.argv[1], int(sys.argv[2])
    commands = _commands_at_the_end(owner)
    _kill(mark)
    for command in reversed(commands):
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, check=False, capture_output=True, timeout=COMMAND_TIMEOUT_S)


def _commands_at_the_end(owner: int) -> list[list[str]]:
    """Listen until ``owner`` has ended, and return the commands that it has not removed."""
    text = b""
    poller = select.poll()
    poller.register(owner, select.POLLIN)
    poller.register(0, select.POLLIN)
    ended = False
    while not ended:
        ready = dict(poller.poll())
        ended = owner in ready
        if 0 in ready or ended:
            text += _all_there_is()
        if ready.get(0, 0) & select.POLLHUP:
            poller.unregister(0)
    commands: dict[int, list[str]] = {}
    for line in text.splitlines():
        with suppress(ValueError):  # the last one was truncated
            told = json.loads(line)
            commands.pop(told["number"], None)
            if "command" in told:
                commands[told["number"]] = told["command"]
    return list(commands.values())


def _all_there_is() -> bytes:
    """Read the present content of the pipe; a child of the owner may hold it open."""
    os.set_blocking(0, False)
    text = b""
    with suppress(BlockingIOError):
        while part := os.read(0, PART_BYTES):
            text += part
    return text


def _kill(mark: str) -> None:
    """Kill all processes with ``mark``, and those that they start meanwhile."""
    quiet = 0
    for _ in range(LOOKS_MAX):
        found = carriers(mark)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        if quiet == QUIET_LOOKS:
            return
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
