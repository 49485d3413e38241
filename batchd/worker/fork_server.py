"""Forks workers that have imported everything already. FORK SERVER process, and each WORKER in its first moments.

To import what a worker needs takes half a second of a CPU; to fork one that has it takes some
milliseconds. And what was imported is in memory once: forked processes share all pages that none of
them writes to.

Invariant: a worker begins with one thread, its standard streams, and the two descriptors that came
for it. Invariant: no worker is reaped before the daemon asks for it, who looks first at how it
ended.
"""

import gc
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from batchd import children, failpoints
from batchd.functions.load import Here
from batchd.orders.worker import TO_FORKSERVER, Fork, Forked, NotForked, Reap
from batchd_wire.channel import ChannelClosed, receive_message, send_message


class Born(NamedTuple):
    """What a new worker has: its channel to the daemon, and the descriptor of its note."""

    channel: socket.socket
    note: int


def serve_forks(channel: socket.socket) -> Born | None:
    """Fork workers until the daemon is gone. Returns once in each worker, and None in the fork server itself."""
    _share_what_is_there()
    try:
        while True:
            message, descriptors = receive_message(channel, TO_FORKSERVER)
            if isinstance(message, Reap):
                os.waitpid(message.pid, 0)
                continue
            assert isinstance(message, Fork)
            failpoints.passing("forks.order.received")
            if _fork(channel, message.worker, descriptors) == 0:
                channel.close()
                return _begin(message.worker, descriptors)
    except ChannelClosed:
        return None


def _share_what_is_there() -> None:
    """Have the collector never look at what is imported by now: looking writes, and what is written is not shared any more."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:  # of somebody's sitecustomize, say
        sys.stderr.write(
            f"the fork server of the workers has {threads} threads; a worker may hang on a lock of one of them\n"
        )
    gc.collect()
    gc.freeze()


def _fork(channel: socket.socket, worker: int, descriptors: Sequence[int]) -> int:
    """Fork; 0 in the worker, otherwise the daemon is told what became of it, and the descriptors are closed here."""
    try:
        pid = children.fork()
    except OSError as error:
        send_message(channel, NotForked(worker, str(error)))
        pid = -1
    if pid == 0:
        return 0
    for descriptor in descriptors:
        os.close(descriptor)
    if pid > 0:
        pidfd = os.pidfd_open(pid)
        try:
            send_message(channel, Forked(worker, pid), [pidfd])
        finally:
            os.close(pidfd)
    return pid


def _begin(worker: int, descriptors: Sequence[int]) -> Born:
    """The first moments of a worker: it knows its number, and nothing in it may be as random as in all the others."""
    Here.worker = worker
    channel, note = descriptors
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    return Born(socket.socket(fileno=channel), note)
