"""Child processes: their start, their output, and their end without leftovers."""

import errno
import json
import os
import signal
import sys

import pytest

from batchd.runtime import children
from batchd.runtime.children import DEVNULL, PIPE, STDOUT, Child, describe, fork_linked, start, start_linked
from support.kernel import children_of, descriptors_of
from support.waiting import PATIENCE_S, wait_until

SLEEPS = "import time; time.sleep(3600)"


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """A child runs the program that is given in place of a module."""
    monkeypatch.setattr(children, "command", lambda program, *arguments: [sys.executable, "-c", program, *arguments])


def read(child: Child, within_s: float = PATIENCE_S) -> str:
    return child.read(within_s, 1 << 16).decode()


def test_a_child_reads_what_it_is_given_and_is_read_to_its_end() -> None:
    """The parent can send input of any length: it reads while it writes."""
    given = b"x" * (1 << 20)
    with start(
        "import sys; print(len(sys.stdin.read()), file=sys.stderr)", given=given, stdout=PIPE, stderr=STDOUT
    ) as child:
        assert read(child) == f"{len(given)}\n"
        assert child.has_ended()
        assert child.end() == 0
        assert child.end() == 0


def test_the_end_of_the_output_is_kept() -> None:
    """This holds for more output than a pipe has room for."""
    with start("print('x' * 1_000_000 + 'the end')", stdout=PIPE) as child:
        assert child.read(PATIENCE_S, 8) == b"the end\n"


def test_a_child_that_is_silent_for_too_long_has_not_ended() -> None:
    """Its earlier output is available."""
    # an unbuffered print writes the end of the line separately, and later
    begins = "import os; os.write(1, b'begun\\n')"
    with start(f"{begins}; {SLEEPS}", stdout=PIPE) as child:
        said = wait_until(lambda: read(child, 0.01), "the child has started")
        assert said == "begun\n"
        assert not child.has_ended()
        assert child.end() == -signal.SIGKILL


def test_the_end_of_a_child_ends_what_it_has_started() -> None:
    """The parent does not wait for the grandchild, though that keeps the pipe open."""
    forks = f"import os\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\n    {SLEEPS}\nos.wait3(os.WNOHANG)"
    with start(forks, stdout=PIPE) as child:
        assert child.has_ended(None)
        grandchild = int(wait_until(lambda: read(child), "the child has sent its pid"))
    wait_until(lambda: grandchild not in children_of(1) | children_of(os.getpid()), "the grandchild has ended")


def test_a_child_gets_the_environment_with_changes_but_nothing_of_the_service_manager(monkeypatch) -> None:
    """Only the daemon reports to the service manager."""
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.setenv("REMOVED", "1")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    with start(program, environment={"ADDED": "1", "REMOVED": None}, stdout=PIPE, stderr=DEVNULL) as child:
        environment = json.loads(read(child))
    assert environment["ADDED"] == "1"
    assert not environment.keys() & {"NOTIFY_SOCKET", "REMOVED"}


def test_a_child_has_the_descriptors_that_are_passed_and_no_other() -> None:
    """The last argument names its channel, which closes when the child ends."""
    program = "import json, os, sys; os.write(int(sys.argv[2]), json.dumps([sys.argv[1:], os.listdir('/proc/self/fd')]).encode())"
    passed = os.open(os.devnull, os.O_RDONLY)
    child, channel = start_linked(program, "first", descriptors=[passed])
    os.close(passed)
    with child, channel:
        (first, last), descriptors = json.loads(channel.recv(4096))
        assert channel.recv(1) == b""
    assert first == "first"
    expected = {0, 1, 2, passed, int(last)}
    assert expected < set(map(int, descriptors))
    assert len(descriptors) == len(expected) + 1  # the listing itself


FORKS = """
import json, os, socket, sys
from batchd.runtime.children import fork_linked
given, opened = int(sys.argv[1]), os.open("/dev/null", os.O_RDONLY)
forked = fork_linked("a.module")
if isinstance(forked, socket.socket):
    facts = {
        "command line": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
        "open": [os.path.exists(f"/proc/self/fd/{one}") for one in (given, opened)],
        "input": os.readlink("/proc/self/fd/0"),
        "leads": os.getpgid(0) == os.getpid(),
        "told": "NOTIFY_SOCKET" in os.environ or "NOTIFY_SOCKET" in open("/proc/self/environ").read(),
        "kept": "PATH=" in open("/proc/self/environ").read(),
        "arguments": sys.argv,
    }
    forked.send(json.dumps(facts).encode())
    forked.recv(1)
    sys.exit(7)
said = forked.channel.recv(4096).decode()
forked.channel.close()
print(said, forked.child.end(None), forked.child.end(), "NOTIFY_SOCKET" in os.environ, sep="\\n")
"""


def test_a_fork_begins_as_a_child_that_is_started(monkeypatch) -> None:
    """What was given to its parent is not its own, and what loaded code has opened is."""
    given = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(children, "SERVICE_MANAGER", {})  # as a service manager starts a daemon
    told = {"NOTIFY_SOCKET": "/run/systemd/notify"}
    with start(FORKS, str(given), descriptors=[given], environment=told, stdout=PIPE) as child:
        said, *rest = read(child).splitlines()
    os.close(given)
    assert json.loads(said) == {
        "command line": [sys.executable, "a.module"],
        "open": [False, True],
        "input": os.devnull,
        "leads": True,
        "told": False,
        "kept": True,
        "arguments": ["a.module"],
    }
    assert rest == ["7", "7", "True"]


@pytest.mark.parametrize("failing", ["pidfd_open", "setpriority"])
@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), KeyboardInterrupt()])
def test_a_child_that_cannot_be_started_leaves_nothing_behind(monkeypatch, failing, error) -> None:
    """No process and no descriptor remain."""

    def fail(*_arguments: object) -> int:
        raise error

    before = children_of(os.getpid()), descriptors_of(os.getpid())
    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(type(error)):
            start_linked(SLEEPS, given=b"x", stdout=PIPE, nicer_by=1)
    assert (children_of(os.getpid()), descriptors_of(os.getpid())) == before


def test_a_fork_that_cannot_be_watched_leaves_nothing_behind(monkeypatch) -> None:
    """No process and no descriptor remain."""

    def fail(_pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = children_of(os.getpid()), descriptors_of(os.getpid())
    program = [sys.executable, "-c", SLEEPS]
    monkeypatch.setattr(children, "fork", lambda: os.posix_spawn(sys.executable, program, os.environ))
    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        fork_linked("a.module")
    assert (children_of(os.getpid()), descriptors_of(os.getpid())) == before


def test_a_child_that_cannot_be_killed_is_left(monkeypatch) -> None:
    """Its descriptors are closed; the init process or the next start reaps it."""
    child = start(SLEEPS)
    with monkeypatch.context() as patch:
        patch.setattr(Child, "kill", lambda _self: None)
        assert child.end(kill_timeout_s=0.0) is None
    assert child.pidfd == -1
    os.kill(child.pid, signal.SIGKILL)
    assert child.reap() == -signal.SIGKILL


def test_an_interrupted_wait_for_the_end_kills(monkeypatch) -> None:
    """A second Ctrl-C leaves no process behind."""
    child = start(SLEEPS)

    def interrupted(_self: Child, _within_s: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Child, "has_ended", interrupted)
        with pytest.raises(KeyboardInterrupt):
            child.end(PATIENCE_S)
    assert child.reap() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("status", "text"), [(0, "exit status 0"), (3, "exit status 3"), (-11, "signal 11 (SIGSEGV)"), (-99, "signal 99")]
)
def test_how_a_process_ended(status, text) -> None:
    """The description also covers signals without a name."""
    assert describe(status) == text
