"""The actor that keeps one worker host alive. Runs in a worker process of Ray; imports no Ray.

    Ray's worker process                                      a child
      main thread: report, leave                                batchd worker ADDRESS ...
      thread: start it, pass on what it prints, start it again --->

The child is a separate program, so its workers are forked where no thread of Ray runs. The child
first runs this module as a script: it asks the kernel for SIGTERM at the end of the actor's
process, then executes `batchd worker`, which finishes its work after that signal.

Invariant: the worker host ends with the actor's process, however that ends; Ray restarts both.
Invariant: the key is in no command line, no file and no log: the child reads it from a memfd.
"""

import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, TypedDict

from batchd.runtime import __version__, children
from batchd.runtime.children import PIPE, STDOUT, Child, describe, die_with_parent

PAUSE_S = (1.0, 30.0)
"""Pause before a restart: at first, and at most, after several short lives."""
SHORT_LIFE_S = 60.0
LEAVE_S = 15.0
"""`batchd worker` ends within 10 s after the signal; after this time it is killed."""
READ_BYTES = 64 << 10
LINE_BYTES_MAX = 4_000
KEY_INPUT = "/proc/self/fd/0"
"""The child's standard input, a memfd with the key; batchd reads no other input."""
RAY_PREFIX = "RAY_"
"""Prefix of Ray's variables. Some are secret, and `batchd worker` runs users' functions."""
THREAD_NAME = "batchd worker host"


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """The options with which each worker host of a pool is started.

    ``key``: the text of a connection file. ``key_path``: the path of one on the nodes instead.
    ``program``: the command to run instead of `batchd worker`.
    """

    address: str
    workers: int
    key: str | None = field(default=None, repr=False)
    key_path: str | None = None
    arguments: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    version: str = __version__


class ActorReport(TypedDict):
    """The state of one worker host: a plain map, since driver and actor may differ in version.

    ``options``: the fields of its ``ActorOptions``. ``actor`` and ``pid``: the processes; ``pid``
    is None while the child does not run. ``starts``: since the actor's own start. ``last_line``:
    the last line that it printed; ``ended``: how it ended last, for people.
    """

    options: dict[str, Any]
    node: str
    actor: int
    pid: int | None
    starts: int
    last_line: str
    ended: str


class HostActor:
    """An actor of Ray: one child, restarted whenever it ends."""

    def __init__(self, options: ActorOptions) -> None:
        self._options = options
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._starts = 0
        self._last_line = self._ended = ""
        self._leaves = threading.Event()
        # The kernel sends the child its signal when the thread that started it ends, so this
        # thread lives as long as the process.
        self._thread = threading.Thread(target=self._keep, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def report(self) -> ActorReport:
        """Return the state of the worker host."""
        child = self._child
        pid = None if child is None else child.pid
        return {
            "options": asdict(self._options),
            "node": socket.gethostname(),
            "actor": os.getpid(),
            "pid": pid,
            "starts": self._starts,
            "last_line": self._last_line,
            "ended": self._ended,
        }

    def leave(self) -> None:
        """Have the worker host finish its work and end; do not restart it."""
        self._leaves.set()
        self._signal(signal.SIGTERM)
        self._thread.join(LEAVE_S)
        self._signal(signal.SIGKILL)
        self._thread.join()

    def _signal(self, number: signal.Signals) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._child is not None:
                signal.pidfd_send_signal(self._child.pidfd, number)

    def _keep(self) -> None:
        """Start and restart the child until ``leave``."""
        pause_s = PAUSE_S[0]
        while not self._leaves.is_set():
            began_s = monotonic()
            try:
                self._run()
            except OSError as error:
                self._ended = f"not started: {error.strerror}"
            pause_s = min(2 * pause_s, PAUSE_S[1]) if monotonic() - began_s < SHORT_LIFE_S else PAUSE_S[0]
            self._leaves.wait(pause_s)

    def _run(self) -> None:
        """Start the child, and read its output until it ends. Raises ``OSError``."""
        options = self._options
        key_path = KEY_INPUT if options.key_path is None else options.key_path
        with children.start(
            __name__,
            str(os.getpid()),
            *(options.program or (sys.executable, "-P", "-m", "batchd", "worker")),
            *(options.address, "--key", key_path, "--workers", str(options.workers), *options.arguments),
            given=(options.key or "").encode(),
            environment={name: None for name in os.environ if name.startswith(RAY_PREFIX)},
            stdout=PIPE,
            stderr=STDOUT,
        ) as child:
            self._starts += 1
            with self._lock:
                self._child = child
            try:
                if self._leaves.is_set():  # ``leave`` came before the child could get the signal
                    self._signal(signal.SIGTERM)
                self._pass_on(child)
            finally:
                with self._lock:
                    self._child = None
            self._ended = describe(child.reap())

    def _pass_on(self, child: Child) -> None:
        """Write each line of the child to the actor's log until the child ends."""
        output, rest = child.output.fileno(), b""
        os.set_blocking(output, False)  # its own children may hold the pipe open for longer
        poll = select.poll()
        poll.register(child.pidfd, select.POLLIN)
        poll.register(output, select.POLLIN)
        has_ended = False
        while not has_ended:
            ready = dict(poll.poll())
            has_ended = child.pidfd in ready
            with suppress(BlockingIOError):
                part = os.read(output, READ_BYTES)
                if not part and output in ready:
                    poll.unregister(output)
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    self._print(line)
                rest = rest[-LINE_BYTES_MAX:]
        self._print(rest)

    def _print(self, line: bytes) -> None:
        text = line[:LINE_BYTES_MAX].decode(errors="replace").strip()
        if text:
            self._last_line = text
            with suppress(OSError):  # the disk of Ray's logs is full
                sys.stderr.write(text + "\n")
                sys.stderr.flush()


def become(actor: int, command: list[str]) -> None:
    """In the child: end with the process ``actor``, protect the key's file, and run ``command``."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != actor:  # it had ended before
        sys.exit(1)
    os.fchmod(sys.stdin.fileno(), 0o600)
    os.execvp(command[0], command)  # noqa: S606  the actor made it


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
