"""Typical users' programs as processes that print lines of JSON.

For the tests of ``tests/with_*``.

A test starts a function of a module here, and reads its output and how it ended; the program's
part of that is below.

The duration of an exit is no fair measure on a busy machine. So the time from a program's last
line to its end is reduced by the time that its main thread ran or waited for a CPU, as the kernel
counts them, and by the time that the test waited for a CPU before it could see the end: during the
rest the program *stood still*, waiting for something. Not for a disk: its libraries, some of which
only its exit uses, are read before its last line.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.daemon_process import DaemonProcess, clean_environment
from support.waiting import PATIENCE_S, wait_until

TESTS = Path(__file__).parents[1]
EXIT_S = 1.0
"""The limit: a program that ends with everything open stands still for less."""
NS_PER_S = 1e9
READ_BYTES = 1 << 20


def start(module: str, program: str, daemon: DaemonProcess, *arguments: object) -> "subprocess.Popen[str]":
    """Start a function of ``support.module`` with a daemon's address."""
    command = [sys.executable, "-m", f"support.{module}", program, daemon.address, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
    )


@contextmanager
def examples(folder: Path, **environment: str) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start programs of users in ``folder``; at the end, those of a failed test are killed."""
    started: list[subprocess.Popen[str]] = []

    def start_example(*command: object, **more: str) -> "subprocess.Popen[str]":
        started.append(
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**clean_environment(), **environment, **more},
                process_group=0,
                text=True,
            )
        )
        return started[-1]

    yield start_example
    for process in started:
        process.kill()
        process.communicate()


def finish(example: "subprocess.Popen[str]") -> str:
    """Return the output of an example that exited cleanly."""
    said, complained = example.communicate(timeout=PATIENCE_S)
    assert example.returncode == 0, said + complained
    return said


def end(program: "subprocess.Popen[str]", still_max_s: float = EXIT_S) -> tuple[list[dict[str, Any]], int, str]:
    """Return a program's output (less than a pipe holds), its status and its errors.

    After its last line it stands still for less than the limit.
    """
    ended = os.WEXITED | os.WNOWAIT | os.WNOHANG  # it stays, so that its run time can be read
    unseen_s = -_cpu_wait_s(os.getpid())
    wait_until(lambda: os.waitid(os.P_PID, program.pid, ended), "the program has ended")
    now_s, busy_s = time.monotonic(), _busy_s(program.pid)
    unseen_s += _cpu_wait_s(os.getpid())
    output, errors = program.communicate(timeout=PATIENCE_S)
    # Libraries write lines, too.
    said = [json.loads(line[line.index("{") :]) for line in output.splitlines() if "{" in line]
    if said and "last_s" in said[-1]:
        exit_s = now_s - said[-1].pop("last_s")
        still_s = exit_s - (busy_s - said[-1].pop("busy_s")) - unseen_s
        sys.stdout.write(f"the exit took {exit_s:.2f} s, and it stood still for {still_s:.2f} s of that\n")
        assert still_s < still_max_s
    return said, program.returncode, errors


def gone(daemon: DaemonProcess) -> bool:
    """Wait until the daemon has no trainer left."""
    return wait_until(lambda: not daemon.stream_status()["subscriptions"], "no trainer is left")


# --- in the program -------------------------------------------------------------------------------


def say(**what: Any) -> None:
    """Print one line for the test in one piece: ranks share their output."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def say_last(**what: Any) -> None:
    """Print one line, and end the program."""
    _read_libraries()
    say(**what, last_s=time.monotonic(), busy_s=_busy_s(os.getpid()))


def epochs_in_threads(threads: int, load: Callable[[], Any]) -> list[list[int]]:
    """Return the rest of the epoch, as each thread reads it with its own loader."""

    def read(_number: int) -> list[int]:
        with load() as loader:
            return [index for batch in loader for index in batch["index"].tolist()]

    with ThreadPoolExecutor(threads) as readers:
        return list(readers.map(read, range(threads)))


def _read_libraries() -> None:
    """Read all files that are mapped here: a page that is in memory costs an exit no wait."""
    words = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    for path in {Path(mapped[5]) for mapped in words if len(mapped) > 5}:
        if path.is_file():
            with path.open("rb", buffering=0) as library:
                while library.read(READ_BYTES):
                    pass


def _busy_s(process: int) -> float:
    """Return how long a main thread has run, and waited for a CPU to run on."""
    ran_ns, _waited_ns, _ = Path(f"/proc/{process}/schedstat").read_text().split()
    return int(ran_ns) / NS_PER_S + _cpu_wait_s(process)


def _cpu_wait_s(process: int) -> float:
    """Return how long a main thread has waited for a CPU to run on."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / NS_PER_S
