"""Failures of the fork server, and the daemon's reaction."""

import errno
import itertools
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys

import pytest

from batchd.core.events import WorkerGone
from batchd.runtime import children
from batchd.runtime.available import OomKills
from batchd.runtime.poller import Poller
from batchd.worker import fork_server
from batchd.worker.messages import TO_DAEMON_FROM_FORKSERVER, ForgetSlots, ForgetStream, Fork, NotForked, Quarantine
from batchd.worker.supervisor import WorkerProcesses
from batchd_wire.channel import receive_message, send_message
from support.kernel import children_of, descriptors_of
from support.waiting import PATIENCE_S, wait_until

EARLY = """
import gc, json, os, subprocess, sys, threading, time
from batchd.cli.daemon import imports_for_a_daemon
from batchd.worker.fork_server import start_early
if sys.argv[1:]:
    threading.Thread(target=time.sleep, args=[3600], daemon=True).start()
os.environ["OMP_NUM_THREADS"] = "7"
before = dict(os.environ)
gc.disable()
early = start_early()
mine = set(sys.modules)
with imports_for_a_daemon():
    import batchd.cli.log_lines, batchd.config.load, batchd.daemon.serve
print(json.dumps([sorted(set(sys.modules) - mine), os.environ == before, isinstance(early.child._popen, subprocess.Popen)]))
early.child.end()
"""
USED_BY_WORKERS = (
    "import json, sys, batchd.data.sources.files.reader, batchd.worker.fork_server, batchd.worker.loop\n"
    "print(json.dumps(list(sys.modules)))"
)
SLEEPS = "import time; time.sleep(3600)"
REAL = "import socket, sys; from batchd.worker.fork_server import work; work(socket.socket(fileno=int(sys.argv[1])))"
ENDS_FIRST = (
    "import os, time; from batchd.runtime import children; mine = os.getpid()\n"
    "def until_it_has_ended():\n"
    "    while os.getppid() == mine: time.sleep(0.001)\n"
    "children.die_with_parent = until_it_has_ended\n"
) + REAL
TALKS_NONSENSE = "import os, sys; os.write(int(sys.argv[1]), b'nonsense'); import time; time.sleep(3600)"


class Workers:
    """The daemon's side, with a test program in place of the fork server."""

    def __init__(self, monkeypatch, program):
        monkeypatch.setattr(children, "command", lambda _module, channel: [sys.executable, "-c", program, channel])
        self._others = children_of(os.getpid())
        self.poller = Poller()
        self.events = []
        self.workers = WorkerProcesses(self.poller, self.events.append)

    def fork_server(self):
        """Return the process id of the fork server."""
        (pid,) = children_of(os.getpid()) - self._others
        return pid

    def gone(self):
        def ends():
            self.poller.dispatch()
            return [
                (event.worker, event.how.partition(":")[0]) for event in self.events if isinstance(event, WorkerGone)
            ]

        return wait_until(ends, "a worker has ended")

    def hear_the_answer(self):
        """Dispatch until it is known what became of the requested worker; no other is there."""

        def is_known():
            self.poller.dispatch()
            return self.workers.pids() != {1: 0}

        wait_until(is_known, "the fork server's answer has come")

    def close(self):
        self.workers.close(0.1)
        self.poller.close()


@pytest.fixture
def started(monkeypatch):
    made = []

    def start(program):
        made.append(Workers(monkeypatch, program))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_a_fork_server_that_does_not_fork_in_time_is_killed_and_its_workers_end(started):
    """The core reports that a worker takes too long; only the fork server can be killed yet."""
    it = started(SLEEPS)
    it.workers.spawn(1)
    it.workers.spawn(2)
    assert it.workers.pids() == {1: 0, 2: 0}
    it.workers.kill(1, "it has not started in time")
    assert it.gone() == [(1, "it could not be started"), (2, "it could not be started")]
    assert it.workers.pids() == {}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "not known yet"])
def test_a_worker_runs_on_the_cpus_of_its_node(started, is_known):
    """From its start, whichever is first: the word of the node, or the process."""
    it = started(REAL)
    it.workers.spawn(1)
    if is_known:
        it.hear_the_answer()
    cpu = min(os.sched_getaffinity(0))
    it.workers.run_on(1, frozenset({cpu}))
    if not is_known:
        it.hear_the_answer()
    assert os.sched_getaffinity(it.workers.pids()[1]) == {cpu}
    it.workers.run_on(1, frozenset({1 << 20}))  # there is none such
    assert os.sched_getaffinity(it.workers.pids()[1]) == {cpu}


def test_a_fork_server_that_sends_nonsense_is_killed(started):
    """For every such message, no worker was forked."""
    it = started(TALKS_NONSENSE)
    it.workers.spawn(1)
    assert it.gone() == [(1, "it could not be started")]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("dies", "program"),
    [("worker", REAL), ("fork server", REAL), ("fork server", ENDS_FIRST)],
    ids=["worker", "fork server", "before it"],
)
def test_a_worker_that_ends_with_its_fork_server_was_not_killed_for_memory(started, monkeypatch, dies, program):
    """The kernel counts such kills of the whole machine, and others happen at the same time.

    Nor has it failed itself, not even where the fork server ends before the kernel is told to end
    the worker with it.
    """
    it = started(program)
    it.workers.spawn(1)
    wait_until(lambda: it.poller.dispatch() or it.workers.pids()[1], "the worker is known")
    counts = itertools.count(1 << 40)
    monkeypatch.setattr(OomKills, "count_all", lambda _kills: next(counts))

    os.kill(it.workers.pids()[1] if dies == "worker" else it.fork_server(), signal.SIGKILL)

    it.gone()
    (gone,) = [event for event in it.events if isinstance(event, WorkerGone)]
    assert (gone.out_of_memory, gone.from_outside) == (dies == "worker", dies == "fork server")


@pytest.fixture
def descriptors_max():
    """Set a limit of descriptors; restore the old limit afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda count: resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def take_all(held):
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))


def test_requested_workers_are_accepted_when_all_descriptors_are_in_use(started, descriptors_max):
    """The descriptors for the answer were reserved; the process has no other free one."""
    it = started(REAL)
    it.workers.spawn(1)
    assert select.select([it.poller], [], [], PATIENCE_S)[0]
    descriptors_max(max(descriptors_of(os.getpid())) + 1)
    held = []
    with pytest.raises(OSError, match="Too many open files"):
        take_all(held)
    it.hear_the_answer()
    for descriptor in held:
        os.close(descriptor)
    (pid,) = it.workers.pids().values()
    os.kill(pid, signal.SIGSEGV)
    assert it.gone() == [(1, "signal 11 (SIGSEGV)")]


def test_without_free_descriptors_workers_are_tried_again(started, descriptors_max):
    """The lost answer is unknown, so all workers and the fork server are ended."""
    it = started(REAL)
    it.workers.spawn(1)
    assert select.select([it.poller], [], [], PATIENCE_S)[0]
    descriptors_max(3)
    it.hear_the_answer()
    descriptors_max(1024)
    assert it.gone() == [(1, "it could not be started")]


def test_a_fork_server_that_ends_is_replaced(started):
    """The next worker starts the replacement."""
    it = started("pass")
    for number in (1, 2):
        it.workers.spawn(number)
        assert it.gone()[-1] == (number, "it could not be started")
        it.events.clear()


def test_the_end_of_the_daemon_ends_a_stopped_fork_server(started):
    """This holds for every state of it, also with requested workers."""
    it = started(SLEEPS)
    it.workers.spawn(1)
    pid = it.fork_server()
    os.kill(pid, signal.SIGSTOP)
    it.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    it.poller = Poller()  # for the fixture


def told_by(program, *arguments):
    return json.loads(subprocess.check_output([sys.executable, "-P", "-c", program, *arguments]))


def test_the_daemon_forks_its_first_fork_server_and_shares_what_both_import():
    """No module of batchd or NumPy that workers use is imported by the daemon a second time."""
    imported_later, keeps_its_environment, is_started = told_by(EARLY)
    imported_twice = set(imported_later) & set(told_by(USED_BY_WORKERS))
    assert not [name for name in imported_twice if name.startswith(("batchd", "numpy"))]
    assert "batchd.daemon.serve" in imported_later
    assert keeps_its_environment
    assert not is_started


def test_the_daemon_imports_nothing_that_its_first_batch_can_do_without():
    """Parts that few daemons need, or that need what others do, are imported at their first use."""
    imported, *_others = told_by(EARLY)
    packages = {name.partition(".")[0] for name in imported}
    assert not packages & {"asyncio", "click", "http", "rich", "ssl", "unittest", "xml"}
    assert not set(imported) & {
        "batchd.daemon.config_checks",
        "batchd.daemon.reload.rescan",
        "batchd.daemon.tcp",
        "batchd.pool.remote",
        "batchd.observe.http",
    }


@pytest.mark.thorough
def test_a_daemon_with_threads_starts_its_fork_server_instead():
    """A fork could hang on a lock that one of them holds, as those of a sitecustomize may."""
    *_others, is_started = told_by(EARLY, "with a thread")
    assert is_started


def test_a_kernel_that_refuses_to_fork_is_reported(monkeypatch):
    """The log gets the reason; the fork server keeps running."""

    def refuse():
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    with ours, theirs:
        for worker in (5, 6):
            send_message(ours, Fork(worker), held)
        ours.shutdown(socket.SHUT_WR)
        assert fork_server.serve_forks(theirs) is None
        for worker in (5, 6):
            message, _descriptors = receive_message(ours, TO_DAEMON_FROM_FORKSERVER)
            assert isinstance(message, NotForked)
            assert message.worker == worker
            assert message.reason.startswith("Resource temporarily unavailable; raise the limit of processes")
    for descriptor in held:
        os.close(descriptor)


# --- what each worker knows -----------------------------------------------------------------------


@pytest.fixture
def two(started, monkeypatch):
    """Two workers: the first knows two streams and three slots, the second one of each."""
    it = started(SLEEPS)
    it.sent = []
    monkeypatch.setattr(it.workers, "send", lambda number, message, *_: it.sent.append((number, message)))
    for worker, streams, slots in ((1, (7, 8), (1, 2, 3)), (2, (7,), (3,))):
        it.workers.spawn(worker)
        assert all(it.workers.lacks_stream(worker, stream) for stream in streams)
        assert all(it.workers.lacks_slot(worker, slot) for slot in slots)
    return it


def test_a_worker_is_told_once(two):
    """Each stream and slot is sent once, however often orders name it; to a dead worker, never."""
    assert not two.workers.lacks_stream(1, 7)
    assert not two.workers.lacks_slot(2, 3)
    assert two.workers.lacks_stream(2, 8)
    assert not two.workers.lacks_stream(9, 7)


def test_a_stream_that_ends_is_said_to_those_that_know_it(two):
    """A later stream of the same number is sent again."""
    two.workers.quarantine(8, [5])
    two.workers.forget_stream(7)
    two.workers.forget_stream(7)
    assert two.sent == [(1, Quarantine(8, [5])), (1, ForgetStream(7)), (2, ForgetStream(7))]
    assert two.workers.lacks_stream(1, 7)


def test_slots_that_go_are_said_to_those_that_know_some(two):
    """Workers that know none of the slots get no message."""
    two.workers.forget_slots((2, 3, 4))
    two.workers.forget_slots((2, 3, 4))
    assert two.sent == [(1, ForgetSlots([2, 3])), (2, ForgetSlots([3]))]
    assert not two.workers.lacks_slot(1, 1)


KEPT = """
import resource
import numpy as np
from batchd.runtime.children import keep_freed_memory
keep_freed_memory()
for number in range(100):
    if number == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(200_000) for _array in range(4)]
    del arrays
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_a_sample_frees_is_kept_for_the_next_one() -> None:
    """The kernel has no page to clear for it again: without that, there are 390 for each array."""
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True)

    assert int(done.stdout) < 390
