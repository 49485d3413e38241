"""The kernel denies a daemon resources: the error is clear, or no half-made state remains."""

import errno
import os
import re
import resource
import socket
import subprocess
from contextlib import closing
from typing import cast

import pytest

from batchd.config.tree import Config
from batchd.daemon import serve as module
from batchd.daemon.serve import ServeOptions, serve
from batchd.errors import BatchdError, why_no_process
from batchd.runtime import limits
from batchd.runtime.children import Child, Linked
from batchd.runtime.limits import CountedPerMinute
from batchd.runtime.poller import Poller
from batchd.worker.supervisor import WorkerProcesses
from support.kernel import descriptors_of


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "Too many open files; this process needs more file descriptors: raise the limit"),
        (errno.ENFILE, "raise fs.file-max"),
        (errno.ENOMEM, "give the machine or the cgroup more"),
        (errno.ENOSPC, "fs.epoll.max_user_watches"),
    ],
)
def test_a_daemon_that_cannot_go_on_says_what_is_lacking(monkeypatch, number, words) -> None:
    """The error names the resource, whatever the daemon was doing."""

    def lack(_config: Config, _options: ServeOptions) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, "_serve", lack)
    with pytest.raises(BatchdError, match=words):
        serve(cast("Config", None), ServeOptions())


@pytest.mark.parametrize(
    ("number", "limit", "value", "words"),
    [
        (errno.EFBIG, resource.RLIMIT_FSIZE, 1 << 40, r"LimitFSIZE=.*RLIMIT_FSIZE is 1,099,511,627,776 bytes"),
        (errno.EMFILE, resource.RLIMIT_NOFILE, 200, r"LimitNOFILE=.*RLIMIT_NOFILE is 200$"),
        (errno.EAGAIN, resource.RLIMIT_NPROC, 20_000, r"LimitNPROC=.*RLIMIT_NPROC is 20,000$"),
        (errno.ENOMEM, resource.RLIMIT_AS, 1 << 42, r"RLIMIT_AS is 4,398,046,511,104 bytes.*LimitAS="),
    ],
)
def test_a_limit_of_the_process_is_named_with_its_value_and_how_to_raise_it(number, limit, value, words) -> None:
    """Without a limit, the machine's lack is named alone."""
    before = resource.getrlimit(limit)
    error = OSError(number, os.strerror(number))
    resource.setrlimit(limit, (value, before[1]))
    try:
        assert re.search(words, why_no_process(error))
    finally:
        resource.setrlimit(limit, before)


def test_a_line_that_comes_again_and_again_is_one_a_minute_with_a_count(monkeypatch) -> None:
    """Another reason has its own line."""
    now = [1000.0]
    monkeypatch.setattr(limits, "monotonic", lambda: now[0])
    lines = CountedPerMinute()

    assert [lines.more("worker not started", "File too large") for _ in range(5)] == [{}, None, None, None, None]
    assert lines.more("worker not started", "Cannot allocate memory") == {"left_out": 4}
    now[0] += 61
    assert lines.more("worker not started", "File too large") == {}


def test_other_errors_are_bugs_of_ours(monkeypatch) -> None:
    """Errors of other kinds are bugs of batchd, so they keep their traceback."""

    def fail(_config: Config, _options: ServeOptions) -> None:
        raise OSError(errno.EBADF, "a bug")

    monkeypatch.setattr(module, "_serve", fail)
    with pytest.raises(OSError, match="a bug"):
        serve(cast("Config", None), ServeOptions())


class FullPoller(Poller):
    """A poller that accepts a limited number of descriptors."""

    room = 2

    def watch(self, descriptor, handler) -> None:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= 1
        super().watch(descriptor, handler)


def spawn(poller: Poller, launched: Linked) -> None:
    """Start a worker and check that nothing of it remains if that fails."""
    workers = WorkerProcesses(poller, print, launched)
    try:
        workers.spawn(1)
    finally:
        assert workers.pids() == {}
        workers.close(0)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_worker_that_cannot_be_watched_is_not_started(room) -> None:
    """A failure for its fork server or its channel leaves nothing, and a retry can succeed."""
    before = len(descriptors_of("self"))
    with closing(FullPoller()) as poller:
        poller.room = room
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launched = Linked(Child(subprocess.Popen(["true"])), ours)
        with closing(theirs), pytest.raises(OSError, match="No space"):
            spawn(poller, launched)
    assert len(descriptors_of("self")) == before
