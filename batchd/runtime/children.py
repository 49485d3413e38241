"""Child processes: start, watch, end and reap them. Every process that starts another one.

Standard library only.

    start --> Child --> pidfd is readable: the process has ended --> reap: its exit status
                |              ^
                +--- kill -----+          end: wait a while, kill, reap

A child has its standard streams and the descriptors that are passed by name. It leads a process
group of its own, so Ctrl-C in a terminal reaches its parent only.

Invariant: a process counts as ended when its pidfd is readable, never because some time has passed.
Invariant: where ``start`` raises, there is no process.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from io import TextIOWrapper
from time import monotonic
from typing import IO, NamedTuple, Self, TypedDict, Unpack

DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
STANDARD_STREAMS = range(3)
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""
KEPT_ARRAY_BYTES = 32 << 20
"""From sys/prctl.h."""
READ_BYTES = 64 << 10
"""Size of a pipe's buffer: one read empties it."""
PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 60.0
"""Before a child that has ended is started again; twice as long each time."""
STAT_BYTES_MAX = 4096
TEXTS, EXIT_CODE = slice(45, 49), 49
"""Indices of the fields 48 to 51 (where its arguments and its environment begin and end) and 52
among those behind the name in a process's ``stat``: proc_pid_stat(5)."""
SERVICE_MANAGER = dict.fromkeys(("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
"""Variables of the service manager, which no child gets: only the daemon itself reports to it."""


class StartOptions(TypedDict, total=False):
    """Options of ``start``."""

    descriptors: Sequence[int]
    """Passed under their own numbers, which the arguments name."""
    environment: Mapping[str, str | None]
    """Changes of this process's environment; None removes a variable."""
    given: bytes
    """The child's standard input; without it, the input is empty."""
    stdout: int
    """A descriptor, or ``PIPE`` for ``Child.output``; without it, this process's."""
    stderr: int
    nicer_by: int
    """Added to this process's niceness, where a sandbox does not refuse that."""
    own_session: bool
    """Start a session instead of a process group."""


class ProcessHandle:
    """A process, known by its pidfd: its number may mean another process later. Owns ``pidfd``."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd

    def has_ended(self, within_s: float | None = 0.0) -> bool:
        """Return whether it has ended or ends within so many seconds. None waits for its end."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(None if within_s is None else max(0.0, within_s * 1000)))

    def kill(self) -> None:
        """Have the kernel end it, if it has not ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptors; a second call does nothing."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Child(ProcessHandle):
    """A process that this one has started. The end of its context kills and reaps it."""

    def __init__(self, popen: "subprocess.Popen[bytes] | _Fork") -> None:
        """Raises ``OSError`` where there is no descriptor; the process stays the caller's."""
        super().__init__(popen.pid, os.pidfd_open(popen.pid))
        self._popen = popen

    @property
    def output(self) -> IO[bytes]:
        """Its output, if it was started with ``stdout=PIPE``."""
        assert self._popen.stdout is not None
        return self._popen.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def read(self, within_s: float, bytes_max: int) -> bytes:
        """The last ``bytes_max`` of its output, read until it ends or ``within_s`` have passed.

        ``has_ended`` tells which. Processes that it has started may hold the pipe open for longer.
        """
        deadline = monotonic() + within_s
        output, said, is_over = self.output.fileno(), b"", False
        os.set_blocking(output, False)
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        poll.register(output, select.POLLIN)
        while not is_over:
            ready = [number for number, _event in poll.poll(max(0.0, (deadline - monotonic()) * 1000))]
            with suppress(BlockingIOError):
                part = os.read(output, READ_BYTES)
                said = (said + part)[-bytes_max:]
                if not part and output in ready:
                    poll.unregister(output)
            is_over = not ready or self.pidfd in ready
        return said

    def kill(self) -> None:
        """Have the kernel end it and its process group."""
        super().kill()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # until it is reaped, no other group has its number

    def reap(self) -> int:
        """Wait until it has ended. Its exit status, or minus the signal; see ``describe``."""
        status = self._popen.wait()
        self.close()
        return status

    def end(self, patience_s: float = 0.0, kill_timeout_s: float | None = None) -> int | None:
        """Wait ``patience_s`` for its end, kill it, and reap it; its status, as ``reap`` gives it.

        None if the kernel keeps it alive for ``kill_timeout_s``. A second call does nothing.
        """
        if self.pidfd < 0:
            return self._popen.returncode
        try:
            self.has_ended(patience_s)
        finally:  # also where the wait is interrupted
            self.kill()
        if self.has_ended(kill_timeout_s):
            return self.reap()
        self.close()
        return None

    def close(self) -> None:
        """Let go of it without waiting for its end."""
        super().close()
        if self._popen.stdout is not None:
            self._popen.stdout.close()


class _Fork:
    """What ``Child`` uses of a ``Popen``, for a fork of this process."""

    stdout = None
    returncode: int | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """End it. The caller has not reaped it, so its number is still its own."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Reap it; its exit status, or minus the signal."""
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class Linked(NamedTuple):
    """A child, and our end of its channel: end of file tells each side that the other is gone."""

    child: Child
    channel: socket.socket


class Grandchild(ProcessHandle):
    """A child of a child. Until its parent reaps it, this process can read how it ended."""

    def __init__(self, pid: int, pidfd: int) -> None:
        super().__init__(pid, pidfd)
        self._stat = -1
        with suppress(OSError):  # opened now, as there may be no descriptor left later
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def status(self) -> int | None:
        """The exit status of one that has ended, or minus the signal; None if it is unknown.

        Without its parent it is a child of the init process, which may be this process.
        """
        with suppress(ChildProcessError):
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            if ended is not None:
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if self._stat < 0:
            return None
        try:
            facts = os.pread(self._stat, STAT_BYTES_MAX, 0).rpartition(b")")[2].split()
        except ProcessLookupError:
            return None
        return os.waitstatus_to_exitcode(int(facts[EXIT_CODE]))

    def close(self) -> None:
        """See ``ProcessHandle``."""
        super().close()
        if self._stat >= 0:
            os.close(self._stat)
            self._stat = -1


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module. ``-P``: nothing of the working directory is imported."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start(module: str, *arguments: str, **options: Unpack[StartOptions]) -> Child:
    """Run a module as a child. Raises ``OSError``, and then there is none."""
    return start_program(command(module, *arguments), **options)


def start_program(words: Sequence[str], **options: Unpack[StartOptions]) -> Child:
    """Run a program as a child, as ``start`` does a module."""
    own_session = options.get("own_session", False)
    environment = {**os.environ, **SERVICE_MANAGER, **options.get("environment", {})}
    with ExitStack() as until_started, ExitStack() as where_it_fails:
        stdin: int | IO[bytes] = subprocess.DEVNULL
        if "given" in options:  # in memory: this process does not wait for the child to read it
            stdin = until_started.enter_context(os.fdopen(os.memfd_create("batchd-given", os.MFD_CLOEXEC), "w+b"))
            stdin.write(options["given"])
            stdin.seek(0)
        popen = subprocess.Popen(
            words,
            pass_fds=options.get("descriptors", ()),
            stdin=stdin,
            stdout=options.get("stdout"),
            stderr=options.get("stderr", _output[1] if _output else None),
            env={name: value for name, value in environment.items() if value is not None},
            process_group=None if own_session else 0,
            start_new_session=own_session,
        )
        where_it_fails.enter_context(popen)
        where_it_fails.callback(popen.kill)
        child = Child(popen)
        where_it_fails.callback(child.close)
        if "nicer_by" in options:
            with suppress(PermissionError):  # a sandbox may refuse it; it is a courtesy
                os.setpriority(os.PRIO_PROCESS, popen.pid, os.getpriority(os.PRIO_PROCESS, 0) + options["nicer_by"])
        where_it_fails.pop_all()
    return child


_output: tuple[int, int] | None = None


def collect_output() -> int:
    """Have the children from now on write to a socket instead of standard error. Returns its end.

    The kernel names the writer of each part (SO_PASSCRED). The caller has to read it: children wait
    for ever at a full socket. Paired with ``stop_collecting``. Raises ``OSError``.
    """
    global _output  # noqa: PLW0603  it is where standard error is, which the whole process has
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    _output = ours.detach(), theirs.detach()
    return _output[0]


def stop_collecting() -> None:
    """Close both ends here; a reader has an end of its own, and reads until no writer is left."""
    global _output  # noqa: PLW0603  as above
    for descriptor in _output or ():
        os.close(descriptor)
    _output = None


def start_linked(module: str, *arguments: str, **options: Unpack[StartOptions]) -> Linked:
    """Run a module as a child whose last argument names its channel. Raises ``OSError``."""
    with ExitStack() as where_it_fails:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        where_it_fails.enter_context(ours)
        with theirs:
            options["descriptors"] = (*options.get("descriptors", ()), theirs.fileno())
            child = where_it_fails.enter_context(start(module, *arguments, str(theirs.fileno()), **options))
        where_it_fails.pop_all()
    return Linked(child, ours)


def fork_linked(module: str) -> Linked | socket.socket:
    """Fork this process, which has one thread. Returns the child; in the child, its channel.

    The child begins as if ``start_linked`` had run ``module``, but with all that is imported here:
    it has no input, no descriptor that this process was started with, and no variable of the
    service manager. What loaded code has opened stays open. Raises ``OSError``.
    """
    with ExitStack() as where_it_fails:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        where_it_fails.enter_context(ours)
        with ExitStack() as until_forked:
            until_forked.enter_context(theirs)
            pid = fork()
            if pid == 0:
                until_forked.pop_all()
                ours.close()
                where_it_fails.pop_all()
                _begin_as(module)
                return theirs
        process = _Fork(pid)
        where_it_fails.callback(process.wait)
        where_it_fails.callback(process.kill)
        child = Child(process)
        where_it_fails.pop_all()
    return Linked(child, ours)


def _begin_as(module: str) -> None:
    """Leave to the parent what was given to it, and show the module in the list of processes."""
    from pathlib import Path  # noqa: PLC0415  scripts that embed a daemon import this module, and need it not

    if _output is not None:
        os.dup2(_output[1], 2)
        stop_collecting()  # its end for reading is the parent's alone
    sys.argv[:] = [module]  # a library that users' functions import may read them
    for name in SERVICE_MANAGER:
        os.environ.pop(name, None)
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  numbers, not paths
        with suppress(OSError):  # the one that listed them is closed
            if descriptor not in STANDARD_STREAMS and os.get_inheritable(descriptor):
                os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    facts = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    arguments, their_end, variables, end = map(int, facts[TEXTS])
    shown = b"\0".join(map(os.fsencode, (sys.executable, module)))[: max(0, their_end - arguments - 1)]
    ctypes.memmove(arguments, shown.ljust(their_end - arguments, b"\0"), their_end - arguments)
    for entry in ctypes.string_at(variables, end - variables).split(b"\0"):
        if os.fsdecode(entry.partition(b"=")[0]) in SERVICE_MANAGER:
            ctypes.memset(variables, 0, len(entry))
        variables += len(entry) + 1


def fork() -> int:
    """Fork this process, which has one thread; 0 in the child, else its id. Raises ``OSError``.

    The child leads a process group of its own, and ends when this process ends.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() != parent:  # it was gone before that: end as the kernel would have ended it
            os.kill(os.getpid(), signal.SIGKILL)
    return pid


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent's thread that forked it is gone.

    The default ends it, whatever holds it then.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def keep_freed_memory() -> None:
    """Let the C library keep what a sample frees, for the next one.

    By default it gives a few megabytes back after each sample, and a quarter of the time of a
    segment of sound is the kernel's, which clears them again. These are the most that it would
    choose by itself, after large arrays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # others than glibc have none
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_ARRAY_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2 * KEPT_ARRAY_BYTES)


def print_to_the_log() -> None:
    """Have users' functions print into the log, line by line: standard output has the address."""
    with suppress(OSError):  # there may be no standard error
        os.dup2(2, 1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def fill_standard_streams() -> None:
    """Open /dev/null for each closed standard stream. Call it before anything else is opened.

    Otherwise the next socket would get the number of a standard stream, and the log would go there.
    """
    for descriptor in STANDARD_STREAMS:
        try:
            os.fstat(descriptor)
        except OSError:
            lowest = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(lowest, True)


def describe(status: int) -> str:
    """Say how a process ended, for people: by its exit status, or minus the signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"
