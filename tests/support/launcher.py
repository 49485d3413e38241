"""Programs of batchd as forks of a process that has imported them: imports are most of a start.

    test --- a message, and descriptors ---> launcher --- forks twice ---> program

The launcher has one thread and nothing of a test. A program gets the given environment, folder,
arguments and descriptors, and becomes a child of the test's process, as one that the test starts by
itself. Its children are started as always.

Invariant: a program runs and ends as ``python -m`` would have it.
"""

import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from runpy import run_module
from threading import Lock
from typing import IO, Any

from batchd.runtime.children import DEVNULL, PIPE, SERVICE_MANAGER, STDOUT, Child, ProcessHandle
from batchd.worker.process import THREAD_VARIABLES

PR_SET_CHILD_SUBREAPER = 36
"""From sys/prctl.h."""
MESSAGE_BYTES_MAX = 1 << 17
DESCRIPTORS_MAX = 16
PAUSE_S = 0.0005
TESTS = str(Path(__file__).parents[1])
IMPORTED = (
    *("batchd.cli.main", "batchd.cli.daemon", "batchd.cli.serve", "batchd.cli.worker", "batchd.cli.log_lines"),
    *("batchd.config.load", "batchd.daemon.serve", "batchd.runtime.child_log", "batchd.pool.gateway.loop"),
    "batchd.pool.worker_host.host",
    *("batchd.worker.fork_server", "batchd.worker.loop", "batchd.worker.process", "batchd.data.sources.files.reader"),
    *("batchd_client", "support.seen"),
)
FORKED = b"forked"

_ours: list["Launcher"] = []


class Program:
    """A launched program; it has what batchd and its tests use of a ``Popen``."""

    def __init__(self, pid: int, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, or minus the signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the same."""
        if self.returncode is None:
            handle = ProcessHandle(self.pid, os.pidfd_open(self.pid))
            handle.has_ended(timeout)
            handle.close()
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def start_program(
    words: Sequence[str],
    *,
    environment: dict[str, str],
    folder: Path,
    stderr: int = 2,
    has_input: bool = False,
    through: Sequence[str] = (),
    is_new: bool = False,
) -> "Program | subprocess.Popen[bytes]":
    """Run a module with its arguments; its output is piped.

    It is a new process instead of a fork if ``is_new``, ``through`` other words before its command,
    and where there is no launcher.
    """
    if _ours and not through and not is_new:
        return _ours[0].launch(words, environment, folder, stderr, has_input=has_input)
    return subprocess.Popen(
        [*through, "env", "--default-signal=HUP", sys.executable, "-m", *words],  # as under nohup
        stdin=PIPE if has_input else DEVNULL,
        stdout=PIPE,
        stderr=stderr,
        env=environment,
        cwd=folder,
        process_group=0,
        bufsize=0,
    )


class Launcher:
    """The test's handle on its launcher, which imports batchd while the test goes on."""

    def __init__(self) -> None:
        self._lock = Lock()  # a test may start programs in threads
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.launcher", str(theirs.fileno())],
                stdin=DEVNULL,
                stdout=DEVNULL,
                env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONPATH": TESTS},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        _ours.append(self)

    def launch(
        self, words: Sequence[str], environment: dict[str, str], folder: Path, stderr: int, *, has_input: bool
    ) -> Program:
        """See ``start_program``."""
        stdin, ours = os.pipe() if has_input else (os.open(os.devnull, os.O_RDONLY), None)
        output, stdout = os.pipe()
        try:
            pid = self._fork(words, environment, folder, {0: stdin, 1: stdout, 2: stderr})
        finally:
            os.close(stdin)
            os.close(stdout)
        return Program(pid, None if ours is None else os.fdopen(ours, "wb", 0), os.fdopen(output, "rb"))

    def start(self, module: str, *arguments: str, **how: Any) -> Child:
        """Run a module of batchd as a child of the test. Replaces ``children.start``."""
        environment = {**os.environ, **SERVICE_MANAGER, **how.get("environment", {})}
        output, writing = os.pipe()
        with ExitStack() as stack:
            stack.callback(os.close, writing)
            nothing = stack.enter_context(open(os.devnull, "r+b", 0)).fileno()  # noqa: PTH123  a descriptor
            given = stack.enter_context(os.fdopen(os.memfd_create("given"), "w+b", 0))
            given.write(how.get("given", b""))
            given.seek(0)
            ends = {None: 1, PIPE: writing, DEVNULL: nothing}
            stdout = ends.get(how.get("stdout"), how.get("stdout"))
            stderr = {**ends, None: 2, STDOUT: stdout}.get(how.get("stderr"), how.get("stderr"))
            descriptors = {0: given.fileno(), 1: stdout, 2: stderr} | {one: one for one in how.get("descriptors", ())}
            kept = {name: value for name, value in environment.items() if value is not None}
            pid = self._fork([module, *arguments], kept, Path.cwd(), descriptors)
        return Child(Program(pid, None, os.fdopen(output, "rb")))  # type: ignore[arg-type]

    def _fork(
        self, words: Sequence[str], environment: dict[str, str], folder: Path, descriptors: dict[int, int]
    ) -> int:
        message = json.dumps([words, environment, str(folder), list(descriptors)]).encode()
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # the program's parent ends: this process is the next
            try:
                socket.send_fds(self._channel, [message], list(descriptors.values()))
                pid = int(self._channel.recv(MESSAGE_BYTES_MAX))
                assert self._channel.recv(MESSAGE_BYTES_MAX) == FORKED
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)
        return pid

    def close(self) -> None:
        """End it."""
        _ours.remove(self)
        self._channel.close()
        self._process.wait()


# --- in the launcher ------------------------------------------------------------------------------


def main() -> None:
    """Fork until the test's process is gone; in each fork, run the program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    from batchd.cli.daemon import imports_for_a_daemon  # noqa: PLC0415  in the launcher only

    with imports_for_a_daemon():
        for module in IMPORTED:
            import_module(module)
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _flags, _address = socket.recv_fds(channel, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
        if not message:
            return
        if (between := os.fork()) == 0:
            parent = os.getpid()
            if (pid := os.fork()) == 0:
                channel.close()
                while os.getppid() == parent:  # its end is that of a program that dies with it
                    time.sleep(PAUSE_S)
                _become(*json.loads(message), descriptors)
                return
            channel.send(str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        channel.send(FORKED)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(
    words: list[str], environment: dict[str, str], folder: str, numbers: list[int], descriptors: list[int]
) -> None:
    """Run a program as if this process had been started for it."""
    from batchd.runtime import failpoints  # noqa: PLC0415  in the launcher only

    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored in tests under nohup
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in zip(numbers, above, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [folder, *paths, *(path for path in sys.path[1:] if path != TESTS)]
    failpoints.arm()
    sys.argv[1:] = words[1:]
    run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
